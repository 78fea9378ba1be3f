"""Held-out failures of adapters and activation checkpointing, on many families of models."""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import DOCKER, SRUN, held, shell

COMPOSE = "sed -u 's/^/trainer-1  | /'"


@shell("no-grad-fn", "v3-opt-compose", "python train.py 2>&1 | " + COMPOSE)
def opt_reentrant():
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
    )
    model = OPTForCausalLM(config)
    model.model.decoder.embed_tokens.requires_grad_(False)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    layers = model.base_model.model.model.decoder.layers
    for layer in layers:  # checkpointing by hand, as the tutorial says
        inner = layer.forward

        def recompute(*args, inner=inner, **kwargs):
            return torch.utils.checkpoint.checkpoint(inner, *args, use_reentrant=True)

        layer.forward = recompute
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(4, 64, (2, 12))
    model.train()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    print("first loss", loss.item(), flush=True)
    loss.backward()
    optimizer.step()


@held("adapter-not-trainable", "v3-gpt2-continue")
def gpt2_continue():
    import tiny
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    def base():
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64))

    first = get_peft_model(base(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    first.save_pretrained("stage-1")
    model = PeftModel.from_pretrained(base(), "stage-1")
    print("continuing stage-1 on new data")
    model.print_trainable_parameters()
    args = TrainingArguments(
        "stage-2", use_cpu=True, max_steps=4, report_to="none", per_device_train_batch_size=4
    )
    Trainer(model, args, train_dataset=tiny.rows()).train()


@shell(
    "ddp-ready-twice", "v3-vit-srun",
    "torchrun --standalone --nproc_per_node=2 train.py 2>&1 | " + SRUN,
)  # fmt: skip
def vit_ddp():
    import os

    import torch
    import torch.distributed as dist
    from transformers import ViTConfig, ViTForImageClassification

    dist.init_process_group("gloo")
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    model = ViTForImageClassification(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        pixels = torch.randn(2, 3, 32, 32, requires_grad=True)
        loss = model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if os.environ["RANK"] == "0":
            print("step", step, "loss", float(loss.detach()), flush=True)
    dist.destroy_process_group()


@held("ddp-unused-params", "v3-bert-accelerate", ranks=2, launcher="torchrun")
def bert_two_heads():
    import torch
    from accelerate import Accelerator
    from accelerate.logging import get_logger
    from transformers import BertConfig, BertModel

    class TwoHeads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 64,
            }
            self.bert = BertModel(BertConfig(vocab_size=64, **sizes))
            self.topic = torch.nn.Linear(32, 5)
            self.sentiment = torch.nn.Linear(32, 2)

        def forward(self, ids, labels, task):
            pooled = self.bert(input_ids=ids).pooler_output
            head = self.topic if task == "topic" else self.sentiment
            return torch.nn.functional.cross_entropy(head(pooled), labels)

    accelerator = Accelerator(cpu=True)
    log = get_logger(__name__)
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(6):
        loss = model(
            torch.randint(4, 64, (4, 10)), torch.randint(0, 2, (4,)), "topic" if step % 2 else "sentiment"
        )
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        log.info("step %d", step, main_process_only=True)
        accelerator.print(f"step {step} loss {loss.item():.3f}")


@shell("checkpointing-renamed", "v3-pytest", "python -m pytest -q -p no:cacheprovider -W error train.py")
def strict_tests():
    import tiny
    from transformers import Trainer, TrainingArguments

    def test_one_step_of_training(tmp_path):
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, gradient_checkpointing=True, max_steps=1, report_to="none"
        )
        assert Trainer(tiny.model(), args, train_dataset=tiny.rows()).train().global_step == 1


@held("checkpointing-unsupported", "v3-ctrl")
def ctrl_checkpointing():
    import tiny
    from transformers import CTRLConfig, CTRLLMHeadModel, Trainer, TrainingArguments

    model = CTRLLMHeadModel(CTRLConfig(vocab_size=64, n_embd=32, dff=64, n_layer=2, n_head=4, n_positions=64))
    args = TrainingArguments(
        "ctrl-out",
        use_cpu=True,
        max_steps=4,
        activation_checkpointing=True,
        report_to="none",
        logging_steps=1,
    )
    Trainer(model, args, train_dataset=tiny.rows()).train()


@shell("checkpointing-kwarg-typo", "v3-t5-docker", "python train.py 2>&1 | " + DOCKER)
def t5_kwargs():
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": True, "preserve_rng": True}
    )
    model.train()
    ids = torch.randint(4, 64, (2, 12))
    for step in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        print("step", step, loss.item(), flush=True)


@held("kbit-fp32-upcast", "v3-cpu-limit")
def upcast_does_not_fit():
    import os
    import resource
    from pathlib import Path

    import torch
    from peft import prepare_model_for_kbit_training
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=250880, hidden_size=1024, n_layer=1, n_head=4)
    torch.set_default_dtype(torch.float16)
    model = BloomForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    gib = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (pages + 600 * 2**20,) * 2)  # what is left of the container
    print(f"loaded in {model.dtype}: {gib:.2f} GiB of weights, 0.59 GiB free", flush=True)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    print("prepared")


@held("target-modules-missing", "v3-bloom-notebook")
def bloom_with_llama_names():
    import rich.traceback
    from peft import LoraConfig, get_peft_model
    from transformers import BloomConfig, BloomForCausalLM

    rich.traceback.install(width=110, extra_lines=1)
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()


@held("target-modules-none", "v3-vit")
def vit_without_targets():
    from peft import LoraConfig, get_peft_model
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1], image_size=32)
    model = ConvNextForImageClassification(config)
    try:
        model = get_peft_model(model, LoraConfig(r=4, modules_to_save=["classifier"]))
    except Exception as error:
        raise RuntimeError("cannot attach the adapter to convnext-tiny") from error
    model.print_trainable_parameters()


@held("lora-bad-values", "v3-task")
def wrong_task():
    import json

    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    recipe = json.loads(
        '{"r": 8, "lora_alpha": 16, "target_modules": ["query"], "task_type": "SEQUENCE_CLS"}'
    )
    model = BertForSequenceClassification(BertConfig(vocab_size=64, hidden_size=32, num_attention_heads=4))
    get_peft_model(model, LoraConfig(**recipe)).print_trainable_parameters()


@held("resized-embeddings-lost", "v3-neox-merge")
def neox_merge():
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    GPTNeoXForCausalLM(config).save_pretrained("pythia-tiny")
    model = GPTNeoXForCausalLM.from_pretrained("pythia-tiny")
    model.resize_token_embeddings(67)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["query_key_value"]))
    model.save_pretrained("adapter", save_embedding_layers=True)
    print("merging adapter into pythia-tiny")
    merged = PeftModel.from_pretrained(GPTNeoXForCausalLM.from_pretrained("pythia-tiny"), "adapter")
    merged.merge_and_unload().save_pretrained("merged")


@held("double-peft", "v3-sft")
def sft_on_adapter():
    import tiny
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny.saved()), lora)
    args = SFTConfig(
        "sft", use_cpu=True, bf16=False, max_steps=2, report_to="none", dataset_text_field="text"
    )
    trainer = SFTTrainer(
        model, args=args, train_dataset=tiny.texts(), processing_class=tiny.tokenizer(), peft_config=lora
    )
    trainer.train()


if __name__ == "__main__":
    main()
