"""The bundle: every file of a run directory and the command that starts it, as text. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.engines import engine_of
from launcher.plan.plan import AppliedFix, Plan
from launcher.recipe.env import hide_kept, split_references, with_references
from launcher.render.command import (
    WORKER,
    render_accelerate_config,
    render_command,
    render_env,
    render_prepare,
)

PLAN_KEYS_LATE = ("{master_port}", "{run_dir}", "{devices}", "{master_addr}", "{node_rank}")
"""Values that are bound when the bundle is executed."""
_FROM_THE_SHELL = {
    "{master_port}": 'master_port="${MASTER_PORT:-29500}"',
    "{devices}": 'devices="${CUDA_VISIBLE_DEVICES-%s}"',
    "{master_addr}": 'master_addr="${MASTER_ADDR:?the address of the machine with NODE_RANK=0}"',
    "{node_rank}": 'node_rank="${NODE_RANK:?0 on the first machine, 1 on the second, and so on}"',
}
"""Late value -> the line of command.sh that binds it."""
_COUNT_DEVICES = (
    'IFS=, read -ra ids <<< "$devices"',
    'if [ "${#ids[@]}" -lt %d ]; then',
    '  echo "this run is planned for %d GPUs a machine; CUDA_VISIBLE_DEVICES=$devices" >&2',
    "  exit 4",
    "fi",
    'devices="$(IFS=,; echo "${ids[*]:0:%d}")"',
)
"""As `run` does: the first of the devices that are named. All of them may be more ranks than are planned."""
_SETTING_OF = {"python": "python.file"}
"""Key of a recipe -> its setting, where that has another name."""
_LATE = re.compile("(" + "|".join(map(re.escape, PLAN_KEYS_LATE)) + ")")


@dataclass(frozen=True, slots=True)
class Bundle:
    """What execution takes: nothing is recomputed from the plan."""

    plan: Plan
    ds_config: dict[str, Any] | None
    prepare: tuple[str, ...]
    """Prepares the data, before any process group exists."""
    command: tuple[str, ...]
    """Starts the ranks of a node."""
    env: Mapping[str, str]
    files: Mapping[str, str]
    """File name -> text, relative to the run directory."""

    def to_json(self) -> dict[str, Any]:
        """plan.json, and the text of all files: the data of `plan --json`."""
        return {**json.loads(self.files["plan.json"]), "files": dict(self.files)}


def render(plan: Plan, worker: str = WORKER) -> Bundle:
    """Render the plan into a bundle; the same plan gives the same bundle.

    worker: the module that the launcher starts.
    """
    ds_config = engine_of(plan).ds_config(plan)
    command, env = render_command(plan, worker), render_env(plan)
    prepare = render_prepare(plan)
    first, starts, variables, config = hide_kept([prepare, command, env, ds_config], plan.kept)
    files = {
        "recipe.yaml": plan.recipe_text,
        "plan.json": dump_json(plan_json(plan, config, starts, variables)),
        "command.sh": _script(first, starts, variables, plan),
        "environment.json": dump_json(dict(plan.versions)),
    }
    if ds_config is not None:
        files["ds_config.json"] = dump_json(config)
    accelerate = render_accelerate_config(plan)
    if accelerate is not None:
        files["accelerate.yaml"] = "".join(f"{k}: {_scalar(v)}\n" for k, v in accelerate.items())
    return Bundle(plan, config, tuple(prepare), tuple(command), env, files)


def dump_json(value: Any) -> str:
    """Strict JSON, two spaces, one final newline: DeepSpeed reads comments, accelerate does not."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def plan_json(
    plan: Plan, ds_config: dict[str, Any] | None, command: list[str], env: Mapping[str, str]
) -> dict[str, Any]:
    """The plan's JSON object: what `plan --json` prints (less the envelope) and the worker reads.

    References of the recipe stay references, in settings and messages.
    """
    hardware, schedule = plan.hardware, plan.schedule
    kept = {_SETTING_OF.get(path, path): one for path, one in plan.kept.items()}
    capability = hardware.compute_capability
    return {
        "recipe": plan.recipe_file,
        "model": hide_kept(_model_json(plan), kept),
        "hardware": {
            "num_nodes": hardware.num_nodes,
            "devices_per_node": hardware.devices_per_node,
            "device": hardware.device,
            "device_bytes": hardware.device_bytes,
            "compute_capability": None if capability is None else float(f"{capability[0]}.{capability[1]}"),
        },
        "batch": plan.batch.to_json(),
        **({"elastic": [size.to_json() for size in plan.elastic]} if plan.elastic else {}),
        "schedule": {
            "steps": schedule.steps,
            "epochs": schedule.epochs,
            "warmup_steps": schedule.warmup_steps,
            "tokens_per_step": schedule.tokens_per_step,
        },
        "settings": {
            key: {
                "value": with_references(plan.at(key), key, kept),
                "source": s.source,
                "by": s.by,
                "reason": hide_kept(s.reason, kept),
            }
            for key, s in sorted(plan.provenance.items())
        },
        "fixes": hide_kept([_fix_json(fix) for fix in plan.fixes], kept),
        **({} if plan.spec.vision is None else {"images": plan.images and plan.images.to_json()}),
        "memory": plan.memory.to_json(),
        "time": plan.time.to_json(schedule.steps),
        "ds_config": ds_config,
        "command": command,
        "env": dict(env),
        "warnings": hide_kept(plan.warnings, kept),
        # Plans up to 0.2.0 do not have this key.
        "references": {one.text: one.digest for one in kept.values()},
    }


