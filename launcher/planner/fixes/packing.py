"""Fixes for packed and padding-free batches: what would let documents see each other, silently."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.models.capabilities import holds_mask, is_varlen
from launcher.models.model_types import why_not_apart
from launcher.planner.fixes.fix import Fix, Situation

MASK_TOKENS = 16384
"""Tokens of one flattened row whose attention mask takes 256 MiB at one byte per pair."""


def _asked(s: Situation) -> str | None:
    """The setting that puts several documents in one row."""
    return "data.packing" if s.data.packing else "data.padding_free" if s.data.padding_free else None


def _family(s: Situation) -> Mapping[str, object]:
    asked = _asked(s)
    leaks = asked and why_not_apart(s.spec.config, s.model.attn_implementation or "sdpa")
    return {asked: False} if asked and leaks else {}


def _cache(s: Situation) -> Mapping[str, object]:
    return {"trainer.use_cache": False} if _asked(s) and s.trainer.use_cache else {}


def _flash_rows(s: Situation) -> Mapping[str, object]:
    varlen = is_varlen(s.model.attn_implementation)
    stacked = s.data.packing and not s.data.padding_free
    return {"data.padding_free": True} if varlen and stacked else {}


def _mask_memory(s: Situation) -> Mapping[str, object]:
    masked = holds_mask(s.model.attn_implementation)
    micro = s.trainer.per_device_train_batch_size or 1
    too_long = masked and s.data.padding_free and micro * s.data.max_length > MASK_TOKENS
    return {"data.padding_free": False} if too_long else {}


PACKING_FIXES = (
    Fix(
        id="packing-family",
        title="packing needs a model that keeps documents apart",
        condition="data.packing or data.padding_free where the model type was not shown to keep documents "
        "apart under model.attn_implementation (docs/models.md), or with other switches of its configuration",
        action="refuse",
        reason="Packed documents are told apart by position_ids or by their bounds alone. OPT's mask ignores "
        "position_ids, and layers with a state or a convolution read across the bounds: documents would see "
        "each other without any error.",
        source="transformers/models/opt/modeling_opt.py (create_causal_mask without position_ids)",
        versions="transformers>=5",
        changes=_family,
        hint="drop data.packing and data.padding_free; or, where docs/models.md lists another kernel for "
        "the type, set model.attn_implementation to it",
        early=True,
    ),
    Fix(
        id="packing-cache",
        title="a KV cache and packed documents",
        condition="trainer.use_cache true with data.packing or data.padding_free",
        action="refuse",
        reason="With a cache transformers no longer reads document borders from position_ids, and packed "
        "documents see each other, in training and evaluation alike.",
        source="transformers/masking_utils.py _preprocess_mask_arguments",
        versions="transformers>=5",
        changes=_cache,
        hint="drop trainer.use_cache",
        early=True,
    ),
    Fix(
        id="packing-flash-rows",
        title="kernels of any length read document borders from a single row",
        condition="data.packing with flash_attention_2 or varlen and data.padding_free false",
        action="refuse",
        reason="In a batch of several packed rows the kernel takes each row for one document, so that "
        "packed documents see each other.",
        source="transformers/modeling_flash_attention_utils.py _is_packed_sequence (batch_size != 1)",
        versions="transformers>=5",
        changes=_flash_rows,
        hint="drop data.padding_free: packs are then laid in one row; or use attn_implementation: sdpa",
        early=True,
    ),
    Fix(
        id="padding-free-mask",
        title="padding-free batches without a kernel for documents of any length",
        condition="data.padding_free under sdpa or eager, micro-batch x max_length above 16384 tokens",
        action="warn",
        reason="These kernels get a mask over every pair of tokens of the whole batch, 256 MiB at 16384 "
        "tokens and four times that at twice as many, and compute attention over all of it.",
        source="transformers/masking_utils.py sdpa_mask, eager_mask",
        versions="*",
        changes=_mask_memory,
        hint="drop model.attn_implementation: varlen needs no mask",
    ),
)
