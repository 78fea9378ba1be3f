"""Rows to token ids and labels: what is learnt, what is cut, what is left out, and how it is counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from every import every

pytest.importorskip("torch")

from launcher.errors import RecipeError
from launcher.rows.sources import Row
from launcher.train.data.encoded import _plain_backend, cut, token_ids
from launcher.train.job import Job
from launcher.train.model.processing import ensure_pad_token
from launcher.train.tasks import train_task
from launcher.train.tiny import tiny_tokenizer


def job_with(**settings):
    known = {"task": "causal-lm", "data.max_length": 64, "seed": 7, "model.name_or_path": "package:mine"}
    known |= dict.fromkeys(
        ("data.overlong", "data.loss_on", "data.fim", "model.tokenizer", "model.chat_template")
    )
    known.update({name.replace("__", "."): value for name, value in settings.items()})
    return Job(Path("run"), {"settings": {name: {"value": value} for name, value in known.items()}})


def encoder(tokenizer, fmt, labels=None, **settings):
    job = job_with(**settings)
    return train_task(job.task.name).encoder(job, tokenizer, SimpleNamespace(format=fmt, columns={}), labels)


def rows_of(*values):
    return [Row(dict(value), "rows.jsonl", number) for number, value in enumerate(values, 1)]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(512)


@pytest.fixture(scope="module")
def eos_padded():
    """The hard case: a tokenizer whose pad token is its EOS."""
    tokenizer = tiny_tokenizer(512)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@pytest.fixture(scope="module")
def both_ends():
    """A tokenizer that writes BOS before and EOS after every text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer(512)
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|bos|>", "<|eos|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A <|eos|>", pair="<|bos|> $A <|eos|> $B:1 <|eos|>:1", special_tokens=special
    )
    return tokenizer


TEXTS = [
    "a red stone",
    "",
    "  \n",
    "How many blue birds are there? " * 9,
    "<|eos|>",
    "ends <|eos|>",
    "é☺ 漢字",
    "x",
]


def slow_text(tokenizer, text, max_length, overlong):
    """Row by row, what a text becomes."""
    ids = tokenizer.encode(text)
    if not ids or ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    if not text.strip():
        return []
    if len(ids) > max_length:
        if overlong == "drop":
            return []
        if overlong == "truncate":
            ids = ids[:max_length]
    count, rest = divmod(len(ids), max_length)
    sizes = [max_length] * count + ([rest] if rest else [])
    if rest == 1 and count:
        sizes[-2:] = [max_length - 1, 2]
    pieces = []
    for size in sizes:
        pieces.append(ids[:size])
        ids = ids[size:]
    return [piece for piece in pieces if len(piece) > 1]


@pytest.mark.parametrize("overlong", [None, "split", "truncate", "drop"])
@pytest.mark.parametrize("max_length", [8, 13, 512])
@pytest.mark.parametrize("kind", ["tokenizer", "eos_padded", "both_ends"])
def test_text_in_batches_equals_text_row_by_row(request, kind, max_length, overlong):
    tokenizer = request.getfixturevalue(kind)
    encode = encoder(tokenizer, "text", data__max_length=max_length, data__overlong=overlong)
    batch = encode(rows_of(*[{"text": text} for text in TEXTS]))
    pieces = [slow_text(tokenizer, text, max_length, overlong or "split") for text in TEXTS]
    expected = [piece for each in pieces for piece in each]
    assert batch.rows == [row for row, each in enumerate(pieces) for _ in each]
    assert batch.columns == {"input_ids": expected, "labels": expected}
    assert batch.kept + sum(batch.dropped.values()) == len(TEXTS)
    assert batch.dropped["empty"] == 2


def test_the_columns_are_not_one_list(tokenizer):
    batch = encoder(tokenizer, "text")(rows_of({"text": "a text"}))
    assert batch.columns["input_ids"][0] is not batch.columns["labels"][0]


