"""States per engine against the tensors that the installed DeepSpeed and torch keep alive on two ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_cases import A100, states_of, step_of

from launcher.engines import ddp, fsdp
from launcher.engines.deepspeed import DEEPSPEED
from launcher.memory.job import MemoryJob
from launcher.memory.states import largest_tensor, model_shapes
from launcher.models.model import read_model_spec

pytestmark = pytest.mark.usefixtures("warm")

pytest.importorskip("deepspeed")

SPEC = read_model_spec(
    "small",
    {
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 4, "vocab_size": 1000, "tie_word_embeddings": False,
    },
    "test",
)  # fmt: skip
RANKS, BUCKET = 2, 150_000
JOB = MemoryJob(
    micro_batch=1, sequence_length=8, data_parallel=RANKS, devices_per_node=RANKS, precision="bf16",
    dtype="float32", quantization="none", double_quant=False, trainable_params=SPEC.params, adapter=False,
    engine=DEEPSPEED, zero_stage=0, offload_optimizer="none", offload_param="none", optim="adamw_torch",
    checkpointing=False, attention="sdpa", reduce_bucket_size=BUCKET, allgather_bucket_size=BUCKET,
    overlap_comm=False, eval_batch=1, accumulation=1,
)  # fmt: skip
FSDP, DDP = replace(JOB, engine=fsdp.FSDP), replace(JOB, engine=ddp.DDP, precision="fp32")
JOBS = {
    **{f"ZeRO-{stage}": replace(JOB, zero_stage=stage) for stage in range(4)},
    "ZeRO-1 between micro-batches": replace(JOB, zero_stage=1, accumulation=2),
    "ZeRO-2 between micro-batches": replace(JOB, zero_stage=2, accumulation=2),
    **{f"ZeRO-{stage} fp32": replace(JOB, zero_stage=stage, precision="fp32") for stage in (0, 1, 3)},
    **{f"ZeRO-{n} offload": replace(JOB, zero_stage=n, offload_optimizer="cpu") for n in (1, 2, 3)},
    "ZeRO-2 offload, accumulating": replace(JOB, zero_stage=2, offload_optimizer="cpu", accumulation=2),
    "FSDP2": FSDP,
    "FSDP2 between micro-batches": replace(FSDP, accumulation=2),
    "FSDP2, reduced after each micro-batch": replace(FSDP, accumulation=2, reduces_each=True),
    "FSDP2 fp32": replace(FSDP, precision="fp32"),
    "FSDP2 fp32 between micro-batches": replace(FSDP, precision="fp32", accumulation=2),
    "DDP": DDP,
}


# At the optimizer's call, and where its gradients have been joined to be cast.
STEPS = {
    f"ZeRO-{stage} {precision}, accumulating {steps}, {at}": (
        replace(JOB, zero_stage=stage, precision=precision, accumulation=steps), at
    )
    for stage in (1, 2) for precision, steps in (("bf16", 1), ("bf16", 2), ("fp32", 1))
    for at in ("joined", "call")
}  # fmt: skip


def case(job: MemoryJob, at: str = "") -> dict[str, Any]:
    """What the ranks run: measured `at` a moment of the step, else after its last backward pass or first."""
    steps = job.accumulation or 1
    offloads = job.offload_optimizer != "none"
    if job.engine is not DEEPSPEED:
        kind = {"engine": job.engine.name, "mixed": job.precision == "bf16"}
        return {**kind, "micro_batches": steps, "reduces_each": job.reduces_each}
    zero: dict[str, Any] = {"stage": job.zero_stage}
    if job.zero_stage:
        zero |= {"reduce_bucket_size": BUCKET, "contiguous_gradients": True, "overlap_comm": False}
    if job.zero_stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    if offloads:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": steps,
        "zero_optimization": zero, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    if job.precision == "bf16":
        config["bf16"] = {"enabled": True}
    return {
        "engine": "deepspeed", "config": config, "at": at, "micro_batches": steps if offloads or at else 1
    }  # fmt: skip


def predicted(job: MemoryJob) -> int:
    """States in both memories (both are a CPU's here), and the engine's buffers that are alive by then.

    DDP's buckets belong to its C++ reducer, where Python does not see them.
    """
    states, width = states_of(SPEC, job), 4 if job.precision == "fp32" else 2
    total = states.total + states.host + states.staging
    # Stage 1 reduces nothing before the last micro-batch, so its bucket stays.
    filling = job.zero_stage == 1 and job.accumulation == 2
    if job.zero_stage == 3 or filling:
        total += width * BUCKET
    elif job.offload_optimizer != "none":
        total += width * largest_tensor(SPEC)
    return total


@pytest.fixture(scope="module")
def held(warm_module: object, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    out = tmp_path_factory.mktemp("engines") / "held.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shapes = [[s.rows, s.columns * s.stacks] for s in model_shapes(SPEC) for _ in range(s.count)]
    cases = {name: case(job) for name, job in JOBS.items()}
    cases |= {name: case(job, at) for name, (job, at) in STEPS.items()}
    script = str(Path(__file__).with_name("engine_states.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(RANKS), port, json.dumps(shapes), json.dumps(cases), out],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    logs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), logs[0][-3000:]
    found: dict[str, int] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_states_are_what_the_engine_keeps(held: dict[str, int], name: str) -> None:
    assert held[name] == pytest.approx(predicted(JOBS[name]), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_step_is_counted_as_the_engine_frees_its_gradients(held: dict[str, int], name: str) -> None:
    """The optimizer allocates nothing here, so the estimate is of the cast: what is joined, and its copy."""
    (job, at), states = STEPS[name], states_of(SPEC, STEPS[name][0])
    owned, wide = -(-SPEC.params // RANKS), job.precision == "fp32"
    fixed = states.total - states.gradients
    copy = 4 * owned
    if at == "call":
        assert held[name] == pytest.approx(fixed + copy, rel=0.01)
        return
    assert held[name] == pytest.approx(fixed + (2 if wide else 1) * copy, rel=0.01)
    plain = replace(job, optim="sgd")
    assert DEEPSPEED.frees_at_step(plain)
    counted = step_of(SPEC, plain, A100)
    assert fixed + counted == pytest.approx(held[name] + (0 if wide else copy), rel=0.01)
