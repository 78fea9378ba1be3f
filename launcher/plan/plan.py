"""The plan as frozen types: every value with its source, and nothing that is not decided."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from launcher.machine.hardware import Hardware
from launcher.memory.estimate import MemoryEstimate
from launcher.memory.job import MemoryJob
from launcher.models.adapted import Reach
from launcher.models.lora import adapted_by, reach_of
from launcher.models.model import ModelSpec
from launcher.plan.inputs import Pace
from launcher.plan.settings import HasSettings, Settings
from launcher.recipe.env import Kept

if TYPE_CHECKING:
    from launcher.rows.prepared_images import PreparedImages

Source = Literal["default", "recipe", "parent", "override", "search", "fix", "hardware"]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted seconds of one optimizer step."""

    low: float
    likely: float
    high: float
    figures_known: bool
    """False: computed from a stand-in's figures, so that only ratios are meaningful."""
    generating: tuple[float, float] | None = None
    """Least and most share of it that the model writes its own samples; None: it does not."""
    basis: str = ""
    """What the likely value rests on."""

    @property
    def seconds(self) -> tuple[float, float] | None:
        """The range, None where the device's figures are not known."""
        return (self.low, self.high) if self.figures_known else None

    def to_json(self, steps: int | None) -> dict[str, Any]:
        """The `time` object of `plan --json`: of a step, and of a run of so many steps without its
        start, evaluations and checkpoints. Pairs are the ends, `likely` is what people are shown."""
        if self.seconds is None:
            return {"seconds_per_step": None, "total": None}

        def rounded(seconds: float) -> float:
            return float(f"{seconds:.3g}")

        found: dict[str, Any] = {
            "seconds_per_step": [rounded(end) for end in self.seconds],
            "total": None if steps is None else [rounded(steps * end) for end in self.seconds],
            "likely": {
                "seconds_per_step": rounded(self.likely),
                "total": None if steps is None else rounded(steps * self.likely),
                "basis": self.basis,
            },
        }
        if self.generating is not None:
            found["generating"] = [round(end, 2) for end in self.generating]
        return found


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the value of a setting came from, and why."""

    source: Source
    by: str
    """`recipes/x.yaml:12`, a fix id, `--set`, or the deciding rule."""
    reason: str


@dataclass(frozen=True, slots=True)
class AppliedFix:
    """A known fix that fired for this plan."""

    id: str
    title: str
    reason: str
    source: str
    changed: Mapping[str, object]
    """Dotted setting -> value that the fix set; empty for a fix that only warns."""


@dataclass(frozen=True, slots=True)
class Batch:
    """`global_size` = `micro` x `accumulation` x `data_parallel`, in samples."""

    micro: int
    accumulation: int
    data_parallel: int

    @property
    def global_size(self) -> int:
        return self.micro * self.accumulation * self.data_parallel

    def to_json(self) -> dict[str, int]:
        """The `batch` object of `plan --json`."""
        return {
            "micro": self.micro,
            "accumulation": self.accumulation,
            "data_parallel": self.data_parallel,
            "global": self.global_size,
        }


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length of the run. What depends on the number of rows is None until the data is read."""

    steps: int | None
    epochs: float | None
    warmup_steps: int | None
    tokens_per_step: int
    """Upper bound: global batch x max_length."""


@dataclass(frozen=True, slots=True)
class NodeCount:
    """What a run does on so many nodes (`launch.min_nodes`)."""

    num_nodes: int
    batch: Batch | None
    needed: int | None
    """Bytes on each device, margin included; None where it cannot run."""
    refused: str = ""
    """Why this many nodes are not used, half a sentence; empty where they are."""
    fits: bool = True
    """False where the memory of the devices or nodes does not suffice."""
    conversion: bool = False
    """Whether a checkpoint of all nodes is converted first."""

    def to_json(self) -> dict[str, object]:
        """An entry of `elastic` in plan.json."""
        return {
            "num_nodes": self.num_nodes,
            "batch": None if self.batch is None else self.batch.to_json(),
            "needed_bytes": self.needed,
            "fits": self.fits,
            "converts_checkpoint": self.conversion,
            "refused": self.refused or None,
        }


@dataclass(frozen=True, slots=True)
class Plan(HasSettings):
    """Everything decided before a device is touched; the worker reads its JSON form."""

    recipe_file: str
    recipe_text: str
    """The recipe as given, for the run directory."""
    hardware: Hardware
    spec: ModelSpec
    batch: Batch
    schedule: Schedule
    settings: Settings
    provenance: Mapping[str, Provenance]
    """Dotted setting -> what is known about it; its keys are the settings that the plan has."""
    fixes: tuple[AppliedFix, ...]
    memory: MemoryEstimate
    time: StepTime
    """Predicted, never measured."""
    pace: Pace
    """What earlier starts of this run took, which its stop was planned with."""
    job: MemoryJob
    """What `memory` was computed from."""
    interpreter: str
    """Starts the workers."""
    versions: Mapping[str, str]
    warnings: tuple[str, ...]
    images: PreparedImages | None = None
    """Statistics of the images in the prepared rows, which `memory` is computed from."""
    kept: Mapping[str, Kept] = field(default_factory=dict)
    """Dotted path of the recipe -> a reference to the environment, which files have instead of its value."""
    elastic: tuple[NodeCount, ...] = ()
    """With `launch.min_nodes`: every number of nodes of the run, most first."""

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.hardware.num_devices

    @property
    def samples_of_rank(self) -> int:
        """Samples of a rank in one step."""
        return self.batch.micro * self.batch.accumulation

    def by(self, dotted: str) -> str:
        """What set a setting: `recipes/x.yaml:12`, `--set`, …; empty where it is absent."""
        return self.provenance[dotted].by if dotted in self.provenance else ""

    @property
    def trainable_params(self) -> int:
        return self.job.trainable_params

    @property
    def reach(self) -> Reach | None:
        """What the adapter is put on; None without one, and where only peft can tell."""
        if not self.adapter.type or self.adapter.path:
            return None
        return reach_of(self.spec, adapted_by(self.spec, self.fields(self.adapter)))

    @property
    def names(self) -> Collection[str]:
        return self.provenance
