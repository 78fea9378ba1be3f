"""Lines that libraries print in healthy runs: kept in the logs, but not shown.

They concern what the plan or the worker has already handled, or what effilaunch shows itself. Every other
line is shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from launcher.knowledge.failures.catalogue import FAILURES


@dataclass(frozen=True, slots=True)
class Noise:
    """A kind of line that is not shown, and why."""

    pattern: str
    """A regular expression (`re.search`) over one line."""
    reason: str


SIGNS_OF = (
    "kbit-reentrant",
    "use-cache-checkpointing",
    "tied-weights-adapter",
    "omp-threads",
    "report-to-default",
    "zero3-no-gather",
)
"""Known failures whose signs a run shows although the plan or the worker has handled what they warn of."""

NOISE: tuple[Noise, ...] = (
    Noise(
        r"^\{'(?:loss|eval_\w+|train_runtime)': .*'epoch': .*\}$",
        "the Trainer's metrics: the progress line shows them, and metrics.jsonl keeps them",
    ),
    Noise(r"\d+%\|[^|]*\| ?[\d.,]+\w*/[\d.,?]+\w* \[[^\]]*\]$", "a progress bar: effilaunch shows its own"),
    Noise(
        r"^\[[\d-]+ [\d:,]+\] \[INFO\] \[\w+\.py:\d+:\w+\] (?!.*(?i:\boverflow\b|skipping step))",
        "DeepSpeed's INFO log, which repeats the plan. Skipped steps are shown",
    ),
    Noise(r"Setting accelerator to CPU\. If you have GPU", "the plan shows the device"),
    Noise(r"Unable to find hostfile, will proceed with", "the plan shows the nodes"),
    Noise(
        r"^Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'",
        "bitsandbytes then uses torch, as planned",
    ),
    Noise(
        r"FutureWarning: `(?:is_gradient_checkpointing|gradient_checkpointing_\w+)` is deprecated",
        "libraries still call names from before transformers 5",
    ),
    Noise(
        r"FutureWarning: `torch\.distributed\.(?:all_gather_into|reduce_scatter)_tensor` is deprecated",
        "DeepSpeed still calls a name from before torch 2.13",
    ),
    Noise(
        r"_distutils_hack/__init__\.py:\d+: UserWarning: (?:Distutils was imported|Setuptools is replacing)",
        "harmless import order while torch builds DeepSpeed's extensions",
    ),
    Noise(r"^DeepSpeed \S+ built successfully$", "missing extensions are built at start-up"),
    Noise(
        r"Gradient accumulation steps mismatch: GradientAccumulationPlugin has 1, DeepSpeed config has \d+\.",
        "the plan sets accumulation in DeepSpeed only",
    ),
    Noise(
        r"UserWarning: OMP_NUM_THREADS/MKL_NUM_THREADS unset, we set it at \d+",
        "the plan sets the number of threads",
    ),
)


def is_noise(line: str) -> bool:
    """Whether a line of a run's output is not shown."""
    return any(pattern.search(line) for pattern in _patterns())


@cache
def _patterns() -> Sequence[re.Pattern[str]]:
    signs = [sign for failure in FAILURES if failure.id in SIGNS_OF for sign in failure.signs]
    return [re.compile(pattern) for pattern in (*(noise.pattern for noise in NOISE), *signs)]
