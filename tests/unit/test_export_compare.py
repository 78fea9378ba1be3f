"""An export beside the trained model: what is an error, and what is reported."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from launcher.errors import RunFailed
from launcher.train.exports.compare import ProbeAnswers, compared
from launcher.train.exports.probes import PROMPTS, TEXTS, texts


def steps(*tokens: int, margin: float = 0.5) -> list[dict]:
    return [{"token": token, "margin": margin} for token in tokens]


TRAINED = ProbeAnswers([[1, 2, 3], [4]], [[5, 6], [7]], "T", [steps(1, 2), steps(3, 4)])


def with_(**changes) -> ProbeAnswers:
    found = {"ids": TRAINED.ids, "prompts": TRAINED.prompts, "template": "T", "answers": TRAINED.answers}
    return ProbeAnswers(**{**found, **changes})


def said(other: ProbeAnswers) -> dict:
    return compared(TRAINED, other, str, "the export")


def test_equal_answers_have_no_differences():
    found = said(with_())
    assert found["answers"] == {"compared": 2, "equal": 2}
    assert (found["texts"], found["template"], found["differences"]) == (2, "identical", [])


@pytest.mark.parametrize(
    "other",
    [
        with_(ids=[[1, 2, 3], [4, 4]]),
        with_(ids=[[1, 9, 3], [4]]),
        with_(prompts=[[5, 6], [1, 7]]),  # BOS twice
        with_(template="T "),
        with_(template=None),
    ],
)
def test_other_ids_or_another_template_are_no_rounding(other):
    with pytest.raises(RunFailed) as wrong:
        said(other)
    assert [problem.code for problem in wrong.value.problems] == ["export-differs"]


@pytest.mark.parametrize(
    ("answer", "token", "margin"), [(steps(3, 9), 2, 0.5), (steps(9), 1, 0.5), (steps(3, 4, 5), 3, None)]
)
def test_an_answer_that_differs_is_reported_from_its_first_token(answer, token, margin):
    found = said(with_(answers=[TRAINED.answers[0], answer]))
    assert found["answers"] == {"compared": 2, "equal": 1}
    (one,) = found["differences"]
    assert (one["prompt"], one["token"], one["margin"]) == (2, token, margin)
    assert one["trained"] == "[3, 4]"


def test_the_texts_are_as_many_as_promised_and_all_different():
    assert len(texts()) == len(set(texts())) == TEXTS
    assert PROMPTS == 50
