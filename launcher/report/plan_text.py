"""A plan as plain text; the search, the estimate and the trace. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from launcher.engines import engine_named
from launcher.plan.plan import Plan
from launcher.planner.adapting import ways_out
from launcher.render.bundle import Bundle
from launcher.report import plan_sections
from launcher.report.memory_sections import memory_section
from launcher.report.sections import Block, Notes, Row, Rows, Section, filled, notes_of, table_of
from launcher.report.tables import WIDTH, gib, wrapped
from launcher.report.terminal import Page
from launcher.report.text import PLAIN, block_lines, flat, section_lines
from launcher.report.values import apart, cut, shown


def plan_text(bundle: Bundle, page: Page = PLAIN) -> str:
    """The plan as one page: facts, decisions with reasons, memory, time, fixes, command."""
    plan = bundle.to_json()
    own = ("device memory", "host memory", "time")  # the sections below begin with them
    facts = [row for row in plan_sections.facts(plan, _live(bundle.plan)) if row.name not in own]
    sections = (
        plan_sections.nodes_section(plan),
        plan_sections.decisions_section(plan),
        memory_section(plan),
        plan_sections.time_section(plan),
        plan_sections.fixes_section(plan),
        plan_sections.command_section(plan, {}, ""),
        plan_sections.warnings_section(plan),
    )
    return "\n".join([*_headed(plan, facts, page), *section_lines(sections, page)]) + "\n"


def brief_text(bundle: Bundle, more: str, page: Page = PLAIN) -> str:
    """What a run says before it starts: its facts, where the whole plan is (`more`), warnings."""
    plan = bundle.to_json()
    lines = _headed(plan, [*plan_sections.facts(plan, _live(bundle.plan)), Row("plan", [more])], page)
    width = page.within(WIDTH)
    lines += [line for warning in plan["warnings"] for line in wrapped(f"warning: {warning}", width=width)]
    return "\n".join(lines) + "\n"


def _headed(plan: Mapping[str, Any], facts: Sequence[Row], page: Page) -> list[str]:
    title = f"{flat(plan['recipe'])} on {plan_sections.hardware_text(plan)}"
    return [*map(page.heading, page.fitted(title)), *block_lines([Rows(facts)], page)]


def _live(plan: Plan) -> dict[str, Any]:
    """What plan.json does not have: facts of the model and the loss, and what is tried without memory."""
    vision, texts, gathered = plan.spec.vision, plan.job.sequences_per_sample, plan.job.gathered
    found: dict[str, Any] = {"texts": texts if texts > 1 else None}
    if vision is not None:
        parts = " and ".join(plan.model.freeze) or "nothing"
        found |= {"frozen": vision.frozen, "parts": parts, "why": plan.provenance["model.freeze"].reason}
    if plan.spec.expert_weights:
        found["router"] = _router_loss(plan.spec.config, is_on=plan.spec.router_loss)
    if plan.task.compares_texts and plan.task.compares(plan):
        compared = plan.batch.micro * gathered
        found |= {"negatives": compared * (texts - 1) - 1, "compared": compared}
        found["gathered"] = gathered if gathered > 1 else None
    if plan.on_oom != "fail":
        found["ways_out"] = ", then ".join(ways_out(plan)) or "nothing is left to change"
    return found


def _router_loss(config: Mapping[str, Any], *, is_on: bool) -> str:
    """Of a model with experts: whether its own configuration adds the auxiliary loss of the routers."""
    if not is_on:
        return "no auxiliary loss: output_router_logits is off in the model's configuration"
    share = config.get("router_aux_loss_coef", config.get("aux_loss_coef"))
    factor = "the class's router_aux_loss_coef" if share is None else share
    return f"auxiliary loss x {factor}: output_router_logits is on in the model's configuration"


def explain_text(plan: Mapping[str, Any], dotted: str) -> str:
    """Where a value came from; a section's name explains everything inside it, "" everything."""
    lines = []
    for key, known in sorted(plan["settings"].items()):
        if not dotted or key == dotted or key.startswith(dotted + "."):
            lines.append(f"{key} = {flat(shown(known['value']))}")
            lines.append(f"  from {known['source']}, {flat(known['by'])}: {known['reason']}")
    return "\n".join(lines) + "\n"


