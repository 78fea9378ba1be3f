"""The recipe as types. Upstream things keep upstream's spelling; unknown keys are errors."""

# Without `from __future__ import annotations`: pydantic would compile each of the annotations from its text.
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from launcher.recipe.field_tables import TASK_FORMATS
from launcher.tasks import DEFAULT_TASK, FORMATS

Precision = Literal["auto", "fp32", "bf16", "fp16", "bf16-true", "fp16-true"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Kernel = Literal["eager", "sdpa", "flash_attention_2", "flex_attention", "varlen"]
Stage = Literal["auto"] | Annotated[int, Field(ge=0, le=3)]
Share = Annotated[float, Field(ge=0, le=1)]
if TYPE_CHECKING:
    Task = str
    Format = str
else:  # the words have one list, which a type checker cannot follow
    Task = Literal[tuple(TASK_FORMATS)]
    Format = Literal["auto", *FORMATS]


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys, no silent coercion of text to numbers."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        defer_build=True,
    )


class Quantization(Section):
    """How the frozen base weights are stored, through bitsandbytes."""

    type: Literal["int8", "nf4", "fp4"]
    """Storage type: `int8` (LLM.int8()), or `nf4` or `fp4`, the 4-bit types of QLoRA."""
    double_quant: bool = True
    """4 bit only: the quantisation constants are quantised too (saves about 0.4 bit a parameter)."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """4 bit only: dtype of the matrix products; absent: follows `precision` and the device."""


class ModelSection(Section):
    """The base model."""

    name_or_path: str | None = None
    """Hub id, folder, or `package:NAME/inner/path` of an installed Python package; this or
    `model.config`."""
    config: dict[str, Any] | str | None = None
    """A configuration, or the name of a shipped model fact, in place of weights: they are drawn at random,
    for training from scratch."""
    revision: str | None = None
    """Branch, tag or commit of the hub id."""
    gguf_file: str | None = None
    """A GGUF file inside `name_or_path`; it is dequantised once and cached."""
    tokenizer: str | None = None
    """Where the tokenizer is, if not beside the model: hub id, folder or `package:` path."""
    quantization: Literal["none", "auto", "int8", "nf4", "fp4"] | Quantization = "none"
    """How the frozen base is stored: `none`, `int8`, `nf4`, `fp4`, or a mapping with the keys of the section
    below; `auto`: with an adapter the fastest of `none`, `int8` and `nf4` that fits."""
    dtype: DtypeName | None = None
    """Dtype of the weights in memory; absent: follows `precision`; `auto`: the checkpoint's."""
    attn_implementation: Kernel | None = None
    """Attention kernel; absent: `varlen` where `data.padding_free` is on by itself, else `sdpa`.
    `flex_attention` is for GPUs; `varlen` takes torch's own kernels, sample by sample of one long row,
    without a mask."""
    loss: Literal["full", "chunked"] | None = None
    """How the head's loss is computed; `chunked`: the scores of all words exist for some hundred tokens at a
    time, and for learnt tokens alone; absent: `chunked` for task `causal-lm` where the head is one matrix,
    and the loss nobody else's."""
    compile_blocks: bool | None = None
    """Compile each layer (`torch.compile`); absent: on GPUs of compute capability 8.0 or later, without
    quantisation and with weights that stay whole (DDP, ZeRO up to 2), where the run is predicted to take an
    hour or more, which needs `trainer.max_steps`."""
    vocab_multiple: Annotated[int, Field(ge=2, le=4096)] | None = None
    """Fill the vocabulary up to a multiple of this, for tensor cores; the further words take part in the
    softmax, so the model is another one, and no plan does it by itself."""
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, Any] | None = None
    """Spreads one process's layers over several devices (naive model parallelism); one process only."""
    chat_template: str | None = None
    """A Jinja template (file or text) for a tokenizer that has none."""
    add_tokens: list[Annotated[str, Field(min_length=1)]] = []
    """Tokens that the tokenizer lacks; their embedding rows are trained and saved, with an adapter too."""
    cache_dir: str | None = None
    """Folder of the hub cache, as in from_pretrained."""
    trust_remote_code: bool = False
    """Run model code from the hub repository."""


