"""A sweep of training jobs on one GPU: memory measured beside predicted, and the time of a step.

    python benchmarks/gpu_memory.py                 the sweep, written to records/gpu_memory_<device>.json
    python benchmarks/gpu_memory.py --only NAME …   these rows; the others stay as recorded
    python benchmarks/gpu_memory.py --repeat        measure again and compare the bytes with the record
    python benchmarks/gpu_memory.py --jobs 4        several at a time, where their memory suffices; no seconds
    python benchmarks/gpu_memory.py --rehearse      the same code on a CPU, with narrow models; no record

Models have their published sizes and random weights: nothing is downloaded. Needs torch and transformers;
rows that need another package are marked skipped when it is absent. The sweep ends after --budget seconds:
rows that do not get their turn are marked skipped, too. Each row is a process of its own.

`allocated` and `reserved` are the allocator's peaks of the steps; `context` is what the driver counts for the
process beside the reserved bytes. The prediction is the closed form (T0).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import gpu
from comparison import Compared, summarise
from gpu import Device
from grids import GPU_MEMORY, Row, grid, settings_of
from records import RECORDS, read_record
from runner import entries_of, in_process, parser_of

from launcher.engines import engine_named
from launcher.machine.hardware import parse_hardware
from launcher.memory.estimate import MemoryEstimate, estimate_memory
from launcher.memory.job import MemoryJob
from launcher.models.lora import lora_params
from launcher.models.model import FAMILY_TASKS, ModelSpec, read_model_spec
from launcher.models.model_config import shipped_model_config
from launcher.planner.candidates import kept_by_sample
from launcher.planner.speed import predict_step

ABOUT = "A sweep on one GPU; made by benchmarks/gpu_memory.py. `reserved` is compared with T0."
DEFAULTS = grid("gpu_memory")["defaults"]
RESERVED = 1.2
"""What is kept free for a job that runs beside others, of its prediction."""


def config_of(row: Row, rehearse: bool) -> tuple[dict[str, Any], str]:
    """The model's configuration (narrow in a rehearsal), and its task."""
    config = shipped_model_config(row.model)
    assert config is not None, row.model
    task = FAMILY_TASKS[config["model_type"]][0]
    if rehearse:
        from launcher.planner.narrow import narrow_config

        config = narrow_config(config)
    return config, task


def job_of(row: Row, spec: ModelSpec) -> MemoryJob:
    """The row as the estimate is asked about it."""
    from gpu_training import RANK, weights_dtype

    targets: Any = row.adapter if row.adapter in (None, "all-linear") else str(row.adapter).split(",")
    return MemoryJob(
        micro_batch=row.micro_batch, sequence_length=spec.tokens_per_sample or row.length,
        accumulation=row.accumulation, eval_batch=row.micro_batch, document_mask=row.packing,
        precision=row.precision, dtype=str(weights_dtype(row)).removeprefix("torch."),
        quantization="none", double_quant=True, adapter=row.adapter is not None,
        trainable_params=lora_params(spec, RANK, targets) if row.adapter else spec.params,
        optim=row.optim, checkpointing=row.checkpointing, attention=row.attention,
        engine=engine_named("ddp"), data_parallel=1, devices_per_node=1, zero_stage=0,
        offload_optimizer="none", offload_param="none", overlap_comm=False, reduce_bucket_size=0,
        allgather_bucket_size=0,
    )  # fmt: skip


def predict(row: Row, device: Device) -> MemoryEstimate:
    spec = spec_of(row, device)
    return estimate_memory(spec, job_of(row, spec), device.hardware)


def predict_seconds(row: Row, device: Device) -> float:
    """Of an optimizer step, as the planner ranks by it."""
    spec = spec_of(row, device)
    job = job_of(row, spec)
    kept = kept_by_sample(job, lambda alone: estimate_memory(spec, alone, device.hardware))
    return predict_step(spec, job, device.hardware, kept=kept).likely


def spec_of(row: Row, device: Device) -> ModelSpec:
    from gpu_training import LABELS

    config, task = config_of(row, device.rehearsal)
    labels = LABELS if "classification" in task else None
    return read_model_spec(row.model, config, "shipped facts", task, labels)


def recorded() -> Iterator[tuple[Row, dict[str, Any], Device]]:
    """The measured rows of each committed sweep, with their entries and the device."""
    rows = {one.name: one for one in GPU_MEMORY}
    for path in sorted(RECORDS.glob("gpu_memory_*.json")):
        record = read_record(path)
        hardware = replace(parse_hardware(f"1x{record['hardware']}"), device_bytes=record["device_bytes"])
        for entry in record["rows"]:
            if "allocated" in entry:
                yield rows[entry["name"]], entry, Device(record["device"], hardware, rehearsal=False)


