"""What merge and eval found, as plain text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.knowledge.lint.document import printable
from launcher.report.tables import gib, table


def merged_text(found: Mapping[str, Any], pushed: Mapping[str, Any] | None) -> str:
    """What was written, and how far its logits are from what was trained."""
    rows = [
        ("adapter on its base", _gap(found["merge"]), f"float32; {found['merge']['allowed']:.1g} is allowed"),
        ("after the cast", _gap(found["cast"]), f"weights in {found['dtype']}; {_choice(found['cast'])}"),
    ]
    if found["quantized"] is not None:
        kind = found["quantization"]
        words = f"the {kind} model that trained; {_choice(found['quantized'])}"
        rows.append(("running adapter", _gap(found["quantized"]), words))
    size = gib(found["bytes"])
    lines = [
        f"merged    {printable(found['folder'])}  {found['params']:,} weights in {found['dtype']}, {size}",
        f"compared  logits of {found['compared']} tokens, up to {found['largest_logit']:.3g} large; "
        "largest difference from",
        *table(rows, "  "),
    ]
    if found["quantized"] is not None:
        kind = found["quantization"]
        lines.append(f"  The base is the dequantised one that trained, not quantised to {kind} again.")
    return "\n".join(lines + pushed_lines(pushed))


def evaluated_text(found: Mapping[str, Any]) -> str:
    """Numbers of an evaluation; what it took comes last."""
    speed = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    metrics = {name: value for name, value in found["metrics"].items() if name not in speed}
    rows = [
        (name.replace("_", " "), "not finite" if value is None else f"{value:.6g}")
        for name, value in metrics.items()
    ]
    if found["at_end"] is not None:
        rows.append(("loss at the end of the run", f"{found['at_end']:.6g}"))
    lines = [f"evaluated {found['weights']}", f"rows      {found['rows']:,} of {found['data']}"]
    return "\n".join(lines + table(rows, "  "))


def pushed_lines(pushed: Mapping[str, Any] | None) -> list[str]:
    """Where it went, and who can see it."""
    if pushed is None:
        return []
    return [
        f"pushed    {pushed['url']}  ({'private' if pushed['private'] else 'PUBLIC: anybody can read it'})"
    ]


def _gap(found: Mapping[str, float]) -> str:
    return f"{found['largest']:.2g}"


def _choice(found: Mapping[str, float]) -> str:
    return f"the same first choice at {found['same_choice']:.1%}"
