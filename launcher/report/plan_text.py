"""A plan as plain text: decisions, memory, time, fixes, command; the search and the trace. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from launcher.engines import engine_named
from launcher.knowledge.lint.document import printable
from launcher.plan.plan import Plan, Provenance
from launcher.planner.adapting import ways_out
from launcher.planner.parallel import NAMES
from launcher.render.bundle import Bundle
from launcher.report.tables import WIDTH, duration, gib, parameters, table, wrapped
from launcher.report.terminal import GREEN, RED, YELLOW, Page

# A word of the command with a value in it that is bound late: it needs no quotes.
_LATE = re.compile(r"[\w./:-]*\{(?:master_port|run_dir|devices)\}[\w./:-]*")
_LATE_NOTE = " (values in braces are set when it starts)"
_PLAIN = Page()
_WIDE = 120
"""Columns of the table of decisions."""
_THREE_COLUMNS = 90
"""Below this width, long reasons are on lines of their own."""
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


def plan_text(bundle: Bundle, page: Page = _PLAIN) -> str:
    """The plan as one page: job, decisions with reasons, memory, fixes, command."""
    plan, width = bundle.plan, page.within(WIDTH)
    words = [word if _LATE.fullmatch(word) else shlex.quote(word) for word in bundle.command]
    late = _LATE_NOTE if any(map(_LATE.fullmatch, bundle.command)) else ""
    lines = [
        *map(page.heading, page.fitted(_title(plan))),
        *(part for line in _job(plan) for part in page.fitted(line, hang=10)),
        "",
        page.heading("decisions"),
        *_decisions(plan, page),
        "",
        *memory_lines(plan, page),
        "",
        *_time_lines(plan.time.to_json(plan.schedule.steps), width),
        "",
        *fix_lines(plan, page),
        "",
        page.heading(f"command{late}"),
        "  " + " ".join(words),  # in one line, so that it can be copied
    ]
    if plan.warnings:
        lines += ["", page.heading("warnings", YELLOW)]
        lines += [line for warning in plan.warnings for line in wrapped(warning, width=width)]
    return "\n".join(lines) + "\n"


def brief_text(plan: Plan, more: str, page: Page = _PLAIN) -> str:
    """What a run says before it starts: job, memory, time, where the whole plan is (`more`), warnings."""
    width = page.within(WIDTH)
    time = plan.time.to_json(plan.schedule.steps)
    lines = [page.heading(line) for line in page.fitted(_title(plan))]
    lines += [part for line in _job(plan) for part in page.fitted(line, hang=10)]
    title, colour = _memory_title(plan)
    lines += [page.paint(line, *colour) for line in page.fitted(f"  memory    {title}", hang=10)]
    lines += page.fitted(f"  time      of a step: {_time_title(time)}", hang=10)
    lines.append(f"  plan      {more}")
    lines += [line for warning in plan.warnings for line in wrapped(f"warning: {warning}", width=width)]
    return "\n".join(lines) + "\n"


def _title(plan: Plan) -> str:
    return f"{printable(plan.recipe_file)} on {plan.hardware.label}"


def _job(plan: Plan) -> list[str]:
    """Model, batch, length and what happens when memory runs out."""
    model, batch, schedule = plan.spec, plan.batch, plan.schedule
    kind = "adapter" if plan.adapter.type else "full fine-tune"
    sizes = {kind: getattr(plan.sharding, key) for key, kind in NAMES.items()}
    shared = [f"{size} {kind}-parallel" for kind, size in sizes.items() if size > 1]
    copies = f"{batch.data_parallel} data-parallel x {' x '.join(shared)}"
    length = f"{schedule.steps} steps"
    if schedule.steps is None:
        epochs = "1 epoch" if schedule.epochs == 1 else f"{schedule.epochs:g} epochs"
        length = f"{epochs} of the rows; the steps are known when they are read"
    on_oom = f"adapt: {', then '.join(ways_out(plan)) or 'nothing is left to change'}"
    part = "" if model.wrapper is None else f", text model of {printable(model.wrapper)}"
    return [
        f"  model     {printable(model.name)}: {parameters(model.params)} parameters ({model.origin}{part}), "
        f"{parameters(plan.trainable_params)} trained ({kind})",
        *_frozen(plan),
        *_images(plan),
        *_reach(plan),
        *_router_loss(plan),
        f"  batch     {batch.micro} x {batch.accumulation} accumulation x {batch.data_parallel} rank(s) "
        f"= {batch.global_size} samples{_texts(plan)}, at most {schedule.tokens_per_step:,} tokens per step",
        *_negatives(plan),
        *_elastic(plan),
        *([f"  layout    {plan.hardware.num_devices} devices: {copies}"] if shared else []),
        f"  length    {length}",
        *([] if plan.on_oom == "fail" else [f"  on oom    {on_oom}"]),
        *([f"  mirror    {printable(plan.runtime.mirror)}"] if plan.runtime.mirror else []),
    ]


def _elastic(plan: Plan) -> list[str]:
    """Every number of nodes that the run may have, with its batch and memory."""
    useful = [count for count in plan.elastic if not count.refused and count.batch is not None]
    lines = []
    for count in useful:
        batch, memory = count.batch, "" if count.needed is None else f", {gib(count.needed)} a device"
        assert batch is not None, "it is not refused"
        numbers = f"{batch.micro} x {batch.accumulation} accumulation x {batch.data_parallel} rank(s)"
        converted = "; a checkpoint is converted first" if count.conversion else ""
        lines.append(f"{_nodes([count.num_nodes])}: {numbers}{memory}{converted}")
    refused: dict[str, list[int]] = {}
    for count in plan.elastic:
        if count.refused:
            refused.setdefault(count.refused, []).append(count.num_nodes)
    lines += [f"not on {_nodes(numbers)}: {why}" for why, numbers in refused.items()]
    return [f"  {'elastic' if line is lines[0] else '':<10}{line}" for line in lines]


def _nodes(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers))} {'node' if list(numbers) == [1] else 'nodes'}"


def _frozen(plan: Plan) -> list[str]:
    """Of a model of images and text: which parts are not trained."""
    if (vision := plan.spec.vision) is None:
        return []
    parts = " and ".join(plan.model.freeze) or "nothing"
    why = _why(plan.provenance["model.freeze"])
    return [f"  frozen    {parts}: {parameters(vision.frozen)} parameters ({why})"]


def _images(plan: Plan) -> list[str]:
    """For a vision-language model: the images of the prepared rows."""
    if plan.spec.vision is None:
        return []
    if plan.images is None:
        return ["  images    not counted yet: `effilaunch prepare` counts those of rows in local files"]
    tokens, images = plan.images.tokens, plan.images.images
    return [
        f"  images    {_spread(images)} per sample, {_spread(tokens)} tokens of images "
        f"({plan.images.samples:,} prepared samples)"
    ]


def _spread(numbers: Mapping[str, float]) -> str:
    return f"median {numbers['p50']:,.0f}, 95 % {numbers['p95']:,.0f}, at most {numbers['max']:,}"


def _reach(plan: Plan) -> list[str]:
    """Of a model with experts: what the adapters are put on."""
    reach = plan.reach
    if reach is None or reach.experts is None:
        return []
    experts, router = ("yes" if one else "no" for one in (reach.experts, reach.router))
    return [
        f"  adapters  reach {reach.params / 1e6:,.1f} M of {plan.spec.params / 1e6:,.1f} M parameters "
        f"(experts: {experts}, router: {router})"
    ]


def _texts(plan: Plan) -> str:
    """Of a task whose samples are several texts: how many, at most."""
    texts = plan.job.sequences_per_sample
    return f" of {texts} texts" if texts > 1 else ""


def _negatives(plan: Plan) -> list[str]:
    """Of a loss that compares the samples of a micro-batch: with how many texts."""
    if not (plan.task.compares_texts and plan.task.compares(plan)):
        return []
    compared = plan.batch.micro * plan.job.gathered
    documents = compared * (plan.job.sequences_per_sample - 1)
    ranks = f" on {plan.job.gathered} ranks" if plan.job.gathered > 1 else ""
    return [
        f"  negatives {documents - 1:,} for each anchor, the other texts of {compared:,} samples{ranks}: "
        "accumulation adds none"
    ]


def _router_loss(plan: Plan) -> list[str]:
    """Of a model with experts: whether its own configuration adds the auxiliary loss of the routers."""
    config = plan.spec.config
    if not plan.spec.expert_weights:
        return []
    if not plan.spec.router_loss:
        return ["  router    no auxiliary loss: output_router_logits is off in the model's configuration"]
    share = config.get("router_aux_loss_coef", config.get("aux_loss_coef"))
    factor = "the class's router_aux_loss_coef" if share is None else share
    return [f"  router    auxiliary loss x {factor}: output_router_logits is on in the model's configuration"]


def _decisions(plan: Plan, page: Page) -> list[str]:
    """Key, value and reason in columns; on a narrow page a long reason below its key."""
    width = page.within(_WIDE)
    shown = [key for key in SHOWN if key in plan.provenance and plan.at(key) is not None]
    rows = [(key, _brief(plan.at(key)), _why(plan.provenance[key])) for key in shown]
    if width >= _THREE_COLUMNS:
        return table(rows, width=width)
    lines = []
    for line, named, row in zip(table(rows), table([row[:2] for row in rows]), rows, strict=True):
        lines += [line] if len(line) <= width else [named, *wrapped(row[2], "      ", width=width)]
    return lines


def _why(setting: Provenance) -> str:
    """The file that sets it, the fix, or the reason."""
    if setting.source in ("recipe", "parent", "override"):
        return printable(Path(setting.by).name)
    return f"fix {setting.by}" if setting.source == "fix" else setting.reason


def _value(value: Any) -> str:
    if value is None:
        return "null"  # as a recipe writes it
    if isinstance(value, Mapping):
        return " ".join(f"{k}={v}" for k, v in value.items())
    return str(value)


def _brief(value: Any) -> str:
    """The value; of a mapping with a type (a quantisation) only that."""
    return _value(value["type"] if isinstance(value, Mapping) and "type" in value else value)


def fix_lines(plan: Plan, page: Page = _PLAIN) -> list[str]:
    """The known fixes that were applied, what each changed, and why."""
    changed = [", ".join(f"{k} = {_value(v)}" for k, v in fix.changed.items()) for fix in plan.fixes]
    rows = table([(fix.id, text or "warning") for fix, text in zip(plan.fixes, changed, strict=True)])
    lines = [page.heading(f"known fixes applied: {len(plan.fixes)}")]
    for row, fix in zip(rows, plan.fixes, strict=True):
        lines += [*page.fitted(row), *wrapped(fix.reason, "    ", width=page.within(WIDTH))]
    return lines


def explain_text(plan: Plan, dotted: str) -> str:
    """Where a value came from; a section's name explains everything inside it, "" everything."""
    keys = [k for k in sorted(plan.names) if not dotted or k == dotted or k.startswith(dotted + ".")]
    lines = []
    for key in keys:
        known = plan.provenance[key]
        value = _value(plan.at(key)).replace("\n", "\n    ")  # a line of it cannot pass for one of ours
        lines.append(f"{key} = {value}")
        lines.append(f"  from {known.source}, {printable(known.by)}: {known.reason}")
    return "\n".join(lines) + "\n"


