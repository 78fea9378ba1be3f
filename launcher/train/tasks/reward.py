"""Reward models with trl, whose rows are prepared before processes meet.

Importing this module imports trl. MachineError when that fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.rows.messages import Message, is_conversation, messages_of
from launcher.rows.sources import Row
from launcher.train.data.chat import require_template
from launcher.train.data.encoded import EncodedBatch, refuse_padded_end, token_ids, with_eos
from launcher.train.job import Job
from launcher.train.own_trainer import over_own
from launcher.train.tasks.pairs import TrainPairs, importing_trl, refuse_mixture
from launcher.train.tasks.task import Shown
from launcher.train.trainers import PreparedTrainer
from launcher.train.upstream.trl_seams import WholeMetrics

with importing_trl("reward"):
    from trl import RewardConfig, RewardTrainer

_SIDES = ("chosen", "rejected")
_COLUMNS = (*(f"{side}_ids" for side in _SIDES), "margin")


class PreparedRewardTrainer(WholeMetrics, PreparedTrainer, RewardTrainer):
    """RewardTrainer for rows of `encode_pairs`."""

    def metric_counts(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"rows": self.loss_items(inputs)}


def encode_pairs(job: Job, tokenizer: Any, rows: Sequence[Row]) -> EncodedBatch:
    """Rows {prompt, chosen, rejected}, all text or all messages, as chosen_ids and rejected_ids.

    margin: by how much the reward of chosen shall be higher, 0 where a row does not say. Each side holds the
    prompt with one answer, tokenised as one text as trl does it. A pair of which one side is
    longer than max_length is left out (overlong with `data.overlong: drop`, else no-targets), and so is one
    of equal answers. `tokens` are those of both sides.
    """
    limit = job.data.max_length
    too_long = "overlong" if job.data.overlong == "drop" else "no-targets"
    different = [number for number, row in enumerate(rows) if row.values["chosen"] != row.values["rejected"]]
    refuse_mixture([rows[number] for number in different])
    batch = EncodedBatch(columns={name: [] for name in _COLUMNS})
    dropped = Counter({"equal": len(rows) - len(different)})
    for number in different:
        sides = [_side(tokenizer, rows[number], side) for side in _SIDES]
        batch.tokens += sum(map(len, sides))
        if max(map(len, sides)) > limit:
            dropped[too_long] += 1
            continue
        for ids in sides:
            refuse_padded_end(tokenizer, rows[number], ids)
        margin = float(rows[number].values.get("margin", 0.0))
        batch.keep(number, dict(zip(_COLUMNS, (*sides, margin), strict=True)))
    batch.dropped = +dropped
    return batch


def _side(tokenizer: Any, row: Row, side: str) -> list[int]:
    """Token ids of the prompt with one answer."""
    return _ids(tokenizer, row.values["prompt"] + row.values[side], row.values.get("tools"))


def _ids(tokenizer: Any, whole: str | list[Message], tools: Any = None) -> list[int]:
    if isinstance(whole, str):
        (ids,) = token_ids(tokenizer, [whole])
        return with_eos(tokenizer, ids)
    return list(tokenizer.apply_chat_template(whole, tools=tools, return_dict=True)["input_ids"])


class TrainReward(TrainPairs):
    encode = staticmethod(encode_pairs)

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        pieces = [(f"[{side}] {processing.decode(sample[f'{side}_ids'])}", True) for side in _SIDES]
        tokens = sum(len(sample[f"{side}_ids"]) for side in _SIDES)
        return pieces, tokens, tokens

    def arguments(self, job: Job) -> tuple[Any, dict[str, Any]]:
        return RewardConfig, {"max_length": job.data.max_length}

    def trainer(self, job: Job, model: Any, processing: Any, common: dict[str, Any]) -> Any:
        return over_own(job, PreparedRewardTrainer)(**common)

    def reply(self, model: Any, processing: Any, prompt: str, inputs: Any) -> str:
        """The reward of a text, or of a conversation that is given as JSON: encoded as a row's side is."""
        whole: Any = prompt
        if is_conversation(prompt):
            require_template(processing)
            whole = messages_of(Row({"prompt": prompt}, "the prompt", 1), "prompt")
        ids = inputs["input_ids"].new_tensor([_ids(processing, whole)])
        return f"{float(model(input_ids=ids).logits[0, 0]):.4f}"


TRAIN_TASK = TrainReward()
