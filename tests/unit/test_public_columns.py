"""Columns of published data sets: what is read, listed, and refused with the line that reads it.

The rows are made up; their columns, and what these hold, are those of the data sets named.
"""

from __future__ import annotations

import json
import re

import pytest
import yaml
from every import every

from launcher.errors import RecipeError
from launcher.rows.recognise import LaterRows, canonical, detect, match, propose_columns, refuse_lost
from launcher.rows.sources import Row
from launcher.rows.unread import is_text

ASK = (
    "Where do the two rivers meet?", "Who wrote the long letter?", "How many stones are in it?",
    "Why did the old lamp break?",
)  # fmt: skip
SAY = (
    "They meet below the northern town.", "The sister of the miller wrote it.",
     "There are forty two stones in it.",
    "Somebody left it out in the rain.",
)  # fmt: skip
MORE = (
    "An account of two valleys.", "Notes about an old family letter.", "A list of what the wall holds.",
    "The inventory of the house in May.",
)  # fmt: skip
LONG = (
    "Two rivers meet below the northern town, where a miller lived with his sister, who wrote long letters "
    "to a friend beyond the hills.",
    "The wall of the old house holds forty two stones, and in May somebody left the lamp of the inventory "
    "out in the rain, where it broke.",
)


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def talk(n):
    return [user(ASK[n]), bot(SAY[n])]


def rows_of(make):
    return [Row(make(n), "rows.jsonl", n + 1) for n in range(len(ASK))]


ALPACA = lambda n: {"instruction": ASK[n], "input": ("", "Paris", "", "1, 2")[n], "output": SAY[n]}  # noqa: E731
MBPP = lambda n: {  # noqa: E731
    "task_id": n, "text": ASK[n], "code": f"def f{n}(a, b):\n    return a if a > b else {n}",
    "test_list": [f"assert f{n}(1, 2) == {n}"] * 3, "test_setup_code": "", "challenge_test_list": [],
}  # fmt: skip
ORCA = lambda n: {"id": f"flan.{n}", "system_prompt": "Be brief.", "question": ASK[n], "response": SAY[n]}  # noqa: E731
SAFE = lambda n: {"prompt": ASK[n], "response_0": SAY[n], "response_1": MORE[n], "better_response_id": n % 2}  # noqa: E731
TWO = {"chosen": "response_0", "rejected": "response_1"}
ALSO_TWO = {"chosen": "response_a", "rejected": "response_b"}

