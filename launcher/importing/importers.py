"""Which tool a file is of: by what it says, not by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.importing import accelerate, axolotl, deepspeed, launch_line, llamafactory, peft, trl
from launcher.importing.llamafactory import tells_info
from launcher.importing.reading import Call, Place, Reading, without_tokens
from launcher.importing.unsupported import MANUALLY, OURS, SCRIPT, config_tool_of, page_of
from launcher.knowledge.lint.document import read_json
from launcher.recipe.yaml_reader import parse_yaml

LLAMAFACTORY = "LLaMA-Factory recipe"
_PYTHON = re.compile(r"(?m)^(?:from [\w.]+ import\b|import [\w.]+\s*(?:$|as\b|,|#|;))")
"""What stands in a Python file, also in one without the ending .py, and in no shell file."""
LARGEST = 1_000_000
"""Bytes; nobody writes as much by hand."""
KINDS = (
    "a DeepSpeed config, an accelerate config, a recipe of axolotl, LLaMA-Factory or TRL, peft's "
    "adapter_config.json, a shell line that starts trl, axolotl, LLaMA-Factory or an example of transformers"
)


@dataclass(frozen=True, slots=True)
class Reader:
    """One kind of file. tells: of a mapping that was read."""

    name: str
    tells: Callable[[Any], bool]
    read: Callable[..., Reading]


MAPPINGS = (
    Reader("DeepSpeed config", deepspeed.tells, deepspeed.read),
    Reader("accelerate config", accelerate.tells, accelerate.read),
    Reader("adapter_config.json", peft.tells, peft.read),
    Reader("axolotl recipe", axolotl.tells, axolotl.read),
    Reader(LLAMAFACTORY, llamafactory.tells, llamafactory.read),
    Reader("TRL recipe", trl.tells, trl.read),
)
"""YAML and JSON, by keys; the first that tells is meant, of which the earlier are narrower."""


Info = tuple[dict[str, Any], str]
"""A dataset_info.json of LLaMA-Factory, and its name."""


def info_of(text: str, file: str) -> Info | None:
    """LLaMA-Factory's list of data sets, None where the text is something else."""
    data = _mapping(text, file)
    return (data, file) if data is not None and tells_info(data) else None


def read_file(file: str) -> Reading:
    """Read one file. RecipeError when it cannot be read, or is of no kind that is known."""
    return read_text(text_of(file), file)


def read_text(text: str, file: str, info: Info | None = None) -> Reading:
    """Read the text of a file; info: for a recipe of LLaMA-Factory.

    RecipeError when it is of no kind that is known.
    """
    if Path(file).suffix.lower() == ".py":
        raise RecipeError(_script(file))
    data = _mapping(text, file)
    if data is not None:
        if (tool := config_tool_of(data)) is not None:
            raise _unknown(file, data, tool)
        for reader in MAPPINGS:
            if reader.tells(data) and (reader.read is not deepspeed.read or text.lstrip().startswith("{")):
                more = {"info": info} if reader.name == LLAMAFACTORY else {}
                return reader.read(text, file, **more)
        raise _unknown(file, data)
    if Path(file).suffix in (".yaml", ".yml", ".json"):
        if problems := _wrong(text, file):
            raise RecipeError(problems)
    elif _PYTHON.search(text):
        raise RecipeError(_script(file))
    elif launch_line.tells(text):
        return launch_line.read(text, file)
    raise _unknown(file, None)


def _script(file: str) -> Problem:
    """A Python script: what it does depends on all of it, so nothing is taken."""
    message = "a Python script; import does not read scripts"
    hint = f"{MANUALLY}; of a program that import knows, give the launch line as a FILE"
    return Problem(SCRIPT, message, file, hint=hint)


def read_call(call: Call, place: Place, file: Path | None, info: Info | None = None) -> Reading:
    """The recipe of another tool that a launch line starts, with what the line says over it."""
    reader = next(reader for reader in MAPPINGS if reader.name == call.tool)
    text = "{}" if file is None else text_of(str(file))
    overrides = dict(call.overrides)
    more: dict[str, Any] = {"info": info} if reader.name == LLAMAFACTORY else {}
    if call.word:
        more["word"] = call.word
    return reader.read(text, place.file if file is None else str(file), overrides, place, **more)


def text_of(file: str) -> str:
    """What a file holds. RecipeError for what is no text, or has no end."""
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
    """As some editors and PowerShell write text."""
    if raw[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        return False
    try:
        return "\0" not in raw.decode("utf-16")
    except UnicodeDecodeError:
        return False


def _mapping(text: str, file: str) -> dict[str, Any] | None:
    """The text as a YAML or JSON mapping, None where it is neither."""
    if text.lstrip().startswith("{"):
        root = read_json(text, file).root
        if root is not None:
            plain = root.plain()
            return plain if isinstance(plain, dict) else None
    data = parse_yaml(text, file).data
    return data if isinstance(data, dict) else None


def _wrong(text: str, file: str) -> list[Problem]:
    if text.lstrip().startswith("{"):
        found = read_json(text, file).findings
        return [
            Problem("import-unreadable", one.message, file, one.line, None, one.hint) for one in found[:1]
        ]
    return parse_yaml(text, file).problems


def _unknown(file: str, data: dict[str, Any] | None, tool: str | None = None) -> RecipeError:
    hint = f"what is read: {KINDS}" + ("" if data else f"; {MANUALLY}")
    looks = "is of no kind that is known here"
    if tool == OURS:
        looks, hint = "is a recipe of effilaunch itself", "`effilaunch plan` reads it"
    elif tool is not None:
        looks, hint = f"is a config of {tool}, which import does not read", f"{page_of(tool)}; {hint}"
    keys = without_tokens(", ".join(map(str, list(data or ())[:6])))
    said = f" (its keys: {keys})" if keys else ""
    return RecipeError(Problem("import-unknown", f"{looks}{said}", file, hint=hint))
