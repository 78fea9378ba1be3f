"""The attention "varlen": what it makes of rows that are not flattened, and what it hands to the kernel.

That flattened documents compute what separate ones do is in test_packing.py, for every family.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from launcher.train.data import host_counts  # noqa: E402
from launcher.train.data.batches import make_collator  # noqa: E402
from launcher.train.model import attention  # noqa: E402
from launcher.train.model.attention import register_varlen  # noqa: E402
from tests.contract.test_packing import LLAMA, VOCAB, Pad, build  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def row_of(lengths: tuple[int, ...], seed: int = 1) -> list[dict[str, list[int]]]:
    drawn = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, VOCAB, (length,), generator=drawn).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in ids]


def apart(found: Any, expected: Any) -> float:
    """The largest difference of two tensors."""
    return float((found - expected).detach().abs().max())


def padded(lengths: tuple[int, ...], side: str) -> dict[str, Any]:
    """Rows [batch, longest] with their mask, padded on one side."""
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), 3), torch.zeros(len(lengths), width, dtype=torch.long)
    for number, sample in enumerate(row_of(lengths)):
        length = lengths[number]
        own = slice(0, length) if side == "right" else slice(width - length, width)
        ids[number, own], mask[number, own] = torch.tensor(sample["input_ids"]), 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "mixtral", "opt", "gpt2"])
def test_padded_rows_are_what_sdpa_makes_of_them(family: str, side: str) -> None:
    batch = padded((12, 7, 3), side)
    real = batch["attention_mask"].bool()
    expected, found = (build(family, name).eval()(**batch).logits[real] for name in ("sdpa", "varlen"))
    assert apart(found, expected) < 2e-5


@pytest.mark.parametrize("task", ["classes", "sequences"])
def test_attention_in_both_directions_keeps_its_mask(task: str) -> None:
    """Bidirectional layers, and layers across two sequences, see what sdpa lets them see."""
    register_varlen()
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    found = []
    for name in ("sdpa", "varlen"):
        torch.manual_seed(0)
        if task == "classes":
            config = transformers.BertConfig(vocab_size=VOCAB, initializer_range=0.2, **small)
            model = transformers.AutoModelForSequenceClassification.from_config(
                config, attn_implementation=name
            )
            more = {}
        else:
            config = transformers.BartConfig(
                vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.2,
            )  # fmt: skip
            model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation=name)
            more = {"decoder_input_ids": torch.tensor([[2, 7, 8], [2, 9, 3], [2, 5, 6]])}
        found.append(model.eval()(**padded((12, 7, 3), "right"), **more).logits)
    assert apart(*found) < 2e-5


def test_right_padding_and_one_document_need_no_mask(monkeypatch: Any) -> None:
    masks = []

    def seen(**given: Any) -> Any:
        masks.append(attention.make_mask(**given))
        return masks[-1]

    model = build("llama", "varlen").eval()
    monkeypatch.setitem(
        transformers.AttentionMaskInterface._global_mapping, "varlen", lambda **given: seen(**given)
    )
    model(**padded((12, 7), "right"), use_cache=False)
    model(**padded((12, 7), "left"), use_cache=False)
    model(**padded((1,), "right"), use_cache=False)
    assert masks[0] is None
    assert masks[1].shape == (2, 1, 12, 12)
    assert masks[2] is None


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_cache_is_read_as_sdpa_reads_it(family: str) -> None:
    batch = padded((9, 4), "left")
    written = [
        build(family, name).eval().generate(**batch, max_new_tokens=8, do_sample=False, pad_token_id=3)
        for name in ("sdpa", "varlen")
    ]
    assert written[0].tolist() == written[1].tolist()


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_bigcode", "gpt2"])
def test_one_row_of_documents_without_bounds_is_told_apart_by_positions(family: str) -> None:
    rows = row_of((6, 1, 11))
    batch = dict(make_collator("flatten", Pad())(rows))
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        batch.pop(name)
    expected, found = (build(family, name)(**batch, use_cache=False).logits for name in ("eager", "varlen"))
    assert apart(found, expected) < 2e-5


def test_lengths_are_read_once_for_all_layers(monkeypatch: Any) -> None:
    """Each reading makes the host wait for a GPU."""
    read = []
    monkeypatch.setattr(host_counts, "pairwise", lambda edges: read.append(edges) or pairwise(edges))
    batch = make_collator("flatten", Pad())(row_of((6, 2)))
    model = build("llama", "varlen")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**batch, use_cache=False).loss.backward()
    assert read == [[0, 6, 8]]


def test_mixed_precision_computes_what_padded_rows_do() -> None:
    rows = row_of((9, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        flat = build("qwen3", "varlen")(**make_collator("flatten", Pad())(rows), use_cache=False).logits[0]
        wide = build("qwen3", "sdpa")(**padded((9, 4), "right"), use_cache=False).logits
    expected = torch.cat([wide[0], wide[1, :4]])
    assert apart(flat, expected) < 0.02 * float(expected.detach().abs().max())


def states(tokens: int, keys: int | None = None, rows: int = 1) -> tuple[Any, Any, Any]:
    drawn = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(rows, heads, length, 16, generator=drawn)
        for heads, length in ((4, tokens), (2, keys or tokens), (2, keys or tokens))
    )


BOUNDS = torch.tensor([0, 3, 8], dtype=torch.int32)
NUMBERS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2]])


@pytest.mark.parametrize(
    ("given", "mask", "message"),
    [
        (states(8), torch.ones(1, 1, 8, 8, dtype=torch.bool), "came with a mask of its own"),
        (states(8, keys=10), None, "8 queries and 10 keys"),
        (states(8, rows=2), None, "2 rows"),
        (states(9), None, "documents of 8 tokens in a row of 9"),
        (states(8), NUMBERS.to(torch.int64), "window to attention 'varlen'"),
    ],
    ids=["mask", "prefix", "rows", "bounds", "window"],
)
def test_what_it_would_get_wrong_is_refused(given: Any, mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention.attend(torch.nn.Module(), *given, mask, cu_seq_lens_q=BOUNDS)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_scores_that_are_changed_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"does not know `{name}`"):
        attention.attend(torch.nn.Module(), *states(8), None, cu_seq_lens_q=BOUNDS, **{name: torch.ones(1)})


def kernel_of_2_13(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None,
                   window_size=(-1, -1), enable_gqa=False):  # fmt: skip
    """torch's, by its documentation: (left, right) tokens beside each; queries [tokens, heads, width]."""
    assert cu_seq_q is cu_seq_k
    assert max_q == max_k == max(cu_seq_q.diff())
    assert window_size[1] == 0
    assert query.dtype == key.dtype == value.dtype
    if not enable_gqa:
        assert key.shape[1] == query.shape[1]
    left = max_q if window_size[0] < 0 else window_size[0]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    parts = []
    for start, end in pairwise(cu_seq_q.tolist()):
        q, k, v = (x[start:end].transpose(0, 1).float() for x in (query, key, value))
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
        seen = (back >= 0) & (back <= left)
        parts.append((scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts).to(query.dtype)


def kernel_of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    assert is_causal
    return kernel_of_2_13(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=(-1, 0))


@pytest.mark.parametrize(
    ("kernel", "window"),
    [(kernel_of_2_10, None), *((kernel_of_2_13, window) for window in (None, 1, 2, 7))],
)
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_the_kernel_is_asked_for_the_same(
    monkeypatch: Any, kernel: Any, window: int | None, scaling: float | None
) -> None:
    monkeypatch.setattr(attention, "_kernel", (kernel, frozenset(inspect.signature(kernel).parameters)))
    given = {"cu_seq_lens_q": BOUNDS, "max_length_q": 5, "scaling": scaling, "sliding_window": window}
    module = torch.nn.Module()
    expected, _ = attention.attend(module, *states(8), None, **given)
    monkeypatch.setattr(attention, "_has_kernel", lambda *_: True)
    found, _ = attention.attend(module, *states(8), None, **given)
    assert found.shape == expected.shape == (1, 8, 4, 16)
    assert apart(found, expected) < 1e-5


def test_which_tensors_the_kernel_takes(monkeypatch: Any) -> None:
    monkeypatch.setattr(attention, "_kernel", (kernel_of_2_13, frozenset({"window_size"})))

    def takes(
        dtype: Any = torch.bfloat16,
        width: int = 64,
        of: int = 64,
        dropout: float = 0.0,
        device: str = "cuda",
        window: int | None = None,
    ) -> bool:
        query, value = (
            SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype, shape=(1, 4, 8, size))
            for size in (width, of)
        )
        return attention._has_kernel(query, value, dropout, window)

    assert takes()
    assert takes(torch.float16)
    assert takes(window=4)
    assert not takes(device="cpu")
    assert not takes(torch.float32)
    assert not takes(dropout=0.1)
    assert not takes(width=20, of=20)
    assert not takes(width=512, of=512)
    assert not takes(of=32)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    assert takes(torch.float32)
    monkeypatch.setattr(attention, "_kernel", (kernel_of_2_10, frozenset()))
    assert takes()
    assert not takes(window=4)
    monkeypatch.setattr(attention, "_kernel", None)
    assert not takes()