READ = [
    ("alpaca", "causal-lm", "auto", {}, ALPACA, "instruction"),
    ("alpaca on the hub", "causal-lm", "instruction", {},
     lambda n: {**ALPACA(n), "text": f"Below is a task.\n{ASK[n]}\n{ALPACA(n)['input']}\nAnswer:\n{SAY[n]}"},
     "instruction"),
    ("dolly", "causal-lm", "instruction", {"output": "response", "input": "context"},
     lambda n: {"instruction": ASK[n], "context": MORE[n], "response": SAY[n], "category": "open_qa"},
      "instruction"),
    ("ultrachat", "causal-lm", "auto", {},
     lambda n: {"prompt": ASK[n], "prompt_id": f"f0e37e{n}", "messages": talk(n)}, "chat"),
    ("gsm8k", "causal-lm", "auto", {"prompt": "question", "completion": "answer"},
     lambda n: {"question": ASK[n], "answer": SAY[n]}, "prompt-completion"),
    ("imdb", "sequence-classification", "auto", {}, lambda n: {"text": MORE[n], "label": n % 2},
     "classification"),
    ("imdb", "causal-lm", "text", {}, lambda n: {"text": MORE[n], "label": n % 2}, "text"),
    ("imdb", "causal-lm", "auto", {"label": None}, lambda n: {"text": MORE[n], "label": n % 2}, "text"),
    ("sst2", "sequence-classification", "auto", {"text": "sentence"},
     lambda n: {"sentence": MORE[n], "label": n % 2, "idx": n}, "classification"),
    ("hh-rlhf", "dpo", "auto", {},
     lambda n: {"chosen": f"\n\nHuman: {ASK[n]}\n\nAssistant: {SAY[n]}",
                "rejected": f"\n\nHuman: {ASK[n]}\n\nAssistant: {MORE[n]}"}, "preference"),
    ("ultrafeedback", "dpo", "auto", {},
     lambda n: {"prompt": ASK[n], "prompt_id": f"a{n}", "chosen": talk(n), "rejected": [user(ASK[n]),
      bot(MORE[n])],
                "messages": talk(n), "score_chosen": 8.5, "score_rejected": 3.0}, "preference"),
    ("OpenAI preferences", "dpo", "auto", {},
     lambda n: {"input": {"messages": [user(ASK[n])], "tools": [], "parallel_tool_calls": True},
                "preferred_output": [bot(SAY[n])], "non_preferred_output": [bot(MORE[n])]}, "preference"),
    ("MetaMath", "causal-lm", "auto",
     {"prompt": "query", "completion": "response", "original_question": None},
     lambda n: {"type": "MATH_AnsAug", "query": ASK[n], "original_question": MORE[n], "response": SAY[n]},
     "prompt-completion"),
    ("MBPP", "causal-lm", "auto", {"prompt": "text", "completion": "code", "test_list": None}, MBPP,
     "prompt-completion"),
    ("MBPP as texts", "causal-lm", "text", {}, MBPP, "text"),
    ("wikipedia", "causal-lm", "auto", {},
     lambda n: {"id": n, "url": f"https://example.org/wiki/{n}", "title": f"River {n}", "text": MORE[n]},
      "text"),
    ("c4", "causal-lm", "auto", {},
     lambda n: {"text": MORE[n], "timestamp": f"2019-04-2{n}T12:57:54Z",
      "url": f"https://example.org/a b{n}"}, "text"),
    ("conll2003", "token-classification", "auto", {"labels": "ner_tags"},
     lambda n: {"id": str(n), "tokens": SAY[n].split(), "pos_tags": [1] * 6,
      "ner_tags": [0] * len(SAY[n].split())},
     "tokens"),
    ("words with their sentence", "token-classification", "auto", {},
     lambda n: {"tokens": SAY[n].split(), "labels": ["O"] * len(SAY[n].split()), "sentence": SAY[n],
                "pos": ["NN", "VB", "NN", "IN", "DT"][: n + 2]}, "tokens"),
    ("FlagEmbedding", "embedding", "auto", {},
     lambda n: {"query": ASK[n], "pos": [SAY[n]], "neg": [MORE[n], MORE[n - 1]]}, "positive-pair"),
    ("FlagEmbedding", "reranker", "auto", {},
     lambda n: {"query": ASK[n], "pos": [SAY[n]], "neg": [MORE[n], MORE[n - 1]]}, "positive-pair"),
    ("hotpot prompts", "grpo", "auto", {}, lambda n: {"prompt": ASK[n], "level": "easy", "seed": n},
     "prompt"),
    ("messages to answer", "grpo", "auto", {}, lambda n: {"messages": [user(ASK[n])], "index": n}, "prompt"),
    ("SafeRLHF, its choice left out", "dpo", "auto", {**TWO, "better_response_id": None}, SAFE, "preference"),
]  # fmt: skip
REFUSED = [
    ("MBPP", "causal-lm", {}, MBPP, "column-unread",
     [{"prompt": "text", "completion": "code", "test_list": None}]),
    *(
        (f"text and {name}", "causal-lm", {}, lambda n, name=name: {"text": ASK[n], name: SAY[n]},
         "column-unread",
         [{"prompt": "text", "completion": name}])
        for name in ("summary", "answer", "translation", "sql", "target")
    ),
    ("text and short answers", "causal-lm", {}, lambda n: {"text": ASK[n], "answer": f"{n}o"},
     "column-unread",
     [{"prompt": "text", "completion": "answer"}]),
    *(
        (f"text and a number under {name}", "causal-lm", {},
         lambda n, name=name, kind=kind: {"text": MORE[n], name: kind(n % 2)}, code, [])
        for name, kind, code in (
            ("label", int, "rows-of-another-task"), ("label", bool, "rows-of-another-task"),
            ("answer", float, "column-unread"), ("target", int, "column-unread"),
        )
    ),
    ("OASST", "causal-lm", {},
     lambda n: {"message_id": f"6ab{n}", "parent_id": None, "text": ASK[n], "role": "prompter", "lang": "en"},
     "column-unread", []),
    ("OASST trees", "causal-lm", {},
     lambda n: {"text": ASK[n], "replies": [{"text": SAY[n], "role": "assistant", "replies": []}]},
     "column-unread", []),
    ("OpenOrca", "causal-lm", {}, ORCA, "format-unknown",
     [{"instruction": "question", "output": "response", "system_prompt": None}]),
    ("OpenOrca, mapped", "causal-lm", {"prompt": "question", "completion": "response"}, ORCA,
     "column-unread", []),
    ("MetaMath", "causal-lm", {"prompt": "query", "completion": "response"},
     lambda n: {"type": "MATH_AnsAug", "query": ASK[n], "original_question": MORE[n], "response": SAY[n]},
     "column-unread", []),
    ("squad", "causal-lm", {},
     lambda n: {"id": f"57{n}", "title": "Rivers", "context": MORE[n], "question": ASK[n],
                "answers": {"text": [MORE[n][:5]], "answer_start": [0]}}, "format-unknown", []),
    ("multiple choice", "causal-lm", {},
     lambda n: {"question": ASK[n], "choices": [SAY[n], MORE[n]], "answer": "AB"[n % 2]}, "format-unknown",
      []),
    ("cnn_dailymail", "seq2seq-lm", {},
     lambda n: {"article": MORE[n], "highlights": SAY[n], "id": f"0b{n}"}, "format-unknown",
     [{"prompt": "article", "completion": "highlights"}]),
    ("provenance is no prompt", "causal-lm", {},
     lambda n: {"source": "web", "passage": MORE[n], "output": SAY[n]}, "format-unknown", []),
    ("two texts", "causal-lm", {}, lambda n: {"text1": ASK[n], "text2": SAY[n], "label": n % 2},
     "format-unknown", []),
    ("two texts", "sequence-classification", {}, lambda n: {"text1": ASK[n], "text2": SAY[n], "label": n % 2},
     "format-unknown", [{"text": "text1", "text_pair": "text2"}]),
    ("conll2003", "token-classification", {},
     lambda n: {"tokens": SAY[n].split(), "pos_tags": [1] * len(SAY[n].split()),
                "ner_tags": [0] * len(SAY[n].split())},
     "format-unknown", [{"labels": "pos_tags"}, {"labels": "ner_tags"}]),
    ("a system prompt to answer", "grpo", {}, lambda n: {"prompt": ASK[n], "system": "Be brief."},
     "column-unread", []),
    ("an input to answer", "grpo", {}, lambda n: {"prompt": ASK[n], "input": f"{n}, 4"}, "column-unread", []),
    ("a prompt of the query", "embedding", {},
     lambda n: {"query": ASK[n], "pos": SAY[n], "prompt": "Find what answers: "}, "column-unread", []),
    ("a prompt of the query", "reranker", {},
     lambda n: {"query": ASK[n], "pos": [SAY[n]], "neg": [MORE[n]], "prompt": "Find what answers: "},
     "column-unread", []),
    ("SafeRLHF", "dpo", TWO, SAFE, "column-unread", []),
    ("SafeRLHF", "reward", TWO, SAFE, "column-unread", []),
    ("an arena", "dpo", ALSO_TWO,
     lambda n: {"prompt": ASK[n], "response_a": SAY[n], "response_b": MORE[n],
                "winner": ("model_a", "model_b", "tie", "model_b")[n]}, "column-unread", []),
    ("a letter", "dpo", ALSO_TWO,
     lambda n: {"prompt": ASK[n], "response_a": SAY[n], "response_b": MORE[n], "chosen": "B"},
      "column-unread", []),
    ("a preference", "reward", ALSO_TWO,
     lambda n: {"prompt": ASK[n], "response_a": SAY[n], "response_b": MORE[n], "preference": n - 1.5},
     "column-unread", []),
    ("LLaMA-Factory preferences", "dpo", {},
     lambda n: {"instruction": ASK[n], "input": "", "chosen": SAY[n], "rejected": MORE[n]},
     "column-unread", [{"prompt": "instruction"}]),
    ("LLaMA-Factory preferences with inputs", "dpo", {},
     lambda n: {"instruction": ASK[n], "input": "Paris", "chosen": SAY[n], "rejected": MORE[n]},
     "column-unread", [{"prompt": "instruction", "input": None}]),
    ("Intel's Orca pairs", "dpo", {},
     lambda n: {"system": "Be brief.", "input": ASK[n], "chosen": SAY[n], "rejected": MORE[n]},
     "column-unread", [{"prompt": "input", "system": None}]),
    ("IMDb of Kaggle", "sequence-classification", {}, lambda n: {"review": MORE[n], "sentiment": "ab"[n % 2]},
     "format-unknown", [{"text": "review", "label": "sentiment"}]),
    ("MNLI", "sequence-classification", {},
     lambda n: {"premise": MORE[n], "hypothesis": SAY[n], "label": n % 3, "idx": n}, "format-unknown",
     [{"text": "premise", "text_pair": "hypothesis"}]),
    ("SICK", "embedding", {}, lambda n: {"premise": MORE[n], "hypothesis": SAY[n], "score": n / 2},
     "format-unknown", [{"sentence1": "premise", "sentence2": "hypothesis"}]),
    ("arXiv", "seq2seq-lm", {}, lambda n: {"article": LONG[n // 2], "abstract": SAY[n]}, "format-unknown",
     [{"prompt": "article", "completion": "abstract"}]),
    ("an explanation", "causal-lm", {},
     lambda n: {"prompt": ASK[n], "completion": SAY[n], "explanation": MORE[n]}, "column-unread", None),
    ("an answer beside a completion", "causal-lm", {},
     lambda n: {"prompt": ASK[n], "completion": SAY[n], "answer": MORE[n]}, "column-unread", None),
    ("RACE", "causal-lm", {},
     lambda n: {"article": LONG[n // 2], "prompt": ASK[n], "completion": SAY[n]}, "column-unread",
     [{"instruction": "prompt", "output": "completion", "input": "article"}]),
    ("CoQA", "causal-lm", {}, lambda n: {"story": LONG[n // 2], "instruction": ASK[n], "output": SAY[n]},
     "column-unread", [{"input": "story"}]),
    ("SQuAD, a document", "causal-lm", {},
     lambda n: {"document": LONG[n // 2], "prompt": ASK[n], "completion": SAY[n]}, "column-unread", None),
    ("OpenR1", "grpo", {}, lambda n: {"messages": talk(n), "solution": MORE[n]}, "column-unread", None),
    *(
        (f"a column {name!r}", "causal-lm", {},
         lambda n, name=name: {"prompt": ASK[n], name: SAY[n]}, "format-unknown", [{"completion": name}])
        for name in (" answer", "answer: long", "answer #1", "answer, long", "*answer", "{answer}")
    ),
    *(
        (f"a column {name!r}", "causal-lm", {},
         lambda n, name=name: {"prompt": ASK[n], "completion": SAY[n], name: MORE[n]}, "column-unread", None)
        for name in ("", "~", "1.5", "a: b", "#")
    ),
]  # fmt: skip


@every(("name", "task", "asked", "columns", "make", "fmt"), READ)
def test_rows_that_are_read(name, task, asked, columns, make, fmt):
    rows = rows_of(make)
    found = detect(rows, asked, columns, task, "rows.jsonl")
    assert found.format == fmt
    for row in rows:
        assert canonical(row, found).values


@every(("name", "task", "columns", "make", "code", "proposed"), REFUSED)
def test_rows_that_are_refused_name_what_reads_them(name, task, columns, make, code, proposed):
    rows = rows_of(make)
    with pytest.raises(RecipeError) as caught:
        detect(rows, "auto", columns, task, "rows.jsonl")
    (problem,) = caught.value.problems
    assert (problem.code, problem.file) == (code, "rows.jsonl")
    lines = [yaml.safe_load(text)["columns"] for text in re.findall(r"`(columns: [^`]*)`", problem.hint)]
    if proposed is None:  # no line reads what is lost
        assert all(column is None for line in lines for column in line.values())
    else:
        assert propose_columns(rows, "auto", columns, task) == proposed
        assert all(line in lines for line in proposed)
    for line in lines:  # each one is tried as `prepare` tries it
        if "field" not in line:
            found = detect(rows, "auto", {**columns, **line}, task, "rows.jsonl")
            assert all(canonical(row, found).values for row in rows)


def test_text_is_told_from_identifiers_addresses_and_numbers():
    texts = [
        ASK,
        ["写一首关于春天的诗", "请把这句话翻译成英文", "这本书讲了什么故事"],
        ["ดอกไม้สวยงามมาก", "แม่น้ำไหลไปทางใต้"],
        [*LONG[:1] * 5, *LONG[1:] * 5],
    ]
    texts += [
        [[{"role": "user", "content": one}] for one in ASK],
        [json.dumps([{"value": one}]) for one in ASK],
    ]
    for values in texts:
        assert is_text(values), values
    others = [
        ["open_qa", "closed_qa", "brainstorm"], ["体育", "科学", "文化"], ASK[:1] * 4, [*ASK[:2]] * 4,
        LONG[:1] * 4, [1, 2, 3], [0.5, 0.25],
        ["2019-04-25 12:57:54", "2019-04-26 11:57:54"], ["https://a.org/x y", "https://a.org/z y"],
        [["NN", "VB", "DT", "IN"], ["DT", "NN", "VB", "IN"]], [[0.1, 0.2, 0.3, 0.4], [0.5, 0.1, 0.2, 0.1]],
        [{"source": "pile", "n": 4}, {"source": "c4", "n": 5}], ["7f 0a 11 22", "8f 0b 12 23"], [],
    ]  # fmt: skip
    for values in others:
        assert not is_text(values), values


def test_a_column_of_text_that_begins_far_down_is_refused_with_its_row():
    found = detect(
        rows_of(lambda n: {"prompt": ASK[n], "completion": SAY[n], "note": ""}), "auto", {}, "causal-lm", "r"
    )
    values = {"prompt": ASK[0], "completion": SAY[0]}
    refuse_lost([Row({**values, "note": "n1"}, "r", 900)], found, "causal-lm")
    with pytest.raises(RecipeError) as caught:
        refuse_lost([Row({**values, "note": MORE[0]}, "r", 901)], found, "causal-lm")
    assert [(p.code, p.line) for p in caught.value.problems] == [("column-unread", 901)]


SECOND = [
    ("dpo", ("chosen", "rejected"), {"preferred_output": SAY[0], "non_preferred_output": SAY[1]},
     {"prompt": ASK[0], "chosen": MORE[0], "rejected": MORE[1]}),
    ("causal-lm", ("messages",), {"conversations": talk(0)}, {"messages": talk(1)}),
    ("kto", ("label",), {"kto_tag": True}, {"prompt": ASK[0], "completion": SAY[0], "label": "maths"}),
    ("reranker", ("document",), {"passage": SAY[0]}, {"query": ASK[0], "document": "d17", "score": 1}),
    ("grpo", ("prompt",), {"messages": talk(0)[:1]}, {"prompt": ASK[0]}),
]  # fmt: skip


@every(("task", "fields", "others", "row"), SECOND)
def test_a_needed_field_whose_column_is_left_out_is_read_from_its_other_name(task, fields, others, row):
    rows = [Row({**row, **others}, "r", 1)]
    found = detect(rows, "auto", dict.fromkeys(fields), task, "r")
    assert [found.columns[field] for field in fields] == list(others)
    assert canonical(rows[0], found).values
    only = [Row({name: value for name, value in {**row, **others}.items() if name not in fields}, "r", 1)]
    assert canonical(rows[0], found) == canonical(only[0], detect(only, "auto", {}, task, "r"))


def test_columns_that_are_left_out_do_not_decide_the_task():
    rows = rows_of(
        lambda n: {"prompt": ASK[n], "completion": SAY[n], "rejected": MORE[n], "system": "Brief."}
    )
    with pytest.raises(RecipeError) as caught:
        detect(rows, "auto", {"rejected": None}, "causal-lm", "r")
    assert caught.value.problems[0].code == "column-unread"


def test_a_written_text_format_trains_on_texts_whatever_is_beside_them():
    more = {
        "image_url": "https://example.org/a.png",
        "chosen": SAY[0],
        "rejected": SAY[1],
        "loss_mask": [0, 1],
    }
    rows = rows_of(lambda n: {"text": MORE[n], **more})
    found = detect(rows, "text", {}, "causal-lm", "r")
    assert [canonical(row, found).values for row in rows] == [{"text": text} for text in MORE]
    for name, value in more.items():
        with pytest.raises(RecipeError):
            detect([Row({"text": MORE[0], name: value}, "r", 1)], "auto", {}, "causal-lm", "r")


def test_a_column_that_begins_late_is_judged_by_several_rows_or_at_the_end():
    found = detect(rows_of(lambda n: {"prompt": ASK[n], "completion": SAY[n]}), "auto", {}, "causal-lm", "r")

    def read(values, ends=True):
        """Rows with these columns: the row after which they are refused, and the columns of the message."""
        later, number = LaterRows(found, "causal-lm"), 0
        try:
            for number, more in enumerate(values, start=1):
                later.read(Row({"prompt": ASK[0], "completion": SAY[0], **more}, "r", number))
            if ends:
                later.end()
        except RecipeError as error:
            (problem,) = error.problems
            assert problem.code in ("column-unread", "rows-of-another-task")
            return number, {name for name in ("title", "note", "rejected") if name in problem.message}
        return None

    titles = [{"title": f"{MORE[n % 4]} {n}"} for n in range(40)]
    assert read(titles, ends=False) == (20, {"title"})
    assert read([{"title": "Fix the login bug quickly"}, {}, {"note": MORE[0]}]) == (3, {"title", "note"})
    assert read([{}, {"rejected": SAY[1]}, {}]) == (2, {"rejected"})
    short = [{"title": f"Word{number}"} for number in range(60)]
    assert read([{"title": MORE[0]}, *short]) is None, "one of many words is an exception"


def test_a_reward_function_reads_its_columns():
    rows = rows_of(lambda n: {"prompt": ASK[n], "solution": SAY[n]})
    with pytest.raises(RecipeError) as caught:
        detect(rows, "auto", {}, "grpo", "r", [{"function": "length"}])
    assert caught.value.problems[0].code == "column-unread"
    read = [{"function": "exact_match", "arguments": {"column": "solution"}}]
    assert detect(rows, "auto", {}, "grpo", "r", read).format == "prompt"


def test_a_prompt_of_text_beside_conversations_does_not_vanish():
    def pair(prompt, n=0):
        return Row({"prompt": prompt, "chosen": talk(n), "rejected": [user(ASK[n]), bot(MORE[n])]}, "r", 7)

    found = match([pair("Answer in French.")], "auto", {}, "dpo", "r")
    with pytest.raises(RecipeError) as caught:
        canonical(pair("Answer in French."), found)
    assert [(p.code, p.line) for p in caught.value.problems] == [("column-unread", 7)]
    same = {"prompt": [user(ASK[0])], "chosen": [bot(SAY[0])], "rejected": [bot(MORE[0])]}
    assert canonical(pair(f" {ASK[0]}\n"), found).values == same
    left = match([pair("Answer in French.")], "auto", {"prompt": None}, "dpo", "r")
    assert canonical(pair("Answer in French."), left).values == same


def test_preferences_of_openai():
    tools = [{"type": "function", "function": {"name": "f"}}]
    values = {
        "input": {"messages": [user(ASK[0])], "tools": tools},
        "preferred_output": [bot(SAY[0])], "non_preferred_output": [bot(MORE[0])],
    }  # fmt: skip
    row = Row(values, "r", 1)
    shaped = {"prompt": [user(ASK[0])], "chosen": [bot(SAY[0])], "rejected": [bot(MORE[0])], "tools": tools}
    assert canonical(row, detect([row], "auto", {}, "dpo", "r")).values == shaped


def test_a_name_that_is_mapped_is_not_read_a_second_time():
    row = Row({"query": ASK[0], "pos": SAY[0], "neg": [MORE[0], MORE[1]]}, "r", 1)
    for columns in ({"negatives": "neg"}, {}):
        found = detect([row], "auto", columns, "embedding", "r")
        assert canonical(row, found).values["negatives"] == [MORE[0], MORE[1]]


def test_a_message_alone_is_one():
    row = Row({"prompt": user(ASK[0]), "completion": bot(SAY[0])}, "r", 1)
    for task, fmt in {"causal-lm": "chat", "kto": "unpaired-preference", "grpo": "prompt"}.items():
        values = {**row.values, "label": True} if task == "kto" else row.values
        one = Row(values, "r", 1)
        found = match([one], "auto", {}, task, "r")
        shaped = canonical(one, found).values
        assert found.format == fmt
        assert [user(ASK[0])] in (shaped.get("prompt"), shaped.get("messages", [])[:1])
