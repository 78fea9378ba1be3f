"""Models and jobs that the tests of the memory estimate share."""

from __future__ import annotations

from dataclasses import replace

from launcher.engines.ddp import DDP
from launcher.engines.deepspeed import DEEPSPEED
from launcher.machine.hardware import MIB, Hardware, parse_hardware
from launcher.memory.activations import make_block
from launcher.memory.job import Held, MemoryJob
from launcher.memory.layers import record
from launcher.memory.states import States
from launcher.models.layers.layout import Dtypes, Layout
from launcher.models.lora import lora_params
from launcher.models.model import FAMILY_TASKS, ModelSpec, read_model_spec
from launcher.models.model_config import shipped_model_config

GIB = 2**30
A100 = parse_hardware("1xA100-80GB")
NODE = parse_hardware("8xA100-80GB")
CPU = parse_hardware("cpu")


def spec(name: str, task: str | None = None) -> ModelSpec:
    """A shipped model with the head of `task`, by default the usual one of its family."""
    config = shipped_model_config(name)
    assert config is not None
    return read_model_spec(name, config, "shipped facts", task or FAMILY_TASKS[config["model_type"]][0])


LLAMA_7B = spec("huggyllama/llama-7b")
LLAMA_1B = spec("meta-llama/Llama-3.2-1B")
STARCODER = spec("bigcode/starcoder")
MT0 = spec("bigscience/mt0-large")

FULL = MemoryJob(
    micro_batch=1,
    sequence_length=2048,
    data_parallel=1,
    devices_per_node=1,
    precision="bf16-true",
    dtype="bfloat16",
    quantization="none",
    double_quant=False,
    trainable_params=LLAMA_7B.params,
    adapter=False,
    engine=DDP,
    zero_stage=0,
    offload_optimizer="none",
    offload_param="none",
    optim="adamw_torch_fused",
    checkpointing=False,
    attention="sdpa",
    reduce_bucket_size=200_000_000,
    allgather_bucket_size=200_000_000,
    overlap_comm=False,
    eval_batch=1,
    accumulation=1,
)
"""Pure 16-bit training of a Llama 7B on one device."""
JOB_1B = replace(FULL, micro_batch=4, trainable_params=LLAMA_1B.params)
LORA_1B = lora_params(LLAMA_1B, 16, "all-linear")
ZERO = replace(FULL, engine=DEEPSPEED, precision="bf16", data_parallel=8, devices_per_node=8)
"""The 7B under DeepSpeed on a node of eight."""


def layer_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    *,
    attention: str,
    sequence: int,
    rank: int = 0,
    layout: Layout | None = None,
) -> float:
    """Bytes per token that one layer (of the first stack) keeps without activation checkpointing."""
    block = make_block(model, dtypes, layout or model.layout, 1, sequence, attention)
    tape, _ = record(replace(block, rank=rank), counted=True)
    return tape.saved()[0] / sequence


def states_of(model: ModelSpec, job: MemoryJob) -> States:
    return job.engine.states(model, job)


def held_of(model: ModelSpec, job: MemoryJob) -> Held:
    return job.engine.held(model, job)


def buffers_of(model: ModelSpec, job: MemoryJob) -> int:
    return job.engine.buffers(model, job)


WORKSPACES = 2 * 65 * MIB // 8
"""Of cuBLAS and cuBLASLt on the A100."""


def step_of(model: ModelSpec, job: MemoryJob, hardware: Hardware) -> int:
    return job.engine.step(model, job, hardware)
