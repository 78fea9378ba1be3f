"""Engine fsdp from the command line: `run` over two CPU ranks, killed, resumed, and short of memory."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from grounds import tokenizer_of_1024_words, write_rows
from launched import effilaunch, losses

if not find_spec("torch"):  # not imported here: that takes long
    pytest.skip("the training stack is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm")]
STEPS = 6
RECIPE = f"""\
model: {{config: {{model_type: llama, vocab_size: 1024, hidden_size: 64, intermediate_size: 128,
                 num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
                 max_position_embeddings: 64, bos_token_id: 1, eos_token_id: 2, pad_token_id: 0}},
        tokenizer: tokenizer}}
data: {{train: [{{path: rows.jsonl}}], max_length: 32, padding_free: false}}
sharding: {{engine: fsdp}}
global_batch_size: 8
trainer: {{max_steps: {STEPS}, learning_rate: 1.0e-2, lr_scheduler_type: linear, logging_steps: 1,
          save_steps: 2, per_device_train_batch_size: 4, activation_checkpointing: false}}
python: hooks.py
on_oom: adapt
"""
HOOKS = """
import functools
import os
import signal

import torch
from transformers import LlamaForCausalLM, TrainerCallback

steps = [0]
forward = LlamaForCausalLM.forward


@functools.wraps(forward)
def limited(self, input_ids=None, **more):
    if os.environ.get("TEST_HOLDS") and steps[0] >= 3 and len(input_ids) > int(os.environ["TEST_HOLDS"]):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total "
                                     "capacity of 23.64 GiB of which 1.21 GiB is free.")
    return forward(self, input_ids=input_ids, **more)


class Steps(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        steps[0] = state.global_step
        if os.environ.get("TEST_KILL_AFTER") == str(state.global_step):
            os.kill(os.getpid(), signal.SIGKILL)


LlamaForCausalLM.forward = limited


def callbacks():
    return [Steps()]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("fsdp")
    tokenizer_of_1024_words().save_pretrained(made / "tokenizer")
    rows = [{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2} w{i + 3} w7 w8"} for i in range(64)]
    write_rows(made / "rows.jsonl", rows)
    (made / "hooks.py").write_text(HOOKS)
    (made / "r.yaml").write_text(RECIPE)
    return made


def run(folder: Path, out: Path, *arguments: str, expect: int = 0, **env: str) -> dict[str, Any]:
    given = ("--on", "2xcpu", "--output-dir", out, *arguments)
    return effilaunch("run", folder / "r.yaml", *given, expect=expect, **env)


@pytest.fixture(scope="module")
def straight(folder, warm_module, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "out"
    result = run(folder, out)["result"]
    assert (result["distributed_type"], result["processes"], result["steps"]) == ("FSDP", 2, STEPS)
    assert len(losses(out)) == STEPS
    return out


def test_a_killed_run_is_resumed_exactly(folder, straight, tmp_path):
    out = tmp_path / "out"
    run(folder, out, expect=5, TEST_KILL_AFTER="3")
    assert losses(out) == {step: losses(straight)[step] for step in (1, 2, 3)}
    result = run(folder, out, "--resume", "auto")["result"]
    assert losses(out) == losses(straight)
    assert result["steps"] == STEPS
    one, two = (next((path / "model").glob("*.safetensors")).read_bytes() for path in (straight, out))
    assert one == two


def test_short_of_memory_it_goes_on_with_its_own_checkpoint(folder, straight, tmp_path):
    out = tmp_path / "out"
    (entry,) = run(folder, out, TEST_HOLDS="2")["result"]["adaptations"]
    assert (entry["step"], entry["resumed_from"]) == (3, 2)
    assert entry["changed"]["trainer.per_device_train_batch_size"] == [4, 2]
    assert losses(out) == pytest.approx(losses(straight), rel=2e-4)


def test_its_result_is_evaluated_asked_and_merged(folder, tmp_path):
    """With LoRA, and rows held out: the commands load what rank 0 gathered, without the engine."""
    out, merged = tmp_path / "out", tmp_path / "merged"
    adapter = "{type: lora, r: 4, lora_alpha: 8, target_modules: all-linear}"
    result = run(folder, out, "--set", f"adapter={adapter}", "--set", "data.eval={split: 0.25}")["result"]
    found = effilaunch("eval", out)["metrics"]
    assert found["loss"] == pytest.approx(result["eval"]["eval_loss"], rel=1e-5)
    effilaunch("generate", out, "w1 w2")
    effilaunch("merge", out, "--output", merged)
    assert next(merged.glob("*.safetensors")).stat().st_size > 0
