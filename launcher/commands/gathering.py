"""How a command finds the other machines of its job, and holds them together while it lasts."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence

from launcher.commands.gather import find_hardware
from launcher.errors import EffilaunchError, Interrupted, Problem, RecipeError
from launcher.execute.group import Group
from launcher.execute.member import COME_S, serve
from launcher.facts.place import Place
from launcher.recipe.loading import LoadedRecipe
from launcher.report.outcome import Outcome

DEFAULT_PORT = 29400
"""The head's control port, where --master-addr names none."""


def rendezvous(
    loaded: LoadedRecipe, on: str | None, node_rank: int | None, address: str | None
) -> Place | None:
    """The place that --node-rank and --master-addr name; None without them. RecipeError (2)."""
    if node_rank is None and address is None:
        return None
    if node_rank is None or address is None:
        missing = "--node-rank" if node_rank is None else "--master-addr"
        message = f"{missing} is missing: the machines of a run find each other by both"
        raise RecipeError(
            Problem("usage", message, hint="--node-rank 0 --master-addr HOST[:PORT], HOST: machine 0")
        )
    nodes = find_hardware(loaded.recipe, on).num_nodes
    if nodes == 1:
        message = "--node-rank is for runs on several machines, and the hardware is one machine"
        raise RecipeError(Problem("usage", message, hint="say how many: --on 2x8xA100-80GB, or `hardware`"))
    if not 0 <= node_rank < nodes:
        message = f"--node-rank {node_rank}: the {nodes} machines are 0 to {nodes - 1}"
        raise RecipeError(Problem("usage", message))
    host, port = split_address(address)
    return Place(f"{host}:{port}", node_rank, nodes, nodes, node_rank, 1, 0, host, port)


def split_address(address: str) -> tuple[str, int]:
    """`HOST`, `HOST:PORT` or `[IPV6]:PORT`. RecipeError (2) where it is neither."""
    host, port = address, ""
    if address.startswith("["):
        host, _, port = address[1:].partition("]")
        port = port.removeprefix(":")
    elif address.count(":") == 1:
        host, _, port = address.partition(":")
    known = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not host or not (port == "" or known):
        message = f"--master-addr {address!r}: HOST or HOST:PORT was expected, PORT from 1 to 65535"
        raise RecipeError(Problem("usage", message, hint=f"e.g. --master-addr node1:{DEFAULT_PORT}"))
    return host, int(port) if port else DEFAULT_PORT


def digest_of_request(loaded: LoadedRecipe, **asked: object) -> str:
    """What all machines must have been given alike: the recipe's text and keys, and the options."""
    given = {"text": loaded.text, "keys": sorted(loaded.origins), **asked}
    text = json.dumps(given, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def take_part(place: Place, asked: str, say: Callable[[str], None]) -> Outcome:
    """Be a member that is not the head, until the job ends. Raises what the head raises."""
    serve(place, asked, say)
    return Outcome({"member": place.member, "node_rank": place.node_rank}, "the run has finished")


@contextlib.contextmanager
def gathered(place: Place | None, asked: str, say: Callable[[str], None]) -> Iterator[Group | None]:
    """The head's group while this is entered; None for a run on one machine. All members leave with its end.

    Nobody is waited for here: `await_members` does that.
    """
    if place is None or place.members == 1:
        yield None
        return
    group = Group(place, asked)
    if group.port != place.port:
        say(f"port {place.port} is taken: listening on {group.port}")
    try:
        yield group
    except EffilaunchError as error:
        group.goodbye(error)
        raise
    except KeyboardInterrupt:
        group.goodbye(Interrupted(Problem("interrupted", "stopped by the user of the first machine")))
        raise
    except BaseException as error:
        message = f"a bug in effilaunch on the first machine: {type(error).__name__}: {error}"
        group.goodbye(EffilaunchError(Problem("internal-error", message)))
        raise
    else:
        group.goodbye(None)


def await_members(
    group: Group,
    say: Callable[[str], None],
    limit_s: float = COME_S,
    failed: Callable[[], Sequence[Problem]] = lambda: (),
) -> None:
    """Return when all members have come. MachineError (4) naming those that have not."""
    group.await_all(limit_s, say, failed)
