"""Failures of DeepSpeed's engine and of the extensions that it compiles."""

from __future__ import annotations

from tests.corpus.make.capture import caused, main
from tests.corpus.make.ds_scripts import AUTO, engine, trainer

OFFLOAD_CLIENT = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
STAGE2 = {**AUTO, "zero_optimization": {"stage": 2, "overlap_comm": False}}
STAGE3 = {**AUTO, "zero_optimization": {"stage": 3, "overlap_comm": False}}
NVME = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
OFFLOAD_ADAM = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
ACCELERATE_YAML = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: ds.json
  zero_stage: 3
  gradient_accumulation_steps: 4
  zero3_init_flag: false
mixed_precision: bf16
num_machines: 1
num_processes: 1
machine_rank: 0
main_training_function: main
"""


def _caused(failure, script, config, **how):
    more = {"launcher": "torchrun", "by": f"make/deepspeed_engine.py:{failure}", **how}
    caused(failure, files={"ds.json": config}, **more)(script)


_caused("ds-fsdp-both", trainer, STAGE2, arguments=["fsdp=full_shard"])
_caused("nvme-path-missing", engine, NVME)
_caused(
    "jit-no-compiler", engine, OFFLOAD_ADAM, env={"CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": "extensions"}
)


@caused("ds-offload-client-optim", launcher="torchrun", files={"ds.json": OFFLOAD_CLIENT})
def offload_client_optim():
    import deepspeed
    import tiny
    import torch

    model = tiny.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model_engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config="ds.json")
    print(model_engine.train_batch_size())


@caused(
    "ds-accelerate-fields",
    launcher="accelerate",
    files={"ds.json": STAGE2, "accelerate.yaml": ACCELERATE_YAML},
    launcher_arguments=["--config_file", "accelerate.yaml"],
)
def accelerate_fields():
    import tiny
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    accelerator = Accelerator()
    model = tiny.model()
    loader = DataLoader(tiny.rows(), batch_size=4, collate_fn=default_data_collator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()


@caused("zero3-auto-batch", launcher="torchrun", files={"ds.json": STAGE3})
def zero3_auto_batch():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out", deepspeed="ds.json", use_cpu=True, auto_find_batch_size=True, max_steps=8, report_to="none"
    )
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@caused("ds-eval-only", launcher="deepspeed", files={"ds.json": STAGE2})
def eval_only():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", deepspeed="ds.json", use_cpu=True, do_eval=True, report_to="none")
    print(Trainer(tiny.model(), args, eval_dataset=tiny.rows()).evaluate())


if __name__ == "__main__":
    main()
