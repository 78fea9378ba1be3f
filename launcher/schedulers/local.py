"""How a command finds the other machines of its job, and holds them together while it lasts.

Machines of one run find each other in one of these ways, and are alike from then on: a hostfile, whose
machines are started over ssh; the same command on each, with --node-rank and --master-addr; the tasks of a
step of Slurm's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.commands.gather import check_hosts, find_hardware, hostfile_warnings, read_hostfile
from launcher.errors import EffilaunchError, Interrupted, Problem, RecipeError
from launcher.execute.nodes.group import Group
from launcher.execute.nodes.member import COME_S, serve
from launcher.facts.interfaces import is_this_machine, own_address_towards
from launcher.facts.place import PORTS, Place
from launcher.recipe.env import reference_names
from launcher.recipe.loading import LoadedRecipe
from launcher.report.outcome import Outcome, note
from launcher.schedulers.slurm import allocated, refuse_hostfile
from launcher.schedulers.ssh import Host, Starting, forwarded, is_host

LINGER_S = 60.0
"""When a run ends before all have come: so long those are told that come by themselves."""
DEFAULT_PORT = 29400
"""The head's control port, where --master-addr names none."""
_LAST_PORT = 65536 - PORTS
"""Those behind the port are tried, too."""
_ADDRESS = re.compile(r"(?:\[([^]]+)\]|([^:]+))(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Gathering:
    """The place of this process in a job over several machines, and how the others come."""

    place: Place
    hosts: tuple[Host, ...] = ()
    """Machines that the head starts over ssh, in the order of their node ranks from 1 on; else they come
    by themselves."""
    env: tuple[str, ...] = ()
    """Variables that the recipe refers to, which those machines get."""


def find_gathering(
    loaded: LoadedRecipe,
    on: str | None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    *,
    command: Sequence[str] = (),
    alone: str = "",
) -> Gathering | None:
    """How the machines of this run come together; None for a run on this machine alone.

    node_rank, master_addr: of the command line. command: its words as given, for hints. alone: the option
    that keeps a command on one machine, if one does. RecipeError (2).
    """
    if node_rank is not None or master_addr is not None:
        if alone:
            message = f"{alone} is done on one machine: without --node-rank and --master-addr"
            raise RecipeError(Problem("usage", message))
        by_hand = Gathering(rendezvous(loaded, on, node_rank, master_addr))
        if loaded.recipe.launch.hostfile is not None:
            note("launch.hostfile: no machine is started over ssh: with --node-rank each is started by hand")
        return by_hand
    if loaded.recipe.launch.hostfile is not None and not alone:
        refuse_hostfile()
        return _of_hostfile(loaded, on, loaded.recipe.launch.hostfile)
    if alone == "--dry-run":
        if loaded.recipe.launch.hostfile is not None:
            for warning in hostfile_warnings(loaded.recipe, find_hardware(loaded.recipe, on)):
                note(warning)
        return None
    words = command or ("run", str(loaded.path))
    place = allocated(loaded, on, words, tiny=bool(alone), say=note)
    return None if place is None else Gathering(place)


def rendezvous(loaded: LoadedRecipe, on: str | None, node_rank: int | None, address: str | None) -> Place:
    """The place that --node-rank and --master-addr name. RecipeError (2)."""
    if node_rank is None or address is None:
        missing = "--node-rank" if node_rank is None else "--master-addr"
        message = f"{missing} is missing: the machines of a run find each other by both"
        hint = "--node-rank 0 --master-addr HOST[:PORT] on machine 0, which HOST names, 1 on the next"
        raise RecipeError(Problem("usage", message, hint=hint))
    nodes = find_hardware(loaded.recipe, on).num_nodes
    if nodes == 1:
        message = "--node-rank is for runs on several machines, and the hardware is one machine"
        raise RecipeError(Problem("usage", message, hint="say how many: --on 2x8xA100-80GB, or `hardware`"))
    if not 0 <= node_rank < nodes:
        message = f"--node-rank {node_rank}: the {nodes} machines are 0 to {nodes - 1}"
        raise RecipeError(Problem("usage", message))
    host, port = split_address(address)
    # Without the host, which each machine may write in another way.
    return Place(f"port {port}", node_rank, nodes, nodes, node_rank, 1, 0, host, port)


def split_address(address: str) -> tuple[str, int]:
    """`HOST`, `HOST:PORT` or `[IPV6]:PORT`. RecipeError (2) where it is none of them."""
    found = _ADDRESS.fullmatch(address)
    host = address if found is None else found[1] or found[2]  # one of IPv6 has more colons
    port = int(found[3]) if found is not None and found[3] else DEFAULT_PORT
    if not is_host(host) or not 0 < port <= _LAST_PORT:
        shown = repr(address if len(address) <= 80 else f"{address[:80]}…")
        message = f"--master-addr {shown}: HOST or HOST:PORT was expected, PORT from 1 to {_LAST_PORT}"
        hint = f"e.g. --master-addr node1:{DEFAULT_PORT}, 10.0.0.1 or [fd00::1]:{DEFAULT_PORT}"
        raise RecipeError(Problem("usage", message, hint=hint))
    return host, port


def _of_hostfile(loaded: LoadedRecipe, on: str | None, file: str) -> Gathering | None:
    """This machine as the head of those in the hostfile."""
    hosts = read_hostfile(file)
    hardware = find_hardware(loaded.recipe, on)
    if hardware.num_nodes == 1:
        return None
    own = [host for host in hosts if is_this_machine(host.name.rpartition("@")[2])]
    if len(own) != 1:
        raise RecipeError(_not_here(own, file))
    others = [host for host in hosts if host is not own[0]]
    check_hosts([*own, *others], hardware, file)
    place = Place(
        uuid.uuid4().hex, 0, hardware.num_nodes, hardware.num_nodes, 0, 1, 0, own[0].name, DEFAULT_PORT
    )
    return Gathering(
        place, tuple(others[: hardware.num_nodes - 1]), tuple(_references(loaded.recipe.model_dump()))
    )


def _not_here(own: list[Host], file: str) -> Problem:
    if own:
        names, line = " and ".join(host.name for host in own), own[1].line
        return Problem(
            "bad-hostfile", f"{names} are one machine, this one", file=file, line=line,
            hint="one line a machine, with all its slots",
        )  # fmt: skip
    return Problem(
        "bad-hostfile", "this machine is not in the hostfile, and the run is led from one that is", file=file,
        hint=f"start it on one of them, or add this one ({os.uname().nodename})",
    )  # fmt: skip


def _references(value: Any) -> Iterator[str]:
    """Names of the environment variables that a recipe refers to."""
    if isinstance(value, str):
        yield from reference_names(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def digest_of_request(loaded: LoadedRecipe, overrides: Sequence[str], **asked: object) -> str:
    """What all machines must have been given alike: the recipe's text and keys, and the options.

    overrides: `--set`, as given. Not --output-dir, which only the first machine needs.
    """
    given = {"text": loaded.text, "keys": sorted(loaded.origins), "set": list(overrides), **asked}
    text = json.dumps(given, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def take_part(place: Place, asked: str, say: Callable[[str], None]) -> Outcome:
    """Be a member that is not the head, until the job ends. Raises what the head raises."""
    serve(place, asked, say, waits=say)
    return Outcome({"member": place.member, "node_rank": place.node_rank}, "the run has finished")


@contextlib.contextmanager
def gathered(gathering: Gathering | None, asked: str, say: Callable[[str], None]) -> Iterator[Group | None]:
    """The head's group while this is entered; None for a run on one machine. All members leave with its end.

    Machines of a hostfile are there when this is entered, or named in a MachineError (4); members that come
    by themselves are waited for by `await_members`.
    """
    if gathering is None or gathering.place.members == 1:
        yield None
        return
    place, starting = gathering.place, Starting()
    group = Group(place, starting.token if gathering.hosts else asked)
    group.linger_s, group.say = 0.0 if gathering.hosts else LINGER_S, say
    if group.members.port != place.port and not gathering.hosts:
        say(f"port {place.port} is taken: listening on {group.members.port}")
    try:
        with _goodbye(group):
            if gathering.hosts:
                _start(gathering, group, starting)
                group.await_all(COME_S, say, lambda: starting.problems(group.members.numbers))
            yield group
    finally:
        starting.end()


@contextlib.contextmanager
def _goodbye(group: Group) -> Iterator[None]:
    """All members leave with the end of this, as it ends."""
    try:
        yield
    except EffilaunchError as error:
        group.goodbye(error)
        raise
    except KeyboardInterrupt as stop:
        message = f"{stop or signal.SIGINT.name}: the first machine was stopped while no rank was running"
        group.goodbye(Interrupted(Problem("interrupted", message)))
        raise
    except BaseException as error:
        message = f"a bug in effilaunch on the first machine: {type(error).__name__}: {error}"
        group.goodbye(EffilaunchError(Problem("internal-error", message)))
        raise
    else:
        group.goodbye(None)


def _start(gathering: Gathering, group: Group, starting: Starting) -> None:
    """Start the members of a hostfile, each told the address by which its machine reaches this one."""
    env = forwarded(os.environ, gathering.env)
    for number, host in enumerate(gathering.hosts, 1):
        try:
            address = own_address_towards(host.name.rpartition("@")[2])
        except OSError:  # perhaps an alias that ssh alone knows; if it is none, ssh says so
            address = os.uname().nodename
        port = group.members.port
        told = replace(gathering.place, member=number, node_rank=number, head=address, port=port)
        starting.start(host.name, told, env)


def await_members(group: Group, say: Callable[[str], None], limit_s: float = COME_S) -> None:
    """Return when all members have come. MachineError (4) naming those that have not."""
    group.await_all(limit_s, say)
