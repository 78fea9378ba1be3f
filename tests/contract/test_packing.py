"""Packing on real models: packed and flattened documents compute what separate ones compute.

transformers keeps documents apart by position_ids alone, and only without attention mask and KV cache.
Each decoder family reads position_ids in code of its own, so each of the closed forms is tried here, with its
windows, scales and experts; benchmarks/coverage.py tries all types on less.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from closed_form_cases import LIKE_LLAMA

from launcher.models.model_types import found

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from launcher.train.data.batches import (  # noqa: E402
    PackedRows,
    make_collator,
    pack_lengths,
)
from launcher.train.model.attention import register_varlen  # noqa: E402
from launcher.train.tiny import tiny_tokenizer  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bounds_kernel  # noqa: E402  (benchmarks is no package)

VOCAB = 128
WINDOW = 5
"""Sliding window, shorter than the documents, so that windowed layers are tried too."""
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "head_dim": 16,
    # Large weights: a leak then moves the logits by far more than rounding does.
    "initializer_range": 0.2,
}
BOTH = ["sliding_attention", "full_attention"]
GPT2 = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "initializer_range": 0.2,
    # Fewer positions than a flattened batch has tokens: positions restart, so they suffice.
    "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
MOE = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
SCALED = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4,
    "max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}  # fmt: skip
"""Queries are scaled by their position, from the fifth on."""
NEOX = {key: value for key, value in LLAMA.items() if key not in ("head_dim", "num_key_value_heads")}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": WINDOW},
    "qwen2": {**LLAMA, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": BOTH},
    "qwen3": {**LLAMA, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": BOTH},
    "gemma": LLAMA,
    "gemma2": {**LLAMA, "sliding_window": WINDOW, "layer_types": BOTH},
    "gemma3_text": {**LLAMA, "sliding_window": WINDOW, "layer_types": BOTH},
    "phi3": {**LLAMA, "sliding_window": WINDOW, "pad_token_id": 0},
    "starcoder2": {
        **LLAMA, "sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0,
    },
    "gpt_bigcode": GPT2,
    "gpt2": GPT2,
    "gpt_neox": {**NEOX, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "opt": {
        **NEOX, "ffn_dim": 96, "dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0,
        "word_embed_proj_dim": 64, "init_std": 0.2, "max_position_embeddings": 32,
    },
    "mixtral": {**LLAMA, **MOE, "sliding_window": WINDOW},
    "qwen3_moe": {**LLAMA, **MOE},
    "smollm3": {
        **LLAMA, "use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layers": [1, 0],
        "pad_token_id": 0,
    },
    "arcee": LLAMA,
    "ministral": {**LLAMA, "sliding_window": WINDOW, "layer_types": BOTH},
    "ministral3": {**LLAMA, "sliding_window": WINDOW, "rope_parameters": SCALED},
    "granite": {
        **LLAMA, "attention_multiplier": 0.25, "embedding_multiplier": 2.0, "logits_scaling": 0.5,
        "residual_multiplier": 0.5,
    },
    "olmo2": LLAMA,
    "olmo3": {**LLAMA, "sliding_window": WINDOW, "layer_types": BOTH},
    "apertus": LLAMA,
    "glm": {**LLAMA, "pad_token_id": 0},
    "glm4": {**LLAMA, "pad_token_id": 0},
}  # fmt: skip
EAGER_ONLY = ("gemma2",)
LENGTHS = (17, 9, 12, 1, 7, 13)
MAX_LENGTH = 30


class Pad:
    """What the collators of packs need of a tokenizer: pad is a token that also stands inside rows."""

    pad_token_id = 3


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small to share a step among threads, which then mostly wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def rows() -> Any:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    # A prompt of a quarter of the document is not learnt.
    labels = [[-100] * (len(row) // 4) + row[len(row) // 4 :] for row in ids]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": labels})


def build(family: str, attention: str) -> Any:
    register_varlen()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.train()


def separately(model: Any, rows: Any) -> tuple[list[Any], float, dict[str, Any]]:
    """Logits of each document, the sum of all losses, and its gradients: one document at a time."""
    model.zero_grad()
    logits, total = [], 0.0
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        out = model(input_ids=ids, use_cache=False)
        logits.append(out.logits[0].detach())
        loss = torch.nn.functional.cross_entropy(
            out.logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum"
        )
        loss.backward()
        total += loss.item()
    return logits, total, gradients(model)


def gradients(model: Any) -> dict[str, Any]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def batch_of(rows: Any, kind: str) -> tuple[dict[str, Any], list[int]]:
    """A batch of all packs, and the rows in the order in which the batch holds them."""
    packs = pack_lengths([len(row["input_ids"]) for row in rows], MAX_LENGTH)
    packed = PackedRows(rows, packs)
    samples = [packed[index] for index in range(len(packed))]
    assert len({len(sample["input_ids"]) for sample in samples}) > 1  # one of the packs has a padded tail
    return dict(make_collator(kind, Pad())(samples)), packs.order.tolist()


def worst_difference(batch: dict[str, Any], order: list[int], logits: Any, expected: list[Any]) -> float:
    """The largest difference of a logit of any document; padded tails come after a row's documents."""
    found: dict[int, Any] = {}
    upcoming = iter(order)
    for positions, values in zip(batch["position_ids"], logits.detach(), strict=True):
        starts = [*torch.where(positions == 0)[0].tolist(), len(positions)]
        for start, end in pairwise(starts):
            row = next(upcoming, None)
            if row is not None:
                found[row] = values[start:end]
    assert sorted(found) == list(range(len(expected)))
    return max(float((found[row] - want).abs().max()) for row, want in enumerate(expected))


