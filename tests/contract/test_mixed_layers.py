"""The closed form of decoders whose layers are of several kinds against the trace of their real classes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from memory_cases import WORKSPACES

sys.path.insert(0, str(Path(__file__).parent))
from traces import LORA_16, peak, request

from launcher.engines.ddp import DDP
from launcher.facts.hardware import parse_hardware
from launcher.facts.model import read_model_spec
from launcher.memory.estimate import estimate_memory
from launcher.memory.job import MemoryJob
from launcher.memory.phases import CUDA_CONTEXT
from launcher.train.trace import run as tracer

SIZES = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip
SPARSE = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}  # fmt: skip
DELTA = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 64, "layer_types": ["mamba", "mamba", "attention"] * 2, "num_experts_per_tok": 2,
}  # fmt: skip
GEMMA4 = {"num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64, "sliding_window": 192}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"model_type": "qwen2_moe", **SIZES, **SPARSE, "decoder_sparse_step": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe", **SIZES, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
    },
    "granitemoe": {
        "model_type": "granitemoe", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", **SIZES, "head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 2,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **SIZES, **DELTA},
    "gpt_oss": {
        "model_type": "gpt_oss", **SIZES, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64,
    },
    "llama4_text": {
        "model_type": "llama4_text", **SIZES, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 8, "intermediate_size": 96, "intermediate_size_mlp": 352, "num_local_experts": 4,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 128,
    },
    "gemma4_text": {
        "model_type": "gemma4_text", **SIZES, **GEMMA4, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
    },
    "gemma4_text-inputs": {
        "model_type": "gemma4_text", **SIZES, **GEMMA4, "num_hidden_layers": 8, "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 1000, "use_double_wide_mlp": True,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
    },
    "gemma4_text-experts": {
        "model_type": "gemma4_text", **SIZES, **GEMMA4, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text", **SIZES, **DELTA, **SPARSE},
    "qwen3_next": {
        "model_type": "qwen3_next", **SIZES, **DELTA, **SPARSE, "linear_num_key_heads": 4,
        "mlp_only_layers": [0, 1],
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **SIZES, **LATENT},
    "deepseek_v3-whole-queries": {
        "model_type": "deepseek_v3", **SIZES, **LATENT, "q_lora_rank": None, "v_head_dim": 48,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid", **SIZES, **MAMBA, "num_local_experts": 4,
        "shared_intermediate_size": 96, "position_embedding_type": "nope",
    },
    "granitemoehybrid-dense": {
        "model_type": "granitemoehybrid", **SIZES, **MAMBA, "num_local_experts": 0,
        "shared_intermediate_size": 352, "position_embedding_type": "rope",
    },
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

EAGER = {"gpt_oss"}
"""Types that are planned with eager attention."""
LENGTHS = {"gpt_oss": (128, 384), "llama4_text": (96, 384)}
"""Without and with the mask of windows where sdpa needs one."""
PLAIN = {"precision": "bf16", "dtype": "float32"}
MODES: dict[str, tuple[dict[str, Any], Any]] = {
    "full": (PLAIN, None),
    "full-checkpointing": ({**PLAIN, "checkpointing": True}, None),
    "32-bit": ({"precision": "fp32", "dtype": "float32"}, None),
    "16-bit": ({"precision": "bf16-true", "dtype": "bfloat16"}, None),
    "lora": ({"precision": "bf16", "dtype": "bfloat16"}, ["o_proj"]),
    "lora-checkpointing": ({"precision": "bf16", "dtype": "bfloat16", "checkpointing": True}, "all-linear"),
}


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize(
    ("name", "length", "mode"),
    cases(
        [(n, length, m) for n in CONFIGS for length in LENGTHS.get(n, (128, 320)) for m in MODES],
        ("glm4_moe", 128, "full"),
        ("qwen2_moe", 128, "lora-checkpointing"),
        ("gpt_oss", 384, "full-checkpointing"),
        ("llama4_text", 384, "lora-checkpointing"),
        ("gemma4_text", 320, "32-bit"),
        ("gemma4_text-inputs", 320, "lora-checkpointing"),
        ("gemma4_text-experts", 128, "full-checkpointing"),
    ),
)
def test_the_closed_form_is_within_3_percent_of_the_trace(
    name: str, length: int, mode: str, on_cpu: bool
) -> None:
    settings, targets = MODES[mode]
    spec = read_model_spec(name, CONFIGS[name], "a test")
    more: dict[str, Any] = {"trainable_params": spec.params, "adapter": False}
    fields: dict[str, Any] = {}
    if targets is not None:
        more = {"adapter": True, "adapted": spec.adapted_paths(targets)}
        more["trainable_params"] = spec.lora_params(16, targets)
        checkpointing = bool(settings.get("checkpointing"))
        fields = {**LORA_16, "adapter.target_modules": targets}
        fields["model.enable_input_require_grads"] = checkpointing
    job = MemoryJob(
        **{
            "micro_batch": 4, "sequence_length": length, "data_parallel": 1, "devices_per_node": 1,
            "quantization": "none", "double_quant": False, "engine": DDP, "zero_stage": 0,
            "offload_optimizer": "none", "offload_param": "none", "optim": "adamw_torch_fused",
            "checkpointing": False, "attention": "eager" if name in EAGER else "sdpa",
            "reduce_bucket_size": 1, "allgather_bucket_size": 1, "overlap_comm": False, "eval_batch": 0,
            "accumulation": 1,
            **settings, **more,
        }
    )  # fmt: skip
    hardware = parse_hardware("cpu" if on_cpu else "1xA100-80GB")
    closed = estimate_memory(spec, job, hardware).total - (0 if on_cpu else CUDA_CONTEXT + WORKSPACES)
    answer = tracer.trace(request(CONFIGS[name], job.to_json(), fields, batches=(4,), on_cpu=on_cpu))
    assert closed == pytest.approx(peak(answer, 4), rel=0.03)
