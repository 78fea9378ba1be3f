"""The rows of a script: load_dataset(…) followed through its names up to the Trainer."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.importing.arguments import as_number
from launcher.importing.found import Effect, Reading
from launcher.importing.keywords import positional
from launcher.importing.script_lengths import is_tokenizer
from launcher.importing.sources import BUILDERS, source_at
from launcher.importing.syntax import Function, last_name, text_of
from launcher.importing.values import Source, Unresolved

TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer", "DPOTrainer", "UnslothTrainer")
_BUILDERS = (*BUILDERS, "pandas")
_READERS = ("from_json", "from_csv", "from_parquet", "from_text")
_MEMORY = ("from_dict", "from_list", "from_generator", "from_pandas", "from_polars")
_SAME = ("shuffle", "remove_columns", "with_format", "set_format", "cast_column", "flatten_indices", "cast",
         "to_iterable_dataset", "flatten", "select_columns")  # fmt: skip
_CHANGING = ("map", "filter", "select", "rename_column", "rename_columns", "with_transform")
_DEEPEST = 40


def trainers_of(source: Source) -> dict[str, str]:
    """Names of Trainers: upstream's, and classes of the script that are made from one -> which."""
    found = dict(zip(TRAINERS, TRAINERS, strict=True))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            base = next((found[name] for name in map(source.name_of, node.bases) if name in found), None)
            if base is not None:
                found[node.name] = base
    return found


@dataclass(slots=True)
class _Rows:
    """What one expression of rows comes from."""

    source: dict[str, Any] | None = None
    line: int | None = None
    """None as long as no address was found."""
    split: str | None = None
    share: float | None = None
    """Share of a train_test_split, whose part `split` names."""
    is_part: bool = False
    """Whether a train_test_split made it, also one whose share is not known."""
    done: list[tuple[str, ast.Call]] = field(default_factory=list)
    """Methods that were called on it."""


def take_rows(reading: Reading, source: Source) -> None:
    """Take the rows that reach the Trainer, or the only ones that are loaded."""
    train, evaluated = _Rows(), _Rows()
    found_train = found_eval = False
    for call, scope in source.calls_of(*trainers_of(source)):
        for keyword in call.keywords:
            if keyword.arg == "train_dataset":
                train, found_train = _follow(reading, source, keyword.value, scope), True
            elif keyword.arg == "eval_dataset" and not _is_none(keyword.value):
                evaluated, found_eval = _follow(reading, source, keyword.value, scope), True
            elif keyword.arg == "formatting_func" and not _is_none(keyword.value):
                _need_prompt(reading, source, keyword.value)
            elif keyword.arg == "data_collator":
                _collator(reading, source, keyword.value, scope)
    # a statement, and so no part of a chain
    train.done += [("set_transform", call) for call, _ in source.calls_of("set_transform")]
    loads = [] if train.source is not None else list(source.calls_of("load_dataset"))
    if len(loads) == 1:
        # how it gets to the Trainer is not known: whatever is done with rows may be done with these
        train = replace(_load(reading, source, *loads[0]), done=[*train.done, *_changes(source, train.done)])
    if train.source is not None:
        reading.take("data.train", [_finished(train)], train.line, "load_dataset")
        _take_done(reading, source, train)
    elif found_train and not any(entry.key == "data.train" for entry in reading.dropped):
        reading.needs("data.train", None, "what reaches train_dataset= is made when the script runs",
                      "write data: {train: [{path: …}]}")  # fmt: skip
        train.done += [("map", call) for call, _ in source.calls_of("map")]
        _take_done(reading, source, train)
    if found_eval:
        _take_eval(reading, train, evaluated)


def _changes(source: Source, known: Sequence[tuple[str, ast.Call]]) -> list[tuple[str, ast.Call]]:
    """Calls anywhere in the script that change rows, but for those that are known."""
    seen = {call for _, call in known}
    return [
        (name, call)
        for name in _CHANGING
        for call, _ in source.calls_of(name)
        if call not in seen and isinstance(call.func, ast.Attribute)
    ]


def _take_eval(reading: Reading, train: _Rows, evaluated: _Rows) -> None:
    if evaluated.share is not None:
        reading.take("data.eval", {"split": evaluated.share}, evaluated.line, "train_test_split")
    elif evaluated.source is not None and not evaluated.is_part:
        reading.take("data.eval", [_finished(evaluated)], evaluated.line, "eval_dataset")
    elif not any(entry.key == "data.eval" for entry in reading.dropped):
        reading.drop("eval_dataset", "", train.line, Effect.NONE, "made when the script runs",
                     "write data.eval, e.g. {split: 0.02}")  # fmt: skip


