"""Answers that are labelled good or bad: rows, samples, balance of labels. kto_trainer.py has the Trainer.

Commands read rows with this module, so it imports neither torch nor trl.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError
from launcher.tasks.kto import LABELLED, LABELLED_CHAT, LABELLED_INSTRUCTION
from launcher.train.data.encoded import EncodedBatch
from launcher.train.data.formats import (
    after_prompt,
    instruction_prompt,
    opening,
    optional_text_in,
    refuse_outside,
    text_in,
    value_in,
)
from launcher.train.data.messages import is_conversation, messages_of, refuse_masks, tools_of
from launcher.train.data.sources import Row, bad_row, kind_of
from launcher.train.data.template import Message
from launcher.train.job import Job
from launcher.train.tasks.pairs import TrainAgainstReference, importing_trl, refuse_mixture
from launcher.train.tasks.task import OwnFormat, Shown
from launcher.train.upstream.trl_seams import labelled_samples

if TYPE_CHECKING:
    from launcher.train.data.encoded import Data

_COLUMNS = ["prompt_ids", "completion_ids", "label"]
_FLAGS: Mapping[Any, bool] = {
    **{1: True, 0: False},
    **dict.fromkeys(("true", "1", "desirable", "good"), True),
    **dict.fromkeys(("false", "0", "undesirable", "bad"), False),
}
"""A label as rows hold it, text in lower case -> whether the answer is good."""
_HINT = "write true or false"


def encode_labelled(job: Job, tokenizer: Any, rows: Sequence[Row]) -> EncodedBatch:
    """Rows {prompt, completion, label}, all text or all messages, as prompt_ids, completion_ids and label.

    trl's own preparation makes them. Samples stay uncut: trl's collator cuts them. A row whose prompt alone
    fills max_length is dropped (no-targets).
    """
    limit = job.data.max_length
    refuse_mixture(rows, "completion")
    numbered = [{**row.values, "row": number} for number, row in enumerate(rows)]
    prepared = labelled_samples(numbered, tokenizer, limit)
    batch = EncodedBatch(columns={name: [sample[name] for sample in prepared] for name in _COLUMNS})
    batch.rows = [sample["row"] for sample in prepared]
    batch.kept = len(prepared)
    batch.dropped = +Counter({"no-targets": len(rows) - len(prepared)})
    for sample in prepared:
        size = len(sample["prompt_ids"]) + len(sample["completion_ids"])
        batch.tokens += size
        batch.tokens_lost += max(0, size - limit)
        batch.truncated += size > limit
    return batch


# --- rows


def shape_labelled(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """{prompt, completion, label}, and tools: both text, or both messages."""
    asked, answer = columns["prompt"], columns["completion"]
    label = _label(row, columns["label"])
    if not (is_conversation(value_in(row, asked)) or is_conversation(value_in(row, answer))):
        return {"prompt": text_in(row, asked), "completion": text_in(row, answer), "label": label}
    prompt, completion = _turns(row, asked, "user"), _turns(row, answer, "assistant")
    completion = after_prompt(prompt, completion)
    if asking := opening(completion):
        if not is_conversation(row.values[asked]):
            refuse_outside(row, asked, asking, [answer], f"columns: {{messages: {answer}, {asked}: null}}")
            prompt = []
        prompt, completion = prompt + asking, completion[len(asking) :]
    return _of_messages(row, prompt, completion, label, columns)


def shape_instruction(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    given = optional_text_in(row, columns.get("input"))
    prompt = instruction_prompt(text_in(row, columns["instruction"]), given)
    label = _label(row, columns["label"])
    return {"prompt": prompt, "completion": text_in(row, columns["output"]), "label": label}


def shape_chat(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """The last message is the answer, those before it are the prompt."""
    value_in(row, columns["messages"])
    messages = messages_of(row, columns["messages"])
    return _of_messages(row, messages[:-1], messages[-1:], _label(row, columns["label"]), columns)


def _turns(row: Row, column: str, role: str) -> list[Message]:
    """The messages of a column; text is one of `role`."""
    if is_conversation(row.values[column]):
        return messages_of(row, column)
    return [{"role": role, "content": text_in(row, column)}]


def _of_messages(
    row: Row, prompt: list[Message], completion: list[Message], label: bool, columns: Mapping[str, str]
) -> dict[str, Any]:
    if not prompt or not completion or completion[-1]["role"] != "assistant":
        message = "the label is about the last message, which must be the assistant's and follow another one"
        raise bad_row(row, message, "delete the row")
    shaped: dict[str, Any] = {"prompt": prompt, "completion": completion}
    refuse_masks(row, shaped)
    tools = tools_of(row, columns["tools"]) if "tools" in columns else None
    return {**shaped, "label": label, **({} if tools is None else {"tools": tools})}


def _label(row: Row, column: str) -> bool:
    """Whether the answer is good. RecipeError for a value that says neither."""
    value = value_in(row, column)
    is_plain = isinstance(value, str | int | float)
    known = _FLAGS.get(value.strip().lower() if isinstance(value, str) else value) if is_plain else None
    if known is None:
        held = repr(value) if is_plain else kind_of(value)
        raise bad_row(row, f"column {column} holds {held}, expected whether the answer is good", _HINT)
    return known


def _made_up(draw: random.Random, index: int) -> tuple[str, str, bool]:
    """A question, its answer, and whether that is good: two thirds are."""
    noun, count = draw.choice(("stone", "river", "lamp", "cup")), draw.randint(2, 9)
    good = index % 3 != 0
    return f"How many {noun}s are there? ", f"There are {count}." if good else "I do not want to count.", good


def _made_up_labelled(draw: random.Random, index: int) -> dict[str, Any]:
    return dict(zip(("prompt", "completion", "label"), _made_up(draw, index), strict=True))


def _made_up_instruction(draw: random.Random, index: int) -> dict[str, Any]:
    return dict(zip(("instruction", "output", "label"), _made_up(draw, index), strict=True))


def _made_up_chat(draw: random.Random, index: int) -> dict[str, Any]:
    prompt, answer, label = _made_up(draw, index)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "label": label}


# --- the balance of the classes


def check_labels(job: Job, labels: Any) -> str:
    """One line about the labels of the training samples, as trl judges their weights.

    labels: an arrow column of booleans. RecipeError where all are the same.
    """
    import pyarrow.compute

    good = int(pyarrow.compute.sum(labels).as_py() or 0)
    bad = len(labels) - good
    if not good or not bad:
        message = f"all {len(labels)} training samples are labelled {'good' if good else 'bad'}"
        hint = "KTO needs answers of both kinds: add rows, or correct the column of the label"
        raise RecipeError(Problem("one-class", message, path="data.train", hint=hint))
    trainer = job.fields(job.trainer)
    weights = [float(str(trainer.get(f"{kind}_weight", 1.0))) for kind in ("desirable", "undesirable")]
    line = f"labels: {good} good (weight {weights[0]:g}), {bad} bad (weight {weights[1]:g})"
    # Eq. 8 of https://huggingface.co/papers/2402.01306, rounded as trl 1.16 rounds it
    shares = [round(bad * weights[1] / good * factor, 2) for factor in (1, 1.33)]
    others = [round(good * weights[0] / bad / factor, 2) for factor in (1.33, 1)]
    if good == bad or shares[0] <= weights[0] <= shares[1] or others[0] <= weights[1] <= others[1]:
        return line
    return (
        f"WARNING: {line}: trl recommends either desirable_weight from {shares[0]} to {shares[1]} or "
        f"undesirable_weight from {others[0]} to {others[1]}, not both"
    )


class TrainKTO(TrainAgainstReference):
    encode = staticmethod(encode_labelled)
    answers = ("completion",)
    own_formats = {
        LABELLED.name: OwnFormat(shape_labelled, _made_up_labelled),
        LABELLED_INSTRUCTION.name: OwnFormat(shape_instruction, _made_up_instruction),
        LABELLED_CHAT.name: OwnFormat(shape_chat, _made_up_chat),
    }

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        answer = "good" if sample["label"] else "bad"
        pieces = [
            (f"[prompt] {processing.decode(sample['prompt_ids'])}", False),
            (f"[{answer}] {processing.decode(sample['completion_ids'])}", True),
        ]
        targets = len(sample["completion_ids"])
        return pieces, len(sample["prompt_ids"]) + targets, targets

    def check_batch(self, job: Job, tokenizer: Any, data: Data, micro_batch: int) -> None:
        print(check_labels(job, data.train.with_format("arrow")["label"][:]))

    def arguments(self, job: Job) -> tuple[Any, dict[str, Any]]:
        with importing_trl(job.task.name):
            from trl import KTOConfig
        return KTOConfig, {"max_length": job.data.max_length}

    def trainer(self, job: Job, model: Any, processing: Any, common: dict[str, Any]) -> Any:
        from trl import KTOTrainer

        from launcher.train.tasks.kto_trainer import KlPairs, PreparedKtoTrainer
        from launcher.train.tasks.reference import frozen_copy, make_reference
        from launcher.train.upstream.trl_seams import reference_from

        args = common["args"]
        if job.task.least_batch_of(job)[0] > 1:
            common = common | {
                "data_collator": KlPairs(
                    pad_token_id=processing.pad_token_id,
                    max_length=args.max_length,
                    pad_to_multiple_of=args.pad_to_multiple_of,
                )
            }
        with reference_from(KTOTrainer, lambda: frozen_copy(job, args, model, processing)):
            return PreparedKtoTrainer(
                **common,
                ref_model=make_reference(job, args, model, processing),
                keep_initial_adapter=job.adapter.path is not None,
            )


TRAIN_TASK = TrainKTO()
