"""Where a script cuts its rows, and what it does to them on the way."""

from __future__ import annotations

import textwrap

import pytest

from launcher.importing import script
from launcher.importing.found import Effect, Reading

ALPACA = """
    def train(cutoff_len: int = 256, data_path: str = "a/b", check: int = 0):
        def tokenize(prompt):
            return tokenizer(prompt, truncation=True, max_length=cutoff_len, padding=False)
        def make_prompt(row):
            return tokenize(row["instruction"])
        if data_path.endswith(".json"):
            data = load_dataset("json", data_files=data_path)
        else:
            data = load_dataset(data_path)
        if check:
            rows = data["train"].map(make_prompt)
        Trainer(args=TrainingArguments("out"), train_dataset=rows)
"""


def read(text: str) -> Reading:
    return script.read("from transformers import *\n" + textwrap.dedent(text), "train.py")


def rows(body: str) -> Reading:
    return read(f"def prepare(row):\n    {body}\nTrainer(args=TrainingArguments('out'))\n")


def dropped(made: Reading) -> set[tuple[str, str, Effect]]:
    return {(entry.key, entry.value, entry.effect) for entry in made.dropped}


def test_a_length_from_the_function_around() -> None:
    made = read(ALPACA)
    assert made.value("data.max_length") == 256
    assert made.value("data.overlong") == "truncate"
    assert made.taken["data.max_length"].note.startswith("default of the parameter cutoff_len")


def test_a_prompt_whose_rows_are_not_found_still_needs_a_word() -> None:
    assert {"data.train", "rows: make_prompt"} <= {
        entry.key for entry in read(ALPACA).dropped if entry.effect is Effect.NEEDED
    }


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("return tokenizer(row['a'], max_length=512, truncation=True)", 512),
        ("return tokenizer.encode(row['a'], max_length=512)", 512),
        ("return tokenizer(row['a'], max_length=512, padding='max_length')", None),
        ("return tokenizer(row['a'], max_length=512, truncation=False)", None),
        ("return model.generate(row['a'], max_length=512)", None),
    ],
)
def test_what_cuts_and_what_does_not(body: str, wanted: int | None) -> None:
    made = rows(body)
    assert made.value("data.max_length") == wanted
    assert ("data.max_length" in {entry.key for entry in made.dropped}) == (wanted is None)


@pytest.mark.parametrize(
    "labels",
    [
        "y = tokenizer(text_target=row['b'], max_length=128, truncation=True)",
        "with tokenizer.as_target_tokenizer(): y = tokenizer(row['b'], max_length=128, truncation=True)",
    ],
)
def test_the_length_of_labels_is_listed(labels: str) -> None:
    made = rows(f"x = tokenizer(row['a'], max_length=1024, truncation=True)\n    {labels}")
    assert made.value("data.max_length") == 1024
    assert ("max_length", "128", Effect.TRAINING) in dropped(made)


def test_several_lengths_are_listed_and_none_is_taken() -> None:
    made = rows("a = tokenizer(row, max_length=64)\n    b = tokenizer(row, max_length=32)")
    assert made.value("data.max_length") is None
    assert {said for key, said, _ in dropped(made) if key == "max_length"} == {"64", "32"}


def test_trl_cuts_at_its_own_length_and_not_at_the_tokenizers() -> None:
    tokenizer = "tok = AutoTokenizer.from_pretrained('a/b', model_max_length=4096)\n"
    assert read(f"{tokenizer}SFTConfig('out')").value("data.max_length") == 1024
    assert read(f"{tokenizer}TrainingArguments('out')").value("data.max_length") == 4096


@pytest.mark.parametrize(
    "text",
    [
        "rows = load_dataset('a/b')['train'].with_transform(crop)",
        "rows = load_dataset('a/b')['train']\nrows.set_transform(crop)",
    ],
)
def test_a_transform_of_images_is_listed_and_their_length_is_not_asked_for(text: str) -> None:
    made = read(
        f"model = AutoModelForImageClassification.from_pretrained('a/b')\n{text}\n"
        "Trainer(model, TrainingArguments('out'), train_dataset=rows)\n"
    )
    keys = {entry.key: entry.effect for entry in made.dropped}
    assert keys[next(key for key in keys if "_transform" in key)] is Effect.TRAINING
    assert "data.max_length" not in keys


def test_a_tokenizer_by_what_made_it() -> None:
    made = read(
        "tok = AutoTokenizer.from_pretrained('a/b')\nmodel = AutoModelForCausalLM.from_pretrained('a/b')\n"
        "rows = load_dataset('a/c')['train'].map(lambda r: tok(r['body'], truncation=True, max_length=99))\n"
        "Trainer(model, TrainingArguments('out'), train_dataset=rows)\n"
    )
    assert made.value("data.max_length") == 99
    assert made.value("data.train") == [{"path": "a/c", "format": "text", "columns": {"text": "body"}}]
    assert not [entry.key for entry in made.dropped if entry.effect is Effect.NEEDED]


@pytest.mark.parametrize("name", ["is_bfloat16_supported", "torch.cuda.is_bf16_supported"])
def test_the_precision_that_the_card_has(name: str) -> None:
    made = read(f"TrainingArguments('out', bf16={name}(), fp16=not {name}())")
    assert made.value("precision") == "auto"
