"""A trace in place of the closed form: where it holds, what the engine shards of it, how it is asked for."""

from __future__ import annotations

import json
import stat
from dataclasses import replace

import pytest
from factories import facts
from memory_cases import WORKSPACES, held_of, states_of

from launcher.engines.ddp import DDP
from launcher.engines.deepspeed import DEEPSPEED
from launcher.engines.fsdp import FSDP
from launcher.errors import MachineError
from launcher.machine.hardware import parse_hardware
from launcher.memory.estimate import estimate_memory, max_micro_batch
from launcher.memory.job import MemoryJob
from launcher.memory.traced import choices_of, traced_phases, why_not
from launcher.models.memory_trace import (
    LinearBytes,
    Moment,
    Trace,
    TracedStep,
    Untraceable,
    ask_child,
    read_step,
)

GIB = 2**30
A100 = parse_hardware("8xA100-80GB")
SPEC = facts().model
JOB = MemoryJob(
    micro_batch=2, sequence_length=2048, data_parallel=8, devices_per_node=8,
    precision="bf16", dtype="bfloat16", quantization="none", double_quant=False,
    trainable_params=SPEC.params, adapter=False, engine=DEEPSPEED, zero_stage=2,
    offload_optimizer="none", offload_param="none", optim="adamw_torch_fused",
    checkpointing=False, attention="sdpa", reduce_bucket_size=200_000_000,
    allgather_bucket_size=200_000_000, overlap_comm=False, eval_batch=1, accumulation=1,
)  # fmt: skip
NOTHING = LinearBytes(0.0, 0.0)


def traced(job=JOB, hardware=A100, fragmentation=NOTHING, *moments):
    full = 2.0 * SPEC.params
    moments = moments or (
        Moment(
            "forward",
            NOTHING,
            LinearBytes(1.0 * GIB, 10.0 * GIB),
            LinearBytes(0, GIB),
            LinearBytes(0.5 * GIB, 0),
        ),
        Moment("backward", LinearBytes(full, 0), LinearBytes(2.0 * GIB, 0), NOTHING, NOTHING),
    )
    return Trace((TracedStep(choices_of(job, hardware), moments, int(full), fragmentation),))


def test_traced_activations_replace_the_closed_form():
    estimate = estimate_memory(SPEC, JOB, A100, trace=traced())
    closed = estimate_memory(SPEC, JOB, A100)
    assert (estimate.method, closed.method) == ("trace", "closed-form")
    parts = estimate.components
    assert (parts.activations, parts.logits, parts.temporary) == (21 * GIB, 2 * GIB, GIB // 2)
    assert parts.weights == closed.components.weights
    assert parts.optimizer == closed.components.optimizer
    assert parts.buffers == closed.components.buffers
    assert estimate.phase == "forward"
    assert set(estimate.phases) == {"forward", "backward", "step"}


def test_gradients_are_sharded_as_the_engine_does():
    states = states_of(SPEC, JOB)
    assert states.gradients == pytest.approx(2 * SPEC.params / 8, abs=8)
    phases = traced_phases(traced(), SPEC, JOB, A100)
    assert phases["backward"].gradients == states.gradients
    assert phases["forward"].gradients == 0


def test_the_step_of_an_engine_is_the_closed_forms():
    closed = estimate_memory(SPEC, JOB, A100).phases["step"]
    step = estimate_memory(SPEC, JOB, A100, trace=traced()).phases["step"]
    assert (step, step.nccl > 0) == (closed, True)


def test_torchs_own_step_is_traced_under_ddp():
    job = replace(JOB, engine=DDP, zero_stage=0)
    step = Moment("step", LinearBytes(2.0 * SPEC.params, 0), NOTHING, NOTHING, LinearBytes(7.0 * GIB, 0))
    assert traced_phases(traced(job, A100, NOTHING, step), SPEC, job, A100)["step"].temporary == 7 * GIB


def test_fragmentation_is_temporary_at_every_moment():
    plain = traced_phases(traced(), SPEC, JOB, A100)
    lost = traced_phases(traced(fragmentation=LinearBytes(GIB, GIB)), SPEC, JOB, A100)
    assert {name: lost[name].temporary - plain[name].temporary for name in plain} == dict.fromkeys(
        plain, 3 * GIB
    )


def test_micro_batches_follow_the_line():
    assert max_micro_batch(SPEC, JOB, A100, trace=traced()) == 4
    for batch, activations in ((1, 11), (4, 41)):
        sized = replace(JOB, micro_batch=batch)
        assert estimate_memory(SPEC, sized, A100, trace=traced()).components.activations == activations * GIB


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_length": 1024},
        {"precision": "fp16"},
        {"dtype": "float32"},
        {"quantization": "nf4"},
        {"attention": "eager"},
        {"checkpointing": True},
        {"adapter": True, "trainable_params": 1000},
        {"adapter_dropout": 0.1},
        {"engine": DDP},
        {"accumulation": 4},
        {"document_mask": True},
        {"padded": True},
    ],
    ids=str,
)
def test_a_trace_of_other_choices_is_not_used(change):
    job = replace(JOB, **change)
    assert traced_phases(traced(), SPEC, job, A100) is None
    assert estimate_memory(SPEC, job, A100, trace=traced()).method == "closed-form"
    assert estimate_memory(SPEC, job, A100, trace=traced(job)).method == "trace"


