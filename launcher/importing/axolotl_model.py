"""Model, adapter, quantisation and precision of axolotl's YAML."""

from __future__ import annotations

from launcher.importing.adapter import take_adapter, take_quantization
from launcher.importing.arguments import as_bool, take_field
from launcher.importing.found import Effect, shown
from launcher.importing.peer import Peer, is_off, texts

_ATTENTION = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "eager_attention": "eager",
}
_KERNELS = ("eager", "sdpa", "flash_attention_2", "flex_attention")
_NOT_LINEAR = ("lm_head", "embed_tokens", "wte")


def take_model(peer: Peer) -> None:
    tokenizer = peer.get("tokenizer_config")
    if tokenizer is not None and tokenizer != peer.values.get("base_model"):
        peer.take("model.tokenizer", str(tokenizer), "tokenizer_config")
    if peer.values.get("base_model_config") == peer.values.get("base_model"):
        peer.get("base_model_config")
    if peer.switch("resize_token_embeddings_to_32x"):
        peer.take("model.vocab_multiple", 32, "resize_token_embeddings_to_32x")
    _take_special_tokens(peer)
    for key in ("model_type", "type_of_model"):
        if str(peer.values.get(key, "")).endswith("ForSequenceClassification"):
            peer.refuse(key, f"is {shown(peer.values[key])}: axolotl trains reward models with it")
    kernel = peer.get("attn_implementation")
    for key, name in _ATTENTION.items():
        if peer.switch(key):
            peer.take("model.attn_implementation", name, key)
    if kernel in _KERNELS:
        peer.take("model.attn_implementation", kernel, "attn_implementation")
    elif kernel is not None:
        peer.drop("attn_implementation", Effect.NONE, "a kernel that is not here; the planner chooses one")


def _take_special_tokens(peer: Peer) -> None:
    tokens = peer.get("special_tokens")
    if tokens is None:
        return
    if not isinstance(tokens, dict):
        peer.drop("special_tokens", Effect.NEEDED, "expected a mapping of tokens")
        return
    for name, value in tokens.items():
        key, line = f"special_tokens.{name}", peer.line(f"special_tokens.{name}")
        if value is None:
            peer.reading.know(key)
        elif name == "additional_special_tokens":
            _add_tokens(peer, key, value, line)
        elif name == "pad_token":
            peer.reading.drop(key, value, line, Effect.NONE, "padding is never learnt")
        else:
            peer.reading.drop(key, value, line, Effect.TRAINING, "unless the tokenizer has it already")


def _add_tokens(peer: Peer, key: str, value: object, line: int | None) -> None:
    known = peer.reading.value("model.add_tokens") or []
    try:
        peer.reading.take("model.add_tokens", [*known, *(texts(value) or [])], line, key)
    except ValueError as error:
        peer.reading.drop(key, value, line, Effect.NEEDED, f"expected {error}")


def take_lora(peer: Peer) -> bool:
    """The adapter; whether there is one."""
    kind = peer.get("adapter")
    if kind is None or is_off(kind):
        _forget_adapter(peer)
        return False
    if kind not in ("lora", "qlora"):
        peer.refuse("adapter", f"is {shown(kind)}, and of adapters there is only LoRA here")
        return True
    peer.take("adapter.type", "lora", "adapter")
    folder = peer.get("lora_model_dir")
    if folder is not None:
        _forget_adapter(peer)
        peer.take("adapter.type", "lora", "adapter")
        peer.take("adapter.path", str(folder), "lora_model_dir")
        return True
    _take_targets(peer)
    _take_peft(peer)
    peer.default("adapter.lora_dropout", 0.0, "lora_dropout")
    for key in ("lora_r", "lora_alpha"):
        if key not in peer.values:
            field = "r" if key == "lora_r" else key
            peer.reading.needs(f"adapter.{field}", None, f"{key} is not there, and axolotl has no default")
    return True


def _forget_adapter(peer: Peer) -> None:
    """Fields of an adapter that is not made: they are without effect there, too."""
    for to in [key for key in peer.reading.taken if key.startswith("adapter.")]:
        del peer.reading.taken[to]
    why = (
        "the adapter in lora_model_dir has its own"
        if "lora_model_dir" in peer.values
        else "no adapter is trained"
    )
    for name in peer.values:
        of_adapter = name.startswith(("lora_", "peft")) and name not in ("lora_model_dir", "lora_on_cpu")
        if of_adapter and not is_off(peer.values[name]):
            peer.drop(name, Effect.NONE, why)
        elif of_adapter:
            peer.get(name)


