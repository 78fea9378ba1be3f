"""Rows of axolotl's preference trainings: its types of pairs and of labelled answers, as hooks (0.21)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from launcher.importing.key_tables import Peer
from launcher.importing.reading import Effect, shown
from launcher.importing.row_sources import Answers, Ranked, Shape, unknown_fields


class _Marks(NamedTuple):
    """The text around the parts of a conversation."""

    system: str
    turn: str
    answer: str


_CHATML = _Marks(
    "<|im_start|>system\n{system}<|im_end|>\n",
    "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
    "{answer}<|im_end|>",
)
_LLAMA3 = _Marks(
    "<|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>",
    "<|start_header_id|>user<|end_header_id|>\n\n{prompt}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "{answer}<|eot_id|>",
)
_PAIR = (("chosen", "chosen"), ("rejected", "rejected"))
_SINGLE = (("completion", "completion"),)


def _of(
    marks: _Marks, prompt: str, answers: tuple[tuple[str, str], ...], within: int | None = None
) -> Answers:
    system = "" if prompt == answers[0][1] else marks.system  # a conversation has no column of system texts
    label = "label" if answers == _SINGLE else ""
    return Answers(marks.turn, system, marks.answer, prompt, answers, within=within, label=label)


def _pairs() -> Iterator[tuple[str, Answers]]:
    for name, marks in (("chatml", _CHATML), ("llama3", _LLAMA3)):
        yield f"{name}.argilla_chat", _of(marks, "chosen", _PAIR, 1)
        for kind, column in (("icr", "input"), ("intel", "question"), ("prompt_pairs", "prompt")):
            yield f"{name}.{kind}", _of(marks, column, _PAIR)
        yield f"{name}.ultra", _of(marks, "prompt", _PAIR, 1)


def _labelled() -> Iterator[tuple[str, Answers]]:
    for name, marks in (("chatml", _CHATML), ("llama3", _LLAMA3)):
        yield f"{name}.argilla", _of(marks, "instruction", _SINGLE)
        yield f"{name}.argilla_chat", _of(marks, "completion", _SINGLE, 1)
        for kind in ("prompt_pairs", "ultra"):  # ChatML's marks under both names
            yield f"{name}.{kind}", _of(_CHATML, "prompt", _SINGLE)
    yield "chatml.intel", _of(_CHATML, "question", _SINGLE)


PAIRS: Mapping[str, Answers] = dict(_pairs())
"""Types of rows with `rl: dpo` and `ipo`."""
LABELLED: Mapping[str, Answers] = dict(_labelled())
"""Types of rows with `rl: kto`."""
RANKED: Mapping[str, Ranked] = {
    "bradley_terry.chat_template": Ranked("input", "chosen", "rejected", system="system"),
}
"""Types of rows with `reward_model: true`."""


_OWN_TYPES = ("bradley_terry", "chat_template", "chatml", "llama3", "passthrough", "user_defined", "zephyr")
"""Beginnings of types that axolotl has, with or without a hook here."""


def shape_of(entry: Peer, kind: Any) -> Shape | None:
    """The hook of a data set's type; None, with the reason in the reading, where it has none."""
    task = entry.reading.task
    if isinstance(kind, dict):
        return _own(entry, kind, labelled=task.labels_answers)
    known: Mapping[str, Shape] = LABELLED if task.labels_answers else PAIRS if task.has_reference else RANKED
    shape = known.get(str(kind))
    if shape is None:
        columns = "prompt, completion and label" if task.labels_answers else "prompt, chosen and rejected"
        reason = f"axolotl {entry.tool.version} has no such type"
        if str(kind).partition(".")[0] in _OWN_TYPES:
            reason = "its prompt is axolotl's own code"
        entry.drop("type", Effect.NEEDED, reason, f"write a format_row that makes {columns}")
    return shape


def _own(entry: Peer, kind: Mapping[str, Any], *, labelled: bool) -> Answers | None:
    """`type: {prompt_format: "...", field_prompt: ...}`."""
    given = {str(key): str(value) for key, value in kind.items() if value is not None}
    names = ("completion",) if labelled else ("chosen", "rejected")
    known = {"field_system", "field_prompt", "prompt_format"} | {f"field_{name}" for name in names}
    known |= {f"{name}_format" for name in names} | ({"field_label"} if labelled else set())
    for key in given.keys() - known:
        entry.reading.drop(entry.given("type").inner(key, given[key]), Effect.NONE, "no key of such a type")
    turn = given.get("prompt_format", "{prompt}")
    formats = {
        given.get(f"{name}_format", f"{{{name}}}").replace(f"{{{name}}}", "{answer}") for name in names
    }
    plain = unknown_fields(turn, ("prompt",)) == [] and len(formats) == 1
    if not plain or unknown_fields(answer := formats.pop(), ("answer",)) != []:
        reason = f"the braces of {shown(turn)} and of its answers are not one prompt and one answer alone"
        entry.drop("type", Effect.NEEDED, reason, "write a format_row")
        return None
    columns = tuple((name, given.get(f"field_{name}", name)) for name in names)
    label = given.get("field_label", "label") if labelled else ""
    return Answers(turn, "", answer, given.get("field_prompt", "prompt"), columns, label=label)