def test_split_keeps_every_token_and_one_eos(tokenizer):
    text = "How many red stones are there? " * 40
    batch = encoder(tokenizer, "text", data__max_length=32)(rows_of({"text": text}))
    pieces = batch.columns["input_ids"]
    joined = [token for piece in pieces for token in piece]
    assert tokenizer.decode(joined) == text + "<|eos|>"
    assert [tokenizer.eos_token_id in piece for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (batch.kept, batch.split, batch.truncated, batch.tokens_lost) == (1, 1, 0, 0)
    assert batch.tokens == len(joined)


@every("length", range(1, 40))
def test_no_chunk_is_too_short_to_learn(length):
    for size in (3, 8, 13):
        chunks = cut(list(range(length)), size)
        assert [token for chunk in chunks for token in chunk] == list(range(length))
        assert all(len(chunk) <= size for chunk in chunks)
        assert len(chunks) == -(-length // size)
        assert len(chunks) == 1 or min(map(len, chunks)) > 1


def test_truncation_keeps_the_beginning_adds_no_eos_and_is_counted(tokenizer):
    text = "one two three four five six seven eight"
    encode = encoder(tokenizer, "text", data__max_length=8, data__overlong="truncate")
    batch = encode(rows_of({"text": text}))
    whole = [*tokenizer.encode(text), tokenizer.eos_token_id]
    assert batch.columns["input_ids"] == [whole[:8]]
    assert (batch.truncated, batch.split) == (1, 0)
    assert (batch.tokens, batch.tokens_lost) == (len(whole), len(whole) - 8)


def test_overlong_rows_can_be_dropped(tokenizer):
    encode = encoder(tokenizer, "text", data__max_length=8, data__overlong="drop")
    batch = encode(rows_of({"text": "one two three four five six"}, {"text": "a b"}))
    assert (batch.kept, batch.dropped, batch.truncated) == (1, {"overlong": 1}, 0)


def test_eos_is_learnt_even_when_it_pads(eos_padded):
    from transformers import DataCollatorForSeq2Seq

    batch = encoder(eos_padded, "prompt-completion")(
        rows_of(
            {"prompt": "Say one. ", "completion": "one"},
            {"prompt": "Say a long thing. ", "completion": "one two three four five"},
        )
    )
    columns = batch.columns
    samples = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    padded = DataCollatorForSeq2Seq(eos_padded)(samples)
    labels, length = padded["labels"][0], len(columns["input_ids"][0])
    assert labels.shape[0] > length
    assert labels[length - 1] == eos_padded.eos_token_id
    assert (labels[length:] == -100).all()


PAIRS = [
    {"prompt": "Ask: ", "completion": "reply"},
    {"prompt": "", "completion": "no prompt"},
    {"prompt": "no answer", "completion": ""},
    {"prompt": "", "completion": " "},
    {"prompt": "long " * 30, "completion": "reply"},
    {"prompt": "x", "completion": "long " * 30},
    {"prompt": "done", "completion": "already<|eos|>"},
]


@pytest.mark.parametrize("loss_on", [None, "completion", "all"])
@pytest.mark.parametrize("fmt", ["prompt-completion", "instruction"])
@pytest.mark.parametrize("kind", ["tokenizer", "both_ends"])
def test_pairs_in_batches_equal_pairs_row_by_row(request, kind, fmt, loss_on):
    tokenizer = request.getfixturevalue(kind)
    eos = tokenizer.eos_token_id
    inputs, labels, kept = [], [], []
    for number, row in enumerate(PAIRS):
        prompt = tokenizer.encode(row["prompt"])
        if kind == "both_ends":
            assert prompt.pop() == eos
        answer = tokenizer.encode(row["completion"], add_special_tokens=False)
        if not answer or answer[-1] != eos:
            answer.append(eos)
        masked = prompt if loss_on == "all" else [-100] * len(prompt)
        ids, learnt = (prompt + answer)[:32], (masked + answer)[:32]
        if row["completion"].strip() and any(label != -100 for label in learnt[1:]):
            kept.append(number)
            inputs.append(ids)
            labels.append(learnt)
    encode = encoder(tokenizer, fmt, data__max_length=32, data__loss_on=loss_on)
    batch = encode(rows_of(*PAIRS))
    assert batch.columns == {"input_ids": inputs, "labels": labels}
    assert batch.truncated == 2
    expected = {"empty": 2} if loss_on == "all" else {"empty": 2, "no-targets": 1}
    assert batch.dropped == expected
    assert batch.kept == len(inputs)
    assert batch.rows == kept


def test_prompt_is_masked(tokenizer):
    batch = encoder(tokenizer, "prompt-completion")(rows_of({"prompt": "Ask: ", "completion": "reply"}))
    assert tokenizer.decode(batch.columns["input_ids"][0]) == "Ask: reply<|eos|>"
    learnt = [label for label in batch.columns["labels"][0] if label != -100]
    assert tokenizer.decode(learnt) == "reply<|eos|>"


def test_a_single_learnable_token_at_the_start_counts_as_none(tokenizer):
    encode = encoder(tokenizer, "text", data__max_length=1, data__overlong="truncate")
    batch = encode(rows_of({"text": "hello"}))
    assert batch.dropped == {"no-targets": 1}  # labels are shifted by one
    assert batch.columns["input_ids"] == []


def test_a_batch_of_no_rows(tokenizer):
    for fmt in ("text", "prompt-completion", "chat"):
        assert encoder(tokenizer, fmt)([]).columns == {"input_ids": [], "labels": []}


def test_what_is_no_text_is_named(tokenizer):
    with pytest.raises(RecipeError, match=r"rows\.jsonl:2: text holds int, expected text"):
        encoder(tokenizer, "text")(rows_of({"text": "a"}, {"text": 3}))


@pytest.mark.parametrize(
    ("fmt", "loss_on"), [("text", "assistant"), ("prompt-completion", "assistant"), ("chat", "everything")]
)
def test_loss_on_must_suit_the_format(tokenizer, fmt, loss_on):
    with pytest.raises(RecipeError, match=f"{loss_on} is meaningless for {fmt} rows") as caught:
        encoder(tokenizer, fmt, data__loss_on=loss_on)
    assert caught.value.problems[0].code == "loss-on"
    assert caught.value.problems[0].path == "data.loss_on"


def test_only_text_can_be_split(tokenizer):
    with pytest.raises(RecipeError, match="chat rows cannot be split"):
        encoder(tokenizer, "chat", data__overlong="split")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "the chat template of package:mine"),
        ({"model__tokenizer": "other/tokens"}, "the chat template of other/tokens"),
        ({"model__chat_template": "mine.jinja"}, "the template of model.chat_template (mine.jinja)"),
        ({"model__chat_template": "{{ messages }}"}, "the template of model.chat_template"),
    ],
)
def test_a_template_has_the_name_of_the_recipe(settings, name):
    talker = tiny_tokenizer(512)
    talker.name_or_path = "/cache/gguf/0123"
    talker.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert encoder(talker, "chat", **settings).rendered.origin == name


