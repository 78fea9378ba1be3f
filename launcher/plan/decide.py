"""What follows from the recipe and the device alone: precision, dtype, engine, Trainer defaults. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.facts.hardware import Hardware
from launcher.plan.draft import Draft
from launcher.recipe.schema import AdapterSection, Quantization, Recipe

AMPERE = (8, 0)
VOLTA = (7, 0)
HALF = {"bf16": "bfloat16", "bf16-true": "bfloat16", "fp16": "float16", "fp16-true": "float16"}


def refuse(draft: Draft, code: str, dotted: str, message: str, hint: str) -> RecipeError:
    """A refusal at the recipe line that asks for what cannot be."""
    file, line = draft.place(dotted)
    return RecipeError(Problem(code, message, file=file, line=line, path=dotted, hint=hint))


def record_recipe(draft: Draft, recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Copy what the recipe says (or its schema's defaults) into the draft, leaf by leaf."""
    draft.put_recipe("task", recipe.task, "the only task so far")
    draft.put_recipe("seed", recipe.seed, "schema default")
    model = recipe.model
    for name in (
        "name_or_path",
        "revision",
        "gguf_file",
        "tokenizer",
        "device_map",
        "chat_template",
        "cache_dir",
        "trust_remote_code",
    ):
        draft.put_recipe(f"model.{name}", getattr(model, name), "not asked for")
    # A shipped fact's name is resolved here: the worker gets the configuration itself.
    draft.put_recipe("model.config", None if model.config is None else dict(config), "not asked for")
    draft.put_recipe(
        "model.attn_implementation",
        model.attn_implementation or "sdpa",
        "torch's own kernels: present on every device, no extra package",
    )
    _record_adapter(draft, recipe.adapter)
    data = recipe.data
    draft.put_recipe("data.train", [s.model_dump() for s in data.train], "")
    rows = data.eval
    evaluation = [s.model_dump() for s in rows] if isinstance(rows, list) else rows and rows.model_dump()
    draft.put_recipe("data.eval", evaluation, "no evaluation asked for")
    draft.put_recipe("data.max_length", data.max_length, "schema default")
    draft.put_recipe("data.loss_on", data.loss_on, "by row format, decided when the rows are read")
    draft.put_recipe("data.num_proc", data.num_proc, "one per core, at most 8")
    if recipe.sharding.zero_stage != "auto":
        draft.put_recipe("sharding.zero_stage", recipe.sharding.zero_stage, "")
    for name in ("offload_optimizer", "offload_param"):
        draft.put_recipe(f"sharding.{name}", getattr(recipe.sharding, name), "nothing is offloaded")
    for name, value in recipe.trainer.items():
        draft.put_recipe(f"trainer.{name}", value, "")


def _record_adapter(draft: Draft, adapter: AdapterSection | None) -> None:
    if adapter is None:
        draft.put_recipe("adapter.type", None, "no adapter: all parameters are trained")
        return
    fields: dict[str, Any] = adapter.model_dump()
    draft.put_recipe("adapter.type", fields.pop("type"), "the adapter method")
    path = fields.pop("path")
    if path is not None:
        draft.put_recipe("adapter.path", path, "")
        return
    for name, value in fields.items():
        draft.put_recipe(f"adapter.{name}", value, "")
    defaults = {
        "r": (16, "rank of common LoRA recipes"),
        "lora_alpha": (32, "twice the default rank"),
        "lora_dropout": (0.0, "peft's default"),
        "target_modules": (
            "all-linear",
            "every linear layer but the head; peft knows not every model",
        ),
    }
    for name, (value, reason) in defaults.items():
        if name not in fields:
            draft.put(f"adapter.{name}", value, reason)


