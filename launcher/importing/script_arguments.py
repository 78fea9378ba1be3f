"""The command line that a script declares: argparse, dataclasses of HfArgumentParser, fire."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.importing.arguments import as_bool, as_number, field_kind, field_names
from launcher.importing.peer import load_tool
from launcher.importing.syntax import Function, field_default, last_name, text_of

ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig",
             "UnslothTrainingArguments")  # fmt: skip
OTHERS = ("ORPOConfig", "KTOConfig", "PPOConfig", "GRPOConfig", "RewardConfig", "RLOOConfig", "CPOConfig",
          "OnlineDPOConfig", "PRMConfig", "BCOConfig", "GKDConfig", "NashMDConfig", "XPOConfig")  # fmt: skip
"""Arguments of trl's trainings that are not here."""
_PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
_OF_TRL = ("ModelConfig", "ScriptArguments", "SFTScriptArguments", "DPOScriptArguments")
_TYPES = {"int": "int", "float": "float", "bool": "bool", "str": "str"}


@dataclass(frozen=True, slots=True)
class Option:
    """One argument of a command line."""

    name: str
    """The attribute that holds its value."""
    kind: str
    """`bare`: never a value (store_true); `switch`: true or false, or nothing; `one`; `many`."""
    type: str = "str"
    """`fire`: a text that fire takes for a list where it looks like one: `[q_proj,v_proj]`."""

    def value(self, given: Any) -> Any:
        """The text of the line, as the script gets it."""
        if isinstance(given, list):
            return [self.value(item) for item in given]
        if self.kind == "bare":
            return self.type == "bool"
        if self.type == "bool":
            return as_bool(given)
        if self.type == "fire" and isinstance(given, str) and given[:1] in ("[", "("):
            return [item.strip(" '\"") for item in given[1:-1].split(",") if item.strip()]
        if self.type in ("int", "float"):
            number = as_number(given)
            return given if number is None else number
        return given


@dataclass(slots=True)
class Declared:
    """What a script takes from its command line."""

    options: dict[str, Option] = field(default_factory=dict)
    """Name without its dashes, `-` as `_` -> the argument."""
    arguments: str = ""
    """Which of ARGUMENTS the parser itself makes; empty where none."""
    changed: dict[str, tuple[str, ast.expr]] = field(default_factory=dict)
    """Fields of TrainingArguments that a class of the script gives another default -> class, default."""
    entry: str | None = None
    """The function whose parameters are the arguments, under fire."""
    positionals: list[str] = field(default_factory=list)
    """Arguments without a name, in their order."""
    other: str = ""
    """Which of OTHERS the parser makes."""
    elsewhere: list[str] = field(default_factory=list)
    """Classes of arguments that another file declares."""
    found: bool = False
    """Whether a parser was found at all."""
    lenient: bool = False
    """Whether its parser leaves what it does not know."""

    def names(self) -> set[str]:
        """All arguments."""
        return {*self.options, *(field_names() if self.arguments else ())}

    def kind(self, name: str) -> str | None:
        """How many words the option takes; None for one that is not declared."""
        if name in self.options:
            return self.options[name].kind
        return field_kind(name) if self.arguments else None


def declared_in(tree: ast.Module) -> Declared:
    """Find what the script declares."""
    found = Declared()
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = last_name(node.func)
        if name in _PARSERS and node.args:
            found.found = True
            for part in _named(node.args[0]):
                _take_class(found, classes, part)
        elif name == "add_argument":
            found.found = True
            _take_argument(found, node)
        elif name == "parse_known_args" or any(k.arg == "return_remaining_strings" for k in node.keywords):
            found.lenient = True
        elif name == "add_config_arguments" and "deepspeed" in text_of(node.func):
            found.options["deepspeed"] = Option("deepspeed", "bare", "bool")
            found.options["deepspeed_config"] = Option("deepspeed_config", "one")
        elif text_of(node.func) in ("fire.Fire", "Fire") and node.args:
            function = functions.get(last_name(node.args[0]))
            if function is not None:
                found.found, found.entry = True, function.name
                _take_parameters(found, function)
    return found


def _named(node: ast.expr) -> Iterator[ast.expr]:
    yield from node.elts if isinstance(node, ast.Tuple | ast.List) else [node]


def _take_class(
    found: Declared, classes: Mapping[str, ast.ClassDef], node: ast.expr, within: tuple[str, ...] = ()
) -> None:
    """The fields of a dataclass, with those of the classes that it is made from."""
    name = last_name(node)
    own = isinstance(node, ast.Name) and name not in within  # not of `transformers.TrainingArguments`
    definition = classes.get(name) if own else None
    if definition is None:
        if name in ARGUMENTS:
            found.arguments = name
        elif name in OTHERS:
            found.other = name
        elif name in _OF_TRL:
            keys = load_tool("trl", "TRL", "refuses it").keys
            for key, default in keys.items():
                found.options.setdefault(key, Option(key, "switch" if default is False else "one"))
        else:
            found.elsewhere.append(name or "a class")
        return
    for base in definition.bases:
        if last_name(base) not in ("object", "ABC"):
            _take_class(found, classes, base, (*within, name))
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            _take_field(found, definition.name, statement.target.id, statement)


def _take_field(found: Declared, owner: str, name: str, statement: ast.AnnAssign) -> None:
    default = field_default(statement.value)
    if found.arguments and field_kind(name) is not None:
        if default is not None:
            found.changed[name] = (owner, default)
        return
    annotation = text_of(statement.annotation).lower()
    if "list[" in annotation or "tuple[" in annotation:
        found.options[name] = Option(name, "many")
        return
    kind = next((kind for kind in ("bool", "int", "float") if kind in annotation.split("=")[0]), "str")
    found.options[name] = Option(name, "switch" if kind == "bool" else "one", kind)


def _take_argument(found: Declared, call: ast.Call) -> None:
    """`add_argument("-l", "--lr", type=float)`."""
    names = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    if names and not names[0].startswith("-"):
        found.positionals.append(names[0])
    if not names or not names[0].startswith("-"):
        return
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    long = next((name for name in names if name.startswith("--")), names[0])
    target = keywords.get("dest")
    dest = target.value if isinstance(target, ast.Constant) else _plain(long)
    action = text_of(keywords["action"]).strip("'\"") if "action" in keywords else ""
    kind, typed = "one", _TYPES.get(text_of(keywords["type"]), "str") if "type" in keywords else "str"
    if action in ("store_true", "store_false"):
        kind, typed = "bare", "bool" if action == "store_true" else "false"
    elif "nargs" in keywords:
        kind = "many" if text_of(keywords["nargs"]).strip("'\"") != "?" else "switch"
    elif "bool" in text_of(keywords["type"]).lower() if "type" in keywords else False:
        kind, typed = "one", "bool"
    for name in names:
        found.options[_plain(name)] = Option(str(dest), kind, typed)


def _take_parameters(found: Declared, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    for argument in arguments:
        annotation = "" if argument.annotation is None else text_of(argument.annotation).lower()
        kind = next((kind for kind in ("bool", "int", "float") if kind in annotation), "fire")
        kind = "fire" if "list[" in annotation else kind
        found.options[argument.arg] = Option(argument.arg, "switch" if kind == "bool" else "one", kind)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
