"""Read the fields of TrainingArguments, LoraConfig and similar classes from source, without importing them.

A table is `{"version": str, "fields": {name: {"types": [...], "default": value, "choices"?: [...],
"renamed_to"?: name}}}`. Types: none bool int float str list list[str] list[int] list[float] dict any, and
`object:Name` for classes that a recipe cannot contain. A default that is no literal is null.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from launcher.tasks.task import ArgumentTable

Table = dict[str, Any]
_PLAIN = {"bool", "int", "float", "str", "dict", "list"}
_ALIAS = re.compile(r"[Dd]eprecated alias of `(\w+)`")
# the sentence in which a help text lists its choices
_VALUES = re.compile(r"Possible values are: (.*?)\.(?: |$)")


def training_arguments_table(package: Path, version: str) -> Table:
    """The table of transformers in the folder `package`. Raises OSError, SyntaxError, KeyError."""
    tree = _parse(package / "training_args.py")
    enums = _enums(tree)
    for name in ("trainer_utils.py", "debug_utils.py"):
        if (package / name).is_file():
            enums |= _enums(_parse(package / name))
    fields = _fields(_class(tree, "TrainingArguments"), enums)
    levels = _dict_keys(package / "utils/logging.py", "log_levels")
    trackers = _dict_keys(package / "integrations/integration_utils.py", "INTEGRATION_TO_CALLBACK")
    for field, choices in (
        ("log_level", [*levels, "passive"] if levels else []),
        ("log_level_replica", [*levels, "passive"] if levels else []),
        ("report_to", ["none", "all", *trackers] if trackers else []),
    ):
        if field in fields and choices:
            fields[field]["choices"] = choices
    return {"version": version, "fields": fields}


def lora_config_table(package: Path, version: str) -> Table:
    """The table of the peft package in `package`: LoraConfig with what it inherits."""
    fields: dict[str, Any] = {}
    enums = _enums(_parse(package / "utils/peft_types.py"))
    base = _parse(package / "config.py")
    for name in ("PeftConfigMixin", "PeftConfig"):
        fields |= _fields(_class(base, name), enums)
    fields |= _fields(_class(_parse(package / "tuners/lora/config.py"), "LoraConfig"), enums)
    return {"version": version, "fields": fields}


def task_arguments_table(package: Path, version: str, of: ArgumentTable) -> Table:
    """Fields that a class adds to TrainingArguments or gives another default. package: of its project."""
    fields: dict[str, Any] = {}
    config = _class(_parse(package / of.module), of.class_name)
    base = package / "trainer/base_config.py"  # of trl's classes
    if base.is_file() and any(ast.unparse(one) == "_BaseConfig" for one in config.bases):
        fields |= _fields(_class(_parse(base), "_BaseConfig"), {})
    fields |= _fields(config, {})
    for name in _read_as_text(config) & set(fields):
        if "str" not in fields[name]["types"]:
            fields[name]["types"].append("str")
    return {"version": version, "fields": fields}


def _read_as_text(node: ast.ClassDef) -> set[str]:
    """Names of fields that the class converts when they are given as one text: isinstance(self.X, str)."""
    return {
        call.args[0].attr
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "isinstance"
        and isinstance(call.args[0], ast.Attribute)
        and ast.unparse(call.args[1]) == "str"
    }


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise KeyError(name)


def _enums(tree: ast.Module) -> dict[str, list[str]]:
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
            items = [item.value for item in node.body if isinstance(item, ast.Assign)]
            values = [item.value for item in items if isinstance(item, ast.Constant)]
            found[node.name] = [value for value in values if isinstance(value, str)]
    return found


def _dict_keys(path: Path, name: str) -> list[str]:
    """Text keys of the module-level dict literal `name`; empty without one."""
    for node in _parse(path).body if path.is_file() else ():
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id == name and isinstance(value, ast.Dict):
            keys = [key.value for key in value.keys if isinstance(key, ast.Constant)]
            return [key for key in keys if isinstance(key, str)]
    return []


def _fields(node: ast.ClassDef, enums: dict[str, list[str]]) -> dict[str, Any]:
    """Annotated attributes of a dataclass body, in order."""
    names: dict[str, Any] = {}
    for statement in ast.walk(node):
        # `default_optim = ...` in the class body, last assignment wins (the branch of a recent torch)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            names |= {t.id: statement.value.value for t in statement.targets if isinstance(t, ast.Name)}
    fields: dict[str, Any] = {}
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(statement.annotation):
            continue
        types, choices = _annotation(statement.annotation, enums)
        default, metadata_choices, renamed = _field_call(statement.value, names)
        entry: dict[str, Any] = {"types": types, "default": default}
        if metadata_choices or choices:
            entry["choices"] = metadata_choices or choices
        if renamed:
            entry["renamed_to"] = renamed
        fields[statement.target.id] = entry
    return fields


def _field_call(node: ast.expr | None, names: dict[str, Any]) -> tuple[Any, list[str], str | None]:
    """Default, choices of the metadata, and the new name that its help text gives."""
    if not isinstance(node, ast.Call):
        return _literal(node, names), [], None
    keywords = {word.arg: word.value for word in node.keywords}
    default = _literal(keywords.get("default"), names)
    factory = keywords.get("default_factory")
    if isinstance(factory, ast.Name) and factory.id in ("dict", "list"):
        default = {} if factory.id == "dict" else []
    elif isinstance(factory, ast.Lambda):
        default = _literal(factory.body, names)
    metadata = keywords.get("metadata")
    choices: list[str] = []
    renamed = None
    if isinstance(metadata, ast.Dict):
        pairs = zip(metadata.keys, metadata.values, strict=True)
        entries = {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}
        given = _literal(entries.get("choices"), names)
        choices = [item for item in given if isinstance(item, str)] if isinstance(given, list) else []
        text = str(_literal(entries.get("help"), names))
        listed = _VALUES.search(text)
        if listed and not choices:
            choices = re.findall(r"`'?(\w+)'?`", listed[1])
        match = _ALIAS.search(text)
        renamed = match[1] if match else None
    return default, choices, renamed


def _literal(node: ast.expr | None, names: dict[str, Any]) -> Any:
    """The value of a literal or of a known name, as JSON can hold it; None for everything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if node is None:
        return None
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return list(value) if isinstance(value, (tuple, set)) else value


