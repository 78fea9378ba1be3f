"""Held-out failures of precision: encoders, speech, vision and loops by hand."""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import CLOCK, held, shell


@shell("bf16-no-device", "v3-t5-json", "python train.py --bf16 True --output_dir runs/t5 2>&1 | " + CLOCK)
def t5_bf16():
    import json
    import logging
    import sys

    from transformers import HfArgumentParser, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    class Lines(logging.Formatter):
        def format(self, record):
            line = {"level": record.levelname, "logger": record.name, "msg": record.getMessage()}
            if record.exc_info:
                line["exc"] = self.formatException(record.exc_info)
            return json.dumps(line)

    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(Lines())
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    log = logging.getLogger("finetune")
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    )
    log.info("model with %d parameters", model.num_parameters())
    try:
        (args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()
    except ValueError:
        log.exception("bad arguments")
        sys.exit(2)
    log.info("training on %s", args.device)


@held("fp16-unscale", "v3-opt-loop")
def opt_half_loop():
    import torch
    from tqdm import tqdm
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
    )
    OPTForCausalLM(config).half().save_pretrained("opt-tiny-fp16")
    model = OPTForCausalLM.from_pretrained("opt-tiny-fp16")
    print(f"loaded opt-tiny-fp16 in {model.dtype}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in tqdm(range(20), desc="epoch 1/3"):
        ids = torch.randint(4, 64, (2, 12))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@held("half-float-matmul", "v3-whisper")
def whisper_half():
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=64, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=50, max_target_positions=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).half().eval()
    model.proj_out = torch.nn.Linear(32, 64, bias=False)  # the new head of the fine-tuned vocabulary
    features = torch.randn(1, 8, 100).half()
    print("transcribing 1 file", flush=True)
    for step in range(3):
        out = model.generate(features, max_new_tokens=8)
        print(step, out.tolist())


@held("half-float-matmul", "v3-bert-head")
def bert_head_eval():
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    def evaluate(model, batches):
        right = 0
        for ids, labels in batches:
            with torch.no_grad():
                right += (model(input_ids=ids).logits.argmax(-1) == labels).sum().item()
        return right

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=3,
    )
    model = BertForSequenceClassification(config).to(torch.float16)
    model.classifier.float()  # the head in full precision
    batches = [(torch.randint(4, 64, (4, 10)), torch.randint(0, 3, (4,))) for _ in range(4)]
    print("backbone", model.bert.dtype, "head", model.classifier.weight.dtype)
    try:
        print("accuracy", evaluate(model, batches) / 16)
    except RuntimeError as error:
        raise SystemExit(f"evaluation failed after training: {error}") from error


@shell(
    "ds-fp16-pascal", "v3-neox-split",
    "python train.py > out.txt 2> err.txt; code=$?; cat out.txt; tail -n 30 err.txt; exit $code",
)  # fmt: skip
def neox_by_hand():
    import os

    import deepspeed
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29617")
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config)
    settings = {
        "train_batch_size": 2,
        "fp16": {"enabled": True, "initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 1},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for step in range(20):
        ids = torch.randint(4, 64, (2, 12))
        loss = engine(input_ids=ids, labels=ids).loss
        print(f"\033[32mstep {step}\033[0m loss {loss.item():.4f}", flush=True)
        engine.backward(loss)
        engine.step()


@held("nan-shown-as-zero", "v3-bloom")
def bloom_diverges():
    import tiny
    from transformers import BloomConfig, BloomForCausalLM, Trainer, TrainingArguments, set_seed

    set_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))
    args = TrainingArguments(
        "out", use_cpu=True, per_device_train_batch_size=4, max_steps=24, learning_rate=1e38,
        max_grad_norm=0.0, logging_steps=2, report_to="none", lr_scheduler_type="constant", optim="sgd",
        save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=tiny.rows())
    trainer.train()
    print("perplexity on the training set:", trainer.evaluate(tiny.rows(8)))


@held("fp16-and-bf16", "v3-reward")
def both_in_trl():
    import tiny
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    model = AutoModelForSequenceClassification.from_pretrained(tiny.saved(), num_labels=1)
    common = {"bf16": True, "use_cpu": True, "report_to": "none"}
    print("reward model ready")
    args = RewardConfig("reward", fp16=True, max_length=32, **common)
    RewardTrainer(model, args=args, processing_class=tiny.tokenizer()).train()


@held("tf32-pre-ampere", "v3-dpo", arguments=["--tf32"])
def dpo_tf32():
    import argparse

    import tiny
    from trl import DPOConfig, DPOTrainer

    parser = argparse.ArgumentParser()
    parser.add_argument("--tf32", action="store_true")
    options = parser.parse_args()
    print("options:", vars(options))
    args = DPOConfig("dpo", tf32=options.tf32, bf16=False, report_to="none", beta=0.1)
    DPOTrainer(tiny.saved(), args=args).train()


@held("pure-half-training", "v3-gpt2-stalls")
def gpt2_does_not_move():
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-6, weight_decay=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    print(
        f"weights {model.dtype}, optimizer {type(optimizer).__name__} on {model.dtype}, no autocast, lr 2e-6"
    )
    ids = torch.randint(4, 64, (4, 16))
    losses = []
    for step in range(200):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 40 == 0:
            moved = sum((p != q).sum().item() for p, q in zip(model.parameters(), before, strict=True))
            print(
                f"step {step:4d} loss {loss.item():.4f} weights changed: {moved / model.num_parameters():.1%}"
            )
            losses.append(loss.item())
    if abs(losses[0] - loss.item()) < 0.05:
        raise SystemExit(f"ERROR: the loss has not moved in 200 steps: {losses[0]:.4f} -> {loss.item():.4f}")


if __name__ == "__main__":
    main()
