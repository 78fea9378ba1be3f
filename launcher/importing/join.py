"""Several files as one recipe: who goes before whom, and what contradicts itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.importing import accelerate, deepspeed, launch_line, peft
from launcher.importing.importers import Info, info_of, read_call, read_file, read_text, text_of
from launcher.importing.reading import Call, Dropped, Effect, Place, Reading, Taken, shown, without_tokens
from launcher.recipe.field_tables import METRICS, TASK_TABLES, task_fields, task_of_field, trainer_fields
from launcher.tasks import DEFAULT_TASK, task_named

MOST = 20
"""Files of one import."""
# The earlier goes before the later where the tools themselves do it so.
_RANKS = {launch_line.TOOL: 0, accelerate.TOOL: 2, deepspeed.TOOL: 3, peft.TOOL: 4}
_ONCE = (launch_line.TOOL, accelerate.TOOL, deepspeed.TOOL, peft.TOOL, "")
"""Kinds of which an import has one at most; "" are the recipes."""

_OF_DEEPSPEED = ("trainer.optim", "trainer.lr_scheduler_type")
"""A DeepSpeed config that has these makes them itself: the Trainer does not look at its own arguments."""


@dataclass(slots=True)
class Imported:
    """One recipe out of all files."""

    files: list[str]
    tools: list[str]
    taken: dict[str, Taken]
    dropped: list[Dropped]
    texts: dict[str, str] = field(default_factory=dict)
    """Files to write beside the recipe: suffix of the name -> text."""
    notes: list[str] = field(default_factory=list)
    """What no key holds: the value for --on."""


def import_files(files: Sequence[str]) -> Imported:
    """Read the files and those that they name. RecipeError for what no recipe can be made of."""
    try:
        return _imported(files)
    except RecipeError as error:  # parsers quote what they stumble over
        clean = [
            replace(
                problem,
                message=without_tokens(problem.message),
                hint=problem.hint and without_tokens(problem.hint),
            )
            for problem in error.problems
        ]
        raise RecipeError(clean) from None


def _imported(files: Sequence[str]) -> Imported:
    readings = _read_all(files)
    refusals = _too_many(readings)
    refusals += [problem for reading in readings for problem in reading.refusals]
    if refusals:
        raise RecipeError(refusals)
    return joined(readings)


def joined(readings: Sequence[Reading]) -> Imported:
    """The readings as one. RecipeError with every contradiction."""
    order = sorted(readings, key=lambda reading: _RANKS.get(reading.tool, 1))
    problems: list[Problem] = []
    dropped = [entry for reading in readings for entry in reading.dropped]
    taken: dict[str, Taken] = {}
    for reading in order:
        for key, value in reading.taken.items():
            before = taken.get(key)
            if before is None or (
                before.is_default and not value.is_default and not _firm(before, key, order)
            ):
                taken[key] = value
            elif not value.is_default and not before.is_default and value.value != before.value:
                if reading.tool == deepspeed.TOOL and key in _OF_DEEPSPEED:
                    dropped.append(_overruled(before, value))
                    taken[key] = value
                    continue
                problem = _contradiction(key, before, value, reading, order)
                if problem is not None:
                    problems.append(problem)
                elif _is_weak(key, before):
                    taken[key] = value
                else:
                    dropped.append(_overruled(value, before))
    if problems:
        raise RecipeError(problems)
    made = Imported(
        [reading.file for reading in readings],
        [reading.tool for reading in readings],
        taken,
        dropped,
        {suffix: text for reading in readings for suffix, text in reading.texts.items()},
    )
    profile = next((reading.profile for reading in readings if reading.profile), {})
    settle(made, profile)
    made.dropped[:] = dict.fromkeys(made.dropped)
    return made


def _read_all(files: Sequence[str]) -> list[Reading]:
    """The files given, and those that they name and that are there."""
    info, texts = _apart(files)
    given = list(texts)
    readings = _read_given(texts, info)
    if not readings:
        raise RecipeError(Problem("import-unknown", "LLaMA-Factory's list of data sets alone is no training",
                                  files[0], hint="give the recipe as a FILE too"))  # fmt: skip
    for reading in readings[:]:
        for call in reading.calls:
            readings = _called(readings, reading, call, given, info)
    known = {_resolved(Path(reading.file)) for reading in readings}
    for reading in readings:  # grows while it is gone through
        for config, line in reading.inline:
            deepspeed.take_config(reading, config, lambda path, line=line: line)  # type: ignore[misc]
        for name, place in reading.names.items():
            _take_named(readings, reading, name, place, known, given)
    return readings


def _apart(files: Sequence[str]) -> tuple[Info | None, dict[str, str]]:
    """LLaMA-Factory's list of data sets, where one is given, and the texts of the other files.

    Each file is opened once: what a shell puts in its place (`<(…)`) is there once. RecipeError with all that
    cannot be read.
    """
    info = None
    texts: dict[str, str] = {}
    problems: list[Problem] = []
    for file in dict.fromkeys(files):
        try:
            text = text_of(file)
        except RecipeError as error:
            problems += error.problems
            continue
        found = info_of(text, file)
        if found is None:
            texts[file] = text
        info = info or found
    problems += _unread(texts, info) if problems else []
    if problems:
        raise RecipeError(problems)
    return info, texts


def _unread(texts: Mapping[str, str], info: Info | None) -> list[Problem]:
    """What is wrong with the files that could be opened, beside those that could not."""
    try:
        _read_given(texts, info)
    except RecipeError as error:
        return error.problems
    return []


def _read_given(texts: Mapping[str, str], info: Info | None) -> list[Reading]:
    """A reading each. RecipeError with what is wrong with any of them."""
    readings: list[Reading] = []
    problems: list[Problem] = []
    for file, text in texts.items():
        try:
            readings.append(read_text(text, file, info))
        except RecipeError as error:
            problems += [replace(problem, file=problem.file or file) for problem in error.problems]
    if problems:
        raise RecipeError(problems)
    return readings


def _take_named(
    readings: list[Reading], reading: Reading, name: str, place: Place, known: set[Path], given: Sequence[str]
) -> None:
    """A config that a file names: read where it is there, else needed."""
    found = _find(name, reading.file, given)
    if found is not None:
        if _resolved(found) not in known and len(readings) < MOST:
            known.add(_resolved(found))
            readings.append(read_file(str(found)))
    elif any(other.tool == deepspeed.TOOL for other in readings):
        reading.drop(name, "", place.line, Effect.NONE, "the DeepSpeed config that is given stands for it")
    else:
        reading.drop(name, "", place.line, Effect.NEEDED, "this file is named, and is not there",
                     "give it as a FILE too")  # fmt: skip


def _called(
    readings: list[Reading], reading: Reading, call: Call, given: Sequence[str], info: Info | None
) -> list[Reading]:
    """Read the recipe that a launch line starts, with what the line says over it."""
    found = None if call.file is None else _find(call.file, reading.file, given)
    if call.file is not None and found is None:
        reading.drop(call.file, "", call.line, Effect.NEEDED, "this recipe is named, and is not there",
                     "give it as a FILE too")  # fmt: skip
        return readings
    made = read_call(call, Place(reading.file, call.line), found, info)
    there = None if found is None else _resolved(found)  # what was read of it without the line
    return [*(other for other in readings if _resolved(Path(other.file)) != there), made]


def _find(name: str, file: str, given: Sequence[str]) -> Path | None:
    """A named file: one that is given, of the same name, else beside the one that names it."""
    same = [Path(other) for other in given if Path(other).name == Path(name).name]
    return same[0] if same else _beside(name, file)


def _beside(name: str, file: str) -> Path | None:
    """A named file, beside the one that names it or in the working folder."""
    try:
        for folder in (Path(file).parent, Path()):
            if (folder / name).is_file():
                return folder / name
    except (OSError, ValueError):
        return None
    return None


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return path


def _kind(reading: Reading) -> str:
    return reading.tool if reading.tool in _ONCE else ""


def _too_many(readings: Sequence[Reading]) -> list[Problem]:
    """Two of a kind: two trainings, or two configs of the same thing."""
    problems = []
    first: dict[str, Reading] = {}
    for reading in readings:
        before = first.setdefault(_kind(reading), reading)
        if before is not reading:
            message = f"a {reading.tool}, and {before.file} is a {before.tool}: one recipe is of one training"
            problems.append(Problem("import-conflict", message, reading.file, hint="import them one by one"))
    return problems


def _tool_of(place: Place, readings: Sequence[Reading]) -> str:
    return next((reading.tool for reading in readings if reading.file == place.file), "")


def _firm(before: Taken, key: str, readings: Sequence[Reading]) -> bool:
    """Whether a tool sets its default itself, against what accelerate's file says."""
    return key == "precision" and _tool_of(before.place, readings).startswith(("TRL", "axolotl"))


def _is_weak(key: str, before: Taken) -> bool:
    """One process a device is also how DeepSpeed and FSDP begin."""
    return key == "sharding.engine" and before.value == "ddp"


def _contradiction(
    key: str, before: Taken, value: Taken, reading: Reading, readings: Sequence[Reading]
) -> Problem | None:
    """The problem of two values, None where one of the tools goes before the other."""
    first = _tool_of(before.place, readings)
    if key == "sharding.engine" and "ddp" in (before.value, value.value):
        return None
    options = first == launch_line.TOOL and key != "sharding.engine"
    if reading.tool == accelerate.TOOL and (options or key == "precision"):
        return None
    message = (
        f"{before.said} in {before.place} and {value.said} in {value.place} contradict each other "
        f"({key}: {shown(before.value)} or {shown(value.value)})"
    )
    return Problem("import-conflict", message, value.place.file, value.place.line, key,
                   "make them equal, or take one out")  # fmt: skip


def _overruled(value: Taken, before: Taken) -> Dropped:
    name, _, text = value.said.partition(": ")
    reason = f"{before.said} ({before.place}) goes before it"
    return Dropped(value.place, name, text or shown(value.value), Effect.NONE, reason)


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
