"""Load a recipe file with overrides: a checked `Recipe`, or all of its problems at once."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import exists
from launcher.files.shipped import shipped_names
from launcher.recipe import env
from launcher.recipe.data_paths import is_hub_id, is_package, is_url
from launcher.recipe.field_tables import TRAINER_OWNED, adapter_fields, trainer_fields
from launcher.recipe.fields import check_adapter, check_trainer, resolve_trainer
from launcher.recipe.merged_yaml import MergedRecipe, find_recipe, load_merged
from launcher.recipe.nested_fields import check_nested
from launcher.recipe.problems import validation_problems
from launcher.recipe.rules import (
    SECRET_CODE,
    check_environment,
    check_rules,
    data_sources,
    take_secrets,
    take_todo,
    take_unsupported,
    task_of,
)
from launcher.recipe.schema import Recipe
from launcher.recipe.suggestions import close_key
from launcher.recipe.yaml_reader import join, parse_scalar
from launcher.tasks.grpo import KEY


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value of the recipe was set."""

    source: Literal["recipe", "parent", "override"]
    by: str
    """`file:line`, `--set` or `--sweep`."""


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A checked recipe and where each value was set."""

    recipe: Recipe
    """Paths are absolute; `${ENV:...}` stays in `trainer` and `launch.env`, and is resolved elsewhere."""
    text: str
    """The file as given, without what it extends."""
    path: Path
    origins: Mapping[str, Origin]
    """Dotted path (`data.train[0].path`) of every given value, of sections and lists too."""
    kept: Mapping[str, env.Kept] = field(default_factory=dict)
    """Dotted path -> the reference that stays one in every file."""
    of_jobs: Sequence[Problem] = ()
    """References in the sections of schedulers that no job's files can have; their keys are left out."""
    overrides: Sequence[str] = ()
    """`key=value` of `--set`, as given."""


def load_recipe(
    path: Path | str, overrides: Sequence[str] = (), swept: Sequence[str] = (), text: str | None = None
) -> LoadedRecipe:
    """Load a file, or the shipped recipe of that name, with `key=value` overrides, and those of a sweep.

    text: what is in the file, where it is not read (an editor's). Raises RecipeError with every problem of
    the recipe, of what it extends and of the overrides.
    """
    file = find_recipe(path) if text is None else Path(path)
    if file is None:
        if _is_there(Path(path)):
            message = "is not a readable file, but a folder, a pipe, a device or a broken link"
            raise RecipeError(Problem("recipe-missing", message, str(path), hint="name a YAML file"))
        near = _similar_recipe(Path(path))
        hint = f"did you mean `{near}`?" if near else "`effilaunch recipes` lists the shipped recipes"
        message = "no such file and no shipped recipe of that name"
        raise RecipeError(Problem("recipe-missing", message, str(path), hint=hint))
    merged = load_merged(file, overrides, swept, text)
    if any(problem.code in ("yaml-syntax", "unreadable") for problem in merged.problems) or not merged.data:
        raise RecipeError(merged.problems or [Problem("wrong-type", "the recipe is empty", str(file), 1)])
    main = str(file)
    recipe, problems, kept, of_jobs = _check(merged, os.environ)
    problems += _shared_mirror(recipe, swept)
    # A value that the reader refused is null from there on, which is no second problem.
    unread = {_place(problem) for problem in merged.problems}
    placed = [with_position(problem, merged, main) for problem in problems]
    problems = merged.problems + [problem for problem in placed if _place(problem) not in unread]
    if recipe is None or problems:
        unique = dict.fromkeys(problems)
        raise RecipeError(sorted(unique, key=lambda p: (p.file != main, p.file or "", p.line or 0)))
    origins = {p: Origin(position.source, position.by) for p, position in merged.positions.items()}
    placed = [with_position(problem, merged, main) for problem in of_jobs]
    return LoadedRecipe(recipe, merged.text, file, origins, kept, placed, tuple(overrides))


def _shared_mirror(recipe: Recipe | None, swept: Sequence[str]) -> list[Problem]:
    """The problem of a sweep whose runs would all have one place in the object store."""
    url = None if recipe is None else recipe.runtime.mirror
    if url is None or not swept or "{name}" in url or any(text.startswith("runtime") for text in swept):
        return []
    message = "is the place of one run, and a sweep has several"
    hint = f"write {url.rstrip('/')}/{{name}}: the name of each run directory"
    return [Problem("wrong-value", message, path="runtime.mirror", hint=hint)]