def decide_precision(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """`auto` by compute capability: never by torch's `is_bf16_supported`, which counts emulation."""
    if recipe.precision != "auto":
        draft.put_recipe("precision", recipe.precision, "")
        return
    capability = hardware.compute_capability
    if hardware.is_cpu:
        value, reason = "fp32", "a CPU: 16-bit is slower there"
    elif capability is None:
        value, reason = "fp16", "compute capability unknown: bf16 only when the recipe says so"
    elif capability >= AMPERE:
        value, reason = "bf16", f"compute capability {_dot(capability)} >= 8.0 has bf16 units"
    elif capability >= VOLTA:
        value, reason = "fp16", f"compute capability {_dot(capability)} < 8.0 has no bf16 units"
    else:
        value, reason = "fp32", f"compute capability {_dot(capability)} < 7.0 has no tensor cores"
    draft.put("precision", value, reason, source="hardware", by=hardware.device)


def _dot(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def decide_engine(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """Which algorithm shards weights, gradients and optimizer states."""
    sharding = recipe.sharding
    wants_zero = (
        sharding.zero_stage != "auto"
        or sharding.offload_optimizer != "none"
        or sharding.offload_param != "none"
        or sharding.config is not None
    )
    processes = 1 if recipe.model.device_map else hardware.num_devices
    if sharding.engine != "auto":
        draft.put_recipe("sharding.engine", sharding.engine, "")
    elif wants_zero:
        draft.put("sharding.engine", "deepspeed", "the recipe names ZeRO, offload or a profile")
    elif processes == 1:
        draft.put("sharding.engine", "ddp", "one process: nothing to shard")
    else:
        draft.put("sharding.engine", "deepspeed", f"{processes} processes: ZeRO can shard states")
    engine = draft.get("sharding.engine")
    if engine == "ddp" and wants_zero:
        raise refuse(
            draft,
            "engine-conflict",
            "sharding.engine",
            "engine ddp cannot use zero_stage, offload or a DeepSpeed profile",
            "set sharding.engine: deepspeed or drop them",
        )
    if engine == "deepspeed" and draft.get("precision").endswith("-true"):
        raise refuse(
            draft,
            "precision-conflict",
            "precision",
            f"{draft.get('precision')} and DeepSpeed: its 16-bit engines keep fp32 master weights",
            "use precision bf16 or fp16, or sharding.engine: ddp",
        )


def decide_launcher(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """Who spawns the processes."""
    launcher, engine = recipe.launch.launcher, draft.get("sharding.engine")
    processes = 1 if recipe.model.device_map else hardware.num_devices
    if launcher != "auto":
        draft.put_recipe("launch.launcher", launcher, "")
        if launcher == "python" and processes > 1:
            raise refuse(
                draft,
                "launcher-conflict",
                "launch.launcher",
                f"python starts one process, the hardware asks for {processes}",
                "use launcher auto, or hardware with one device",
            )
        if launcher == "deepspeed" and engine == "ddp":
            raise refuse(
                draft,
                "launcher-conflict",
                "launch.launcher",
                "the deepspeed launcher with engine ddp starts DDP ranks without rendezvous checks",
                "use launcher accelerate for engine ddp",
            )
    elif processes == 1:
        draft.put("launch.launcher", "python", "one process needs no launcher")
    else:
        chosen = "deepspeed" if engine == "deepspeed" else "accelerate"
        draft.put("launch.launcher", chosen, f"engine {engine} over {processes} processes")


def _quantization(recipe: Recipe) -> Quantization | None:
    asked = recipe.model.quantization
    if isinstance(asked, Quantization):
        return asked
    return None if asked == "none" else Quantization(type=asked)


def decide_weights(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """Quantisation with every choice made, and the dtype of the weights in memory."""
    precision = draft.get("precision")
    half = HALF.get(precision)
    asked = _quantization(recipe)
    if asked is None:
        draft.put_recipe("model.quantization", "none", "not asked for")
    elif asked.type == "int8":
        draft.put_recipe("model.quantization", {"type": "int8"}, "")
    else:
        value = {
            "type": asked.type,
            "double_quant": asked.double_quant,
            "compute_dtype": asked.compute_dtype or half or "float32",
        }
        draft.put_recipe("model.quantization", value, "")
    if recipe.model.dtype is not None:
        draft.put_recipe("model.dtype", recipe.model.dtype, "")
        return
    if "explicit-dtype" in recipe.fixes.disable:
        draft.put("model.dtype", "auto", "fix explicit-dtype is disabled: the checkpoint's own dtype")
        return
    trains_adapter = recipe.adapter is not None
    if half is None:
        dtype, reason = "float32", "precision fp32"
    elif asked is not None:
        dtype, reason = half, "dtype of the modules that stay unquantised"
    elif trains_adapter:
        dtype, reason = half, "frozen base weights need no fp32 copy; the adapter has its own"
    elif precision.endswith("-true"):
        dtype, reason = half, f"precision {precision}"
    elif draft.get("sharding.engine") == "deepspeed":
        dtype, reason = half, "DeepSpeed holds fp32 master weights of its own"
    else:
        dtype, reason = "float32", "mixed precision under autocast trains fp32 weights"
    draft.put("model.dtype", dtype, reason, source="fix", by="explicit-dtype")


def decide_trainer(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """TrainingArguments that follow from other decisions, and defaults that upstream leaves unsafe."""
    precision = draft.get("precision")
    owned: Mapping[str, tuple[Any, str]] = {
        "bf16": (precision == "bf16", f"precision {precision}"),
        "fp16": (precision == "fp16", f"precision {precision}"),
        "seed": (recipe.seed, "recipe seed"),
        "use_cpu": (hardware.is_cpu, f"device {hardware.device}"),
    }
    for name, (value, reason) in owned.items():
        draft.put(f"trainer.{name}", value, reason)
    has_eval = recipe.data.eval is not None
    defaults: dict[str, tuple[Any, str]] = {
        "optim": ("adamw_torch_fused", "upstream's default, said explicitly"),
        "learning_rate": (
            2e-4 if recipe.adapter else 2e-5,
            "usual for adapters" if recipe.adapter else "usual for full fine-tunes",
        ),
        "max_grad_norm": (1.0, "upstream's default; DeepSpeed's own default has changed over time"),
        "logging_steps": (10, "a loss line every ten steps"),
        "logging_first_step": (True, "the first loss shows whether the data is right"),
        "save_total_limit": (2, "a full disk ends a run; the last two checkpoints are kept"),
        "report_to": ("none", "no tracker asked for"),
        "disable_tqdm": (True, "the logs hold lines, not bars"),
        "dataloader_pin_memory": (not hardware.is_cpu, f"device {hardware.device}"),
        "eval_strategy": (
            "epoch" if has_eval else "no",
            "data.eval is " + ("given" if has_eval else "absent"),
        ),
    }
    if has_eval:
        defaults["prediction_loss_only"] = (True, "no metrics asked for: logits are not kept")
    if "max_steps" not in recipe.trainer:
        defaults["num_train_epochs"] = (3.0, "upstream's default, said explicitly")
    for name, (value, reason) in defaults.items():
        if f"trainer.{name}" not in draft.settings:
            draft.put(f"trainer.{name}", value, reason)


def decide_runtime(draft: Draft, cpu_cores: int, hardware: Hardware, env: Mapping[str, str]) -> None:
    """Environment variables of the workers, each with its reason."""
    values = {
        "TOKENIZERS_PARALLELISM": (
            "false",
            "forked dataloader workers and tokenizer threads deadlock",
        ),
        "PYTHONUNBUFFERED": ("1", "the last lines before a crash must reach the log"),
    }
    offloads = "cpu" in (draft.get("sharding.offload_optimizer"), draft.get("sharding.offload_param"))
    if hardware.is_cpu or offloads:
        threads = max(1, cpu_cores // hardware.devices_per_node)
        values["OMP_NUM_THREADS"] = (str(threads), "launchers default to 1, which starves CPU work")
    if hardware.is_cpu and draft.get("sharding.engine") == "ddp":
        # Under DeepSpeed the same variable would make accelerate choose DDP without a word.
        values["ACCELERATE_USE_CPU"] = (
            "true",
            "else accelerate starts independent processes on a CPU",
        )
    if not hardware.is_cpu:
        values["PYTORCH_ALLOC_CONF"] = ("expandable_segments:True", "less fragmentation")
    for name, (value, reason) in values.items():
        draft.put(f"launch.env.{name}", value, reason)
    for name, text in env.items():
        draft.put_recipe(f"launch.env.{name}", text, "")
