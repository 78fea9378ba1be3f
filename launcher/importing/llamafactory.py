"""LLaMA-Factory's YAML as keys of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.importing.adapter import take_adapter, take_quantization
from launcher.importing.arguments import (
    TRANSFORMERS_DEFAULTS,
    as_bool,
    as_number,
    fill_defaults,
    take_argument,
)
from launcher.importing.found import Effect, Place, Reading, shown
from launcher.importing.llamafactory_rows import take_rows, tells_info
from launcher.importing.llamafactory_tables import DPO_KEYS, HANDLED, KEYS, LEFT, LORA_KEYS, OPTIONS, SECRETS
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
from launcher.recipe.field_tables import trainer_fields
from launcher.tasks import TASKS, task_of_tool, words_of_tool

__all__ = ["mapping_rows", "read", "tells", "tells_info"]

_MARKS = ("stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "lora_target", "lora_rank")
_KERNELS = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager"}


def tells(data: Mapping[str, Any]) -> bool:
    """Whether a YAML's keys are LLaMA-Factory's."""
    if "model_name_or_path" not in data:
        return False
    return any(key in data for key in _MARKS) or isinstance(data.get("dataset"), str)


def mapping_rows() -> list[Row]:
    """(key of LLaMA-Factory, key of a recipe, note), for a page."""
    return rows_of((*KEYS, *LORA_KEYS, *DPO_KEYS), HANDLED, LEFT)


def read(
    text: str,
    file: str,
    overrides: Mapping[str, Any] | None = None,
    place: Place | None = None,
    info: tuple[Mapping[str, Any], str] | None = None,
) -> Reading:
    """Read a recipe of LLaMA-Factory.

    overrides: what the launch line at `place` says over the file; info: the content and the name of a
    dataset_info.json, where it is not looked for beside the recipe. RecipeError when the file is no YAML; a
    kind of training that is not here is among the reading's refusals.
    """
    peer = open_peer(text, file, _tool(), overrides)
    stage = _take_stage(peer)
    if "model_name_or_path" not in peer.values:
        peer.reading.needs("model.name_or_path", None, "model_name_or_path is not there")
    take_keys(peer, KEYS)
    _take_model(peer)
    _take_adapter(peer)
    _take_bits(peer)
    take_rows(peer, stage, info)
    _take_packing(peer, stage)
    _take_learnt(peer, stage)
    _take_training(peer)
    on = [(key, names) for key, names in OPTIONS if not is_off(peer.values.get(key))]
    leave_keys(
        peer, [Left(Effect.TRAINING, f"an option of {key}, which is not here", names) for key, names in on]
    )
    leave_keys(peer, LEFT)
    _take_arguments(peer)
    fill_defaults(peer.reading, TRANSFORMERS_DEFAULTS)
    leave_rest(peer, trainer_fields())
    return close_peer(peer, overrides or (), place)


def _tool() -> Tool:
    return load_tool("llamafactory", "LLaMA-Factory", "refuses it")


def _take_stage(peer: Peer) -> str:
    stage = str(peer.get("stage") or "sft")
    task = task_of_tool("llamafactory", stage)
    if task is None:
        known = ", ".join(words_of_tool("llamafactory"))
        peer.refuse("stage", f"is {shown(stage)}; import reads the stages {known}")
    elif "stage" in peer.values:
        peer.take("task", task.name, "stage")
    if as_bool(peer.get("do_train")) is not True:
        peer.refuse("do_train", "is not true: this file does not train", "write do_train: true if it should")
    if task is not None and task.ranks_answers:
        take_keys(peer, DPO_KEYS)
        for to, value in task.tool_defaults["llamafactory"].items():
            peer.default(to, value, "pref_beta")
        if str(peer.values.get("pref_loss")) in ("orpo", "simpo"):
            peer.refuse("pref_loss", f"is {shown(peer.values['pref_loss'])}, which is not here", "sigmoid is")
    else:
        for key in DPO_KEYS:
            if key.name in peer.values and not is_off(peer.values[key.name]):
                peer.drop(key.name, Effect.NONE, "of stage: dpo alone")
    return stage


def _take_model(peer: Peer) -> None:
    kernel = peer.get("flash_attn")
    if str(kernel) in _KERNELS:
        peer.take("model.attn_implementation", _KERNELS[str(kernel)], "flash_attn")
    elif kernel is not None and kernel != "auto":
        peer.drop("flash_attn", Effect.NONE, "a kernel that is not here; the planner chooses one")
    tokens = [*peer.listed("add_tokens"), *peer.listed("add_special_tokens")]
    if tokens:
        key = "add_tokens" if "add_tokens" in peer.values else "add_special_tokens"
        peer.take("model.add_tokens", tokens, key, "add_special_tokens")
    if peer.switch("disable_gradient_checkpointing"):
        peer.take("trainer.activation_checkpointing", False, "disable_gradient_checkpointing")
    reentrant = as_bool(peer.get("use_reentrant_gc"))
    if reentrant is not None and "trainer.activation_checkpointing" not in peer.reading.taken:
        peer.take("trainer.activation_checkpointing_kwargs", {"use_reentrant": reentrant}, "use_reentrant_gc")


def _take_adapter(peer: Peer) -> None:
    kind = str(peer.get("finetuning_type") or "lora")
    folder = peer.listed("adapter_name_or_path")
    if kind not in ("lora", "full"):
        peer.refuse("finetuning_type", f"is {shown(kind)}, and of adapters there is only LoRA here")
    if kind != "lora" or folder:
        why = "the adapter goes on with its own" if folder else "all parameters are trained"
        for name in (*(key.name for key in LORA_KEYS), "lora_target", "pissa_init", "pissa_iter"):
            if name in peer.values and not is_off(peer.values[name]):
                peer.drop(name, Effect.NONE, why)
    if kind != "lora":
        return
    if "finetuning_type" in peer.values:
        peer.take("adapter.type", "lora", "finetuning_type")
    peer.default("adapter.type", "lora", "finetuning_type")
    if folder:
        if len(folder) != 1:
            peer.refuse("adapter_name_or_path", "names several adapters, which would be merged first")
        else:
            peer.take("adapter.path", folder[0], "adapter_name_or_path")
        return
    take_keys(peer, LORA_KEYS)
    rank = peer.reading.value("adapter.r") or 8
    for to, value, name in (("r", 8, "lora_rank"), ("lora_alpha", 2 * rank, "lora_alpha"),
                            ("lora_dropout", 0.0, "lora_dropout")):  # fmt: skip
        peer.default(f"adapter.{to}", value, name)
    _take_targets(peer)


def _take_targets(peer: Peer) -> None:
    target = peer.get("lora_target")
    names = [part.strip() for part in target.split(",")] if isinstance(target, str) else target
    if names in (None, ["all"], []):
        if target is None:
            peer.default("adapter.target_modules", "all-linear", "lora_target: all")
        else:
            peer.take("adapter.target_modules", "all-linear", "lora_target")
    else:
        take_adapter(peer.reading, "target_modules", names, peer.line("lora_target"), "lora_target")
    steps = as_number(peer.get("pissa_iter"))
    if peer.switch("pissa_init"):
        count = 16 if steps is None else int(steps)
        name = "pissa" if count == -1 else f"pissa_niter_{count}"
        peer.take("adapter.init_lora_weights", name, "pissa_init", "pissa_iter")


def _take_bits(peer: Peer) -> None:
    bits, kind = as_number(peer.get("quantization_bit")), str(peer.get("quantization_type") or "nf4")
    method = str(peer.get("quantization_method") or "bnb").lower()
    double = as_bool(peer.get("double_quantization"))
    if "quantization_bit" not in peer.values:
        return
    if method not in ("bnb", "bitsandbytes"):
        peer.refuse("quantization_method", f"is {shown(method)}: only bitsandbytes quantises here")
    elif bits == 8:
        take_quantization(peer.reading, "int8", peer.line("quantization_bit"), "quantization_bit: 8")
    elif bits == 4 and kind in ("nf4", "fp4"):
        take_quantization(
            peer.reading,
            kind,
            peer.line("quantization_bit"),
            "quantization_bit: 4",
            double_quant=double is not False,
        )
    else:
        what = f"is {shown(peer.values['quantization_bit'])}, and bitsandbytes has 8 and 4 (nf4, fp4)"
        peer.refuse("quantization_bit", what)


def _take_packing(peer: Peer, stage: str) -> None:
    """For pt it packs by itself; documents of a pack see each other there, but with neat_packing."""
    packing, neat = as_bool(peer.get("packing")), peer.switch("neat_packing")
    packed = neat or packing is True or (packing is None and stage == "pt")
    key = "neat_packing" if neat else "packing"
    if packed and key in peer.values:
        peer.take("data.packing", True, key)
    elif packed:
        peer.default("data.packing", True, key)
    if packed and not neat and not peer.reading.task.ranks_answers:
        reason = "documents of a pack see each other there; here none sees another"
        peer.reading.drop("packing", "true", peer.line("packing"), Effect.TRAINING, reason)
    peer.default("data.max_length", 2048, "cutoff_len")
    if packed and stage == "pt":
        peer.default("data.overlong", "split", "packing: true")
    else:
        note = "" if stage == "pt" else "cut at the end; there prompt and answer are cut in proportion"
        peer.default("data.overlong", "truncate", "cutoff_len: 2048", note)


def _take_learnt(peer: Peer, stage: str) -> None:
    prompt, history = peer.switch("train_on_prompt"), peer.switch("mask_history")
    if stage == "sft" and prompt:
        peer.take("data.loss_on", "all", "train_on_prompt")
    elif stage == "sft" and history:
        peer.take("data.loss_on", "completion", "mask_history")
    elif prompt or history:
        key = "train_on_prompt" if prompt else "mask_history"
        peer.drop(key, Effect.NONE, "of stage: sft alone")
    template, hint = peer.get("template"), "look with `effilaunch prepare RECIPE --show 1`"
    if stage == "pt" and template is not None:
        peer.drop("template", Effect.NONE, "texts are learnt as they are")
    elif template is not None:
        reason = "LLaMA-Factory's own text of that template; the tokenizer's chat template is used"
        peer.drop("template", Effect.TRAINING, reason, hint)
    thinking = as_bool(peer.get("enable_thinking"))
    if thinking is False:
        peer.drop("enable_thinking", Effect.TRAINING, "the chat template alone makes the text", hint)
    if str(peer.get("mix_strategy") or "concat") != "concat":
        reason = "sources are laid one after another; `weight` of a source says how often it is seen"
        peer.drop("mix_strategy", Effect.TRAINING, reason)


def _take_training(peer: Peer) -> None:
    if peer.switch("pure_bf16"):
        peer.take("precision", "bf16-true", "pure_bf16")
        for key in ("bf16", "fp16"):
            peer.get(key)
    if peer.switch("compute_accuracy"):
        if "data.eval" in peer.reading.taken and not peer.reading.task.own_metrics:
            peer.take("data.metrics", ["accuracy"], "compute_accuracy")
        else:
            peer.drop("compute_accuracy", Effect.NONE, "nothing is evaluated")
    patience = as_number(peer.get("early_stopping_steps"))
    if patience is not None and patience >= 1:
        peer.take("early_stopping.patience", int(patience), "early_stopping_steps")
    elif patience is None and "early_stopping_steps" in peer.values:
        peer.drop("early_stopping_steps", Effect.TRAINING, "expected a number of evaluations")
    if peer.switch("disable_shuffling"):
        peer.take("trainer.train_sampling_strategy", "sequential", "disable_shuffling")
    for key in SECRETS:
        if key in peer.values:
            peer.drop(key, Effect.NONE, "a secret: set it in the environment")


def _take_arguments(peer: Peer) -> None:
    """What is left, of TrainingArguments; fields that only another task has are none of them."""
    general, others = trainer_fields(), {name for task in TASKS for name in trainer_fields(task.name)}
    for name in list(peer.values):
        if name in peer.reading.seen or (name in others and name not in general):
            continue
        take_argument(peer.reading, name, peer.values[name], peer.line(name))
