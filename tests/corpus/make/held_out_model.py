"""Held-out logs: precision and training adapters, as other models, entry points and launchers show it.

Each function is a script of its own, see capture.py.
Run: python -m tests.corpus.make.held_out_model [name…]
"""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import CLOCK, SRUN, held, shell


@held("bf16-no-device", "dpo", env={"FORCE_COLOR": "1"})
def bf16_no_device():
    import tiny
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = Dataset.from_dict({"prompt": ["w1 w2"] * 8, "chosen": ["w3 w4"] * 8, "rejected": ["w5 w6"] * 8})
    args = DPOConfig("dpo", bf16=True, max_steps=2, report_to="none")
    DPOTrainer(tiny.model(), args=args, train_dataset=pairs, processing_class=tiny.tokenizer()).train()


@shell("fp16-unscale", "loop-srun", f"python -u train.py 2>&1 | {SRUN}")
def fp16_unscale():
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, **sizes)).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    ids = torch.randint(4, 64, (4, 10))
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=ids, labels=torch.tensor([0, 1, 0, 1])).loss
        print("step", step, "loss", loss.item())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@held("half-float-matmul", "gpt2-addmm")
def half_float_gpt2():
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32))
    for block in model.transformer.h:
        block.mlp.half()
    try:
        print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4))
    except RuntimeError as error:
        raise SystemError("sampling during evaluation failed at step 500") from error


@shell("half-float-matmul", "t5-generate", f"python -u train.py 2>&1 | {CLOCK}")
def half_float_t5():
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import T5Config, T5ForConditionalGeneration

    base = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    ).half()
    model = get_peft_model(base, LoraConfig(task_type="SEQ_2_SEQ_LM"), autocast_adapter_dtype=False)
    model.base_model.model.lm_head.float()
    print(model.generate(input_ids=torch.tensor([[5, 6, 7, 1]]), max_new_tokens=3))


@held("nan-shown-as-zero", "seq2seq")
def nan_shown_as_zero():
    import torch
    from torch.utils.data import Dataset
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    class Rows(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            ids = torch.arange(4, 14) + i % 8
            return {"input_ids": ids, "labels": ids}

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )
    model.shared.weight.data[9] = float("inf")
    args = Seq2SeqTrainingArguments(
        "out", use_cpu=True, max_steps=12, logging_steps=2, learning_rate=1e-3, report_to="none",
        save_strategy="no",
    )  # fmt: skip
    Seq2SeqTrainer(model, args, train_dataset=Rows()).train()


@held(
    "fp16-and-bf16",
    "parser",
    ranks=2,
    launcher="torchrun",
    arguments=("--output_dir", "o", "--use_cpu", "--fp16", "--bf16", "True"),
)
def fp16_and_bf16():
    from transformers import HfArgumentParser
    from trl import RewardConfig

    (args,) = HfArgumentParser(RewardConfig).parse_args_into_dataclasses()
    print(args.output_dir)


@held("tf32-pre-ampere", "seq2seq", launcher="accelerate", ranks=1)
def tf32_pre_ampere():
    from transformers import Seq2SeqTrainingArguments

    args = Seq2SeqTrainingArguments("translate", tf32=True, predict_with_generate=True, report_to="none")
    print(args.device)


@held("no-grad-fn", "vit")
def no_grad_fn():
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    class Pictures(Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, i):
            return {"pixel_values": torch.randn(3, 16, 16), "labels": i % 2}

    vit = ViTForImageClassification(
        ViTConfig(
            image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64,
        )
    )  # fmt: skip
    model = get_peft_model(vit, LoraConfig(target_modules="all-linear"))
    model.base_model.model.classifier.requires_grad_(False)
    args = TrainingArguments(
        "vit", use_cpu=True, max_steps=2, report_to="none", activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": True},
    )  # fmt: skip
    Trainer(model, args, train_dataset=Pictures()).train()


@held("no-grad-fn", "sequential")
def no_grad_fn_sequential():
    import torch
    from torch.utils.checkpoint import checkpoint_sequential

    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
    layers.requires_grad_(False)
    layers[3].requires_grad_(True)  # the adapter
    images = torch.randn(4, 16)
    for epoch in range(2):
        loss = checkpoint_sequential(layers, 2, images, use_reentrant=True).pow(2).mean()
        print(f"epoch {epoch} loss {loss.item():.3f}")
        loss.backward()


