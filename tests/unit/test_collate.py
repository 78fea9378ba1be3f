"""Batches: padding never decides what is learnt, packs carry no mask, documents stay apart."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from launcher.train.data.batches import make_collator  # noqa: E402
from launcher.train.tiny import tiny_tokenizer  # noqa: E402

PACKS = [
    {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, -100], "position_ids": [0, 1, 2, 0]},
    {"input_ids": [5, 6], "labels": [-100, 6], "position_ids": [0, 1]},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = tiny_tokenizer(300)
    made.pad_token = made.eos_token
    made.padding_side = "left"
    return made


def lists(batch: Any) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in batch.items()}


def test_an_end_of_text_inside_a_row_is_attended_to_and_learnt(tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    rows = [
        {"input_ids": [7, eos, 8, eos], "labels": [7, eos, 8, eos]},
        {"input_ids": [9, eos], "labels": [-100, eos]},
    ]
    batch = lists(make_collator("pad", tokenizer)(rows))
    assert batch == {
        "input_ids": [[7, eos, 8, eos], [9, eos, eos, eos]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
        "labels": [[7, eos, 8, eos], [-100, eos, -100, -100]],
    }
    assert tokenizer.padding_side == "left"


def test_padding_to_a_multiple_keeps_ids_and_labels_alike(tokenizer: Any) -> None:
    rows = [{"input_ids": [7, 8, 9], "labels": [7, 8, 9]}]
    batch = make_collator("pad", tokenizer, pad_to_multiple_of=8)(rows)
    assert {name: value.shape[1] for name, value in batch.items()} == dict.fromkeys(batch, 8)


def test_a_tokenizer_that_names_no_mask_gets_one(tokenizer: Any) -> None:
    bare = tiny_tokenizer(300)
    bare.model_input_names = ["input_ids"]
    batch = make_collator("pad", bare)(
        [{"input_ids": [7, 8], "labels": [7, 8]}, {"input_ids": [9], "labels": [9]}]
    )
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_classes_are_stacked(tokenizer: Any) -> None:
    rows = [
        {"input_ids": [7, 8], "token_type_ids": [0, 1], "labels": 2},
        {"input_ids": [9], "token_type_ids": [0], "labels": 0},
    ]
    batch = make_collator("pad", tokenizer)(rows)
    assert batch["labels"].tolist() == [2, 0]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["token_type_ids"].shape == (2, 2)


def test_the_padded_tail_of_a_pack_is_a_document_of_its_own(tokenizer: Any) -> None:
    pad = tokenizer.pad_token_id
    assert lists(make_collator("packed", tokenizer)(PACKS)) == {
        "input_ids": [[1, 2, 3, 4], [5, 6, pad, pad]],
        "labels": [[-100, 2, 3, -100], [-100, 6, -100, -100]],
        "position_ids": [[0, 1, 2, 0], [0, 1, 0, 1]],
    }
    wide = make_collator("packed", tokenizer, pad_to_multiple_of=8)(PACKS)
    assert wide["position_ids"].tolist()[0] == [0, 1, 2, 0, 0, 1, 2, 3]


def test_packs_are_flattened_document_by_document(tokenizer: Any) -> None:
    assert lists(make_collator("flatten", tokenizer)(PACKS)) == {
        "input_ids": [[1, 2, 3, 4, 5, 6]],
        "labels": [[-100, 2, 3, -100, -100, 6]],
        "position_ids": [[0, 1, 2, 0, 0, 1]],
        "cu_seq_lens_q": [0, 3, 4, 6],
        "cu_seq_lens_k": [0, 3, 4, 6],
        "max_length_q": 3,
        "max_length_k": 3,
    }


def test_the_padded_tail_of_a_flattened_row_is_a_document_of_its_own(tokenizer: Any) -> None:
    pad = tokenizer.pad_token_id
    rows = [
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3]},
        {"input_ids": [], "labels": []},
        {"input_ids": [5, 6], "labels": [-100, 6]},
    ]
    assert lists(make_collator("flatten", tokenizer, pad_to_multiple_of=8)(rows)) == {
        "input_ids": [[1, 2, 3, 5, 6, pad, pad, pad]],
        "labels": [[-100, 2, 3, -100, 6, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2]],
        "cu_seq_lens_q": [0, 3, 5, 8],
        "cu_seq_lens_k": [0, 3, 5, 8],
        "max_length_q": 3,
        "max_length_k": 3,
    }
    even = make_collator("flatten", tokenizer, pad_to_multiple_of=5)(rows)
    assert even["cu_seq_lens_q"].tolist() == [0, 3, 5]


@pytest.mark.parametrize("kind", ["pad", "packed", "flatten"])
def test_collators_pickle(tokenizer: Any, kind: str) -> None:
    collate = make_collator(kind, tokenizer)
    again = pickle.loads(pickle.dumps(collate))
    assert lists(again(PACKS[:1])) == lists(collate(PACKS[:1]))