def _is_there(path: Path) -> bool:
    try:
        return os.path.lexists(path) and path.name != ""
    except (OSError, ValueError):  # a name that no file can have
        return False


def _similar_recipe(path: Path) -> str | None:
    """A recipe with a similar name in the same folder, else a shipped one."""
    try:
        beside = {file.stem: str(file) for suffix in ("*.yaml", "*.yml") for file in path.parent.glob(suffix)}
    except (OSError, ValueError):  # a name that no folder can have, a folder that may not be read
        beside = {}
    near = close_key(path.stem, beside)
    return beside[near] if near else close_key(path.name.removesuffix(".yaml"), shipped_names())


def _place(problem: Problem) -> tuple[object, ...]:
    return problem.file, problem.line, problem.path


def with_position(problem: Problem, merged: MergedRecipe, main: str) -> Problem:
    """The problem with file and line; a missing key is reported for `main`."""
    position = merged.position(problem.path or "")
    if position is None:
        return replace(problem, file=main)
    return replace(problem, file=position.file, line=position.line)


def _check(
    merged: MergedRecipe, environ: Mapping[str, str]
) -> tuple[Recipe | None, list[Problem], dict[str, env.Kept], list[Problem]]:
    """The recipe, if its types allow one, all problems (without file and line), its references, and the
    problems of jobs alone."""
    data = copy.deepcopy(merged.data)
    problems = [*take_todo(data), *take_unsupported(data), *take_secrets(data), *check_environment(data)]
    of_jobs = _take_job_references(data, environ)
    references = _resolve_references(data, environ, problems)
    task = task_of(data).name
    _drop_nulls(data, task)
    trainer = data.get("trainer")
    resolved: Mapping[str, Any] = {}
    if isinstance(trainer, dict):
        problems += check_trainer({k: v for k, v in trainer.items() if k not in TRAINER_OWNED}, environ, task)
        known = {k: v for k, v in trainer.items() if not _is_missing(v, environ)}
        resolved = resolve_trainer(known, environ, task)
        for name, value in resolved.items():
            if not isinstance(value, str) and env.is_reference(trainer[name]):
                trainer[name] = value  # a number or a switch is decided now
        # What `optim_args` holds is in the messages: not the value of a variable.
        problems += check_nested({**resolved, "optim_args": trainer.get("optim_args")})
    if isinstance(data.get("adapter"), dict):
        problems += check_adapter(data["adapter"])

    def folder(path: str) -> Path:
        position = merged.position(path)
        return position.folder if position else Path.cwd()

    problems += check_rules(data, resolved, folder)
    if task_of(data).made_by_hooks:
        data.setdefault("model", {})
        data["data"] = {"train": []}
    _make_absolute(data, folder)
    recipe, errors = _validate(data, references)
    kept = {} if recipe is None else _kept(data, references, folder)
    # of two problems with one field, from the field table and from the schema, the former says more
    known_paths = {problem.path for problem in problems}
    problems += [problem for problem in errors if problem.path not in known_paths]
    hidden = {problem.path for problem in problems if problem.code == SECRET_CODE}
    return recipe, [p for p in problems if p.path not in hidden or p.code == SECRET_CODE], kept, of_jobs


def _kept(
    data: Any, references: Mapping[str, env.Kept], folder: Callable[[str], Path]
) -> dict[str, env.Kept]:
    """The references that stay in the files of a run: those of texts; a choice or a number is decided."""
    if not references:
        return {}
    found: dict[str, env.Kept] = {}

    def visit(value: Any, path: str) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            child, item = join(path, key), value[key]
            if isinstance(item, (dict, list)):
                visit(item, child)
            elif isinstance(item, str) and child in references:
                given = references[child]
                is_relative = item != given.value and not given.value.startswith(("/", "~"))
                found[child] = env.Kept(item, f"{folder(child)}/{given.text}" if is_relative else given.text)

    visit(data, "")
    texts = copy.deepcopy(data)
    for path, one in found.items():
        _put(texts, path, one.text)
    try:
        Recipe.model_validate(texts)
    except ValidationError as error:
        decided = {problem.path for problem in validation_problems(error.errors(), texts)}
        return {path: one for path, one in found.items() if path not in decided}
    return found


