"""Facts about the model families that are known, from transformers' own classes.

`module_names`: the modules that LoRA cannot adapt, or that have no closed form; the model types that have a
causal language model, and those that read images and text with the type of their text model.
`config_defaults`: defaults that decide sizes. `tp_plans`: how transformers cuts the layers. `model_types`:
what benchmarks/coverage.py found out by running each type. `models`: configurations of named models.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from launcher.models.model import FAMILY_TASKS
from launcher.train.model.models import auto_class
from tools.tables import shipped

COVERAGE = Path(__file__).parents[2] / "benchmarks" / "records" / "coverage_cpu.json"
KERNELS = ("eager", "flash_attention_2", "sdpa", "varlen")
_COUNTED = ("Linear", "Conv1D", "Embedding")
_LAYERS = ("h", "layers", "layer", "block")
"""Names of the lists of layers."""


def names() -> dict[str, dict[str, str]]:
    """Family -> module's name, `{}` for the layer's index -> class."""
    return {family: _of_family(family) for family in FAMILY_TASKS}


def _of_family(family: str) -> dict[str, str]:
    config = transformers.AutoConfig.for_model(family)
    if family == "ministral":  # whose class needs what its configuration leaves open
        config.head_dim = config.hidden_size // config.num_attention_heads
    with torch.device("meta"):
        model = auto_class(FAMILY_TASKS[family][0]).from_config(config)
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name and kind not in _COUNTED:
            found[_template(name)] = kind
    return found


def _template(name: str) -> str:
    """`{}` for the first index alone: blocks of T5 have numbered parts."""
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit() and parts[i - 1] in _LAYERS), None)
    if place is not None:
        parts[place] = "{}"
    return ".".join(parts)


def module_names() -> dict[str, Any]:
    return {
        "version": transformers.__version__,
        "names": names(),
        "causal_lm": sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "rotary": [kind for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if _is_rotary(kind)],
        "image_text_to_text": {
            kind: _text(kind) for kind in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        },
    }


def _is_rotary(kind: str) -> bool:
    """Whether all layers have the same rotary positions, whose frequencies follow from `rope_type`."""
    make = CONFIG_MAPPING[kind]
    try:
        config = make()
    except StrictDataclassClassValidationError:  # whose defaults contradict each other
        return False
    rope = getattr(config, "rope_parameters", None)
    if not rope or rope.get("rope_type") != "default" or config.nested_rope_parameter_keys(rope):
        return False
    code = Path(inspect.getfile(make)).parent.glob("modeling_*.py")
    return any("ROPE_INIT_FUNCTIONS" in path.read_text(encoding="utf-8") for path in code)


def _text(kind: str) -> dict[str, Any]:
    """The type of the text model in a model that reads images too, and whether its embeddings are tied."""
    config = CONFIG_MAPPING[kind]()
    inner = getattr(config, "text_config", None)
    return {
        "text": None if inner is None else inner.model_type,
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
    }


SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "resid_pdrop", "use_bias",
    "residual_dropout", "n_embd", "n_inner", "n_layer", "n_head", "n_positions", "multi_query",
    "activation_function", "attn_pdrop", "hidden_dropout", "ffn_dim", "word_embed_proj_dim",
    "do_layer_norm_before", "_remove_final_layer_norm", "enable_bias",
    "layer_norm_elementwise_affine", "dropout", "num_local_experts", "num_experts_per_tok",
    "num_experts", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "d_model",
    "d_ff", "d_kv", "num_layers", "num_decoder_layers", "num_heads",
    "relative_attention_num_buckets", "feed_forward_proj", "dropout_rate", "type_vocab_size",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "image_size", "patch_size",
    "num_channels", "qkv_bias", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "shared_expert_intermediate_size", "shared_intermediate_size", "position_embedding_type",
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_chunk_size",
    "mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "first_k_dense_replace",
    "n_shared_experts", "n_routed_experts", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "use_qk_norm", "intermediate_size_mlp",
    "interleave_moe_layer_step", "no_rope_layer_interval", "attention_chunk_size",
    "attn_temperature_tuning", "vocab_size_per_layer_input", "hidden_size_per_layer_input",
    "num_kv_shared_layers", "attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block",
    "top_k_experts", "norm_bias", "mlp_dropout", "classifier_bias", "classifier_pooling", "local_attention",
)  # fmt: skip
"""Fields of configurations that decide sizes."""


def config_defaults() -> dict[str, Any]:
    """Model type -> field of SIZES -> default; without those that the class does not have."""
    found = {}
    for family in FAMILY_TASKS:
        own = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[family])}
        found[family] = {
            name: own[name] for name in SIZES if own.get(name, dataclasses.MISSING) is not dataclasses.MISSING
        }
    return {"version": transformers.__version__, "defaults": found}


def tp_plans() -> dict[str, Any]:
    """Model type -> module pattern -> style; {} for a family without a plan."""
    plans = {family: CONFIG_MAPPING[family].base_model_tp_plan or {} for family in sorted(FAMILY_TASKS)}
    return {"version": transformers.__version__, "plans": plans}


def model_types() -> dict[str, Any]:
    """Model type -> what passed, without types of which nothing did."""
    record = json.loads(COVERAGE.read_text("utf-8"))
    types = {kind: _passed(row) for kind, row in record["causal_lm"].items()}
    return {
        "version": record["versions"]["transformers"],
        "types": {kind: row for kind, row in types.items() if any(row.values())},
    }


def _passed(row: dict[str, Any]) -> dict[str, Any]:
    needs = row.get("needs", {})
    return {
        "apart": [kernel for kernel in KERNELS if row.get(kernel) is True],
        **{name: row.get(name) is True for name in ("chunked", "compiled")},
        **({"needs": needs} if needs else {}),
    }


TABLES: dict[str, Callable[[], dict[str, Any]]] = {
    "module_names": module_names, "config_defaults": config_defaults, "tp_plans": tp_plans,
    "model_types": model_types, "models": shipped.models,
}  # fmt: skip