class TestSeq2Seq:
    def encode(self, tokenizer, *rows, **settings):
        return encoder(tokenizer, "prompt-completion", task="seq2seq-lm", **settings)(rows_of(*rows))

    def test_prompt_and_completion_stand_apart(self, both_ends):
        batch = self.encode(both_ends, {"prompt": "Ask: ", "completion": "reply"})
        assert both_ends.decode(batch.columns["input_ids"][0]) == "<|bos|>Ask: <|eos|>"
        assert both_ends.decode(batch.columns["labels"][0]) == "<|bos|>reply<|eos|>"

    def test_the_target_ends_even_where_the_tokenizer_adds_no_eos(self, tokenizer):
        batch = self.encode(tokenizer, {"prompt": "Ask: ", "completion": "reply"})
        assert tokenizer.decode(batch.columns["labels"][0]) == "reply<|eos|>"
        assert tokenizer.decode(batch.columns["input_ids"][0]) == "Ask: "

    def test_both_are_cut(self, both_ends):
        rows = [{"prompt": "p " * 30, "completion": "c " * 30}, {"prompt": "p", "completion": "c"}]
        batch = self.encode(both_ends, *rows, data__max_length=10)
        ids, labels = batch.columns["input_ids"][0], batch.columns["labels"][0]
        assert len(ids) == len(labels) == 10
        assert ids[-1] == both_ends.eos_token_id  # an encoder's input is closed
        assert labels[-1] != both_ends.eos_token_id  # a cut answer has not ended
        assert (batch.kept, batch.truncated) == (2, 1)
        whole = [both_ends.encode(rows[0][name]) for name in ("prompt", "completion")]
        assert batch.tokens_lost == sum(map(len, whole)) - 20

    def test_rows_are_left_out_by_name(self, both_ends):
        rows = [{"prompt": " ", "completion": ""}, {"prompt": "p " * 30, "completion": "c"}]
        batch = self.encode(both_ends, *rows, data__max_length=10, data__overlong="drop")
        assert batch.dropped == {"empty": 1, "overlong": 1}
        assert batch.columns["input_ids"] == batch.rows == []


