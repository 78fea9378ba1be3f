"""Trace the memory of the real model for a plan, in a child process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from launcher.errors import DoesNotFit
from launcher.machine.software import require_modules
from launcher.memory.allocator import expandable_in, reserved_beyond_allocated
from launcher.memory.estimate import estimate_memory
from launcher.memory.traced import choices_of, why_not
from launcher.models.memory_trace import LinearBytes, Trace, TracedStep, Untraceable, ask_child, read_step
from launcher.models.recorded_traces import recorded
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan
from launcher.planner.planner import make_plan
from launcher.recipe.loading import LoadedRecipe
from launcher.render.bundle import render
from launcher.report.outcome import note
from launcher.tasks import task_named

ROUNDS = 4
"""Largest number of traces: a traced memory can change the plan, which is then traced again."""

_OPTIMIZERS = "launcher.train.own_states"
"""The module that runs an optimizer of `python:`."""
_READ = (
    "adapter.", "model.", "precision", "sharding.", "task",
    "trainer.activation_checkpointing", "trainer.fp16", "trainer.max_grad_norm",
)  # fmt: skip
_UNREAD = frozenset(
    {
        "model.cache_dir", "model.chat_template", "model.config", "model.gguf_file", "model.name_or_path",
        "model.revision", "model.rope_parameters", "model.tokenizer",
        "sharding.offload_activations",  # where it is on, nothing is traced
        "sharding.optim_in_backward",  # a trace has all gradients; memory/ takes out those that are freed
    }
)  # fmt: skip
"""What of these a trace does not read."""


def with_trace(loaded: LoadedRecipe, facts: Facts, *, runs_code: bool = False) -> Facts:
    """The facts with a trace for the final plan; with a warning if the model cannot be traced.

    runs_code: a trace was asked for, so that an optimizer of `python:` may run.
    Raises MachineError if the training packages are missing.
    """
    require_modules(["torch", "transformers", "peft"])
    if runs_code and "optimizer" in facts.hooks:
        facts = _with_own_optimizer(loaded, facts)
    for count in range(ROUNDS + 1):
        plan = _plan(loaded, facts)
        choices = choices_of(plan.job, plan.hardware)
        known = facts.trace or Trace()
        if known.step_for(choices) is not None:
            return facts
        reason = why_not(plan.job, facts.model.task)
        if plan.adapter.path is not None:
            reason = "it continues an adapter from files"
        elif count == ROUNDS:
            reason = f"each of {ROUNDS} traces led to another plan"
        try:
            if reason is not None:
                raise Untraceable(reason)
            step, versions = trace_plan(plan)
        except Untraceable as error:
            if facts.model.made is not None:
                made = replace(facts.model.made, uncounted=str(error))
                return replace(facts, model=replace(facts.model, made=made))
            warning = f"the model could not be traced, so its memory is the closed form's: {error}"
            return replace(facts, warnings=(*facts.warnings, warning))
        facts = replace(facts, trace=known.with_step(step, versions))
    raise AssertionError("the last round ends with a warning")


def _with_own_optimizer(loaded: LoadedRecipe, facts: Facts) -> Facts:
    """The facts with what the optimizer of `python:` keeps after one step on tensors without values.

    With a warning where that cannot be had.
    """
    plan = _plan(loaded, facts)
    reason = ""
    if plan.has_adapter:
        reason = "an adapter is trained"
    elif "make_model" in facts.hooks:
        reason = "make_model makes the model"
    elif plan.job.engine.has_stages:
        reason = "DeepSpeed hands it parts of the weights"
    try:
        if reason:
            raise Untraceable(reason)
        settings = json.loads(render(plan).files["plan.json"])["settings"]
        request = {"ask": "optimizer", "plan": {"settings": settings}, "config": dict(plan.spec.config)}
        answer = ask_child(request, plan.interpreter, note, _OPTIMIZERS)
    except Untraceable as error:
        warning = f"your optimizer could not be traced, so its states are not counted: {error}"
        return replace(facts, warnings=(*facts.warnings, warning))
    return replace(facts, own_states=answer["bytes_of_value"])


def trace_rows(plan: Plan, facts: Facts) -> dict[str, Any] | None:
    """The key `trace` of `plan --trace --json`: both estimates of the job; None without a trace."""
    if facts.trace is None or facts.trace.step_for(choices_of(plan.job, plan.hardware)) is None:
        return None
    closed = estimate_memory(plan.spec, plan.job, plan.hardware)
    traced = estimate_memory(plan.spec, plan.job, plan.hardware, trace=facts.trace)
    both = {"closed_form": closed, "traced": traced}
    parts = {
        name: {"components": asdict(one.components), "total": one.total, "phase": one.phase}
        for name, one in both.items()
    }
    return {**parts, "versions": dict(facts.trace.versions or {})}


def _plan(loaded: LoadedRecipe, facts: Facts) -> Plan:
    try:
        return make_plan(loaded, facts)
    except DoesNotFit as error:
        plan: Plan = error.nearest_miss
        return plan


def trace_plan(plan: Plan) -> tuple[TracedStep, Mapping[str, str]]:
    """Trace one step; also the versions of the libraries. Raises Untraceable, MachineError."""
    request, choices = trace_request(plan), choices_of(plan.job, plan.hardware)
    if plan.spec.made is not None:
        from launcher.inputs.own_model import trace_made

        return trace_made(request, choices)
    expandable = expandable_in(plan.launch.env)

    def ask() -> dict[str, Any]:
        answer = ask_child(request, plan.interpreter, note)
        return {**answer, "fragmentation": _fragmentation(answer, expandable=expandable)}

    asked = {
        **{name: request[name] for name in ("ask", "config", "labels", "batches")},
        "settings": request["plan"]["settings"],
        "choices": choices,
        "accumulates": plan.job.accumulation != 1,
        "expandable": expandable,
    }
    answer = recorded(asked, plan.interpreter, ask, note)
    lost = answer["fragmentation"]
    return read_step(answer, choices, None if lost is None else LinearBytes(*lost)), answer["versions"]


def trace_request(plan: Plan) -> dict[str, Any]:
    """The request to the child process."""
    capability, micro = plan.hardware.compute_capability, plan.job.micro_batch
    settings = json.loads(render(plan).files["plan.json"])["settings"]
    return {
        "ask": "trace",
        "plan": {
            "settings": {
                n: {"value": one["value"]}
                for n, one in settings.items()
                if _is_read(n) or plan.spec.made is not None
            }
        },
        "memory": plan.job.to_json(),
        "config": dict(plan.spec.config),
        "labels": plan.spec.head.out_features if task_named(plan.spec.task).adds_head else None,
        "on_cpu": plan.hardware.is_cpu,
        "capability": None if capability is None else list(capability),
        "batches": [micro // 2 or 1, micro if micro > 1 else 2],
    }


def _is_read(name: str) -> bool:
    """Whether a trace reads this setting: its record holds for all plans that have these alike."""
    return name.startswith(_READ) and name not in _UNREAD


def _fragmentation(answer: Mapping[str, Any], *, expandable: bool) -> tuple[float, float] | None:
    """Bytes that the allocator reserves beyond the allocated peak: a constant, and a factor of the batch."""
    if answer["replays"] is None:
        return None
    lost = {
        replay["batch"]: reserved_beyond_allocated(replay["sizes"], replay["events"], expandable=expandable)
        for replay in answer["replays"]
    }
    if not lost:
        return 0.0, 0.0
    low, high = min(lost), max(lost)
    slope = (lost[high] - lost[low]) / (high - low) if high > low else 0.0
    return lost[low] - slope * low, slope