def _finished(rows: _Rows) -> dict[str, Any]:
    """The source with its split, where that is not the one of training rows."""
    made = dict(rows.source or {})
    if not rows.is_part and rows.split is not None and rows.split != "train":
        made["split"] = rows.split
    return made


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _follow(
    reading: Reading, source: Source, node: ast.expr, scope: Function | None, before: int | None = None,
    depth: int = 0,
) -> _Rows:  # fmt: skip
    """Go back from an expression to where its rows are loaded."""
    if depth > _DEEPEST:
        return _Rows()
    if isinstance(node, ast.Name):
        line = node.lineno if before is None else before
        earlier = [(at, value) for at, value in source.assignments(node.id, scope) if at < line]
        if not earlier or earlier[-1][1] is None:
            return _Rows()
        at, value = earlier[-1]
        return _follow(reading, source, value, scope, at, depth + 1) if value is not None else _Rows()
    if isinstance(node, ast.Subscript):
        rows = _follow(reading, source, node.value, scope, before, depth + 1)
        name = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return replace(rows, split=name) if isinstance(name, str) else rows
    if isinstance(node, ast.Call):
        return _called(reading, source, node, scope, before, depth)
    return _Rows()


def _called(
    reading: Reading, source: Source, node: ast.Call, scope: Function | None, before: int | None, depth: int
) -> _Rows:
    name = last_name(node.func)
    if name in ("load_dataset", "load_from_disk", *_READERS):
        return _load(reading, source, node, scope)
    if name in _MEMORY:
        reading.needs("data.train", node.lineno, f"{text_of(node.func)}(…) makes rows when the script runs",
                      "write them into a .jsonl file")  # fmt: skip
        return _Rows()
    if not isinstance(node.func, ast.Attribute):
        return _Rows()
    rows = _follow(reading, source, node.func.value, scope, before, depth + 1)
    if name == "train_test_split":
        _split(reading, source, node, scope, rows)
    elif name not in _SAME:
        rows.done.append((name, node))
    return rows


def _split(reading: Reading, source: Source, node: ast.Call, scope: Function | None, rows: _Rows) -> None:
    size = next((k.value for k in node.keywords if k.arg == "test_size"), positional(node))
    rows.share, rows.is_part = 0.25, True
    if size is None:
        return
    try:
        share = as_number(source.value(size, scope).value)
    except Unresolved:
        share = None
    if share is None or not 0 < share < 1:
        reading.needs("data.eval", node.lineno, f"test_size={text_of(size)} is no share of the rows",
                      "write data: {eval: {split: 0.02}}, or so")  # fmt: skip
        rows.share = None
    else:
        rows.share = float(share)


def _load(reading: Reading, source: Source, call: ast.Call, scope: Function | None) -> _Rows:
    """The source that one loading call names."""
    values = _given(reading, source, call, scope)
    address = values.get("path", values.get("path_or_paths"))
    files = values.get("data_files")
    if address in _BUILDERS and files is not None:
        address = files
    elif files is not None and isinstance(address, str):
        reading.needs("data.train", call.lineno, f"data_files of {address}: a recipe names whole data sets",
                      "fetch the file, and name it")  # fmt: skip
        return _Rows()
    if isinstance(address, list) and len(address) == 1:
        address = address[0]
    if isinstance(address, dict):
        address = address.get("train")
    if not isinstance(address, str):
        return _Rows()
    given = {name: values.get(name) for name in ("name", "revision")}
    split = _plain_split(reading, values.get("split"), call.lineno)
    made = source_at(reading, "load_dataset", call.lineno, address, given)
    if made is None:
        return _Rows()
    if values.get("streaming") is True:
        reading.take("data.streaming", True, call.lineno, "streaming")
    return _Rows(made, call.lineno, split)


