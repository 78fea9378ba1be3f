"""Attention kernels and what they do with packed rows; chunks of logits; tensor-parallel plans."""

from __future__ import annotations

import functools
import json

from launcher.files.shipped import facts_file

VARLEN = ("flash_attention_2", "varlen")
"""Kernels that take document boundaries (cu_seq_lens) instead of a mask."""
MASKLESS = (*VARLEN, "flex_attention")
"""Kernels without a mask over pairs of tokens; flex_attention has one over pairs of blocks."""


def is_varlen(name: str | None) -> bool:
    """Whether the kernel computes a packed row at the cost of its documents one by one."""
    return name in VARLEN


def holds_mask(name: str | None) -> bool:
    """Whether a packed row needs a mask over every pair of its tokens."""
    return name not in MASKLESS


CHUNK_BYTES = 256 * 2**20
"""float32 logits of one chunk."""
STEP = 256
"""Rows of the smallest chunk. With 8 rows (torch's choice for a vocabulary of 49152 on a CPU) the head takes
five times as long as in one piece."""
LOGIT_BYTES = 4


def chunk_rows(vocab_size: int) -> int:
    """Rows of logits in one chunk: those that fit 256 MiB in float32, a multiple of 256, at least 256."""
    fitting = CHUNK_BYTES // (LOGIT_BYTES * vocab_size)
    return max(STEP, fitting // STEP * STEP)


@functools.cache
def tp_plans() -> dict[str, dict[str, str]]:
    """Model type -> module pattern -> style, as in the tested transformers; {} for a family without one."""
    return dict(json.loads(facts_file("tp_plans.json").read_text("utf-8"))["plans"])


def has_tp_plan(model_type: str) -> bool:
    """Whether transformers has a tensor-parallel plan (`base_model_tp_plan`) for this family."""
    return bool(tp_plans().get(model_type))
