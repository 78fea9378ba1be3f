"""Print the size and structure of the code, one figure a line: `make stats`.

Files and lines count Python files below launcher/ that hold code. A cycle is a group of modules that import
each other, imports inside functions and for type checking included. An override is a method of a class of
launcher/train that a base class of another project also defines.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import grimp
import networkx

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "launcher"
UPSTREAM = ("transformers", "trl", "accelerate", "peft", "deepspeed", "datasets", "bitsandbytes")
RECORDS = ROOT / "build" / "tests"
"""Of the last session of each test target, and of the last CI run (tests/cpu_seconds.py, .ci/parts.py)."""
FLAKY = ROOT / "tests" / "flaky.jsonl"


def code_files() -> dict[Path, int]:
    """Python file -> its lines, those without code (`__init__.py` of a docstring) left out."""
    counted = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body[ast.get_docstring(tree) is not None :]:
            counted[path] = path.read_text(encoding="utf-8").count("\n")
    return counted


def cycles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Groups of modules that import each other."""
    directed = networkx.DiGraph()
    for module in graph.modules:
        directed.add_edges_from((module, other) for other in graph.find_modules_directly_imported_by(module))
    return [sorted(group) for group in networkx.strongly_connected_components(directed) if len(group) > 1]


def overrides() -> list[tuple[str, str]]:
    """(class.method, the project whose method it replaces), for all classes of launcher.train."""
    found = []
    train = importlib.import_module("launcher.train")
    for info in pkgutil.walk_packages(train.__path__, "launcher.train."):
        module = importlib.import_module(info.name)
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ != info.name:
                continue
            bases = [base for base in kind.__mro__[1:] if upstream(base)]
            for method, value in vars(kind).items():
                owner = next((base for base in bases if method in vars(base)), None)
                if owner is not None and callable(value) and not method.startswith("__"):
                    found.append((f"{name}.{method}", owner.__module__.partition(".")[0]))
    return found


def upstream(kind: type) -> bool:
    """Whether a base class is one whose methods are no hooks: those of a TrainerCallback are."""
    return kind.__module__.partition(".")[0] in UPSTREAM and kind.__name__ != "TrainerCallback"


def session_seconds() -> dict[str, str]:
    """Of each test session and part of CI that is recorded."""
    found = {}
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text("utf-8"))
        if path.stem == "ci":
            found["seconds of CI"] = str(record["seconds"])
            found |= {f"seconds of CI: {one['part']}": seconds_of(one) for one in record["parts"]}
        else:
            more = f"{record['processes']} processes, {record['cores']} cores, commit {record['commit']}"
            found[f"seconds of make {path.stem}"] = f"{seconds_of(record)}, {more}"
    return found or {"seconds of make test": "not run"}


def seconds_of(record: dict[str, Any]) -> str:
    spent = f"{record['seconds']} ({record['cpu_seconds']} of CPU)"
    return f"{spent}, load {record['load']}, status {record['status']}"


def main() -> None:
    files = code_files()
    groups = cycles(grimp.build_graph("launcher"))
    found = overrides()
    private = [name for name, _ in found if name.partition(".")[2].startswith("_")]
    figures = {
        "files": len(files),
        "lines": sum(files.values()),
        "overridden methods of other projects": len(found),
        "private ones among them": len(private),
        "import cycles": len(groups),
        **session_seconds(),
        "flaky tests seen": len(FLAKY.read_text("utf-8").splitlines()),
    }
    for name, value in figures.items():
        print(f"{name:40} {value if isinstance(value, str) else format(value, ',')}")
    for line in FLAKY.read_text("utf-8").splitlines():
        print("  {path} at {commit}: {cause}".format(**json.loads(line)))
    if "--verbose" in sys.argv[1:]:
        print("", *map(" ".join, groups), *(f"{name} ({owner})" for name, owner in found), sep="\n  ")


if __name__ == "__main__":
    main()
