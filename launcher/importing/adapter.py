"""LoRA and bitsandbytes, as peft, transformers and those who wrap them say them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import RecipeError
from launcher.facts.model_config import find_model_config
from launcher.importing.arguments import convert
from launcher.importing.found import Effect, Reading, shown
from launcher.recipe.field_tables import ADAPTER_OWNED, adapter_fields
from launcher.recipe.fields import check_adapter
from launcher.tasks import TASKS

PEFT_DEFAULTS: dict[str, Any] = {"adapter.r": 8, "adapter.lora_alpha": 8, "adapter.lora_dropout": 0.0}
"""LoraConfig's own, which a recipe must name: its planner's are others."""
TASK_TYPES = {task.peft_task: task.name for task in reversed(TASKS) if task.peft_task}
"""`task_type` of an adapter_config.json -> the first task that has it."""
_ATTENTION = ("q_proj", "v_proj")
PEFT_TARGETS: dict[str, list[str]] = {
    **{name: list(_ATTENTION) for name in (
        "bart", "opt", "gptj", "gpt_neo", "llama", "llama4", "mistral", "mixtral", "stablelm", "gemma",
        "gemma2", "gemma3_text", "qwen2", "qwen3")},
    **{name: ["q", "v"] for name in ("t5", "mt5")},
    **{name: ["c_attn"] for name in ("gpt2", "gpt_bigcode")},
    **{name: ["query_key_value"] for name in ("bloom", "gpt_neox", "chatglm", "RefinedWebModel",
                                              "RefinedWeb", "falcon")},
    **{name: ["query", "value"] for name in ("bert", "roberta", "xlm-roberta", "electra", "layoutlm")},
    "deberta-v2": ["query_proj", "value_proj"],
    "deberta": ["in_proj"],
    "mpt": ["Wqkv"],
    "codegen": ["qkv_proj"],
    "phi": [*_ATTENTION, "fc1", "fc2"],
}  # fmt: skip
"""model_type -> layers that peft adapts where nobody names them (peft 0.21, utils/constants.py)."""


def take_adapter(reading: Reading, name: str, value: Any, line: int | None, said: str | None = None) -> bool:
    """Take one LoraConfig field; `said`: how the file spells it. False where LoraConfig has no such field."""
    said = said or name
    fields = adapter_fields()
    if name not in fields and name not in ADAPTER_OWNED and name not in ("autocast_adapter_dtype",):
        return False
    if value is None:
        reading.know(said)
    elif name == "task_type":
        _take_task(reading, said, value, line)
    elif name in ADAPTER_OWNED:
        reading.know(said)
    else:
        _take_field(reading, name, value, line, said, fields.get(name, {"types": ["bool"]}))
    return True


def _take_field(
    reading: Reading, name: str, value: Any, line: int | None, said: str, entry: Mapping[str, Any]
) -> None:
    converted = convert(value, entry)
    if name == "target_modules" and converted in (["all-linear"], ("all-linear",)):
        converted = "all-linear"
    if isinstance(converted, set | frozenset):
        converted = sorted(converted)
    problems = check_adapter({name: converted})
    if problems:
        effect = Effect.NEEDED if name in ("r", "lora_alpha", "target_modules") else Effect.TRAINING
        reading.drop(said, value, line, effect, problems[0].message, problems[0].hint or "")
        return
    same = said == name and converted == value
    reading.take(f"adapter.{name}", converted, line, said if same else f"{said}: {shown(value)}")


def _take_task(reading: Reading, said: str, value: Any, line: int | None) -> None:
    task = TASK_TYPES.get(str(value).rpartition(".")[2])
    if task is None:
        reading.refuse(said, line, f"is {shown(value)}, which no task here is")
    else:
        reading.take("task", task, line, f"{said}: {shown(value)}", default=True)
        reading.know(said)


def take_default_targets(reading: Reading, line: int | None = None) -> None:
    """peft's own layers for this model, literally, where the file names none: a recipe's are all-linear."""
    if "adapter.target_modules" in reading.taken or "adapter.path" in reading.taken:
        return
    computed = any(entry.key.endswith("target_modules") for entry in reading.dropped)
    if computed or "adapter.target_parameters" in reading.taken:
        return
    model = reading.value("model.name_or_path")
    kind = _model_type(model, reading) if isinstance(model, str) else None
    if kind in PEFT_TARGETS:
        reading.take(
            "adapter.target_modules", list(PEFT_TARGETS[kind]), line, "target_modules",
            default=True, note=f"what peft takes for {kind} where nobody names them",
        )  # fmt: skip
        return
    known = f"for {kind}" if kind else "for a model whose configuration is not here"
    reading.needs(
        "adapter.target_modules", line, f"which layers peft would take {known} is not known here",
        "name them as the log of the other tool does, or write all-linear",
    )  # fmt: skip


def _model_type(model: str, reading: Reading) -> str | None:
    """From the model's folder beside the file, the hub's cache, the hub or the shipped facts."""
    beside = Path(reading.file).parent / model
    try:
        name = str(beside) if model.startswith((".", "/")) or beside.is_dir() else model
        config, _ = find_model_config(name, revision=reading.value("model.revision"))
    except (RecipeError, OSError, ValueError):
        return None
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else None


def take_quantization(
    reading: Reading,
    kind: str,
    line: int | None,
    said: str,
    *,
    double_quant: bool | None = None,
    compute_dtype: str | None = None,
    note: str = "",
) -> None:
    """int8, nf4 or fp4 as a mapping: the short form would have a recipe's defaults.

    double_quant and compute_dtype are of 4 bits only; None leaves a recipe's default.
    """
    value: dict[str, Any] = {"type": kind}
    if kind != "int8" and double_quant is not None:
        value["double_quant"] = double_quant
    if kind != "int8" and compute_dtype is not None:
        value["compute_dtype"] = compute_dtype
    reading.take("model.quantization", value, line, said, note=note)


def dtype_name(value: Any) -> str | None:
    """float32, bfloat16, float16 or auto from text, `torch.bfloat16` or a short form; None for others."""
    text = str(value).rpartition(".")[2].strip().lower()
    short = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
    text = short.get(text, text)
    return text if text in ("float32", "bfloat16", "float16", "auto") else None
