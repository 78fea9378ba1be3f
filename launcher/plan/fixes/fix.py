"""What a known fix is: data, plus one pure function that says what it would change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launcher.facts.hardware import Hardware
from launcher.facts.model import ModelSpec
from launcher.plan.draft import Draft

Action = Literal["set", "warn", "refuse"]


@dataclass(frozen=True, slots=True)
class Situation:
    """What a fix may look at."""

    draft: Draft
    model: ModelSpec
    hardware: Hardware
    versions: Mapping[str, str]
    """Installed versions by distribution name."""

    def get(self, dotted: str) -> Any:
        return self.draft.get(dotted)

    @property
    def has_adapter(self) -> bool:
        return self.get("adapter.type") is not None

    @property
    def quantization(self) -> str:
        """`none`, `int8`, `nf4` or `fp4`."""
        value = self.get("model.quantization")
        return str(value["type"]) if isinstance(value, dict) else "none"

    @property
    def pre_ampere(self) -> bool:
        capability = self.hardware.compute_capability
        return capability is not None and capability < (8, 0)

    @property
    def zero_stage(self) -> int | None:
        """The ZeRO stage; None for engines without stages."""
        return self.get("sharding.zero_stage") if self.get("sharding.engine") == "deepspeed" else None

    @property
    def processes(self) -> int:
        """Of the whole run. A device_map spreads one over all devices; `local` is each rank's own."""
        spread = self.get("model.device_map") not in (None, "local")
        return 1 if spread else self.hardware.num_devices


@dataclass(frozen=True, slots=True)
class Fix:
    """One known failure and what is done about it before the launch.

    `changes` returns dotted setting -> value for action `set` (empty: does not apply), and for `warn` and
    `refuse` a mapping whose keys are the settings at fault. `early` fixes run before sizes are chosen.
    Where the recipe itself says another value than a `set` fix wants, the fix refuses; one that `yields`
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
    changes: Callable[[Situation], Mapping[str, Any]]
    hint: str = ""
    early: bool = False
    yields: bool = False