class AdapterSection(BaseModel):
    """A LoRA adapter, for any task. Further keys are LoraConfig fields of the installed peft."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, defer_build=True)

    type: Literal["lora"] = "lora"
    """The adapter method."""
    path: str | None = None
    """Folder of an adapter to continue; it brings its own settings, so fields of `LoraConfig` are not
    allowed beside it."""
    cast_input_dtype_enabled: bool | None = None
    """Whether each layer copies its input into the adapter's dtype; absent: false where autocast would
    narrow the copy again (`bf16`, `fp16`, without `lora_dropout`), which gives the same numbers with less
    memory."""
    autocast_adapter_dtype: bool = True
    """Whether the adapter is kept in float32 over a 16-bit model, as peft does; `false` trains it in 16
    bits: less memory, other results; estimates count float32."""


class DataSource(Section):
    """One source of rows."""

    path: str
    """File, glob, folder, data set of the hub (organisation/name) or `package:NAME/inner/path`; files are
    .jsonl .json .csv .tsv .parquet .arrow .txt, each also as .gz."""
    format: Format = "auto"
    """What the rows are; `auto` reads it from the column names."""
    columns: dict[str, str | None] = {}
    """Renames columns: field of the format to column of the file, e.g. `{completion:
    canonical_solution}`; with `null` a column of the file is left out, e.g. `{history: null}`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often an epoch sees the rows of this source: 2.5 is twice all of them, and half of them once more.
    With data.streaming: how often this source is drawn, beside the others. For training rows only."""
    split: str = "train"
    """Split of a data set of the hub."""
    name: str | None = None
    """Configuration of a data set of the hub, where it has several."""
    revision: str | None = None
    """Branch, tag or commit of a data set of the hub."""


class EvalSplit(Section):
    """An evaluation set cut from the training rows."""

    split: Annotated[float, Field(gt=0, lt=1)]
    """Share of the training rows, chosen with `seed`, that are evaluated instead."""


class FimSection(Section):
    """Fill-in-the-middle, for code models whose tokenizer has the tokens for it: a text is cut in three, and
    the middle is learnt after what surrounds it."""

    rate: Share
    """Share of the texts that are rearranged; the others stay as they are."""
    spm_rate: Share = 0.5
    """Of those, the share in suffix-prefix-middle order; the others are prefix-suffix-middle."""


class DataSection(Section):
    """Training and evaluation rows."""

    train: Annotated[list[DataSource], Field(min_length=1)]
    """Sources of training rows, concatenated; their keys stand in the section below."""
    eval: EvalSplit | list[DataSource] | None = None
    """A list of sources as in `data.train`, or a share of its rows: `{split: 0.02}`."""
    metrics: list[str] = []
    """What is measured on the evaluation rows besides the loss; which names there are depends on the task."""
    max_length: Annotated[int, Field(ge=8, le=1_000_000_000)] = 2048
    """Longest sample in tokens; `data.overlong` says what happens to longer ones, and their number is
    reported."""
    overlong: Literal["truncate", "split", "drop"] | None = None
    """What happens to a row that is longer than `max_length`; absent: split into several samples for text
    rows, truncate for all others."""
    packing: bool = False
    """Fill samples with whole documents up to `max_length`, none of which sees another."""
    padding_free: bool | None = None
    """Lay the samples of a batch end to end instead of padding them: the same samples, and nothing is
    computed for padding; absent: for task `causal-lm` where model and kernel keep samples apart."""
    pad_to_multiple_of: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Fill each row of a batch up to a multiple of so many tokens, 1 for none; absent: 64 on GPUs of compute
    capability 8.0 or later, 8 on others, none on a CPU."""
    loss_on: Literal["completion", "assistant", "all"] | None = None
    """Tokens that are learnt; absent: `completion` for prompt/completion and instruction rows, `assistant`
    for chat rows, `all` for text."""
    loss_on_inserted: bool = False
    """Learn what the chat template writes into an answer that the row does not hold, such as an empty
    `<think></think>` block; else it is masked, and counted. With `loss_on: all` it is learned."""
    fim: FimSection | None = None
    """Fill-in-the-middle of text rows."""
    streaming: bool = False
    """Read the rows while training instead of before it; needs `trainer.max_steps`."""
    max_truncated: Share = 0.2
    """Share of the tokens that may be lost to `max_length` before a run is stopped at its start."""
    max_dropped: Share = 0.05
    """Share of a source's rows that may be dropped before a run is stopped at its start: empty rows, rows
    without target tokens, and pairs of two equal answers. Rows that `overlong: drop` or a `format_row`
    leaves out do not count."""
    num_proc: Annotated[int, Field(ge=1)] | None = None
    """Processes that tokenise; absent: one per core, at most 8."""


