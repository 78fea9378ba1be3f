"""A recipe's model on the hub: whether it is in the cache, and whether the hub would hand it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib import error as urlerror
from urllib import request as urlrequest

from launcher.facts.machine_disk import hub_token
from launcher.facts.machine_network import HUB_SECONDS

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
    endpoint = environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = urlrequest.Request(f"{endpoint}/{name}/resolve/{revision}/config.json", method="HEAD")
    if token := hub_token(environ):
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urlrequest.urlopen(request, timeout=HUB_SECONDS):
            return "open"
    except urlerror.HTTPError as refused:
        refused.close()
        return {401: "refused", 403: "refused", 404: "absent"}.get(refused.code, "unknown")
    except (OSError, ValueError, HTTPException):
        return "unknown"
