"""Rows and columns that a task does not read: refused where they belong to what would be learned."""

from __future__ import annotations

import json
from functools import partial
from itertools import product

import pytest
from counted_work import function_calls
from every import every

import launcher.tasks
from launcher.errors import RecipeError
from launcher.recipe.suggestions import listed
from launcher.rows.recognise import canonical, detect, refuse_lost
from launcher.rows.sources import Row
from launcher.rows.unread import unread_columns

CHAT = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}]
PAIR = {"prompt": "Which? ", "completion": "This one."}
SAID = {"role": "assistant", "content": "That one."}
TASKS = tuple(task.name for task in launcher.tasks.TASKS)


def looked(values, task="causal-lm", asked="auto", columns=None, others=()):
    rows = [Row(v, "rows.jsonl", n) for n, v in enumerate((values, *others), start=1)]
    return detect(rows, asked, columns or {}, task, "rows.jsonl")


def refused(values, task="causal-lm", **options):
    """The problem of rows that are refused."""
    with pytest.raises(RecipeError) as caught:
        looked(values, task, **options)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT, "label": False},
        {"messages": CHAT, "label": 1},
        {"messages": CHAT, "kto_tag": "true"},
        {**PAIR, "label": True},
        {**PAIR, "label": 0},
        {**PAIR, "label": "False"},
        {**PAIR, "kto_tag": False},
        {"instruction": "a", "input": "", "output": "b", "kto_tag": False},
        {"completion": "b", "label": True},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "label": False},
    ],
)
def test_answers_with_a_label_are_for_kto(row):
    problem = refused(row)
    assert problem.code == "rows-of-another-task"
    assert "task kto" in problem.message
    assert "`task: kto`" in problem.hint


@pytest.mark.parametrize("task", ["dpo", "reward"])
@pytest.mark.parametrize("row", [{**PAIR, "label": True}, {"messages": CHAT, "kto_tag": False}])
def test_answers_with_a_label_are_no_pairs(row, task):
    problem = refused(row, task)
    assert problem.code in ("rows-of-another-task", "format-unknown")
    assert "kto" in problem.hint


def test_pairs_and_rows_without_a_label_are_not_for_kto():
    pair = refused({"prompt": "a", "chosen": "b", "rejected": "c"}, "kto")
    assert (pair.code, "dpo" in pair.hint) == ("format-unknown", True)
    both = refused({**PAIR, "label": True, "rejected": "c"}, "kto")
    assert (both.code, "`task: dpo`" in both.hint) == ("rows-of-another-task", True)
    assert refused(PAIR, "kto").code == "format-unknown"


def test_the_label_of_a_class_is_no_judgement_of_the_answer():
    rows = [{**PAIR, "label": label} for label in (0, 1, 2)]
    assert looked(rows[0], others=rows[1:]).format == "prompt-completion"
    assert looked({**PAIR, "label": "maths"}).format == "prompt-completion"


def test_a_label_beside_a_text_is_for_classification():
    problem = refused({"text": "a", "label": 1})
    assert (problem.code, problem.line) == ("rows-of-another-task", 1)
    assert "`task: sequence-classification`" in problem.hint
    assert looked({"text": "a", "label": 1}, asked="text").format == "text"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT, "rejected_response": "That one."},
        {"messages": CHAT, "rejected_messages": [SAID]},
        {"messages": CHAT, "chosen": CHAT, "rejected": [SAID]},
        {**PAIR, "rejected": "That one."},
        {"text": "a", "chosen": "c", "rejected": "b"},
        {"conversations": CHAT[:1], "chosen": CHAT[1], "rejected": SAID},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"question": "a", "response_chosen": "b", "response_rejected": "c"},
    ],
)
@pytest.mark.parametrize("task", ["causal-lm", "seq2seq-lm"])
def test_preference_rows_name_the_task_that_trains_on_them(row, task):
    problem = refused(row, task)
    assert "dpo" in f"{problem.message} {problem.hint}"
    assert problem.code in ("rows-of-another-task", "format-unknown")