def _fix_json(fix: AppliedFix) -> dict[str, Any]:
    names = ("id", "title", "reason", "source")
    return {**{name: getattr(fix, name) for name in names}, "changed": dict(fix.changed)}


def _model_json(plan: Plan) -> dict[str, Any]:
    reach = plan.reach
    adapters = None if reach is None or reach.experts is None else dataclasses.asdict(reach)
    return {
        "name": plan.spec.name,
        "origin": plan.spec.origin,
        "model_type": plan.spec.model_type,
        "params": plan.spec.params,
        "trainable": plan.trainable_params,
        **({} if adapters is None else {"adapters": adapters}),
    }


def _scalar(value: object) -> str:
    return json.dumps(value)


def _script(prepare: list[str], command: list[str], env: Mapping[str, str], plan: Plan) -> str:
    """`command.sh`: the same start, for a shell. Late values become shell variables with defaults."""
    several = plan.hardware.num_nodes > 1
    lines = [
        "#!/usr/bin/env bash",
        "# The command that effilaunch starts for this run; it runs by hand, too.",
        *(_SEVERAL if several else []),
        *(_MIRRORED if plan.runtime.mirror else []),
        "set -euo pipefail",
        'run_dir="$(CDPATH=\'\' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"',
    ]
    words = [*env.values(), *command]
    count = 0 if plan.hardware.is_cpu else plan.hardware.devices_per_node
    for late, line in _FROM_THE_SHELL.items():
        if any(late in word for word in words):
            lines.append(line % ",".join(map(str, range(count))) if late == "{devices}" else line)
            if late == "{devices}" and count:
                lines += [line.replace("%d", str(count)) for line in _COUNT_DEVICES]
    parts = [part for word in words for part in split_references(word)]
    given = [part[1] for part in parts if isinstance(part, tuple) and part[1] is not None]
    defaults = {text: f"default_{number}" for number, text in enumerate(dict.fromkeys(given), start=1)}
    lines += [f"{name}={_quoted(text)}" for text, name in defaults.items()]
    lines += [f"export {name}={_shell(value, defaults)}" for name, value in env.items()]
    prepares = " ".join(_shell(word, defaults) for word in prepare)
    # On one machine alone: the others find its data.json in the run directory, and wait for its ranks.
    lines.append(f'if [ "$node_rank" = 0 ]; then {prepares}; fi' if several else prepares)
    lines.append("exec " + " \\\n  ".join(_shell(word, defaults) for word in command))
    return "\n".join(lines) + "\n"


_MIRRORED = [
    "# Started manually it copies no checkpoint to the store of runtime.mirror: `effilaunch run` does.",
]
_SEVERAL = (
    "# On several nodes: start it on each, with NODE_RANK=0, 1, … and MASTER_ADDR, the address of the node",
    "# with NODE_RANK=0, in the environment. All nodes must see this folder and the data cache. The first",
    "# node prepares the data: start the others within 10 minutes after that (data.json is there).",
)


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
