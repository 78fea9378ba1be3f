"""A real Slurm on this machine: munged, slurmctld and two slurmd, each a process of this one.

Nothing of /etc is read or written: configuration, keys, state and logs lie in one folder, which SLURM_CONF
names. Nodes with two CPUs each, and two GPUs that are only counted. `low` and `high` are partitions of n1
and n2, of which the second preempts jobs of the first (requeued, after a grace of GRACE_S); `short` has a
limit of ten minutes; `wide` has n3, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from patience import Deadline, patience

NODES = ("n1", "n2", "n3")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "scontrol")
PACKAGES = ("munge", "slurm-wlm")
GRACE_S = 120
REQUEUE_HOLD_S = 20
"""A requeued job waits so long (cred_expire); and so long a loaded machine may take to start a step."""
_READY_S = 120
# Times in which daemons and steps must answer are those of a machine on which other tests run, too.
_CONF = """\
ClusterName=effilaunch
SlurmctldHost={host}({address})
SlurmctldPort={controller_port}
FirstJobId={first_job}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={hold}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=60
MessageTimeout=60
TCPTimeout=30
BatchStartTimeout=120
SlurmdTimeout=1200
UnkillableStepTimeout=600
MinJobAge=900
InactiveLimit=0
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
GresTypes=gpu
NodeName=n1 Port={port_1} NodeHostname={host} NodeAddr={address} CPUs=2 RealMemory=4000 Gres=gpu:2
NodeName=n2 Port={port_2} NodeHostname={host} NodeAddr={address} CPUs=2 RealMemory=4000 Gres=gpu:2
NodeName=n3 Port={port_3} NodeHostname={host} NodeAddr={address} CPUs=2 RealMemory=4000 Gres=gpu:2
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes=n1,n2 MaxTime=60 PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=n1 MaxTime=10 PriorityTier=1
PartitionName=wide Nodes=n1,n2,n3 MaxTime=60 PriorityTier=1
"""


class NoSlurm(Exception):
    """Why no Slurm can be started here."""


def install() -> None:
    """Install the Debian packages where they are missing. NoSlurm where that cannot be."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise NoSlurm(f"{', '.join(missing)} missing, and there is no apt-get to install them")
    if os.geteuid() != 0:
        raise NoSlurm(f"{', '.join(missing)} missing: run `apt-get install {' '.join(PACKAGES)}` as root")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(
            ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *words],
            env=quiet,
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise NoSlurm(f"apt-get could not install {', '.join(PACKAGES)}: {done.stderr.strip()[-300:]}")


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on just now, all different."""
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


class Cluster:
    """The daemons, and what a user of the cluster types."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="effilaunch-slurm-", dir="/tmp"))  # short: sockets
        self.environ = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons and wait until all nodes are idle. NoSlurm where they do not come up."""
        if os.geteuid() != 0:
            raise NoSlurm("slurmd starts jobs only as root")
        self._write()
        socket_path = self.folder / "munge.socket"
        self._spawn(
            "munged", "--foreground", "--force", f"--socket={socket_path}",
            f"--key-file={self.folder}/munge.key", f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munged.seed",
        )  # fmt: skip
        self._until(socket_path.exists, "munged opens no socket")
        self._spawn("slurmctld", "-D", "-c")
        for node in NODES:
            self._nodes[node] = self._spawn("slurmd", "-D", "-N", node)
        self._until(self._idle, "the nodes do not become idle")

    def stop(self) -> None:
        """End the jobs, then exactly the daemons that were started."""
        with contextlib.suppress(subprocess.SubprocessError, OSError, NoSlurm):
            self.run("scancel", "--user", "root", "--full", check=False)
            self._until(lambda: not self.run("squeue", "-h", check=False).stdout.strip(), "jobs are left")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=patience(60))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self, *words: str, check: bool = True, timeout: float = 120, **more
    ) -> subprocess.CompletedProcess:
        """One command of Slurm's or ours, in the cluster's environment."""
        env = {**os.environ, **self.environ, **more.pop("env", {})}
        done = subprocess.run(
            words, env=env, capture_output=True, text=True, timeout=patience(timeout), **more
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done

    def job(self, number: str) -> dict[str, str]:
        """`scontrol show job` as a mapping."""
        shown = self.run("scontrol", "-o", "show", "job", number).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait_state(self, number: str, *states: str, timeout: float = 240) -> dict[str, str]:
        """The job once it is in one of the states."""
        found: dict[str, str] = {}

        def there() -> bool:
            found.update(self.job(number))
            return found["JobState"] in states

        self._until(there, f"job {number} does not become {'/'.join(states)}", timeout, found)
        return found

    def lose(self, node: str, number: str) -> None:
        """End a node as a power cut does: its slurmd and all that it runs of the job, without a word."""
        words = {**self.environ, "SLURM_JOB_ID": number, "SLURMD_NODENAME": node}
        ours = {f"{name}={value}".encode() for name, value in words.items()}
        tasks: set[int] = set()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if ours <= set((entry / "environ").read_bytes().split(b"\0")):
                    tasks.add(int(entry.name))
        parents = {
            int(Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()[1]) for task in tasks
        }
        steps = {pid for pid in parents if b"slurmstepd" in Path(f"/proc/{pid}/cmdline").read_bytes()}
        self._nodes[node].kill()
        for pid in sorted(steps) + sorted(tasks - steps):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def bring_back(self, node: str) -> None:
        """Start a lost node again."""
        self._nodes[node].wait()
        self._daemons.remove(self._nodes[node])
        self._nodes[node] = self._spawn("slurmd", "-D", "-N", node)
        self._until(self._idle, f"{node} does not come back", 120)

    def _spawn(self, *words: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, **self.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
        program = shutil.which(words[0], path=env["PATH"])
        if program is None:
            raise NoSlurm(f"{words[0]} is missing")
        with (self.folder / f"{words[0]}-{len(self._daemons)}.out").open("wb") as log:
            started = subprocess.Popen(
                [program, *words[1:]], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._daemons.append(started)
        return started

    def _until(self, there, otherwise: str, timeout: float = _READY_S, seen: object = "") -> None:
        deadline = Deadline(timeout)
        while not there():
            if deadline.passed():
                logs = "".join(
                    f"\n{p.name}: {p.read_text(errors='replace')[-600:]}"
                    for p in [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
                )
                raise NoSlurm(f"{otherwise} within {timeout:g} s: {seen}{logs}")
            time.sleep(0.3)

    def _idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-p", "wide", "-o", "%T", check=False).stdout.split()
        return states == ["idle"] * len(NODES)

    def _write(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        (self.folder / "plugstack.conf").write_text("")
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        # The port of a job comes from its number: the Slurm of another test process has others.
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        controller_port, port_1, port_2, port_3 = free_ports(4)
        text = _CONF.format(
            folder=self.folder, host=socket.gethostname(), address="127.0.0.1", grace=GRACE_S,
            hold=REQUEUE_HOLD_S,
            controller_port=controller_port, port_1=port_1, port_2=port_2, port_3=port_3,
            first_job=1 + 250 * worker,
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)