def test_which_devices_have_the_kernel(monkeypatch: Any) -> None:
    assert attention._find_kernel() is None or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert attention._find_kernel() is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    found = attention._find_kernel()
    assert found is not None
    assert {"window_size", "scale", "enable_gqa"} <= found[1]


def test_windows_are_those_of_transformers() -> None:
    from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

    theirs = sdpa_mask(1, 9, 9, mask_function=sliding_window_causal_mask_function(4), local_size=4)
    assert attention._window(9, 4, torch.device("cpu")).equal(theirs[0, 0])


def test_a_saved_model_does_not_name_it(tmp_path: Any) -> None:
    build("llama", "varlen").save_pretrained(tmp_path)
    assert "varlen" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_registering_again_changes_nothing() -> None:
    register_varlen()
    register_varlen()
    assert transformers.AttentionInterface()["varlen"] is attention.attend
    assert LLAMA["num_key_value_heads"] < LLAMA["num_attention_heads"]  # grouped keys are tried here


def test_compiled_layers_are_compiled_once_for_all_lengths() -> None:
    """Up to what dynamic shapes ask for; each list of lengths by itself would be another graph."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain, compiled = (build("mistral", "varlen") for _ in range(2))
    compiled.model.layers[0].compile(dynamic=True, backend="eager")
    graphs = []
    for lengths in ((9, 4), (5, 8, 3), (12, 5, 1, 1, 4)):
        batch = make_collator("flatten", Pad())(row_of(lengths))
        found, expected = (model(**batch, use_cache=False).logits for model in (compiled, plain))
        assert apart(found, expected) < 1e-6
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[2] == graphs[1]
