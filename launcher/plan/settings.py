"""The settings of a plan: one frozen, typed class per section.

The planner's draft, the plan and the worker's job all read settings as attributes, which mypy checks:
`plan.sharding.zero_stage`. Beside them a mapping holds what is known about each setting (source, by, reason),
keyed by the dotted name that plan.json and people use; its keys are the settings that a plan has.

- An attribute with a default is a setting that may be absent. One without a default is decided in
  every plan; reading it earlier raises `AttributeError`, in a worker the error of an incomplete plan.json.
- Two sections take any field of an upstream class: `trainer` (TrainingArguments) and `adapter` (LoraConfig).
  What this project reads is an attribute with upstream's type; everything else is in `others`, as given.
  `HasSettings.fields` is both together. `launch.env` and `deepspeed.aio` are mappings.
- Values are those of JSON, so that plan.json holds them unchanged. The recipe's rules check their types.
- `put` and `at` take dotted names: for decisions, known fixes, `--set`, `--explain` and plan.json. They
  refuse a name that no section has. No other code changes a section; a plan's never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, TypeVar

from launcher.tasks import task_named
from launcher.tasks.embedding import Embedding
from launcher.tasks.reranker import Reranker
from launcher.tasks.task import Task

EngineName = Literal["ddp", "deepspeed", "fsdp"]
Launcher = Literal["python", "accelerate", "deepspeed"]
Precision = Literal["fp32", "bf16", "fp16", "bf16-true", "fp16-true"]
Offload = Literal["none", "cpu", "nvme"]
Json = Mapping[str, object]
"""A mapping as the recipe or an upstream class has it."""
Strings = str | list[str]

OTHERS = "others"
_S = TypeVar("_S", bound="Section")


class Quantized(TypedDict, total=False):
    """`model.quantization` of a quantised base; int8 has no other keys than `type`, and the dtype that 4-bit
    weights are stored as is there where it is not uint8."""

    type: Literal["int8", "nf4", "fp4"]
    double_quant: bool
    compute_dtype: str
    quant_storage: str


class SourceValues(TypedDict):
    """One element of `data.train`, and of `data.eval` where that is a list."""

    path: str
    format: str
    columns: dict[str, str | None]
    weight: float
    split: str
    name: str | None
    revision: str | None


class SplitValues(TypedDict):
    """`data.eval` where rows of `data.train` are held out."""

    split: float


class FimValues(TypedDict):
    """`data.fim`."""

    rate: float
    spm_rate: float


class Section:
    """Base of the sections. An attribute without a value raises what `absent` returns for its dotted name."""

    __slots__ = ("_absent",)
    _absent: Callable[[str], Exception]
    PATH: ClassVar[str] = ""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _values(other) == _values(self)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the attributes that have a value; dataclass's own state would read all of them."""
        state = {"_absent": self._absent, **_values(self)}
        return object.__new__, (type(self),), state, None, None, _set_values

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in _values(self).items())
        return f"{type(self).__name__}({values})"

    if not TYPE_CHECKING:  # mypy must not take this for a reason to accept any attribute

        def __getattr__(self, name: str) -> Any:
            if name not in _attributes(type(self)):
                raise AttributeError(f"{type(self).__name__} has no {name}")
            raise self._absent(f"{self.PATH}.{name}".lstrip("."))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ModelSettings(Section):
    PATH: ClassVar[str] = "model"
    name_or_path: str | None
    revision: str | None
    gguf_file: str | None
    tokenizer: str | None
    device_map: str | Json | None
    chat_template: str | None
    add_tokens: list[str]
    cache_dir: str | None
    trust_remote_code: bool
    config: Json | None
    quantization: Literal["none"] | Quantized
    dtype: str
    attn_implementation: str
    loss: Literal["full", "chunked"]
    compile_blocks: bool
    vocab_multiple: int | None
    freeze: list[str]
    image_sizes: Json
    pad_token: Literal["keep", "ensure"]
    enable_input_require_grads: bool
    prepare_for_kbit: bool
    kbit_norms: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of what a quantised base has beside its quantised matrices and is not trained."""
    text_only: bool = False
    """Of a checkpoint for text and images, only the text model is loaded."""

    @property
    def quantization_type(self) -> Literal["none", "int8", "nf4", "fp4"]:
        return "none" if self.quantization == "none" else self.quantization["type"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AdapterSettings(Section):
    """`type` is None for a full fine-tune; other attributes then have no meaning."""

    PATH: ClassVar[str] = "adapter"
    type: str | None
    path: str | None = None
    cast_input_dtype_enabled: bool | None = None
    autocast_adapter_dtype: bool = True
    lora_dropout: float = 0.0
    init_lora_weights: bool | str | None = None
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None
    trainable_token_indices: list[int] | Json | None = None
    others: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DataSettings(Section):
    PATH: ClassVar[str] = "data"
    train: list[SourceValues]
    eval: SplitValues | list[SourceValues] | None
    fim: FimValues | None
    max_length: int
    max_truncated: float
    max_dropped: float
    metrics: list[str]
    overlong: Literal["truncate", "split", "drop"] | None
    loss_on: Literal["completion", "assistant", "all"] | None
    loss_on_inserted: bool
    packing: bool
    padding_free: bool
    pad_to_multiple_of: int | None
    streaming: bool
    num_proc: int | None
    special_tokens_in_text: Literal["keep", "escape", "refuse"] | None
    """None: kept, and rows with some are a warning."""
    problem_type: str = "single_label_classification"
    """Of task `sequence-classification`."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EmbeddingSettings(Section):
    """Of task `embedding`; the values of other tasks have no meaning."""

    PATH: ClassVar[str] = Embedding.section
    loss: str
    negatives: int
    scale: float | None
    triplet_margin: float | None
    mini_batch_size: int | None
    gather_across_devices: bool
    matryoshka_dims: list[int]
    pooling: str | None
    """None: that of the checkpoint, else the usual one of its kind of model."""
    normalize: bool | None
    """None: as the checkpoint, else true."""
    prompts: Mapping[str, str]
    """query, document -> text; {}: those of the checkpoint are saved, and none is put before the rows."""
    batch_sampler: Literal["batch_sampler", "no_duplicates"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RerankerSettings(Section):
    """Of task `reranker`."""

    PATH: ClassVar[str] = Reranker.section
    loss: str
    documents: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EarlyStoppingSettings(Section):
    PATH: ClassVar[str] = "early_stopping"
    patience: int | None
    threshold: float | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PythonSettings(Section):
    """The recipe's own functions."""

    PATH: ClassVar[str] = "python"
    file: str | None
    hooks: list[str]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardingSettings(Section):
    PATH: ClassVar[str] = "sharding"
    engine: EngineName
    offload_optimizer: Offload
    offload_param: Offload
    tp_size: int
    sp_size: int
    cp_size: int
    zero_stage: int | None = None
    """None in a draft whose recipe and profile leave it open, and in a plan whose engine has no stages."""
    nvme_path: str | None = None

    @property
    def ranks_of_copy(self) -> int:
        """Ranks that compute one copy's micro-batch together."""
        return self.tp_size * self.sp_size * self.cp_size


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TrainerSettings(Section):
    PATH: ClassVar[str] = "trainer"
    bf16: bool
    fp16: bool
    use_cpu: bool
    optim: str
    learning_rate: float
    max_grad_norm: float
    report_to: Strings
    per_device_train_batch_size: int | None = None
    """In a draft None until a size is chosen; a plan has it, and the two below."""
    per_device_eval_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_kwargs: Json | None = None
    accelerator_config: Json | str | None = None
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    auto_find_batch_size: bool = False
    average_tokens_across_devices: bool | None = None
    dataloader_num_workers: int | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_find_unused_parameters: bool | None = None
    ddp_timeout: int | None = None
    disable_dropout: bool | None = None
    eval_accumulation_steps: int | None = None
    eval_delay: float = 0
    eval_steps: float | None = None
    eval_strategy: str = "no"
    hub_model_id: str | None = None
    hub_strategy: str | None = None
    label_smoothing_factor: float = 0.0
    load_best_model_at_end: bool = False
    lr_scheduler_type: str = "linear"
    max_steps: int | None = None
    metric_for_best_model: str | None = None
    neftune_noise_alpha: float | None = None
    num_train_epochs: float | None = None
    optim_args: str | None = None
    precompute_ref_log_probs: bool = False
    predict_with_generate: bool = False
    prediction_loss_only: bool | None = None
    push_to_hub: bool = False
    run_name: str | None = None
    save_only_model: bool = False
    save_steps: float | None = None
    save_strategy: str = "steps"
    save_total_limit: int | None = None
    tf32: bool | None = None
    torch_compile: bool = False
    use_cache: bool | None = None
    use_liger_kernel: bool = False
    warmup_steps: float = 0
    weight_decay: float = 0.0
    others: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BufferSettings(Section):
    """Buffers through which DeepSpeed offloads the optimizer's states, or the parameters, to NVMe."""

    PATH: ClassVar[str] = "deepspeed.offload_*"
    buffer_count: int
    pin_memory: bool
    buffer_size: int
    max_in_cpu: int
    pipeline_read: bool
    pipeline_write: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DeepSpeedSettings(Section):
    """What the DeepSpeed configuration holds beyond what other sections decide; `profile` has dotted keys."""

    PATH: ClassVar[str] = "deepspeed"
    profile: Json
    offload_optimizer: BufferSettings
    offload_param: BufferSettings
    reduce_bucket_size: int
    allgather_bucket_size: int
    overlap_comm: bool
    stage3_max_reuse_distance: int
    aio: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FsdpSettings(Section):
    """`fsdp_config` of TrainingArguments; nothing for another engine."""

    PATH: ClassVar[str] = "fsdp"
    version: int | None = None
    auto_wrap_policy: str | None = None
    reshard_after_forward: bool | None = None
    activation_checkpointing: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    state_dict_type: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LaunchSettings(Section):
    PATH: ClassVar[str] = "launch"
    launcher: Launcher
    max_restarts: int
    hang_factor: float
    min_nodes: int | None = None
    hostfile: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RuntimeSettings(Section):
    """What the workers do around the Trainer."""

    PATH: ClassVar[str] = "runtime"
    autocast: str | None
    training_arguments_first: bool
    loss_over: Literal["targets", "rows", "targets and routers", "rows and routers", "micro-batch"]
    """What the loss of a step and of an evaluation is a mean of."""
    stop_seconds: int | None = None
    mirror: str | None = None
    """URL of the object store that gets the checkpoints."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Settings(Section):
    """All settings of a plan."""

    task: str
    seed: int
    on_oom: Literal["fail", "adapt"]
    precision: Precision
    global_batch_size: int
    tiny: bool
    model: ModelSettings
    adapter: AdapterSettings
    data: DataSettings
    embedding: EmbeddingSettings
    reranker: RerankerSettings
    early_stopping: EarlyStoppingSettings
    python: PythonSettings
    sharding: ShardingSettings
    trainer: TrainerSettings
    deepspeed: DeepSpeedSettings
    fsdp: FsdpSettings
    launch: LaunchSettings
    runtime: RuntimeSettings
    reward: list[dict[str, Any]] = field(default_factory=list)
    """The functions that score completions: {function, weight, arguments, time_limit}."""

    @classmethod
    def empty(cls, absent: Callable[[str], Exception] | None = None) -> Settings:
        """Settings of which none is decided. absent: the error of reading one, by its dotted name."""
        return _empty(cls, absent or _undecided)

    def copy(self) -> Settings:
        """The same values in sections of their own."""
        return _copy(self)

    def at(self, dotted: str) -> object:
        """The value of a setting, read as its attribute is. KeyError for a name that no section has."""
        section, name, key = _place(self, dotted)
        value: object = getattr(section, name)
        return value[key] if key and isinstance(value, Mapping) else value

    def put(self, dotted: str, value: object) -> None:
        """Set the value of a setting. KeyError for a name that no section has."""
        section, name, key = _place(self, dotted)
        if key:
            value = {**getattr(section, name), key: value}
        object.__setattr__(section, name, value)

    def remove(self, dotted: str) -> None:
        """Leave a setting without a value: reading it is an error, whatever its default."""
        section, name, _ = _place(self, dotted)
        with suppress(AttributeError):
            object.__delattr__(section, name)


class HasSettings:
    """Gives the holder of settings its sections as attributes."""

    __slots__ = ()

    if TYPE_CHECKING:  # properties that are made below; a dataclass would take an inherited one for a default

        @property
        def settings(self) -> Settings: ...

        @property
        def names(self) -> Collection[str]:
            """Dotted names of the settings that are there."""

        seed: int
        on_oom: Literal["fail", "adapt"]
        precision: Precision
        tiny: bool
        model: ModelSettings
        adapter: AdapterSettings
        data: DataSettings
        embedding: EmbeddingSettings
        reranker: RerankerSettings
        early_stopping: EarlyStoppingSettings
        python: PythonSettings
        sharding: ShardingSettings
        trainer: TrainerSettings
        deepspeed: DeepSpeedSettings
        fsdp: FsdpSettings
        launch: LaunchSettings
        runtime: RuntimeSettings
        reward: list[dict[str, Any]]

    def at(self, dotted: str) -> object:
        """The value of a setting named by text, None where it is absent."""
        return self.settings.at(dotted) if dotted in self.names else None

    def fields(self, section: Section) -> dict[str, object]:
        """The settings of a section that are there, by the rest of their names."""
        start = section.PATH + "."
        return {
            name.removeprefix(start): self.settings.at(name) for name in self.names if name.startswith(start)
        }

    @property
    def task(self) -> Task:
        return task_named(self.settings.task)

    @property
    def has_adapter(self) -> bool:
        return self.settings.adapter.type is not None


for _name in (one.name for one in fields(Settings) if one.name != "task"):
    setattr(HasSettings, _name, property(attrgetter(f"settings.{_name}")))


_SECTIONS: Mapping[str, type[Section]] = {
    kind.__name__: kind
    for kind in (
        ModelSettings, AdapterSettings, DataSettings, EmbeddingSettings, RerankerSettings,
        EarlyStoppingSettings, PythonSettings, ShardingSettings, TrainerSettings, BufferSettings,
        DeepSpeedSettings, FsdpSettings, LaunchSettings, RuntimeSettings,
    )
}  # fmt: skip
_OPEN = {"launch.env", "deepspeed.aio"}
"""Mappings whose keys are settings of their own."""


_ATTRIBUTES: dict[type, Mapping[str, type[Section] | None]] = {}
_DEFAULTS: dict[type, Mapping[str, Any]] = {}


def _attributes(kind: Any) -> Mapping[str, type[Section] | None]:
    """Attribute -> the class of a section, None for a value."""
    if kind not in _ATTRIBUTES:
        _ATTRIBUTES[kind] = {one.name: _SECTIONS.get(str(one.type)) for one in fields(kind)}
    return _ATTRIBUTES[kind]


def _defaults(kind: Any) -> Mapping[str, Any]:
    """Attribute -> its default. Mappings are replaced, never changed, so all sections may share one."""
    if kind not in _DEFAULTS:
        given = {one.name: one.default for one in fields(kind) if one.default is not MISSING}
        made = {one.name: one.default_factory for one in fields(kind)}
        _DEFAULTS[kind] = given | {name: make() for name, make in made.items() if make is not MISSING}
    return _DEFAULTS[kind]


def _undecided(dotted: str) -> Exception:
    return AttributeError(f"{dotted} is not decided yet")


def _empty(kind: type[_S], absent: Callable[[str], Exception]) -> _S:
    made = object.__new__(kind)
    object.__setattr__(made, "_absent", absent)
    for name, default in _defaults(kind).items():
        object.__setattr__(made, name, default)
    for name, inner in _attributes(kind).items():
        if inner is not None:
            object.__setattr__(made, name, _empty(inner, absent))
    return made


def _set_values(section: Section, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        object.__setattr__(section, name, value)


def _values(section: Section) -> dict[str, Any]:
    """The attributes that have a value."""
    found = {}
    for name in _attributes(type(section)):
        with suppress(AttributeError):
            found[name] = object.__getattribute__(section, name)
    return found


def _copy(section: _S) -> _S:
    made = object.__new__(type(section))
    object.__setattr__(made, "_absent", section._absent)
    for name, value in _values(section).items():
        object.__setattr__(made, name, _copy(value) if isinstance(value, Section) else value)
    return made


def _place(settings: Settings, dotted: str) -> tuple[Section, str, str]:
    """(Section, attribute, key within the attribute's mapping or "") of a dotted name."""
    section: Section = settings
    rest = dotted
    while True:
        name, _, inner = rest.partition(".")
        known = _attributes(type(section))
        if inner and known.get(name) is not None:
            section, rest = object.__getattribute__(section, name), inner
        elif inner and f"{section.PATH}.{name}" in _OPEN:
            return section, name, inner
        elif not inner and name in known and known[name] is None and name != OTHERS:
            return section, name, ""
        elif OTHERS in known:
            return section, OTHERS, rest
        else:
            raise KeyError(f"no section has a setting {dotted}")
