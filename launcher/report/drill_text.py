"""A drill: one line a fault, and a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.report.tables import table, wrapped

HEAD = (
    "fault", "the run ended", "gone after", "checkpoint", "resumed at", "steps compared", "loss differs by",
    "verdict",
)  # fmt: skip


def fault_line(fault: Mapping[str, Any]) -> str:
    """How one fault went, while the drill goes on."""
    if fault["status"] != "passed":
        return f"{fault['id']}: {fault['status']}: {fault['reason']}"
    return (
        f"{fault['id']}: {_ended(fault)}, all gone after {_seconds(fault['seconds'])}, resumed at "
        f"step {fault['resumed_at']}; {fault['compared']} losses, apart: {_apart(fault['difference'])}"
    )


def drill_text(data: Mapping[str, Any], folder: str) -> str:
    """The table, what failed, and where the rest lies."""
    title = f"{data['recipe']} on {data['hardware']}: {data['steps']} steps, saved every {data['save_steps']}"
    lines = [
        "",
        title,
        *table([HEAD, *(_row(fault) for fault in data["faults"])]),
        "",
        _measure(data["reference"]),
    ]
    for fault in data["faults"]:
        if fault["reason"]:
            lines += wrapped(f"{fault['id']}: {fault['reason']}", "")
    return "\n".join([*lines, f"{folder}/drill.json has all of it"]) + "\n"


def _row(fault: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        fault["title"],
        _ended(fault),
        _seconds(fault["seconds"]),
        _step(fault["checkpoint"]),
        _step(fault["resumed_at"]),
        "" if fault["compared"] is None else str(fault["compared"]),
        _apart(fault["difference"]),
        fault["status"],
    )


def _ended(fault: Mapping[str, Any]) -> str:
    if not fault["struck"]:
        return ""
    return "not at all" if fault["exit_code"] is None else f"exit code {fault['exit_code']}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _step(value: int | None) -> str:
    return "" if value is None else f"step {value}"


def _apart(value: float | None) -> str:
    if value is None:
        return ""
    return "nothing" if value == 0 else f"{value:.3g}"


def _measure(reference: Mapping[str, Any]) -> str:
    """What the losses are held against."""
    if reference["tolerance"] == 0:
        return "expected: losses of every step the same, to the last bit, as in the run that nothing struck"
    return (
        f"expected: losses at most {reference['tolerance']:.3g} apart; two runs that nothing struck were "
        f"{reference['spread']:.3g} apart"
    )