# --- memory


_VISIBLE = 2**19
"""Bytes that are shown as more than 0 MiB."""


def memory_lines(plan: Plan, page: Page = _PLAIN) -> list[str]:
    """The memory of one device by component, as a range, compared with the size of the device."""
    memory, width = plan.memory.to_json(), page.within(WIDTH)
    title, colour = _memory_title(plan)
    title = f"memory of each device: {title}"
    lines = [page.heading(line, *colour) for line in page.fitted(title)]
    if memory["fits"] and memory["high"] > memory["device_bytes"]:
        lines += page.fitted("  it fits by its likely peak; the upper end of the range would not")
    if memory["calibration"]:
        lines += wrapped(memory["calibration"], width=width)
    scale = max(memory["components"].values(), default=0) or 1
    for name, size in memory["components"].items():
        bar = "#" * round(24 * size / scale)
        lines.append(f"  {name:12s} {gib(size):>11s}  {page.paint(bar, *colour)}".rstrip())
    keys = {"training": "total", "saving": "save_peak", "evaluating": "eval_peak", "loading": "load_peak"}
    peaks = ", ".join(f"{name} {gib(memory[key])}" for name, key in keys.items())
    lines += page.fitted(f"  peaks: {peaks}; the highest is {memory['moment']}")
    if memory["eval_kept"] >= _VISIBLE:
        lines += page.fitted(
            f"  each evaluation batch leaves {gib(memory['eval_kept'])} more where metrics read predictions, "
            "until trainer.eval_accumulation_steps"
        )
    parts = ", ".join(f"{name} {gib(size)}" for name, size in memory["host"].items() if size)
    host = f"{gib(memory['host_bytes'])}{f' ({parts})' if parts else ''}"
    lines += page.fitted(f"  host of each node, without data sets: {host}")
    return lines + [line for note in memory["notes"] for line in wrapped(f"note: {note}", width=width)]


