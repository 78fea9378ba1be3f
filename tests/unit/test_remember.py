"""The calibration file: written whole by many processes, never in the way of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from factories import facts, plan, with_settings
from patience import patience

from launcher.cli import main
from launcher.execute.remember import append_line, finished_run, remember_run
from launcher.machine import probe
from launcher.machine.hardware import parse_hardware
from launcher.memory.estimate import estimate_memory
from launcher.models.measured_runs import read_calibration
from launcher.planner.planner import predict_as_run

FACTS = facts("cpu")


def result(planned, **memory) -> dict:
    """result.json of a finished run of a plan, as far as it is kept."""
    measured = {
        "measured": planned.memory.total, "method": "cpu-tensor-storages", "allocated": None,
        "components": {"context": {"measured": 0}}, "device_bytes": None, "steps": 10,
        "tokens": {"planned": 512, "largest": 512},
    }  # fmt: skip
    return {"processes": 1, "memory": {**measured, **memory}}


@pytest.fixture
def planned(tmp_path):
    return plan(tmp_path, on="cpu", precision="fp32", trainer__per_device_train_batch_size=1)


def kept() -> list[dict]:
    path = probe.calibration_file()
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_is_kept_beside_its_estimate_and_read_by_the_next_plan(planned):
    assert remember_run(planned, result(planned), FACTS) is None
    found = read_calibration(probe.calibration_text(), planned.hardware, "here")
    (run,) = found.runs
    assert run.ratio == 1
    assert run.predicted == planned.memory.total
    after = estimate_memory(planned.spec, planned.job, planned.hardware, calibration=found)
    assert "1 run like it" in after.calibration


def test_nothing_of_a_record_names_model_data_or_machine(planned):
    remember_run(planned, result(planned), FACTS)
    text = probe.calibration_file().read_text().lower()
    for secret in ("huggyllama", "7b", "train.jsonl", os.uname().nodename.lower(), os.environ["HOME"], "/"):
        assert secret not in text


def test_a_record_holds_the_estimate_without_calibration(planned):
    first = finished_run(planned, result(planned, measured=2 * planned.memory.total), FACTS)
    calibrated = estimate_memory(
        planned.spec, planned.job, planned.hardware,
        calibration=read_calibration(first.to_line() * 9, planned.hardware, "here"),
    )  # fmt: skip
    assert calibrated.expected > 1.5 * calibrated.total
    again = finished_run(replace(planned, memory=calibrated), result(planned), FACTS)
    assert again.predicted == first.predicted


def test_shorter_rows_than_planned_are_no_error_of_the_estimate(planned):
    shorter = predict_as_run(planned, FACTS, 128)
    job = replace(planned.job, sequence_length=128)
    assert shorter.total == estimate_memory(planned.spec, job, planned.hardware).total < planned.memory.total
    for tokens in (512, None):
        assert predict_as_run(planned, FACTS, tokens).total == planned.memory.total
    brief = result(planned, measured=shorter.total, tokens={"planned": 512, "largest": 128})
    assert finished_run(planned, brief, FACTS).ratio == 1


def test_rehearsals_are_not_kept(planned):
    assert remember_run(with_settings(planned, {"tiny": True}), result(planned), FACTS) is None
    assert kept() == []


def test_a_folder_that_cannot_be_written_is_a_word_and_no_failure(planned, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "file"))
    said = remember_run(planned, result(planned), FACTS)
    assert "are not kept" in said
    assert str(tmp_path / "file") in said


def test_a_torn_line_is_ended_before_the_next(tmp_path):
    path = tmp_path / "new" / "calibration.jsonl"
    append_line(path, "one\n")
    with path.open("a") as stream:
        stream.write("half a li")
    append_line(path, "two\n")
    assert path.read_text() == "one\nhalf a li\ntwo\n"


def test_many_processes_append_whole_lines(tmp_path):
    path = tmp_path / "calibration.jsonl"
    program = (
        "import sys; from pathlib import Path; from launcher.execute.remember import append_line\n"
        "for i in range(200): append_line(Path(sys.argv[1]), sys.argv[2] * 5000 + '\\n')"
    )
    started = [subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in "abcd"]
    assert [process.wait(timeout=patience(120)) for process in started] == [0] * 4
    lines = path.read_text().splitlines()
    assert sorted(lines) == sorted(name * 5000 for name in "abcd" for _ in range(200))


RECIPE = """\
model: {name_or_path: huggyllama/llama-7b}
adapter: {type: lora, r: 8}
data: {train: [{path: rows.jsonl}], max_length: 512}
trainer: {max_steps: 10}
precision: fp32
"""


def planned_by_command(folder, capsys, *options: str) -> dict:
    (folder / "r.yaml").write_text(RECIPE)
    assert main(["plan", str(folder / "r.yaml"), "--json", *options]) in (0, 3)
    return json.loads(capsys.readouterr().out)


def test_plans_and_estimates_read_the_file_and_count_what_is_foreign(tmp_path, capsys):
    before = planned_by_command(tmp_path, capsys, "--on", "cpu")
    assert before["memory"]["calibration"] is None
    planned = plan(tmp_path, on="cpu", text=RECIPE)
    full = {"planned": None, "largest": None}
    found = result(planned, measured=int(1.1 * planned.memory.total), tokens=full)
    run = finished_run(planned, found, FACTS)
    path = probe.calibration_file()
    append_line(path, "# mine\n" + run.to_line())
    after = planned_by_command(tmp_path, capsys, "--on", "cpu")
    assert after["memory"]["calibration"] == (
        f"range from 1 run like it, which took 1.10 of their estimates, on cpu ({path})"
    )
    assert f"{path}: skipped 1 line(s) that are not from this version" in after["warnings"]
    assert after["memory"]["high"] > before["memory"]["high"]
    assert planned_by_command(tmp_path, capsys, "--on", "A100-80GB")["memory"]["calibration"] is None
    assert main(["estimate", str(tmp_path / "r.yaml"), "--on", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert any(row["memory"]["calibration"] == after["memory"]["calibration"] for row in rows)


def test_a_plan_for_this_machine_knows_its_host_memory(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(probe, "probe_hardware", lambda: parse_hardware("A100-80GB"))
    monkeypatch.setattr(probe, "host_memory_bytes", lambda: 10**9)
    (error,) = planned_by_command(tmp_path, capsys)["errors"]
    assert (error["code"], "0.93 GiB in the host's memory" in error["message"]) == ("does-not-fit", True)
    elsewhere = planned_by_command(tmp_path, capsys, "--on", "A100-80GB")
    assert "errors" not in elsewhere
    assert elsewhere["memory"]["host_bytes"] > 10**9


def test_offloading_more_than_the_host_holds_does_not_fit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(probe, "probe_hardware", lambda: parse_hardware("A100-80GB"))
    monkeypatch.setattr(probe, "host_memory_bytes", lambda: 10**9)
    offload = ("--set", "sharding.engine=deepspeed", "--set", "sharding.offload_optimizer=cpu")
    (error,) = planned_by_command(tmp_path, capsys, *offload)["errors"]
    assert error["code"] == "does-not-fit"
    assert "in the host's memory" in error["message"]
