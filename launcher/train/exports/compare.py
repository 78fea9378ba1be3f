"""An export beside the model that it came from: token ids, chat template, greedy answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import Problem, RunFailed


@dataclass(frozen=True, slots=True)
class ProbeAnswers:
    """What a model and its tokenizer say about the probes."""

    ids: list[list[int]]
    """Of the texts."""
    prompts: list[list[int]]
    template: str | None
    answers: list[list[dict[str, Any]]] = field(default_factory=list)
    """Tokens of the greedy answers, `margin` where it is known; empty for models that do not write."""


def compared(source: ProbeAnswers, export: ProbeAnswers, decode: Any, what: str) -> dict[str, Any]:
    """The comparison. RunFailed for other token ids or another template: those are no rounding.

    decode: ids -> text, for the answers that differ. what: the export, for messages.
    """
    other = [place for place, ids in enumerate(source.ids) if export.ids[place] != ids]
    if other:
        raise RunFailed(_other_ids(what, other[0], len(other), source.ids, export.ids))
    prompts = [place for place, ids in enumerate(source.prompts) if export.prompts[place] != ids]
    if prompts:
        raise RunFailed(_other_ids(what, prompts[0], len(prompts), source.prompts, export.prompts))
    if source.template != export.template:
        message = f"{what} has another chat template than the trained model; nothing was written"
        raise RunFailed(Problem("export-differs", message, hint="please report this"))
    pairs = enumerate(zip(source.answers, export.answers, strict=True))
    found = [_differs(place, one, two, decode) for place, (one, two) in pairs]
    differences = [difference for difference in found if difference is not None]
    return {
        "texts": len(source.ids),
        "prompts": len(source.prompts),
        "template": "none" if source.template is None else "identical",
        "answers": {"compared": len(source.answers), "equal": len(source.answers) - len(differences)},
        "differences": differences,
    }


def _other_ids(
    what: str, place: int, count: int, ours: Sequence[list[int]], theirs: Sequence[list[int]]
) -> Problem:
    first = next(
        (at for at, (one, two) in enumerate(zip(ours[place], theirs[place], strict=False)) if one != two),
        min(len(ours[place]), len(theirs[place])),
    )
    one, two = ours[place][first : first + 4], theirs[place][first : first + 4]
    message = (
        f"{what} tokenizes {count} of {len(ours)} texts differently; number {place + 1} from token "
        f"{first + 1} on: {two}, in training {one}. Nothing was written"
    )
    return Problem("export-differs", message, hint="please report this with the model's name")


def _differs(
    place: int, ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], decode: Any
) -> dict[str, Any] | None:
    """None for equal answers."""
    one, two = ([step["token"] for step in steps] for steps in (ours, theirs))
    if one == two:
        return None
    first = next(
        (at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(map(len, (one, two)))
    )
    return {
        "prompt": place + 1,
        "token": first + 1,
        "margin": ours[first]["margin"] if first < len(ours) else None,
        "trained": decode(one),
        "exported": decode(two),
    }
