"""Prepared data on disk: keyed by what it was made from, written once, memory-mapped by every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.facts.safe_files import parse_json
from launcher.train.cached import defect
from launcher.train.job import Job

VERSION = 3
"""Part of every key: raised when the same settings would give other samples."""
RECORD = "data.json"


def content_key(parts: Mapping[str, Any]) -> str:
    """A name for data made from `parts` (JSON values)."""
    text = json.dumps({"version": VERSION, **parts}, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_digest(path: Path) -> tuple[str, int]:
    """SHA-256 of a file, and the number of its line feeds, in one pass."""
    digest, lines = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
            lines += chunk.count(b"\n")
    return digest.hexdigest(), lines


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over all that decides a tokenizer's output: its core, special tokens and chat template."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    parts = {
        "class": type(tokenizer).__name__,
        "core": core.to_str() if core is not None else sorted(tokenizer.get_vocab().items()),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": str(tokenizer.chat_template),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class SampleWriter:
    """Writes columns of samples to one Arrow stream file, a batch at a time, with flat memory.

    Lists are int32 token ids or labels, single numbers int64; pictures are a path or the bytes of a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples = 0
        self._writer: Any = None

    def write(self, columns: Mapping[str, Any]) -> None:
        """Append samples: what `arrow_columns` made, or the lists that it takes. All have the same length."""
        import pyarrow as pa

        count = len(next(iter(columns.values()), ()))
        if count == 0:
            return
        made = arrow_columns(columns)
        if self._writer is None:
            schema = pa.schema([(name, column.type) for name, column in made.items()])
            self._writer = pa.ipc.new_stream(str(self.path), schema)
        self._writer.write_batch(pa.record_batch(list(made.values()), names=list(made)))
        self.samples += count

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()


def arrow_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of at least one sample as Arrow arrays: a quarter of the lists' memory, and sent between
    processes as they lie. What is one already stays."""
    import pyarrow as pa

    return {
        name: values if isinstance(values, pa.Array) else pa.array(values, type=_arrow_type(name, values))
        for name, values in columns.items()
    }


def _arrow_type(name: str, values: Sequence[Any]) -> Any:
    import pyarrow as pa

    if name == "image_path":
        return pa.string()
    if name == "image_bytes":
        return pa.large_binary()
    return pa.list_(pa.int32()) if isinstance(values[0], list) else pa.int64()


def open_samples(path: Path) -> Any:
    """The samples of a file as a memory-mapped `datasets.Dataset`."""
    from datasets import Dataset

    return Dataset.from_file(str(path))


def read_record(job: Job, *, rehash: bool = False) -> dict[str, Any]:
    """What `prepare` left in the run directory; RecipeError when it or its cache is gone or damaged.

    rehash: read the samples for that, which `prepare` does before each run.
    """
    path = job.run_dir / RECORD
    hint = f"prepare it again: python -m launcher.train.prepare {job.run_dir}"
    try:
        record: Any = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"the data of this run is not prepared: {error}"
        raise RecipeError(Problem("data-not-prepared", message, file=str(path), hint=hint)) from error
    if not isinstance(record, dict):
        message = "the data of this run is not prepared: no JSON object"
        raise RecipeError(Problem("data-not-prepared", message, file=str(path), hint=hint))
    folder = record.get("folder")
    wrong = None if folder is None else defect(Path(folder), "prepared data", rehash=rehash)
    if wrong is not None:
        message = f"the prepared data in the cache is gone or damaged: {wrong}"
        raise RecipeError(Problem("data-not-prepared", message, file=folder, hint=hint))
    return record
