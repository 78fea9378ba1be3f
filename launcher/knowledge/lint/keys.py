"""The keys that DeepSpeed knows (written by `make tables`), and findings about others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from launcher.knowledge.lint.document import Document, LintFinding, Member, Node, TextEdit, join
from launcher.recipe.suggestions import close_key, is_spelling

TABLE = Path(__file__).parent / "tables" / "deepspeed.json"
Row = Mapping[str, Any]


@cache
def vocabulary() -> dict[str, Any]:
    """`version`, `keys`, `removed`, `auto`; `optimizers` and `schedulers`, with rows of their `_params`.

    A row of `keys` has `types`; maybe `choices` (in `any_case`), bounds (`above`, `at_least`, `below`,
    `at_most`), `deprecated` (what to write instead), `other_name`; a row of parameters (`NAME` of any class,
    or `CLASS.NAME`) maybe `whole`, `converted`, `length` and `items`. A section's has `keys` and `strict`:
    whether DeepSpeed refuses an unknown one; `open_below` are names that may stand anywhere in it.
    """
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def deepspeed_version() -> str:
    """The DeepSpeed that the table was generated from."""
    return str(vocabulary()["version"])


def known_keys() -> dict[str, Row]:
    """The keys of the top level."""
    found: dict[str, Row] = vocabulary()["keys"]
    return found


def spellings(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Every spelling that a section accepts -> its row."""
    other = {row["other_name"]: row for row in rows.values() if "other_name" in row}
    return {**other, **rows}


def sections_with(name: str) -> list[str]:
    """Sections in which a key of this name is known."""
    return [path for path, rows in _tables("", known_keys()) if name in spellings(rows)]


def _tables(path: str, rows: Mapping[str, Row]) -> Iterator[tuple[str, Mapping[str, Row]]]:
    yield path, rows
    for key, row in rows.items():
        if "keys" in row and key != "bfloat16":
            yield from _tables(f"{path}.{key}" if path else key, row["keys"])


# Key of another version or tool -> the key in its section that is meant.
RENAMED = {
    "aio.thread_count": "intra_op_parallelism",
    "zero_optimization.cpu_offload_params": "cpu_offload_param",
    "zero_optimization.grad_hooks": "",
    "fp16.opt_level": "",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "fp_16": "fp16",
    "bf_16": "bf16",
    "float16": "fp16",
    "zero": "zero_optimization",
    "zero_optimisation": "zero_optimization",
    "comms_config": "comms_logger",
}
_MOVED = {"gradient_accumulation_dtype": ("grad_accum_dtype", "data_types")}
"""Key of the top level -> (name, section) under which DeepSpeed reads it."""
_WIDEST = 40
"""Known keys that a hint lists at most."""


def sections(document: Document) -> Iterator[tuple[str, Node, dict[str, Row], bool, bool]]:
    """Each section that DeepSpeed knows: path, object, spelling -> row, strict, whether names are open."""
    pending = [] if document.root is None else [("", document.root, known_keys(), False, False)]
    for path, node, rows, strict, is_open in pending:
        known = spellings(rows)
        yield path, node, known, strict, is_open
        for member in node.members or ():
            row = known.get(member.key, {})
            if "keys" in row and member.node.members is not None:
                below = is_open or bool(row.get("open_below"))
                pending.append((join(path, member.key), member.node, row["keys"], row["strict"], below))


def check_keys(document: Document) -> Iterator[LintFinding]:
    """Find unknown, removed and renamed keys at every depth."""
    for path, node, known, strict, is_open in sections(document):
        for member in (node.members or ()) if not is_open else ():
            where, row = join(path, member.key), known.get(member.key)
            if where in vocabulary()["removed"]:
                yield _removed(document, where, member)
            elif row is not None:
                yield from _known(document, node, member, where, row)
            elif strict or not member.key.startswith("_"):  # else it is a comment
                yield _unknown(document, node, member, path, known, strict)


def _removed(document: Document, where: str, member: Member) -> LintFinding:
    reason = vocabulary()["removed"][where].split(" See https")[0].rstrip(".")
    message = f"DeepSpeed {deepspeed_version()} refuses `{member.key}` with any value: {reason}"
    given = member.node.plain()
    is_off = not given or (isinstance(given, dict) and not given.get("enabled"))
    return document.report(where, "ds-removed-key", message, "remove it", member=member, remove=is_off)


