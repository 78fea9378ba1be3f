"""Generated tokenizer and rows for `--tiny`, which keeps a recipe's formats, adapter and engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

ROWS = 64
_SPECIAL = ["<|pad|>", "<|eos|>", "<|bos|>"]
_FIM = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
_TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|eos|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|eos|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
_COLOURS = ["red", "green", "blue", "white", "black"]
_NOUNS = ["stone", "river", "lamp", "road", "bird", "cup"]


def tiny_tokenizer(vocab_size: int, named: Mapping[str, str] | None = None) -> Any:
    """A byte-level BPE tokenizer with a chat template and at most `vocab_size` entries (at least 263).

    It has pad, eos and bos, and the sentinels of fill-in-the-middle under StarCoder's names. named: attribute
    of the tokenizer -> token, which come on top of these entries.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 512),
        special_tokens=[*_SPECIAL, *_FIM],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    draw = random.Random(0)
    core.train_from_iterator([_text(draw, index)["text"] for index in range(ROWS)], trainer)
    pad, eos, bos = _SPECIAL
    own = {"model_specific_special_tokens": dict(named)} if named else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=pad, eos_token=eos, bos_token=bos, **own
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _pair(draw: random.Random, _: int) -> dict[str, Any]:
    colour, noun, count = draw.choice(_COLOURS), draw.choice(_NOUNS), draw.randint(2, 9)
    prompt = f"How many {colour} {noun}s are there? "
    return {"prompt": prompt, "completion": f"There are {count} {colour} {noun}s."}


def _text(draw: random.Random, index: int) -> dict[str, Any]:
    pair = _pair(draw, index)
    return {"text": pair["prompt"] + pair["completion"]}


def _instruction(draw: random.Random, index: int) -> dict[str, Any]:
    pair = _pair(draw, index)
    given = "Look at the table." if index % 4 == 0 else ""
    return {"instruction": pair["prompt"], "input": given, "output": pair["completion"]}


def _chat(draw: random.Random, index: int) -> dict[str, Any]:
    pair = _pair(draw, index)
    turns = [
        {"role": "user", "content": pair["prompt"]},
        {"role": "assistant", "content": pair["completion"]},
    ]
    if index % 8 == 0:
        turns.insert(0, {"role": "system", "content": "Count things."})
    return {"messages": turns}


def _preference(draw: random.Random, index: int) -> dict[str, Any]:
    pair = _pair(draw, index)
    return {"prompt": pair["prompt"], "chosen": pair["completion"], "rejected": "I do not want to count."}


MAKERS: Mapping[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "text": _text,
    "instruction": _instruction,
    "prompt-completion": _pair,
    "chat": _chat,
    "preference": _preference,
}
"""For the formats that several tasks read."""
