"""Parts of a run's page from its plan: its main facts, decisions, fixes, environment, command. Pure."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.execute.record import RunRecord
from launcher.report.html.elements import (
    NONE,
    Markup,
    amount_of,
    at,
    block,
    bullets,
    code,
    count,
    cut,
    details,
    duration,
    joined,
    listed,
    mapping,
    number,
    objects,
    pairs,
    parameters,
    several,
    shown,
    size,
    table,
    tag,
)
from launcher.report.html.page import PageSection
from launcher.report.plan_text import SHOWN

_FIRST = (
    "adapter.type",
    "adapter.r",
    "trainer.learning_rate",
    "trainer.max_steps",
    "data.max_length",
    "data.packing",
)
"""Set in most recipes, and looked for first."""
_METHODS = {"lora": "LoRA", "adalora": "AdaLoRA", "ia3": "IA3", "loha": "LoHa", "lokr": "LoKr"}
_VALUE, _REASON, _TEXT = 400, 600, 40_000
"""Characters shown of a value, of a reason, of a file."""
NARROW, TIMES = "\N{NO-BREAK SPACE}", "\N{MULTIPLICATION SIGN}"


def setting(record: RunRecord, key: str) -> Any:
    """The value of a setting; None where it is not in the plan."""
    return at(mapping(record.plan.get("settings")).get(key), "value")


def hardware_text(record: RunRecord) -> str:
    """Nodes and devices, such as 2 nodes of 8 H100-80GB."""
    hardware = mapping(record.plan.get("hardware"))
    device = str(hardware.get("device") or "devices")
    name = device.upper() if device == "cpu" else device
    devices = NARROW.join((count(hardware.get("devices_per_node")), TIMES, name))
    nodes = number(hardware.get("num_nodes")) or 1
    return devices if nodes <= 1 else f"{count(nodes)} nodes of {devices}"


def method_text(record: RunRecord) -> str:
    """`LoRA adapter, r 16, over nf4 weights`."""
    kind, rank = setting(record, "adapter.type"), setting(record, "adapter.r")
    method = f"{_METHODS.get(str(kind), shown(kind))} adapter" if kind else "all parameters"
    if kind and rank:
        method += f", r {shown(rank)}"
    quantization = setting(record, "model.quantization")
    weights = at(quantization, "type") if isinstance(quantization, Mapping) else quantization
    return method if weights in (None, "none") else f"{method}, over {shown(weights)} weights"


def length_text(record: RunRecord) -> str:
    schedule = mapping(record.plan.get("schedule"))
    if number(schedule.get("steps")) is not None:
        return f"{count(schedule.get('steps'))} steps"
    epochs = number(schedule.get("epochs"))
    return "" if epochs is None else f"{epochs:g} epochs" if epochs != 1 else "1 epoch"


def plan_tiles(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Name, value and note of the most important numbers of a plan."""
    memory, batch = mapping(record.plan.get("memory")), mapping(record.plan.get("batch"))
    verdict = {True: "fits", False: "does not fit", None: "size unknown"}
    held = memory.get("device_bytes")
    fits = memory.get("fits") if isinstance(memory.get("fits"), bool) else None
    yield "Memory of each device", size(memory.get("needed")), f"of {size(held)}: {verdict[fits]}"
    yield "Host memory of a node", size(memory.get("host_bytes")), "without data sets"
    shares = [count(batch.get(name)) for name in ("micro", "accumulation", "data_parallel")]
    yield "Batch", count(batch.get("global")), f"{f' {TIMES} '.join(shares)} ranks"
    tokens = count(at(record.plan, "schedule", "tokens_per_step"))
    yield "Length", length_text(record) or NONE, f"at most {tokens} tokens per step"
    model = mapping(record.plan.get("model"))
    yield "Trained", parameters(model.get("trainable")), f"of {parameters(model.get('params'))} parameters"
    likely = mapping(at(record.plan, "time", "likely"))
    if likely:
        each = f"about {duration(likely.get('seconds_per_step'))} per step"
        whole = amount_of(likely.get("total"))
        told = (each, "") if whole is None else (f"about {duration(whole)}", each)
        yield "Time, estimated", *told


