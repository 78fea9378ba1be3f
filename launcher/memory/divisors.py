"""Divisors of a count: of a batch, of heads, of devices. Pure."""

from __future__ import annotations

import math


def divisors(number: int) -> list[int]:
    """All divisors of a number of at least 1, the smallest first; in the time of its square root."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return [*low, *(number // d for d in reversed(low) if d * d != number)]
