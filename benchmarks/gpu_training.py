"""A row of the GPU sweep as a model, a batch and steps: what transformers' Trainer does, spelled out.

Needs torch and transformers; peft and bitsandbytes only for the rows that name them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from grids import Row

STEPS = 4
"""Of the optimizer; the first one is not timed."""
RANK, LABELS, DOCUMENTS = 16, 10, 4
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-true": torch.bfloat16}
AUTO = {
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}


def weights_dtype(row: Row) -> torch.dtype:
    """As plans decide it: only a full fine-tune under autocast trains float32 weights."""
    keeps_fp32 = row.precision != "bf16-true" and row.adapter is None
    return torch.float32 if row.precision == "fp32" or keeps_fp32 else HALF[row.precision]


def build_model(row: Row, config: Mapping[str, Any], task: str, device: torch.device) -> Any:
    """The model with random weights on the device, in training mode, with its adapter."""
    import transformers

    from launcher.train.upstream.model_seams import repeat_keys_for_fused_attention

    repeat_keys_for_fused_attention()  # as runs do
    auto = getattr(transformers, AUTO[task])
    labels = {"num_labels": LABELS} if "classification" in task else {}
    built = transformers.AutoConfig.for_model(**{**config, **labels})
    with device:
        model = auto.from_config(built, dtype=weights_dtype(row), attn_implementation=row.attention)
    model.config.use_cache = False
    if row.adapter is not None:
        model = _with_adapter(row, model, task)
    if row.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _with_adapter(row: Row, model: Any, task: str) -> Any:
    from peft import LoraConfig, get_peft_model

    if row.checkpointing:
        model.enable_input_require_grads()
    targets = "all-linear" if row.adapter == "all-linear" else str(row.adapter).split(",")
    kind = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM"}.get(task)
    return get_peft_model(model, LoraConfig(r=RANK, target_modules=targets, task_type=kind))


def make_batch(row: Row, config: Any, task: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Random rows of full length, as a collator makes them."""
    classes = torch.zeros(row.micro_batch, dtype=torch.long, device=device)
    if task == "image-classification":
        size = config.image_size
        pixels = torch.randn(row.micro_batch, 3, size, size, device=device, dtype=weights_dtype(row))
        return {"pixel_values": pixels, "labels": classes}
    ids = torch.randint(4, config.vocab_size, (row.micro_batch, row.length), device=device)
    labels = classes if task == "sequence-classification" else ids.clone()
    if row.packing:
        positions = torch.arange(row.length // DOCUMENTS, device=device).repeat(row.micro_batch, DOCUMENTS)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def make_optimizer(row: Row, model: Any, trained: list[torch.Tensor]) -> torch.optim.Optimizer:
    """As TrainingArguments.optim names them."""
    if row.optim == "sgd":
        return torch.optim.SGD(trained, lr=1e-4)
    if row.optim == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(trained, lr=1e-4, scale_parameter=False, relative_step=False)
    if row.optim == "adamw_bnb_8bit":
        from bitsandbytes.optim import AdamW8bit, GlobalOptimManager

        manager = GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):  # as the Trainer does
                manager.register_module_override(module, "weight", {"optim_bits": 32})
        eight: torch.optim.Optimizer = AdamW8bit(trained, lr=1e-4)
        return eight
    return torch.optim.AdamW(trained, lr=1e-4, fused=True if row.optim == "adamw_torch_fused" else None)


def make_step(row: Row, model: Any, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """One optimizer step: micro-batches, gradients clipped to norm 1, update."""
    device = next(model.parameters()).device
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(row, model, trained)
    scaler = torch.amp.GradScaler(device.type, enabled=row.precision == "fp16")

    def autocast() -> AbstractContextManager[Any]:
        if row.precision not in ("bf16", "fp16"):
            return nullcontext()
        return torch.autocast(device.type, dtype=HALF[row.precision])

    def step() -> None:
        for _ in range(row.accumulation):
            with autocast():
                loss = model(**batch).loss / row.accumulation
            scaler.scale(loss).backward()
            del loss
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def timed_steps(step: Callable[[], Any], device: torch.device, count: int = STEPS) -> list[float]:
    """Run `count` steps; seconds of each, the device waited for."""
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds
