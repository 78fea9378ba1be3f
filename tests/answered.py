"""Answers of the tracing process, kept for all tests of a checkout: each request is traced once.

Tracing a model of images takes up to 70 CPU seconds, and several tests plan the same shipped recipe. An
answer is kept under everything that it depends on: the request, the versions, all modules of launcher/train/.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import launcher

TRAIN = Path(launcher.__file__).parent / "train"
PACKAGES = ("torch", "transformers", "peft")
SLOWLY = ("gemma3_4b_vision_lora", "qwen3_vl_8b_lora_24gb")
"""Recipes whose model is traced for most of a minute; `make test` traces a smaller model of images."""


def recipes(paths: Iterable[Path]) -> list[Any]:
    """Recipes as parameters of a test that plans them; CI plans all of them."""
    always = pytest.mark.slow(share=1)
    return [pytest.param(path, id=path.stem, marks=always if path.stem in SLOWLY else ()) for path in paths]


@cache
def versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


@cache
def surroundings(folder: Path = TRAIN) -> str:
    """Digest of what every trace depends on: versions, and the modules below `folder`."""
    found = hashlib.sha256(json.dumps(versions()).encode())
    for module in sorted(folder.rglob("*.py")):
        found.update(str(module.relative_to(folder)).encode() + b"\0" + module.read_bytes() + b"\0")
    return found.hexdigest()


def answering(
    ask: Callable[[Mapping[str, Any], str], dict[str, Any]], folder: Path
) -> Callable[..., dict[str, Any]]:
    """`ask_child` with its answers in `folder`. Who asks what another process traces waits for it."""

    def answered(request: Mapping[str, Any], python: str, *_say: Any) -> dict[str, Any]:
        # Its name: forks are started from another folder in each session.
        text = json.dumps([request, Path(python).name, surroundings()], sort_keys=True)
        path = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        folder.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                written = path.with_suffix(".new")
                written.write_text(json.dumps(ask(request, python)))
                written.replace(path)
            found: dict[str, Any] = json.loads(path.read_text())
            return found

    return answered
