"""Reward functions that fail, before a run and within it; plans of groups, vLLM and the reference."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

from launcher.errors import RecipeError, RunFailed
from launcher.files.checkpoint import MANIFEST
from launcher.recipe.loading import load_recipe
from launcher.train.rewards.calls import for_trl, load_rewards

sys.path.insert(0, str(Path(__file__).parent))
from library_cases import CASES, llama, make_ground, make_run
from plans import LORA, trained
from small import job, lora, tokenizer
from small import llama as small_llama

BAD = {
    "raises": ("raise KeyError(columns['answer'][0])", "reward-failed"),
    "exits": ("sys.exit(3)", "reward-failed"),
    "text": ("return ['good'] * len(completions)", "reward-value"),
    "one text": ("return 'good'", "reward-value"),
    "number": ("return 1.0", "reward-value"),
    "nan": ("return [float('nan') if a == '2' else 1.0 for a in columns['answer']]", "reward-value"),
    "count": ("return [1.0] * (len(completions) + 1)", "reward-value"),
    "hangs": ("time.sleep(60 if '2' in columns['answer'] else 0); return [1.0] * len(completions)",
              "reward-hangs"),
    "hangs in a pattern": ("return [float(bool(re.match('(a+)+$', 'a' * 40 + 'b')))] * len(completions)",
                           "reward-hangs"),
}  # fmt: skip
ROWED = {"nan": "rows.jsonl:2", "hangs": "rows.jsonl:2", "raises": "rows.jsonl:1", "text": "rows.jsonl:1"}
"""Case -> the row that is named."""
ROWS = [
    {
        "prompt": "w1",
        "place": f"rows.jsonl:{n}",
        "columns": {"answer": str(n)},
        "reference": ["answer", str(n)],
    }
    for n in (1, 2, 3)
]


def entries(folder: Path, body: str, **more: object) -> list[dict]:
    file = folder / "rewards.py"
    file.write_text(f"import re, sys, time\ndef f(completions, **columns):\n    {body}\n")
    return [{"function": f"{file}:f", "weight": 1.0, "arguments": {}, "time_limit": 2.0, **more}]


def tried(folder: Path, body: str, **more: object) -> dict:
    from launcher.train.rewards.trial import try_rewards

    work = job(folder / "run", {"task": "grpo", "reward": entries(folder, body, **more)})
    return try_rewards(work, tokenizer(), ROWS)


@pytest.mark.parametrize("name", [name for name in BAD if name != "hangs in a pattern"])
def test_a_function_that_fails_ends_the_run_before_it_starts(tmp_path, name):
    body, code = BAD[name]
    with pytest.raises(RecipeError) as caught:
        tried(tmp_path, body)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == (code, "reward[0].function")
    assert problem.file == str(tmp_path / "rewards.py")
    assert ROWED.get(name, "") in problem.message
    if name == "raises":
        assert problem.line == 3


@pytest.mark.parametrize("name", BAD)
def test_a_function_that_fails_in_training_names_itself_and_the_row(tmp_path, name):
    body, code = BAD[name]
    (reward,) = load_rewards(entries(tmp_path, body, time_limit=0.5))
    given, texts = [{"place": row["place"], "columns": row["columns"]} for row in ROWS], ["", "", ""]
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(RunFailed) as caught:
        for_trl(reward)(texts, texts, [[], [], []], row_of_data=given)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path, RunFailed.exit_code) == (code, "reward[0].function", 5)
    assert "reward function f" in problem.message
    assert ROWED.get(name, "") in problem.message
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_process_that_dies_is_an_error_with_its_status(tmp_path):
    with pytest.raises(RecipeError) as caught:
        tried(tmp_path, "import os; os._exit(7)")
    (problem,) = caught.value.problems
    assert (problem.code, "status 7" in problem.message) == ("reward-failed", True)


def test_secrets_that_a_function_prints_are_not_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a1B2" * 8)
    found = tried(
        tmp_path, "import os; print('it is', os.environ['HF_TOKEN']); return [len(c) for c in completions]"
    )
    said = capsys.readouterr().out
    assert "it is" in said
    assert os.environ["HF_TOKEN"] not in said
    assert found["values"]["f"] == {"reference": [1.0, 1.0, 1.0], "empty": [0.0, 0.0, 0.0]}
    assert (found["warning"], found["reference_column"]) == (None, "answer")


def test_a_reward_that_does_not_prefer_the_reference_is_a_warning_with_the_values(tmp_path, capsys):
    found = tried(tmp_path, "return [None if len(c) else 0.5 for c in completions]")
    assert found["totals"] == {"reference": 0.0, "empty": 0.5}
    assert found["warning"] in capsys.readouterr().out


RECIPE = """\
task: grpo
model: {name_or_path: Qwen/Qwen2.5-0.5B}
data: {train: [{path: rows.jsonl}], max_length: 1024}
reward: [{function: numeric_answer}]
"""


@pytest.mark.parametrize(
    ("more", "code", "path"),
    [
        ("global_batch_size: 12", "groups-not-whole", "global_batch_size"),
        ("global_batch_size: 16\ntrainer: {steps_per_generation: 3, per_device_train_batch_size: 2}",
         "groups-not-whole", "trainer.steps_per_generation"),
        ("generation: {backend: vllm-colocate}\ntrainer: {vllm_gpu_memory_utilization: 0.01}",
         "vllm-too-small", "trainer.vllm_gpu_memory_utilization"),
        ("generation: {backend: vllm-colocate}\ntrainer: {vllm_tensor_parallel_size: 3}", "vllm-ranks",
         "trainer.vllm_tensor_parallel_size"),
    ],
)  # fmt: skip
def test_what_trl_and_vllm_would_refuse_is_found_while_planning(tmp_path, more, code, path):
    from launcher.inputs.planning_facts import gather
    from launcher.planner.planner import make_plan

    file = tmp_path / "r.yaml"
    file.write_text(RECIPE + more + "\n")
    with pytest.raises(RecipeError) as caught:
        make_plan(*gather(load_recipe(file), "2xA100-80GB"))
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == (code, path)


@pytest.mark.parametrize("backend", ["transformers", "vllm-colocate", "vllm-server"])
def test_the_arguments_of_every_backend_are_trls(tmp_path, backend):
    from trl import GRPOConfig

    from launcher.inputs.planning_facts import gather
    from launcher.planner.planner import make_plan

    file = tmp_path / "r.yaml"
    server = "\ntrainer: {vllm_server_host: gpu1, vllm_server_port: 8001, vllm_server_timeout: 60}"
    colocate = "\ntrainer: {vllm_enable_sleep_mode: true, vllm_tensor_parallel_size: 2}"
    more = {"vllm-server": server, "vllm-colocate": colocate}.get(backend, "")
    file.write_text(f"{RECIPE}generation: {{backend: {backend}}}{more}\n")
    plan = make_plan(*gather(load_recipe(file), "8xA100-80GB"))
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    fields = {name: value for name, value in plan.fields(plan.trainer).items() if name in known}
    assert set(plan.fields(plan.trainer)) - known == set()
    cpu = {"bf16": False, "tf32": None, "use_cpu": True, "output_dir": str(tmp_path)}
    args = GRPOConfig(**{**fields, **cpu})
    assert args.use_vllm == (backend != "transformers")
    assert (args.vllm_mode, args.use_vllm) == (backend.removeprefix("vllm-"), True) or not args.use_vllm
    phases = plan.memory.phases
    assert ("generate" in phases) == (backend != "vllm-server")
    if backend == "vllm-colocate":  # it sleeps while the model trains
        assert phases["generate"].buffers - phases["step"].buffers == int(0.3 * plan.hardware.device_bytes)


def test_a_reference_is_planned_where_beta_asks_for_it(tmp_path):
    from launcher.inputs.planning_facts import gather
    from launcher.planner.planner import make_plan

    def weights(more: str) -> int:
        file = tmp_path / "r.yaml"
        file.write_text(RECIPE + more + "\n")
        return make_plan(*gather(load_recipe(file), "A100-80GB")).memory.components.weights

    plain, held = weights("trainer: {beta: 0.0}"), weights("trainer: {beta: 0.1}")
    assert held == 2 * plain
    lora = "adapter: {type: lora}\n"
    assert weights(lora + "trainer: {beta: 0.1}") == weights(lora)


def test_a_checkpoint_holds_the_place_within_a_generation(tmp_path, monkeypatch):
    """Checkpoint-1 is within a generation of two steps."""
    import dataclasses

    import torch

    from launcher.train.job import read_job
    from launcher.train.worker import train

    case = CASES["grpo"]
    body = "return [float(text == 'said') for text in columns['completion']]"  # trl gives no such column
    rewards = [*case.recipe["reward"], {"function": entries(tmp_path, body)[0]["function"]}]
    rows = [{**row, "completion": "said"} for row in case.rows]
    case = dataclasses.replace(case, rows=rows, recipe={**case.recipe, "reward": rewards})
    make_ground(case, tmp_path)
    long = {**rows[0], "prompt": " ".join(["w1"] * 24)}
    (tmp_path / "eval.jsonl").write_text((json.dumps(long) + "\n") * 4)
    evaluated = {"eval_strategy": "steps", "eval_steps": 1}
    env = make_run(case, tmp_path, tmp_path / "run", evaluated=True, max_steps=1, save_steps=1, **evaluated)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    train(read_job(tmp_path / "run"))
    state = tmp_path / "run" / "checkpoints" / "checkpoint-1" / "rollouts_0.pt"
    saved = torch.load(state, weights_only=True)
    assert (saved["step"], saved["micro"], len(saved["buffered"])) == (2, 2, 2)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["rollouts"]["generations"], result["rollouts"]["completions"]) == (1, 4)
    assert result["rollouts"]["constant"]["f"] == 1.0
    # Two prompts of at most 12 tokens with 8 of a completion; the evaluation has 24 tokens.
    assert 0 < result["memory"]["tokens"]["largest"] <= 2 * (12 + 8)
    lines = (tmp_path / "run" / "completions.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert set(json.loads(lines[0])) == {"step", "prompt", "completion", "rewards", "advantage"}


def test_an_evaluation_compares_with_the_adapter_that_was_continued(tmp_path):
    """trl copies the adapter that it is given, which is the trained one then."""
    from types import SimpleNamespace

    import torch
    from peft import PeftModel

    from launcher.train.tasks.grpo import TRAIN_TASK

    lora(small_llama(), init_lora_weights=False).save_pretrained(tmp_path / "first")
    model = PeftModel.from_pretrained(small_llama(), tmp_path / "first")
    model.add_adapter("ref", model.peft_config["default"])
    changes = {"task": "grpo", "trainer.beta": 0.1, "adapter.type": "lora"}
    work = job(tmp_path / "run", {**changes, "adapter.path": str(tmp_path / "first")})
    TRAIN_TASK.as_it_began(work, SimpleNamespace(model=model, ref_model=None), None)
    held = dict(model.named_parameters())
    names = [name for name in held if ".default." in name]
    assert names
    for name in names:
        torch.testing.assert_close(held[name.replace(".default.", ".ref.")], held[name], rtol=0, atol=0)


def started(case_run, monkeypatch, **more: str) -> None:
    from launcher.train.job import read_job
    from launcher.train.worker import train

    run, env = case_run
    for key, value in {**env, **more}.items():
        monkeypatch.setenv(key, value)
    train(read_job(run))


def test_smaller_micro_batches_continue_the_same_generation(tmp_path, monkeypatch):
    """As after `on_oom: adapt`: the completions of two steps are split otherwise."""
    case = dataclasses.replace(CASES["grpo"], build=lambda: llama(attention_dropout=0.0))
    make_ground(case, tmp_path)
    runs = {
        name: (tmp_path / name, make_run(case, tmp_path, tmp_path / name, max_steps=2, save_steps=1, **sizes))
        for name, sizes in {
            "whole": {},
            "smaller": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        }.items()
    }
    started(runs["whole"], monkeypatch)
    first = tmp_path / "whole" / "checkpoints" / "checkpoint-1"
    started(runs["smaller"], monkeypatch, EFFILAUNCH_RESUME=str(first))

    def second(name: str) -> dict:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return next(row for row in map(json.loads, lines) if row["step"] == 2 and "loss" in row)

    expected, found = second("whole"), second("smaller")
    for value in ("loss", "grad_norm", "kl"):
        assert found[value] == pytest.approx(expected[value], rel=1e-3, abs=1e-6), value
    assert expected["grad_norm"] > 1e-3
    result = json.loads((tmp_path / "smaller" / "result.json").read_text())
    assert (result["rollouts"]["generations"], result["rollouts"]["completions"]) == (1, 4)


def test_a_checkpoint_without_its_place_in_a_generation_is_refused(tmp_path, monkeypatch):
    case = CASES["grpo"]
    make_ground(case, tmp_path)
    one = (tmp_path / "run", make_run(case, tmp_path, tmp_path / "run", max_steps=1, save_steps=1))
    started(one, monkeypatch)
    (folder,) = (tmp_path / "run" / "checkpoints").glob("checkpoint-1")
    (folder / "rollouts_0.pt").unlink()
    file = folder / MANIFEST
    manifest = json.loads(file.read_text())
    del manifest["files"]["rollouts_0.pt"]
    file.write_text(json.dumps(manifest))
    with pytest.raises(RunFailed) as caught:
        started(one, monkeypatch, EFFILAUNCH_RESUME=str(folder))
    (problem,) = caught.value.problems
    assert (problem.code, problem.file) == ("no-rollout-state", str(folder))


@pytest.mark.parametrize(("pattern", "constant"), [("z{9}", True), ("[aeiou0-4]", False)])
def test_adapters_are_not_called_idle_where_no_group_had_a_signal(tmp_path, pattern, constant):
    rows = [{"path": "unused", "format": "prompt", "columns": {}}]
    function = {"function": "regular_expression", "weight": 1.0, "time_limit": 60.0}
    changes = {"task": "grpo", "data.train": rows, "adapter": LORA, "trainer.max_steps": 2}
    run = trained(tmp_path / "run", {**changes, "reward": [{**function, "arguments": {"pattern": pattern}}]})
    result = json.loads((run / "result.json").read_text())
    rollouts = result["rollouts"]
    assert result["idle_adapters"] is None
    assert (rollouts["groups_without_signal"] == rollouts["groups"]) == constant
    assert bool(rollouts["warnings"]) == constant


def test_a_run_in_which_no_group_had_a_signal_ends_as_failed(tmp_path):
    tokenizer().save_pretrained(tmp_path / "words")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w1"}\n' * 8)
    function = {"function": "regular_expression", "weight": 1.0, "time_limit": 60.0}
    changes = {
        "task": "grpo", "tiny": False, "model.tokenizer": str(tmp_path / "words"), "trainer.max_steps": 2,
        "data.train": [{"path": str(tmp_path / "rows.jsonl"), "format": "prompt", "columns": {}}],
    }  # fmt: skip
    run = tmp_path / "run"
    with pytest.raises(RunFailed) as caught:
        trained(run, {**changes, "reward": [{**function, "arguments": {"pattern": "z{9}"}}]})
    (problem,) = caught.value.problems
    assert (problem.code, problem.path, (run / "result.json").exists()) == ("no-signal", "reward", False)
