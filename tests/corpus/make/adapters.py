"""Failures of adapters and of activation checkpointing."""

from __future__ import annotations

from tests.corpus.make.capture import caused, main

CPU = {"ACCELERATE_USE_CPU": "true"}


@caused("no-grad-fn")
def no_grad_fn():
    import tiny
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    model = get_peft_model(
        tiny.model(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    )
    model.print_trainable_parameters()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.disable_input_require_grads()
    args = TrainingArguments(
        "out", use_cpu=True, per_device_train_batch_size=4, max_steps=8, report_to="none"
    )
    Trainer(model, args, train_dataset=tiny.rows()).train()


@caused("adapter-not-trainable")
def adapter_not_trainable():
    import tiny
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import Trainer, TrainingArguments

    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    get_peft_model(tiny.model(), lora).save_pretrained("first-adapter")

    model = PeftModel.from_pretrained(tiny.model(), "first-adapter")
    model.print_trainable_parameters()
    args = TrainingArguments(
        "out", use_cpu=True, per_device_train_batch_size=4, max_steps=8, report_to="none"
    )
    Trainer(model, args, train_dataset=tiny.rows()).train()


@caused("ddp-ready-twice", launcher="torchrun", ranks=2, env=CPU)
def ddp_ready_twice():
    import tiny
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    model = get_peft_model(
        tiny.model(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    )
    model.enable_input_require_grads()
    args = TrainingArguments(
        "out", use_cpu=True, per_device_train_batch_size=4, max_steps=8, report_to="none",
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True},
    )  # fmt: skip
    Trainer(model, args, train_dataset=tiny.rows()).train()


@caused("ddp-unused-params", launcher="torchrun", ranks=2, env=CPU)
def ddp_unused_params():
    import tiny
    import torch
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    class WithValueHead(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.value_head = torch.nn.Linear(config.hidden_size, 1)

    args = TrainingArguments(
        "out", use_cpu=True, per_device_train_batch_size=4, max_steps=8, report_to="none",
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    Trainer(WithValueHead(tiny.config()), args, train_dataset=tiny.rows()).train()


@caused("checkpointing-unsupported")
def checkpointing_unsupported():
    import tiny
    from transformers import CTRLConfig, CTRLLMHeadModel, Trainer, TrainingArguments

    model = CTRLLMHeadModel(CTRLConfig(vocab_size=64, n_positions=64, n_embd=32, dff=64, n_layer=2, n_head=4))
    args = TrainingArguments(
        "out", use_cpu=True, activation_checkpointing=True, max_steps=8, report_to="none"
    )
    Trainer(model, args, train_dataset=tiny.rows()).train()


@caused("checkpointing-kwarg-typo", launcher="accelerate", ranks=2)
def checkpointing_kwarg_typo():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out", use_cpu=True, per_device_train_batch_size=4, max_steps=8, report_to="none",
        activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrent": False},
    )  # fmt: skip
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@caused("target-modules-missing", launcher="accelerate", ranks=2)
def target_modules_missing():
    import tiny
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    lora = LoraConfig(r=8, target_modules=["query_key_value"], task_type="CAUSAL_LM")
    args = SFTConfig("out", use_cpu=True, bf16=False, max_steps=8, report_to="none", max_length=16)
    trainer = SFTTrainer(
        tiny.saved(), args, train_dataset=tiny.texts(), peft_config=lora, processing_class=tiny.tokenizer()
    )
    trainer.train()


@caused("target-modules-missing", "regex-many-layers")
def target_modules_missing_many():
    import tiny
    from peft import LoraConfig, get_peft_model

    wanted = [f"transformer.h.{layer}.attn.{name}" for layer in range(48) for name in ("c_attn", "c_proj")]
    model = get_peft_model(tiny.model(), LoraConfig(target_modules=wanted, task_type="CAUSAL_LM"))
    model.print_trainable_parameters()


@caused("target-modules-none")
def target_modules_none():
    import tiny
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import CTRLConfig, CTRLLMHeadModel, Trainer, TrainingArguments

    model = CTRLLMHeadModel(CTRLConfig(vocab_size=64, n_positions=64, n_embd=32, dff=64, n_layer=2, n_head=4))
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, task_type=TaskType.CAUSAL_LM))
    args = TrainingArguments("out", use_cpu=True, max_steps=8, report_to="none")
    Trainer(model, args, train_dataset=tiny.rows()).train()


@caused("lora-bad-values", "rank-zero")
def lora_rank_zero():
    import tiny
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.model(), LoraConfig(r=0, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.print_trainable_parameters()


@caused("lora-bad-values", "unknown-field", launcher="torchrun", ranks=2)
def lora_unknown_field():
    import tiny
    from peft import LoraConfig, get_peft_model

    def main():
        lora = LoraConfig(r=8, alpha=16, dropout=0.05, target_modules=["q_proj"], task_type="CAUSAL_LM")
        get_peft_model(tiny.model(), lora).print_trainable_parameters()

    main()


@caused("lora-bad-values", "task-type")
def lora_task_type():
    import tiny
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.model(), LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LLM"))
    model.print_trainable_parameters()


@caused("resized-embeddings-lost")
def resized_embeddings_lost():
    import tiny
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    folder = tiny.saved()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<tool>", "</tool>"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    lora = LoraConfig(
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora)
    args = TrainingArguments(
        "out", use_cpu=True, max_steps=4, report_to="none", logging_steps=1, save_strategy="no"
    )
    Trainer(model, args, train_dataset=tiny.rows()).train()
    model.save_pretrained("adapter")

    base = AutoModelForCausalLM.from_pretrained(folder)
    merged = PeftModel.from_pretrained(base, "adapter").merge_and_unload()
    merged.save_pretrained("merged")


@caused("double-peft")
def double_peft():
    import tiny
    from peft import LoraConfig, get_peft_model
    from trl import SFTConfig, SFTTrainer

    lora = LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny.model(), lora)
    args = SFTConfig("out", use_cpu=True, bf16=False, max_steps=4, report_to="none", max_length=16)
    SFTTrainer(
        model, args, train_dataset=tiny.texts(), peft_config=lora, processing_class=tiny.tokenizer()
    ).train()


if __name__ == "__main__":
    main()