def _memory_title(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """The peak, the device, the verdict; and the verdict's colours."""
    memory = plan.memory.to_json()
    held, fits = memory["device_bytes"], memory["fits"]
    verdict = {True: "fits", False: "DOES NOT FIT", None: "device size unknown"}[fits]
    colour = () if fits is None else (GREEN if fits else RED,)
    trained = " to ".join(dict.fromkeys((gib(memory["low"]), gib(memory["high"]))))
    if memory["moment"] == "training":
        return f"{trained} of {gib(held)}: {verdict} (peak in {memory['phase']})", colour
    # The range is that of training, which would contradict the verdict.
    moment = f"{memory['moment']}; training {trained}"
    return f"{gib(memory['needed'])} of {gib(held)}: {verdict} ({moment})", colour


_COLUMNS = ("weight", "grads", "optim", "activ", "logits", "other", "needs", "fits", "batch", "host")
_STRATEGY_WIDTH, _NUMBER_WIDTH = 39, 6


_COMMON = "backward"
"""The moment of training at which the parts of all rows are compared."""
_MARKS = {
    "forward": "f", "recompute": "r", "gradients": "g", "step": "o", "generate": "c", "saving": "s",
    "evaluating": "e", "loading": "l",
}  # fmt: skip


def estimate_text(
    model: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], left_out: Sequence[Mapping[str, str]]
) -> str:
    """One block per machine and one line per strategy, in GiB, at most 113 columns wide."""
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
        lines.append(_estimate_line("strategy", _COLUMNS))
        lines += [_estimate_line(row["strategy"], _cells(row)) for row in block]
    lines += [
        "",
        "weight to other: in the backward pass (other: buffers, temporaries, CUDA context); needs: highest",
        "peak, if not there: forward (f), recomputing (r), gradients (g), optimizer step (o), saving (s),",
        "evaluating (e), loading (l); batch: largest micro-batch that fits; host: of a node, data sets aside",
    ]
    notes = dict.fromkeys(note for row in rows for note in row["memory"]["notes"])
    reasons: dict[str, list[str]] = {}
    for one in left_out:
        reasons.setdefault(one["reason"], []).append(one["strategy"])
    lines += [f"note: {note}" for note in notes]
    for reason, names in reasons.items():
        lines += wrapped(f"left out: {', '.join(dict.fromkeys(names))}: {reason}", "")
    return "\n".join(lines) + "\n"


