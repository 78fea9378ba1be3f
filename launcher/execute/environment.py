"""What the environment says that libraries no longer read, or would stop at: mended before the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.facts.wandb_server import wandb_obstacle
from launcher.knowledge.doctor.needs import trackers

_TRUE = {"1", "true", "yes", "on"}
_OLD_CACHES = ("TRANSFORMERS_CACHE", "PYTORCH_TRANSFORMERS_CACHE", "PYTORCH_PRETRAINED_BERT_CACHE")
_NEW_CACHES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME")
_WANDB_IDENTITIES = ("WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE")


def mend_environment(environ: Mapping[str, str], report_to: Any) -> tuple[dict[str, str], list[str]]:
    """(variables to set on top, what to tell the user).

    environ: what the workers would get. report_to: trainer.report_to, a name or a list of names. Nothing that
    is set already is replaced. Where wandb is asked for, its server is, too, for a few seconds.
    """
    added: dict[str, str] = {}
    notes: list[str] = []
    old = next((name for name in _OLD_CACHES if environ.get(name)), None)
    if old is not None and not any(environ.get(name) for name in _NEW_CACHES):
        added["HF_HUB_CACHE"] = environ[old]
        notes.append(f"{old} is no longer read: its folder is used as HF_HUB_CACHE")
    if "wandb" not in trackers(report_to):
        return added, notes
    if environ.get("WANDB_DISABLED", "").lower() in _TRUE:
        notes.append(
            "WANDB_DISABLED is no longer read: the run reports to wandb; trainer.report_to: none stops it"
        )
    chosen = any(environ.get(name) for name in _WANDB_IDENTITIES)
    if not chosen and (obstacle := wandb_obstacle(environ)) is not None:
        added["WANDB_MODE"] = "offline"
        notes.append(
            f"{obstacle}: the run is logged offline (WANDB_MODE=offline); `wandb sync` uploads it later"
        )
    return added, notes
