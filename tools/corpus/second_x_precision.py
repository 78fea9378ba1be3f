"""Second held-out logs of failures of precision."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import held, shell

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


if __name__ == "__main__":
    main()
