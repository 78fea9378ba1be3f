"""What a plan counts of every form of LoraConfig is what the real peft builds, over many families."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import cases
from closed_form_cases import MIXED_TYPES

from launcher.errors import DoesNotFit, RecipeError
from launcher.inputs.model_spec import find_spec
from launcher.machine.hardware import parse_hardware
from launcher.models.families import MODEL_TYPES
from launcher.models.lora import adapted_by
from launcher.models.model import FAMILY_TASKS
from launcher.plan.inputs import Facts
from launcher.planner.narrow import narrow_config
from launcher.planner.planner import make_plan
from launcher.planner.tiny import tiny_recipe
from launcher.train.model.adapters import exclusions
from launcher.train.model.attention import register_varlen
from launcher.train.trace.run import ANSWERS
from tests import factories

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.filterwarnings("ignore")]

SIZES = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OTHERS = (
    "granitemoe", "cohere", "cohere2", "olmo", "falcon", "bloom", "phi", "stablelm", "mpt", "gptj",
)  # fmt: skip
KNOWN = tuple(family for family, tasks in FAMILY_TASKS.items() if "causal-lm" in tasks)
NAMES = {
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn", "c_proj")),
    **dict.fromkeys(("gpt_neox", "falcon", "bloom"), ("query_key_value", "dense")),
    **dict.fromkeys(("opt", "gptj"), ("q_proj", "out_proj")),
    "phi3": ("qkv_proj", "o_proj"),
    "mpt": ("Wqkv", "out_proj"),
    "phi": ("q_proj", "dense"),
    "deepseek_v3": ("q_a_proj", "o_proj"),
}
RENAMED = ("deepseek_v3", "glm4_moe", "qwen3_next")
HYBRIDS = ("granitemoehybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
REFUSED = {"no-target-modules", "target-modules-missing", "bad-adapter"}


def forms(family: str, head: str, embedding: str, linears: list[str]) -> dict[str, dict[str, Any]]:
    """Each of peft's forms, with names that this family has."""
    first, second = NAMES.get(family, ("q_proj", "o_proj"))
    layers = linears[0].split(".")[-1 - linears[0].split(".")[::-1].index("0") - 1]
    return {
        "all-linear": {"target_modules": "all-linear"},
        "all-linear-in-capitals": {"target_modules": "All-Linear"},
        "names": {"target_modules": [first, second]},
        "paths": {"target_modules": [linears[0], linears[-1]]},
        "pattern": {"target_modules": rf".*\.[12]\..*\.{first}"},
        "pattern-of-containers": {"target_modules": rf".*\.{layers}\..*"},
        "some-layers": {"target_modules": [first], "layers_to_transform": [1], "layers_pattern": layers},
        "one-layer": {"target_modules": [first], "layers_to_transform": 2},
        "first-layer": {"target_modules": [first], "layers_to_transform": 0},
        "layers-in-a-list": {"target_modules": [first], "layers_to_transform": [0]},
        "first-layer-of-a-pattern": {"target_modules": f".*{first}", "layers_to_transform": 0},
        "first-layer-of-containers": {
            "target_modules": [first], "layers_to_transform": 0, "layers_pattern": layers,
        },
        "no-layer": {"target_modules": [first], "layers_to_transform": []},
        "no-layer-of-a-pattern": {"target_modules": f".*{first}", "layers_to_transform": []},
        "no-container-of-a-pattern": {"target_modules": f".*{first}", "layers_pattern": []},
        "first-layer-of-all-linear": {"target_modules": "all-linear", "layers_to_transform": 0},
        "no-such-layer": {"target_modules": [first], "layers_to_transform": [7]},
        "layers-of-a-pattern": {"target_modules": f".*{first}", "layers_to_transform": [1]},
        "pattern-without-layers": {"target_modules": [first], "layers_pattern": layers},
        "ranks": {"target_modules": [first, second], "rank_pattern": {second: 3}},
        "alphas": {"target_modules": [first, second], "alpha_pattern": {first: 2}},
        "rank-of-one-layer": {"target_modules": [first], "rank_pattern": {rf"{layers}\.0\..*{first}": 5}},
        "head-pattern": {"target_modules": f".*{head}"},
        "head": {"target_modules": [head, first]},
        "embedding": {"target_modules": [embedding.rpartition(".")[2]]},
        "saved-head": {"target_modules": [first], "modules_to_save": [head]},
        "saved-embedding": {"target_modules": [first], "modules_to_save": [embedding.rpartition(".")[2]]},
        "saved-and-targeted": {"target_modules": [first], "modules_to_save": [first]},
        "excluded": {"target_modules": "all-linear", "exclude_modules": [second]},
        "all-excluded": {"target_modules": [first], "exclude_modules": f".*{first}"},
        "tokens": {"target_modules": [first], "trainable_token_indices": [1, 2, 5]},
        "dora": {"target_modules": [first], "use_dora": True},
        "rslora": {"target_modules": [first], "use_rslora": True},
        "half-trained": {"target_modules": [first], "init_lora_weights": "mica"},
        "from-weights": {"target_modules": [first], "init_lora_weights": "pissa"},
        "broken-layers": {"target_modules": [first], "layers_to_transform": 1, "layers_pattern": "["},
        "biases": {"target_modules": [second], "bias": "lora_only"},
        "missing": {"target_modules": ["no_such_module"]},
        "broken-pattern": {"target_modules": "*.q_proj"},
        "default": {"target_modules": None},
    }  # fmt: skip


