"""How fast the command line answers, as multiples of starting Python itself.

    python benchmarks/cli_latency.py            the table
    python benchmarks/cli_latency.py --check    exit 1 when a target is missed

The runs are interleaved (one of each command a round), so that a slow spell of the machine hits all
commands alike, and medians are compared. The launchers that effilaunch wraps stand beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "starcoder_lora.yaml"
BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class Case:
    """One command; `limit` is its target in multiples of the baseline, None for a bystander."""

    name: str
    argv: tuple[str, ...]
    limit: float | None = None


BASELINE = Case("python -c pass", (sys.executable, "-c", "pass"))
OURS = (
    Case("effilaunch --help", (str(BIN / "effilaunch"), "--help"), 5),
    Case("effilaunch validate", (str(BIN / "effilaunch"), "validate", str(RECIPE)), 25),
    Case("effilaunch plan", (str(BIN / "effilaunch"), "plan", str(RECIPE)), 35),
)
OTHERS = (
    Case("accelerate launch --help", (str(BIN / "accelerate"), "launch", "--help")),
    Case("deepspeed --help", (str(BIN / "deepspeed"), "--help")),
)


def seconds(case: Case) -> float:
    """Wall time of one run; a run that fails would be no measurement, so it raises."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    subprocess.run(case.argv, check=True, capture_output=True, cwd=ROOT, env=environment)
    return time.perf_counter() - start


def measure(fast: tuple[Case, ...], slow: tuple[Case, ...], rounds: int) -> dict[str, float]:
    """Median seconds by command name. `slow` commands run in every fifth round only."""
    for case in (*fast, *slow):
        seconds(case)  # warms the page cache and writes the .pyc files
    times: dict[str, list[float]] = {case.name: [] for case in (*fast, *slow)}
    for number in range(rounds):
        for case in (*fast, *(slow if number % 5 == 0 else ())):
            times[case.name].append(seconds(case))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each command (default 15)")
    parser.add_argument("--ours", action="store_true", help="leave the other launchers out")
    options = parser.parse_args()

    others = () if options.ours else tuple(case for case in OTHERS if Path(case.argv[0]).exists())
    medians = measure((BASELINE, *OURS), others, options.rounds)
    base = medians[BASELINE.name]
    missed = []
    print(f"{'command':<26}{'median ms':>10}{'multiple':>10}{'target':>8}")
    for case in (BASELINE, *OURS, *others):
        multiple = medians[case.name] / base
        target = "" if case.limit is None else f"{case.limit:g}x"
        print(f"{case.name:<26}{medians[case.name] * 1000:>10.1f}{multiple:>9.1f}x{target:>8}")
        if case.limit is not None and multiple > case.limit:
            missed.append(case.name)
    if missed:
        print(f"over target: {', '.join(missed)}", file=sys.stderr)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