def _given(reading: Reading, source: Source, call: ast.Call, scope: Function | None) -> dict[str, Any]:
    """The arguments that name rows, as far as they are written out."""
    values: dict[str, Any] = {}
    named = [*zip(("path", "name"), call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
    for name, node in named:
        if name in ("path", "name", "split", "data_files", "revision", "streaming", "path_or_paths"):
            try:
                values[name] = source.value(node, scope).value
            except Unresolved:
                effect = Effect.NEEDED if name in ("path", "data_files") else Effect.TRAINING
                said = f"load_dataset({name}=)"
                reading.drop(said, text_of(node), node.lineno, effect, "computed at run time")
    return values


def _plain_split(reading: Reading, split: Any, line: int) -> str | None:
    """`train` of `train[:10%]`, whose slice is listed."""
    if not isinstance(split, str):
        return None
    name, bracket, _ = split.partition("[")
    if bracket:
        reading.drop("split", split, line, Effect.TRAINING, "all rows of a split are used; there is no slice")
    return name


def _take_done(reading: Reading, source: Source, rows: _Rows) -> None:
    """What is done with the rows before they are learnt."""
    for name, call in rows.done:
        if name == "map":
            node = positional(call) or next((k.value for k in call.keywords if k.arg == "function"), None)
            if isinstance(node, ast.Call) and last_name(node.func) == "partial":
                node = positional(node) or node
            if node is not None and not _tokenizes(reading, source, node):
                _need_prompt(reading, source, node)
        elif name in ("select", "filter", "take", "skip", "shard"):
            reading.drop(f".{name}(…)", text_of(call)[-40:], call.lineno, Effect.TRAINING,
                         "all rows are used", "write the rows that are wanted into a file")  # fmt: skip
        elif name in ("rename_column", "rename_columns"):
            reading.drop(f".{name}(…)", text_of(call)[-40:], call.lineno, Effect.NEEDED,
                         "another name of a column", "write it as `columns` of the source")  # fmt: skip
        elif name in ("with_transform", "set_transform"):
            reading.drop(f".{name}(…)", text_of(call)[-40:], call.lineno, Effect.TRAINING,
                         "what it makes of a row as it is learnt (a random crop, say) is not done",
                         "look with `effilaunch prepare RECIPE --show 1`")  # fmt: skip
        else:
            reading.drop(
                f".{name}(…)", "", call.lineno, Effect.TRAINING, "what it does with the rows is not read"
            )


def _body_of(source: Source, node: ast.expr) -> tuple[list[ast.AST], str] | None:
    """Body and parameter of a function that is named, or of a lambda."""
    if isinstance(node, ast.Lambda) and node.args.args:
        return [node.body], node.args.args[0].arg
    function = source.functions.get(last_name(node))
    if function is not None and function.args.args:
        return list(function.body), function.args.args[0].arg
    return None


def _tokenizes(reading: Reading, source: Source, node: ast.expr) -> bool:
    """Whether a function only turns one column into tokens; then that column is text."""
    found = _body_of(source, node)
    if found is None:
        return False
    body, row = found
    calls = [inner for part in body for inner in ast.walk(part) if isinstance(inner, ast.Call)]
    calls = [call for call in calls if is_tokenizer(source, call)]
    if len(calls) != 1 or not calls[0].args or len(body) > 2:
        return False
    column = calls[0].args[0]
    is_column = isinstance(column, ast.Subscript) and last_name(column.value) == row
    if not is_column or not isinstance(column, ast.Subscript) or not isinstance(column.slice, ast.Constant):
        return False
    name = column.slice.value
    taken = reading.taken.get("data.train")
    if taken is None or not isinstance(name, str) or reading.value("task") not in (None, "causal-lm"):
        return reading.value("task") in ("sequence-classification", "image-classification")
    for key in ("data.train", "data.eval"):
        if key in reading.taken and isinstance(reading.taken[key].value, list):
            columns = {} if name == "text" else {"columns": {"text": name}}
            before = reading.taken[key]
            rows = [{**entry, "format": "text", **columns} for entry in before.value]
            reading.take(key, rows, before.place.line, before.said)
    for keyword in calls[0].keywords:
        if keyword.arg == "max_length":
            try:
                length = source.value(keyword.value, None).value
            except Unresolved:
                continue
            reading.take("data.max_length", length, keyword.value.lineno, "max_length")
            reading.take("data.overlong", "truncate", keyword.value.lineno, "truncation", default=True)
    return True


def _need_prompt(reading: Reading, source: Source, node: ast.expr) -> None:
    """The function is the prompt, and only Python can say it."""
    name = text_of(node) if not isinstance(node, ast.Lambda) else "a lambda"
    function = source.functions.get(last_name(node))
    line = node.lineno if function is None else function.lineno
    reading.drop(f"rows: {name}", "", line, Effect.NEEDED, "what it makes of a row is the prompt, which "
                 "only Python says", "move it into a hooks.py as format_row(row), and write "
                 "python: hooks.py")  # fmt: skip


def _collator(reading: Reading, source: Source, node: ast.expr, scope: Function | None) -> None:
    """What the collator says of the tokens that are learnt."""
    call: ast.expr | None = node
    if isinstance(node, ast.Name):
        found = source.assignments(node.id, scope)
        call = found[-1][1] if found else None
    if not isinstance(call, ast.Call):
        if not _is_none(node):
            reading.drop("data_collator", text_of(node), node.lineno, Effect.TRAINING,
                         "the script's own way to make a batch")  # fmt: skip
        return
    kind = source.name_of(call.func)
    if kind == "DataCollatorForLanguageModeling":
        mlm = next((k.value for k in call.keywords if k.arg == "mlm"), positional(call, 1))
        if mlm is None or (isinstance(mlm, ast.Constant) and mlm.value is True):
            reading.refuse(
                "mlm", call.lineno, "is true: masked words are no task here", "mlm=False is causal-lm"
            )
        else:
            reading.take("data.loss_on", "all", call.lineno, f"{kind}: mlm=False")
    elif kind == "DataCollatorForCompletionOnlyLM":
        reading.take(
            "data.loss_on", "completion", call.lineno, kind, note="what follows the response template"
        )
    elif kind not in ("DataCollatorForSeq2Seq", "DataCollatorWithPadding", "default_data_collator",
                      "DefaultDataCollator"):  # fmt: skip
        reading.drop(
            "data_collator", kind, call.lineno, Effect.TRAINING, "the script's own way to make a batch"
        )
