"""Seconds of a step of task grpo beside trl's own script, on the same work, on a CPU.

    python benchmarks/throughput_grpo.py --rounds 3

Both sides train one model of 6 layers on the same prompts with the same completions: a case of
tests/contract/library_cases.py with a larger model. In turn, each round in processes of their own; compared
are trl's `step_time` of the steps after the first --drop (which our side also measures memory in), median
over all rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "contract")]
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8}


def case() -> Any:
    import transformers
    from library_cases import CASES

    def build() -> Any:
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=1024, num_key_value_heads=8, max_position_embeddings=128, pad_token_id=0,
                bos_token_id=1, eos_token_id=2, **SIZES,
            )
        )  # fmt: skip

    return dataclasses.replace(CASES["grpo"], build=build)


def ours(ground: Path, steps: int) -> list[float]:
    from library_cases import make_run

    from launcher.train.job import read_job
    from launcher.train.worker import train

    env = make_run(case(), ground, ground / "ours", max_steps=steps, save_strategy="no")
    os.environ.update(env)
    train(read_job(ground / "ours"))
    lines = (ground / "ours" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["step_time"] for row in map(json.loads, lines) if "step_time" in row]


def plain(ground: Path, steps: int) -> list[float]:
    from library_cases import SEED, TRAINER

    one = case()
    args = {
        **TRAINER, "output_dir": str(ground / "plain"), "seed": SEED, "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no", "dataloader_pin_memory": False, **one.plain_args, "max_steps": steps,
    }  # fmt: skip
    trainer = one.plain(ground / "model", one.rows, args)
    trainer.train()
    return [row["step_time"] for row in trainer.state.log_history if "step_time" in row]


def measured(side: Any, ground: Path, steps: int, into: Path) -> None:
    into.write_text(json.dumps(side(ground, steps)), encoding="utf-8")
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--drop", type=int, default=6)
    options = parser.parse_args()
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        from library_cases import make_ground

        for number in range(options.rounds):
            ground = Path(folder) / str(number)
            ground.mkdir()
            make_ground(case(), ground)
            for name, side in (("plain", plain), ("ours", ours)):
                into = ground / f"{name}.json"
                process = multiprocessing.get_context("spawn").Process(
                    target=measured, args=(side, ground, options.steps, into)
                )
                process.start()
                process.join()
                times[name] += json.loads(into.read_text(encoding="utf-8"))[options.drop :]
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, seconds in medians.items():
        print(f"{name:<6} {seconds:.4f} s a step (median of {len(times[name])})")
    print(f"ours is {medians['plain'] / medians['ours']:.3f} times as fast")
    return 0


if __name__ == "__main__":
    sys.exit(main())
