"""Which keys transformers' sdpa leaves grouped: torch's fused kernels take them in 16 bits from Ampere on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from transformers.integrations import sdpa_attention  # noqa: E402

from launcher.train.upstream.model_seams import repeat_keys_for_fused_attention  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from task_models import job_for, load  # noqa: E402


@pytest.fixture
def upstream(monkeypatch):
    """As transformers has it, whatever tests before this one have loaded in this process."""
    found = sdpa_attention.use_gqa_in_sdpa
    found = getattr(found, "upstream", found)
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", found)
    return found


@pytest.fixture
def patched(upstream):
    repeat_keys_for_fused_attention()
    repeat_keys_for_fused_attention()  # once more changes nothing
    assert sdpa_attention.use_gqa_in_sdpa.upstream is upstream
    return upstream


def keys(device: str, dtype: torch.dtype, width: int = 64) -> SimpleNamespace:
    return SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype, shape=(1, 2, 8, width))


@pytest.mark.parametrize(
    ("dtype", "capability", "grouped"),
    [
        (torch.bfloat16, (9, 0), True),
        (torch.float16, (8, 0), True),
        (torch.float16, (7, 0), False),
        (torch.float32, (9, 0), False),
    ],
)
def test_cuda_reads_grouped_keys_where_a_kernel_takes_them(patched, monkeypatch, dtype, capability, grouped):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    key = keys("cuda", dtype)
    assert patched(None, key, key) is True  # what upstream does on every GPU
    assert sdpa_attention.use_gqa_in_sdpa(None, key, key) is grouped


def test_what_upstream_repeats_stays_repeated_and_a_cpu_is_left_alone(patched):
    assert (
        sdpa_attention.use_gqa_in_sdpa(None, keys("cpu", torch.float32), keys("cpu", torch.float32)) is True
    )
    mask, wide = torch.ones(1), keys("cpu", torch.bfloat16, width=512)
    assert (
        sdpa_attention.use_gqa_in_sdpa(mask, keys("cpu", torch.bfloat16), keys("cpu", torch.bfloat16))
        is False
    )
    assert sdpa_attention.use_gqa_in_sdpa(None, wide, wide) is False


def test_a_model_that_is_loaded_asks_the_device(tmp_path, upstream):
    load(job_for(tmp_path, "causal-lm"))
    assert sdpa_attention.use_gqa_in_sdpa.upstream is upstream
