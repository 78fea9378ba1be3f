"""What the optimizer's step allocates and frees. Pure arithmetic.

As read in torch 2.13 (optim/adamw.py and others: on CUDA `foreach` updates all tensors at once, a CPU one
after another; fused kernels and plain SGD allocate nothing), transformers 5.23 (optimization.Adafactor) and
DeepSpeed 0.19.8. Clipping gradients allocates one number for each tensor, then scales them in place.
"""

from __future__ import annotations

from launcher.facts.hardware import Hardware
from launcher.facts.model import ModelSpec
from launcher.memory.engine import trained_shapes
from launcher.memory.job import MemoryJob
from launcher.memory.states import trained_width

_FOREACH_COPIES = {"adamw_torch": 1, "adagrad": 2, "rmsprop": 1}
"""Copies of all values that `foreach` makes: denominators, and of Adagrad the scaled gradients."""
_LOOP_COPIES = {"adamw_torch": 2, "adagrad": 1, "rmsprop": 1, "adafactor": 2}
"""Copies of the values of the tensor that is updated; one of the tensor before it still has a name."""
_WIDENED = 2
"""Copies that Adafactor makes of 16-bit values beside: gradient and parameter in float32."""


def step_bytes(spec: ModelSpec, job: MemoryJob, hardware: Hardware) -> int:
    """Bytes beside states and gradients at the worst moment of the step."""
    if job.offload_optimizer != "none":
        return 0
    sharded = job.engine == "fsdp" or (job.engine == "deepspeed" and job.zero_stage > 0)
    ranks = job.data_parallel if sharded else 1
    trained = job.trainable_params
    updated = -(-(trained + job.whole_copies) // ranks)
    temporary, width = 0, trained_width(job.engine, job.precision, job.dtype, job.adapter)
    if job.engine == "deepspeed":
        width = 4
        if job.zero_stage or job.precision != "fp32":
            temporary = 4 * updated  # gradients in float32, beside the master copy
    if not hardware.is_cpu and job.optim in _FOREACH_COPIES:
        return temporary + _FOREACH_COPIES[job.optim] * width * updated
    return temporary + _looped(spec, job, trained, width) // ranks


def _looped(part: ModelSpec, job: MemoryJob, trained: int, width: int) -> int:
    """Bytes of temporaries where tensors are updated one after another."""
    copies = _LOOP_COPIES.get(job.optim, 0)
    if not copies:
        return 0
    shapes = trained_shapes(part, job)
    alone = max((shape.values for shape in shapes if shape.count == 1), default=0)
    repeated = max((shape.values for shape in shapes if shape.count > 1), default=0)
    if job.optim == "adafactor":
        copies, width = copies + (_WIDENED if width < 4 else 0), 4
    return width * max(copies * alone, (copies + 1) * repeated)