def test_scores_of_answers_are_no_answers():
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_score": 9.0, "rejected_score": 1}
    assert looked(row, "dpo").format == "preference"
    assert looked({"messages": CHAT, "chosen_rating": 5}).format == "chat"


@pytest.mark.parametrize(
    ("column", "text", "task"),
    [
        *((column, "What?", "causal-lm") for column in ("image", "images", "videos", "audio", "audios")),
        *((column, "<image>What?", "causal-lm") for column in ("image_path", "Image-URL")),
        *(("images", "What?", task) for task in TASKS if task != "image-text-to-text"),
    ],
)
def test_rows_with_media_are_refused_by_tasks_that_read_text(column, text, task):
    turns = [{"role": "user", "content": text}, CHAT[1]]
    problem = refused({"messages": turns, column: ["a.png"]}, task)
    assert problem.code in ("rows-of-another-task", "format-unknown")
    if task != "image-classification":
        assert "image-text-to-text" in problem.message
    assert looked({"messages": turns, column: []}).format == "chat", "a column that holds nothing"


OTHERS = {
    "causal-lm": {"messages": CHAT},
    "seq2seq-lm": PAIR,
    "sequence-classification": {"text": "a", "label": "x"},
    "image-classification": {"image": "a.png", "label": "x"},
    "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "kto": {**PAIR, "label": False},
    "prm": {"prompt": "a", "completions": ["b"], "labels": [True]},
    "regression": {"prompt": "a", "response": "b", "reward": 0.5},
    "grpo": {"prompt": "a", "ground_truth": "4"},
    "embedding": {"anchor": "a", "positive": "b", "negative": "c"},
    "embedding ": {"query": "a", "positive": "b"},
    "reranker": {"query": "a", "documents": ["b", "c"], "labels": [1, 0]},
    "token-classification": {"tokens": ["a"], "labels": [0]},
    "image-text-to-text": {"images": ["a.png"], "messages": CHAT},
}
READS = {
    ("causal-lm", "seq2seq-lm"), ("reward", "dpo"),
    ("image-text-to-text", "causal-lm"), ("image-text-to-text", "seq2seq-lm"), ("reranker", "embedding"),
    *(("grpo", other) for other in ("causal-lm", "seq2seq-lm", "kto", "prm", "regression")),
}  # fmt: skip
"""(task, task whose rows it may train on): prompts with completions, pairs, conversations without an image,
and prompts with whatever is beside them."""


@every(("task", "owner"), product(TASKS, OTHERS))
def test_each_task_refuses_the_rows_of_each_other_and_names_it(task, owner):
    row, owner = OTHERS[owner], owner.strip()
    if task == owner or (task, owner) in READS:
        assert looked(row, task)
        return
    problem = refused(row, task)
    said = f"{problem.message} {problem.hint}"
    if owner in ("causal-lm", "seq2seq-lm"):
        assert "task causal-lm" in said
    else:
        assert f"task {owner}" in said or f"task: {owner}" in said
    if owner not in TASKS:
        assert f"no task {owner}" in problem.hint


def test_a_task_with_images_reads_them_and_no_video() -> None:
    row = {"messages": CHAT, "images": ["a.png"]}
    assert looked(row, "image-text-to-text").columns["images"] == "images"
    assert (
        looked({"conversations": CHAT, "image": "a.png"}, "image-text-to-text").columns["images"] == "image"
    )
    assert looked({**PAIR, "images": ["a.png"]}, "image-text-to-text").format == "image-prompt"
    assert refused({**row, "videos": ["a.mp4"]}, "image-text-to-text").code == "column-unread"
    assert refused({**row, "image": "b.png"}, "image-text-to-text").code == "column-unread"


