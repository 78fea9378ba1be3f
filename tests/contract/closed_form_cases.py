"""Jobs whose memory the planner has in closed form, and what the tracer is asked about each.

Small models of every family with layers of one kind, of encoders with windows, of windows shorter than a row,
of frozen experts, and of families with layers of several kinds; on a CPU and on an A100.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memory_cases import WORKSPACES
from traces import LORA_16, peak, request

from launcher.engines.ddp import DDP
from launcher.machine.hardware import Hardware, parse_hardware
from launcher.memory.estimate import MemoryEstimate, estimate_memory
from launcher.memory.job import MemoryJob
from launcher.memory.phases import CUDA_CONTEXT
from launcher.memory.traced import choices_of
from launcher.models.families import MODEL_TYPES
from launcher.models.lora import adapted_paths, lora_params
from launcher.models.memory_trace import LinearBytes, Trace, read_step
from launcher.models.model import ModelSpec, read_model_spec

DEVICES = {"cpu": parse_hardware("cpu"), "cuda": parse_hardware("1xA100-80GB")}
JOB = MemoryJob(
    micro_batch=4, sequence_length=256, data_parallel=1, devices_per_node=1, precision="bf16-true",
    dtype="bfloat16", quantization="none", double_quant=False, trainable_params=0, adapter=False, engine=DDP,
    zero_stage=0, offload_optimizer="none", offload_param="none", optim="adamw_torch_fused",
    checkpointing=False, reduce_bucket_size=1, allgather_bucket_size=1, attention="sdpa", overlap_comm=False,
    eval_batch=1, accumulation=1,
)  # fmt: skip


@dataclass(frozen=True)
class ClosedFormCase:
    """One job on one device."""

    name: str
    spec: ModelSpec
    job: MemoryJob
    device: str
    batches: tuple[int, ...]
    """Micro-batches that are traced; the last is the job's own."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the plan that differ from those of every request."""

    @property
    def hardware(self) -> Hardware:
        return DEVICES[self.device]

    @property
    def labels(self) -> int | None:
        return None if self.spec.task == "causal-lm" else self.spec.head.out_features

    def request(self) -> dict[str, Any]:
        """What the tracing process reads."""
        return request(
            self.spec.config, self.job.to_json(), self.settings, batches=self.batches,
            on_cpu=self.hardware.is_cpu, labels=self.labels,
        )  # fmt: skip

    def configuration(self) -> dict[str, Any]:
        """What the trace of this job depends on, as JSON."""
        return {
            "config": dict(self.spec.config), "choices": choices_of(self.job, self.hardware),
            "settings": dict(self.settings), "batches": self.batches, "labels": self.labels,
        }  # fmt: skip

    def closed(self) -> MemoryEstimate:
        return estimate_memory(self.spec, self.job, self.hardware)

    def traced(self, answer: Mapping[str, Any], versions: Mapping[str, str]) -> MemoryEstimate:
        """The planner's estimate with this answer in place of the closed form."""
        step = read_step(answer, choices_of(self.job, self.hardware), LinearBytes(0.0, 0.0))
        return estimate_memory(self.spec, self.job, self.hardware, trace=Trace().with_step(step, versions))

    def error(self, answer: Mapping[str, Any], versions: Mapping[str, str]) -> float:
        """Closed form against the planner's estimate with the trace, as a share; states are the closed
        form's on both sides."""
        closed, traced = self.closed(), self.traced(answer, versions)
        assert (closed.method, traced.method) == ("closed-form", "trace"), self.name
        return _share(closed.total - closed.components.context, traced.total - traced.components.context)

    def error_of_peak(self, answer: Mapping[str, Any]) -> float:
        """Closed form against the traced peak alone, states included, as a share."""
        closed = self.closed().total - (0 if self.hardware.is_cpu else CUDA_CONTEXT + WORKSPACES)
        return _share(closed, peak(answer, self.batches[-1]))


def _share(closed: float, traced: float) -> float:
    return closed / traced - 1


