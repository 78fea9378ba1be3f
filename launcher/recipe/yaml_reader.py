"""Read YAML as plain values with the line of every key, without the traps of YAML 1.1.

PyYAML reads `1e-4` as text, `no` as False, `24:00:00` as 86400 and `2024-01-01` as a date, and lets the
second of two equal keys silently win. Here scalars follow the core rules of YAML 1.2, with two exceptions: a
number with a leading zero is a string (commit ids), and `1_000` is a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import yaml

from launcher.errors import Problem

_TAG = "tag:yaml.org,2002:"
_LARGEST = 100_000
_DEEPEST = 64
_LARGEST_NUMBER = 2**64

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9]*(?:_[0-9]{3})*|0x[0-9a-fA-F]+|0o[0-7]+)$")
_FLOAT = re.compile(
    r"^[-+]?(?:(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
)
_MERGE = re.compile(r"^<<$")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_LOADER):  # type: ignore[misc]
    """Resolves plain scalars by the patterns above; only its node graph is used."""

    yaml_implicit_resolvers: ClassVar[dict[Any, list[tuple[str, re.Pattern[str]]]]] = {}


for _name, _pattern, _first in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", _MERGE, ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)


@dataclass(slots=True)
class YamlDocument:
    """One parsed YAML text."""

    data: Any
    """dict (keys are strings), list, str, int, float, bool or None."""
    lines: dict[str, int]
    """Dotted path (`data.train[0].path`) -> line, from 1."""
    problems: list[Problem]


def parse_yaml(text: str, file: str, path: str = "", *, last_wins: bool = False) -> YamlDocument:
    """Parse one document. Never raises: syntax errors and duplicate keys are in `problems`.

    path: the dotted path of the whole document. last_wins: of equal keys the last one wins, as other tools
    read them; by default the first.
    """
    try:
        too_deep = _too_deep(text)
        if too_deep is not None:
            message = f"nested more than {_DEEPEST} levels deep"
            return YamlDocument(None, {}, [Problem("yaml-syntax", message, file, too_deep)])
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        return YamlDocument(None, {}, [_syntax_problem(error, text, file)])
    except (UnicodeError, ValueError) as error:  # e.g. half a surrogate pair in an argument
        return YamlDocument(None, {}, [Problem("yaml-syntax", f"not valid YAML: {error}", file)])
    builder = _Builder(file, last_wins)
    data = None if root is None else builder.build(root, path)
    return YamlDocument(data, builder.lines, builder.problems)


def parse_scalar(text: str) -> Any:
    """The value of `text` as a YAML scalar or flow collection; `text` itself if it is not YAML."""
    document = parse_yaml(text, "")
    return text if document.problems else document.data


# An empty key is valid in a device_map: the whole model; and in columns: one without a name.
_EMPTY_KEY_IN = ("model.device_map", ".columns")


def join(path: str, key: str | int) -> str:
    """Dotted path of a child: `data.train` + 0 -> `data.train[0]`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def _too_deep(text: str) -> int | None:
    """The line where collections are nested too deeply for the recursive functions here, else None."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _DEEPEST:
                return event.start_mark.line + 1 if event.start_mark else 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return None


def _syntax_problem(error: yaml.YAMLError, text: str, file: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = None if mark is None else mark.line + 1
    if line is None and isinstance(getattr(error, "position", None), int):
        line = text.count("\n", 0, error.position) + 1  # type: ignore[attr-defined]
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    context = getattr(error, "context", None)
    hint = None
    if "\\t" in repr(what) or ("cannot start any token" in what and "\t" in text):
        hint = "indent with spaces, not tabs"
    elif "mapping values are not allowed" in what:
        hint = _deeper_key(text, mark) or "put quotes around a string that contains `: `"
    elif "expected key" in what or "<block end>" in what:
        hint = _indentation_hint(mark, getattr(error, "context_mark", None))
    message = f"not valid YAML: {what}" + (f" ({context})" if context else "")
    return Problem("yaml-syntax", message, file, line, None, hint)


_KEY = re.compile(r"( *)[\w.-]+ *:(?= |$)")
"""A line's indentation, and what can be its key."""


def _deeper_key(text: str, mark: yaml.Mark | None) -> str | None:
    """Of a key that is indented more than the key with a value in the line above."""
    lines = text.splitlines()
    if mark is None or not 0 < mark.line < len(lines):
        return None
    key, above = _KEY.match(lines[mark.line]), _KEY.match(lines[mark.line - 1])
    if key is None or above is None or key.end() != mark.column + 1 or len(key[1]) <= len(above[1]):
        return None
    return f"indent it like line {mark.line}, by {len(above[1])} spaces; that line has a value already"


