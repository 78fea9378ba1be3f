"""The memory ladder: run a recipe with one memory saving after the other, predicted beside measured.

A rung is data: what it changes in the recipe, and the rungs whose changes it keeps. Every rung is planned by
the ordinary planner. A rung that is refused is shown with the reason, and those above do without its changes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.engines.deepspeed import DEEPSPEED
from launcher.errors import (
    DoesNotFit,
    EffilaunchError,
    Interrupted,
    MachineError,
    Problem,
    RecipeError,
    RunFailed,
)
from launcher.execute.remember import remember_run
from launcher.execute.run_dir import write_run_dir
from launcher.execute.start import execute, prepare_data
from launcher.execute.start_checks import check_free_memory, check_machine
from launcher.files.safe_files import write_text
from launcher.inputs.first_rows import data_problems
from launcher.inputs.planning_facts import gather
from launcher.knowledge.doctor.needs import NEEDED
from launcher.lab.options import choose, make_folder
from launcher.machine import probe
from launcher.machine.hardware import AMPERE, Hardware
from launcher.machine.software import require_modules
from launcher.memory.estimate import MemoryEstimate
from launcher.memory.tensor_parallel import divisors
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan
from launcher.planner.candidates import UPSTREAM_MICRO_BATCH
from launcher.planner.planner import make_plan, predict_as_run
from launcher.recipe.loading import LoadedRecipe, load_recipe, with_changes
from launcher.recipe.schema import Recipe
from launcher.render.bundle import dump_json, render
from launcher.report.html.charts import StackedBar, legend, stacked_bars
from launcher.report.html.elements import Markup, joined, tag
from launcher.report.html.elements import table as html_table
from launcher.report.html.page import PageSection, page
from launcher.report.outcome import SCHEMA_VERSION
from launcher.report.run_display import Showing
from launcher.report.tables import BYTES, amount, table

TINY_BATCH = 16
"""Largest global batch with `--tiny`, whose data has 64 rows."""
HELD_OUT = 0.1
"""Share of the rows that are evaluated if the recipe sets no data.eval."""
SGD_LEARNING_RATE = 1e-2
"""SGD multiplies the rate by the gradient, without Adam's normalisation."""
DATA = "data.json"

Changes = Mapping[str, Any]
"""Dotted recipe key -> value; None removes the key."""


@dataclass(frozen=True, slots=True)
class LadderStart:
    """What all rungs start from."""

    recipe: Recipe
    hardware: Hardware
    """All devices; most rungs use one."""
    batch: int
    """Global batch size at the start."""
    steps: int
    """Steps at that batch: each rung trains on the same number of samples."""

    @property
    def precision(self) -> str:
        """The 16-bit precision of the devices; a CPU has bf16, but no faster."""
        capability = self.hardware.compute_capability
        return "bf16" if self.hardware.is_cpu or (capability is not None and capability >= AMPERE) else "fp16"

    @property
    def small_batch(self) -> int:
        return _divisor(self.batch, 4)

    @property
    def micro_batch(self) -> int:
        """Micro-batch of the rungs that accumulate."""
        return _divisor(self.batch, 16)

    @property
    def spread(self) -> Hardware:
        """The hardware of the rungs that shard: on a CPU two processes, which share its memory."""
        if not self.hardware.is_cpu or self.hardware.num_devices > 1:
            return self.hardware
        memory = self.hardware.device_bytes
        return replace(
            self.hardware, devices_per_node=2, device_bytes=None if memory is None else memory // 2
        )

    @property
    def one_device(self) -> Hardware:
        """The hardware of the other rungs; on a CPU one process with all of its memory."""
        memory = self.hardware.device_bytes
        if self.hardware.is_cpu and memory is not None:
            memory *= self.hardware.devices_per_node
        return replace(self.hardware, num_nodes=1, devices_per_node=1, device_bytes=memory)


