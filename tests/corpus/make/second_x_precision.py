"""Second held-out logs of failures of precision."""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import SRUN, held, shell

COMPOSE = "sed -u 's/^/trainer-1  | /'"
"""As docker compose writes the lines of a service."""
FP16_AND_BF16 = {
    "train_batch_size": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
    "fp16": {"enabled": True, "initial_scale_power": 12},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}
OVERFLOWING = {
    "train_batch_size": 2,
    "steps_per_print": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
    "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
    "zero_optimization": {"stage": 2},
}


@held("bf16-no-device", "x2-dpo")
def bf16_dpo():
    import tiny
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = [{"prompt": "w1 w2", "chosen": " w3 w4", "rejected": " w5"}] * 16
    folder = tiny.saved()
    args = DPOConfig("dpo-out", beta=0.1, bf16=True, per_device_train_batch_size=2, report_to="none")
    DPOTrainer(
        folder, args=args, train_dataset=Dataset.from_list(pairs), processing_class=tiny.tokenizer()
    ).train()


@shell("bf16-no-device", "x2-typer", "python -u summarise.py runs/cnn --steps 40 2>&1", files={
    "summarise.py": """\
import typer
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

import tiny


def main(output: str, steps: int = 20, bf16: bool = True):
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2))
    args = Seq2SeqTrainingArguments(output, max_steps=steps, bf16=bf16, report_to="none")
    Seq2SeqTrainer(model, args, train_dataset=tiny.rows()).train()


typer.run(main)
"""
})  # fmt: skip
def bf16_typer():
    pass


@held("fp16-unscale", "x2-vit")
def fp16_unscale_vit():
    import torch
    from torch.amp import GradScaler, autocast
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    model = ViTForImageClassification(config).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu")
    for step in range(10):
        images = torch.randn(8, 3, 32, 32)
        with autocast("cpu", dtype=torch.float16):
            loss = model(pixel_values=images.half(), labels=torch.randint(0, 2, (8,))).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step} loss {loss.item():.4f}")


@shell("fp16-unscale", "x2-srun", f"python -u train.py 2>&1 | {SRUN} | tail -n 30")
def fp16_unscale_srun():
    import logging

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)-8s %(name)s:%(lineno)d %(message)s")
    log = logging.getLogger("pythia")

    class StepFailed(RuntimeError):
        pass

    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model = GPTNeoXForCausalLM(config).to(torch.float16)
    lora = LoraConfig(r=4, target_modules=["query_key_value"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    model.print_trainable_parameters()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=2e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    log.info("starting run, mixed precision fp16")
    ids = torch.randint(4, 60, (4, 12))
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        log.info("step 1 loss %.4f", loss.item())
        scaler.step(optimizer)
    except ValueError as error:
        log.error("step failed, giving up")
        raise StepFailed("optimizer step 1 of 1000 failed") from error


@held("half-float-matmul", "x2-bert-eval")
def half_bert():
    import torch
    from torch import nn
    from transformers import BertConfig, BertModel

    class Ranker(nn.Module):
        def __init__(self):
            super().__init__()
            config = BertConfig(
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=64,
            )
            self.encoder = BertModel(config).to(torch.float16)
            self.score = nn.Linear(32, 1)

        def forward(self, input_ids):
            return self.score(self.encoder(input_ids).last_hidden_state[:, 0])

    model = Ranker().eval()
    print("Evaluating on 64 queries")
    with torch.no_grad():
        for _ in range(8):
            print(model(torch.randint(0, 64, (8, 10))).mean().item())


@shell("half-float-matmul", "x2-whisper", "python train.py > out.txt 2> err.txt; cat out.txt err.txt")
def half_whisper():
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16,
        max_source_positions=50, max_target_positions=40, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    model.model.decoder.to(torch.bfloat16)
    print("decoder in bfloat16, encoder in float32 (frozen)")
    features = torch.randn(2, 16, 100)
    labels = torch.randint(4, 90, (2, 8))
    loss = model(input_features=features, labels=labels).loss
    loss.backward()


@shell(
    "loss-scale-minimum", "x2-hand",
    "deepspeed --num_accelerators 1 --master_port 29731 train.py --deepspeed 2>&1 | tail -n 40",
    files={"ds.json": OVERFLOWING},
)  # fmt: skip
def loss_scale_hand():
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        word_embed_proj_dim=32,
    )
    model = OPTForCausalLM(config)
    get_accelerator().is_fp16_supported = lambda: True  # slow on a CPU, but it runs
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
    for step in range(60):
        ids = torch.randint(4, 60, (2, 12))
        loss = engine(input_ids=ids, labels=ids).loss * 1e8
        engine.backward(loss)
        engine.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item()}")


