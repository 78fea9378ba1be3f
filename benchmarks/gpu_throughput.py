"""Training speed on one GPU: tokens a second and the share of the device's arithmetic that is used (MFU).

    python benchmarks/gpu_throughput.py                 the table, and records/gpu_throughput_<device>.json
    python benchmarks/gpu_throughput.py --only NAME …   these rows; the others stay as recorded
    python benchmarks/gpu_throughput.py --check         exit 1 when a target is missed
    python benchmarks/gpu_throughput.py --rehearse      the same code on a CPU, with narrow models; no record

Llama-shaped models with random weights, so that nothing is downloaded; the largest of each row's shapes
whose memory suffices. Needs torch and transformers. Rows that need another package are marked skipped when
it is absent, as are those whose memory does not suffice and those that get no turn within --budget seconds.
Each row is a process of its own. How operations are counted stands in gpu_steps.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gpu
import torch
import transformers  # once for all rows, which are forked from here
from comparison import Measure, exit_status
from gpu import Device
from gpu_memory import config_of, predict, predict_seconds
from gpu_steps import DATASHEET, ROWS, SpeedRow, grid_row, matrix_params, measure, step_flops
from grids import settings_of
from runner import entries_of, in_process, parser_of

ABOUT = "Training speed on one GPU; made by benchmarks/gpu_throughput.py."
ROW_S = 120.0
MFU, LORA_AHEAD = 0.50, 1.25
"""Targets: of the best full fine-tune on an H200; of the best LoRA beside it."""


def sweep(rows: Sequence[SpeedRow], device: Device, budget_s: float) -> list[dict[str, Any]]:
    """An entry for every row: measured, skipped or failed."""
    ends = time.monotonic() + budget_s
    rates: dict[str, float] = {}

    def one(row: SpeedRow) -> dict[str, Any]:
        left = ends - time.monotonic()
        entry: dict[str, Any] = {"name": row.name, "settings": settings_of(row)}
        model, reason = model_of(row, device, left)
        if reason is not None or model is None:
            return entry | {"skipped": reason}
        entry |= {"model": model, **in_process(_measured, min(left, ROW_S), row, model, device)}
        if "out of memory" in entry.get("error", "").lower():
            entry["skipped"] = f"out of memory: {entry.pop('error')[:120]}"
        if "step_s" in entry:
            rates[row.name] = entry["flops"] / entry["step_s"]
            entry |= shares(entry, device.name, rates.get("matmul"))
        return entry

    return entries_of(rows, one, line_of)


def model_of(row: SpeedRow, device: Device, left_s: float) -> tuple[str | None, str | None]:
    """(the shape to train, None) or (None, why the row is not tried)."""
    reason = gpu.obstacle(row.needs, device, left_s)
    if reason is not None:
        return None, reason
    if row.kind != "train" or row.tight:
        return row.models[0], None
    for model in row.models:
        reason = gpu.too_large(predict(grid_row(row, model), device).total, device)
        if reason is None:
            return model, None
    return None, reason


def _measured(row: SpeedRow, model: str, device: Device) -> dict[str, Any]:
    """Bytes and seconds of one row; in a process of its own."""
    transformers.logging.set_verbosity_error()
    transformers.set_seed(0)
    config, _ = config_of(grid_row(row, model), device.rehearsal)
    found = measure(row, model, config, torch.device(device.torch_name))
    if row.kind == "train":
        found["params"] = matrix_params(config)
        if not device.rehearsal:
            found["predicted_s"] = predict_seconds(grid_row(row, model), device)
        full = step_flops(config, row, 0, full=True)
        found["ceiling_to_full"] = full / found["flops"]
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}


def shares(entry: Mapping[str, Any], device: str, measured_rate: float | None) -> dict[str, Any]:
    """Operations a second, and over the datasheet's rate and the measured one."""
    rate = entry["flops"] / entry["step_s"]
    square = entry.get("flops_square", entry["flops"]) / entry["step_s"]
    sheet = next((rate for name, rate in DATASHEET.items() if name in device), None)

    def share(part: float, whole: float | None) -> float | None:
        return None if whole is None else round(part / whole, 4)

    return {"flops_per_second": rate, "mfu": share(rate, sheet), "mfu_square": share(square, sheet),
            "of_measured": share(rate, measured_rate)}  # fmt: skip


