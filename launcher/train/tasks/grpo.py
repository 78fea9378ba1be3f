"""GRPO with trl: prompts are prepared before processes meet, completions are written in the steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.recipe.reward_columns import columns_needed, unread
from launcher.recipe.suggestions import listed
from launcher.rows.messages import Message
from launcher.rows.sources import Row, bad_row, kind_of
from launcher.train.data.chat import in_forms, plain_message, require_template, template_origin
from launcher.train.data.encoded import EncodedBatch, token_ids
from launcher.train.data.rendered import RenderCheck
from launcher.train.data.template import Template
from launcher.train.job import Job
from launcher.train.rewards.calls import ROW
from launcher.train.rewards.trial import ROWS, reference_of, try_rewards
from launcher.train.tasks.pairs import HasReference
from launcher.train.tasks.task import Shown

if TYPE_CHECKING:
    from launcher.rows.sources import Detected
    from launcher.train.data.encoded import Encoder

_ROW = "row"
"""The column of a prepared sample with prompt, place and columns, as JSON: rows may differ in their types."""


class PromptEncoder:
    """Prompts with the columns that reward functions read; one without room for a completion is left out."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self._job, self._tokenizer = job, tokenizer
        self._rendered = RenderCheck(template_origin(job), masked=False)
        longest = job.trainer.others["max_completion_length"]
        assert isinstance(longest, int), "recorded from `generation:`"
        self._room = job.data.max_length - longest
        self._needed = [(entry["function"], columns_needed(entry)) for entry in job.reward]

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        batch, dropped, notes = EncodedBatch(columns={}), Counter[str](), Counter[str]()
        for number, row in enumerate(rows):
            prompt = row.values["prompt"]
            ids = self._ids(prompt) if isinstance(prompt, str) else self._rendered_ids(prompt, row, notes)
            batch.tokens += len(ids)
            if len(ids) > self._room or not ids:
                dropped["overlong" if self._job.data.overlong == "drop" else "no-targets"] += 1
                continue
            kept = {"prompt": prompt, "place": f"{Path(row.file).name}:{row.number}"}
            kept["columns"] = self._columns(row)
            kept["reference"] = reference_of(self._job.reward, row)
            batch.keep(number, {"input_ids": ids, _ROW: json.dumps(kept)})
        batch.dropped, batch.notes = +dropped, +notes
        return batch

    def _ids(self, text: str) -> list[int]:
        (ids,) = token_ids(self._tokenizer, [text])
        return ids

    def _rendered_ids(self, messages: list[Message], row: Row, notes: Counter[str]) -> list[int]:
        """Token ids as trl's trainer will make them. RecipeError where the template leaves something out."""
        require_template(self._tokenizer)
        template = Template(self._tokenizer, None)

        def find(turns: list[Message]) -> list[Message]:
            taken = self._rendered.adapted(template, turns, row)
            self._rendered.check(template, taken, template.render(taken), row, notes)
            return taken

        taken = in_forms(find, [plain_message(message) for message in messages], self._rendered.origin, row)
        row.values["prompt"][:] = taken
        made = self._tokenizer.apply_chat_template(
            taken, add_generation_prompt=True, tokenize=True, return_dict=True, **self._template_options()
        )
        return list(made["input_ids"])

    def _template_options(self) -> dict[str, Any]:
        found = self._job.trainer.others.get("chat_template_kwargs")
        return dict(found) if isinstance(found, Mapping) else {}

    def _columns(self, row: Row) -> dict[str, Any]:
        columns: dict[str, Any] = dict(row.values["columns"])
        unused = unread(list(columns), self._job.reward)
        columns = {name: value for name, value in columns.items() if name not in unused}
        for function, needed in self._needed:
            for name in sorted(needed - columns.keys()):
                if self._job.tiny:  # made-up rows have an answer and nothing else
                    columns[name] = row.values["columns"].get("answer")
                    continue
                message = f"the row has no column {name}, which the reward function {function} reads"
                hint = f"it has {listed(row.values['columns'])}"
                raise bad_row(row, message, hint, code="column-missing", path="reward")
        for name, value in columns.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                message = f"column {name} holds {kind_of(value)}, which reward functions cannot get"
                raise bad_row(row, message, "write it as text or numbers") from None
        return columns


def _decoded(batch: Mapping[str, list[Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    rows = [json.loads(text) for text in batch[_ROW]]
    columns = [{name: row["columns"].get(name) for name in names} for row in rows]
    given = [{"place": row["place"], "columns": own} for row, own in zip(rows, columns, strict=True)]
    return {"prompt": [row["prompt"] for row in rows], ROW: given}


class TrainGRPO(HasReference):
    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        return PromptEncoder(job, processing)

    def collator(self, job: Job, processing: Any) -> None:
        return None

    def samples(self, job: Job, samples: Any, processing: Any) -> Any:
        """Rows as GRPOTrainer reads them: prompt and columns, the same columns in all rows."""
        names = sorted({name for text in samples[_ROW] for name in json.loads(text)["columns"]})
        return samples.with_transform(lambda batch: _decoded(batch, names))

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        row = json.loads(sample[_ROW])
        pieces = [(processing.decode(sample["input_ids"]), False)]
        pieces += [(f"\n[{name}] {value}", False) for name, value in row["columns"].items()]
        return pieces, len(sample["input_ids"]), 0

    def tried(self, job: Job, processing: Any, samples: Any) -> dict[str, Any]:
        rows = [json.loads(samples[index][_ROW]) for index in range(min(ROWS, len(samples)))]
        return {"rewards": try_rewards(job, processing, rows)}

    def arguments(self, job: Job) -> tuple[Any, dict[str, Any]]:
        from launcher.train.rewards.trainer import GRPOConfig

        return GRPOConfig, {}

    def trainer(self, job: Job, model: Any, processing: Any, common: dict[str, Any]) -> Any:
        from launcher.train.rewards.trainer import make_trainer

        return make_trainer(job, model, processing, common)


TRAIN_TASK = TrainGRPO()
