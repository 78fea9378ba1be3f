"""Seconds of one optimizer step, predicted from what it computes and moves. Pure arithmetic.

A ranking of configurations is what this is for. Nobody measured these shares of the published peaks
here: each is an assumption with a pessimistic, a likely and an optimistic end. What is shown is the
likely value with what it rests on; the ends are for those who need a limit (the time of a stop).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.machine.hardware import Figures, Hardware, Processor, figures_of
from launcher.memory.activations import offloaded_inputs
from launcher.memory.job import MemoryJob
from launcher.memory.rollouts import cache_bytes
from launcher.memory.tensor_parallel import on_rank
from launcher.models.capabilities import is_varlen
from launcher.models.layers.layout import WIDTHS
from launcher.models.model import ModelSpec
from launcher.plan.plan import StepTime


@dataclass(frozen=True, slots=True)
class Assumption:
    """A figure that was not measured: its ends, and what the ranking takes."""

    worst: float
    likely: float
    best: float


MATMUL_SHARE = Assumption(0.25, 0.45, 0.65)
"""Assumption: share of the tensor cores' dense peak that matrix products reach in a Hugging Face model."""
SINGLE_SHARE = Assumption(0.5, 0.75, 0.95)
"""Assumption: the same for fp32 without tensor cores, whose peak is easier to reach."""
MEMORY_SHARE = Assumption(0.4, 0.65, 0.9)
"""Assumption: share of the memory's bandwidth that elementwise operations and updates reach."""
PROCESSOR_SHARE = Assumption(0.04, 0.08, 0.3)
"""Assumption: of a processor's bf16 peak, matrix units as a rule. Set manually by measured rows of both
halves of benchmarks/grids/speed.yaml (2 cores with AMX), whose products are small."""
LINK_SHARE = Assumption(0.2, 0.5, 0.8)
"""Assumption: share of the link's bandwidth that collectives reach."""
EXPOSED_SHARE = Assumption(1.0, 0.5, 0.0)
"""Assumption: share of the communication that no computation hides."""
NETWORK_BYTES = Assumption(3e9, 25e9, 400e9)
"""Assumption: bytes a second and direction between nodes, which no recipe gives: from 25 Gbit/s Ethernet
to eight adapters of 400 Gbit/s."""
HOST_SHARE = Assumption(0.3, 0.6, 0.9)
"""Assumption: share of the PCIe bandwidth that copies to and from the host reach."""
HOST_MEMORY_BYTES = Assumption(30e9, 100e9, 250e9)
"""Assumption: bytes a second of the host's memory, which rules the optimizer on the CPU."""
LAUNCH_SECONDS = Assumption(20e-6, 10e-6, 3e-6)
"""Assumption: seconds for which Python and the driver keep the device from one kernel."""

KERNELS_PER_LAYER = 30
"""Assumption: kernels of one layer's forward pass as transformers writes it; a backward pass has twice
as many, an adapter doubles both."""
FORWARD_PASSES, BACKWARD_PASSES = 2, 3
"""Assumption: how often a pass moves the activations that it keeps through the device's memory: written
and read once, and as much again for gradients on the way back."""
UPDATE_PASSES = 3
"""Assumption: how often an update moves gradients and optimizer states: norm, read, write. Counted as if
nothing were sharded, so that a ZeRO stage is chosen for its memory and never for its update."""
DEQUANTIZED_BYTES = 4
"""Of a weight that is unpacked to 16 bits before each product: written once, read once."""
INT8_SLOWDOWN = 1.5
"""Assumption: products of LLM.int8() against those of 16 bits. Its outliers are computed apart."""
GATHERS_PER_LAYER = 4
"""Assumption: further kernels of a ZeRO-3 layer that gather and release weights, in each direction."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one device does in one optimizer step."""

    flops: float
    traffic: float
    """Bytes through the device's own memory."""
    sent: float
    """Bytes to other devices, between copies."""
    shared: float
    """Bytes to the devices of the same copy."""
    hosted: float
    """Bytes over PCIe to and from the host."""
    ahead: float
    """The same, while the device computes: inputs of layers that checkpoints keep in the host's memory."""
    host_traffic: float
    """Bytes through the host's memory."""
    launches: float


