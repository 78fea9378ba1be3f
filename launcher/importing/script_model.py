"""The model, its quantisation and its adapter, as a script's calls name them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from launcher.importing.adapter import (
    dtype_name,
    take_adapter,
    take_bits,
    take_default_targets,
    take_quantization,
)
from launcher.importing.found import Effect, Reading, shown
from launcher.importing.keywords import keywords_of, plain, positional
from launcher.importing.syntax import Function, last_name, text_of
from launcher.importing.values import Source, Unresolved, Value

TASKS = {
    "ForCausalLM": "causal-lm",
    "ForSeq2SeqLM": "seq2seq-lm",
    "ForSequenceClassification": "sequence-classification",
    "ForImageClassification": "image-classification",
}
"""Ending of a model's class -> task."""
_TEXT_TO_TEXT = ("T5", "MT5", "UMT5", "LongT5", "Bart", "MBart", "PLBart", "Pegasus", "PegasusX", "M2M100",
                 "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "LED", "FSMT", "ProphetNet", "NllbMoe",
                 "SwitchTransformers")  # fmt: skip
"""What stands before ForConditionalGeneration in models of text; the others read pictures or speech."""
_OTHER_QUANTIZERS = ("GPTQConfig", "AwqConfig", "HqqConfig", "TorchAoConfig", "Mxfp4Config", "QuantoConfig",
                     "AqlmConfig", "FPQuantConfig", "EetqConfig")  # fmt: skip
_OTHER_ADAPTERS = ("IA3Config", "PromptTuningConfig", "AdaLoraConfig", "PrefixTuningConfig", "OFTConfig",
                   "PromptEncoderConfig", "LoHaConfig", "LoKrConfig", "VeraConfig", "BOFTConfig",
                   "FourierFTConfig", "LNTuningConfig", "XLoraConfig", "RandLoraConfig")  # fmt: skip
_IDLE = ("cache_dir", "low_cpu_mem_usage", "use_cache", "token", "use_auth_token", "local_files_only",
         "force_download", "use_safetensors", "offload_folder", "max_memory", "pretraining_tp", "subfolder",
         "ignore_mismatched_sizes", "offload_state_dict", "pretrained_model_name_or_path")  # fmt: skip
_KERNELS = ("eager", "sdpa", "flash_attention_2", "flex_attention")


def take_models(reading: Reading, source: Source) -> None:
    """Take `AutoModelForX.from_pretrained(…)`, its tokenizer, and quantisation configs."""
    for call, scope in source.calls_of(*_OTHER_QUANTIZERS):
        if _is_passed_by(source, call, scope):
            continue
        reading.refuse(last_name(call.func), call.lineno, "quantises in a way that is not here",
                       "BitsAndBytesConfig is read")  # fmt: skip
    seen = False
    for call, scope in source.calls_of("from_pretrained"):
        kind = _class_of(source, call)
        if kind in ("FastLanguageModel", "FastModel"):
            _take_fast(reading, source, call, scope)
            seen = True
        elif (task := _task_of(kind)) is not None and not seen:
            _take_model(reading, source, call, scope, task)
            seen = True
        elif "Tokenizer" in kind or "Processor" in kind:
            _take_tokenizer(reading, source, call, scope)
        elif kind == "PeftModel":
            _take_peft_model(reading, source, call, scope)
        elif kind == "FastVisionModel" or ("For" in kind and task is None and kind[:1].isupper()):
            reading.refuse(kind, call.lineno, "is a model of another task than those here",
                           f"known: {', '.join(sorted(set(TASKS.values())))}")  # fmt: skip
    if not seen:
        _take_named_model(reading, source)


