"""A real Ray on this machine: a head without CPUs and two raylets, each a process of this one.

The three have addresses of their own in 127.0.0.0/8, and ask for a token. The raylets do not see HIDDEN, a
folder of the head.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from cluster.slurm import free_ports
from patience import patience, wait_until

_READY_S = 120
_HEAD = "127.0.0.2"
_MEMORY = 80_000_000
"""Bytes of the object store of each node; Ray's least is 75 MiB."""


class RayCluster:
    """The processes, and what a user of the cluster has in the environment."""

    def __init__(self, cache: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="effilaunch-ray-", dir="/tmp"))  # short: sockets
        self.hidden = self.folder / "hidden"
        self.hidden.mkdir()
        self._gcs, dashboard = free_ports(2)
        self.address = f"http://{_HEAD}:{dashboard}"
        self.environ = {
            "RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }  # fmt: skip
        without_address = {name: value for name, value in self.environ.items() if name != "RAY_ADDRESS"}
        self._env = {
            **os.environ, **without_address, "EFFILAUNCH_CACHE": str(cache), "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "10",
            "RAY_worker_niceness": "0",
        }  # fmt: skip
        self._dashboard = dashboard
        self._started: list[psutil.Popen] = []
        self._nodes: list[psutil.Popen] = []

    def start(self) -> None:
        """Start all nodes and wait until both raylets are there."""
        head = {
            "port": self._gcs, "dashboard-host": _HEAD, "dashboard-port": self._dashboard,
            "temp-dir": self.folder / "ray", "ray-client-server-port": free_ports(1)[0], "num-cpus": 0,
        }  # fmt: skip
        self._ray("--head", *(f"--{name}={value}" for name, value in head.items()), address=_HEAD)
        self._until(lambda: self._count() == 1)
        for _ in range(2):
            self.add()

    def add(self) -> None:
        """Start another raylet and wait until it has joined."""
        before = self._count()
        address = f"127.0.0.{3 + len(self._nodes)}"
        hide = f'mount -t tmpfs none {self.hidden} && exec "$@"'
        self._nodes.append(
            self._ray(
                f"--address={_HEAD}:{self._gcs}", "--num-cpus=2", address=address,
                before=["unshare", "--mount", "sh", "-c", hide, "sh"],
            )
        )  # fmt: skip
        self._until(lambda: self._count() == before + 1)

    def lose(self, rank_host: str) -> None:
        """End the raylet with this address as a power cut does: with all its processes."""
        (node,) = [one for one in self._nodes if f"--node-ip-address={rank_host}" in one.args]
        for process in [*node.children(recursive=True), node]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait()

    def stop(self) -> None:
        """End exactly what was started."""
        for one in reversed(self._started):
            processes = [one, *(one.children(recursive=True) if one.is_running() else ())]
            with contextlib.suppress(psutil.NoSuchProcess):
                one.terminate()
            _, left = psutil.wait_procs(processes, timeout=patience(60))
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=5)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ray(self, *words: str, address: str, before: list[str] = ()) -> psutil.Popen:
        ray = str(Path(sys.executable).parent / "ray")
        command = [
            *before, ray, "start", "--block", f"--node-ip-address={address}", *words,
            f"--object-store-memory={_MEMORY}", "--include-log-monitor=false", "--disable-usage-stats",
            f"--dashboard-agent-listen-port={free_ports(1)[0]}",
        ]  # fmt: skip
        with (self.folder / f"{address}.out").open("wb") as log:
            started = psutil.Popen(
                command, env=self._env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._started.append(started)
        return started

    def _count(self) -> int:
        """Living nodes."""
        from ray.util.state import list_nodes

        try:
            return sum(node.state == "ALIVE" for node in list_nodes(self.address, detail=True))
        except Exception:  # what it raises while the head starts is not documented
            return 0

    def _until(self, there) -> None:
        def logs() -> str:
            return "".join(f"\n{p.name}: {p.read_text()[-600:]}" for p in self.folder.glob("*.out"))

        wait_until(there, _READY_S, logs)
