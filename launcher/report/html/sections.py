"""What ran, on what, and why each value has its value: parts of a page. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.execute.record import RunRecord, total_seconds
from launcher.report.html.elements import Markup, block, code, details, joined, table, tag
from launcher.report.html.values import (
    NONE,
    apart,
    at,
    count,
    duration,
    figure,
    listed,
    mapping,
    number,
    objects,
    parameters,
    rate,
    said,
    several,
    size,
    span,
)
from launcher.report.text import SHOWN

STATES = {
    "finished": "✓ finished", "failed": "✕ failed", "stopped": "■ stopped", "running": "▸ running",
    "not started": "○ not started", "planned": "○ planned, nothing was started",
}  # fmt: skip
"""What a badge says: the form of its sign tells it too, not only its colour."""
_FIRST = (
    "adapter.type",
    "adapter.r",
    "trainer.learning_rate",
    "trainer.max_steps",
    "data.max_length",
    "data.packing",
)
"""Decided by the recipe more often than by us, and looked for first."""
_METHODS = {"lora": "LoRA", "adalora": "AdaLoRA", "ia3": "IA3", "loha": "LoHa", "lokr": "LoKr"}
_VALUE, _REASON = 400, 600
"""Characters that a table shows of a value and of a reason."""
NARROW, TIMES = "\N{NO-BREAK SPACE}", "\N{MULTIPLICATION SIGN}"
_TEXT = 40_000
"""The same of a recipe."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page that the navigation names."""

    id: str
    heading: str
    body: Markup


def setting(record: RunRecord, key: str) -> Any:
    """The value of a setting; None where it is not in the plan."""
    return at(mapping(record.plan.get("settings")).get(key), "value")


def state_of(record: RunRecord) -> Markup:
    if record.state == "planned" and record.problems:
        return tag("span", "✕ does not fit", class_="state failed")
    return tag("span", STATES[record.state], class_=f"state {record.state.replace(' ', '-')}")


def hardware_words(record: RunRecord) -> str:
    """Such as 2 nodes of 8 H100-80GB."""
    hardware = mapping(record.plan.get("hardware"))
    device = str(hardware.get("device") or "devices")
    name = device.upper() if device == "cpu" else device
    devices = NARROW.join((count(hardware.get("devices_per_node")), TIMES, name))
    nodes = number(hardware.get("num_nodes")) or 1
    return devices if nodes <= 1 else f"{count(nodes)} nodes of {devices}"


def method_words(record: RunRecord) -> str:
    """How the model is trained: `LoRA, r 16, over nf4`."""
    kind = setting(record, "adapter.type")
    rank = setting(record, "adapter.r")
    words = (
        "all parameters"
        if not kind
        else f"{_METHODS.get(str(kind), said(kind))} adapter" + (f", r {said(rank)}" if rank else "")
    )
    quantization = setting(record, "model.quantization")
    kind = at(quantization, "type") if isinstance(quantization, Mapping) else quantization
    return words if kind in (None, "none") else f"{words}, over {said(kind)} weights"


def length_words(record: RunRecord) -> str:
    schedule = mapping(record.plan.get("schedule"))
    if number(schedule.get("steps")) is not None:
        return f"{count(schedule.get('steps'))} steps"
    epochs = number(schedule.get("epochs"))
    return "" if epochs is None else f"{epochs:g} epochs" if epochs != 1 else "1 epoch"


def about(record: RunRecord) -> Iterator[Markup]:
    """In two lines: what, how, on what, for how long; and where it lies."""
    model, batch = mapping(record.plan.get("model")), mapping(record.plan.get("batch"))
    name = str(model.get("name") or "a model")
    words = [
        f"{Path(name).name if name.startswith('/') else name} ({parameters(model.get('params'))} parameters)",
        method_words(record),
        hardware_words(record),
        f"{length_words(record)} of {count(batch.get('global'))} samples".strip(),
    ]
    yield tag("p", " · ".join(words), class_="lead")
    if record.run_dir:
        yield tag("p", code(record.run_dir), class_="soft small")


def tiles(record: RunRecord) -> Markup:
    """The few numbers that are looked for first."""
    found = list(_plan_tiles(record) if record.state in ("planned", "not started") else _run_tiles(record))
    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="note") if note else None)
            for name, value, note in found
        ),
        class_="tiles",
    )


def losses(record: RunRecord) -> tuple[Any, Any]:
    """The first and the last loss: as the result has them, else as far as the metrics go."""
    loss = mapping(record.result.get("loss"))
    rows = [row["loss"] for row in record.metrics if number(row.get("loss")) is not None]
    return loss.get("first", rows[0] if rows else None), loss.get("last", rows[-1] if rows else None)


