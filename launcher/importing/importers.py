"""Find the tool that a file belongs to, by its content, and read it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launcher.errors import Problem, RecipeError
from launcher.importing import accelerate, axolotl, deepspeed, launch_line, llamafactory, peft, trl
from launcher.importing.llamafactory import Info
from launcher.importing.reading import Call, Reading, without_tokens
from launcher.importing.unsupported import MANUALLY, OURS, SCRIPT, config_tool_of, page_of
from launcher.knowledge.lint.document import read_json
from launcher.recipe.yaml_reader import parse_yaml

_PYTHON = re.compile(r"(?m)^(?:from [\w.]+ import\b|import [\w.]+\s*(?:$|as\b|,|#|;))")
"""Of a Python file, also of one without the ending .py, and of no shell file."""
LARGEST = 1_000_000
"""Bytes of a file."""
KINDS = (
    "a DeepSpeed config, an accelerate config, a recipe of axolotl, LLaMA-Factory or TRL, peft's "
    "adapter_config.json, a shell line that starts trl, axolotl, LLaMA-Factory or an example of transformers"
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
    hint = f"{MANUALLY}; of a program that import knows, give the launch line as a FILE"
    script = Problem(SCRIPT, "a Python script; import does not read scripts", file, hint=hint)
    if Path(file).suffix.lower() == ".py":
        raise RecipeError(script)
    if not re.sub(r"(?m)^\s*#.*$", "", text).strip():
        raise RecipeError(Problem("import-unknown", "is empty", file, hint=f"known kinds: {KINDS}"))
    data, is_config = _mapping(text, file), Path(file).suffix in (".yaml", ".yml", ".json")
    if data is not None:
        tool = config_tool_of(data)
        for reader in MAPPINGS if tool is None else ():
            if reader.matches(data) and (reader.read is not deepspeed.read or _is_json(text)):
                return _read(reader, text, file, None, info)
        # A launch line with JSON in it can be a mapping of YAML.
        if tool is not None or is_config or not launch_line.may_train(text):
            raise _unknown(file, data, tool)
    if is_config:
        if problems := _wrong(text, file):
            raise RecipeError(problems)
    elif _PYTHON.search(text):
        raise RecipeError(script)
    elif launch_line.may_train(text):
        return launch_line.read(text, file)
    raise _unknown(file, None)


def read_call(call: Call, file: Path | None, info: Info | None = None) -> Reading:
    """The recipe of another tool that a launch line starts, with the options of the line."""
    reader = next(reader for reader in MAPPINGS if reader.name == call.tool)
    text = "{}" if file is None else text_of(str(file))
    return _read(reader, text, str(file or call.place.file), call, info)


def _read(reader: Reader, text: str, file: str, call: Call | None, info: Info | None) -> Reading:
    if reader.read is llamafactory.read:
        return llamafactory.read(text, file, call, info)
    return reader.read(text, file) if call is None else reader.read(text, file, call)


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
