"""Fields of `trainer:` and `adapter:`, from the installed package or the shipped table; names of tasks."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from launcher.machine.software import installed_version
from launcher.tasks import DEFAULT_TASK, TASKS

TASK_FORMATS: Mapping[str, tuple[str, ...]] = {task.name: task.formats for task in TASKS}
"""Task -> row formats that it reads."""

METRICS: Mapping[str, tuple[str, ...]] = {task.name: task.metrics for task in TASKS}
"""Task -> names that `data.metrics` may hold; the evaluation loss is always reported."""


TASK_TABLES = {task.name: task.argument_table for task in TASKS if task.argument_table}
"""Task -> table of its fields besides those of TrainingArguments."""
_OF_TASKS = {table.name: table for table in TASK_TABLES.values()}
TABLES: Mapping[str, str] = {
    "training_arguments": "transformers",
    "lora_config": "peft",
    **{name: table.package for name, table in _OF_TASKS.items()},
}
"""Stem of a shipped table -> package that it is read from."""

# field of every task -> what decides it instead
TRAINER_OWNED = {
    "output_dir": "`run --output-dir` decides it",
    "deepspeed": "`sharding` decides it",
    "fsdp": "`sharding` decides it",
    "fsdp_config": "`sharding` decides it",
    "resume_from_checkpoint": "`run --resume` decides it",
    "local_rank": "the launcher sets it",
    "seed": "set `seed` at the top of the recipe",
    "use_cpu": "`hardware.device: cpu` or `--on cpu` decides it",
    "do_train": "a run always trains",
    "do_eval": "`data.eval` decides it",
    "do_predict": "prediction is not part of a run",
    "bf16": "`precision` decides it",
    "fp16": "`precision` decides it",
    "include_num_input_tokens_seen": "remove it: a run counts its tokens without padding",
    "enable_jit_checkpoint": "remove it: on a signal all ranks save the same step and exit",
    "hub_token": "set HF_TOKEN in the environment; a recipe must not contain secrets",
}
# task -> fields of its table that the plan decides, or that have no effect
TASK_OWNED: dict[str, Mapping[str, str]] = {
    task.name: task.owned_arguments for task in TASKS if task.argument_table
}
# LoraConfig fields that the plan decides.
ADAPTER_OWNED = {
    "task_type": "`task` decides it",
    "peft_type": "`adapter.type` decides it",
    "base_model_name_or_path": "`model.name_or_path` decides it",
    "inference_mode": "training needs false",
    "auto_mapping": "peft sets it",
    "peft_version": "peft sets it",
}


def installed_package(name: str) -> tuple[str, Path] | None:
    """(version, folder) of an installed package, found without importing it; None when it is absent."""
    spec = importlib.util.find_spec(name)
    version = installed_version(name)
    if spec is None or not spec.submodule_search_locations or version is None:
        return None
    return version, Path(next(iter(spec.submodule_search_locations)))


@cache
def field_table(name: str) -> dict[str, Any]:
    """A table of TABLES (see `source_tables`): of the installed version, else of the tested one."""
    shipped: dict[str, Any] = json.loads(shipped_table(name).read_text(encoding="utf-8"))
    found = installed_package(TABLES[name])
    if found is None or found[0] == shipped["version"]:
        return shipped
    try:
        return read_table(name, found[1], found[0])
    except (OSError, SyntaxError, KeyError, ValueError):
        return shipped


def read_table(name: str, package: Path, version: str) -> dict[str, Any]:
    """The table as the source in the folder `package` has it. OSError, SyntaxError or KeyError otherwise."""
    from launcher.recipe import source_tables

    if name in _OF_TASKS:
        return source_tables.task_arguments_table(package, version, _OF_TASKS[name])
    reader = {
        "training_arguments": source_tables.training_arguments_table,
        "lora_config": source_tables.lora_config_table,
    }[name]
    return reader(package, version)


def shipped_table(name: str) -> Path:
    """File of the table that was generated from the tested version."""
    return Path(__file__).parent / "tables" / f"{name}.json"


def trainer_fields(task: str = DEFAULT_TASK) -> dict[str, Any]:
    """Fields of `trainer:` for a task: name -> {types, default, choices?, renamed_to?}."""
    fields: dict[str, Any] = field_table("training_arguments")["fields"]
    return fields | task_fields(task) if task in TASK_TABLES else fields


def task_fields(task: str) -> dict[str, Any]:
    """Fields of `trainer:` that only this task has."""
    if task not in TASK_TABLES:
        return {}
    general = field_table("training_arguments")["fields"]
    own = field_table(TASK_TABLES[task].name)["fields"]
    return {k: v for k, v in own.items() if k not in general and k not in TASK_OWNED[task]}


def task_of_field(name: str) -> str | None:
    """The task that has this field of `trainer:`, None when none or every task has it."""
    return next((task for task in TASK_TABLES if name in task_fields(task)), None)


def adapter_fields() -> dict[str, Any]:
    """LoraConfig fields that a recipe may give: name -> {types, default, choices?}."""
    fields: dict[str, Any] = field_table("lora_config")["fields"]
    return {name: entry for name, entry in fields.items() if name not in ADAPTER_OWNED}
