"""What the engine holds at the moments of a step: buckets, gathered weights, whole gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from memory_cases import (
    A100,
    JOB_1B,
    LLAMA_1B,
    LLAMA_7B,
    LORA_1B,
    NODE,
    WORKSPACES,
    ZERO,
    held_of,
    layer_bytes,
    states_of,
)

from launcher.engines.ddp import DDP
from launcher.engines.fsdp import FSDP
from launcher.memory.estimate import estimate_memory
from launcher.memory.job import Held
from launcher.memory.phases import training_phases
from launcher.memory.states import layer_values
from launcher.models.lora import lora_params

P7, P1 = LLAMA_7B.params, LLAMA_1B.params
BUCKET = 200_000_000
LAYER = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
HEAD = 32000 * 4096
LORA = replace(ZERO, adapter=True, trainable_params=lora_params(LLAMA_7B, 16, "all-linear"))


def test_engines_that_gather_nothing_hold_nothing() -> None:
    for job in (replace(ZERO, engine=DDP), replace(ZERO, zero_stage=0)):
        assert held_of(LLAMA_7B, job) == Held()


@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_come_with_the_first_gradient(stage: int) -> None:
    job = replace(ZERO, zero_stage=stage, accumulation=1)
    held = held_of(LLAMA_7B, job)
    assert (held.forward, held.head) == (0, 0)
    # One that is filled, and the copy that is reduced.
    assert held.layers == held.bottom == held.embedding == 2 * 2 * BUCKET
    assert held_of(LLAMA_7B, replace(job, overlap_comm=True)).layers == 3 * 2 * BUCKET
    phases = training_phases(LLAMA_7B, replace(job, checkpointing=True), NODE)
    assert phases["forward"].buffers == phases["step"].buffers == WORKSPACES
    assert phases["recompute"].buffers == WORKSPACES + 2 * 2 * BUCKET


def test_stage_1_keeps_its_bucket_between_micro_batches() -> None:
    job = replace(ZERO, accumulation=2)
    assert held_of(LLAMA_7B, replace(job, zero_stage=1)).head == 2 * BUCKET
    assert held_of(LLAMA_7B, replace(job, zero_stage=2)).head == 0


@pytest.mark.parametrize("stage", [1, 2])
def test_saving_finds_no_bucket(stage: int) -> None:
    job = replace(ZERO, zero_stage=stage, checkpointing=True)
    small, large = (
        estimate_memory(LLAMA_7B, replace(job, reduce_bucket_size=bucket), NODE) for bucket in (1, BUCKET)
    )
    assert small.save_peak == large.save_peak
    assert small.phases["recompute"].buffers < large.phases["recompute"].buffers


def test_stage_3_gathers_up_to_its_limit_and_lets_go_backward() -> None:
    held = held_of(LLAMA_1B, replace(ZERO, zero_stage=3, trainable_params=P1))
    assert held.forward == held.head == 2 * 10**9
    assert held.layers == 2 * 10**9 + 2 * BUCKET
    assert held.bottom == 2 * (LLAMA_1B.embedding_params + layer_values(LLAMA_1B)) + 2 * BUCKET


def test_stage_3_holds_its_gradients_from_the_start() -> None:
    job = replace(ZERO, zero_stage=3, accumulation=1)
    partition = states_of(LLAMA_7B, job).gradients
    assert partition == pytest.approx(2 * P7 / 8, abs=8)
    assert {p.gradients for p in training_phases(LLAMA_7B, job, NODE).values()} == {partition}
    assert training_phases(LLAMA_7B, replace(job, zero_stage=2), NODE)["forward"].gradients == 0
    assert not replace(job, offload_optimizer="cpu").engine.keeps_gradients(
        replace(job, offload_optimizer="cpu")
    )


def test_stage_3_leaves_adapters_in_float32_and_keeps_inputs_of_frozen_products() -> None:
    second, third = replace(LORA, zero_stage=2), replace(LORA, zero_stage=3)
    flows = [job.engine.dtypes(job, on_cpu=NODE.is_cpu) for job in (second, third)]
    assert [(flow.adapter, flow.frozen_inputs) for flow in flows] == [(2, False), (4, True)]
    kept, plain = (
        layer_bytes(LLAMA_7B, flow, attention="sdpa", sequence=2048, rank=16)
        for flow in (flows[1], replace(flows[1], frozen_inputs=False))
    )
    # Both norms' outputs and what `down_proj` reads, in 16 bits; attention keeps its output anyway.
    assert kept - plain == 2 * (2 * 4096 + 11008)
    weights = states_of(LLAMA_7B, third).weights
    assert weights == pytest.approx((2 * P7 + 4 * LORA.trainable_params) / 8, abs=8)


def test_a_frozen_embedding_is_not_kept_for_the_backward_pass() -> None:
    small = replace(ZERO, zero_stage=3, adapter=True, trainable_params=LORA_1B)
    # Llama 3.2's head is tied: the embedding stays for it.
    assert held_of(LLAMA_1B, small).head == 2 * 10**9 + 4 * LORA_1B
    limited = replace(LLAMA_7B, params=900_000_000)
    assert held_of(limited, replace(LORA, zero_stage=3)).head == 2 * (900_000_000 - HEAD) + 4 * (
        LORA.trainable_params
    )


def test_stage_3_trains_the_embeddings_of_added_tokens_whole() -> None:
    """Two bytes of weight and of gradient and twelve of the optimizer each, in place of a frozen copy."""
    rows = 2 * HEAD
    tokens = replace(LORA, extra_frozen=2 * rows)
    second = [states_of(LLAMA_7B, replace(job, zero_stage=2)) for job in (LORA, tokens)]
    assert second[1].total - second[0].total == 2 * rows
    third = [states_of(LLAMA_7B, replace(job, zero_stage=3)) for job in (LORA, tokens)]
    assert third[1].total - third[0].total == pytest.approx(16 * rows / 8, abs=64)
    assert third[1].gradients - third[0].gradients == pytest.approx(2 * rows / 8, abs=8)


def test_fsdp_gathers_a_layer_and_the_next() -> None:
    job = replace(ZERO, engine=FSDP, dtype="float32", accumulation=1)
    held = held_of(LLAMA_7B, job)
    # At the loss the head is there, forward with the buffer that it came in.
    assert (held.forward, held.head) == (2 * 2 * HEAD, 2 * HEAD)
    # The layer, the buffer of the next, and the gradients that are scattered still.
    assert held.layers == 2 * 3 * LAYER
    assert held.bottom == 2 * (2 * LAYER + HEAD)
    assert held.embedding == 2 * (2 * HEAD + LAYER)
    assert held.unsharded == 2
    assert held_of(LLAMA_7B, replace(job, precision="fp32")).head == 4 * HEAD
    assert held_of(LLAMA_7B, replace(job, quantization="nf4")).layers < held.layers


def test_fsdp_copies_a_table_with_added_rows_while_it_is_used() -> None:
    """peft keeps the rows alone; nothing of the size of a table stays on a rank."""
    job = replace(LORA, engine=FSDP, dtype="bfloat16", precision="bf16")
    tokens = replace(job, extra_frozen=2 * 2 * HEAD)
    assert states_of(LLAMA_7B, tokens).total == states_of(LLAMA_7B, job).total
    before, held = held_of(LLAMA_7B, job), held_of(LLAMA_7B, tokens)
    more = {name: getattr(held, name) - getattr(before, name) for name in ("forward", "head", "embedding")}
    assert more == {"forward": 2 * HEAD, "head": 2 * 2 * HEAD, "embedding": 2 * HEAD}
    assert (held.layers, held.bottom) == (before.layers, before.bottom)


def test_fsdp_keeps_a_tied_head_for_the_whole_pass() -> None:
    job = replace(ZERO, engine=FSDP, dtype="float32", trainable_params=P1, accumulation=1)
    layer, head = 2 * 2048 * (2048 + 512) + 3 * 2048 * 8192 + 2 * 2048, 128_256 * 2048
    held = held_of(LLAMA_1B, job)
    assert held.head == 2 * head
    # Beside it its gradient, which is reduced at the very end.
    assert held.layers == 2 * (2 * head + 3 * layer)


def test_gradients_of_the_running_layer_are_whole_under_fsdp() -> None:
    job = replace(JOB_1B, engine=FSDP, dtype="float32", data_parallel=8, devices_per_node=8, accumulation=1)
    phases = training_phases(LLAMA_1B, job, A100)
    gradients = states_of(LLAMA_1B, job).gradients
    assert gradients == pytest.approx(4 * P1 / 8, abs=8)
    running = training_phases(LLAMA_1B, replace(job, checkpointing=True), A100)["recompute"].gradients
    # At its worst moment the layer has the gradient of `down_proj` alone, the head's is a shard.
    assert running - 4 * LLAMA_1B.embedding_params / 8 == pytest.approx(4 * 2048 * 8192, rel=0.001)
    assert phases["step"].gradients == gradients


def test_only_checkpointing_computes_a_layer_again() -> None:
    job = replace(ZERO, zero_stage=2)
    assert "recompute" not in training_phases(LLAMA_7B, job, NODE)
    assert "recompute" in training_phases(LLAMA_7B, replace(job, checkpointing=True), NODE)
