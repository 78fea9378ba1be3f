"""Memory of losses that compare the embeddings of a micro-batch with each other. Pure arithmetic.

As read in sentence-transformers 6.2 (multiple_negatives_ranking.py and matryoshka.py in
sentence_transformer/losses, base/losses/gradcache.py, util/similarity.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.memory.job import MemoryJob
from launcher.models.model import ModelSpec
from launcher.tasks import task_named

RANDOM_STATE = 5056
"""Bytes of torch's CPU generator, of which GradCache keeps a copy for each of its forward passes."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """Bytes of embeddings [texts, width] and of their similarities [samples, documents of all ranks]."""

    saved: int = 0
    """Kept for the loss's backward pass."""
    flow: int = 0
    """The most that this backward pass takes besides."""
    cache: int = 0
    """Held while GradCache computes its mini-batches again: gradients of embeddings, states of generators."""


def contrast(spec: ModelSpec, job: MemoryJob, width: int, *, on_cpu: bool) -> Contrast:
    """`width`: bytes of a value of an embedding."""
    if task_named(spec.task).head != "none":
        return Contrast()
    column = job.micro_batch * spec.hidden_size * width
    own, texts = column * job.sequences_per_sample, job.sequences_per_sample
    compared = column * (1 + (texts - 1) * job.gathered)
    rows = min(job.mini_batch, job.micro_batch) if job.mini_batch else job.micro_batch
    similar = rows * job.micro_batch * (texts - 1) * job.gathered * width
    # A cached loss is run backwards for each width and each mini-batch of anchors, before the next one.
    times = 1 if job.mini_batch else max(1, job.matryoshka)
    # The pooled texts; of each width twice what is normalised (Normalize, cos_sim), and the logits.
    saved = own + times * (2 * compared + similar)
    # logsumexp: differences, their exponentials, and the product with the gradient.
    flow = 3 * similar + compared
    if not job.mini_batch:
        # MatryoshkaLoss holds all that the model returned (ForwardDecorator).
        states = job.sequence_length * own if job.matryoshka else 0
        return Contrast(saved + states, flow)
    states = RANDOM_STATE * job.forwards if on_cpu else 0
    return Contrast(saved + own, flow, own + states)