def _indentation_hint(key: yaml.Mark | None, section: yaml.Mark | None) -> str | None:
    """Of a key that starts in another column than the first one of its section."""
    if key is None or section is None or key.column == section.column:
        return None
    return (
        f"keys of one section are indented alike: here by {key.column}, "
        f"in line {section.line + 1} by {section.column} spaces"
    )


@dataclass(slots=True)
class _Builder:
    """Turns the node graph into values; collects lines and problems."""

    file: str
    last_wins: bool
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    open_nodes: set[int] = field(default_factory=set)
    count: int = 0

    def build(self, node: Any, path: str) -> Any:
        self.count += 1
        if id(node) in self.open_nodes or self.count > _LARGEST:
            if not any(problem.code == "yaml-alias" for problem in self.problems):
                message = f"more than {_LARGEST:,} values, or aliases that contain themselves"
                self._problem("yaml-alias", message, node, path)
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self._problem("yaml-tag", f"cannot read a collection with the tag `{node.tag}`", node, path)
            return None
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            paths = [join(path, index) for index in range(len(node.value))]
            self.lines |= {
                place: item.start_mark.line + 1 for place, item in zip(paths, node.value, strict=True)
            }
            return [self.build(item, place) for place, item in zip(paths, node.value, strict=True)]
        finally:
            self.open_nodes.discard(id(node))

    def _mapping(self, node: Any, path: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        own: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem("yaml-key", "a key must be a string, not a mapping or a list", key_node, path)
                continue
            line = key_node.start_mark.line + 1
            if key_node.tag == _TAG + "merge":
                self._merge_into(values, own, value_node, path)
                continue
            key = str(key_node.value)
            if not _is_plain(key) or not (key or path.endswith(_EMPTY_KEY_IN)):
                self._problem("yaml-key", "a key must be a non-empty string", key_node, path)
                continue
            child = join(path, key)
            if key in own:
                what = f"duplicate key, first in line {own[key]}"
                self._problem("duplicate-key", what, key_node, child, "keep one of the two")
                if not self.last_wins:
                    continue
            own[key] = line
            self.lines[child] = line
            values[key] = self.build(value_node, child)
        return values

    def _merge_into(self, values: dict[str, Any], own: dict[str, int], node: Any, path: str) -> None:
        """`<<: *anchor`: fills in the keys that the mapping does not give itself."""
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            outside, self.lines = self.lines, {}
            merged = self.build(source, path)
            inside, self.lines = self.lines, outside
            if not isinstance(merged, dict):
                self._problem("yaml-merge", "`<<` needs a mapping", node, path)
                continue
            for place, line in inside.items():
                self.lines.setdefault(place, line)
            for key, value in merged.items():
                if key not in own:
                    values.setdefault(key, value)

    def _scalar(self, node: Any, path: str) -> Any:
        text, kind = str(node.value), str(node.tag).removeprefix(_TAG)
        if not _is_plain(text):
            message = "contains a zero byte or half a surrogate pair"
            self._problem("yaml-text", message, node, path)
            return None
        try:
            return _convert(text, kind)
        except (KeyError, ValueError):
            shown = text if len(text) <= 60 else text[:57] + "..."
            if kind == "int" and _INT.match(text):
                self._problem("yaml-number", f"the number {shown} is beyond 64 bits", node, path)
            else:
                self._problem("yaml-tag", f"cannot read {shown!r} with the tag `{node.tag}`", node, path)
            return None

    def _problem(self, code: str, message: str, node: Any, path: str, hint: str | None = None) -> None:
        line = node.start_mark.line + 1
        self.problems.append(Problem(code, message, self.file, line, path or None, hint))


def _is_plain(text: str) -> bool:
    """Whether file names, JSON and terminals can represent `text`."""
    if "\0" in text:
        return False
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _convert(text: str, kind: str) -> Any:
    if kind in ("str", "merge"):
        return text
    if kind == "null":
        return None
    if kind == "bool":
        return {"true": True, "false": False}[text.lower()]
    if kind == "int":
        number = int(text.replace("_", ""), 0)
        if abs(number) > _LARGEST_NUMBER:
            raise ValueError("beyond 64 bits")
        return number
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    raise KeyError(kind)
