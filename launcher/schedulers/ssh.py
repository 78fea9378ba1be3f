"""Runs on the hosts of `launch.hostfile`, whose nodes are started over ssh from one of them.

The environment is sent through ssh's standard input: neither a command line nor a file shows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.machine.interfaces import is_this_machine, own_address_towards
from launcher.machine.job_member import JobMember
from launcher.machine.probe import free_port
from launcher.recipe.env import reference_names
from launcher.schedulers.hostfile import Host, check_hosts, hostfile_warnings, read_hostfile
from launcher.schedulers.scheduler import Gathering, Say, Scheduler, StartRequest
from launcher.schedulers.slurm_allocation import read_allocation

ANSWER_S = 15.0
"""Hosts that have not answered by then are named together."""
START_S = 60.0
"""Time for a started node to join: Python's files may be on a slow network disk."""
COMMAND = "EFFILAUNCH_SSH"
"""Environment variable: command to use in place of `ssh`, with its options."""
OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "LogLevel=ERROR",
           "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")  # fmt: skip
FORWARDED = ("ACCELERATE_", "CUDA_", "DEEPSPEED_", "DS_", "EFFILAUNCH_CACHE", "FI_", "GLOO_", "HF_", "KMP_",
             "LD_LIBRARY_PATH", "MKL_", "MV2_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "TOKENIZERS_",
             "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_", "WANDB_", "http_proxy", "https_proxy",
             "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")  # fmt: skip
"""Names, or prefixes, of the variables that the other hosts get from this one."""
OWN = ("CUDA_VISIBLE_DEVICES",)
"""Not forwarded: each host has its own."""
_ROOT = Path(__file__).resolve().parents[2]
READY = "effilaunch: started"
"""A host prints this line when it runs effilaunch."""
_BEGIN = (
    "import sys, json, os; said = json.loads(sys.stdin.readline()); os.environ.update(said['env']); "
    "os.chdir(said['cwd']); sys.path.insert(0, said['root']); from launcher.cli import main; "
    f"print({READY!r}); sys.exit(main(said['argv']))"
)
_LAST_LINES_S = 0.2
"""For the threads that read the last output of ssh."""
_LINES = 20
"""Lines kept of the output of a host."""


@dataclass(frozen=True, slots=True)
class HostGathering(Gathering):
    """Node rank 0, which starts the same command on the other hosts."""

    hosts: tuple[Host, ...] = ()
    """The hosts to start, in the order of their node ranks from 1 on."""
    env: tuple[str, ...] = ()
    """Environment variables that the recipe refers to; the hosts get them."""
    words: tuple[str, ...] = ()
    """Of the command line."""

    @contextlib.contextmanager
    def others(self, run_dir: Path, say: Say) -> Iterator[Callable[[], Sequence[Problem]]]:
        starting = Starting()
        try:
            self._start(starting, run_dir)
            starting.await_started()
            yield starting.problems
        finally:
            starting.end()

    def _start(self, starting: Starting, run_dir: Path) -> None:
        """Start the hosts, each with the address by which it reaches this machine."""
        env = forwarded(os.environ, self.env)
        for number, host in enumerate(self.hosts, 1):
            try:
                address = own_address_towards(host.name.rpartition("@")[2])
            except OSError:  # perhaps an alias of ssh's configuration; otherwise ssh reports it
                address = os.uname().nodename
            where = f"[{address}]" if ":" in address else address
            argv = [*self.words, "--output-dir", str(run_dir), "--node-rank", str(number),
                    "--master-addr", f"{where}:{self.place.port}"]  # fmt: skip
            starting.start(host.name, argv, env)


