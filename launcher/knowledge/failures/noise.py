"""Lines that libraries print in healthy runs and that tell nobody anything: in the logs, but not shown.

Here is what effilaunch has dealt with by the plan or in the worker, and what it shows in its own words. What
is not listed is shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from launcher.knowledge.failures.catalogue import FAILURES


@dataclass(frozen=True, slots=True)
class Noise:
    """One kind of line."""

    pattern: str
    """A regular expression (`re.search`) over one line."""
    reason: str
    """Why it is not shown."""


SIGNS_OF = (
    "kbit-reentrant",
    "use-cache-checkpointing",
    "tied-weights-adapter",
    "omp-threads",
    "report-to-default",
    "zero3-no-gather",
)
"""Known failures whose signs a run shows although the plan or the worker has mended what they warn of."""

NOISE: tuple[Noise, ...] = (
    Noise(
        r"^\{'(?:loss|eval_\w+|train_runtime)': .*'epoch': .*\}$",
        "the Trainer's rows: the line of the run shows them, and metrics.jsonl holds them",
    ),
    Noise(r"\d+%\|[^|]*\| ?[\d.,]+\w*/[\d.,?]+\w* \[[^\]]*\]$", "a bar: the line of the run has one"),
    Noise(
        r"^\[[\d-]+ [\d:,]+\] \[INFO\] \[\w+\.py:\d+:\w+\] (?!.*(?i:\boverflow\b|skipping step))",
        "DeepSpeed's log of what it does: the plan says what that is. Not that a step was skipped: then the "
        "weights stay as they were",
    ),
    Noise(r"Setting accelerator to CPU\. If you have GPU", "the plan says what it runs on"),
    Noise(r"Unable to find hostfile, will proceed with", "the plan says on which machines it runs"),
    Noise(
        r"^Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'",
        "bitsandbytes then multiplies with torch, as measured and planned",
    ),
    Noise(
        r"FutureWarning: `(?:is_gradient_checkpointing|gradient_checkpointing_\w+)` is deprecated",
        "libraries that call each other by names of before transformers 5",
    ),
    Noise(
        r"FutureWarning: `torch\.distributed\.(?:all_gather_into|reduce_scatter)_tensor` is deprecated",
        "DeepSpeed calls torch by a name of before 2.13",
    ),
    Noise(
        r"_distutils_hack/__init__\.py:\d+: UserWarning: (?:Distutils was imported|Setuptools is replacing)",
        "torch builds DeepSpeed's kernels in an order that setuptools minds",
    ),
    Noise(r"^DeepSpeed \S+ built successfully$", "its kernels are built where they are missing"),
    Noise(
        r"Gradient accumulation steps mismatch: GradientAccumulationPlugin has 1, DeepSpeed config has \d+\.",
        "the plan gives the accumulation to DeepSpeed alone",
    ),
    Noise(
        r"UserWarning: OMP_NUM_THREADS/MKL_NUM_THREADS unset, we set it at \d+",
        "the plan decides about threads",
    ),
)
"""Every kind of line that is not shown."""


def is_noise(line: str) -> bool:
    """Whether a line of a run's output is not shown."""
    return any(pattern.search(line) for pattern in _patterns())


@cache
def _patterns() -> Sequence[re.Pattern[str]]:
    signs = [sign for failure in FAILURES if failure.id in SIGNS_OF for sign in failure.signs]
    return [re.compile(pattern) for pattern in (*(noise.pattern for noise in NOISE), *signs)]
