"""Failures of precision."""

from __future__ import annotations

from tests.corpus.make.capture import caused, main

FP16 = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
    "zero_optimization": {"stage": 1},
}
BOTH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "fp16": {"enabled": True},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


@caused("bf16-no-device")
def bf16_no_device():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", bf16=True, per_device_train_batch_size=4, max_steps=8)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@caused("bf16-no-device", "torchrun", launcher="torchrun", ranks=2)
def bf16_no_device_torchrun():
    from dataclasses import dataclass

    import tiny
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    @dataclass
    class ScriptArguments:
        name: str = "tiny"

    def main():
        parser = HfArgumentParser((ScriptArguments, TrainingArguments))
        _, args = parser.parse_dict({"output_dir": "out", "bf16": True, "max_steps": 8})
        Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()

    if __name__ == "__main__":
        main()


@caused("fp16-unscale")
def fp16_unscale():
    import tiny
    import torch
    from torch.utils.data import DataLoader
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, default_data_collator

    model = AutoModelForCausalLM.from_pretrained(tiny.saved(dtype="float16"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    scaler = torch.amp.GradScaler("cpu")
    loader = DataLoader(tiny.rows(), batch_size=4, collate_fn=default_data_collator)
    for batch in tqdm(loader, desc="epoch 1"):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@caused("half-float-matmul")
def half_float_matmul():
    import tiny
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.saved(dtype="float16"))
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
    model.get_output_embeddings().to(torch.float32)
    model.print_trainable_parameters()
    batch = {"input_ids": torch.tensor([[4, 5, 6, 7]]), "labels": torch.tensor([[4, 5, 6, 7]])}
    model.eval()
    with torch.no_grad():
        print("loss before training:", model(**batch).loss)


@caused(
    "half-float-matmul", "bf16-lora-head", launcher="torchrun", ranks=2, env={"ACCELERATE_USE_CPU": "true"}
)
def half_float_matmul_torchrun():
    import tiny
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(tiny.saved(), dtype=torch.bfloat16)
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    model = get_peft_model(model, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    args = TrainingArguments(
        "out", use_cpu=True, per_device_train_batch_size=4, max_steps=8, report_to="none"
    )
    Trainer(model, args, train_dataset=tiny.rows()).train()


@caused("ds-fp16-pascal", "cpu", launcher="deepspeed", files={"ds.json": FP16})
def ds_fp16_unsupported():
    import deepspeed
    import tiny
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    engine, _, _, _ = deepspeed.initialize(model=tiny.model(), config="ds.json")
    loader = DataLoader(tiny.rows(256), batch_size=4, collate_fn=default_data_collator)
    for step, batch in enumerate(loader):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item()}")


@caused("loss-scale-minimum", launcher="torchrun")
def loss_scale_minimum():
    import deepspeed
    import tiny
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    deepspeed.init_distributed()
    model = tiny.model().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3)
    scaler = DynamicLossScaler(2**4, 1000, 1.0, delayed_shift=1, consecutive_hysteresis=False)
    loader = DataLoader(tiny.rows(256), batch_size=4, collate_fn=default_data_collator)
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        scaler.backward(loss)
        overflow = not all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        print(f"step {step} loss {loss.item()} scale {scaler.loss_scale} overflow {overflow}", flush=True)
        scaler.update_scale(overflow)
        if step < 3:
            optimizer.step()
        optimizer.zero_grad()


@caused("nan-shown-as-zero")
def nan_shown_as_zero():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out", use_cpu=True, per_device_train_batch_size=4, max_steps=30, learning_rate=1e20,
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=2, report_to="none",
    )  # fmt: skip
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@caused("fp16-and-bf16")
def fp16_and_bf16():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", use_cpu=True, fp16=True, bf16=True, max_steps=8)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@caused("fp16-and-bf16", "ds-config", launcher="deepspeed", files={"ds.json": BOTH})
def fp16_and_bf16_ds():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", deepspeed="ds.json", fp16=True, use_cpu=True, max_steps=8)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@caused("tf32-pre-ampere")
def tf32_pre_ampere():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", use_cpu=True, tf32=True, max_steps=8)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


if __name__ == "__main__":
    main()
