"""Find the tool that a file belongs to, by its content, and read it."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launcher.errors import Problem, RecipeError
from launcher.importing import accelerate, axolotl, deepspeed, llamafactory, peft, trl
from launcher.importing.llamafactory import Info
from launcher.importing.reading import Reading, without_tokens
from launcher.importing.unsupported import MANUALLY, OURS, SCRIPT, config_tool_of, page_of
from launcher.knowledge.lint.document import read_json
from launcher.recipe.yaml_reader import parse_yaml

_PYTHON = re.compile(r"(?m)^(?:from [\w.]+ import\b|import [\w.]+\s*(?:$|as\b|,|#|;))")
"""Of a Python file, also of one without the ending .py, and of no shell file."""
_SHELL_SUFFIXES = (".sh", ".bash", ".zsh", ".slurm", ".sbatch")
_COMMAND = re.compile(r"(?m)\A#!.*sh\b|^#SBATCH\s|\s--[A-Za-z]")
"""Of a shell file or launch line without such an ending."""
_SPLIT = re.compile(r"[\s'\"=,;:()<>|&]+")
_OF_CONFIG = re.compile("config|deepspeed")
"""Option before a JSON file that is a config, not rows."""
_MOST_NAMED = 5
LARGEST = 1_000_000
"""Bytes of a file."""
KINDS = (
    "a DeepSpeed config, an accelerate config, a recipe of axolotl, LLaMA-Factory or TRL, peft's "
    "adapter_config.json"
)


class Reader(NamedTuple):
    """One kind of YAML or JSON file."""

    name: str
    matches: Callable[[Any], bool]
    """Of the mapping in the file."""
    read: Callable[..., Reading]


MAPPINGS = (
    Reader("DeepSpeed config", deepspeed.is_config, deepspeed.read),
    Reader("accelerate config", accelerate.is_config, accelerate.read),
    Reader("adapter_config.json", peft.is_config, peft.read),
    Reader("axolotl recipe", axolotl.is_recipe, axolotl.read),
    Reader("LLaMA-Factory recipe", llamafactory.is_recipe, llamafactory.read),
    Reader("TRL recipe", trl.is_recipe, trl.read),
)
"""The first that matches reads the file; the earlier are narrower."""


def info_of(text: str, file: str) -> Info | None:
    """LLaMA-Factory's list of data sets and its name, None where the text is something else."""
    data = _mapping(text, file)
    return (data, file) if data is not None and llamafactory.is_dataset_info(data) else None


def naming_tools(problems: Sequence[Problem]) -> list[Problem]:
    """The problems of recipes, with one for each file that is another tool's in place of all of that file."""
    files = {problem.file for problem in problems if (problem.code, problem.path) == _WITHOUT_MODEL}
    tools = {file: tool for file in files if file is not None and (tool := _tool_of(file)) is not None}
    named = [
        Problem(
            "other-tool",
            f"{'an' if tool[0] in 'aeiou' else 'a'} {tool}, expected a recipe of effilaunch",
            file,
            hint=f"`effilaunch import {shlex.quote(file)} --output recipe.yaml` converts it",
        )
        for file, tool in tools.items()
    ]
    return [*named, *(problem for problem in problems if problem.file not in tools)]


_WITHOUT_MODEL = ("missing-key", "model")


def _tool_of(file: str) -> str | None:
    """The kind of a file that another tool reads."""
    try:
        data = _mapping(text_of(file), file)
    except RecipeError:
        return None
    return next((r.name for r in MAPPINGS if data is not None and r.matches(data)), None)


def read_file(file: str) -> Reading:
    """Read one file. Raises RecipeError if it cannot be read, or is of no known kind."""
    return read_text(text_of(file), file)


def read_text(text: str, file: str, info: Info | None = None) -> Reading:
    """Read the text of a file; info: for a recipe of LLaMA-Factory.

    Raises RecipeError if it is of no known kind.
    """
    suffix = Path(file).suffix.lower()
    if suffix == ".py":
        raise RecipeError(_python(file))
    if not re.sub(r"(?m)^\s*#.*$", "", text).strip():
        raise RecipeError(Problem("import-unknown", "is empty", file, hint=f"known kinds: {KINDS}"))
    if suffix in _SHELL_SUFFIXES:
        raise RecipeError(_shell(text, file))
    data = _mapping(text, file)
    if data is not None:
        tool = config_tool_of(data)
        for reader in MAPPINGS if tool is None else ():
            if reader.matches(data) and (reader.read is not deepspeed.read or _is_json(text)):
                if reader.read is llamafactory.read:
                    return llamafactory.read(text, file, info)
                return reader.read(text, file)
        raise _unknown(file, data, tool)
    if suffix in (".yaml", ".yml", ".json"):
        if problems := _wrong(text, file):
            raise RecipeError(problems)
    elif _PYTHON.search(text):
        raise RecipeError(_python(file))
    elif _COMMAND.search(text):
        raise RecipeError(_shell(text, file))
    raise _unknown(file, None)