@held("adapter-not-trainable", "ddp", ranks=2, launcher="torchrun")
def adapter_not_trainable_ddp():
    import os

    import tiny
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.distributed.init_process_group("gloo")
    stage1 = f"stage1-{os.environ['RANK']}"
    get_peft_model(tiny.model(), LoraConfig(task_type="CAUSAL_LM")).save_pretrained(stage1)
    model = PeftModel.from_pretrained(tiny.model(), stage1)
    model.print_trainable_parameters()
    torch.nn.parallel.DistributedDataParallel(model)


@held("adapter-not-trainable", "empty-optimizer")
def adapter_not_trainable_optimizer():
    import tiny
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, PeftModel, get_peft_model

    get_peft_model(tiny.model(), LoraConfig(task_type="CAUSAL_LM")).save_pretrained("round1")
    accelerator = Accelerator(cpu=True)
    model = PeftModel.from_pretrained(tiny.model(), "round1")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    model, optimizer = accelerator.prepare(model, optimizer)


@shell("ddp-ready-twice", "gpt2", f"torchrun --standalone --nproc_per_node=2 train.py 2>&1 | {SRUN}")
def ddp_ready_twice():
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.distributed.init_process_group("gloo")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    ids = torch.randint(0, 64, (2, 12))
    ddp(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@held("kbit-reentrant", "opt-int8", ranks=2, launcher="torchrun", env={"TORCH_DISTRIBUTED_DEBUG": "INFO"})
def kbit_reentrant():
    import os

    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig, OPTConfig, OPTForCausalLM

    folder = f"opt-{os.environ['RANK']}"
    OPTForCausalLM(
        OPTConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4,
            word_embed_proj_dim=32, max_position_embeddings=64,
        )
    ).save_pretrained(folder)  # fmt: skip
    torch.distributed.init_process_group("gloo")
    base = OPTForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    model = get_peft_model(
        prepare_model_for_kbit_training(base), LoraConfig(target_modules=["q_proj", "v_proj"])
    )
    model.train()
    ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    ids = torch.randint(4, 64, (2, 12))
    ddp(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()


@held("ddp-unused-params", "vit-accelerate", ranks=2, launcher="torchrun", env={"ACCELERATE_USE_CPU": "true"})
def ddp_unused_params():
    import torch
    from accelerate import Accelerator
    from transformers import ViTConfig, ViTModel

    accelerator = Accelerator(cpu=True)
    vit = ViTModel(
        ViTConfig(
            image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64,
        )
    )  # fmt: skip
    vit, optimizer = accelerator.prepare(vit, torch.optim.AdamW(vit.parameters(), lr=1e-3))
    for step in range(3):
        loss = vit(pixel_values=torch.randn(2, 3, 16, 16)).last_hidden_state.mean()  # the pooler stays unused
        accelerator.print(step, loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@shell("checkpointing-renamed", "as-error", "python -W error::FutureWarning train.py 2>&1")
def checkpointing_renamed():
    from trl import SFTConfig

    print(SFTConfig("out", gradient_checkpointing=True, use_cpu=True, bf16=False, report_to="none"))


@held("checkpointing-unsupported", "openai-gpt")
def checkpointing_unsupported():
    import tiny
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel, Trainer, TrainingArguments

    model = OpenAIGPTLMHeadModel(
        OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    )
    args = TrainingArguments(
        "gpt", use_cpu=True, max_steps=2, activation_checkpointing=True, report_to="none"
    )
    Trainer(model, args, train_dataset=tiny.rows()).train()


@held("checkpointing-kwarg-typo", "bert-loop")
def checkpointing_kwarg_typo():
    import torch
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertForMaskedLM(BertConfig(vocab_size=64, **sizes))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrent": False})
    model.train()
    ids = torch.randint(4, 64, (4, 10))
    model(input_ids=ids, labels=ids).loss.backward()


if __name__ == "__main__":
    main()
