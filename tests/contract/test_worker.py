"""The worker with the real libraries: run directories written by hand, tiny random models, CPU."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import cases

pytest.importorskip("torch")

from launcher.errors import RecipeError, RunFailed

sys.path.insert(0, str(Path(__file__).parent))
from plans import LORA, TINY_LLAMA, generate, prepared, trained, write_run, zero_config

pytestmark = pytest.mark.usefixtures("warm")

KBIT = {
    "adapter": LORA,
    "model.prepare_for_kbit": True,
    "model.device_map": "local",
    "model.enable_input_require_grads": True,
}
NF4 = {"type": "nf4", "double_quant": True, "compute_dtype": "float32"}


def result(folder: Path) -> dict:
    assert (folder / "COMPLETED").is_file()
    return json.loads((folder / "result.json").read_text())


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(folder: Path, changes: dict) -> dict:
    return result(trained(folder, changes))


def rows_of(found: dict) -> dict:
    return {name: found["rows"][name] for name in ("train", "eval", "truncated", "dropped")}


def trainable(folder: Path) -> int:
    from safetensors.torch import load_file

    name = "adapter/adapter_model.safetensors"
    return sum(tensor.numel() for tensor in load_file(folder / name).values())


def test_lora_learns_and_leaves_a_record(tmp_path):
    found = run(tmp_path / "run", {"adapter": LORA, "data.eval": {"split": 0.25}})
    assert found["steps"] == 8
    assert found["output"] == "adapter"
    assert found["loss"]["last"] < found["loss"]["first"] - 0.2
    assert rows_of(found) == {"train": 48, "eval": 16, "truncated": 0, "dropped": 0}
    assert found["trainable_params"] == trainable(tmp_path / "run")
    assert found["memory"]["measured"] > found["memory_footprint"]
    rows = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[-1]["tokens"] == found["tokens"] > 8 * 4
    assert (tmp_path / "run" / "adapter" / "tokenizer.json").is_file()
    answer = generate(tmp_path / "run", "How many red stones are there? ", max_new_tokens=4)
    assert isinstance(answer, str)


def test_full_fine_tune_learns_what_it_generates(tmp_path):
    found = run(tmp_path / "run", {"trainer.max_steps": 60})
    assert found["output"] == "model"
    assert found["trainable_params"] == found["total_params"]
    assert found["loss"]["last"] < 1.5
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["use_cache"] is True
    answer = generate(tmp_path / "run", "How many red lamps are there? ", max_new_tokens=24)
    assert answer.startswith("There are ")


@pytest.mark.parametrize("quantization", [{"type": "int8"}, NF4], ids=["int8", "nf4"])
def test_quantised_lora_learns(tmp_path, quantization):
    found = run(tmp_path / "run", {**KBIT, "model.quantization": quantization})
    assert found["loss"]["last"] < found["loss"]["first"] - 0.2
    plain = 4 * found["total_params"]
    assert found["memory_footprint"] < 0.8 * plain
    written = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert not written["base_model_name_or_path"]


def test_checkpointing_changes_memory_and_not_the_loss(tmp_path):
    plain = run(tmp_path / "plain", {"adapter": LORA})
    changes = {
        "adapter": LORA,
        "model.enable_input_require_grads": True,
        "trainer.activation_checkpointing": True,
        "trainer.activation_checkpointing_kwargs": {"use_reentrant": False},
    }
    saving = run(tmp_path / "saving", changes)
    assert saving["loss"]["last"] == pytest.approx(plain["loss"]["last"], rel=1e-6)
    assert saving["memory"]["measured"] < plain["memory"]["measured"]


def test_resume_goes_on_exactly(tmp_path, monkeypatch):
    lora = {**LORA, "lora_dropout": 0.1}
    saving = {"adapter": lora, "trainer.save_strategy": "steps", "trainer.save_steps": 4}
    whole = run(tmp_path / "whole", saving)
    halved = tmp_path / "halved"
    shutil.copytree(tmp_path / "whole", halved)
    shutil.rmtree(halved / "checkpoints" / "checkpoint-8")
    for name in ("COMPLETED", "result.json"):
        (halved / name).unlink()
    with monkeypatch.context() as patch:
        patch.setenv("EFFILAUNCH_RESUME", "auto")
        resumed = run(halved, saving)
    keys = ("step", "loss", "grad_norm", "tokens")
    expected = [{key: row[key] for key in keys} for row in metrics(tmp_path / "whole")]
    assert [{key: row[key] for key in keys} for row in metrics(halved)] == expected
    assert resumed["loss"] == whole["loss"]


def test_resuming_a_finished_run_trains_no_further_step(tmp_path, monkeypatch, capsys):
    saving = {"adapter": LORA, "trainer.save_strategy": "steps", "trainer.save_steps": 8}
    first = run(tmp_path / "run", saving)
    before = (tmp_path / "run" / "adapter" / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run" / "adapter")
    (tmp_path / "run" / "COMPLETED").unlink()
    with monkeypatch.context() as patch:
        patch.setenv("EFFILAUNCH_RESUME", "auto")
        again = run(tmp_path / "run", saving)
    assert "nothing left to train" in capsys.readouterr().out
    assert again["steps"] == 8
    assert (first["memory"]["steps"], again["memory"]["steps"]) == (8, 0)
    assert again["loss"] == first["loss"]
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").read_bytes() == before


def test_resume_without_a_checkpoint_starts_afresh(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setenv("EFFILAUNCH_RESUME", "auto")
        found = run(tmp_path / "run", {"adapter": LORA, "trainer.max_steps": 2})
    assert found["steps"] == 2
    assert "no checkpoint to resume" in capsys.readouterr().out


def test_an_adapter_is_continued(tmp_path):
    first = run(tmp_path / "first", {"adapter": LORA, "trainer.max_steps": 12})
    folder = str(tmp_path / "first" / "adapter")
    going_on = {"adapter.type": "lora", "adapter.path": folder, "trainer.max_steps": 2}
    second = run(tmp_path / "second", going_on)
    assert second["loss"]["first"] < first["loss"]["first"] - 0.3
    assert second["trainable_params"] == first["trainable_params"]


def test_module_names_that_match_nothing_are_refused(tmp_path):
    adapter = {**LORA, "target_modules": ["q_proj", "query"], "modules_to_save": ["score"]}
    with pytest.raises(RecipeError) as caught:
        run(tmp_path / "run", {"adapter": adapter})
    found = [(problem.path, problem.message) for problem in caught.value.problems]
    assert [path for path, _ in found] == ["adapter.target_modules", "adapter.modules_to_save"]
    assert "'query'" in found[0][1]
    assert "q_proj" in found[0][1]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    changes = {"trainer.learning_rate": math.inf, "trainer.max_steps": 20}
    with pytest.raises(RunFailed, match="not finite 3 times in a row"):
        run(tmp_path / "run", changes)
    assert metrics(tmp_path / "run")[-1]["step"] < 20
    assert not (tmp_path / "run" / "COMPLETED").exists()


def test_only_long_prompts_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="no row is left to train on"):
        run(tmp_path / "run", {"data.max_length": 8, "data.train": [source("instruction")]})


def source(fmt: str) -> dict:
    return {"path": "unused.jsonl", "format": fmt, "columns": {}}


@pytest.mark.parametrize("fmt", ["text", "instruction", "chat"])
def test_tiny_rows_come_in_every_format(tmp_path, fmt):
    changes = {"adapter": LORA, "trainer.max_steps": 1, "data.train": [source(fmt)]}
    assert run(tmp_path / "run", changes)["rows"]["read"] == 64


def test_weights_tokenizer_and_rows_from_files(tmp_path):
    run(tmp_path / "base", {"trainer.max_steps": 1})
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "a b c", "completion": "d"}\n' * 12)
    columns = {"prompt": "question"}
    changes = {
        "tiny": False,
        "adapter": LORA,
        "model.config": None,
        "model.name_or_path": str(tmp_path / "base" / "model"),
        "data.train": [{"path": str(rows), "format": "auto", "columns": columns}],
        "data.eval": [{"path": str(rows), "format": "auto", "columns": columns}],
    }
    found = run(tmp_path / "run", changes)
    assert rows_of(found) == {"train": 12, "eval": 12, "truncated": 0, "dropped": 0}
    assert found["loss"]["last"] < found["loss"]["first"]


def worker_environment(**more: str) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    tools = str(Path(sys.executable).parent)
    path = os.pathsep.join([tools, os.environ["PATH"]])
    return {**os.environ, "PYTHONPATH": root, "PATH": path, "OMP_NUM_THREADS": "1", **more}


def test_errors_are_recorded_and_decide_the_exit_code(tmp_path):
    folder = write_run(tmp_path / "run", {"tiny": False, "model.config": TINY_LLAMA})
    command = [sys.executable, "-m", "launcher.train.worker", str(folder)]
    done = subprocess.run(command, env=worker_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    error = json.loads((folder / "logs" / "error-rank-0.json").read_text())
    assert error["type"] == "RecipeError"
    assert error["problems"][0]["path"] == "model.tokenizer"
    assert "Traceback" in error["traceback"]
    assert "names no tokenizer" in (folder / "logs" / "rank-0.log").read_text()
    assert "names no tokenizer" in done.stderr


@pytest.mark.parametrize("stage", cases((2, 3), 3))
def test_two_zero_processes_train_on_their_own_rows(tmp_path, stage):
    from safetensors.torch import load_file

    changes = {"sharding.engine": "deepspeed", "sharding.zero_stage": stage, "trainer.max_steps": 4}
    folder = prepared(tmp_path / "run", changes, zero_config(stage))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port()), "-m", "launcher.train.worker", str(folder)]
    done = subprocess.run(command, env=worker_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = result(folder)
    assert found["steps"] == 4
    assert found["loss"]["last"] < found["loss"]["first"]
    assert (folder / "logs" / "rank-1.log").is_file()
    weights = load_file(folder / "model" / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == found["total_params"]
    # Twice the tokens of one process: the rows were dealt out, and both shares were counted.
    single = run(tmp_path / "single", {"trainer.max_steps": 4})
    assert found["tokens"] > 1.5 * single["tokens"]
    assert found["memory_footprint"] == single["memory_footprint"]


def free_port() -> int:
    from launcher.machine.probe import free_port as find

    return find()


def test_an_engine_that_accelerate_replaces_in_silence_is_a_failure(tmp_path):
    """ACCELERATE_USE_CPU beside a DeepSpeed config: accelerate trains without DeepSpeed, and says nothing."""
    changes = {"sharding.engine": "deepspeed", "sharding.zero_stage": 2, "trainer.max_steps": 1}
    folder = prepared(tmp_path / "run", changes, zero_config(2))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port()), "-m", "launcher.train.worker", str(folder)]
    env = worker_environment() | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    # Both ranks see it; the launcher ends the other one as soon as the first is gone.
    said = [log.read_text() for log in (folder / "logs").glob("rank-*.log")]
    assert any("planned deepspeed over 2 processes" in text for text in said)
    errors = [json.loads(file.read_text()) for file in (folder / "logs").glob("error-rank-*.json")]
    assert {error["type"] for error in errors} == {"RunFailed"}
    assert not (folder / "COMPLETED").exists()
