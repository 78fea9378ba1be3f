"""Rules on secrets and on `launch.env`: a recipe is copied into every run directory, and holds none."""

from __future__ import annotations

import re
from typing import Any

from launcher.errors import Problem
from launcher.facts.secrets import is_written_secret, looks_secret, names_secret
from launcher.recipe.env import reference_names, split_references
from launcher.recipe.yaml_marks import join

SECRET_CODE = "secret-in-recipe"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNED = re.compile(r"""(?<![\w$-])([A-Za-z_]\w*)\+?=((?:"[^"]*"|'[^']*'|[^\s;&|()'"])*)""", re.ASCII)
"""NAME=value in a line of shell."""


_COUNTED = "`hardware.num_nodes` and `hardware.devices_per_node` say how many ranks there are"
_MET = "a run finds where its ranks meet; `launch.hostfile` or Slurm names the machines"
_SHELL = "set it in the shell that starts the run"
_ENGINE = "`sharding` decides it"
_PARTS = "`sharding.tp_size`, `sp_size` and `cp_size` decide it"
_OWNED = (
    (r"(LOCAL_|ROLE_|GROUP_)?(RANK|WORLD_SIZE)|LOCAL_SIZE|NODE_RANK", _COUNTED),
    (r"MASTER_(ADDR|PORT)", _MET),
    (r"CUDA_VISIBLE_DEVICES", f"{_SHELL}; `hardware.devices_per_node` says how many of them are used"),
    (r"EFFILAUNCH_\w+", _SHELL),
    (r"ACCELERATE_(USE_CPU|TORCH_DEVICE)", "`hardware.device: cpu` or `--on cpu` decides it"),
    (r"ACCELERATE_(USE_\w+|DEEPSPEED_\w+|CONFIG_DS_FIELDS|ALLOW_CP_STANDALONE)|FSDP_\w+", _ENGINE),
    (r"PARALLELISM_CONFIG_\w+", _PARTS),
    (r"ACCELERATE_(MIXED_PRECISION|DOWNCAST_BF16|FP8_\w+)", "`precision` decides it"),
    (r"ACCELERATE_DYNAMO_\w+", "write `trainer.torch_compile` and its like"),
    (r"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "`global_batch_size` decides it"),
    (r"ACCELERATE_GRADIENT_CLIPPING", "write `trainer.max_grad_norm`"),
)
"""Variables that the run sets itself, or that would change behind the plan what it has decided, as patterns,
and how the thing is said instead."""


def take_secrets(data: dict[str, Any]) -> list[Problem]:
    """Problems of secrets that are written out, or asked for where they would be written down.

    Takes them out of `data`, so that no other message shows them.
    """
    problems: list[Problem] = []

    def visit(value: Any, path: str) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            child, item = join(path, key), value[key]
            if isinstance(item, dict | list):
                visit(item, child)
            elif isinstance(item, str) and (problem := _secret(path, str(key), item, child)):
                problems.append(problem)
                value[key] = "hidden"

    visit(data, "")
    return problems


def check_environment(data: dict[str, Any]) -> list[Problem]:
    """Problems of names under `launch.env`: no variable's, which no shell could set, or the run's own."""
    launch = data.get("launch")
    env = launch.get("env") if isinstance(launch, dict) else None
    problems = []
    for name in env if isinstance(env, dict) else ():
        if not _NAME.fullmatch(str(name)):
            message = "is no name of a variable, expected letters, digits and _, not beginning with a digit"
            problems.append(Problem("wrong-value", message, path=join("launch.env", name)))
        owner = next((hint for pattern, hint in _OWNED if re.fullmatch(pattern, str(name))), None)
        if owner is not None:
            message = "not allowed under `launch.env`: the run sets it, or has decided it"
            problems.append(Problem("owned-key", message, path=join("launch.env", name), hint=owner))
    return problems


def _secret(parent: str, key: str, text: str, path: str) -> Problem | None:
    """The problem of one text; `parent` and `key` make its path."""
    in_environment = parent == "launch.env"
    in_shell = parent == "launch.slurm.setup"
    if not in_environment and any(names_secret(name) for name in reference_names(text)):
        message = "asks for a secret, which would be written into the run directory"
        hint = "the environment reaches every process by itself; a variable's name is no value of the recipe"
        return Problem(SECRET_CODE, message, path=path, hint=hint)
    plain = "".join(part for part in split_references(text) if isinstance(part, str))
    is_secret = is_written_secret(key, plain) if in_environment else looks_secret(plain)
    if in_shell and (is_secret or _sets_secret(plain)):
        message = "sets a secret, and the line is written into the job scripts"
        hint = (
            "the jobs get the environment of the shell that submits them: set it there, and leave it out here"
        )
        return Problem(SECRET_CODE, message, path=path, hint=hint)
    if not is_secret:
        return None
    message = "is a secret, and a recipe is copied into every run directory"
    name = key if in_environment else "NAME"
    hint = f"set it in the environment and write ${{ENV:{name}}} under launch.env, or leave it out there"
    return Problem(SECRET_CODE, message, path=path, hint=hint)


def _sets_secret(line: str) -> bool:
    """Whether a line of shell sets a variable to a secret; one that is read from elsewhere ($…) is none."""
    for name, quoted in _ASSIGNED.findall(line):
        value = quoted.replace('"', "").replace("'", "")
        if "$" not in value and "`" not in value and is_written_secret(name, value):
            return True
    return False
