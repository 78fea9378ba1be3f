"""Fields of an adapter that peft would ignore or exceed are refused; what it leaves out is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher.errors import RecipeError
from launcher.inputs.model_spec import find_spec
from launcher.models.lora import adapted_by, without_adapter
from launcher.models.memory_trace import Untraceable
from launcher.train.model.adapters import new_adapter
from launcher.train.trace.run import ANSWERS

sys.path.insert(0, str(Path(__file__).parent))

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from test_adapter_forms import build, config_of  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore")]

IDLE = {
    "exclusion": {"target_modules": ["q_proj"], "exclude_modules": ["no_such"]},
    "one-exclusion": {"target_modules": "all-linear", "exclude_modules": ["q_proj", "no_such"]},
    "exclusion-pattern": {"target_modules": ["q_proj"], "exclude_modules": "no_such.*"},
    "empty-exclusion": {"target_modules": ["q_proj"], "exclude_modules": ""},
    "layer": {"target_modules": ["q_proj"], "layers_to_transform": [1, 99]},
    "negative-layer": {"target_modules": ["q_proj"], "layers_to_transform": [0, -1]},
    "layers": {
        "target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["layers", "blocks"],
    },
    "rank": {"target_modules": ["q_proj"], "rank_pattern": {"k_proj": 2}},
    "alpha": {"target_modules": ["q_proj"], "alpha_pattern": {"k_proj": 2}},
    "broken-alpha": {"target_modules": ["q_proj"], "alpha_pattern": {"*q": 2}},
    "parameter": {"target_modules": ["q_proj"], "target_parameters": ["no_such"]},
    "one-parameter": {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight", "no_such"]},
}  # fmt: skip
PATHS = {
    "exclusion": "exclude_modules", "layer": "layers_to_transform", "layers": "layers_pattern",
    "rank": "rank_pattern", "alpha": "alpha_pattern", "parameter": "target_parameters",
}  # fmt: skip
EXPERTS = {
    "pattern-of-layers": ({"target_modules": r".*\.[12]\..*o_proj"}, "target_modules"),
    "exclusion": ({"target_modules": "all-linear", "exclude_modules": ["experts"]}, "exclude_modules"),
    "exclusion-pattern": (
        {"target_modules": "all-linear", "exclude_modules": ".*experts.*"}, "exclude_modules",
    ),
    "layers-of-parameters": (
        {"target_modules": ["o_proj"], "target_parameters": ["experts.down_proj"], "layers_to_transform": 1},
        "layers_to_transform",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    def ask(asked, _python, _say):
        try:
            return ANSWERS[asked["ask"]](asked)
        except ValueError as error:  # as the child tells it
            raise Untraceable(str(error)) from None

    monkeypatch.setattr("launcher.inputs.model_trace.ask_child", ask)  # first: it imports the other
    monkeypatch.setattr("launcher.models.memory_trace.ask_child", ask)


def planned(family, fields):
    """What planning counts of this adapter, or the codes and paths that it refuses it with."""
    fields = {"r": 4, **fields}
    try:
        spec, note = find_spec("m", config_of(family), "a test", "causal-lm", ask=True, adapter=fields)
        return adapted_by(spec, fields).params, note
    except RecipeError as error:
        return {(p.code, p.path) for p in error.problems}


def attached(family, fields):
    """The same of the worker."""
    with torch.device("meta"):
        try:
            wrapped = new_adapter({"r": 4, **fields}, "causal-lm", build(config_of(family)))
        except RecipeError as error:
            return {(p.code, p.path) for p in error.problems}
    return sum(p.numel() for p in wrapped.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", ["llama", "gptj"])
@pytest.mark.parametrize("form", IDLE)
def test_what_matches_nothing_is_refused(family, form):
    fields = IDLE[form]
    if family == "gptj":  # its layers have another name
        fields = {key: ["h", "blocks"] if key == "layers_pattern" else value for key, value in fields.items()}
    said, done = planned(family, fields), attached(family, fields)
    kind = form.rpartition("-")[2]
    if form == "broken-alpha":
        assert {code for code, _ in said | done} == {"bad-adapter"}
    else:
        path = PATHS["exclusion" if "exclusion" in form else kind]
        assert said == done == {("target-modules-missing", f"adapter.{path}")}


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
@pytest.mark.parametrize("form", EXPERTS)
def test_what_peft_rewrites_for_experts_is_refused_where_it_adapts_more(family, form):
    fields, path = EXPERTS[form]
    assert planned(family, fields) == attached(family, fields) == {("bad-adapter", f"adapter.{path}")}


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ".*o_proj"},
        {"target_modules": ["o_proj"], "layers_to_transform": [1]},
        {"target_modules": ["o_proj"], "target_parameters": ["layers.1.mlp.experts.down_proj"]},
        {"target_modules": ["o_proj"], "target_parameters": ["experts.down_proj"],
         "rank_pattern": {"experts.down_proj": 2}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_what_experts_take_as_it_is_written_is_counted(family, fields):
    params, note = planned(family, fields)
    assert params == attached(family, fields)
    assert "none, such as" not in note


def test_linear_layers_that_peft_leaves_out_are_counted_in_a_warning():
    """Dense layers and shared experts of GLM-4 MoE, whose names peft takes for those of experts."""
    model = build(config_of("glm4_moe"))
    ends = ("gate_proj", "up_proj", "down_proj")
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    named = [name for name in linears if name.endswith(ends)]
    spec, _ = find_spec("m", config_of("glm4_moe"), "a test", "causal-lm", ask=False)
    (warning,) = without_adapter(spec)
    assert warning.startswith(f"{len(named)} linear layer")
    assert named[0] in warning


def test_a_beginning_that_needs_weights_or_a_device_is_counted():
    fields = {"target_modules": ["q_proj"]}
    config = {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 1}}
    for family in ("llama", "gptj"):
        assert planned(family, {**fields, **config})[0] == planned(family, fields)[0]


def test_a_model_without_attention_counts_as_one_head():
    config = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    spec, note = find_spec("m", config, "a test", "causal-lm", ask=True, adapter={"r": 4})
    assert (spec.num_heads, spec.hidden_size, spec.num_layers) == (1, 32, 2)
    assert note is not None
