"""The whole pipeline on CPU: real engines, small random models, ranks that are forks.

The launchers themselves are in tests/process/test_loopback.py and test_supervision.py.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cases import cases
from grounds import tokenizer_of_1024_words, write_rows
from launched import effilaunch

from launcher.execute.leftovers import SHARED_MEMORY

pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("warm")
ROOT = Path(__file__).resolve().parents[2]

MODEL = """\
model:
  config: {model_type: llama, vocab_size: 1024, hidden_size: 64, intermediate_size: 128,
           num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
           max_position_embeddings: 128, bos_token_id: 1, eos_token_id: 2}
  tokenizer: tokenizer
"""
REST = """\
data: {train: [{path: rows.jsonl}], max_length: 64}
global_batch_size: 4
trainer: {max_steps: 6, learning_rate: 1.0e-2, lr_scheduler_type: constant, logging_steps: 1,
          save_strategy: "no"}
"""
LORA = "adapter: {type: lora, r: 8}\n"


@pytest.fixture
def folder(tmp_path):
    """A recipe's folder: rows, and a tokenizer of 1024 words made here."""
    tokenizer_of_1024_words().save_pretrained(tmp_path / "tokenizer")
    rows = [{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2} w{i + 3} w7 w8 w9"} for i in range(64)]
    write_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path


def trained(folder: Path, text: str, *arguments: str, expect: int = 0) -> dict:
    (folder / "r.yaml").write_text(MODEL + text + REST, encoding="utf-8")
    out = folder / "out"
    return effilaunch("run", folder / "r.yaml", "--output-dir", out, *arguments, expect=expect)


def check_whole(data: dict, folder: Path, *, ranks: int, output: str) -> dict:
    """A finished run directory: marker, result, metrics, logs of every rank, weights."""
    out, result = folder / "out", data["result"]
    assert (out / "COMPLETED").is_file()
    assert json.loads((out / "result.json").read_text()) == result
    assert result["steps"] == 6
    assert result["loss"]["last"] < result["loss"]["first"]
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert sorted(p.name for p in (out / "logs").glob("rank-*.log")) == [
        f"rank-{i}.log" for i in range(ranks)
    ]
    weights = "adapter_model.safetensors" if output == "adapter" else "model.safetensors"
    assert (out / output / weights).stat().st_size > 0
    return result


def check_states(result: dict, slack: int = 0) -> None:
    """The states that live on each device are those that were planned, or within `slack` bytes of them."""
    for name in ("weights", "gradients", "optimizer"):
        pair = result["memory"]["components"][name]
        assert pair["measured"] == pytest.approx(pair["predicted"], rel=0.02, abs=slack), name


@pytest.mark.slow
def test_one_process_full_fine_tune(folder):
    result = check_whole(trained(folder, "", "--on", "cpu"), folder, ranks=1, output="model")
    assert result["trainable_params"] == result["total_params"]


def test_ddp_and_one_process_learn_the_same(folder):
    one = trained(folder, LORA, "--on", "cpu")["result"]["loss"]
    (folder / "out").rename(folder / "one")
    data = trained(folder, LORA + "sharding: {engine: ddp}\n", "--on", "2xcpu")
    two = check_whole(data, folder, ranks=2, output="adapter")
    assert two["loss"]["first"] == pytest.approx(one["first"], rel=0.02)
    assert two["loss"]["last"] == pytest.approx(one["last"], rel=0.05)
    assert "launcher.train.loopback" in (folder / "out" / "command.sh").read_text()
    # 6 steps of 4 samples: each rank took two of them, none was trained twice.
    assert two["tokens"] == pytest.approx(6 * 4 * 8, rel=0.35)


@pytest.mark.parametrize("stage", cases((2, 3), 3))
def test_deepspeed_zero_with_lora_over_two_processes(folder, stage):
    before = set(SHARED_MEMORY.glob("deepspeed_*"))
    data = trained(folder, LORA + f"sharding: {{zero_stage: {stage}}}\n", "--on", "2xcpu")
    left = set(SHARED_MEMORY.glob("deepspeed_*")) - before
    result = check_whole(data, folder, ranks=2, output="adapter")
    assert (result["distributed_type"], result["processes"]) == ("DEEPSPEED", 2)
    assert result["optimizer"] == "AdamW"
    check_states(result)
    assert json.loads((folder / "out" / "ds_config.json").read_text())["zero_optimization"]["stage"] == stage
    assert not left, "the run left its shared-memory buffers"


@pytest.mark.slow
def test_zero_2_through_accelerate_launch(folder):
    text = LORA + "sharding: {zero_stage: 2}\nlaunch: {launcher: accelerate}\n"
    check_whole(trained(folder, text, "--on", "2xcpu"), folder, ranks=2, output="adapter")
    assert "launcher.train.loopback" in (folder / "out" / "command.sh").read_text()


@pytest.mark.slow
def test_zero3_full_fine_tune_saves_whole_weights(folder):
    from safetensors.torch import load_file

    data = trained(folder, "sharding: {zero_stage: 3}\n", "--on", "2xcpu")
    result = check_whole(data, folder, ranks=2, output="model")
    weights = load_file(folder / "out" / "model" / "model.safetensors")
    assert sum(t.numel() for t in weights.values()) == result["total_params"]
    check_states(result)


@pytest.mark.parametrize("kind", cases(("int8", "nf4"), "nf4"))
def test_quantised_base_with_lora(folder, kind):
    text = LORA
    data = trained(folder, text, "--on", "cpu", "--set", f"model.quantization={kind}")
    result = check_whole(data, folder, ranks=1, output="adapter")
    full = result["total_params"] * 4
    assert result["memory_footprint"] < full
    # Each of the 14 linears has tables of 1.1 kB to decode its constants, which counts in so small a model.
    check_states(result, slack=14 * 1200 if kind == "nf4" else 0)


@pytest.mark.slow
def test_int8_lora_under_zero_2(folder):
    text = LORA + "sharding: {zero_stage: 2}\n"
    data = trained(folder, text, "--on", "2xcpu", "--set", "model.quantization=int8")
    check_states(check_whole(data, folder, ranks=2, output="adapter"))


@pytest.mark.slow
def test_optimizer_offload_to_cpu(folder):
    """Compiles DeepSpeedCPUAdam once."""
    text = "sharding: {zero_stage: 2, offload_optimizer: cpu}\n"
    data = trained(folder, text, "--on", "2xcpu")
    result = check_whole(data, folder, ranks=2, output="model")
    assert result["optimizer"] == "DeepSpeedCPUAdam"


@pytest.mark.slow
def test_resume_goes_on_from_the_last_checkpoint(folder):
    saving = ("--set", "trainer.save_strategy=steps", "--set", "trainer.save_steps=2")
    trained(folder, LORA, "--on", "cpu", *saving, "--set", "trainer.max_steps=4")
    rows = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    refused = trained(folder, LORA, "--on", "cpu", *saving, "--resume", "auto", expect=2)
    assert [error["code"] for error in refused["errors"]] == ["finished-run"]
    longer = ("--set", "trainer.max_steps=6", "--resume", "auto")
    data = trained(folder, LORA, "--on", "cpu", *saving, *longer)
    assert data["result"]["steps"] == 6
    again = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    assert again[:4] == rows
    assert [json.loads(line)["step"] for line in again] == [1, 2, 3, 4, 5, 6]


def test_an_unreadable_dataset_is_one_error_with_its_line(folder):
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": oops}\n')
    data = trained(folder, LORA, "--on", "cpu", expect=2)
    (error,) = data["errors"]
    assert "rows.jsonl" in error["file"]
    assert not (folder / "out" / "COMPLETED").exists()


def test_a_failing_worker_is_exit_5_with_its_cause(folder):
    data = trained(folder, LORA, "--on", "cpu", "--set", "trainer.learning_rate=1e30", expect=5)
    assert "not finite" in data["errors"][0]["message"]


@pytest.mark.slow
def test_the_real_smollm2_learns_for_a_few_steps(tmp_path):
    out = tmp_path / "out"
    data = effilaunch(
        "run", ROOT / "recipes" / "smoke.yaml", "--output-dir", out, "--on", "cpu",
        "--set", "trainer.max_steps=3", "--set", "data.max_length=64",
        "--set", "data.max_truncated=1.0",
    )  # fmt: skip
    result = data["result"]
    assert result["rows"]["train"] == 164
    assert result["total_params"] - result["trainable_params"] == 134_515_008
    memory = result["memory"]
    assert memory["measured"] == pytest.approx(memory["predicted"], rel=0.25)
    for words in after_smoke():
        said = subprocess.run(
            [sys.executable, "-m", "launcher", *(str(out) if word == "$RUN" else word for word in words)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert said.stdout.strip(), words
    assert (out / "report.html").stat().st_size > 20_000
    assert (out / "merged" / "model.safetensors").stat().st_size > 4 * 134_515_008 // 2


def after_smoke() -> list[list[str]]:
    """What README does with the run of `make smoke`: the words of each of its commands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("RUN=$(", 1)[1].split("```", 1)[0]
    commands = [shlex.split(line, comments=True)[1:] for line in text.splitlines()[1:]]
    assert [words[0] for words in commands] == ["report", "generate", "merge"]
    return commands
