"""Several files as one recipe: which value takes precedence, and what contradicts itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.importing import accelerate, deepspeed, peft
from launcher.importing.importers import beside, info_of, read_file, read_text, text_of
from launcher.importing.llamafactory import Info
from launcher.importing.reading import (
    EVALUATED,
    Dropped,
    Effect,
    Given,
    Place,
    Reading,
    Taken,
    shown,
    without_tokens,
)
from launcher.recipe.field_tables import METRICS
from launcher.tasks import DEFAULT_TASK

MOST = 20
"""Files of one import."""
# The earlier takes precedence over the later where the tools themselves do it so.
_RANKS = {accelerate.TOOL: 2, deepspeed.TOOL: 3, peft.TOOL: 4}
"""Kinds of which an import has one at most; recipes of other tools (1) are one kind."""
_OF_DEEPSPEED = ("trainer.optim", "trainer.lr_scheduler_type")
"""A DeepSpeed config that has these makes them itself: the Trainer ignores its own arguments."""


@dataclass(slots=True)
class Imported(Reading):
    """All files as one reading; texts: files to write next to the recipe."""

    files: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What no key holds: the value for --on."""

    def leave(self, key: str, effect: Effect, reason: str, hint: str = "") -> None:
        """Drop what was taken for a recipe key."""
        taken = self.taken.pop(key, None)
        if taken is not None and not taken.is_default:
            self.dropped.append(taken.dropped(effect, reason, hint))


def import_files(files: Sequence[str]) -> Imported:
    """Read the files and those that they name. Raises RecipeError if no recipe can be made of them."""
    try:
        readings = _read_all(files)
        refusals = [problem for reading in readings for problem in reading.refusals]
        if problems := [*_too_many(readings), *refusals]:
            raise RecipeError(problems)
        return _joined(readings)
    except RecipeError as error:  # parsers quote the text that they cannot read
        raise RecipeError([_without_tokens(problem) for problem in error.problems]) from None


def _without_tokens(problem: Problem) -> Problem:
    hint = problem.hint and without_tokens(problem.hint)
    return replace(problem, message=without_tokens(problem.message), hint=hint)


def _joined(readings: Sequence[Reading]) -> Imported:
    """The readings as one. Raises RecipeError with every contradiction."""
    made = Imported(
        "",
        readings[0].file,
        files=[reading.file for reading in readings],
        tools=[reading.tool for reading in readings],
        dropped=[entry for reading in readings for entry in reading.dropped],
        texts={suffix: text for reading in readings for suffix, text in reading.texts.items()},
    )
    tools = {reading.file: reading.tool for reading in reversed(readings)}
    for reading in sorted(readings, key=lambda reading: _RANKS.get(reading.tool, 1)):
        for key, value in reading.taken.items():
            before = made.taken.get(key)
            if before is None:
                made.taken[key] = value
            elif (not value.is_default and value.value != before.value) or before.is_default:
                _choose(made, key, value, reading.tool, tools)
    if made.refusals:
        raise RecipeError(made.refusals)
    settle(made, next((reading.profile for reading in readings if reading.profile), {}))
    made.dropped[:] = dict.fromkeys(made.dropped)
    return made


def _choose(made: Imported, key: str, value: Taken, second: str, tools: Mapping[str, str]) -> None:
    """Choose between the value of a key and that of a `second` tool: one is dropped, or both are refused."""
    before = made.taken[key]
    if before.value == "auto" and not value.is_default and second == deepspeed.TOOL:  # axolotl's bf16: auto
        made.taken[key] = value
        return
    first = tools.get(before.place.file, "")
    if before.is_default:
        # TRL and axolotl pass their default of the precision, against accelerate's file.
        firm = key == "precision" and first.startswith(("TRL", "axolotl"))
        if not value.is_default and not firm:
            made.taken[key] = value
        return
    if second == deepspeed.TOOL and key in _OF_DEEPSPEED:
        before, value = value, before
    elif key == "sharding.engine" and "ddp" in (before.value, value.value):
        if before.value == "ddp":  # DeepSpeed and FSDP, too, begin with one process a device
            made.taken[key] = value
            return
    elif second != accelerate.TOOL or key != "precision":
        message = (
            f"{before.said} in {before.place} and {value.said} in {value.place} contradict each other "
            f"({key}: {shown(before.value)} or {shown(value.value)})"
        )
        made.refusals.append(Problem("import-conflict", message, value.place.file, value.place.line, key,
                                     "make them equal, or delete one"))  # fmt: skip
        return
    made.taken[key] = before
    reason = f"{before.said} ({before.place}) takes precedence"
    made.dropped.append(value.dropped(Effect.NONE, reason))


