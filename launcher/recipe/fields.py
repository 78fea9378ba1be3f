"""Check `trainer:` and `adapter:` by name, type and choice, without importing the libraries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import parse_json
from launcher.recipe.env import has_reference, is_reference, resolve_env
from launcher.recipe.field_tables import (
    ADAPTER_OWNED,
    TASK_OWNED,
    adapter_fields,
    field_table,
    task_of_field,
    trainer_fields,
)
from launcher.recipe.suggestions import (
    ADAPTER_ALIASES,
    TRAINER_ALIASES,
    TRAINER_REMOVED,
    choice_hint,
    close_key,
    describe,
    elsewhere,
    rewrite_hint,
)
from launcher.recipe.yaml_reader import parse_scalar
from launcher.tasks import DEFAULT_TASK, task_named

_FILE_OR_MAPPING = "trainer.accelerator_config"
_PHRASES = {
    "none": "null",
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "list": "a list",
    "list[str]": "a list of strings",
    "list[int]": "a list of integers",
    "list[float]": "a list of numbers",
    "dict": "a mapping",
}
# field -> lower limit, and whether the limit itself is allowed
_LIMITS: dict[str, tuple[float, bool]] = {
    **dict.fromkeys(
        ("trainer.per_device_train_batch_size", "trainer.per_device_eval_batch_size",
         "trainer.gradient_accumulation_steps", "trainer.generation_max_length",
         "trainer.generation_num_beams", "trainer.precompute_ref_batch_size",
         "trainer.num_iterations", "trainer.steps_per_generation", "trainer.num_generations_eval",
         "trainer.vllm_tensor_parallel_size", "trainer.vllm_max_model_length",
         "adapter.r", "adapter.lora_alpha"),
        (1, True),
    ),
    **dict.fromkeys(
        ("trainer.learning_rate", "trainer.warmup_steps", "trainer.dataloader_num_workers",
         "trainer.label_smoothing", "trainer.epsilon", "trainer.epsilon_high"),
        (0, True),
    ),
    **dict.fromkeys(
        ("trainer.num_train_epochs", "trainer.logging_steps", "trainer.eval_steps", "trainer.save_steps",
         "trainer.beta", "trainer.delta", "trainer.vllm_server_timeout",
         "trainer.vllm_gpu_memory_utilization"),
        (0, False),
    ),
}  # fmt: skip
ADAPTER_KEYS = ("type", "path", "cast_input_dtype_enabled", "autocast_adapter_dtype")
"""Keys of `adapter:` that are no LoraConfig fields; allowed for a continued adapter, too."""
_SHARES = (
    "adapter.lora_dropout", "trainer.ld_alpha", "trainer.top_entropy_quantile",
    "trainer.vllm_gpu_memory_utilization",
)  # fmt: skip
"""Fields from 0 to 1."""


def resolve_trainer(
    trainer: Mapping[str, Any], environ: Mapping[str, str], task: str = DEFAULT_TASK
) -> dict[str, Any]:
    """`trainer` with its `${ENV:...}` resolved; a value that is one reference gets the type of its field.

    Raises RecipeError when a variable is missing.
    """
    fields = trainer_fields(task)
    return {
        name: _resolve(value, fields.get(name, {}).get("types", ()), environ)
        for name, value in trainer.items()
    }


def _resolve(value: Any, types: Iterable[str], environ: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        text = resolve_env(value, environ)
        parsed = parse_scalar(text) if is_reference(value) and set(types) - {"str", "none"} else text
        return parsed if parsed is not None else text
    if isinstance(value, Mapping):
        return {key: _resolve(item, ("any",), environ) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve(item, (), environ) for item in value]
    return value


def check_trainer(
    trainer: Mapping[str, Any], environ: Mapping[str, str] | None = None, task: str = DEFAULT_TASK
) -> list[Problem]:
    """Problems of single `trainer:` fields, without file and line; skips values with unset variables."""
    fields = trainer_fields(task)
    owned = TASK_OWNED.get(task, {})
    problems = []
    for name, value in trainer.items():
        path = f"trainer.{name}"
        entry = fields.get(name)
        if name in owned:
            problems.append(Problem("owned-key", "not allowed under `trainer:`", path=path, hint=owned[name]))
        elif entry is None:
            problems.append(_unknown_trainer(name, fields, task))
        elif "renamed_to" in entry:
            new = entry["renamed_to"]
            message = f"deprecated in transformers {field_table('training_arguments')['version']}"
            problems.append(Problem("renamed-key", message, path=path, hint=f"write `{new}`"))
        else:
            try:
                resolved = _resolve(value, entry["types"], environ or {})
            except RecipeError:
                continue
            problems += _check_value(path, resolved, entry, shown=value)
    return problems


def check_adapter(adapter: Mapping[str, Any]) -> list[Problem]:
    """Problems of single `adapter:` fields (not `ADAPTER_KEYS`), without file and line."""
    fields = adapter_fields()
    problems = []
    for name, value in adapter.items():
        path = f"adapter.{name}"
        if name in ADAPTER_KEYS:
            continue
        if name in ADAPTER_OWNED:
            problems.append(Problem("owned-key", "not allowed here", path=path, hint=ADAPTER_OWNED[name]))
        elif name not in fields:
            version = field_table("lora_config")["version"]
            message = f"unknown key, expected a LoraConfig field of peft {version}"
            hint = f"`{name}` belongs under `trainer:`" if name in trainer_fields() else None
            if near := ADAPTER_ALIASES.get(name) or close_key(name, [*fields, *ADAPTER_KEYS]):
                hint = f"did you mean `{near}`?"
            problems.append(Problem("unknown-key", message, path=path, hint=hint))
        else:
            problems += _check_value(path, value, fields[name], shown=value) or _check_items(name, value)
    return problems


def _check_items(name: str, value: Any) -> list[Problem]:
    """Problems of the items of a field that `LoraConfig` declares as a mapping or list of anything."""
    if name in ("rank_pattern", "alpha_pattern"):
        kind, low, inclusive = ("int", 1, True) if name == "rank_pattern" else ("float", 0, False)
        wanted = f"{_PHRASES[kind]} of {'at least' if inclusive else 'more than'} {low}"
        return [
            Problem("wrong-value", f"is {describe(item)}, expected {wanted}", path=f"adapter.{name}.{key}")
            for key, item in (value or {}).items()
            if not _admits(kind, item) or item < low or (item == low and not inclusive)
        ]
    if name == "trainable_token_indices":
        for ids in value.values() if isinstance(value, Mapping) else [value or []]:
            if not _admits("list[int]", ids) or any(token < 0 for token in ids):
                message = f"is {describe(ids)}, expected token ids: integers of at least 0"
                return [Problem("wrong-value", message, path=f"adapter.{name}")]
    return []


def _unknown_trainer(name: str, fields: Mapping[str, Any], task: str) -> Problem:
    version = field_table("training_arguments")["version"]
    if name in TRAINER_REMOVED:
        message, hint = f"removed in transformers {version}", TRAINER_REMOVED[name]
        return Problem("renamed-key", message, path=f"trainer.{name}", hint=hint)
    message = f"unknown key, expected a TrainingArguments field of transformers {version}"
    table = task_named(task).argument_table
    if table and table.package != "transformers":
        version = field_table(table.name)["version"]
        message += f", or a field that task {task} adds ({table.package} {version})"
    return Problem("unknown-key", message, path=f"trainer.{name}", hint=_trainer_hint(name, fields))


def _trainer_hint(name: str, fields: Mapping[str, Any]) -> str | None:
    """What was probably meant by an unknown key of `trainer:`."""
    if other := task_of_field(name):
        return f"it is a key of `task: {other}`"
    if target := elsewhere(name):
        return f"write `{target.removeprefix('trainer.')}`"
    usable = [key for key, entry in fields.items() if "renamed_to" not in entry]
    if near := TRAINER_ALIASES.get(name) or close_key(name, usable):
        return f"did you mean `{near}`?"
    if old := close_key(name, TRAINER_REMOVED):
        return TRAINER_REMOVED[old]
    return f"`{name}` belongs under `adapter:`" if name in adapter_fields() else None


def _check_value(path: str, value: Any, entry: Mapping[str, Any], *, shown: Any) -> list[Problem]:
    types, choices = entry["types"], entry.get("choices", [])
    kinds = [kind for kind in types if not kind.startswith("object:")]
    if not any(_admits(kind, value) for kind in kinds):
        expected = _expected(kinds, choices)
        if not [kind for kind in kinds if kind != "none"]:
            objects = ", ".join(kind.removeprefix("object:") for kind in types if kind.startswith("object:"))
            expected = f"a Python object ({objects}), which a recipe cannot contain"
        hint = None if has_reference(shown) else rewrite_hint(value, kinds)
        return [Problem("wrong-type", f"is {describe(shown)}, expected {expected}", path=path, hint=hint)]
    if isinstance(value, str) and "dict" in kinds and path != _FILE_OR_MAPPING and not _is_json(value):
        message = f"is {describe(shown)}, expected a mapping"
        return [Problem("wrong-type", message, path=path)]  # the worker would fail to parse it
    for item in value if isinstance(value, list) else [value]:
        if choices and isinstance(item, str) and not _is_choice(item, choices):
            hint = choice_hint(item, choices)
            text = describe(shown if isinstance(shown, str) else item)
            return [Problem("wrong-choice", f"is {text}, expected {_one_of(choices)}", path=path, hint=hint)]
    if (place := non_finite_at(value)) is not None:
        where = path + place
        return [Problem("wrong-value", "contains NaN or infinity, expected finite numbers", path=where)]
    wanted = None if value == entry.get("default") else _outside(path, value)
    message = f"is {describe(shown)}, expected {wanted}"
    return [Problem("wrong-value", message, path=path)] if wanted else []


def _is_json(text: str) -> bool:
    """Whether a text is a mapping in JSON."""
    try:
        return isinstance(parse_json(text), dict)
    except ValueError:
        return False


def non_finite_at(value: Any) -> str | None:
    """Path (`.key[0]`) of a NaN or infinite number inside a mapping or list, else None."""
    if isinstance(value, Mapping):
        inner = ((f".{key}", item) for key, item in value.items())
    elif isinstance(value, list):
        inner = ((f"[{i}]", item) for i, item in enumerate(value))
    else:
        return None
    for place, item in inner:
        if isinstance(item, float) and not math.isfinite(item):
            return place
        if (deeper := non_finite_at(item)) is not None:
            return place + deeper
    return None


def _outside(path: str, value: Any) -> str | None:
    """The expected range of a number that is outside its field's limits."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    low, inclusive = _LIMITS.get(path, (-math.inf, True))
    if path in _SHARES and not 0 <= value <= 1:
        return "a number from 0 to 1"
    if value < low or (value == low and not inclusive):
        return f"{'at least' if inclusive else 'more than'} {low:g}"
    return None


def _admits(kind: str, value: Any) -> bool:
    if kind == "any":
        return True
    if kind == "none":
        return value is None
    if kind in ("int", "float"):
        return isinstance(value, (int, float) if kind == "float" else int) and not isinstance(value, bool)
    if kind.startswith("list"):
        inner = kind[5:-1]
        return isinstance(value, list) and (not inner or all(_admits(inner, item) for item in value))
    plain = {"bool": bool, "str": str, "dict": dict}
    return kind in plain and isinstance(value, plain[kind])


def _is_choice(item: str, choices: Iterable[str]) -> bool:
    # `pissa_niter_[number of iters]` stands for an integer after the last underscore
    for choice in choices:
        prefix, bracket, _ = choice.partition("[")
        if item == choice or (bracket and item.startswith(prefix) and item[len(prefix) :].isdigit()):
            return True
    return False


def _expected(kinds: list[str], choices: list[str]) -> str:
    words = [_PHRASES.get(kind, kind) for kind in kinds if kind != "none"]
    if choices:
        words = [_one_of(choices) if word == _PHRASES["str"] else word for word in words]
    return " or ".join(words)


def _one_of(choices: Iterable[str]) -> str:
    return "one of " + ", ".join(choices)
