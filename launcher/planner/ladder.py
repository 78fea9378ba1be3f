"""The memory ladder: one recipe, one saving after the other. Pure.

A rung is data: what it changes of the recipe, and the rungs whose changes it keeps. Everything is planned by
the ordinary planner; what it refuses is a rung with that reason, and the rungs above do without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.engines.deepspeed import DEEPSPEED
from launcher.errors import DoesNotFit, EffilaunchError, Problem, RecipeError
from launcher.facts.hardware import Hardware
from launcher.memory.tensor_parallel import divisors
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan
from launcher.planner.candidates import UPSTREAM_MICRO_BATCH
from launcher.planner.decide import AMPERE
from launcher.planner.planner import make_plan
from launcher.recipe.loading import LoadedRecipe, with_changes
from launcher.recipe.schema import Recipe
from launcher.recipe.suggestions import close_key

TINY_BATCH = 16
"""Global batch of a `--tiny` ladder at most: it has 64 rows."""
HELD_OUT = 0.1
"""Share of the rows that are evaluated where the recipe names none."""
SGD_LEARNING_RATE = 1e-2
"""Plain SGD steps by rate x gradient, without Adam's division by the gradient's own size."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What all rungs start from."""

    recipe: Recipe
    hardware: Hardware
    """All of it; most rungs run on one device."""
    batch: int
    """Samples of a step at the start."""
    steps: int
    """Steps at that batch: each rung trains on the same number of samples."""

    @property
    def half(self) -> str:
        """The 16-bit precision of the devices; a CPU has bf16, at no speed."""
        capability = self.hardware.compute_capability
        return "bf16" if self.hardware.is_cpu or (capability is not None and capability >= AMPERE) else "fp16"

    @property
    def small_batch(self) -> int:
        return _divisor(self.batch, 4)

    @property
    def micro_batch(self) -> int:
        """Micro-batch of the rungs that accumulate."""
        return _divisor(self.batch, 16)


Changes = Mapping[str, Any]
"""Dotted recipe key -> value; None takes the key away."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder."""

    id: str
    title: str
    keeps: tuple[str, ...]
    """Rungs whose changes it stands on."""
    changes: Callable[[Ground], Changes]
    refusal: Callable[[Ground], str | None] = lambda ground: None
    """Why this rung means nothing here."""
    spread: bool = False
    """Runs on all devices (on a CPU: two processes); the others on one."""


@dataclass(frozen=True, slots=True)
class Step:
    """A rung as it will be run, or why it will not."""

    rung: Rung
    kept: tuple[str, ...]
    """Of the rungs that it stands on, those that could be planned."""
    changed: Changes
    plan: Plan | None
    """None where there is none; with a refusal, the plan that does not fit."""
    refusal: str | None


