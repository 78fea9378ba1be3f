"""Sections about a plan, from the object of `plan --json` or plan.json. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launcher.planner.parallel import NAMES
from launcher.report.sections import (
    MAIN,
    Block,
    Fact,
    Folded,
    Listing,
    Row,
    Rows,
    Section,
    Text,
    line,
    notes_of,
    rows_of,
    table_of,
)
from launcher.report.values import at, count, listed, mapping, number, objects, several, shown, size

Plan = Mapping[str, Any]
"""The object of `plan --json`; each value may be missing or of any type."""

# A word of the command with a value in it that is bound late: it needs no quotes.
_LATE = re.compile(r"[\w./:-]*\{(?:master_port|run_dir|devices|master_addr|node_rank)\}[\w./:-]*")
_METHODS = {"lora": "LoRA", "adalora": "AdaLoRA", "ia3": "IA3", "loha": "LoHa", "lokr": "LoKr"}
_VARIANTS = {"adapter.use_dora": "DoRA", "adapter.use_rslora": "rsLoRA"}
_GIVEN = ("recipe", "parent", "override", "fix")
"""Sources that say more than the reason."""
SHOWN = (
    "precision",
    "model.dtype",
    "model.quantization",
    "model.kbit_norms",
    "sharding.engine",
    "sharding.zero_stage",
    "launch.launcher",
    "trainer.activation_checkpointing",
    "trainer.per_device_train_batch_size",
    "trainer.gradient_accumulation_steps",
    "model.attn_implementation",
    "data.padding_free",
    "model.loss",
    "model.compile_blocks",
)
"""Settings on the first page; `--explain` shows any of the others."""
_IMAGES, _TOKENS = (
    f"median {{images.{key}.p50:count}}, 95 % {{images.{key}.p95:count}}, at most {{images.{key}.max:count}}"
    for key in ("images_per_sample", "tokens_per_sample")
)
_MODEL = Fact("model", "{model.name}", "({model.params:parameters} parameters[, {model.origin}])")
LEAD = Fact(
    "",
    "{model.name}",
    "[({model.params:parameters} parameters) ]· {method} · {hardware_text} · {length}[, "
    "{batch.global:count} samples a step]",
)
MEMORY = Fact("device memory", "{memory.needed:bytes}", "of {held}: {verdict} ({peak})", MAIN)
TIME = (
    Fact("time", "about {time.likely.total:seconds}", "for all steps, "
         "{time.likely.seconds_per_step:seconds} each, without start, evaluations and checkpoints", MAIN),
    Fact("time", "about {step_only:seconds} per step", "", MAIN),
    Fact("time", "not estimated: {unknown_device}"),
)  # fmt: skip
_FACTS = (
    _MODEL,
    Fact("trained", "{model.trainable:parameters}", "of {model.params:parameters} parameters: {method}",
         MAIN),
    Fact("adapters", "{model.adapters.params:parameters} parameters reached",
         "(experts: {model.adapters.experts}, router: {model.adapters.router})"),
    Fact("images", _IMAGES,
         f"per sample, {_TOKENS} tokens of images ({{images.samples:count}} prepared samples)"),
    Fact("images", "{uncounted}"),
    Fact("frozen", "{live.frozen:parameters} parameters", "({live.parts}: {live.why})"),
    Fact("router", "{live.router}"),
    Fact("texts", "{live.texts:count} per sample"),
    Fact("negatives", "{live.negatives:count} for each anchor", "(the other texts of {live.compared:count} "
         "samples[ on {live.gathered:count} ranks]: accumulation adds none)"),
    Fact("batch", "{batch.global:count} samples", "= {batch.micro:count} x {batch.accumulation:count} "
         "accumulation x {batch.data_parallel:count} rank(s)", MAIN),
    Fact("layout", "{devices:count} devices: {batch.data_parallel:count} data-parallel x {shared}"),
    Fact("length", "{length}[ of {rows}]", "(at most {schedule.tokens_per_step:count} tokens per step)",
         MAIN),
    Fact("on oom", "adapt: {live.ways_out}"),
    Fact("mirror", "{mirror}"),
    MEMORY,
    Fact("host memory", "{memory.host_bytes:bytes}", "on each node, without data sets", MAIN),
    *TIME,
)  # fmt: skip


def setting(plan: Plan, key: str) -> Any:
    """The value of a setting; None where it is not in the plan."""
    return at(mapping(plan.get("settings")).get(key), "value")


# --- what is planned, in a few words


def hardware_text(plan: Plan) -> str:
    """Nodes and devices as `--on` reads them: 2x8xH100-80GB."""
    hardware = mapping(plan.get("hardware"))
    nodes, devices = (number(hardware.get(key)) or 1 for key in ("num_nodes", "devices_per_node"))
    device = str(hardware.get("device") or "devices")
    is_one = device == "cpu" and nodes * devices == 1
    return device if is_one else f"{f'{count(nodes)}x' if nodes > 1 else ''}{count(devices)}x{device}"


def method_text(plan: Plan) -> str:
    """`LoRA adapter (r 16, alpha 32) over nf4 weights`."""
    kind, rank, alpha = (setting(plan, f"adapter.{key}") for key in ("type", "r", "lora_alpha"))
    name = next((name for key, name in _VARIANTS.items() if setting(plan, key)), None)
    method = f"{name or _METHODS.get(str(kind), shown(kind))} adapter" if kind else "all parameters"
    if kind and rank:
        method += f" (r {shown(rank)}{f', alpha {shown(alpha)}' if alpha else ''})"
    weights = _brief(setting(plan, "model.quantization"))
    return method if weights in (None, "none") else f"{method} over {shown(weights)} weights"


def length_text(plan: Plan) -> str:
    schedule = mapping(plan.get("schedule"))
    if number(schedule.get("steps")) is not None:
        return f"{count(schedule.get('steps'))} steps"
    epochs = number(schedule.get("epochs"))
    return "" if epochs is None else f"{epochs:g} epochs" if epochs != 1 else "1 epoch"


def facts(plan: Plan, live: Mapping[str, Any] | None = None) -> list[Row]:
    """Model, batch, length, memory, time. live: what only the planner knows."""
    return rows_of(_FACTS, {**_scope(plan), "live": live})


def summary(plan: Plan, *chosen: Fact) -> str:
    """The first of these facts that is known, in one line."""
    return next((line(row.parts) for row in rows_of(chosen, _scope(plan))), "")


def _scope(plan: Plan) -> dict[str, Any]:
    """The plan with what is computed from it."""
    memory, likely = mapping(plan.get("memory")), at(plan, "time", "likely")
    fits, moment = memory.get("fits"), memory.get("moment", "training")
    trained = " to ".join(dict.fromkeys((size(memory.get("low")), size(memory.get("high")))))
    # The range is that of training, which would contradict the verdict at another moment.
    peak = (
        f"{trained}, peak in {memory.get('phase')}"
        if moment == "training"
        else f"{moment}; training {trained}"
    )
    sizes = {kind: number(setting(plan, f"sharding.{key}")) or 1 for key, kind in NAMES.items()}
    nodes, devices = (number(at(plan, "hardware", key)) or 1 for key in ("num_nodes", "devices_per_node"))
    unread = "not counted yet: `effilaunch prepare` counts those of rows in local files"
    return {
        **plan,
        "method": method_text(plan),
        "hardware_text": hardware_text(plan),
        "length": length_text(plan),
        "rows": None if at(plan, "schedule", "steps") else "the rows",
        "devices": nodes * devices,
        "shared": " x ".join(f"{count(size)} {kind}-parallel" for kind, size in sizes.items() if size > 1),
        "mirror": setting(plan, "runtime.mirror"),
        "uncounted": unread if "images" in plan and not plan["images"] else None,
        "held": size(memory.get("device_bytes")),
        "verdict": "fits" if fits is True else "DOES NOT FIT" if fits is False else "size unknown",
        "peak": peak,
        "step_only": None if number(at(likely, "total")) else at(likely, "seconds_per_step"),
        "unknown_device": None if likely else "this device has no published figures here",
    }


# --- sections


def chosen_rows(plan: Plan) -> list[dict[str, Any]]:
    """The most important decisions: setting, value, what set it or why."""
    rows = {row["key"]: row for row in setting_rows(plan, SHOWN)}
    chosen = [rows[key] for key in SHOWN if key in rows and setting(plan, key) is not None]
    return [
        {
            **row,
            "value": shown(_brief(setting(plan, row["key"]))),
            "why": row["whose"] if row["whose"].startswith(_GIVEN) else row["reason"],
        }
        for row in chosen
    ]


def _brief(value: Any) -> Any:
    """Of a mapping with a type (a quantization) only that."""
    return value["type"] if isinstance(value, Mapping) and "type" in value else value


def decisions_section(plan: Plan) -> Section | None:
    """The most important decisions, then every setting."""
    if not (rows := setting_rows(plan, mapping(plan.get("settings")))):
        return None
    columns = {"setting": "`{key}`", "value": "`{value}`", "from": "{whose}", "why": "{reason}"}
    (every,) = table_of("All settings", columns, rows, "settings stack")
    sources = Counter(str(row["source"]) for row in rows).most_common()
    note = "by source: " + ", ".join(f"{how_many} {name}" for name, how_many in sources)
    columns = {"setting": "`{key}`", "value": "`{value}`", "why": "{why}"}
    first = table_of("The most important decisions", columns, chosen_rows(plan), "settings stack")
    folded = Folded(f"All {several(len(rows), 'setting')}", every, note)
    return Section("decisions", "Decisions", [*first, folded])


def setting_rows(plan: Plan, keys: Iterable[str]) -> list[dict[str, Any]]:
    """Settings as plan.json has them, each with its `key`, and `whose` value it is."""
    found, settings = [], mapping(plan.get("settings"))
    for key in sorted(keys):
        known = mapping(settings.get(key))
        if known:
            by, source = str(known.get("by") or ""), str(known.get("source") or "")
            place = Path(by).name if source in ("recipe", "parent", "override") else by
            whose = source if place in ("", source) else f"{source}: {place}"
            own = {"key": key, "value": shown(known.get("value")), "source": source, "whose": whose}
            found.append({**known, **own, "reason": str(known.get("reason") or "")})
    return found


def nodes_section(plan: Plan) -> Section | None:
    """Every number of nodes that an elastic run may have."""
    columns = {
        "nodes": "{num_nodes:count}",
        "micro-batch": "{batch.micro:count}",
        "accumulation": "{batch.accumulation:count}",
        "ranks": "{batch.data_parallel:count}",
        "memory of each device": "{needed_bytes:bytes}",
        "note": "[not used: {refused}][{converted}]",
    }
    converted = {True: "a checkpoint is converted first"}
    scopes = [
        {**found, "converted": converted.get(found.get("converts_checkpoint") is True)}
        for found in objects(plan.get("elastic"))
    ]
    table = table_of("Numbers of nodes", columns, scopes, "stack")
    return Section("nodes", "Numbers of nodes", table) if table else None


def time_section(plan: Plan) -> Section:
    """The estimated time, and what it rests on."""
    ends = [number(end) for end in listed(at(plan, "time", "generating"))]
    generating = " to ".join(f"{end:.0%}".replace("%", " %") for end in ends if end is not None)
    basis = at(plan, "time", "likely", "basis")
    notes = [
        [f"{generating} of it writes completions"] if generating else None,
        [f"from published figures, not measured: {basis}"] if basis else None,
    ]
    return Section("time", "Time", notes_of(notes), summary=summary(plan, *TIME))


def fixes_section(plan: Plan) -> Section | None:
    """The known fixes of the plan, what each has changed, why, and where it is known from."""
    columns = {
        "fix": ("`{id}`", "{title}"),
        "changed": "`{changes}`",
        "why": ("{reason}", "{source}"),
    }
    fixes = [{**fix, "changes": _changed(fix.get("changed"))} for fix in objects(plan.get("fixes"))]
    table = table_of("Known fixes that were applied", columns, fixes, "stack")
    return Section("fixes", "Known fixes applied", table, summary=str(len(fixes))) if table else None


def _changed(changed: Any) -> str:
    return ", ".join(f"{key} = {shown(value)}" for key, value in mapping(changed).items()) or "a warning"


def warnings_section(plan: Plan) -> Section | None:
    warnings = notes_of([str(warning)] for warning in listed(plan.get("warnings")))
    return Section("warnings", "Warnings", warnings, tone="warning") if warnings else None


_ENVIRONMENT = (
    Fact("hardware", "{label}"),
    Fact("memory of a device", "{device_bytes:bytes}"),
    Fact("compute capability", "{compute_capability:number}"),
    Fact("hosts", "{hosts}"),
)


def environment_section(plan: Plan, environment: Mapping[str, Any]) -> Section:
    """Hardware, versions, variables. environment: that of a run directory."""
    nodes = objects(at(environment, "bound", "nodes"))
    hosts = ", ".join(str(node.get("host") or shown(node)) for node in nodes)
    scope = {**mapping(plan.get("hardware")), "label": hardware_text(plan), "hosts": hosts}
    versions = _texts(environment) or _texts(mapping(plan.get("versions")))
    rows = [*rows_of(_ENVIRONMENT, scope), *(Row(name, [text]) for name, text in versions.items())]
    variables = [{"name": name, "value": value} for name, value in mapping(plan.get("env")).items()]
    table = table_of("Variables", {"variable": "`{name}`", "value": "`{value}`"}, variables)
    heading = f"{several(len(variables), 'environment variable')} of the workers"
    return Section("environment", "Environment", [Rows(rows), *(Folded(heading, one) for one in table)])


def _texts(found: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in found.items() if isinstance(value, str)}


def command_section(plan: Plan, environment: Mapping[str, Any], recipe: str) -> Section | None:
    """The command as it starts or was started, the recipe and the DeepSpeed config."""
    bound = listed(at(environment, "bound", "command"))
    words = [str(word) for word in bound or listed(plan.get("command"))]
    blocks: list[Block] = []
    if words:
        blocks.append(
            Listing("Command", " ".join(w if _LATE.fullmatch(w) else shlex.quote(w) for w in words))
        )
    if not bound and any(map(_LATE.fullmatch, words)):
        blocks.append(Text(["Values in braces are set when it starts."], "small"))
    if recipe:
        listing = Listing("Recipe", recipe, "yaml")
        blocks.append(Folded("The recipe, as given", listing, str(plan.get("recipe") or "")))
    if config := plan.get("ds_config"):
        text = json.dumps(config, indent=2, ensure_ascii=False, default=str)
        blocks.append(Folded("The DeepSpeed config", Listing("DeepSpeed config", text, "json")))
    return Section("command", "Command", blocks) if words or recipe else None