def config_of(family: str) -> dict[str, Any]:
    own = transformers.AutoConfig.for_model(family).to_dict()
    given = {key: value for key, value in own.items() if key != "layer_types"}
    config = narrow_config({**given, "model_type": family})
    config |= {key: value for key, value in SIZES.items() if key in own}
    if family == "ministral":  # its attention needs one, and its class has none
        config["head_dim"] = 16
    for key in ("layer_types", "no_rope_layers", "moe_layers"):
        config.pop(key, None)
    if family in HYBRIDS:
        config["layer_types"] = ["full_attention", "linear_attention", "full_attention"]
    return config | {key: 3 for key in ("n_layer", "num_layers", "n_layers") if key in own}


def real(family: str, config: dict[str, Any], fields: dict[str, Any]) -> int | None:
    """Parameters that peft trains, with the head and embedding tied as the worker asks; None: it refuses."""
    model = build(config)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    more: dict[str, Any] = {"ensure_weight_tying": True} if tied and ties(model, fields) else {}
    fields = {**fields, **exclusions(fields, model)}
    with torch.device("meta"):
        try:
            wrapped = peft.get_peft_model(
                model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **fields, **more)
            )
        except (ValueError, TypeError, AttributeError, KeyError, re.error):
            return None
    pattern = str(fields.get("target_modules"))
    if ".*" in pattern and not all(re.fullmatch(pattern, name) for name in adapted_names(wrapped)):
        return None  # it adapts more than the pattern matches, and has to be refused
    return sum(p.numel() for p in wrapped.parameters() if p.requires_grad)


def adapted_names(wrapped: Any) -> list[str]:
    return [
        name.removeprefix("base_model.model.")
        for name, module in wrapped.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    ]


def ties(model: Any, fields: dict[str, Any]) -> bool:
    both = (model.get_output_embeddings(), model.get_input_embeddings())
    names = [name for name, module in model.named_modules() if any(module is one for one in both)]
    return any(name.endswith(one) for name in names for one in fields.get("modules_to_save", ()))


def build(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))


@pytest.fixture
def in_process(monkeypatch):
    """The child's answers without its start: the same functions, of the same libraries."""

    def ask(request, _python, _say):
        return ANSWERS[request["ask"]](request)

    monkeypatch.setattr("launcher.inputs.model_trace.ask_child", ask)  # first: it imports the other
    monkeypatch.setattr("launcher.models.memory_trace.ask_child", ask)


