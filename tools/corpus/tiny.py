"""Models, tokenizer and rows so small that a script trains them in a second; lies beside each script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = 60


def tokenizer(pad: str | None = "<pad>") -> Any:
    """Words w0, w1, … with ids from 4."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words |= {f"w{i}": 4 + i for i in range(WORDS)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=pad, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def config(**more: Any) -> Any:
    """A Llama of two layers."""
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": WORDS + 4, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **more})


def model(**more: Any) -> Any:
    """The Llama with random weights."""
    from transformers import LlamaForCausalLM, set_seed

    set_seed(0)
    return LlamaForCausalLM(config(**more))


def saved(folder: str = "tiny-llama", dtype: str = "float32", **more: Any) -> str:
    """The Llama and its tokenizer as a folder for from_pretrained; several ranks may ask at once."""
    import os
    import shutil

    import torch

    target = Path(folder)
    if not target.exists():
        own = Path(f"{folder}.{os.getpid()}")
        model(**more).to(getattr(torch, dtype)).save_pretrained(own)
        tokenizer().save_pretrained(own)
        try:
            own.rename(target)
        except OSError:  # another rank was faster
            shutil.rmtree(own)
    return folder


def rows(count: int = 32, length: int = 12) -> Any:
    """A Dataset of input_ids, attention_mask and labels."""
    from datasets import Dataset

    ids = [[4 + (i * 7 + j) % WORDS for j in range(length)] for i in range(count)]
    return Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * length] * count, "labels": ids})
