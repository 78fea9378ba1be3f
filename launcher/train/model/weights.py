"""Weights from files: GGUF dequantised into a model folder; checkpoints under the names of the modules.

transformers 5 saves many models (ViT, Swin, Mixtral, Qwen's experts, ...) under the names and in the shapes
of their first releases (modeling_utils.py save_pretrained, revert_weight_conversion). Its from_pretrained
translates them, its Trainer does not: a resumed run would continue with the weights that it began with, and
only log a warning (5.23, trainer.py _load_from_checkpoint, _load_best_model). DeepSpeed's and FSDP's own
states have the modules' names.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from launcher.errors import Problem, RecipeError, RunFailed
from launcher.machine.probe import cache_root
from launcher.train.data.store import cached
from launcher.train.progress import LEAST_S, Progress
from launcher.train.upstream.model_seams import names_not_saved


def weight_files(checkpoint: Path) -> list[Path]:
    """The files of a whole model's weights; none where the checkpoint holds an adapter or other states."""
    return sorted(checkpoint.glob("model*.safetensors"))


def read_weights(model: Any, checkpoint: Path) -> tuple[list[str], list[str]]:
    """Copy a checkpoint's weights and buffers into a model; of a tensor that is cut for ranks, its part.

    Returns the names that the checkpoint lacks, and those that the model lacks.
    """
    own = model.state_dict()
    missing, unexpected = set(own), set[str]()
    with torch.no_grad():
        for piece in translated(model, stored(checkpoint)):
            parts = {name: _part(value, own.get(name)) for name, value in piece.items()}
            result = model.load_state_dict(parts, strict=False)
            missing -= piece.keys()
            unexpected.update(result.unexpected_keys)
    return sorted(missing), sorted(unexpected)


def _part(whole: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
    """A tensor as transformers' tensor parallelism has cut the model's own; every rank reads the whole."""
    placements = getattr(own, "placements", None)
    if own is None or placements is None:
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(own, DTensor)
    return distribute_tensor(whole.to(own.device), own.device_mesh, placements, src_data_rank=None)


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All weights of a whole model, on the CPU, under the names of the files."""
    return {name: value for file in weight_files(checkpoint) for name, value in load_file(file).items()}


def translated(model: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors under the model's own names and in its shapes, one or a few at a time.

    As core_model_loading.py convert_and_load_state_dict_in_model does, which would also choose other dtypes
    and initialise what is not there. Names that the model does not have stay as they are.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    if not hasattr(model, "base_model_prefix"):  # no model of transformers, and saved under its own names
        yield from ({name: tensor} for name, tensor in tensors.items())
        return
    own, prefix = model.state_dict(), model.base_model_prefix
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    gathered: dict[str, Any] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own:
            target, pattern = rename_source_key(name, [], [], prefix, own)
        if pattern is None:
            yield {target: tensors[name]}
            continue
        rule = gathered.setdefault(target, deepcopy(by_pattern[pattern]))
        rule.add_tensor(target, name, pattern, tensors[name])
    for target in list(gathered):
        made = gathered.pop(target).convert(target, model=model, config=model.config)
        yield {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def check_missing(model: Any, missing: list[str], checkpoint: Path | None) -> None:
    """RunFailed where weights were not in a checkpoint, unless a save leaves them out: a tied weight's twin.

    checkpoint: its folder, None where nobody knows.
    """
    own = model.state_dict(keep_vars=True)
    ignored = names_not_saved(model)
    read = {id(value) for name, value in own.items() if name not in missing}
    lost = [name for name in missing if name in own and name not in ignored and id(own[name]) not in read]
    if lost:
        message = (
            f"the checkpoint lacks {len(lost)} of the model's weights, first {lost[0]}: they would keep "
        )
        message += "the values that they have now"
        hint = "continue with the release of transformers that wrote it: `versions` in its manifest.json"
        file = None if checkpoint is None else str(checkpoint)
        raise RunFailed(Problem("checkpoint-names", message, file=file, hint=hint))


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
    """Names the converted folder: SHA-256 of the file, whatever its path."""
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

    # The file holds the architecture; code next to it is not used.
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
        message = f"cannot be converted: {error}"
        raise RecipeError(
            Problem("gguf-unreadable", message, file=str(source), path="model.gguf_file")
        ) from error
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
