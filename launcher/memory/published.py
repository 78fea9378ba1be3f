"""Rules of thumb that others publish, kept apart from the estimate and compared with it. Pure arithmetic.

Each counts states only, with a width of its own for what the installed engines do differently.
"""

from __future__ import annotations

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


def overlap_comm_upper_bound(bucket_elements: int) -> int:
    """Hugging Face's documented rule for `overlap_comm`: 4.5 buckets, twice, in 16 bits.

    The installed code allocates two buckets, which is the estimate; this is the end of the range.
    """
    return int(4.5 * bucket_elements * 2 * 2)