def test_a_margin_is_read_by_reward_models_alone() -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5}
    assert looked(pair, "reward").columns["margin"] == "margin"
    assert "margin" not in looked(pair, "reward", columns={"margin": None}).columns
    found = looked(pair, "dpo")
    assert unread_columns([Row(pair, "rows.jsonl", 1)], found) == ("margin",)


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"instruction": "a", "output": "b", "history": [["q", "r"]]}, "history"),
        ({"instruction": "a", "output": "b", "system": "Be brief."}, "system"),
        ({"instruction": "a", "output": "b", "context": "France"}, "context"),
        ({**PAIR, "system_prompt": "Be brief."}, "system_prompt"),
        ({**PAIR, "tools": [{"type": "function"}]}, "tools"),
        ({**PAIR, "reasoning_content": "Hm, it is the nearer one."}, "reasoning_content"),
        ({"messages": CHAT, "system": "Be brief."}, "system"),
        ({"text": "A docstring.", "prompt": "def f():"}, "prompt"),
        ({"messages": CHAT, "functions": '[{"name": "f"}]'}, "functions"),
        ({"messages": CHAT, "history": [{"role": "user", "content": "Before?"}]}, "history"),
        ({"messages": CHAT, "turns": [{"role": "user", "content": "Which one was it before?"}]}, "turns"),
        ({**PAIR, "输入": "这里有两个盒子一个红色一个蓝色"}, "输入"),
        ({**PAIR, "历史": [["哪一个盒子是红色的", "左边的那一个"]]}, "历史"),
        ({**PAIR, "choices": ["the box on the left", "the box on the right"]}, "choices"),
        ({**PAIR, "article": "Two boxes stood there."}, "article"),
        ({"messages": CHAT, "tool_defs": "f, g"}, "tool_defs"),
        ({"messages": CHAT, "tool_schemas": [{"name": "f"}]}, "tool_schemas"),
        ({**PAIR, "tool_list": "f"}, "tool_list"),
    ],
)
def test_a_column_of_the_conversation_is_read_or_left_out_in_so_many_words(row, column):
    problem = refused(row)
    assert (problem.code, problem.file, problem.line) == ("column-unread", "rows.jsonl", 1)
    assert f"{{{column}: null}}" in problem.hint
    detected = looked(row, columns={column: None})
    assert column in detected.left_out
    empty = {**row, column: type(row[column])()}
    assert looked(empty).format == detected.format, "and one that holds nothing is no loss"


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({**PAIR, "loss_weight": 0.0}, "loss_weight"),
        ({**PAIR, "train": False}, "train"),
        ({**PAIR, "train": "False"}, "train"),
        ({**PAIR, "loss_mask": "[0, 1]"}, "loss_mask"),
        ({"instruction": "a", "output": "b", "weight": 0}, "weight"),
        ({"text": "a b", "loss_mask": [0, 1]}, "loss_mask"),
        ({"messages": CHAT, "masks": [0, 0]}, "masks"),
        ({"messages": CHAT, "message_weights": [0, 0.5]}, "message_weights"),
        ({"messages": CHAT, "loss": False}, "loss"),
        ({"messages": CHAT, "Loss_Mask": [0, 1]}, "Loss_Mask"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "weight": 0}, "weight"),
    ],
)
def test_a_mask_that_the_format_does_not_read_is_refused(row, column):
    task = "dpo" if "chosen" in row else "causal-lm"
    problem = refused(row, task)
    assert problem.code == "column-unread"
    assert f"{{{column}: null}}" in problem.hint
    assert column in looked(row, task, columns={column: None}).left_out


@pytest.mark.parametrize("key", ["loss_mask", "mask", "weight"])
def test_a_mask_beside_a_conversation_can_be_left_out(key):
    row = {"messages": CHAT, key: [0, 0.5]}
    detected = looked(row, columns={key: None})
    assert (
        canonical(Row(row, "x", 1), detected).values
        == canonical(Row({"messages": CHAT}, "x", 1), detected).values
    )
    assert unread_columns([Row(row, "x", 1)], detected) == (key,)
    assert unread_columns([Row(row, "x", 1)], looked(row)) == ()


