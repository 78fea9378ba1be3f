"""The grids of jobs that are measured and predicted, read from grids/*.yaml.

A row's name states its settings. The longest known model at its start decides the model, and each further
part stands for the settings that `words` gives it; b8, s128 and accumulation2 are micro-batch, tokens of a
row and accumulation. The row's value has what the name does not state: `4x256` is micro-batch x tokens.
Rows that were measured are never deleted and do not change; one that cannot run says why in `impossible`.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

HALVES = ("tuning", "held-out")
FOLDER = Path(__file__).parent / "grids"
_NUMBERS = {"b": "micro_batch", "s": "length", "accumulation": "accumulation", "acc": "accumulation"}


@dataclass(frozen=True, slots=True)
class Row:
    """One training job."""

    name: str
    model: str
    """Key of MODELS; on a GPU, the name of a shipped model fact."""
    micro_batch: int = 4
    length: int = 256
    """Tokens per row; an image's patches decide theirs."""
    precision: str = "fp32"
    """fp32 | bf16 (autocast) | fp16 (autocast, scaled) | bf16-true"""
    adapter: str | None = None
    """all-linear, attention (the products that MODELS names), or a comma-separated list of modules."""
    adapter_dropout: float = 0.0
    quantization: str = "none"
    kbit_norms: str = "float32"
    optim: str = "adamw_torch_fused"
    checkpointing: bool = False
    attention: str = "sdpa"
    packing: bool = False
    """Each row holds four documents."""
    padded: bool = False
    """Every second row ends in padding; its length stays."""
    accumulation: int = 1
    engine: str = "ddp"
    """ddp | deepspeed | fsdp (version 2); one process without the others."""
    zero_stage: int = 0
    offload_optimizer: str = "none"
    processes: int = 1
    bucket: int = 1_000_000
    """DeepSpeed's reduce and all-gather buckets, in elements."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the model's configuration."""
    free: bool = False
    """The rows of a batch lie in one row, for `attention`."""
    loss: str = "full"
    cast: bool = True
    """Adapters copy their input into their own dtype."""
    trains_tower: bool = False
    """Vision tower and projector of a model of images and text are trained, too."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `trainer:` that the task adds."""
    section: Mapping[str, Any] = field(default_factory=dict)
    """The task's own section of the recipe."""
    tuned: bool = False
    """A formula was corrected on it, whatever half its name would put it in."""
    impossible: str | None = None
    """Why the row cannot run."""
    needs: tuple[str, ...] = ()
    """Packages without which the row is skipped."""

    @property
    def half(self) -> str:
        """By sha256 of the name. Formulas and traces are tuned on the rows of the half `tuning` alone."""
        if self.tuned:
            return HALVES[0]
        return HALVES[hashlib.sha256(self.name.encode()).digest()[0] % 2]


@dataclass(frozen=True, slots=True)
class Model:
    """A configuration, its task, and the products that an attention-only adapter adapts."""

    config: Mapping[str, Any]
    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    task: str = "causal-lm"
    image: tuple[int, ...] = (0, 0)
    """Width and height of the one image of a sample."""
    image_sizes: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the generated image processor."""
    patches: int = 0
    """That the processor makes of the image, with what it is filled up with."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A job whose micro-batch is the planner's to choose, at one global batch."""

    name: str
    row: Row
    samples: int

    def rows(self) -> Iterable[Row]:
        """Every way to compute it: the divisors of its samples, with and without recomputation."""
        micro = self.samples
        while micro:
            if self.samples % micro == 0:
                for again in (False, True):
                    name = f"{self.name}-b{micro}{'-ckpt' if again else ''}"
                    shape = {"micro_batch": micro, "accumulation": self.samples // micro}
                    yield replace(self.row, name=name, checkpointing=again, **shape)
            micro //= 2


@functools.cache
def grid(name: str) -> Mapping[str, Any]:
    """The content of grids/NAME.yaml."""
    found: Mapping[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))
    return found


def rows_of(name: str, part: str = "rows", kind: type = Row) -> tuple[Any, ...]:
    """The rows of a grid, or of another part of it, as objects of `kind`."""
    known = grid(name)
    return tuple(
        kind(row, **_plain({**known.get("defaults", {}), **_named(row, known), **_stated(value)}))
        for row, value in known[part].items()
    )


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def _named(row: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the name states; KeyError for a part that is neither a model nor one of `words`."""
    task, _, rest = row.partition("-")
    if task not in known.get("tasks", ()):
        task, rest = "", row
    parts = rest.split("-")
    for end in range(len(parts), 0, -1):
        model = known["models"].get("-".join(parts[:end]))
        if model is not None:
            break
    else:
        raise KeyError(f"{row}: no model of the grid")
    settings = {"model": model} if isinstance(model, str) else dict(model)
    if task:
        settings["model"] += f"-{task}"
    for part in parts[end:]:
        number = re.fullmatch(r"(b|s|acc|accumulation)(\d+)", part)
        settings |= {_NUMBERS[number[1]]: int(number[2])} if number else known["words"][part]
    return settings


def _stated(value: Mapping[str, Any] | str | None) -> dict[str, Any]:
    settings = dict(value) if isinstance(value, Mapping) else {"shape": value}
    shape = settings.pop("shape", None)
    if shape is not None:
        micro, _, length = shape.partition("x")
        settings |= {"micro_batch": int(micro), **({"length": int(length)} if length else {})}
    return settings


def settings_of(row: Any, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Fields, but for name and needs, that differ from the class's defaults, or from the grid's own."""
    plain = {one.name: one.default for one in fields(row) if one.default is not MISSING} | dict(
        defaults or {}
    )
    plain |= {one.name: {} for one in fields(row) if one.default_factory is not MISSING}
    given = {name: value for name, value in asdict(row).items() if name not in ("name", "needs")}
    return {name: value for name, value in given.items() if name not in plain or value != plain[name]}


def _models() -> dict[str, Model]:
    known = grid("models")
    own = {one.name for one in fields(Model)}
    found = {}
    for name, settings in known["models"].items():
        config = {key: value for key, value in settings.items() if key not in own}
        more = {key: value for key, value in settings.items() if key in own}
        found[name] = Model(config, **_plain(more))
    for names, tasks, config in (known["of_trl"], known["of_texts"]):
        found |= {
            f"{name}-{task}": replace(found[name], task=task, config={**found[name].config, **config})
            for name in names
            for task in tasks
        }
    return found


MODELS: dict[str, Model] = _models()
MEMORY: tuple[Row, ...] = rows_of("memory")
GPU_MEMORY: tuple[Row, ...] = rows_of("gpu_memory")
SPEED: tuple[Row, ...] = rows_of("speed")
FRESH: tuple[Row, ...] = rows_of("speed", "fresh")
"""Rows of other shapes, which no figure of the speed model was set beside."""
CHOICES = tuple(
    Choice(row.name, row, grid("speed")["samples"][row.name]) for row in rows_of("speed", "choices")
)


def speed_rows() -> list[Row]:
    """All rows whose steps are timed."""
    return [*SPEED, *FRESH, *(row for choice in CHOICES for row in choice.rows())]


def memory_row(name: str) -> Row:
    """The row of that name; KeyError for another."""
    return {one.name: one for one in MEMORY}[name]
