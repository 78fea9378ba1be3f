"""Lines that libraries print in healthy runs: kept in the logs, but not shown.

They concern what the plan or the worker has already handled, or what effilaunch shows itself. Every other
line is shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from launcher.knowledge.failures.catalogue import FAILURES

SIGNS_OF = (
    "kbit-reentrant", "use-cache-checkpointing", "tied-weights-adapter", "omp-threads", "report-to-default",
    "zero3-no-gather",
)  # fmt: skip
"""Known failures whose signs a run shows although the plan or the worker has handled what they warn of."""

NOISE = (
    # The Trainer's metrics: the progress line shows them, and metrics.jsonl keeps them.
    r"^\{'(?:loss|eval_\w+|train_runtime)': .*'epoch': .*\}$",
    # A progress bar: effilaunch shows its own.
    r"\d+%\|[^|]*\| ?[\d.,]+\w*/[\d.,?]+\w* \[[^\]]*\]$",
    # DeepSpeed's INFO log, which repeats the plan. Skipped steps are shown.
    r"^\[[\d-]+ [\d:,]+\] \[INFO\] \[\w+\.py:\d+:\w+\] (?!.*(?i:\boverflow\b|skipping step))",
    # The plan shows the device.
    r"Setting accelerator to CPU\. If you have GPU",
    # The plan shows the nodes.
    r"Unable to find hostfile, will proceed with",
    # bitsandbytes then uses torch, as planned.
    r"^Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'",
    # Libraries still call names from before transformers 5.
    r"FutureWarning: `(?:is_gradient_checkpointing|gradient_checkpointing_\w+)` is deprecated",
    # DeepSpeed still calls a name from before torch 2.13.
    r"FutureWarning: `torch\.distributed\.(?:all_gather_into|reduce_scatter)_tensor` is deprecated",
    # Harmless import order while torch builds DeepSpeed's extensions.
    r"_distutils_hack/__init__\.py:\d+: UserWarning: (?:Distutils was imported|Setuptools is replacing)",
    # Missing extensions are built at start-up.
    r"^DeepSpeed \S+ built successfully$",
    # The plan sets accumulation in DeepSpeed only.
    r"Gradient accumulation steps mismatch: GradientAccumulationPlugin has 1, DeepSpeed config has \d+\.",
    # The plan sets the number of threads.
    r"UserWarning: OMP_NUM_THREADS/MKL_NUM_THREADS unset, we set it at \d+",
)
"""Regular expressions (`re.search`) over one line, each with the reason why such a line is not shown."""


def is_noise(line: str) -> bool:
    """Whether a line of a run's output is not shown."""
    return any(pattern.search(line) for pattern in _patterns())


@cache
def _patterns() -> Sequence[re.Pattern[str]]:
    signs = [sign for failure in FAILURES if failure.id in SIGNS_OF for sign in failure.signs]
    return [re.compile(pattern) for pattern in (*NOISE, *signs)]
