"""NCCL's buffers on a device: what its communicators take beside the CUDA context. Pure arithmetic.

A communicator has channels, and a channel a connection to each neighbour: on the receiving side a buffer for
each of the protocols LL, LL128 and Simple (`DEFAULT_LL_BUFFSIZE`, `DEFAULT_LL128_BUFFSIZE`,
`DEFAULT_BUFFSIZE`, NVIDIA/nccl src/init.cc), on the sending side a small one. CUDA maps them in units of
2 MiB: 10 and 2 MiB, as the log in NVIDIA/nccl#1685 has them. On four A100, NVIDIA/nccl#964 measured 144 MiB
more for communicators of more than two ranks: its trees add half as much as its rings. What it measured
beyond that, 256 MiB for each of its communicators, are buffers for sends that later versions make on demand
(NVIDIA/nccl#2366); they are not counted. Nothing of it was measured here.
"""

from __future__ import annotations

from launcher.machine.hardware import MIB, Hardware, figures_of
from launcher.memory.job import MemoryJob

RING_BYTES = (10 + 2) * MIB
"""Of a channel: it receives from one neighbour, and sends to one."""
TREE_BYTES = RING_BYTES // 2
"""Of a channel where more than two ranks make trees."""
LINKED_CHANNELS = 24
"""Channels of collectives over NVLink (A100: the figures above; H100: NCCL's log of `coll channels`)."""
PLAIN_CHANNELS = 4
"""Over PCIe; NCCL uses 2 or 4."""
PCIE_BYTES = 64e9
"""Bytes a second and direction of PCIe 5: what links faster is NVLink."""
NVLS_BYTES = 16 * 2 * 8 * 128 * 1024
"""For each rank of a node: 16 channels, two directions, 8 steps of 128 KiB (src/transport/nvls.cc)."""
NVLS_CAPABILITY = (9, 0)
"""From here on a switch of NVLink adds up what more than two ranks send."""


def nccl_bytes(job: MemoryJob, hardware: Hardware) -> int:
    """Bytes that the communicators of one rank take on its device."""
    groups = [size for size in job.engine.communicators(job) if size > 1]
    return 0 if hardware.is_cpu else sum(_communicator(size, hardware) for size in groups)


def _communicator(ranks: int, hardware: Hardware) -> int:
    linked = figures_of(hardware)[0].link > PCIE_BYTES
    channels = LINKED_CHANNELS if linked else PLAIN_CHANNELS
    each = RING_BYTES + (TREE_BYTES if ranks > 2 else 0)
    local = min(ranks, hardware.devices_per_node)
    capability = hardware.compute_capability or (0, 0)
    switched = NVLS_BYTES * local if linked and local > 2 and capability >= NVLS_CAPABILITY else 0
    return channels * each + switched
