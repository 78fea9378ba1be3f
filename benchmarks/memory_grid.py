"""The grid of small training jobs whose memory is measured and predicted: pure data.

Half of the rows are held out: formulas and traces are tuned on the rows of the half `tuning` alone. The
first byte of sha256(name) decides, even: tuning, odd: held-out (`half`). Rows are never deleted and do not
change; one that cannot run says why in `impossible`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

HALVES = ("tuning", "held-out")


@dataclass(frozen=True, slots=True)
class Row:
    """One training job on a CPU: two optimizer steps on rows of random tokens."""

    name: str
    model: str
    """Key of MODELS."""
    micro_batch: int = 4
    length: int = 256
    """Tokens per row; an image's patches decide theirs."""
    precision: str = "fp32"
    adapter: str | None = None
    """all-linear, or attention: the products that MODELS names; rank 8."""
    adapter_dropout: float = 0.0
    quantization: str = "none"
    kbit_norms: str = "float32"
    optim: str = "adamw_torch_fused"
    checkpointing: bool = False
    attention: str = "sdpa"
    packing: bool = False
    """Each row holds four documents."""
    padded: bool = False
    """Every second row ends in padding; its length stays."""
    accumulation: int = 1
    engine: str = "ddp"
    """ddp | deepspeed | fsdp (version 2); one process without the others."""
    zero_stage: int = 0
    offload_optimizer: str = "none"
    processes: int = 1
    bucket: int = 1_000_000
    """DeepSpeed's reduce and all-gather buckets, in elements."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the model's configuration."""
    free: bool = False
    """The rows of a batch lie in one row, for `attention`."""
    loss: str = "full"
    cast: bool = True
    """Adapters copy their input into their own dtype."""
    trains_tower: bool = False
    """Vision tower and projector of a model of images and text are trained, too."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `trainer:` that the task adds."""
    section: Mapping[str, Any] = field(default_factory=dict)
    """The task's own section of the recipe."""
    tuned: bool = False
    """A formula was corrected on it, whatever half its name would put it in."""
    impossible: str | None = None
    """Why the row cannot run."""

    @property
    def half(self) -> str:
        if self.tuned:
            return HALVES[0]
        return HALVES[hashlib.sha256(self.name.encode()).digest()[0] % 2]