@pytest.mark.parametrize(
    "more",
    [
        {"turns": 3, "history": 0, "tools": False},
        {"loss": 0.31, "weights": [70.5], "train": "yes", "masks": [1, 1]},
        {"id": 7, "source": "web", "category": "maths", "url": "https://example.org"},
    ],
)
@pytest.mark.parametrize("row", [PAIR, {"messages": CHAT}, {"instruction": "a", "output": "b"}])
def test_counts_scores_and_names_are_no_part_of_the_conversation(row, more):
    assert looked({**row, **more}).format


def test_a_rejected_answer_is_refused_also_where_the_prompt_holds_its_words():
    row = {"prompt": "Yes or No?", "completion": "Yes", "rejected": "No"}
    assert refused(row).code == "rows-of-another-task"


def test_of_two_answers_none_is_proposed():
    for names in (("answer1", "answer2"), ("response_j", "response_k")):
        problem = refused({"prompt": "a", **dict.fromkeys(names, "b")})
        assert names[0] not in problem.hint


def test_what_is_read_elsewhere_is_not_lost():
    """Columns that published data sets carry beside a conversation that holds the same."""
    assert looked({"prompt": "Which?", "prompt_id": "7f", "messages": CHAT}).format == "chat"
    assert looked({"messages": CHAT, "conversations": json.dumps(CHAT)}).format == "chat"
    assert looked({"text": "Which? That.", "prompt": "Which?"}).format == "text"
    both = {"prompt": "Which?", "chosen": CHAT, "rejected": [CHAT[0], SAID], "messages": CHAT}
    assert looked(both, "dpo").format == "preference"
    assert refused({**both, "messages": [{"role": "system", "content": "Be brief."}, *CHAT]}, "dpo")


def test_the_hint_names_the_field_that_would_read_a_column():
    assert "{input: context}" in refused({"instruction": "a", "output": "b", "context": "c"}).hint
    assert "{tools: functions}" in refused({"messages": CHAT, "functions": [{"name": "f"}]}).hint
    pair = {"text": "a", "sentence2": "b", "label": 1}
    row = {"conversations": CHAT[:1], "chosen": CHAT[1], "rejected": SAID}
    assert "{prompt: conversations}" in refused(row, "dpo").hint
    assert "format_row" in refused({"messages": CHAT, "system": "Be brief."}).hint
    assert "{text_pair: sentence2}" in refused(pair, "sequence-classification").hint


def test_null_leaves_out_a_column_that_a_format_would_read():
    row = {"messages": CHAT, "tools": [{"type": "function"}]}
    assert "tools" not in looked(row, columns={"tools": None}).columns
    both = {"text": "a b", "instruction": "a", "output": "b"}
    assert looked(both, columns={"text": None}).format == "instruction"
    problem = refused(PAIR, columns={"histroy": None}, others=[{**PAIR, "history": []}])
    assert problem.code == "column-missing"
    assert "{history: null}" in problem.hint


def test_a_row_far_down_is_looked_at_too():
    detected = looked(PAIR)
    row = Row({**PAIR, "rejected": "That one."}, "rows.jsonl", 5000)
    with pytest.raises(RecipeError) as caught:
        refuse_lost([row], detected, "causal-lm")
    assert caught.value.problems[0].line == 5000


def test_suggested_columns_hold_what_the_field_needs():
    problem = refused({"conversation_id": "a1", "answer": "b", "prompt_id": "7"})
    assert "conversation_id" not in (problem.hint or "")
    assert "prompt_id" not in (problem.hint or "")
    named = refused({"conversation_id": "a1", "text": "t"}, columns={"messages": "conversation"})
    assert "conversation_id" not in named.hint
    dolly = refused({"instruction": "a", "context": "b", "response": "c", "category": "d"})
    assert "{output: response, input: context}" in dolly.hint
    said = {"question": "Where did the two boxes stand?", "response": "They stood on the left."}
    orca = refused({"system_prompt": "Be brief.", **said})
    assert "{instruction: question, output: response, system_prompt: null}" in orca.hint
    stack = refused({"size": 1, "ext": "py", "lang": "Python", "content": "c"})
    assert "{text: content}" in stack.hint
    sides = refused({"prompt": "a", "response_chosen": "b", "response_rejected": "c"}, "dpo")
    assert "{chosen: response_chosen, rejected: response_rejected}" in sides.hint
    swift = refused({"messages": CHAT, "rejected_response": "That one."}, "dpo")
    assert "format_row" in swift.hint
    glue = refused({"sentence1": "a", "sentence2": "b", "label": 1, "idx": 0}, "sequence-classification")
    assert "{text: sentence1, text_pair: sentence2}" in glue.hint


