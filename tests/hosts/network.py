"""Two machines on this one: network namespaces joined by a cable, each with a name, an address and an sshd.

Their disks are this machine's, so that they share everything. As on a Debian each one's own name leads to
127.0.1.1. Needs root, iproute2, util-linux and openssh-server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from patience import wait_until

ROOT = Path(__file__).resolve().parents[2]
PORT = 2222
SSHD = "/usr/sbin/sshd"
NAMES = ("hosta", "hostb")


def missing() -> str:
    """What this machine lacks for it; empty where nothing is."""
    programs = [
        name for name in ("ip", "unshare", "ssh", "ssh-keygen", "mount") if shutil.which(name) is None
    ]
    if not Path(SSHD).is_file():
        programs.append("sshd")
    if os.geteuid() != 0:
        return "it needs root"
    return f"not installed: {', '.join(programs)}" if programs else ""


def call(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True)


@dataclass
class Machine:
    """One of them."""

    name: str
    address: str
    namespace: str
    hosts: Path
    """Its /etc/hosts."""
    sshd: subprocess.Popen[bytes] | None = None

    def argv(self, *command: str) -> list[str]:
        """What runs a command there. Namespaces of mounts and names of its own come with it."""
        inside = 'mount --bind "$0" /etc/hosts; hostname "$1"; shift; exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", inside,
                str(self.hosts), self.name, *command]  # fmt: skip


@dataclass
class Network:
    """Both, and how ssh reaches them."""

    folder: Path
    number: int = field(default_factory=lambda: os.getpid() % 200 + 20)
    machines: dict[str, Machine] = field(default_factory=dict)

    def up(self, set_env: Mapping[str, str] | None = None) -> None:
        """Make them. set_env: variables of hostb's sshd for all that it starts."""
        for host, name in enumerate(NAMES, 1):
            hosts = self.folder / f"{name}.hosts"
            namespace = f"effi{self.number}-{name}"
            machine = Machine(name, f"10.77.{self.number}.{host}", namespace, hosts)
            self.machines[name] = machine
            call("ip", "netns", "add", namespace)
        self._write_hosts()
        self._join()
        self._keys()
        for name, machine in self.machines.items():
            machine.sshd = self._sshd(machine, set_env if name == "hostb" else None)

    def _write_hosts(self) -> None:
        for machine in self.machines.values():
            others = [m for m in self.machines.values() if m is not machine]
            lines = ["127.0.0.1 localhost", f"127.0.1.1 {machine.name}"]
            machine.hosts.write_text("\n".join([*lines, *(f"{m.address} {m.name}" for m in others), ""]))

    def _join(self) -> None:
        a, b = self.machines.values()
        ends = [f"ef{self.number}a", f"ef{self.number}b"]
        call("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, machine in zip(ends, (a, b), strict=True):
            call("ip", "link", "set", end, "netns", machine.namespace, "name", "eth0")
            inside = ["ip", "-n", machine.namespace]
            call(*inside, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            call(*inside, "link", "set", "eth0", "up")
            call(*inside, "link", "set", "lo", "up")

    def _keys(self) -> None:
        for name in ("user", "host"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        key = (self.folder / "host.pub").read_text().split()[:2]
        known = [
            f"[{where}]:{PORT} {' '.join(key)}\n"
            for m in self.machines.values()
            for where in (m.name, m.address)
        ]
        (self.folder / "known_hosts").write_text("".join(known))
        (self.folder / "ssh_config").write_text(
            f"Host *\n  Port {PORT}\n  User root\n  IdentityFile {self.folder / 'user'}\n"
            "  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder / 'known_hosts'}\n  GlobalKnownHostsFile /dev/null\n"
            "  StrictHostKeyChecking yes\n"
        )

    def _sshd(self, machine: Machine, set_env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
        Path("/run/sshd").mkdir(exist_ok=True)
        config = self.folder / f"{machine.name}.sshd_config"
        extra = "".join(f"SetEnv {name}={value}\n" for name, value in (set_env or {}).items())
        config.write_text(
            f"Port {PORT}\nHostKey {self.folder / 'host'}\nAuthorizedKeysFile {self.folder / 'user.pub'}\n"
            f"StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n{extra}"
        )
        process = subprocess.Popen(
            machine.argv(SSHD, "-D", "-e", "-f", str(config)), stderr=subprocess.DEVNULL
        )
        wait_until(lambda: self._listens(machine) or process.poll() is not None, 60, "sshd never listened")
        assert process.poll() is None, "sshd ended"
        return process

    def _listens(self, machine: Machine) -> bool:
        asked = ["ip", "netns", "exec", machine.namespace, "cat", "/proc/net/tcp"]
        found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        return f":{PORT:04X} 00000000:0000 0A" in found

    def environment(self) -> dict[str, str]:
        """For a command on one of them: how its ssh reaches the other."""
        return {**os.environ, "EFFILAUNCH_SSH": f"ssh -F {self.folder / 'ssh_config'}"}

    def start(self, name: str, argv: Sequence[str], log: Path, **env: str) -> subprocess.Popen[bytes]:
        """Start a command on a machine; its output goes to `log`."""
        with log.open("wb") as stream:
            return subprocess.Popen(
                self.machines[name].argv(*argv), env={**self.environment(), **env}, stdout=stream,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def effilaunch(self, name: str, *words: str, log: Path, **env: str) -> subprocess.Popen[bytes]:
        """Start `effilaunch` on a machine."""
        return self.start(
            name, [sys.executable, "-m", "launcher.cli", *words], log, PYTHONPATH=str(ROOT), **env
        )

    def cut(self) -> None:
        """Pull the cable: nothing that is sent arrives, and nobody is told."""
        call("ip", "-n", self.machines["hostb"].namespace, "link", "set", "eth0", "down")

    def mend(self) -> None:
        call("ip", "-n", self.machines["hostb"].namespace, "link", "set", "eth0", "up")

    def processes(self, name: str) -> list[int]:
        """All that runs on a machine, its sshd included."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.machines[name].namespace],
            capture_output=True,
            text=True,
            check=False,
        )
        return [int(pid) for pid in found.stdout.split()]

    def commands(self, name: str) -> dict[int, str]:
        """All that runs on a machine without its sshd, and the command line of each."""
        sshd, found = self.machines[name].sshd, {}
        for pid in self.processes(name):
            if sshd is None or pid != sshd.pid:
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                    found[pid] = words.decode(errors="replace")
        return found

    def down(self) -> None:
        """Remove them, with all that still runs there."""
        for name, machine in self.machines.items():
            for pid in self.processes(name):
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            if machine.sshd is not None:
                machine.sshd.wait()
            subprocess.run(["ip", "netns", "del", machine.namespace], check=False, capture_output=True)