def scores(record: RunRecord) -> dict[str, float]:
    """The last evaluation's numbers that say how good it is: name -> value."""
    rows = [row for row in record.metrics if number(row.get("eval_loss")) is not None]
    last = {**(rows[-1] if rows else {}), **mapping(record.result.get("eval"))}
    slow = ("_runtime", "_per_second", "_time")
    return {
        name: value
        for name, raw in last.items()
        if name.startswith("eval_") and not name.endswith(slow) and (value := number(raw)) is not None
    }


def steps_done(record: RunRecord) -> float:
    """Optimizer steps: as the result has them, else the last one that anybody told of."""
    known = number(record.result.get("steps"))
    if known is not None:
        return known
    logged = [number(row.get("step")) or 0 for row in record.metrics]
    return max([float(record.step), *logged])


def _run_tiles(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    first, last = losses(record)
    memory = mapping(record.result.get("memory"))
    if number(last) is not None:
        yield "Loss", figure(last), f"{figure(first)} at the first step"
    for name, value in list(scores(record).items())[:2]:
        yield name.replace("eval_", "Held-out ").replace("_", " "), figure(value), ""
    planned = number(at(record.plan, "schedule", "steps"))
    yield (
        "Steps",
        count(steps_done(record)),
        f"of {count(planned)} planned" if planned else length_words(record),
    )
    speed = record.result.get("tokens_per_second")
    if number(speed) is not None:
        yield "Tokens a second", rate(speed), f"{count(record.result.get('tokens'))} in all"
    if record.result.get("seconds") is not None:
        trained = record.result.get("train_seconds")
        since = record.result.get("resumed_at")
        last = f" since step {count(since)}" if since else " of it"
        yield "Time", time_words(record), f"{duration(trained)}{last} training"
    if memory.get("measured") is not None:
        predicted = memory.get("predicted")
        note = f"{size(predicted)} predicted ({apart(predicted, memory['measured'])})"
        yield "Peak memory of a device", size(memory["measured"]), note
    else:
        yield "Memory predicted", size(at(record.plan, "memory", "total")), "of each device, at the peak"
    if record.state != "finished" and record.checkpoints:
        newest = record.checkpoints[-1].removeprefix("checkpoint-")
        yield "Newest checkpoint", newest, f"{len(record.checkpoints)} whole"


def time_words(record: RunRecord) -> str:
    """What a run took over all its starts; where that is not known, what its last one did, and since when."""
    total = total_seconds(record.result)
    if total is not None:
        return duration(total)
    since = record.result.get("resumed_at")
    last = duration(record.result.get("seconds"))
    return f"{last} since step {count(since)}" if since else last


def _plan_tiles(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    memory, batch = mapping(record.plan.get("memory")), mapping(record.plan.get("batch"))
    verdict = {True: "fits", False: "does not fit", None: "size unknown"}
    held = memory.get("device_bytes")
    fits = memory.get("fits") if isinstance(memory.get("fits"), bool) else None
    yield "Memory of each device", size(memory.get("needed")), f"of {size(held)}: {verdict[fits]}"
    yield "Host memory of a node", size(memory.get("host_bytes")), "data sets apart"
    shares = [count(batch.get(name)) for name in ("micro", "accumulation", "data_parallel")]
    yield "Batch", count(batch.get("global")), f"{f' {TIMES} '.join(shares)} ranks"
    tokens = count(at(record.plan, "schedule", "tokens_per_step"))
    yield "Length", length_words(record) or NONE, f"at most {tokens} tokens a step"
    model = mapping(record.plan.get("model"))
    yield "Trained", parameters(model.get("trainable")), f"of {parameters(model.get('params'))} parameters"
    whole, each = (listed(at(record.plan, "time", key)) for key in ("total", "seconds_per_step"))
    if len(whole) == 2:
        yield "Time, estimated", span(*whole), f"{span(*each)} a step" if len(each) == 2 else ""


def decisions_section(record: RunRecord) -> Section | None:
    """The decisions that matter first; every setting behind them."""
    settings = {
        key: value
        for key, value in mapping(record.plan.get("settings")).items()
        if isinstance(value, Mapping)
    }
    if not settings:
        return None
    chosen = [key for key in (*SHOWN, *_FIRST) if key in settings]
    head = ("setting", "value", "from", "why")
    shown = table("Decisions", head, [_setting_row(key, settings[key]) for key in chosen], "settings stack")
    every = table(
        "All settings", head, [_setting_row(key, settings[key]) for key in sorted(settings)], "settings stack"
    )
    sources: dict[str, int] = {}
    for value in settings.values():
        sources[str(value.get("source"))] = sources.get(str(value.get("source")), 0) + 1
    note = ", ".join(
        f"{number} {name}" for name, number in sorted(sources.items(), key=lambda item: -item[1])
    )
    body = joined([shown, details(f"All {len(settings)} settings", every, note=f"by source: {note}")])
    return Section("decisions", "Decisions", body)


def _setting_row(key: str, setting: Mapping[str, Any]) -> tuple[Markup, ...]:
    by, source = str(setting.get("by") or ""), str(setting.get("source") or "")
    place = Path(by).name if source in ("recipe", "parent", "override") else by
    whose = source if place in ("", source) else f"{source}: {place}"
    value = code(_cut(said(setting.get("value")), _VALUE))
    return (
        code(key),
        value,
        tag("span", whose, class_="from", title=by),
        tag("span", _cut(str(setting.get("reason") or ""), _REASON)),
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def fixes_section(record: RunRecord) -> Section | None:
    """The known fixes that this plan has, and what each has changed."""
    fixes = objects(record.plan.get("fixes"))
    warnings = [str(warning) for warning in listed(record.plan.get("warnings"))]
    if not fixes and not warnings:
        return None
    rows = [
        (
            joined([code(fix.get("id")), tag("span", fix.get("title") or "", class_="soft")], tag("br")),
            code(_changed(fix.get("changed"))),
            joined(
                [
                    tag("span", fix.get("reason") or ""),
                    tag("span", fix.get("source") or "", class_="soft small"),
                ],
                tag("br"),
            ),
        )
        for fix in fixes
    ]
    parts = [tag("ul", *(tag("li", warning) for warning in warnings), class_="plain")] if warnings else []
    if parts:
        parts.insert(0, tag("h3", "Warnings of the plan"))
    if rows:
        head = ("fix", "changed", "why, and where it is known from")
        parts.insert(0, table("Known fixes that were applied", head, rows, "stack"))
    return Section("fixes", "Known fixes applied" if rows else "Warnings", joined(parts))


def _changed(changed: Any) -> str:
    return _cut(
        ", ".join(f"{key} = {said(value)}" for key, value in mapping(changed).items()) or "a warning", _VALUE
    )


def environment_section(record: RunRecord) -> Section | None:
    """Hardware, versions, variables."""
    versions = {k: v for k, v in record.environment.items() if isinstance(v, str)}
    versions = versions or {
        k: v for k, v in mapping(record.plan.get("versions")).items() if isinstance(v, str)
    }
    hardware = mapping(record.plan.get("hardware"))
    capability = listed(hardware.get("compute_capability"))
    rows: list[tuple[str, object]] = [("hardware", hardware_words(record))]
    if number(hardware.get("device_bytes")) is not None:
        rows.append(("memory of a device", size(hardware["device_bytes"])))
    if capability:
        rows.append(("compute capability", ".".join(str(part) for part in capability)))
    nodes = objects(at(record.environment, "bound", "nodes"))
    if nodes:
        rows.append(("machines", ", ".join(str(node.get("host") or said(node)) for node in nodes)))
    rows += [(name, version) for name, version in versions.items()]
    parts = [pairs(rows)]
    variables = mapping(record.plan.get("env"))
    if variables:
        named = table(
            "Variables",
            ("variable", "value"),
            [(code(k), code(_cut(said(v), _VALUE))) for k, v in variables.items()],
        )
        parts.append(details(f"{several(len(variables), 'environment variable')} of the workers", named))
    return Section("environment", "Environment", joined(parts))


def pairs(rows: Iterable[tuple[str, object]]) -> Markup:
    """Names with their values."""
    return tag(
        "dl", *(part for name, value in rows for part in (tag("dt", name), tag("dd", value))), class_="pairs"
    )


def command_section(record: RunRecord) -> Section | None:
    """What was started, and from which recipe."""
    bound = listed(at(record.environment, "bound", "command"))
    words = [str(word) for word in bound or listed(record.plan.get("command"))]
    if not words and not record.recipe:
        return None
    parts = []
    if words:
        line = " ".join(word if "{" in word else shlex.quote(word) for word in words)
        parts.append(block(_cut(line, _TEXT), "Command"))
        if not bound and "{" in line:
            parts.append(tag("p", "Words in braces are bound when it starts.", class_="soft small"))
    if record.recipe:
        parts.append(
            details(
                "The recipe, as given",
                block(_cut(record.recipe, _TEXT), "Recipe"),
                note=str(record.plan.get("recipe") or ""),
            )
        )
    if record.plan.get("ds_config"):
        parts.append(
            details(
                "The DeepSpeed config",
                block(_cut(_indented(record.plan["ds_config"]), _TEXT), "DeepSpeed config"),
            )
        )
    return Section("command", "Command and recipe", joined(parts))


def _indented(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