class Ssh(Scheduler):
    """Starts the hosts of `launch.hostfile`."""

    def starts(self, request: StartRequest) -> bool:
        has_hostfile = request.loaded.recipe.launch.hostfile is not None
        return has_hostfile and not request.is_manual and request.alone != "--tiny"

    def gathering(self, request: StartRequest) -> Gathering | None:
        recipe = request.loaded.recipe
        if request.alone:
            for warning in hostfile_warnings(recipe, request.hardware()):
                request.say(warning)
            return None
        _refuse_tasks()
        file = recipe.launch.hostfile
        assert file is not None, "asked for a recipe with a hostfile"
        hosts, hardware = read_hostfile(file), request.hardware()
        if hardware.num_nodes == 1:
            return None
        own = [host for host in hosts if is_this_machine(host.name.rpartition("@")[2])]
        if len(own) != 1:
            raise RecipeError(_not_here(own, file))
        others = [host for host in hosts if host is not own[0]]
        check_hosts([*own, *others], hardware, file)
        nodes = hardware.num_nodes
        started, port = tuple(others[: nodes - 1]), free_port()
        try:
            head = own_address_towards(started[0].name.rpartition("@")[2])
        except OSError:  # an alias of ssh's configuration
            head = own[0].name.rpartition("@")[2]
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{port}"
        names = tuple(host.name for host in (own[0], *started))
        place = JobMember(f"port {port}", 0, nodes, nodes, 0, 1, 0, head, port, name, names)
        texts = [recipe.model_dump(), *(one.text for one in request.loaded.kept.values())]
        references = tuple(dict.fromkeys(_references(texts)))
        return HostGathering(place, started, references, tuple(request.words))


SCHEDULER = Ssh()


def _refuse_tasks() -> None:
    """RecipeError (2) in one of several tasks of a Slurm step: each would start all hosts."""
    allocation = read_allocation(os.environ)
    if allocation is None or allocation.step is None or allocation.tasks == 1:
        return
    message = f"each of the {allocation.tasks} tasks of srun would start all hosts of the hostfile"
    hint = "remove it under Slurm (--set launch.hostfile=null), or start the run once, without srun"
    raise RecipeError(Problem("slurm-hostfile", message, path="launch.hostfile", hint=hint))


def _not_here(own: Sequence[Host], file: str) -> Problem:
    if own:
        message = f"{' and '.join(host.name for host in own)} are one machine, this one"
        hint = "write one line per host, with all its slots"
        return Problem("bad-hostfile", message, file=file, line=own[1].line, hint=hint)
    message = "this machine is not in the hostfile; a run is started on one of its hosts"
    hint = f"start it there, or add this machine ({os.uname().nodename})"
    return Problem("bad-hostfile", message, file=file, hint=hint)


def _references(value: Any) -> Iterator[str]:
    """Names of the environment variables that a recipe refers to."""
    if isinstance(value, str):
        yield from reference_names(value)
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _references(item)


