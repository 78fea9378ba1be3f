"""Held-out failures of quantised models."""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import CLOCK, held, shell


@held("purely-quantized", "v3-opt-seq2seq")
def opt_eight_bit():
    import tiny
    from transformers import (
        AutoModelForSeq2SeqLM,
        BitsAndBytesConfig,
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )  # fmt: skip

    class Translator(Seq2SeqTrainer):
        def compute_loss(self, model, inputs, **more):
            return super().compute_loss(model, inputs, **more)

    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    T5ForConditionalGeneration(config).save_pretrained("flan-tiny")
    model = AutoModelForSeq2SeqLM.from_pretrained(
        "flan-tiny", quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map={"": "cpu"}
    )
    args = Seq2SeqTrainingArguments(
        "out", use_cpu=True, max_steps=2, report_to="none", predict_with_generate=True
    )
    collator = DataCollatorForSeq2Seq(tiny.tokenizer(), model=model)
    Translator(model, args, train_dataset=tiny.rows(), data_collator=collator).train()


@shell("load-in-kwargs-removed", "v3-pipeline", "python -W ignore train.py 2>&1 | " + CLOCK)
def pipeline_four_bit():
    import tiny
    from transformers import pipeline

    folder = tiny.saved()
    print("loading", folder, "in 4-bit")
    generator = pipeline("text-generation", model=folder, model_kwargs={"load_in_4bit": True}, device="cpu")
    print(generator("w1 w2 w3", max_new_tokens=4))


@held("bnb-both", "v3-env")
def both_widths():
    import os

    import tiny
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    def load(path):
        quantization = BitsAndBytesConfig(
            load_in_8bit=os.environ.get("LOAD_8BIT", "1") == "1",
            load_in_4bit=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        return AutoModelForCausalLM.from_pretrained(path, quantization_config=quantization)

    path = tiny.saved()
    for attempt in (1, 2):
        try:
            model = load(path)
            break
        except ValueError as error:
            print(f"attempt {attempt} failed: {error}", flush=True)
    print(model.get_memory_footprint())


@held("bnb-bad-quant-type", "v3-opt")
def opt_int4():
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=64,
        hidden_size=64,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=64,
    )
    OPTForCausalLM(config).save_pretrained("opt-tiny")
    model = AutoModelForCausalLM.from_pretrained(
        "opt-tiny", quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="int4")
    )
    model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(r=4))
    model.print_trainable_parameters()


@held("device-map-auto-distributed", "v3-one-rank-shown", launcher="torchrun", ranks=2)
def auto_map_in_two_ranks():
    import os
    from pathlib import Path

    import tiny
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    accelerator = Accelerator(cpu=True)
    if not accelerator.is_main_process:
        Path("rank1.err").touch()
        os.dup2(os.open("rank1.err", os.O_WRONLY), 2)  # only the first rank's output is kept
    with accelerator.main_process_first():
        folder = tiny.saved(hidden_size=64, intermediate_size=256, num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto",
        max_memory={"cpu": "500KB"}, offload_folder=f"offload-{accelerator.process_index}",
    )  # fmt: skip
    accelerator.print("device map:", model.hf_device_map)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)


@held("kbit-cpu-offload", "v3-max-memory")
def spills_to_disk():
    import tiny
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = tiny.saved(num_hidden_layers=8, hidden_size=64, intermediate_size=256)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map="auto",
        max_memory={"cpu": "200KB"}, offload_folder="offload",
    )  # fmt: skip
    print(model.hf_device_map)


DS3 = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}


@shell(
    "zero3-device-map", "v3-mixtral",
    "deepspeed --num_accelerators=1 --master_port=29631 train.py --deepspeed ds3.json 2>&1 | tail -n 30",
    files={"ds3.json": DS3},
)  # fmt: skip
def mixtral_device_map():
    import sys

    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, TrainingArguments

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained("mixtral-tiny")
    args = TrainingArguments("out", use_cpu=True, deepspeed=sys.argv[-1], per_device_train_batch_size=2)
    model = AutoModelForCausalLM.from_pretrained("mixtral-tiny", device_map={"": args.device})
    print("loaded", model.num_parameters())


if __name__ == "__main__":
    main()
