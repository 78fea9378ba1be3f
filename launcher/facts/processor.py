"""What a processor can compute at most, from what Linux says of it. Pure but for `probe_processor`.

Peaks are counted, not measured: cores times clock times what one core's vector or matrix units finish in a
cycle. The shares of them that training reaches are assumptions of the plan's speed model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HIGHEST_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
"""kHz."""
CPUINFO = Path("/proc/cpuinfo")

_SINGLE = (("avx512f", 64), ("avx2", 32), ("avx", 16))
"""Flag -> fp32 operations a core finishes in a cycle: two units of so many lanes, a multiply-add is two."""
_PLAIN = 8
"""Of four lanes, in two units, of which one adds and one multiplies."""
_HALF = (("amx_bf16", 1024), ("avx512_bf16", 128))
"""The same of bf16 products with fp32 sums; AMX: 16 x 16 x 32 multiply-adds in 16 cycles."""
_EMULATED = 1 / 4
"""Share of the fp32 rate where bf16 has no unit of its own: operands are widened before each product."""


@dataclass(frozen=True, slots=True)
class Processor:
    """One core's peaks, in operations a second."""

    single: float
    """fp32 products."""
    half: float
    """bf16 products with fp32 sums."""
    name: str
    """The vector or matrix units that were counted, e.g. `avx512f, amx_bf16 at 2.7 GHz`."""

    @property
    def has_half(self) -> bool:
        """Whether bf16 has units of its own."""
        return self.half > self.single


def probe_processor() -> Processor | None:
    """This machine's processor; None where Linux says too little of it."""
    try:
        text = CPUINFO.read_text("utf-8", errors="replace")
    except OSError:
        return None
    try:
        return read_processor(text, float(HIGHEST_CLOCK.read_text("ascii")) * 1e3)
    except (OSError, ValueError):  # a virtual machine's clock does not change
        return read_processor(text)


def read_processor(text: str, hertz: float | None = None) -> Processor | None:
    """The processor of /proc/cpuinfo's text, of its first core; None without clock or flags.

    hertz: its highest clock, where that is known: an idle core's text has the clock of the moment.
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    try:
        hertz = hertz or float(fields["cpu MHz"]) * 1e6
    except (KeyError, ValueError):
        return None
    if not flags or not 1e8 <= hertz <= 1e10:
        return None
    units, single = next(((name, lanes) for name, lanes in _SINGLE if name in flags), ("sse", _PLAIN))
    matrix, half = next(((name, lanes) for name, lanes in _HALF if name in flags), (None, single * _EMULATED))
    named = units if matrix is None else f"{units}, {matrix}"
    return Processor(single * hertz, half * hertz, f"{named} at {hertz / 1e9:.1f} GHz")
