"""A node of a Ray job: an actor that runs the command of the node and passes its output on.

Started as a program (`python -m launcher.schedulers.ray_node WORDS`), it is that command: it receives SIGTERM
when the actor dies, so that a run never outlives its job.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_PDEATHSIG = 1
_OF_OTHERS = ("SLURM_",)
"""Variables that describe the job in which the raylet was started, not this one."""


class RayNode:
    """An actor. Its two threads are one for `run` and one for everything else."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def facts(self, files: Sequence[str]) -> dict[str, Any]:
        """What this node is and what it lacks: its name and address, a free port, effilaunch, files."""
        import ray

        from launcher import __version__
        from launcher.machine.probe import free_port

        return {
            "id": ray.get_runtime_context().get_node_id(),
            "name": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),
            "port": free_port(),
            "effilaunch": __version__,
            "absent": [file for file in files if not Path(file).exists()],
        }

    def run(self, words: Sequence[str], folder: str, env: Mapping[str, str]) -> Iterator[str | int]:
        """Run a command of effilaunch; its lines, then its exit code."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHERS)}
        environ.pop("OMP_NUM_THREADS", None)  # Ray's: all CPUs of the actor, for one process
        command = [sys.executable, "-u", "-m", __name__, *words]
        with subprocess.Popen(
            command, cwd=folder, env={**environ, **env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        ) as self._process:  # fmt: skip
            assert self._process.stdout is not None, "a pipe"
            for line in self._process.stdout:
                yield line.rstrip("\n")
        yield self._process.returncode

    def signal(self, number: int) -> None:
        """Signal the command."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def main() -> None:
    """Run the command line of effilaunch until the actor that started it dies."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, int(signal.SIGTERM))
    runpy.run_module("launcher.cli", run_name="__main__")


if __name__ == "__main__":
    main()
