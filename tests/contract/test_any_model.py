"""Model types without a closed form: planned from transformers' class, without being asked, and trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.planner.narrow import narrow_config

sys.path.insert(0, str(Path(__file__).parent))
from cases import cases
from plans import LORA
from task_models import batch_for, job_for, load, train_steps

from launcher.train.model.adapters import attach_adapter, not_adaptable

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

ALL = {**LORA, "target_modules": "all-linear"}
MIXED = ("mamba", "mamba2", "falcon_h1", "nemotron_h", "lfm2", "zamba2", "bailing_hybrid", "rwkv")
"""State-space, convolution and linear-attention layers, alone and beside attention."""


def small(kind: str) -> dict[str, Any]:
    config = transformers.AutoConfig.for_model(kind).to_dict() | {"model_type": kind}
    narrow = narrow_config(config)
    return {key: value for key, value in narrow.items() if key not in ("dtype", "transformers_version")}


def on_meta(kind: str) -> Any:
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**small(kind))
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", MIXED)
def test_layers_without_attention_learn_with_an_adapter(kind, tmp_path):
    job = job_for(tmp_path / "run", "causal-lm", model__config=small(kind), adapter=ALL,
                  model__attn_implementation=None)  # fmt: skip
    processing, base = load(job)
    model = attach_adapter(job, base, processing)
    losses = train_steps(model, batch_for("causal-lm", processing))
    assert losses[-1] < losses[0]
    for parameter in model.parameters():
        parameter.grad = None
    model(**batch_for("causal-lm", processing)).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    idle = [name for name, p in trained.items() if p.grad is None or not p.grad.abs().sum()]
    assert not idle


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("mamba", ["dt_proj", "out_proj"]),
        ("nemotron_h", ["out_proj"]),
        ("llama4_text", ["router"]),
        ("falcon", []),
    ],
)
def test_what_all_linear_leaves_out(kind, names):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**small(kind))
        )
    assert not_adaptable(model) == names


@pytest.mark.usefixtures("warm")  # for the process that traces
@pytest.mark.parametrize("kind", cases(["mamba2", "falcon_h1", "lfm2"], "lfm2"))
def test_a_plan_is_traced_without_being_asked(kind, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    recipe = tmp_path / "r.yaml"
    (tmp_path / "config.json").write_text(json.dumps(small(kind), default=str))
    recipe.write_text(
        f"model: {{name_or_path: {tmp_path}}}\nadapter: {{type: lora}}\n"
        f"data: {{train: [{{path: {rows}}}], max_length: 64}}\ntrainer: {{max_steps: 2}}\n"
    )
    assert main(["plan", str(recipe), "--on", "1xA100-80GB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**small(kind))
        )
    assert plan["model"]["params"] == sum(p.numel() for p in model.parameters())
    assert plan["memory"]["method"] == "trace"
