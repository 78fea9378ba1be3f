"""Rules of thumb that others publish, kept apart from the estimate and compared with it. Pure arithmetic.

Each counts states only, with a width of its own for what the installed engines do differently.
"""

from __future__ import annotations

from dataclasses import dataclass

ZERO_PAPER = {"weights": 2, "gradients": 2, "optimizer": 12}
"""Bytes per parameter of mixed-precision Adam in ZeRO's paper (arXiv 1910.02054), section 3.1."""

HF_WEIGHTS = {"fp32": 4, "mixed": 6}
"""Hugging Face's model-memory anatomy: mixed precision holds the weights in both widths."""
HF_OPTIMIZERS = {"adamw": 8, "adamw_8bit": 2, "sgd_momentum": 4}
HF_GRADIENTS = 4


def zero_paper_bytes(params: int, ranks: int, stage: int) -> float:
    """States on one of `ranks` devices by the paper's table, in bytes."""
    shared = {"optimizer": 1, "gradients": 2, "weights": 3}
    return sum(params * width / (ranks if stage >= shared[name] else 1) for name, width in ZERO_PAPER.items())


def hf_page_bytes(params: int, precision: str = "mixed", optimizer: str = "adamw") -> int:
    """Weights, optimizer and gradients on one device by Hugging Face's page, in bytes."""
    return params * (HF_WEIGHTS[precision] + HF_OPTIMIZERS[optimizer] + HF_GRADIENTS)


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of model states on one device and on one node's host."""

    device: int
    host: int


_SPARE = 1.5
"""DeepSpeed's documentation adds half for buffers on the host."""


def deepspeed_zero2(params: int, devices: int, *, offload: bool) -> Needs:
    """DeepSpeed's memory documentation for stage 2 on one node.

    Its estimator of 0.19.8 counts 2 + 18/N on the device without offload, where the page has 4 + 16/N.
    """
    if offload:
        return Needs(2 * params, int(params * max(4 * devices, 16) * _SPARE))
    return Needs(4 * params + 16 * params // devices, int(params * 4 * devices * _SPARE))


def deepspeed_zero3(params: int, largest_layer: int, devices: int, *, offload: str) -> Needs:
    """DeepSpeed's memory documentation for stage 3 on one node with zero.Init.

    `offload`: none | optimizer | all (optimizer and parameters).
    """
    gathered = 4 * largest_layer
    if offload == "all":
        return Needs(gathered, int(params * 18 * _SPARE))
    if offload == "optimizer":
        return Needs(gathered + 2 * params // devices, int(params * 16 * _SPARE))
    return Needs(gathered + 18 * params // devices, int(largest_layer * 4 * devices * _SPARE))


def overlap_comm_upper_bound(bucket_elements: int) -> int:
    """Hugging Face's documented rule for `overlap_comm`: 4.5 buckets, twice, in 16 bits.

    The installed code allocates two buckets, which is the estimate; this is the end of the range.
    """
    return int(4.5 * bucket_elements * 2 * 2)


def llama_6b_rule(samples: int, *, hidden: int = 4096, inner: int = 11008) -> float:
    """Bytes by a rule of thumb of 2023: a model of 6e9 parameters in int8 at 2048 tokens.

    Weights 6 GB, gradients 6, two moments 12, kernels 1.3; of each of 32 layers the hidden and the inner
    activation of each token in one byte.
    """
    return (6 + 6 + 12 + 1.3) * 1e9 + samples * (hidden + inner) * 2048 * 32
