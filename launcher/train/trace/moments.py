"""Tapes at small depths and batches, extended to the whole model: the few moments that may rule.

Live bytes at one event are a sum over layers of sums over samples. So from two depths of each stack and
two batches they are known for every depth and batch, event by event, without saying beforehand which one
is the peak. Events that never rule are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launcher.train.trace.tape import KINDS, Tape

Rows = Any
"""numpy array of (events, kinds), bytes."""


def segment_rows(tape: Tape) -> dict[str, Rows]:
    """Live bytes by kind after every event of a segment; equal keys follow each other.

    Segments of middle layers are left out: live bytes there lie between those of the first and last layer.
    """
    live = np.array(tape.live(), dtype=np.float64).reshape(-1, len(KINDS))
    ends = [segment.start for segment in tape.segments[1:]] + [len(tape.events)]
    rows: dict[str, list[Rows]] = {}
    for segment, end in zip(tape.segments, ends, strict=True):
        if not segment.key.endswith("-middle"):
            # What is live as the segment begins counts too, so that none is empty.
            rows.setdefault(segment.key, []).append(live[max(segment.start - 1, 0) : max(end, segment.start)])
    return {key: np.concatenate(parts) for key, parts in rows.items()}


def extend(
    tapes: Mapping[tuple[tuple[int, ...], int], Tape], depths: Sequence[int]
) -> list[tuple[str, Rows, Rows]]:
    """(segment, constant, per row of the batch) of every moment, for stacks of `depths`.

    tapes: by depths and rows; for every number of rows the base depth, and each stack alone deeper.
    """
    parts = {corner: segment_rows(tape) for corner, tape in tapes.items()}
    batches = sorted({rows for _, rows in tapes})
    shapes = sorted({depth for depth, _ in tapes}, key=sum)
    moments = []
    for key in parts[shapes[0], batches[0]]:
        whole = []
        for rows in batches:
            corners = _alike([parts[shape, rows][key] for shape in shapes])
            whole.append(to_depth(corners, shapes, depths))
        whole = _alike(whole)
        slope = (whole[-1] - whole[0]) / (batches[-1] - batches[0]) if len(batches) > 1 else 0 * whole[0]
        moments.append((key, whole[0] - slope * batches[0], slope))
    return moments


def to_depth(corners: Sequence[Rows], shapes: Sequence[tuple[int, ...]], depths: Sequence[int]) -> Rows:
    """Values at `depths`, from those at `shapes`: a base, and the base with one stack deeper."""
    base, value = shapes[0], corners[0]
    for shape, corner in zip(shapes[1:], corners[1:], strict=True):
        stack = next(i for i in range(len(base)) if shape[i] != base[i])
        value = value + (corner - corners[0]) / (shape[stack] - base[stack]) * (depths[stack] - base[stack])
    return value


def _alike(corners: list[Rows]) -> list[Rows]:
    """The corners, or the fullest moment of each where they differ in their events."""
    if len({len(corner) for corner in corners}) == 1:
        return corners
    return [corner[[int(corner.sum(axis=1).argmax())]] for corner in corners]


def ruling(moments: Sequence[tuple[str, Rows, Rows]]) -> list[dict[str, Any]]:
    """The moments that may be the fullest for some batch and some share of the gradients."""
    free = [KINDS.index(kind) for kind in ("activations", "logits", "temporary")]
    grads = KINDS.index("gradients")
    found = []
    for key, constant, per_row in moments:
        marks = np.stack(
            [
                constant[:, free].sum(axis=1),
                per_row[:, free].sum(axis=1),
                constant[:, grads] + per_row[:, grads],
            ],
            axis=1,
        ).round()
        # At one row a moment holds constant and slope together, so the constant alone may be negative.
        marks[:, 0] += marks[:, 1]
        for index in _undominated(marks):
            values = {
                kind: [float(constant[index, k]), float(per_row[index, k])]
                for k, kind in enumerate(KINDS)
                if kind not in ("weights", "optimizer")
            }
            found.append({"segment": key, **values})
    return found


def _undominated(marks: Rows) -> list[int]:
    """Rows that no other row reaches in every column."""
    order = np.argsort(-marks.sum(axis=1), kind="stable")
    kept: list[int] = []
    for index in order:
        if not kept or not (marks[kept] >= marks[index]).all(axis=1).any():
            kept.append(int(index))
    return sorted(kept)


def state_bytes(tapes: Mapping[tuple[tuple[int, ...], int], Tape], depths: Sequence[int]) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer states at full depth, where all of them are there."""
    batch = min(rows for _, rows in tapes)
    most = {
        corner: np.array(tape.live(), dtype=np.float64).max(axis=0)
        for corner, tape in tapes.items()
        if corner[1] == batch
    }
    shapes = sorted({depth for depth, _ in most}, key=sum)
    whole = to_depth([most[shape, batch] for shape in shapes], shapes, depths)
    return {kind: float(whole[KINDS.index(kind)]) for kind in ("weights", "gradients", "optimizer")}
