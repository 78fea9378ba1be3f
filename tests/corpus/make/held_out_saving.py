"""Held-out logs of saving and resuming: other models and entry points than a plain Trainer on a Llama.

Collected after the patterns were final, by somebody who had not read them.
"""

from __future__ import annotations

from functools import partial

from tests.corpus.make.capture import caused, main

held_out = partial(caused, kind="first_held_out")


@held_out("shared-tensors", "accelerate-dict")
def accelerate_dict():
    import torch
    from accelerate import Accelerator
    from safetensors.torch import save_file
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    save_file(accelerator.get_state_dict(model), "gpt2.safetensors")


@held_out("shared-tensors", "save-pretrained")
def save_pretrained():
    import tiny
    import torch
    from transformers import Trainer, TrainingArguments

    model = tiny.model()
    shared = torch.nn.Parameter(torch.randn(32, 32))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight = shared
    args = TrainingArguments("out", use_cpu=True, max_steps=4, save_steps=2, logging_steps=1)
    Trainer(model, args, train_dataset=tiny.rows()).train()


@held_out("no-checkpoint", "t5-resume")
def t5_resume():
    from pathlib import Path

    import tiny
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    model = T5ForConditionalGeneration(config)
    Path("out/runs").mkdir(parents=True)
    args = Seq2SeqTrainingArguments("out", use_cpu=True, max_steps=4)
    Seq2SeqTrainer(model, args, train_dataset=tiny.rows()).train(resume_from_checkpoint=True)


@held_out("best-metric", "vit-accuracy")
def vit_accuracy():
    import numpy
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, num_labels=4,
    )  # fmt: skip
    data = Dataset.from_dict(
        {"pixel_values": numpy.random.rand(16, 3, 16, 16).tolist(), "labels": [i % 4 for i in range(16)]}
    )
    args = TrainingArguments(
        "out", use_cpu=True, num_train_epochs=2, per_device_train_batch_size=4, eval_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="f1",
    )  # fmt: skip
    Trainer(
        ViTForImageClassification(config), args, train_dataset=data, eval_dataset=data,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    ).train()  # fmt: skip


@held_out("best-strategy", "sft-epoch-steps")
def sft_epoch_steps():
    import tiny
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        "out", use_cpu=True, bf16=False, eval_strategy="steps", eval_steps=4, save_strategy="steps",
        save_steps=6, load_best_model_at_end=True,
    )  # fmt: skip
    SFTTrainer(tiny.model(), args, train_dataset=tiny.texts(), eval_dataset=tiny.texts(8)).train()


@held_out("rng-weights-only", "vit-old-checkpoint")
def vit_old_checkpoint():
    import datetime

    import numpy
    import torch
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, num_labels=4,
    )  # fmt: skip
    data = Dataset.from_dict(
        {"pixel_values": numpy.random.rand(16, 3, 16, 16).tolist(), "labels": [i % 4 for i in range(16)]}
    )
    args = TrainingArguments(
        "out", use_cpu=True, max_steps=4, save_steps=2, logging_steps=1, disable_tqdm=True
    )
    Trainer(ViTForImageClassification(config), args, train_dataset=data).train()
    state = torch.load("out/checkpoint-2/rng_state.pth", weights_only=False)
    state["saved_at"] = datetime.datetime(2024, 5, 1)
    state["numpy"] = numpy.random.RandomState(1)
    torch.save(state, "out/checkpoint-2/rng_state.pth")
    print("resuming from checkpoint-2")
    Trainer(ViTForImageClassification(config), args, train_dataset=data).train("out/checkpoint-2")


if __name__ == "__main__":
    main()
