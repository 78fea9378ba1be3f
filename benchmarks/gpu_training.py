"""A row of the GPU sweep as a model, a batch and steps: what transformers' Trainer does, spelled out.

Needs torch and transformers; peft, bitsandbytes and deepspeed only for the rows that name them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from grids import Row

STEPS = 4
"""Of the optimizer; the first one is not timed."""
RANK, LABELS, DOCUMENTS, BUCKET = 16, 10, 4, 50_000_000
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-true": torch.bfloat16}
AUTO = {
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}


def weights_dtype(row: Row) -> torch.dtype:
    """As plans decide it: only a full fine-tune under autocast trains float32 weights."""
    keeps_fp32 = row.precision != "bf16-true" and row.adapter is None and row.engine == "ddp"
    return torch.float32 if row.precision == "fp32" or keeps_fp32 else HALF[row.precision]


def build_model(row: Row, config: Mapping[str, Any], task: str, device: torch.device) -> Any:
    """The model with random weights on the device, in training mode, with its adapter."""
    import transformers

    from launcher.train.upstream.model_seams import repeat_keys_for_fused_attention

    repeat_keys_for_fused_attention()  # as runs do
    auto = getattr(transformers, AUTO[task])
    labels = {"num_labels": LABELS} if "classification" in task else {}
    built = transformers.AutoConfig.for_model(**{**config, **labels})
    options = {"dtype": weights_dtype(row), "attn_implementation": row.attention}
    if row.quantization == "none":
        with device:
            model = auto.from_config(built, **options)
    else:
        model = _quantized(auto, built, options, device)
    model.config.use_cache = False
    if row.adapter is not None:
        model = _with_adapter(row, model, task)
    if row.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _quantized(auto: Any, built: Any, options: dict[str, Any], device: torch.device) -> Any:
    """Weights are quantised while they are read, so random ones take the way over a folder."""
    from transformers import BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=options["dtype"],
    )
    with tempfile.TemporaryDirectory() as folder:
        with device:
            auto.from_config(built, dtype=options["dtype"]).save_pretrained(folder)
        return auto.from_pretrained(folder, quantization_config=four_bit, device_map={"": device}, **options)


def _with_adapter(row: Row, model: Any, task: str) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if row.quantization != "none":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if row.checkpointing:
        model.enable_input_require_grads()
    targets = "all-linear" if row.adapter == "all-linear" else str(row.adapter).split(",")
    kind = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM"}.get(task)
    return get_peft_model(model, LoraConfig(r=RANK, target_modules=targets, task_type=kind))


def make_batch(row: Row, config: Any, task: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Random rows of full length, as a collator makes them."""
    if task == "image-classification":
        size = config.image_size
        pixels = torch.randn(row.micro_batch, 3, size, size, device=device, dtype=weights_dtype(row))
        return {
            "pixel_values": pixels,
            "labels": torch.zeros(row.micro_batch, dtype=torch.long, device=device),
        }
    shape = (row.micro_batch, row.length)
    ids = torch.randint(4, config.vocab_size, shape, device=device)
    if task == "sequence-classification":
        labels = torch.zeros(row.micro_batch, dtype=torch.long, device=device)
    else:
        labels = ids.clone()
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
    if row.engine == "deepspeed":
        return _deepspeed_step(row, model, trained, batch)
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


def _deepspeed_step(
    row: Row, model: Any, trained: list[torch.Tensor], batch: dict[str, torch.Tensor]
) -> Callable[[], None]:
    import deepspeed

    device = next(model.parameters()).device
    zero: dict[str, Any] = {
        "stage": row.zero_stage,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "overlap_comm": False,
        "contiguous_gradients": True,
    }
    if row.offload_optimizer == "cpu":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device.type == "cuda"}
        optimizer = DeepSpeedCPUAdam(trained, lr=1e-4)
    else:
        optimizer = make_optimizer(row, model, trained)
    config = {
        "train_micro_batch_size_per_gpu": row.micro_batch,
        "gradient_accumulation_steps": row.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": row.precision == "bf16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> None:
        for _ in range(row.accumulation):
            engine.backward(engine(**batch).loss)
            engine.step()

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
