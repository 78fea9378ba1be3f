"""Which attention kernels read documents of any length from one row. Pure."""

from __future__ import annotations

VARLEN = ("flash_attention_2", "varlen")
"""They take the borders of documents (cu_seq_lens) instead of a mask over every pair of tokens."""
MASKLESS = (*VARLEN, "flex_attention")
"""They hold no mask over pairs of tokens: flex_attention one over pairs of blocks, which is small."""


def is_varlen(name: str | None) -> bool:
    """Whether the kernel of this name costs a flattened row what its documents cost one by one."""
    return name in VARLEN


def holds_mask(name: str | None) -> bool:
    """Whether documents that share a row cost this kernel a mask over every pair of its tokens."""
    return name not in MASKLESS
