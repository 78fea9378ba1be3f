"""Samples as people read them: text in pieces, each learnt or not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.train.data.encoded import IGNORED
from launcher.train.tasks import train_task

SHOWN_CHARACTERS = 2000

Piece = tuple[str, bool]
"""(text, whether it is learnt)"""


def decode_pieces(tokenizer: Any, ids: Sequence[int], labels: Sequence[int]) -> list[Piece]:
    """The text of a sample, cut wherever learnt and unlearnt tokens meet."""
    pieces = []
    flags = [label != IGNORED for label in labels]
    for learnt, run in itertools.groupby(zip(ids, flags, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        pieces.append((text, learnt))
    return pieces


def mark_pieces(pieces: Sequence[Piece]) -> str:
    """Pieces as one text, the learnt ones between ⟦ and ⟧, cut to a readable length."""
    text = "".join(f"⟦{piece}⟧" if learnt else piece for piece, learnt in pieces)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"


def is_target(label: int) -> bool:
    """Whether a token with this label contributes to the loss."""
    return label != IGNORED


def show_sample(
    task: str, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None
) -> dict[str, Any]:
    """One prepared sample as JSON: its tokens, how many are targets, its text in pieces."""
    pieces, tokens, targets = train_task(task).shown(processing, sample, labels)
    return {"tokens": tokens, "targets": targets, "pieces": [list(piece) for piece in pieces]}
