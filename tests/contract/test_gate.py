"""The gate before step 1: batches that teach nothing, or not what was asked, stop the run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from launcher.errors import RecipeError
from launcher.train.data.batches import make_collator
from launcher.train.data.build import build_data
from launcher.train.data.encoded import Data
from launcher.train.data.gate import (
    LOOKED_AT,
    _look,
    check_first_batch,
    check_steps,
    check_stream,
    check_truncation,
)
from launcher.train.hooks import OwnCollator
from launcher.train.job import read_job
from launcher.train.model.processing import load_processing
from launcher.train.tiny import tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from plans import prepared, trained, write_run


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(512)


def sample(tokenizer, prompt: str, answer: str, *, eos: bool = True, learnt: bool = True, all_: bool = False):
    first, second = (tokenizer(text)["input_ids"] for text in (prompt, answer))
    ids = first + second + [tokenizer.eos_token_id]
    labels = (first if all_ else [-100] * len(first)) + (second if learnt else [-100] * len(second))
    return {"input_ids": ids, "labels": [*labels, tokenizer.eos_token_id if eos else -100]}


def check(tmp_path, tokenizer, samples, formats=("prompt-completion",), **changes):
    job = read_job(write_run(tmp_path / "run", {k.replace("__", "."): v for k, v in changes.items()}))
    collate = make_collator("pad", tokenizer)
    data = Data(samples, None, collate, None, {}, samples=samples, formats=formats)
    check_first_batch(job, tokenizer, data, 2)


def test_a_good_batch_passes(tmp_path, tokenizer):
    good = [sample(tokenizer, "ask", "answer"), sample(tokenizer, "ask more", "x")]
    check(tmp_path, tokenizer, good, data__loss_on="completion")


def test_flattened_rows_do_without_the_first_label_of_a_sample(tmp_path, tokenizer):
    """Which nothing predicts; any other label that is lost stops the run."""
    good = [sample(tokenizer, "ask", "answer", all_=True), sample(tokenizer, "ask more", "x", all_=True)]
    job = read_job(write_run(tmp_path / "run", {}))
    collate = make_collator("flatten", tokenizer, pad_to_multiple_of=8)
    check_first_batch(job, tokenizer, Data(good, None, collate, None, {}, samples=good), 2)

    def loses(samples):
        batch = collate(samples)
        batch["labels"][0, 1] = -100
        return batch

    with pytest.raises(RecipeError) as caught:
        check_first_batch(job, tokenizer, Data(good, None, loses, None, {}, samples=good), 2)
    assert [problem.code for problem in caught.value.problems] == ["targets-lost"]


@pytest.mark.parametrize(("masked", "code"), [(2, None), (None, "no-targets")])
def test_a_collator_of_the_file_may_mask_more_but_not_all(tmp_path, tokenizer, masked, code):
    good = [sample(tokenizer, "ask", "answer", all_=True), sample(tokenizer, "ask more", "x", all_=True)]
    job, pad = read_job(write_run(tmp_path / "run", {})), make_collator("pad", tokenizer)

    def masks(samples):
        batch = pad(samples)
        batch["labels"][:, :masked] = -100
        return batch

    data = Data(good, None, OwnCollator(tmp_path / "hooks.py", masks), None, {}, samples=good)
    if code is None:
        check_first_batch(job, tokenizer, data, 2)
        return
    with pytest.raises(RecipeError) as caught:
        check_first_batch(job, tokenizer, data, 2)
    assert [problem.code for problem in caught.value.problems] == [code]


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
    inner = {name: ids[:-1] for name, ids in cut.items()}
    check(tmp_path / "inner", tokenizer, [inner] * 2)


def test_one_learnt_end_in_a_sample_is_enough(tmp_path, tokenizer):
    """Templates write a line break after the token that closes a turn."""
    good = sample(tokenizer, "ask", "answer", all_=True)
    line = tokenizer("\n")["input_ids"]
    good = {name: ids + line for name, ids in good.items()}
    check(tmp_path, tokenizer, [good] * 2, data__loss_on="all")


def test_a_mask_without_effect_stops(tmp_path, tokenizer):
    bad = [sample(tokenizer, "ask", "answer", all_=True)] * 2
    with pytest.raises(RecipeError, match="loss_on completion masks no token"):
        check(tmp_path, tokenizer, bad, data__loss_on="completion")
    check(tmp_path / "all", tokenizer, bad, data__loss_on="all")


def test_a_default_mask_without_effect_stops_too(tmp_path, tokenizer):
    bad = [sample(tokenizer, "ask", "answer", all_=True)] * 2
    for formats in (("instruction",), ("chat",), ("chat", "prompt-completion")):
        with pytest.raises(
            RecipeError, match=r"loss_on (assistant|completion|assistant or completion) masks"
        ):
            check(tmp_path / "-".join(formats), tokenizer, bad, formats)
    check(tmp_path / "text", tokenizer, bad, ("text",))
    # The first samples may all be of the source that learns everything.
    check(tmp_path / "mixed", tokenizer, bad, ("text", "chat"))


CHATML = "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eos|>\n{% endfor %}"


def test_a_template_that_ends_turns_with_a_line_break_passes(tmp_path, tokenizer):
    talk = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Two."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for loss_on in ("all", None):
        changes = {
            "tiny": False,
            "model.tokenizer": str(tmp_path / "tokenizer"),
            "model.chat_template": CHATML,
            "data.train": [{"path": str(tmp_path / "chats.jsonl")}],
            "data.loss_on": loss_on,
        }
        looked(prepared(tmp_path / str(loss_on), changes), 2)


def looked(run: Path, micro_batch: int) -> None:
    """The gate of a run directory, as the worker holds it."""
    job = read_job(run)
    processing = load_processing(job)
    check_first_batch(job, processing, build_data(job, processing), micro_batch)


@pytest.mark.parametrize("how", ["streamed", "prepared"])
def test_pieces_of_long_texts_beside_fill_in_the_middle_pass(tmp_path, tokenizer, how):
    """Most pieces stay plain and have no EOS: their text goes on in the next one."""
    text = "def add(a, b):\n    return a + b\n\n\n" * 120
    (tmp_path / "code.jsonl").write_text((json.dumps({"text": text}) + "\n") * 4)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    changes = {
        "tiny": False,
        "model.tokenizer": str(tmp_path / "tokenizer"),
        "data.train": [{"path": str(tmp_path / "code.jsonl")}],
    }
    if how == "streamed":
        changes |= {"data.streaming": True, "data.packing": True}
    changes["data.fim"] = {"rate": 0.02, "spm_rate": 0.5}
    for seed in range(8):
        looked(prepared(tmp_path / f"run-{seed}", {**changes, "seed": seed}), 1)


def test_every_process_judges_the_same_samples_of_a_stream(tmp_path, tokenizer, monkeypatch):
    rows = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(200))
    (tmp_path / "rows.jsonl").write_text(rows)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    changes = {
        "tiny": False,
        "model.tokenizer": str(tmp_path / "tokenizer"),
        "data.train": [{"path": str(tmp_path / "rows.jsonl")}],
        "data.streaming": True,
        "data.packing": True,
    }
    job = read_job(prepared(tmp_path / "run", changes))
    data = build_data(job, load_processing(job))
    monkeypatch.setenv("WORLD_SIZE", "2")
    looks = []
    for number in ("0", "1"):
        monkeypatch.setenv("RANK", number)
        looks.append(_look(data, 2))
    assert looks[0] == looks[1]
    batch, samples = looks[0]
    assert (len(batch), len(samples)) == (2, LOOKED_AT)
    assert len(samples[0]["input_ids"]) < len(batch[0]["input_ids"])


def test_the_warning_about_special_tokens_of_a_stream_names_them_and_a_row(tmp_path, tokenizer, capsys):
    rows = [{"text": "plain"}, {"text": f"a {tokenizer.eos_token} b"}, {"text": f"c {tokenizer.eos_token}"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    changes = {
        "tiny": False,
        "model.tokenizer": str(tmp_path / "tokenizer"),
        "data.train": [{"path": str(tmp_path / "rows.jsonl")}],
        "data.streaming": True,
    }
    job = read_job(prepared(tmp_path / "run", changes))
    capsys.readouterr()
    check_stream(job, tokenizer)
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("WARNING")]
    assert f"2 with {tokenizer.eos_token} " in line
    assert re.search(r"rows\.jsonl:[23]\b", line)


def test_a_collator_that_masks_real_tokens_stops(tmp_path, tokenizer):
    """What DataCollatorForLanguageModeling does when pad is EOS."""
    good = [sample(tokenizer, "ask", "answer"), sample(tokenizer, "ask more", "x")]
    job = read_job(write_run(tmp_path / "run", {}))
    plain = make_collator("pad", tokenizer)

    def masks_eos(samples):
        batch = plain(samples)
        batch["labels"][batch["input_ids"] == tokenizer.eos_token_id] = -100
        return batch

    with pytest.raises(RecipeError) as caught:
        check_first_batch(job, tokenizer, Data(good, None, masks_eos, None, {}, samples=good), 2)
    assert [problem.code for problem in caught.value.problems] == ["targets-lost"]


def test_truncation_is_held_against_what_the_recipe_allows():
    counts = {"tokens": 1000, "tokens_lost": 250, "truncated": 10, "read": 40}
    record = {"splits": {"train": {"counts": counts}}}
    check_truncation(SimpleNamespace(data=SimpleNamespace(max_truncated=0.25)), record)
    with pytest.raises(RecipeError, match=r"25.0% of the train tokens were cut off, in 10 of 40 rows"):
        check_truncation(SimpleNamespace(data=SimpleNamespace(max_truncated=0.2)), record)


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


def rows_without_collator(count, *, streaming=False):
    rows = [{}] * count
    train = iter(rows) if streaming else rows
    return Data(train=train, eval=None, collate=None, labels=None, counts={}, streaming=streaming)


def test_fewer_samples_than_one_batch_for_each_process_are_refused():
    with pytest.raises(RecipeError) as caught:
        check_steps(rows_without_collator(15), 4, 4, drop_last=True)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("no-steps", "trainer.dataloader_drop_last")
    assert "15 samples are fewer than 4 batches of 4" in problem.message


def test_what_still_has_a_step_is_accepted():
    check_steps(rows_without_collator(16), 4, 4, drop_last=True)
    check_steps(rows_without_collator(1), 4, 4, drop_last=False)
    check_steps(rows_without_collator(1, streaming=True), 4, 4, drop_last=True)
