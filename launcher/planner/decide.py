"""What follows from the recipe and the device alone: precision, engine, launcher, weights. Pure."""

from __future__ import annotations

from launcher.errors import Problem, RecipeError
from launcher.facts.hardware import Hardware
from launcher.plan.draft import Draft
from launcher.recipe.schema import Quantization, Recipe

AMPERE = (8, 0)
VOLTA = (7, 0)
HALF = {"bf16": "bfloat16", "bf16-true": "bfloat16", "fp16": "float16", "fp16-true": "float16"}


def refuse(draft: Draft, code: str, dotted: str, message: str, hint: str) -> RecipeError:
    """A refusal at the recipe line that asks for what cannot be."""
    file, line = draft.place(dotted)
    return RecipeError(Problem(code, message, file=file, line=line, path=dotted, hint=hint))


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


def processes_of(recipe: Recipe, hardware: Hardware) -> int:
    """A device_map spreads one process over all devices."""
    return 1 if recipe.model.device_map else hardware.num_devices


def _wants_zero(recipe: Recipe) -> bool:
    """Whether the recipe names something that only ZeRO has."""
    sharding = recipe.sharding
    offloads = {sharding.offload_optimizer, sharding.offload_param} - {"none", "auto"}
    return sharding.zero_stage != "auto" or sharding.config is not None or bool(offloads)


def engine_is_open(recipe: Recipe, hardware: Hardware) -> bool:
    """Whether both engines could train this: several processes, and nothing that only one of them has."""
    several = processes_of(recipe, hardware) > 1
    return recipe.sharding.engine == "auto" and several and not _wants_zero(recipe) and not shares(recipe)


def shares(recipe: Recipe) -> bool:
    """Whether ranks share the work of one copy (plan/parallel.py)."""
    return any(getattr(recipe.sharding, name) > 1 for name in ("tp_size", "sp_size", "cp_size"))


def decide_engine(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """Which algorithm shards weights, gradients and optimizer states."""
    sharding, wants_zero = recipe.sharding, _wants_zero(recipe)
    if recipe.model.device_map:
        draft.warnings.append(
            "model.device_map is naive model parallelism: one process, its layers spread over the devices, "
            "of which one works while the others wait"
        )
    if sharding.engine != "auto":
        draft.put_recipe("sharding.engine", sharding.engine, "")
    elif wants_zero:
        draft.put("sharding.engine", "deepspeed", "only DeepSpeed has ZeRO stages, offload and profiles")
    elif shares(recipe):
        draft.put("sharding.engine", *_sharing_engine(recipe, hardware))
    else:  # several processes leave it open, and then a variant says it
        draft.put("sharding.engine", "ddp", "one process: nothing to shard")
    engine = draft.sharding.engine
    if engine == "ddp" and wants_zero:
        raise refuse(
            draft,
            "engine-conflict",
            "sharding.engine",
            "engine ddp cannot use zero_stage, offload or a DeepSpeed profile",
            "set sharding.engine: deepspeed or drop them",
        )
    if engine == "deepspeed" and draft.precision.endswith("-true"):
        raise refuse(
            draft,
            "precision-conflict",
            "precision",
            f"{draft.precision} and DeepSpeed: its 16-bit engines keep fp32 master weights",
            "use precision bf16 or fp16, or sharding.engine: ddp",
        )


def _sharing_engine(recipe: Recipe, hardware: Hardware) -> tuple[str, str]:
    """The engine where ranks share a copy, and why."""
    if recipe.sharding.cp_size > 1:
        return "fsdp", "context parallelism is accelerate's, with FSDP2"
    if recipe.sharding.sp_size > 1:
        return "deepspeed", "sequence parallelism is DeepSpeed's Ulysses"
    return "deepspeed", "DeepSpeed's AutoTP also takes several copies, and shares their optimizer states"


def decide_launcher(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """Who spawns the processes."""
    launcher, engine = recipe.launch.launcher, draft.sharding.engine
    processes = processes_of(recipe, hardware)
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
        if launcher == "deepspeed" and engine != "deepspeed":
            raise refuse(
                draft,
                "launcher-conflict",
                "launch.launcher",
                f"the deepspeed launcher with engine {engine} starts ranks without rendezvous checks",
                f"use launcher accelerate for engine {engine}",
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
    if asked == "none" or asked == "auto":  # `auto` is filled in before anything is decided
        return None
    return Quantization(type=asked)


def decide_weights(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """Quantisation with every choice made, and the dtype of the weights in memory."""
    precision = draft.precision
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
    elif draft.sharding.engine == "deepspeed":
        dtype, reason = half, "DeepSpeed holds fp32 master weights of its own"
    else:
        dtype, reason = "float32", "mixed precision under autocast trains fp32 weights"
    draft.put("model.dtype", dtype, reason, source="fix", by="explicit-dtype")
