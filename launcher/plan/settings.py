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

# Without `from __future__ import annotations`: the annotations are read, and need not be evaluated then.
from collections.abc import Callable, Collection, Mapping
from dataclasses import FrozenInstanceError
from functools import cache
from inspect import get_annotations
from operator import attrgetter
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypedDict,
    dataclass_transform,
)

from launcher.recipe.keys import (
    DERIVED,
    EVALUATED,
    ROUNDED,
    DataKeys,
    Key,
    LaunchKeys,
    ModelKeys,
    Resume,
    RunKeys,
    RuntimeKeys,
    ShardingKeys,
    has_problem_types,
    keys_of,
    shared_keys,
)
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

CHOSEN_BEST = Resume("note", "the best checkpoint so far was chosen by the old value")
MINIMISED = Resume("refuse", "what is minimised would be other")
_OWN_CODE = Resume(
    "refuse",
    "the file of `python:`, or a module that it imports, has changed, and it decides what is learned",
    "restore the file, or start a new run in another --output-dir",
)
REWARDED = Resume("refuse", "what is rewarded would be other")
LEARNED = Resume("refuse", "it decides what was learned so far")
_OTHER_WEIGHTS = Resume("refuse", "what is trained was learned on other frozen weights")
_OTHER_TYPE = Resume("refuse", "weights and states are of another type")
_FILES = Resume("states", "each engine writes files of its own")
_COUNTED = Resume("refuse", "steps, schedule and the place in the data are counted in batches")
FINISHED = "finish the run with effilaunch 0.2.0, or start a new one in another --output-dir"
_LOSS_OVER = Resume(
    "refuse",
    "up to 0.2.0 micro-batches of different sizes weighed the same, and each added the whole auxiliary "
    "loss of the routers",
    FINISHED,
)
OTHERS = "others"
NOTHING: Json = {}


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


