"""Tables of `import`: the keys and defaults of trl, axolotl and LLaMA-Factory, read from their source.

Nothing of them is imported. A default that is no plain value (bool, int, float, str) is null.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

PLAIN = (bool, int, float, str)


def trl(package: Path, version: str) -> dict[str, Any]:
    """trl's sft and dpo scripts: what their arguments add to TrainingArguments, or give another default."""
    classes = classes_of(package / "trainer") | classes_in(package / "scripts" / "utils.py")
    keys = fields(classes, ["SFTConfig", "ModelConfig", "ScriptArguments", "DatasetMixtureConfig"])
    dpo = fields(classes, ["DPOConfig"])
    for name in fields(classes, ["_BaseConfig"]):
        dpo.pop(name, None)  # among `keys` already
    dataset = sorted(fields(classes, ["DatasetConfig"]))
    return {"version": version, "keys": keys, "dpo": dpo, "dataset": dataset}


def axolotl(package: Path, version: str) -> dict[str, Any]:
    """axolotl's configuration; of its plugins those that are on without being named."""
    classes = classes_of(package / "utils" / "schemas")
    for plugin in ("cut_cross_entropy", "liger"):
        classes |= classes_in(package / "integrations" / plugin / "args.py")
    return {
        "version": version,
        "keys": fields(classes, ["AxolotlInputConfig", "CutCrossEntropyArgs", "LigerArgs"]),
        "dataset": sorted(fields(classes, ["SFTDataset", "DPODataset"])),
        "pretraining": sorted(fields(classes, ["PretrainingDataset"])),
        "prompt": sorted(fields(classes, ["UserDefinedPrompterType"])),
    }


def llamafactory(package: Path, version: str) -> dict[str, Any]:
    """LLaMA-Factory's arguments besides those of transformers."""
    classes = classes_of(package / "hparams")
    enums = classes_in(package / "extras" / "constants.py")
    parts = (
        "ModelArguments", "DataArguments", "TrainingArguments", "FinetuningArguments", "GeneratingArguments",
    )  # fmt: skip
    return {"version": version, "keys": fields(classes, parts, enums)}


PEERS: Mapping[str, Callable[[Path, str], dict[str, Any]]] = {
    "trl": trl, "axolotl": axolotl, "llamafactory": llamafactory,
}  # fmt: skip


def table_text(table: Mapping[str, Any]) -> str:
    return json.dumps(table, indent=1) + "\n"


def classes_of(folder: Path) -> dict[str, ast.ClassDef]:
    """All classes below a folder by name."""
    found: dict[str, ast.ClassDef] = {}
    for file in sorted(folder.rglob("*.py")):
        found |= classes_in(file)
    return found


def classes_in(file: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def fields(
    classes: Mapping[str, ast.ClassDef], names: Iterable[str], enums: Mapping[str, ast.ClassDef] | None = None
) -> dict[str, Any]:
    """Field -> default of classes with their bases, sorted; an earlier class wins."""
    found: dict[str, Any] = {}
    for name in names:
        found = _own_and_inherited(classes, name, enums or {}) | found
    return dict(sorted(found.items()))


def _own_and_inherited(
    classes: Mapping[str, ast.ClassDef], name: str, enums: Mapping[str, ast.ClassDef]
) -> dict[str, Any]:
    if name not in classes:
        return {}  # of another project
    node = classes[name]
    found: dict[str, Any] = {}
    for base in reversed(node.bases):
        found |= _own_and_inherited(classes, ast.unparse(base).rpartition(".")[2], enums)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            field, text = item.target.id, ast.unparse(item.annotation)
            is_field = not (field.startswith("_") or "ClassVar" in text or "InitVar" in text)
            if is_field and field != "model_config":  # pydantic's own
                names = {field, _alias(item.value) or field}
                found |= dict.fromkeys(names, _default(item.value, enums))
    return found


def _alias(node: ast.expr | None) -> str | None:
    """The name that a recipe writes, where pydantic's Field gives another."""
    words = node.keywords if isinstance(node, ast.Call) else []
    return next((ast.literal_eval(word.value) for word in words if word.arg == "alias"), None)


def _default(node: ast.expr | None, enums: Mapping[str, ast.ClassDef]) -> Any:
    """A plain default: itself, `default=` of a field, or the first argument of pydantic's Field."""
    if isinstance(node, ast.Call):
        if ast.unparse(node.func).rpartition(".")[2] not in ("field", "Field"):
            return None
        given = [word.value for word in node.keywords if word.arg == "default"]
        node = next(itertools.chain(given, node.args), None)
    value = None if node is None else _value(node, enums)
    return value if isinstance(value, PLAIN) else None


def _value(node: ast.expr, enums: Mapping[str, ast.ClassDef]) -> Any:
    """A literal, a product of numbers, or the value of an enum's member."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        parts = _value(node.left, enums), _value(node.right, enums)
        return math.prod(parts) if all(isinstance(part, int) for part in parts) else None
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in enums:
        members = {
            item.targets[0].id: item.value
            for item in enums[node.value.id].body
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
        }
        return _value(members[node.attr], {}) if node.attr in members else None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
