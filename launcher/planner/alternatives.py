"""What would make a recipe fit that does not: each answer was found by the search itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from launcher.engines.deepspeed import DEEPSPEED
from launcher.engines.fsdp import FSDP
from launcher.errors import RecipeError
from launcher.machine.hardware import DEVICES, Hardware, device_facts
from launcher.memory.tensor_parallel import divisors
from launcher.plan.inputs import Facts
from launcher.planner.candidates import Candidate
from launcher.planner.decide import SIZES
from launcher.planner.kbit_norms import KEY as KBIT_NORMS
from launcher.planner.kbit_norms import could_narrow
from launcher.planner.search import MICRO, could_fit, search
from launcher.recipe.loading import LoadedRecipe, with_changes
from launcher.recipe.schema import Recipe
from launcher.tasks import task_named

EVALUATED = 64
"""Rows of an evaluation batch that is tried where the plan may choose none."""
PER_NODE = (2, 4, 8)
"""Devices per node that are tried, then nodes with the largest number."""
NODES = (2, 4, 8, 16, 32)
_RUN_SHARED = ("sp_size", "tp_size")
"""Context parallelism was planned from its source alone."""
_IN_BACKWARD = "sharding.optim_in_backward"
_ACTIVATIONS, _RECOMPUTES = "sharding.offload_activations", "trainer.activation_checkpointing"
_COSTS = {KBIT_NORMS: "slightly less exact norms", _IN_BACKWARD: "gradients are not clipped"}
"""What a change costs besides time, by its key."""
LENGTH_STEP = 64
"""Tokens: data.max_length is tried at its multiples."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One change with which something fits."""

    change: Mapping[str, object]
    """`on`: hardware; else dotted keys of the recipe. None takes a key away."""
    candidate: Candidate
    """What would then be planned."""

    @property
    def text(self) -> str:
        memory = self.candidate.memory
        changes = " and ".join(f"{key}: {_yaml(value)}" for key, value in self.change.items() if key != "on")
        where = f"on {self.change['on']}" if "on" in self.change else f"with {changes}"
        held = memory.device_bytes or 0
        costs = "".join(f", {cost}" for key, cost in _COSTS.items() if key in self.change)
        return f"{where} ({memory.needed / 2**30:.1f} of {held / 2**30:.1f} GiB{costs})"

    def to_json(self) -> dict[str, object]:
        """An entry of `would_fit` of `plan --json`."""
        candidate = self.candidate
        return {
            "change": dict(self.change),
            "settings": candidate.choices,
            "batch": candidate.batch.to_json(),
            "memory": candidate.memory.to_json(),
        }


def _yaml(value: object) -> str:
    if value is None:
        return "left out"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def would_fit(loaded: LoadedRecipe, facts: Facts) -> tuple[Alternative, ...]:
    """The closed options, the largest micro-batch, the fewest ranks that share a copy, the longest rows, and
    then other hardware: the smallest device and the fewest devices, each of which fits."""
    found = [
        *_options(loaded, facts),
        *_smaller_batch(loaded, facts),
        *_shared(loaded, facts),
        *_longest(loaded, facts),
        *_first(loaded, facts, _larger_devices(facts.hardware)),
        *_first(loaded, facts, _more_devices(facts.hardware)),
    ]
    return tuple(found)


def _could_fit(loaded: LoadedRecipe, facts: Facts) -> bool:
    try:
        return could_fit(loaded, facts)
    except RecipeError:
        return False


def _fitting(loaded: LoadedRecipe, facts: Facts) -> Candidate | None:
    """What would be planned, None where nothing fits or can run."""
    if not _could_fit(loaded, facts):
        return None
    try:
        first = search(loaded, facts).first
    except RecipeError:
        return None
    return first if first.fits else None


def _first(loaded: LoadedRecipe, facts: Facts, machines: Iterator[Hardware]) -> Iterator[Alternative]:
    for hardware in machines:
        # What was measured was measured on this machine.
        there = replace(facts, hardware=hardware, calibration=None, host_bytes=None)
        if (candidate := _fitting(loaded, there)) is not None:
            yield Alternative({"on": hardware.label}, candidate)
            return


def _larger_devices(hardware: Hardware) -> Iterator[Hardware]:
    """As many larger CUDA devices of the catalogue, smallest first."""
    if hardware.is_cpu:
        return
    for name in sorted(DEVICES, key=lambda known: DEVICES[known].bytes):
        _, size, capability = device_facts(name)
        if capability is not None and size is not None and size > (hardware.device_bytes or 0):
            yield replace(hardware, device=name, device_bytes=size, compute_capability=capability)


def _more_devices(hardware: Hardware) -> Iterator[Hardware]:
    """More of the same devices: in one node up to eight, then in several."""
    if hardware.is_cpu:
        return
    if hardware.num_nodes == 1:
        for count in PER_NODE:
            if count > hardware.devices_per_node:
                yield replace(hardware, devices_per_node=count)
    per_node = max(PER_NODE[-1], hardware.devices_per_node)
    for nodes in NODES:
        if nodes > hardware.num_nodes:
            yield replace(hardware, num_nodes=nodes, devices_per_node=per_node)


