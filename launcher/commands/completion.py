"""`completion`: the words of the command line as a script for a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from launcher.facts.hardware import DEVICES
from launcher.facts.probe import shipped_model_names
from launcher.plan.fixes import FIXES
from launcher.recipe.merged_yaml import shipped_names
from launcher.render.completion import SCRIPTS, Argument, Command
from launcher.report.outcome import Outcome

KIND_OF: dict[str, str] = {
    "RECIPE": "recipe",
    "RECIPE|MODEL": "recipe",
    "RECIPE|RUN_DIR": "recipe-or-folder",
    "RUN_DIR": "folder",
    "D": "folder",
    "RUN_DIR|LOG": "file",
    "auto|PATH": "file",
    "DS_CONFIG": "file",
    "FILE": "file",
    "DATA": "file",
    "MODEL": "model",
    "HW": "hardware",
    "ID": "fix",
}
"""What the help calls a value -> what is offered for it; for the others nothing is."""


def completion_command(shell: str, parser: argparse.ArgumentParser) -> Outcome:
    """The script for `shell`, made of all commands of `parser`."""
    names = {
        "recipe": [name for name in shipped_names() if "/" not in name],  # not the bases
        "hardware": ["cpu", *DEVICES],
        "model": shipped_model_names(),
        "fix": [fix.id for fix in FIXES],
    }
    script = SCRIPTS[shell](tuple(_commands(parser)), names)
    return Outcome({"shell": shell, "script": script}, script)


def _commands(parser: argparse.ArgumentParser) -> Iterator[Command]:
    (group,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for listed in group._choices_actions:
        actions = group.choices[listed.dest]._actions
        yield Command(
            listed.dest,
            listed.help or "",
            tuple(_argument(action, listed.dest) for action in actions if action.option_strings),
            tuple(_argument(action, listed.dest) for action in actions if not action.option_strings),
        )


def _argument(action: argparse.Action, command: str) -> Argument:
    label = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    choices = tuple(str(choice) for choice in action.choices or ())
    kind = "choices" if choices else KIND_OF.get(label, "text")
    if action.dest == "recipe":
        kind = "recipe"
    elif command == "recipes" and label == "NAME":
        kind = "shipped"
    return Argument(
        tuple(action.option_strings),
        action.help or label,
        "" if action.nargs == 0 else kind,
        label.partition("[")[0],
        choices,
        many=isinstance(action, argparse._AppendAction) or action.nargs in ("+", "*"),
        optional=action.nargs == "?",
    )
