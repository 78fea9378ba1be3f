"""Three machines on a switch: network namespaces, each with a name of its own, one of them with a slow port.

Needs root, iproute2 and util-linux. The disk is this machine's, and so shared, but where it is hidden.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from network import ROOT, call

NAMES = ("gpu00", "gpu01", "gpu02")
SLOW = "20mbit"
_HIDE = 'while [ ! -d "$HIDDEN" ]; do sleep 0.05; done; mount -t tmpfs none "$HIDDEN"'


@dataclass
class Bridge:
    """The machines, the switch between them, and what runs there."""

    number: int = field(default_factory=lambda: os.getpid() % 200 + 20)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def space(self, name: str) -> str:
        return f"effib{self.number}-{name}"

    def address(self, name: str) -> str:
        return f"10.78.{self.number}.{NAMES.index(name) + 1}"

    def up(self) -> None:
        switch = self.space("switch")
        call("ip", "netns", "add", switch)
        call("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        call("ip", "-n", switch, "link", "set", "br0", "up")
        for name in NAMES:
            inside, port = ["ip", "-n", self.space(name)], name
            call("ip", "netns", "add", self.space(name))
            call("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0",
                 "netns", self.space(name))  # fmt: skip
            call("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            call(*inside, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            call(*inside, "link", "set", "eth0", "up")
            call(*inside, "link", "set", "lo", "up")

    def slow(self, name: str) -> None:
        """Let a machine's port carry no more than SLOW, in both directions."""
        limit = ["root", "tbf", "rate", SLOW, "burst", "32kb", "latency", "400ms"]
        call("ip", "netns", "exec", self.space("switch"), "tc", "qdisc", "add", "dev", name, *limit)
        call("ip", "netns", "exec", self.space(name), "tc", "qdisc", "add", "dev", "eth0", *limit)

    def effilaunch(self, name: str, *words: str, hidden: Path | None = None) -> subprocess.Popen[str]:
        """Start `effilaunch` on a machine. hidden: a folder that is an empty disk of its own there, as soon
        as it exists."""
        hide = "" if hidden is None else f"({_HIDE}) & "
        inside = f'hostname "$0"; {hide}exec "$@"'
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.space(name), "unshare", "--uts", "sh", "-c", inside, name,
             sys.executable, "-m", "launcher.cli", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "HIDDEN": str(hidden or "")}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def down(self) -> None:
        """Remove all of it, with what still runs there."""
        for name in (*NAMES, "switch"):
            asked = ["ip", "netns", "pids", self.space(name)]
            found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
            for pid in found.split():
                subprocess.run(["kill", "-9", pid], check=False, capture_output=True)
        for process in self.processes:
            process.communicate()
        for name in (*NAMES, "switch"):
            subprocess.run(["ip", "netns", "del", self.space(name)], check=False, capture_output=True)