def _validate(
    data: dict[str, Any], references: Mapping[str, env.Kept]
) -> tuple[Recipe | None, list[Problem]]:
    """Validate; a value that was one reference counts as a number where a string does not fit."""
    try:
        return Recipe.model_validate(data), []
    except ValidationError as error:
        problems = validation_problems(error.errors(), data)
    whole = {path: one.value for path, one in references.items() if env.is_reference(one.text)}
    numbers = {problem.path for problem in problems} & set(whole)
    if numbers:
        for path in numbers:
            _put(data, str(path), parse_scalar(whole[str(path)]))
        try:
            return Recipe.model_validate(data), []
        except ValidationError as error:
            problems = validation_problems(error.errors(), data)
    return None, problems


def _put(data: Any, path: str, value: Any) -> None:
    def visit(current: Any, here: str) -> None:
        for key in list(current) if isinstance(current, dict) else range(len(current)):
            child = join(here, key)
            if child == path:
                current[key] = value
            elif isinstance(current[key], (dict, list)):
                visit(current[key], child)

    visit(data, "")


def _drop_nulls(data: dict[str, Any], task: str) -> None:
    """Remove `key: null` under `trainer` and `adapter`, unless null is a valid value of the field."""
    for section, fields in (("trainer", trainer_fields(task)), ("adapter", adapter_fields())):
        values = data.get(section)
        if not isinstance(values, dict) or None not in values.values():
            continue
        for name in [name for name, value in values.items() if value is None]:
            if "none" not in fields.get(name, {}).get("types", ["none"]):
                del values[name]
    for section in ("trainer", "launch", "sharding", "fixes", "runtime"):
        if section in data and data[section] is None:
            del data[section]


def _is_missing(value: Any, environ: Mapping[str, str]) -> bool:
    """Whether a value refers to a variable that is not set."""
    if isinstance(value, str):
        return bool(env.missing_variables(value, environ))
    items: Any = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_is_missing(item, environ) for item in items)


def _resolve_references(
    data: dict[str, Any], environ: Mapping[str, str], problems: list[Problem]
) -> dict[str, env.Kept]:
    """Resolve references in place, but not under `trainer` and `launch.env`.

    Returns path -> the texts that had any. Missing variables go to `problems`.
    """
    resolved: dict[str, env.Kept] = {}

    def visit(value: Any, path: str, keep: bool) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            child, item = join(path, key), value[key]
            if isinstance(item, (dict, list)):
                visit(item, child, keep or child in ("trainer", "launch.env"))
            elif isinstance(item, str) and env.has_incomplete_reference(item):
                problems.append(env.incomplete_problem(child))
            elif isinstance(item, str) and env.has_reference(item):
                missing = env.missing_variables(item, environ)
                problems.extend(env.missing_problem(name, child) for name in missing)
                if not missing and not keep:
                    value[key] = env.resolve_env(item, environ)
                    resolved[child] = env.Kept(value[key], item)

    visit(data, "", keep=False)
    return resolved


_OF_SCHEDULER = re.compile(r"launch\.(slurm|kubernetes|ray|skypilot)\.([^.\[]+)")
_SHELL_LINE = re.compile(r"launch\.\w+\.(?:prepare\.)?setup\[\d+\]")


def _take_job_references(data: dict[str, Any], environ: Mapping[str, str]) -> list[Problem]:
    """Make references in the lines of `setup` those of the job's shell, and take out keys with others.

    Schedulers read their sections from the job's files, which would have the value. Returns the problems of
    what was taken out, which only the job of that scheduler has.
    """
    launch = data.get("launch")
    problems: list[Problem] = []

    def visit(value: Any, path: str) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            child, item = join(path, key), value[key]
            if isinstance(item, (dict, list)):
                visit(item, child)
            elif isinstance(item, str) and _OF_SCHEDULER.match(child) and env.has_reference(item):
                missing = env.missing_variables(item, environ)
                line = env.for_shell(item) if _SHELL_LINE.fullmatch(child) and not missing else None
                value[key] = line or item
                problems.extend(env.missing_problem(name, child) for name in missing)
                if line is None and not missing:
                    problems.append(_unwritable_reference(child))

    visit({"launch": launch} if isinstance(launch, dict) else {}, "")
    for section, key in {match.groups() for p in problems if (match := _OF_SCHEDULER.match(p.path or ""))}:
        data["launch"][section].pop(key)
    return problems


