"""Failures of DeepSpeed configs."""

from __future__ import annotations

from tools.corpus.capture import caused, main
from tools.corpus.ds_scripts import AUTO, engine, trainer

BY = "tools/corpus/deepspeed_config.py:"
ACCELERATE = ["--use_deepspeed", "--deepspeed_config_file", "ds.json"]
OVERLAP = {"overlap_comm": False}


def zero(stage: int = 2, **more: object) -> dict[str, object]:
    """A config for the Trainer; `more` are blocks beside zero_optimization."""
    return {**AUTO, "zero_optimization": {"stage": stage, **OVERLAP}, **more}


def with_zero(**keys: object) -> dict[str, object]:
    """A config whose zero_optimization has `keys` too."""
    return {**AUTO, "zero_optimization": {"stage": 2, **OVERLAP, **keys}}


COMMENTED = """{
  // 2 GPUs
  "train_micro_batch_size_per_gpu": "auto",
  "zero_optimization": {"stage": 2}
}
"""
TWICE = """{
  "train_batch_size": 8,
  "zero_optimization": {"stage": 2},
  "gradient_clipping": 1.0,
  "zero_optimization": {"stage": 3}
}
"""
SCHEDULER = {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def _trainer(failure, config, variant="", **how):
    caused(failure, variant, files={"ds.json": config}, by=BY + failure, **{"launcher": "torchrun", **how})(
        trainer
    )


def _engine(failure, config, variant="", **how):
    caused(failure, variant, files={"ds.json": config}, by=BY + failure, **{"launcher": "torchrun", **how})(
        engine
    )


_trainer(
    "ds-typo-nested", with_zero(reduce_bucketsize=200000000, overlap_com=False), launcher="deepspeed", ranks=2
)
_trainer("ds-typo-nested", zero(bf16={"enable": True}), "bf16-torchrun", ranks=2)
_trainer("ds-removed-key", zero(nebula={"enabled": False}), launcher="deepspeed")
_trainer("ds-bfloat16-alias", zero(bfloat16={"enabled": "auto"}))
_trainer(
    "ds-hf-mismatch", {**zero(), "train_batch_size": 64}, "train-batch-size",
    launcher="accelerate", ranks=2, launcher_arguments=ACCELERATE,
)  # fmt: skip
_engine(
    "ds-batch-mismatch",
    {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    "engine",
)
_trainer(
    "ds-hf-mismatch",
    {**zero(), "gradient_accumulation_steps": 8, "gradient_clipping": 0.5},
    launcher="deepspeed",
    ranks=2,
)
_engine(
    "ds-auto-unresolved",
    {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"},
    "engine",
)
_engine(
    "ds-float-bucket",
    {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1, "reduce_bucket_size": "5e8"}},
    "string",
)
_trainer("ds-json-comments", COMMENTED)
_engine("ds-duplicate-keys", TWICE)
_trainer(
    "ds-no-zero-block",
    {**AUTO, "bf16": {"enabled": "auto"}},
    launcher="accelerate",
    launcher_arguments=ACCELERATE,
)
_trainer(
    "ds-warmup-zero",
    zero(scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": 0}}),
    "trainer",
)
_engine(
    "ds-total-steps",
    {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW, "scheduler": SCHEDULER},
)
_engine(
    "ds-max-grad-norm-param",
    {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "max_grad_norm": 1.0}},
    },
)
_engine(
    "ds-comm-dtype",
    {"train_micro_batch_size_per_gpu": 4, "communication_data_type": "bfloat16", "optimizer": ADAMW},
)


if __name__ == "__main__":
    main()
