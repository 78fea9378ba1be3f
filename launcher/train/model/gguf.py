"""GGUF checkpoints: dequantised once into an ordinary model folder, then loaded from there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.facts.probe import cache_root
from launcher.train.data.store import cached
from launcher.train.progress import LEAST_S, Progress


def converted(root: str, gguf_file: str, hub_options: dict[str, Any]) -> Path:
    """Folder with the dequantised model and its tokenizer, converting on first use.

    root: folder that holds `gguf_file`, or a hub id. RecipeError when the file is absent or cannot be
    converted; safe in several processes and MachineError as `cached`.
    """
    source = _locate(root, gguf_file, hub_options)
    target = cache_root() / "gguf" / _key(source)

    def build(folder: Path) -> None:
        with Progress(f"Converting {source.name}", least_s=LEAST_S):
            _convert(source, folder)

    # Every rank asks, and the weights may have 100 GB: they are read again only after somebody touched them.
    cached(target, "converted GGUF model", build, rehash=False)
    return target


def _locate(root: str, gguf_file: str, hub_options: dict[str, Any]) -> Path:
    folder = Path(root)
    if folder.is_dir():
        path = folder / gguf_file
        if not path.is_file():
            raise RecipeError(
                Problem("gguf-missing", "no such GGUF file", file=str(path), path="model.gguf_file")
            )
        return path
    from transformers.utils import cached_file

    options = {name: hub_options[name] for name in ("revision", "cache_dir") if name in hub_options}
    try:
        return Path(str(cached_file(root, gguf_file, **options)))
    except OSError as error:
        raise RecipeError(
            Problem("gguf-missing", f"cannot get {gguf_file} of {root}: {error}", path="model.gguf_file")
        ) from error


def _key(source: Path) -> str:
    """Names the converted folder: SHA-256 of the file, wherever it lies and whatever it is called."""
    return _digest(source.resolve())[:32]


def _digest(source: Path) -> str:
    """SHA-256 of a file; hashed once for each state (place, size, times, inode) that it was in."""
    state = source.stat()
    identity = f"{source}:{state.st_size}:{state.st_mtime_ns}:{state.st_ctime_ns}:{state.st_ino}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:32]
    known = cache_root() / "gguf" / "digests" / name
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = known.read_text(encoding="ascii").strip()
        if re.fullmatch("[0-9a-f]{64}", found):
            return found
    digest = _hashed(source, state.st_size)
    with contextlib.suppress(OSError):  # the next start hashes it again
        known.parent.mkdir(parents=True, exist_ok=True)
        aside = known.with_name(f".{name}-{os.getpid()}")
        aside.write_text(digest + "\n", encoding="ascii")
        aside.replace(known)
    return digest


def _hashed(source: Path, size: int) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with (
        source.open("rb", buffering=0) as stream,
        Progress(f"Reading {source.name}", size, "B", least_s=LEAST_S) as progress,
    ):
        while piece := stream.readinto(buffer):
            digest.update(buffer[:piece])
            progress.add(piece)
    return digest.hexdigest()


def _convert(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # The file holds the architecture; code that lies beside it has no part in reading it.
    name: dict[str, Any] = {"gguf_file": source.name, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), **name)
        model = AutoModelForCausalLM.from_pretrained(
            str(source.parent),
            **name,
            quantization_config=GgufConfig(dequantize=True),
            dtype="float32",
        )
    except (ValueError, KeyError, OSError) as error:
        raise RecipeError(
            Problem(
                "gguf-unreadable",
                f"cannot be converted: {error}",
                file=str(source),
                path="model.gguf_file",
            )
        ) from error
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
