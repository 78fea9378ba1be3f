"""What a configuration was weighed against, in words with numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.engines import ENGINES
from launcher.planner.candidates import Candidate
from launcher.planner.search import Search

MICRO = "trainer.per_device_train_batch_size"
ACCUMULATION = "trainer.gradient_accumulation_steps"
NO_DIFFERENCE = 0.005
"""Share of the time below which two predictions are the same."""
SAME_MEMORY = 2**30 // 20
"""Bytes below which two estimates are the same: what a tenth of a GiB rounds to nothing."""
_LABELS = {
    "sharding.offload_optimizer": "optimizer on the CPU",
    "sharding.offload_param": "parameters on the CPU",
}


def reasons(found: Search) -> dict[str, str]:
    """Dotted setting -> why the first of the search has its value, against the best with another one."""
    chosen = found.first
    if not chosen.fits:
        return dict.fromkeys((*chosen.choices, MICRO), "nothing fits: this misses by least")
    told = {}
    for dotted, value in chosen.choices.items():
        words = [_against(chosen, best, dotted) for best in _others(found, dotted, value)]
        told[dotted] = "; ".join(words) or "nothing else can run here"
    told[MICRO] = _larger(found, chosen)
    return told


def _others(found: Search, dotted: str, value: object) -> Iterator[Candidate]:
    """The best candidate with each other value of a setting."""
    seen = {value, None}
    for candidate in (*found.ranked, *found.misses):
        other = candidate.choices[dotted]
        if other not in seen:
            seen.add(other)
            yield candidate


def _against(chosen: Candidate, other: Candidate, dotted: str) -> str:
    value = other.choices[dotted]
    if dotted == "sharding.zero_stage":
        label = f"stage {value}"
    elif dotted == "trainer.activation_checkpointing":
        label = "with it" if value else "without it"
    else:
        label = str(value)
    if not other.fits:
        return f"{label} {_needs(other)}"
    if chosen.safe and not other.safe:
        return f"{label} {_may_need(other)}"
    slower = other.seconds_per_sample / chosen.seconds_per_sample - 1
    if slower < NO_DIFFERENCE:
        return f"{label} is no faster"
    if not chosen.time.figures_known:
        return f"{label} is slower"
    return f"{label} about {slower:.0%} slower".replace("%", " %")


def _needs(candidate: Candidate) -> str:
    memory, host = candidate.memory, candidate.host_bytes
    if memory.fits is False or host is None:
        return f"needs {_gib(memory.needed + memory.margin)}"
    return f"needs {_gib(memory.host_bytes)} of the host's {_gib(host)}"


def _may_need(candidate: Candidate) -> str:
    return f"may need {_gib(candidate.memory.high)}"


def _larger(found: Search, chosen: Candidate) -> str:
    bench = found.of(chosen)
    place = bench.batches.index(chosen.batch)
    if place == 0:
        return "the largest at this global batch"
    larger = bench.candidate(chosen.strategy, bench.batches[place - 1])
    if chosen.safe and larger.fits and not larger.safe:
        return f"largest that surely fits at this global batch: {larger.batch.micro} {_may_need(larger)}"
    if larger.fits:
        return f"{larger.batch.micro} would be slower: attention between all samples of a flattened batch"
    return f"largest that fits at this global batch: {larger.batch.micro} {_needs(larger)}"


def trade(found: Search, candidate: Candidate) -> str:
    """What each thing that a configuration does saves and costs, against the same without it."""
    told = [_traded(label, candidate, other) for label, other in _without(found, candidate)]
    return "; ".join(told) or "nothing is traded"


def _without(found: Search, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    """(What it does, the same configuration without it), as far as the recipe allows the other."""
    bench, (stage, again) = found.of(candidate), candidate.strategy
    if again and (stage, False) in bench.strategies():
        yield "checkpointing", bench.candidate((stage, False), candidate.batch)
    if stage > min(bench.stages()):
        yield f"ZeRO-{stage}", bench.candidate((min(bench.stages()), again), candidate.batch)
    for dotted, value in candidate.variant.values.items():
        plain = ENGINES[0].name if dotted == "sharding.engine" else "none"
        twin = found.benches.get(candidate.variant.changed(dotted, plain))
        if value == plain or twin is None:
            continue
        same = min(twin.stages(), key=lambda other: abs(other - stage))
        label = _LABELS.get(dotted, value)
        yield label, twin.candidate((same, again), candidate.batch)


def _traded(label: str, candidate: Candidate, other: Candidate) -> str:
    saved = other.memory.needed - candidate.memory.needed
    memory = f"saves {_gib(saved)}" if saved >= 0 else f"takes {_gib(-saved)} more"
    if abs(saved) < SAME_MEMORY:
        memory = "takes as much"
    host = candidate.memory.host_bytes - other.memory.host_bytes
    if label in _LABELS.values() and host > 0:
        memory += f", takes {_gib(host)} of the host"
    slower = candidate.seconds_per_sample / other.seconds_per_sample - 1
    if abs(slower) < NO_DIFFERENCE:
        return f"{label}: {memory}, costs no time"
    verb = "costs" if slower > 0 else "saves"
    if not candidate.time.figures_known:
        return f"{label}: {memory}, {verb} time"
    return f"{label}: {memory}, {verb} about {abs(slower):.0%} time".replace("%", " %")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def search_rows(found: Search, steps: int | None) -> list[dict[str, object]]:
    """The `search` array of `plan --search --json`: what fits by rank, then what does not, nearest first.

    `steps`: length of the run, where it is known.
    """
    fastest = found.first.seconds_per_sample
    rows: list[dict[str, object]] = []
    for rank, candidate in enumerate((*found.ranked, *found.misses), start=1):
        batch = candidate.batch
        rows.append(
            {
                "rank": rank if candidate.fits else None,
                "settings": {**candidate.choices, MICRO: batch.micro, ACCUMULATION: batch.accumulation},
                "batch": batch.to_json(),
                "memory": candidate.memory.to_json(),
                "time": candidate.time.to_json(steps),
                "relative_speed": round(fastest / candidate.seconds_per_sample, 3),
                "fits": candidate.fits,
                "fits_surely": candidate.safe,
                "trade": trade(found, candidate),
            }
        )
    return rows
