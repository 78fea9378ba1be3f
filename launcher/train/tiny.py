"""A stand-in for model files and data: a tokenizer built on the spot and rows made up by rule.

Used by `--tiny`, which rehearses a recipe: its formats, adapter, precision, engine stay.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

ROWS = 64
_SPECIAL = ["<|pad|>", "<|eos|>", "<|bos|>"]
_TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|eos|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|eos|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
_COLOURS = ["red", "green", "blue", "white", "black"]
_NOUNS = ["stone", "river", "lamp", "road", "bird", "cup"]


def tiny_tokenizer(vocab_size: int) -> Any:
    """A byte-level BPE tokenizer with a chat template and at most `vocab_size` entries (at least 259)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 512),
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator((f"{row['prompt']} {row['completion']}" for row in _pairs()), trainer)
    pad, eos, bos = _SPECIAL
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, eos_token=eos, bos_token=bos)
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def tiny_sources(sources: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, Any], Any]]:
    """Each source with 64 generated rows of its format instead of its file."""
    from datasets import Dataset

    found = []
    for source in sources:
        fmt = source.get("format") or "auto"
        fmt = "prompt-completion" if fmt == "auto" else fmt
        rows = [_as_format(row, fmt) for row in _pairs()]
        found.append(({"path": source["path"], "format": fmt, "columns": {}}, Dataset.from_list(rows)))
    return found


def _pairs() -> list[dict[str, str]]:
    draw = random.Random(0)
    rows = []
    for _ in range(ROWS):
        colour, noun, count = draw.choice(_COLOURS), draw.choice(_NOUNS), draw.randint(2, 9)
        prompt = f"How many {colour} {noun}s are there? "
        rows.append({"prompt": prompt, "completion": f"There are {count} {colour} {noun}s."})
    return rows


def _as_format(row: Mapping[str, str], fmt: str) -> dict[str, Any]:
    prompt, completion = row["prompt"], row["completion"]
    if fmt == "text":
        return {"text": prompt + completion}
    if fmt == "instruction":
        return {"instruction": prompt, "input": "", "output": completion}
    if fmt == "chat":
        turns = [("user", prompt), ("assistant", completion)]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}
    return dict(row)