def _divisor(batch: int, parts: int) -> int:
    """The largest divisor of `batch` that is at most a `parts`-th of it, at least 1."""
    return max(size for size in divisors(batch) if size <= max(1, batch // parts))


def _precision(suffix: str) -> Callable[[Ground], Changes]:
    return lambda ground: {"precision": ground.half + suffix}


def _smaller_batch(ground: Ground) -> Changes:
    return {
        "global_batch_size": ground.small_batch,
        "trainer.per_device_train_batch_size": ground.small_batch,
        "trainer.max_steps": ground.steps * (ground.batch // ground.small_batch),
    }


def _accumulation(ground: Ground) -> Changes:
    return {"trainer.per_device_train_batch_size": ground.micro_batch}


def _one_sample(ground: Ground) -> str | None:
    return "the batch is one sample already" if ground.batch == 1 else None


def _sgd(ground: Ground) -> Changes:
    return {
        "trainer.optim": "sgd",
        "trainer.lr_scheduler_type": "cosine",
        "trainer.learning_rate": SGD_LEARNING_RATE,
    }


def _built_on_device(ground: Ground) -> str | None:
    return "a CPU has no second memory: the model is built where it stays" if ground.hardware.is_cpu else None


def _lora(ground: Ground) -> Changes:
    given = ground.recipe.adapter
    return {
        "adapter": {"type": "lora"} if given is None else given.model_dump(exclude_unset=True),
        # A rate for adapters serves no full fine-tune, nor the other way round.
        "trainer.learning_rate": None if given is None else ground.recipe.trainer.get("learning_rate"),
    }


def _several(hardware: Hardware) -> Hardware:
    """The hardware of the rungs that spread: two processes of a CPU, which share its memory."""
    if not hardware.is_cpu or hardware.num_devices > 1:
        return hardware
    held = hardware.device_bytes
    return replace(hardware, devices_per_node=2, device_bytes=None if held is None else held // 2)


def _zero3(ground: Ground) -> Changes:
    ranks = _several(ground.hardware).num_devices
    of_each = _divisor(ground.batch, ranks)
    micro = max(m for m in divisors(of_each) if m <= ground.micro_batch)
    return {
        "sharding": {"engine": DEEPSPEED.name, "zero_stage": 3},
        "trainer.per_device_train_batch_size": micro,
    }


def _one_device(ground: Ground) -> str | None:
    label = ground.hardware.label
    lonely = _several(ground.hardware).num_devices == 1
    return f"{label} is one device: there is nobody to share weights and states with" if lonely else None


def _offload(ground: Ground) -> Changes:
    both = {"offload_optimizer": "cpu", "offload_param": "cpu"}
    # DeepSpeedCPUAdam is what updates in host memory.
    return {
        **_zero3(ground),
        "sharding": {"engine": DEEPSPEED.name, "zero_stage": 3, **both},
        "trainer.optim": "adamw_torch",
    }


_PURE = ("pure-16bit", "accumulation")
_ADAPTER = ("mixed", "accumulation", "on-device", "checkpointing")
RUNGS: tuple[Rung, ...] = (
    Rung("fp32", "everything in 32 bits", (), lambda ground: {"precision": "fp32"}),
    Rung("mixed", "16-bit arithmetic over 32-bit weights", (), _precision("")),
    Rung("pure-16bit", "weights and states in 16 bits", (), _precision("-true")),
    Rung("small-batch", "a quarter of the batch", ("pure-16bit",), _smaller_batch, _one_sample),
    Rung("accumulation", "the whole batch in small pieces", ("pure-16bit",), _accumulation, _one_sample),
    Rung("sgd", "SGD with cosine schedule: no states", _PURE, _sgd),
    Rung("adamw-8bit", "AdamW with 8-bit states", _PURE, lambda ground: {"trainer.optim": "adamw_bnb_8bit"}),
    Rung(
        "on-device", "the model is built on the device", (*_PURE, "sgd"),
        lambda ground: {"model.device_map": {"": 0}}, _built_on_device,
    ),
    Rung(
        "checkpointing", "activations are computed twice", (*_PURE, "sgd", "on-device"),
        lambda ground: {"trainer.activation_checkpointing": True},
    ),
    Rung("lora", "an adapter is trained, the rest is frozen", _ADAPTER, _lora),
    Rung("int8", "frozen weights in 8 bits", (*_ADAPTER, "lora"), lambda g: {"model.quantization": "int8"}),
    Rung("nf4", "frozen weights in 4 bits", (*_ADAPTER, "lora"), lambda g: {"model.quantization": "nf4"}),
    Rung(
        "sharding", "ZeRO-3: all weights trained, shared out", ("mixed", "accumulation", "checkpointing"),
        _zero3, _one_device, spread=True,
    ),
    Rung(
        "cpu-offload", "ZeRO-3 with weights and states in host memory",
        ("mixed", "accumulation", "checkpointing"), _offload, spread=True,
    ),
)  # fmt: skip
"""From the bottom up."""


def choose_rungs(only: str | None) -> tuple[Rung, ...]:
    """The rungs that `--only` names, all without it; RecipeError for a name that no rung has."""
    if only is None:
        return RUNGS
    names = [name.strip() for name in only.split(",")]
    known = [rung.id for rung in RUNGS]
    problems = []
    for name in names:
        if name not in known:
            near = close_key(name, known)
            hint = f"did you mean {near}?" if near else f"the rungs are {', '.join(known)}"
            problems.append(Problem("unknown-rung", f"the ladder has no rung {name!r}", "--only", hint=hint))
    if problems:
        raise RecipeError(problems)
    return tuple(rung for rung in RUNGS if rung.id in names)


def start_batch(given: Recipe, *, tiny: bool) -> int:
    """Samples of a step as the recipe says, or upstream's default."""
    batch = given.global_batch_size
    if batch is None:
        micro = given.trainer.get("per_device_train_batch_size", UPSTREAM_MICRO_BATCH)
        batch = int(micro) * int(given.trainer.get("gradient_accumulation_steps", 1))
    return min(batch, TINY_BATCH) if tiny else batch


def plan_ladder(loaded: LoadedRecipe, facts: Facts, batch: int, steps: int) -> list[Step]:
    """Every rung planned, from the bottom up.

    loaded, facts: as `gather` returns them. batch: samples of a step, the same at the start of every rung.
    """
    ground = Ground(loaded.recipe, facts.hardware, batch, steps)
    found: dict[str, Step] = {}
    for rung in RUNGS:
        kept = tuple(name for name in rung.keeps if found[name].plan is not None)
        changed = dict(rung.changes(ground))
        refusal, plan = rung.refusal(ground), None
        if refusal is None:
            changes = _bottom(ground)
            for name in kept:
                changes |= found[name].changed
            asked = with_changes(loaded, {**changes, **changed}, f"ladder rung {rung.id}")
            plan, refusal = _plan(asked, replace(facts, hardware=_hardware(rung, ground), profile=None))
        found[rung.id] = Step(rung, kept, changed, plan, refusal)
    return list(found.values())


def _hardware(rung: Rung, ground: Ground) -> Hardware:
    if rung.spread:
        return _several(ground.hardware)
    held, shares = ground.hardware.device_bytes, ground.hardware.devices_per_node
    if ground.hardware.is_cpu and held is not None:
        held *= shares
    return replace(ground.hardware, num_nodes=1, devices_per_node=1, device_bytes=held)


def _plan(loaded: LoadedRecipe, facts: Facts) -> tuple[Plan | None, str | None]:
    """The plan, or the sentence that refuses it."""
    try:
        return make_plan(loaded, facts), None
    except DoesNotFit as error:
        return error.nearest_miss, sentence(error)
    except RecipeError as error:
        return None, sentence(error)


def sentence(error: EffilaunchError) -> str:
    """An error's own words, without the place: a rung's place is the ladder."""
    return "; ".join(problem.message for problem in error.problems)


def _bottom(ground: Ground) -> dict[str, Any]:
    """The recipe without any saving, for a few steps that end with one evaluation and no checkpoint."""
    recipe = ground.recipe
    changes: dict[str, Any] = {
        "adapter": None,
        "early_stopping": None,
        "hardware": None,
        "sharding": None,
        "model.quantization": None,
        "model.dtype": None,
        "model.device_map": None,
        "launch.launcher": None,
        "global_batch_size": ground.batch,
        "trainer.per_device_train_batch_size": ground.batch,
        "trainer.max_steps": ground.steps,
        "trainer.activation_checkpointing": False,
        "trainer.save_strategy": "no",
        "trainer.eval_strategy": "no",
        "trainer.warmup_steps": 0,
    }
    gone = (
        "gradient_accumulation_steps", "num_train_epochs", "optim", "optim_args", "load_best_model_at_end",
        "metric_for_best_model", "greater_is_better", "eval_steps", "save_steps", "auto_find_batch_size",
    )  # fmt: skip
    changes |= {f"trainer.{name}": None for name in gone}
    if recipe.adapter is not None:
        changes["trainer.learning_rate"] = None
    if recipe.data.eval is None and not recipe.data.streaming:
        changes["data.eval"] = {"split": HELD_OUT}
    if recipe.model.attn_implementation == "flash_attention_2":
        # It has no 32-bit kernel, and rungs are compared with the same attention.
        changes["model.attn_implementation"] = "sdpa"
    return changes
