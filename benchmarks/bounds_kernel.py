"""An attention kernel that, like FlashAttention's, knows documents by their bounds (cu_seq_lens) alone.

FlashAttention runs on GPUs only; that a model hands it the bounds is seen with this one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

NAME = "variable-length"


def variable_length(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Any = None,
    cu_seq_lens_q: Any = None, max_length_q: int = 0, **rest: Any,
) -> tuple[Any, None]:  # fmt: skip
    """[1, tokens, heads, width] of [1, heads, tokens, width]; without bounds, one document."""
    import torch

    if attention_mask is not None or s_aux is not None or query.shape[2] != key.shape[2]:
        raise ValueError("flash_attention_2 has no mask and no sinks, and as many keys as queries")
    ends = [0, query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    if cu_seq_lens_q is not None and max_length_q != max(cu_seq_lens_q.diff()):
        raise ValueError("the longest document is another")
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    parts = []
    for start, end in pairwise(ends):
        q, k, v = (states[:, :, start:end] for states in (query, key, value))
        scores = q @ k.transpose(-1, -2) * (scaling or q.shape[-1] ** -0.5)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        places = torch.arange(end - start)
        back = places[:, None] - places
        visible = (back >= 0) & (back < (sliding_window or end))
        parts.append(scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v)
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def register() -> None:
    import transformers

    transformers.AttentionInterface.register(NAME, variable_length)
