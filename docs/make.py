"""The pages that are made from the code, so that they cannot be out of date.

Call it after a change to the schema, the parser, the fixes or the failures:

    python docs/make.py            writes them
    python docs/make.py --check    compares, and ends with 1 where one differs
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from devices_page import devices_page
from failures_page import linked, page_text
from migration_tables import ROW_TYPES, mapping_rows
from models_page import models_page
from recipe_page import NOTE, recipe_page, shown_value, table

from launcher import errors
from launcher.parsing import COMMANDS, Command, Parser
from launcher.planner.fixes import FIXES
from launcher.planner.fixes.fix import Fix

DOCS = Path(__file__).resolve().parent

PAGES = {
    "run": "quickstart.md",
    "plan": "plan-page.md",
    "prepare": "data.md",
    "submit": "cluster.md",
    "lint": "lint.md",
    "estimate": "memory.md",
    "ladder": "ladder.md",
    "drill": "faults.md",
    "fixes": "fixes.md",
    "schema": "recipe.md",
    "diagnose": "diagnose.md",
    "doctor": "doctor.md",
    "report": "reports.md",
    "merge": "results.md",
    "generate": "results.md",
    "eval": "results.md",
    "import": "import.md",
}
"""Command -> the page that says more of it."""


# --- the command line


def commands_page() -> str:
    """The help of every command, 100 columns wide."""
    parts = ["# Command reference", NOTE, COMMON]
    for command in COMMANDS:
        page = PAGES.get(command.name, "")
        more = f" More: [{page}](../{page})" if page else ""
        parts.append(f"## {command.name}")
        parts.append(f"{command.summary[0].upper()}{command.summary[1:]}.{more}")
        parts.append(f"```\n{help_of(command)}```")
    codes = [(f"`{code}`", meaning) for code, meaning in exit_codes()]
    return "\n\n".join([*parts, "## Exit status", table(("status", "meaning"), codes)]) + "\n"


def help_of(command: Command) -> str:
    """Usage and arguments, without the summary between them."""
    width = partial(argparse.HelpFormatter, width=100)
    parser = Parser(prog=f"effilaunch {command.name}", formatter_class=width)
    return command.fill(parser).format_help()


COMMON = (
    "Every command takes `--json`: it prints one object on stdout, with `schema_version` and `command`, and "
    "on failure `errors[{code, message, file, line, path, hint}]`; progress goes to stderr. Options and "
    "positional arguments may be interleaved.\n\n"
    "To complete commands, options, files, recipes and devices with the tab key, add "
    "`source <(effilaunch completion bash)` to `~/.bashrc`, the same with `zsh` to `~/.zshrc` after "
    "`compinit`, or `effilaunch completion fish | source` to `~/.config/fish/config.fish`. "
    "`effilaunch` must be on `PATH`."
)


def exit_codes() -> list[tuple[int, str]]:
    """Code -> what it says, from the classes of the errors."""
    classes: tuple[type[errors.EffilaunchError], ...] = (
        errors.RecipeError, errors.DoesNotFit, errors.MachineError, errors.RunFailed, errors.Interrupted,
    )  # fmt: skip
    said = [
        (kind.exit_code, str(kind.__doc__).splitlines()[0].split("; ")[0].rstrip(".")) for kind in classes
    ]
    return [(0, "Done"), *said, (70, "A bug of effilaunch; the message names a log")]


# --- the fixes


def fixes_page() -> str:
    """Every known fix, in the order of application."""
    parts = [
        "# Every known fix",
        NOTE,
        f"{len(FIXES)} combinations that a plan knows, in the order in which it looks at them; "
        "[fixes.md](../fixes.md) says what a fix may do and how one is disabled. "
        "`effilaunch fixes ID` shows one of them, and whether it is for the installed versions.",
    ]
    for fix in FIXES:
        versions = "all" if fix.versions == "*" else f"`{fix.versions}`"
        rows = [
            ("when", f"{fix.condition}"),
            (fix.action, _changes(fix)),
            ("reason", fix.reason),
            *([("instead", fix.hint)] if fix.hint else []),
            ("source", linked(fix.source)),
            ("versions", versions),
        ]
        parts += [f"## {fix.id}", f"{fix.title}.", table(("", ""), rows)]
    return "\n\n".join(parts) + "\n"


def _changes(fix: Fix) -> str:
    """The settings that it is about, from the cases that its tests plan."""
    cases = importlib.import_module("fix_cases").CASES[fix.id][0]
    if fix.action != "set":
        return ", ".join(dict.fromkeys(f"`{case.setting}`" for case in cases))
    shown = dict.fromkeys(f"`{case.setting}` = {shown_value(case.value)}" for case in cases if case.setting)
    yields = "; a different value in the recipe stays, with a warning" if fix.yields else ""
    return ", or ".join(shown) + yields


# --- from other tools


def mapping_page(page: str) -> str:
    """A page about coming from a tool, with the tables that `import` goes by."""

    def filled(found: re.Match[str]) -> str:
        rows = mapping_rows(found[3]) if found[2] == "mapping" else ROW_TYPES
        shown = [(f"`{theirs}`", f"`{ours}`" if ours else "", note) for theirs, ours, note in rows]
        return f"{found[1]}{table(('there', 'in a recipe', 'note'), shown)}\n{found[4]}"

    return BETWEEN.sub(filled, (DOCS / page).read_text(encoding="utf-8"))


BETWEEN = re.compile(r"(<!-- (mapping|rows) (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MAPPED = ("import.md", *(f"migrate/{tool}.md" for tool in ("axolotl", "llamafactory", "trl")))


# --- all of them


PAGES_OF: Mapping[str, Callable[[], str]] = {
    "failures.md": page_text,
    "reference/recipe.md": recipe_page,
    "reference/commands.md": commands_page,
    "reference/fixes.md": fixes_page,
    "reference/devices.md": devices_page,
    "models.md": models_page,
    **{page: partial(mapping_page, page) for page in MAPPED},
}
"""File below docs/ -> what writes it."""


def main() -> int:
    """Write the pages, or compare them."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--check", action="store_true", help="write nothing; 1 where a page is out of date")
    check = words.parse_args().check
    stale = []
    for name, made in PAGES_OF.items():
        file, text = DOCS / name, made()
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    sys.stdout.write("".join(f"{'out of date' if check else 'written'}: docs/{name}\n" for name in stale))
    return 1 if stale and check else 0


# the cases of the fixes are data of the tests
sys.path.insert(0, str(DOCS.parent / "tests"))

if __name__ == "__main__":
    sys.exit(main())
