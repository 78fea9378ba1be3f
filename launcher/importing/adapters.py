"""LoRA and the quantisation of its base: the subjects `adapter` and `model.quantization`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from launcher.errors import RecipeError
from launcher.importing.key_tables import Keys, Peer
from launcher.importing.reading import Effect, Given, Reading
from launcher.models.model_config import find_model_config


class Lora(NamedTuple):
    """The keys of a tool about its adapter."""

    switch: str
    """Whether there is one, and of which kind."""
    keys: Keys
    """Fields of LoraConfig."""
    others: re.Pattern[str]
    """Beginnings of other keys that nothing reads, either, where no adapter is made."""
    unread: str
    """Why nothing reads them."""
    folder: str = ""
    """Key of an adapter that is continued."""
    continued: str = ""
    """Why nothing reads them where there is such an adapter."""


def take_lora(peer: Peer, lora: Lora, *, is_on: bool) -> bool:
    """Take the adapter; whether one is made from fields of the file."""
    folder = peer.listed(lora.folder) if is_on and lora.folder else []
    if folder or not is_on:
        own = [key for key in peer.values if key in lora.keys or lora.others.match(key)]
        peer.leave_unread(own, lora.continued if lora.folder in peer.values else lora.unread)
        if not is_on:
            return False
    peer.decide("adapter.type", "lora", lora.switch)
    if len(folder) > 1:
        peer.refuse(lora.folder, "names several adapters, which would be merged first")
    elif folder:
        peer.take("adapter.path", folder[0], lora.folder)
    else:
        peer.take_keys(lora.keys)
        peer.fill(lora.keys)
    return not folder


class FourBits(NamedTuple):
    """The keys of a tool about weights in 4 bits."""

    kind: str
    """nf4 or fp4; nf4 where it is absent."""
    double: str
    is_double: bool
    """Whether the constants are quantised, too, where `double` is absent."""
    note: str = ""


def take_four_bits(peer: Peer, key: str, bits: FourBits, options: Peer, compute: str | None = None) -> None:
    """Take a base in 4 bits; key: its switch, options: the mapping that has the keys of `bits`."""
    kind = str(options.get(bits.kind) or "nf4")
    double = options.switch(bits.double) if bits.double in options.values else bits.is_double
    if kind not in ("nf4", "fp4"):
        options.drop(bits.kind, Effect.NEEDED, "expected nf4 or fp4", "write model.quantization")
        return
    take_quantization(
        peer.reading, kind, peer.given(key), bits.note, double_quant=double, compute_dtype=compute
    )


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
"""model_type -> layers that peft adapts by default (peft 0.21, utils/constants.py)."""


def take_default_targets(reading: Reading) -> None:
    """peft's own layers for this model, where the file names none: a recipe's default is all-linear."""
    if reading.taken.keys() & {"adapter.target_modules", "adapter.path", "adapter.target_parameters"}:
        return
    if any(entry.key.endswith("target_modules") for entry in reading.dropped):
        return
    model = reading.value("model.name_or_path")
    kind = _model_type(model, reading) if isinstance(model, str) else None
    if kind in PEFT_TARGETS:
        reading.default("adapter.target_modules", list(PEFT_TARGETS[kind]), "target_modules",
                        f"peft's default for {kind}")  # fmt: skip
        return
    known = f"for {kind}" if kind else "for a model whose configuration is not here"
    reading.needs("adapter.target_modules", None, f"which layers peft would take {known} is not known here",
                  "name them as the log of the other tool does, or write all-linear")  # fmt: skip


def _model_type(model: str, reading: Reading) -> str | None:
    """From the model's folder next to the file, the hub's cache, the hub or the shipped facts."""
    beside = Path(reading.file).parent / model
    try:
        name = str(beside) if model.startswith((".", "/")) or beside.is_dir() else model
        config, _ = find_model_config(name, revision=reading.value("model.revision"))
    except (RecipeError, OSError, ValueError):
        return None
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else None


def take_quantization(reading: Reading, kind: str, given: Given, note: str = "", **options: Any) -> None:
    """int8, nf4 or fp4 as a mapping: the short form would have a recipe's defaults.

    options: double_quant and compute_dtype, of 4 bits only; None leaves a recipe's default.
    """
    extra = {} if kind == "int8" else {name: value for name, value in options.items() if value is not None}
    reading.take("model.quantization", {"type": kind, **extra}, given, note=note)


def take_kbit_norms(reading: Reading, said: str, tool: str) -> None:
    """bfloat16, of a tool that trains a quantised base with all else in the 16 bits of the computation.

    Call it after the precision and the adapter. Where weights are trained whole, in float32, a recipe with it
    would be refused: there it is not set.
    """
    quantised = reading.value("model.quantization") not in (None, "none")
    precision, whole = reading.value("precision"), reading.value("adapter.modules_to_save")
    unlike = precision == "bf16-true" and reading.task.adds_head
    if quantised and precision in ("bf16", "bf16-true") and not whole and not unlike:
        note = f"{tool} trains norms, embedding and head of a quantised model in 16 bits"
        reading.default("model.kbit_norms", "bfloat16", said, note)
