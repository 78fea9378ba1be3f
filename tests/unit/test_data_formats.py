"""Which format rows have, and the one shape that each format comes out in."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from dataclasses import replace

import pytest
from counted_work import function_calls

pytest.importorskip("datasets")

from launcher.errors import MachineError, RecipeError
from launcher.recipe.field_tables import TASK_FORMATS
from launcher.rows.class_names import collect_labels
from launcher.rows.formats import instruction_prompt, label_id
from launcher.rows.recognise import canonical, detect
from launcher.rows.sources import Row
from launcher.tasks import FORMATS
from launcher.train.data.job_sources import require_packages
from launcher.train.tiny import tiny_tokenizer

CAUSAL, DPO = "causal-lm", "dpo"
CLASSES, IMAGES = "sequence-classification", "image-classification"
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is an extra")


def rows_of(*values):
    return [Row(value, "x.jsonl", number) for number, value in enumerate(values, start=1)]


def found(value, task=CAUSAL, asked="auto", columns=None, file="x.jsonl"):
    rows = [replace(row, file=file) for row in rows_of(value)]
    return detect(rows, asked, columns or {}, task, file)


def shaped(value, task=CAUSAL, asked="auto", columns=None):
    """The canonical values of one row."""
    return canonical(rows_of(value)[0], found(value, task, asked, columns)).values


SYSTEM = {"role": "system", "content": "s"}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("task", "row", "columns", "expected"),
    [
        (CAUSAL, {"text": "a"}, {}, "text"),
        (CAUSAL, {"text": "a", "id": 1}, {}, "text"),
        (CLASSES, {"text": "a", "label": 1}, {}, "classification"),
        (CAUSAL, {"messages": [user("a")], "id": 1}, {}, "chat"),
        (CAUSAL, {"messages": json.dumps([user("a")])}, {}, "chat"),
        (CAUSAL, {"conversations": [{"from": "human", "value": "a"}]}, {}, "chat"),
        (CAUSAL, {"instruction": "a", "output": "b"}, {}, "instruction"),
        (CAUSAL, {"prompt": "a", "completion": "b"}, {}, "prompt-completion"),
        (CAUSAL, {"prompt": "a", "solution": "b"}, {"completion": "solution"}, "prompt-completion"),
        (CAUSAL, {"prompt": "a", "topic": "b", "dialog": [user("a")]}, {"messages": "dialog"}, "chat"),
        (CAUSAL, {"input": "a", "output": "b"}, {"instruction": "input"}, "instruction"),
        (CAUSAL, {"text": 3, "prompt": "a", "completion": "b"}, {}, "prompt-completion"),
        (IMAGES, {"image": b"", "label": "cat", "text": "a"}, {}, "image"),
    ],
)
def test_the_format_is_read_from_fields_types_and_task(task, row, columns, expected):
    assert found(row, task, columns=columns).format == expected


def test_one_odd_row_does_not_hide_the_format():
    rows = rows_of({"prompt": "a", "completion": None}, {"prompt": "a"}, {"prompt": "a", "completion": "b"})
    assert detect(rows, "auto", {}, CAUSAL, "x").format == "prompt-completion"


def test_two_formats_that_match_are_not_chosen_between():
    row = {"instruction": "a", "input": "", "output": "b", "text": "a b"}
    with pytest.raises(RecipeError, match=r"read as text and as instruction; .*write `format: text`"):
        found(row)
    assert found(row, asked="instruction").format == "instruction"
    assert found(row, "seq2seq-lm").format == "instruction"
    assert found(row, columns={"output": "output"}).format == "instruction"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"frage": 1, "antwort": 2},
            {},
            r"columns frage, antwort do not .*prompt-completion: prompt, completion",
        ),
        (
            {"task_id": 1, "prompt": "a", "canonical_solution": "b"},
            {},
            r"did you mean `columns: \{completion: canonical_solution\}`",
        ),
        ({"instruction": "a", "outputs": "b"}, {}, r"did you mean `columns: \{output: outputs\}`"),
        ({"instruction": "a"}, {"asked": "instruction"}, "format instruction needs"),
        ({"prompt": "a"}, {"columns": {"completion": "solution"}}, r"no column solution .* are prompt"),
        (
            {"prompt": "a", "solutions": "b"},
            {"columns": {"completion": "solution"}},
            r"did you mean `columns: \{completion: solutions\}`",
        ),
        (
            {"chosen": "a", "rejected": "b"},
            {},
            "look like preference rows, which task dpo or reward trains on",
        ),
        ({"text": "a"}, {"asked": "text", "task": CLASSES}, "trains on classification, not on text rows"),
        ({"text": "a"}, {"asked": "chat"}, "they look like text rows"),
        ({"a text one": "a text two"}, {"file": "rows.csv"}, r"header: false.*else: did you mean"),
        ({"0": "1", "good": "bad"}, {"file": "rows.tsv.gz", "task": CLASSES}, "header: false"),
        ({"0": "1", "good": "bad"}, {"task": CLASSES}, r"\(name the columns"),
    ],
)
def test_unknown_columns_are_listed_with_what_was_meant(row, options, message):
    with pytest.raises(RecipeError, match=message):
        found(row, **options)


def test_instruction_rows_become_a_prompt():
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    expected = "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
    assert shaped(row) == {"prompt": expected, "completion": "3"}
    for given in ("", None):
        plain = "### Instruction:\nAdd.\n\n### Response:\n"
        assert shaped({**row, "input": given})["prompt"] == plain == instruction_prompt("Add.", given)


def test_columns_are_renamed_and_others_left_out():
    row = {"q": "a", "a": "b", "id": 7}
    assert shaped(row, columns={"prompt": "q", "completion": "a"}) == {"prompt": "a", "completion": "b"}


def test_a_column_serves_one_field_only():
    row = {"input": "a", "output": "b"}
    assert shaped(row, columns={"instruction": "input"})["prompt"] == instruction_prompt("a")


def test_sharegpt_becomes_messages():
    speakers = ["system", "human", "gpt", "observation", "chatgpt", "tool", "model", "user", "function"]
    row = {"conversations": [{"from": name, "value": name, "weight": 1} for name in speakers]}
    messages = shaped(row)["messages"]
    roles = ["system", "user", "assistant", "tool", "assistant", "tool", "assistant", "user", "tool"]
    assert [message["role"] for message in messages] == roles
    assert [message["content"] for message in messages] == speakers
    call = {"name": "add", "arguments": '{"a": 1}'}
    row = {"conversations": [{"from": "function_call", "value": json.dumps(call)}]}
    function = {"name": "add", "arguments": {"a": 1}}
    assert shaped(row)["messages"] == [
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    ]


def test_messages_as_json_text_and_with_other_role_names():
    turns = [
        {"role": "human", "content": "a", "name": None},
        {"role": "gpt", "content": [{"type": "text", "text": "b"}]},
    ]
    for value in (turns, json.dumps(turns)):
        assert shaped({"messages": value}) == {"messages": [user("a"), assistant("b")], "tools": None}


def test_prompt_and_completion_of_messages_are_a_chat():
    row = {"prompt": [user("a")], "completion": [assistant("b")], "tools": [{"type": "function"}]}
    assert found(row).format == "chat"
    assert shaped(row) == {"messages": [user("a"), assistant("b")], "tools": [{"type": "function"}]}
    with pytest.raises(RecipeError, match=r"x\.jsonl:1: column prompt holds a list, expected text"):
        shaped(row, "seq2seq-lm", columns={"tools": None})


def test_tool_calls_and_tools():
    tools = [{"type": "function", "function": {"name": "add"}}]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"type": "function", "function": {"name": "add", "arguments": {"b": None}}},
        {"type": "function", "function": {"name": "add", "arguments": ""}},
        {"name": "own form", "arguments": '{"a": 1}'},
    ]
    row = {
        "messages": [user("a"), {"role": "assistant", "content": None, "tool_calls": calls}],
        "tools": tools,
    }
    for given in (tools, json.dumps(tools)):
        values = shaped({**row, "tools": given})
        assert values["tools"] == tools
        taken = values["messages"][1]["tool_calls"]
        assert [call["function"]["arguments"] for call in taken[:3]] == [{"a": 1}, {"b": None}, {}]
        assert taken[0]["id"] == "1"
        assert taken[3] == {"type": "function", "function": {"name": "own form", "arguments": {"a": 1}}}
        assert values["messages"][1]["content"] is None
    assert calls[0]["function"]["arguments"] == '{"a": 1}'  # the row itself stays as it was
    empty = {"messages": [{**assistant("a"), "tool_calls": []}], "tools": ""}
    assert shaped(empty) == {"messages": [assistant("a")], "tools": None}


def test_tool_calls_come_out_of_a_chat_template_as_one_object():
    """What transformers' templates do with arguments: text would be quoted a second time."""
    tokenizer = tiny_tokenizer(512)
    tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    values = shaped({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert tokenizer.apply_chat_template(values["messages"], tokenize=False) == '{"a": 1}'


@needs_trl
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("p", "a", "b"), ("p", "a", "b")),
        ((None, "Hi. yes", "Hi. no"), ("Hi.", " yes", " no")),
        (
            ([user("p")], [assistant("a")], [assistant("b")]),
            ([user("p")], [assistant("a")], [assistant("b")]),
        ),
        (([user("p")], "a", "b"), ([user("p")], [assistant("a")], [assistant("b")])),
        (("p", [assistant("a")], [assistant("b")]), ([user("p")], [assistant("a")], [assistant("b")])),
        (
            ("p", [user("p"), assistant("a")], [user("p"), assistant("b")]),
            ([user("p")], [assistant("a")], [assistant("b")]),
        ),
        (
            (None, [user("p"), assistant("a")], [user("p"), assistant("b")]),
            ([user("p")], [assistant("a")], [assistant("b")]),
        ),
        (
            ([user("p")], [user("p"), assistant("a")], [user("p"), assistant("b")]),
            ([user("p")], [assistant("a")], [assistant("b")]),
        ),
        (
            ([SYSTEM], [user("p"), assistant("a")], [user("p"), assistant("b")]),
            ([SYSTEM, user("p")], [assistant("a")], [assistant("b")]),
        ),
        (
            ([user("p")], [user("p"), assistant("a")], [assistant("b")]),
            ([user("p")], [assistant("a")], [assistant("b")]),
        ),
        (
            (
                [{"from": "human", "value": "p"}],
                {"from": "gpt", "value": "a"},
                {"from": "gpt", "value": "b"},
            ),
            ([user("p")], [assistant("a")], [assistant("b")]),
        ),
    ],
)
def test_preference_pairs(row, expected):
    names = ("prompt", "chosen", "rejected")
    values = {name: value for name, value in zip(names, row, strict=True) if value is not None}
    assert shaped(values, DPO) == dict(zip(names, expected, strict=True))


