"""What an engine is for planning; the half that trains is in `launcher/train/engines/`. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from launcher.memory.job import EngineMemory, MemoryJob
from launcher.plan.settings import HasSettings

if TYPE_CHECKING:
    from launcher.plan.draft import Draft, Refusal
    from launcher.plan.inputs import Facts
    from launcher.plan.plan import Plan
    from launcher.recipe.schema import Recipe

RANKS = "number of ranks"
"""In place of a setting, where the number of processes has changed."""


ALONE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{master_port}",
}  # fmt: skip
"""Variables of a single process without a launcher, for an engine that needs a process group."""


def counted(ranks: int) -> str:
    """`1 rank`, `2 ranks`."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


@dataclass(frozen=True, slots=True)
class CheckpointReading:
    """Whether a run can read a checkpoint of the same engine; by default as it is."""

    refused: str = ""
    """The setting because of which it cannot; empty where it can."""
    reason: str = ""
    """Why not."""
    is_lost: bool = False
    """Whether restoring that setting would not help either: the training states are lost."""
    conversion: str = ""
    """Why the files have to be converted first, half a sentence; empty where they need not."""


class Engine(EngineMemory):
    """An engine with what most have in common; a subclass sets what is different."""

    # --- choice ---------------------------------------------------------------------------------
    is_automatic: ClassVar[bool] = True
    """Whether `sharding.engine: auto` compares it where the recipe leaves the engine open; the others are
    tried where none of these fits."""
    shares: ClassVar[Mapping[str, str]] = {}
    """Sizes of `sharding` for which `auto` chooses it (`tp_size`, `sp_size`, `cp_size`) -> the reason."""
    lacks: ClassVar[Mapping[str, tuple[str, str]]]
    """The other sizes -> (why it cannot have them, what to do instead)."""

    offload_limit: ClassVar[tuple[str, str]]
    """(why it cannot offload everything that a recipe may name, what to do instead)."""

    updates_in_backward: ClassVar[bool] = False
    """Whether one process may update weights in the backward pass (`sharding.optim_in_backward`)."""

    # --- workers --------------------------------------------------------------------------------
    packages: ClassVar[tuple[str, ...]] = ()
    """Modules that the workers import besides those of every run."""
    launcher: ClassVar[str] = "accelerate"
    """What starts several processes where the recipe leaves it open."""
    has_autocast: ClassVar[bool] = True
    """Whether the Trainer trains bf16 and fp16 under autocast; else the engine casts the model."""
    stores_packed: ClassVar[bool] = False
    """Whether 4-bit weights have to be stored as the dtype that is computed in, to be sharded."""
    half_weights: ClassVar[str] = ""
    """Why bf16 and fp16 train 16-bit weights; empty where they train float32 ones."""
    cpu_env: ClassVar[Mapping[str, tuple[str, str]]] = {
        "ACCELERATE_USE_CPU": ("true", "else accelerate starts independent processes on a CPU")
    }
    """Variables of workers on a CPU -> (value, reason)."""
    alone_env: ClassVar[Mapping[str, str]] = {}
    """Variables of a single process that no launcher starts."""

    def precision_conflict(self, precision: str) -> tuple[str, str] | None:
        """(message, hint) where it cannot train in a precision."""
        return None

    def own_optimizer_conflict(self, profile: Mapping[str, object]) -> tuple[str, str] | None:
        """(message, hint) where it cannot train with an optimizer of `python:`. profile: the base config."""
        return None

    def can_offload(self, optimizer: str, param: str) -> bool:
        """Whether it can keep optimizer states and parameters there: values of `offload_optimizer` and
        `offload_param`."""
        return (optimizer, param) == ("none", "none")

    def decide(self, draft: Draft, recipe: Recipe, facts: Facts, processes: int) -> None:
        """Put its settings into the draft; RecipeError for what it cannot train.

        processes: of the run.
        """
        draft.put("deepspeed.profile", {}, "no base profile")
        refuse_unused_path(draft)

    def sharing_conflicts(self, draft: Draft, name: str) -> Iterator[Refusal]:
        """Refusals of ranks that share a copy by one of `tp_size`, `sp_size` and `cp_size`."""
        if name in self.lacks:
            message, hint = self.lacks[name]
            yield ("parallel-engine", f"sharding.{name}", message, hint)

    def completed(self, job: MemoryJob, draft: Draft) -> MemoryJob:
        """The memory job of a draft with what this engine's settings decide."""
        return job

    def stages_to_try(self, job: MemoryJob) -> tuple[int, ...]:
        """Stages that the search compares where the recipe sets none."""
        return (0,)

    # --- a plan ---------------------------------------------------------------------------------
    def ds_config(self, plan: Plan) -> dict[str, Any] | None:
        """The content of ds_config.json; None for other engines than DeepSpeed."""
        return None

    def compiled_ops(self, plan: Plan) -> list[str]:
        """Operators that are compiled at the start of the run."""
        return []

    def bucket_bytes(self, plan: Plan, gradients: int) -> int:
        """Bytes of a message in which the run reduces `gradients` bytes."""
        raise NotImplementedError

    def written_shares(self, plan: Plan, weights: int, states: int, copies: int) -> tuple[int, int]:
        """Bytes of a checkpoint that rank 0 writes, and every other rank.

        weights, states: bytes of the result, and of the optimizer's states before they are sharded;
        copies: ranks that share these.
        """
        return self.checkpoint_copies(plan.job) * weights + states, 0

    def reads(self, old: HasSettings, new: HasSettings, before: int, after: int) -> CheckpointReading:
        """Whether the plan `new` can read the training states of a checkpoint of `old`, of the same engine.

        before, after: ranks that wrote it, and that shall read it.
        """
        return CheckpointReading()


def refuse_unused_path(draft: Draft) -> None:
    """RecipeError for a folder of offload to NVMe without such an offload."""
    path = "sharding.nvme_path"
    if draft.explicit(path) and draft.sharding.nvme_path is not None:
        hint = "write offload_optimizer: nvme, or remove it"
        raise draft.refuse("nvme-path-unused", path, "nothing is offloaded to NVMe", hint)
