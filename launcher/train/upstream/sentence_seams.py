"""What sentence-transformers looks for in a model that is not its own."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class UnderDDP(nn.Module):
    """A model that calls the one in `inner`, which the Trainer has wrapped."""

    inner: list[Any]

    @property
    def _orig_mod(self) -> Any:
        """The cached losses look here for DDP, to synchronise gradients once for a micro-batch."""
        if self.inner and isinstance(self.inner[0], DistributedDataParallel):
            return self.inner[0]
        raise AttributeError("_orig_mod")
