"""The tokenizer that a plan's rows are encoded with."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from launcher.train.model.processing import ensure_pad_token
from launcher.train.tiny import tiny_tokenizer


def test_pad_token_prefers_a_spare_token_to_eos():
    from transformers import PreTrainedTokenizerFast

    tokenizer = tiny_tokenizer(512)
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|eos|>")
    assert bare.pad_token_id is None
    size = len(bare)
    ensure_pad_token(bare)
    assert bare.pad_token == "<|pad|>"
    assert len(bare) == size
