"""What a rehearsal of a plan measures: the sizes of its messages and of its checkpoint. Pure."""

from __future__ import annotations

from launcher.engines import engine_of
from launcher.errors import Problem, RecipeError
from launcher.facts.rehearsal_course import Course
from launcher.memory.tensor_parallel import on_rank
from launcher.plan.plan import Plan

SECONDS = 20.0
LEAST_SECONDS, MOST_SECONDS = 1.0, 600.0
MEET_S = 120.0
"""Ranks of one start come within seconds of each other; torch read from a slow network disk takes minutes."""
JOIN_S = 300.0
"""Importing the training stack, compiling DeepSpeed's operator for CPUs, connecting thousands of ranks."""
LINKS_S, DEVICES_S, SAVE_S = 120.0, 60.0, 300.0

SMALL = 4 * 2**10
"""Bytes of the message that shows the latency of an all-reduce."""
LARGE = 64 * 2**20
"""Bytes from which on a message shows the bandwidth, on every network that exists."""
MOST = 2**30
"""Bytes of the largest message: two copies of it have room on every device."""
CAP = 2**30
"""Bytes that a rank saves at most: more than a disk's cache of writes takes in at once, and soon written."""
TOKEN = 2**16
"""Bytes that a rank writes which saves nothing in the run: whether the others see its file is asked all
the same."""


def make_course(plan: Plan, seconds: float, meet_s: float | None = None) -> Course:
    """The rehearsal of a plan. RecipeError for a number of seconds that measures nothing, or holds devices
    for nothing. meet_s: how long a rank is waited for, MEET_S where it is None."""
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        message = f"--seconds {seconds:g}: expected {LEAST_SECONDS:g} to {MOST_SECONDS:g}"
        raise RecipeError(Problem("usage", message, path="--seconds"))
    first, each = _shares(plan)
    return Course(
        seconds=seconds,
        sizes=message_sizes(plan),
        gradient_bytes=_gradient_bytes(plan),
        first_bytes=first,
        each_bytes=each,
        cap_bytes=CAP,
        meet_s=MEET_S if meet_s is None else meet_s,
        join_s=JOIN_S,
        links_s=LINKS_S,
        devices_s=DEVICES_S,
        save_s=SAVE_S,
    )


def message_sizes(plan: Plan) -> tuple[int, ...]:
    """A small message, the run's own bucket, and a large one where the bucket is none."""
    bucket = max(SMALL, min(bucket_bytes(plan), MOST))
    return tuple(sorted({SMALL, bucket, max(bucket, LARGE)}))


def bucket_bytes(plan: Plan) -> int:
    """Bytes of a message in which the run reduces its gradients."""
    return engine_of(plan).bucket_bytes(plan, max(1, _gradient_bytes(plan)))


def _gradient_bytes(plan: Plan) -> int:
    """Bytes of gradients that a rank reduces with its copies'; none where there is one copy."""
    _, job = on_rank(plan.spec, plan.job)
    return 0 if job.data_parallel == 1 else int(job.trainable_params * _gradient_width(plan))


def _gradient_width(plan: Plan) -> int:
    return int(plan.job.engine.widths(plan.job).gradient)


def _shares(plan: Plan) -> tuple[int, int]:
    """Bytes of a checkpoint that rank 0 writes, and every other rank.

    Sharded states are written by all ranks, the model of the run by the first one.
    """
    job = plan.job
    weights = job.engine.result(plan.spec, job)
    if plan.trainer.save_only_model:
        return weights, 0
    widths = job.engine.widths(job)
    _, part = on_rank(plan.spec, job)  # tensor-parallel ranks have states of their own matrices alone
    states = int(part.trainable_params * widths.optimizer)
    return engine_of(plan).written_shares(plan, weights, states, part.data_parallel)
