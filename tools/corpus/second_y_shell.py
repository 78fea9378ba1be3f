"""How the scripts of the second held-out set are launched, and what their output is piped through."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.corpus.capture import MADE, Script, body, capture

TAIL = "tail -n 30"
"""As people paste the end of a log."""
COMPOSE = "sed -u 's/^/trainer-1  | /'"
"""As `docker compose logs` marks a service."""
KUBE = """while IFS= read -r line
do printf '%(%Y-%m-%dT%H:%M:%S)T.204817311Z stderr F %s\\n' -1 "$line"; done"""
"""As a container's log file on a cluster keeps a line."""
ONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29711"}
"""A process group of one, set by hand."""
TORCHRUN = "torchrun --nnodes=1 --nproc_per_node={ranks} --master_port={port} train.py"
DEEPSPEED = "deepspeed --num_accelerators={ranks} --master_port={port} train.py"
ACCELERATE = "accelerate launch --cpu --num_processes={ranks} --main_process_port={port} train.py"


def second(
    failure: str,
    variant: str,
    command: str = "python train.py",
    through: str = "",
    env: Mapping[str, str] = {},
    files: Mapping[str, object] = {},
    limit: float = 150.0,
) -> Callable[[Script], Script]:
    """Register a script that a shell command runs as train.py; through: a filter of its whole output."""

    def register(script: Script) -> Script:
        name = f"{failure}-y2-{variant}"
        by = f"tools/corpus/{Path(inspect.getfile(script)).name}:{script.__name__}"
        nets = Path(__file__).with_name("second_y_nets.py").read_text(encoding="utf-8")
        beside = {"train.py": body(script), "nets.py": nets, **files}
        line = f"({command}) 2>&1 | {through}" if through else command

        def make() -> None:
            capture(name, failure, line, env=env, files=beside, by=by, kind="held_out", limit=limit)

        MADE[name] = make
        return script

    return register
