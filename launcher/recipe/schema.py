"""The recipe as types. Upstream things keep upstream's spelling; unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Precision = Literal["auto", "fp32", "bf16", "fp16", "bf16-true", "fp16-true"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Format = Literal["auto", "text", "instruction", "chat", "prompt-completion"]
Stage = Literal["auto"] | Annotated[int, Field(ge=0, le=3)]


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys, no silent coercion of text to numbers."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class Quantization(Section):
    """How the frozen base weights are stored, through bitsandbytes."""

    type: Literal["int8", "nf4", "fp4"]
    """Storage type: LLM.int8() or a 4-bit type of QLoRA."""
    double_quant: bool = True
    """4-bit only: quantise the quantisation constants too (saves about 0.4 bit a parameter)."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """4-bit only: dtype of the matrix products; absent: derived from precision and device."""


class ModelSection(Section):
    """The base model."""

    name_or_path: str | None = None
    """Hub id, folder, or package:NAME/inner/path of an installed Python package."""
    config: dict[str, Any] | str | None = None
    """Instead of weights: a configuration (or the name of a shipped model fact) to initialise at random."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    gguf_file: str | None = None
    """File name of a GGUF checkpoint inside name_or_path; it is dequantised once and cached."""
    tokenizer: str | None = None
    """Hub id, folder or package: path of the tokenizer; absent: the model's own."""
    quantization: Literal["none", "int8", "nf4", "fp4"] | Quantization = "none"
    """none | int8 | nf4 | fp4, or {type: nf4, double_quant: true, compute_dtype: bfloat16}."""
    dtype: DtypeName | None = None
    """Dtype of the weights in memory; absent: derived from precision; auto: the checkpoint's."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    """Attention kernel; absent: sdpa."""
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, Any] | None = None
    """Spreads one process's layers over its devices (naive model parallelism); one process only."""
    chat_template: str | None = None
    """Jinja template (file or text) for a tokenizer that has none."""
    cache_dir: str | None = None
    """Folder of the hub cache, as in from_pretrained."""
    trust_remote_code: bool = False
    """Run model code from the hub repository."""


class AdapterSection(BaseModel):
    """A LoRA adapter. Further keys are LoraConfig fields, checked against the installed peft."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, use_attribute_docstrings=True)

    type: Literal["lora"] = "lora"
    """The adapter method."""
    path: str | None = None
    """Folder of an adapter to continue; excludes every other field but type."""


class DataSource(Section):
    """One source of rows."""

    path: str
    """File, folder or package:NAME/inner/path; .jsonl .json .csv .parquet .txt, each also as .gz."""
    format: Format = "auto"
    """text | instruction | chat | prompt-completion; auto reads it from the column names."""
    columns: dict[str, str] = {}
    """Renames: field of the format -> column of the file, e.g. {completion: canonical_solution}."""


class EvalSplit(Section):
    """An evaluation set cut from the training rows."""

    split: Annotated[float, Field(gt=0, lt=1)]
    """Share of the training rows, chosen with `seed`."""


class DataSection(Section):
    """Training and evaluation rows."""

    train: Annotated[list[DataSource], Field(min_length=1)]
    """Sources of training rows, concatenated."""
    eval: EvalSplit | list[DataSource] | None = None
    """{split: 0.02}, or sources as in train."""
    max_length: Annotated[int, Field(ge=8)] = 2048
    """Longest sample in tokens; longer ones are truncated, and the number of them is reported."""
    loss_on: Literal["completion", "assistant", "all"] | None = None
    """Tokens that are learnt; absent: completion for prompt/completion and instruction rows,
    assistant for chat rows, all for text."""
    num_proc: Annotated[int, Field(ge=1)] | None = None
    """Processes that tokenise; absent: one per core, at most 8."""


class ShardingSection(Section):
    """How weights, gradients and optimizer states are spread over the processes."""

    engine: Literal["auto", "deepspeed", "ddp"] = "auto"
    """deepspeed (ZeRO) | ddp; auto: ddp for one process, else deepspeed."""
    zero_stage: Stage = "auto"
    """ZeRO stage, DeepSpeed only; auto: the lowest whose estimate fits."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """Where optimizer states live; cpu needs ZeRO and an AdamW optimizer."""
    offload_param: Literal["none", "cpu"] = "none"
    """Where parameters live between uses; ZeRO-3 only."""
    config: str | None = None
    """Base DeepSpeed profile (a file, or the name of a shipped one such as zero2)."""


class HardwareSection(Section):
    """The hardware that the recipe is written for; absent: what is found here."""

    num_nodes: Annotated[int, Field(ge=1)] = 1
    """Machines."""
    devices_per_node: Annotated[int, Field(ge=1)] = 1
    """Devices per machine; with device cpu: processes."""
    device: str
    """Catalogue name such as A100-80GB, NNGB for an unnamed one, or cpu."""


class LaunchSection(Section):
    """Who starts the processes, and with which environment."""

    launcher: Literal["auto", "deepspeed", "accelerate", "python"] = "auto"
    """auto: python for one process; else deepspeed for engine deepspeed, accelerate for ddp."""
    env: dict[str, str] = {}
    """Environment variables of the workers. Secrets only as ${ENV:NAME}."""


class FixesSection(Section):
    """Known fixes."""

    disable: list[str] = []
    """Ids of fixes that shall not be applied; `effilaunch fixes` lists them."""


class Recipe(Section):
    """One fine-tune."""

    task: Literal["causal-lm"] = "causal-lm"
    """What is trained."""
    model: ModelSection
    """The base model."""
    adapter: AdapterSection | None = None
    """A LoRA adapter; absent: all parameters are trained."""
    data: DataSection
    """Training and evaluation rows."""
    precision: Precision = "auto"
    """auto | fp32 | bf16 | fp16 (mixed) | bf16-true | fp16-true (weights and states in 16 bit)."""
    sharding: ShardingSection = ShardingSection()
    """How states are spread over processes."""
    global_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Samples per optimizer step: micro-batch x accumulation x data-parallel ranks."""
    trainer: dict[str, Any] = {}
    """TrainingArguments fields, checked by name and type against the installed transformers."""
    hardware: HardwareSection | None = None
    """The hardware that the recipe is written for."""
    launch: LaunchSection = LaunchSection()
    """Who starts the processes."""
    fixes: FixesSection = FixesSection()
    """Known fixes."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Seed of data order, adapter initialisation and dropout."""
