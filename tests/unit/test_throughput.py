"""What trains faster: kernels of any length, the loss by chunks."""

from __future__ import annotations

import pytest

from launcher.facts.architectures import FAMILIES
from launcher.facts.attention import is_varlen
from launcher.facts.head_loss import CHUNK_BYTES, PLAIN_HEADS, chunk_rows


@pytest.mark.parametrize(
    ("kernel", "varlen"),
    [("flash_attention_2", True), ("varlen", True), ("sdpa", False), ("eager", False),
     ("flex_attention", False), (None, False)],
)  # fmt: skip
def test_which_kernels_take_documents_of_any_length(kernel, varlen):
    assert is_varlen(kernel) is varlen


@pytest.mark.parametrize("vocab", [2, 1024, 32000, 49152, 128256, 151936, 262144, 10**7])
def test_a_chunk_of_logits_is_a_multiple_of_256_rows_within_its_bytes(vocab):
    rows = chunk_rows(vocab)
    assert rows % 256 == 0
    assert rows >= 256
    assert rows == 256 or rows * vocab * 4 <= CHUNK_BYTES
    assert (rows + 256) * vocab * 4 > CHUNK_BYTES


def test_plain_heads_are_families_that_are_known():
    assert FAMILIES.keys() >= PLAIN_HEADS
    assert not PLAIN_HEADS & {"gemma2", "mixtral", "qwen3_moe"}
