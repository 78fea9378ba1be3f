"""Does it fit? What the planner says, beside answers that were measured, computed or published.

    python benchmarks/memory_verdicts.py            every case
    python benchmarks/memory_verdicts.py --check    exit 1 where a measured or computed case has a false fit

measured: a peak on a GPU, or a published one (of the rows that train as transformers' Trainer does), asked
for the largest device of the catalogue that is too small for it and the smallest that is large enough.
published: what a source says fits, or ran out of memory. computed: states alone exceed the device.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from comparison import exit_status
from gpu_memory import predict, recorded
from memory_accuracy import planned_runs
from memory_published import plan_of_row, planned, published_verdicts
from runner import parser_of

from launcher.errors import RecipeError
from launcher.machine.hardware import DEVICES
from launcher.memory.estimate import MemoryEstimate, estimate_memory
from launcher.models.model_config import shipped_model_config
from launcher.plan.plan import Plan

SIZES = sorted({device.bytes for device in DEVICES.values()})
RESERVED = 1.25
"""Of what was allocated, the most that an allocator is taken to reserve for it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One question; the answer and the planner's."""

    name: str
    group: str
    """measured | computed | published | elsewhere"""
    device_bytes: int
    fits: bool
    planned: MemoryEstimate

    @property
    def outcome(self) -> str:
        """right | false fit | false refusal"""
        if self.planned.fits == self.fits:
            return "right"
        return "false fit" if self.planned.fits else "false refusal"


def asked(needs: int, at_most: int) -> Iterator[tuple[int, bool]]:
    """Sizes of devices around a peak, and whether it fits: `needs` bytes at least, surely `at_most`."""
    smaller, larger = [s for s in SIZES if s < needs], [s for s in SIZES if s >= at_most]
    if smaller:
        yield max(smaller), False
    yield min(larger), True


def measured_here() -> Iterator[Case]:
    """The rows of the sweeps and of whole runs on a GPU."""
    for row, entry, device in recorded():
        context = entry["context"]
        for size, fits in asked(entry["allocated"] + context, entry["reserved"] + context):
            there = replace(device, hardware=replace(device.hardware, device_bytes=size))
            yield Case(row.name, "measured", size, fits, predict(row, there))
    for entry, plan in planned_runs():
        measured = entry["measured"]
        context = measured["components"]["context"]["measured"]
        for size, fits in asked(measured["allocated"] + context, measured["measured"]):
            yield Case(entry["name"], "measured", size, fits, on(plan, size))


def on(plan: Plan, size: int) -> MemoryEstimate:
    """The estimate of a plan on a device with this memory."""
    return estimate_memory(plan.spec, plan.job, replace(plan.hardware, device_bytes=size))


def measured_elsewhere() -> Iterator[Case]:
    for one, plan in planned():
        if one.alike and isinstance(plan, Plan):
            outside = 0 if one.counts == "device" else plan.memory.components.outside
            needs = one.measured_bytes + outside
            largest = int(RESERVED * one.measured_bytes) + outside if one.counts == "allocated" else needs
            for size, fits in asked(needs, largest):
                yield Case(one.name, "published", size, fits, on(plan, size))


def told() -> Iterator[Case]:
    """Statements of sources; those about a model without a closed form are named."""
    for row in published_verdicts():
        group = "elsewhere" if set(row["apart"]) - {"fsdp1"} else "published"
        try:
            plan = plan_of_row(row)
        except RecipeError as error:
            print(f"{row['name']}: not asked: {error.problems[0].message.partition(' (')[0]}")
            continue
        assert plan.memory.device_bytes is not None
        yield Case(row["name"], group, plan.memory.device_bytes, row["fits"], plan.memory)


LLAMA_405B = {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
}  # fmt: skip
_ADAPTER = {"adapter": {"type": "lora", "r": 8}, "model": {"quantization": "nf4"}}
COMPUTED: tuple[tuple[str, str, dict[str, Any], str, dict[str, Any]], ...] = (
    ("8B, 16 bytes a parameter", "meta-llama/Llama-3.1-8B", {}, "1xA100-80GB", {}),
    ("8B, 16 bytes a parameter over 2", "meta-llama/Llama-3.1-8B", {}, "2xA6000-48GB",
     {"sharding": {"zero_stage": 3}}),
    ("70B, 16 bytes a parameter over 8", "meta-llama/Llama-3.1-70B", {}, "8xH100-80GB",
     {"sharding": {"zero_stage": 3}}),
    ("70B, 16 bytes a parameter, ZeRO-2 over 8", "meta-llama/Llama-3.1-70B", {}, "8xH200-141GB",
     {"sharding": {"zero_stage": 2}}),
    ("70B, 4 bits on each rank under ZeRO-3", "meta-llama/Llama-3.1-70B", {}, "8xRTX3090-24GB",
     {**_ADAPTER, "sharding": {"zero_stage": 3}}),
    ("405B, 4 bits on each rank under ZeRO-3", "meta-llama/Llama-3.1-70B", LLAMA_405B, "8xH100-80GB",
     {**_ADAPTER, "sharding": {"zero_stage": 3}}),
    ("30B MoE in 16 bits", "Qwen/Qwen3-30B-A3B", {}, "1xA6000-48GB", {"adapter": _ADAPTER["adapter"]}),
    ("13B in 16 bits", "meta-llama/Llama-2-13b-hf", {}, "1xRTX4090-24GB", {"adapter": _ADAPTER["adapter"]}),
)  # fmt: skip
"""Name, shipped model, changes to it, hardware, recipe: what states alone exceed."""


def computed() -> Iterator[Case]:
    for name, model, config, hardware, recipe in COMPUTED:
        base = {"precision": "bf16", "data": {"max_length": 512}}
        trainer = {"per_device_train_batch_size": 1, "activation_checkpointing": True}
        row = {"model": model, "config": {**(shipped_model_config(model) or {}), **config}}
        row |= {"hardware": hardware, "recipe": {**base, "trainer": trainer, **recipe}}
        found = plan_of_row(row).memory
        assert found.device_bytes is not None
        yield Case(name, "computed", found.device_bytes, False, found)


def cases() -> Iterator[Case]:
    yield from measured_here()
    yield from computed()
    yield from measured_elsewhere()
    yield from told()


def main() -> int:
    options = parser_of(__doc__, "check").parse_args()
    found = list(cases())
    for one in found:
        answer, needed = "fits" if one.fits else "does not", one.planned.needed / 2**30
        mark, size = "" if one.outcome == "right" else one.outcome, f"{one.device_bytes / 2**30:>7.1f} GiB"
        print(f"{one.name:<64}{one.group:<12}{size}  {answer:<9}{needed:>7.1f}  {mark}")
    print()
    for group in dict.fromkeys(one.group for one in found):
        counts = Counter(one.outcome for one in found if one.group == group)
        shares = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        print(f"{group}: {counts.total()} cases, {shares}")
    wrong = [one for one in found if one.outcome == "false fit" and one.group in ("measured", "computed")]
    return exit_status([f"{one.name}: {one.outcome}" for one in wrong], options.check)


if __name__ == "__main__":
    sys.exit(main())