@dataclass(frozen=True, slots=True)
class Model:
    """A configuration, its task, and the products that an attention-only adapter adapts."""

    config: Mapping[str, Any]
    attention: tuple[str, ...]
    task: str = "causal-lm"
    image: tuple[int, int] = (0, 0)
    """Width and height of the one image of a sample."""
    image_sizes: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the generated image processor."""
    patches: int = 0
    """That the processor makes of the image, with what it is filled up with."""


_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "vocab_size": 4000,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_GPT = {"n_embd": 256, "n_layer": 6, "n_head": 8, "n_positions": 512, "vocab_size": 4000}
_OPT = {name: size for name, size in _SIZES.items() if name != "intermediate_size"} | {
    "ffn_dim": 1024,
    "word_embed_proj_dim": 256,
}
_T5 = {"d_model": 256, "d_ff": 768, "d_kv": 32, "num_heads": 8, "num_layers": 4, "vocab_size": 4000}


def _decoder(model_type: str, sizes: Mapping[str, Any], *attention: str, **more: Any) -> Model:
    return Model({"model_type": model_type, **sizes, **more}, attention or _QKVO)


def _encoder(model_type: str, task: str, *attention: str, **more: Any) -> Model:
    return Model({"model_type": model_type, **more}, attention, task)


MODELS: dict[str, Model] = {
    "llama": _decoder("llama", _SIZES),
    "llama-gqa": _decoder("llama", _GROUPED, num_hidden_layers=8),
    "mistral": _decoder("mistral", _GROUPED, intermediate_size=896),
    "qwen2": _decoder("qwen2", _GROUPED, hidden_size=192, num_attention_heads=6, vocab_size=8000),
    "qwen3": _decoder("qwen3", _GROUPED, head_dim=48),
    "gemma": _decoder("gemma", _GROUPED, head_dim=64, intermediate_size=1024, num_hidden_layers=4),
    "gemma2": _decoder("gemma2", _GROUPED, head_dim=32, intermediate_size=1024),
    "gemma3": _decoder("gemma3_text", _GROUPED, head_dim=48, vocab_size=8000),
    "phi3": _decoder("phi3", _GROUPED, "qkv_proj", "o_proj", hidden_size=384, num_hidden_layers=4),
    "gpt2": _decoder("gpt2", _GPT, "c_attn"),
    "gpt-bigcode": _decoder("gpt_bigcode", _GPT, "c_attn"),
    "gpt-neox": _decoder("gpt_neox", _SIZES, "query_key_value", intermediate_size=1024),
    "opt": _decoder("opt", _OPT, "q_proj", "k_proj", "v_proj", "out_proj"),
    "starcoder2": _decoder("starcoder2", _GROUPED, intermediate_size=1024),
    "mixtral": _decoder(
        "mixtral", _GROUPED, num_hidden_layers=4, intermediate_size=384, num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen3-moe": _decoder(
        "qwen3_moe", _GROUPED, num_hidden_layers=4, head_dim=32, moe_intermediate_size=192, num_experts=8,
        num_experts_per_tok=2,
    ),
    "smollm3": _decoder("smollm3", _GROUPED, pad_token_id=0),
    "arcee": _decoder("arcee", _GROUPED, intermediate_size=1024),
    "ministral": _decoder("ministral", _GROUPED, head_dim=48),
    "ministral3": _decoder("ministral3", _GROUPED, head_dim=48),
    "granite": _decoder("granite", _GROUPED, tie_word_embeddings=True),
    "olmo2": _decoder("olmo2", _SIZES),
    "olmo3": _decoder("olmo3", _GROUPED),
    "apertus": _decoder("apertus", _GROUPED, intermediate_size=1024),
    "glm": _decoder("glm", _GROUPED, head_dim=48, pad_token_id=0),
    "glm4": _decoder("glm4", _GROUPED, head_dim=48, pad_token_id=0),
    "phi4-mini": _decoder(
        "phi3", _GROUPED, "qkv_proj", "o_proj", partial_rotary_factor=0.75, tie_word_embeddings=True,
        pad_token_id=0,
    ),
    "qwen2-moe": _decoder(
        "qwen2_moe", _GROUPED, num_hidden_layers=4, moe_intermediate_size=192, num_experts=8,
        shared_expert_intermediate_size=256, num_experts_per_tok=2,
    ),
    "glm4-moe": _decoder(
        "glm4_moe", _GROUPED, num_hidden_layers=4, head_dim=32, moe_intermediate_size=192, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
    ),
    "granitemoe": _decoder(
        "granitemoe", _GROUPED, num_hidden_layers=4, intermediate_size=384, num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen3-5": _decoder(
        "qwen3_5_text", _GROUPED, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=8,
        linear_key_head_dim=32, linear_value_head_dim=32,
    ),
    "gpt-oss": _decoder(
        "gpt_oss", _GROUPED, num_hidden_layers=4, head_dim=32, intermediate_size=192, num_local_experts=8,
        num_experts_per_tok=2, sliding_window=128, pad_token_id=0,
    ),
    "llama4": _decoder(
        "llama4_text", _GROUPED, num_hidden_layers=4, head_dim=32, intermediate_size=192,
        intermediate_size_mlp=704, num_local_experts=4, interleave_moe_layer_step=2, attention_chunk_size=128,
        pad_token_id=0,
    ),
    "qwen3-5-moe": _decoder(
        "qwen3_5_moe_text", _GROUPED, num_hidden_layers=4, head_dim=32, linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=192, shared_expert_intermediate_size=256,
    ),
    "qwen3-next": _decoder(
        "qwen3_next", _GROUPED, num_hidden_layers=4, head_dim=32, linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=192, shared_expert_intermediate_size=256,
    ),
    "deepseek-v3": _decoder(
        "deepseek_v3", _SIZES, "q_a_proj", "q_b_proj", "kv_b_proj", "o_proj", num_hidden_layers=4,
        num_key_value_heads=8, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16,
        v_head_dim=32, first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
        moe_intermediate_size=192, n_group=2, topk_group=1,
    ),
    "granitemoehybrid": _decoder(
        "granitemoehybrid", _GROUPED, num_hidden_layers=4, mamba_n_heads=16, mamba_d_head=32,
        mamba_d_state=32, mamba_n_groups=1, mamba_expand=2, mamba_chunk_size=64, intermediate_size=192,
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=256,
        position_embedding_type="nope", layer_types=("mamba", "mamba", "mamba", "attention"),
    ),
    "gemma4-text": _decoder(
        "gemma4_text", _SIZES, num_key_value_heads=2, head_dim=32, global_head_dim=64, sliding_window=128,
        hidden_size_per_layer_input=32, vocab_size_per_layer_input=4000, num_kv_shared_layers=4,
        use_double_wide_mlp=True, layer_types=(*["sliding_attention"] * 3, "full_attention") * 2,
        num_hidden_layers=8, pad_token_id=0,
    ),
    "gemma4-text-moe": _decoder(
        "gemma4_text", _SIZES, num_hidden_layers=6, num_key_value_heads=4, num_global_key_value_heads=2,
        attention_k_eq_v=True, head_dim=32, global_head_dim=64, sliding_window=128, pad_token_id=0,
        hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=8, top_k_experts=2,
        moe_intermediate_size=192,
    ),
    "t5": _encoder("t5", "seq2seq-lm", "q", "k", "v", "o", **_T5),
    "mt5": _encoder("mt5", "seq2seq-lm", "q", "k", "v", "o", **_T5),
    "bert": _encoder("bert", "sequence-classification", "query", "key", "value", **_SIZES),
    "bert-words": _encoder("bert", "token-classification", "query", "key", "value", **_SIZES),
    "modernbert": _encoder("modernbert", "sequence-classification", "Wqkv", **_SIZES, pad_token_id=0),
    "modernbert-words": _encoder("modernbert", "token-classification", "Wqkv", **_SIZES, pad_token_id=0),
    "qwen2-classes": _encoder("qwen2", "sequence-classification", *_QKVO, **_GROUPED, pad_token_id=0),
    "qwen2-words": _encoder("qwen2", "token-classification", *_QKVO, **_GROUPED, pad_token_id=0),
    "vit": _encoder(
        "vit", "image-classification", *_QKVO, hidden_size=256, intermediate_size=1024,
        num_hidden_layers=6, num_attention_heads=8, image_size=128, patch_size=8,
    ),
}  # fmt: skip

MODELS |= {
    f"{name}-{task}": replace(MODELS[name], task=task)
    for name in ("llama", "llama-gqa", "qwen3", "mistral", "gpt-neox")
    for task in ("dpo", "kto", "reward", "grpo")
}
MODELS |= {
    f"{name}-{task}": replace(MODELS[name], task=task, config={**MODELS[name].config, "pad_token_id": 0})
    for name in ("bert", "qwen2", "qwen3")
    for task in ("embedding", "reranker")
}

_TEXT = _GROUPED | {"head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TOWER = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}


def _vision(
    model_type: str, image: tuple[int, int], text: Mapping[str, Any], tower: Mapping[str, Any], **more: Any
) -> Model:
    sizes, patches = more.pop("image_sizes", {}), more.pop("patches")
    config = {"model_type": model_type, "text_config": {**_TEXT, **text}, "vision_config": tower, **more}
    return Model(config, _QKVO, "image-text-to-text", image, sizes, patches)


_ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0, "mrope_interleaved": True}
_SQUARE = {"image_size": 210, "patch_size": 7}
"""30 by 30 patches, of which a projector makes 15 by 15 tokens."""
MODELS |= {
    "qwen3-vl": _vision(
        "qwen3_vl", (448, 420), {"rope_parameters": _ROPE},
        {
            "depth": 4, "hidden_size": 192, "intermediate_size": 768, "num_heads": 4, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 256,
            "num_position_embeddings": 1024, "deepstack_visual_indexes": [0, 2],
        },
        image_sizes={"max_pixels": 448 * 420}, patches=960,
    ),
    "gemma3-vl": _vision(
        "gemma3", (210, 210), {"sliding_window": 128},
        {**_TOWER, **_SQUARE, "model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=225, patches=900,
    ),
    "gemma4-vl": _vision(
        "gemma4", (168, 96),
        {
            "num_kv_shared_layers": 0, "global_head_dim": 32, "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 4000, "sliding_window": 128,
        },
        {
            **_TOWER, "num_key_value_heads": 4, "head_dim": 48, "patch_size": 4, "pooling_kernel_size": 3,
            "position_embedding_size": 1024,
        },
        audio_config=None, image_sizes={"max_soft_tokens": 140}, patches=1260,
    ),
    "idefics3": _vision(
        "idefics3", (210, 210), {"model_type": "llama"}, {**_TOWER, **_SQUARE}, scale_factor=2, patches=900
    ),
    "smolvlm": _vision(
        "smolvlm", (210, 210), {"model_type": "llama"}, {**_TOWER, **_SQUARE}, scale_factor=2, patches=900
    ),
    "llava": _vision(
        "llava", (210, 210), {"model_type": "llama"},
        {
            **_TOWER, "model_type": "clip_vision_model", "image_size": 210, "patch_size": 14,
            "projection_dim": 192,
        },
        patches=225,
    ),
    "llama4-vl": _vision(
        "llama4", (210, 210),
        {
            "num_hidden_layers": 4, "intermediate_size": 192, "intermediate_size_mlp": 704,
            "num_local_experts": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 128,
        },
        {
            **_TOWER, **_SQUARE, "projector_input_dim": 256, "projector_output_dim": 256,
            "vision_output_dim": 256,
        },
        image_sizes={"size": {"height": 210, "width": 210}}, patches=900,
    ),
}  # fmt: skip

_LORA: dict[str, Any] = {"adapter": "all-linear"}
_ATTENTION: dict[str, Any] = {"adapter": "attention"}
_CKPT: dict[str, Any] = {"checkpointing": True}
_ZERO: dict[str, Any] = {"engine": "deepspeed", "processes": 2}

_LLAMA = [
    Row("llama-fp32", "llama"),
    Row("llama-fp32-b8-s128", "llama", 8, 128),
    Row("llama-fp32-b1-s512", "llama", 1, 512),
    Row("llama-fp32-ckpt", "llama", **_CKPT),
    Row("llama-fp32-ckpt-b8", "llama", 8, **_CKPT),
    Row("llama-fp32-eager", "llama", 2, attention="eager"),
    Row("llama-fp32-adamw-torch", "llama", 2, optim="adamw_torch"),
    Row("llama-fp32-sgd", "llama", optim="sgd"),
    Row("llama-fp32-adafactor", "llama", optim="adafactor"),
    Row("llama-fp32-adamw-8bit", "llama", 2, optim="adamw_bnb_8bit"),
    Row("llama-fp32-accumulation2", "llama", 2, accumulation=2),
    Row("llama-fp32-padded", "llama", padded=True),
    Row("llama-fp32-packing", "llama", packing=True),
    Row("llama-fp32-vocab16k", "llama", 4, 512, config={"vocab_size": 16000, "hidden_size": 128}),
    Row("llama-bf16", "llama", precision="bf16"),
    Row("llama-bf16-ckpt", "llama", 8, precision="bf16", **_CKPT),
    Row("llama-bf16-eager-packing", "llama", 2, precision="bf16", attention="eager", packing=True),
    Row("llama-bf16-accumulation2", "llama", 2, 128, precision="bf16", accumulation=2),
    Row("llama-bf16-padded", "llama", 8, 128, precision="bf16", padded=True),
    Row("llama-bf16-vocab32k", "llama", 2, 512, precision="bf16", config={"vocab_size": 32000}),
    Row("llama-bf16true", "llama", precision="bf16-true"),
    Row("llama-bf16true-ckpt", "llama", 8, precision="bf16-true", **_CKPT),
    Row("llama-bf16true-eager-s512", "llama", 1, 512, precision="bf16-true", attention="eager"),
    Row("llama-lora-fp32", "llama", **_LORA),
    Row("llama-lora-bf16", "llama", precision="bf16", **_LORA),
    Row("llama-lora-bf16true", "llama", precision="bf16-true", **_LORA),
    Row("llama-lora-bf16-ckpt", "llama", 8, precision="bf16", **_LORA, **_CKPT),
    Row("llama-lora-fp32-dropout", "llama", adapter_dropout=0.1, **_LORA),
    Row("llama-lora-attention-fp32", "llama", 8, 128, **_ATTENTION),
    Row("llama-lora-attention-bf16", "llama", precision="bf16", **_ATTENTION),
    Row("llama-int8-lora-fp32", "llama", quantization="int8", **_LORA),
    Row("llama-nf4-lora-fp32", "llama", quantization="nf4", **_LORA),
    Row("llama-nf4-lora-bf16-ckpt", "llama", 8, precision="bf16", quantization="nf4", **_LORA, **_CKPT),
]
_FREE: dict[str, Any] = {"attention": "varlen", "free": True}
_CHUNKED: dict[str, Any] = {"loss": "chunked"}
_64K = {"vocab_size": 64000, "hidden_size": 128}
_FAST = [
    Row("llama-fp32-free", "llama", **_FREE),
    Row("llama-gqa-bf16-free", "llama-gqa", precision="bf16", **_FREE),
    Row("mistral-fp32-free-ckpt", "mistral", 8, 128, **_FREE, **_CKPT),
    Row("gpt-neox-fp32-free", "gpt-neox", 2, **_FREE),
    Row("qwen3-bf16true-free", "qwen3", precision="bf16-true", **_FREE),
    Row("llama-fp32-vocab16k-chunked", "llama", 4, 512, config={"vocab_size": 16000}, **_CHUNKED),
    Row("llama-fp32-vocab64k-chunked", "llama", 4, 512, config=_64K, **_CHUNKED),
    Row("llama-bf16-vocab32k-chunked", "llama", 2, 512, "bf16", config={"vocab_size": 32000}, **_CHUNKED),
    Row("llama-bf16true-vocab64k-chunked", "llama", 4, 512, "bf16-true", config=_64K, **_CHUNKED),
    Row("llama-lora-fp32-vocab64k-chunked", "llama", 4, 512, config=_64K, **_LORA, **_CHUNKED),
    Row("llama-lora-bf16-uncast", "llama", precision="bf16", cast=False, **_LORA),
    Row("llama-nf4-lora-bf16-uncast-ckpt", "llama", 8, precision="bf16", quantization="nf4", cast=False,
        **_LORA, **_CKPT),
    Row("gemma3-lora-bf16-free-chunked", "gemma3", 4, 128, "bf16", cast=False, **_LORA, **_FREE, **_CHUNKED),
    Row("llama-lora-fp32-free-chunked", "llama", 8, **_LORA, **_FREE, **_CHUNKED),
    Row("llama-zero2-bf16-free-chunked", "llama", precision="bf16", zero_stage=2, **_FREE, **_CHUNKED,
        **_ZERO),
    Row("qwen3-zero3-fp32-free-chunked", "qwen3", zero_stage=3, **_FREE, **_CHUNKED, **_ZERO),
]  # fmt: skip
_DECODERS = [
    Row("llama-gqa-fp32", "llama-gqa"),
    Row("llama-gqa-bf16-eager", "llama-gqa", 2, precision="bf16", attention="eager"),
    Row("llama-gqa-nf4-lora-attention-bf16", "llama-gqa", precision="bf16", quantization="nf4", **_ATTENTION),
    Row("mistral-fp32", "mistral", 4, 128),
    Row("mistral-lora-bf16", "mistral", precision="bf16", **_LORA),
    Row("qwen2-fp32-ckpt", "qwen2", **_CKPT),
    Row("qwen2-bf16", "qwen2", precision="bf16"),
    Row("qwen2-lora-attention-fp32", "qwen2", 2, **_ATTENTION),
    Row("qwen3-fp32", "qwen3"),
    Row("qwen3-bf16true-padded", "qwen3", precision="bf16-true", padded=True),
    Row("qwen3-lora-bf16", "qwen3", 8, 128, precision="bf16", **_LORA),
    Row("gemma-fp32", "gemma", 2),
    Row("gemma-bf16", "gemma", precision="bf16"),
    Row("gemma2-fp32-eager", "gemma2", 2, attention="eager"),
    Row("gemma2-lora-bf16-eager", "gemma2", 2, precision="bf16", attention="eager", **_LORA),
    Row("gemma3-fp32", "gemma3", 2),
    Row("gemma3-lora-fp32-ckpt", "gemma3", **_LORA, **_CKPT),
    Row("phi3-fp32", "phi3", 2),
    Row("phi3-lora-bf16", "phi3", precision="bf16", **_LORA),
    Row("gpt2-fp32", "gpt2"),
    Row("gpt2-fp32-eager", "gpt2", 2, attention="eager"),
    Row("gpt2-bf16-ckpt", "gpt2", 8, precision="bf16", **_CKPT),
    Row("gpt-bigcode-fp32", "gpt-bigcode", 2),
    Row("gpt-bigcode-lora-attention-bf16", "gpt-bigcode", precision="bf16", **_ATTENTION),
    Row("gpt-bigcode-int8-lora-fp32", "gpt-bigcode", 2, quantization="int8", **_ATTENTION),
    Row("gpt-neox-fp32", "gpt-neox"),
    Row("gpt-neox-bf16true-sgd", "gpt-neox", precision="bf16-true", optim="sgd"),
    Row("opt-fp32", "opt", 4, 128),
    Row("opt-int8-lora-bf16", "opt", precision="bf16", quantization="int8", **_LORA),
    Row("starcoder2-bf16", "starcoder2", precision="bf16"),
    Row("starcoder2-lora-attention-fp32", "starcoder2", **_ATTENTION),
    Row("mixtral-fp32", "mixtral", 2),
    Row("mixtral-lora-bf16", "mixtral", 2, precision="bf16", **_LORA),
    Row("qwen3-moe-fp32", "qwen3-moe", 2),
    Row("qwen3-moe-bf16-ckpt", "qwen3-moe", precision="bf16", **_CKPT),
    Row("qwen3-moe-nf4-lora-attention-fp32", "qwen3-moe", 2, quantization="nf4", **_ATTENTION),
]
_TRUE: dict[str, Any] = {"precision": "bf16-true"}
_WINDOW = {"sliding_window": 128}
_SHALLOW = {"num_hidden_layers": 4, "vocab_size": 1000}
_OF_2025 = [
    Row("qwen2-moe-fp32", "qwen2-moe", 2),
    Row("qwen2-moe-bf16-ckpt", "qwen2-moe", precision="bf16", **_CKPT),
    Row("glm4-moe-fp32", "glm4-moe", 2),
    Row("glm4-moe-lora-attention-fp32", "glm4-moe", **_ATTENTION),
    Row("granitemoe-fp32", "granitemoe", 2),
    Row("granitemoe-lora-attention-fp32", "granitemoe", **_ATTENTION),
    Row("qwen3-5-fp32", "qwen3-5", 2),
    Row("qwen3-5-lora-bf16true-ckpt", "qwen3-5", **_TRUE, **_LORA, **_CKPT),
    Row("qwen3-5-bf16", "qwen3-5", 2, precision="bf16"),
    Row("qwen3-5-moe-fp32", "qwen3-5-moe", 2),
    Row("qwen3-5-moe-lora-attention-bf16true-ckpt", "qwen3-5-moe", **_TRUE, **_ATTENTION, **_CKPT),
    Row("qwen3-next-bf16-ckpt", "qwen3-next", precision="bf16", **_CKPT),
    Row("qwen3-next-lora-attention-fp32", "qwen3-next", **_ATTENTION),
    Row("deepseek-v3-fp32", "deepseek-v3", 2),
    Row("deepseek-v3-bf16-ckpt", "deepseek-v3", precision="bf16", **_CKPT),
    Row("deepseek-v3-lora-attention-bf16", "deepseek-v3", precision="bf16", **_ATTENTION),
    Row("granitemoehybrid-fp32", "granitemoehybrid", 2),
    Row("granitemoehybrid-lora-attention-bf16true-ckpt", "granitemoehybrid", **_TRUE, **_ATTENTION, **_CKPT),
    Row("smollm3-fp32", "smollm3", 2),
    Row("smollm3-lora-bf16true-ckpt", "smollm3", **_TRUE, **_LORA, **_CKPT),
    Row("arcee-bf16", "arcee", precision="bf16"),
    Row("arcee-lora-bf16true-ckpt", "arcee", 8, **_TRUE, **_LORA, **_CKPT),
    Row("ministral-fp32-ckpt", "ministral", **_CKPT),
    Row("ministral-lora-bf16", "ministral", precision="bf16", **_LORA),
    Row("ministral-lora-bf16-window", "ministral", precision="bf16", config=_WINDOW, **_LORA),
    Row("gemma3-fp32-window", "gemma3", 2, config=_WINDOW),
    Row("olmo3-bf16true-window", "olmo3", config=_WINDOW, **_TRUE),
    Row("ministral3-fp32", "ministral3", 2),
    Row("ministral3-lora-bf16true-ckpt", "ministral3", **_TRUE, **_LORA, **_CKPT),
    Row("granite-bf16", "granite", precision="bf16"),
    Row("granite-lora-bf16true-ckpt", "granite", **_TRUE, **_LORA, **_CKPT),
    Row("olmo2-fp32", "olmo2", 2),
    Row("olmo2-lora-bf16", "olmo2", precision="bf16", **_LORA),
    Row("olmo3-bf16true-ckpt", "olmo3", 8, **_TRUE, **_CKPT),
    Row("olmo3-lora-attention-fp32", "olmo3", **_ATTENTION),
    Row("apertus-fp32", "apertus", 2),
    Row("apertus-lora-bf16", "apertus", precision="bf16", **_LORA),
    Row("glm-bf16", "glm", precision="bf16"),
    Row("glm-lora-bf16true-ckpt", "glm", **_TRUE, **_LORA, **_CKPT),
    Row("glm-lora-bf16true", "glm", **_TRUE, **_LORA),
    Row("glm-lora-bf16true-v1k", "glm", **_TRUE, **_LORA, config=_SHALLOW),
    Row("glm4-fp32", "glm4", 2),
    Row("glm4-lora-bf16true-ckpt", "glm4", **_TRUE, **_LORA, **_CKPT),
    Row("phi4-mini-bf16true-padded", "phi4-mini", **_TRUE, padded=True),
    Row("phi4-mini-lora-bf16true-ckpt", "phi4-mini", **_TRUE, **_LORA, **_CKPT),
]
_OF_2026 = [
    Row("gpt-oss-bf16-eager", "gpt-oss", 2, precision="bf16", attention="eager"),
    Row("gpt-oss-lora-attention-bf16true-ckpt", "gpt-oss", attention="eager", **_TRUE, **_ATTENTION, **_CKPT),
    Row("llama4-bf16", "llama4", 2, precision="bf16"),
    Row("llama4-lora-attention-bf16true-ckpt", "llama4", **_TRUE, **_ATTENTION, **_CKPT),
    Row("gemma4-text-bf16", "gemma4-text", 2, precision="bf16"),
    Row("gemma4-text-lora-bf16true-ckpt", "gemma4-text", **_TRUE, **_LORA, **_CKPT),
    Row("gemma4-text-moe-fp32-ckpt", "gemma4-text-moe", 2, **_CKPT),
]
_ENCODERS = [
    Row("t5-fp32", "t5", 4, 128),
    Row("t5-bf16-ckpt", "t5", 4, 128, precision="bf16", **_CKPT),
    Row("t5-lora-fp32", "t5", 4, 64, **_LORA),
    Row("mt5-fp32-adafactor", "mt5", 2, 128, optim="adafactor"),
    Row("mt5-lora-attention-bf16", "mt5", 4, 128, precision="bf16", **_ATTENTION),
    Row("bert-fp32", "bert"),
    Row("bert-fp32-padded", "bert", 8, 128, padded=True),
    Row("bert-bf16-ckpt", "bert", 8, precision="bf16", **_CKPT),
    Row("bert-lora-bf16", "bert", precision="bf16", **_LORA),
    Row("bert-bf16-accumulation2", "bert", precision="bf16", accumulation=2),
    Row("bert-bf16-true", "bert", precision="bf16-true"),
    Row("qwen2-classes-fp32", "qwen2-classes"),
    Row("qwen2-classes-bf16-ckpt", "qwen2-classes", 8, precision="bf16", **_CKPT),
    Row("qwen2-classes-lora-bf16", "qwen2-classes", precision="bf16", **_LORA),
    Row("bert-words-fp32", "bert-words"),
    Row("bert-words-bf16-ckpt", "bert-words", 8, precision="bf16", **_CKPT),
    Row("bert-words-lora-bf16", "bert-words", precision="bf16", **_LORA),
    Row("bert-words-bf16-long", "bert-words", 2, 512, precision="bf16"),
    Row("modernbert-fp32", "modernbert"),
    Row("modernbert-fp32-padded", "modernbert", 8, 128, padded=True),
    Row("modernbert-bf16-ckpt", "modernbert", 8, precision="bf16", **_CKPT),
    Row("modernbert-bf16true-ckpt", "modernbert", 8, **_TRUE, **_CKPT),
    Row("modernbert-lora-bf16", "modernbert", precision="bf16", **_LORA),
    Row("modernbert-words-fp32", "modernbert-words"),
    Row("modernbert-words-bf16", "modernbert-words", precision="bf16"),
    Row("modernbert-words-lora-bf16-ckpt", "modernbert-words", 8, precision="bf16", **_LORA, **_CKPT),
    Row("qwen2-words-fp32", "qwen2-words"),
    Row("qwen2-words-lora-bf16", "qwen2-words", precision="bf16", **_LORA),
    Row("vit-fp32", "vit"),
    Row("vit-fp32-sgd-accumulation2", "vit", 2, optim="sgd", accumulation=2),
    Row("vit-bf16true", "vit", precision="bf16-true"),
    Row("vit-lora-bf16", "vit", precision="bf16", **_LORA),
]
_TWO_PROCESSES = [
    Row("llama-ddp-fp32", "llama", 2, processes=2),
    Row("llama-ddp-bf16", "llama", 2, processes=2, precision="bf16"),
    Row("llama-ddp-lora-fp32", "llama", 2, processes=2, **_LORA),
    Row("llama-zero1-fp32", "llama", 2, zero_stage=1, **_ZERO),
    Row("llama-zero2-fp32", "llama", 2, zero_stage=2, **_ZERO),
    Row("llama-zero2-bf16", "llama", 2, zero_stage=2, precision="bf16", **_ZERO),
    Row("llama-zero2-offload-fp32", "llama", 2, zero_stage=2, offload_optimizer="cpu", **_ZERO),
    Row("llama-zero3-fp32", "llama", 2, zero_stage=3, **_ZERO),
    Row("qwen3-zero3-lora-bf16", "qwen3", 2, zero_stage=3, precision="bf16", **_LORA, **_ZERO),
    Row("llama-fsdp2-fp32", "llama", 2, engine="fsdp", processes=2),
    Row("llama-fsdp2-bf16-ckpt", "llama", 4, engine="fsdp", processes=2, precision="bf16", **_CKPT),
]
_UNFROZEN: dict[str, Any] = {"trains_tower": True}
_IMAGE_JOBS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "unfrozen-fp32": _UNFROZEN,
    "unfrozen-fp32-ckpt": {**_UNFROZEN, **_CKPT},
    "lora-bf16": {"precision": "bf16", **_LORA},
}
_EXPERT_JOBS = {k: v for k, v in _IMAGE_JOBS.items() if "adapter" not in v}
_EXPERT_JOBS["lora-attention-bf16"] = {"precision": "bf16", **_ATTENTION}
"""all-linear would leave the experts, which hold most parameters, without adapters."""
_WITH_IMAGES = [
    Row(f"{model}-{name}", model, 2, 160 if model == "gemma4-vl" else 256, **settings)
    for model in ("qwen3-vl", "gemma3-vl", "gemma4-vl", "idefics3", "smolvlm", "llava", "llama4-vl")
    for name, settings in (_IMAGE_JOBS if model != "llama4-vl" else _EXPERT_JOBS).items()
    if model != "smolvlm" or name == "lora-bf16"  # the layers of Idefics3
]
# All micro-batches of a step are on the device at once, with their pixels.
_WITH_IMAGES.append(
    Row("qwen3-vl-lora-bf16-acc8", "qwen3-vl", 2, 256, **_IMAGE_JOBS["lora-bf16"], accumulation=8)
)
_32K = {"vocab_size": 32000}
_OF_TRL = [
    Row("dpo-llama-fp32", "llama-dpo", 2),
    Row("dpo-llama-lora-bf16", "llama-dpo", 2, precision="bf16", **_LORA),
    Row("dpo-gqa-bf16-vocab32k", "llama-gqa-dpo", 2, precision="bf16", config=_32K),
    Row("dpo-mistral-fp32-sft", "mistral-dpo", 4, 128, trainer={"loss_type": "sft"}),
    Row("dpo-qwen3-bf16true-lora-ckpt", "qwen3-dpo", **_TRUE, **_LORA, **_CKPT),
    Row("dpo-qwen3-fp32-precomputed", "qwen3-dpo", 2, trainer={"precompute_ref_log_probs": True}),
    Row("dpo-llama-zero2-bf16", "llama-dpo", 2, precision="bf16", zero_stage=2, **_ZERO),
    Row("kto-llama-fp32", "llama-kto"),
    Row("kto-llama-fp32-ckpt", "llama-kto", **_CKPT),
    Row("kto-llama-lora-bf16", "llama-kto", precision="bf16", **_LORA),
    Row("kto-gqa-bf16-vocab32k", "llama-gqa-kto", precision="bf16", config=_32K),
    Row("kto-qwen3-fp32-apo", "qwen3-kto", 2, trainer={"loss_type": "apo_zero_unpaired"}),
    Row("kto-mistral-fp32-b8", "mistral-kto", 8, 128),
    Row("kto-qwen3-lora-bf16true-ckpt", "qwen3-kto", 8, **_TRUE, **_LORA, **_CKPT),
    Row("reward-llama-fp32", "llama-reward", 2),
    Row("reward-llama-fp32-ckpt", "llama-reward", 4, **_CKPT),
    Row("reward-llama-lora-bf16", "llama-reward", 2, precision="bf16", **_LORA),
    Row("reward-qwen3-fp32", "qwen3-reward", 2),
    Row("reward-gqa-bf16-ckpt", "llama-gqa-reward", 4, precision="bf16", **_CKPT),
    Row("reward-qwen3-lora-bf16true-ckpt", "qwen3-reward", **_TRUE, **_LORA, **_CKPT),
    Row("grpo-llama-fp32", "llama-grpo"),
    Row("grpo-llama-fp32-ckpt", "llama-grpo", **_CKPT),
    Row("grpo-llama-lora-bf16", "llama-grpo", precision="bf16", **_LORA),
    Row("grpo-qwen3-fp32-reference", "qwen3-grpo", 2, trainer={"beta": 0.1}),
    Row("grpo-mistral-fp32-b8", "mistral-grpo", 8, 128),
    Row("grpo-mistral-lora-fp32", "mistral-grpo", 2, 128, **_LORA),
    Row("grpo-llama-generates-fp32", "llama-grpo", 2, 128, accumulation=32, **_CKPT, tuned=True),
    Row("grpo-qwen3-generates-bf16true", "qwen3-grpo", 2, 128, accumulation=96, **_TRUE, **_CKPT, tuned=True),
    Row("grpo-mistral-generates-lora", "mistral-grpo", 2, 128, accumulation=64, **_LORA, **_CKPT, tuned=True),
    Row("grpo-gqa-generates-bf16", "llama-gqa-grpo", 2, 128, "bf16", accumulation=96, **_CKPT, tuned=True),
    Row("grpo-mistral-generates-bf16", "mistral-grpo", 2, 128, "bf16", accumulation=64, **_CKPT),
    Row("grpo-gpt-neox-generates-fp32", "gpt-neox-grpo", 2, 128, accumulation=32, **_CKPT),
    Row("grpo-qwen3-lora-generates", "qwen3-grpo", 2, 96, accumulation=80, **_LORA, **_CKPT),
]
_WIDTHS = {"matryoshka_dims": [256, 128, 64]}
_CACHED = {"loss": "CachedMultipleNegativesRankingLoss", "mini_batch_size": 8}
_LISTS = {"loss": "LambdaLoss", "documents": 4}
_OF_TEXTS = [
    Row("embedding-bert-fp32", "bert-embedding", 8, 128),
    Row("embedding-bert-fp32-negatives3", "bert-embedding", 4, 128, section={"negatives": 3}),
    Row("embedding-bert-fp32-matryoshka", "bert-embedding", 8, 128, section=_WIDTHS),
    Row("embedding-bert-fp32-b512-s8", "bert-embedding", 512, 8),
    Row("embedding-bert-fp32-b512-matryoshka", "bert-embedding", 512, 8, section=_WIDTHS),
    Row("embedding-bert-fp32-cosent", "bert-embedding", 8, 128, section={"loss": "CoSENTLoss"}),
    Row("embedding-bert-cached-fp32", "bert-embedding", 64, 128, section=_CACHED),
    Row("embedding-bert-bf16-cached-negatives1", "bert-embedding", 16, 128, "bf16",
        section={**_CACHED, "negatives": 1}),
    Row("embedding-bert-bf16-ckpt", "bert-embedding", 16, 128, "bf16", **_CKPT),
    Row("embedding-bert-lora-bf16", "bert-embedding", 8, 128, "bf16", **_LORA),
    Row("embedding-bert-fp32-accumulation2", "bert-embedding", 4, 128, accumulation=2),
    Row("embedding-qwen2-fp32-s128", "qwen2-embedding", 4, 128),
    Row("embedding-qwen2-bf16-negatives1", "qwen2-embedding", 4, 128, "bf16", section={"negatives": 1}),
    Row("embedding-qwen3-lora-fp32-cached", "qwen3-embedding", 32, 128, section=_CACHED, **_LORA),
    Row("embedding-qwen3-lora-bf16true-ckpt", "qwen3-embedding", 8, **_TRUE, **_LORA, **_CKPT),
    Row("reranker-bert-fp32", "bert-reranker", 8, 128),
    Row("reranker-bert-bf16-ckpt", "bert-reranker", 16, 128, "bf16", **_CKPT),
    Row("reranker-bert-lora-bf16", "bert-reranker", 8, 128, "bf16", **_LORA),
    Row("reranker-bert-fp32-lists", "bert-reranker", 4, 128, section=_LISTS),
    Row("reranker-bert-fp32-listnet-ckpt", "bert-reranker", 4, 128,
        section={"loss": "ListNetLoss", "documents": 8}, **_CKPT),
    Row("reranker-bert-fp32-accumulation2", "bert-reranker", 4, 128, accumulation=2),
    Row("reranker-qwen2-fp32", "qwen2-reranker", 4, 128),
    Row("reranker-qwen3-lora-bf16-lists", "qwen3-reranker", 2, 128, "bf16", section=_LISTS, **_LORA),
]  # fmt: skip

_NF4: dict[str, Any] = {"quantization": "nf4", **_LORA}
_INT8: dict[str, Any] = {"quantization": "int8", **_LORA}
_NARROW: dict[str, Any] = {"kbit_norms": "bfloat16"}
_QUANTIZED = [
    Row("llama-nf4-bf16", "llama", precision="bf16", **_NF4),
    Row("llama-nf4-bf16-narrow", "llama", precision="bf16", **_NF4, **_NARROW),
    Row("llama-nf4-bf16-narrow-ckpt", "llama", 8, precision="bf16", **_NF4, **_NARROW, **_CKPT),
    Row("llama-nf4-bf16-uncast-narrow-ckpt", "llama", 8, precision="bf16", cast=False, **_NF4, **_NARROW,
        **_CKPT),
    Row("llama-nf4-bf16-vocab32k", "llama", 2, precision="bf16", config=_32K, **_NF4),
    Row("llama-nf4-bf16-vocab32k-narrow", "llama", 2, precision="bf16", config=_32K, **_NF4, **_NARROW),
    Row("llama-nf4-bf16-chunked-narrow", "llama", 4, 512, "bf16", config=_32K, **_NF4, **_NARROW, **_CHUNKED),
    Row("llama-int8-bf16", "llama", precision="bf16", **_INT8),
    Row("llama-int8-bf16-narrow", "llama", precision="bf16", **_INT8, **_NARROW),
    Row("llama-int8-bf16-narrow-ckpt", "llama", 8, precision="bf16", **_INT8, **_NARROW, **_CKPT),
    Row("qwen3-nf4-bf16-ckpt", "qwen3", 8, precision="bf16", **_NF4, **_CKPT),
    Row("qwen3-nf4-bf16-narrow-ckpt", "qwen3", 8, precision="bf16", **_NF4, **_NARROW, **_CKPT),
    Row("qwen3-nf4-bf16true-narrow", "qwen3", precision="bf16-true", **_NF4, **_NARROW),
    Row("gemma-nf4-bf16-narrow", "gemma", precision="bf16", **_NF4, **_NARROW),
    Row("gemma3-fp4-bf16-narrow-ckpt", "gemma3", precision="bf16", quantization="fp4", **_LORA, **_NARROW,
        **_CKPT),
    Row("opt-int8-bf16-narrow", "opt", precision="bf16", **_INT8, **_NARROW),
    Row("opt-nf4-bf16-narrow-ckpt", "opt", precision="bf16", **_NF4, **_NARROW, **_CKPT),
    Row("qwen2-classes-nf4-bf16-narrow", "qwen2-classes", precision="bf16", **_NF4, **_NARROW),
    Row("dpo-llama-nf4-bf16-narrow", "llama-dpo", 2, precision="bf16", **_NF4, **_NARROW),
    Row("qwen3-moe-nf4-bf16-narrow", "qwen3-moe", 2, precision="bf16", quantization="nf4", **_ATTENTION,
        **_NARROW),
    Row("llama-nf4-zero2-fp32", "llama", precision="fp32", zero_stage=2, **_NF4, **_ZERO),
    Row("llama-nf4-zero2-bf16", "llama", precision="bf16", zero_stage=2, tuned=True, **_NF4, **_ZERO),
    Row("llama-nf4-zero3-bf16", "llama", precision="bf16", zero_stage=3, tuned=True, **_NF4, **_ZERO),
    Row("qwen3-int8-zero2-bf16-ckpt", "qwen3", 8, precision="bf16", zero_stage=2, **_INT8, **_ZERO, **_CKPT),
]  # fmt: skip

ROWS: tuple[Row, ...] = (
    *_LLAMA, *_FAST, *_DECODERS, *_OF_2025, *_OF_2026, *_ENCODERS, *_TWO_PROCESSES, *_WITH_IMAGES, *_OF_TRL,
    *_OF_TEXTS, *_QUANTIZED,
)  # fmt: skip


def row(name: str) -> Row:
    """The row of that name; KeyError for another."""
    return {one.name: one for one in ROWS}[name]
