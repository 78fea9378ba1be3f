"""Failures of quantised bases."""

from __future__ import annotations

from tests.corpus.make.capture import caused, main

ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "overlap_comm": False},
}


@caused("purely-quantized")
def purely_quantized():
    import tiny
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

    four_bit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(tiny.saved(), quantization_config=four_bit)
    args = TrainingArguments("out", use_cpu=True, max_steps=8, report_to="none")
    Trainer(model, args, train_dataset=tiny.rows()).train()


@caused("purely-quantized", "int8-torchrun", launcher="torchrun", ranks=2, env={"ACCELERATE_USE_CPU": "true"})
def purely_quantized_torchrun():
    import tiny
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    eight_bit = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(tiny.saved(), quantization_config=eight_bit)
    args = SFTConfig("out", use_cpu=True, bf16=False, max_steps=8, report_to="none", max_length=16)
    SFTTrainer(model, args, train_dataset=tiny.texts(), processing_class=tiny.tokenizer()).train()


@caused("load-in-kwargs-removed")
def load_in_kwargs_removed():
    import tiny
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.saved(), load_in_8bit=True, device_map="auto")
    model = prepare_model_for_kbit_training(model)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))


@caused("bnb-both")
def bnb_both():
    import tiny
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    both = BitsAndBytesConfig(load_in_8bit=True, load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(tiny.saved(), quantization_config=both)
    print(model.get_memory_footprint())


@caused("bnb-bad-quant-type")
def bnb_bad_quant_type():
    import tiny
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="int4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(tiny.saved(), quantization_config=config, device_map="cpu")
    print(model.get_memory_footprint())


@caused("kbit-cpu-offload")
def kbit_cpu_offload():
    import tiny
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    device_map = {"model": "cpu", "lm_head": "disk"}
    model = AutoModelForCausalLM.from_pretrained(
        tiny.saved(), quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map=device_map
    )
    print(model.hf_device_map)


@caused("zero3-device-map", launcher="deepspeed", files={"ds_zero3.json": ZERO3})
def zero3_device_map():
    import os

    import tiny
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    folder = tiny.saved()
    args = TrainingArguments("out", deepspeed="ds_zero3.json", use_cpu=True, max_steps=8, report_to="none")
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map={"": int(os.environ.get("LOCAL_RANK", "0"))}
    )
    Trainer(model, args, train_dataset=tiny.rows()).train()


@caused("kbit-half")
def kbit_half():
    import tiny
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = AutoModelForCausalLM.from_pretrained(
        tiny.saved(), quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    model = prepare_model_for_kbit_training(model.half())
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    model.print_trainable_parameters()


@caused("half-float-matmul", "int8-generate")
def int8_generate():
    import tiny
    import torch
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = AutoModelForCausalLM.from_pretrained(
        tiny.saved(dtype="bfloat16"), quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    model = prepare_model_for_kbit_training(model)
    model.lm_head.to(torch.bfloat16)
    print(model.generate(torch.tensor([[4, 5, 6]]), max_new_tokens=8))


if __name__ == "__main__":
    main()
