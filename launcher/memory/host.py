"""What one node's host memory holds at the moments of a run. Pure arithmetic.

Data sets are left out: they are read through memory maps, whose pages the system takes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from launcher.machine.hardware import Hardware
from launcher.memory.activations import offloaded_inputs
from launcher.memory.allocator import power_of_two
from launcher.memory.job import MemoryJob
from launcher.memory.states import base_weight_bytes
from launcher.memory.tensor_parallel import on_rank
from launcher.models.model import ModelSpec

PROCESS_BYTES = 1 << 30
"""Host memory of one worker besides tensors: interpreter and libraries, rounded up."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of one node."""

    workers: int
    """Interpreters and libraries of its ranks."""
    tensors: int
    """On a CPU: what the ranks hold in place of a device's memory."""
    offloaded: int
    """Offloaded weights, gradients and optimizer states."""
    activations: int
    """Inputs of layers that checkpoints keep, offloaded."""
    staging: int
    """Page-locked buffers through which they travel."""
    rounding: int
    """What page-locked buffers take beyond their size: blocks of powers of two."""
    pageable: int
    """Paged optimizer states."""
    loading: int
    """Weights that ranks read before they move to the devices."""
    saving: int
    """The model, or shards of the optimizer, gathered to be written."""
    nvme: int
    """Files on NVMe, not part of `peak`."""

    @property
    def peak(self) -> int:
        """The most at any moment: while loading, or in training with a save."""
        running = self.tensors + self.offloaded + self.activations + self.staging + self.rounding
        return self.workers + max(self.loading, running + self.pageable + self.saving)


def host_memory(spec: ModelSpec, job: MemoryJob, hardware: Hardware, total: int) -> HostMemory:
    """Host memory by its parts; `total`: the training peak of one device."""
    engine = job.engine
    part, own = on_rank(spec, job)
    states = engine.states(part, own)
    kept = 1 if job.mini_batch else job.passes
    inputs = [] if hardware.is_cpu else kept * offloaded_inputs(part, own)
    local = min(job.devices_per_node, job.data_parallel * job.tensor_parallel * job.sequence_parallel)
    return HostMemory(
        workers=local * PROCESS_BYTES,
        tensors=local * total if hardware.is_cpu else 0,
        offloaded=local * states.host,
        activations=local * sum(inputs),
        staging=local * states.staging,
        rounding=local * _rounding((*states.pinned, *inputs)) if job.rounds_pinned else 0,
        # A CPU has no paged memory: bitsandbytes falls back to plain tensors, which are part of `tensors`.
        pageable=0 if hardware.is_cpu else local * states.pageable,
        loading=0 if hardware.is_cpu else _loading(spec, job, local),
        saving=engine.saving(spec, job, local, on_cpu=hardware.is_cpu),
        nvme=local * states.nvme,
    )


def _rounding(buffers: Iterable[int]) -> int:
    """Bytes beyond the buffers' own (ATen/core/CachingHostAllocator.h, `allocate`, torch 2.13)."""
    return sum(power_of_two(size) - size for size in buffers)


def _loading(spec: ModelSpec, job: MemoryJob, local: int) -> int:
    if job.engine.loads_on_host(job):
        return local * sum(job.engine.frozen_bytes(spec, job))
    if job.quantization != "none" or job.spread > 1:
        return 0  # straight to the devices, through memory maps
    copies = job.loaded_copies - job.maps_weights
    one = base_weight_bytes(spec, job.dtype) * copies
    return one if job.engine.loads_once(job) else local * one
