"""DeepSpeed's shared-memory buffers: it makes one of 66 MiB per rank of a CPU run and never removes it.

They lie in /dev/shm, which is memory, and stay when the ranks end: a few hundred runs fill a machine. A rank
that is early would find a killed run's flags in them where the port is the same. Source: `shm_initialize` in
DeepSpeed's csrc/cpu/comm/shm.cpp, whose `shared_close` nobody calls (0.19.8).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def remove_shared_buffers(master_port: int, folder: Path = SHARED_MEMORY) -> None:
    """Remove this user's buffers of the run that meets on `master_port`.

    To be called where no rank of that run lives: before it starts and after it ended.
    """
    for path in folder.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{master_port}_*"):
        with contextlib.suppress(OSError):  # somebody else may remove it first
            path.unlink()