@needs_trl
def test_preference_rows_keep_their_tools():
    tools = [{"type": "function"}]
    row = {"prompt": [user("p")], "chosen": [assistant("a")], "rejected": [assistant("b")], "tools": tools}
    assert shaped(row, DPO)["tools"] == tools


def test_preference_rows_need_trl(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"effilaunch\[dpo\]"):
        require_packages(found({"prompt": "a", "chosen": "b", "rejected": "c"}, DPO))
    require_packages(found({"text": "a"}))


BAD_ROWS = [
    (CAUSAL, "auto", {"prompt": "a", "completion": None}, "column completion holds nothing, expected text"),
    (CAUSAL, "prompt-completion", {"prompt": "a"}, "the row has no column completion; it has prompt"),
    (CAUSAL, "auto", {"text": 3}, "column text holds an integer, expected text"),
    (CAUSAL, "instruction", {"instruction": "a", "input": 1, "output": "b"}, "column input holds an integer"),
    (CAUSAL, "chat", {"messages": "hello"}, "the text in messages is not JSON"),
    (CAUSAL, "chat", {"messages": None}, "holds nothing, expected a list of messages"),
    (CAUSAL, "chat", {"messages": []}, "holds no messages"),
    (CAUSAL, "chat", {"messages": ["a"]}, r"messages\[0\] is text, expected an object"),
    (CAUSAL, "chat", {"messages": [{"text": "a"}]}, r"messages\[0\] has no role; it has text"),
    (CAUSAL, "chat", {"messages": [user("a"), {"role": "assistant"}]}, r"messages\[1\] has no content"),
    (
        CAUSAL,
        "chat",
        {"messages": [user("a"), {"role": "assistant", "content": None}]},
        r"messages\[1\] has neither content",
    ),
    (CAUSAL, "chat", {"messages": [user(3)]}, "has content that is an integer"),
    (CAUSAL, "chat", {"messages": [user([{"type": "image"}])]}, "content that is not text.*vision-language"),
    (
        CAUSAL,
        "chat",
        {"messages": [{"from": "robot", "value": "a"}]},
        "is from 'robot'; known are system, human",
    ),
    (CAUSAL, "chat", {"messages": [user("a")], "tools": [3]}, "expected a list of JSON schemas"),
    (CAUSAL, "chat", {"messages": [user("a")], "tools": ["add"]}, "the text in tools is not JSON"),
    (
        CAUSAL,
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]},
        r"messages\[0\]\.tool_calls\[0\]\.function\.arguments is not JSON",
    ),
    (DPO, "preference", {"chosen": "a", "rejected": [assistant("b")]}, "one is text and one is messages"),
    (DPO, "preference", {"chosen": "a", "rejected": "b"}, "share no beginning, and there is no prompt"),
    (DPO, "preference", {"chosen": [user("a")], "rejected": [user("a")]}, "the same single message"),
    *(
        (
            DPO,
            "preference",
            {
                "prompt": prompt,
                "chosen": [user("a"), assistant("b")],
                "rejected": [user("c"), assistant("d")],
            },
            "the answer in chosen begins with a message of role user",
        )
        for prompt in ("p", [SYSTEM])
    ),
    (DPO, "preference", {"chosen": None, "rejected": "b"}, "column chosen holds nothing"),
    (DPO, "preference", {"chosen": [user("a")], "rejected": None}, "column rejected holds nothing"),
    (CLASSES, "auto", {"text": "a", "label": {}}, "expected a label"),
    (CLASSES, "auto", {"text": "a", "label": None}, "column label holds nothing, expected a label"),
    (CLASSES, "auto", {"text": "a", "label": ""}, "column label holds nothing, expected a label"),
    (IMAGES, "auto", {"image": 3, "label": 1}, "column image holds an integer"),
    (IMAGES, "auto", {"image": "none.png", "label": 1}, "there is no image none.png"),
    (IMAGES, "auto", {"image": "https://a.b/c.png", "label": 1}, "images are not downloaded"),
]


