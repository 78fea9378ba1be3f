"""`#SBATCH` lines, as launch.slurm and hardware."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from launcher.importing.found import Effect, Reading

_KEYS = ("partition", "account", "qos", "reservation", "time", "constraint", "mem", "nodelist", "exclude")
_SHORT = {"-p": "partition", "-A": "account", "-q": "qos", "-t": "time", "-C": "constraint", "-w": "nodelist",
          "-x": "exclude", "-N": "nodes", "-c": "cpus-per-task", "-J": "job-name", "-o": "output",
          "-e": "error", "-n": "ntasks", "-G": "gpus"}  # fmt: skip
_OURS = ("job-name", "output", "error", "ntasks", "ntasks-per-node", "chdir", "export", "array", "signal",
         "requeue", "open-mode")  # fmt: skip
_COUNT = re.compile(r"(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d+)")


def take_sbatch(reading: Reading, lines: Sequence[tuple[str, int]]) -> None:
    """Take the options of a job script."""
    for text, line in lines:
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            words = text.split()
        at = 0
        while at < len(words):
            name, equals, value = words[at].partition("=")
            at += 1
            if not equals and at < len(words) and not words[at].startswith("-"):
                value = words[at]
                at += 1
            _take(reading, _SHORT.get(name, name.lstrip("-")), value, line)


def _take(reading: Reading, name: str, value: str, line: int) -> None:
    said = f"#SBATCH --{name}"
    if name in _KEYS and value:
        reading.take(f"launch.slurm.{name}", value, line, said)
    elif name == "cpus-per-task" and value.isdecimal():
        reading.take("launch.slurm.cpus_per_task", int(value), line, said)
    elif name == "nodes" and value.isdecimal():
        reading.take("hardware.num_nodes", int(value), line, said)
    elif name in ("gres", "gpus-per-node", "gpus-per-task") and (count := _COUNT.fullmatch(value)):
        reading.take("hardware.devices_per_node", int(count[1]), line, said)
        if name == "gres" and value.count(":") > 1:
            reading.take("launch.slurm.gres", value, line, f"{said}: {value}")
    elif name in _OURS:
        reading.drop(said, value, line, Effect.NONE, "`submit` writes the job script, and says it itself")
    else:
        reading.drop(said, value, line, Effect.NONE, "write it under launch.slurm.options if it is needed")