def _is_passed_by(source: Source, call: ast.Call, scope: Function | None) -> bool:
    """Whether the call is in the branch of `A if test else B` that is not gone."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.IfExp) or call not in ast.walk(node):
            continue
        try:
            test = source.value(node.test, scope).value
        except Unresolved:
            continue
        return call not in ast.walk(node.body if test else node.orelse)
    return False


def take_adapters(reading: Reading, source: Source) -> bool:
    """Take LoraConfig(…), where something uses it; whether there is an adapter."""
    for call, _ in source.calls_of(*_OTHER_ADAPTERS):
        reading.refuse(last_name(call.func), call.lineno, "is no LoRA, which adapters here are")
    fast = [(call, scope) for call, scope in source.calls_of("get_peft_model")
            if _class_of(source, call) in ("FastLanguageModel", "FastModel")]  # fmt: skip
    calls = [*source.calls_of("LoraConfig"), *fast]
    if not calls:
        return False
    call, scope = calls[0]
    if not fast and not _uses_adapter(source):
        reading.drop("LoraConfig", "", call.lineno, Effect.TRAINING,
                     "nothing uses it: neither get_peft_model nor peft_config=")  # fmt: skip
        return False
    for name, (value, node) in keywords_of(reading, source, call, scope).items():
        if value is None:
            effect = Effect.NEEDED if name in ("r", "lora_alpha", "target_modules") else Effect.TRAINING
            reading.drop(name, text_of(node), node.lineno, effect, "computed at run time",
                         f"write adapter.{name}")  # fmt: skip
        elif name == "use_gradient_checkpointing":
            reading.know(name)  # unsloth's: memory only
        elif name == "random_state" or not take_adapter(reading, name, value.value, node.lineno):
            reading.drop(name, value.value, node.lineno, Effect.NONE if fast else Effect.TRAINING,
                         "no field of LoraConfig")  # fmt: skip
    if fast:
        reading.take("adapter.r", 16, None, "r: 16", default=True)
        reading.take("adapter.lora_alpha", 16, None, "lora_alpha: 16", default=True)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        reading.take("adapter.target_modules", targets, None, "target_modules", default=True)
    take_default_targets(reading, call.lineno)
    return True


def _uses_adapter(source: Source) -> bool:
    if any(True for _ in source.calls_of("get_peft_model", "add_adapter", "inject_adapter_in_model")):
        return True
    return any(keyword.arg == "peft_config" for call, _ in source.calls for keyword in call.keywords)


def _class_of(source: Source, call: ast.Call) -> str:
    """`AutoModelForCausalLM` of `AutoModelForCausalLM.from_pretrained`."""
    return source.name_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _task_of(kind: str) -> str | None:
    name = kind.removesuffix("ForConditionalGeneration")
    if name != kind:
        return "seq2seq-lm" if name in _TEXT_TO_TEXT else None
    return next((task for ending, task in TASKS.items() if kind.endswith(ending)), None)


def _first(
    reading: Reading, source: Source, call: ast.Call, scope: Function | None, *names: str
) -> tuple[Value | None, int] | None:
    """The address of a call: its first argument, or a keyword of one of these names."""
    node = positional(call)
    if node is None:
        node = next((keyword.value for keyword in call.keywords if keyword.arg in names), None)
    if node is None:
        return None
    try:
        return source.value(node, scope), node.lineno
    except Unresolved as error:
        reading.drop("from_pretrained", str(error), node.lineno, Effect.NEEDED, "computed at run time",
                     "write model.name_or_path")  # fmt: skip
        return None, node.lineno


def _take_model(reading: Reading, source: Source, call: ast.Call, scope: Function | None, task: str) -> None:
    found = _first(reading, source, call, scope, "pretrained_model_name_or_path")
    if task != "causal-lm":
        reading.take("task", task, call.lineno, _class_of(source, call), default=True)
    if found is not None and found[0] is not None and found[0].value != "":
        value, line = found
        note = value.note if value is not None else ""
        reading.take("model.name_or_path", value.value if value else None, line, "from_pretrained",
                     default=bool(note), note=note)  # fmt: skip
        reading.know("from_pretrained")
    bits: dict[str, tuple[Any, int | None]] = {}
    for name, (value, node) in keywords_of(reading, source, call, scope).items():
        if name in ("load_in_4bit", "load_in_8bit") and value is not None:
            bits[name] = (value.value, node.lineno)
        else:
            _take_model_keyword(reading, source, name, value, node)
    if bits and not any(keyword.arg == "quantization_config" for keyword in call.keywords):
        take_bits(reading, bits)


def _take_model_keyword(
    reading: Reading, source: Source, name: str, value: Value | None, node: ast.expr
) -> None:
    held = None if value is None else value.value
    if name == "quantization_config":
        reading.know(name)
        _take_quantization(reading, source, node)
    elif name in _IDLE or (name == "device_map" and (value is None or held in ("cuda", "cpu"))):
        reading.know(name)
    elif value is None:
        reading.drop(name, text_of(node), node.lineno, Effect.TRAINING, "computed at run time")
    elif name in _KEYWORDS:
        _KEYWORDS[name](reading, name, held, node.lineno)
    else:
        reading.drop(name, text_of(node), node.lineno, Effect.TRAINING, "no key of a recipe's model")


def _dtype(reading: Reading, name: str, value: Any, line: int) -> None:
    dtype = dtype_name(value)
    if dtype is None:
        reading.drop(name, value, line, Effect.TRAINING, "no dtype that is known here")
    else:
        reading.take("model.dtype", dtype, line, f"{name}: {value}")


def _kernel(reading: Reading, name: str, value: Any, line: int) -> None:
    if value in _KERNELS:
        reading.take("model.attn_implementation", value, line, name)
    else:
        reading.drop(name, value, line, Effect.NONE, "speed only; the planner chooses")


def _flash(reading: Reading, name: str, value: Any, line: int) -> None:
    reading.know(name)
    if value is True:
        reading.take("model.attn_implementation", "flash_attention_2", line, f"{name}: true")


def _device_map(reading: Reading, name: str, value: Any, line: int) -> None:
    reading.know(name)
    if not isinstance(value, dict) and value is not None:
        reading.drop(name, value, line, Effect.NONE, "the planner lays the model out")


def _as_written(reading: Reading, name: str, value: Any, line: int) -> None:
    reading.take(f"model.{name}", value, line, name)


def _trust(reading: Reading, name: str, value: Any, line: int) -> None:
    reading.know(name)
    if value is True:
        reading.take("model.trust_remote_code", True, line, name)


def _labels(reading: Reading, name: str, value: Any, line: int) -> None:
    reading.drop(name, value, line, Effect.NONE, "the labels are read from the rows")


_KEYWORDS: dict[str, Callable[[Reading, str, Any, int], None]] = {
    "torch_dtype": _dtype,
    "dtype": _dtype,
    "attn_implementation": _kernel,
    "use_flash_attention_2": _flash,
    "device_map": _device_map,
    "revision": _as_written,
    "gguf_file": _as_written,
    "trust_remote_code": _trust,
    **dict.fromkeys(("num_labels", "id2label", "label2id", "problem_type"), _labels),
}


def _take_quantization(reading: Reading, source: Source, node: ast.expr) -> None:
    """The one BitsAndBytesConfig(…) of the script."""
    if isinstance(node, ast.Constant) and node.value is None:
        return
    calls = list(source.calls_of("BitsAndBytesConfig"))
    if len(calls) != 1:
        reading.drop("quantization_config", text_of(node), node.lineno, Effect.NEEDED,
                     "which of the BitsAndBytesConfig(…) is meant is not written out" if calls else
                     "computed at run time", "write model.quantization")  # fmt: skip
        return
    call, scope = calls[0]
    fields = keywords_of(reading, source, call, scope)
    for name, (value, inner) in fields.items():
        if value is None:
            effect = Effect.NEEDED if name.startswith(("bnb_4bit_", "load_in_")) else Effect.TRAINING
            reading.drop(name, text_of(inner), inner.lineno, effect, "computed at run time",
                         "write model.quantization")  # fmt: skip
    take_bits(reading, {n: (v.value, i.lineno) for n, (v, i) in fields.items() if v is not None})


def _take_tokenizer(reading: Reading, source: Source, call: ast.Call, scope: Function | None) -> None:
    node = positional(call)
    try:
        name = None if node is None else source.value(node, scope).value
    except Unresolved:
        return
    if isinstance(name, str) and name and name != reading.value("model.name_or_path"):
        reading.take("model.tokenizer", name, call.lineno, "tokenizer")
    for keyword, (value, inner) in keywords_of(reading, source, call, scope).items():
        trl = any(source.calls_of("SFTConfig", "SFTTrainer"))  # trl cuts at its own max_length
        if keyword == "model_max_length" and value is not None and not trl:
            reading.take("data.max_length", value.value, inner.lineno, keyword)
        else:
            reading.know(keyword)


def _take_peft_model(reading: Reading, source: Source, call: ast.Call, scope: Function | None) -> None:
    node = positional(call, 1)
    fields = keywords_of(reading, source, call, scope)
    trainable = fields.get("is_trainable", (None, None))[0]
    reading.know(*fields)
    if node is None or trainable is None or plain(trainable.value) is not True:
        if not any(source.calls_of("LoraConfig")):  # else it is the result, loaded for a try
            reading.needs("adapter.path", call.lineno, "an adapter is loaded without is_trainable=True: "
                          "whether it is trained on is not written out",
                          "write adapter: {path: …} to continue it")  # fmt: skip
        return
    try:
        reading.take(
            "adapter.path", source.value(node, scope).value, call.lineno, "PeftModel.from_pretrained"
        )
    except Unresolved as error:
        reading.drop("PeftModel.from_pretrained", str(error), call.lineno, Effect.NEEDED,
                     "computed at run time", "write adapter.path")  # fmt: skip


def _take_fast(reading: Reading, source: Source, call: ast.Call, scope: Function | None) -> None:
    """unsloth's loader."""
    found = _first(reading, source, call, scope, "model_name")
    if found is not None and found[0] is not None:
        name = found[0].value
        note = "weights that are quantised already" if "bnb-4bit" in str(name) else found[0].note
        reading.take("model.name_or_path", name, found[1], "model_name", note=note)
    fields = keywords_of(reading, source, call, scope)
    four, length = fields.get("load_in_4bit"), fields.get("max_seq_length")
    if four is None or (four[0] is not None and four[0].value is True):
        line = call.lineno if four is None else four[1].lineno
        take_quantization(reading, "nf4", line, "load_in_4bit: true", double_quant=True)
    if length is not None and length[0] is not None:
        reading.take("data.max_length", length[0].value, length[1].lineno, "max_seq_length")
    for name, (value, node) in fields.items():
        if name in ("model_name", "load_in_4bit", "max_seq_length", "token", "dtype"):
            reading.know(name)
        else:
            reading.drop(name, shown(None if value is None else value.value), node.lineno, Effect.NONE,
                         "unsloth's own")  # fmt: skip


def _take_named_model(reading: Reading, source: Source) -> None:
    """trl's trainers take the model's name as text."""
    for call, scope in source.calls_of("SFTTrainer", "DPOTrainer"):
        node = positional(call) or next((k.value for k in call.keywords if k.arg == "model"), None)
        try:
            value = None if node is None else source.value(node, scope)
        except Unresolved:
            continue
        if value is not None and isinstance(value.value, str):
            reading.take("model.name_or_path", value.value, call.lineno, "model", note=value.note)
            if not _has_load_options(source):
                reading.take("model.dtype", "float32", None, "dtype: float32", default=True,
                             note="TRL loads the weights so")  # fmt: skip


def _has_load_options(source: Source) -> bool:
    calls = source.calls_of("SFTConfig", "DPOConfig")
    return any(keyword.arg == "model_init_kwargs" for call, _ in calls for keyword in call.keywords)
