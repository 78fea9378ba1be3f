"""DeepSpeed's hostfile: `HOST slots=N`, a machine a line. Pure."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.facts.place import Place

_LINE = re.compile(r"(\S+)\s+slots=([0-9]{1,6})")
_LABELS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_EXAMPLE = "HOST slots=N, such as `node1 slots=8`"


@dataclass(frozen=True, slots=True)
class Host:
    """A line of it."""

    name: str
    """As ssh takes it: a name, an address, or one of ssh's own aliases; USER@HOST as well."""
    slots: int
    """Devices, or processes on a CPU."""
    line: int


def is_host(name: str) -> bool:
    """Whether it may be the name of a machine, or is an address: what can be looked up, and is no option of
    ssh's."""
    if len(name) <= 253 and _LABELS.fullmatch(name):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return name.isascii() and name.isprintable()  # an address of IPv6 may end with any name of an interface


def parse_hostfile(text: str, file: str) -> tuple[Host, ...]:
    """The machines in their order. RecipeError with every line that is none, and its place.

    Blank lines and `#` comments are passed over, also behind an entry.
    """
    hosts: dict[str, Host] = {}
    problems = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        if wrong := _wrong(line, hosts):
            message, hint = wrong
            problems.append(Problem("bad-hostfile", message, file=file, line=number, hint=hint))
        elif found := _LINE.fullmatch(line):
            hosts[_machine(found[1])] = Host(found[1], int(found[2]), number)
    if not (hosts or problems):
        problems.append(Problem("bad-hostfile", f"it names no machine; {_EXAMPLE} was expected", file=file))
    if problems:
        raise RecipeError(problems)
    return tuple(hosts.values())


def _machine(name: str) -> str:
    """The same for all ways to write one machine's name or address: neither a user nor capitals matter."""
    host = name.rpartition("@")[2]
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().removesuffix(".")


def _wrong(line: str, known: Mapping[str, Host]) -> tuple[str, str | None] | None:
    """What is wrong with a line, and its mend; None where nothing is."""
    name, *rest = line.split()
    if (mend := _mend_of(name)) is not None:
        return f"{name[:80]!r} is no host name: {_EXAMPLE} was expected", mend
    if not rest:
        return f"{name} has no slots: {_EXAMPLE} was expected", None
    found = _LINE.fullmatch(line)
    if found is None:
        return f"{' '.join(rest)[:80]!r} is not `slots=N`: {_EXAMPLE} was expected", None
    if int(found[2]) == 0:
        return f"{name} has no slot: 1 or more was expected", None
    if (other := known.get(_machine(name))) is not None:
        written = "" if other.name == name else f" as {other.name}"
        message = f"{name} stands in line {other.line} already{written}"
        return f"{message}: one line a machine, with all its slots", None
    return None


def _mend_of(name: str) -> str | None:
    """The mend of what is not HOST or USER@HOST; None where it is."""
    user, at, host = name.rpartition("@")
    if is_host(host) and user.isprintable() and bool(user) == bool(at) and not name.startswith("-"):
        return None
    if "," in host or "[" in host[1:]:  # as Slurm writes lists: node[2-3]
        return "give each machine a line of its own"
    if host.startswith("["):
        return "an address of IPv6 stands without brackets, and a port belongs into ~/.ssh/config"
    if host.count(":") == 1:
        return "a port belongs into ~/.ssh/config"
    if at and not (user and host):
        return "write HOST or USER@HOST"
    return "a name has letters, digits, - and _ between its dots, at most 63; or write an address"


ANSWER_S = 15.0
"""A host that has not answered by then is named, together with all others that have not."""
START_S = 60.0
"""So long a member may take that was started: Python's files may lie on a slow network disk."""
COMMAND = "EFFILAUNCH_SSH"
"""Environment variable: what to start in place of `ssh`, with its options."""
OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "LogLevel=ERROR",
           "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")  # fmt: skip
FORWARDED = ("ACCELERATE_", "CUDA_", "DEEPSPEED_", "DS_", "EFFILAUNCH_CACHE", "FI_", "GLOO_", "HF_", "KMP_",
             "LD_LIBRARY_PATH", "MKL_", "MV2_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "TOKENIZERS_",
             "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_", "WANDB_", "http_proxy", "https_proxy",
             "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")  # fmt: skip
"""Names, or beginnings of names, of the variables that the other machines get from this one."""
OWN = ("CUDA_VISIBLE_DEVICES",)
"""Each machine has its own."""
_ROOT = Path(__file__).resolve().parents[2]
_BEGIN = (
    "import sys, json, os; said = json.loads(sys.stdin.readline()); os.environ.update(said['env']); "
    "sys.path.insert(0, said['root']); from launcher.execute.nodes.member import main; sys.exit(main(said))"
)
_LINES = 20
"""Of what a host says, the last ones are kept."""