# --- memory of several strategies

_STRATEGY_WIDTH = 39
_COMMON = "backward"
"""The moment of training at which the parts of all rows are compared."""
_MARKS = {
    "forward": "f", "recompute": "r", "gradients": "g", "step": "o", "generate": "c", "saving": "s",
    "evaluating": "e", "loading": "l",
}  # fmt: skip
_LEGEND = (
    "weight to other: in the backward pass (other: buffers, temporaries, CUDA context); needs: highest peak, "
    "if not there: forward (f), recomputing (r), gradients (g), optimizer step (o), saving (s), evaluating "
    "(e), loading (l); batch: largest micro-batch that fits; host: of a node, data sets aside"
)
_ESTIMATE = {
    "strategy": "{name}", "weight": "{parts.weights:gib}", "grads": "{parts.gradients:gib}",
    "optim": "{parts.optimizer:gib}", "activ": "{parts.activations:gib}", "logits": "{parts.logits:gib}",
    "other": "{other:gib}", "needs": "{memory.needed:gib}[{mark}]", "fits": "{fits}", "batch": "{batch}",
    "host": "{memory.host_bytes:gib}",
}  # fmt: skip


def estimate_text(
    model: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], left_out: Sequence[Mapping[str, str]]
) -> str:
    """One block per machine and one line per strategy, in GiB."""
    published = model["published"]
    lines = [
        f"{model['name']}: {model['params']:,} parameters; {model['sequence_length']} tokens, "
        f"micro-batch {model['micro_batch']}",
        "published rules for all states on one device: ZeRO's paper (16 bytes a parameter) "
        f"{gib(published['zero_paper'])},",
        f"Hugging Face's page (18 bytes) {gib(published['hf_page'])}",
    ]
    for label, group in groupby(rows, key=lambda row: row["hardware"]):
        block = list(group)
        lines += ["", f"{label}, {gib(block[0]['memory']['device_bytes'])} a device; GiB on each device"]
        lines += block_lines(table_of(label, _ESTIMATE, map(_estimate, block), "numbers"))
    notes = dict.fromkeys(note for row in rows for note in row["memory"]["notes"])
    reasons: dict[str, list[str]] = {}
    for one in left_out:
        reasons.setdefault(one["reason"], []).append(one["strategy"])
    without = (f"left out: {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items())
    texts = [_LEGEND, *(f"note: {note}" for note in notes), *without]
    return "\n".join([*lines, "", *(part for text in texts for part in wrapped(text, ""))]) + "\n"


def _estimate(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with what is computed from it."""
    memory, batch = row["memory"], row["max_micro_batch"]
    parts = memory["phases"].get(_COMMON, memory["components"])
    moment = memory["phase"] if memory["moment"] == "training" else memory["moment"]
    return {
        **row,
        "name": cut(row["strategy"], _STRATEGY_WIDTH),
        "parts": parts,
        "other": sum(parts[name] for name in ("buffers", "temporary", "context", "nccl")),
        "mark": _MARKS.get(moment),
        "fits": {True: "yes", False: "no", None: "?"}[memory["fits"]],
        "batch": "?" if batch is None else str(batch),
    }


def trace_text(compared: Mapping[str, Any]) -> str:
    """The traced memory next to the closed form's, one line per component."""
    closed, traced = compared["closed_form"], compared["traced"]
    versions = ", ".join(f"{name} {version}" for name, version in compared["versions"].items())
    scopes = [
        {"name": name, "closed": size, "traced": traced["components"][name]}
        for name, size in closed["components"].items()
    ]
    totals = {"closed": closed["total"], "traced": traced["total"]}
    scopes.append({"name": "total", **totals, "off": apart(*totals.values())})
    columns = {"": "{name}", "closed form": "{closed:bytes}", "traced": "{traced:bytes}", "off": "[{off}]"}
    note = [f"the peak of the closed form is in {closed['phase']}, of the trace in {traced['phase']}"]
    blocks: list[Block] = [*table_of("Trace", columns, scopes, "numbers"), Notes([note])]
    section = Section("trace", f"trace of the real model ({versions}) and the closed form", blocks)
    return "\n".join(section_lines([section])) + "\n"


# --- the search

_MOST, _MOST_MISSES = 12, 3
"""Configurations shown that fit, and that do not."""


_RANKED = {
    "rank": "{rank}",
    "strategy": "{strategy}",
    "micro x acc": "{batch.micro:count} x {batch.accumulation:count}",
    # Whether something fits is judged by the estimate and its margin.
    "memory GiB": "{memory.low:gib} to {memory.high:gib}[ {unsure}]",
    "speed": "{relative_speed:number}",
    "s/step": "[{time.likely.seconds_per_step:number}]",
    "": "{trade}",
}
_MISSED = (
    "{strategy}, micro-batch {batch.micro:count}: needs {needs:bytes} with its margin, of "
    "{memory.device_bytes:bytes}"
)


def search_text(
    rows: Sequence[Mapping[str, Any]],
    compared: Mapping[str, int],
    left_out: Sequence[Mapping[str, str]],
    others: Sequence[str],
    *,
    timed: bool,
) -> str:
    """The fastest that fit, the nearest that do not, what cannot run.

    `others`: hardware that something would fit on. `timed`: speeds are this device's, not a stand-in's.
    """
    found = [_search(row, timed=timed) for row in rows]
    fitting, misses = [row for row in found if row["fits"]], [row for row in found if not row["fits"]]
    more, unsure = len(fitting) - _MOST, any(not row["fits_surely"] for row in fitting[:_MOST])
    implied = f"{compared['estimated']} estimated; {compared['implied']} have a smaller micro-batch than one "
    speeds = "speeds are predicted from published peaks and assumed shares of them; none was measured"
    stand_in = "this device has no published figures here: ranked by a stand-in's, without seconds"
    about = [implied + "that fits, which is never faster"] if compared["implied"] else []
    below = ["nothing fits"] if not fitting else []
    below += [f"… and {more} more that fit (--json shows all)"] if more > 0 else []
    below += (
        ["! fits by its estimate; the upper end of its range would not, so it is ranked lower"]
        if unsure
        else []
    )
    ranked = table_of("Search", _RANKED, fitting[:_MOST], "stack")
    count, samples = compared["configurations"], rows[0]["batch"]["global"]
    parts: dict[str, list[Block]] = {
        f"search: {count} configurations at one global batch of {samples} samples": [
            *notes_of([text] for text in (*about, speeds if timed else stand_in)), *ranked,
            *notes_of([text] for text in below),
        ],
        f"does not fit: {len(misses)}, the nearest of them": [
            *notes_of(filled(_MISSED, row) for row in misses[:_MOST_MISSES])
        ],
        "it would fit": [*notes_of([other] for other in others)],
        "left out": [*notes_of([f"{entry['what']}: {entry['reason']}"] for entry in left_out)],
    }  # fmt: skip
    lines = section_lines(Section("", title, blocks) for title, blocks in parts.items() if blocks)
    return "\n".join(lines[1:]) + "\n"


def _search(row: Mapping[str, Any], *, timed: bool) -> dict[str, Any]:
    """A row of the search with what is computed from it."""
    memory = row["memory"]
    return {
        **row,
        "strategy": strategy_name(row["settings"]),
        "unsure": None if row["fits_surely"] else "!",
        "needs": memory["needed"] + memory["margin"],
        "time": row["time"] if timed else None,
    }


def strategy_name(settings: Mapping[str, Any]) -> str:
    """`ZeRO-2, nf4, checkpointing` for the settings of a row."""
    stage, quantization = settings["sharding.zero_stage"], settings["model.quantization"]
    parts = [engine_named(settings["sharding.engine"]).label(stage)]
    parts += [] if quantization == "none" else [quantization]
    parts += ["checkpointing"] if settings["trainer.activation_checkpointing"] else []
    names = {"sharding.offload_optimizer": "optimizer", "sharding.offload_param": "parameters"}
    offloaded = [name for key, name in names.items() if settings[key] != "none"]
    parts += [f"offload {'both' if len(offloaded) == 2 else offloaded[0]}"] if offloaded else []
    parts += ["offload activations"] if settings["sharding.offload_activations"] != "none" else []
    return ", ".join(parts)
