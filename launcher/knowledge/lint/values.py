"""Values of the wrong type, out of range, or "auto" where nobody fills it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.knowledge.lint.document import Document, Edit, Finding, Member, Node, join
from launcher.knowledge.lint.keys import Row, known_keys, spellings, vocabulary
from launcher.recipe.suggestions import close_key

# No two neighbours of it match the same digits: a long text is refused in one pass.
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_LONGEST_NUMBER = 40
"""Digits; what is longer is no setting, and would lose its last ones as a decimal number."""
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# DeepSpeed's other spellings of the types of communication_data_type.
_FLOATS = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
# What the Trainer compares with its own value, or reads by itself: a text there is no number to it.
_READ_RAW = ("zero_optimization.stage", "fp16.enabled", "bf16.enabled")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "dict": 'an object {"…": …}',
    "null": "null",
}
_NAMES = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null"}
# "auto" that DeepSpeed itself reads; a file with no other is not for the Trainer.
OWN_AUTO = ("zero_optimization.zenflow.", "pipeline.", "expert_parallel.", "data_types.")


@dataclass(frozen=True, slots=True)
class _Spot:
    """One value, and what is known of its key."""

    document: Document
    member: Member
    where: str
    row: Row
    converted: bool
    """Whether DeepSpeed turns texts into numbers here."""

    @property
    def value(self) -> Any:
        return self.member.node.value

    def found(
        self, code: str, message: str, hint: str | None = None, new: str | None = None, **more: Any
    ) -> Finding:
        node = self.member.node
        edits = () if new is None else (Edit(node.start, node.end, new),)
        return self.document.found(node.start, self.where, code, message, hint, edits=edits, **more)


def check_types(document: Document) -> Iterator[Finding]:
    """Each value of a known key."""
    if document.root is not None:
        yield from _level(document, document.root, "", known_keys(), False)


def check_autos(document: Document) -> Iterator[Finding]:
    """Each "auto" that neither the Trainer nor accelerate fills."""
    if not for_trainer(document):
        return
    for where, member in autos(document):
        if where in vocabulary()["auto"] or where.startswith("bfloat16"):
            continue
        yield document.found(
            member.node.start,
            where,
            "ds-auto-unresolved",
            f'"auto" for `{member.key}` is filled by nobody: under the Trainer it is an error, DeepSpeed '
            "alone takes its default or the text",
            "write a value, or leave the key out",
            edits=document.removal(where),
        )


def for_trainer(document: Document) -> bool:
    """Whether a file has an "auto" that only the Trainer or accelerate can mean."""
    return any(not where.startswith(OWN_AUTO) for where, _ in autos(document))


def autos(document: Document) -> list[tuple[str, Member]]:
    """Dotted path and member of every "auto"; those in lists are looked at by nobody."""
    return [] if document.root is None else list(_autos(document.root, ""))


def _autos(node: Node, path: str) -> Iterator[tuple[str, Member]]:
    for member in node.members or ():
        where = join(path, member.key)
        if member.node.value == "auto":
            yield where, member
        yield from _autos(member.node, where)


def _level(document: Document, node: Node, path: str, rows: Any, strict: bool) -> Iterator[Finding]:
    known = spellings(rows)
    for member in node.members or ():
        row = known.get(member.key)
        if row is None:
            continue
        where = join(path, member.key)
        finding = _check(_Spot(document, member, where, row, strict))
        if finding is not None:
            yield finding
        elif "keys" in row and member.node.members is not None:
            yield from _level(document, member.node, where, row["keys"], row["strict"])


def _check(spot: _Spot) -> Finding | None:
    node, types = spot.member.node, spot.row["types"]
    if "keys" in spot.row:
        return _section(spot)
    if "any" in types or node.value == "auto":
        return None
    kind = (
        "dict" if node.members is not None else "list" if node.items is not None else _NAMES[type(node.value)]
    )
    if kind == "float" and not math.isfinite(node.value):
        if spot.document.text[node.start : node.end].lstrip("-")[0].isdigit():
            return spot.found("ds-wrong-value", f"`{spot.member.key}` is larger than any number")
        return None  # NaN is found where it is read
    if kind in types or (kind == "int" and "float" in types):
        return _range(spot)
    if "choices" in spot.row and kind == "str" and "int" not in types:
        return _range(spot)
    return _wrong(spot, kind)


def _section(spot: _Spot) -> Finding | None:
    node = spot.member.node
    if node.members is not None:
        return None
    if node.value is None and node.items is None and ("null" in spot.row["types"] or not _crashes(spot)):
        return None
    key = spot.member.key
    if key == "zero_optimization" and node.value is True:
        message = "`zero_optimization: true` is of old versions; the Trainer cannot read it"
        return spot.found("ds-wrong-type", message, 'write {"stage": 1}', '{"stage": 1}')
    enabled = "enabled" in spot.row["keys"]
    if enabled and (isinstance(node.value, bool) or node.value == "auto"):
        said = '"auto"' if node.value == "auto" else str(node.value).lower()
        new = f'{{"enabled": {said}}}'
        return spot.found("ds-wrong-type", f"`{key}` is an object, here it is {said}", f"write {new}", new)
    return spot.found("ds-wrong-type", f"`{key}` is an object, here it is {_shown(spot)}", 'write {"…": …}')


def _crashes(spot: _Spot) -> bool:
    """Whether null for this section breaks DeepSpeed's reader."""
    return bool(spot.row["strict"]) or spot.member.key in ("optimizer", "scheduler")


