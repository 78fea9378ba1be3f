"""Find values of the wrong type or out of range, and "auto" that nothing replaces."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.knowledge.lint.document import PYTHON_NUMBER, Document, LintFinding, Member, join
from launcher.knowledge.lint.keys import Row, sections, vocabulary
from launcher.recipe.suggestions import close_key, is_spelling

_LONGEST_NUMBER = 40
"""Digits; what is longer is no setting, and would lose its last ones as a decimal number."""
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# DeepSpeed's other spellings of the types of communication_data_type.
_FLOATS = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
# Values that the Trainer compares with its own or reads itself: it does not convert strings.
_READ_RAW = ("zero_optimization.stage", "fp16.enabled", "bf16.enabled")
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "list": "a list",
    "dict": 'an object {"…": …}',
    "null": "null",
}
_BOUNDS = {
    "above": (operator.gt, "more than"),
    "at_least": (operator.ge, "at least"),
    "below": (operator.lt, "less than"),
    "at_most": (operator.le, "at most"),
}
# "auto" that DeepSpeed itself reads; a file with no other is not for the Trainer.
OWN_AUTO = ("zero_optimization.zenflow.", "pipeline.", "expert_parallel.", "data_types.")


@dataclass(frozen=True, slots=True)
class _Spot:
    """One value, and the table's row of its key."""

    document: Document
    member: Member
    where: str
    row: Row
    converted: bool
    """Whether DeepSpeed converts strings to numbers here."""

    @property
    def value(self) -> Any:
        return self.member.node.value

    def found(
        self, code: str, message: str, hint: str | None = None, new: str | None = None, **more: Any
    ) -> LintFinding:
        return self.document.report(
            self.where, code, message, hint, member=self.member, at_value=True, new=new, **more
        )


def check_types(document: Document) -> Iterator[LintFinding]:
    """Find values of the wrong type or out of range."""
    for path, node, known, strict, _ in sections(document):
        for member in node.members or ():
            if member.key in known:
                row = known[member.key]
                yield from check_value(document, member, join(path, member.key), row, converted=strict)


def check_value(
    document: Document, member: Member, where: str, row: Row, *, converted: bool
) -> Iterator[LintFinding]:
    """Find what is wrong with one value, or with the items of a list; converted: see `_Spot`."""
    finding = _check(_Spot(document, member, where, row, converted))
    if finding is not None:
        yield finding
    elif "items" in row:
        for at, node in enumerate(member.node.items or ()):
            item = Member(f"{member.key}[{at}]", node.start, node.start, node)
            yield from check_value(document, item, f"{where}[{at}]", row["items"], converted=converted)


def check_autos(document: Document) -> Iterator[LintFinding]:
    """Find each "auto" that neither the Trainer nor accelerate replaces."""
    if not for_trainer(document):
        return
    for where, member in autos(document):
        if where in vocabulary()["auto"] or where.startswith("bfloat16"):
            continue
        message = (
            f'"auto" for `{member.key}` is not replaced: an error under the Trainer; DeepSpeed alone uses '
        )
        message += "its default or the string"
        hint = "write a value, or remove the key"
        yield document.report(where, "ds-auto-unresolved", message, hint, member=member, at_value=True)


def for_trainer(document: Document) -> bool:
    """Whether a file has an "auto" that only the Trainer or accelerate can mean."""
    return any(not where.startswith(OWN_AUTO) for where, _ in autos(document))


def autos(document: Document) -> Iterator[tuple[str, Member]]:
    """Dotted path and member of every "auto" outside of lists."""
    pending = [] if document.root is None else [("", document.root)]
    for path, node in pending:
        for member in node.members or ():
            if member.node.value == "auto" and not member.node.unread:
                yield join(path, member.key), member
            pending.append((join(path, member.key), member.node))


def _check(spot: _Spot) -> LintFinding | None:
    node, types = spot.member.node, spot.row["types"]
    if node.unread:
        return None
    if "keys" in spot.row:
        return _section(spot)
    if "any" in types or node.value == "auto":
        return None
    kind = node.kind
    if kind == "float" and not math.isfinite(node.value):
        if spot.document.text[node.start : node.end].lstrip("-")[0].isdigit():
            return spot.found("ds-wrong-value", f"`{spot.member.key}` is too large for a number")
        return None  # NaN is found where it is read
    if kind in types or (kind == "int" and "float" in types):
        return _range(spot)
    if "choices" in spot.row and kind == "str" and "int" not in types:
        return _range(spot)
    return _wrong(spot, kind)


def _section(spot: _Spot) -> LintFinding | None:
    node = spot.member.node
    key = spot.member.key
    # Other sections break DeepSpeed's reader.
    may_be_null = not spot.row["strict"] and key not in ("optimizer", "scheduler")
    if node.kind == "dict" or (node.kind == "null" and ("null" in spot.row["types"] or may_be_null)):
        return None
    if key == "zero_optimization" and isinstance(node.value, bool):
        trainer = for_trainer(spot.document)
        if not trainer and not node.value:
            return None
        new = f'{{"stage": {int(node.value)}}}'
        message = f"`zero_optimization: {_shown(spot)}` is outdated; the Trainer cannot read it"
        severity = "error" if trainer else "warning"
        return spot.found("ds-wrong-type", message, f"write {new}", new, severity=severity)
    enabled = "enabled" in spot.row["keys"]
    if enabled and (isinstance(node.value, bool) or node.value == "auto"):
        given = '"auto"' if node.value == "auto" else str(node.value).lower()
        new = f'{{"enabled": {given}}}'
        return spot.found("ds-wrong-type", f"`{key}` must be an object, not {given}", f"write {new}", new)
    return spot.found("ds-wrong-type", f"`{key}` must be an object, not {_shown(spot)}", 'write {"…": …}')


