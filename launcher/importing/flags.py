"""The flags of a training script on a launch line: TrainingArguments, and names that everybody copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.importing.adapter import (
    PEFT_DEFAULTS,
    dtype_name,
    take_adapter,
    take_bits,
    take_default_targets,
    take_quantization,
)
from launcher.importing.arguments import (
    NEEDED_FIELDS,
    TRANSFORMERS_DEFAULTS,
    as_bool,
    as_number,
    fill_defaults,
    take_argument,
)
from launcher.importing.found import Effect, Reading, shown
from launcher.importing.shell import Word
from launcher.importing.sources import source_at
from launcher.recipe.suggestions import TRAINER_ALIASES

OWN = "the script's own flag: what it does with it is not known here"
_SURE = ("lr", "epochs", "num_epochs")
"""Short names that mean one thing everywhere."""
_ADAPTED = ("use_peft", "use_lora", "use_peft_lora")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a launch line."""

    name: str
    """Without its dashes, `-` as `_`."""
    value: Any
    """A text; several as a list; True without one."""
    line: int
    open: bool = False
    """Whether the value is only known when the line is run."""


def read_flags(words: Sequence[Word]) -> tuple[list[Flag], list[Word]]:
    """Flags, and the words that belong to none: `--x v`, `--x=v`, `--x`, `--x a b`."""
    flags: list[Flag] = []
    loose: list[Word] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.text.startswith("--") or len(word.text) < 3:
            loose.append(word)
            continue
        name, equals, text = word.text[2:].partition("=")
        plain = name.replace("-", "_")
        if equals:
            flags.append(Flag(plain, text, word.line, word.open))
            continue
        values = []
        while at < len(words) and not words[at].text.startswith("--"):
            values.append(words[at])
            at += 1
        value: Any = [v.text for v in values] if len(values) > 1 else values[0].text if values else True
        flags.append(Flag(plain, value, word.line, any(v.open for v in values)))
    return flags, loose


def take_flags(reading: Reading, flags: Sequence[Flag]) -> None:
    """Take all flags of a script with TrainingArguments' parser."""
    rows = _Rows()
    seen: dict[str, tuple[Any, int | None]] = {}
    for flag in flags:
        seen[flag.name] = (flag.value, flag.line)
    fields = _has(seen, *_ADAPTED, "lora_r", "lora_rank", "lora_alpha")
    for flag in flags:
        if flag.open:
            _leave_open(reading, flag)
        elif not _take(reading, flag, rows, fields):
            reading.drop(f"--{flag.name}", flag.value, flag.line, Effect.TRAINING, OWN)
    _take_rows(reading, rows)
    if fields and _is_on(seen, _ADAPTED):
        fill_defaults(reading, PEFT_DEFAULTS)
        take_default_targets(reading)
    _take_bits(reading, seen)
    tell_length(reading)
    fill_defaults(reading, TRANSFORMERS_DEFAULTS)


def tell_length(reading: Reading) -> None:
    """A script cuts its rows somewhere, and a recipe at its own default. Images have no length."""
    told = any(entry.key in ("data.max_length", "max_length") for entry in reading.dropped)
    if not ("data.max_length" in reading.taken or told or reading.value("task") == "image-classification"):
        reading.drop("data.max_length", "", None, Effect.TRAINING, "where rows are cut is not said; a recipe "
                     "cuts at 2,048 tokens", "write data.max_length")  # fmt: skip


def _has(seen: dict[str, tuple[Any, int | None]], *names: str) -> bool:
    return any(name in seen for name in names)


def _is_on(seen: dict[str, tuple[Any, int | None]], names: Sequence[str]) -> bool:
    """Whether no switch of these says no."""
    return all(as_bool(seen[name][0]) is not False for name in names if name in seen)