def assert_same_as_separate(model: Any, rows: Any, kind: str) -> None:
    logits, total, grads = separately(model, rows)
    batch, order = batch_of(rows, kind)
    model.zero_grad()
    out = model(**batch, use_cache=False, num_items_in_batch=1)
    out.loss.backward()
    assert worst_difference(batch, order, out.logits, logits) < 2e-5
    assert out.loss.item() == pytest.approx(total, rel=1e-6)
    found = gradients(model)
    assert found.keys() == grads.keys()
    for name, grad in grads.items():
        # A bias that all keys share, unrotated, moves all scores of a query alike: its gradient is zero, and
        # both of these are rounding (in float64 they are 1e-15).
        zero = model.config.model_type == "opt" and name.endswith("k_proj.bias")
        largest = 0.0 if zero else float(grad.abs().max())
        assert float((found[name] - grad).abs().max()) < 1e-5 * largest + (3e-7 if zero else 1e-7), name


def pairs(attentions: tuple[str, ...], *, apart: bool) -> list[tuple[str, str]]:
    """(Family, attention) with the verdict that the planner reads."""
    return [
        (family, attention)
        for family in CONFIGS
        for attention in attentions
        if (attention in found(family).apart) is apart and (family not in EAGER_ONLY or apart)
    ]


APART = pairs(("eager", "sdpa", "varlen"), apart=True)


BATCHES = [
    (family, attention, kind)
    for family, attention in APART
    for kind in ("packed", "flatten")
    if kind == "flatten" or family != "opt"  # several packs of OPT leak; fix packing-flash-rows refuses them
]


