"""What is shipped is planned without tracing: its records are there, are of this tracer, and are all used."""

from __future__ import annotations

import json

import pytest
from trace_records import TYPES, shipped_plans

from launcher.cli import main
from launcher.models import recorded_traces
from launcher.models.recorded_traces import SHIPPED, TRACER, digest, read_records, surroundings

CASES = sorted({record["case"] for record in read_records(SHIPPED)} | set(TYPES)) if SHIPPED.exists() else []


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("case", CASES)
def test_it_is_planned_from_its_records(case, tmp_path, capsys, monkeypatch):
    asked, upstream = [], recorded_traces.recorded

    def spy(about, *others):
        asked.append(about)
        return upstream(about, *others)

    for module in ("models.recorded_traces", "inputs.model_trace"):
        monkeypatch.setattr(f"launcher.{module}.recorded", spy)
    assert main([*shipped_plans(tmp_path)[case], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["method"] == "trace"
    kept = [record for record in read_records(SHIPPED) if record["case"] == case]
    around = surroundings(TRACER)
    used = {digest(about, one["answer"], around) for about in asked for one in kept}
    assert {one["digest"] for one in kept} <= used, "`make traces` removes what nothing asks"
