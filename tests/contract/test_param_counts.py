"""Specs against the real classes: parameter counts, linears and LoRA on small configurations."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RecipeError
from launcher.files.shipped import facts_file
from launcher.models.families import MODEL_TYPES
from launcher.models.lora import lora_params
from launcher.models.model import FAMILY_TASKS, read_model_spec
from launcher.planner.narrow import narrow_config
from launcher.tasks import task_named
from launcher.train.model.adapters import exclusions
from launcher.train.model.models import head_modules

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# peft sets the first for GPT-2; the second is its own rewriting of targets in expert models.
pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys"),
    pytest.mark.filterwarnings("ignore:target_parameters=.* were set but no parameter"),
]

AUTO = {
    "causal-lm": transformers.AutoModelForCausalLM,
    "seq2seq-lm": transformers.AutoModelForSeq2SeqLM,
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "image-classification": transformers.AutoModelForImageClassification,
    "reward": transformers.AutoModelForSequenceClassification,
    "embedding": transformers.AutoModel,
    "reranker": transformers.AutoModelForSequenceClassification,
}
ONE_LOGIT = ("reward", "reranker")
# What the worker hands to LoraConfig for each task; peft has no task type for images.
LORA: dict[str, dict[str, Any]] = {
    "causal-lm": {"task_type": "CAUSAL_LM"},
    "seq2seq-lm": {"task_type": "SEQ_2_SEQ_LM"},
    "sequence-classification": {"task_type": "SEQ_CLS"},
    # With this type alone "all-linear" takes the head, too, which peft then cannot save.
    "token-classification": {"task_type": "TOKEN_CLS", "modules_to_save": ["classifier", "score"]},
    "image-classification": {"modules_to_save": ["classifier"]},
    "reward": {"task_type": "SEQ_CLS"},
    "embedding": {"task_type": "FEATURE_EXTRACTION"},
    "reranker": {"task_type": "SEQ_CLS"},
}

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
GEMMA4 = {
    **LLAMA, "num_hidden_layers": 8, "head_dim": 24, "global_head_dim": 32, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 500,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 512}
T5 = {"d_model": 64, "d_kv": 24, "d_ff": 160, "num_layers": 3, "num_heads": 4, "vocab_size": 512}
MOE = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32}
MIXED = {**LLAMA, "head_dim": 16, "num_hidden_layers": 6}
SPARSE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3,
}  # fmt: skip
MAMBA = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_d_conv": 3,
    "layer_types": ["mamba", "mamba", "attention", "mamba", "attention", "mamba"],
}  # fmt: skip
DENSE_FIRST = {
    "first_k_dense_replace": 2, "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
}  # fmt: skip
MLA = {
    **{key: value for key, value in MIXED.items() if key != "head_dim"}, **DENSE_FIRST,
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10,
}  # fmt: skip
LLAMA_4 = {
    **MIXED, "intermediate_size_mlp": 96, "num_local_experts": 4, "interleave_moe_layer_step": 2,
    "num_experts_per_tok": 1,
}  # fmt: skip
BIASED = {"attention_bias": True}
MIXED_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"model_type": "qwen3_next", **MIXED, **SPARSE, **DELTA},
    "qwen3_next-step": {
        "model_type": "qwen3_next", **MIXED, **SPARSE, **DELTA, **BIASED, "decoder_sparse_step": 2,
        "mlp_only_layers": [3], "full_attention_interval": 3, "tie_word_embeddings": True,
    },
    "qwen3_next-dense": {"model_type": "qwen3_next", **MIXED, **SPARSE, **DELTA, "num_experts": 0},
    "qwen3_5_text": {"model_type": "qwen3_5_text", **MIXED, **DELTA},
    "qwen3_5_text-types": {
        "model_type": "qwen3_5_text", **MIXED, **DELTA, **BIASED,
        "layer_types": ["full_attention", *["linear_attention"] * 5],
    },
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text", **MIXED, **SPARSE, **DELTA},
    "qwen2_moe": {"model_type": "qwen2_moe", **LLAMA, **SPARSE},
    "qwen2_moe-step": {
        "model_type": "qwen2_moe", **MIXED, **SPARSE, "decoder_sparse_step": 3, "qkv_bias": False,
    },
    "granitemoehybrid": {"model_type": "granitemoehybrid", **MIXED, **MAMBA},
    "granitemoehybrid-bias": {
        "model_type": "granitemoehybrid", **MIXED, **MAMBA, **BIASED, "mamba_conv_bias": False,
        "mamba_proj_bias": True, "tie_word_embeddings": True, "position_embedding_type": "rope",
    },
    "granitemoehybrid-dense": {
        "model_type": "granitemoehybrid", **MIXED, **MAMBA, "num_local_experts": 0, "num_experts_per_tok": 0,
    },
    "granitemoe": {"model_type": "granitemoe", **LLAMA, "num_local_experts": 4, **BIASED},
    "deepseek_v3": {"model_type": "deepseek_v3", **MLA},
    "deepseek_v3-whole-queries": {"model_type": "deepseek_v3", **MLA, **BIASED, "q_lora_rank": None},
    "deepseek_v3-bias": {"model_type": "deepseek_v3", **MLA, **BIASED},
    "glm4_moe": {"model_type": "glm4_moe", **MIXED, **DENSE_FIRST},
    "glm4_moe-norm": {"model_type": "glm4_moe", **MIXED, **DENSE_FIRST, **BIASED, "use_qk_norm": True},
    "llama4_text": {"model_type": "llama4_text", **LLAMA_4},
    "llama4_text-listed": {
        "model_type": "llama4_text", **LLAMA_4, **BIASED, "moe_layers": [0, 1, 4], "use_qk_norm": False,
    },
    "gemma4-plain": {"model_type": "gemma4_text", **GEMMA4, "hidden_size_per_layer_input": 0},
    "gemma4-inputs": {"model_type": "gemma4_text", **GEMMA4, "attention_bias": True},
    "gemma4-shared": {
        "model_type": "gemma4_text",
        **GEMMA4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma4-narrow-full": {
        "model_type": "gemma4_text",
        **GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "layer_types": ["full_attention", "sliding_attention"] * 4,
        "tie_word_embeddings": False,
    },
    "gemma4-experts": {
        "model_type": "gemma4_text",
        **GEMMA4,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gpt_oss": {"model_type": "gpt_oss", **LLAMA, "head_dim": 24, "num_local_experts": 4},
    "gpt_oss-plain": {
        "model_type": "gpt_oss", **LLAMA, "num_local_experts": 4, "attention_bias": False, "head_dim": 16,
    },
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    **MIXED_CONFIGS,
    "llama": {"model_type": "llama", **LLAMA},
    "llama-bias": {"model_type": "llama", **LLAMA, "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", **LLAMA},
    "qwen2": {"model_type": "qwen2", **LLAMA, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **LLAMA},
    "gemma": {"model_type": "gemma", **LLAMA},
    "gemma2": {"model_type": "gemma2", **LLAMA},
    "gemma3_text": {"model_type": "gemma3_text", **LLAMA},
    "phi3": {"model_type": "phi3", **LLAMA, "pad_token_id": 0},
    "starcoder2": {"model_type": "starcoder2", **LLAMA},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **GPT2},
    "gpt_bigcode-mha": {"model_type": "gpt_bigcode", **GPT2, "multi_query": False},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt_neox": {"model_type": "gpt_neox", **LLAMA},
    "opt": {"model_type": "opt", **LLAMA, "ffn_dim": 160},
    "opt-projected": {"model_type": "opt", **LLAMA, "ffn_dim": 160, "word_embed_proj_dim": 32},
    "mixtral": {"model_type": "mixtral", **LLAMA, "num_local_experts": 4},
    "qwen3_moe": {"model_type": "qwen3_moe", **LLAMA, **MOE, "num_experts_per_tok": 2},
    "qwen3_moe-step": {
        "model_type": "qwen3_moe",
        **LLAMA,
        **MOE,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 5,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "smollm3": {"model_type": "smollm3", **LLAMA, "pad_token_id": 0},
    "smollm3-bias": {
        "model_type": "smollm3",
        **LLAMA,
        "pad_token_id": 0,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "arcee": {"model_type": "arcee", **LLAMA},
    "arcee-bias": {"model_type": "arcee", **LLAMA, "attention_bias": True, "mlp_bias": True},
    "ministral": {"model_type": "ministral", **LLAMA, "head_dim": 24},
    "ministral3": {"model_type": "ministral3", **LLAMA},
    "granite": {"model_type": "granite", **LLAMA, "tie_word_embeddings": True},
    "granite-bias": {"model_type": "granite", **LLAMA, "attention_bias": True, "mlp_bias": True},
    "olmo2": {"model_type": "olmo2", **LLAMA},
    "olmo2-bias": {"model_type": "olmo2", **LLAMA, "attention_bias": True},
    "olmo3": {"model_type": "olmo3", **LLAMA},
    "apertus": {"model_type": "apertus", **LLAMA},
    "apertus-bias": {"model_type": "apertus", **LLAMA, "attention_bias": True, "hidden_act": "relu2"},
    "glm": {"model_type": "glm", **LLAMA, "pad_token_id": 0},
    "glm4": {"model_type": "glm4", **LLAMA, "pad_token_id": 0},
    "glm4-no-bias": {
        "model_type": "glm4",
        **LLAMA,
        "attention_bias": False,
        "head_dim": 24,
        "pad_token_id": 0,
    },
    "phi3-partial": {
        "model_type": "phi3",
        **LLAMA,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.75,
    },
    "t5": {"model_type": "t5", **T5},
    "t5-gated": {"model_type": "t5", **T5, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 2},
    "mt5": {"model_type": "mt5", **T5, "tie_word_embeddings": False},
    "mt5-silu": {"model_type": "mt5", **T5, "feed_forward_proj": "silu"},
    "bert": {"model_type": "bert", **LLAMA, "type_vocab_size": 3},
    "modernbert": {"model_type": "modernbert", **LLAMA, "num_hidden_layers": 5, "pad_token_id": 0},
    "modernbert-bias": {
        "model_type": "modernbert",
        **LLAMA,
        "pad_token_id": 0,
        "attention_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "classifier_bias": True,
        "classifier_pooling": "mean",
    },
    "vit": {"model_type": "vit", **LLAMA, "image_size": [48, 32], "patch_size": [8, 16]},
    "vit-grey": {"model_type": "vit", **LLAMA, "image_size": 32, "num_channels": 1, "qkv_bias": False},
}
HEADS = {task for task in AUTO if task in ONE_LOGIT or task.endswith("classification")}
CASES = [
    (name, task)
    for name, config in CONFIGS.items()
    for task in FAMILY_TASKS[config["model_type"]]
    if task in AUTO
]


def build(config: dict[str, Any], task: str, **more: Any) -> Any:
    resolved = transformers.AutoConfig.for_model(**config, **more)
    with torch.device("meta"):
        return AUTO[task].from_config(resolved, **without_pooler(task, resolved))


def without_pooler(task: str, config: Any) -> dict[str, bool]:
    """As models without a head are loaded."""
    if task != "embedding" or type(config) not in transformers.MODEL_MAPPING:
        return {}
    kind = transformers.MODEL_MAPPING[type(config)]
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind).parameters else {}


def trainable(model: Any, task: str, r: int, targets: Any) -> int:
    """Parameters that peft trains, without the layers that the worker leaves out."""
    left = exclusions({"target_modules": targets}, model)
    fields = {**left, **LORA[task]}
    if task_named(task).adds_head:
        fields["modules_to_save"] = head_modules(model)  # as the worker
    config = peft.LoraConfig(r=r, target_modules=targets, **fields)
    with torch.device("meta"):
        adapted = peft.get_peft_model(model, config)
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def shapes(model: Any) -> Counter[tuple[str, int, int]]:
    found: Counter[tuple[str, int, int]] = Counter()
    for path, module in model.named_modules():
        if path in ("lm_head", "score", "classifier"):
            continue
        if isinstance(module, torch.nn.Linear):
            found[path, module.in_features, module.out_features] += 1
        elif type(module).__name__ == "Conv1D":
            found[path, module.nx, module.nf] += 1
    return found


def test_every_type_has_a_row() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == MODEL_TYPES.keys()


@pytest.mark.parametrize(("name", "task"), CASES)
def test_parameters_linears_and_lora_match_the_real_model(name: str, task: str) -> None:
    labels = {"num_labels": 1 if task in ONE_LOGIT else 7} if task in HEADS else {}
    given = None if task in ONE_LOGIT else labels.get("num_labels")
    spec = read_model_spec(name, CONFIGS[name], "test", task, given)
    model = build(CONFIGS[name], task, **labels)
    assert spec.params == sum(p.numel() for p in model.parameters())
    expected: Counter[tuple[str, int, int]] = Counter()
    for linear in spec.linears:
        for name in linear.names():
            expected[name, linear.in_features, linear.out_features] += 1
    assert shapes(model) == expected
    assert lora_params(spec, 5, "all-linear") == trainable(model, task, 5, "all-linear")


@pytest.mark.parametrize(
    ("name", "task"),
    [
        *((name, "causal-lm") for name in ("llama", "gpt2", "gpt_bigcode", "opt", "gpt_neox")),
        ("qwen2", "sequence-classification"),
        ("bert", "sequence-classification"),
        ("t5", "seq2seq-lm"),
        ("mt5", "seq2seq-lm"),
    ],
)
def test_default_lora_targets_are_those_of_peft(name: str, task: str) -> None:
    spec = read_model_spec(name, CONFIGS[name], "test", task)
    assert lora_params(spec, 5, None) == trainable(build(CONFIGS[name], task), task, 5, None)


@pytest.mark.parametrize(
    ("name", "task", "targets"),
    [
        ("vit", "image-classification", ["q_proj", "v_proj"]),
        ("vit", "image-classification", ["q_proj", "o_proj", "fc1", "fc2"]),
        ("bert", "sequence-classification", ["query", "key", "value"]),
        ("bert", "sequence-classification", ["dense"]),
        ("bert", "token-classification", ["dense"]),
        ("bert", "sequence-classification", ["query", "token_type_embeddings", "word_embeddings"]),
        ("modernbert", "sequence-classification", ["Wqkv", "Wi"]),
        ("modernbert", "token-classification", ["Wo", "dense"]),
        ("bert", "sequence-classification", r".*layer\.[01]\.output\.dense"),
        ("t5", "seq2seq-lm", ["q", "k", "v", "o", "wi", "wo"]),
        ("mt5", "seq2seq-lm", ["wi_0", "wi_1", "wo"]),
        ("mt5", "seq2seq-lm", r"decoder\..*EncDecAttention\.[qv]"),
        ("llama", "sequence-classification", ["q_proj", "down_proj"]),
        ("gpt2", "sequence-classification", ["c_attn", "wpe"]),
    ],
)
def test_named_lora_targets_match_peft(name: str, task: str, targets: Any) -> None:
    spec = read_model_spec(name, CONFIGS[name], "test", task, 7)
    labels = {"num_labels": 7} if task.endswith("classification") else {}
    model = build(CONFIGS[name], task, **labels)
    assert lora_params(spec, 4, targets) == trainable(model, task, 4, targets)


def test_a_t5_checkpoint_with_its_own_head_keeps_it(tmp_path: Path) -> None:
    spec = read_model_spec("mt5", CONFIGS["mt5"], "test", "seq2seq-lm")
    model = transformers.AutoModelForSeq2SeqLM.from_config(
        transformers.AutoConfig.for_model(**CONFIGS["mt5"])
    )
    assert sum(p.numel() for p in model.parameters()) == spec.params
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert sum(p.numel() for p in loaded.parameters()) == spec.loaded_params


def shipped_models() -> dict[str, Any]:
    models: dict[str, Any] = json.loads(facts_file("models.json").read_text())["models"]
    return {name: model for name, model in models.items() if "text_config" not in model["config"]}


def ends_of_families() -> list[str]:
    """The smallest and the largest model of each family; `make tables` counts the published class of all."""
    families: dict[str, list[str]] = {}
    for name, model in sorted(shipped_models().items(), key=lambda item: item[1]["params"]):
        families.setdefault(model["config"]["model_type"], []).append(name)
    return [name for names in families.values() for name in dict.fromkeys((names[0], names[-1]))]


@pytest.mark.parametrize("name", ends_of_families())
def test_shipped_models_are_counted_like_their_real_class_for_every_task(name: str) -> None:
    config = shipped_models()[name]["config"]
    for task in FAMILY_TASKS[config["model_type"]]:
        if task in AUTO:
            spec = read_model_spec(name, config, "test", task)
            one = {"num_labels": 1} if task in ONE_LOGIT else {}
            assert spec.params == sum(p.numel() for p in build(config, task, **one).parameters()), task


# One published configuration of each family.
FAMILY_EXAMPLES = {entry["config"]["model_type"]: entry["config"] for entry in shipped_models().values()}


@pytest.mark.parametrize("family", FAMILY_EXAMPLES)
def test_narrow_configurations_build_and_learn(family: str) -> None:
    narrow = narrow_config(FAMILY_EXAMPLES[family])
    for task in FAMILY_TASKS[family]:
        if task not in AUTO:
            continue
        one = {"num_labels": 1} if task in ONE_LOGIT else {}
        config = transformers.AutoConfig.for_model(**narrow, **one)
        model = AUTO[task].from_config(config, **without_pooler(task, config))
        spec = read_model_spec(family, narrow, "test", task)
        assert spec.params == sum(p.numel() for p in model.parameters()) < 400_000
        if task == "image-classification":
            inputs = {"pixel_values": torch.zeros(2, 3, 32, 32)}
        else:
            inputs = {"input_ids": torch.randint(3, 1024, (2, 16))}
        labels = torch.tensor([0, 1]) if task.endswith("classification") else inputs["input_ids"]
        if task == "token-classification":
            labels = inputs["input_ids"] % 2
        if task in ONE_LOGIT:
            labels = torch.tensor([0.5, -0.5])
        if task == "embedding":
            model(**inputs).last_hidden_state.square().mean().backward()
            continue
        out = model(**inputs, labels=labels)
        out.loss.backward()
        if task.endswith("classification"):
            assert out.logits.shape == ((2, 16, 2) if task == "token-classification" else (2, 2))


def test_every_family_has_the_classes_of_its_tasks_and_no_others_are_promised() -> None:
    for family, tasks in FAMILY_TASKS.items():
        config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
        for task, auto in AUTO.items():
            if task in tasks:
                assert config in auto._model_mapping
            else:
                with pytest.raises(RecipeError, match=f"does not support {task}"):
                    read_model_spec(family, {"model_type": family}, "test", task)