def _python(file: str) -> Problem:
    return Problem(SCRIPT, "a Python script; import reads configs, not scripts", file, hint=MANUALLY)


def _shell(text: str, file: str) -> Problem:
    """Why a shell file is not read, with the configs that it names."""
    here: dict[str, str] = {}
    words = _SPLIT.split(re.sub(r"(?m)(?:^|(?<=\s))#.*$", "", text))
    for option, word in itertools.pairwise(["", *words]):
        name = word.lstrip("-").rstrip("}")
        if name in here or not name.endswith((".yaml", ".yml", ".json")):
            continue
        path = beside(name, file)
        if path is not None and (tool := _tool_of(str(path))) is not None:
            here[name] = f"{path} ({tool})"
        elif path is None and (not name.endswith(".json") or _OF_CONFIG.search(option)):
            here[name] = f"{name} (not found)"
    hint = MANUALLY
    if here:
        names = ", ".join([*here.values()][:_MOST_NAMED])
        hint = f"import what it names: {names}; options on its command line must then be set in the recipe"
    message = "a shell script or launch line; import reads configs, not scripts"
    return Problem(SCRIPT, message, file, hint=hint)


def beside(name: str, file: str) -> Path | None:
    """A file that another one names: next to that one, or in the working folder."""
    try:
        for folder in (Path(file).parent, Path()):
            if (folder / name).is_file():
                return folder / name
    except (OSError, ValueError):
        return None
    return None


def text_of(file: str) -> str:
    """The content of a file. Raises RecipeError if it is no text, or longer than LARGEST."""
    try:
        with Path(file).open("rb") as stream:
            raw = stream.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RecipeError(Problem("file-unreadable", f"cannot read it: {reason}", file=file)) from None
    if len(raw) > LARGEST:
        raise RecipeError(Problem("import-unknown", f"more than {LARGEST:,} bytes are no config", file=file))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        kind, hint = ("text in UTF-16", "save it as UTF-8") if _is_utf_16(raw) else ("a binary file", None)
        raise RecipeError(Problem("import-unknown", f"{kind}, expected text in UTF-8", file=file, hint=hint))
    return text


def _is_utf_16(raw: bytes) -> bool:
    """UTF-16, as some editors and PowerShell write it."""
    if raw[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        return False
    try:
        return "\0" not in raw.decode("utf-16")
    except UnicodeDecodeError:
        return False


def _is_json(text: str) -> bool:
    return text.lstrip().startswith("{")


def _mapping(text: str, file: str) -> dict[str, Any] | None:
    """The text as a YAML or JSON mapping, None where it is neither."""
    if _is_json(text):
        root = read_json(text, file).root
        if root is not None:
            plain = root.plain()
            return plain if isinstance(plain, dict) else None
    data = parse_yaml(text, file).data
    return data if isinstance(data, dict) else None


def _wrong(text: str, file: str) -> list[Problem]:
    if _is_json(text):
        found = read_json(text, file).findings
        return [
            Problem("import-unreadable", one.message, file, one.line, None, one.hint) for one in found[:1]
        ]
    return parse_yaml(text, file).problems


def _unknown(file: str, data: dict[str, Any] | None, tool: str | None = None) -> RecipeError:
    message, hint = "is of no known kind", f"known kinds: {KINDS}" + ("" if data else f"; {MANUALLY}")
    if tool == OURS:
        message, hint = "is a recipe of effilaunch itself", "`effilaunch plan` reads it"
    elif tool is not None:
        message, hint = f"is a config of {tool}, which import does not read", f"{page_of(tool)}; {hint}"
    keys = without_tokens(", ".join(map(str, list(data or ())[:6])))
    keys = f" (its keys: {keys})" if keys else ""
    return RecipeError(Problem("import-unknown", f"{message}{keys}", file, hint=hint))
