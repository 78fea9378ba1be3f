"""Second held-out set: configs that DeepSpeed itself refuses, in scripts that call it by hand."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.second_y_shell import KUBE, ONE, TAIL, TORCHRUN, second


@second("ds-batch-mismatch", "vit-two-ranks", TORCHRUN.format(ranks=2, port=29713), KUBE, files={
    "ds.json": {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
})  # fmt: skip
def batch_sizes():
    import logging

    import deepspeed
    import nets

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s [%(name)s] %(message)s")
    logging.getLogger("train").info("building ViT for 10 classes")
    model = nets.vit()
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")


@second("ds-auto-unresolved", "neox-by-hand", env=ONE, files={
    "zero2.json": {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                   "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 2}}
})  # fmt: skip
def auto_by_hand():
    import json
    from pathlib import Path

    import deepspeed
    import nets
    import torch

    model = nets.neox()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = json.loads(Path("zero2.json").read_text())
    deepspeed.initialize(model=model, optimizer=optimizer, config=config)


@second("ds-float-bucket", "string", "python train.py > out.txt 2> err.txt; cat out.txt err.txt", env=ONE)
def string_bucket():
    import deepspeed
    import nets

    print("loading bloom ...")
    model = nets.bloom()
    zero = {"stage": 2, "allgather_bucket_size": "2e8", "reduce_bucket_size": "2e8", "overlap_comm": True}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)


@second("ds-duplicate-keys", "whisper", env=ONE, files={
    "ds_config.json": """{
  "train_micro_batch_size_per_gpu": 2,
  "gradient_clipping": 1.0,
  "zero_optimization": {
    "stage": 2,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "overlap_comm": false
  }
}
"""
})  # fmt: skip
def duplicate_in_zero():
    import deepspeed
    import nets

    model = nets.whisper()
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")


@second("ds-warmup-zero", "opt-by-hand", env=ONE, through=TAIL)
def warmup_zero():
    import deepspeed
    import nets
    import torch

    model = nets.opt()
    scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 0}}
    settings = {"train_micro_batch_size_per_gpu": 1, "scheduler": scheduler}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    deepspeed.initialize(model=model, optimizer=optimizer, config=settings)


@second("ds-max-grad-norm-param", "bert", TORCHRUN.format(ranks=1, port=29715), "tail -n 60", files={
    "ds.json": {"train_micro_batch_size_per_gpu": 8, "optimizer": {
        "type": "Adam",
        "params": {"lr": 3e-5, "weight_decay": 0.01, "bias_correction": False, "max_grad_norm": 1.0}}}
})  # fmt: skip
def grad_norm_in_optimizer():
    import deepspeed
    import nets

    model = nets.bert()
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")


if __name__ == "__main__":
    main()
