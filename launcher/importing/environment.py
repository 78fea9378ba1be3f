"""Variables that a launch line sets, as `launch.env`."""

from __future__ import annotations

from typing import Any

from launcher.facts.secrets import names_secret
from launcher.importing.found import Effect, Reading
from launcher.recipe.secret_rules import check_environment

_OF_THE_SHELL = ("PYTHONPATH", "PATH", "HOME", "USER", "LD_LIBRARY_PATH")


def take_env(reading: Reading, name: str, value: Any, line: int | None) -> None:
    """One variable, where a run does not set it itself; a secret is not repeated."""
    problems = check_environment({"launch": {"env": {name: value}}})
    if names_secret(name):
        reading.drop(name, value, line, Effect.NONE, "")
    elif problems:
        reading.drop(name, value, line, Effect.NONE, problems[0].hint or problems[0].message)
    elif name in _OF_THE_SHELL:
        reading.drop(name, value, line, Effect.NONE, "set it in the shell that starts the run")
    else:
        reading.take(f"launch.env.{name}", str(value), line, name)
