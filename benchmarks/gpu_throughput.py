"""Training speed on one GPU: tokens a second and the share of the device's arithmetic that is used (MFU).

    python benchmarks/gpu_throughput.py                 the table, and records/gpu_throughput_<device>.json
    python benchmarks/gpu_throughput.py --only NAME …   these rows; the others stay as recorded
    python benchmarks/gpu_throughput.py --check         exit 1 when a target is missed
    python benchmarks/gpu_throughput.py --rehearse      the same code on a CPU, with narrow models; no record

Llama-shaped models with random weights, so that nothing is downloaded; the largest of each row's shapes
whose memory suffices. Needs torch and transformers. Rows that need another package are marked skipped when
it is absent, as are those whose memory does not suffice and those that get no turn within --budget seconds.
Each row is a process of its own. How operations are counted stands in gpu_speed_rows.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gpu
from gpu import Device
from gpu_memory import config_of, predict, predict_seconds
from gpu_speed_rows import ROWS, SpeedRow, datasheet_rate, matrix_params, step_flops
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
    from gpu_steps import grid_row

    for model in row.models:
        reason = gpu.too_large(predict(grid_row(row, model), device).total, device)
        if reason is None:
            return model, None
    return None, reason


def _measured(row: SpeedRow, model: str, device: Device) -> dict[str, Any]:
    """Bytes and seconds of one row; in a process of its own."""
    import torch
    import transformers
    from gpu_steps import grid_row, measure

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
    sheet = datasheet_rate(device)
    return {
        "flops_per_second": rate,
        "mfu": None if sheet is None else round(rate / sheet, 4),
        "mfu_square": None if sheet is None else round(square / sheet, 4),
        "of_measured": None if measured_rate is None else round(rate / measured_rate, 4),
    }


HEAD = (
    f"{'row':<30}{'model':<14}{'tokens/s':>10}{'step':>10}{'peak GB':>9}{'TFLOP/s':>9}{'MFU':>7}"
    f"{'square':>8}{'of matmul':>11}"
)


def line_of(entry: Mapping[str, Any]) -> str:
    if "step_s" not in entry:
        return (
            f"{entry['name']:<30}{'skipped: ' + entry['skipped'] if 'skipped' in entry else entry['error']}"
        )
    model = entry["model"].split("/")[-1] if "tokens_per_second" in entry else ""
    speed = f"{entry['tokens_per_second']:,.0f}" if "tokens_per_second" in entry else ""
    peak = f"{entry['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in entry else ""
    return (
        f"{entry['name']:<30}{model:<14}{speed:>10}{entry['step_s'] * 1000:>7.1f} ms{peak:>9}"
        f"{entry['flops_per_second'] / 1e12:>9.1f}{_percent(entry['mfu']):>7}"
        f"{_percent(entry['mfu_square']):>8}{_percent(entry['of_measured']):>11}"
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def judge(entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool | None]]:
    """(what was found beside a target, whether it holds); None where it was not measured."""
    done = [one for one in entries if "tokens_per_second" in one and not one["name"].startswith("mix-")]
    full = [one for one in done if one["name"].startswith("full-")]
    lora = [one for one in done if one["name"].startswith("lora-")]
    found: list[tuple[str, bool | None]] = []
    if not full or full[0]["mfu"] is None:
        found.append((f"MFU of at least {MFU:.0%}: not measured", None))
    else:
        best = max(full, key=lambda one: one["mfu"])
        said = f"MFU of at least {MFU:.0%}: {best['mfu']:.1%} with {best['name']} of {best['model']}"
        found.append((said, best["mfu"] >= MFU))
    pairs = [
        (one["tokens_per_second"] / other["tokens_per_second"], one)
        for one in lora
        for other in [max(full, key=lambda row: row["tokens_per_second"], default=None)]
        if other is not None and other["model"] == one["model"]
    ]
    if not pairs:
        found.append((f"LoRA at least {LORA_AHEAD} times a full run: not measured on one shape", None))
    else:
        ratio, one = max(pairs, key=lambda pair: pair[0])
        said = f"LoRA at least {LORA_AHEAD} times a full run: {ratio:.2f} with {one['name']}, "
        said += f"where its operations allow {one['ceiling_to_full']:.2f}"
        found.append((said, ratio >= LORA_AHEAD))
    return found


def rehearsed(row: SpeedRow) -> SpeedRow:
    chunk = None if row.chunk is None else 32
    documents = tuple(min(32 + number, length) for number, length in enumerate(row.documents))
    return replace(row, documents=documents, accumulation=min(row.accumulation, 2), chunk=chunk)


def main() -> int:
    options = parser_of(__doc__, "budget", "check", "rehearse", "out", rows=ROWS).parse_args()
    started = time.monotonic()
    import torch  # noqa: F401  # once for all rows, which are forked from here
    import transformers  # noqa: F401

    def measured(rows: Sequence[SpeedRow], device: Device) -> list[dict[str, Any]]:
        print(f"{device.name}\n{HEAD}")
        return sweep(rows, device, options.budget - (time.monotonic() - started))

    found = gpu.run_command(options, ROWS, rehearsed, measured, ABOUT)
    if found is None:
        return 0
    device, entries = found
    verdicts = [] if device.rehearsal else judge(entries)
    for said, holds in verdicts:
        print({True: "holds  ", False: "MISSED ", None: "open   "}[holds] + said)
    missed = options.check and any(holds is False for _, holds in verdicts)
    return int(missed or any("error" in one for one in entries))


if __name__ == "__main__":
    sys.exit(main())
