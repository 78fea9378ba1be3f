"""The traced memory beside the closed form's, by component. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.report.tables import gib


def trace_text(compared: Mapping[str, Any]) -> str:
    """One line a component: `trace_rows` as text."""
    closed, traced = compared["closed_form"], compared["traced"]
    versions = ", ".join(f"{name} {version}" for name, version in compared["versions"].items())
    lines = ["", f"trace of the real model ({versions}) beside the closed form"]
    lines.append(f"  {'':12s} {'closed form':>12s} {'traced':>12s}")
    for name, size in closed["components"].items():
        lines.append(f"  {name:12s} {gib(size):>12s} {gib(traced['components'][name]):>12s}")
    total, other = closed["total"], traced["total"]
    lines.append(f"  {'total':12s} {gib(total):>12s} {gib(other):>12s}  {other / total - 1:+.1%}")
    lines.append(f"  {'peak in':12s} {closed['phase']:>12s} {traced['phase']:>12s}")
    return "\n".join(lines) + "\n"
