"""Find what the pickles of a checkpoint would call, without running them.

transformers and peft read weights, optimizer and schedule with weights_only=True, which runs nothing.
DeepSpeed reads its states with weights_only=False (checkpoint_engine/torch_checkpoint_engine.py), and FSDP's
sharded checkpoints have a plain pickle next to the shards (torch/distributed/checkpoint/filesystem.py
read_metadata): whoever can write such a file can run code in every process that resumes from it.
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
        # Plain data, restored from attributes: the loss scale, the position of a tensor in the flat one.
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
"""Files of the checkpoint's own folder; unsafe rng_state*.pth are renamed, training_args.bin is not read."""
_SUFFIXES = (".pt", ".pth", ".bin")


def save_members_by_value(enumeration: tuple[str, str]) -> None:
    """Before the first save: let checkpoints hold members of an enumeration as every Python can read them.

    enumeration: (module, name).

    Python 3.11.2 (of Debian 12) pickles a member as a call of getattr, with which a pickle can reach
    everything: `check_pickles` refuses it. Later versions pickle the value.
    """
    module, name = enumeration
    getattr(importlib.import_module(module), name).__reduce_ex__ = _by_value


def _by_value(member: enum.Enum, _protocol: int) -> tuple[type[enum.Enum], tuple[Any]]:
    return type(member), (member.value,)


def check_pickles(checkpoint: Path) -> None:
    """RecipeError, with the file and the name, if loading a checkpoint would call more than it needs.

    Reads names only: no tensor is loaded and nothing imported.
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
    """Files that are read of a checkpoint: known names, and everything in its folders."""
    yield from (path for path in map(checkpoint.joinpath, _READ) if path.is_file())
    for folder in sorted(path for path in checkpoint.iterdir() if path.is_dir()):
        for place, _, names in os.walk(folder, followlinks=True):
            yield from (Path(place, name) for name in sorted(names))


def _check_tag(checkpoint: Path, file: Path) -> None:
    """DeepSpeed joins the text of this file to the folder; a path would lead out of it."""
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
    """Finds only the classes that describe shards."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OF_SHARDS or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"reading it would call {module}.{name}")


def _check_shards(path: Path) -> None:
    """The description of sharded tensors, and the objects among them, which torch unpickles."""
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
            f"this file of the checkpoint is not loaded: {why}",
            file=str(path),
            hint="resume from your own checkpoint, in a folder that nobody else can write to",
        )
    )
