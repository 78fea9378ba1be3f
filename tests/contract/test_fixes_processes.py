"""Known fixes that need process groups, in the real libraries: the failure without the fix, none with it.

Each script asks many questions in one process, since starting one takes seconds; every test reads its answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
for needed in ("peft", "accelerate", "deepspeed", "bitsandbytes"):
    pytest.importorskip(needed)

from launcher.machine.probe import free_port  # noqa: E402

pytestmark = pytest.mark.usefixtures("warm")

HERE = Path(__file__).parent
HEAD = 128 * 32
"""Elements of the tiny model's head."""


def answers(argv: list[str], **environ: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *argv],
        capture_output=True, text=True, timeout=400, check=False, env={**os.environ, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@cache
def under_deepspeed(model: str) -> dict[str, Any]:
    root = str(HERE.parents[1])
    return answers([str(HERE / "fixes_under_deepspeed.py"), model], PYTHONPATH=root)


@cache
def under_ddp() -> dict[str, Any]:
    script = str(HERE / "fixes_under_ddp.py")
    return answers([script, str(free_port())], ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")


@cache
def under_accelerate() -> dict[str, Any]:
    return answers([str(HERE / "fixes_under_accelerate.py")])


def test_zero3_arguments_before_the_model(model):
    found = under_deepspeed(model)
    assert found["model_first"] == HEAD, "built before the arguments: the whole weight"
    assert found["arguments_first"] == 0, "partitioned while loading"


def test_zero3_with_device_map(model):
    found = under_deepspeed(model)
    assert "DeepSpeed Zero-3 is not compatible with passing a `device_map`" in found["device_map"]
    assert found["arguments_first"] == 0, "loads without"


def test_a_4bit_base_is_loaded_whole_under_zero3(model):
    found = under_deepspeed(model)
    assert found["four_bits"] == {"whole": HEAD, "partitioned": False}
    assert found["arguments_first"] == 0, "an unquantised one is partitioned while loading"


def test_save_only_model_with_the_best_checkpoint(model):
    found = under_deepspeed(model)
    assert "can't be used with `save_only_model`" in found["save_only_model=True"]
    assert found["save_only_model=False"] == ""


def test_zero3_refuses_auto_find_batch_size(model):
    assert "isn't supported yet with DeepSpeed Zero-3" in under_deepspeed(model)["auto_find_batch_size=True"]


def test_offload_swaps_the_optimizer(model):
    """DeepSpeedCPUAdam stands in; only for AdamW with its decoupled weight decay. Others it cannot build."""
    found = under_deepspeed(model)["swapped"]
    assert found["adamw"] == {"class": "DeepSpeedCPUAdam", "adamw_mode": True}
    for other in ("adafactor", "adamw 8-bit"):
        assert found[other] == {"class": "DeepSpeedCPUAdam", "adamw_mode": False}
    for other in ("adagrad", "lion"):
        assert "unexpected keyword argument 'adamw_mode'" in found[other]


def test_adagrad_is_lost_over_partitions(model):
    """DeepSpeed makes it anew with one group for the Trainer's two. Optimizers that it leaves alone train."""
    found = under_deepspeed(model)["over_partitions"]
    assert found.pop("Adagrad 1") == found.pop("Adagrad 3") == "IndexError: list index out of range"
    assert set(found.values()) == {""}


def test_parameters_are_offloaded_at_stage_3_only(model):
    assert under_deepspeed(model)["offloaded"]["parameters"] == {"stage 2": False, "stage 3": True}


def test_the_optimizer_is_offloaded_from_stage_1_on(model):
    assert under_deepspeed(model)["offloaded"]["optimizer"] == {"stage 0": False, "stage 1": True}


def test_deepspeed_refuses_fp16_below_capability_7(model):
    found = under_deepspeed(model)["fp16"]
    assert "Type fp16 is not supported on your device" in found["6"]
    assert found["7"] == ""


def test_every_group_waits_as_long_as_the_recipe_says(model):
    """The Trainer's ddp_timeout of 1234 s reaches neither its group on CPU nor the one that ZeRO makes."""
    found = under_deepspeed(model)["timeout_s"]
    assert (found["trainer"], found["zero"]) == (1800, 1800)
    assert found["zero, told"] == 1234


def test_reentrant_checkpointing_while_ddp_searches():
    found = under_ddp()
    assert "Expected to mark a variable ready only once" in found["reentrant, search None"]["error"]
    assert [run["error"] for name, run in found.items() if name != "reentrant, search None"] == [""] * 3


def test_the_trainer_lets_ddp_search_in_every_adapter_run():
    for kind in ("reentrant", "not reentrant"):
        assert under_ddp()[f"{kind}, search None"]["searched"] is True
        assert under_ddp()[f"{kind}, search False"]["searched"] is False


def test_device_map_against_distributed_launch():
    found = under_accelerate()
    assert "in any distributed mode" in found["spread"]
    assert found["whole"] == "accepted"


def test_a_quantised_base_lies_on_its_own_device():
    found = under_accelerate()
    assert "on a different device than the one you're training on" in found["int8 on the first device"]
    assert found["int8 on its own device"] == "accepted"


def test_rtx_40_cards_need_both_variables():
    found = under_accelerate()
    for refused in ("links", "links, one variable"):
        assert "Using RTX 4000 series doesn't support" in found[refused]
    assert found["no links"] == "accepted"
