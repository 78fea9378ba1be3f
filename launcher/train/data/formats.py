"""The formats of rows: the columns that each needs, and the canonical shape of each.

Canonical shapes: text{text} · pair{prompt, completion} · chat{messages}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import Problem, RecipeError

# format: (columns it must have, columns it may have)
COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prompt-completion": (("prompt", "completion"), ()),
    "instruction": (("instruction", "output"), ("input",)),
    "chat": (("messages",), ()),
    "text": (("text",), ()),
}
SHAPES = {"prompt-completion": "pair", "instruction": "pair", "chat": "chat", "text": "text"}
DEFAULT_LOSS = {
    "prompt-completion": "completion",
    "instruction": "completion",
    "chat": "assistant",
    "text": "all",
}
ALLOWED_LOSS = {
    "prompt-completion": ("completion", "all"),
    "instruction": ("completion", "all"),
    "chat": ("assistant", "completion", "all"),
    "text": ("all",),
}


def find_format(columns: Sequence[str], asked: str, renames: Mapping[str, str], file: str) -> str:
    """The format of rows with these columns; `renames` maps a format's field to the file's column.

    RecipeError lists what is missing and which columns the file has.
    """
    absent = [column for column in renames.values() if column not in columns]
    if absent:
        raise _missing(absent, columns, file)
    available = {field for field in columns if field not in renames.values()} | set(renames)
    if asked == "auto":
        for name, (needed, _) in COLUMNS.items():
            if available.issuperset(needed):
                return name
        wanted = "; ".join(f"{name}: {', '.join(needed)}" for name, (needed, _) in COLUMNS.items())
        raise RecipeError(
            Problem(
                "format-unknown",
                f"no known format has the columns {', '.join(columns)} (expected {wanted})",
                file=file,
                hint="rename columns with `columns: {field: column}`",
            )
        )
    missing = [field for field in COLUMNS[asked][0] if field not in available]
    if missing:
        raise _missing(missing, columns, file, asked)
    return asked


def to_canonical(rows: Any, fmt: str, renames: Mapping[str, str]) -> Any:
    """The same rows with only the columns of the format's canonical shape."""
    fields = [*COLUMNS[fmt][0], *COLUMNS[fmt][1]]
    columns = {field: renames.get(field, field) for field in fields}
    rows = rows.select_columns([name for name in columns.values() if name in rows.column_names])
    clashing = {new: old for new, old in columns.items() if new != old and old in rows.column_names}
    rows = rows.rename_columns({old: new for new, old in clashing.items()})
    if fmt == "instruction":
        rows = rows.map(instruction_to_pair, remove_columns=rows.column_names, desc="Formatting")
    return rows


def instruction_to_pair(row: Mapping[str, Any]) -> dict[str, str]:
    """One instruction row as a prompt and the completion that is learnt."""
    parts = [f"### Instruction:\n{row['instruction']}"]
    if row.get("input"):
        parts.append(f"### Input:\n{row['input']}")
    parts.append("### Response:\n")
    return {"prompt": "\n\n".join(parts), "completion": row["output"]}


def check_loss_on(fmt: str, asked: str | None) -> str:
    """Which tokens are learnt for a format; RecipeError when the two do not go together."""
    if asked is None:
        return DEFAULT_LOSS[fmt]
    if asked not in ALLOWED_LOSS[fmt]:
        allowed = " or ".join(ALLOWED_LOSS[fmt])
        raise RecipeError(
            Problem(
                "loss-on",
                f"{asked} is meaningless for {fmt} rows; expected {allowed}",
                path="data.loss_on",
            )
        )
    return asked


def _missing(
    missing: Sequence[str], columns: Sequence[str], file: str, fmt: str | None = None
) -> RecipeError:
    for_format = f" for format {fmt}" if fmt else ""
    message = f"no column {', '.join(missing)}{for_format}; the file has {', '.join(columns)}"
    return RecipeError(
        Problem("column-missing", message, file=file, hint="rename with `columns: {field: column}`")
    )