def planned_job(tmp_path, fields, spec):
    """What the plan of a recipe with this adapter says of memory."""
    return made(tmp_path, config_of(spec.model_type), fields, spec).memory


def made(tmp_path, config, fields, spec):
    text = "model: {config: {model_type: llama}, tokenizer: t}\n" + factories.BASE.partition("\n")[2]
    text += "fixes: {disable: [experts-untouched]}\n"  # counted, too, where the experts have no adapter
    loaded = factories.recipe(tmp_path, text)
    section = loaded.recipe.adapter.model_copy(update={"r": 4, **fields})
    model = loaded.recipe.model.model_copy(update={"config": config})
    loaded = factories.replace_recipe(loaded, {"adapter": section, "model": model})
    facts = Facts(parse_hardware("1xA100-80GB"), spec, {})
    try:
        return make_plan(loaded, facts)
    except DoesNotFit as error:
        return error.nearest_miss


def counted(tmp_path, config, fields):
    """Parameters that the whole planner counts; None where it refuses as it should."""
    try:
        spec, _ = find_spec("m", config, "a test", "causal-lm", ask=True, adapter=fields)
        return made(tmp_path, config, fields, spec).trainable_params
    except RecipeError as error:
        return None if {p.code for p in error.problems} <= REFUSED else error


@pytest.mark.parametrize("family", cases((*KNOWN, *OTHERS), "llama", "gpt2", "mixtral", "granite"))
def test_every_form_is_counted_as_peft_builds_it_or_refused(family, tmp_path, in_process):
    config = config_of(family)
    model = build(config)
    modules = dict(model.named_modules())
    head = next(n for n, m in modules.items() if m is model.get_output_embeddings())
    embedding = next(n for n, m in modules.items() if m is model.get_input_embeddings())
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    linears = [n for n, m in modules.items() if isinstance(m, kinds) and ".0." in n]
    if family in RENAMED:  # a path to one of them is refused: peft would adapt the experts of all layers
        linears = [n for n in linears if not n.endswith(("gate_proj", "up_proj", "down_proj"))]
    wrong = {}
    for form, fields in forms(family, head, embedding, linears).items():
        expected, found = real(family, config, fields), counted(tmp_path, config, {"r": 4, **fields})
        if found != expected:
            wrong[form] = (found, expected)
    assert not wrong


CLASSIFIERS = [
    (family, task) for family, tasks in FAMILY_TASKS.items() for task in tasks if "classification" in task
]


@pytest.mark.parametrize(("family", "task"), CLASSIFIERS)
def test_the_head_of_a_classification_may_be_named_and_counts_once(family, task, in_process):
    config = config_of(family) | {"id2label": {"0": "a", "1": "b", "2": "c"}}
    bare, _ = find_spec("m", config, "a test", task, ask=False)
    head, first = bare.head.name, "query" if family == "bert" or family == "vit" else None
    first = first or NAMES.get(family, ("q_proj", ""))[0]
    shapes = {
        "head": {"target_modules": [first], "modules_to_save": [head]},
        "no-head": {"target_modules": [first]},
        "all-linear": {"target_modules": "all-linear", "modules_to_save": [head]},
        "one-layer": {"target_modules": [first], "modules_to_save": [head], "layers_to_transform": 0},
        "targeted-head": {"target_modules": [first, head]},
        "pattern-with-head": {"target_modules": f".*({first}|{head})", "modules_to_save": [head]},
        "excluded-head": {"target_modules": "all-linear", "exclude_modules": [head]},
        "head-alone": {"target_modules": [head]},
        "other-head": {"target_modules": [first], "modules_to_save": ["classifier", "score"]},
        "no-such-module": {"target_modules": [first], "modules_to_save": ["lm_head"]},
    }  # fmt: skip
    wrong = {}
    for shape, fields in shapes.items():
        answer = ANSWERS["adapter"](
            {"config": config, "labels": 3, "task": task, "adapter": {"r": 4, **fields}}
        )
        try:
            spec, _ = find_spec("m", config, "a test", task, ask=True, adapter={"r": 4, **fields})
            found = adapted_by(spec, {"r": 4, **fields}).params
        except RecipeError as error:
            found = None if {p.code for p in error.problems} <= REFUSED else error
        if found != answer.get("params"):
            wrong[shape] = (found, answer)
    assert not wrong


