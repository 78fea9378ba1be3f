"""Held-out failures of precision: encoders, speech, vision and loops by hand."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import held, shell


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