def _leave_open(reading: Reading, flag: Flag) -> None:
    if flag.name in _ADDRESSES:
        key = "model.name_or_path" if flag.name in _ADDRESSES[:5] else "data.train"
        reading.know(flag.name)
        reading.needs(key, flag.line, f"--{flag.name} {shown(flag.value)} is known only when the line is run")
        return
    needed = flag.name in NEEDED_FIELDS
    effect = Effect.NEEDED if needed else Effect.NONE if flag.name == "output_dir" else Effect.TRAINING
    reading.drop(f"--{flag.name}", flag.value, flag.line, effect, "known only when the line is run",
                 "write what it stands for" if needed else "")  # fmt: skip


@dataclass(slots=True)
class _Rows:
    """Flags that name rows, which make one or two sources together."""

    train: Flag | None = None
    eval: Flag | None = None
    name: Flag | None = None
    split: Flag | None = None
    share: Flag | None = None


def _take(reading: Reading, flag: Flag, rows: _Rows, adapted: bool) -> bool:
    """Whether the flag is taken, dropped or known."""
    name, value = flag.name, flag.value
    if name in _ALIASES:
        _ALIASES[name](reading, flag)
        return True
    if name in _ROW_FLAGS:
        setattr(rows, _ROW_FLAGS[name], flag)
        reading.know(name)
        return True
    lora = _LORA.get(name)
    if lora is not None or (adapted and name in ("use_dora", "use_rslora", "modules_to_save")):
        return take_adapter(
            reading, lora or name, _listed(value) if "modules" in name else value, flag.line, name
        )
    if name in _QUANTIZATION or name in _ADAPTED:
        reading.know(name)
        return True
    if name in _SURE:
        return take_argument(reading, TRAINER_ALIASES[name], value, flag.line)
    if name.startswith("no_") and take_argument(reading, name.removeprefix("no_"), False, flag.line):
        return True
    return take_argument(reading, name, value, flag.line)


def _listed(value: Any) -> Any:
    """Names of layers: several words, or one with commas."""
    if isinstance(value, str) and value in ("all", "all-linear"):
        return "all-linear"
    if isinstance(value, str):
        return value.split(",")
    return ["all-linear"] if value == ["all"] else value


def _text(to: str) -> Callable[[Reading, Flag], None]:
    def take(reading: Reading, flag: Flag) -> None:
        if flag.value in ("", "None", True):
            reading.know(flag.name)
        else:
            reading.take(to, str(flag.value), flag.line, flag.name)

    return take


def _trust(reading: Reading, flag: Flag) -> None:
    reading.know(flag.name)
    if as_bool(flag.value):
        reading.take("model.trust_remote_code", True, flag.line, flag.name)


def _dtype(reading: Reading, flag: Flag) -> None:
    name = dtype_name(flag.value)
    if name is None:
        reading.drop(flag.name, flag.value, flag.line, Effect.TRAINING, "no dtype that is known here")
    else:
        reading.take("model.dtype", name, flag.line, flag.name)


def _source_length(reading: Reading, flag: Flag) -> None:
    """Of transformers' run_summarization.py and run_translation.py alone: rows are read, then written."""
    reading.take("task", "seq2seq-lm", flag.line, f"{flag.name}: {shown(flag.value)}")
    length = as_number(flag.value)
    if length is not None and length > 0 and length == int(length):
        reading.take("data.max_length", int(length), flag.line, flag.name)
    else:
        reading.drop(flag.name, flag.value, flag.line, Effect.TRAINING, "expected a whole number from 1")


def _kernel(reading: Reading, flag: Flag) -> None:
    if flag.value in ("eager", "sdpa", "flash_attention_2", "flex_attention"):
        reading.take("model.attn_implementation", flag.value, flag.line, flag.name)
    else:
        reading.drop(flag.name, flag.value, flag.line, Effect.NONE, "speed only; the planner chooses")


def _flash(reading: Reading, flag: Flag) -> None:
    reading.know(flag.name)
    if as_bool(flag.value):
        reading.take("model.attn_implementation", "flash_attention_2", flag.line, f"{flag.name}: true")