def predict_step(
    spec: ModelSpec,
    job: MemoryJob,
    hardware: Hardware,
    *,
    kept: int,
    tf32: bool = False,
    processor: Processor | None = None,
    cores: int = 1,
) -> StepTime:
    """Seconds of one step of `job`.

    `kept`: bytes of activations and logits that one sample keeps where nothing is recomputed. `tf32`: the
    recipe lets fp32 products use the tensor cores. `processor` with its `cores`: this machine's, for a plan
    on it.
    """
    figures, known = figures_of(hardware, processor, cores)
    work = step_work(spec, job, kept)
    group = job.tensor_parallel * job.sequence_parallel
    far = hardware.num_nodes > 1 and job.data_parallel * group > 1
    spans = group > hardware.devices_per_node
    overlaps = job.engine.overlaps(job)

    def seconds(end: str) -> dict[str, float]:
        """By what they are spent on."""
        peak = _product_peak(figures, job.precision, hardware.is_cpu, tf32, end)
        parts = _seconds(work, figures, peak, far, spans, overlaps, end)
        return {**parts, WRITING: _generating(spec, job, figures, peak, end)}

    each = {end: seconds(end) for end in ("best", "likely", "worst")}
    low, likely, high = (sum(parts.values()) for parts in each.values())
    shares = [parts[WRITING] / sum(parts.values()) for parts in each.values()]
    split = None if job.rollout is None else (min(shares), max(shares))
    reached = _product_peak(figures, job.precision, hardware.is_cpu, tf32, "likely")
    return StepTime(low, likely, high, known, split, _basis(each["likely"], reached))


WRITING = "written completions"


def _basis(parts: dict[str, float], products: float) -> str:
    """Parts of the likely time from a tenth on, and the speed that products are taken to have."""
    whole = sum(parts.values())
    large = [(value / whole, name) for name, value in parts.items() if value >= whole / 10]
    named = ", ".join(f"{share:.0%} {name}".replace("%", " %") for share, name in sorted(large, reverse=True))
    return f"{named}; products at {products / 1e12:.3g} TFLOP/s"


def _product_peak(figures: Figures, precision: str, on_cpu: bool, tf32: bool, end: str) -> float:
    """Operations a second that matrix products reach."""
    if precision == "fp32" and not tf32:
        peak, share = figures.single, SINGLE_SHARE
    else:
        peak = figures.tf32 if precision == "fp32" else figures.half
        share = PROCESSOR_SHARE if on_cpu else MATMUL_SHARE
    reached: float = peak * getattr(share, end)
    return reached


def _seconds(
    work: Work, figures: Figures, peak: float, far: bool, spans: bool, overlaps: bool, end: str
) -> dict[str, float]:
    """By what they are spent on.

    `peak`: of products; `far`: copies talk over the network; `spans`: the ranks of one copy do, too.
    `overlaps`: what copies send each other is sent while they compute.
    """

    def at(assumption: Assumption) -> float:
        value: float = getattr(assumption, end)
        return value

    inside = figures.link * at(LINK_SHARE)
    network = min(inside, at(NETWORK_BYTES))
    exposed = at(EXPOSED_SHARE)
    pcie = figures.host * at(HOST_SHARE)
    products, traffic = work.flops / peak, work.traffic / (figures.memory * at(MEMORY_SHARE))
    waits = max(exposed * work.ahead / pcie, work.ahead / pcie - products - traffic)
    return {
        "matrix products": products,
        "device memory": traffic,
        "communication": (exposed if overlaps else 1.0) * work.sent / (network if far else inside)
        + exposed * work.shared / (network if spans else inside),
        "offload": work.hosted / pcie + waits + work.host_traffic / at(HOST_MEMORY_BYTES),
        "kernel launches": work.launches * at(LAUNCH_SECONDS),
    }


