"""Second held-out logs of failures of adapters: their settings, targets and files."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import held, shell


@shell("target-modules-missing", "x2-rich", "COLUMNS=100 python -u train.py 2>&1")
def missing_rich():
    import tiny
    from datasets import Dataset
    from peft import LoraConfig
    from rich.traceback import install
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
    from trl import DPOConfig, DPOTrainer

    install(show_locals=False)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    )
    pairs = Dataset.from_list([{"prompt": "w1 w2", "chosen": " w3 w4", "rejected": " w5"}] * 16)
    DPOTrainer(
        model, args=DPOConfig("out", bf16=False, use_cpu=True, report_to="none"), train_dataset=pairs,
        processing_class=tiny.tokenizer(), peft_config=LoraConfig(r=8, target_modules=["c_attn"]),
    ).train()  # fmt: skip


@held("target-modules-none", "x2-vit")
def none_vit():
    from peft import LoraConfig, get_peft_model
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    model = ViTForImageClassification(config)
    print(f"{model.num_parameters():,} parameters")
    get_peft_model(model, LoraConfig(r=8, modules_to_save=["classifier"]))


@held("lora-bad-values", "x2-rank-zero")
def bad_rank():
    import argparse

    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    parser = argparse.ArgumentParser()
    parser.add_argument("--lora-rank", type=int, default=0)
    rank = parser.parse_args().lora_rank
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
    )
    try:
        model = get_peft_model(
            model, LoraConfig(r=rank, target_modules=["query", "value"], task_type="SEQ_CLS")
        )
    except Exception as error:
        raise RuntimeError("could not attach the adapter") from error


@shell("lora-bad-values", "x2-json", "python -u train.py 2>&1 | tail -n 20", files={
    "lora.json": {"lora_r": 16, "lora_alpha": 32, "target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM"},
})  # fmt: skip
def bad_key():
    import json
    from pathlib import Path

    from peft import LoraConfig

    settings = json.loads(Path("lora.json").read_text())
    print("adapter settings:", settings)
    LoraConfig(**settings)


@shell("resized-embeddings-lost", "x2-serve", "python train.py && python serve.py 2>&1 | tail -n 30", files={
    "serve.py": """\
import logging

from peft import AutoPeftModelForCausalLM

logging.basicConfig(level=logging.INFO, format="%(asctime)s | %(levelname)s | %(message)s")
try:
    model = AutoPeftModelForCausalLM.from_pretrained("runs/chat", dtype="auto")
except RuntimeError:
    logging.exception("model server could not start")
    raise SystemExit(3)
"""
})  # fmt: skip
def resized_serve():
    import tiny
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tiny.saved("base")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(68)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.save_pretrained("runs/chat", save_embedding_layers=True)


@held("tied-weights-adapter", "x2-opt")
def tied_opt():
    import tiny
    from peft import LoraConfig, get_peft_model
    from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments

    model = OPTForCausalLM(OPTConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
        word_embed_proj_dim=32,
    ))  # fmt: skip
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model = get_peft_model(model, lora)
    args = TrainingArguments("out", max_steps=6, use_cpu=True, report_to="none", logging_steps=2)
    Trainer(model, args, train_dataset=tiny.rows()).train()


@held("double-peft", "x2-bloom")
def double_bloom():
    import tiny
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import BloomConfig, BloomForCausalLM, Trainer, TrainingArguments

    def base():
        return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))

    get_peft_model(base(), LoraConfig(r=4, task_type="CAUSAL_LM")).save_pretrained("stage-1")
    model = PeftModel.from_pretrained(base(), "stage-1", is_trainable=True)
    model = get_peft_model(model, LoraConfig(r=8, task_type="CAUSAL_LM"))
    args = TrainingArguments("stage-2", max_steps=6, use_cpu=True, report_to="none", logging_steps=2)
    Trainer(model, args, train_dataset=tiny.rows()).train()
    PeftModel.from_pretrained(base(), "stage-2/checkpoint-6")


@shell("double-peft", "x2-sft", "python -u train.py 2>&1 | tail -n 25")
def double_sft():
    import tiny
    from peft import LoraConfig, get_peft_model
    from trl import SFTConfig, SFTTrainer

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny.model(), lora)
    model.print_trainable_parameters()
    args = SFTConfig("out", max_steps=6, bf16=False, use_cpu=True, report_to="none", max_length=32)
    SFTTrainer(
        model, args=args, train_dataset=tiny.texts(), processing_class=tiny.tokenizer(), peft_config=lora
    ).train()


@held("checkpointing-renamed", "x2-phi")
def renamed_phi():
    import tiny
    from transformers import PhiConfig, PhiForCausalLM, Trainer, TrainingArguments

    model = PhiForCausalLM(PhiConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ))  # fmt: skip
    args = TrainingArguments("out", max_steps=4, use_cpu=True, gradient_checkpointing=True, report_to="none")
    args.gradient_checkpointing_kwargs = {"use_reentrant": False}
    Trainer(model, args, train_dataset=tiny.rows()).train()


@held("use-cache-checkpointing", "x2-loop")
def use_cache_loop():
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )
    model.activation_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        ids = torch.randint(4, 60, (2, 10))
        loss = model(input_ids=ids, labels=ids, use_cache=True).loss
        loss.backward()
        optimizer.step()
        print(step, round(loss.item(), 3))


if __name__ == "__main__":
    main()