def _length(reading: Reading, flag: Flag) -> None:
    number = as_number(flag.value)
    if not isinstance(number, int) or number < 8:
        reading.drop(flag.name, flag.value, flag.line, Effect.NEEDED, "expected a number of tokens from 8")
        return
    reading.take("data.max_length", number, flag.line, flag.name)
    if flag.name == "block_size":
        reading.take("data.packing", True, flag.line, f"{flag.name}: {number}", default=True)
        reading.drop(flag.name, flag.value, flag.line, Effect.TRAINING, "run_clm.py cuts all texts in a row "
                     "into blocks; here no document of a block sees another")  # fmt: skip


def _samples(reading: Reading, flag: Flag) -> None:
    reading.drop(
        flag.name, flag.value, flag.line, Effect.TRAINING, "all rows are used; there is no limit of rows"
    )


def _checkpointing(reading: Reading, flag: Flag) -> None:
    take_argument(reading, "gradient_checkpointing", flag.value, flag.line)
    reading.know(flag.name)


def _reentrant(reading: Reading, flag: Flag) -> None:
    reading.know(flag.name)
    given = {"use_reentrant": as_bool(flag.value) is not False}
    take_argument(reading, "gradient_checkpointing_kwargs", given, flag.line)


def _packing(reading: Reading, flag: Flag) -> None:
    reading.take("data.packing", as_bool(flag.value) is True, flag.line, f"{flag.name}: {shown(flag.value)}")


def _prepared(reading: Reading, flag: Flag) -> None:
    reading.drop(flag.name, flag.value, flag.line, Effect.NONE, "prepared rows are kept by `prepare`")


def _workers(reading: Reading, flag: Flag) -> None:
    number = as_number(flag.value)
    reading.know(flag.name)
    if isinstance(number, int) and number > 0:
        reading.take("data.num_proc", number, flag.line, flag.name)


def _silent(reading: Reading, flag: Flag) -> None:
    reading.know(flag.name)


_ADDRESSES = ("model_name_or_path", "model_name", "base_model", "model_id", "pretrained_model_name_or_path",
              "dataset_name", "train_file", "data_path")  # fmt: skip
_LENGTHS = ("max_seq_length", "max_length", "model_max_length", "block_size", "cutoff_len", "max_seq_len")
_ALIASES: dict[str, Callable[[Reading, Flag], None]] = {
    **dict.fromkeys(_ADDRESSES[:5], _text("model.name_or_path")),
    **dict.fromkeys(("tokenizer_name", "tokenizer_name_or_path"), _text("model.tokenizer")),
    "model_revision": _text("model.revision"),
    "cache_dir": _text("model.cache_dir"),
    "trust_remote_code": _trust,
    "torch_dtype": _dtype,
    "dtype": _dtype,
    "attn_implementation": _kernel,
    **dict.fromkeys(("use_flash_attn", "use_flash_attn_2", "use_flash_attention_2"), _flash),
    **dict.fromkeys(_LENGTHS, _length),
    **dict.fromkeys(("max_train_samples", "max_eval_samples", "num_samples"), _samples),
    "use_gradient_checkpointing": _checkpointing,
    "use_reentrant": _reentrant,
    "packing": _packing,
    "overwrite_cache": _prepared,
    "preprocessing_num_workers": _workers,
    "dataset_num_proc": _workers,
    "max_source_length": _source_length,
    **dict.fromkeys(("use_fast_tokenizer", "low_cpu_mem_usage", "use_auth", "use_auth_token"), _silent),
}  # fmt: skip
_ROW_FLAGS = {
    "dataset_name": "train", "train_file": "train", "data_path": "train", "validation_file": "eval",
    "dataset_config": "name", "dataset_config_name": "name", "dataset_split": "split",
    "dataset_train_split": "split", "validation_split_percentage": "share",
}  # fmt: skip
_LORA = {
    "lora_r": "r", "lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules", "target_modules": "target_modules",
    "lora_modules": "target_modules", "lora_modules_to_save": "modules_to_save", "lora_bias": "bias",
}  # fmt: skip
_QUANTIZATION = (
    "load_in_4bit", "load_in_8bit", "bits", "quant_type", "double_quant", "bnb_4bit_quant_type",
    "use_bnb_nested_quant", "bnb_4bit_compute_dtype", "q_lora", "use_qlora",
    "use_4bit_quantization", "use_8bit_quantization", "use_nested_quant", "bnb_4bit_quant_storage_dtype",
)  # fmt: skip