def measure(row: Row, device: Device) -> dict[str, Any]:
    """Bytes and seconds of one row; in a process of its own."""
    import torch
    import transformers
    from gpu_training import build_model, make_batch, make_step, timed_steps

    transformers.logging.set_verbosity_error()
    transformers.set_seed(0)
    if device.rehearsal:
        from profiled import count_all_threads, peak_bytes

        count_all_threads()
    where = torch.device(device.torch_name)
    config, task = config_of(row, device.rehearsal)
    started = time.perf_counter()
    model = build_model(row, config, task, where)
    step = make_step(row, model, make_batch(row, model.config, task, where))
    built = time.perf_counter() - started
    seconds: list[float] = []
    if device.rehearsal:
        found: dict[str, Any] = {"allocated": peak_bytes(lambda: seconds.extend(timed_steps(step, where)))}
    else:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seconds.extend(timed_steps(step, where))
        found = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "context": context_bytes(),
        }
    return {**found, "step_s": round(statistics.median(seconds[1:]), 4), "build_s": round(built, 2)}


def context_bytes() -> int | None:
    """What the driver counts for this process beside what torch reserved; None where it does not say."""
    import torch

    answer = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    used = dict(line.split(", ") for line in answer.stdout.splitlines() if line.count(", ") == 1)
    mine = used.get(str(os.getpid()), "")
    return int(mine) * 2**20 - torch.cuda.memory_reserved() if mine.isdigit() else None


def sweep(
    rows: Sequence[Row], device: Device, budget_s: float, jobs: int = 1, gigabytes: float | None = None
) -> list[dict[str, Any]]:
    """An entry for every row: measured, skipped or failed."""
    ends, space = time.monotonic() + budget_s, gpu.room_of(device, gigabytes)
    # Reads files under locks, beside which no fork is safe.
    estimates = {row.name: predict(row, device) for row in rows}

    def one(row: Row) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": row.name, "settings": settings_of(row, DEFAULTS)}
        predicted = estimates[row.name]
        with space.of(RESERVED * predicted.total):
            left = ends - time.monotonic()
            reason = gpu.obstacle(row.needs, device, left) or gpu.too_large(predicted.total, device)
            if reason is not None:
                return entry | {"skipped": reason}
            entry |= in_process(measure, left, row, device)
            entry |= {"t0": predicted.total, "t0_low": predicted.low, "t0_high": predicted.high}
            entry["t0_without_context"] = predicted.total - predicted.components.outside
        if jobs > 1:
            entry.pop("step_s", None)
        return entry

    return entries_of(rows, one, line_of, jobs)


def line_of(entry: dict[str, Any]) -> str:
    if "allocated" not in entry:
        return f"{entry['name']:<32} {entry.get('skipped') or entry.get('error')}"
    measured = entry.get("reserved") or entry["allocated"]
    predicted = entry["t0_without_context"]
    seconds = f"{entry['step_s']:>9.3f} s" if "step_s" in entry else ""
    return (
        f"{entry['name']:<32}{entry['allocated'] / 1e9:>9.3f}{measured / 1e9:>9.3f}{predicted / 1e9:>9.3f}"
        f"{predicted / measured - 1:>+8.1%}{seconds}"
    )


def summary_of(entries: Sequence[dict[str, Any]]) -> str:
    """One line: how many rows were measured, and how far the prediction was from them."""
    compared = [
        Compared(one["name"], "gpu", one.get("reserved") or one["allocated"],
                 one["t0_without_context"], one["t0_low"], one["t0_high"])
        for one in entries if "allocated" in one
    ]  # fmt: skip
    counted = f"{len(compared)} measured, {sum('skipped' in one for one in entries)} skipped, "
    counted += f"{sum('error' in one for one in entries)} failed"
    found = summarise(compared)
    if found is None:
        return counted
    return f"{counted}; error of T0: median {found.median:.1%}, max {found.maximum:.1%}"


def rehearsed(row: Row) -> Row:
    return replace(row, micro_batch=min(row.micro_batch, 2), length=min(row.length, 64))


def main() -> int:
    parser = parser_of(__doc__, "repeat", "budget", "jobs", "room", "rehearse", "out", rows=GPU_MEMORY)
    options = parser.parse_args()
    started = time.monotonic()
    import torch  # noqa: F401  # once for all rows, which are forked from here
    import transformers  # noqa: F401

    def measured(rows: Sequence[Row], device: Device) -> list[dict[str, Any]]:
        print(f"{device.name}: GB allocated, reserved, predicted; error; seconds per step")
        rows = [rehearsed(row) for row in rows] if device.rehearsal else rows
        left = options.budget - (time.monotonic() - started)
        return sweep(rows, device, left, options.jobs, options.room)

    found = gpu.run_command(options, "gpu_memory", GPU_MEMORY, measured, ABOUT)
    if found is None:
        return 4
    print(summary_of(found[1]))
    return int(any("error" in one for one in found[1]))


if __name__ == "__main__":
    sys.exit(main())
