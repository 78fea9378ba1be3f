"""A sweep of training jobs on one GPU: memory measured beside predicted, and the time of a step.

    python benchmarks/gpu_memory.py                 the sweep, written to records/gpu_memory_<device>.json
    python benchmarks/gpu_memory.py --only NAME …   these rows
    python benchmarks/gpu_memory.py --jobs 4        several at a time, where their memory suffices; no seconds
    python benchmarks/gpu_memory.py --rehearse      the same code on a CPU, with narrow models; no record

Models have their published sizes and random weights: nothing is downloaded. Needs torch and transformers;
rows that need another package are marked skipped when it is absent. The sweep ends after --budget seconds:
rows that do not get their turn are marked skipped, too. Each row is a process of its own.

`allocated` and `reserved` are the allocator's peaks of the steps; `context` is what the driver counts for the
process beside the reserved bytes. The prediction is the closed form (T0).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import math
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grids import GPU_MEMORY, Row, grid, settings_of
from installed import versions

from launcher.engines import engine_named
from launcher.facts.hardware import Hardware, parse_hardware
from launcher.facts.model import FAMILY_TASKS, ModelSpec, read_model_spec
from launcher.facts.probe import shipped_model_config
from launcher.memory.estimate import MemoryEstimate, estimate_memory
from launcher.memory.job import MemoryJob
from launcher.planner.candidates import kept_by_sample
from launcher.planner.speed import predict_step

RECORDS = Path(__file__).parent / "records"
BUDGET_S = 500.0
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "deepspeed", "flash_attn", "liger_kernel")
ABOUT = "A sweep on one GPU; made by benchmarks/gpu_memory.py. `reserved` is compared with T0."
DEFAULTS = grid("gpu_memory")["defaults"]
REHEARSED = {"micro_batch": 2, "length": 64}


@dataclass(frozen=True, slots=True)
class Device:
    """Where the sweep runs."""

    name: str
    hardware: Hardware
    rehearsal: bool

    @property
    def torch_name(self) -> str:
        return "cpu" if self.rehearsal else "cuda"


def find_device(rehearse: bool) -> Device | None:
    """The first GPU, asked in a process of its own: a CUDA context does not outlive a fork."""
    if rehearse:
        return Device("cpu", parse_hardware("cpu"), True)
    found = in_process(_describe_gpu, 120.0)
    if "name" not in found:
        return None
    hardware = Hardware(1, 1, found["name"], found["bytes"], tuple(found["capability"]))
    return Device(found["name"], hardware, False)


def _describe_gpu() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "bytes": properties.total_memory,
        "capability": [properties.major, properties.minor],
    }


_FORKS = threading.Lock()
"""filelock, which the hub's client imports, lets no two threads fork at once."""


def in_process(work: Any, timeout_s: float, *arguments: Any) -> dict[str, Any]:
    """What `work` returns in a forked process; {"error": …} when it fails or takes too long."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=_answer, args=(there, work, arguments))
    with _FORKS:
        process.start()
    there.close()
    try:
        if here.poll(timeout_s):
            answer: dict[str, Any] = here.recv()
            return answer
        return {"error": f"stopped after {timeout_s:.0f} s"}
    except EOFError:
        process.join()
        return {"error": f"the process ended with code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _answer(answers: Connection, work: Any, arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    try:
        answers.send(work(*arguments))
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        answers.send({"error": f"{type(error).__name__}: {lines[0][:200]}"})


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
    from gpu_training import BUCKET, RANK, weights_dtype

    targets: Any = row.adapter if row.adapter in (None, "all-linear") else str(row.adapter).split(",")
    return MemoryJob(
        micro_batch=row.micro_batch,
        sequence_length=spec.tokens_per_sample or row.length,
        data_parallel=1,
        devices_per_node=1,
        precision=row.precision,
        dtype=str(weights_dtype(row)).removeprefix("torch."),
        quantization=row.quantization,
        double_quant=True,
        trainable_params=spec.lora_params(RANK, targets) if row.adapter else spec.params,
        adapter=row.adapter is not None,
        engine=engine_named(row.engine),
        zero_stage=row.zero_stage,
        offload_optimizer=row.offload_optimizer,
        offload_param="none",
        optim=row.optim,
        checkpointing=row.checkpointing,
        attention=row.attention,
        reduce_bucket_size=BUCKET,
        allgather_bucket_size=BUCKET,
        overlap_comm=False,
        eval_batch=row.micro_batch,
        accumulation=row.accumulation,
        document_mask=row.packing,
    )


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


def measure(row: Row, device: Device) -> dict[str, Any]:
    """Bytes and seconds of one row; in a process of its own."""
    import torch
    import transformers
    from gpu_training import build_model, make_batch, make_step, timed_steps

    if row.engine == "deepspeed":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
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


def obstacle(row: Row, device: Device, predicted: MemoryEstimate, left_s: float) -> str | None:
    """Why a row is not tried, None when nothing is in the way."""
    absent = [name for name in row.needs if importlib.util.find_spec(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if row.attention == "flash_attention_2" and device.rehearsal:
        return "flash_attn needs a GPU"
    if left_s <= 0:
        return "the time budget is spent"
    size = device.hardware.device_bytes
    if size is not None and predicted.total > size:
        return f"predicted {predicted.total / 1e9:.1f} GB, the device has {size / 1e9:.1f}"
    return None


class Room:
    """The device's memory, shared among jobs at the same time."""

    def __init__(self, size: float) -> None:
        self.size = self.left = size
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, wanted: float) -> Iterator[None]:
        """Wait for `wanted` bytes, at most all of them, and hold them."""
        wanted = min(wanted, self.size)
        with self.changed:
            self.changed.wait_for(lambda: wanted <= self.left)
            self.left -= wanted
        try:
            yield
        finally:
            with self.changed:
                self.left += wanted
                self.changed.notify_all()


