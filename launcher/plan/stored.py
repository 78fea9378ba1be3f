"""plan.json as it is read: by the worker (train/job.py), and to compare a plan with an earlier one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from launcher.errors import RecipeError
from launcher.plan.settings import HasSettings, Settings, declared_keys
from launcher.recipe.env import Kept
from launcher.recipe.keys import ALWAYS
from launcher.tasks import TASKS

OWN_COMMAND = "own command"
"""`kind` in the plan.json of a user's own command, of which nothing is planned."""


def before(settings: Mapping[str, Any]) -> dict[str, object]:
    """What a plan did before there was such a setting; the worker reads older plans so, too.

    settings: those of plan.json.
    """
    name = settings.get("task", {}).get("value")
    counted = any(task.name == name and task.counted_by_trainer for task in TASKS)
    found = {name: key.before for name, key in declared_keys().items() if key.before is not ALWAYS}
    return {**found, "runtime.loss_over": "targets" if counted else "micro-batch"}


class ReadPlan(HasSettings):
    """The settings of a plan.json; those that older plans lack have the values that these plans had."""

    plan: Mapping[str, Any]

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys() | self._before.keys()

    @cached_property
    def settings(self) -> Settings:
        """Reading one that the plan lacks gives its default, or the error of `absent`."""
        settings = Settings.empty(self.absent)
        for name, value in self._before.items():
            settings.put(name, value)
        for name, stored in self._stored.items():
            try:
                settings.put(name, self.read(stored["value"]))
            except RecipeError:
                settings.remove(name)
            except KeyError:  # a setting of another version, which nothing reads
                continue
        return settings

    def read(self, value: Any) -> Any:
        """A value of the plan. RecipeError where it cannot be had, which `absent` raises when it is read."""
        return value

    def absent(self, dotted: str) -> Exception:
        """The error of reading a setting that the plan lacks."""
        return AttributeError(f"the plan has no setting {dotted}")

    @property
    def _stored(self) -> Mapping[str, Mapping[str, Any]]:
        found: Mapping[str, Mapping[str, Any]] = self.plan["settings"]
        return found

    @cached_property
    def _before(self) -> Mapping[str, object]:
        return before(self._stored)


class StoredPlan(ReadPlan):
    """The plan of a checkpoint or of another run, which is compared with one."""

    def __init__(self, plan: Mapping[str, Any], kept: Collection[Kept] = ()) -> None:
        """KeyError or TypeError, also later, where it is not a plan's.

        kept: its references with their values, for `has_value_of`.
        """
        self.plan = plan
        self._values = {one.text: one.value for one in kept}
        _ = self._stored

    @property
    def ranks(self) -> int:
        """Processes."""
        hardware = self.plan["hardware"]
        return int(hardware["num_nodes"]) * int(hardware["devices_per_node"])

    @property
    def samples_of_rank(self) -> int:
        """Samples of a rank in one step."""
        batch = self.plan["batch"]
        return int(batch["micro"]) * int(batch["accumulation"])

    def at(self, dotted: str) -> object:
        """The value of a setting, also of one that no section has; None where it is absent."""
        stored = self._stored.get(dotted)
        return self._before.get(dotted) if stored is None else self.read(stored["value"])

    def written(self, dotted: str) -> object:
        """The value of a setting as plan.json has it; None where it is absent."""
        return self._stored.get(dotted, {}).get("value")

    def has_value_of(self, now: StoredPlan, dotted: str) -> bool:
        """Whether a setting has the value of `now`'s, by a reference to the environment or in clear."""
        return _same(self.written(dotted), now.written(dotted), self._digests, now._values)

    @property
    def is_of_0_2_0(self) -> bool:
        """Whether 0.2.0 or an earlier version wrote it."""
        return "references" not in self.plan

    @property
    def finished_by(self) -> str:
        """The version that continues its run where this one may not."""
        return "effilaunch 0.2.0" if self.is_of_0_2_0 else "the version that began it"

    @property
    def _digests(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.plan.get("references", {})
        return found

    def read(self, value: Any) -> Any:
        """The value with the digest of each reference, so that one whose variable has changed differs."""
        if isinstance(value, str):
            digest = self._digests.get(value)
            return value if digest is None else f"{value}#{digest}"
        if isinstance(value, dict):
            return {key: self.read(item) for key, item in value.items()}
        return [self.read(item) for item in value] if isinstance(value, list) else value

    def by(self, dotted: str) -> str:
        """What set it: `recipes/x.yaml:12`, `--set`, …"""
        return str(self._stored.get(dotted, {}).get("by", ""))


def _same(old: Any, new: Any, digests: Mapping[str, str], values: Mapping[str, str]) -> bool:
    """digests: of the references of `old`; values: of those of `new`."""
    if isinstance(old, str) and isinstance(new, str):
        value, digest = values.get(new, new), digests.get(old)
        return old == value if digest is None else Kept(value, old).digest == digest
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_same(old[key], new[key], digests, values) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(
            _same(*pair, digests, values) for pair in zip(old, new, strict=True)
        )
    return bool(old == new)