@pytest.mark.parametrize(
    ("layers", "trained"), [(0, 212_992), ([0], 212_992), (2, 212_992), ([7], 212_992), ([1, 2], 425_984)]
)
def test_the_layers_of_a_published_model_are_counted(layers, trained):
    fields = {"r": 16, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": layers}
    assert adapted_by(factories.facts(model="Qwen/Qwen3-8B").model, fields).params == trained


@pytest.mark.parametrize("family", ["granitemoe", "mixtral", "qwen3_moe", "llama"])
def test_parameters_of_experts_are_counted_by_peft_itself(family, in_process):
    config = config_of(family)
    names = {
        name.rpartition(".")[0].rpartition(".")[2] + "." + name.rpartition(".")[2]
        for name, p in build(config).named_parameters()
        if p.ndim == 3 or "mlp.up" in name
    }
    fields = {"r": 4, "target_modules": ["q_proj"], "target_parameters": sorted(names) or ["up_proj.weight"]}
    spec, note = find_spec("m", config, "a test", "causal-lm", ask=True, adapter=fields)
    expected = real(family, config, {k: v for k, v in fields.items() if k != "r"})
    assert note is not None
    assert expected is not None
    assert adapted_by(spec, fields).params == expected


@pytest.mark.parametrize("family", ["bloom", "mpt", "granite", "olmo3", "glm4", *sorted(MIXED_TYPES)])
def test_the_attention_of_a_plan_is_one_that_the_class_takes(family, tmp_path, in_process):
    config = config_of(family)
    spec, _ = find_spec("m", config, "a test", "causal-lm", ask=True)
    # all-linear is refused where it leaves the experts out.
    fields = {"target_modules": ["o_proj"]} if family in MIXED_TYPES else {}
    planned = made(tmp_path, config, fields, spec).model.attn_implementation
    register_varlen()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config), attn_implementation=planned
        )
    assert model.config._attn_implementation == planned


def test_a_rehearsal_with_two_layers_takes_adapters_of_deeper_ones(tmp_path):
    fields = {
        "target_modules": ["q_proj", "fc1", "o_proj"], "layers_to_transform": [8, 10, 11],
        "rank_pattern": {r"layers\.11\..*q_proj": 8, "o_proj": 2},
        "alpha_pattern": {r"layers\.(8|9)\..*": 4, "fc1": 3},
    }  # fmt: skip
    loaded = factories.recipe(tmp_path, factories.BASE)
    loaded = factories.replace_recipe(
        loaded, {"adapter": loaded.recipe.adapter.model_copy(update={"r": 4, **fields})}
    )
    tiny = tiny_recipe(loaded, config_of("llama")).recipe.adapter.model_dump()
    assert tiny["layers_to_transform"] == [0, 1]
    assert (tiny["rank_pattern"], tiny["alpha_pattern"]) == ({"o_proj": 2}, {"fc1": 3})


def test_an_adapter_of_the_head_alone_keeps_nothing_of_the_layers(tmp_path):
    spec, _ = find_spec("m", config_of("llama"), "a test", "causal-lm", ask=False)
    text = {"head": {"target_modules": ".*lm_head"}, "layers": {"target_modules": ["q_proj"]}}
    kept = {name: planned_job(tmp_path, fields, spec).components.activations for name, fields in text.items()}
    assert kept["head"] < kept["layers"]


def test_default_targets_are_those_of_peft():
    theirs = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    ours = {name: list(one.peft_targets) for name, one in MODEL_TYPES.items() if one.peft_targets}
    assert {f: theirs[f] for f in FAMILY_TASKS if f in theirs} == ours
