"""Tensor parallelism of transformers and accelerate over CPU processes, for tests alone.

accelerate takes a ParallelismConfig over GPUs only ("only compatible ... but got MULTI_CPU").
Import it in a rank before anything else, as `Forks.run(..., prelude="cut_on_cpu")` does. Without it such a
run ends with engine-mismatch (launcher/train/sharing.py no_cpu).

What it does: CPU ranks count as GPUs as soon as accelerate's state is made. Device, process group and number
of ranks are settled by then and stay. The attribute is private: another version may need another patch.
"""

from __future__ import annotations

import functools
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def cut_on_cpu() -> None:
    """Install the patch in this process; a second call changes nothing."""
    plain = AcceleratorState.__init__
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        shared, several = PartialState._shared_state, DistributedType.MULTI_CPU
        if shared.get("distributed_type") == several:
            shared["distributed_type"] = DistributedType.MULTI_GPU
        plain(self, *args, **kwargs)

    AcceleratorState.__init__ = patched


cut_on_cpu()
