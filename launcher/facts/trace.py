"""What a trace of the real model says about its activations: a fact, gathered before planning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trace:
    """Bytes at the moments of one training step of a model, as functions of depth and micro-batch."""