@needs_trl
@pytest.mark.parametrize(("task", "asked", "values", "message"), BAD_ROWS)
def test_bad_values_are_named_with_their_row(task, asked, values, message):
    good = {
        "preference": {"prompt": "p", "chosen": "a", "rejected": "b"},
        "chat": {"messages": [user("a")], "tools": None},
    }.get(asked, {field: "a" for fmt in TASK_FORMATS[task] for field in FORMATS[fmt].needed})
    fmt = TASK_FORMATS[task][0] if asked == "auto" else asked
    if "completion" in values:
        fmt = "prompt-completion"
    detected = detect(rows_of(good), fmt, {}, task, "x.jsonl")
    with pytest.raises(RecipeError, match=rf"data/x\.jsonl:40317: .*{message}"):
        canonical(Row(values, "data/x.jsonl", 40_317), detected)


def labelled(*labels):
    return [Row({"label": label}, "x.csv", number) for number, label in enumerate(labels, start=1)]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["pos", "neg", "pos"], ("neg", "pos")),
        ([10, 2, 0, 2], ("0", "2", "10")),
        (["10", "9", "2"], ("2", "9", "10")),
        ([True, False], ("False", "True")),
        (["1", "one"], ("1", "one")),
    ],
)
def test_labels_are_in_the_order_of_their_ids(labels, expected):
    rows = labelled(*labels)
    assert collect_labels(iter(rows)) == expected
    assert [label_id(row, row.values["label"], expected) for row in rows] == [
        expected.index(str(label)) for label in labels
    ]


