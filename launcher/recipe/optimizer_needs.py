"""Requirements of the optimizers of transformers (`trainer.optim`) on the weights that they update.

Read in transformers 5.23 (trainer_optimizer.py), DeepSpeed 0.19.8 (runtime/zero) and the optimizers' sources.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of one optimizer; none by default: each element is updated from its own gradient."""

    shards: bool = False
    """Works on FSDP2's shards (tested). Adagrad creates its states before the weights are sharded; those of
    bitsandbytes and transformers were not written for shards."""
    whole: str = ""
    """Why it cannot train on ZeRO's partitions, which are flat vectors across many matrices; "" if it can."""
    from_stage: int = 0
    """The lowest ZeRO stage to which `whole` applies."""
    by_tensor: str = ""
    """What it does per tensor; with ZeRO, per partition."""
    targets: bool = False
    """Needs `optim_target_modules`: the layers whose gradients it projects."""
    layerwise: bool = False
    """Updates weights during the backward pass: one process, one micro-batch per step."""
    device: str = ""
    """The only devices that have it, where these are not supported here."""


_PLAIN, _SHARDS = Needs(), Needs(shards=True)
_PROJECTS = "it projects the gradient of each matrix, and a flat partition has no matrices"
_LOW_RANK = Needs(whole=_PROJECTS, targets=True)
_LAYERWISE = Needs(whole=_PROJECTS, targets=True, layerwise=True)
_IN_BACKWARD = Needs(whole="it updates weights in its own backward pass, which DeepSpeed's engine replaces")
_AVERAGES = Needs(
    whole="it swaps in averaged weights to evaluate and save: into DeepSpeed's fp32 copies, not into the "
    "weights that are evaluated and saved"
)

OPTIMIZERS: dict[str, Needs] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop"), _SHARDS),
    **dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit", "adamw_anyprecision"), _PLAIN),
    **dict.fromkeys(
        ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "ademamix",
         "ademamix_8bit", "paged_ademamix_8bit", "paged_ademamix_32bit", "lion_8bit", "lion_32bit",
         "paged_lion_8bit", "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
        _PLAIN,
    ),
    "adagrad": Needs(
        whole="DeepSpeed recreates it with one parameter group, while the Trainer has two: with and without "
        "weight decay",
        from_stage=1,
    ),
    "adafactor": Needs(by_tensor="clips its updates and factors its states"),
    "stable_adamw": Needs(by_tensor="clips its updates"),
    "grokadamw": Needs(by_tensor="clips gradients and lowers its momentum"),
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw"), _LOW_RANK),
    **dict.fromkeys(
        ("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise",
         "apollo_adamw_layerwise"),
        _LAYERWISE,
    ),
    **dict.fromkeys(("lomo", "adalomo"), _IN_BACKWARD),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), _AVERAGES),
    "adamw_torch_xla": Needs(device="TPUs"),
    "adamw_torch_npu_fused": Needs(device="Ascend NPUs"),
}  # fmt: skip
IN_SHARDS = tuple(name for name, needs in OPTIMIZERS.items() if needs.shards)
"""Optimizers that work on FSDP2's shards and on tensor-parallel shards."""


def needs_of(name: object) -> Needs:
    """Requirements of a `trainer.optim`; none for an unknown name."""
    return OPTIMIZERS.get(str(name), _PLAIN)