def _generating(spec: ModelSpec, job: MemoryJob, figures: Figures, peak: float, end: str) -> float:
    """Seconds of one step in which completions are written.

    Each token reads all weights and the keys and values so far, and the prompts pass through once. The model
    itself pays for each kernel; vLLM replays them as CUDA graphs. A server counts as one of these devices.
    """
    rollout = job.rollout
    if rollout is None:
        return 0.0
    rows, tokens = rollout.rows(job), job.sequence_length
    prompt, written = tokens - rollout.completion_length, rollout.completion_length
    width = 4 if job.precision == "fp32" else 2
    weights = _weight_traffic(spec, job) / (1 if rollout.itself else rollout.vllm_tensor_parallel)
    cache = cache_bytes(spec, rows * (prompt + written // 2), width)
    flops = 2.0 * rows * (spec.linear_weights + _active_experts(spec))
    layers = sum(stack.layers for stack in spec.layout.stacks)
    launches = layers * KERNELS_PER_LAYER * (2 if job.adapter else 1) if rollout.itself else 0
    of_token = (weights + cache) / (figures.memory * getattr(MEMORY_SHARE, end))
    of_token += launches * getattr(LAUNCH_SECONDS, end)
    seconds = flops * prompt / peak + written * max(of_token, flops / peak)
    return rollout.per_step(job) * float(seconds)


def step_work(spec: ModelSpec, job: MemoryJob, kept: int) -> Work:
    """The work of one device; `kept` as in `predict_step`."""
    shared, parts = _shared(spec, job), job.sequence_parallel
    spec, job = on_rank(spec, job)
    micro_steps = job.accumulation or 1
    # A checkpoint computes its layers again; GradCache all embeddings, whose gradients it has then.
    recomputed = (1 if job.checkpointing else 0) + (1 if job.mini_batch else 0)
    forwards = micro_steps * job.forwards
    passes = FORWARD_PASSES * (1 + recomputed) + BACKWARD_PASSES
    samples = job.micro_batch * micro_steps
    whole = replace(
        job, data_parallel=1, zero_stage=0, offload_optimizer="none", offload_param="none", in_backward=False
    )
    states = job.engine.states(spec, whole)
    reduced = states.gradients * job.engine.reduced_width(job) // int(job.engine.widths(job).gradient)
    update = UPDATE_PASSES * (states.gradients + states.optimizer)
    streamed = (2 + recomputed) * _weight_traffic(spec, job) + 2 * states.gradients
    offloads = job.offload_optimizer != "none"
    sent, hosted = _moved(job, reduced, _stored_weights(spec, job))
    layers = sum(stack.layers for stack in spec.layout.stacks)
    kernels = KERNELS_PER_LAYER * (2 if job.adapter else 1)
    gathers = GATHERS_PER_LAYER if job.engine.stage(job) == 3 else 0
    return Work(
        flops=micro_steps * _flops(spec, job, parts),
        traffic=samples * passes * kept + forwards * streamed + (0 if offloads else update),
        sent=sent,
        shared=micro_steps * (2 + recomputed) * shared,
        hosted=hosted,
        ahead=2 * forwards * sum(offloaded_inputs(spec, job)),
        host_traffic=update if offloads else 0,
        launches=forwards * layers * (kernels + gathers) * (3 + recomputed),
    )


def _shared(spec: ModelSpec, job: MemoryJob) -> float:
    """Bytes that a device sends to those it shares a copy with, in one pass over the layers.

    Tensor parallelism adds up what attention and feed-forward block return. Ulysses swaps tokens for heads
    before attention and back after it; context parallelism passes keys and values round.
    """
    rows, length = job.rows
    width = 4 if job.precision == "fp32" else 2
    layers, tensor, tokens = spec.num_layers, job.tensor_parallel, job.sequence_parallel
    if tensor > 1:
        return 2 * 2 * (tensor - 1) / tensor * rows * length * spec.hidden_size * width * layers
    if tokens == 1:
        return 0.0
    own = rows * length / tokens * spec.head_dim * width * layers
    if job.engine.ring_attention:
        return (tokens - 1) * own * 2 * spec.num_kv_heads
    return (tokens - 1) / tokens * own * 2 * (spec.num_heads + spec.num_kv_heads)


def _flops(spec: ModelSpec, job: MemoryJob, parts: int) -> float:
    """Operations of one micro-step: forward, backward, recomputation, the reference model of DPO.

    `parts`: of a sample, of which this device has one; its positions attend to all of them.
    """
    rows, length = job.rows
    rows = job.sequences if job.forwards > 1 else rows
    tokens = rows * length
    attended = parts * (job.sequence_length if is_varlen(job.attention) else length)
    linears = 2.0 * tokens * (spec.linear_weights + _active_experts(spec))
    if job.quantization == "int8":
        linears *= INT8_SLOWDOWN
    attentions = sum(stack.layers * stack.attentions for stack in spec.layout.stacks)
    # Two products of every pair of positions; kernels that skip what causality masks are not credited.
    attention = 4.0 * tokens * attended * attentions * spec.num_heads * spec.head_dim
    head = 2.0 * (tokens if spec.head.per_token else rows) * spec.head.in_features * spec.head.out_features
    adapter = 2.0 * tokens * job.trainable_params if job.adapter else 0.0
    forward = linears + attention + adapter
    # Backward: gradients of what came in, those of the weights where they are trained; attention has both.
    backward = (1 if job.adapter else 2) * (linears + head) + 2 * attention + 2 * adapter
    again = forward if job.checkpointing else 0.0
    extra = job.extra_forwards * (linears + attention + head)
    return forward + head + backward + again + extra


def _active_experts(spec: ModelSpec) -> int:
    """Weights of all layers' experts that one token passes through."""
    return sum(
        3 * spec.hidden_size * stack.active_inner * stack.layers
        for stack in spec.layout.stacks
        if stack.experts
    )


def _held_weights(spec: ModelSpec) -> int:
    """Entries of all matrices that a forward pass reads, the head's included."""
    return spec.linear_weights + spec.expert_weights + spec.head.in_features * spec.head.out_features


def _weight_traffic(spec: ModelSpec, job: MemoryJob) -> float:
    """Bytes of device memory for one reading of all weights, unpacked or cast where they have to be."""
    weights = _held_weights(spec)
    if job.quantization != "none":
        packed = 1.0 if job.quantization == "int8" else 0.5
        return weights * 2 + spec.quantized_weights(job.quantization) * (packed + DEQUANTIZED_BYTES - 2)
    computed = 4 if job.precision == "fp32" else 2
    if job.engine.casts(job.precision):
        return float(weights * computed)
    stored = WIDTHS[job.dtype]
    # Autocast reads the stored weight, writes its 16-bit copy, and reads that.
    return float(weights * (stored if stored == computed else stored + 2 * computed))


def _stored_weights(spec: ModelSpec, job: MemoryJob) -> float:
    """Bytes of the weights that ZeRO-3 and FSDP2 gather."""
    width = 4.0 if job.precision == "fp32" else 2.0
    if job.quantization != "none":
        packed = 1.0 if job.quantization == "int8" else 0.5
        return spec.params * width + spec.quantized_weights(job.quantization) * (packed - width)
    return spec.params * width


def _moved(job: MemoryJob, gradients: int, weights: float) -> tuple[float, float]:
    """Bytes that a device sends to others, and over PCIe to and from the host, in one step.

    All-reduce: reduce-scatter and all-gather. ZeRO-3 and FSDP2 gather the weights twice in each micro-step.
    """
    ranks, micro_steps = job.data_parallel, job.accumulation or 1
    reductions = micro_steps if job.engine.reduces_each(job) else 1
    sent = float(gradients * reductions)
    sent += 2 * weights * micro_steps if job.engine.stage(job) == 3 else gradients
    hosted = 0.0
    if job.offload_optimizer != "none":
        # Gradients go out as they are reduced, the updated weights come back: as many bytes.
        hosted += gradients * (reductions + 1) / ranks
    if job.offload_param != "none":
        hosted += 2 * weights * micro_steps / ranks
    return sent * (ranks - 1) / ranks, hosted
