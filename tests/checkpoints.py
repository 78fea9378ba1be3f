"""Checkpoints as a finished save leaves them, without a Trainer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONTENT = {"trainer_state.json": b"{}", "model.safetensors": bytes(1000), "global_step/optim.pt": b"states"}


def checkpoint(folder: Path, step: int, content: Mapping[str, bytes] = CONTENT, **changed: Any) -> Path:
    """`folder`/checkpoint-STEP, whole; `changed`: keys of the manifest that say something else."""
    made = folder / f"checkpoint-{step}"
    files = {}
    for name, data in content.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(data)
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {
        "schema_version": 1,
        "step": step,
        "world_size": 1,
        "files": files,
        "bytes": sum(map(len, content.values())),
        "seconds": 0.1,
        "data": None,
        "versions": {"torch": "2.13.0"},
    }
    (made / "manifest.json").write_text(json.dumps({**manifest, **changed}))
    return made