def _take_bits(reading: Reading, seen: dict[str, tuple[Any, int | None]]) -> None:
    """Quantisation in transformers' names, and in those of artidoro/qlora and of peft's examples."""
    renamed = {
        "use_4bit_quantization": "load_in_4bit",
        "use_8bit_quantization": "load_in_8bit",
        "use_bnb_nested_quant": "bnb_4bit_use_double_quant",
        "use_nested_quant": "bnb_4bit_use_double_quant",
        "bnb_4bit_quant_storage_dtype": "bnb_4bit_quant_storage",
    }
    names = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", *renamed, "bnb_4bit_compute_dtype")
    fields = {renamed.get(name, name): seen[name] for name in names if name in seen}
    if "use_4bit_quantization" in seen:  # peft's examples begin with other defaults than BitsAndBytesConfig
        fields = {"bnb_4bit_quant_type": ("nf4", None), "bnb_4bit_compute_dtype": ("float16", None), **fields}
    if fields:
        take_bits(reading, fields)
    bits, line = seen.get("bits", (None, None))
    if as_number(bits) == 4:
        kind = str(seen.get("quant_type", ("nf4", None))[0])
        double = as_bool(seen.get("double_quant", (True, None))[0])
        compute = {"bf16": "bfloat16", "fp16": "float16"}.get(str(reading.value("precision")), "float32")
        take_quantization(reading, kind if kind in ("nf4", "fp4") else "nf4", line, "bits: 4",
                          double_quant=double, compute_dtype=compute)  # fmt: skip
    elif as_number(bits) == 8:
        take_quantization(reading, "int8", line, "bits: 8")
    elif bits is not None and as_number(bits) != 16:
        reading.drop("bits", bits, line, Effect.NEEDED, "expected 4, 8 or 16")
    for name in ("q_lora", "use_qlora"):
        if name in seen and as_bool(seen[name][0]):
            reading.drop(name, seen[name][0], seen[name][1], Effect.NEEDED, "in how many bits is not said",
                         "write model.quantization: nf4 if it is QLoRA's")  # fmt: skip


def _take_rows(reading: Reading, rows: _Rows) -> None:
    if rows.train is not None and not rows.train.open:
        name = None if rows.name is None or rows.name.value == "None" else rows.name.value
        split = None if rows.split is None else rows.split.value
        given = {"name": name, "split": split}
        source = source_at(reading, rows.train.name, rows.train.line, rows.train.value, given)
        if source is not None:
            reading.take(
                "data.train", [source], rows.train.line, f"{rows.train.name}: {shown(rows.train.value)}"
            )
            reading.drop(rows.train.name, rows.train.value, rows.train.line, Effect.TRAINING,
                         "what the script makes of a row is its own; here it is read by its columns",
                         "look with `effilaunch prepare RECIPE --show 1`, or write a format_row")  # fmt: skip
    if rows.eval is not None:
        source = source_at(reading, rows.eval.name, rows.eval.line, rows.eval.value)
        if source is not None:
            reading.take("data.eval", [source], rows.eval.line, f"{rows.eval.name}: {shown(rows.eval.value)}")
    elif rows.share is not None and (share := as_number(rows.share.value)) is not None and 0 < share < 100:
        reading.take("data.eval", {"split": share / 100}, rows.share.line, f"{rows.share.name}: {share}")