def _take_targets(peer: Peer) -> None:
    names = peer.get("lora_target_modules")
    if peer.switch("lora_target_linear"):
        peer.take("adapter.target_modules", "all-linear", "lora_target_linear")
        given = names if isinstance(names, list) else [names] if names else []
        beyond = [name for name in given if str(name).rpartition(".")[2] in _NOT_LINEAR]
        if beyond:
            reason = "all-linear is without the embeddings and the head"
            hint = "write adapter.target_modules as a list of all names"
            peer.drop("lora_target_modules", Effect.TRAINING, reason, hint)
        elif given:
            peer.drop("lora_target_modules", Effect.NONE, "lora_target_linear takes all linear layers")
    elif names:
        take_adapter(peer.reading, "target_modules", names, peer.line("lora_target_modules"),
                     "lora_target_modules")  # fmt: skip
    elif "lora_target_parameters" not in peer.values:
        peer.reading.needs("adapter.target_modules", None, "neither lora_target_modules nor "
                           "lora_target_linear is there: axolotl would adapt nothing",
                           "all-linear is what lora_target_linear means")  # fmt: skip


def _take_peft(peer: Peer) -> None:
    """`peft: {loftq_config: {loftq_bits: 4}}`."""
    given = peer.get("peft")
    loftq = given.get("loftq_config") if isinstance(given, dict) else None
    if isinstance(loftq, dict) and loftq:
        config = {"loftq_iter": 1, **loftq}
        peer.take("adapter.loftq_config", config, "peft")
        peer.take("adapter.init_lora_weights", "loftq", "peft")
    elif given:
        peer.drop("peft", Effect.TRAINING, "only its loftq_config is read")


def take_bits(peer: Peer, adapted: bool) -> None:
    four, eight, kind = peer.switch("load_in_4bit"), peer.switch("load_in_8bit"), peer.values.get("adapter")
    backend = peer.get("nf4_backend")
    if backend not in (None, "bitsandbytes"):
        peer.refuse("nf4_backend", f"is {shown(backend)}: only bitsandbytes quantises here")
    if (four or eight) and not adapted:
        key = "load_in_4bit" if four else "load_in_8bit"
        peer.refuse(key, "is true without an adapter: a quantised model cannot be trained itself",
                    "set adapter: qlora, or take it away")  # fmt: skip
    elif kind == "qlora" and not four and "lora_model_dir" not in peer.values:
        peer.refuse("adapter", "is qlora without load_in_4bit: true, which axolotl refuses")
    elif kind == "lora" and four and not eight:
        reason = "axolotl quantises with adapter: qlora only; the model stays as it is"
        peer.drop("load_in_4bit", Effect.NONE, reason, "write model.quantization: nf4 if QLoRA is meant")
    elif eight and kind == "lora":
        take_quantization(peer.reading, "int8", peer.line("load_in_8bit"), "load_in_8bit: true")
    elif four:
        _take_four_bits(peer)


def _take_four_bits(peer: Peer) -> None:
    options = peer.get("bnb_config_kwargs")
    options = options if isinstance(options, dict) else {}
    kind = str(options.get("bnb_4bit_quant_type", "nf4"))
    if kind not in ("nf4", "fp4"):
        peer.drop("bnb_config_kwargs", Effect.NEEDED, "expected the type nf4 or fp4")
        return
    double = as_bool(options.get("bnb_4bit_use_double_quant", True))
    take_quantization(
        peer.reading, kind, peer.line("load_in_4bit"), "load_in_4bit: true", double_quant=double
    )
    for name in options:
        if name not in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"):
            peer.reading.drop(f"bnb_config_kwargs.{name}", options[name], peer.line("bnb_config_kwargs"),
                              Effect.TRAINING, "no recipe key says it")  # fmt: skip


def take_precision(peer: Peer, adapted: bool) -> None:
    """bf16 is auto there, and without DeepSpeed the weights themselves are loaded in 16 bits."""
    bf16, fp16 = peer.get("bf16"), peer.switch("fp16")
    brain, half, full = (peer.switch(key) for key in ("bfloat16", "float16", "float32"))
    asked = str("auto" if bf16 is None else bf16).lower()
    wide = as_bool(bf16) is True or brain
    if asked == "full":
        peer.take("precision", "bf16-true", "bf16", note="no autocast there")
    elif wide or (asked == "auto" and not fp16):
        _take_wide(peer, adapted, "bf16" if wide or not adapted else "auto", "bfloat16" if brain else "bf16")
    elif fp16:
        peer.take("precision", "fp16", "fp16")
    elif half:
        peer.take("precision", "fp16-true", "float16")
    elif full:
        peer.take("precision", "fp32", "float32")
    else:
        peer.take("precision", "fp32", "bf16")
    tf32 = peer.get("tf32")
    if as_bool(tf32) is not None:
        take_field(peer.reading, "tf32", tf32, peer.line("tf32"))


def _take_wide(peer: Peer, adapted: bool, precision: str, key: str) -> None:
    by_default = key not in peer.values
    note = (
        "auto there: where the card has it"
        if precision == "bf16" and as_bool(peer.values.get(key)) is None
        else ""
    )
    if by_default:
        peer.default("precision", precision, "bf16: auto" if key == "bf16" else key, note)
    else:
        peer.take("precision", precision, key, note=note)
    if not adapted and "deepspeed" not in peer.values:
        said = f"{key}: {shown(peer.values.get(key, 'auto'))}"
        note = "axolotl loads the weights in 16 bits"
        peer.reading.take("model.dtype", "bfloat16", peer.line(key), said, note=note)