def _estimate_line(name: str, cells: Sequence[str]) -> str:
    short = name if len(name) <= _STRATEGY_WIDTH else name[: _STRATEGY_WIDTH - 1] + "…"
    return "  ".join([f"  {short:{_STRATEGY_WIDTH}s}", " ".join(cell.rjust(_NUMBER_WIDTH) for cell in cells)])


def _cells(row: Mapping[str, Any]) -> list[str]:
    memory = row["memory"]
    parts = memory["phases"].get(_COMMON, memory["components"])
    moment = memory["phase"] if memory["moment"] == "training" else memory["moment"]
    mark = _MARKS.get(moment, "")
    sizes = [parts[name] for name in ("weights", "gradients", "optimizer", "activations", "logits")]
    sizes.append(parts["buffers"] + parts["temporary"] + parts["context"] + parts["nccl"])
    batch = row["max_micro_batch"]
    return [
        *map(_gib_number, sizes),
        _gib_number(memory["needed"]) + mark,
        {True: "yes", False: "no", None: "?"}[memory["fits"]],
        "?" if batch is None else str(batch),
        _gib_number(memory["host_bytes"]),
    ]


def _gib_number(size: int) -> str:
    """GiB with as many places as five characters hold."""
    value = size / 2**30
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def trace_text(compared: Mapping[str, Any]) -> str:
    """The traced memory next to the closed form's, one line per component."""
    closed, traced = compared["closed_form"], compared["traced"]
    versions = ", ".join(f"{name} {version}" for name, version in compared["versions"].items())
    rows = [("", "closed form", "traced", "")]
    rows += [(n, gib(size), gib(traced["components"][n]), "") for n, size in closed["components"].items()]
    off = f"{traced['total'] / closed['total'] - 1:+.1%}"
    rows.append(("total", gib(closed["total"]), gib(traced["total"]), off))
    rows.append(("peak in", closed["phase"], traced["phase"], ""))
    lines = [f"  {name:12s} {a:>12s} {b:>12s}  {c}".rstrip() for name, a, b, c in rows]
    return "\n".join(["", f"trace of the real model ({versions}) and the closed form", *lines]) + "\n"


# --- time and the search

_MOST, _MOST_MISSES = 12, 3
"""Configurations shown that fit, and that do not."""


