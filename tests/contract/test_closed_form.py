"""The closed form of memory against recorded traces of the real models, and the records against the tracer.

Seen with torch 2.13, transformers 5.23 and peft 0.21: layers of one kind within 0.5 %.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from closed_form_cases import KINDS, WINDOWS, every_case, windowed
from drawn import commit, is_drawn
from trace_records import TRACER, Records, digest, read_records, surroundings

from launcher.memory.estimate import estimate_memory

CASES = every_case()
RETRACE = (
    "import json, sys; from trace_records import retrace;"
    "print(json.dumps({name: retrace(name) for name in sys.argv[1:]}))"
)
VERSIONS = {name: version(name) for name in ("torch", "transformers")}
LIMITS = {kind: 0.01 for kind in KINDS} | {"mixed-layers": 0.03}


@pytest.fixture(scope="module")
def records() -> Records:
    return read_records(CASES)


def test_every_case_has_a_record_that_can_be_trusted(records: Records) -> None:
    assert not records.problems, "\n".join(f"{name}: {why}" for name, why in records.problems.items())
    assert records.answers.keys() == CASES.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_the_closed_form_is_what_was_traced(kind: str, records: Records) -> None:
    cases = [case for case in KINDS[kind]() if case.name in records.answers]
    assert cases, "no record to compare with"
    errors = {case.name: case.error(records.answers[case.name], VERSIONS) for case in cases}
    assert {name: error for name, error in errors.items() if abs(error) > LIMITS[kind]} == {}


def test_the_peak_of_mixed_layers_is_what_was_traced(records: Records) -> None:
    """States included, which the comparison above takes from the closed form."""
    cases = [case for case in KINDS["mixed-layers"]() if case.name in records.answers]
    errors = {case.name: case.error_of_peak(records.answers[case.name]) for case in cases}
    assert {name: error for name, error in errors.items() if abs(error) > 0.03} == {}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_longer_than_a_row_has_no_mask(name: str) -> None:
    """Full rows are traced without a mask of padding: one map for all rows, 0.3 % of these jobs."""
    for case in KINDS["windows"]():
        if case.name.startswith(f"{name}-"):
            length = case.job.sequence_length + 1
            wide = estimate_memory(windowed(name, length), case.job, case.hardware)
            assert (wide.total == case.closed().total) is case.job.padded, case.name


@pytest.mark.slow(share=1)
def test_a_tenth_is_traced_again(records: Records) -> None:
    names = [name for name in sorted(CASES) if is_drawn(name, 10, commit())]
    # In the order of their sets, which models walk, as in every trace.
    environ = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", RETRACE, *names], env=environ, stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    missing = {name: records.problems[name] for name in names if name not in records.answers}
    other = {name: differences(found[name], records.answers[name]) for name in names if name not in missing}
    wrong = missing | {name: places for name, places in other.items() if places}
    assert wrong == {}, "other traces may differ too: `make traces ALL=1` renews them"


def differences(found: Any, recorded: Any, place: str = "") -> list[str]:
    """Places of two answers whose values are not equal; byte counts to a millionth."""
    if isinstance(recorded, dict) and isinstance(found, dict) and recorded.keys() == found.keys():
        return [line for key in recorded for line in differences(found[key], recorded[key], f"{place}.{key}")]
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = enumerate(zip(found, recorded, strict=True))
        return [line for i, (new, old) in pairs for line in differences(new, old, f"{place}[{i}]")]
    numbers = isinstance(found, int | float) and isinstance(recorded, int | float)
    alike = found == (pytest.approx(recorded, rel=1e-6, abs=1) if numbers else recorded)
    return [] if alike else [f"{place}: {found}, recorded {recorded}"]


def rewritten(folder: Path, change: Any) -> dict[str, str]:
    """What is wrong with a file of two records after `change` of its parsed lines."""
    cases = {name: CASES[name] for name in sorted(CASES)[:2]}
    around = surroundings(TRACER)
    lines = [
        {"case": name, "digest": digest(case, ANSWER, around), "answer": ANSWER}
        for name, case in cases.items()
    ]
    path = folder / "records.jsonl"
    text = change(lines)
    path.write_text(text if isinstance(text, str) else "".join(f"{json.dumps(one)}\n" for one in lines))
    return dict(read_records(cases, path).problems)


ANSWER = {"moments": [], "states": {"weights": 1}, "depths": [4]}
FIRST, SECOND = sorted(CASES)[:2]


@pytest.mark.parametrize(
    ("change", "places"),
    [
        (lambda lines: None, set()),
        (lambda lines: lines[0]["answer"]["states"].update(weights=2), {FIRST}),  # both share the answer
        (lambda lines: lines[1].update(digest="0" * 16), {SECOND}),
        (lambda lines: lines.pop(0) and None, {FIRST}),
        (lambda lines: lines.append(lines[0]), {"records.jsonl:3"}),
        (lambda lines: lines[0].update(case="nowhere"), {"records.jsonl:1", FIRST}),
        (lambda lines: lines[0].pop("answer") and None, {"records.jsonl:1", FIRST}),
        (lambda lines: "{\n", {"records.jsonl:1", FIRST, SECOND}),
        (lambda lines: "7\n", {"records.jsonl:1", FIRST, SECOND}),
        (lambda lines: " ", {"records.jsonl:1", FIRST, SECOND}),
    ],
    ids=["good", "edited", "digest", "absent", "twice", "of-no-case", "no-answer", "not-json", "number",
         "empty"],
)  # fmt: skip
def test_a_record_that_cannot_be_trusted_is_named(change: Any, places: set[str], tmp_path: Path) -> None:
    def own_answers(lines: list[dict[str, Any]]) -> Any:
        for line in lines:
            line["answer"] = json.loads(json.dumps(ANSWER))
        return change(lines)

    assert rewritten(tmp_path, own_answers).keys() == places


def test_a_file_that_is_not_there_is_every_record_missing(tmp_path: Path) -> None:
    assert read_records(CASES, tmp_path / "none").problems.keys() == CASES.keys()


def test_a_changed_module_of_the_tracer_makes_every_record_stale(tmp_path: Path) -> None:
    for module in TRACER.glob("*.py"):
        (tmp_path / module.name).write_bytes(module.read_bytes())
    assert surroundings(tmp_path) == surroundings(TRACER)
    with (tmp_path / "tape.py").open("a") as module:
        module.write("# another\n")
    surroundings.cache_clear()
    stale = read_records(CASES, around=surroundings(tmp_path))
    assert stale.problems.keys() == CASES.keys()
    assert not stale.answers


def test_another_value_of_a_trace_is_told() -> None:
    name = random.Random(41).choice(sorted(CASES))
    recorded = json.loads(json.dumps(read_records(CASES).answers[name]))
    assert differences(json.loads(json.dumps(recorded)), recorded) == []
    changed = json.loads(json.dumps(recorded))
    changed["states"]["weights"] *= 1.0001
    changed["moments"][0]["segment"] += "x"
    assert [line.partition(":")[0] for line in differences(changed, recorded)] == [
        ".moments[0].segment", ".states.weights",
    ]  # fmt: skip
    changed["moments"].pop()
    assert len(differences(changed, recorded)) == 2
