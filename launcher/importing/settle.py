"""Rules between the keys of an imported recipe, where the other tool allows what a recipe does not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.importing.found import Dropped, Effect, Place, Taken, shown
from launcher.recipe.field_tables import TASK_TABLES, task_fields, task_of_field, trainer_fields
from launcher.recipe.vocabulary import METRICS
from launcher.tasks import DEFAULT_TASK, task_named

if TYPE_CHECKING:
    from launcher.importing.join import Imported

PROFILE = "_deepspeed.json"
"""Ending of the base profile's name."""
_OF_EVALUATION = (
    "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps",
    "eval_do_concat_batches", "batch_eval_metrics", "include_for_metrics", "per_device_eval_batch_size",
    "prediction_loss_only", "eval_use_gather_object",
)  # fmt: skip
_OF_ROWS = ("data", "load_dataset", "train_file", "rows:", "pretraining_dataset")
"""What the keys of other tools begin with that name rows."""
_OF_BEST = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")


def settle(made: Imported, profile: Mapping[str, Any]) -> None:
    """Make the keys fit each other; what has to go is listed."""
    _settle_model(made)
    _settle_steps(made)
    _settle_batch(made)
    _settle_evaluation(made)
    _settle_metric(made)
    _settle_hub(made)
    _settle_task(made)
    _settle_sharding(made, profile)
    _settle_hardware(made)
    made.dropped[:] = [entry for entry in made.dropped if not _answered(entry, made)]
    _need_the_rest(made)


def _answered(entry: Dropped, made: Imported) -> bool:
    """Whether another file says what this one needed."""
    if entry.effect is not Effect.NEEDED or entry.value:
        return False
    return entry.key in made.taken or any(key.startswith(f"{entry.key}.") for key in made.taken)


def _leave(made: Imported, key: str, effect: Effect, reason: str, hint: str = "") -> None:
    taken = made.taken.pop(key, None)
    if taken is None or taken.is_default:
        return
    name, _, text = taken.said.partition(": ")
    made.dropped.append(Dropped(taken.place, name, text or shown(taken.value), effect, reason, hint))


def _settle_model(made: Imported) -> None:
    """What a recipe means by itself need not be written."""
    model, tokenizer = made.taken.get("model.name_or_path"), made.taken.get("model.tokenizer")
    if tokenizer is not None and model is not None and tokenizer.value == model.value:
        del made.taken["model.tokenizer"]
    task = made.taken.get("task")
    if task is not None and task.value == DEFAULT_TASK:
        del made.taken["task"]


def _settle_steps(made: Imported) -> None:
    if "trainer.max_steps" in made.taken:
        _leave(made, "trainer.num_train_epochs", Effect.NONE, "max_steps is given too, and goes before it")


def _settle_batch(made: Imported) -> None:
    both = ("trainer.gradient_accumulation_steps", "trainer.per_device_train_batch_size")
    if "global_batch_size" in made.taken and both[0] in made.taken:
        if both[1] in made.taken:
            _leave(made, "global_batch_size", Effect.NONE, "micro-batch and accumulation say it for any "
                   "number of devices")  # fmt: skip
        else:
            _leave(made, both[0], Effect.NONE, "train_batch_size decides it with the number of devices")


def _settle_evaluation(made: Imported) -> None:
    if "data.eval" in made.taken:
        if "trainer.eval_strategy" not in made.taken:
            where = made.taken["data.eval"].place
            made.taken["trainer.eval_strategy"] = Taken(
                "no", Place(where.file), "eval_strategy: no", is_default=True
            )
        return
    asked = made.taken.get("trainer.eval_strategy")
    reason = "no evaluation rows are named" if asked and asked.value != "no" else "nothing is evaluated"
    for name in _OF_EVALUATION:
        if f"trainer.{name}" in made.taken and made.taken[f"trainer.{name}"].value == "no":
            del made.taken[f"trainer.{name}"]
        hint = "write data.eval, e.g. {split: 0.02}" if name == "eval_strategy" else ""
        _leave(made, f"trainer.{name}", Effect.NONE, reason, hint)
    for name in _OF_BEST:
        key = f"trainer.{name}"
        if key in made.taken and made.taken[key].value is False:
            del made.taken[key]
        _leave(made, key, Effect.TRAINING, "needs evaluation rows, and none are named",
               "write data.eval, e.g. {split: 0.02}")  # fmt: skip
    for key in ("early_stopping.patience", "early_stopping.threshold"):
        _leave(made, key, Effect.TRAINING, "needs evaluation rows, and none are named",
               "write data.eval, e.g. {split: 0.02}")  # fmt: skip


def _settle_metric(made: Imported) -> None:
    """The metric of the best checkpoint has to be measured: by a recipe's own of that name, or by a hook."""
    best = made.taken.get("trainer.metric_for_best_model")
    if best is None or {"python", "data.metrics"} & made.taken.keys():
        return
    task = made.taken["task"].value if "task" in made.taken else DEFAULT_TASK
    name = str(best.value).removeprefix("eval_")
    if name == "loss" or task_named(task).own_metrics:
        return
    if name in METRICS.get(task, ()):
        note = "the script's own function may count otherwise"
        made.taken["data.metrics"] = Taken([name], best.place, best.said, note=note)
    else:
        reason = "only a function of the script's own measures it"
        hint = "move that into a hooks.py as compute_metrics(prediction), and write python: hooks.py"
        said = shown(best.value)
        made.dropped.append(Dropped(best.place, "metric_for_best_model", said, Effect.NEEDED, reason, hint))