def _shown(spot: _Spot) -> str:
    node = spot.member.node
    if node.items is not None:
        return "a list"
    if node.members is not None:
        return "an object"
    text = spot.document.text[node.start : node.end]
    return text if len(text) <= 40 else f"{text[:37]}..."


def _expected(types: list[str]) -> str:
    return " or ".join(_WORDS[kind] for kind in types)


def _wrong(spot: _Spot, kind: str) -> Finding | None:
    """A value of a type that the key does not have, and what was probably meant."""
    value, types, key = spot.value, spot.row["types"], spot.member.key
    number = "int" in types or "float" in types
    expected = f"`{key}` takes {_expected(types)}, here it is {_shown(spot)}"
    lax = spot.converted and spot.where not in _READ_RAW
    if kind == "float" and "int" in types:
        return _decimal(spot, expected)
    if kind == "str" and number and _NUMBER.fullmatch(value.strip()):
        return _number_text(spot, expected, lax=lax)
    if kind == "str" and "bool" in types and value.strip().lower() in _TRUTH:
        new = str(_TRUTH[value.strip().lower()]).lower()
        effect = (
            "DeepSpeed converts it" if lax else "every text counts as true" if not spot.converted else None
        )
        message = f"{expected}; {effect}" if effect else expected
        return spot.found(
            "ds-wrong-type", message, f"write {new}", new, severity="warning" if lax else "error"
        )
    if kind == "int" and types[0] == "bool" and value in (0, 1):
        new = str(bool(value)).lower()
        return spot.found("ds-wrong-type", expected, f"write {new}", new, severity="warning")
    return spot.found("ds-wrong-type", expected)


def _decimal(spot: _Spot, expected: str) -> Finding | None:
    """A number with a point or an exponent where a whole one belongs."""
    value = spot.value
    if not value.is_integer():
        near = round(value) or (1 if value > 0 else 0)
        return spot.found("ds-float-bucket", expected, f"write {near}", str(near))
    if spot.converted:  # 5e8 and 1e9 are how everybody writes buckets
        return None
    return spot.found(
        "ds-wrong-type",
        f"{expected}: JSON reads it as the decimal number {value}, and DeepSpeed keeps it so",
        f"write {int(value)}",
        str(int(value)),
        severity="warning" if spot.member.key == "steps_per_print" else "error",
    )


def _number_text(spot: _Spot, expected: str, *, lax: bool) -> Finding:
    """ "8" for 8."""
    text = spot.value.strip().replace("_", "")
    whole = re.fullmatch(r"[-+]?[0-9]+", text) is not None
    if len(text) > _LONGEST_NUMBER or not math.isfinite(float(text)):
        return spot.found("ds-wrong-type", expected, "write a number in the usual range")
    number = int(text) if whole else float(text)
    new = str(number)
    if isinstance(number, float) and number.is_integer() and "int" in spot.row["types"]:
        new = str(int(number))
    refused = spot.converted and "int" in spot.row["types"] and not whole
    code = "ds-float-bucket" if refused else "ds-wrong-type"
    note = "; DeepSpeed converts it" if lax and not refused else ""
    severity = "warning" if note else "error"
    return spot.found(code, f"{expected}{note}", f"write {new}", new, severity=severity)


def _range(spot: _Spot) -> Finding | None:
    row, value, key = spot.row, spot.value, spot.member.key
    choices = row.get("choices")
    if choices and value is not None:
        plain = value.lower() if isinstance(value, str) and row.get("any_case") else value
        if isinstance(value, bool) or plain not in [c.lower() if row.get("any_case") else c for c in choices]:
            return _choice(spot, choices)
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    above, least = row.get("above"), row.get("at_least")
    below, most = row.get("below"), row.get("at_most")
    for wrong, said in (
        (above is not None and value <= above, f"more than {above}"),
        (least is not None and value < least, f"at least {least}"),
        (below is not None and value >= below, f"less than {below}"),
        (most is not None and value > most, f"at most {most}"),
    ):
        if wrong:
            return spot.found("ds-wrong-value", f"`{key}` must be {said}, here it is {_shown(spot)}")
    return None


def _choice(spot: _Spot, choices: list[Any]) -> Finding:
    value, key = spot.value, spot.member.key
    listed = ", ".join(str(choice) for choice in choices)
    near = None
    if isinstance(value, str):
        texts = [choice for choice in choices if isinstance(choice, str)]
        near = _FLOATS.get(value.lower().removeprefix("torch."))
        near = near if near in texts else close_key(value, texts)
    code = "ds-comm-dtype" if key.endswith("communication_data_type") else "ds-wrong-value"
    hint = f"did you mean {near}?" if near else None
    new = f'"{near}"' if near else None
    return spot.found(code, f"`{key}` is one of {listed}, here it is {_shown(spot)}", hint, new)
