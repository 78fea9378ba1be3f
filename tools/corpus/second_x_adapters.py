"""Second held-out logs of failures of adapters and activation checkpointing."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import CLOCK, SRUN, held, shell


@shell("no-grad-fn", "x2-srun", f"python -u train.py 2>&1 | {SRUN}")
def no_grad_srun():
    import logging

    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    logging.basicConfig(level="INFO", format="[%(asctime)s][%(levelname)s] %(message)s")

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(64, 32).requires_grad_(False)
            self.blocks = nn.ModuleList(Adapter(nn.Linear(32, 32)) for _ in range(3))
            self.head = nn.Linear(32, 64).requires_grad_(False)

        def forward(self, ids):
            hidden = self.embed(ids)
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=True)
            return self.head(hidden)

    net = Net()
    logging.info("trainable tensors: %d", sum(p.requires_grad for p in net.parameters()))
    ids = torch.randint(0, 64, (2, 8))
    loss = nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    logging.info("step 0 loss %.3f", loss.item())
    loss.backward()


@shell("adapter-not-trainable", "x2-clock", f"python -u train.py 2>&1 | {CLOCK}")
def frozen_bert():
    import torch
    from accelerate import Accelerator
    from transformers import BertConfig, BertForSequenceClassification

    accelerator = Accelerator(cpu=True)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("score")  # BERT's head is called classifier
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(f"trainable params: {trainable:,} || all params: {total:,}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(input_ids=torch.randint(0, 64, (4, 8)), labels=torch.tensor([0, 1, 0, 1])).loss
    try:
        accelerator.backward(loss)
    except RuntimeError as error:
        raise SystemExit(f"training stopped at step 0: {error}") from error


@held("ddp-ready-twice", "x2-kbit-sft", launcher="torchrun", ranks=2)
def twice_kbit():
    import tiny
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    base = AutoModelForCausalLM.from_pretrained(
        tiny.saved(), quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    )
    model = get_peft_model(
        prepare_model_for_kbit_training(base), LoraConfig(r=4, target_modules="all-linear")
    )
    args = SFTConfig(
        "out", max_steps=6, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        ddp_find_unused_parameters=True, max_length=32,
    )  # fmt: skip
    SFTTrainer(model, args=args, train_dataset=tiny.texts(), processing_class=tiny.tokenizer()).train()


@shell(
    "ddp-unused-params", "x2-two-heads",
    "torchrun --nproc_per_node 2 --master_port 29763 --tee 3 train.py 2>&1",
)  # fmt: skip
def unused_heads():
    import os

    import tiny
    import torch
    from transformers import Trainer, TrainingArguments

    class TwoHeads(torch.nn.Module):
        """A policy and a value head; the value head is used on rank 0 only."""

        def __init__(self):
            super().__init__()
            self.lm = tiny.model()
            self.value = torch.nn.Linear(64, 1)

        def forward(self, input_ids, attention_mask=None, labels=None):
            out = self.lm(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
            if os.environ["RANK"] == "0":
                return {"loss": out.loss + self.value(out.logits).pow(2).mean(), "logits": out.logits}
            return {"loss": out.loss, "logits": out.logits}

    args = TrainingArguments(
        "out",
        max_steps=6,
        use_cpu=True,
        report_to="none",
        ddp_find_unused_parameters=False,
        save_strategy="no",
    )
    Trainer(TwoHeads(), args, train_dataset=tiny.rows()).train()


@held("checkpointing-unsupported", "x2-custom")
def unsupported_custom():
    import tiny
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    class MixerConfig(PreTrainedConfig):
        model_type = "mixer"

    class MixerForCausalLM(PreTrainedModel):
        config_class = MixerConfig

        def __init__(self, config):
            super().__init__(config)
            self.embed = torch.nn.Embedding(64, 32)
            self.head = torch.nn.Linear(32, 64)
            self.post_init()

        def forward(self, input_ids, labels=None, **kwargs):
            logits = self.head(self.embed(input_ids))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return {"loss": loss, "logits": logits}

    args = TrainingArguments("out", max_steps=6, use_cpu=True, gradient_checkpointing=True, report_to="none")
    Trainer(MixerForCausalLM(MixerConfig()), args, train_dataset=tiny.rows()).train()


@shell(
    "checkpointing-kwarg-typo", "x2-t5-loop", "python -W error::FutureWarning -u train.py 2>&1 | tail -n 30"
)
def kwarg_t5():
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )
    model.activation_checkpointing_enable({"reentrant": False, "preserve_rng": True})
    model.train()
    for epoch in range(2):
        print("epoch", epoch)
        ids = torch.randint(4, 60, (2, 10))
        model(input_ids=ids, labels=ids).loss.backward()


@held("fsdp-double-checkpointing", "x2-args", launcher="torchrun", ranks=2)
def double_checkpointing():
    import tiny
    from accelerate import DistributedType, PartialState
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out", max_steps=6, use_cpu=True, gradient_checkpointing=True, report_to="none",
        fsdp=True, fsdp_config={"activation_checkpointing": True, "fsdp_version": 2},
    )  # fmt: skip
    print("device", args.device)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU  # no FSDP on CPU
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


if __name__ == "__main__":
    main()
