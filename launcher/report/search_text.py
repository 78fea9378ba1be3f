"""The search as plain text: one configuration with its trade after the other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.engines import engine_named
from launcher.report.tables import gib, table, wrapped

GIB = 2**30
SHOWN, MISSES_SHOWN = 12, 3
_OFFLOADS = {
    (True, False): "offload optimizer",
    (False, True): "offload parameters",
    (True, True): "offload both",
}


def search_text(
    rows: Sequence[Mapping[str, Any]],
    compared: Mapping[str, int],
    left_out: Sequence[Mapping[str, str]],
    others: Sequence[str],
    *,
    timed: bool,
) -> str:
    """The fastest that fit, the nearest that do not, what cannot run.

    `others`: with what something would fit. `timed`: speeds are not a stand-in's.
    """
    fitting = [row for row in rows if row["fits"]]
    misses = [row for row in rows if not row["fits"]]
    samples = rows[0]["batch"]["global"]
    lines = [f"search: {compared['configurations']} configurations at one global batch of {samples} samples"]
    if compared["implied"]:
        lines.append(
            f"  {compared['estimated']} estimated; {compared['implied']} have a smaller micro-batch than one "
            "that fits, which is never faster"
        )
    lines += [
        "  speeds are predicted from published peaks and assumed shares of them; nobody measured them"
        if timed
        else "  this device has no published figures here: ranked by a stand-in's, without seconds",
        "",
    ]
    lines += _block(fitting[:SHOWN], timed=timed) if fitting else ["  nothing fits"]
    if len(fitting) > SHOWN:
        lines.append(f"  … and {len(fitting) - SHOWN} more that fit (--json shows all)")
    if not all(row["fits_surely"] for row in fitting[:SHOWN]):
        lines.append(
            "  ! fits by its estimate; the upper end of its range would not, so it stands behind the others"
        )
    if misses:
        lines += ["", f"does not fit: {len(misses)}, the nearest of them"]
        lines += [
            f"  {strategy_name(row['settings'])}, micro-batch {row['batch']['micro']}: "
            f"needs {gib(row['memory']['needed'] + row['memory']['margin'])} with its margin, of "
            f"{gib(row['memory']['device_bytes'])}"
            for row in misses[:MISSES_SHOWN]
        ]
    if others:
        lines += ["", "it would fit", *(line for other in others for line in wrapped(other))]
    if left_out:
        lines += ["", "left out"]
        lines += [line for entry in left_out for line in wrapped(f"{entry['what']}: {entry['reason']}")]
    return "\n".join(lines) + "\n"


def _block(rows: Sequence[Mapping[str, Any]], *, timed: bool) -> list[str]:
    """Two lines a row: the figures, and the trade below them."""
    # The range of the estimate; whether something fits is judged by the estimate and its margin.
    head = ("rank", "strategy", "micro x acc", "memory GiB", "speed", "s/step" if timed else "")
    body = [
        (
            str(row["rank"]),
            strategy_name(row["settings"]),
            f"{row['batch']['micro']} x {row['batch']['accumulation']}",
            f"{row['memory']['low'] / GIB:.1f} to {row['memory']['high'] / GIB:.1f}"
            + ("" if row["fits_surely"] else " !"),
            f"{row['relative_speed']:.2f}",
            seconds(row["time"]["seconds_per_step"]) if timed else "",
        )
        for row in rows
    ]
    lines = [line.rstrip() for line in table([head, *body])]
    told = [lines[0]]
    for line, row in zip(lines[1:], rows, strict=True):
        told += [line, *wrapped(row["trade"], " " * 8)]
    return told


def strategy_name(settings: Mapping[str, Any]) -> str:
    """`ZeRO-2, nf4, checkpointing` of the settings of a row."""
    stage, quantization = settings["sharding.zero_stage"], settings["model.quantization"]
    words = [engine_named(settings["sharding.engine"]).label(stage)]
    words += [] if quantization == "none" else [quantization]
    words += ["checkpointing"] if settings["trainer.activation_checkpointing"] else []
    offloads = tuple(settings[f"sharding.offload_{what}"] != "none" for what in ("optimizer", "param"))
    words += [_OFFLOADS[offloads]] if offloads in _OFFLOADS else []
    return ", ".join(words)


def seconds(span: Sequence[float] | None) -> str:
    """A predicted range."""
    return "unknown" if span is None else f"{span[0]:.3g} to {span[1]:.3g}"


def time_line(time: Mapping[str, Any]) -> str:
    """The predicted time of a step and of the run."""
    if time["seconds_per_step"] is None:
        return "time of a step: not predicted, this device has no published figures here"
    line = f"time of a step: {seconds(time['seconds_per_step'])} s, predicted (never measured)"
    if time["total"] is None:
        return line
    low, high = (_long(end) for end in time["total"])
    return f"{line}; all steps {low} to {high}, without start, evaluations and checkpoints"


def _long(spent: float) -> str:
    if spent < 60:
        return f"{spent:.2g} s"
    return f"{spent / 60:.2g} min" if spent < 3600 else f"{spent / 3600:.2g} h"