def _read_all(files: Sequence[str]) -> list[Reading]:
    """The files given, and those that they name and that are there."""
    texts, info, problems = _texts_of(files)
    readings: list[Reading] = []
    for file, text in texts.items():
        try:
            readings.append(read_text(text, file, info))
        except RecipeError as error:
            problems += [replace(problem, file=problem.file or file) for problem in error.problems]
    if problems:
        raise RecipeError(problems)
    if not readings:
        raise RecipeError(Problem("import-unknown", "LLaMA-Factory's list of data sets alone is no training",
                                  files[0], hint="give the recipe as a FILE too"))  # fmt: skip
    known = {_resolved(Path(reading.file)) for reading in readings}
    for reading in readings:  # grows while it is gone through
        for config, line in reading.inline:
            deepspeed.take_config(reading, config, lambda path, line=line: line)  # type: ignore[misc]
        for name, place in reading.names.items():
            _take_named(readings, reading, name, place, known, list(texts))
    return readings


def _texts_of(files: Sequence[str]) -> tuple[dict[str, str], Info | None, list[Problem]]:
    """(texts, LLaMA-Factory's list of data sets where one is given, what cannot be opened).

    Each file is opened once: a pipe (`<(…)`) can be read once.
    """
    texts: dict[str, str] = {}
    info: Info | None = None
    problems: list[Problem] = []
    for file in dict.fromkeys(files):
        try:
            texts[file] = text_of(file)
            if found := info_of(texts[file], file):
                del texts[file]
                info = info or found
        except RecipeError as error:
            problems += error.problems
    return texts, info, problems


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
        where = Given(name, "", place.line)
        reading.drop(where, Effect.NONE, "the DeepSpeed config that is given is used in its place")
    elif name in reading.shipped:
        reading.drop(Given(name, "", place.line), Effect.NONE, "it is not here: read as the tool ships it")
        config = Reading(deepspeed.TOOL, name)
        deepspeed.take_config(config, reading.shipped[name], lambda _: None)
        readings.append(config)
    else:
        reading.needs(name, place.line, "this file is named, and is not there", "give it as a FILE too")


def _find(name: str, file: str, given: Sequence[str]) -> Path | None:
    """A named file: one that is given, of the same name, else next to the one that names it."""
    same = [Path(other) for other in given if Path(other).name == Path(name).name]
    return same[0] if same else beside(name, file)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return path


def _too_many(readings: Sequence[Reading]) -> list[Problem]:
    """Two of a kind: two trainings, or two configs of the same thing."""
    problems = []
    first: dict[int, Reading] = {}
    for reading in readings:
        before = first.setdefault(_RANKS.get(reading.tool, 1), reading)
        if before is not reading:
            message = f"a {reading.tool}, and {before.file} is a {before.tool}: a recipe describes one run"
            problems.append(Problem("import-conflict", message, reading.file, hint="import them one by one"))
    return problems


PROFILE = "_deepspeed.json"
"""Ending of the base profile's name."""
_OF_EVALUATION = (
    "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps",
    "eval_do_concat_batches", "batch_eval_metrics", "include_for_metrics", "per_device_eval_batch_size",
    "prediction_loss_only", "eval_use_gather_object",
)  # fmt: skip
_OF_ROWS = ("data", "load_dataset", "train_file", "rows:", "pretraining_dataset")
"""Beginnings of other tools' keys that name rows."""
_OF_BEST = (
    "trainer.load_best_model_at_end", "trainer.metric_for_best_model", "trainer.greater_is_better",
    "early_stopping.patience", "early_stopping.threshold",
)  # fmt: skip


