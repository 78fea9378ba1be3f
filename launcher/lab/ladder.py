"""The memory ladder: rows of the search that are trained, one memory saving after the other.

A rung names what it changes in the recipe, and the rungs whose changes it keeps. Its row is the first that
the search finds for the recipe with these changes. A rung that is refused is shown with the reason, and those
above do without its changes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.engines.deepspeed import DEEPSPEED
from launcher.errors import EffilaunchError, Interrupted, MachineError, Problem, RecipeError, RunFailed
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
from launcher.planner.planner import miss, plan_first, predict_as_run
from launcher.planner.search import MICRO, Search, search
from launcher.planner.strategies import Changes
from launcher.recipe.loading import LoadedRecipe, load_recipe, with_changes
from launcher.recipe.schema import Recipe
from launcher.render.bundle import dump_json, render
from launcher.report.html.elements import tag
from launcher.report.html.page import page
from launcher.report.outcome import SCHEMA_VERSION
from launcher.report.run_display import Showing
from launcher.report.sections import Bars, Section, StackedBar, Table, Text
from launcher.report.tables import BYTES, amount
from launcher.report.text import block_lines

TINY_BATCH = 16
"""Largest global batch with `--tiny`, whose data has 64 rows."""
HELD_OUT = 0.1
"""Share of the rows that are evaluated if the recipe sets no data.eval."""
SGD_LEARNING_RATE = 1e-2
"""SGD multiplies the rate by the gradient, without Adam's normalisation."""
DATA = "data.json"


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder."""

    id: str
    title: str
    keeps: tuple[str, ...] = ()
    """Rungs whose changes it keeps."""
    spread: bool = False
    """Uses all devices (on a CPU: two processes); the others use one."""


_PURE = ("pure-16bit", "accumulation")
_ADAPTER = ("mixed", "accumulation", "on-device", "checkpointing")
_SHARDED = ("mixed", "accumulation", "checkpointing")
RUNGS: tuple[Rung, ...] = (
    Rung("fp32", "everything in 32 bits"),
    Rung("mixed", "16-bit arithmetic, 32-bit weights"),
    Rung("pure-16bit", "16-bit weights and optimizer states"),
    Rung("small-batch", "a quarter of the batch", ("pure-16bit",)),
    Rung("accumulation", "the full batch in micro-batches", ("pure-16bit",)),
    Rung("sgd", "SGD with cosine schedule: no optimizer states", _PURE),
    Rung("adamw-8bit", "AdamW with 8-bit states", _PURE),
    Rung("on-device", "the model is built on the device", (*_PURE, "sgd")),
    Rung("checkpointing", "activations are recomputed", (*_PURE, "sgd", "on-device")),
    Rung("lora", "an adapter is trained, the rest is frozen", _ADAPTER),
    Rung("int8", "8-bit frozen weights", (*_ADAPTER, "lora")),
    Rung("nf4", "4-bit frozen weights", (*_ADAPTER, "lora")),
    Rung("sharding", "ZeRO-3: all weights trained, sharded", _SHARDED, spread=True),
    Rung("cpu-offload", "ZeRO-3 with weights and states in host memory", _SHARDED, spread=True),
)
"""From the bottom up."""


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

    def on(self, rung: Rung) -> Hardware:
        """The devices of a rung: all, or one; on a CPU two processes that share its memory, or one."""
        hardware, is_cpu = self.hardware, self.hardware.is_cpu
        if rung.spread and not (is_cpu and hardware.num_devices == 1):
            return hardware
        processes = 2 if rung.spread else 1
        memory = hardware.device_bytes
        if is_cpu and memory is not None:
            memory = memory * hardware.devices_per_node // processes
        return replace(hardware, num_nodes=1, devices_per_node=processes, device_bytes=memory)

    def changes(self) -> dict[str, Changes]:
        """Rung -> what it changes in the recipe. None removes a key."""
        capability, adapter = self.hardware.compute_capability, self.recipe.adapter
        # A learning rate for adapters does not suit a full fine-tune, nor the other way round.
        rate = None if adapter is None else self.recipe.trainer.get("learning_rate")
        # A CPU computes in bf16, but no faster.
        has_bf16 = self.hardware.is_cpu or (capability is not None and capability >= AMPERE)
        half = "bf16" if has_bf16 else "fp16"
        small, micro = _divisor(self.batch, 4), _divisor(self.batch, 16)
        of_rank = _divisor(self.batch, self.on(RUNGS[-1]).num_devices)
        sharded = max(size for size in divisors(of_rank) if size <= micro)
        zero3 = {"engine": DEEPSPEED.name, "zero_stage": 3}
        return {
            "fp32": {"precision": "fp32"},
            "mixed": {"precision": half},
            "pure-16bit": {"precision": f"{half}-true"},
            "small-batch": {
                "global_batch_size": small,
                MICRO: small,
                "trainer.max_steps": self.steps * (self.batch // small),
            },
            "accumulation": {MICRO: micro},
            "sgd": {
                "trainer.optim": "sgd",
                "trainer.lr_scheduler_type": "cosine",
                "trainer.learning_rate": SGD_LEARNING_RATE,
            },
            "adamw-8bit": {"trainer.optim": "adamw_bnb_8bit"},
            "on-device": {"model.device_map": {"": 0}},
            "checkpointing": {"trainer.activation_checkpointing": True},
            "lora": {
                "adapter": {"type": "lora"} if adapter is None else adapter.model_dump(exclude_unset=True),
                "trainer.learning_rate": rate,
            },
            "int8": {"model.quantization": "int8"},
            "nf4": {"model.quantization": "nf4"},
            "sharding": {"sharding": zero3, MICRO: sharded},
            "cpu-offload": {
                "sharding": {**zero3, "offload_optimizer": "cpu", "offload_param": "cpu"},
                MICRO: sharded,
                "trainer.optim": "adamw_torch",  # DeepSpeedCPUAdam is what updates in host memory
            },
        }

    def refusals(self) -> dict[str, str]:
        """Rung -> why it is pointless here."""
        found: dict[str, str] = {}
        if self.batch == 1:
            reason = "the batch is one sample already"
            found |= {"small-batch": reason, "accumulation": reason}
        if self.hardware.is_cpu:
            found["on-device"] = "a CPU has no second memory: the model is built where it stays"
        elif self.hardware.num_devices == 1:
            found["sharding"] = f"{self.hardware.label} is one device: nothing to shard over"
        return found


def _divisor(batch: int, parts: int) -> int:
    """The largest divisor of `batch` that is at most `batch / parts`, at least 1."""
    return max(size for size in divisors(batch) if size <= max(1, batch // parts))


@dataclass(frozen=True, slots=True)
class LadderRow:
    """A rung as the search found it, or why it will not run."""

    rung: Rung
    kept: tuple[str, ...]
    """Those of `rung.keeps` that the search knows."""
    changed: Changes
    hardware: Hardware
    found: Search | None
    """None where nothing of it can run."""
    plan: Plan | None
    """What is trained; None with a refusal."""
    refusal: str | None


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


def plan_ladder(loaded: LoadedRecipe, facts: Facts, batch: int, steps: int) -> list[LadderRow]:
    """Search for every rung, from the bottom up.

    loaded, facts: as `gather` returns them. batch: global batch size of the start.
    """
    start = LadderStart(loaded.recipe, facts.hardware, batch, steps)
    changes, refusals = start.changes(), start.refusals()
    rows: dict[str, LadderRow] = {}
    for rung in RUNGS:
        kept = tuple(name for name in rung.keeps if rows[name].found is not None)
        there = replace(facts, hardware=start.on(rung), profile=None)
        found, plan, refusal = None, None, refusals.get(rung.id)
        if refusal is None:
            every = _without_savings(start)
            for name in (*kept, rung.id):
                every |= changes[name]
            try:
                asked = with_changes(loaded, every, f"ladder rung {rung.id}")
                found = search(asked, there)
                if found.first.fits:
                    plan = plan_first(asked, there, found)
                else:
                    refusal = miss(found.first, there).message
            except RecipeError as error:
                found, refusal = None, _messages(error)
        rows[rung.id] = LadderRow(rung, kept, changes[rung.id], there.hardware, found, plan, refusal)
    return list(rows.values())


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
    rows = [row for row in plan_ladder(planned, facts, batch, steps) if row.rung in chosen]
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
        "rungs": [_record(row) for row in rows],
    }
    climb = Climb(make_folder(output_dir, str(loaded.path), "ladder"), data, facts, shown)
    shown.say(f"{len(rows)} rungs, {steps} steps of {batch} samples each, in {climb.folder}")
    for number, (row, record) in enumerate(zip(rows, data["rungs"], strict=True), start=1):
        _train_row(climb, row, record, planned.recipe.data.metrics, f"[{number}/{len(rows)}]")
    if all(rung["status"] != "done" for rung in data["rungs"]):
        raise _nothing_ran(climb)
    return climb.folder, data


def _record(row: LadderRow) -> dict[str, Any]:
    """The record of a rung before it is trained."""
    unknown = ("measured", "load", "seconds", "metric", "run_dir")
    memory = None if row.found is None else row.found.first.memory
    return {
        "id": row.rung.id,
        "title": row.rung.title,
        "changed": dict(row.changed),
        "keeps": list(row.kept),
        "hardware": None if memory is None else row.hardware.label,
        "planned": None if memory is None else memory.total,
        **_predicted(memory),
        **dict.fromkeys(unknown),
        "status": "not-run" if row.refusal is None else "refused",
        "reason": row.refusal,
    }


def _predicted(memory: MemoryEstimate | None) -> dict[str, Any]:
    found = {} if memory is None else memory.to_json()
    keys = {"predicted": "total", "low": "low", "high": "high", "components": "components"}
    return {key: found.get(name) for key, name in keys.items()}


def _train_row(
    climb: Climb, row: LadderRow, record: dict[str, Any], metrics: Sequence[str], place: str
) -> None:
    """Train a row if it can run, and save the result. A failure is recorded, and the next row follows."""
    if row.plan is not None:
        climb.shown.say(f"{place} {row.rung.id}: {row.rung.title} …")
        try:
            _run(climb, row.rung, row.plan, record, metrics)
        except (Interrupted, KeyboardInterrupt) as stop:
            record |= {"status": "interrupted", "reason": "stopped by the user"}
            climb.save()
            hint = f"results so far are in {climb.folder}"
            raise Interrupted(Problem("interrupted", f"stopped at rung {row.rung.id}", hint=hint)) from stop
    climb.save()
    climb.shown.say(f"{place} {rung_line(record)}")


def _run(climb: Climb, rung: Rung, plan: Plan, record: dict[str, Any], metrics: Sequence[str]) -> None:
    """Run the plan of a rung and fill its record. An error of the data is raised: it would end every rung."""
    try:
        gpus = check_machine(plan)
        check_free_memory(plan.memory.needed, gpus, climb.shown.say)
    except MachineError as error:
        record |= {"status": "refused", "reason": _messages(error)}
        climb.lacking += error.problems
        return
    bundle = render(plan)
    run_dir = climb.folder / f"{RUNGS.index(rung) + 1:02d}-{rung.id}"
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
    title = f"{data['recipe']} on {data['hardware']}: {data['steps']} steps of {data['batch']} samples"
    return (
        "\n".join(["", title, *block_lines([_rung_table(data)]), "", f"plots: {folder}/ladder.html"]) + "\n"
    )


def _rung_table(data: Mapping[str, Any]) -> Table:
    return Table("Rungs", HEAD, [_row(rung) for rung in data["rungs"]])


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
    chart = Bars("Predicted by component, and measured", bars, limit=limit, legend=True)
    seconds = {rung["id"]: rung["seconds"] for rung in rungs if rung["seconds"] is not None}
    sections = [
        Section("memory", "Memory", [*(Text([text]) for text in about), chart, _rung_table(data)]),
        Section("time", "Seconds of training", [_bars("Seconds", "s", seconds)]),
        *_metric_sections(rungs),
        Section("changes", "What each rung changes", [_changes_table(rungs)]),
    ]
    title = f"Memory ladder of {data['model']}"
    return page(title, [tag("h1", title)], sections, f"ladder.json of {data['recipe']}")


def _changes_table(rungs: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for rung in rungs:
        changes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in rung["changed"].items())
        result = f"{rung['status']}: {rung['reason']}" if rung["reason"] else str(rung["status"])
        rows.append((rung["id"], changes or "nothing", ", ".join(rung["keeps"]) or "the start", result))
    return Table("Changes", ("rung", "changes", "keeps the changes of", "result"), rows)


def _bars(title: str, unit: str, values: Mapping[str, float | None]) -> Bars:
    """One bar per rung; only text for a value without a bar."""
    bars = [
        StackedBar(
            rung, {title: value} if value and value > 0 else {}, "" if value and value > 0 else _number(value)
        )
        for rung, value in values.items()
    ]
    return Bars(title, bars, unit)


def _metric_sections(rungs: Sequence[Mapping[str, Any]]) -> list[Section]:
    """One chart for each metric, since they have different scales."""
    found = [rung for rung in rungs if rung["metric"] is not None]
    sections = []
    for place, name in enumerate(dict.fromkeys(rung["metric"]["name"] for rung in found)):
        values = {r["id"]: r["metric"]["value"] for r in found if r["metric"]["name"] == name}
        chart = _bars(f"{name} at the end", "", values)
        sections.append(Section(f"metric-{place}", f"At the end: {name}", [chart]))
    return sections
