"""Adapters over experts in 4 bits on two ranks: every engine that takes them trains the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launched import effilaunch, losses

pytest.importorskip("bitsandbytes")

RECIPE = """\
model: {{{model}, quantization: {{type: nf4, compute_dtype: float32}}}}
adapter: {{type: lora, r: 4, target_modules: all-linear}}
data: {{train: [{{path: rows.jsonl, format: prompt-completion}}], max_length: 64}}
precision: fp32
global_batch_size: 4
sharding: {sharding}
trainer: {{max_steps: 3, learning_rate: 1.0e-3, logging_steps: 1}}
hardware: {{num_nodes: 1, devices_per_node: 2, device: cpu}}
"""


CONFIG = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
    "num_local_experts": 4,
}  # fmt: skip
MODELS = {"a checkpoint": "name_or_path: model", "random": f"config: {json.dumps(CONFIG)}, tokenizer: model"}


def checkpoint(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    from launcher.train.tiny import tiny_tokenizer

    set_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).save_pretrained(folder)
    tiny_tokenizer(512).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["a checkpoint", "random"])
def test_zero3_trains_experts_in_4_bits_like_ddp(tmp_path, monkeypatch, model):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    checkpoint(tmp_path / "model")
    rows = [{"prompt": f"what is {i}", "completion": f"it is {i}"} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for name, sharding in {"ddp": "{engine: ddp}", "zero3": "{engine: deepspeed, zero_stage: 3}"}.items():
        (tmp_path / f"{name}.yaml").write_text(RECIPE.format(sharding=sharding, model=MODELS[model]))
        effilaunch("run", tmp_path / f"{name}.yaml", "--output-dir", tmp_path / name)
        found[name] = losses(tmp_path / name)
    assert found["zero3"] == pytest.approx(found["ddp"], rel=1e-5)
    assert found["ddp"][3] < found["ddp"][1]
