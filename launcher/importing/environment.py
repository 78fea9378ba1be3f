"""Variables that a launch line sets, as `launch.env`."""

from __future__ import annotations

from launcher.facts.redaction import names_secret
from launcher.importing.conversions import To, as_bool, count
from launcher.importing.reading import Effect, Given, Reading, shown
from launcher.recipe.rules import check_environment

_OF_THE_SHELL = ("PYTHONPATH", "PATH", "HOME", "USER", "LD_LIBRARY_PATH")

_OTHER_TRAINERS = {
    "USE_MCA": "LLaMA-Factory then trains with Megatron, which is not supported here",
    "USE_MEGATRON_BRIDGE": "LLaMA-Factory then trains with Megatron, which is not supported here",
    "USE_V1": "LLaMA-Factory v1 then reads the file, with other keys",
}
_OF_LLAMAFACTORY = {
    "NNODES": "hardware.num_nodes",
    "NPROC_PER_NODE": "hardware.devices_per_node",
    "MAX_RESTARTS": "launch.max_restarts",
    **dict.fromkeys(
        ("FORCE_TORCHRUN", "RDZV_ID", "MIN_NNODES", "MAX_NNODES", "USE_RAY", *_OTHER_TRAINERS), ""
    ),
}
"""Variables that llamafactory-cli reads -> recipe key; empty where a run does it itself."""


def take_env(reading: Reading, given: Given) -> None:
    """One variable, where a run does not set it itself; a secret is not repeated."""
    name = given.name
    problems = check_environment({"launch": {"env": {name: given.value}}})
    if given.open:
        reading.drop(given, Effect.NONE, "known only when the script runs")
    elif names_secret(name):
        reading.drop(given, Effect.NONE, "")
    elif problems:
        reading.drop(given, Effect.NONE, problems[0].hint or problems[0].message)
    elif name in _OF_THE_SHELL:
        reading.drop(given, Effect.NONE, "set it in the shell that starts the run")
    else:
        reading.take(f"launch.env.{name}", str(given.value), given, said=name)


def take_variables_of_llamafactory(reading: Reading) -> None:
    """Variables by which llamafactory-cli starts torchrun, and those that choose another trainer."""
    for name, to in _OF_LLAMAFACTORY.items():
        taken = reading.taken.pop(f"launch.env.{name}", None)
        if taken is None:
            continue
        given = Given(name, taken.value, taken.place.line)
        if to:
            To(to, count)(reading, given)
        elif name in _OTHER_TRAINERS and as_bool(taken.value):
            reading.refuse(given, f"is {shown(taken.value)}: {_OTHER_TRAINERS[name]}")
        else:
            reading.know(name)