class EarlyStopping(Section):
    """The end of a run whose evaluation no longer improves; the best checkpoint is kept."""

    patience: Annotated[int, Field(ge=1)]
    """Evaluations without improvement after which training stops; the best checkpoint is the result."""
    threshold: Annotated[float, Field(ge=0)] = 0.0
    """By how much `trainer.metric_for_best_model` (absent: the evaluation loss) must improve to count."""


class ShardingSection(Section):
    """How weights, gradients and optimizer states are spread over the processes."""

    engine: Literal["auto", "deepspeed", "fsdp", "ddp"] = "auto"
    """`deepspeed` (ZeRO), `fsdp` (FSDP2: bf16, fp32 or `-true`, no offload, no quantised base) or `ddp`;
    `auto`, which never is fsdp: ddp for one process that offloads nothing, else the fastest that fits."""
    zero_stage: Stage = "auto"
    """ZeRO stage, engine `deepspeed` only; `auto`: that of the fastest configuration that fits."""
    offload_optimizer: Literal["none", "auto", "cpu", "nvme"] = "none"
    """Where optimizer states live; `cpu` needs ZeRO and an AdamW optimizer, `nvme` ZeRO-3 as well; `auto`:
    `cpu` where that is faster than what fits without, never a disk."""
    offload_param: Literal["none", "auto", "cpu", "nvme"] = "none"
    """Where parameters live between uses; `cpu` and `nvme` with ZeRO-3 only; `auto` as for optimizer
    states."""
    nvme_path: str | None = None
    """Folder on a local disk for what is offloaded to `nvme`, relative to the recipe; in place of the one
    that a base profile names."""
    config: str | None = None
    """A base DeepSpeed profile: a file, or the name of a shipped one such as `zero2`."""
    tp_size: Annotated[int, Field(ge=1, le=999_999)] = 1
    """Devices that share each layer's matrices (tensor parallelism), engine `deepspeed`; `ddp` for one
    copy."""
    sp_size: Annotated[int, Field(ge=1, le=999_999)] = 1
    """Devices that share each sample's tokens (Ulysses sequence parallelism), engine `deepspeed`."""
    cp_size: Annotated[int, Field(ge=1, le=999_999)] = 1
    """Devices that share each sample's tokens (context parallelism of torch), engine `fsdp`; never run."""


class HardwareSection(Section):
    """The hardware that the recipe is written for; absent: what is found here."""

    num_nodes: Annotated[int, Field(ge=1, le=999_999)] = 1
    """Machines."""
    devices_per_node: Annotated[int, Field(ge=1, le=999_999)] = 1
    """Devices of a machine; with device `cpu`: processes."""
    device: str
    """A catalogue name such as `A100-80GB`, `NNGB` (e.g. `24GB`) for an unnamed device, or `cpu`."""


class SlurmJob(Section):
    """What a job asks of Slurm; the names are those of sbatch's options."""

    partition: str | None = None
    """Partition; absent: Slurm's default one."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    reservation: str | None = None
    """Reservation."""
    time: str | Annotated[int, Field(ge=1)] | None = None
    """Limit of the job: minutes, or hours:minutes:seconds, or days-hours:minutes:seconds; absent: the
    partition's."""
    constraint: str | None = None
    """Features that the nodes must have."""
    cpus_per_task: Annotated[int, Field(ge=1)] | None = None
    """CPUs of a node for this job, which runs one task a node."""
    mem: str | Literal[0] | None = None
    """Memory of a node, such as 64G; 0: all of it."""
    nodelist: str | None = None
    """Nodes that must be among the job's."""
    exclude: str | None = None
    """Nodes that must not be among them."""
    options: dict[str, str | int | bool] = {}
    """Further options of sbatch, e.g. {mail-type: END}; true stands for an option without a value."""