@pytest.fixture(scope="module")
def bert():
    """A tokenizer with BERT's special tokens and token type ids."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer(512)
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


class TestClasses:
    ROWS = (
        {"text": "red", "text_pair": None, "label": "yes"},
        {"text": "red", "text_pair": "blue bird", "label": "no"},
        {"text": "", "text_pair": None, "label": "yes"},
        {"text": "one two three " * 9, "text_pair": "four " * 9, "label": "no"},
    )

    def encode(self, tokenizer, **settings):
        settings = {"task": "sequence-classification", "data__max_length": 16} | settings
        return encoder(tokenizer, "classification", ("no", "yes"), **settings)(rows_of(*self.ROWS))

    def test_special_tokens_types_and_ids(self, bert):
        batch = self.encode(bert)
        assert sorted(batch.columns) == ["input_ids", "labels", "token_type_ids"]
        assert batch.columns["labels"] == [1, 0, 0]
        alone, paired, long = batch.columns["input_ids"]
        assert bert.decode(alone) == "[CLS]red[SEP]"
        assert bert.decode(paired) == "[CLS]red[SEP]blue bird[SEP]"
        assert batch.columns["token_type_ids"][0] == [0] * len(alone)
        second = len(bert.encode("red"))
        assert batch.columns["token_type_ids"][1] == [0] * second + [1] * (len(paired) - second)
        assert len(long) == 16
        assert long[-1] == bert.sep_token_id
        assert (batch.kept, batch.truncated, batch.dropped) == (3, 1, {"empty": 1})
        assert batch.rows == [0, 1, 3]

    def test_a_model_without_token_types_gets_none(self, both_ends):
        assert sorted(self.encode(both_ends).columns) == ["input_ids", "labels"]

    def test_overlong_rows_can_be_dropped(self, bert):
        batch = self.encode(bert, data__overlong="drop")
        assert batch.dropped == {"empty": 1, "overlong": 1}
        assert len({len(column) for column in batch.columns.values()}) == 1


ODD = [
    "", " ", "\n\n\t ", "plain words", "<|eos|>", "a<|eos|>b <|bos|><|unk|>", "\x00\x01\x7f", "x" * 3000,
    "e\u0301 \u00e9 \ufb01 \u2028 \U0001f469\u200d\U0001f469", "\u0627\u0644\u0639 \u4f60\u597d",
    "tab\tand  spaces   ", "def f(x):\n    return x  # no\r\n",
]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"add_special_tokens": False}, {"add_special_tokens": True}])
@pytest.mark.parametrize("given", ["tokenizer", "both_ends", "cut_and_padded", "split_special"])
def test_ids_are_those_of_the_tokenizers_own_call(request, monkeypatch, tokenizer, given, options):
    chosen = tokenizer
    if given == "both_ends":
        chosen = request.getfixturevalue(given)
    elif given == "cut_and_padded":  # as some tokenizer.json files ask for
        chosen = tiny_tokenizer(512)
        chosen.backend_tokenizer.enable_truncation(4)
        chosen.backend_tokenizer.enable_padding()
    elif given == "split_special":
        chosen = tiny_tokenizer(512)
        chosen.split_special_tokens = True
    expected = [chosen(text, verbose=False, **options)["input_ids"] for text in ODD]
    assert _plain_backend(chosen) is not None
    assert token_ids(chosen, ODD, **options) == expected
    assert token_ids(chosen, ODD[:1], **options) == expected[:1]


def test_a_tokenizer_that_does_something_of_its_own_with_texts_is_called(tokenizer):
    class Own(type(tokenizer)):
        def _encode_plus(self, text, **options):
            return super()._encode_plus([one.upper() for one in text], **options)

    own = Own(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|eos|>")
    assert _plain_backend(own) is None
    assert token_ids(own, ["abc", "def"]) == token_ids(tokenizer, ["ABC", "DEF"])


def test_pad_token_prefers_a_spare_token_to_eos():
    from transformers import PreTrainedTokenizerFast

    tokenizer = tiny_tokenizer(512)
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|eos|>")
    assert bare.pad_token_id is None
    size = len(bare)
    ensure_pad_token(bare)
    assert bare.pad_token == "<|pad|>"
    assert len(bare) == size
