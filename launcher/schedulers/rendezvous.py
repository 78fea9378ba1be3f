"""Which nodes a command runs on, and how they stay together while it lasts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import EffilaunchError, Interrupted, Problem, RecipeError
from launcher.execute.nodes import Nodes
from launcher.machine.job_member import JobMember
from launcher.recipe.loading import LoadedRecipe
from launcher.schedulers import SCHEDULERS, scheduler_named
from launcher.schedulers.scheduler import Gathering, Say, StartRequest


def find_gathering(request: StartRequest) -> Gathering | None:
    """How the nodes of this run meet; None for a run on one node. RecipeError (2)."""
    chosen = next(one for one in map(scheduler_named, SCHEDULERS) if one.starts(request))
    found = chosen.gathering(request)
    return None if found is None or found.place.members == 1 else found


def digest_of_request(loaded: LoadedRecipe, **asked: object) -> str:
    """A digest of what must be the same on all nodes: the recipe's text and keys, and the options."""
    given = {"text": loaded.text, "keys": sorted(loaded.origins), "set": list(loaded.overrides), **asked}
    text = json.dumps(given, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def shared_run_dir(proposed: Path, is_proposed: bool, place: JobMember) -> Path:
    """The run directory, which all nodes must name alike: a default name is that of the job.

    RecipeError (2) where the job has no name of its own.
    """
    if not is_proposed:
        return proposed
    if not place.name:
        message = "--output-dir is missing: the nodes meet in the run directory, on a disk that all share"
        hint = "add the same --output-dir on every node"
        raise RecipeError(Problem("usage", message, hint=hint))
    return proposed.with_name(place.name)


@contextlib.contextmanager
def leading(gathering: Gathering | None, run_dir: Path, asked: str, say: Say) -> Iterator[Nodes | None]:
    """The other nodes, for node rank 0; None for a run on one node.

    All leave at the end of this, with the same exit status. MachineError (4) for nodes that could not be
    started.
    """
    if gathering is None:
        yield None
        return
    nodes = Nodes(gathering.place, run_dir, asked)
    with gathering.others(run_dir, say) as nodes.failed, nodes:
        try:
            yield nodes
        except EffilaunchError as error:
            nodes.close(error)
            raise
        except KeyboardInterrupt as stop:
            message = f"{stop or signal.SIGINT.name}: node rank 0 was stopped while no rank was running"
            nodes.close(Interrupted(Problem("interrupted", message)))
            raise
        except BaseException as error:
            message = f"a bug in effilaunch on node rank 0: {type(error).__name__}: {error}"
            nodes.close(EffilaunchError(Problem("internal-error", message)))
            raise
        else:
            nodes.close(None)
