"""Memory as plain text: one job by component, many jobs as a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from launcher.plan.plan import Plan
from launcher.report.colour import GREEN, RED
from launcher.report.page import Page
from launcher.report.tables import WIDTH, gib, wrapped

_PLAIN = Page()
_COLOURS = {True: (GREEN,), False: (RED,), None: ()}
VERDICTS = {True: "fits", False: "DOES NOT FIT", None: "device size unknown"}


def memory_lines(plan: Plan, page: Page = _PLAIN) -> list[str]:
    """The memory of one device by component, as a range, against what the device holds."""
    memory = plan.memory.to_json()
    held = memory["device_bytes"]
    verdict, colour = VERDICTS[memory["fits"]], _COLOURS[memory["fits"]]
    trained = f"{gib(memory['low'])} to {gib(memory['high'])}"
    if memory["moment"] == "training":
        said = f"memory of each device: {trained} of {gib(held)}: {verdict} (peak in {memory['phase']})"
    else:  # what decides is no moment of training, whose range would contradict the verdict
        said = (
            f"memory of each device: {gib(memory['needed'])} of {gib(held)}: {verdict} "
            f"({memory['moment']}; training {trained})"
        )
    lines = [page.heading(line, *colour) for line in page.fitted(said)]
    if memory["fits"] and memory["high"] > held:
        lines += page.fitted("  it fits by its likely peak; the upper end of the range would not")
    if memory["calibration"]:
        lines += wrapped(memory["calibration"], width=page.within(WIDTH))
    scale = max(memory["components"].values(), default=0) or 1
    for name, size in memory["components"].items():
        bar = "#" * round(24 * size / scale)
        lines.append(f"  {name:12s} {gib(size):>11s}  {page.paint(bar, *colour)}".rstrip())
    peaks = {
        "training": memory["total"],
        "saving": memory["save_peak"],
        "evaluating": memory["eval_peak"],
        "loading": memory["load_peak"],
    }
    moments = ", ".join(f"{name} {gib(size)}" for name, size in peaks.items())
    lines += page.fitted(f"  moments: {moments}; {memory['moment']} rules")
    if memory["eval_kept"]:
        lines += page.fitted(
            f"  each evaluation batch leaves {gib(memory['eval_kept'])} more where metrics read predictions, "
            "until trainer.eval_accumulation_steps"
        )
    lines += page.fitted(
        f"  host of each node, data sets apart: {gib(memory['host_bytes'])}{_host_parts(memory['host'])}"
    )
    width = page.within(WIDTH)
    return lines + [line for note in memory["notes"] for line in wrapped(f"note: {note}", width=width)]


def _host_parts(host: Mapping[str, int]) -> str:
    parts = [f"{name} {gib(size)}" for name, size in host.items() if size]
    return f" ({', '.join(parts)})" if parts else ""


_COLUMNS = ("weight", "grads", "optim", "activ", "logits", "other", "needs", "fits", "batch", "host")
_STRATEGY_WIDTH, _NUMBER_WIDTH = 39, 6


def estimate_text(model: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """One block a machine and one line a strategy, in GiB, at most 113 columns wide."""
    published = model["published"]
    lines = [
        f"{model['name']}: {model['params']:,} parameters; {model['sequence_length']} tokens, "
        f"micro-batch {model['micro_batch']}",
        f"published rules for all states on one device: ZeRO's paper (16 bytes a parameter) "
        f"{gib(published['zero_paper'])},",
        f"Hugging Face's page (18 bytes) {gib(published['hf_page'])}",
    ]
    for label, group in groupby(rows, key=lambda row: row["hardware"]):
        block = list(group)
        lines += ["", f"{label}, {gib(block[0]['memory']['device_bytes'])} a device; GiB on each device"]
        lines.append(_line("strategy", _COLUMNS))
        lines += [_line(row["strategy"], _cells(row)) for row in block]
    lines += [
        "",
        "batch: largest micro-batch that fits; host: of a node, data sets apart; needs: at any moment, where",
        "s, e or l marks saving, evaluating or loading; other: buffers, temporaries and the CUDA context",
    ]
    lines += [
        f"note: {note}" for note in dict.fromkeys(note for row in rows for note in row["memory"]["notes"])
    ]
    return "\n".join(lines) + "\n"


def _line(name: str, cells: Sequence[str]) -> str:
    short = name if len(name) <= _STRATEGY_WIDTH else name[: _STRATEGY_WIDTH - 1] + "…"
    return "  ".join([f"  {short:{_STRATEGY_WIDTH}s}", " ".join(cell.rjust(_NUMBER_WIDTH) for cell in cells)])


def _cells(row: Mapping[str, Any]) -> list[str]:
    memory, parts = row["memory"], row["memory"]["components"]
    mark = {"training": "", "saving": "s", "evaluating": "e", "loading": "l"}[memory["moment"]]
    sizes = [parts[name] for name in ("weights", "gradients", "optimizer", "activations", "logits")]
    sizes.append(parts["buffers"] + parts["temporary"] + parts["context"])
    batch = row["max_micro_batch"]
    return [
        *(_number(size) for size in sizes),
        _number(memory["needed"]) + mark,
        {True: "yes", False: "no", None: "?"}[memory["fits"]],
        "?" if batch is None else str(batch),
        _number(memory["host_bytes"]),
    ]


def _number(size: int) -> str:
    """GiB with as many places as five characters hold."""
    value = size / 2**30
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
