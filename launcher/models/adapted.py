"""What an adapter is put on, and what it trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """What an adapter is put on."""

    params: int
    """Parameters of the matrices that have an adapter, or are trained in full beside it."""
    experts: bool | None
    """Whether experts are among them; None: there are none."""
    router: bool | None


@dataclass(frozen=True, slots=True)
class Adapted:
    """What an adapter trains."""

    params: int
    """Trained parameters: adapters, modules trained in full, a classifier."""
    paths: tuple[str, ...] | None
    """Paths of the adapted modules, `{}` for the layer's index; None: `all-linear`."""
    rank: int
    """Mean rank over the modules of `paths`, at least 1."""
    uneven: bool = False
    """Layers differ in whether they have an adapter, or in its rank."""
    whole: tuple[str, ...] = ()
    """Paths of modules that are trained in full (modules_to_save)."""
    reach: Reach | None = None
    """Where peft itself was asked."""
