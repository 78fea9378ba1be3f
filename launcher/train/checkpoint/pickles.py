"""What the pickles of a checkpoint would call, found without running them.

transformers and peft read weights, optimizer and schedule with weights_only=True, which runs nothing.
DeepSpeed reads its states with weights_only=False (checkpoint_engine/torch_checkpoint_engine.py), and FSDP's
sharded checkpoints hold a plain pickle beside the shards (torch/distributed/checkpoint/filesystem.py
read_metadata): whoever can write such a file runs code in every process that resumes from it.
"""

from __future__ import annotations

import enum
import importlib
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from launcher.errors import Problem, RecipeError

_OF_DEEPSPEED = frozenset(
    {
        # Plain data, made anew from attributes: the scale of the loss, where a tensor lies in the flat one.
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
        # An enumeration: a number becomes one of its members.
        "deepspeed.runtime.zero.config.ZeroStageEnum",
    }
)
_OF_SHARDS = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
            "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
        )
    }
    | {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("torch", "device"),
        ("collections", "OrderedDict"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("builtins", "set"),
    }
)  # fmt: skip
_DTYPES = frozenset(name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype))
_READ = (
    "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "pytorch_model.bin", "adapter_model.bin",
)  # fmt: skip
"""Of the checkpoint's own folder. rng_state*.pth is put aside where it is not safe, and nobody reads
training_args.bin."""
_SUFFIXES = (".pt", ".pth", ".bin")


def save_members_by_value(enumeration: tuple[str, str]) -> None:
    """Before the first save: let checkpoints hold members of an enumeration as every Python can read them.

    enumeration: (module, name).

    Python 3.11.2 (Debian 12's) pickles a member as a call of getattr, by which a pickle reaches everything:
    `check_pickles` refuses it. Later ones pickle its value, as is done here.
    """
    module, name = enumeration
    getattr(importlib.import_module(module), name).__reduce_ex__ = _by_value


def _by_value(member: enum.Enum, _protocol: int) -> tuple[type[enum.Enum], tuple[Any]]:
    return type(member), (member.value,)


def check_pickles(checkpoint: Path) -> None:
    """RecipeError, with the file and the name, where reading a checkpoint would call more than it needs.

    Reads names only: no tensor, and nothing of what is named is imported.
    """
    for tag in ("latest", "latest_universal"):
        _check_tag(checkpoint, checkpoint / tag)
    for path in _files(checkpoint):
        if path.name == ".metadata":
            _check_shards(path)
        elif path.suffix in _SUFFIXES:
            with path.open("rb") as stream:
                _check_saved(stream, path)


def _files(checkpoint: Path) -> Iterator[Path]:
    """What is read of a checkpoint: known names beside its weights, and everything in its folders."""
    yield from (path for path in map(checkpoint.joinpath, _READ) if path.is_file())
    for folder in sorted(path for path in checkpoint.iterdir() if path.is_dir()):
        for place, _, names in os.walk(folder, followlinks=True):
            yield from (Path(place, name) for name in sorted(names))


def _check_tag(checkpoint: Path, file: Path) -> None:
    """DeepSpeed joins the word in this file to the folder, and a path would lead it out of there."""
    if not file.is_file():
        return
    tag = file.read_text("utf-8", errors="replace").strip()
    if tag != Path(tag).name or tag in ("", "..", "."):
        raise _refusal(file, f"it leads to {tag!r}, out of the checkpoint")


def _check_saved(stream: Any, path: Path) -> None:
    """One object of torch.save."""
    try:
        unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(stream)) - _OF_DEEPSPEED
    except Exception as error:  # no zip file, torchscript, or an instruction that torch.save never writes
        raise _refusal(path, f"torch.save did not write it: {error}") from error
    if unsafe:
        raise _refusal(path, f"reading it would call {', '.join(sorted(unsafe))}")


class _Careful(pickle.Unpickler):
    """Finds nothing but what describes shards."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OF_SHARDS or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"reading it would call {module}.{name}")


def _check_shards(path: Path) -> None:
    """The description of sharded tensors, and the objects among them, which torch unpickles as they are."""
    try:
        with path.open("rb") as stream:
            metadata = _Careful(stream).load()
        entries = [(index.fqn, info) for index, info in metadata.storage_data.items()]
        kinds = {name: type(entry).__name__ for name, entry in metadata.state_dict_metadata.items()}
    except Exception as error:
        raise _refusal(path, str(error)) from error
    for name, info in entries:
        if kinds.get(name) == "TensorStorageMetadata":  # read with weights_only=True
            continue
        if info.relative_path != Path(info.relative_path).name:
            raise _refusal(path, f"it leads to {info.relative_path!r}, out of the checkpoint")
        shard = path.parent / info.relative_path
        with shard.open("rb") as stream:
            stream.seek(info.offset)
            _check_saved(io.BytesIO(stream.read(info.length)), shard)


def _refusal(path: Path, why: str) -> RecipeError:
    return RecipeError(
        Problem(
            "unsafe-pickle",
            f"this file of the checkpoint is not read: {why}",
            file=str(path),
            hint="resume from a checkpoint of your own, in a folder that nobody else can write to",
        )
    )
