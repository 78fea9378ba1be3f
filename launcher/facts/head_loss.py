"""What a loss that never holds all logits may be used for, and the size of its chunks. Pure."""

from __future__ import annotations

CHUNK_BYTES = 256 * 2**20
"""float32 logits of one chunk."""
STEP = 256
"""Fewer rows make the matrix products slow: at 8 rows, torch's own choice for a vocabulary of 49152 on a
CPU, the head takes five times as long as in one piece."""
LOGIT_BYTES = 4

PLAIN_HEADS = frozenset(
    {
        "gemma",
        "gemma3_text",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "llama",
        "mistral",
        "opt",
        "phi3",
        "qwen2",
        "qwen3",
        "starcoder2",
    }
)
"""Model types whose logits are `lm_head(hidden)` and whose loss is that of these logits alone.

As read in transformers 5.23. Gemma-2 caps its logits, and Gemma-3 where its configuration has a
final_logit_softcapping (the plan asks); Mixtral and Qwen3-MoE may add the loss of their routers.
"""


def chunk_rows(vocab_size: int) -> int:
    """Rows of logits in one chunk: as many as 256 MiB hold in float32, a multiple of 256, at least 256."""
    fitting = CHUNK_BYTES // (LOGIT_BYTES * vocab_size)
    return max(STEP, fitting // STEP * STEP)
