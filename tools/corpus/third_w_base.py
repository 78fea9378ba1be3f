"""What the makers of the third held-out set's letter w share."""

from __future__ import annotations

ONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def rank(port: int) -> dict[str, str]:
    """The variables of a single process, which a notebook's first cell sets."""
    return {**ONE, "MASTER_PORT": str(port)}
