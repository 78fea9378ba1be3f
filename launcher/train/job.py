"""The worker's view of plan.json: settings, secrets from the environment, folder names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.engines import engine_of
from launcher.engines.engine import Engine
from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import LARGEST_RECORD, read_json
from launcher.plan.settings import OTHERS
from launcher.plan.stored import ReadPlan
from launcher.recipe.env import Kept, reference_names, resolve_env


@dataclass(frozen=True)
class Job(ReadPlan):
    """One run directory and its plan, with every value decided and `${ENV:...}` resolved.

    Reading a setting that does not exist, or whose variable is not as it was, raises RecipeError.
    """

    run_dir: Path
    plan: Mapping[str, Any]

    def absent(self, dotted: str) -> RecipeError:
        for name, stored in self.plan["settings"].items():
            if (name + ".").startswith(dotted.removesuffix(OTHERS)):
                self.read(stored["value"])
        path = str(self.run_dir / "plan.json")
        return RecipeError(Problem("bad-plan", f"the plan has no setting {dotted}", file=path))

    def read(self, value: Any) -> Any:
        """A value of the plan with its references resolved. RecipeError where a variable is not as it was."""
        if isinstance(value, str) and value in (planned := self.plan.get("references", {})):
            if Kept(resolved := resolve_env(value, os.environ), value).digest == planned[value]:
                return resolved
            message = f"{value} has another value than when the run was planned"
            hint = f"set {' and '.join(reference_names(value))} as it was"
            path = str(self.run_dir / "plan.json")
            raise RecipeError(Problem("env-changed", message, file=path, hint=hint))
        if isinstance(value, list):
            return [self.read(item) for item in value]
        if isinstance(value, dict):
            return {key: self.read(item) for key, item in value.items()}
        return resolve_references(value)

    @property
    def kept(self) -> dict[str, Kept]:
        """The references of the plan with their values, which no file that a worker writes should hold."""
        return {text: Kept(resolve_env(text, os.environ), text) for text in self.plan.get("references", {})}

    @property
    def adaptations(self) -> list[dict[str, Any]]:
        """What `on_oom: adapt` has changed since the run was started; one object per attempt."""
        adapted = self.plan.get("adapted")
        return [] if adapted is None else list(adapted["adaptations"])

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def engine(self) -> Engine:
        return engine_of(self)

    @property
    def ds_config(self) -> Path | None:
        """The DeepSpeed configuration, None for a run without DeepSpeed."""
        path = self.run_dir / "ds_config.json"
        if not self.engine.has_stages or not path.is_file():
            return None
        return path

    @property
    def zero_stage(self) -> int | None:
        return None if self.ds_config is None else self.sharding.zero_stage


def read_job(run_dir: Path) -> Job:
    """Read RUN_DIR/plan.json. RecipeError if it is missing, too large, or not a plan."""
    path = run_dir / "plan.json"
    try:
        plan = read_json(path, LARGEST_RECORD)
    except (OSError, ValueError) as error:
        raise RecipeError(Problem("bad-plan", f"cannot read the plan: {error}", file=str(path))) from error
    settings = plan.get("settings") if isinstance(plan, dict) else None
    if not isinstance(settings, dict) or not all(
        isinstance(setting, dict) and "value" in setting for setting in settings.values()
    ):
        raise RecipeError(Problem("bad-plan", "no `settings`; not a plan", file=str(path)))
    return Job(run_dir.absolute(), plan)


def resolve_references(value: Any) -> Any:
    """Replace `${ENV:NAME}` and `${ENV:NAME:default}` in every text of a nested value.

    RecipeError if a variable without a default is not set.
    """
    if isinstance(value, str):
        return resolve_env(value, os.environ)
    if isinstance(value, list):
        return [resolve_references(item) for item in value]
    if isinstance(value, dict):
        return {key: resolve_references(item) for key, item in value.items()}
    return value


RANKS = "EFFILAUNCH_RANKS"
"""Environment variable that the agent of one of several nodes sets, as JSON: `first`, its first rank; `addr`,
`port` of the store; `local`, such as [1, 4] for the second of four tasks on its node with one rank each."""


def take_rank() -> None:
    """Number the ranks by the node ranks; torchrun's c10d rendezvous numbers nodes in any order.

    All ranks are clients of an agent's store, so none depends on being torchrun's rank 0. They use the store
    of the rendezvous, whose port is known, instead of another one that torchrun makes on a port of its own.
    """
    said = os.environ.pop(RANKS, "")
    if not said:
        return
    found = json.loads(said)
    os.environ["RANK"] = str(found["first"] + int(os.environ["LOCAL_RANK"]))
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = found["addr"], str(found["port"])
    if found["local"] is None:
        return
    number, count = map(str, found["local"])
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["LOCAL_SIZE"] = count  # the second is DeepSpeed's name
    if "," in os.environ.get("CUDA_VISIBLE_DEVICES", ","):  # with a device of its own it is number 0
        os.environ["LOCAL_RANK"] = number


def rank() -> int:
    """This process among all processes, from the launcher's environment; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process among those of its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Number of processes of the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def copies(job: Job) -> int:
    """Data-parallel copies among the processes."""
    return world_size() // job.sharding.ranks_of_copy
