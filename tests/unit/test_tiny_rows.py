"""The stand-ins of `--tiny`: rows of every format, and a tokenizer that fits any of them."""

from __future__ import annotations

import io

import pytest

from launcher.recipe.field_tables import TASK_FORMATS
from launcher.rows.class_names import collect_labels
from launcher.rows.recognise import canonical, detect
from launcher.train.data.made_up import tiny_rows
from launcher.train.tiny import ROWS, tiny_tokenizer


@pytest.mark.parametrize(
    ("task", "fmt"), [(task, fmt) for task, all_ in TASK_FORMATS.items() for fmt in all_]
)
def test_generated_rows_have_their_format(task, fmt):
    rows = tiny_rows({"path": "data/x.jsonl", "format": fmt, "columns": {}}, task)
    assert len(rows) == ROWS
    detected = detect(rows, "auto", {}, task, "data/x.jsonl")
    assert detected.format == fmt
    shapes = [canonical(row, detected).values for row in rows]
    if "label" in shapes[0]:
        labels = collect_labels(rows)
        assert len(labels) == (2 if task == "kto" else 3)
    if fmt == "chat":
        assert {len(shape["messages"]) for shape in shapes} == {2, 3}


@pytest.mark.parametrize(
    ("source", "loss_on", "columns"),
    [
        ({"format": "auto"}, None, {"text"}),
        ({"columns": {"completion": "solution"}}, None, {"prompt", "completion"}),
        ({}, "assistant", {"messages"}),
        ({}, "completion", {"instruction", "input", "output"}),
        ({"format": "chat"}, "completion", {"messages"}),
    ],
)
def test_generated_rows_of_a_source_without_format(source, loss_on, columns):
    rows = tiny_rows({"path": "x", **source}, "causal-lm", loss_on)
    assert set(rows[0].values) == columns


def test_generated_pictures_show_their_label():
    from PIL import Image

    for row in tiny_rows({"path": "x"}, "image-classification")[:6]:
        picture = Image.open(io.BytesIO(row.values["image"]))
        assert picture.size == (32, 32)
        pixel = picture.getpixel((0, 0))
        assert ("red", "green", "blue")[pixel.index(max(pixel))] == row.values["label"]


@pytest.mark.parametrize("vocab_size", [263, 512, 50_000])
def test_the_generated_tokenizer(vocab_size):
    tokenizer = tiny_tokenizer(vocab_size)
    assert len(tokenizer) <= min(vocab_size, 512)
    special = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id]
    names = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
    special += tokenizer.convert_tokens_to_ids(names)
    assert len(set(special)) == 7
    assert None not in special
    assert tokenizer("<fim_middle>")["input_ids"] == [special[4]]
    ids = tokenizer("a<fim_prefix>b ü\n")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab ü\n"
