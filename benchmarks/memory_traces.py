"""Traces (T1) of many plans: the tracing process's own function, forked for each plan after one import."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from runner import in_process

from launcher.facts.memory_trace import Trace, Untraceable
from launcher.inputs import model_trace
from launcher.plan.plan import Plan

TIMEOUT_S = 300


def trace_of(name: str, plan: Plan) -> Trace | None:
    """The trace of the plan's job; None where it cannot be traced, with a line that says why."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import peft  # noqa: F401  # once for all that are forked from here

    import launcher.train.model.adapters
    import launcher.train.trace.run  # noqa: F401

    model_trace.ask_child = ask_forked
    try:
        step, versions = model_trace.trace_plan(plan)
    except Untraceable as error:
        print(f"{name}: no trace: {error}", file=sys.stderr)
        return None
    return Trace().with_step(step, versions)


def ask_forked(request: Mapping[str, Any], python: str) -> dict[str, Any]:
    """In place of launcher.facts.memory_trace.ask_child, which starts an interpreter for every question."""
    answer = in_process(_answer, TIMEOUT_S, request, quiet=True)
    if "error" in answer:
        raise Untraceable(answer["error"])
    return answer


def _answer(request: Mapping[str, Any]) -> Any:
    from launcher.train.trace.run import ANSWERS

    return ANSWERS[request["ask"]](request)
