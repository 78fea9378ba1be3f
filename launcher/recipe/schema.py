"""The recipe as pydantic models. Upstream settings keep their upstream names; unknown keys are errors."""

# Without `from __future__ import annotations`: pydantic would compile each annotation from its source.
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from launcher.recipe.field_tables import TASK_FORMATS
from launcher.recipe.keys import (
    NO_TOKENS,
    DataKeys,
    Key,
    LaunchKeys,
    ModelKeys,
    RunKeys,
    RuntimeKeys,
    ShardingKeys,
    has_problem_types,
    has_tokens,
    joins_rows,
    keys_of,
)
from launcher.tasks import DEFAULT_TASK, FORMATS
from launcher.tasks.embedding import LOSSES as EMBEDDING_LOSSES
from launcher.tasks.embedding import MOST_NEGATIVES
from launcher.tasks.reranker import LOSSES as RERANKER_LOSSES
from launcher.tasks.task import Task as AnyTask

Precision = Literal["auto", "fp32", "bf16", "fp16", "bf16-true", "fp16-true"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Kernel = Literal["eager", "sdpa", "flash_attention_2", "flex_attention", "varlen"]
Stage = Literal["auto"] | Annotated[int, Field(ge=0, le=3)]
Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Share = Annotated[float, Field(ge=0, le=1)]
if TYPE_CHECKING:
    Task = str
    Format = str
    EmbeddingLoss = str
    RerankerLoss = str
else:  # computed, which a type checker cannot follow
    Task = Literal[tuple(TASK_FORMATS)]
    Format = Literal["auto", *FORMATS]
    EmbeddingLoss = Literal[tuple(EMBEDDING_LOSSES)]
    RerankerLoss = Literal[tuple(RERANKER_LOSSES)]


OF_IMAGES = Key(read_by=lambda task: task.sees_images, unread="it reads no images")


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys, no silent coercion of strings to numbers.

    A section that a recipe leaves out is made by `model_construct`: to validate its defaults, each section
    would need a validator of its own beside the recipe's, and building those takes longer than a plan.
    """

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
    """4-bit only: quantise the quantisation constants too (saves about 0.4 bit per parameter)."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """4-bit only: dtype of the matrix products; absent: from `precision` and the device."""


class ModelSection(Section, ModelKeys):
    """The base model."""

    config: dict[str, Any] | str | None = None
    """A configuration, or the name of a model whose configuration is shipped, in place of pretrained weights:
    the weights are initialised at random, to train from scratch."""
    quantization: Literal["none", "auto", "int8", "nf4", "fp4"] | Quantization = "none"
    """Storage of the frozen base weights: `none`, `int8`, `nf4`, `fp4`, or a mapping with the keys of the
    section below; `auto`: with an adapter, the fastest of `none`, `int8` and `nf4` that fits. A
    checkpoint that bitsandbytes stored quantised needs what it is stored as."""
    kbit_norms: Literal["auto", "float32", "bfloat16"] | None = None
    """With `quantization`: dtype of what stays unquantised and frozen (norms, embedding, head, biases);
    absent: `float32`, as peft's `prepare_model_for_kbit_training` leaves them; `bfloat16`: back to 16 bits,
    and the activations between the layers with them: less memory, slightly less exact (needs `precision`
    `bf16` or `bf16-true`); `auto`: the fastest of both that fits. What is trained whole stays float32."""
    dtype: DtypeName | None = None
    """Dtype of the weights in memory; absent: from `precision`; `auto`: as in the checkpoint."""
    attn_implementation: Kernel | None = None
    """Attention kernel; absent: `varlen` where the plan turns on `data.padding_free`, else `sdpa`.
    `flex_attention` needs a GPU; `varlen` uses torch's own variable-length kernels, without a mask."""
    loss: Literal["full", "chunked"] | None = None
    """How the loss is computed; `chunked`: logits for some hundred target tokens at a time, so that the full
    logits are never materialised; absent: `chunked` for task `causal-lm` where the model type was shown to
    have the same loss with it, nothing else replaces the loss, and it needs less memory."""
    compile_blocks: bool | None = None
    """Compile each layer (`torch.compile`); absent: where the model type was shown to compute the same and
    the run is predicted to take an hour or more (needs `trainer.max_steps`), on GPUs of compute capability
    8.0 or later, without quantisation and with unsharded weights (DDP, ZeRO up to 2)."""
    vocab_multiple: Annotated[
        Annotated[int, Field(ge=2, le=4096)] | None, Key(read_by=has_tokens, unread=NO_TOKENS)
    ] = None
    """Pad the vocabulary to a multiple of this, for tensor cores. The added entries take part in the softmax
    and change the model, so no plan sets it automatically."""
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, Any] | None = None
    """Distribute the layers over several devices (naive model parallelism); one process only."""
    freeze: Annotated[list[Literal["vision", "projector"]] | None, OF_IMAGES] = None
    """Task `image-text-to-text`: the parts that are not trained, and that no adapter is put on: the vision
    tower, and the projector between it and the language model; absent: both, `[]`: none."""
    image_sizes: Annotated[dict[str, Any], OF_IMAGES] = {}
    """Task `image-text-to-text`: how large images become, as fields of the model's image processor:
    `max_pixels` and `min_pixels` for Qwen-VL, `size`, `do_image_splitting` for SmolVLM. They decide the
    number of an image's tokens, and are saved with the result."""

    def asked_quantization(self) -> Quantization | None:
        """The mapping of a short form; None for `none`, and for `auto`, which the planner fills in."""
        if isinstance(self.quantization, Quantization):
            return self.quantization
        if self.quantization == "none" or self.quantization == "auto":
            return None
        return Quantization(type=self.quantization)


