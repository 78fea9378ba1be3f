"""The closed form against the trace of the real model, family by family; nothing is trained.

Seen with torch 2.13, transformers 5.23 and peft 0.21: every row within 0.5 %.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from traces import LORA_16, request

from launcher.engines.ddp import DDP
from launcher.facts.hardware import parse_hardware
from launcher.facts.memory_trace import Line, Trace, read_step
from launcher.facts.model import ModelSpec, read_model_spec
from launcher.memory.estimate import MemoryEstimate, estimate_memory
from launcher.memory.job import MemoryJob
from launcher.memory.traced import choices_of

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from launcher.train.trace import run as tracer

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.filterwarnings("ignore")]

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
EXPERTS = {
    "model_type": "qwen3_moe", **SIZES, "head_dim": 32, "moe_intermediate_size": 192, "num_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
JOBS = {
    "full": {},
    "full-checkpointing": {"checkpointing": True},
    "lora": {"adapter": True},
    "lora-checkpointing": {"adapter": True, "checkpointing": True},
}
ROWS, LENGTH, RANK = 4, 256, 8
DEVICES = {"cpu": parse_hardware("cpu"), "cuda": parse_hardware("A100-80GB")}


def job_of(spec: ModelSpec, **more: Any) -> MemoryJob:
    job = MemoryJob(
        micro_batch=ROWS, sequence_length=LENGTH, data_parallel=1, devices_per_node=1, precision="bf16-true",
        dtype="bfloat16", quantization="none", double_quant=False, trainable_params=spec.params,
        adapter=False, engine=DDP, zero_stage=0, offload_optimizer="none", offload_param="none",
        optim="adamw_torch_fused", checkpointing=False, reduce_bucket_size=1, allgather_bucket_size=1,
        attention="sdpa", overlap_comm=False, eval_batch=1, accumulation=1,
    )  # fmt: skip
    if more.get("adapter"):
        more = {**more, "trainable_params": spec.lora_params(RANK, "all-linear")}
    return replace(job, **more)


def traced(spec: ModelSpec, job: MemoryJob, device: str) -> MemoryEstimate:
    targets = "all-linear" if job.adapted is None else ATTENTION
    settings: dict[str, Any] = {"task": spec.task}
    if job.adapter:
        settings |= {**LORA_16, "adapter.r": RANK, "adapter.target_modules": targets}
    settings["model.enable_input_require_grads"] = job.adapter and job.checkpointing
    on_cpu, labels = device == "cpu", None if spec.task == "causal-lm" else spec.head.out_features
    batches = (ROWS // 2, ROWS)
    asked = request(spec.config, job.to_json(), settings, batches=batches, on_cpu=on_cpu, labels=labels)
    answer = tracer.trace(asked)
    step = read_step(answer, choices_of(job, DEVICES[device]), Line(0.0, 0.0))
    trace = Trace().with_step(step, answer["versions"])
    return estimate_memory(spec, job, DEVICES[device], trace=trace)


def without_context(estimate: MemoryEstimate) -> int:
    return estimate.total - estimate.components.context


def rows() -> list[Any]:
    """All but two jobs of each family are `slow`, and but one whose peak is in the forward pass."""
    usual = {("cpu", "full"), ("cuda", "lora-checkpointing")}
    every, peak = itertools.product(FAMILIES, DEVICES, JOBS), ("glm", "cpu", "lora")
    slow = {True: pytest.mark.slow, False: ()}
    return [
        pytest.param(*row, marks=slow[row[1:] not in usual and row != peak], id="-".join(row))
        for row in every
    ]


@pytest.mark.parametrize(("name", "device", "kind"), rows())
def test_the_closed_form_is_what_is_traced(name: str, device: str, kind: str) -> None:
    spec = read_model_spec(name, FAMILIES[name], "test")
    job = job_of(spec, **JOBS[kind])
    closed, found = estimate_memory(spec, job, DEVICES[device]), traced(spec, job, device)
    assert (closed.method, found.method) == ("closed-form", "trace")
    assert without_context(closed) == pytest.approx(without_context(found), rel=0.01)


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
WORDS = ("full", "lora")
QUICK_ENCODERS = ("cpu", "full"), ("cuda", "lora-checkpointing"), ("cuda", "padded-eager")


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        pytest.param(*row, marks=() if row in QUICK_ENCODERS else pytest.mark.slow)
        for row in itertools.product(DEVICES, ENCODER_JOBS)
    ],
)
def test_encoders_with_windows_on_both_sides(device: str, kind: str) -> None:
    config, more = ENCODER_JOBS[kind]
    task = "token-classification" if kind in WORDS else "sequence-classification"
    spec = read_model_spec("modernbert", {**MODERNBERT, **config}, "test", task)
    job = job_of(spec, **more)
    closed, found = estimate_memory(spec, job, DEVICES[device]), traced(spec, job, device)
    assert (closed.method, found.method) == ("closed-form", "trace")
    assert without_context(closed) == pytest.approx(without_context(found), rel=0.01)


WINDOWS = {
    "gemma3": {}, "olmo3": {}, "mistral": {"model_type": "mistral", **SIZES},
    "ministral": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
}  # fmt: skip
QUICK = ("gemma3", "cuda", "full"), ("qwen3", "cpu", "lora")


@pytest.mark.parametrize("more", [{}, {"padded": True}], ids=["", "padded"])
@pytest.mark.parametrize(
    ("name", "device", "kind"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in itertools.product(WINDOWS, DEVICES, JOBS)
    ],
)
def test_windows_shorter_than_a_row_have_masks(
    name: str, device: str, kind: str, more: dict[str, Any]
) -> None:
    config = {**FAMILIES.get(name, {}), **WINDOWS[name], "sliding_window": LENGTH // 2}
    spec = read_model_spec(name, config, "test")
    job = job_of(spec, **JOBS[kind], **more)
    closed, found = estimate_memory(spec, job, DEVICES[device]), traced(spec, job, device)
    # Full rows are traced without a mask of padding: one map for all rows, 0.3 % of these jobs.
    assert without_context(closed) == pytest.approx(without_context(found), rel=0.01)
    whole = read_model_spec(name, {**config, "sliding_window": LENGTH + 1}, "test")
    assert (estimate_memory(whole, job, DEVICES[device]).total == closed.total) is bool(more)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
@pytest.mark.parametrize("quantization", [pytest.param("none", marks=pytest.mark.slow), "nf4"])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_frozen_experts_keep_no_rows(device: str, quantization: str, precision: str, dtype: str) -> None:
    spec = read_model_spec("experts", EXPERTS, "test")
    job = job_of(spec, adapter=True, quantization=quantization, precision=precision, dtype=dtype)
    trained = spec.lora_params(RANK, ATTENTION)
    job = replace(job, adapted=spec.adapted_paths(ATTENTION), trainable_params=trained)
    closed, found = estimate_memory(spec, job, DEVICES[device]), traced(spec, job, device)
    assert without_context(closed) == pytest.approx(without_context(found), rel=0.01)
