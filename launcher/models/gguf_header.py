"""Read the header of a GGUF file: metadata and tensor shapes, never the tensors.

Takes milliseconds even for large vocabularies: the tokenizer's string arrays are skipped.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError

_STRING, _ARRAY = 8, 9
# GGUF value type -> struct format (little-endian, no padding); 7 is a boolean.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LONGEST_LIST = 16
"""Only the length of longer arrays (a tokenizer's) is kept."""

_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
}
# GGUF architecture -> (model_type, class).
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`metadata`: key to value (long arrays: their length); `tensors`: name to shape."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]


class _Cursor:
    """Reads little-endian values one after another from a buffer."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 4

    def scalar(self, fmt: str) -> Any:
        (value,) = struct.unpack_from("<" + fmt, self.data, self.at)
        self.at += struct.calcsize("<" + fmt)
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        start = self.at
        self.at += length
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def skip_texts(self, count: int) -> None:
        read = struct.Struct("<Q").unpack_from
        data, at = self.data, self.at
        for _ in range(count):
            at += 8 + read(data, at)[0]
        self.at = at

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        return self.scalar(_SCALARS[kind])

    def array(self) -> Any:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count <= _LONGEST_LIST:
            return [self.value(kind) for _ in range(count)]
        if kind == _STRING:
            self.skip_texts(count)
        elif kind == _ARRAY:
            for _ in range(count):
                self.array()
        else:
            self.at += count * struct.calcsize("<" + _SCALARS[kind])
        return count


def _tensors(cursor: _Cursor, count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for _ in range(count):
        name = cursor.text()
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))
        cursor.at += 4 + 8  # storage type, offset of the data
        yield name, shape


def read_gguf_header(path: Path) -> GgufHeader:
    """Metadata and tensor shapes of a GGUF file (version 2 or 3); RecipeError for another file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF":
                raise _unreadable(path, "it does not start with the magic number GGUF")
            cursor = _Cursor(data)
            version = cursor.scalar("I")
            if version not in (2, 3):
                raise _unreadable(path, f"version {version}, expected 2 or 3")
            tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
            metadata = {}
            for _ in range(key_count):
                key = cursor.text()
                metadata[key] = cursor.value(cursor.scalar("I"))
            return GgufHeader(metadata, dict(_tensors(cursor, tensor_count)))
    except (OSError, ValueError, struct.error, KeyError, IndexError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def _unreadable(path: Path, why: str) -> RecipeError:
    message = f"cannot read a GGUF header from {path}: {why}"
    return RecipeError(Problem("bad-gguf", message, path="model.gguf_file"))


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """The configuration with transformers' keys; RecipeError for an unknown architecture."""
    metadata = header.metadata
    name = str(metadata.get("general.architecture"))
    if name not in _ARCHITECTURES:
        message, hint = (
            f"GGUF architecture {name!r} is not supported",
            f"supported: {', '.join(_ARCHITECTURES)}",
        )
        raise RecipeError(Problem("unknown-architecture", message, path="model.gguf_file", hint=hint))
    model_type, architecture = _ARCHITECTURES[name]
    config: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
    for key, ours in _COMMON.items():
        if (value := metadata.get(f"{name}.{key}")) is not None:
            config[ours] = value
    if "vocab_size" not in config and "token_embd.weight" in header.tensors:
        config["vocab_size"] = header.tensors["token_embd.weight"][-1]
    # A tied head is not stored.
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    return config


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Configuration of the model in a GGUF file, from its header."""
    return gguf_config(read_gguf_header(path))
