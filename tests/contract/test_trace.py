"""The trace of real models: against whole depths, published peaks, and what real training was measured at."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
from cases import cases

sys.path.insert(0, str(Path(__file__).parent))
from traces import LORA_16, peak, request

from launcher.models.lora import lora_params
from launcher.models.memory_trace import Trace, read_step
from launcher.models.model_config import shipped_model_config
from launcher.train.memory_meter import Meter
from launcher.train.model.attention import register_varlen
from launcher.train.model.loss import chunk_loss
from launcher.train.trace import run as tracer

pytestmark = pytest.mark.usefixtures("warm")

LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip
BERT = {
    "model_type": "bert", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6,
    "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip
VIT = {
    "model_type": "vit", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6,
    "num_attention_heads": 4, "image_size": 64, "patch_size": 8,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 128, "d_ff": 256, "d_kv": 32, "num_heads": 4, "num_layers": 5,
    "num_decoder_layers": 6, "vocab_size": 1000,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
OF_KINDS = {**LLAMA, "head_dim": 32, "num_hidden_layers": 17, "num_experts": 4, "num_experts_per_tok": 2}
MIXED_MOE = {
    **OF_KINDS, "model_type": "glm4_moe", "num_hidden_layers": 9, "moe_intermediate_size": 64,
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 2,
}  # fmt: skip
QWEN3_NEXT = {
    **OF_KINDS, "model_type": "qwen3_next", "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
GRANITE_4 = {
    **OF_KINDS, "model_type": "granitemoehybrid", "num_local_experts": 4, "shared_intermediate_size": 96,
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
    "layer_types": ["mamba", "mamba", *(["mamba", "mamba", "attention"] * 5)],
}  # fmt: skip
LORA = {**LORA_16, "adapter.r": 8}
SHORT = {"sequence_length": 128}
CASES = {
    "full": (LLAMA, {}, {}),
    "mixed": (LLAMA, {"precision": "bf16", "dtype": "float32", "accumulation": 4}, {}),
    "foreach": (LLAMA, {"optim": "adamw_torch"}, {}),
    "lora": (LLAMA, {"precision": "bf16"}, LORA),
    "lora-checkpointing": (
        LLAMA,
        {"precision": "bf16", "checkpointing": True},
        {**LORA, "model.enable_input_require_grads": True},
    ),
    "experts": (MIXTRAL, {}, {}),
    "dense-and-experts": (MIXED_MOE, {}, {}),
    "dense-and-experts-lora": (MIXED_MOE, {"precision": "bf16"}, LORA),
    "linear-attention": (QWEN3_NEXT, {"checkpointing": True}, {}),
    "state-space": (GRANITE_4, {}, {}),
    "bert": (BERT, {}, {"task": "sequence-classification"}),
    "bert-words": (BERT, {}, {"task": "token-classification"}),
    "vit": (VIT, {}, {"task": "image-classification"}),
    "t5": (T5, {}, {"task": "seq2seq-lm"}),
}  # fmt: skip


def asked(case, batches):
    config, memory, settings = CASES[case]
    labels = 3 if "class" in settings.get("task", "") else None
    return request(config, {**SHORT, **memory}, settings, batches=batches, labels=labels)


@functools.cache
def extended(case):
    """The answer from 2 and 4 layers."""
    return tracer.trace(asked(case, (2, 4)))


@pytest.mark.parametrize("case", cases(CASES, "vit"))
def test_few_layers_extend_to_the_whole_depth(case, monkeypatch):
    """Two and four of alike layers; of layers of several kinds, those around two periods, and the periods."""
    found, full = extended(case), [5, 6] if case == "t5" else [CASES[case][0].get("num_hidden_layers")]
    assert found["depths"] == full
    monkeypatch.setattr(tracer, "DEEPER", max(full))
    whole = tracer.trace(asked(case, (6,)))  # beyond the batches that were extended, too
    assert peak(found, 6) == pytest.approx(peak(whole, 6), rel=0.001)
    assert found["states"] == whole["states"]


def test_an_adapters_kept_gradients_need_no_trace_of_their_own():
    """Told by a trace that keeps none: to one gradient of the adapter."""
    covers = {"adapter": True, "keeps_gradients": False}
    found = extended("lora")
    told = Trace((read_step(found, covers, None),)).step_for({**covers, "keeps_gradients": True})
    config, memory, settings = CASES["lora"]
    kept = tracer.trace(request(config, {**SHORT, **memory, "accumulation": 4}, settings, batches=(2, 4)))
    largest = 8 * LLAMA["intermediate_size"] * 4
    for batch in (1, 2, 16):
        most = max(
            sum(line.at(batch) for line in (one.gradients, one.activations, one.logits, one.temporary))
            for one in told.moments
        )
        states = kept["states"]["weights"] + kept["states"]["optimizer"]
        assert 0 <= peak(kept, batch) - states - most <= largest


def live_and_peak(replay):
    live = peak = 0
    for event in replay["events"]:
        live += replay["sizes"][event] if event >= 0 else -replay["sizes"][~event]
        peak = max(peak, live)
    return live, peak


@pytest.mark.parametrize(
    "case",
    cases(
        ("full", "lora-checkpointing", "t5", "dense-and-experts", "linear-attention", "state-space"),
        "lora-checkpointing",
    ),
)
def test_allocations_of_the_whole_model_are_replayed_from_four_layers(case):
    answer = extended(case)
    replay = next(one for one in answer["replays"] if one["batch"] == 4)
    live, most = live_and_peak(replay)
    states = answer["states"]
    # What stays are weights and optimizer states; the peak is the traced one.
    # Stacks of different depths are told apart in the peak alone: what a mean layer holds is added there.
    loose = 0.05 if case == "t5" else 0.001
    assert live == pytest.approx(states["weights"] + states["optimizer"], rel=loose)
    assert most == pytest.approx(peak(answer, 4), rel=0.05 if case == "t5" else 0.01)
    assert all(size >= 0 for size in replay["sizes"])


GIB = 2**30
ONE_B, SEVEN_B = "meta-llama/Llama-3.2-1B", "huggyllama/llama-7b"
# Traced peaks of an A100, AdamW bf16, 2048 tokens, without context: model, micro-batch, GiB.
PUBLISHED = {
    "full": (ONE_B, 4, {}, {}, 32.81),
    "checkpointing": (ONE_B, 4, {"checkpointing": True}, {}, 19.29),
    "lora": (
        ONE_B, 4, {"checkpointing": True}, {**LORA_16, "model.enable_input_require_grads": True}, 14.75,
    ),
    "eager": (ONE_B, 4, {"attention": "eager"}, {}, 80.77),
    "7B": (SEVEN_B, 1, {}, {}, 50.22),
    "7B-checkpointing": (SEVEN_B, 1, {"checkpointing": True}, {}, 50.22),
}  # fmt: skip


@pytest.mark.parametrize("case", cases(PUBLISHED, "lora", "7B"))
def test_published_traces_come_out_again(case, monkeypatch):
    model, batch, memory, settings, gib = PUBLISHED[case]
    if case == "full":
        # Traced when transformers repeated grouped keys before attention; without a mask it no longer does.
        from transformers.integrations import sdpa_attention

        monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", lambda *_: False)
    answer = tracer.trace(request(shipped_model_config(model), memory, settings, batches=(batch,)))
    assert peak(answer, batch) / GIB == pytest.approx(gib, rel=0.005)


def test_grouped_keys_are_not_repeated_for_flash_attention():
    answer = tracer.trace(request(shipped_model_config(ONE_B), batches=(4,)))
    # Two times 1536 values of 2 bytes less than with repeated ones, per token and layer.
    assert peak(answer, 4) / GIB == pytest.approx(32.81 - 2 * 1536 * 2 * 8192 * 16 / GIB, rel=0.001)


FLAT = {"one_row": True, "document_mask": True}
"""A micro-batch in one row."""


@pytest.mark.slow
def test_kernels_that_read_bounds_hold_no_mask():
    """Such a row takes what padded ones do, but for the numbers of its positions."""
    plain = peak(tracer.trace(request(LLAMA, SHORT, batches=(2, 4))), 4)
    for kernel in ("flash_attention_2", "varlen", "flex_attention"):
        answer = tracer.trace(request(LLAMA, {**SHORT, "attention": kernel, **FLAT}, batches=(2, 4)))
        assert peak(answer, 4) == pytest.approx(plain, rel=0.005)
    masked = tracer.trace(request(LLAMA, {**SHORT, **FLAT}, batches=(2, 4)))
    assert peak(masked, 4) > 1.1 * plain


def measured(model, batch, steps=2):
    """Peak bytes of real training, from the second step on with the optimizer's states."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.train()
    meter = Meter(on_cuda=False)
    meter.watch([*model.parameters(), *model.buffers()])
    with meter.phase("train"):
        for _ in range(steps):
            # The Trainer fetches the next batch before it trains on this one.
            inputs, waiting = ({k: torch.zeros_like(v) for k, v in batch.items()} for _ in range(2))
            loss = model(**inputs).loss
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
            del inputs, waiting
    return meter.peak("train").allocated