_ROWS_NEEDED = "needs evaluation rows, and none are named"
_SPLIT = "write data.eval, e.g. {split: 0.02}"


def settle(made: Imported, profile: Mapping[str, Any]) -> None:
    """Make the keys fit each other, and drop those that do not."""
    if made.value("model.tokenizer") == made.value("model.name_or_path"):
        made.taken.pop("model.tokenizer", None)
    if made.value("task") == DEFAULT_TASK:
        del made.taken["task"]
    if "trainer.max_steps" in made.taken:
        made.leave("trainer.num_train_epochs", Effect.NONE, "max_steps is given too, and takes precedence")
    _settle_batch(made)
    _settle_evaluation(made)
    _settle_metric(made)
    _settle_hub(made)
    _settle_sharding(made, profile)
    _settle_hardware(made)
    made.dropped[:] = [entry for entry in made.dropped if not _is_answered(made, entry)]
    _need_the_rest(made)


def _is_answered(made: Imported, entry: Dropped) -> bool:
    """Whether another file sets what this one needed."""
    if entry.effect is not Effect.NEEDED or entry.value:
        return False
    return any(f"{key}.".startswith(f"{entry.key}.") for key in made.taken)


def _settle_batch(made: Imported) -> None:
    steps, micro = "trainer.gradient_accumulation_steps", "trainer.per_device_train_batch_size"
    if "global_batch_size" not in made.taken or steps not in made.taken:
        return
    if micro in made.taken:
        reason = "micro-batch and accumulation set it for any number of devices"
        made.leave("global_batch_size", Effect.NONE, reason)
    else:
        made.leave(steps, Effect.NONE, "train_batch_size decides it with the number of devices")


def _settle_evaluation(made: Imported) -> None:
    if made.evaluates:
        if "trainer.eval_strategy" not in made.taken:
            where = Place(made.taken[EVALUATED].place.file if EVALUATED in made.taken else made.file)
            made.taken["trainer.eval_strategy"] = Taken("no", where, "eval_strategy: no", is_default=True)
        return
    asked = made.value("trainer.eval_strategy") not in (None, "no")
    reason = "no evaluation rows are named" if asked else "nothing is evaluated"
    for name in _OF_EVALUATION:
        if made.value(f"trainer.{name}") == "no":
            del made.taken[f"trainer.{name}"]
        made.leave(f"trainer.{name}", Effect.NONE, reason, _SPLIT if name == "eval_strategy" else "")
    for key in _OF_BEST:
        if made.value(key) is False:
            del made.taken[key]
        made.leave(key, Effect.TRAINING, _ROWS_NEEDED, _SPLIT)


def _settle_metric(made: Imported) -> None:
    """The metric of the best checkpoint has to be measured: by a recipe's own of that name, or by a hook."""
    best = made.taken.get("trainer.metric_for_best_model")
    if best is None or {"python", "data.metrics"} & made.taken.keys():
        return
    name = str(best.value).removeprefix("eval_")
    if made.task.reports(name):
        return
    if name in METRICS.get(made.task.name, ()):
        made.taken["data.metrics"] = Taken([name], best.place, best.said, note="it may be counted otherwise")
    else:
        reason = "no metric here has that name"
        hint = "write a function compute_metrics(prediction) in a hooks.py, and python: hooks.py"
        shorter = replace(best, said="metric_for_best_model")
        made.dropped.append(shorter.dropped(Effect.NEEDED, reason, hint))


def _settle_hub(made: Imported) -> None:
    push = made.value("trainer.push_to_hub")
    if push is True and "trainer.hub_model_id" not in made.taken:
        hint = "write trainer.hub_model_id: you/name"
        made.leave("trainer.push_to_hub", Effect.NONE, "no name of a repository is given", hint)
    elif push is False:
        del made.taken["trainer.push_to_hub"]
    if "trainer.push_to_hub" not in made.taken:
        for name in ("hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision"):
            made.leave(f"trainer.{name}", Effect.NONE, "nothing is pushed")


