"""The shared memory that DeepSpeed's CPU runs leave: a run's own goes, another's stays."""

from __future__ import annotations

import os

from launcher.execute.leftovers import remove_shared_buffers


def test_only_the_buffers_of_the_named_run_go(tmp_path):
    mine = f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_29500"
    others = [
        f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_29501_0",
        f"deepspeed_allreduce_buffer_{os.getuid() + 1}_127.0.0.1_29500_0",
        "psm_29500_0",
    ]
    for name in [f"{mine}_0", f"{mine}_1", *others]:
        (tmp_path / name).write_bytes(b"")
    remove_shared_buffers(29500, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