@shell("nan-shown-as-zero", "x2-t5", "python -u train.py 2>&1 | tail -n 30")
def nan_t5():
    import tiny
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )
    args = Seq2SeqTrainingArguments(
        "t5-out", max_steps=40, learning_rate=1e18, max_grad_norm=0.0, optim="sgd", logging_steps=2,
        use_cpu=True, report_to="none", lr_scheduler_type="constant",
    )  # fmt: skip
    Seq2SeqTrainer(model, args, train_dataset=tiny.rows()).train()


@held("nan-shown-as-zero", "x2-json")
def nan_json():
    import json
    import time

    import tiny
    import torch
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class JsonLines(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            print(
                json.dumps({"ts": round(time.time(), 3), "level": "info", "step": state.global_step, **logs})
            )

    model = tiny.model()
    with torch.no_grad():
        model.lm_head.weight[7] = float("inf")  # a damaged checkpoint
    args = TrainingArguments(
        "out", max_steps=10, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(model, args, train_dataset=tiny.rows(), callbacks=[JsonLines()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


@held("fp16-and-bf16", "x2-engine", files={"ds_config.json": FP16_AND_BF16}, launcher="deepspeed")
def both_engine():
    import deepspeed
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))
    print("model has", sum(p.numel() for p in model.parameters()), "parameters")
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config="ds_config.json"
    )
    engine.save_checkpoint("out")


@shell(
    "fp16-and-bf16", "x2-plugin",
    "torchrun --nproc_per_node 1 --master_port 29741 train.py --fp16 2>&1",
    files={"ds.json": {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }},
)  # fmt: skip
def both_plugin():
    import sys

    import tiny
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin

    mixed = "fp16" if "--fp16" in sys.argv else "bf16"
    accelerator = Accelerator(mixed_precision=mixed, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"))
    model = tiny.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.print("ready")


@held("tf32-pre-ampere", "x2-reward")
def tf32_reward():
    import warnings

    import tiny
    from datasets import Dataset
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    warnings.warn("the dataset has 3 duplicated prompts", stacklevel=1)
    model = LlamaForSequenceClassification(tiny.config(num_labels=1))
    pairs = [{"chosen": "w3 w4", "rejected": "w5 w6"}] * 16
    args = RewardConfig("reward", tf32=True, bf16=False, use_cpu=True, max_steps=4, report_to="none")
    RewardTrainer(
        model, args=args, train_dataset=Dataset.from_list(pairs), processing_class=tiny.tokenizer()
    ).train()


@shell("tf32-pre-ampere", "x2-compose", f"python -u train.py args.json 2>&1 | {COMPOSE}", files={
    "args.json": {
        "output_dir": "out", "tf32": True, "use_cpu": True, "per_device_train_batch_size": 4, "max_steps": 20,
        "report_to": "none",
    }
})  # fmt: skip
def tf32_compose():
    import sys

    from transformers import HfArgumentParser, TrainingArguments

    print("reading", sys.argv[1])
    (args,) = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[1])
    print(args.output_dir)


if __name__ == "__main__":
    main()
