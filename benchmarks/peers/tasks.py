"""Small jobs of the tasks whose Trainer a library owns: rows, weights, and both sides' settings.

`plain` is the library's own script (library.py), `ours` a recipe that leaves what is not set to this project.
Both train random weights on HumanEval: a prompt is a function's head, the right answer its body, the rejected
one the body of the function before.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.sides import HERE, LORA, RATE, Side, run_recipe
from peers.work import Work, cut, human_eval_rows, model_folder

PROMPT, ANSWER, COMPLETION = 32, 24, 16
"""Most tokens of a prompt, an answer and a written completion: no side has to cut a row."""
COMPLETIONS, PATTERN = 4, "[xz]"
"""Of a prompt under grpo; one with an x or a z is rewarded."""
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Job:
    """A job of one task; a step is one micro-batch."""

    row: Callable[[str, str, str], Row]
    """(prompt, its answer, another's answer) -> a line of the file."""
    tokens: Callable[[Mapping[str, int]], int]
    """Tokens that a step computes of a row, of the tokens of its columns."""
    rows: int
    """Of a step."""
    batch: int
    """Samples that they make: per_device_train_batch_size of both sides."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Of both sides, besides those of every task."""
    model: str = "LlamaForCausalLM"
    lora: bool = True
    drawn: bool = False
    """The library draws the order of the rows, so that a step's tokens are those of the mean row."""


def _pair(prompt: str, right: str, wrong: str) -> Row:
    return {"prompt": prompt, "chosen": right, "rejected": wrong}


def _pair_tokens(tokens: Mapping[str, int]) -> int:
    return 2 * tokens["prompt"] + tokens["chosen"] + tokens["rejected"] + 2


IN_ORDER = {"train_sampling_strategy": "sequential"}
JOBS: Mapping[str, Job] = {
    "dpo": Job(_pair, _pair_tokens, 4, 4, trainer=IN_ORDER),
    "reward": Job(_pair, _pair_tokens, 10, 10, trainer=IN_ORDER, model="LlamaForSequenceClassification"),
    "grpo": Job(
        lambda prompt, right, wrong: {"prompt": prompt},
        lambda tokens: COMPLETIONS * (tokens["prompt"] + COMPLETION),
        rows=2, batch=2 * COMPLETIONS, trainer={"shuffle_dataset": False},
        recipe={
            "reward": [{"function": "regular_expression", "arguments": {"pattern": PATTERN}}],
            "generation": {"num_generations": COMPLETIONS, "max_completion_length": COMPLETION},
        },
    ),
    "embedding": Job(
        lambda prompt, right, wrong: {"anchor": prompt, "positive": right},
        lambda tokens: sum(tokens.values()),
        rows=8, batch=8, recipe={"embedding": {"loss": "MultipleNegativesRankingLoss"}},
        lora=False, drawn=True,
    ),
}  # fmt: skip


def make_task_work(task: str, shape: str, cache: Path, folder: Path, *, gpu: bool, steps: int) -> Work:
    """The job of one task, its rows written into `folder`, the longest of a step first."""
    from transformers import AutoTokenizer

    job = JOBS[task]
    model = model_folder(shape, cache, job.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = [
        (cut(row["prompt"], tokenizer, PROMPT)[0], cut(row["canonical_solution"], tokenizer, ANSWER)[0])
        for row in human_eval_rows()
    ]
    rows = [job.row(*pair, found[number - 1][1]) for number, pair in enumerate(found)]
    lengths = [job.tokens({name: len(tokenizer(row[name])["input_ids"]) for name in row}) for row in rows]
    longest = sorted(range(len(rows)), key=lambda number: -lengths[number])[: job.rows]
    order = longest + [number for number in range(len(rows)) if number not in longest]
    file = folder / f"{task}.jsonl"
    file.write_text("".join(f"{json.dumps(rows[number])}\n" for number in order), encoding="utf-8")
    mean = round(statistics.mean(lengths))
    return Work(
        shape, model, file, tuple(mean if job.drawn else lengths[number] for number in order),
        PROMPT + ANSWER + 8, job.rows, job.batch, steps, gpu, task,
    )  # fmt: skip


def arguments(work: Work) -> dict[str, Any]:
    """Values of `trainer:` and of the library's own arguments."""
    return {
        "max_steps": work.steps, "per_device_train_batch_size": work.micro_batch,
        "gradient_accumulation_steps": 1, "learning_rate": RATE, "lr_scheduler_type": "constant",
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "seed": 42, **JOBS[work.task].trainer,
    }  # fmt: skip


def plain(work: Work, folder: Path, python: Path) -> list[str]:
    job, file = JOBS[work.task], folder / "job.json"
    told = {
        "model": str(work.model), "rows": str(work.rows), "output": str(folder / "run"),
        "max_length": work.max_length, "lora": LORA if job.lora else None, "precision": work.precision,
        "generation": job.recipe.get("generation", {}), "pattern": PATTERN, "arguments": arguments(work),
    }  # fmt: skip
    file.write_text(json.dumps(told, indent=1), encoding="utf-8")
    return [str(python), str(HERE / "timed.py"), str(HERE / "library.py"), work.task, str(file)]


def ours(work: Work, folder: Path, python: Path) -> list[str]:
    job, trainer = JOBS[work.task], arguments(work)
    seed = trainer.pop("seed")
    recipe = {
        "task": work.task, "model": {"name_or_path": str(work.model)},
        "data": {"train": [{"path": str(work.rows)}], "max_length": work.max_length},
        "precision": work.precision, "seed": seed, "trainer": trainer, "python": str(HERE / "clock.py"),
        **job.recipe,
    }  # fmt: skip
    if job.lora:
        recipe["adapter"] = {"type": "lora", **LORA}
    return run_recipe(recipe, folder, python)


TASK_SIDES = (Side("plain", "the library's own script", plain), Side("ours", "a recipe", ours))