def test_labels_that_cannot_be_learnt():
    with pytest.raises(RecipeError, match=r"x\.csv: every row has the label 'a'"):
        collect_labels(labelled("a", "a"))
    with pytest.raises(RecipeError, match="the labels are decimal numbers"):
        collect_labels(labelled("0.5", "1"))
    with pytest.raises(RecipeError, match=r"x\.csv:1: label 'c' is not among the training labels a, b"):
        label_id(labelled("c")[0], "c", ("a", "b"))


def test_classification_rows():
    row = {"sentence": "a", "other": "b", "label": True}
    columns = {"text": "sentence", "text_pair": "other"}
    assert shaped(row, CLASSES, columns=columns) == {"text": "a", "text_pair": "b", "label": True}
    assert shaped({"text": "a", "label": 1}, CLASSES) == {"text": "a", "text_pair": None, "label": 1}


def test_pictures_are_paths_or_bytes(tmp_path):
    from PIL import Image

    (tmp_path / "pictures").mkdir()
    picture = Image.new("RGB", (2, 2), (200, 0, 0))
    picture.save(tmp_path / "pictures/1.png")
    data = (tmp_path / "pictures/1.png").read_bytes()
    path = str(tmp_path / "pictures/1.png")
    cases = [
        ("pictures/1.png", path),
        (path, path),
        (data, data),
        ({"bytes": data, "path": "1.png"}, data),
        ({"path": "pictures/1.png"}, path),
        (f"data:image/png;base64,{base64.b64encode(data).decode()}", data),
    ]
    for value, expected in cases:
        row = Row({"image": value, "label": "red"}, str(tmp_path / "train.csv"), 2)
        values = canonical(row, detect([row], "auto", {}, IMAGES, "train.csv")).values
        assert values == {"image": expected, "label": "red"}
    row = Row({"image": picture, "label": "red"}, "x", 1)
    held = canonical(row, detect([row], "auto", {}, IMAGES, "x")).values["image"]
    assert Image.open(io.BytesIO(held)).getpixel((0, 0)) == (200, 0, 0)


def test_shaping_keeps_pace():
    row = rows_of({"prompt": "a", "completion": "b"})[0]
    detected = detect([row], "auto", {}, CAUSAL, "x")
    assert function_calls(lambda: canonical(row, detected)) < 30
