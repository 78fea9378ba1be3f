"""axolotl's YAML as keys of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.importing.arguments import as_bool, as_number, take_argument
from launcher.importing.axolotl_model import take_bits, take_lora, take_model, take_precision
from launcher.importing.axolotl_rows import take_rows
from launcher.importing.axolotl_steps import take_optimizer, take_steps, take_times
from launcher.importing.axolotl_tables import (
    DPO_KEYS,
    HANDLED,
    KEYS,
    LEFT,
    PLUGIN_KEYS,
    REFUSED_TRAINING,
    ROW_TYPES,
    SHARING,
)
from launcher.importing.found import Effect, Place, Reading, shown
from launcher.importing.fsdp import take_fsdp_options
from launcher.importing.peer import (
    Left,
    Peer,
    Row,
    Tool,
    close_peer,
    is_off,
    leave_keys,
    leave_rest,
    load_tool,
    open_peer,
    rows_of,
    take_keys,
)
from launcher.tasks import task_of_tool

_MARKS = ("datasets", "pretraining_dataset", "sequence_len", "micro_batch_size", "adapter", "rl")
_TRACKERS = {
    "use_wandb": "wandb",
    "use_tensorboard": "tensorboard",
    "use_mlflow": "mlflow",
    "use_comet": "comet_ml",
    "use_trackio": "trackio",
}


def tells(data: Mapping[str, Any]) -> bool:
    """Whether a YAML's keys are axolotl's."""
    return "base_model" in data and any(key in data for key in _MARKS)


def mapping_rows() -> list[Row]:
    """(key of axolotl, key of a recipe, note), for a page."""
    of_plugins = [entry for table in PLUGIN_KEYS.values() for entry in table]
    return rows_of((*KEYS, *DPO_KEYS), HANDLED, (*LEFT, *of_plugins))


def row_types() -> list[Row]:
    """(`type` of a data set, what it becomes, note), for a page."""
    return list(ROW_TYPES)


def read(
    text: str, file: str, overrides: Mapping[str, Any] | None = None, place: Place | None = None
) -> Reading:
    """Read a recipe of axolotl.

    overrides: what the launch line at `place` says over the file. RecipeError when the file is no YAML; a
    kind of training that is not here is among the reading's refusals.
    """
    peer = open_peer(text, file, _tool(), overrides)
    if "base_model" not in peer.values:
        peer.reading.needs("model.name_or_path", None, "base_model is not there")
    _take_task(peer)
    if (as_number(peer.values.get("max_steps", 1)) or 0) <= 0:
        peer.get("max_steps")  # as if absent
        peer.values.pop("max_steps")
    take_keys(peer, KEYS)
    take_model(peer)
    adapted = take_lora(peer)
    take_bits(peer, adapted)
    take_precision(peer, adapted)
    has_eval = take_rows(peer)
    take_steps(peer)
    take_optimizer(peer)
    take_times(peer, has_eval)
    _take_sharding(peer)
    _take_trackers(peer)
    _take_plugins(peer)
    leave_keys(peer, (*LEFT, *SHARING))
    leave_rest(peer)
    return close_peer(peer, overrides or (), place)


def _tool() -> Tool:
    return load_tool("axolotl", "axolotl", "ignores it")


def _take_task(peer: Peer) -> None:
    kind = peer.get("rl")
    name = str(kind).lower()
    if kind is None or is_off(kind):
        return
    task = task_of_tool("axolotl", name)
    if task is not None:
        peer.take("task", task.name, "rl")
        take_keys(peer, DPO_KEYS)
        if name == "ipo":
            peer.take("trainer.loss_type", "ipo", "rl")
    else:
        what = f"is {shown(kind)}, and of preference trainings there is only dpo here"
        if name not in REFUSED_TRAINING:
            what = f"is {shown(kind)}, expected dpo or ipo"
        peer.refuse("rl", what)


def _take_sharding(peer: Peer) -> None:
    config = peer.get("deepspeed")
    if config:
        take_argument(peer.reading, "deepspeed", config, peer.line("deepspeed"))
    version = peer.get("fsdp_version")
    options, words = peer.get("fsdp_config"), peer.get("fsdp")
    if options or words:
        peer.take("sharding.engine", "fsdp", "fsdp_config" if options else "fsdp")
        if words:
            take_argument(peer.reading, "fsdp", words, peer.line("fsdp"))
        if options:
            take_fsdp_options(peer.reading, "fsdp_config", options, peer.line("fsdp_config"))
    elif version is not None:
        peer.reading.know("fsdp_version")
    if "fsdp_final_state_dict_type" in peer.values:
        peer.drop("fsdp_final_state_dict_type", Effect.NONE, "whole weights are saved")
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        size = as_number(peer.get(key))
        if size is not None and size > 1:
            to = "sharding.sp_size" if config else "sharding.cp_size"
            peer.take(to, int(size), key)


def _take_trackers(peer: Peer) -> None:
    used = [name for key, name in _TRACKERS.items() if peer.switch(key)]
    if "swanlab" in str(peer.values.get("plugins", "")) and peer.switch("use_swanlab"):
        used.append("swanlab")
    project = peer.get("wandb_project")
    if project and "wandb" not in used and as_bool(peer.values.get("use_wandb")) is not False:
        used.insert(0, "wandb")
    if used:
        first = next(
            (key for key in ("wandb_project", *_TRACKERS, "use_swanlab") if key in peer.values),
            "wandb_project",
        )
        peer.take("trainer.report_to", used, first)
    for key in ("wandb_project", "wandb_entity", "wandb_mode"):
        value = peer.get(key)
        if value is not None and value != "":
            peer.take(f"launch.env.{key.upper()}", str(value), key)
    if peer.get("wandb_name"):
        peer.take("trainer.run_name", str(peer.values["wandb_name"]), "wandb_name")
    target = peer.get("hub_model_id")
    if target:
        peer.take("trainer.hub_model_id", str(target), "hub_model_id")
        peer.take("trainer.push_to_hub", True, "hub_model_id")
        peer.take("trainer.hub_private_repo", True, "hub_model_id", note="always private there")


def _take_plugins(peer: Peer) -> None:
    plugins = peer.get("plugins")
    named = [str(name) for name in plugins] if isinstance(plugins, list) else []
    kernels = [key for key in peer.values if key.startswith("liger_")]
    for key in kernels:
        peer.get(key)
    if any(as_bool(peer.values[key]) for key in kernels):
        key = next(key for key in kernels if as_bool(peer.values[key]))
        peer.take("trainer.use_liger_kernel", True, key, *kernels)
    for name in named:
        plain = name.lower()
        line = peer.line("plugins")
        if _plugin_of(name) in ("liger", "cut_cross_entropy", "swanlab"):
            continue
        if "kd" in plain.split(".") or "diffusion" in plain:
            peer.refuse("plugins", f"holds {shown(name)}: another kind of training")
        else:
            peer.reading.drop("plugins", name, line, Effect.TRAINING, "a plugin of axolotl's")
    _take_plugin_keys(peer, {_plugin_of(name) for name in named})
    _leave_to_plugins(peer, [name for name in named if not _plugin_of(name)])


def _plugin_of(name: str) -> str:
    """`swanlab` of `axolotl.integrations.swanlab.SwanLabPlugin`; empty for one of somebody else's."""
    start, _, rest = name.partition("axolotl.integrations.")
    return rest.partition(".")[0] if not start else ""


def _take_plugin_keys(peer: Peer, on: set[str]) -> None:
    """Keys of axolotl's own plugins, which are read where `plugins` names them."""
    for plugin, table in PLUGIN_KEYS.items():
        if plugin in on:
            leave_keys(peer, table)
        else:
            reason = f"only axolotl's plugin {plugin} reads it, and plugins does not name that"
            leave_keys(peer, [Left(Effect.NONE, reason, entry.names) for entry in table])


def _leave_to_plugins(peer: Peer, others: list[str]) -> None:
    """With a plugin of somebody else's, a key that axolotl has not is that plugin's."""
    known = {*peer.tool.keys, *peer.reading.seen}
    for key in [key for key in peer.values if key not in known] if others else ():
        reason = f"no key of axolotl's own: the plugin {shown(others[0])} may read it"
        peer.drop(key, Effect.TRAINING, reason)
