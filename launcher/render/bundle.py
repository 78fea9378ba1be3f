"""The bundle: every file of a run directory and the command that starts it, as text. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.plan.plan import Plan
from launcher.recipe.env import split_references
from launcher.render.command import (
    render_accelerate_config,
    render_command,
    render_env,
    render_prepare,
)
from launcher.render.ds_config import render_ds_config

PLAN_KEYS_LATE = ("{master_port}", "{run_dir}", "{devices}")
"""Values that are bound when the bundle is executed."""
_LATE = re.compile("(" + "|".join(map(re.escape, PLAN_KEYS_LATE)) + ")")


@dataclass(frozen=True, slots=True)
class Bundle:
    """What execution takes: nothing is recomputed from the plan."""

    plan: Plan
    ds_config: dict[str, Any] | None
    prepare: tuple[str, ...]
    """Prepares the data, before any process group exists."""
    command: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str]
    """File name -> text, relative to the run directory."""


def render(plan: Plan) -> Bundle:
    """Render the plan into a bundle; the same plan gives the same bundle."""
    ds_config = render_ds_config(plan)
    command, env = render_command(plan), render_env(plan)
    prepare = render_prepare(plan)
    files = {
        "recipe.yaml": plan.recipe_text,
        "plan.json": dump_json(plan_json(plan, ds_config, command, env)),
        "command.sh": _script(prepare, command, env),
        "environment.json": dump_json(dict(plan.versions)),
    }
    if ds_config is not None:
        files["ds_config.json"] = dump_json(ds_config)
    accelerate = render_accelerate_config(plan)
    if accelerate is not None:
        files["accelerate.yaml"] = "".join(f"{k}: {_scalar(v)}\n" for k, v in accelerate.items())
    return Bundle(plan, ds_config, tuple(prepare), tuple(command), env, files)


def dump_json(value: Any) -> str:
    """Strict JSON, two spaces, one final newline: DeepSpeed reads comments, accelerate does not."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def plan_json(
    plan: Plan, ds_config: dict[str, Any] | None, command: list[str], env: Mapping[str, str]
) -> dict[str, Any]:
    """The plan's JSON object: what `plan --json` prints (less the envelope) and the worker reads."""
    hardware, schedule = plan.hardware, plan.schedule
    capability = hardware.compute_capability
    return {
        "recipe": plan.recipe_file,
        "model": _model_json(plan),
        "hardware": {
            "num_nodes": hardware.num_nodes,
            "devices_per_node": hardware.devices_per_node,
            "device": hardware.device,
            "device_bytes": hardware.device_bytes,
            "compute_capability": None if capability is None else float(f"{capability[0]}.{capability[1]}"),
        },
        "batch": plan.batch.to_json(),
        "schedule": {
            "steps": schedule.steps,
            "epochs": schedule.epochs,
            "warmup_steps": schedule.warmup_steps,
            "tokens_per_step": schedule.tokens_per_step,
        },
        "settings": {
            key: {"value": s.value, "source": s.source, "by": s.by, "reason": s.reason}
            for key, s in sorted(plan.settings.items())
        },
        "fixes": [
            {
                "id": f.id,
                "title": f.title,
                "reason": f.reason,
                "source": f.source,
                "changed": dict(f.changed),
            }
            for f in plan.fixes
        ],
        "memory": plan.memory.to_json(),
        "time": plan.time.to_json(schedule.steps),
        "ds_config": ds_config,
        "command": command,
        "env": dict(env),
        "warnings": list(plan.warnings),
    }


def _model_json(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.model.name,
        "origin": plan.model.origin,
        "model_type": plan.model.model_type,
        "params": plan.model.params,
        "trainable": plan.trainable_params,
    }


def _scalar(value: object) -> str:
    return json.dumps(value)


def _script(prepare: list[str], command: list[str], env: Mapping[str, str]) -> str:
    """`command.sh`: the same start by hand. Late values become shell variables with defaults."""
    lines = [
        "#!/usr/bin/env bash",
        "# The command that effilaunch starts for this run; it runs by hand, too.",
        "set -euo pipefail",
        'run_dir="$(CDPATH=\'\' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"',
    ]
    words = [*env.values(), *command]
    if any("{master_port}" in word for word in words):
        lines.append('master_port="${MASTER_PORT:-29500}"')
    if any("{devices}" in word for word in words):
        lines.append('devices="${CUDA_VISIBLE_DEVICES:-0}"')
    parts = [part for word in words for part in split_references(word)]
    given = [part[1] for part in parts if isinstance(part, tuple) and part[1] is not None]
    defaults = {text: f"default_{number}" for number, text in enumerate(dict.fromkeys(given), start=1)}
    lines += [f"{name}={_quoted(text)}" for text, name in defaults.items()]
    lines += [f"export {name}={_shell(value, defaults)}" for name, value in env.items()]
    lines.append(" ".join(_shell(word, defaults) for word in prepare))
    lines.append("exec " + " \\\n  ".join(_shell(word, defaults) for word in command))
    return "\n".join(lines) + "\n"


def _shell(word: str, defaults: Mapping[str, str]) -> str:
    """Quote a word; late values become "${name}", `${ENV:NAME}` the variable NAME.

    defaults: of references, each with the shell variable that holds it. Between braces no quotes would
    protect it: bash reads an apostrophe there as the beginning of a text.
    """
    text = ""
    for part in split_references(word):
        if isinstance(part, tuple):
            name, default = part
            text += f'"${{{name}}}"' if default is None else f'"${{{name}-${{{defaults[default]}}}}}"'
            continue
        for piece in _LATE.split(part):
            text += f'"${piece}"' if piece in PLAN_KEYS_LATE else _quoted(piece) if piece else ""
    return text or "''"


def _quoted(text: str) -> str:
    """A text that the shell takes as it is; shellcheck takes these signs in single quotes for a slip."""
    if re.search(r"[$`\\']", text):
        return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
    return shlex.quote(text)
