"""What follows from the recipe and the device alone: precision, engine, launcher, weights. Pure."""

from __future__ import annotations

from launcher.engines import ENGINES, engine_of
from launcher.engines.ddp import DDP
from launcher.engines.deepspeed import DEEPSPEED
from launcher.machine.hardware import AMPERE, VOLTA, Hardware
from launcher.plan.draft import Draft
from launcher.recipe.schema import Recipe

SIZES = ("tp_size", "sp_size", "cp_size")
"""The keys of `sharding` by which ranks share a copy."""
HALF = {"bf16": "bfloat16", "bf16-true": "bfloat16", "fp16": "float16", "fp16-true": "float16"}


def decide_precision(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """`auto` by compute capability: never by torch's `is_bf16_supported`, which counts emulation."""
    if recipe.precision != "auto":
        draft.put_recipe("precision", recipe.precision, "")
        return
    capability = hardware.compute_capability
    if hardware.is_cpu:
        value, reason = "fp32", "a CPU: 16-bit is slower there"
    elif capability is None:
        value, reason = "fp16", "compute capability unknown: bf16 only if the recipe sets it"
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
    """Processes of the run: a device_map spreads one over all devices."""
    return 1 if recipe.model.device_map else hardware.num_devices


def ranks_of_copy(recipe: Recipe) -> int:
    """Ranks that compute one copy's micro-batch together (parallel.py)."""
    sharding = recipe.sharding
    return sharding.tp_size * sharding.sp_size * sharding.cp_size


def copies_of(recipe: Recipe, hardware: Hardware) -> int:
    """Data-parallel copies, among which the global batch is divided."""
    return processes_of(recipe, hardware) // ranks_of_copy(recipe)


def shares(recipe: Recipe) -> bool:
    """Whether ranks share the work of one copy."""
    return ranks_of_copy(recipe) > 1


def _wants_stages(recipe: Recipe) -> bool:
    """Whether the recipe names something that only ZeRO has."""
    return recipe.sharding.zero_stage != "auto" or recipe.sharding.config is not None


def _offloads(recipe: Recipe) -> bool:
    return bool({recipe.sharding.offload_optimizer, recipe.sharding.offload_param} - {"none", "auto"})


def engine_is_open(recipe: Recipe, hardware: Hardware) -> bool:
    """Whether the search chooses the engine: several processes, and nothing that only one engine has."""
    return processes_of(recipe, hardware) > 1 and may_be_any_engine(recipe)


def may_be_any_engine(recipe: Recipe) -> bool:
    """Whether the recipe names neither an engine nor what only one has."""
    fixed = _wants_stages(recipe) or _offloads(recipe) or shares(recipe)
    return recipe.sharding.engine == "auto" and not fixed and not recipe.model.device_map


def decide_engine(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """Which algorithm shards weights, gradients and optimizer states."""
    asked, wants_stages, offloads = recipe.sharding.engine, _wants_stages(recipe), _offloads(recipe)
    if recipe.model.device_map:
        draft.warnings.append(
            "model.device_map is naive model parallelism: one process, its layers spread over the devices, "
            "of which one works while the others wait"
        )
    if asked != "auto":
        draft.put_recipe("sharding.engine", asked, "")
    elif wants_stages or offloads:
        reason = "DeepSpeed has ZeRO stages, each kind of offload, and profiles"
        draft.put("sharding.engine", DEEPSPEED.name, reason)
    elif shares(recipe):
        draft.put("sharding.engine", *sharing_engine(recipe))
    else:  # with several processes a variant has set it
        draft.put("sharding.engine", DDP.name, "one process: nothing to shard")
    engine = engine_of(draft)
    if wants_stages and not engine.has_stages:
        message = f"engine {engine.name} has no zero_stage or DeepSpeed profile"
        hint = f"use sharding.engine: {DEEPSPEED.name}, or drop them"
        raise draft.refuse("engine-conflict", "sharding.engine", message, hint)
    if not engine.can_offload(recipe.sharding.offload_optimizer, recipe.sharding.offload_param):
        raise draft.refuse("engine-conflict", "sharding.engine", *engine.offload_limit)
    if conflict := engine.precision_conflict(draft.precision):
        raise draft.refuse("precision-conflict", "precision", *conflict)


def sharing_engine(recipe: Recipe) -> tuple[str, str]:
    """The engine where ranks share a copy, and why."""
    sizes = [name for name in reversed(SIZES) if getattr(recipe.sharding, name) > 1]
    return next((engine.name, engine.shares[sizes[0]]) for engine in ENGINES if sizes[0] in engine.shares)


def decide_launcher(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """Who spawns the processes."""
    launcher, engine = recipe.launch.launcher, engine_of(draft)
    processes = processes_of(recipe, hardware)
    if launcher != "auto":
        draft.put_recipe("launch.launcher", launcher, "")
        if launcher == "python" and processes > 1:
            message = f"python starts one process, the hardware asks for {processes}"
            hint = "use launcher auto, or hardware with one device"
            raise draft.refuse("launcher-conflict", "launch.launcher", message, hint)
        if launcher == DEEPSPEED.launcher and hardware.num_nodes > 1:
            message = f"the {launcher} launcher starts one node, the hardware has {hardware.num_nodes}"
            hint = (
                "use launcher auto: torchrun starts several nodes, with the same DeepSpeed engine in the "
                "ranks; DeepSpeed's own launcher notices no lost node"
            )
            raise draft.refuse("launcher-conflict", "launch.launcher", message, hint)
        if launcher == DEEPSPEED.launcher != engine.launcher:
            message = (
                f"the {launcher} launcher with engine {engine.name} starts ranks without rendezvous checks"
            )
            hint = f"use launcher {engine.launcher} for engine {engine.name}"
            raise draft.refuse("launcher-conflict", "launch.launcher", message, hint)
    elif processes == 1:
        draft.put("launch.launcher", "python", "one process needs no launcher")
    elif hardware.num_nodes > 1:
        draft.put("launch.launcher", "accelerate", f"torchrun's rendezvous over {hardware.num_nodes} nodes")
    else:
        draft.put("launch.launcher", engine.launcher, f"engine {engine.name} over {processes} processes")


def decide_weights(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """Quantisation with every choice made, and the dtype of the weights in memory."""
    precision = draft.precision
    half = HALF.get(precision)
    asked = recipe.model.asked_quantization()  # `auto` is filled in before anything is decided
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
        if engine_of(draft).stores_packed:
            value["quant_storage"] = half or "float32"
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
    elif master := engine_of(draft).half_weights:
        dtype, reason = half, master
    else:
        dtype, reason = "float32", "mixed precision under autocast trains fp32 weights"
    draft.put("model.dtype", dtype, reason, source="fix", by="explicit-dtype")