def _annotation(node: ast.expr, enums: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Types, and the texts that are allowed (empty: any)."""
    types: list[str] = []
    choices: list[str] = []
    for part in _union(node):
        text = ast.unparse(part)
        name = text.partition("[")[0].rpartition(".")[2]
        if text == "None":
            types.append("none")
        elif name == "Literal" and isinstance(part, ast.Subscript):
            values = ast.literal_eval(part.slice)
            for value in values if isinstance(values, tuple) else (values,):
                types.append(type(value).__name__)
                choices += [value] if isinstance(value, str) else []
        elif name in enums:
            types.append("str")
            choices += enums[name]
        elif name.lower() in ("list", "tuple"):
            inner = text.partition("[")[2].removesuffix("]")
            inner = "str" if inner in enums else inner
            types.append(f"list[{inner}]" if inner in ("str", "int", "float") else "list")
        elif name.lower() in _PLAIN:
            types.append(name.lower())
        else:
            types.append("any" if name == "Any" else f"object:{name}")
    return list(dict.fromkeys(types)), list(dict.fromkeys(choices))


def _union(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return _union(node.left) + _union(node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _union(ast.parse(node.value, mode="eval").body)
    if isinstance(node, ast.Subscript):
        name = ast.unparse(node.value).rpartition(".")[2]
        if name == "Optional":
            return [*_union(node.slice), ast.Constant(None)]
        if name == "Union":
            return [part for item in getattr(node.slice, "elts", [node.slice]) for part in _union(item)]
    return [node]
