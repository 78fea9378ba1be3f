"""SFTConfig and DPOConfig of trl beyond TrainingArguments, as a script writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.importing.arguments import as_bool, as_number
from launcher.importing.found import Effect, Reading

SFT_DEFAULTS: dict[str, Any] = {
    "trainer.learning_rate": 2e-5,
    "precision": "bf16",
    "trainer.num_train_epochs": 3.0,
    "data.max_length": 1024,
    "data.overlong": "truncate",
}
DPO_DEFAULTS: dict[str, Any] = {**SFT_DEFAULTS, "trainer.learning_rate": 1e-6, "trainer.beta": 0.1}
_LOSS = "data.loss_on"


def take_sft(reading: Reading, name: str, value: Any, line: int | None) -> bool:
    """Take one field that trl adds; False for those of TrainingArguments."""
    if name in ("max_length", "max_seq_length"):
        _length(reading, name, value, line)
    elif name not in _KNOWN:
        return False
    elif value is None:
        reading.know(name)
    elif name in _TAKERS:
        _TAKERS[name](reading, name, value, line)
    elif value in (False, "nll", "keep_start", "auto", 0):
        reading.know(name)
    else:
        effect, reason = _DROPPED[name]
        reading.drop(name, value, line, effect, reason)
    return True


def _length(reading: Reading, name: str, value: Any, line: int | None) -> None:
    number = as_number(value)
    if isinstance(number, int) and number >= 8:
        reading.take("data.max_length", number, line, name)
    else:
        reading.drop(name, value, line, Effect.NEEDED, "trl then cuts nothing; a recipe names a length",
                     "write data.max_length")  # fmt: skip


def _packing(reading: Reading, name: str, value: Any, line: int | None) -> None:
    reading.take("data.packing", as_bool(value) is True, line, name)


def _text_field(reading: Reading, name: str, value: Any, line: int | None) -> None:
    reading.take("text_field", value, line, name)


def _workers(reading: Reading, name: str, value: Any, line: int | None) -> None:
    reading.take("data.num_proc", value, line, name)


def _padding_free(reading: Reading, name: str, value: Any, line: int | None) -> None:
    reading.know(name)
    if as_bool(value):
        reading.take("data.padding_free", True, line, name)


def _multiple(reading: Reading, name: str, value: Any, line: int | None) -> None:
    reading.know(name)
    if isinstance(as_number(value), int):
        reading.take("data.pad_to_multiple_of", value, line, name)


def fill_sft(reading: Reading, kind: str) -> None:
    """Join the text field to the rows, and say what trl learns where it is not said."""
    field = reading.taken.pop("text_field", None)
    sources = reading.value("data.train")
    if field is not None and field.value != "text" and isinstance(sources, list):
        for key in ("data.train", "data.eval"):
            taken = reading.taken.get(key)
            if taken is not None and isinstance(taken.value, list):
                named = [
                    {**source, "format": "text", "columns": {"text": field.value}} for source in taken.value
                ]
                reading.take(key, named, taken.place.line, taken.said)
    sources = reading.value("data.train")
    plain = isinstance(sources, list) and all(source.get("format") == "text" for source in sources)
    if kind == "SFTConfig" and _LOSS not in reading.taken and sources and not plain:
        reading.needs(_LOSS, None, "of rows of messages trl learns every token without assistant_only_loss; "
                      "what these rows are is not known", "write all for messages, completion for prompt and "
                      "completion")  # fmt: skip


def _strategy(reading: Reading, name: str, value: Any, line: int | None) -> None:
    if value == "wrapped":
        reading.drop(name, value, line, Effect.TRAINING, "documents run into each other there, and not here")
    else:
        overlong = "split" if value == "bfd_split" else "truncate"
        reading.take("data.overlong", overlong, line, f"{name}: {value}")


def _loss(reading: Reading, name: str, value: Any, line: int | None) -> None:
    on = as_bool(value) is True
    reading.know(name)
    if name == "assistant_only_loss" and on:
        reading.take(_LOSS, "assistant", line, f"{name}: true")
    elif name == "completion_only_loss":
        reading.take(_LOSS, "completion" if on else "all", line, f"{name}: {str(on).lower()}")


def _dataset_kwargs(reading: Reading, name: str, value: Any, line: int | None) -> None:
    reading.know(name)
    given = value if isinstance(value, dict) else {}
    if given.get("skip_prepare_dataset"):
        reading.refuse(name, line, "skips the preparation: the rows are tokens already", "name rows of text")
    for key, item in given.items():
        if key != "skip_prepare_dataset":
            reading.drop(f"{name}.{key}", item, line, Effect.TRAINING, "the rows are made by `prepare`")


_DROPPED = {
    "eval_packing": (Effect.NONE, "evaluation rows are packed as training rows are"),
    "truncation_mode": (Effect.TRAINING, "a sample's start is kept here"),
    "chat_template_path": (
        Effect.TRAINING,
        "another model's template; write its text as model.chat_template",
    ),
    "eos_token": (Effect.TRAINING, "the tokenizer's own is used"),
    "pad_token": (Effect.NONE, "padding is never learnt"),
    "model_init_kwargs": (Effect.TRAINING, "write them under `model`"),
    "activation_offloading": (Effect.NONE, "memory only"),
    "shuffle_dataset": (Effect.NONE, "rows are shuffled anyway"),
    "dataset_batch_size": (Effect.NONE, "how rows are prepared"),
    "max_prompt_length": (Effect.TRAINING, "a sample is cut at its end, as a whole"),
    "max_completion_length": (Effect.TRAINING, "a sample is cut at its end, as a whole"),
    "num_of_sequences": (Effect.NONE, "how rows are prepared"),
    "chars_per_token": (Effect.NONE, "how rows are prepared"),
}
_TAKERS: dict[str, Callable[[Reading, str, Any, int | None], None]] = {
    "packing": _packing,
    "packing_strategy": _strategy,
    "completion_only_loss": _loss,
    "assistant_only_loss": _loss,
    "dataset_text_field": _text_field,
    "dataset_num_proc": _workers,
    "padding_free": _padding_free,
    "pad_to_multiple_of": _multiple,
    "dataset_kwargs": _dataset_kwargs,
}
_KNOWN = (*_TAKERS, *_DROPPED)