def chosen(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Name and value of the most important decisions, without a note, as of `plan_tiles`."""
    for key in SHOWN:
        value = setting(record, key)
        if value is not None:
            yield key, cut(shown(value), _VALUE), ""


def decisions_section(record: RunRecord) -> PageSection | None:
    """The most important decisions, then every setting."""
    given = mapping(record.plan.get("settings"))
    settings = {key: value for key, value in given.items() if isinstance(value, Mapping)}
    if not settings:
        return None
    chosen = [key for key in (*SHOWN, *_FIRST) if key in settings]
    head = ("setting", "value", "from", "why")
    first = table(
        "The most important decisions",
        head,
        [_setting_row(key, settings[key]) for key in chosen],
        "settings stack",
    )
    rows = [_setting_row(key, settings[key]) for key in sorted(settings)]
    every = table("All settings", head, rows, "settings stack")
    sources = Counter(str(value.get("source")) for value in settings.values()).most_common()
    note = "by source: " + ", ".join(f"{how_many} {name}" for name, how_many in sources)
    return PageSection(
        "decisions", "Decisions", joined([first, details(f"All {len(settings)} settings", every, note=note)])
    )


def _setting_row(key: str, setting: Mapping[str, Any]) -> tuple[Markup, ...]:
    by, source = str(setting.get("by") or ""), str(setting.get("source") or "")
    place = Path(by).name if source in ("recipe", "parent", "override") else by
    whose = source if place in ("", source) else f"{source}: {place}"
    return (
        code(key),
        code(cut(shown(setting.get("value")), _VALUE)),
        tag("span", whose, class_="from", title=by),
        tag("span", cut(str(setting.get("reason") or ""), _REASON)),
    )


def nodes_section(record: RunRecord) -> PageSection | None:
    """Every number of nodes that an elastic run may have."""
    counts = objects(record.plan.get("elastic"))
    if not counts:
        return None
    head = ("nodes", "micro-batch", "accumulation", "ranks", "memory of each device", "not used because")
    return PageSection(
        "nodes", "Numbers of nodes", table("Numbers of nodes", head, map(_nodes_row, counts), "stack")
    )


def _nodes_row(found: Mapping[str, Any]) -> tuple[object, ...]:
    batch = mapping(found.get("batch"))
    shares = (
        count(batch.get(name)) if batch else NONE for name in ("micro", "accumulation", "data_parallel")
    )
    needed = NONE if found.get("needed_bytes") is None else size(found.get("needed_bytes"))
    return (count(found.get("num_nodes")), *shares, needed, cut(str(found.get("refused") or ""), _REASON))


def fixes_section(record: RunRecord) -> PageSection | None:
    """The known fixes of the plan with what each has changed, and the plan's warnings."""
    fixes, warnings = objects(record.plan.get("fixes")), listed(record.plan.get("warnings"))
    if not fixes and not warnings:
        return None
    parts = []
    if fixes:
        head = ("fix", "changed", "why, and where it is known from")
        parts.append(table("Known fixes that were applied", head, map(_fix_row, fixes), "stack"))
    if warnings:
        parts += [tag("h3", "Warnings of the plan"), bullets(str(warning) for warning in warnings)]
    return PageSection("fixes", "Known fixes applied" if fixes else "Warnings", joined(parts))


def _fix_row(fix: Mapping[str, Any]) -> tuple[Markup, ...]:
    changed = ", ".join(f"{key} = {shown(value)}" for key, value in mapping(fix.get("changed")).items())
    source = tag("span", fix.get("source") or "", class_="soft small")
    return (
        joined([code(fix.get("id")), tag("span", fix.get("title") or "", class_="soft")], tag("br")),
        code(cut(changed or "a warning", _VALUE)),
        joined([tag("span", fix.get("reason") or ""), source], tag("br")),
    )


def environment_section(record: RunRecord) -> PageSection:
    """Hardware, versions, variables."""
    hardware = mapping(record.plan.get("hardware"))
    rows: list[tuple[str, object]] = [("hardware", hardware_text(record))]
    if number(hardware.get("device_bytes")) is not None:
        rows.append(("memory of a device", size(hardware["device_bytes"])))
    if capability := listed(hardware.get("compute_capability")):
        rows.append(("compute capability", ".".join(map(str, capability))))
    if nodes := objects(at(record.environment, "bound", "nodes")):
        rows.append(("hosts", ", ".join(str(node.get("host") or shown(node)) for node in nodes)))
    versions = _texts(record.environment) or _texts(mapping(record.plan.get("versions")))
    parts = [pairs([*rows, *versions])]
    if variables := mapping(record.plan.get("env")):
        cells = [(code(k), code(cut(shown(v), _VALUE))) for k, v in variables.items()]
        heading = f"{several(len(variables), 'environment variable')} of the workers"
        parts.append(details(heading, table("Variables", ("variable", "value"), cells)))
    return PageSection("environment", "Environment", joined(parts))


def _texts(values: Mapping[str, Any]) -> list[tuple[str, object]]:
    return [(name, value) for name, value in values.items() if isinstance(value, str)]


def command_section(record: RunRecord) -> PageSection | None:
    """The command, the recipe and the DeepSpeed config."""
    bound = listed(at(record.environment, "bound", "command"))
    command = [str(word) for word in bound or listed(record.plan.get("command"))]
    if not command and not record.recipe:
        return None
    parts = []
    if command:
        line = " ".join(word if "{" in word else shlex.quote(word) for word in command)
        parts.append(block(cut(line, _TEXT), "Command"))
        if not bound and "{" in line:
            parts.append(tag("p", "Values in braces are set when it starts.", class_="soft small"))
    if record.recipe:
        shortened = block(cut(record.recipe, _TEXT), "Recipe")
        parts.append(details("The recipe, as given", shortened, note=str(record.plan.get("recipe") or "")))
    if config := record.plan.get("ds_config"):
        text = cut(json.dumps(config, indent=2, ensure_ascii=False, default=str), _TEXT)
        parts.append(details("The DeepSpeed config", block(text, "DeepSpeed config")))
    return PageSection("command", "Command and recipe", joined(parts))
