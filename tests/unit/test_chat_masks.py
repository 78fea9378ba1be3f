"""Masks of turns as the rows of other tools spell them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from test_chat import CHATML, LLAMA2, MARKED, QWEN3, QWEN25, TOOLS, learnt
from test_chat_rows import ANSWER, CALL, END, QUESTION, TURNS, encode, learned, refused


def masked(turn, **keys):
    return [{**message, **(keys if index == turn else {})} for index, message in enumerate(TURNS)]


NOT_LEARNED = [
    {"weight": 0}, {"weight": 0.0}, {"loss": False}, {"train": False}, {"training": False},
    {"loss_weight": 0.0},
    {"masked": True}, {"trainable": False}, {"step_loss_mask": 0}, {"weight": 0, "train": False},
    {"loss_mask": 0}, {"disable_loss": True},
]  # fmt: skip
LEARNED = [
    {"weight": 1},
    {"loss": True},
    {"train": True},
    {"loss_weight": 1.0},
    {"masked": False},
    {"disable_loss": False},
    {"loss": None},
]


@pytest.mark.parametrize(
    "template", [CHATML, MARKED, QWEN3, LLAMA2], ids=["prefix", "marked", "marks", "llama2"]
)
@pytest.mark.parametrize("keys", NOT_LEARNED, ids=str)
def test_a_turn_with_a_mask_is_not_learned(keys, template):
    end = " </s>" if template is LLAMA2 else END
    pad = " " if template is LLAMA2 else ""
    tokenizer, batch = encode(template, masked(1, **keys))
    assert learnt(tokenizer, batch) == [pad + "Four." + end]
    assert batch.notes["turn-masked"] == 1
    assert learned(template, masked(3, **keys)) == [pad + "Two." + end]


@pytest.mark.parametrize("keys", LEARNED, ids=str)
def test_a_mask_that_leaves_nothing_out_changes_nothing(keys):
    plain = encode(CHATML, TURNS)[1]
    batch = encode(CHATML, masked(1, **keys))[1]
    assert (batch.columns, batch.notes) == (plain.columns, {})


def test_masks_of_speakers_and_with_other_loss_on():
    speakers = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two.", "loss": False}]
    more = [{"from": "human", "value": "Three?"}, {"from": "gpt", "value": "Four."}]
    assert learned(CHATML, speakers + more) == ["Four." + END]
    assert learned(CHATML, speakers + more, "completion") == ["Four." + END]
    whole = "".join(learned(CHATML, TURNS, "all"))
    assert "".join(learned(CHATML, speakers + more, "all")) == whole.replace("Two." + END, "")


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
def test_a_row_of_which_every_turn_is_masked_is_counted(loss_on):
    batch = encode(CHATML, [{**turn, "weight": 0} for turn in TURNS], loss_on)[1]
    assert (batch.kept, batch.dropped) == (0, {"masked": 1})


def test_spans_of_several_blocks_in_a_turn_keep_to_their_turn():
    """Two {% generation %} blocks a turn: which are masked is told by where the turns lie."""
    text = "{% generation %}{{ m.content }}{% endgeneration %}"
    template = MARKED.replace(
        "{{ m.content }}<|im_end|>{% endgeneration %}", "{% endgeneration %}" + text * 2 + END
    )
    assert learned(template, masked(1, train=False)) == ["Four.Four." + END]


@pytest.mark.parametrize("keys", [
    {"weight": 0.5}, {"loss": "no"}, {"loss_weight": 2}, {"mask": True}, {"mask": 0},
    {"loss": False, "train": True},
    {"train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]}, {"lossWeights": [0]},
])  # fmt: skip
def test_a_mask_that_cannot_be_used_is_refused(keys):
    code, message = refused(CHATML, masked(1, **keys))
    assert code == "bad-row"
    assert "messages[1]" in message


def test_a_turn_of_the_user_is_learned_with_all_alone():
    code, message = refused(CHATML, masked(0, train=True))
    assert code == "chat-mask"
    assert "message 1 (role user)" in message
    assert learned(CHATML, masked(0, train=True), "all") == learned(CHATML, TURNS, "all")
    assert learned(CHATML, masked(0, train=False)) == learned(CHATML, TURNS)
    assert refused(CHATML, masked(0, train=False), "all")[0] == "chat-mask"


@pytest.mark.parametrize("column", ["message_loss_mask", "loss_mask", "train_mask"])
def test_a_column_of_masks(column):
    assert learned(CHATML, TURNS, **{column: [0, 0, 0, 1]}) == ["Four." + END]
    assert learned(CHATML, TURNS, **{column: "[0, 0, 0, 1]"}) == ["Four." + END]
    assert refused(CHATML, TURNS, **{column: [0, 1]})[0] == "bad-row"
    assert refused(CHATML, masked(3, train=False), **{column: [0, 0, 0, 1]})[0] == "bad-row"


@pytest.mark.parametrize(("columns", "fits"), [
    ({"weight": 1}, True), ({"mask": "User"}, True), ({"train": "split-a"}, True),
    ({"loss_weight": 1.0}, True),
    ({"weight": 0.3}, False), ({"weight": 0}, False), ({"mask": [0, 1, 0, 1]}, False),
    ({"mask": "gpt"}, False),
    ({"train": False}, False), ({"train": "False"}, False), ({"weight": "0"}, False),
    ({"loss_mask": [0, 0.5, 0, 1]}, False),
])  # fmt: skip
def test_columns_that_weigh_a_row(columns, fits):
    if fits:
        assert learned(CHATML, TURNS, **columns) == learned(CHATML, TURNS)
    else:
        assert next(iter(columns)) in refused(CHATML, TURNS, **columns)[1]


def test_masks_of_one_turn_must_agree():
    call = {"role": "tool_call", "content": CALL}
    text = {"role": "assistant", "content": "I look."}
    for first, second in [(False, True), (None, False), (False, None)]:
        row = [QUESTION, {**text, "train": first}, {**call, "train": second}, ANSWER]
        assert refused(QWEN25, row, tools=TOOLS)[0] == "bad-row"
    row = [QUESTION, {**text, "train": False}, {**call, "train": False}, ANSWER]
    assert [said.strip() for said in learned(QWEN25, row, tools=TOOLS)] == ["It rains." + END]
