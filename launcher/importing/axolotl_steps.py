"""Batch, optimizer, schedule, evaluations and saves of axolotl's YAML."""

from __future__ import annotations

from launcher.importing.arguments import as_bool, as_number, take_argument, take_field
from launcher.importing.axolotl_tables import OWN_OPTIMIZERS, OWN_SCHEDULES
from launcher.importing.found import Effect
from launcher.importing.peer import Peer, is_off


def take_steps(peer: Peer) -> None:
    micro, given = as_number(peer.values.get("micro_batch_size", 1)), peer.get("gradient_accumulation_steps")
    peer.default("trainer.per_device_train_batch_size", 1, "micro_batch_size")
    batch = as_number(peer.get("batch_size"))
    if given is not None:
        take_field(
            peer.reading, "gradient_accumulation_steps", given, peer.line("gradient_accumulation_steps")
        )
        if batch is not None:
            peer.drop("batch_size", Effect.NONE, "gradient_accumulation_steps is given too, and decides")
    elif batch is not None and micro:
        peer.take("trainer.gradient_accumulation_steps", max(1, int(batch // micro)), "batch_size",
                  note="batch_size // micro_batch_size, as for one process")  # fmt: skip
    peer.default("trainer.gradient_accumulation_steps", 1, "gradient_accumulation_steps")
    peer.default("trainer.average_tokens_across_devices", False, "average_tokens_across_devices")
    size = peer.reading.value("trainer.per_device_train_batch_size")
    if peer.reading.value("data.eval") is not None:
        peer.default("trainer.per_device_eval_batch_size", size, "eval_batch_size")
    epochs = peer.get("num_epochs")
    if epochs is not None and "trainer.max_steps" in peer.reading.taken:
        peer.drop("num_epochs", Effect.NONE, "max_steps goes before it")
    elif epochs is not None:
        take_field(peer.reading, "num_epochs", epochs, peer.line("num_epochs"), "num_train_epochs")
    elif "trainer.max_steps" not in peer.reading.taken:
        peer.default("trainer.num_train_epochs", 1.0, "num_epochs")
    seed = peer.get("seed")
    if seed is not None:
        take_argument(peer.reading, "seed", seed, peer.line("seed"))
    told = any(entry.key == "learning_rate" for entry in peer.reading.dropped)
    if "trainer.learning_rate" not in peer.reading.taken and not told:
        peer.reading.needs("trainer.learning_rate", None, "learning_rate is not there, and axolotl wants it")


def take_optimizer(peer: Peer) -> None:
    name = peer.get("optimizer")
    if name is None:
        peer.default("trainer.optim", "adamw_torch_fused", "optimizer")
    elif str(name) in OWN_OPTIMIZERS:
        peer.drop(
            "optimizer", Effect.TRAINING, "axolotl's own optimizer, which is not here", "write trainer.optim"
        )
    else:
        take_field(peer.reading, "optimizer", name, peer.line("optimizer"), "optim")
    _take_schedule(peer)
    _take_warmup(peer)
    value = peer.get("gradient_checkpointing")
    if isinstance(value, str) and value.lower() in ("offload", "offload_disk"):
        peer.take("trainer.activation_checkpointing", True, "gradient_checkpointing",
                  note="where it is kept does not matter")  # fmt: skip
    elif value is not None:
        take_argument(peer.reading, "gradient_checkpointing", value, peer.line("gradient_checkpointing"))
    for key in ("gradient_checkpointing_kwargs", "lr_scheduler_kwargs"):
        options = peer.get(key)
        if options is not None and not (key == "lr_scheduler_kwargs" and options == {}):
            take_argument(peer.reading, key, options, peer.line(key))
    compiled = peer.get("torch_compile")
    if as_bool(compiled) is not None:
        take_field(peer.reading, "torch_compile", compiled, peer.line("torch_compile"))
    for key, sampling in (("group_by_length", "group_by_length"), ("curriculum_sampling", "sequential"),
                          ("sample_packing_sequentially", "sequential")):  # fmt: skip
        if peer.switch(key):
            peer.take("trainer.train_sampling_strategy", sampling, key)


def _take_schedule(peer: Peer) -> None:
    name, low = peer.get("lr_scheduler"), peer.get("cosine_min_lr_ratio")
    if str(name) in OWN_SCHEDULES:
        peer.drop("lr_scheduler", Effect.TRAINING, "axolotl's own schedule, which is not here",
                  "write trainer.lr_scheduler_type")  # fmt: skip
    elif name is not None:
        take_field(peer.reading, "lr_scheduler", name, peer.line("lr_scheduler"), "lr_scheduler_type")
    else:
        peer.default("trainer.lr_scheduler_type", "cosine", "lr_scheduler")
    if low is None:
        return
    ratio = as_number(low)
    if str(name or "cosine") == "cosine" and ratio is not None and 0 < ratio < 1 and (
        "cosine_constant_lr_ratio" not in peer.values
    ):  # fmt: skip
        peer.take("trainer.lr_scheduler_type", "cosine_with_min_lr", "cosine_min_lr_ratio")
        peer.take("trainer.lr_scheduler_kwargs", {"min_lr_rate": ratio}, "cosine_min_lr_ratio")
    elif ratio != 0:
        peer.drop("cosine_min_lr_ratio", Effect.TRAINING, "only of a cosine schedule, without a constant end")


def _take_warmup(peer: Peer) -> None:
    """Without a word axolotl warms up for 3 % of the steps, and for 100 at most."""
    for key in ("warmup_steps", "warmup_ratio"):
        value = peer.get(key)
        if value is not None:
            take_argument(peer.reading, key, value, peer.line(key))
    if not any(key in peer.values for key in ("warmup_steps", "warmup_ratio")):
        peer.default("trainer.warmup_steps", 0.03, "warmup_ratio",
                     "a share of all steps; axolotl stops at 100 steps")  # fmt: skip


def _per_epoch(peer: Peer, key: str) -> float | None:
    """`evals_per_epoch` as a share of all steps; None where there is none, 1 or more: then nothing is set."""
    times, epochs = as_number(peer.get(key)), as_number(peer.values.get("num_epochs", 1.0))
    if not times or not epochs or times < 0 or epochs < 0:
        return None
    return float(f"{1 / (times * epochs):.12g}")


def _take_interval(peer: Peer, kind: str) -> float | None:
    """Take when it is saved (`save`) or evaluated (`eval`); the share of all steps that is asked for."""
    often, share = f"{kind}s_per_epoch", _per_epoch(peer, f"{kind}s_per_epoch")
    strategy, steps = peer.get(f"{kind}_strategy"), peer.get(f"{kind}_steps")
    if share is not None and share < 1:
        peer.take(f"trainer.{kind}_steps", share, often, note="a share of all steps")
        peer.take(f"trainer.{kind}_strategy", "steps", often)
    elif steps is not None:
        take_field(peer.reading, f"{kind}_steps", steps, peer.line(f"{kind}_steps"))
        peer.take(f"trainer.{kind}_strategy", "steps", f"{kind}_steps")
    if strategy is not None:
        take_argument(peer.reading, f"{kind}_strategy", strategy, peer.line(f"{kind}_strategy"))
    return share


def take_times(peer: Peer, has_eval: bool) -> None:
    """When it is saved and evaluated, and when it stops for that."""
    if "evaluation_strategy" in peer.values:
        peer.values.setdefault("eval_strategy", peer.get("evaluation_strategy"))
    _take_saves(peer)
    names = ("eval_strategy", "eval_steps", "evals_per_epoch", "early_stopping_patience")
    given = [key for key in names if peer.get(key) is not None and not is_off(peer.values[key])]
    if has_eval:
        _take_evaluations(peer)
        return
    for key in given:
        peer.drop(key, Effect.NONE, "there are no rows to evaluate on, there neither")


def _take_evaluations(peer: Peer) -> None:
    share = _take_interval(peer, "eval")
    if share is not None and share >= 1 and peer.values.get("eval_steps") is None:
        reason = "1 / (evals x epochs) is not below 1: axolotl does not evaluate"
        peer.drop("evals_per_epoch", Effect.NONE, reason)
    peer.default("trainer.eval_strategy", "no", "eval_strategy", "axolotl evaluates only when told how often")
    patience = as_number(peer.get("early_stopping_patience"))
    if patience is not None and peer.reading.value("trainer.eval_strategy") == "no":
        reason = "nothing is evaluated during the run, there neither"
        peer.drop("early_stopping_patience", Effect.NONE, reason)
    elif patience is not None and patience >= 1:
        peer.take("early_stopping.patience", int(patience), "early_stopping_patience")


def _take_saves(peer: Peer) -> None:
    _take_interval(peer, "save")
    if not peer.reading.value("data.streaming"):  # a stream has no epochs
        peer.default("trainer.save_strategy", "epoch", "save_strategy")
    peer.default("trainer.save_total_limit", 4, "save_total_limit")
