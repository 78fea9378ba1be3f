"""Find the recipe of a diagnosed run, and apply the changes of a failure to its text.

Never overwrites a file, and keeps none that the loader refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import parse_json
from launcher.knowledge.diagnose.findings import Diagnosis, Edit, Finding
from launcher.knowledge.diagnose.run_dir import is_run_dir
from launcher.knowledge.failures.elsewhere import fix_elsewhere
from launcher.recipe.loading import load_recipe
from launcher.recipe.yaml_reader import parse_yaml
from launcher.recipe.yaml_writer import flow
from launcher.render.new_file import write_new

_OWN_CODE = "launcher/train/"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class _Change:
    """Text to put in place of `start:end`."""

    start: int
    end: int
    text: str


def edits(file: str, text: str, changes: Mapping[str, Any]) -> tuple[Edit, ...]:
    """List the edits that the changes need; values that are already set are left out."""
    document = parse_yaml(text, file)
    found = []
    for path, new in changes.items():
        old = _value(document.data, path)
        if old != new:
            found.append(Edit(file, document.lines.get(path, 0), path, old, new))
    return tuple(found)


def changed_text(text: str, changes: Mapping[str, Any]) -> str:
    """Return the recipe's text with each dotted key set; None removes a key."""
    for path, value in changes.items():
        root = yaml.compose(text, Loader=_LOADER)
        change = None
        if isinstance(root, yaml.MappingNode):
            change = _at(root, path.split("."), value, text)
        elif value is not None:
            change = _Change(len(text), len(text), _lines(path.split("."), value, 0))
        if change is not None:
            text = text[: change.start] + change.text + text[change.end :]
    return text


def write_fixed(recipe: Path, folder: Path, changes: Mapping[str, Any]) -> Path:
    """Write `NAME.mended.yaml` into `folder`. RecipeError if it exists or the recipe would be invalid."""
    target = folder / f"{recipe.stem}.mended.yaml"
    try:
        write_new(target, changed_text(recipe.read_text("utf-8"), changes))
    except FileExistsError:
        message, hint = "already exists and is not overwritten", "move it away, or use it"
        raise RecipeError(Problem("mended-exists", message, str(target), hint=hint)) from None
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        message = f"cannot change {recipe}: {error}"
        raise RecipeError(Problem("mended-unwritable", message, str(target))) from error
    try:
        load_recipe(target)
    except RecipeError as error:
        target.unlink()
        first, file = error.problems[0], str(recipe)
        message = f"with {', '.join(changes)} changed, the recipe is invalid: {first.message}"
        hint = "change it manually"
        raise RecipeError(Problem("mend-refused", message, file, path=first.path, hint=hint)) from error
    return target


def recipe_of(paths: Sequence[str]) -> Path | None:
    """The recipe of the first run directory: the original if it is unchanged, else the copy in the run."""
    for folder in filter(is_run_dir, map(Path, paths)):
        copy = folder / "recipe.yaml"
        for record in ("plan.json", "submit.json"):  # a job runs a copy of the recipe
            try:
                original = Path(parse_json((folder / record).read_text("utf-8"))["recipe"])
                if original.is_file() and original.read_bytes() == copy.read_bytes():
                    return original
            except (OSError, ValueError, KeyError, TypeError):
                pass  # the run directory is incomplete
        if copy.is_file():
            return copy
    return None


def with_recipe(diagnosis: Diagnosis, recipe: Path) -> Diagnosis:
    """Add the recipe lines to change to the findings, if the recipe is readable."""
    try:
        text = recipe.read_text("utf-8", errors="replace")
    except OSError:
        return diagnosis
    findings = [replace(f, recipe=edits(str(recipe), text, f.failure.changes)) for f in diagnosis.findings]
    return replace(diagnosis, findings=findings)


def without_recipe(diagnosis: Diagnosis) -> Diagnosis:
    """Replace recipe keys in the advice, unless the log is of this project's own run."""

    def advised(finding: Finding) -> Finding:
        ours = any(_OWN_CODE in frame.file for frame in finding.error.frames)
        return finding if ours or finding.advice else replace(finding, advice=fix_elsewhere(finding.failure))

    findings, noticed = map(advised, diagnosis.findings), map(advised, diagnosis.noticed)
    return replace(diagnosis, findings=list(findings), noticed=list(noticed))


def _value(data: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(data, dict) or name not in data:
            return None
        data = data[name]
    return data


def _at(mapping: yaml.MappingNode, path: Sequence[str], value: Any, text: str) -> _Change | None:
    """The change below a mapping."""
    for position, (key, child) in enumerate(mapping.value):
        if key.value != path[0]:
            continue
        if len(path) > 1 and isinstance(child, yaml.MappingNode):
            emptied = value is None and len(child.value) == 1 and child.value[0][0].value == path[1]
            if not (emptied and len(path) == 2):
                return _at(child, path[1:], value, text)
        elif len(path) > 1 and value is None:
            return None
        if value is None:
            return _without(mapping, position, text)
        return _replaced(child, _nested(path[1:], value), text)
    return None if value is None else _inserted(mapping, path, value, text)


def _replaced(node: yaml.Node, value: Any, text: str) -> _Change:
    start, end = node.start_mark.index, _end(node)
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        start = text.rindex(":", 0, start) + 1
    is_after_colon = start > 0 and text[start - 1] == ":"  # also `key:` without a value
    return _Change(start, end, f" {flow(value)}" if is_after_colon else flow(value))


def _inserted(mapping: yaml.MappingNode, path: Sequence[str], value: Any, text: str) -> _Change:
    if mapping.flow_style:
        last = _end(mapping) - 1
        comma = ", " if mapping.value else ""
        return _Change(last, last, f"{comma}{path[0]}: {flow(_nested(path[1:], value))}")
    end = _end(mapping.value[-1][1]) if mapping.value else mapping.start_mark.index
    newline = text.find("\n", end)
    place = len(text) if newline < 0 else newline + 1
    before = "" if newline >= 0 else "\n"
    indent = mapping.value[0][0].start_mark.column if mapping.value else mapping.start_mark.column
    return _Change(place, place, before + _lines(path, value, indent))


def _without(mapping: yaml.MappingNode, position: int, text: str) -> _Change:
    key, child = mapping.value[position]
    start, end = key.start_mark.index, max(_end(child), key.end_mark.index + 1)
    if mapping.flow_style:
        if position + 1 < len(mapping.value):
            return _Change(start, mapping.value[position + 1][0].start_mark.index, "")
        if position > 0:
            return _Change(_end(mapping.value[position - 1][1]), end, "")
        return _Change(start, end, "")
    begin = text.rfind("\n", 0, start) + 1
    newline = text.find("\n", end)
    return _Change(begin, len(text) if newline < 0 else newline + 1, "")


def _end(node: yaml.Node) -> int:
    """Where a value's text ends; the end mark of a block is after the comments that follow it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        key, child = node.value[-1]
        return max(_end(child), int(key.end_mark.index) + 1)
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _end(node.value[-1])
    return int(node.end_mark.index)


def _nested(path: Sequence[str], value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def _lines(path: Sequence[str], value: Any, indent: int) -> str:
    """Block lines of a new key: `trainer:` and below it `  max_steps: 5`."""
    lines = []
    for name in path[:-1]:
        lines.append(f"{' ' * indent}{name}:\n")
        indent += 2
    lines.append(f"{' ' * indent}{path[-1]}: {flow(value)}\n")
    return "".join(lines)