def _case(
    name: str, spec: ModelSpec, device: str, batches: tuple[int, ...], rank: int, targets: Any, **more: Any
) -> ClosedFormCase:
    """targets: of the adapter; None: full training."""
    job, settings = replace(JOB, trainable_params=spec.params, **more), {"task": spec.task}
    if targets is not None:
        job = replace(job, adapter=True, trainable_params=lora_params(spec, rank, targets))
        settings |= {**LORA_16, "adapter.r": rank, "adapter.target_modules": targets}
        settings["model.enable_input_require_grads"] = job.checkpointing
    return ClosedFormCase(f"{name}-{device}", spec, job, device, batches, settings)


BATCHES, RANK = (2, 4), 8
SIZES = {
    "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "vocab_size": 1000, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
WIDE = {**SIZES, "head_dim": 48}
PHI4 = {**SIZES, "partial_rotary_factor": 0.75, "tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "qwen3": {"model_type": "qwen3", **WIDE},
    "gemma3": {"model_type": "gemma3_text", **WIDE},
    "phi4-mini": {"model_type": "phi3", **PHI4},
    "smollm3": {"model_type": "smollm3", **SIZES},
    "arcee": {"model_type": "arcee", **SIZES},
    "ministral": {"model_type": "ministral", **WIDE},
    "ministral3": {"model_type": "ministral3", **WIDE},
    "granite": {"model_type": "granite", **SIZES},
    "olmo2": {"model_type": "olmo2", **SIZES},
    "olmo3": {"model_type": "olmo3", **SIZES},
    "apertus": {"model_type": "apertus", **SIZES},
    "glm": {"model_type": "glm", **WIDE},
    "glm4": {"model_type": "glm4", **WIDE},
}
JOBS: dict[str, dict[str, Any]] = {
    "full": {},
    "full-checkpointing": {"checkpointing": True},
    "lora": {"targets": "all-linear"},
    "lora-checkpointing": {"targets": "all-linear", "checkpointing": True},
}


def of_families() -> Iterator[ClosedFormCase]:
    for name, device, kind in itertools.product(FAMILIES, DEVICES, JOBS):
        spec = read_model_spec(name, FAMILIES[name], "test")
        yield _case(f"{name}-{kind}", spec, device, BATCHES, RANK, **{"targets": None, **JOBS[kind]})


MODERNBERT = {
    "model_type": "modernbert", "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8,
    "num_hidden_layers": 6, "vocab_size": 1000, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
ENCODER_JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: ({}, job) for name, job in JOBS.items()},
    "eager": ({}, {"attention": "eager"}),
    "padded": ({}, {"padded": True}),
    "padded-eager": ({}, {"padded": True, "attention": "eager"}),
    "wide-window": ({"local_attention": 1024}, {}),
    "bf16": ({}, {"precision": "bf16", "dtype": "float32"}),
    "dropout": ({"attention_dropout": 0.1, "mlp_dropout": 0.1}, {}),
    "biases": ({"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}, {}),
}
TOKEN_JOBS = ("full", "lora")


def of_encoders() -> Iterator[ClosedFormCase]:
    """ModernBERT, whose windows are on both sides."""
    for device, kind in itertools.product(DEVICES, ENCODER_JOBS):
        config, more = ENCODER_JOBS[kind]
        task = "token-classification" if kind in TOKEN_JOBS else "sequence-classification"
        spec = read_model_spec("modernbert", {**MODERNBERT, **config}, "test", task)
        yield _case(f"modernbert-{kind}", spec, device, BATCHES, RANK, **{"targets": None, **more})


WINDOWS: dict[str, dict[str, Any]] = {
    "gemma3": {}, "olmo3": {}, "mistral": {"model_type": "mistral", **SIZES},
    "ministral": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
}  # fmt: skip


def windowed(name: str, window: int) -> ModelSpec:
    config = {**FAMILIES.get(name, {}), **WINDOWS[name], "sliding_window": window}
    return read_model_spec(name, config, "test")


def of_windows() -> Iterator[ClosedFormCase]:
    """Windows shorter than a row, which has a mask of them."""
    for name, device, kind, padded in itertools.product(WINDOWS, DEVICES, JOBS, (False, True)):
        spec = windowed(name, JOB.sequence_length // 2)
        title = f"{name}-window-{kind}" + "-padded" * padded
        yield _case(title, spec, device, BATCHES, RANK, **{"targets": None, **JOBS[kind]}, padded=padded)


EXPERTS = {
    "model_type": "qwen3_moe", **SIZES, "head_dim": 32, "moe_intermediate_size": 192, "num_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def of_frozen_experts() -> Iterator[ClosedFormCase]:
    spec = read_model_spec("experts", EXPERTS, "test")
    precisions = (("fp32", "float32"), ("bf16", "bfloat16"))
    for device, quantization, (precision, dtype) in itertools.product(DEVICES, ("none", "nf4"), precisions):
        yield _case(
            f"experts-{quantization}-{precision}", spec, device, BATCHES, RANK, ATTENTION,
            precision=precision, dtype=dtype, quantization=quantization,
            adapted=adapted_paths(spec, ATTENTION),
        )  # fmt: skip


MIXED_SIZES = {
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
MIXED: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"model_type": "qwen2_moe", **MIXED_SIZES, **SPARSE, "decoder_sparse_step": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe", **MIXED_SIZES, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
    },
    "granitemoe": {
        "model_type": "granitemoe", **MIXED_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", **MIXED_SIZES, "head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 2,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **MIXED_SIZES, **DELTA},
    "gpt_oss": {
        "model_type": "gpt_oss", **MIXED_SIZES, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 96,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64,
    },
    "llama4_text": {
        "model_type": "llama4_text", **MIXED_SIZES, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 8, "intermediate_size": 96, "intermediate_size_mlp": 352, "num_local_experts": 4,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 128,
    },
    "gemma4_text": {
        "model_type": "gemma4_text", **MIXED_SIZES, **GEMMA4, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
    },
    "gemma4_text-inputs": {
        "model_type": "gemma4_text", **MIXED_SIZES, **GEMMA4, "num_hidden_layers": 8,
        "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 1000, "use_double_wide_mlp": True,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
    },
    "gemma4_text-experts": {
        "model_type": "gemma4_text", **MIXED_SIZES, **GEMMA4, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text", **MIXED_SIZES, **DELTA, **SPARSE},
    "qwen3_next": {
        "model_type": "qwen3_next", **MIXED_SIZES, **DELTA, **SPARSE, "linear_num_key_heads": 4,
        "mlp_only_layers": [0, 1],
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **MIXED_SIZES, **LATENT},
    "deepseek_v3-whole-queries": {
        "model_type": "deepseek_v3", **MIXED_SIZES, **LATENT, "q_lora_rank": None, "v_head_dim": 48,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid", **MIXED_SIZES, **MAMBA, "num_local_experts": 4,
        "shared_intermediate_size": 96, "position_embedding_type": "nope",
    },
    "granitemoehybrid-dense": {
        "model_type": "granitemoehybrid", **MIXED_SIZES, **MAMBA, "num_local_experts": 0,
        "shared_intermediate_size": 352, "position_embedding_type": "rope",
    },
}  # fmt: skip
MIXED_TYPES = {config["model_type"] for config in MIXED.values()} - {"qwen3_moe"}
LIKE_LLAMA = tuple(
    name for name, one in MODEL_TYPES.items() if one.kind == "decoder" and name not in MIXED_TYPES
)
"""Decoders that a configuration of Llama's sizes makes."""
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


def of_mixed_layers() -> Iterator[ClosedFormCase]:
    """Decoders whose layers are of several kinds."""
    for name, config in MIXED.items():
        spec = read_model_spec(name, config, "test")
        for length, mode, device in itertools.product(LENGTHS.get(name, (128, 320)), MODES, DEVICES):
            more, targets = MODES[mode]
            more = {**more, "attention": "eager" if name in EAGER else "sdpa", "sequence_length": length}
            if targets is not None:
                more["adapted"] = adapted_paths(spec, targets)
            yield _case(f"{name}-{length}-{mode}", spec, device, (4,), 16, targets, eval_batch=0, **more)


KINDS = {
    "families": of_families, "encoders": of_encoders, "windows": of_windows,
    "frozen-experts": of_frozen_experts, "mixed-layers": of_mixed_layers,
}  # fmt: skip


def every_case() -> dict[str, ClosedFormCase]:
    """By name. A name is given once."""
    cases = [case for kind in KINDS.values() for case in kind()]
    found = {case.name: case for case in cases}
    assert len(found) == len(cases)
    return found
