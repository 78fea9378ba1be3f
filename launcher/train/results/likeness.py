"""Whether two models say the same: their logits on a few real tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from launcher.train.job import Job
from launcher.train.model.processing import added_ids

TOLERANCE = 1e-5
"""Of logits in float32 that should be equal: for each unit of the largest one, at least one unit.

float32 itself is not more exact: SmolLM2-135M with an adapter, whose logits reach 44, is 6e-5 from its own
logits in float64, and merged 8e-5 from its unmerged ones.
"""
_ROWS, _TOKENS, _ANSWER = 3, 64, 8
_TEXT = "The quick brown fox jumps over the lazy dog, and 12 more do so in 1984."


@dataclass(frozen=True, slots=True)
class Difference:
    """How far logits are from those that they are compared with."""

    largest: float
    """Largest absolute difference; NaN or infinite where a logit is."""
    scale: float
    """Largest absolute logit of those that they are compared with."""
    same_choice: float
    """Share of places (tokens; rows of a classifier) where the likeliest answer is the same."""

    @property
    def allowed(self) -> float:
        """What float32 may lose."""
        return TOLERANCE * max(1.0, self.scale)

    @property
    def is_none(self) -> bool:
        """Whether nothing but float32's own inexactness is between them; never for what is not finite."""
        return self.largest <= self.allowed

    def to_json(self) -> dict[str, float]:
        return {"largest": self.largest, "allowed": self.allowed, "same_choice": self.same_choice}


def probes(job: Job, processing: Any, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Inputs of the model, one row each: the run's first samples, of which data.json holds the text.

    Ids of added tokens are among them. A picture is drawn; a run without samples has a sentence of ours.
    """
    if not job.task.reads_tokens:
        return [dict(processing(_picture(), return_tensors="pt"))]
    texts = ["".join(text for text, _ in sample["pieces"]) for sample in record.get("samples", ())][:_ROWS]
    extra = added_ids(job, processing)
    rows = []
    for text in texts or [_TEXT]:
        ids = processing(text, add_special_tokens=True)["input_ids"][:_TOKENS]
        rows.append(torch.tensor([ids + extra or [processing.eos_token_id or 0]]))
    if not job.task.is_encoder_decoder:
        return [{"input_ids": row} for row in rows]
    start = processing.pad_token_id  # T5's; any token will do
    return [
        {"input_ids": row, "decoder_input_ids": torch.tensor([[start, *row[0, :_ANSWER].tolist()]])}
        for row in rows
    ]


def _picture() -> Any:
    """One with every value and no symmetry."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, size=(64, 64, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def logits_of(model: Any, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Logits of each input, [..., classes] in float32, on the CPU."""
    model.eval()
    with torch.inference_mode():
        return [model(**one).logits.float().cpu() for one in inputs]


def difference(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> Difference:
    """How far `these` logits are from `those`, of the same inputs."""
    gaps = torch.cat([(one - other).abs().flatten() for one, other in zip(these, those, strict=True)])
    choices = [
        (one.argmax(-1) == other.argmax(-1)).flatten() for one, other in zip(these, those, strict=True)
    ]
    return Difference(
        largest=gaps.max().item(),  # a NaN wins
        scale=max(one.abs().max().item() for one in those),
        same_choice=torch.cat(choices).float().mean().item(),
    )
