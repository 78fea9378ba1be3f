"""A finished run that is made longer: asked for on the command line, with the earlier result until then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from grounds import make_base
from launched import effilaunch

from launcher.cli import main
from launcher.files.checkpoint import FINISHED_BEFORE

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm")

RECIPE = """\
model: {name_or_path: model}
adapter: {type: lora, r: 4}
data: {train: [{path: rows.jsonl}], max_length: 32}
global_batch_size: 4
trainer: {max_steps: 100000, learning_rate: 1.0e-2, logging_steps: 1, save_steps: 2}
"""


class Run:
    """`effilaunch run` of one recipe."""

    def __init__(self, folder: Path) -> None:
        make_base(folder, hidden_size=32, layers=1, heads=2)
        (folder / "r.yaml").write_text(RECIPE)
        self.folder, self.out = folder, folder / "out"

    def __call__(self, *words: str, fault: dict | None = None, expect: int = 0) -> dict:
        drill = {} if fault is None else {"EFFILAUNCH_DRILL": json.dumps(fault)}
        given = ("--on", "cpu", "--output-dir", self.out, *words)
        return effilaunch("run", self.folder / "r.yaml", *given, expect=expect, **drill)

    def steps(self) -> int:
        return json.loads((self.out / "result.json").read_text())["steps"]

    def elapsed(self, step: int) -> float:
        manifest = self.out / "checkpoints" / f"checkpoint-{step}" / "manifest.json"
        return json.loads(manifest.read_text())["elapsed"]

    def weights(self) -> bytes:
        return (self.out / "adapter" / "adapter_model.safetensors").read_bytes()


def to(steps: int) -> tuple[str, str]:
    return ("--set", f"trainer.max_steps={steps}")


@pytest.mark.slow
def test_the_earlier_result_is_of_use_until_the_longer_run_has_one(tmp_path, capsys):
    run = Run(tmp_path)
    run(*to(4))
    weights = run.weights()
    run("--resume", "auto", expect=2)  # the recipe's 100,000 steps are no wish of whoever forgets --set
    run("--resume", "auto", *to(8), fault={"fault": "kill-all", "step": 7}, expect=5)
    assert (run.steps(), run.weights()) == (4, weights)
    assert (run.out / FINISHED_BEFORE).is_file()
    assert (run.out / "checkpoints" / "checkpoint-6" / "manifest.json").is_file()
    capsys.readouterr()

    assert main(["generate", str(run.out), "w1 w2", "--json"]) == 0
    of_result = capsys.readouterr()
    assert "step 4" in of_result.err
    assert main(["generate", str(run.out), "w1 w2", "--json", "--checkpoint", "checkpoint-6"]) == 0
    assert "step 4" not in capsys.readouterr().err
    assert main(["merge", str(run.out), "--json", "--checkpoint", "checkpoint-6"]) == 0
    merged = json.loads(capsys.readouterr().out)["merged"]
    assert Path(merged["folder"]).name == "merged-checkpoint-6"
    assert "(checkpoint-6)" in Path(merged["folder"], "README.md").read_text()
    assert main(["merge", str(run.out), "--json", "--checkpoint", "checkpoint-7"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "no-checkpoint"

    before = json.loads((run.out / "result.json").read_text())
    assert before["total_seconds"] == pytest.approx(before["seconds"], abs=0.01)
    elapsed = {step: run.elapsed(step) for step in (4, 6)}
    assert 0 < elapsed[4] < before["seconds"]
    assert elapsed[6] > elapsed[4], "the start between is counted with the first"
    run("--resume", "auto", *to(8))
    assert run.steps() == 8
    result = json.loads((run.out / "result.json").read_text())
    assert result["resumed_at"] == 6
    assert result["total_seconds"] == pytest.approx(elapsed[6] + result["seconds"], abs=0.01)
    assert run.weights() != weights
    assert not (run.out / FINISHED_BEFORE).exists()
    assert (run.out / "COMPLETED").is_file()


@pytest.mark.slow
def test_a_stop_while_it_is_made_longer_keeps_the_result_and_one_that_never_finished_has_none(tmp_path):
    run = Run(tmp_path)
    run(*to(6), fault={"fault": "terminate", "step": 3}, expect=130)
    assert main(["generate", str(run.out), "w1"]) == 2
    (stopped,) = (run.out / "checkpoints").glob("checkpoint-[3-5]")
    assert main(["generate", str(run.out), "w1", "--checkpoint", stopped.name]) == 0
    run("--resume", "auto", *to(6))
    weights = run.weights()
    run("--resume", "auto", *to(12), fault={"fault": "terminate", "step": 9}, expect=130)
    assert (run.steps(), run.weights()) == (6, weights)
    assert main(["generate", str(run.out), "w1"]) == 0