def forwarded(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The variables for the other hosts. names: those that the recipe refers to."""
    wanted = set(names)
    return {
        name: value
        for name, value in environ.items()
        if name in wanted or (name.startswith(FORWARDED) and name not in OWN)
    }


@dataclass(slots=True)
class Started:
    """A node that was started on a host."""

    host: str
    process: subprocess.Popen[bytes]
    began: float
    output: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES))
    ready: bool = False
    """Whether it runs effilaunch."""


class Starting:
    """The ssh processes of a job; all are started at once."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._command = shlex.split((environ or os.environ).get(COMMAND, "")) or ["ssh"]
        self._started: list[Started] = []

    def start(self, host: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start `effilaunch` with these arguments on a host; returns at once."""
        remote = f"exec {shlex.quote(sys.executable)} -u -c {shlex.quote(_BEGIN)}"
        command = [*self._command, *OPTIONS, host, remote]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which ends the nodes
            )  # fmt: skip
        except OSError as error:
            raise _no_ssh(self._command[0], error) from None
        one = Started(host, process, time.monotonic())
        instructions = {"argv": list(argv), "env": dict(env), "root": str(_ROOT), "cwd": str(Path.cwd())}
        threading.Thread(target=_talk, args=(one, instructions), name="ssh", daemon=True).start()
        self._started.append(one)

    def await_started(self) -> None:
        """Return when all hosts run effilaunch. MachineError (4) with the problems of all that do not."""
        while waiting := [one for one in self._started if not one.ready]:
            over = [one for one in waiting if one.process.poll() is not None]
            now = time.monotonic()
            late = [one for one in waiting if one not in over and now - one.began > START_S]
            settled = len(over) == len(waiting) or all(now - one.began > ANSWER_S for one in waiting)
            if late or (over and settled):
                time.sleep(_LAST_LINES_S)
                if found := [_problem(one) for one in over if not one.ready] + [_silent(one) for one in late]:
                    raise MachineError(found)
            time.sleep(0.1)

    def problems(self) -> list[Problem]:
        """The problems of hosts on which effilaunch has ended with an error."""
        over = [one for one in self._started if one.process.poll() not in (None, 0)]
        if over:
            time.sleep(_LAST_LINES_S)
        return [_problem(one) for one in over]

    def end(self, wait_s: float = 10.0) -> None:
        """Wait for the ssh processes, then kill the rest."""
        deadline = time.monotonic() + wait_s
        for one in self._started:
            try:
                one.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()


def _talk(one: Started, instructions: Mapping[str, object]) -> None:
    """Send a node its instructions, then keep the output of its host."""
    process = one.process
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    with contextlib.suppress(OSError), process.stdin:
        process.stdin.write(json.dumps(instructions).encode() + b"\n")
    with process.stdout:
        for line in process.stdout:
            text = line.decode("utf-8", "replace").rstrip()
            one.ready = one.ready or text == READY
            one.output.append(text)


def _no_ssh(program: str, error: OSError) -> MachineError:
    hint = f"install an ssh client, or name another one in {COMMAND}"
    return MachineError(Problem("ssh-missing", f"{program} cannot be started: {error.strerror}", hint=hint))


_KINDS: Sequence[tuple[str, str, str, str]] = (
    ("Could not resolve hostname", "host-unreachable", "does not answer",
     "is the name in the hostfile right?"),
    ("Host key verification failed", "host-key", "has a key that ssh does not know",
     "connect once manually (`ssh {host}`) and accept it, or correct ~/.ssh/known_hosts"),
    ("Permission denied", "ssh-denied", "does not let ssh in without a password",
     "`ssh-copy-id {host}`, or load the key into an ssh-agent; `ssh -o BatchMode=yes {host} true` must work"),
    ("No module named", "effilaunch-missing", "does not see effilaunch",
     "install it there under the same path, best in one environment on a shared disk"),
)  # fmt: skip


def _problem(one: Started) -> Problem:
    """Why a node ended before it joined, from the output of ssh or of the host."""
    text = "\n".join(one.output)
    last = next(
        (line for line in reversed(one.output) if line.strip() not in ("", READY)),
        f"exit code {one.process.returncode}",
    )
    for pattern, code, what, hint in _KINDS:
        if pattern in text:
            line = next(line for line in one.output if pattern in line)
            return Problem(code, f"{one.host} {what}: {line}", hint=hint.format(host=one.host))
    if one.process.returncode in (126, 127) or "No such file" in text:
        message = f"{one.host} has no {sys.executable}: {last}"
        hint = "all hosts need the same environment under the same path"
        return Problem("python-missing", message, hint=hint)
    if one.process.returncode == 255:  # ssh's own
        hint = f"is it up, and does `ssh {one.host}` work?"
        return Problem("host-unreachable", f"{one.host} does not answer: {last}", hint=hint)
    message = f"{one.host} could not join: {last}"
    return Problem("host-failed", message, hint="this is the last line of its output")


def _silent(one: Started) -> Problem:
    message = f"{one.host}: ssh has connected, but no node has joined within {START_S:.0f} s"
    return Problem("host-silent", message, hint="does its shared disk hang, or a shell start-up file?")
