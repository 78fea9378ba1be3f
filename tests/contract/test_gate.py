"""The gate before step 1: batches that teach nothing, or not what was asked, stop the run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from launcher.errors import RecipeError
from launcher.train.data.build import Data
from launcher.train.data.collate import make_collator
from launcher.train.data.gate import check_first_batch, check_truncation
from launcher.train.job import read_job
from launcher.train.tiny import tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from plans import trained, write_run


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(512)


def sample(tokenizer, prompt: str, answer: str, *, eos: bool = True, learnt: bool = True, all_: bool = False):
    first, second = (tokenizer(text)["input_ids"] for text in (prompt, answer))
    ids = first + second + [tokenizer.eos_token_id]
    labels = (first if all_ else [-100] * len(first)) + (second if learnt else [-100] * len(second))
    return {"input_ids": ids, "labels": [*labels, tokenizer.eos_token_id if eos else -100]}


def check(tmp_path, tokenizer, samples, **changes):
    job = read_job(write_run(tmp_path / "run", {k.replace("__", "."): v for k, v in changes.items()}))
    collate = make_collator("pad", tokenizer)
    check_first_batch(job, tokenizer, Data(samples, None, collate, None, {}, samples=samples), 2)


def test_a_good_batch_passes(tmp_path, tokenizer):
    good = [sample(tokenizer, "ask", "answer"), sample(tokenizer, "ask more", "x")]
    check(tmp_path, tokenizer, good, data__loss_on="completion")


def test_no_learnt_token_stops_and_shows_the_sample(tmp_path, tokenizer):
    bad = [sample(tokenizer, "ask", "answer", eos=False, learnt=False)] * 2
    with pytest.raises(RecipeError, match="no token of the first batch carries loss") as caught:
        check(tmp_path, tokenizer, bad)
    assert "askanswer" in str(caught.value)


def test_a_masked_end_stops(tmp_path, tokenizer):
    bad = [sample(tokenizer, "ask", "answer", eos=False)] * 2
    with pytest.raises(RecipeError, match="its end carries no loss") as caught:
        check(tmp_path, tokenizer, bad)
    assert "ask⟦answer⟧" in str(caught.value)


def test_samples_without_an_end_of_their_own_prove_nothing(tmp_path, tokenizer):
    cut = sample(tokenizer, "ask", "answer", eos=False)
    check(tmp_path, tokenizer, [cut] * 2, data__max_length=len(cut["input_ids"]))


def test_a_mask_without_effect_stops(tmp_path, tokenizer):
    bad = [sample(tokenizer, "ask", "answer", all_=True)] * 2
    with pytest.raises(RecipeError, match="loss_on completion masks no token"):
        check(tmp_path, tokenizer, bad, data__loss_on="completion")
    check(tmp_path / "all", tokenizer, bad, data__loss_on="all")


def test_a_collator_that_masks_real_tokens_stops(tmp_path, tokenizer):
    """What DataCollatorForLanguageModeling does when pad is EOS."""
    good = [sample(tokenizer, "ask", "answer"), sample(tokenizer, "ask more", "x")]
    job = read_job(write_run(tmp_path / "run", {}))
    plain = make_collator("pad", tokenizer)

    def masks_eos(samples):
        batch = plain(samples)
        batch["labels"][batch["input_ids"] == tokenizer.eos_token_id] = -100
        return batch

    with pytest.raises(RecipeError, match="learnt tokens"):
        check_first_batch(job, tokenizer, Data(good, None, masks_eos, None, {}, samples=good), 2)


def test_truncation_is_held_against_what_the_recipe_allows():
    counts = {"tokens": 1000, "tokens_lost": 250, "truncated": 10, "read": 40}
    record = {"splits": {"train": {"counts": counts}}}
    check_truncation(SimpleNamespace(value=lambda *_: 0.25), record)
    with pytest.raises(RecipeError, match=r"25.0% of the train tokens were cut off, in 10 of 40 rows"):
        check_truncation(SimpleNamespace(value=lambda *_: 0.2), record)


@pytest.mark.parametrize("packing", [False, True])
def test_the_gate_stands_in_the_way_of_a_run(tmp_path, monkeypatch, packing):
    """The real worker, with samples whose labels were spoilt after they were prepared."""
    from launcher.train.data import build

    real = build.open_samples

    def spoilt(path):
        return real(path).map(lambda row: {"labels": [-100] * len(row["labels"])})

    monkeypatch.setattr(build, "open_samples", spoilt)
    with pytest.raises(RecipeError, match="no token of the first batch carries loss"):
        trained(tmp_path / "run", {"data.packing": packing})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
