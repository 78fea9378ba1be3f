"""Rules between the task, its rows and how they become samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import Problem
from launcher.recipe.data_paths import is_hub_id, is_url
from launcher.recipe.suggestions import close_key, describe
from launcher.recipe.vocabulary import METRICS, TASK_FORMATS
from launcher.tasks import DEFAULT_TASK, FORMATS, TASKS, task_named
from launcher.tasks.task import OPTIONAL_DATA_KEYS, Task

_HUB_ONLY = ("name", "split", "revision")
# keys that mean nothing where no text becomes tokens
_TOKEN_KEYS = (
    "data.max_length", "data.overlong", "data.max_truncated", "data.max_dropped",
    "model.tokenizer", "model.chat_template", "model.add_tokens", "model.vocab_multiple",
    "data.pad_to_multiple_of",
)  # fmt: skip
_OWN_METRIC = "`python:` names a file with a compute_metrics of yours"


def task_of(data: Mapping[str, Any]) -> Task:
    """The task of a recipe; the default one where it is absent or wrong."""
    task = data.get("task", DEFAULT_TASK)
    return task_named(task if isinstance(task, str) and task in TASK_FORMATS else DEFAULT_TASK)


def data_sources(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted path, source) of every entry of `data.train` and `data.eval`."""
    for name in ("train", "eval"):
        entries = _section(data, "data").get(name)
        for index, source in enumerate(entries if isinstance(entries, list) else []):
            yield f"data.{name}[{index}]", source


def check_data(
    data: Mapping[str, Any], trainer: Mapping[str, Any], folder: Callable[[str], Path]
) -> list[Problem]:
    """Problems between `task`, `data`, `model` and what `trainer` (references resolved) says of them.

    `folder(path)`: where the relative paths of that value start.
    """
    if data.get("task", DEFAULT_TASK) not in list(TASK_FORMATS):
        return _check_paths(data, folder)  # what the rows must be is not known
    return [
        *_check_paths(data, folder),
        *_check_formats(data),
        *_check_columns(data),
        *_check_weights(data),
        *_check_optional(data),
        *_check_model(data),
        *_check_loss(data),
        *_check_samples(data),
        *_check_metrics(data),
        *_check_streaming(data, trainer),
    ]


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name)
    return value if isinstance(value, Mapping) else {}


def _given(data: Mapping[str, Any], dotted: str) -> bool:
    section, _, key = dotted.partition(".")
    return _section(data, section).get(key) not in (None, [], False)


def _conflict(path: str, message: str, hint: str) -> Problem:
    return Problem("conflict", message, path=path, hint=hint)


def _check_paths(data: Mapping[str, Any], folder: Callable[[str], Path]) -> list[Problem]:
    problems = []
    for place, source in data_sources(data):
        path = source.get("path") if isinstance(source, Mapping) else None
        if not isinstance(path, str):
            continue
        if is_url(path):
            hint = _hub_hint(path) or "write a file, a folder, a glob, package:NAME/inner/path or a hub id"
            problems.append(Problem("unsupported", "a URL is not read", path=f"{place}.path", hint=hint))
        elif not path:
            problems.append(Problem("wrong-value", "is empty", path=f"{place}.path", hint="name a file"))
        elif not is_hub_id(path, folder(f"{place}.path")):
            problems += [
                _conflict(
                    f"{place}.{key}",
                    "is only for a data set of the hub, and the path here is none",
                    "remove it, or write `path: organisation/name`",
                )
                for key in _HUB_ONLY
                if source.get(key) is not None
            ]
    return problems


def _hub_hint(url: str) -> str | None:
    """How to write `url` if it names a data set of the hub, else None."""
    for prefix in ("https://huggingface.co/datasets/", "hf://datasets/", "hf://", "hf:", "hub:"):
        if url.startswith(prefix):
            parts = url.removeprefix(prefix).strip("/").split("/")
            return f"write `path: {parts[0]}/{parts[1]}`" if len(parts) >= 2 else None
    return None


