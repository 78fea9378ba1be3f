"""Rows that are tokenised already train what their texts would, and `prepare --show` shows them."""

from __future__ import annotations

import json

import pytest
from grounds import tokenizer_of_1024_words, write_rows
from launched import effilaunch, losses

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm")
RECIPE = """\
model:
  config: {model_type: llama, vocab_size: 1024, hidden_size: 64, intermediate_size: 128,
           num_hidden_layers: 2, num_attention_heads: 4, max_position_embeddings: 128}
  tokenizer: tokenizer
data: {train: [{path: rows.jsonl}], max_length: 32}
global_batch_size: 4
trainer: {max_steps: 4, learning_rate: 1.0e-2, logging_steps: 1, save_strategy: "no"}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer_of_1024_words().save_pretrained("tokenizer")
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    return tmp_path


def write_texts(folder):
    """Prompts and completions, and the same tokenised by the library."""
    texts = [{"prompt": f"w{n} w9 w3", "completion": f" w{n + 1} w7 w{n + 2}"} for n in range(32)]
    tokenizer, rows = tokenizer_of_1024_words(), []
    for text in texts:
        prompt = tokenizer(text["prompt"])["input_ids"]
        answer = tokenizer(text["completion"], add_special_tokens=False)["input_ids"]
        answer = [*answer, *[tokenizer.eos_token_id] * (answer[-1] != tokenizer.eos_token_id)]
        prompt = prompt[:-1] if prompt[-1] == tokenizer.eos_token_id else prompt
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    write_rows(folder / "rows.jsonl", texts)
    write_rows(folder / "ids.jsonl", [{**row, "attention_mask": [1] * len(row["labels"])} for row in rows])


def test_they_train_what_their_texts_would(folder):
    write_texts(folder)
    effilaunch("run", "r.yaml", "--on", "cpu", "--output-dir", "texts")
    ids = ("--set", "data.train[0].path=ids.jsonl")
    shown = effilaunch("prepare", "r.yaml", "--on", "cpu", "--show", 1, *ids)
    assert shown["data"]["splits"]["train"]["sources"][0]["format"] == "token-ids"
    ((first, is_first), (rest, is_rest)) = shown["samples"][0]["pieces"]
    assert (first.split(), is_first) == (["w0", "w9", "w3"], False)
    assert (rest.split()[:3], is_rest) == (["w1", "w7", "w2"], True)
    effilaunch("run", "r.yaml", "--on", "cpu", "--output-dir", "ids", *ids)
    assert losses(folder / "ids") == losses(folder / "texts")
    assert len(losses(folder / "ids")) == 4


def test_an_id_beyond_the_vocabulary_names_its_row(folder):
    write_rows(folder / "rows.jsonl", [{"input_ids": [5, 6], "labels": [-100, 6]}] * 3)
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"input_ids": [5, 99999], "labels": [-100, 99999]}) + "\n")
    (error,) = effilaunch("prepare", "r.yaml", "--on", "cpu", expect=2)["errors"]
    assert (error["code"], error["line"]) == ("unknown-token", 4)


def test_a_choice_of_tokens_is_refused(folder):
    write_rows(folder / "rows.jsonl", [{"input_ids": [5, 6], "labels": [-100, 6]}] * 3)
    asked = ("--on", "cpu", "--set", "data.loss_on=all")
    named = ("--set", "data.train[0].format=token-ids")
    (error,) = effilaunch("plan", "r.yaml", *asked, *named, expect=2)["errors"]
    assert error["path"] == "data.loss_on"
    (error,) = effilaunch("prepare", "r.yaml", *asked, expect=2)["errors"]
    assert (error["code"], error["path"]) == ("loss-on", "data.loss_on")
