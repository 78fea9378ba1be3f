"""Tokens/s of tokenise and pack: effilaunch beside trl's own preparation of the same file.

    python benchmarks/data_prep.py [--rows N …] [--repeats N] [--check] [--json RECORD]

Each measurement is a process of its own with empty caches, timed after its imports; the sides take
turns. Both read the JSONL file, tokenise it with SmolLM2's tokenizer and pack it to 2048 tokens by
best-fit decreasing. trl runs as it comes (one process) and with one process per core. Both are ready to train
then: trl has written the packed rows, this project which documents a row is joined of when it is read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from peers.work import human_eval, smollm2
from records import keep
from runner import parser_of

MAX_LENGTH = 2048
ALONE = 20_000
"""Above so many rows only this project's preparation is timed."""
HEAD = ("rows", "side", "seconds", "tokens/s", "tokens", "filled", "largest process, GB")
SIDES = ("effilaunch", "trl", "trl, a process per core")
AHEAD = 2.0
"""`--check`: how much faster than the faster of trl's two this must be."""


def mixed_texts(count: int) -> Iterator[str]:
    """Texts made of HumanEval's functions, their lengths spread as in many data sets: log-normal."""
    functions = human_eval()
    draw = random.Random(0)
    for number in range(count):
        wanted = int(draw.lognormvariate(6, 1) * 3)
        text = f"# {number}\n"
        while len(text) < wanted:
            text += draw.choice(functions)
        yield text[:wanted]


def ours(rows: Path, tokenizer: Path, folder: Path) -> tuple[float, int, int]:
    """(seconds, tokens, packs) of this project's preparation."""
    from launcher.execute.run_dir import write_run_dir
    from launcher.inputs.planning_facts import gather
    from launcher.planner.planner import make_plan
    from launcher.recipe.loading import load_recipe
    from launcher.render.bundle import render
    from launcher.train.data.batches import pack_lengths, sample_lengths
    from launcher.train.data.store import open_samples
    from launcher.train.job import read_job
    from launcher.train.prepare import prepare_run

    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model: {{config: HuggingFaceTB/SmolLM2-135M-Instruct, tokenizer: {tokenizer}}}\n"
        f"data: {{train: [{{path: {rows}}}], max_length: {MAX_LENGTH}, packing: true}}\n",
        encoding="utf-8",
    )
    run_dir = folder / "run"
    write_run_dir(render(make_plan(*gather(load_recipe(recipe), "cpu"))), run_dir, resume=False)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    started = time.perf_counter()
    record = prepare_run(read_job(run_dir))
    samples = open_samples(Path(record["folder"]) / "train.arrow")
    lengths = sample_lengths(samples)
    packs = pack_lengths(lengths, MAX_LENGTH)
    return time.perf_counter() - started, int(lengths.sum()), len(packs)


def theirs(rows: Path, tokenizer: Path, folder: Path, processes: int | None) -> tuple[float, int, int]:
    """(seconds, tokens, packs) of SFTTrainer's preparation."""
    import datasets
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    args = SFTConfig(
        output_dir=str(folder), max_length=MAX_LENGTH, packing=True, packing_strategy="bfd_split",
        dataset_num_proc=processes, bf16=False, use_cpu=True, report_to="none",
    )  # fmt: skip
    started = time.perf_counter()
    loaded = AutoTokenizer.from_pretrained(str(tokenizer))
    trainer = SimpleNamespace(
        _tokenizer=loaded, _is_vlm=False, chat_template=None, completion_only_loss=False,
        assistant_only_loss=False,
    )  # fmt: skip
    dataset = datasets.load_dataset("json", data_files=str(rows), split="train", cache_dir=str(folder))
    prepared = SFTTrainer._prepare_dataset(trainer, dataset, loaded, args, True, None, "train")
    seconds = time.perf_counter() - started
    return seconds, sum(map(len, prepared["input_ids"])), len(prepared)


def measure(side: str, rows: Path, tokenizer: Path) -> dict[str, float]:
    """One measurement in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"EFFILAUNCH_CACHE": f"{folder}/ours", "HF_HOME": f"{folder}/hf", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--side", side, str(rows), str(tokenizer), folder]
        done = subprocess.run(
            command, env={**os.environ, **caches}, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def one_side(side: str, rows: Path, tokenizer: Path, folder: Path) -> None:
    """Measure one side in this process, after a few rows that load all modules, and print it as JSON."""
    few = folder / "few.jsonl"
    with rows.open(encoding="utf-8") as stream:
        few.write_text("".join(itertools.islice(stream, 20)), encoding="utf-8")
    for number, file in enumerate((few, rows)):
        own = folder / str(number)
        own.mkdir()
        if side == SIDES[0]:
            seconds, tokens, packs = ours(file, tokenizer, own)
        else:
            processes = os.cpu_count() if side == SIDES[2] else None
            seconds, tokens, packs = theirs(file, tokenizer, own, processes)
    used = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({"seconds": seconds, "tokens": tokens, "packs": packs, "bytes": used * 1024}))


def main() -> int:
    parser = parser_of(__doc__, "check", "json")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", default=[20_000], help="sizes (20000)")
    parser.add_argument("--repeats", type=int, default=3, help="of each size (3)")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side, *paths = args.side
        one_side(side, *map(Path, paths))
        return 0
    table: list[list[str]] = []
    ratio = 0.0
    for count in args.rows:
        found = compared(count, args.repeats)
        table += (cells(count, side, runs) for side, runs in found.items())
        for row in table[-len(found) :]:
            print("  ".join(f"{cell:>14}" for cell in row), flush=True)
        times = {side: statistics.median(run["seconds"] for run in runs) for side, runs in found.items()}
        if len(found) > 1:
            ratio = min(times[side] for side in SIDES[1:]) / times[SIDES[0]]
            print(f"effilaunch is {ratio:.2f} times as fast as the faster of trl's two", flush=True)
    if args.json is not None:
        keep(args.json, HEAD, table, ("trl", "datasets", "tokenizers", "pyarrow"))
    return int(args.check and ratio < AHEAD)


def compared(count: int, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Side -> its runs over the same rows, in turn."""
    sides = SIDES if count <= ALONE else SIDES[:1]
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        with rows.open("w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps({'text': text})}\n" for text in mixed_texts(count))
        tokenizer = smollm2()
        for _ in range(repeats):
            for side in sides:
                found[side].append(measure(side, rows, tokenizer))
    return found


def cells(count: int, side: str, runs: Sequence[Mapping[str, float]]) -> list[str]:
    """A row of the table: medians."""
    seconds = statistics.median(run["seconds"] for run in runs)
    tokens, packs = int(runs[0]["tokens"]), int(runs[0]["packs"])
    held = statistics.median(run["bytes"] for run in runs)
    fill = tokens / (packs * MAX_LENGTH)
    speed = f"{tokens / seconds:,.0f}"
    return [f"{count:,}", side, f"{seconds:.2f}", speed, f"{tokens:,}", f"{fill:.2%}", f"{held / 1e9:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