def _check_formats(data: Mapping[str, Any]) -> list[Problem]:
    task = task_of(data)
    problems = []
    for place, form in _formats(data):
        if form in task.formats:
            continue
        others = [name for name, formats in TASK_FORMATS.items() if form in formats]
        message = f"is {form}, but task {task.name} reads {' or '.join(task.formats)}"
        problems.append(_conflict(f"{place}.format", message, f"{form} rows are for `task: {others[0]}`"))
    return problems


def _formats(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted path of the source, format) where a known format is given."""
    for place, source in data_sources(data):
        form = source.get("format") if isinstance(source, Mapping) else None
        if isinstance(form, str) and form in FORMATS:
            yield place, form


def _check_weights(data: Mapping[str, Any]) -> list[Problem]:
    return [
        _conflict(f"{place}.weight", "is only for training rows", "remove it: evaluation sees each row once")
        for place, source in data_sources(data)
        if place.startswith("data.eval") and isinstance(source, Mapping) and source.get("weight", 1) != 1
    ]


def _check_columns(data: Mapping[str, Any]) -> list[Problem]:
    """A rename of a field that the format lacks would have no effect."""
    explicit = dict(_formats(data))
    problems = []
    for place, source in data_sources(data):
        columns = source.get("columns") if isinstance(source, Mapping) else None
        forms = [explicit[place]] if place in explicit else task_of(data).formats
        fields = list(dict.fromkeys(f for form in forms for f in FORMATS[form].fields))
        for key, column in columns.items() if isinstance(columns, Mapping) else ():
            if key in fields or column is None:  # which leaves the file's column of that name out
                continue
            near = close_key(str(key), fields)
            hint = f"did you mean `{near}`?" if near else "write `field of the format: column of the file`"
            message = f"unknown field, expected one of {', '.join(fields)}"
            problems.append(Problem("unknown-key", message, path=f"{place}.columns.{key}", hint=hint))
    return problems


def _check_optional(data: Mapping[str, Any]) -> list[Problem]:
    """Keys of `data:` that the task does not read."""
    task = task_of(data)
    problems = []
    for key, why in OPTIONAL_DATA_KEYS.items():
        if key in task.data_keys or not _given(data, f"data.{key}"):
            continue
        readers = " and ".join(other.name for other in TASKS if key in other.data_keys)
        hint = f"remove it: with task {task.name}, {why}"
        problems.append(_conflict(f"data.{key}", f"is only for task {readers}", hint))
    return problems


def _check_model(data: Mapping[str, Any]) -> list[Problem]:
    task = task_of(data)
    problems = []
    if not task.gguf and _given(data, "model.gguf_file"):
        message = f"is only for causal language models, not for task {task.name}"
        problems.append(_conflict("model.gguf_file", message, "name a checkpoint in safetensors"))
    if not task.reads_tokens:
        problems += [
            _conflict(path, "means nothing for images, which are not made of tokens", "remove it")
            for path in _TOKEN_KEYS
            if _given(data, path)
        ]
    elif task.own_padding and _given(data, "data.pad_to_multiple_of"):
        message = f"has no effect with task {task.name}: {task.own_padding}"
        problems.append(_conflict("data.pad_to_multiple_of", message, "remove it"))
    tokens = _section(data, "model").get("add_tokens")
    seen: set[str] = set()
    for index, token in enumerate(tokens if isinstance(tokens, list) else []):
        if isinstance(token, str) and token in seen:
            path = f"model.add_tokens[{index}]"
            problems.append(Problem("wrong-value", f"{describe(token)} is given twice", path=path))
        seen.add(str(token))
    return problems


def _check_loss(data: Mapping[str, Any]) -> list[Problem]:
    wanted = _section(data, "data").get("loss_on")
    if not isinstance(wanted, str):
        return []
    for place, form in _formats(data):
        allowed = task_of(data).learns.get(form, ())
        if allowed and wanted not in allowed:
            message = f"is {wanted}, but the {form} rows of `{place}` can only learn {' or '.join(allowed)}"
            hint = "remove it: every format has its own default"
            return [_conflict("data.loss_on", message, hint)]
    return []


def _check_samples(data: Mapping[str, Any]) -> list[Problem]:
    """What packing, fill-in-the-middle and `overlong` need of the rows."""
    rows = _section(data, "data")
    problems = []
    other = next(((place, form) for place, form in _formats(data) if form != "text"), None)
    if rows.get("packing") is True and rows.get("padding_free") is True:
        message = "excludes `data.packing`, which leaves nothing to pad"
        problems.append(_conflict("data.padding_free", message, "keep one of the two"))
    refused = task_of(data).overlong
    overlong = str(rows.get("overlong"))
    if overlong in refused:
        rest = " or ".join(value for value in ("truncate", "drop") if value not in refused)
        message = f"is {overlong}, {refused[overlong]}"
        problems.append(_conflict("data.overlong", message, f"write {rest}, or remove it"))
    elif rows.get("overlong") == "split" and other:
        message = f"is split, but only text rows can be split, and those of `{other[0]}` are {other[1]}"
        problems.append(_conflict("data.overlong", message, "write truncate or drop"))
    if rows.get("fim") is not None and other and "fim" in task_of(data).data_keys:
        message = f"needs text rows, but those of `{other[0]}` are {other[1]}"
        problems.append(_conflict("data.fim", message, "write `format: text`, or remove fim"))
    return problems


def _check_metrics(data: Mapping[str, Any]) -> list[Problem]:
    rows = _section(data, "data")
    metrics = rows.get("metrics")
    if not isinstance(metrics, list) or not metrics:
        return []
    task, problems = task_of(data), []
    known = task.metrics
    if rows.get("eval") is None:
        hint = "add e.g. `eval: {split: 0.02}` under `data:`"
        problems.append(_conflict("data.metrics", "needs `data.eval`, the rows to measure on", hint))
    if _section(data, "trainer").get("prediction_loss_only") is True and metrics != ["perplexity"]:
        message = "is true, so that nothing of data.metrics but perplexity would be measured"
        problems.append(_conflict("trainer.prediction_loss_only", message, "drop it"))
    for index, name in enumerate(metrics):
        if not isinstance(name, str) or name in known:
            continue
        near = close_key(name, known)
        owner = next((other for other, names in METRICS.items() if name in names), None)
        hint = f"it is a metric of task {owner}" if owner else _OWN_METRIC
        hint = f"did you mean {near}?" if near else hint
        expected = f"one of {', '.join(known)}" if known else f"nothing: task {task.name} has its own"
        message = f"is {describe(name)}, expected {expected}"
        problems.append(Problem("wrong-choice", message, path=f"data.metrics[{index}]", hint=hint))
    return problems


def _check_streaming(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    rows = _section(data, "data")
    if rows.get("streaming") is not True or "streaming" not in task_of(data).data_keys:
        return []
    problems = []
    steps = trainer.get("max_steps")
    if not isinstance(steps, int) or steps <= 0:
        message = "needs `trainer.max_steps`: the end of a stream is not known before it comes"
        hint = "write `max_steps:` in place of `num_train_epochs:`" if "num_train_epochs" in trainer else (
            "write e.g. `trainer: {max_steps: 1000}`"
        )  # fmt: skip
        problems.append(_conflict("data.streaming", message, hint))
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if trainer.get(name) == "epoch":
            message = "is epoch, but a stream is one epoch without end"
            problems.append(_conflict(f"trainer.{name}", message, "write steps, or remove it"))
    if isinstance(rows.get("eval"), Mapping):
        message = "cannot be cut from rows that are streamed"
        problems.append(_conflict("data.eval", message, "give a list of sources as in `data.train`"))
    return problems
