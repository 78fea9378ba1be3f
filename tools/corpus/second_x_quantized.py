"""Second held-out logs of failures of quantisation."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import CLOCK, held, shell

ZERO3 = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 3},
}


@shell("purely-quantized", "x2-reward", f"python -u train.py 2>&1 | {CLOCK} | tail -n 30")
def purely_reward():
    import tiny
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig
    from trl import RewardConfig, RewardTrainer

    folder = tiny.saved()
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, quantization_config=four)
    pairs = Dataset.from_list([{"chosen": "w3 w4", "rejected": "w5 w6"}] * 16)
    args = RewardConfig("reward", bf16=False, use_cpu=True, max_steps=4, report_to="none")
    RewardTrainer(model, args=args, train_dataset=pairs, processing_class=tiny.tokenizer()).train()


@held("load-in-kwargs-removed", "x2-t5")
def load_in_t5():
    from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

    T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2)
    ).save_pretrained("flan")
    model = AutoModelForSeq2SeqLM.from_pretrained("flan", load_in_8bit=True, device_map="auto")
    print(model.get_memory_footprint())


@held("bnb-both", "x2-dataclass")
def both_bits():
    from dataclasses import dataclass

    from transformers import BitsAndBytesConfig

    @dataclass
    class ModelArgs:
        load_in_8bit: bool = True
        load_in_4bit: bool = True
        bnb_4bit_quant_type: str = "nf4"

    def quantization(args):
        return BitsAndBytesConfig(**vars(args))

    print("arguments:", ModelArgs())
    quantization(ModelArgs())


@held("bnb-bad-quant-type", "x2-neox")
def quant_type_neox():
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPTNeoXConfig, GPTNeoXForCausalLM

    GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
        )
    ).save_pretrained("pythia")
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="int4")
    model = AutoModelForCausalLM.from_pretrained("pythia", quantization_config=four)
    print(model)


@held("device-map-auto-distributed", "x2-gpt2", launcher="torchrun", ranks=2)
def auto_gpt2():
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=6, n_head=4)).save_pretrained("gpt2")
    accelerator.wait_for_everyone()
    model = AutoModelForCausalLM.from_pretrained(
        "gpt2", device_map="auto", max_memory={"cpu": "700KB"}, offload_folder="offload"
    )
    print(model.hf_device_map)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)


@shell(
    "zero3-device-map", "x2-two-ranks",
    "deepspeed --num_accelerators 2 --master_port 29773 train.py 2>&1 | tail -n 60", files={"z3.json": ZERO3},
)  # fmt: skip
def zero3_ranks():
    import os

    from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM
    from transformers.integrations import HfDeepSpeedConfig

    name = f"bert-{os.environ['LOCAL_RANK']}"
    BertForMaskedLM(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
    ).save_pretrained(name)
    keep = HfDeepSpeedConfig("z3.json")
    print("zero3:", keep.is_zero3())
    AutoModelForMaskedLM.from_pretrained(name, device_map={"": "cpu"})


@held("fsdp-4bit-storage", "x2-fsdp2", launcher="torchrun", ranks=2)
def fsdp_storage():
    import tiny
    from accelerate import DistributedType, PartialState
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

    args = TrainingArguments(
        "out", max_steps=4, use_cpu=True, report_to="none", save_strategy="no", fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )  # fmt: skip
    print("device", args.device)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = AutoModelForCausalLM.from_pretrained(tiny.saved(), quantization_config=four)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU  # no FSDP on CPU
    Trainer(model, args, train_dataset=tiny.rows()).train()


@held("kbit-compile", "x2-opt")
def compile_opt():
    import tiny
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(tiny.saved(), quantization_config=four)
    model = torch.compile(model)
    args = TrainingArguments("out", max_steps=4, use_cpu=True, report_to="none", disable_tqdm=True)
    Trainer(model, args, train_dataset=tiny.rows()).train()


@shell("kbit-half", "x2-whisper", "python -u train.py 2>&1 | tail -n 15")
def half_whisper():
    from transformers import BitsAndBytesConfig, WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=100, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, pad_token_id=0,
        max_source_positions=50, max_target_positions=40, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=3,
    )  # fmt: skip
    WhisperForConditionalGeneration(config).save_pretrained("whisper")
    four = BitsAndBytesConfig(load_in_4bit=True)
    model = WhisperForConditionalGeneration.from_pretrained("whisper", quantization_config=four)
    model = model.half()
    print(model.dtype)


@held("kbit-cpu-offload", "x2-map")
def offload_map():
    import tiny
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    places = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "disk"}
    model = AutoModelForCausalLM.from_pretrained(
        tiny.saved(), device_map=places, offload_folder="offload",
        quantization_config=BitsAndBytesConfig(load_in_8bit=True),
    )  # fmt: skip
    print(model.hf_device_map)


@shell("bnb-defaults-slow", "x2-layers", "python -u train.py > out.txt 2> err.txt; cat err.txt out.txt")
def slow_layers():
    import bitsandbytes as bnb
    import torch
    from torch import nn

    model = nn.Sequential(bnb.nn.Linear4bit(64, 128), nn.ReLU(), bnb.nn.Linear4bit(128, 64)).to("cpu")
    for step in range(3):
        out = model(torch.randn(4, 64, dtype=torch.float16))
        print("batch", step, "mean", out.float().mean().item())


if __name__ == "__main__":
    main()
