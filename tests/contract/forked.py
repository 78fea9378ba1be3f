"""Ranks as forks of one process that has imported the training stack: hundreds of starts in a test, not ten.

A start of torch, transformers and DeepSpeed takes most of ten seconds; a fork of a process that has them
takes none of it. The forking process computes nothing itself, so that no thread of torch's is lost by the
fork: a test asks for `threads`. A rank runs what `python -m launcher.train.worker RUN_DIR` runs, in the
environment that a launcher gives it, and ends as it does.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KILL = "TEST_KILL_AFTER"
"""The variable with the step after which a rank with `KILL_HOOKS` kills itself."""
KILL_HOOKS = f"""
import os
import signal

from transformers import TrainerCallback


class Kill(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if os.environ.get("{KILL}") == str(state.global_step):
            os.kill(os.getpid(), signal.SIGKILL)


def callbacks():
    return [Kill()]
"""
GRACE_S = 2.0
"""How long the others may live on when one rank has failed, as a launcher would see to."""
HEAVY = (
    "torch", "torch.distributed", "torch.distributed.fsdp", "datasets", "accelerate", "peft", "deepspeed",
    "transformers.trainer", "transformers.models.llama.modeling_llama", "transformers.integrations.deepspeed",
    "torch.utils.cpp_extension", "deepspeed.ops.op_builder.all_ops", "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    *(f"launcher.train.{name}" for name in (
        "worker", "prepare", "adapters", "models", "processing", "training", "outcome", "metrics",
        "memory_meter", "memory_record", "data.build", "data.gate", "data.prepare", "data.stream",
    )),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ended:
    """How the ranks of one start ended."""

    codes: tuple[int, ...]
    """Exit codes by rank; negative: the signal."""
    seconds: float
    said: str
    """The last lines of all ranks."""


class Forks:
    """The process that forks. A context manager; `run` starts ranks and waits for them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """environ: what every rank gets beneath its own variables."""
        root = str(Path(__file__).resolve().parents[2])
        self.environ = {**environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=self.environ,
        )  # fmt: skip
        self.threads: list[str] = self._answer()["threads"]
        """Names of the forking process's threads, but for its own and for the one of Arrow's memory pool,
        which knows forks (jemalloc's own handlers)."""

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        # Closing alone would not do: a process that a test forked meanwhile holds the pipe open too.
        self._server.stdin.write("\n")
        self._server.stdin.close()
        self._server.wait(30)
        self._server.stdout.close()

    def run(
        self,
        run_dir: Path,
        world: int,
        env: Mapping[str, str],
        *,
        module: str = "worker",
        prelude: str | None = None,
        timeout_s: float = 240.0,
    ) -> Ended:
        """Start `world` ranks of launcher.train.`module` on `run_dir` and wait until all have ended.

        prelude: a module beside this one that is imported in the rank first. world 0: one process without a
        launcher's variables.
        """
        assert self._server.stdin is not None
        port = free_port()
        common = {
            **self.environ,
            **{name: text.replace("{master_port}", str(port)) for name, text in env.items()},
        }
        ranks = [{**common, **launched(rank, world, port)} for rank in range(world)] or [common]
        order = {"run_dir": str(run_dir), "ranks": ranks, "module": module, "prelude": prelude}
        self._server.stdin.write(json.dumps({**order, "timeout_s": timeout_s}) + "\n")
        self._server.stdin.flush()
        answer = self._answer()
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink()
        said = "\n".join(_last_lines(log) for log in sorted((run_dir / "logs").glob("*.log")))
        return Ended(tuple(answer["codes"]), answer["seconds"], said)

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the forking process has ended"
        found: dict[str, Any] = json.loads(line)
        return found


def launched(rank: int, world: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {name: str(number) for name, number in numbers.items()} | address


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_lines(log: Path, count: int = 12) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([f"== {log.name}", *lines[-count:]])


def die_with_parent() -> None:
    """A rank does not outlive the test that started it."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def other_threads() -> list[str]:
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    return [name for task in tasks if (name := (task / "comm").read_text().strip()) != "jemalloc_bg_thd"]


def serve() -> None:
    """Import everything, then fork what is asked for on stdin, until an empty line or its end."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print where the answers would be
    for name in HEAVY:
        importlib.import_module(name)
    # accelerate and DeepSpeed collect garbage at every start, which would walk through all that was imported.
    gc.collect()
    gc.freeze()
    sys.stdout.flush()
    answers.write(json.dumps({"threads": other_threads()}) + "\n")
    answers.flush()
    while line := sys.stdin.readline().strip():
        order = json.loads(line)
        started = time.monotonic()
        codes = attend([fork(order, rank) for rank in range(len(order["ranks"]))], order["timeout_s"])
        answers.write(json.dumps({"codes": codes, "seconds": time.monotonic() - started}) + "\n")
        answers.flush()
    os._exit(0)  # what the libraries do at an exit is not of this test, and can hang


def fork(order: Mapping[str, Any], rank: int) -> int:
    """The process id of a new rank."""
    found = os.fork()
    if found:
        return found
    code = 70
    try:
        die_with_parent()
        run_dir = Path(order["run_dir"])
        (run_dir / "logs").mkdir(exist_ok=True)
        log = os.open(run_dir / "logs" / f"forked-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for number, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(number, target)
        os.environ.clear()
        os.environ.update(order["ranks"][rank])
        sys.argv = [order["module"], str(run_dir)]
        if order["prelude"]:
            importlib.import_module(order["prelude"])
        chosen = importlib.import_module(f"launcher.train.{order['module']}")
        code = chosen.main([str(run_dir)])
        sys.stdout.flush()
        importlib.import_module("launcher.train.worker").leave(code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def attend(ranks: Sequence[int], timeout_s: float) -> list[int]:
    """Wait for all; when one has failed, or after `timeout_s`, the others are killed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(ranks):
        for pid in set(ranks) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] != 0:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            for pid in set(ranks) - codes.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in ranks]


if __name__ == "__main__":
    serve()
