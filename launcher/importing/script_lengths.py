"""Where a script's tokenizer cuts rows and labels."""

from __future__ import annotations

import ast
from functools import lru_cache

from launcher.importing.found import Effect, Reading
from launcher.importing.syntax import last_name, text_of
from launcher.importing.values import Source, Unresolved

_NAME = "data.max_length"


def is_tokenizer(source: Source, call: ast.Call) -> bool:
    """Whether a tokenizer is called: by its name, or as what `AutoTokenizer.from_pretrained` made."""
    name = last_name(call.func)
    if "token" in name.lower():
        return True
    return isinstance(call.func, ast.Name) and name in _tokenizers(source.tree)


@lru_cache(maxsize=1)
def _tokenizers(tree: ast.Module) -> frozenset[str]:
    """Names that hold what `…Tokenizer….from_pretrained` made."""
    return frozenset(
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if "Tokenizer" in text_of(node.value.func)
        for target in node.targets
        if isinstance(target, ast.Name)
    )


def take_lengths(reading: Reading, source: Source) -> None:
    """`data.max_length` out of `tokenizer(…, truncation=True, max_length=N)`, where there is one such N.

    Lengths of labels, and several lengths, are listed: a recipe has one for all.
    """
    of_labels = _calls_of_labels(source.tree)
    found: dict[object, ast.expr] = {}
    for call, scope in source.calls:
        node = _length(source, call)
        if node is None:
            continue
        try:
            length = source.value(node, scope).value
        except Unresolved:
            reading.drop(_NAME, text_of(node), node.lineno, Effect.TRAINING, "computed at run time",
                         f"write {_NAME}")  # fmt: skip
            continue
        if call in of_labels or any(keyword.arg == "text_target" for keyword in call.keywords):
            reading.drop("max_length", length, node.lineno, Effect.TRAINING,
                         f"labels are cut at it there; here {_NAME} is for rows and labels")  # fmt: skip
        elif isinstance(length, int) and length > 0:
            found.setdefault(length, node)
    if len(found) == 1:
        _take(reading, source, *next(iter(found.items())))
    for length, node in found.items() if len(found) > 1 else ():
        reason = "one of several lengths that tokenizers of the script cut at"
        reading.drop("max_length", length, node.lineno, Effect.TRAINING, reason, f"write {_NAME}")


def _take(reading: Reading, source: Source, length: object, node: ast.expr) -> None:
    note = ""
    if isinstance(node, ast.Name):
        note = next((
            source.value(inner, scope).note for call, scope in source.calls
            if (inner := _length(source, call)) is node
        ), "")  # fmt: skip
    reading.take(_NAME, length, node.lineno, f"max_length: {length}", default=bool(note), note=note)
    reading.take("data.overlong", "truncate", node.lineno, "truncation", default=True)


def _length(source: Source, call: ast.Call) -> ast.expr | None:
    """What a tokenizer cuts at; None where the call is of something else, or cuts nothing."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    encodes = last_name(call.func) in ("encode", "encode_plus", "batch_encode_plus")
    if "max_length" not in given or not (encodes or is_tokenizer(source, call)):
        return None
    cuts, pads = given.get("truncation"), given.get("padding")
    if isinstance(cuts, ast.Constant) and cuts.value in (False, None, "do_not_truncate"):
        return None
    if cuts is None and pads is not None and not (isinstance(pads, ast.Constant) and not pads.value):
        return None  # transformers cuts unasked only where it does not pad
    return given["max_length"]


def _calls_of_labels(tree: ast.Module) -> set[ast.Call]:
    """Calls within `with tokenizer.as_target_tokenizer():`."""
    withs = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.With) and "as_target_tokenizer" in text_of(node.items[0].context_expr)
    ]  # fmt: skip
    return {inner for node in withs for inner in ast.walk(node) if isinstance(inner, ast.Call)}
