"""`completion`: the script that lets a shell ask argcomplete, and the completions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any, cast

from launcher.report.outcome import Outcome

SHIPPED = ("RECIPE", "NAME")
FILES = ("FILE", "DATA", "DS_CONFIG", "LOG", "PATH")
FOLDERS = ("DIR", "RUN_DIR", "MODEL")
"""Parts of metavars; an argument such as RECIPE|RUN_DIR offers what each part does."""


def completion_command(shell: str) -> Outcome:
    """The script for bash, zsh or fish."""
    from argcomplete.shell_integration import shellcode

    script = shellcode(["effilaunch"], use_defaults=False, shell=shell)
    return Outcome({"shell": shell, "script": script}, script)


def complete(parser: argparse.ArgumentParser) -> None:
    """Print completions for the line that argcomplete finds in the environment, and exit."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options=False, default_completer=cast(Any, offers))


def offers(prefix: str, action: argparse.Action, **_: Any) -> Iterable[str]:
    """The completions of an argument's value, chosen by its metavar."""
    from argcomplete.completers import DirectoriesCompleter, FilesCompleter

    from launcher.files.shipped import shipped_names
    from launcher.machine.hardware import DEVICES
    from launcher.models.model_config import shipped_model_names
    from launcher.planner.fixes import FIXES

    for kind in str(action.metavar).split("|"):
        if kind in SHIPPED:
            yield from (name for name in shipped_names() if "/" not in name)  # not the base recipes
        if kind == "RECIPE":
            yield from FilesCompleter(["yaml", "yml"])(prefix)
        elif kind in FILES:
            yield from FilesCompleter()(prefix)
        elif kind in FOLDERS:
            yield from DirectoriesCompleter()(prefix)
        if kind == "MODEL":
            yield from shipped_model_names()
        elif kind == "HW":
            counts = re.match(r"(?:[0-9]+x){0,2}", prefix)
            assert counts is not None
            yield from (counts[0] + device for device in ("cpu", *DEVICES))
        elif kind == "ID":
            yield from (fix.id for fix in FIXES)
