"""Predicted peaks beside measured and published ones.

    python benchmarks/memory_accuracy.py                  the closed form (T0) on every recorded row
    python benchmarks/memory_accuracy.py --half tuning    only the rows that formulas may be tuned on
    python benchmarks/memory_accuracy.py --trace          also the trace (T1), a process for each row
    python benchmarks/memory_accuracy.py --check          exit 1 when a target is missed

Measured figures come from records/memory_cpu.json, records/gpu_*.json and memory_published.py; predictions
are computed here.
Errors are predicted / measured - 1; summaries are of their sizes.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from comparison import TIERS, Compared, Target, coverage, exit_status, summarise
from gpu_memory import predict, recorded
from grids import HALVES, memory_row
from memory_images import ask_forked, sees_images, with_pixels
from memory_measure import RECORD
from memory_published import planned
from memory_rows import host_share, job_of, make, plan_of
from records import RECORDS, read_record
from runner import parser_of

from launcher.errors import RecipeError
from launcher.inputs import model_trace
from launcher.machine.hardware import MIB, parse_hardware
from launcher.memory.estimate import MemoryEstimate, estimate_memory
from launcher.models.memory_trace import Trace, Untraceable
from launcher.models.model import read_model_spec
from launcher.models.model_config import shipped_model_config
from launcher.plan.plan import Plan

PUBLISHED = tuple(f"{group}-{half}" for group in ("published", "elsewhere") for half in HALVES)
"""Groups of published rows: those trained as transformers' Trainer does, and those that leave something open
or are of other loops and other code of the model (`apart` in the record)."""
IMAGES = "images"
"""Group of the rows of models of images and text, of either half, with the images that their rows hold."""
UNREAD = "images-unread"
"""The same before their rows are read: all tokens count as tokens of images."""
_MEASURED = {"t0": Target(0.05, 0.12), "t1": Target(0.03, 0.08)}
_IMAGES = {"t1": Target(0.05, 0.15)}  # no closed form
_PUBLISHED = {"t0": Target(0.05, 0.15, is_p95=True)}
TARGETS: Mapping[str, Mapping[str, Target]] = {
    **dict.fromkeys((*HALVES, "gpu", "gpu-runs"), _MEASURED),
    **dict.fromkeys((IMAGES, UNREAD), _IMAGES),
    **dict.fromkeys((half for half in PUBLISHED if half.startswith("published")), _PUBLISHED),
}
"""Of each group by tier. The largest error of published rows is that of a source: a percentile counts."""


def trace_of(name: str, plan: Plan) -> Trace | None:
    """The trace of the plan's job; None where it cannot be traced, with a line that says why."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import peft  # noqa: F401  # once for all that are forked from here

    import launcher.train.model.adapters
    import launcher.train.trace.run  # noqa: F401

    model_trace.ask_child = ask_forked
    try:
        step, versions = model_trace.trace_plan(plan)
    except Untraceable as error:
        print(f"{name}: no trace: {error}", file=sys.stderr)
        return None
    return Trace().with_step(step, versions)


def compare_measured(half: str, trace: bool, record: Path) -> Iterator[Compared]:
    """The recorded rows of a half (or `all`), predicted now."""
    for entry in read_record(record)["rows"]:
        if "measured_bytes" not in entry or half not in ("all", entry["half"]):
            continue
        one = memory_row(entry["name"])
        if sees_images(one) and not trace:
            continue  # no closed form
        plan = plan_of(one)
        plan = replace(plan, job=job_of(one, plan))
        extra = host_share(plan.spec, plan.job)
        found = trace_of(one.name, plan) if trace else None
        if sees_images(one):
            yield _compared(f"{one.name}, unread", UNREAD, entry["measured_bytes"], plan, extra, found)
            plan = replace(plan, job=with_pixels(one, plan))
        group = IMAGES if sees_images(one) else one.half
        yield _compared(one.name, group, entry["measured_bytes"], plan, extra, found)


def compare_published(half: str, trace: bool) -> Iterator[Compared]:
    """The published rows of a half (or `all`), each with an estimate of what its figure counts."""
    for one, plan in planned(half):
        if isinstance(plan, RecipeError):
            print(f"{one.name}: not compared: {plan.problems[0].message}")
            continue
        apart = one.apart(estimate_memory(plan.spec, plan.job, plan.hardware))
        found = trace_of(one.name, plan) if trace else None
        group = f"{'published' if one.alike else 'elsewhere'}-{one.half}"
        loading = one.counts != "allocated"  # what loading has reserved stays reserved
        yield _compared(one.name, group, one.measured_bytes, plan, apart, found, loading=loading)


def compare_gpu() -> Iterator[Compared]:
    """The rows of each committed sweep on a GPU: what torch allocated, predicted now (T0)."""
    for row, entry, device in recorded():
        yield _of_tensors(row.name, entry["allocated"], predict(row, device))


def planned_runs() -> Iterator[tuple[dict[str, Any], Plan]]:
    """The measured entries of each committed record of whole runs on a GPU, planned now."""
    for path in sorted(RECORDS.glob("gpu_runs_*.json")):
        record = read_record(path)
        hardware = parse_hardware(f"1x{record['hardware']}")
        versions = {name.replace("_", "-"): version for name, version in record["versions"].items()}
        for entry in record["rows"]:
            if "measured" in entry:
                recipe = entry["recipe"]
                name, task = recipe["model"]["name_or_path"], recipe.get("task", "causal-lm")
                config = shipped_model_config(name)
                assert config is not None, name
                spec = read_model_spec(name, config, "shipped facts", task)
                yield entry, make(recipe, spec, hardware, versions)