class _Undecided:
    """An attribute without a value: reading it raises what `absent` of its settings returns for its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, section: "Section | None", owner: type) -> Any:
        if section is None:
            return self
        raise section._absent(f"{section.PATH}.{self.name}".lstrip("."))


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
class Section:
    """Base of the sections: attributes that `put` alone sets, in the order of their declarations."""

    PATH: ClassVar[str] = ""
    KINDS: ClassVar[Mapping[str, "type[Section] | None"]] = {}
    """Attribute -> the class of an inner section, None for a value."""
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    """Of the attributes that may be absent. Mappings are replaced, never changed, so all may share one."""
    if TYPE_CHECKING:
        _absent: Callable[[str], Exception]

    def __init_subclass__(cls) -> None:
        own = _declared(cls)
        cls.DEFAULTS = {name: vars(cls)[name] for name in own if name in vars(cls)}
        for base in cls.__bases__[1:]:  # of recipe/keys.py
            own |= _declared(base)
            cls.DEFAULTS |= {name: vars(base)[name] for name, key in keys_of(base) if key.absent is None}
        cls.KINDS = {name: kind if _is_section(kind) else None for name, kind in own.items()}
        for name in cls.KINDS:
            setattr(cls, name, _Undecided(name))

    @classmethod
    def empty(cls, absent: Callable[[str], Exception] | None = None) -> Self:
        """A section of which nothing is decided. absent: the error of reading an attribute, by its name."""
        made = object.__new__(cls)
        vars(made).update(cls.DEFAULTS)
        vars(made).update({name: kind.empty(absent) for name, kind in cls.KINDS.items() if kind is not None})
        vars(made)["_absent"] = absent or _undecided
        return made

    def copy(self) -> Self:
        """The same values in sections of their own."""
        made = object.__new__(type(self))
        values = vars(self).items()
        vars(made).update({n: value.copy() if isinstance(value, Section) else value for n, value in values})
        return made

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to {name}: `put` decides settings")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _values(other) == _values(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in _values(self).items())
        return f"{type(self).__name__}({values})"


def _declared(kind: type) -> dict[str, Any]:
    """The attributes that a class itself declares, with their annotations."""
    found = get_annotations(kind).items()
    return {name: annotation for name, annotation in found if name not in Section.__annotations__}


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _undecided(dotted: str) -> Exception:
    return AttributeError(f"{dotted} is not decided yet")


def _values(section: Section) -> dict[str, Any]:
    """The attributes that have a value."""
    return {name: value for name, value in vars(section).items() if name != "_absent"}


class ModelSettings(Section, ModelKeys):
    PATH: ClassVar[str] = "model"
    device_map: Annotated[str | Json | None, Key(DERIVED)]
    config: Json | None
    quantization: Annotated[Literal["none"] | Quantized, Key(_OTHER_WEIGHTS)]
    dtype: Annotated[str, Key(_OTHER_TYPE)]
    attn_implementation: Annotated[str, Key(ROUNDED)]
    loss: Annotated[Literal["full", "chunked"], Key(ROUNDED, before="full")]
    compile_blocks: Annotated[bool, Key(ROUNDED, before=False)]
    vocab_multiple: Annotated[int | None, Key(before=None)]
    freeze: Annotated[list[str], Key(before=[])]
    image_sizes: Annotated[Json, Key(before={})]
    pad_token: Literal["keep", "ensure"]
    enable_input_require_grads: Annotated[bool, Key(DERIVED)]
    prepare_for_kbit: Annotated[bool, Key(_OTHER_WEIGHTS)]
    kbit_norms: Annotated[Literal["float32", "bfloat16", "float16"], Key(ROUNDED)] = "float32"
    """Dtype of what a quantised base has beside its quantised matrices and is not trained."""
    text_only: bool = False
    """Of a checkpoint for text and images, only the text model is loaded."""

    @property
    def quantization_type(self) -> Literal["none", "int8", "nf4", "fp4"]:
        return "none" if self.quantization == "none" else self.quantization["type"]


class AdapterSettings(Section):
    """`type` is None for a full fine-tune; other attributes then have no meaning."""

    PATH: ClassVar[str] = "adapter"
    type: str | None
    path: str | None = None
    cast_input_dtype_enabled: Annotated[bool | None, Key(ROUNDED, before=True)] = None
    autocast_adapter_dtype: Annotated[
        bool, Key(Resume("refuse", "its weights and states are of another type"), before=True)
    ] = True
    lora_dropout: float = 0.0
    init_lora_weights: bool | str | None = None
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None
    trainable_token_indices: list[int] | Json | None = None
    others: Json = NOTHING


class DataSettings(Section, DataKeys):
    PATH: ClassVar[str] = "data"
    train: list[SourceValues]
    eval: SplitValues | list[SourceValues] | None
    fim: Annotated[FimValues | None, Key(decides_samples=True)]
    padding_free: Annotated[bool, Key(ROUNDED)]
    pad_to_multiple_of: Annotated[int | None, Key(ROUNDED)]
    problem_type: Annotated[
        str, Key(before="single_label_classification", decides_samples=True, read_by=has_problem_types)
    ] = "single_label_classification"
    """Of task `sequence-classification`."""


class EmbeddingSettings(Section):
    """Of task `embedding`; the values of other tasks have no meaning."""

    PATH: ClassVar[str] = Embedding.section
    loss: str
    negatives: int
    scale: float | None
    triplet_margin: float | None
    mini_batch_size: Annotated[int | None, Key(ROUNDED)]
    gather_across_devices: bool
    matryoshka_dims: list[int]
    pooling: str | None
    """None: that of the checkpoint, else the usual one of its kind of model."""
    normalize: bool | None
    """None: as the checkpoint, else true."""
    prompts: Mapping[str, str]
    """query, document -> text; {}: those of the checkpoint are saved, and none is put before the rows."""
    batch_sampler: Literal["batch_sampler", "no_duplicates"]


class RerankerSettings(Section):
    """Of task `reranker`."""

    PATH: ClassVar[str] = Reranker.section
    loss: str
    documents: int


class EarlyStoppingSettings(Section):
    PATH: ClassVar[str] = "early_stopping"
    patience: Annotated[int | None, Key(CHOSEN_BEST)]
    threshold: Annotated[float | None, Key(CHOSEN_BEST)]


class PythonSettings(Section):
    """The recipe's own functions and classes."""

    PATH: ClassVar[str] = "python"
    file: Annotated[str | None, Key(EVALUATED)]
    hooks: Annotated[list[str], Key(MINIMISED)]
    digest: Annotated[str | None, Key(_OWN_CODE, before=None)]
    """Of the file and the modules next to it that it imports; None where no hook decides what is learned."""


class ShardingSettings(Section, ShardingKeys):
    PATH: ClassVar[str] = "sharding"
    engine: Annotated[EngineName, Key(_FILES)]
    offload_optimizer: Annotated[Offload, Key(_FILES)]
    offload_param: Annotated[Offload, Key(_FILES)]
    offload_activations: Annotated[Literal["none", "cpu"], Key(DERIVED, before="none")]
    zero_stage: Annotated[int | None, Key(_FILES)] = None
    """None in a draft whose recipe and profile leave it open, and in a plan whose engine has no stages."""

    @property
    def ranks_of_copy(self) -> int:
        """Ranks that compute one copy's micro-batch together."""
        return self.tp_size * self.sp_size * self.cp_size


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
    use_liger_kernel: Annotated[bool, Key(before=False)] = False
    warmup_steps: float = 0
    weight_decay: float = 0.0
    others: Json = NOTHING


class BufferSettings(Section):
    """Buffers through which DeepSpeed offloads the optimizer's states, or the parameters, to NVMe."""

    PATH: ClassVar[str] = "deepspeed.offload_*"
    buffer_count: int
    pin_memory: bool
    buffer_size: int
    max_in_cpu: int
    pipeline_read: bool
    pipeline_write: bool


