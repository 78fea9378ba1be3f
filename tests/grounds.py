"""What a tiny run stands on, made here: a tokenizer of 1024 words, a Llama, rows to learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SLOW_STEPS = """\
import os
import time

from transformers import TrainerCallback


class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(float(os.environ.get("STEP_S", "0")))


def callbacks():
    return [Slow()]
"""
"""Hooks of a recipe: each step takes STEP_S seconds longer."""


def tokenizer_of_1024_words() -> Any:
    """Words w0, w1, … with ids from 4, split at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": 4 + i for i in range(1020)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def make_base(folder: Path, *, hidden_size: int = 64, layers: int = 2, heads: int = 4) -> Path:
    """model/ with its tokenizer, and rows.jsonl of 64 rows; returns the folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer_of_1024_words().save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = [{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2} w{i + 3} w7 w8"} for i in range(64)]
    write_rows(folder / "rows.jsonl", rows)
    return folder


def unlike_rows(count: int = 64) -> list[dict[str, str]]:
    """Rows of unlike length."""
    return [
        {"prompt": f"w{i} w{7 * i % 50}", "completion": "".join(f" w{i + j}" for j in range(3 + i % 9))}
        for i in range(count)
    ]


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
