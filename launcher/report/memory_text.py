"""Memory as plain text: one job by component, many jobs as a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.plan.plan import Plan
from launcher.report.tables import gib, table


def memory_lines(plan: Plan) -> list[str]:
    """The memory of one device by component, as a range, against what the device holds."""
    memory = plan.memory.to_json()
    held = memory["device_bytes"]
    verdict = {True: "fits", False: "DOES NOT FIT", None: "device size unknown"}[memory["fits"]]
    lines = [
        f"memory of each device: {gib(memory['low'])} to {gib(memory['high'])} of {gib(held)}: {verdict} "
        f"(peak in {memory['phase']})"
    ]
    scale = max(memory["components"].values(), default=0) or 1
    for name, size in memory["components"].items():
        bar = "#" * round(24 * size / scale)
        lines.append(f"  {name:12s} {gib(size):>11s}  {bar}".rstrip())
    lines.append(
        f"  save peak {gib(memory['save_peak'])}, evaluation peak {gib(memory['eval_peak'])}, "
        f"host {gib(memory['host_bytes'])}"
    )
    return lines


def estimate_text(model: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a strategy and device."""
    head = ("hardware", "strategy", "needs", "holds", "fits", "largest micro-batch")
    body = [
        (
            row["hardware"],
            row["strategy"],
            f"{gib(row['memory']['low'])} to {gib(row['memory']['high'])}",
            gib(row["memory"]["device_bytes"]),
            {True: "yes", False: "no", None: "?"}[row["memory"]["fits"]],
            str(row["max_micro_batch"]),
        )
        for row in rows
    ]
    title = f"{model['name']}: {model['params']:,} parameters"
    return "\n".join([title, *table([head, *body])]) + "\n"