def _unknown(
    document: Document, holder: Node, member: Member, path: str, known: Mapping[str, Row], strict: bool
) -> LintFinding:
    where = join(path, member.key)
    near, is_sure = RENAMED.get(where), where in RENAMED
    if near is None:
        longer = _longer(member.key, known)
        near = longer or close_key(member.key, known)
        if near is not None:
            has_type = fits(known[near], member.node)
            is_sure = near == longer or is_spelling(member.key, near)
            near = near if has_type or is_sure or member.node.members is not None else None
            is_sure &= has_type
    effect = "refuses it" if strict else "ignores it silently"
    level = f"`{path}`" if path else "the top level"
    edits: tuple[TextEdit, ...] = ()
    homes = [home for home in sections_with(member.key) if home != path]
    # At the top level a common name, such as seed or debug, is rather another tool's.
    is_common = not path and "_" not in member.key and "zero_optimization" not in homes
    if where in _MOVED:
        hint = "write it as `{}` in `{}`".format(*_MOVED[where])
    elif near:
        hint = f"did you mean `{near}`?"
        # A section for a number, or the other way round: the name is only a guess.
        alike = ("keys" in known[near]) == (member.node.members is not None)
        if is_sure and alike and holder.get(near) is None:
            edits = (TextEdit(member.start, member.end, f'"{near}"'),)
    elif path in ("bf16", "bfloat16") and "fp16" in homes:
        hint, edits = "remove it: bf16 needs no loss scaling", document.removal(where)
    elif homes and len(homes) <= 2 and not is_common and member.key != path:
        hint = f"move it to {' or '.join(f'`{home}`' if home else 'the top level' for home in homes)}"
    else:
        is_needless = len(known) > _WIDEST or member.key == path
        hint = "remove it" if is_needless else f"known keys: {', '.join(sorted(known))}"
    code = "ds-typo-nested" if path else "ds-typo-toplevel"
    message = f"unknown key `{member.key}` in {level}; DeepSpeed {deepspeed_version()} {effect}"
    return document.found(member.start, where, code, message, hint, edits=edits)


def fits(row: Row, node: Node) -> bool:
    """Whether a value has the type of a key, or is a string that may be converted to it."""
    types, kind = {*row["types"]}, node.kind
    if "any" in types or node.value == "auto" or kind in types:
        return True
    if kind == "str":
        is_word = node.value.lower() in ("true", "false")
        return "bool" in types if is_word else bool({"int", "float"} & types and not node.value[:1].isalpha())
    return kind in ("int", "float") and bool({"int", "float"} & types)


def _longer(name: str, known: Mapping[str, Row]) -> str | None:
    """The one key that is this name with `stage3_` before it, or without."""
    for candidate in (f"stage3_{name}", name.removeprefix("stage3_")):
        if candidate != name and candidate in known:
            return candidate
    return None


def _known(document: Document, holder: Node, member: Member, where: str, row: Row) -> Iterator[LintFinding]:
    """Old names of keys, and two names of one key."""
    if "deprecated" in row:
        yield _deprecated(document, holder, member, where, str(row["deprecated"]))
    other = row.get("other_name")
    if other and other != member.key and holder.get(other) is not None:
        message = f"`{member.key}` and `{other}` are the same setting; DeepSpeed refuses both together"
        yield document.report(where, "ds-alias-twice", message, f"remove `{other}`", member=member)
    if where == "bfloat16":
        yield _bfloat16(document, holder, member)


def _deprecated(document: Document, holder: Node, member: Member, where: str, new: str) -> LintFinding:
    edits: tuple[TextEdit, ...] = ()
    hint = f"write `{new}`"
    value = member.node.value
    if new.startswith("offload_") and " or " not in new:
        hint = f'write "{new}": {{"device": "cpu"}}'
        if value is True and holder.get(new) is None:
            edits = (TextEdit(member.start, member.node.end, f'"{new}": {{"device": "cpu"}}'),)
        elif not value:
            hint, edits = "remove it", document.removal(where)
    elif " or " in new:
        hint = "it has no effect: set `pin_memory` in the offload section"
    elif holder.get(new) is None:
        edits = (TextEdit(member.start, member.end, f'"{new}"'),)
    message = f"`{member.key}` is deprecated"
    return document.found(
        member.start, where, "ds-deprecated-key", message, hint, severity="warning", edits=edits
    )


def _bfloat16(document: Document, holder: Node, member: Member) -> LintFinding:
    message = (
        "`bfloat16` is the old name: the Trainer does not fill it, and accelerate's own `bf16` overrides it, "
        "so the run is silently fp32"
    )
    hint, other = "remove it: `bf16` is set", holder.get("bf16")
    edits: tuple[TextEdit, ...] = ()
    if other is None:
        hint, edits = "write `bf16`", (TextEdit(member.start, member.end, '"bf16"'),)
    elif other.node.plain() == member.node.plain():
        edits = document.removal("bfloat16")
    return document.found(member.start, "bfloat16", "ds-bfloat16-alias", message, hint, edits=edits)
