"""Reward models with trl, whose rows are prepared before processes meet.

Importing this module imports trl. MachineError when that fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from launcher.errors import MachineError, Problem
from launcher.train.data.chat import require_template
from launcher.train.data.encoded import EncodedBatch, token_ids, with_eos
from launcher.train.data.messages import is_conversation, messages_of
from launcher.train.data.preferences import PreferenceEncoder, refuse_mixture
from launcher.train.data.sources import Row
from launcher.train.data.turns import Message
from launcher.train.job import Job
from launcher.train.tasks.task import Shown, TrainTask
from launcher.train.trainers import PreparedTrainer

if TYPE_CHECKING:
    from launcher.train.data.encoded import Encoder
    from launcher.train.data.formats import Detected

try:
    from trl import RewardConfig, RewardTrainer
except ImportError as error:
    raise MachineError(
        Problem(
            "trl-missing",
            f"task reward needs trl, which cannot be imported: {error}",
            path="task",
            hint="pip install 'effilaunch[dpo]'",
        )
    ) from error

_SIDES = ("chosen", "rejected")


class PreparedRewardTrainer(PreparedTrainer, RewardTrainer):
    """RewardTrainer for rows of `encode_pairs`."""


def encode_pairs(job: Job, tokenizer: Any, rows: Sequence[Row]) -> EncodedBatch:
    """Rows {prompt, chosen, rejected}, all text or all messages, as chosen_ids and rejected_ids.

    Each holds the prompt with one answer, tokenised as one text as trl does it. A pair of which one side is
    longer than max_length is left out (overlong where the recipe says drop, else no-targets), and so is one
    of equal answers. `tokens` are those of both sides.
    """
    limit = job.data.max_length
    too_long = "overlong" if job.data.overlong == "drop" else "no-targets"
    different = [number for number, row in enumerate(rows) if row.values["chosen"] != row.values["rejected"]]
    refuse_mixture([rows[number] for number in different])
    batch = EncodedBatch({f"{side}_ids": [] for side in _SIDES})
    dropped = {"equal": len(rows) - len(different), too_long: 0}
    for number in different:
        sides = [_side(tokenizer, rows[number], side) for side in _SIDES]
        batch.tokens += sum(map(len, sides))
        if max(map(len, sides)) > limit:
            dropped[too_long] += 1
            continue
        batch.kept += 1
        batch.rows.append(number)
        for column, ids in zip(batch.columns.values(), sides, strict=True):
            column.append(ids)
    batch.dropped = {reason: count for reason, count in dropped.items() if count}
    return batch


def _side(tokenizer: Any, row: Row, side: str) -> list[int]:
    """Token ids of the prompt with one answer."""
    return _ids(tokenizer, row.values["prompt"] + row.values[side], row.values.get("tools"))


def _ids(tokenizer: Any, whole: str | list[Message], tools: Any = None) -> list[int]:
    if isinstance(whole, str):
        (ids,) = token_ids(tokenizer, [whole])
        return with_eos(tokenizer, ids)
    return list(tokenizer.apply_chat_template(whole, tools=tools, return_dict=True)["input_ids"])


class TrainReward(TrainTask):
    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        return PreferenceEncoder(job, processing, partial(encode_pairs, job, processing))

    def collator(self, job: Job, processing: Any) -> None:
        return None

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        pieces = [(f"[{side}] {processing.decode(sample[f'{side}_ids'])}", True) for side in _SIDES]
        tokens = sum(len(sample[f"{side}_ids"]) for side in _SIDES)
        return pieces, tokens, tokens

    def arguments(self, job: Job) -> tuple[Any, dict[str, Any]]:
        return RewardConfig, {"max_length": job.data.max_length}

    def trainer(self, job: Job, model: Any, processing: Any, common: dict[str, Any]) -> Any:
        trainer = PreparedRewardTrainer(**common)
        # The loss is a mean over the pairs of a micro-batch, whatever the model's forward takes.
        trainer.model_accepts_loss_kwargs = False
        return trainer

    def reply(self, model: Any, processing: Any, prompt: str, inputs: Any) -> str:
        """The reward of a text, or of a conversation that is given as JSON: encoded as a row's side is."""
        whole: Any = prompt
        if is_conversation(prompt):
            require_template(processing)
            whole = messages_of(Row({"prompt": prompt}, "the prompt", 1), "prompt")
        ids = inputs["input_ids"].new_tensor([_ids(processing, whole)])
        return f"{float(model(input_ids=ids).logits[0, 0]):.4f}"


TRAIN_TASK = TrainReward()