def _settle_hub(made: Imported) -> None:
    push = made.taken.get("trainer.push_to_hub")
    if push is not None and push.value is True and "trainer.hub_model_id" not in made.taken:
        _leave(made, "trainer.push_to_hub", Effect.NONE, "no name of a repository is given",
               "write trainer.hub_model_id: you/name")  # fmt: skip
    elif push is not None and push.value is False:
        del made.taken["trainer.push_to_hub"]
    if "trainer.push_to_hub" not in made.taken:
        for name in ("hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision"):
            _leave(made, f"trainer.{name}", Effect.NONE, "nothing is pushed")


def _settle_task(made: Imported) -> None:
    """Fields that only another task has."""
    task = made.taken["task"].value if "task" in made.taken else DEFAULT_TASK
    fields = {**trainer_fields(task), **(task_fields(task) if task in TASK_TABLES else {})}
    for key in [key for key in made.taken if key.startswith("trainer.")]:
        name = key.removeprefix("trainer.")
        other = task_of_field(name)
        if name not in fields and other is not None:
            off = made.taken[key].value in (False, None)
            if off:
                del made.taken[key]
            # Fields of a task that generates say how evaluations generate.
            effect = Effect.NONE if task_named(other).generates else Effect.TRAINING
            _leave(made, key, effect, f"a key of task {other}, and this is {task}")


def _settle_sharding(made: Imported, profile: Mapping[str, Any]) -> None:
    _settle_fsdp(made)
    engine = made.taken.get("sharding.engine")
    if engine is not None and engine.value != "deepspeed":
        for key in ("zero_stage", "offload_optimizer", "offload_param", "nvme_path", "config"):
            _leave(made, f"sharding.{key}", Effect.NONE, f"the engine is {engine.value}")
    if "sharding.config" in made.taken and profile:
        made.texts[PROFILE] = json.dumps(profile, indent=2) + "\n"
        made.taken["sharding.config"] = replace(made.taken["sharding.config"], value=PROFILE)
    stage = made.taken.get("sharding.zero_stage")
    offload = made.taken.get("sharding.offload_param")
    if stage is not None and offload is not None and stage.value != 3:
        _leave(made, "sharding.offload_param", Effect.NONE, "DeepSpeed reads it at stage 3 alone")


def _settle_fsdp(made: Imported) -> None:
    """What FSDP does not train here; how a model is sharded does not change what it learns."""
    engine = made.taken.get("sharding.engine")
    if engine is None or engine.value != "fsdp":
        return
    precision = made.taken.get("precision")
    task = task_named(made.taken["task"].value if "task" in made.taken else DEFAULT_TASK)
    why = "a quantised model" if "model.quantization" in made.taken else ""
    why = why or ("fp16" if precision is not None and precision.value == "fp16" else "")
    why = why or ("an encoder-decoder" if task.is_encoder_decoder else "")
    if why:
        reason = f"memory only: fsdp does not shard {why} here; the planner chooses the engine"
        if why == "fp16":
            reason = "memory only: fsdp is not planned with fp16 here; the planner chooses the engine"
        _leave(made, "sharding.engine", Effect.NONE, reason)


def _settle_hardware(made: Imported) -> None:
    """`hardware` needs a device, which no other tool names: the numbers are told, not written."""
    total, nodes = made.taken.pop("hardware.total", None), made.taken.get("hardware.num_nodes")
    each = made.taken.get("hardware.devices_per_node")
    machines = nodes.value if nodes else 1
    if total is not None and each is None:
        if total.value % machines:
            made.dropped.append(Dropped(
                total.place, total.said, shown(total.value), Effect.NEEDED,
                f"{total.value} processes do not divide over {machines} machines",
                "accelerate's num_processes counts those of all machines"))  # fmt: skip
        else:
            each = replace(total, value=total.value // machines)
            made.taken["hardware.devices_per_node"] = each
    if "hardware.device" in made.taken:
        return
    for key in ("hardware.devices_per_node", "hardware.num_nodes"):
        made.taken.pop(key, None)
    if each is None and nodes is None:
        return
    count = each.value if each else None
    on = f"{f'{machines}x' if machines > 1 else ''}{count or 'N'}xDEVICE"
    every = count * machines if count else None
    made.notes.append(f"hardware: made for {every or 'all'} device{'s' if every != 1 else ''} on {machines} "
                      f"machine{'s' if machines != 1 else ''}; plan with --on {on}")  # fmt: skip
    if machines > 1:
        made.notes.append("several machines: write launch.hostfile or launch.slurm, or start `run` on each")


def _need_the_rest(made: Imported) -> None:
    """What every recipe needs, and no file says."""
    told = {entry.key for entry in made.dropped if entry.effect is Effect.NEEDED}
    where = Place(made.files[0])
    model = {"model.name_or_path", "model.config"}
    if not model & (made.taken.keys() | told):
        made.dropped.append(Dropped(where, "model.name_or_path", "", Effect.NEEDED,
                                    "no file names a model", "write the hub id or folder"))  # fmt: skip
    rows = any(key.startswith(_OF_ROWS) for key in told)
    if "data.train" not in made.taken and not rows:
        made.dropped.append(Dropped(where, "data.train", "", Effect.NEEDED, "no file names training rows",
                                    "write data: {train: [{path: FILE}]}"))  # fmt: skip
