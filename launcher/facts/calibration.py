"""What earlier runs measured beside what was predicted: a fact, gathered before planning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Calibration:
    """Predicted and measured peaks of runs on one kind of device."""