class AdapterSection(BaseModel):
    """A LoRA adapter, for any task. Further keys are LoraConfig fields of the installed peft."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, defer_build=True)

    type: Literal["lora"] = "lora"
    """The adapter method."""
    path: str | None = None
    """Folder of an adapter to continue. It has its own settings: fields of `LoraConfig` are not allowed
    together with it."""
    cast_input_dtype_enabled: bool | None = None
    """Whether each layer casts its input to the adapter's dtype; absent: false where autocast would cast it
    back (`bf16`, `fp16`, without `lora_dropout`): the same results with less memory."""
    autocast_adapter_dtype: bool = True
    """Keep the adapter in float32 on a 16-bit model, peft's default; `false` trains it in 16 bits: less
    memory, different results. Estimates count float32."""


class DataSource(Section):
    """One source of rows."""

    path: str
    """File, glob, folder, hub dataset (organisation/name) or `package:NAME/inner/path`; files are
    .jsonl .json .csv .tsv .parquet .arrow .txt .conll, each also as .gz."""
    format: Format = "auto"
    """Row format; `auto`: detected from the column names."""
    columns: dict[str, str | None] = {}
    """Rename columns: field of the format to column of the file, e.g. `{completion: canonical_solution}`;
    `null` drops a column of the file, e.g. `{history: null}`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often an epoch contains the rows of this source: 2.5 is all of them twice, and half of them once
    more. With data.streaming: sampling weight relative to the other sources. For training rows only."""
    split: str = "train"
    """Split of a hub dataset, or of a folder or glob whose files' names tell splits (`train-1.jsonl`,
    `test/a.csv`); `all`: every file."""
    name: str | None = None
    """Configuration of a hub dataset that has several."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""
    quoting: Literal["minimal", "none"] = "minimal"
    """Quotes in CSV and TSV files: `minimal`: around cells that need them; `none`: they are text."""
    header: bool | None = None
    """Whether the first line of CSV and TSV files names the columns; `false`: they are called `column_1`,
    `column_2`, …; absent: it does, and one that looks like a row is refused."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What a row of a .txt file is: a line, the lines between blank lines, or the whole file."""

    @model_serializer(mode="wrap")
    def _as_before(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the defaults of keys that plans of 0.2.0 do not have, so that these are resumed."""
        found: dict[str, Any] = dump(self)
        added = {"quoting": "minimal", "header": None, "sample_by": "line"}
        return {name: value for name, value in found.items() if name not in added or value != added[name]}


class EvalSplit(Section):
    """An evaluation set split from the training rows."""

    split: Annotated[float, Field(gt=0, lt=1)]
    """Share of the training rows, chosen with `seed`, that are used for evaluation instead."""


class FimSection(Section):
    """Fill-in-the-middle, for code models whose tokenizer has the tokens for it: a text is split in three,
    and the middle is moved after prefix and suffix."""

    rate: Share
    """Share of the texts that are rearranged."""
    spm_rate: Share = 0.5
    """Share of the rearranged texts in suffix-prefix-middle order; the others are prefix-suffix-middle."""


class DataSection(Section, DataKeys):
    """Training and evaluation rows."""

    train: Annotated[list[DataSource], Field(json_schema_extra={"minItems": 1})]
    """Sources of training rows, concatenated; keys in the section below."""
    eval: EvalSplit | list[DataSource] | None = None
    """A list of sources as in `data.train`, or a share of its rows: `{split: 0.02}`."""
    problem_type: Annotated[
        Literal["single_label_classification", "regression", "multi_label_classification"] | None,
        Key(read_by=has_problem_types, unread="its labels can be read in one way only"),
    ] = None
    """What a label of task `sequence-classification` is: one class, one or more numbers, or a list of labels;
    absent: one class."""
    padding_free: Annotated[bool | None, Key(read_by=joins_rows, unread="its samples are padded")] = None
    """Concatenate the samples of a batch instead of padding them: the same samples, without computation on
    padding; absent: for task `causal-lm` where model and kernel keep samples apart."""
    pad_to_multiple_of: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Pad each row of a batch to a multiple of this many tokens, 1: none; absent: 64 on GPUs of compute
    capability 8.0 or later, 8 on others, none on a CPU."""
    fim: Annotated[
        FimSection | None, Key(read_by=joins_rows, unread="only a causal language model learns to fill in")
    ] = None
    """Fill-in-the-middle of text rows."""


class RewardFunction(Section):
    """Task `grpo`: a function that scores completions; the reward is the weighted sum of all."""

    function: Annotated[str, Field(min_length=1)]
    """`FILE.py:NAME`, a function `NAME(prompts, completions, **columns)` of a file that returns a number or
    None for each completion; or a shipped one: `exact_match` and `numeric_answer` (against the column
    `answer`), `regular_expression` (`pattern`), `format` (`tags`), `length` (`tokens`)."""
    weight: Annotated[float, Field(ge=-1_000_000, le=1_000_000)] = 1.0
    """Factor of its values."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of the function, e.g. `{column: solution}`."""
    time_limit: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Seconds that one call may take; a call that takes longer ends the run with the row."""


class GenerationSection(Section):
    """Task `grpo`: how completions are sampled, with the names of trl's `GRPOConfig`."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions of each prompt, which are compared with each other. `global_batch_size` counts completions
    and is a multiple of it."""
    max_completion_length: Annotated[int, Field(ge=1)] = 512
    """Tokens of a completion at most. `data.max_length` is the limit of prompt and completion together."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Only the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Only that many of the likeliest tokens; 0: all."""
    min_p: Share | None = None
    """Only tokens with this share of the likeliest one's probability."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Above 1: tokens of the text so far become less likely."""
    backend: Literal["transformers", "vllm-colocate", "vllm-server"] = "transformers"
    """What generates: `transformers`: the model itself; `vllm-colocate`: vLLM in the same processes;
    `vllm-server`: a server that is started separately. Further settings are fields of `trainer:`
    (`vllm_gpu_memory_utilization`, `vllm_server_host`, ...)."""


class Prompts(Section):
    """Texts that are put before the texts of rows; they are saved with the result."""

    query: str = ""
    """Before `anchor`, or before both texts of a scored pair."""
    document: str = ""
    """Before `positive` and the negatives."""


class EmbeddingSection(Section):
    """Task `embedding`: the loss and the modules after the model, with the names of sentence-transformers."""

    loss: EmbeddingLoss = next(iter(EMBEDDING_LOSSES))
    """`MultipleNegativesRankingLoss`: positive pairs, the other texts of a micro-batch are negatives;
    `CachedMultipleNegativesRankingLoss`: the same in the memory of `mini_batch_size` texts; `TripletLoss`:
    pairs with one negative; `CoSENTLoss`, `AnglELoss`, `CosineSimilarityLoss`: scored pairs."""
    negatives: Annotated[int, Field(ge=0, le=MOST_NEGATIVES)] | None = None
    """Hard negatives of each row, from the columns `negative`, `negative_1`, … or the list `negatives`;
    absent: none, with `TripletLoss` 1. A row with another number is refused."""
    scale: Annotated[float, Field(gt=0)] | None = None
    """What similarities are multiplied by (1 / temperature); absent: 20."""
    triplet_margin: Annotated[float, Field(gt=0)] | None = None
    """`TripletLoss`: how much farther the negative has to be; absent: 5."""
    mini_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Cached losses: texts whose activations are held at a time; it changes memory and speed, not what is
    learned; absent: 32."""
    gather_across_devices: bool = False
    """Whether the texts of the other ranks are negatives, too."""
    matryoshka_dims: list[Annotated[int, Field(ge=1)]] = []
    """First dimensions that are trained to be embeddings on their own (`MatryoshkaLoss`), such as
    [768, 256, 64]; the model's own width should be one of them."""
    pooling: Pooling | None = None
    """How token embeddings become one; absent: that of the checkpoint, else `mean`, for decoders
    `lasttoken`."""
    normalize: bool | None = None
    """Whether embeddings have length 1; absent: that of the checkpoint, else true."""
    prompts: Prompts | None = None
    """Texts before the texts of rows."""
    batch_sampler: Literal["batch_sampler", "no_duplicates"] | None = None
    """`no_duplicates`: no text twice in a micro-batch, where it would be its own negative; absent: that for
    losses with negatives of the batch, else `batch_sampler`."""


class RerankerSection(Section):
    """Task `reranker`: the loss, with the names of sentence-transformers."""

    loss: RerankerLoss = next(iter(RERANKER_LOSSES))
    """`BinaryCrossEntropyLoss`, `MSELoss`: a query, a document and its score; `LambdaLoss`, `ListNetLoss`,
    `RankNetLoss`: a query with a list of documents and labels, or with a positive and negatives."""
    documents: Annotated[int, Field(ge=2, le=1000)] | None = None
    """Losses over lists: the most documents of a row, for which memory is planned; absent: 8. A row with more
    is refused."""


class EarlyStopping(Section):
    """Stop when the evaluation no longer improves, and keep the best checkpoint."""

    patience: Annotated[int, Field(ge=1)]
    """Evaluations without improvement after which training stops."""
    threshold: Annotated[float, Field(ge=0)] = 0.0
    """Smallest improvement of `trainer.metric_for_best_model` (default: the evaluation loss) that counts."""


class ShardingSection(Section, ShardingKeys):
    """How weights, gradients and optimizer states are sharded over the processes."""

    engine: Literal["auto", "deepspeed", "fsdp", "ddp"] = "auto"
    """`deepspeed` (ZeRO), `fsdp` (FSDP2: bf16, fp32 or `-true`, no int8 base) or `ddp`;
    `auto`: ddp for one process without offload, else the fastest that fits; fsdp where nothing else does."""
    zero_stage: Stage = "auto"
    """ZeRO stage, engine `deepspeed` only; `auto`: from the fastest configuration that fits."""
    offload_optimizer: Literal["none", "auto", "cpu", "nvme"] = "none"
    """Where optimizer states are stored; `cpu` needs ZeRO and an AdamW optimizer, `nvme` also ZeRO-3; `auto`:
    `cpu` where that is faster than what fits without it, never `nvme`."""
    offload_param: Literal["none", "auto", "cpu", "nvme"] = "none"
    """Where parameters are stored between uses: `cpu` with ZeRO-3, and with engine `fsdp`, which moves
    gradients and optimizer states, too; `nvme` with ZeRO-3 only; `auto` as for optimizer states."""
    offload_activations: Literal["none", "auto", "cpu"] = "none"
    """Where the inputs of layers wait for the backward pass, which activation checkpointing keeps: `cpu`: in
    host memory, each fetched while the layer above it is computed; `auto` as for optimizer states."""
    config: str | None = None
    """A base DeepSpeed profile: a file, or the name of a shipped one such as `zero2`."""


class HardwareSection(Section):
    """The hardware to plan for; absent: the hardware of this machine."""

    num_nodes: Annotated[int, Field(ge=1, le=999_999)] = 1
    """Nodes."""
    devices_per_node: Annotated[int, Field(ge=1, le=999_999)] = 1
    """Devices per node; with device `cpu`: processes per node."""
    device: str
    """A catalogue name such as `A100-80GB`, `NNGB` (e.g. `24GB`) for an unnamed device, or `cpu`."""


class SlurmJob(Section):
    """Options of a Slurm job, with the names of sbatch's options."""

    partition: str | None = None
    """Partition; absent: Slurm's default."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    reservation: str | None = None
    """Reservation."""
    time: str | Annotated[int, Field(ge=1)] | None = None
    """Time limit: minutes, or hours:minutes:seconds, or days-hours:minutes:seconds; absent: the
    partition's."""
    constraint: str | None = None
    """Features that the nodes must have."""
    cpus_per_task: Annotated[int, Field(ge=1)] | None = None
    """CPUs per node; the job runs one task per node."""
    mem: str | Literal[0] | None = None
    """Memory per node, such as 64G; 0: all of it."""
    nodelist: str | None = None
    """Nodes that the job must include."""
    exclude: str | None = None
    """Nodes that the job must not include."""
    options: dict[str, str | int | bool] = {}
    """Further options of sbatch, e.g. {mail-type: END}; true: an option without a value."""


class SlurmSection(SlurmJob):
    """The job that `effilaunch submit` creates. `hardware` sets nodes and devices."""

    gpus_per_node: str | Annotated[int, Field(ge=1)] | None = None
    """Devices per node as this cluster names them, e.g. a100:8; absent: their number."""
    gres: str | None = None
    """Generic resources per node, e.g. gpu:a100:8, for clusters without gpus_per_node."""
    setup: list[str] = []
    """Shell lines at the beginning of the job, e.g. module load cuda/12.4."""
    prepare: Literal[False] | SlurmJob = SlurmJob.model_construct()
    """Options of the CPU job that prepares the data first, instead of partition, account, qos, reservation
    and time of this one; false: no such job, the training job prepares the data itself."""
    array_limit: Annotated[int, Field(ge=1)] | None = None
    """How many jobs of a sweep run at the same time; absent: Slurm's limit."""


class RemoteVolume(Section):
    """A volume of the cluster in the pods."""

    claim: str
    """Name of a PersistentVolumeClaim."""
    path: Annotated[str, Field(pattern="^/")]
    """Where the pods see it."""
    read_only: bool = False
    """Whether the pods may not write to it."""


class KubernetesSection(Section):
    """The objects that `effilaunch submit --to kubernetes` creates. `hardware` sets nodes and devices."""

    kind: Literal["trainjob", "job"] = "trainjob"
    """TrainJob of Kubeflow Trainer v2, or an Indexed Job, for clusters without Kubeflow."""
    image: str | None = None
    """Image of the containers; it contains effilaunch. Required."""
    runs: Annotated[str, Field(pattern="^/")] | None = None
    """Folder of the run directories and of the prepared data, on one of `volumes`. Required."""
    volumes: list[RemoteVolume] = []
    """Volumes with the data, the model, and `runs`. With several nodes all of them mount these."""
    secrets: list[str] = []
    """Names of Secrets whose keys are environment variables of the containers, e.g. HF_TOKEN."""
    image_pull_secrets: list[str] = []
    """Names of Secrets of the image's registry."""
    namespace: str | None = None
    """Namespace; absent: that of the context."""
    context: str | None = None
    """Context of the kubeconfig file; absent: the current one."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """CPUs per node; absent: on CPU nodes one per process, else none are requested."""
    memory: str | None = None
    """Memory per node, such as 64Gi."""
    shm: str | None = None
    """Size limit of /dev/shm, such as 16Gi; absent: that of the pod's memory."""
    device: str = "nvidia.com/gpu"
    """Resource name of a device."""
    node_selector: dict[str, str] = {}
    """Labels that the nodes must have."""
    tolerations: list[dict[str, str | int]] = []
    """Taints that the pods tolerate, as in a pod."""
    service_account: str | None = None
    """ServiceAccount of the pods."""
    priority_class: str | None = None
    """PriorityClass of the pods."""
    labels: dict[str, str] = {}
    """Labels of the job and its pods, e.g. kueue.x-k8s.io/queue-name."""
    setup: list[str] = []
    """Shell lines in the container, before the run."""
    prepare: bool = True
    """Whether the data is prepared first, in a pod without devices (kind job: in an init container)."""
    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often the job starts again after a failure, e.g. a lost node. Stops and evictions do not count;
    errors of the recipe, of the machine and of memory (exit statuses 2, 3 and 4) end it."""


class SkypilotSection(Section):
    """The managed job that `effilaunch submit --to skypilot` launches. `hardware` sets nodes and devices."""

    infra: str | None = None
    """Where: aws, gcp/us-central1, k8s/my-context; absent: wherever SkyPilot finds the cheapest."""
    accelerator: str | None = None
    """SkyPilot's name of the device, e.g. H100; absent: from the device of the plan."""
    spot: bool = True
    """Whether spot instances are used; SkyPilot starts a preempted job again elsewhere."""
    image: str | None = None
    """Image, e.g. docker:registry.example/effilaunch:1; absent: SkyPilot's, for `setup` to install into."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """Least number of CPUs per node."""
    memory: Annotated[int, Field(ge=1)] | None = None
    """Least memory per node in GB."""
    disk: Annotated[int, Field(ge=1)] | None = None
    """Size of the disk in GB."""
    mounts: dict[str, str] = {}
    """Path on the nodes -> bucket (s3://…, gs://…), which is mounted, or name of a volume."""
    runs: Annotated[str, Field(pattern="^/")] = "/tmp/effilaunch"
    """Folder of the run directory on the nodes; with several nodes it is on one of `mounts`."""
    secrets: list[str] = []
    """Names of environment variables of yours that the nodes get, e.g. HF_TOKEN; no value is written."""
    setup: list[str] = []
    """Shell lines that prepare a node, e.g. pip install effilaunch[train]."""
    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often the job starts again after a failure of its own. Preemptions and stops do not count."""


class RaySection(Section):
    """The job that `effilaunch submit --to ray` creates. `hardware` sets nodes and devices."""

    address: str | None = None
    """URL of the cluster's dashboard, e.g. http://head:8265; absent: RAY_ADDRESS, else the cluster on this
    machine."""
    cpus_per_node: Annotated[int, Field(ge=1)] | None = None
    """CPUs that the job reserves on each node; absent: one per process."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Further resources that it reserves on each node, e.g. {"accelerator_type:A100": 0.001}."""
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment of the job, e.g. {pip: [...], env_vars: {HF_HOME: /shared/hf}}. The job does
    not have the environment variables of your shell. Ray shows these values: no secrets."""
    python: str = "python"
    """The interpreter on the head node that has Ray and effilaunch."""
    wait_seconds: Annotated[int, Field(ge=0)] = 0
    """How long the job waits for nodes that the cluster does not have, e.g. until an autoscaler starts them.
    0: a cluster with too few nodes is an error."""
    prepare: bool = True
    """Whether the data is prepared first, on one CPU of the cluster, before devices are reserved."""


class LaunchSection(Section, LaunchKeys):
    """How the processes are started, and with which environment."""

    launcher: Literal["auto", "deepspeed", "accelerate", "python"] = "auto"
    """What starts the processes; `auto`: `python` for one process; else `deepspeed` for engine deepspeed,
    `accelerate` for fsdp and ddp, over several nodes, and where a shutdown may take longer than 30 s, after
    which the deepspeed launcher kills the processes. Over several nodes torchrun, which accelerate uses as
    well, is started itself."""
    env: dict[str, str] = {}
    """Environment variables of the workers; secrets only as `${ENV:NAME}`. Refused are those that the run
    sets: ranks, `MASTER_*`, `CUDA_VISIBLE_DEVICES` (set it in the shell), `ACCELERATE_USE_*` and similar,
    `FSDP_*`, `EFFILAUNCH_*`."""
    max_nodes: Annotated[int, Field(ge=1, le=999_999)] | None = None
    """With min_nodes: the number of nodes that the batch of the recipe is meant for; absent: that of the
    hardware. `submit --to slurm` asks for min_nodes to max_nodes nodes."""
    slurm: SlurmSection = SlurmSection.model_construct()
    """Slurm options of `effilaunch submit`."""
    kubernetes: KubernetesSection = KubernetesSection.model_construct()
    """Kubernetes options of `effilaunch submit --to kubernetes`."""
    ray: RaySection = RaySection.model_construct()
    """Ray options of `effilaunch submit --to ray`."""
    skypilot: SkypilotSection = SkypilotSection.model_construct()
    """SkyPilot options of `effilaunch submit --to skypilot`."""


class RuntimeSection(Section, RuntimeKeys):
    """What a run does besides training."""


class FixesSection(Section):
    """Known fixes."""

    disable: list[str] = []
    """Ids of known fixes not to apply; `effilaunch fixes` lists them."""


class Recipe(Section, RunKeys):
    """One fine-tune."""

    task: Task = DEFAULT_TASK
    """What is trained: a causal language model (also from scratch, with `model.config`), a
    sequence-to-sequence model, a classifier of texts, tokens or images, a model of images and text
    (`image-text-to-text`), preferences (`dpo`), answers labelled good or bad (`kto`), a reward model
    (`reward`), or a model whose answers functions score (`grpo`), these with trl; text embeddings
    (`embedding`) or a reranker (`reranker`), both with sentence-transformers; or the model and the datasets
    that hooks make (`own`)."""
    model: ModelSection
    """The base model; task `own` needs none."""
    adapter: AdapterSection | None = None
    """A LoRA adapter; absent: all parameters are trained."""
    data: DataSection
    """Training and evaluation rows; task `own` has those of `make_datasets`."""
    embedding: EmbeddingSection | None = None
    """Task `embedding`: its loss, pooling and prompts."""
    reranker: RerankerSection | None = None
    """Task `reranker`: its loss."""
    precision: Precision = "auto"
    """Precision of training; `bf16` and `fp16`: mixed; `bf16-true` and `fp16-true`: 16-bit weights and
    optimizer states; `auto`: bf16 where the device has it, else fp16, on a CPU fp32."""
    sharding: ShardingSection = ShardingSection.model_construct()
    """How weights, gradients and optimizer states are sharded over the processes."""
    global_batch_size: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Samples of one optimizer step: micro-batch x accumulation x data-parallel ranks; excludes
    `trainer.gradient_accumulation_steps`."""
    trainer: dict[str, Any] = {}
    """Fields of `TrainingArguments`, checked by name and type against the installed transformers; with task
    `seq2seq-lm` also those of `Seq2SeqTrainingArguments`, with tasks of trl also those of its arguments
    (`DPOConfig`, `GRPOConfig`)."""
    reward: list[RewardFunction] = []
    """Task `grpo`: the functions that score completions."""
    generation: GenerationSection | None = None
    """Task `grpo`: how completions are sampled; absent: its defaults."""
    early_stopping: EarlyStopping | None = None
    """Stop when the evaluation no longer improves."""
    python: str | None = None
    """A file with your hooks: `format_row(row)`, `compute_loss(…)`, `optimizer(…)`, `Trainer` and others."""
    hardware: HardwareSection | None = None
    """The hardware to plan for; absent: the hardware of this machine; `--on` overrides it."""
    launch: LaunchSection = LaunchSection.model_construct()
    """How the processes are started."""
    runtime: RuntimeSection = RuntimeSection.model_construct()
    """What a run does besides training."""
    fixes: FixesSection = FixesSection.model_construct()
    """Known fixes."""


def unread_keys(task: AnyTask) -> Iterator[tuple[str, Key]]:
    """(dotted name, its Key) of the keys that a task does not read."""
    for section, kind in {"model.": ModelSection, "data.": DataSection}.items():
        for base in kind.__mro__:
            yield from ((section + name, key) for name, key in keys_of(base) if not key.is_read_by(task))