def compare_runs(*, reserved: bool = True) -> Iterator[Compared]:
    """Whole runs on a GPU: what torch reserved, or what it allocated of that (T0)."""
    for entry, plan in planned_runs():
        measured = entry["measured"]
        context = measured["components"]["context"]["measured"]
        found = measured["measured"] - context if reserved else measured["allocated"]
        yield _of_tensors(entry["name"], found, plan.memory, "gpu-runs")


def _of_tensors(name: str, measured: int, estimate: MemoryEstimate, half: str = "gpu") -> Compared:
    """Without the context and NCCL's buffers, which the allocator does not know."""
    outside = estimate.components.outside
    ends = estimate.total - outside, estimate.low - outside, estimate.high - outside
    return Compared(name, half, measured, *ends, asdict(replace(estimate.components, context=0, nccl=0)))


def _compared(
    name: str, half: str, measured: int, plan: Plan, extra: int, trace: Trace | None, *, loading: bool = False
) -> Compared:
    """`extra`: bytes that the measurement sees beside the device's, or does not see of them (negative): of a
    CPU the host's, of a GPU its context with NCCL's buffers. `loading`: it sees the peak of loading, too."""
    estimate = estimate_memory(plan.spec, plan.job, plan.hardware)
    traced = estimate_memory(plan.spec, plan.job, plan.hardware, trace=trace)
    least = estimate.load_peak if loading else 0
    parts = asdict(estimate.components)
    if estimate.components.context:
        parts |= {"context": estimate.components.outside + extra, "nccl": 0}
    elif extra:
        parts["host"] = extra
    parts["weights"] += max(0, least - estimate.total)  # which loading holds besides
    t0, low, high, t1 = (
        max(size, least) + extra for size in (estimate.total, estimate.low, estimate.high, traced.total)
    )
    return Compared(name, half, measured, t0, low, high, parts, t1 if traced.method == "trace" else None)


HEAD = ("row", "half", "measured", "T0", "error", "T1", "error", "  MiB")
WIDTHS = (-64, -20, 12, 12, 8, 12, 8, 0)


def line_of(cells: Sequence[str]) -> str:
    """Cells in columns, to the left where the width is negative."""
    pairs = zip(cells, WIDTHS, strict=False)
    return "".join(cell.ljust(-w) if w < 0 else cell.rjust(w) for cell, w in pairs).rstrip()


def cells_of(one: Compared) -> tuple[str, ...]:
    t0, t1 = (percent(one.error(tier)) for tier in TIERS)
    return (one.name, one.half, mib(one.measured), mib(one.t0), t0, mib(one.t1), t1)


def percent(error: float | None) -> str:
    """A signed error; no sign on what rounds to nothing."""
    if error is None:
        return ""
    return "0.0%" if abs(error) < 0.0005 else f"{error:+.1%}"


def mib(size: float | None) -> str:
    return "" if size is None else f"{size / MIB:,.1f}"


def groups(rows: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Rows by half, in the order of HALVES and then published."""
    return {
        half: found
        for half in (*HALVES, IMAGES, UNREAD, "gpu", "gpu-runs", *PUBLISHED)
        if (found := [r for r in rows if r.half == half])
    }


def summaries(rows: Sequence[Compared]) -> list[str]:
    """A sentence for each group of rows and tier, and one for its range."""
    found = []
    for half, members in groups(rows).items():
        for tier, name in TIERS.items():
            if tier == "t0" and half in (IMAGES, UNREAD):
                continue  # they have no closed form
            total = summarise(members, tier)
            if total is not None:
                found.append(
                    f"{half}, {name}: {total.count} rows, median {total.median:.1%}, p95 {total.p95:.1%}, "
                    f"max {total.maximum:.1%} ({total.worst}), {total.low_share:.0%} low"
                )
                uncovered = [one.name for one in members if one.error(tier) is None]
                if uncovered:
                    found.append(f"{half}, {name}: not covered: {', '.join(uncovered)}")
        found.append(f"{half}: low to high holds {coverage(members):.0%} of {len(members)} rows")
    return found


def missed_targets(rows: Sequence[Compared]) -> list[str]:
    """A sentence for each target that a group of rows misses."""
    missed = []
    for half, members in groups(rows).items():
        for tier, target in TARGETS.get(half, {}).items():
            found = summarise(members, tier)
            if found is not None:
                missed += target.missed(f"{half}, {TIERS[tier]}", found)
    return missed


def main() -> int:
    parser = parser_of(__doc__, "check", "record", record=RECORD)
    parser.add_argument("--half", choices=[*HALVES, "all"], default="all")
    parser.add_argument("--trace", action="store_true", help="predict with the trace of the real model too")
    options = parser.parse_args()
    rows = []
    print(line_of(HEAD))
    measured = compare_measured(options.half, options.trace, options.record)
    published = compare_published(options.half, options.trace)
    for one in itertools.chain(measured, compare_gpu(), compare_runs(), published):
        rows.append(one)
        print(line_of(cells_of(one)), flush=True)
    print("", *summaries(rows), sep="\n")
    return exit_status(missed_targets(rows), options.check)


if __name__ == "__main__":
    sys.exit(main())
