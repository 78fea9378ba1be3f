"""Matrix products in bfloat16 on a CPU without units for it, computed in float32 beside torch's allocator.

torch's own loops take up to fifty times as long there. Outputs are allocated as torch does it; the operands'
float32 copies live in numpy's memory, which the profiler does not see, so peaks stay equal to the byte.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

_LIBRARIES: list[Any] = []
"""Registrations end with the object that made them."""


def install_fast_products() -> None:
    """Replace the CPU kernels of mm, addmm, bmm and baddbmm; for other dtypes they call torch's own."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() or _LIBRARIES:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for name, kernel in (("mm", _mm), ("addmm", _addmm), ("bmm", _mm), ("baddbmm", _addmm)):
            library.impl(name, kernel, "CPU")
    _LIBRARIES.append(library)


def _outside(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 copy in numpy's memory."""
    return torch.from_numpy(np.empty(tuple(tensor.shape), np.float32)).copy_(tensor)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The matrix, or the copy that torch makes of one whose rows and columns are both strided."""
    (rows, columns), (down, across) = tensor.shape[-2:], tensor.stride()[-2:]
    by_rows = across == 1 and down >= max(1, columns)
    by_columns = down == 1 and across >= max(1, rows)
    return tensor if tensor.dim() > 2 or by_rows or by_columns else tensor.contiguous()


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = torch.mm if a.dim() == 2 else torch.bmm
    out = a.new_empty((*a.shape[:-1], b.shape[-1]))
    if a.dtype != torch.bfloat16:
        return product(a, b, out=out)
    a, b = _readable(a), _readable(b)
    wide = torch.from_numpy(np.empty(tuple(out.shape), np.float32))
    return out.copy_(product(_outside(a), _outside(b), out=wide))


def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    product = torch.addmm if a.dim() == 2 else torch.baddbmm
    out = a.new_empty((*a.shape[:-1], b.shape[-1]))
    if a.dtype != torch.bfloat16:
        return product(bias, a, b, beta=beta, alpha=alpha, out=out)
    a, b = _readable(a), _readable(b)
    wide = torch.from_numpy(np.empty(tuple(out.shape), np.float32))
    product(_outside(bias), _outside(a), _outside(b), beta=beta, alpha=alpha, out=wide)
    return out.copy_(wide)
