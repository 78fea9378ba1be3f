"""`estimate`: rows over strategies and devices, as JSON and as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.memory.published import hf_page_bytes

RECIPE = """\
model: {name_or_path: huggyllama/llama-7b}
data: {train: [{path: train.jsonl}], max_length: 512}
sharding: {engine: deepspeed}
trainer: {max_steps: 10}
global_batch_size: 64
"""


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*argv: str) -> tuple[int, str]:
        code = main(["estimate", *argv])
        return code, capsys.readouterr().out

    return call


def rows(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["hardware"], row["strategy"]): row for row in json.loads(text)["rows"]}


def test_rows_of_a_model(called: Any) -> None:
    code, text = called("huggyllama/llama-7b", "--on", "8xA100-80GB", "--on", "1x24GB", "--json")
    assert code == 0
    answer = json.loads(text)
    assert answer["model"]["params"] == 6_738_415_616
    assert answer["model"]["published"] == {
        "zero_paper": 16 * 6_738_415_616, "hf_page": hf_page_bytes(6_738_415_616),
    }  # fmt: skip
    found = rows(text)
    assert all(row.keys() == {"hardware", "strategy", "memory", "max_micro_batch"} for row in found.values())
    names = {name for on, name in found if on == "8xA100-80GB"}
    assert {"full, DDP", "full, ZeRO-3", "full, FSDP2", "nf4 LoRA r16, DDP"} <= names
    for row in found.values():
        assert (row["max_micro_batch"] > 0) is row["memory"]["fits"]
    stages = [found["8xA100-80GB", f"full, ZeRO-{stage}"]["memory"]["needed"] for stage in range(4)]
    assert stages == sorted(stages, reverse=True)
    # One device has nothing to shard over.
    assert ("1x24GB", "full, ZeRO-3") not in found


def test_the_table_is_narrow_and_names_every_row(called: Any) -> None:
    code, text = called("huggyllama/llama-7b", "--on", "8xA100-80GB")
    assert code == 0
    lines = text.splitlines()
    assert max(map(len, lines)) <= 113
    head = next(line for line in lines if line.lstrip().startswith("strategy"))
    assert head.split()[1:] == [
        "weight", "grads", "optim", "activ", "logits", "other", "needs", "fits", "batch", "host",
    ]  # fmt: skip
    ddp = next(line for line in lines if line.startswith("  full, DDP  ")).split()
    assert ddp[2] == "25.10"
    assert "no" in ddp
    assert "…" not in text


def test_a_recipe_over_what_it_leaves_open(called: Any, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    code, text = called(str(file), "--on", "8xA100-80GB", "--on", "8xA100-40GB", "--json")
    assert code == 0
    found = rows(text)
    assert {on for on, _ in found} == {"8xA100-80GB", "8xA100-40GB"}
    assert ("8xA100-40GB", "ZeRO-3, all on CPU, checkpointing") in found
    pinned = ("--set", "sharding.zero_stage=2", "--set", "sharding.offload_optimizer=none")
    code, text = called(str(file), "--on", "8xA100-80GB", *pinned, "--json")
    assert {name for _, name in rows(text)} == {
        "ZeRO-2", "ZeRO-2, checkpointing", "ZeRO-2, checkpointing on CPU",
    }  # fmt: skip


def test_a_recipe_that_pins_a_stage_has_its_rows_on_one_device_too(called: Any, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    pinned = ("--set", "sharding.zero_stage=3", "--set", "sharding.offload_optimizer=none")
    code, text = called(str(file), "--on", "1xA100-80GB", *pinned, "--json")
    assert code == 0
    assert {name for _, name in rows(text)} == {
        "ZeRO-3", "ZeRO-3, checkpointing", "ZeRO-3, checkpointing on CPU",
    }  # fmt: skip


def test_tensor_parallel_ranks_share_the_matrices(called: Any) -> None:
    _, alone = called("huggyllama/llama-7b", "--on", "8xA100-80GB", "--json")
    code, shared = called("huggyllama/llama-7b", "--on", "8xA100-80GB", "--tensor-parallel", "8", "--json")
    assert code == 0
    key = ("8xA100-80GB", "full, ZeRO-1")
    whole, part = (rows(text)[key]["memory"]["components"]["weights"] for text in (alone, shared))
    kept = 2 * 4096 * (65 + 32000)  # norms, and the embedding
    assert part == (whole - kept) // 8 + kept


def test_tensor_parallel_rows_are_those_that_plan_takes(called: Any) -> None:
    _, text = called("meta-llama/Llama-3.1-8B", "--on", "8xH100-80GB", "--tensor-parallel", "2", "--json")
    assert {name for _, name in rows(text)} == {"full, ZeRO-1", "full, ZeRO-2"}
    _, text = called("meta-llama/Llama-3.1-8B", "--on", "2xH100-80GB", "--tensor-parallel", "2", "--json")
    assert {name for _, name in rows(text)} == {"full, ZeRO-1"}
    code, text = called(
        "meta-llama/Llama-3.1-8B", "--on", "16xH100-80GB", "--tensor-parallel", "16", "--json"
    )
    assert code == 2
    assert "8 key-value heads" in text
    on = ("--on", "8xH100-80GB", "--on", "8xV100-32GB")
    code, text = called("meta-llama/Llama-3.1-8B", *on, "--tensor-parallel", "2", "--json")
    assert code == 2
    assert "--tensor-parallel" in text


def test_set_needs_a_recipe(called: Any) -> None:
    code, text = called("huggyllama/llama-7b", "--set", "precision=fp32", "--json")
    assert code == 2
    assert json.loads(text)["errors"][0]["code"] == "set-without-recipe"


def test_the_task_of_the_published_head(called: Any, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000, "architectures": ["LlamaForSequenceClassification"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _, text = called(str(tmp_path), "--on", "1xA100-80GB", "--json")
    embedding, layer = 1000 * 64, 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert json.loads(text)["model"]["params"] == embedding + 2 * layer + 64 + 2 * 64


def test_a_checkpoint_in_a_dtype_that_cannot_be_trained(called: Any, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "dtype": "float8_e4m3fn"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    file = tmp_path / "recipe.yaml"
    text = RECIPE.replace("huggyllama/llama-7b", f"{tmp_path}, dtype: auto")
    file.write_text(text, encoding="utf-8")
    code, out = called(str(file), "--on", "8xA100-80GB", "--json")
    assert code == 2
    assert json.loads(out)["errors"][0]["code"] == "checkpoint-dtype"


def test_a_model_that_nobody_knows_and_a_hardware_that_cannot_be_read(called: Any, tmp_path: Path) -> None:
    for argv in ((str(tmp_path / "nothing"), "--on", "1xA100-80GB"), ("huggyllama/llama-7b", "--on", "8 of")):
        code, text = called(*argv, "--json")
        assert code == 2
        assert "rows" not in json.loads(text)


SHARED = """\
model: {name_or_path: meta-llama/Llama-3.1-8B}
data: {train: [{path: rows.jsonl}], max_length: 4096}
sharding: {SIZE: 2}
global_batch_size: 16
trainer: {max_steps: 10}
"""


@pytest.mark.parametrize("size", ["tp_size", "sp_size"])
def test_a_recipe_s_ranks_that_share_a_copy_are_kept(size, tmp_path, capsys):
    """Every row is of groups of two, and the plan's own job says the same as `plan`."""
    path = tmp_path / "r.yaml"
    path.write_text(SHARED.replace("SIZE", size))
    assert main(["estimate", str(path), "--on", "8xH100-80GB", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    words = "2 tensor-parallel" if size == "tp_size" else "2 ranks a sample"
    assert all(words in row["strategy"] for row in rows)
    assert not any("CPU" in row["strategy"] for row in rows)
    assert main(["plan", str(path), "--on", "8xH100-80GB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    stage = plan["settings"]["sharding.zero_stage"]["value"]
    again = plan["settings"]["trainer.activation_checkpointing"]["value"]
    named = f"ZeRO-{stage}, {words}{', checkpointing' if again else ''}"
    (own,) = [row for row in rows if row["strategy"] == named]
    assert own["memory"]["total"] == plan["memory"]["total"]
    if size == "sp_size":
        assert {row["max_micro_batch"] for row in rows} <= {0, 1}


def test_devices_that_a_recipe_s_ranks_cannot_divide_are_refused(tmp_path, capsys):
    path = tmp_path / "r.yaml"
    path.write_text(SHARED.replace("SIZE", "sp_size"))
    assert main(["estimate", str(path), "--on", "8xH100-80GB", "--on", "3xH100-80GB"]) == 2
    assert "do not divide into groups of 2" in capsys.readouterr().err
    assert main(["estimate", str(path), "--on", "8xH100-80GB", "--tensor-parallel", "4"]) == 2
    assert "which ranks share a copy" in capsys.readouterr().err