def built(config, task):
    from transformers import AutoConfig

    from launcher.train.model.models import auto_class

    options = {"num_labels": 3} if "class" in task else {}
    whole = AutoConfig.for_model(**config, **options)
    if whole.is_encoder_decoder:
        whole.decoder_start_token_id = 0
    return auto_class(task).from_config(whole, dtype=torch.float32)


REAL = {
    "llama": (LLAMA, "causal-lm", {}),
    "checkpointing": (LLAMA, "causal-lm", {"checkpointing": True}),
    "eager": (LLAMA, "causal-lm", {"attention": "eager"}),
    "varlen": (LLAMA, "causal-lm", {"attention": "varlen", **FLAT}),
    "chunked": ({**LLAMA, "vocab_size": 2**17}, "causal-lm", {"chunked": True}),  # two chunks of rows
    "bert": (BERT, "sequence-classification", {}),
    "bert-words": (BERT, "token-classification", {}),
    "llama-words": (LLAMA, "token-classification", {}),
    "vit": (VIT, "image-classification", {}),
    "t5": (T5, "seq2seq-lm", {}),
}


@pytest.mark.parametrize("name", cases(REAL, "llama", "bert"))
def test_real_training_takes_what_was_traced(name):
    config, task, memory = REAL[name]
    choices = {**SHORT, "precision": "fp32", "dtype": "float32", **memory}
    labels = 3 if "class" in task else None
    wanted = request(config, choices, {"task": task}, batches=(8,), on_cpu=True, labels=labels)
    model = built(config, task)
    if memory.get("attention"):
        register_varlen()
        model.set_attn_implementation(memory["attention"])
    if memory.get("checkpointing"):
        model.activation_checkpointing_enable()
    if memory.get("chunked"):
        chunk_loss(model)
    model.config.use_cache = False
    tokens = torch.zeros(8, 128, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    if memory.get("one_row"):
        batch = {name: row.reshape(1, -1) for name, row in batch.items()}
        batch["position_ids"] = torch.arange(128).repeat(8)[None]
    if labels and task != "token-classification":
        batch["labels"] = torch.zeros(8, dtype=torch.long)
    if task == "image-classification":
        batch = {"pixel_values": torch.zeros(8, 3, 64, 64), "labels": batch["labels"]}
    answer = tracer.trace(wanted)
    assert peak(answer, 8) == pytest.approx(measured(model, batch), rel=0.01)


def test_the_child_answers_in_json_and_says_what_went_wrong():
    from launcher.models.memory_trace import Untraceable, ask_child

    with pytest.raises(Untraceable, match="nothing"):
        ask_child({"ask": "model", "config": {"model_type": "nothing"}, "task": "causal-lm", "labels": None},
                  sys.executable)  # fmt: skip


@pytest.mark.parametrize(
    "model_type",
    cases(("granitemoe", "olmo", "cohere", "falcon", "bloom", "phi", "stablelm"), "granitemoe", "bloom"),
)
def test_unknown_families_are_counted_to_the_last_parameter(model_type):
    from transformers import AutoConfig, AutoModelForCausalLM

    from launcher.models.model import foreign_spec

    config = {"model_type": model_type, "num_hidden_layers": 3}
    answer = tracer.model({"config": config, "task": "causal-lm", "labels": None})
    spec = foreign_spec("m", config, "a test", "causal-lm", answer)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    params = sum(p.numel() for p in model.parameters())
    assert spec.params == params
    parts = sum(linear.params for linear in spec.linears) + spec.embedding_params + spec.head.own_params
    assert parts + spec.num_layers * spec.layout.layer_extra + spec.layout.model_extra == params
    assert lora_params(spec, 8, "all-linear") == _lora_params(model, 8)


def _lora_params(model, rank):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)
