"""Types and ranges of what `optimizer.params` and `scheduler.params` hold, for `lint`.

The classes have few annotations, and each checks its own part of the values; so the rows are written down
here, and `tests/contract/test_ds_parameters.py` asks the classes. A row named `CLASS.parameter` stands
before the one named `parameter`. `whole` is a number without a fraction, `converted` one that the class turns
from a string into a number itself, `length` and `items` are those of a list.
"""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

_ANY: Row = {"types": ["any"]}
_FLAG: Row = {"types": ["bool"]}
_FLAG_OR_NULL: Row = {"types": ["bool", "null"]}
_NUMBER: Row = {"types": ["float"]}
_FROM_0: Row = {"types": ["float"], "at_least": 0}
_ABOVE_0: Row = {"types": ["float"], "above": 0}
_SHARE: Row = {"types": ["float"], "at_least": 0, "at_most": 1}
_DECAY: Row = {"types": ["float"], "at_least": 0, "below": 1}
_COUNT: Row = {"types": ["int"], "above": 0}
_COUNT_OR_NULL: Row = {"types": ["int", "null"], "above": 0}
_STEPS_FROM_0: Row = {"types": ["float"], "at_least": 0, "whole": True}
_STEPS: Row = {"types": ["float"], "above": 0, "whole": True}
# One for each group of parameters, or one for all.
_RATES: Row = {"types": ["float", "list"], "at_least": 0, "items": _FROM_0}
_MOMENTA: Row = {"types": ["float", "list"], "at_least": 0, "below": 1, "items": _DECAY}


def _pair(item: Row) -> Row:
    return {"types": ["list"], "length": 2, "items": item}


def _one_of(*choices: str) -> Row:
    return {"types": ["str"], "choices": list(choices)}


OF_OPTIMIZERS: dict[str, Row] = {
    **dict.fromkeys(
        ("lr", "eps", "weight_decay", "momentum", "adam_lr", "muon_lr", "lr_decay", "momentum_decay",
         "initial_accumulator_value", "max_coeff", "min_coeff", "max_grad_norm", "tolerance_grad",
         "tolerance_change"),
        _FROM_0,
    ),
    **dict.fromkeys(
        ("adam_w_mode", "amsgrad", "bias_correction", "capturable", "centered", "decoupled_weight_decay",
         "differentiable", "eps_inside_sqrt", "fp32_optimizer_states", "maximize", "nesterov",
         "per_head_muon", "set_grad_none", "torch_adam"),
        _FLAG,
    ),
    **dict.fromkeys(("foreach", "fused"), _FLAG_OR_NULL),
    **dict.fromkeys(("alpha", "lambd", "t0", "dampening"), _NUMBER),
    "betas": _pair(_DECAY),
    "RMSprop.alpha": _FROM_0,
    "rho": _SHARE,
    "Adafactor.beta2_decay": {"types": ["float"], "at_most": 0},
    "Adafactor.d": {"types": ["float"], "at_least": 1},
    "Adafactor.eps": _pair({"types": ["float", "null"], "at_least": 0}),
    "etas": _pair(_ABOVE_0),
    "step_sizes": _pair(_FROM_0),
    "SparseAdam.eps": _ABOVE_0,
    "SparseAdam.lr": _ABOVE_0,
    "history_size": _COUNT,
    "max_iter": _COUNT,
    "max_eval": _COUNT_OR_NULL,
    "line_search_fn": {"types": ["str", "null"], "choices": ["strong_wolfe"]},
    "ns_method": _one_of("gram", "standard"),
}  # fmt: skip

OF_SCHEDULERS: dict[str, Row] = {
    "last_batch_iteration": {"types": ["float"], "at_least": -1, "whole": True},
    "last_epoch": {"types": ["int"], "choices": [-1]},  # others need an optimizer that has been scheduled
    **dict.fromkeys(
        ("warmup_min_lr", "lr_range_test_min_lr", "cycle_min_lr", "cycle_max_lr", "base_lr",
         "max_lr", "min_lr"),
        _RATES,
    ),
    "warmup_max_lr": {**_RATES, "types": ["float", "list", "null"]},
    "warmup_num_steps": {"types": ["int"]},
    "total_num_steps": _STEPS,
    "warmup_type": _one_of("log", "linear"),
    **dict.fromkeys(("warmup_min_ratio", "cos_min_ratio"), _SHARE),
    "lr_range_test_step_size": _COUNT,
    "lr_range_test_step_rate": _NUMBER,
    "lr_range_test_staircase": _FLAG,
    "cycle_first_step_size": {**_STEPS, "converted": True},
    "cycle_second_step_size": {"types": ["float", "null"], "at_least": 0, "whole": True, "converted": True},
    "cycle_first_stair_count": _STEPS_FROM_0,
    "cycle_second_stair_count": {"types": ["float", "null"], "at_least": 0, "whole": True},
    **dict.fromkeys(("decay_lr_rate", "decay_mom_rate", "decay_step_size"), _FROM_0),
    **dict.fromkeys(("cycle_min_mom", "cycle_max_mom", "base_momentum", "max_momentum"), _MOMENTA),
    **dict.fromkeys(("cycle_momentum", "three_phase"), _FLAG),
    **dict.fromkeys(("T_0", "T_mult"), _COUNT),
    **dict.fromkeys(("T_max", "step_size"), _STEPS),
    "eta_min": _FROM_0,
    "factor": {"types": ["float"], "above": 0, "at_most": 1},
    "total_iters": _STEPS_FROM_0,
    **dict.fromkeys(("step_size_up", "div_factor", "final_div_factor"), _ABOVE_0),
    "step_size_down": {"types": ["float", "null"], "above": 0},
    "CyclicLR.mode": _one_of("triangular", "triangular2", "exp_range"),
    "scale_mode": _one_of("cycle", "iterations"),
    **dict.fromkeys(("gamma", "power", "threshold", "eps"), _NUMBER),
    "start_factor": {"types": ["float"], "above": 0, "at_most": 1},
    "end_factor": _SHARE,
    "milestones": {"types": ["list"], "items": {"types": ["int"]}},
    **dict.fromkeys(("total_steps", "epochs", "steps_per_epoch"), _COUNT_OR_NULL),
    "pct_start": _SHARE,
    "anneal_strategy": _one_of("cos", "linear"),
    "mode": _one_of("min", "max"),
    "ReduceLROnPlateau.factor": {"types": ["float"], "below": 1},
    "threshold_mode": _one_of("rel", "abs"),
    **dict.fromkeys(("patience", "cooldown"), _STEPS_FROM_0),
    **dict.fromkeys(("lr_lambda", "schedulers", "scale_fn"), _ANY),
}  # fmt: skip


def checked(rows: dict[str, Row], classes: dict[str, list[str]]) -> dict[str, Row]:
    """The rows, sorted; RuntimeError if a class has a parameter without a row, or a row no parameter."""
    used = {
        f"{name}.{key}" if f"{name}.{key}" in rows else key for name, keys in classes.items() for key in keys
    }
    if used != rows.keys():
        raise RuntimeError(f"parameters of DeepSpeed's classes changed: {sorted(used ^ rows.keys())}")
    return dict(sorted(rows.items()))
