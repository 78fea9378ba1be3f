"""How fast the command line answers, as multiples of importing three libraries: yaml, pydantic and rich.

    python benchmarks/cli_latency.py            the table
    python benchmarks/cli_latency.py --check    exit 1 when a target is missed
    python benchmarks/cli_latency.py --json R   write the table

The runs are interleaved (one of each command a round), so that a slow spell of the machine hits all
commands alike, and medians are compared: of the wall time, and of the processor's (user and system), which
a machine that does other things beside disturbs less. Targets are of the wall time. The launchers that
effilaunch wraps and its peers stand beside it. All run from compiled modules, as an installed command does.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from comparison import exit_status
from records import keep
from runner import parser_of

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "starcoder_lora.yaml"
BIN = Path(sys.executable).parent
CACHE = Path("~/.cache/effilaunch-benchmarks").expanduser()
HEAD = ("command", "median ms", "multiple", "middle half", "of CPU time", "target")


@dataclass(frozen=True, slots=True)
class Case:
    """One command; `limit` is its target in multiples of the baseline, None for a bystander."""

    name: str
    argv: tuple[str, ...]
    limit: float | None = None


BASELINE = Case("import yaml, pydantic, rich", (sys.executable, "-c", "import yaml, pydantic, rich"))
OURS = (
    Case("effilaunch --help", (str(BIN / "effilaunch"), "--help"), 0.7),
    Case("effilaunch validate", (str(BIN / "effilaunch"), "validate", str(RECIPE)), 4.8),
    Case("effilaunch plan", (str(BIN / "effilaunch"), "plan", str(RECIPE)), 4.8),
)
OTHERS = (
    Case("accelerate launch --help", (str(BIN / "accelerate"), "launch", "--help")),
    Case("deepspeed --help", (str(BIN / "deepspeed"), "--help")),
    Case("trl sft --help", (str(BIN / "trl"), "sft", "--help")),
    Case("axolotl --help", ("axolotl", "--help")),
    Case("llamafactory-cli help", ("llamafactory-cli", "help")),
)


def seconds(case: Case) -> tuple[float, float]:
    """Wall and processor time of one run; a run that fails would be no measurement, so it raises."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # without .pyc files it is compiling that is measured
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(case.argv, check=True, capture_output=True, cwd=ROOT, env=environment)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(
    fast: tuple[Case, ...], slow: tuple[Case, ...], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """(wall, processor) seconds of each run by command. `slow` commands run in every fifth round only."""
    for case in (*fast, *slow):
        seconds(case)  # warms the page cache and writes the .pyc files
    times: dict[str, list[tuple[float, float]]] = {case.name: [] for case in (*fast, *slow)}
    for number in range(rounds):
        for case in (*fast, *(slow if number % 5 == 0 else ())):
            times[case.name].append(seconds(case))
    return times


def located(case: Case, cache: Path) -> Case | None:
    """The command beside this Python, else in an environment of its own; None where it is in neither."""
    program = Path(case.argv[0]).name
    places = [BIN / program, *sorted(cache.glob(f"venvs/*/bin/{program}"))]
    found = next((place for place in places if place.exists()), None)
    return None if found is None else replace(case, argv=(str(found), *case.argv[1:]))


def medians(runs: list[tuple[float, float]]) -> tuple[float, float]:
    """Of the wall and of the processor's times."""
    return statistics.median(wall for wall, _ in runs), statistics.median(used for _, used in runs)


def spread(runs: list[tuple[float, float]], base: list[tuple[float, float]]) -> str:
    """The multiples of the single rounds without the lowest and the highest quarter, of the wall time."""
    every = 1 if len(runs) == len(base) else 5
    multiples = sorted(run[0] / of_round[0] for run, of_round in zip(runs, base[::every], strict=True))
    quarter = len(multiples) // 4
    return f"{multiples[quarter]:.1f} to {multiples[-1 - quarter]:.1f}"


def line(cells: Sequence[str]) -> str:
    return "".join(f"{cell:<26}" if i == 0 else f"{cell:>14}" for i, cell in enumerate(cells))


def main() -> int:
    parser = parser_of(__doc__, "check", "json")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each command (default 15)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="of throughput.py: axolotl, LLaMA-Factory")
    parser.add_argument("--ours", action="store_true", help="leave the other launchers out")
    options = parser.parse_args()

    others = () if options.ours else tuple(case for one in OTHERS if (case := located(one, options.cache)))
    times = measure((BASELINE, *OURS), others, options.rounds)
    base, base_cpu = medians(times[BASELINE.name])
    missed, table = [], []
    print(line(HEAD))
    for case in (BASELINE, *OURS, *others):
        wall, used = medians(times[case.name])
        target = "" if case.limit is None else f"{case.limit:g}x"
        middle = spread(times[case.name], times[BASELINE.name])
        cells = (f"{wall * 1000:.1f}", f"{wall / base:.1f}x", middle, f"{used / base_cpu:.1f}x", target)
        table.append((case.name, *cells))
        print(line(table[-1]))
        if case.limit is not None and wall / base > case.limit:
            missed.append(f"{case.name}: {wall / base:.1f}x > {target}")
    if options.json is not None:
        keep(options.json, HEAD, table, ("pydantic", "trl", "accelerate", "deepspeed"))
    named = {case.name for case in others}
    for case in () if options.ours else OTHERS:
        if case.name not in named:
            print(f"{case.name:<26} absent: {Path(case.argv[0]).name} is not installed")
    return exit_status(missed, options.check)


if __name__ == "__main__":
    sys.exit(main())