def test_kept_gradients_are_told_by_a_step_without_of_an_adapter_alone():
    adapter = replace(JOB, adapter=True, trainable_params=SPEC.params)
    kept = replace(adapter, accumulation=4)
    told = traced(adapter).step_for(choices_of(kept, A100))
    assert {moment.gradients.at(3) for moment in told.moments} == {int(2.0 * SPEC.params)}
    assert traced_phases(traced(adapter), SPEC, kept, A100)["forward"].gradients > 0
    assert traced(JOB).step_for(choices_of(replace(JOB, accumulation=4), A100)) is None
    assert traced(kept).step_for(choices_of(adapter, A100)) is None


@pytest.mark.parametrize("hardware", ["8xV100-32GB", "8xcpu"])
def test_a_trace_of_another_kind_of_device_is_not_used(hardware):
    assert traced_phases(traced(), SPEC, JOB, parse_hardware(hardware)) is None


@pytest.mark.parametrize("change", [{"zero_stage": 3}, {"data_parallel": 4}, {"micro_batch": 7}], ids=str)
def test_sharding_and_batch_need_no_new_trace(change):
    assert traced_phases(traced(), SPEC, replace(JOB, **change), A100) is not None


def test_jobs_that_cannot_be_traced_say_why():
    assert why_not(JOB, "causal-lm") is None
    assert "trl" in why_not(JOB, "dpo")
    quantized = {"engine": FSDP, "quantization": "nf4", "adapter": True}
    sharded = {"zero_stage": 3, "adapter": True}
    for change in ({"liger": True}, {"tensor_parallel": 2}, {"spread": 2}, quantized, sharded):
        assert why_not(replace(JOB, **change), "causal-lm")
    for change in ({"engine": FSDP}, {"zero_stage": 3}, {"zero_stage": 2, "adapter": True}):
        assert why_not(replace(JOB, **change), "causal-lm") is None


def test_a_trace_is_of_the_engine_that_casts():
    """FSDP2 gathers in 16 bits under autocast, DeepSpeed casts all and has no autocast."""
    fsdp = replace(JOB, engine=FSDP)
    assert traced_phases(traced(), SPEC, fsdp, A100) is None
    assert traced_phases(traced(fsdp), SPEC, fsdp, A100) is not None
    plain = [replace(JOB, engine=engine, precision="fp32", dtype="float32") for engine in (FSDP, DDP)]
    assert choices_of(plain[0], A100) == choices_of(plain[1], A100)


def test_what_the_engine_holds_comes_and_goes_with_the_traced_moments():
    held = held_of(SPEC, JOB)
    assert held.layers > held.head == held.forward == 0
    loss = Moment("backward", NOTHING, NOTHING, LinearBytes(GIB, 0), NOTHING)
    layer = Moment("backward", NOTHING, LinearBytes(GIB, 0), NOTHING, NOTHING)
    for moment, expected in ((loss, 0), (layer, held.layers)):
        phases = traced_phases(traced(JOB, A100, NOTHING, moment), SPEC, JOB, A100)
        assert phases["backward"].buffers == WORKSPACES + expected


def test_the_gradients_of_stage_3_are_there_from_the_start():
    job = replace(JOB, zero_stage=3)
    phases = traced_phases(traced(job), SPEC, job, A100)
    assert {parts.gradients for parts in phases.values()} == {states_of(SPEC, job).gradients}


def test_an_answer_becomes_a_step():
    moment = {"gradients": [0.0, 0.0], "activations": [1.0, 2.0], "logits": [3, 4], "temporary": [5, -6]}
    answer = {
        "moments": [{"segment": "backward/stack0-first", **moment}],
        "states": {"gradients": 7.0, "weights": 8.0, "optimizer": 9.0},
    }
    step = read_step(answer, {"a": 1}, LinearBytes(1.5, 0.0))
    assert step.moments[0].phase == "backward"
    assert step.moments[0].activations.at(10) == 21
    assert step.moments[0].temporary.at(10) == 0  # never below nothing
    assert (step.gradients, step.covers) == (7, {"a": 1})
    trace = Trace().with_step(step, {"torch": "2"})
    assert trace.step_for({"a": 1}) is step
    assert trace.step_for({"a": 2}) is None


def interpreter(folder, script):
    """Something that is called like a Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\nhead -n 1 > {folder}/asked\necho $@ > {folder}/words\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_child_is_asked_and_answers_in_json(tmp_path):
    python = interpreter(tmp_path, "echo '{\"states\": 1}'")
    assert ask_child({"ask": "trace"}, python) == {"states": 1}
    assert json.loads((tmp_path / "asked").read_text()) == {"ask": "trace"}
    assert (tmp_path / "words").read_text().split() == ["-m", "launcher.train.trace.run"]


def test_a_model_that_cannot_be_traced_is_no_error_of_the_machine(tmp_path):
    with pytest.raises(Untraceable, match="data dependent"):
        ask_child({}, interpreter(tmp_path, 'echo \'{"error": "data dependent"}\''))


def test_a_child_that_dies_is_one(tmp_path):
    with pytest.raises(MachineError) as error:
        ask_child({}, interpreter(tmp_path, "echo 'ImportError: libcuda' >&2; exit 1"))
    assert error.value.problems[0].code == "trace-failed"
    assert "libcuda" in error.value.problems[0].message


def test_a_child_that_never_ends_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.models.memory_trace.LIMIT_S", 1.5)
    monkeypatch.setattr("launcher.models.memory_trace._SHOWN_S", 0.5)
    said = []
    with pytest.raises(Untraceable, match="longer than"):
        ask_child({"ask": "trace"}, interpreter(tmp_path, "exec sleep 60"), said.append)
    assert said