class DeepSpeedSettings(Section):
    """What the DeepSpeed configuration holds beyond what other sections decide; `profile` has dotted keys."""

    PATH: ClassVar[str] = "deepspeed"
    profile: Annotated[Json, Key(ROUNDED)]
    offload_optimizer: BufferSettings
    offload_param: BufferSettings
    reduce_bucket_size: Annotated[int, Key(DERIVED)]
    allgather_bucket_size: Annotated[int, Key(DERIVED)]
    overlap_comm: Annotated[bool, Key(DERIVED)]
    stage3_max_reuse_distance: int
    aio: Json = NOTHING


class FsdpSettings(Section):
    """`fsdp_config` of TrainingArguments; nothing for another engine."""

    PATH: ClassVar[str] = "fsdp"
    version: int | None = None
    auto_wrap_policy: str | None = None
    reshard_after_forward: bool | None = None
    activation_checkpointing: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    cpu_offload: bool | None = None
    state_dict_type: Annotated[
        str | None, Key(Resume("refuse", "the weights and states are in files of another kind"))
    ] = None


class LaunchSettings(Section, LaunchKeys):
    PATH: ClassVar[str] = "launch"
    launcher: Launcher
    env: Mapping[str, str] = {}


LEAST_STOP_S = 60
"""Least seconds from a signal to the end of a run: for a step and a save, and for the upload that follows."""


class RuntimeSettings(Section, RuntimeKeys):
    """What the workers do around the Trainer."""

    PATH: ClassVar[str] = "runtime"
    autocast: Annotated[str | None, Key(_OTHER_TYPE)]
    training_arguments_first: Annotated[bool, Key(DERIVED)]
    loss_over: Annotated[str, Key(_LOSS_OVER)]
    """What the loss of a step and of an evaluation is a mean of (`Task.loss_over`), with ` and routers` where
    a mixture adds their loss; `micro-batch`: a mean of means."""
    stop_seconds: Annotated[int | None, Key(DERIVED)] = None

    @property
    def stop_limit_s(self) -> int:
        """Seconds that a stop may take."""
        return max(LEAST_STOP_S, self.stop_seconds or 0)


class Settings(Section, RunKeys):
    """All settings of a plan."""

    task: Annotated[str, Key(LEARNED)]
    precision: Annotated[Precision, Key(_OTHER_TYPE)]
    global_batch_size: Annotated[int, Key(_COUNTED)]
    tiny: Annotated[bool, Key(LEARNED)]
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
    reward: Annotated[list[dict[str, Any]], Key(REWARDED)] = []  # noqa: RUF012
    """The functions that score completions: {function, weight, arguments, time_limit}."""

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
        vars(section)[name] = value

    def remove(self, dotted: str) -> None:
        """Leave a setting without a value: reading it is an error, whatever its default."""
        section, name, _ = _place(self, dotted)
        vars(section).pop(name, None)


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


for _name in (name for name in Settings.KINDS if name != "task"):
    setattr(HasSettings, _name, property(attrgetter(f"settings.{_name}")))


_OPEN = {"launch.env", "deepspeed.aio"}
"""Mappings whose keys are settings of their own."""


def _place(settings: Settings, dotted: str) -> tuple[Section, str, str]:
    """(Section, attribute, key within the attribute's mapping or "") of a dotted name."""
    section: Section = settings
    rest = dotted
    while True:
        name, _, inner = rest.partition(".")
        known = section.KINDS
        if inner and known.get(name) is not None:
            section, rest = getattr(section, name), inner
        elif inner and f"{section.PATH}.{name}" in _OPEN:
            return section, name, inner
        elif not inner and name in known and known[name] is None and name != OTHERS:
            return section, name, ""
        elif OTHERS in known:
            return section, OTHERS, rest
        else:
            raise KeyError(f"no section has a setting {dotted}")


@cache
def declared_keys() -> Mapping[str, Key]:
    """Dotted setting -> its Key, of those that have one."""
    sections: list[type[Section]] = [
        Settings,
        *(kind for kind in Settings.KINDS.values() if kind is not None),
    ]
    return {
        f"{kind.PATH}.{name}".lstrip("."): key
        for kind in sections
        for base in (kind, *kind.__bases__[1:])
        for name, key in keys_of(base)
    }


def deciding_images() -> tuple[str, ...]:
    """Settings that decide the images of the prepared samples; the recipe has the same keys and values."""
    samples = (name for name, key in shared_keys() if key.decides_samples)
    model = ("name_or_path", "revision", "tokenizer", "chat_template", "add_tokens", "image_sizes")
    return ("task", "python.file", "data.train", *samples, *(f"model.{name}" for name in model))