@pytest.mark.parametrize(("family", "attention", "kind"), BATCHES)
def test_packed_documents_compute_what_separate_ones_do(
    rows: Any, family: str, attention: str, kind: str
) -> None:
    assert_same_as_separate(build(family, attention), rows, kind)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(rows: Any, reentrant: bool) -> None:
    model = build("llama", "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same_as_separate(model, rows, "packed")


@pytest.mark.parametrize(("family", "attention"), pairs(("eager", "sdpa"), apart=False))
def test_other_families_do_leak(rows: Any, family: str, attention: str) -> None:
    """One that no longer leaks shows that the record is old."""
    model = build(family, attention)
    logits, _, _ = separately(model, rows)
    batch, order = batch_of(rows, "packed")
    assert worst_difference(batch, order, model(**batch, use_cache=False).logits, logits) > 0.1


@pytest.mark.parametrize(("family", "attention"), APART)
def test_a_mask_or_a_cache_lets_documents_see_each_other(rows: Any, family: str, attention: str) -> None:
    """What the tests above must be able to notice, and why batches have no mask and runs no cache."""
    model = build(family, attention)
    logits, _, _ = separately(model, rows)
    batch, order = batch_of(rows, "packed")
    masked = model(**batch, attention_mask=torch.ones_like(batch["input_ids"]), use_cache=False)
    cached = model(**batch, use_cache=True)
    assert worst_difference(batch, order, masked.logits, logits) > 0.1
    assert worst_difference(batch, order, cached.logits, logits) > 0.1


def test_every_closed_form_is_tried_and_opt_alone_leaks_under_sdpa() -> None:
    assert CONFIGS.keys() == set(LIKE_LLAMA)
    assert pairs(("sdpa",), apart=False) == [("opt", "sdpa")]
    assert ("opt", "varlen") in APART


@pytest.mark.parametrize("family", EAGER_ONLY)
def test_a_family_without_sdpa_says_so(rows: Any, family: str) -> None:
    with pytest.raises(ValueError, match="does not support an attention implementation"):
        build(family, "sdpa")
    model = build(family, "varlen")
    with pytest.raises(ValueError, match="does not know `softcap`"):
        model(**batch_of(rows, "flatten")[0], use_cache=False)


@pytest.mark.parametrize("family", [name for name, _ in pairs(("flash_attention_2",), apart=True)])
def test_sequence_bounds_reach_the_kernel(rows: Any, family: str) -> None:
    """FlashAttention runs on GPUs only; that each family hands it the bounds is seen without one."""
    bounds_kernel.register()
    logits, _, _ = separately(build(family, "eager"), rows)
    model = build(family, bounds_kernel.NAME)
    batch, order = batch_of(rows, "flatten")
    out = model(**batch, use_cache=False)
    assert worst_difference(batch, order, out.logits, logits) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_flex_attention_tells_documents_apart(
    rows: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and capped scores, too; compiled here, and without a backward pass: that is for GPUs alone."""
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # torch sets it, and leaves it set
    logits, _, _ = separately(build(family, "eager"), rows)
    model = build(family, "flex_attention")
    batch, order = batch_of(rows, "flatten")
    with torch.no_grad():
        out = model(**batch, use_cache=False)
    assert worst_difference(batch, order, out.logits, logits) < 2e-5
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        model(**batch, use_cache=False)


def trainer(folder: Any, model: Any, samples: Any, kind: str, **arguments: Any) -> Any:
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=1,
        logging_steps=1,
        learning_rate=0.0,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        per_device_train_batch_size=len(samples),
        per_device_eval_batch_size=len(samples),
        include_num_input_tokens_seen="all",
        dataloader_pin_memory=False,
        **arguments,
    )
    tokenizer = tiny_tokenizer(300)
    return transformers.Trainer(
        model,
        args,
        train_dataset=samples,
        eval_dataset=samples,
        data_collator=make_collator(kind, tokenizer),
    )


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["packed", "flatten"])
def test_the_trainer_learns_and_evaluates_as_without_packing(
    tmp_path: Any, rows: Any, kind: str, lora: bool
) -> None:
    packs = pack_lengths([len(row["input_ids"]) for row in rows], MAX_LENGTH)
    logged = []
    for samples, batches in ((rows, "pad"), (PackedRows(rows, packs), kind)):
        model = build("llama", "sdpa")
        if lora:
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
        runner = trainer(tmp_path, model, samples, batches)
        runner.train()
        step = runner.state.log_history[0]
        logged.append([step["loss"], step["grad_norm"], runner.evaluate()["eval_loss"]])
        if batches == "flatten":
            assert runner.state.num_input_tokens_seen == sum(LENGTHS)
    assert logged[1] == pytest.approx(logged[0], rel=1e-5)


def test_a_trainer_with_a_cache_would_leak(tmp_path: Any, rows: Any) -> None:
    packed = PackedRows(rows, pack_lengths([len(row["input_ids"]) for row in rows], MAX_LENGTH))
    model = build("llama", "sdpa")
    without, with_cache = (
        trainer(tmp_path, model, packed, "packed", use_cache=cache).evaluate()["eval_loss"]
        for cache in (False, True)
    )
    assert abs(without - with_cache) > 1e-3