def test_messages_list_few_of_many_columns():
    wide = {f"key-{number}-{'x' * 200}": "v" for number in range(5000)}
    problem = refused(wide)
    assert len(str(problem)) < 2500
    assert "4,984 more" in problem.message
    assert listed([]) == "none"
    assert listed("abc") == "a, b, c"


def test_unread_columns_are_named_in_their_order():
    rows = [Row({**PAIR, "id": 1}, "x", 1), Row({"source": "a", **PAIR}, "x", 2)]
    assert unread_columns(rows, looked(PAIR)) == ("id", "source")


def test_the_look_at_each_row_costs_little():
    row = Row({**PAIR, **{f"column{n}": "v" for n in range(10)}}, "x", 1)
    detected = looked(row.values)
    look = partial(refuse_lost, [row], detected, "causal-lm")
    assert function_calls(look) < 700


def test_a_column_to_leave_out_may_come_in_a_later_row():
    detected = looked(PAIR, columns={"history": None})
    later = Row({**PAIR, "history": [["a", "b"]]}, "rows.jsonl", 500)
    refuse_lost([later], detected, "causal-lm")


@pytest.mark.parametrize("value", [3, "3", "0.5"])
def test_a_number_is_no_conversation(value):
    assert looked({**PAIR, "turns": value}).format == "prompt-completion"


@pytest.mark.parametrize("column", ["positive_messages", "negative_messages"])
def test_conversations_to_compare_are_of_a_task_that_is_not_there(column):
    for messages in (CHAT, CHAT[:1]):
        problem = refused(
            {"messages": messages, column: [[{"role": "user", "content": "Which one of these?"}]]}
        )
        assert problem.code == "rows-of-another-task"
        assert "task embedding" in problem.message


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("systemPrompt", "Be brief."),
        ("systemInstruction", {"parts": [{"text": "Be brief."}]}),
        ("chatHistory", [["Which one was it?", "The other."]]),
        ("meta_instruction", "Be brief."),
        ("thought", "It is near to me."),
        ("Complex_CoT", "It is near to me."),
        ("chat_template_kwargs", {"enable_thinking": True, "xml_tools": []}),
        ("documents", [{"title": "Boxes", "text": "Two boxes stood there."}]),
    ],
)
@pytest.mark.parametrize("rows", [{"messages": CHAT}, PAIR], ids=["chat", "pair"])
def test_what_else_belongs_to_a_conversation(rows, column, value):
    assert refused({**rows, column: value}).code == "column-unread"
    assert looked({**rows, column: value}, columns={column: None}).left_out >= {column}


def test_an_answer_under_a_name_in_camel_case():
    assert "task dpo" in refused({**PAIR, "rejectedResponse": "That one."}).message


def test_a_count_under_the_name_of_a_kto_label_is_none():
    detected = looked({**PAIR, "thumbs_up": 3}, others=[{**PAIR, "thumbs_up": 0}])
    row = Row({**PAIR, "thumbs_up": 0}, "rows.jsonl", 2)
    refuse_lost([row], detected, "causal-lm")
    assert refused({**PAIR, "thumbs_up": 0}, others=[{**PAIR, "thumbs_up": 1}]).code == "rows-of-another-task"


@pytest.mark.parametrize(
    ("column", "value", "is_mask"),
    [("weight", 0.5, True), ("loss_weight", "0.5", True), ("weight", 70.5, False), ("loss", 0.5, False)],
)
def test_a_weight_below_one_is_a_mask(column, value, is_mask):
    row = {**PAIR, column: value}
    if is_mask:
        assert refused(row).code == "column-unread"
    else:
        assert looked(row).format == "prompt-completion"
