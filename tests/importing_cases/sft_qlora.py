"""SFTTrainer with QLoRA."""

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

bits = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained(
    "mistralai/Mistral-7B-v0.1", quantization_config=bits, device_map="auto"
)
lora = LoraConfig(r=32, lora_alpha=64, lora_dropout=0.05, task_type="CAUSAL_LM")
train = load_dataset("json", data_files="train.jsonl", split="train")
arguments = SFTConfig(
    output_dir="out",
    max_length=2048,
    packing=True,
    learning_rate=1e-4,
    per_device_train_batch_size=4,
    max_steps=200,
    lr_scheduler_type="cosine",
    warmup_ratio=0.03,
    completion_only_loss=True,
    report_to="wandb",
)
trainer = SFTTrainer(model=model, args=arguments, train_dataset=train, peft_config=lora)
trainer.train()
