"""What each optimizer of transformers (`trainer.optim`) needs of the weights that it updates. Data.

Read in transformers 5.23 (trainer_optimizer.py), DeepSpeed 0.19.8 (runtime/zero) and the optimizers' sources.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Needs:
    """What one optimizer needs; by default nothing: it updates each value by that value's own gradients."""

    shards: bool = False
    """Tested over FSDP2's shards. Of the others Adagrad makes its states before the weights are shards, and
    those of bitsandbytes and transformers were not written for shards."""
    whole: str = ""
    """Why it does not train over ZeRO's partitions, which are flat vectors of parts of many matrices."""
    from_stage: int = 0
    """The lowest ZeRO stage for which `whole` is true."""
    by_tensor: str = ""
    """What it does tensor by tensor; over ZeRO's partitions it does that partition by partition."""
    targets: bool = False
    """`optim_target_modules` names the layers that it treats so."""
    layerwise: bool = False
    """It updates weights within the backward pass: one process, one micro-batch a step."""
    device: str = ""
    """The only device that has it, where that is one which nothing here trains on."""


_PLAIN, _SHARDS = Needs(), Needs(shards=True)
_PROJECTS = "it projects the gradient of each matrix, and a flat partition has no matrices"
_LOW_RANK = Needs(whole=_PROJECTS, targets=True)
_LAYERWISE = Needs(whole=_PROJECTS, targets=True, layerwise=True)
_IN_BACKWARD = Needs(whole="it updates weights in its own backward pass, and DeepSpeed's engine has another")
_AVERAGES = Needs(
    whole="it puts averaged weights in place to evaluate and save: into DeepSpeed's fp32 copies, not into "
    "those that are evaluated and saved"
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
        whole="DeepSpeed makes it anew with one group of parameters, where the Trainer has two: with and "
        "without weight decay",
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
"""What updates FSDP2's shards, and the parts of tensor parallelism, as it updates whole tensors."""


def needs_of(name: object) -> Needs:
    """Of a `trainer.optim`; nothing is known of a name that is not listed, so nothing is asked for it."""
    return OPTIMIZERS.get(str(name), _PLAIN)