def _settle_sharding(made: Imported, profile: Mapping[str, Any]) -> None:
    _settle_fsdp(made)
    _settle_activations(made)
    engine = made.value("sharding.engine")
    if engine not in (None, "deepspeed"):
        for key in ("zero_stage", "offload_optimizer", "offload_param", "nvme_path", "config"):
            if (engine, key, made.value(f"sharding.{key}")) != ("fsdp", "offload_param", "cpu"):
                made.leave(f"sharding.{key}", Effect.NONE, f"the engine is {engine}")
    if "sharding.config" in made.taken and profile:
        made.texts[PROFILE] = json.dumps(profile, indent=2) + "\n"
        made.taken["sharding.config"] = replace(made.taken["sharding.config"], value=PROFILE)
    if made.value("sharding.zero_stage") not in (None, 3):
        made.leave("sharding.offload_param", Effect.NONE, "DeepSpeed reads it at stage 3 alone")


def _settle_fsdp(made: Imported) -> None:
    """Drop FSDP where it is not planned here; how a model is sharded does not change the training."""
    quantization = made.value("model.quantization")
    kind = quantization.get("type") if isinstance(quantization, dict) else quantization
    cases = {
        "an int8 model": kind == "int8",
        "a model in fp16": made.value("precision") == "fp16",
        "an encoder-decoder": made.task.is_encoder_decoder,
    }
    why = next((why for why, applies in cases.items() if applies), None)
    if made.value("sharding.engine") == "fsdp" and why is not None:
        reason = f"memory only: fsdp does not shard {why} here; the planner chooses the engine"
        made.leave("sharding.engine", Effect.NONE, reason)
        made.leave("sharding.offload_param", Effect.NONE, "it was for fsdp")


def _settle_activations(made: Imported) -> None:
    """Drop offloaded activations where they are not planned here; they do not change the training."""
    cases = {
        "trainer.activation_checkpointing is false": made.value("trainer.activation_checkpointing") is False,
        "trainer.torch_compile is true": made.value("trainer.torch_compile") is True,
        "ranks share each layer": any(
            made.value(f"sharding.{n}") not in (None, 1) for n in ("tp_size", "cp_size")
        ),
    }
    for why in (why for why, applies in cases.items() if applies):
        made.leave("sharding.offload_activations", Effect.NONE, f"memory only: not here where {why}")


def _settle_hardware(made: Imported) -> None:
    """`hardware` needs a device, which no other tool names: the numbers become a note."""
    total, nodes = made.taken.pop("hardware.total", None), made.value("hardware.num_nodes")
    each, count = "hardware.devices_per_node", nodes or 1
    if total is not None:
        if total.value % count:
            reason = f"{total.value} processes do not divide over {count} nodes"
            hint = "accelerate's num_processes counts those of all nodes"
            made.dropped.append(total.dropped(Effect.NEEDED, reason, hint))
        else:
            made.taken[each] = replace(total, value=total.value // count)
    if "hardware.device" in made.taken:
        return
    taken = made.taken.pop(each, None)
    made.taken.pop("hardware.num_nodes", None)
    if taken is None and nodes is None:
        return
    devices = taken.value if taken else None
    on = f"{f'{count}x' if count > 1 else ''}{devices or 'N'}xDEVICE"
    every = devices * count if devices else None
    made.notes.append(f"hardware: made for {every or 'all'} device{'s' if every != 1 else ''} on {count} "
                      f"node{'s' if count != 1 else ''}; plan with --on {on}")  # fmt: skip
    if count > 1:
        made.notes.append("several nodes: write launch.hostfile or launch.slurm, or start `run` on each")


def _need_the_rest(made: Imported) -> None:
    """What every recipe needs, and no file sets."""
    known = {entry.key for entry in made.dropped if entry.effect is Effect.NEEDED}
    if not {"model.name_or_path", "model.config"} & (made.taken.keys() | known):
        made.needs("model.name_or_path", None, "no file names a model", "write the hub id or folder")
    if "data.train" not in made.taken and not any(key.startswith(_OF_ROWS) for key in known):
        hint = "write data: {train: [{path: FILE}]}"
        made.needs("data.train", None, "no file names training rows", hint)
