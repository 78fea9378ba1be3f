"""Rows of data sets of the hub, which `datasets` streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.rows.files import without_none
from launcher.rows.sources import Row, counted_rows
from launcher.rows.splits import TRAIN


def _stream(source: Mapping[str, Any], cache_dir: Path | str | None) -> Any:
    from datasets import load_dataset

    return load_dataset(
        source["path"],
        name=source.get("name"),
        split=source.get("split") or TRAIN,
        revision=source.get("revision"),
        cache_dir=None if cache_dir is None else str(cache_dir),
        streaming=True,
    )


def hub_features(source: Mapping[str, Any], cache_dir: Path | str | None) -> dict[str, Any]:
    """The features of a data set of the hub whose rows were read, as datasets writes them; {} without any."""
    features = _stream(source, cache_dir).features
    found: dict[str, Any] = {} if features is None else features.to_dict()
    return found


def hub_rows(source: Mapping[str, Any], cache_dir: Path | str | None) -> Iterator[Row]:
    """Rows of a data set of the hub (`path`, `split`, `name`, `revision`), streamed, as `counted_rows`.

    RecipeError where there is no such data set; MachineError where the hub cannot be reached.
    """
    yield from counted_rows(source, _streamed_rows(source, cache_dir))


def _streamed_rows(source: Mapping[str, Any], cache_dir: Path | str | None) -> Iterator[Row]:
    from datasets.exceptions import DatasetsError

    reference = source["path"]
    try:
        rows = _stream(source, cache_dir)
        # Images stay bytes. iter() is not split over dataloader workers, as __iter__ is: a stream deals
        # its rows out itself.
        for number, batch in enumerate(rows.decode(False).iter(batch_size=1), start=1):
            values = {key: column[0] for key, column in batch.items()}
            # Top-level None is a missing value; nested, it fills up what an object lacks.
            yield Row({key: _own_keys(value) for key, value in values.items()}, reference, number)
    except (DatasetsError, FileNotFoundError, ValueError) as error:
        hint = "check the id, `split`, `name` and `revision`; a gated data set needs HF_TOKEN"
        raise RecipeError(Problem("hub-data", _first_line(error), file=reference, hint=hint)) from error
    except OSError as error:
        hint = "run `effilaunch prepare` where there is a network, or download it and name the folder"
        problem = Problem("hub-unreachable", _first_line(error), file=reference, hint=hint)
        raise MachineError(problem) from error


def _own_keys(value: Any) -> Any:
    if isinstance(value, dict) and value.get("bytes", b"") is None and "://" in str(value.get("path")):
        import fsspec

        with fsspec.open(value["path"], "rb") as stream:  # an image of which only the address came
            return {"bytes": stream.read(), "path": value["path"]}
    return without_none(value)


def _first_line(error: Exception) -> str:
    cause = error.__cause__ or error
    return (str(cause).splitlines() or [type(cause).__name__])[0]
