"""Tokenizer, models and rows so small that a test trains them in a second; nothing here reads a file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.train.job import Job, read_job

sys.path.insert(0, str(Path(__file__).parent))
from plans import write_run

WORDS = 60


@dataclass
class Rows:
    """What `make_trainer` reads of the data."""

    train: Any
    eval: Any = None
    collate: Any = None
    labels: tuple[str, ...] | None = None
    counts: dict = field(default_factory=dict)
    streaming: bool = False
    collate_eval: Any = None


def job(folder: Path, changes: Mapping[str, Any]) -> Job:
    return read_job(write_run(folder, {"trainer.max_steps": 4, "data.max_length": 16, **changes}))


def tokenizer(pad: str = "<pad>") -> Any:
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


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS + 4, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            bos_token_id=1, eos_token_id=2, pad_token_id=0, **more,
        )
    )  # fmt: skip


def lora(model: Any, **more: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **more))


def sequences(count: int, length: int = 10) -> list[dict[str, list[int]]]:
    """Rows that count upwards, so that the next token can be learnt; the prompt's two tokens are masked."""
    rows = []
    for start in range(count):
        ids = [4 + (start + i) % WORDS for i in range(length - start % 3)] + [2]
        rows.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return rows


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
