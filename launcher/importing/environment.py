"""Variables that a launch line sets, as `launch.env`."""

from __future__ import annotations

from typing import Any

from launcher.facts.redaction import names_secret
from launcher.importing.accelerate import take_count
from launcher.importing.arguments import as_bool
from launcher.importing.reading import Effect, Reading, shown
from launcher.recipe.rules import check_environment

_OF_THE_SHELL = ("PYTHONPATH", "PATH", "HOME", "USER", "LD_LIBRARY_PATH")

_OTHER_TRAINERS = {
    "USE_MCA": "LLaMA-Factory trains with Megatron then, which nothing here does",
    "USE_MEGATRON_BRIDGE": "LLaMA-Factory trains with Megatron then, which nothing here does",
    "USE_V1": "LLaMA-Factory v1 reads the file then, whose keys are others",
}
_OF_LLAMAFACTORY = {
    "NNODES": "hardware.num_nodes",
    "NPROC_PER_NODE": "hardware.devices_per_node",
    "MAX_RESTARTS": "launch.max_restarts",
    **dict.fromkeys(
        ("FORCE_TORCHRUN", "RDZV_ID", "MIN_NNODES", "MAX_NNODES", "USE_RAY", *_OTHER_TRAINERS), ""
    ),
}
"""Variables that llamafactory-cli reads -> recipe key; empty where a run does it by itself."""


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


def take_variables_of_llamafactory(reading: Reading) -> None:
    """Variables by which llamafactory-cli starts torchrun; and those that make another trainer of it."""
    for name, to in _OF_LLAMAFACTORY.items():
        taken = reading.taken.pop(f"launch.env.{name}", None)
        if taken is None:
            continue
        if to:
            take_count(to)(reading, name, taken.value, taken.place.line)
        elif name in _OTHER_TRAINERS and as_bool(taken.value):
            reading.refuse(name, taken.place.line, f"is {shown(taken.value)}: {_OTHER_TRAINERS[name]}")
        else:
            reading.know(name)