HEAD = (f"{'row':<30}{'model':<14}{'tokens/s':>10}{'step':>10}{'peak GB':>9}{'TFLOP/s':>9}{'MFU':>7}"
        f"{'square':>8}{'of matmul':>11}")  # fmt: skip


def line_of(entry: Mapping[str, Any]) -> str:
    if "step_s" not in entry:
        return f"{entry['name']:<30}{entry.get('skipped') or entry['error']}"
    model, speed = "", ""
    if "tokens_per_second" in entry:
        model, speed = entry["model"].split("/")[-1], f"{entry['tokens_per_second']:,.0f}"
    peak = f"{entry['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in entry else ""
    mfu, square, of_matmul = (
        "" if entry[name] is None else f"{entry[name]:.1%}" for name in ("mfu", "mfu_square", "of_measured")
    )
    return (
        f"{entry['name']:<30}{model:<14}{speed:>10}{entry['step_s'] * 1000:>7.1f} ms{peak:>9}"
        f"{entry['flops_per_second'] / 1e12:>9.1f}{mfu:>7}{square:>8}{of_matmul:>11}"
    )


def judge(entries: Sequence[Mapping[str, Any]]) -> list[Measure]:
    """The targets, of training on rows of one length; LoRA's beside a full run of the same shape."""
    done = [one for one in entries if "tokens_per_second" in one]
    full, lora = ([one for one in done if one["name"].startswith(kind)] for kind in ("full-", "lora-"))
    best = max((one for one in full if one["mfu"] is not None), key=lambda one: one["mfu"], default=None)
    said = f"{best['name']} of {best['model']}" if best else "not measured"
    found = [Measure("MFU", best and best["mfu"], MFU, said)]
    fastest = max(full, key=lambda one: one["tokens_per_second"], default=None)
    alike = [one for one in lora if fastest is not None and one["model"] == fastest["model"]]
    ahead = max(alike, key=lambda one: one["tokens_per_second"], default=None)
    if fastest is None or ahead is None:
        return [*found, Measure("LoRA beside a full run", None, LORA_AHEAD, "not measured on one shape")]
    ratio = ahead["tokens_per_second"] / fastest["tokens_per_second"]
    said = f"{ahead['name']}, whose operations allow {ahead['ceiling_to_full']:.2f}"
    return [*found, Measure("LoRA beside a full run", ratio, LORA_AHEAD, said)]


def rehearsed(row: SpeedRow) -> SpeedRow:
    documents = tuple(min(32 + number, length) for number, length in enumerate(row.documents))
    return replace(row, documents=documents, accumulation=min(row.accumulation, 2))


def main() -> int:
    options = parser_of(__doc__, "budget", "check", "rehearse", "out", rows=ROWS).parse_args()
    started = time.monotonic()

    def measured(rows: Sequence[SpeedRow], device: Device) -> list[dict[str, Any]]:
        print(f"{device.name}\n{HEAD}")
        rows = [rehearsed(row) for row in rows] if device.rehearsal else rows
        return sweep(rows, device, options.budget - (time.monotonic() - started))

    found = gpu.run_command(options, "gpu_throughput", ROWS, measured, ABOUT)
    if found is None:
        return 0
    device, entries = found
    verdicts = [] if device.rehearsal else judge(entries)
    for one in verdicts:
        print("{:<24}{:>7}  {:<14}{}".format(*one.cells))
    failed = any("error" in one for one in entries)
    return int(failed or exit_status([text for one in verdicts for text in one.missed], options.check))


if __name__ == "__main__":
    sys.exit(main())
