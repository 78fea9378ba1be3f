"""`model.rope_parameters`: the same logits as of a checkpoint whose own configuration has these positions."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.errors import RecipeError
from launcher.inputs.planning_facts import gather, model_config
from launcher.models.positions import FIELDS, longest_row, stretchable_types, stretched
from launcher.recipe.loading import load_recipe
from launcher.train.results.merge import merge

sys.path.insert(0, str(Path(__file__).parent))
from plans import LORA, trained
from task_models import job_for, load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TRAINED = 64
"""Positions of the checkpoint."""
SIZES = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": TRAINED,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
ASKED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 16},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model("llama", **SIZES, rope_theta=5000.0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    processing, _ = load(job_for(folder / "run", "causal-lm"))
    processing.save_pretrained(folder)
    return folder


def asked_for(kind: str) -> dict[str, Any]:
    return {"rope_type": kind, **ASKED[kind]}


def logits(model: Any) -> Any:
    rows = torch.arange(3, 3 + 2 * TRAINED)[None]
    with torch.no_grad():
        return model.eval()(input_ids=rows).logits


@pytest.mark.parametrize("kind", FIELDS)
def test_logits_are_those_of_a_configuration_that_says_so(base, tmp_path, kind):
    job = job_for(tmp_path / "run", "causal-lm", model__name_or_path=str(base),
                  model__rope_parameters=asked_for(kind))  # fmt: skip
    found = logits(load(job)[1])
    config = transformers.AutoConfig.from_pretrained(base)
    theta = config.rope_parameters["rope_theta"]
    more = {"original_max_position_embeddings": TRAINED} if kind in ("yarn", "llama3") else {}
    config.rope_parameters = {"rope_theta": theta, **asked_for(kind), **more}
    if kind != "dynamic":
        config.max_position_embeddings = 4 * TRAINED
    config.standardize_rope_params()
    config.validate_rope()
    told = transformers.AutoModelForCausalLM.from_pretrained(base, config=config)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(found, logits(told))
    assert not torch.allclose(found, logits(plain), atol=1e-4), "the positions are others"


def test_a_merged_model_has_the_positions_that_it_was_trained_with(base, tmp_path):
    changes = {"model.name_or_path": str(base), "model.config": None, "adapter": LORA,
               "trainer.max_steps": 1, "model.rope_parameters": asked_for("yarn")}  # fmt: skip
    run = trained(tmp_path / "run", changes)
    assert merge(run, run / "merged", "float32", lambda _: "a card\n").sum.is_none
    saved = json.loads((run / "merged" / "config.json").read_text())
    assert saved["max_position_embeddings"] == 4 * TRAINED
    expected = {**asked_for("yarn"), "rope_theta": 5000.0, "original_max_position_embeddings": TRAINED}
    assert saved["rope_parameters"] == expected


@pytest.mark.parametrize("kind", FIELDS)
def test_a_stretched_configuration_is_stretched_once(kind):
    once = stretched({"model_type": "llama", **SIZES}, asked_for(kind))
    assert stretched(once, asked_for(kind)) == once
    assert longest_row(once, once["max_position_embeddings"]) == 4 * TRAINED


def test_a_larger_factor_begins_at_the_positions_before_any_stretching():
    once = stretched({"model_type": "llama", **SIZES}, asked_for("yarn"))
    twice = stretched(once, asked_for("yarn") | {"factor": 8.0})
    assert twice["max_position_embeddings"] == 8 * TRAINED
    with pytest.raises(RecipeError) as raised:
        stretched(once, asked_for("linear"))
    assert [one.path for one in raised.value.problems] == ["model.rope_parameters.rope_type"]


@pytest.mark.parametrize("kind", ["gpt2", "gemma3_text", "gpt_oss", "my_model"])
def test_models_without_one_kind_of_rotary_positions_are_refused(kind):
    assert kind not in stretchable_types()
    with pytest.raises(RecipeError) as raised:
        stretched({"model_type": kind, **SIZES}, asked_for("yarn"))
    assert [one.code for one in raised.value.problems] == ["rope-type"]


def warned(*overrides: str) -> list[str]:
    """Warnings about positions, of a shipped recipe on 40,960 positions."""
    loaded = load_recipe("qwen3_0_6b_full", ["data.max_length=65536", *overrides])
    _, facts = gather(loaded, "1xH100-80GB", allow_network=False)
    return [warning for warning in facts.warnings if "positions" in warning]


def test_the_plan_offers_the_key_that_is_enough():
    (warning,) = warned()
    found = re.search(r"`model\.rope_parameters: (\{.*\})`", warning)
    assert found is not None, warning
    assert yaml.safe_load(found[1]) == {"rope_type": "yarn", "factor": 2.0}
    assert warned(f"model.rope_parameters={found[1]}") == []
    assert warned("model.rope_parameters={rope_type: dynamic, factor: 2}") == []
    (scratch,) = warned(
        "model.name_or_path=null", f"model.config={json.dumps({'model_type': 'llama', **SIZES})}"
    )
    assert "model.rope_parameters" not in scratch, "a configuration has its own"
    (less,) = warned("model.rope_parameters={rope_type: linear, factor: 1.5}")
    assert str(int(1.5 * 40960)) in less


def test_the_text_model_of_a_wrapper_is_stretched():
    wrapper = {"model_type": "llava", "text_config": {**SIZES}}
    set_to = [f"model.rope_parameters={json.dumps(asked_for('linear'))}", "model.name_or_path=wrapper"]
    recipe = load_recipe("qwen3_0_6b_full", set_to).recipe
    _, found, _ = model_config(recipe, allow_network=False, given={"wrapper": wrapper})
    assert found["text_config"]["max_position_embeddings"] == 4 * TRAINED
    assert "max_position_embeddings" not in found
