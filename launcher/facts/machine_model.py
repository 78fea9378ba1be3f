"""A recipe's model on the hub: whether it is in the cache, and whether the hub would hand it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.facts.hub import ask_config

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model that is named by its hub id."""

    name: str
    cached: bool
    """Whether weights lie in the cache; whether all of them do only the download knows."""
    access: str
    """open | refused (gated or private, to this login) | absent | unknown (the hub was not asked)"""


def read_hub_model(
    name: str, revision: str, cache: Path, environ: Mapping[str, str], *, ask: bool
) -> ModelFacts:
    """Look into the cache, and ask the hub for the model's configuration when `ask`."""
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    cached = any(any(snapshots.glob(f"*/{pattern}")) for pattern in WEIGHTS)
    return ModelFacts(name, cached, _access(name, revision, environ) if ask else "unknown")


def _access(name: str, revision: str, environ: Mapping[str, str]) -> str:
    answer = ask_config(name, revision, environ, method="HEAD")
    by_status = {401: "refused", 403: "refused", 404: "absent"}
    return "open" if answer.state == "found" else by_status.get(answer.status or 0, "unknown")