def _time_lines(time: Mapping[str, Any], width: int) -> list[str]:
    """The estimated time of a step and of the run, and what it rests on."""
    lines = wrapped(f"time of a step: {_time_title(time)}", "", width=width)
    if (likely := time.get("likely")) is None:
        return lines
    if split := time.get("generating"):
        of_it = f"{split[0]:.0%} to {split[1]:.0%} of it writes completions".replace("%", " %")
        lines += wrapped(of_it, width=width)
    return lines + wrapped(f"from published figures, not measured: {likely['basis']}", width=width)


def _time_title(time: Mapping[str, Any]) -> str:
    """The estimated seconds of a step and of all."""
    if time["seconds_per_step"] is None:
        return "not estimated, this device has no published figures here"
    likely = time["likely"]
    line = f"about {_seconds(likely['seconds_per_step'])}"
    if likely["total"] is not None:
        line += f"; all steps about {_seconds(likely['total'])}, without start, evaluations and checkpoints"
    return line


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 60 else duration(seconds)


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
    fitting, misses = [row for row in rows if row["fits"]], [row for row in rows if not row["fits"]]
    samples = rows[0]["batch"]["global"]
    lines = [f"search: {compared['configurations']} configurations at one global batch of {samples} samples"]
    if compared["implied"]:
        lines.append(
            f"  {compared['estimated']} estimated; {compared['implied']} have a smaller micro-batch than one "
            "that fits, which is never faster"
        )
    lines += [
        "  speeds are predicted from published peaks and assumed shares of them; none was measured"
        if timed
        else "  this device has no published figures here: ranked by a stand-in's, without seconds",
        "",
    ]
    lines += _ranked(fitting[:_MOST], timed=timed) if fitting else ["  nothing fits"]
    if len(fitting) > _MOST:
        lines.append(f"  … and {len(fitting) - _MOST} more that fit (--json shows all)")
    if not all(row["fits_surely"] for row in fitting[:_MOST]):
        lines.append("  ! fits by its estimate; the upper end of its range would not, so it is ranked lower")
    if misses:
        lines += ["", f"does not fit: {len(misses)}, the nearest of them"]
    for row in misses[:_MOST_MISSES]:
        memory = row["memory"]
        lines.append(
            f"  {strategy_name(row['settings'])}, micro-batch {row['batch']['micro']}: needs "
            f"{gib(memory['needed'] + memory['margin'])} with its margin, of {gib(memory['device_bytes'])}"
        )
    if others:
        lines += ["", "it would fit", *(line for other in others for line in wrapped(other))]
    if left_out:
        lines += ["", "left out"]
        lines += [line for entry in left_out for line in wrapped(f"{entry['what']}: {entry['reason']}")]
    return "\n".join(lines) + "\n"


def _ranked(rows: Sequence[Mapping[str, Any]], *, timed: bool) -> list[str]:
    """Two lines per row: the figures and the trade-off."""
    # The range of the estimate; whether something fits is judged by the estimate and its margin.
    head = ("rank", "strategy", "micro x acc", "memory GiB", "speed", "s/step" if timed else "")
    body = [
        (
            str(row["rank"]),
            strategy_name(row["settings"]),
            f"{row['batch']['micro']} x {row['batch']['accumulation']}",
            f"{row['memory']['low'] / 2**30:.1f} to {row['memory']['high'] / 2**30:.1f}"
            + ("" if row["fits_surely"] else " !"),
            f"{row['relative_speed']:.2f}",
            f"{row['time']['likely']['seconds_per_step']:.3g}" if timed else "",
        )
        for row in rows
    ]
    first, *figures = (line.rstrip() for line in table([head, *body]))
    trades = [wrapped(row["trade"], " " * 8) for row in rows]
    return [first, *(part for line, trade in zip(figures, trades, strict=True) for part in (line, *trade))]


def strategy_name(settings: Mapping[str, Any]) -> str:
    """`ZeRO-2, nf4, checkpointing` for the settings of a row."""
    stage, quantization = settings["sharding.zero_stage"], settings["model.quantization"]
    parts = [engine_named(settings["sharding.engine"]).label(stage)]
    parts += [] if quantization == "none" else [quantization]
    parts += ["checkpointing"] if settings["trainer.activation_checkpointing"] else []
    names = {"sharding.offload_optimizer": "optimizer", "sharding.offload_param": "parameters"}
    offloaded = [name for key, name in names.items() if settings[key] != "none"]
    parts += [f"offload {'both' if len(offloaded) == 2 else offloaded[0]}"] if offloaded else []
    return ", ".join(parts)