def _shown(spot: _Spot) -> str:
    node = spot.member.node
    if node.kind in ("list", "dict"):
        return "a list" if node.kind == "list" else "an object"
    text = spot.document.text[node.start : node.end]
    return text if len(text) <= 40 else f"{text[:37]}..."


def _wrong(spot: _Spot, kind: str) -> LintFinding | None:
    """A value of a wrong type, and the value that was probably meant."""
    value, types, key = spot.value, spot.row["types"], spot.member.key
    number = "int" in types or "float" in types
    expected = f"`{key}` must be {' or '.join(_WORDS[kind] for kind in types)}, not {_shown(spot)}"
    lax = spot.converted and spot.where not in _READ_RAW
    if kind == "float" and "int" in types:
        return _decimal(spot, expected, value)
    if kind == "str" and number and PYTHON_NUMBER.fullmatch(value.strip()):
        return _number_text(spot, expected, lax=lax)
    if kind == "str" and "bool" in types and value.strip().lower() in _TRUTH:
        new = str(_TRUTH[value.strip().lower()]).lower()
        message = f"{expected}; DeepSpeed converts it" if lax else expected
        if not spot.converted:
            message += "; DeepSpeed treats every string as true"
        severity = "warning" if lax else "error"
        return spot.found("ds-wrong-type", message, f"write {new}", new, severity=severity)
    if kind == "int" and types[0] == "bool" and value in (0, 1):
        new = str(bool(value)).lower()
        return spot.found("ds-wrong-type", expected, f"write {new}", new, severity="warning")
    return spot.found("ds-wrong-type", expected)


def _decimal(spot: _Spot, expected: str, value: float) -> LintFinding | None:
    """A number with a point or an exponent where an integer is required."""
    if not value.is_integer():
        code = "ds-float-bucket" if spot.converted else "ds-wrong-type"
        return spot.found(code, expected, "write a number without a fraction")
    if spot.converted:  # 5e8 and 1e9 are how everybody writes buckets
        return None
    return spot.found(
        "ds-wrong-type",
        f"{expected}: JSON reads it as the float {value}, and DeepSpeed does not convert it",
        f"write {int(value)}",
        str(int(value)),
        severity="warning" if spot.member.key == "steps_per_print" else "error",
    )


def _number_text(spot: _Spot, expected: str, *, lax: bool) -> LintFinding | None:
    """ "8" for 8."""
    text = spot.value.strip().replace("_", "")
    whole = re.fullmatch(r"[-+]?[0-9]+", text) is not None
    if len(text) > _LONGEST_NUMBER or not math.isfinite(float(text)):
        return spot.found("ds-wrong-type", expected, "write a number in the valid range")
    number = int(text) if whole else float(text)
    if isinstance(number, float) and "float" not in spot.row["types"] and not number.is_integer():
        return _decimal(spot, expected, number)
    new = str(number)
    is_whole = "int" in spot.row["types"] or spot.row.get("whole")
    if isinstance(number, float) and number.is_integer() and is_whole:
        new = str(int(number))
    refused = spot.converted and "int" in spot.row["types"] and not whole
    code = "ds-float-bucket" if refused else "ds-wrong-type"
    note = "; DeepSpeed converts it" if lax and not refused else ""
    severity = "warning" if note else "error"
    return spot.found(code, f"{expected}{note}", f"write {new}", new, severity=severity)


def _range(spot: _Spot) -> LintFinding | None:
    row, value, key = spot.row, spot.value, spot.member.key
    choices = row.get("choices")
    if choices and value is not None:
        plain = value.lower() if isinstance(value, str) and row.get("any_case") else value
        if isinstance(value, bool) or plain not in [c.lower() if row.get("any_case") else c for c in choices]:
            return _choice(spot, choices)
        return None
    length = row.get("length")
    if length is not None and len(spot.member.node.items or ()) != length:
        given = len(spot.member.node.items or ())
        return spot.found("ds-wrong-value", f"`{key}` must have {length} items, not {given}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if row.get("whole") and value != int(value):
        return spot.found(
            "ds-wrong-value", f"`{key}` must be a number without a fraction, not {_shown(spot)}"
        )
    for bound, (holds, phrase) in _BOUNDS.items():
        if bound in row and not holds(value, row[bound]):
            message = f"`{key}` must be {phrase} {row[bound]}, not {_shown(spot)}"
            return spot.found("ds-wrong-value", message)
    return None


def _choice(spot: _Spot, choices: list[Any]) -> LintFinding:
    value, key = spot.value, spot.member.key
    listed = ", ".join(str(choice) for choice in choices)
    near, is_sure = None, False
    if isinstance(value, str):
        texts = [choice for choice in choices if isinstance(choice, str)]
        near = _FLOATS.get(value.lower().removeprefix("torch."))
        is_sure = near in texts
        near = near if is_sure else close_key(value, texts)
        is_sure |= near is not None and is_spelling(value, near)
    code = "ds-comm-dtype" if key.endswith("communication_data_type") else "ds-wrong-value"
    hint = f"did you mean {near}?" if near else None
    new = f'"{near}"' if is_sure else None
    return spot.found(code, f"`{key}` must be one of {listed}, not {_shown(spot)}", hint, new)
