"""What a known fix is: data, plus one pure function of what it would change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from launcher.engines import engine_of
from launcher.engines.engine import Engine
from launcher.machine.hardware import AMPERE, Hardware
from launcher.models.model import ModelSpec
from launcher.plan.draft import Draft
from launcher.plan.settings import HasSettings, Settings

Action = Literal["set", "warn", "refuse"]


@dataclass(frozen=True, slots=True)
class Situation(HasSettings):
    """What a fix may look at."""

    draft: Draft
    spec: ModelSpec
    hardware: Hardware
    versions: Mapping[str, str]
    """Installed versions by distribution name."""

    @property
    def settings(self) -> Settings:
        return self.draft.settings

    @property
    def names(self) -> Collection[str]:
        return self.draft.names

    @property
    def quantization(self) -> str:
        """`none`, `int8`, `nf4` or `fp4`."""
        return self.model.quantization_type

    @property
    def pre_ampere(self) -> bool:
        capability = self.hardware.compute_capability
        return capability is not None and capability < AMPERE

    @property
    def engine(self) -> Engine:
        return engine_of(self)

    @property
    def processes(self) -> int:
        """Of the run. A device_map spreads one over all devices; `local` is each rank's own."""
        spread = self.model.device_map not in (None, "local")
        return 1 if spread else self.hardware.num_devices


@dataclass(frozen=True, slots=True)
class Fix:
    """One known failure and what is done about it before the launch.

    `changes` returns dotted setting -> value for action `set` (empty: does not apply), and for `warn` and
    `refuse` a mapping whose keys are the settings at fault. `early` fixes run before sizes are chosen.
    Where the recipe itself has another value than a `set` fix wants, the fix refuses; one that `yields`
    warns and leaves the recipe's value.
    """

    id: str
    title: str
    condition: str
    action: Action
    reason: str
    source: str
    versions: str
    """The installed versions that it is for, e.g. `transformers>=5,<6`; `*` for all."""
    changes: Callable[[Situation], Mapping[str, object]]
    hint: str = ""
    early: bool = False
    yields: bool = False