RESERVED = 1.2
"""What is kept free for a job that runs beside others, of its prediction."""


def sweep(
    rows: Sequence[Row], device: Device, budget_s: float, jobs: int = 1, room: Room | None = None
) -> list[dict[str, Any]]:
    """An entry for every row: measured, skipped or failed."""
    ends = time.monotonic() + budget_s
    space = room or Room(math.inf)

    def one(row: Row, predicted: MemoryEstimate) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "name": row.name,
            "settings": settings_of(row, grid("gpu_memory")["defaults"]),
        }
        with space.of(RESERVED * predicted.total):
            reason = obstacle(row, device, predicted, ends - time.monotonic())
            if reason is not None:
                entry["skipped"] = reason
            else:
                entry |= in_process(measure, ends - time.monotonic(), row, device)
                entry["t0"] = predicted.total
                entry["t0_without_context"] = predicted.total - predicted.components.context
                entry["t0_low"], entry["t0_high"] = predicted.low, predicted.high
        if jobs > 1:
            entry.pop("step_s", None)
        print(line_of(entry), flush=True)
        return entry

    estimates = [
        predict(row, device) for row in rows
    ]  # reads files under locks, beside which no fork is safe
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, rows, estimates))


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
    errors = [
        abs(one["t0_without_context"] / (one.get("reserved") or one["allocated"]) - 1)
        for one in entries
        if "allocated" in one
    ]
    counted = f"{len(errors)} measured, {sum('skipped' in one for one in entries)} skipped, "
    counted += f"{sum('error' in one for one in entries)} failed"
    if not errors:
        return counted
    return f"{counted}; error of T0: median {statistics.median(errors):.1%}, max {max(errors):.1%}"


def write_record(path: Path, device: Device, entries: Sequence[Mapping[str, Any]], about: str) -> None:
    record = {
        "about": about,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device.name,
        "hardware": device.hardware.device,
        "device_bytes": device.hardware.device_bytes,
        "versions": versions(PACKAGES),
        "rows": list(entries),
    }
    if device.rehearsal:
        record["about"] = "A rehearsal with narrow models on a CPU: says nothing about a GPU."
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def record_path(kind: str, device: Device) -> Path:
    """records/KIND_<device>.json"""
    return RECORDS / f"{kind}_{re.sub(r'[^a-z0-9]+', '_', device.name.lower()).strip('_')}.json"


def rehearsed(row: Row) -> Row:
    from dataclasses import replace

    return replace(row, **{name: min(getattr(row, name), size) for name, size in REHEARSED.items()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[row.name for row in GPU_MEMORY])
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help="seconds in all")
    parser.add_argument("--jobs", type=int, default=1, help="rows at the same time (1)")
    parser.add_argument("--room", type=float, metavar="GB", help="of the device, for several jobs (all)")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with narrow models")
    parser.add_argument("--out", type=Path, help="the record's file")
    options = parser.parse_args()
    started = time.monotonic()
    rows = [row for row in GPU_MEMORY if options.only is None or row.name in options.only]
    import torch  # noqa: F401  # once for all rows, which are forked from here
    import transformers  # noqa: F401

    device = find_device(options.rehearse)
    if device is None:
        print("no GPU is here; --rehearse runs the same code on a CPU", file=sys.stderr)
        return 4
    if device.rehearsal:
        rows = [rehearsed(row) for row in rows]
    print(f"{device.name}: GB allocated, reserved, predicted; error; seconds per step")
    room = Room(options.room * 1e9 if options.room else device.hardware.device_bytes or math.inf)
    entries = sweep(rows, device, options.budget - (time.monotonic() - started), options.jobs, room)
    print(summary_of(entries))
    out = options.out
    if out is None and not device.rehearsal:
        out = record_path("gpu_memory", device)
    if out is not None:
        write_record(out, device, entries, ABOUT)
    return 1 if any("error" in one for one in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