def _longest(loaded: LoadedRecipe, facts: Facts) -> Iterator[Alternative]:
    """The longest data.max_length that fits; images have no length to choose."""
    if facts.model.tokens_per_sample is not None:
        return
    recipe = loaded.recipe

    def shortened(steps: int) -> LoadedRecipe:
        return with_changes(loaded, {"data.max_length": steps * LENGTH_STEP}, None)

    low, high = 0, -(-recipe.data.max_length // LENGTH_STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _could_fit(shortened(middle), facts) else (low, middle)
    if low and (candidate := _fitting(shortened(low), facts)) is not None:
        yield Alternative({"data.max_length": low * LENGTH_STEP}, candidate)


def _smaller_batch(loaded: LoadedRecipe, facts: Facts) -> Iterator[Alternative]:
    """The largest micro-batch that fits where its size decides what is learned, and the search tries one."""
    found = search(loaded, facts)
    draft, batch = found.of(found.first).draft, found.first.batch
    if not draft.task.compares(draft):
        return
    for size in reversed(divisors(batch.micro * batch.accumulation)):
        change: dict[str, object] = {MICRO: size}
        if size < batch.micro and (candidate := _fitting(with_changes(loaded, change, None), facts)):
            yield Alternative(change, candidate)
            return


def _options(loaded: LoadedRecipe, facts: Facts) -> Iterator[Alternative]:
    """What the recipe fixes: each option alone, then all that it pins, then everything."""
    done: list[dict[str, object]] = []
    *changes, everything = _changes(loaded.recipe, facts.hardware)
    for change in changes:
        if any(smaller.items() <= change.items() for smaller in done):
            continue  # less than this is enough
        if (candidate := _fitting(with_changes(loaded, change, None), facts)) is not None:
            done.append(change)
            yield Alternative(change, candidate)
    if not done and (candidate := _fitting(with_changes(loaded, everything, None), facts)) is not None:
        yield Alternative(everything, candidate)


def _shared(loaded: LoadedRecipe, facts: Facts) -> Iterator[Alternative]:
    """The fewest ranks of a node that share a copy; of each kind that was run and that the recipe has not."""
    sharding, devices = loaded.recipe.sharding, facts.hardware.devices_per_node
    if any(getattr(sharding, name) > 1 for name in SIZES):
        return
    for name in _RUN_SHARED:
        for size in (size for size in PER_NODE if devices % size == 0):
            change: dict[str, object] = {f"sharding.{name}": size}
            if (candidate := _fitting(with_changes(loaded, change, None), facts)) is not None:
                yield Alternative(change, candidate)
                break


def _changes(recipe: Recipe, hardware: Hardware) -> list[dict[str, object]]:
    """Changes of closed options, the last of them with all; nf4 comes with an adapter where there is none."""
    pins = dict(_pinned(recipe))
    changes: list[dict[str, object]] = [{key: value} for key, value in pins.items()]
    if len(pins) > 1:
        changes.append(pins)
    if recipe.sharding.offload_optimizer == "none" and not hardware.is_cpu:
        changes.append({"sharding.offload_optimizer": "cpu"})
        if recipe.sharding.offload_param == "none":
            changes.append({"sharding.offload_optimizer": "cpu", "sharding.offload_param": "cpu"})
    if recipe.sharding.offload_activations == "none" and not hardware.is_cpu:
        recomputes = {_RECOMPUTES: True} if _RECOMPUTES in pins else {}
        changes.append({**recomputes, _ACTIVATIONS: "cpu"})
    adapter: dict[str, object] = {} if recipe.adapter else {"adapter": {"type": "lora"}}
    if adapter:
        changes.append(adapter)
    if recipe.model.quantization == "none":
        changes.append({**adapter, "model.quantization": "nf4"})
    else:
        if recipe.model.kbit_norms in (None, "float32") and could_narrow(recipe, hardware):
            changes.append({KBIT_NORMS: "bfloat16"})
        if recipe.sharding.offload_param == "none" and not hardware.is_cpu:
            # ZeRO would hold the whole base on each device.
            changes.append({"sharding.engine": FSDP.name, "sharding.offload_param": "cpu"})
    everything: dict[str, object] = {}
    for change in changes:
        everything |= change
    if not recipe.adapter and hardware.num_devices == 1 and not recipe.sharding.optim_in_backward:
        changes.append({_IN_BACKWARD: True, "trainer.max_grad_norm": 0})
    return [*changes, everything]


def _pinned(recipe: Recipe) -> Iterator[tuple[str, object]]:
    """Values of the recipe that keep the search from saving memory, and what to write instead."""
    if recipe.trainer.get("activation_checkpointing") is False:
        yield _RECOMPUTES, True
    if recipe.trainer.get("per_device_train_batch_size", 1) != 1:
        yield "trainer.per_device_train_batch_size", None
    evaluates = recipe.data.eval is not None and "per_device_eval_batch_size" not in recipe.trainer
    if evaluates and task_named(recipe.task).compares_texts:
        yield "trainer.per_device_eval_batch_size", EVALUATED
    if recipe.sharding.engine not in ("auto", DEEPSPEED.name):
        yield "sharding.engine", "auto"
    if recipe.sharding.zero_stage != "auto":
        yield "sharding.zero_stage", "auto"
