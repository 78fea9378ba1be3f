"""A configuration written into its draft: sizes, buckets, and why the search chose them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.plan.draft import Draft
from launcher.planner.strategy import Candidate


def record_size(draft: Draft, chosen: Candidate, reasons: Mapping[str, str] | None = None) -> None:
    """Record what the search chose. `reasons`: dotted setting -> what it was weighed against."""
    why = reasons or {}
    batch = chosen.batch
    if chosen.zero_stage is None:
        draft.put("sharding.zero_stage", None, f"engine {chosen.job.engine} has no stages")
    elif draft.sharding.zero_stage is None:
        reason = why.get("sharding.zero_stage", "")
        draft.put("sharding.zero_stage", chosen.zero_stage, reason, source="search")
    for dotted in chosen.variant.values:
        draft.explain(dotted, why.get(dotted, ""), source="search")
    micro, again = "trainer.per_device_train_batch_size", "trainer.activation_checkpointing"
    sizes: dict[str, tuple[object, str]] = {
        micro: (batch.micro, why.get(micro, "")),
        "trainer.gradient_accumulation_steps": (
            batch.accumulation,
            f"{batch.global_size} samples a step / {batch.data_parallel} ranks / micro-batch {batch.micro}",
        ),
        "trainer.per_device_eval_batch_size": (chosen.job.eval_batch or batch.micro, _why_evaluated(chosen)),
        again: (chosen.job.checkpointing, why.get(again, "")),
    }
    for dotted, (value, reason) in sizes.items():
        if draft.at(dotted) is None:
            draft.put(dotted, value, reason, source="search")
    buckets = {
        "deepspeed.reduce_bucket_size": chosen.job.reduce_bucket_size,
        "deepspeed.allgather_bucket_size": chosen.job.allgather_bucket_size,
        "deepspeed.overlap_comm": chosen.job.overlap_comm,
    }
    if chosen.zero_stage is not None:
        for dotted, bucket in buckets.items():
            draft.put(dotted, bucket, "as counted by the memory estimate")
    draft.put_recipe("global_batch_size", batch.global_size, "micro x accumulation x ranks")
    draft.put("model.enable_input_require_grads", False, "only adapters with checkpointing need it")
    draft.put("model.prepare_for_kbit", False, "only a quantised base needs it")
    draft.put("model.pad_token", "keep", "the tokenizer's own")
    draft.put("runtime.autocast", None, "the Trainer's own autocast suffices")
    draft.put("runtime.training_arguments_first", False, "the order matters under ZeRO-3 only")


def _why_evaluated(chosen: Candidate) -> str:
    if chosen.job.eval_batch == 0:
        return "nothing is evaluated"
    if chosen.job.eval_batch == chosen.batch.micro:
        return "the micro-batch of training is known to fit"
    return "the micro-batch of training, halved until an evaluation fits"