def _unwritable_reference(path: str) -> Problem:
    message = "would be written into the job's files with the variable's value"
    hint = f"write the value, or consent when you submit: --set {path}=VALUE"
    if _SHELL_LINE.fullmatch(path):
        message = "has a reference that the shell of the job cannot expand, by its quotes or its default"
        hint = "write $NAME, outside of single quotes"
    return Problem("env-reference", message, path=path, hint=hint)


_PATHS = {
    **dict.fromkeys(("model.name_or_path", "model.tokenizer", "model.chat_template"), False),
    **dict.fromkeys(("sharding.config", "trainer.generation_config"), False),
    **dict.fromkeys(("model.cache_dir", "adapter.path", "sharding.nvme_path", "launch.hostfile"), True),
}
"""Key -> whether its value is always a path; False: it may also be a name."""


def names_file(entry: Any) -> bool:
    """Whether an entry of `reward:` names a function of a file: `FILE.py:NAME`."""
    function = entry.get("function") if isinstance(entry, dict) else None
    return isinstance(function, str) and ".py:" in function


def _make_absolute(data: dict[str, Any], folder: Callable[[str], Path]) -> None:
    """Make paths absolute, relative to the file that sets them; hub ids and package: references stay."""

    def fix(holder: Any, key: str, path: str, *, always: bool, rows: bool = False) -> None:
        text = holder.get(key) if isinstance(holder, dict) else None
        if not isinstance(text, str) or not text or is_package(text):
            return
        if key == "chat_template" and ("\n" in text or "{" in text):  # an inline template
            return
        if rows and (is_url(text) or is_hub_id(text, folder(path))):
            return
        plain = os.path.expanduser(text)  # noqa: PTH111 - a Path would lose the leading ./
        full = Path(os.path.normpath(folder(path) / plain))
        if always or plain.startswith(("./", "../", "/")) or plain in (".", "..") or exists(full):
            holder[key] = str(full)

    fix(data, "python", "python", always=True)
    for index, entry in enumerate(data[KEY] if isinstance(data.get(KEY), list) else []):
        fix(entry, "function", f"{KEY}[{index}].function", always=names_file(entry))
    for path, always in _PATHS.items():
        section, _, key = path.partition(".")
        fix(data.get(section), key, path, always=always)
    for path, source in data_sources(data):
        fix(source, "path", f"{path}.path", always=True, rows=True)


def local_paths(loaded: LoadedRecipe) -> dict[str, str]:
    """Dotted path -> absolute path, of everything that the recipe names in the file system."""
    data = loaded.recipe.model_dump(exclude_unset=True)
    found: dict[str, str] = {}

    def look(holder: Any, key: str, path: str) -> None:
        text = holder.get(key) if isinstance(holder, dict) else None
        if isinstance(text, str) and text.startswith("/") and "\n" not in text and "{" not in text:
            found[path] = text.partition(".py:")[0] + ".py" if ".py:" in text else text

    look(data, "python", "python")
    for index, entry in enumerate(data.get(KEY) or []):
        look(entry, "function", f"{KEY}[{index}].function")
    for path in _PATHS:
        section, _, key = path.partition(".")
        look(data.get(section), key, path)
    for path, source in data_sources(data):
        look(source, "path", f"{path}.path")
    return found


def with_changes(loaded: LoadedRecipe, changes: Mapping[str, Any], by: str | None) -> LoadedRecipe:
    """The recipe with some values replaced; None removes a key.

    `changes`: dotted key -> value. `by`: their origin; None: no origin, so that known fixes may replace them.
    """
    data = loaded.recipe.model_dump(exclude_unset=True)
    origins = dict(loaded.origins)
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        section = data
        for name in path:
            section = section.setdefault(name, {})
        inside = (dotted + ".", dotted + "[")
        origins = {k: o for k, o in origins.items() if k != dotted and not k.startswith(inside)}
        section.pop(last, None)
        if value is not None:
            section[last] = value
            if by is not None:
                origins[dotted] = Origin("override", by)
    return replace(loaded, recipe=Recipe.model_validate(data), origins=origins)
