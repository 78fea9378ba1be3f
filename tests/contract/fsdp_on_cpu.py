"""FSDP2 over CPU processes, for tests alone: accelerate shards over GPUs only and sets up DDP elsewhere.

Three ways to use it, with a recipe that says `sharding: {engine: fsdp}` on several CPU processes:

- copy or link this file beside the recipe and write `python: fsdp_on_cpu.py`: it defines a hook, `callbacks`;
- import it in a rank before anything else, as `Forks.run(..., prelude="fsdp_on_cpu")` does;
- write `HOOKS` into a hooks file that has more to say.

Without it such a run ends with engine-mismatch (launcher/train/training.py check_engine).

What it does: when accelerate's state is made with an FSDP plugin over CPU ranks, they count as GPUs for as
long as it decides about the engine (accelerate 1.15 state.py looks at the plugin for those alone). Device,
process group and number of ranks are settled by then and stay. The attribute is private: another version may
need another patch.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

HOOKS = f"""\
import sys

sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
import fsdp_on_cpu
"""
"""The first lines of a hooks file that also needs the patch."""


def shard_on_cpu() -> None:
    """Install the patch in this process; a second call changes nothing."""
    plain = AcceleratorState.__init__
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        shared, several = PartialState._shared_state, DistributedType.MULTI_CPU
        if kwargs.get("fsdp_plugin") is not None and shared.get("distributed_type") == several:
            shared["distributed_type"] = DistributedType.MULTI_GPU
        plain(self, *args, **kwargs)

    AcceleratorState.__init__ = patched


def callbacks() -> list[Any]:
    """The hook of a recipe's `python` file; it adds nothing."""
    return []


shard_on_cpu()
