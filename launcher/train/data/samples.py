"""Samples as people read them: text in pieces, each learnt or not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.train.data.encoded import IGNORED

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


def show_sample(
    task: str, tokenizer: Any, sample: Mapping[str, Any], labels: Sequence[str] | None
) -> dict[str, Any]:
    """One prepared sample as JSON: its tokens, how many are learnt, its text in pieces."""
    if task == "dpo":
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        pieces = [(f"[{name[:-4]}] {tokenizer.decode(sample[name])}", name != "prompt_ids") for name in names]
        tokens = sum(len(sample[name]) for name in names)
        return _shown(pieces, tokens, tokens - len(sample["prompt_ids"]))
    if task == "image-classification":
        assert labels is not None, "only pictures have no tokens, and they have labels"
        text = f"{sample['image_path'] or 'a picture'} -> {labels[sample['labels']]}"
        return _shown([(text, True)], 0, 1)
    ids, target = sample["input_ids"], sample["labels"]
    if task == "sequence-classification":
        assert labels is not None, "a single label is a class"
        pieces = [(tokenizer.decode(ids), False), (f" -> {labels[target]}", True)]
        return _shown(pieces, len(ids), 1)
    if task == "seq2seq-lm":  # what is read, and what is written
        own = [token for token in target if token != IGNORED]
        pieces = [(tokenizer.decode(ids), False), (tokenizer.decode(own), True)]
        return _shown(pieces, len(ids) + len(own), len(own))
    return _shown(decode_pieces(tokenizer, ids, target), len(ids), sum(x != IGNORED for x in target))


def _shown(pieces: Sequence[Piece], tokens: int, targets: int) -> dict[str, Any]:
    return {"tokens": tokens, "targets": targets, "pieces": [list(piece) for piece in pieces]}