def _divisor(batch: int, parts: int) -> int:
    """The largest divisor of `batch` that is at most `batch / parts`, at least 1."""
    return max(size for size in divisors(batch) if size <= max(1, batch // parts))


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder."""

    id: str
    title: str
    keeps: tuple[str, ...]
    """Rungs whose changes it keeps."""
    changes: Callable[[LadderStart], Changes]
    refusal: Callable[[LadderStart], str | None] = lambda start: None
    """Why this rung is pointless here."""
    spread: bool = False
    """Uses all devices (on a CPU: two processes); the others use one."""


@dataclass(frozen=True, slots=True)
class Step:
    """A rung as it will be run, or why it will not."""

    rung: Rung
    kept: tuple[str, ...]
    """Those of `rung.keeps` that could be planned."""
    changed: Changes
    plan: Plan | None
    """With a refusal: the plan that does not fit, if there is one."""
    refusal: str | None


def _smaller_batch(start: LadderStart) -> Changes:
    return {
        "global_batch_size": start.small_batch,
        "trainer.per_device_train_batch_size": start.small_batch,
        "trainer.max_steps": start.steps * (start.batch // start.small_batch),
    }


def _accumulation(start: LadderStart) -> Changes:
    return {"trainer.per_device_train_batch_size": start.micro_batch}


def _sgd(start: LadderStart) -> Changes:
    return {
        "trainer.optim": "sgd",
        "trainer.lr_scheduler_type": "cosine",
        "trainer.learning_rate": SGD_LEARNING_RATE,
    }


def _lora(start: LadderStart) -> Changes:
    given = start.recipe.adapter
    return {
        "adapter": {"type": "lora"} if given is None else given.model_dump(exclude_unset=True),
        # A learning rate for adapters does not suit a full fine-tune, nor the other way round.
        "trainer.learning_rate": None if given is None else start.recipe.trainer.get("learning_rate"),
    }


def _zero3(start: LadderStart, **offload: str) -> Changes:
    per_rank = _divisor(start.batch, start.spread.num_devices)
    return {
        "sharding": {"engine": DEEPSPEED.name, "zero_stage": 3, **offload},
        "trainer.per_device_train_batch_size": max(
            size for size in divisors(per_rank) if size <= start.micro_batch
        ),
    }


def _offload(start: LadderStart) -> Changes:
    # adamw_torch: DeepSpeedCPUAdam is what updates in host memory.
    return {**_zero3(start, offload_optimizer="cpu", offload_param="cpu"), "trainer.optim": "adamw_torch"}


def _one_sample(start: LadderStart) -> str | None:
    return "the batch is one sample already" if start.batch == 1 else None


def _on_cpu(start: LadderStart) -> str | None:
    return "a CPU has no second memory: the model is built where it stays" if start.hardware.is_cpu else None


def _one_device(start: LadderStart) -> str | None:
    alone = start.spread.num_devices == 1
    return f"{start.hardware.label} is one device: nothing to shard over" if alone else None


_PURE = ("pure-16bit", "accumulation")
_ADAPTER = ("mixed", "accumulation", "on-device", "checkpointing")
_SHARDED = ("mixed", "accumulation", "checkpointing")
RUNGS: tuple[Rung, ...] = (
    Rung("fp32", "everything in 32 bits", (), lambda start: {"precision": "fp32"}),
    Rung("mixed", "16-bit arithmetic, 32-bit weights", (), lambda start: {"precision": start.precision}),
    Rung(
        "pure-16bit", "16-bit weights and optimizer states", (),
        lambda start: {"precision": start.precision + "-true"},
    ),
    Rung("small-batch", "a quarter of the batch", ("pure-16bit",), _smaller_batch, _one_sample),
    Rung("accumulation", "the full batch in micro-batches", ("pure-16bit",), _accumulation, _one_sample),
    Rung("sgd", "SGD with cosine schedule: no optimizer states", _PURE, _sgd),
    Rung(
        "adamw-8bit", "AdamW with 8-bit states", _PURE, lambda start: {"trainer.optim": "adamw_bnb_8bit"}
    ),
    Rung(
        "on-device", "the model is built on the device", (*_PURE, "sgd"),
        lambda start: {"model.device_map": {"": 0}}, _on_cpu,
    ),
    Rung(
        "checkpointing", "activations are recomputed", (*_PURE, "sgd", "on-device"),
        lambda start: {"trainer.activation_checkpointing": True},
    ),
    Rung("lora", "an adapter is trained, the rest is frozen", _ADAPTER, _lora),
    Rung("int8", "8-bit frozen weights", (*_ADAPTER, "lora"), lambda start: {"model.quantization": "int8"}),
    Rung("nf4", "4-bit frozen weights", (*_ADAPTER, "lora"), lambda start: {"model.quantization": "nf4"}),
    Rung("sharding", "ZeRO-3: all weights trained, sharded", _SHARDED, _zero3, _one_device, spread=True),
    Rung("cpu-offload", "ZeRO-3 with weights and states in host memory", _SHARDED, _offload, spread=True),
)  # fmt: skip
"""From the bottom up."""


def choose_rungs(only: str | None) -> tuple[Rung, ...]:
    """The rungs that `--only` names, all without it."""
    return choose(only, {rung.id: rung for rung in RUNGS}, "rung")


def start_batch(given: Recipe, *, tiny: bool) -> int:
    """Global batch size of the recipe, or upstream's default."""
    batch = given.global_batch_size
    if batch is None:
        micro = given.trainer.get("per_device_train_batch_size", UPSTREAM_MICRO_BATCH)
        batch = int(micro) * int(given.trainer.get("gradient_accumulation_steps", 1))
    return min(batch, TINY_BATCH) if tiny else batch


def plan_ladder(loaded: LoadedRecipe, facts: Facts, batch: int, steps: int) -> list[Step]:
    """Plan every rung, from the bottom up.

    loaded, facts: as `gather` returns them. batch: global batch size of the start.
    """
    start = LadderStart(loaded.recipe, facts.hardware, batch, steps)
    found: dict[str, Step] = {}
    for rung in RUNGS:
        kept = tuple(name for name in rung.keeps if found[name].plan is not None)
        changed = dict(rung.changes(start))
        refusal, plan = rung.refusal(start), None
        if refusal is None:
            changes = _without_savings(start)
            for name in kept:
                changes |= found[name].changed
            asked = with_changes(loaded, {**changes, **changed}, f"ladder rung {rung.id}")
            hardware = start.spread if rung.spread else start.one_device
            try:
                plan = make_plan(asked, replace(facts, hardware=hardware, profile=None))
            except DoesNotFit as error:
                plan, refusal = error.nearest_miss, _messages(error)
            except RecipeError as error:
                refusal = _messages(error)
        found[rung.id] = Step(rung, kept, changed, plan, refusal)
    return list(found.values())


def _messages(error: EffilaunchError) -> str:
    return "; ".join(problem.message for problem in error.problems)


_UNSET = (
    "adapter", "early_stopping", "hardware", "sharding", "model.quantization", "model.dtype",
    "model.device_map", "launch.launcher",
    *(
        f"trainer.{name}" for name in (
            "gradient_accumulation_steps", "num_train_epochs", "optim", "optim_args", "eval_steps",
            "save_steps", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
            "auto_find_batch_size",
        )
    ),
)  # fmt: skip


def _without_savings(start: LadderStart) -> dict[str, Any]:
    """Changes that remove every saving; a few steps, one evaluation at the end and no checkpoint."""
    recipe = start.recipe
    changes: dict[str, Any] = {
        **dict.fromkeys(_UNSET),
        "global_batch_size": start.batch,
        "trainer.per_device_train_batch_size": start.batch,
        "trainer.max_steps": start.steps,
        "trainer.activation_checkpointing": False,
        "trainer.save_strategy": "no",
        "trainer.eval_strategy": "no",
        "trainer.warmup_steps": 0,
    }
    if recipe.adapter is not None:
        changes["trainer.learning_rate"] = None
    if recipe.data.eval is None and not recipe.data.streaming:
        changes["data.eval"] = {"split": HELD_OUT}
    if recipe.model.attn_implementation == "flash_attention_2":
        # It has no 32-bit kernel, and all rungs are compared with the same attention.
        changes["model.attn_implementation"] = "sdpa"
    return changes


@dataclass(slots=True)
class Climb:
    """A ladder that is being run."""

    folder: Path
    data: dict[str, Any]
    """The content of ladder.json."""
    facts: Facts
    shown: Showing
    prepared: Path | None = None
    """data.json of the first rung: all rungs train on the same rows."""
    lacking: list[Problem] = field(default_factory=list)
    """What this machine lacks."""

    def save(self) -> None:
        """Write ladder.json and ladder.html with the results so far."""
        write_text(self.folder / "ladder.json", dump_json(self.data))
        write_text(self.folder / "ladder.html", ladder_page(self.data))


def climb_ladder(
    recipe: str,
    *,
    overrides: Sequence[str],
    on: str | None,
    tiny: bool,
    steps: int,
    only: str | None,
    output_dir: str | None,
    shown: Showing,
) -> tuple[Path, dict[str, Any]]:
    """Run the rungs; the ladder's directory and the content of ladder.json.

    If no rung ran: MachineError if the machine lacks something, else RunFailed. Results so far are kept after
    Interrupted.
    """
    chosen = choose_rungs(only)
    if steps < 1:
        raise RecipeError(Problem("usage", f"--steps {steps}: expected at least 1", "--steps"))
    loaded = load_recipe(recipe, overrides)
    if not tiny and (absent := data_problems(loaded)):
        raise RecipeError(absent)
    require_modules(NEEDED)
    batch = start_batch(loaded.recipe, tiny=tiny)
    planned, facts = gather(loaded, on, tiny=tiny)
    found = [step for step in plan_ladder(planned, facts, batch, steps) if step.rung in chosen]
    data: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "recipe": str(loaded.path),
        "model": facts.model.name,
        "hardware": facts.hardware.label,
        "device_bytes": facts.hardware.device_bytes,
        "batch": batch,
        "steps": steps,
        "tiny": tiny,
        "versions": dict(facts.versions),
        "rungs": [_record(step) for step in found],
    }
    climb = Climb(make_folder(output_dir, str(loaded.path), "ladder"), data, facts, shown)
    shown.say(f"{len(found)} rungs, {steps} steps of {batch} samples each, in {climb.folder}")
    for number, (step, record) in enumerate(zip(found, data["rungs"], strict=True), start=1):
        _run_rung(climb, step, record, planned.recipe.data.metrics, f"[{number}/{len(found)}]")
    if all(rung["status"] != "done" for rung in data["rungs"]):
        raise _nothing_ran(climb)
    return climb.folder, data


def _record(step: Step) -> dict[str, Any]:
    """The record of a rung before it is run."""
    unknown = ("measured", "load", "seconds", "metric", "run_dir")
    return {
        "id": step.rung.id,
        "title": step.rung.title,
        "changed": dict(step.changed),
        "keeps": list(step.kept),
        "hardware": None if step.plan is None else step.plan.hardware.label,
        "planned": None if step.plan is None else step.plan.memory.total,
        **_predicted(None if step.plan is None else step.plan.memory),
        **dict.fromkeys(unknown),
        "status": "not-run" if step.refusal is None else "refused",
        "reason": step.refusal,
    }


def _predicted(memory: MemoryEstimate | None) -> dict[str, Any]:
    found = {} if memory is None else memory.to_json()
    keys = {"predicted": "total", "low": "low", "high": "high", "components": "components"}
    return {key: found.get(name) for key, name in keys.items()}


def _run_rung(climb: Climb, step: Step, record: dict[str, Any], metrics: Sequence[str], place: str) -> None:
    """Run a rung if it can be run, and save the result. A failure is recorded, and the next rung follows."""
    if step.plan is not None and step.refusal is None:
        climb.shown.say(f"{place} {step.rung.id}: {step.rung.title} …")
        try:
            _run(climb, step, step.plan, record, metrics)
        except (Interrupted, KeyboardInterrupt) as stop:
            record |= {"status": "interrupted", "reason": "stopped by the user"}
            climb.save()
            hint = f"results so far are in {climb.folder}"
            raise Interrupted(Problem("interrupted", f"stopped at rung {step.rung.id}", hint=hint)) from stop
    climb.save()
    climb.shown.say(f"{place} {rung_line(record)}")


def _run(climb: Climb, step: Step, plan: Plan, record: dict[str, Any], metrics: Sequence[str]) -> None:
    """Run one rung and fill its record. An error of the data is raised: it would end every rung."""
    try:
        gpus = check_machine(plan)
        check_free_memory(plan.memory.needed, gpus, climb.shown.say)
    except MachineError as error:
        record |= {"status": "refused", "reason": _messages(error)}
        climb.lacking += error.problems
        return
    bundle = render(plan)
    run_dir = climb.folder / f"{RUNGS.index(step.rung) + 1:02d}-{step.rung.id}"
    record["run_dir"] = str(run_dir)
    write_run_dir(bundle, run_dir, resume=False)
    if climb.prepared is None:
        prepare_data(bundle, run_dir, echo=climb.shown.say, look=climb.shown.look)
        climb.prepared = run_dir / DATA
    else:
        shutil.copy(climb.prepared, run_dir / DATA)
    try:
        result = execute(
            bundle, run_dir, gpus=gpus, master_port=probe.free_port(), resume=None,
            prepare=False, echo=lambda line: None, look=climb.shown.begin(plan, run_dir),
        )  # fmt: skip
    except Interrupted:
        raise
    except EffilaunchError as error:
        record |= {"status": "failed", "reason": _messages(error)}
        return
    if unkept := remember_run(plan, result, climb.facts):
        climb.shown.say(unkept)
    memory = result["memory"]
    record |= {
        "status": "done",
        **_predicted(predict_as_run(plan, climb.facts, memory["tokens"]["largest"])),
        "measured": memory["measured"],
        "load": memory["load"]["measured"],
        "seconds": result["train_seconds"],
        "metric": _metric(result, metrics),
    }
    # Weights after a few steps are useless, and fourteen copies of a model would fill a disk.
    shutil.rmtree(run_dir / result["output"], ignore_errors=True)


def _metric(result: dict[str, Any], metrics: Sequence[str]) -> dict[str, Any]:
    """The recipe's first metric at the end, else the evaluation loss, else the last training loss."""
    for name in (*(f"eval_{name}" for name in metrics), "eval_loss"):
        if name in result["eval"]:
            return {"name": name, "value": result["eval"][name]}
    return {"name": "loss", "value": result["loss"]["last"]}


def _nothing_ran(climb: Climb) -> EffilaunchError:
    if climb.lacking:
        return MachineError(list(dict.fromkeys(climb.lacking)))
    file = str(climb.folder / "ladder.json")
    reasons = [f"{rung['id']}: {rung['reason']}" for rung in climb.data["rungs"]]
    return RunFailed([Problem("no-rung-ran", reason, file=file) for reason in reasons])


HEAD = ("rung", "predicted", "measured", "off", "load", "seconds", "metric", "what it does")
LONGEST_REASON = 96
"""Characters of a reason in a table; ladder.json has all of it."""


def rung_line(rung: Mapping[str, Any]) -> str:
    """The result of one rung."""
    if rung["status"] != "done":
        return f"{rung['id']}: {_not_done(rung)}"
    return (
        f"{rung['id']}: measured {_bytes(rung['measured'])}, predicted {_bytes(rung['predicted'])} "
        f"({_off(rung)}), {rung['seconds']:.1f} s, {_metric_text(rung['metric'])}"
    )


def ladder_text(data: Mapping[str, Any], folder: Path) -> str:
    """The table, and the path of the page."""
    rows = [HEAD, *(_row(rung) for rung in data["rungs"])]
    title = f"{data['recipe']} on {data['hardware']}: {data['steps']} steps of {data['batch']} samples"
    return "\n".join(["", title, *table(rows), "", f"plots: {folder}/ladder.html"]) + "\n"


def _row(rung: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        rung["id"],
        _bytes(rung["predicted"]),
        _bytes(rung["measured"]),
        _off(rung),
        _bytes(rung["load"]),
        "" if rung["seconds"] is None else f"{rung['seconds']:.1f}",
        "" if rung["metric"] is None else _metric_text(rung["metric"]),
        rung["title"] if rung["status"] == "done" else _not_done(rung),
    )


def _bytes(size: float | None) -> str:
    return "" if size is None else amount(size, BYTES)


def _off(rung: Mapping[str, Any]) -> str:
    """The deviation of the prediction from the measurement."""
    if not rung["measured"] or rung["predicted"] is None:
        return ""
    return f"{rung['predicted'] / rung['measured'] - 1:+.1%}"


def _metric_text(metric: Mapping[str, Any]) -> str:
    return f"{metric['name']} {_number(metric['value'])}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _not_done(rung: Mapping[str, Any]) -> str:
    reason = rung["reason"] or ""
    if len(reason) > LONGEST_REASON:
        reason = reason[: LONGEST_REASON - 1].rstrip() + "…"
    return f"{rung['status']}: {reason}"


def ladder_page(data: Mapping[str, Any]) -> str:
    """Table and charts as one HTML file."""
    rungs = data["rungs"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(data["versions"].items()))
    about = [
        f"{data['recipe']}: {data['model']} on {data['hardware']}; every rung trains on the samples of "
        f"{data['steps']} steps of {data['batch']}.",
        "Bars are the predicted memory of one device by component, at the peak of training; marks are what "
        "was measured.",
        f"Measured with {versions}.",
    ]
    bars = [
        StackedBar(
            rung["id"],
            {name: float(size) for name, size in (rung["components"] or {}).items()},
            "" if rung["status"] == "done" else _not_done(rung),
            measured=rung["measured"],
        )
        for rung in rungs
    ]
    limit = ("device", float(data["device_bytes"])) if data["device_bytes"] else None
    memory = [
        *(tag("p", text) for text in about),
        legend(bars),
        stacked_bars("Predicted by component, and measured", bars, limit=limit),
        html_table("Rungs", HEAD, [_row(rung) for rung in rungs]),
    ]
    seconds = {rung["id"]: rung["seconds"] for rung in rungs if rung["seconds"] is not None}
    sections = [
        PageSection("memory", "Memory", joined(memory)),
        PageSection("time", "Seconds of training", _bars("Seconds", "s", seconds)),
        *_metric_sections(rungs),
        PageSection("changes", "What each rung changes", _changes_table(rungs)),
    ]
    title = f"Memory ladder of {data['model']}"
    return page(title, [tag("h1", title)], sections, f"ladder.json of {data['recipe']}")


def _changes_table(rungs: Sequence[Mapping[str, Any]]) -> Markup:
    rows = []
    for rung in rungs:
        changes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in rung["changed"].items())
        result = f"{rung['status']}: {rung['reason']}" if rung["reason"] else str(rung["status"])
        rows.append((rung["id"], changes or "nothing", ", ".join(rung["keeps"]) or "the start", result))
    return html_table("Changes", ("rung", "changes", "keeps the changes of", "result"), rows)


def _bars(title: str, unit: str, values: Mapping[str, float | None]) -> Markup:
    """One bar per rung; only text for a value without a bar."""
    bars = [
        StackedBar(
            rung, {title: value} if value and value > 0 else {}, "" if value and value > 0 else _number(value)
        )
        for rung, value in values.items()
    ]
    return stacked_bars(title, bars, unit=unit)


def _metric_sections(rungs: Sequence[Mapping[str, Any]]) -> list[PageSection]:
    """One chart for each metric, since they have different scales."""
    found = [rung for rung in rungs if rung["metric"] is not None]
    sections = []
    for place, name in enumerate(dict.fromkeys(rung["metric"]["name"] for rung in found)):
        values = {r["id"]: r["metric"]["value"] for r in found if r["metric"]["name"] == name}
        body = _bars(f"{name} at the end", "", values)
        sections.append(PageSection(f"metric-{place}", f"At the end: {name}", body))
    return sections
