"""A plan as an earlier run's plan.json holds it: settings, ranks and batch, typed as a plan's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

from launcher.plan.settings import HasSettings, Settings
from launcher.recipe.env import Kept
from launcher.tasks import TASKS

_BEFORE: Mapping[str, object] = {
    "sharding.tp_size": 1,
    "sharding.sp_size": 1,
    "sharding.cp_size": 1,
    "trainer.use_liger_kernel": False,
    "model.loss": "full",
    "model.compile_blocks": False,
    "model.vocab_multiple": None,
    "model.freeze": [],
    "model.image_sizes": {},
    "adapter.cast_input_dtype_enabled": True,
    "adapter.autocast_adapter_dtype": True,
    "data.loss_on_inserted": True,
    "data.max_dropped": 1.0,
    "data.special_tokens_in_text": None,
    "data.problem_type": "single_label_classification",
}


def before(settings: Mapping[str, Any]) -> dict[str, object]:
    """What a plan did before there was such a setting; the worker reads older plans so, too.

    settings: those of plan.json.
    """
    name = settings.get("task", {}).get("value")
    counted = any(task.name == name and task.counted_by_trainer for task in TASKS)
    return {**_BEFORE, "runtime.loss_over": "targets" if counted else "micro-batch"}


class StoredPlan(HasSettings):
    """plan.json, parsed. Reading a setting that it lacks gives its default, or raises AttributeError."""

    def __init__(self, plan: Mapping[str, Any], kept: Collection[Kept] = ()) -> None:
        """KeyError or TypeError, also later, where it is not a plan's.

        kept: its references with their values, for `has_value_of`.
        """
        self._plan = plan
        self._values = {one.text: one.value for one in kept}
        self._settings: Mapping[str, Mapping[str, Any]] = plan["settings"]

    @property
    def ranks(self) -> int:
        """Processes."""
        hardware = self._plan["hardware"]
        return int(hardware["num_nodes"]) * int(hardware["devices_per_node"])

    @property
    def samples_of_rank(self) -> int:
        """Samples of a rank in one step."""
        batch = self._plan["batch"]
        return int(batch["micro"]) * int(batch["accumulation"])

    @property
    def names(self) -> Collection[str]:
        return self._settings.keys() | self._before.keys()

    @cached_property
    def _before(self) -> Mapping[str, object]:
        return before(self._settings)

    @cached_property
    def settings(self) -> Settings:
        settings = Settings.empty()
        for name in self.names:
            with suppress(KeyError):  # a setting of another version, which nothing reads
                settings.put(name, self.at(name))
        return settings

    def at(self, dotted: str) -> object:
        """The value of a setting, also of one that no section has; None where it is absent."""
        stored = self._settings.get(dotted)
        return self._before.get(dotted) if stored is None else self._told_apart(stored["value"])

    def written(self, dotted: str) -> object:
        """The value of a setting as plan.json has it; None where it is absent."""
        return self._settings.get(dotted, {}).get("value")

    def has_value_of(self, now: StoredPlan, dotted: str) -> bool:
        """Whether a setting has the value of `now`'s, by a reference to the environment or in clear."""
        return _same(self.written(dotted), now.written(dotted), self._digests, now._values)

    @property
    def is_of_0_2_0(self) -> bool:
        """Whether 0.2.0 or an earlier version wrote it."""
        return "references" not in self._plan

    @property
    def finished_by(self) -> str:
        """The version that continues its run where this one may not."""
        return "effilaunch 0.2.0" if self.is_of_0_2_0 else "the version that began it"

    @property
    def _digests(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self._plan.get("references", {})
        return found

    def _told_apart(self, value: Any) -> Any:
        """The value with the digest of each reference, so that one whose variable has changed differs."""
        if isinstance(value, str):
            digest = self._digests.get(value)
            return value if digest is None else f"{value}#{digest}"
        if isinstance(value, dict):
            return {key: self._told_apart(item) for key, item in value.items()}
        return [self._told_apart(item) for item in value] if isinstance(value, list) else value

    def by(self, dotted: str) -> str:
        """What set it: `recipes/x.yaml:12`, `--set`, …"""
        return str(self._settings.get(dotted, {}).get("by", ""))


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
