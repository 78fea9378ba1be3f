"""grpo on two ranks through the command line: stopped within a generation and within a step, and resumed."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from launched import effilaunch

pytest.importorskip("torch")
pytest.importorskip("trl")

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from engine_runs import weights
from library_cases import CASES, make_ground

pytestmark = pytest.mark.usefixtures("warm")
ASKED = "TEST_SIGNAL"
HOOKS = f"""
import json
import os

import torch
from transformers import TrainerCallback

from launcher.train import agreement

agreement.AGREE_S = 0  # the ranks agree at each step, so that the test knows at which one they stop
ASKED = json.loads(os.environ.get("{ASKED}", "[]"))


class Signals(TrainerCallback):
    tokens = 0

    def send(self, moment, step):
        if ASKED[:3] == [moment, step, int(os.environ.get("RANK", 0))]:
            ASKED[:3] = []
            print(f"signalled: {{moment}} of step {{step}}", flush=True)
            os.kill(os.getpid(), ASKED[-1])

    def on_train_begin(self, args, state, control, model, **_):
        def one_token(module, args, kwargs):
            if not torch.is_grad_enabled() and kwargs["input_ids"].shape[1] == 1:
                self.send("generation", state.global_step + 1)

        model.register_forward_pre_hook(one_token, with_kwargs=True)

    def on_substep_end(self, args, state, control, **_):
        self.send("step", state.global_step + 1)


def callbacks():
    return [Signals()]
"""
STEPS = 6
RECIPE = f"""\
task: grpo
model: {{name_or_path: model}}
data: {{train: [{{path: rows.jsonl}}], max_length: 32}}
precision: fp32
global_batch_size: 8
reward:
- {{function: regular_expression, arguments: {{pattern: 'w[0-9]*[0-4]$'}}}}
- {{function: regular_expression, arguments: {{pattern: '7 w'}}, weight: 0.5}}
sharding: {{engine: ddp}}
generation: {{num_generations: 4, max_completion_length: 8}}
trainer: {{max_steps: {STEPS}, learning_rate: 1.0e-3, logging_steps: 1, save_steps: 100, num_iterations: 2,
          per_device_train_batch_size: 2}}
python: hooks.py
"""
"""A generation serves two steps: 1 and 2, 3 and 4, 5 and 6."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Path:
    folder = make_ground(CASES["grpo"], tmp_path_factory.mktemp("ground"))
    (folder / "hooks.py").write_text(HOOKS)
    (folder / "r.yaml").write_text(RECIPE)
    return folder


def run(
    ground: Path, out: Path, *more: object, on: str = "2xcpu", expect: int = 0, asked: object = ()
) -> str:
    """What it said."""
    words = ("run", ground / "r.yaml", "--on", on, "--output-dir", out, *more)
    return str(effilaunch(*words, expect=expect, **{ASKED: json.dumps(asked)})["said"])


def rows(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without times."""
    timed = ("time", "memory", "per_second", "runtime")
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if not name.endswith(timed)} for row in found]


@pytest.fixture(scope="module")
def whole(ground, warm_module, tmp_path_factory) -> Path:
    """The undisturbed run, with a checkpoint of each step."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(ground, out, "--set", "trainer.save_steps=1", "--set", "trainer.save_total_limit=9")
    return out


def log(out: Path) -> str:
    return "".join(file.read_text() for file in sorted((out / "logs").glob("rank-*.log")))


@pytest.mark.slow
def test_stopped_within_a_generation_and_within_a_step_it_ends_as_the_undisturbed_run(
    ground, whole, tmp_path
):
    out, resume = tmp_path / "out", ()
    # Step 3 generates for steps 3 and 4; the micro-batches of step 4 are in the checkpoint of step 3.
    for moment, step, rank in (("generation", 3, 1), ("step", 4, 0)):
        run(ground, out, *resume, expect=130, asked=[moment, step, rank, signal.SIGTERM])
        assert f"signalled: {moment} of step {step}" in log(out)
        told = json.loads((out / "stopped.json").read_text())
        assert (told["signal"], told["step"], told["checkpoint"]) == ("SIGTERM", step, f"checkpoint-{step}")
        resume = ("--resume", "auto")
    run(ground, out, *resume)
    assert "generated again" not in log(out)
    assert [row["step"] for row in rows(whole) if "loss" in row] == list(range(1, STEPS + 1))
    assert any(row["loss"] for row in rows(whole) if "loss" in row), "there was something to learn"
    assert rows(out) == rows(whole)
    expected, found = weights(whole), weights(out)
    assert found.keys() == expected.keys() != set()
    assert all(tensor.equal(found[key]) for key, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 4])
def test_one_rank_resumes_what_two_had(step, ground, whole, tmp_path):
    """Checkpoint-3 is within a generation, whose rest is written again; checkpoint-4 is at the end of one."""
    out = tmp_path / "out"
    run(ground, out, "--resume", whole / "checkpoints" / f"checkpoint-{step}", on="cpu")
    assert log(out).count("generated again") == (step == 3)
    found = [row for row in rows(out) if "loss" in row]
    assert [row["step"] for row in found] == list(range(step + 1, STEPS + 1))
    counts = [json.loads((run / "result.json").read_text())["rollouts"] for run in (out, whole)]
    for name in ("generations", "completions", "groups"):  # one that is made again counts once
        assert counts[0][name] == counts[1][name] > 0
