"""How the nodes of a run find each other, and stay together while a command lasts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from launcher.errors import EffilaunchError, Interrupted, Problem
from launcher.execute.nodes.group import Group
from launcher.execute.nodes.member import COME_S, serve
from launcher.facts.hardware import Hardware
from launcher.facts.job_member import JobMember
from launcher.recipe.loading import LoadedRecipe
from launcher.schedulers import SCHEDULERS, scheduler_named

LINGER_S = 60.0
"""Seconds the coordinator keeps accepting late nodes when the run ends before all have come."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What decides where the run of a command starts."""

    loaded: LoadedRecipe
    hardware: Callable[[], Hardware]
    """The hardware that the command plans for."""
    say: Say
    """Takes notes for the user."""
    node_rank: int | None = None
    master_addr: str | None = None
    """Both of the command line."""
    command: Sequence[str] = ()
    """The words of the command line, for hints."""
    alone: str = ""
    """The option that keeps the command on one node: --dry-run or --tiny."""

    @property
    def is_manual(self) -> bool:
        """Whether the command line gives this node's place."""
        return self.node_rank is not None or self.master_addr is not None

    @property
    def words(self) -> Sequence[str]:
        return self.command or ("run", str(self.loaded.path))


@dataclass(frozen=True, slots=True)
class Gathering:
    """The place of this process in a job on several nodes, which start by themselves."""

    place: JobMember

    @contextlib.contextmanager
    def head(self, asked: str, say: Say) -> Iterator[Group]:
        """The group of node rank 0; nodes may still be missing."""
        group = Group(self.place, asked)
        group.linger_s, group.say = LINGER_S, say
        if group.members.port != self.place.port:
            say(f"port {self.place.port} is taken: listening on {group.members.port}")
        with leaving_together(group):
            yield group


def find_gathering(request: Request) -> Gathering | None:
    """How the nodes of this run meet; None for a run on one node. RecipeError (2)."""
    chosen = next(one for one in map(scheduler_named, SCHEDULERS) if one.starts(request))
    return chosen.gathering(request)


def digest_of_request(loaded: LoadedRecipe, overrides: Sequence[str], **asked: object) -> str:
    """A digest of what must be the same on all nodes: the recipe's text and keys, and the options.

    overrides: `--set`. Not --output-dir, which only node rank 0 needs.
    """
    given = {"text": loaded.text, "keys": sorted(loaded.origins), "set": list(overrides), **asked}
    text = json.dumps(given, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def take_part(place: JobMember, asked: str, say: Say) -> dict[str, int]:
    """Run a node other than rank 0 until the job ends; its place. Raises what node rank 0 raises."""
    serve(place, asked, say, waits=say)
    return {"member": place.member, "node_rank": place.node_rank}


@contextlib.contextmanager
def gathered(gathering: Gathering | None, asked: str, say: Say) -> Iterator[Group | None]:
    """The group of node rank 0; None for a run on one node. All nodes leave at its end.

    Nodes that the scheduler starts have come when this is entered, or are named in a MachineError (4);
    `await_members` waits for the others.
    """
    if gathering is None or gathering.place.members == 1:
        yield None
        return
    with gathering.head(asked, say) as group:
        yield group


@contextlib.contextmanager
def leaving_together(group: Group) -> Iterator[None]:
    """All nodes leave at the end of this, with the same exit status."""
    try:
        yield
    except EffilaunchError as error:
        group.goodbye(error)
        raise
    except KeyboardInterrupt as stop:
        message = f"{stop or signal.SIGINT.name}: node rank 0 was stopped while no rank was running"
        group.goodbye(Interrupted(Problem("interrupted", message)))
        raise
    except BaseException as error:
        message = f"a bug in effilaunch on node rank 0: {type(error).__name__}: {error}"
        group.goodbye(EffilaunchError(Problem("internal-error", message)))
        raise
    else:
        group.goodbye(None)


def await_members(group: Group, say: Say, limit_s: float = COME_S) -> None:
    """Return when all nodes have come. MachineError (4) naming those that have not."""
    group.await_all(limit_s, say)