def forwarded(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The variables that other machines get. names: those that the plan refers to."""
    wanted = set(names)
    return {
        name: value
        for name, value in environ.items()
        if name in wanted or (name.startswith(FORWARDED) and name not in OWN)
    }


@dataclass(slots=True)
class Started:
    """A member that was started on a host."""

    host: str
    member: int
    process: subprocess.Popen[bytes]
    began: float
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES))


class Starting:
    """The ssh processes of a job; all are started at once."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._command = shlex.split((environ or os.environ).get(COMMAND, "")) or ["ssh"]
        self._started: list[Started] = []
        self.token = secrets.token_hex(32)
        """By which these members and the head know each other."""

    def start(self, host: str, place: Place, env: Mapping[str, str]) -> None:
        """Start a member on a host; returns at once."""
        remote = f"exec {shlex.quote(sys.executable)} -u -c {shlex.quote(_BEGIN)}"
        argv = [*self._command, *OPTIONS, host, remote]
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which tells the members
            )  # fmt: skip
        except OSError as error:
            raise _no_ssh(self._command[0], error) from None
        one = Started(host, place.member, process, time.monotonic())
        told = {"place": asdict(place), "token": self.token, "env": dict(env), "root": str(_ROOT),
                "cwd": str(Path.cwd())}  # fmt: skip
        threading.Thread(target=_talk, args=(one, told), name="ssh", daemon=True).start()
        self._started.append(one)

    def problems(self, joined: Callable[[], Iterable[int]]) -> list[Problem]:
        """What is wrong with hosts, once all that can be said is said: all at once, else none yet.

        joined: the members that have come.
        """
        there = set(joined())
        waiting = [one for one in self._started if one.member not in there]
        over = [one for one in waiting if one.process.poll() is not None]
        now = time.monotonic()
        late = [one for one in waiting if one not in over and now - one.began > START_S]
        settled = len(over) == len(waiting) or all(now - one.began > ANSWER_S for one in waiting)
        if not (late or (over and settled)):
            return []
        time.sleep(0.2)  # for the threads that read what ssh said last
        return [_problem(one) for one in over] + [_silent(one) for one in late]

    def end(self, wait_s: float = 10.0) -> None:
        """Let the members leave, and end what is left of ssh."""
        deadline = time.monotonic() + wait_s
        for one in self._started:
            try:
                one.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()


def _talk(one: Started, told: Mapping[str, Any]) -> None:
    """Tell a member what it must know, then keep what its host says."""
    process = one.process
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    with contextlib.suppress(OSError), process.stdin:
        process.stdin.write(json.dumps(told).encode() + b"\n")
    with process.stdout:
        for line in process.stdout:
            one.said.append(line.decode("utf-8", "replace").rstrip())


def _no_ssh(program: str, error: OSError) -> MachineError:
    hint = f"install an ssh client, or name another one in {COMMAND}"
    return MachineError(Problem("ssh-missing", f"{program} cannot be started: {error.strerror}", hint=hint))


_KINDS: Sequence[tuple[str, str, str, str]] = (
    ("Could not resolve hostname", "host-unreachable", "does not answer",
     "is the name in the hostfile right?"),
    ("Host key verification failed", "host-key", "has a key that ssh does not know",
     "connect once by hand (`ssh {host}`) and accept it, or correct ~/.ssh/known_hosts"),
    ("Permission denied", "ssh-denied", "does not let ssh in without a password",
     "`ssh-copy-id {host}`, or load the key into an ssh-agent; `ssh -o BatchMode=yes {host} true` must work"),
    ("No module named", "effilaunch-missing", "does not see effilaunch",
     "install it there under the same path, best in one environment on a shared disk"),
    ("head-missing", "head-unreachable", "cannot reach this machine",
     "a firewall must let the machines reach each other on ports above 1024"),
)  # fmt: skip


def _problem(one: Started) -> Problem:
    """Why a host's member ended before it came, from the words of ssh or of the host."""
    text = "\n".join(one.said)
    last = next((line for line in reversed(one.said) if line.strip()), f"exit code {one.process.returncode}")
    for words, code, what, hint in _KINDS:
        if words in text:
            said = next(line for line in one.said if words in line)
            return Problem(code, f"{one.host} {what}: {said}", hint=hint.format(host=one.host))
    if one.process.returncode in (126, 127) or "No such file" in text:
        message = f"{one.host} has no {sys.executable}: {last}"
        return Problem(
            "python-missing", message, hint="all machines need the same environment under the same path"
        )
    if one.process.returncode == 255:  # ssh's own
        hint = f"is it up, and does `ssh {one.host}` work?"
        return Problem("host-unreachable", f"{one.host} does not answer: {last}", hint=hint)
    message = f"{one.host} could not take part: {last}"
    return Problem("host-failed", message, hint="what it said last is in this message")


def _silent(one: Started) -> Problem:
    message = f"{one.host}: ssh has connected, and no member has come within {START_S:.0f} s"
    return Problem("host-silent", message, hint="does its shared disk hang, or a shell start-up file?")
