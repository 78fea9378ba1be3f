"""Reward functions: the shipped ones, the columns that a file's functions read, what a run's rewards were."""

from __future__ import annotations

import pytest

from launcher.errors import RecipeError
from launcher.recipe.reward_columns import columns_needed, columns_read, unread
from launcher.rows.sources import Row
from launcher.train.rewards.calls import load_rewards
from launcher.train.rewards.rollouts import Rollouts
from launcher.train.rewards.shipped import SHIPPED
from launcher.train.rewards.trial import reference_of

SAID = [{"role": "assistant", "content": "so 6"}]


@pytest.mark.parametrize(
    ("name", "completions", "given", "expected"),
    [
        ("exact_match", [" a ", "A", "b"], {"answer": ["a"] * 3}, [1, 0, 0]),
        ("exact_match", ["A"], {"answer": ["a"], "ignore_case": True}, [1]),
        ("exact_match", ["7"], {"solution": [7], "column": "solution"}, [1]),
        ("numeric_answer", ["1, 2, so 1,200", "#### 5 or 6", r"\boxed{1/2} not 3"],
         {"answer": ["1200", 5, 0.5]}, [1, 1, 1]),
        ("numeric_answer", [SAID, "no number", "6.1"], {"answer": ["x 6"] * 3}, [1, 0, 0]),
        ("numeric_answer", ["6"], {"answer": ["none"]}, [None]),
        ("numeric_answer", ["6.1"], {"answer": [6], "tolerance": 0.1}, [1]),
        ("regular_expression", ["a1", "a"], {"pattern": r"\d"}, [1, 0]),
        ("format", ["<think>x</think>\n<answer>1</answer>", "<answer>1</answer>",
                    "<think>x</think><answer>1</answer> more"], {}, [1, 0, 0]),
        ("length", ["", "", ""], {"tokens": 2, "completion_ids": [[1], [1, 2, 3], [1] * 9]}, [1, 0.5, 0]),
    ],
)  # fmt: skip
def test_shipped_functions(name, completions, given, expected):
    assert SHIPPED[name](completions=completions, prompts=completions, **given) == expected


def test_columns_that_functions_read(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(
        "def a(completions, answer, level=1, **columns): return columns['extra'], columns.get('more')\n"
        "def b(completions, **columns): return c(columns)\n"
    )

    def entry(name: str, **arguments: object) -> dict:
        return {"function": name if name in SHIPPED else f"{file}:{name}", "arguments": arguments}

    assert columns_read(entry("a")) == {"answer", "level", "extra", "more"}
    assert columns_needed(entry("a")) == {"answer"}
    assert columns_needed(entry("a", answer=1)) == frozenset()
    assert columns_read(entry("b")) is None
    assert columns_read(entry("numeric_answer", column="solution")) == {"solution"}
    assert columns_read(entry("length")) == frozenset()
    assert unread(["answer", "other"], [entry("a")]) == ("other",)
    assert unread(["answer", "other"], [entry("a"), entry("b")]) == ()
    assert unread(["answer"], []) == ("answer",)


def test_rewards_without_a_signal_are_reported():
    found, nan = Rollouts(), float("nan")
    found.add({"same": [1.0, 1.0], "none": [nan, nan], "varies": [0.0, 1.0]}, [-1.0, 1.0], 2)
    found.add({"same": [1.0, 1.0], "none": [nan, nan], "varies": [1.0, 1.0]}, [0.0, 0.0], 2)
    assert (found.generations, found.completions, found.groups, found.groups_without_signal) == (2, 4, 2, 1)
    assert found.constant == {"same": 1.0}
    assert found.unscored == {"same": 0, "none": 4, "varies": 0}
    assert len(found.warnings) == 2
    assert Rollouts(**found.saved()) == found
    flat = Rollouts()
    flat.add({"varies": [0.0, 0.0, 1.0, 1.0]}, [0.0] * 4, 2)
    assert (flat.constant, flat.groups_without_signal, len(flat.warnings)) == ({}, 2, 1)


def test_twenty_steps_without_a_signal_are_a_warning_and_so_are_the_next_twenty():
    found, warned = Rollouts(), []
    for step in range(70):
        advantages = [-1.0, 1.0] if step == 25 else [0.0, 0.0]
        if found.add({"f": [0.0, 0.0]}, advantages, 2, step):
            warned.append(step)
        found = Rollouts(**found.saved())
    assert warned == [20, 45, 65]


def test_a_reference_is_text_or_a_number():
    entry = {"function": "exact_match", "arguments": {}}
    own = {"function": "rewards.py:f", "arguments": {}}
    model = {"ground_truth": "42", "style": "rule"}

    def found(entry, **columns):
        return reference_of([entry], Row({"columns": columns}, "rows.jsonl", 3))

    assert found(entry, answer=7) == ["answer", "7"]
    assert found(entry, reward_model=model) == found(own, answer=None, x=model) == ["ground_truth", "42"]
    assert found(own, answer=["a"], solution="b") == ["solution", "b"]
    assert found(own, answer=model, other=1) == ["ground_truth", "42"]
    entry = {**entry, "arguments": {"column": "reward_model"}}
    for value in (model, ["42"], None):
        with pytest.raises(RecipeError) as caught:
            found(entry, reward_model=value)
        (problem,) = caught.value.problems
        assert (problem.code, problem.path) == ("reward-column", "reward[0]")
        assert (problem.file, problem.line) == ("rows.jsonl", 3)


def test_arguments_come_before_columns_of_the_same_name():
    entry = {"function": "exact_match", "weight": 1.0, "time_limit": 1.0, "arguments": {"column": "answer"}}
    (reward,) = load_rewards([entry])
    columns = {"answer": ["a"], "column": ["x"], "ignore_case": [True], "arguments": [1]}
    assert reward.function(prompts=["?"], completions=["A"], completion_ids=[[1]], **columns) == [0.0]