class SlurmSection(SlurmJob):
    """The job that `effilaunch submit` makes of a recipe. Nodes and devices are those of `hardware`."""

    gpus_per_node: str | Annotated[int, Field(ge=1)] | None = None
    """Devices of a node as this Slurm names them, e.g. a100:8; absent: their number."""
    gres: str | None = None
    """The same by generic resource, e.g. gpu:a100:8, where a cluster has no gpus_per_node."""
    setup: list[str] = []
    """Lines of shell at the job's beginning, e.g. module load cuda/12.4."""
    prepare: Literal[False] | SlurmJob = SlurmJob()
    """The CPU job before it that prepares the data: what it asks for instead of partition, account, qos,
    reservation and time of this one; false: none, the job prepares its data itself."""
    array_limit: Annotated[int, Field(ge=1)] | None = None
    """How many jobs of a sweep run at the same time; absent: as many as Slurm lets."""


class LaunchSection(Section):
    """Who starts the processes, and with which environment."""

    launcher: Literal["auto", "deepspeed", "accelerate", "python"] = "auto"
    """Who starts the processes; `auto`: `python` for one process; else `deepspeed` for engine deepspeed,
    `accelerate` for fsdp and ddp, and where a stop may take longer than the 30 s after which the deepspeed
    launcher kills."""
    env: dict[str, str] = {}
    """Environment variables of the workers; secrets only as `${ENV:NAME}`; refused are those that the run
    sets or has decided: ranks, `MASTER_*`, `CUDA_VISIBLE_DEVICES` (set it in the shell), `ACCELERATE_USE_*`
    and its like, `FSDP_*`, `EFFILAUNCH_*`."""
    hostfile: str | None = None
    """A file with a machine a line, `HOST slots=N`, this one among them: the run starts on the others over
    ssh. Without `hardware` and --on the file also says how many machines there are, and devices in each."""
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often in a row a run that failed is started again from its last whole checkpoint, with pauses of
    10 s to 5 minutes between. A new checkpoint since the last start counts as progress, and restarts are
    counted anew. What would fail again the same way (the recipe, memory, a full disk) is not restarted.
    0: never."""
    hang_factor: Annotated[float, Field(ge=0, le=1_000_000)] = 20.0
    """A run whose step takes this many times its median, and at least 5 minutes, hangs: it is ended with the
    rank that is behind, and restarted where max_restarts allows it. 0: never."""
    slurm: SlurmSection = SlurmSection()
    """What `effilaunch submit` asks Slurm for."""


class FixesSection(Section):
    """Known fixes."""

    disable: list[str] = []
    """Ids of known fixes that shall not be applied; `effilaunch fixes` lists them."""


class Recipe(Section):
    """One fine-tune."""

    task: Task = DEFAULT_TASK
    """What is trained: a causal language model (also from scratch, with `model.config`), a
    sequence-to-sequence model, a classifier of texts or of pictures, or preferences (`dpo`, with trl)."""
    model: ModelSection
    """The base model."""
    adapter: AdapterSection | None = None
    """A LoRA adapter; absent: all parameters are trained."""
    data: DataSection
    """Training and evaluation rows."""
    precision: Precision = "auto"
    """What is computed in; `bf16` and `fp16`: mixed; `bf16-true` and `fp16-true`: weights and optimizer
    states in 16 bit; `auto`: bf16 where the device has it, else fp16, on a CPU fp32."""
    sharding: ShardingSection = ShardingSection()
    """How weights, gradients and optimizer states are spread over the processes."""
    global_batch_size: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Samples of one optimizer step: micro-batch x accumulation x data-parallel ranks; excludes
    `trainer.gradient_accumulation_steps`."""
    trainer: dict[str, Any] = {}
    """Fields of `TrainingArguments`, checked by name and type against the installed transformers; with task
    `seq2seq-lm` also those of `Seq2SeqTrainingArguments`, with task `dpo` also those of trl's
    `DPOConfig`."""
    early_stopping: EarlyStopping | None = None
    """The end of a run whose evaluation no longer improves."""
    python: str | None = None
    """A file with functions of yours: `format_row(row)`, `compute_metrics(prediction)`, `callbacks()`."""
    hardware: HardwareSection | None = None
    """The hardware that the recipe is written for; absent: what is found here; `--on` replaces it."""
    launch: LaunchSection = LaunchSection()
    """Who starts the processes."""
    on_oom: Literal["fail", "adapt"] = "fail"
    """What a run does that runs out of memory; `adapt`: it goes on with less: a smaller micro-batch with
    more accumulation, then activation checkpointing, then ZeRO and offload."""
    fixes: FixesSection = FixesSection()
    """Known fixes."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Seed of data order, splits, adapter initialisation and dropout; owns `trainer.seed`."""
