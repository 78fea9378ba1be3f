"""What of a plan decides its memory, and what is answered about one moment. Pure types."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.memory.engine import EngineMemory
    from launcher.memory.rollouts import Rollout

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one value."""


@dataclass(frozen=True, slots=True)
class MemoryJob:
    """What of a plan decides its memory; lengths in tokens, buckets in elements."""

    micro_batch: int
    sequence_length: int
    data_parallel: int
    devices_per_node: int
    precision: str
    """fp32 | bf16 | fp16 | bf16-true | fp16-true"""
    dtype: str
    """Dtype of the loaded weights."""
    quantization: str
    """none | int8 | nf4 | fp4"""
    double_quant: bool
    trainable_params: int
    adapter: bool
    engine: EngineMemory
    zero_stage: int
    offload_optimizer: str
    """none | cpu | nvme"""
    offload_param: str
    """none | cpu | nvme"""
    optim: str
    checkpointing: bool
    attention: str
    """eager | sdpa | flash_attention_2 | flex_attention | varlen"""
    reduce_bucket_size: int
    allgather_bucket_size: int
    overlap_comm: bool
    eval_batch: int
    """Samples of an evaluation batch on one device; 0: the job does not evaluate."""
    accumulation: int | None = None
    """Micro-batches per step; at 1 no gradient outlives a step. None: gradients are assumed to."""
    adapter_dropout: float = 0.0
    sequences_per_sample: int = 1
    """Sequences of `sequence_length` that one sample of a micro-batch brings: 2 for preference pairs."""
    passes: int = 1
    """Forward passes over which the sequences of a sample are spread; the activations of all are kept."""
    mini_batch: int = 0
    """Sequences whose activations are held at a time (GradCache); 0: those of the whole micro-batch."""
    gathered: int = 1
    """Ranks whose samples each sample is compared with."""
    matryoshka: int = 0
    """Widths of an embedding that MatryoshkaLoss trains; 0: there is no such loss."""
    reference_model: bool = False
    """A frozen second copy of the weights is held on the device."""
    loaded_copies: int = 1
    """Copies of the weights in host memory before they move to the devices."""
    extra_forwards: int = 0
    """Forward passes without gradients of each micro-batch, besides the one of training."""
    document_mask: bool = False
    """Rows hold several documents, which a mask keeps apart (FlashAttention does without)."""
    spread: int = 1
    """Devices over which one process spreads its layers (device_map)."""
    one_row: bool = False
    """The sequences of a micro-batch are laid end to end in one row."""
    liger: bool = False
    """Liger's kernels: no logits of the complete vocabulary, leaner norms and feed-forward blocks."""
    chunked: bool = False
    """The loss takes the logits of some hundred tokens at a time (model.loss)."""
    one_by_one: bool = False
    """Attention varlen calls torch's kernel for each document, where none takes all of them."""
    grouped: bool = True
    """CUDA's 16-bit kernel of this attention takes keys of groups of heads."""
    cast_inputs: bool = True
    """Adapters copy their input into their own dtype (adapter.cast_input_dtype_enabled)."""
    padded: bool = False
    """A batch carries a mask of its padding."""
    kbit_norms: str = "float32"
    """Dtype of what a quantised base has beside its quantised matrices."""
    tensor_parallel: int = 1
    """Devices that share one copy's matrices; `data_parallel` counts copies."""
    sequence_parallel: int = 1
    """Devices that share each sample's tokens (Ulysses, context parallelism); see `tensor_parallel`."""
    adapted: tuple[str, ...] | None = None
    """Paths of the modules that have an adapter (`ModelSpec.adapted_paths`); None: all linears."""
    adapter_rank: int = 0
    """Mean rank over these modules; 0: the one that gives `trainable_params`."""
    uneven: bool = False
    """Layers have different adapters: in closed form all count as if they had the mean of them."""
    whole: tuple[str, ...] = ()
    """Paths of modules that are trained completely beside an adapter."""
    extra_frozen: int = 0
    """Bytes of embedding copies that adapters over added tokens hold; ZeRO-3 trains them (`whole_copies`)."""
    reduces_each: bool = False
    """FSDP2: gradients become shards after every micro-batch, not after the last one of a step."""
    each_loads: bool = False
    """FSDP2: every rank reads all weights, not one rank for all."""
    optim_args: str = ""
    """trainer.optim_args, which gives SGD and RMSprop a momentum."""
    optimizer_buffers: int = 4
    """Offload to NVMe: page-locked buffers of a sub-group of the optimizer's each."""
    param_buffers: int = 5
    """Offload to NVMe: page-locked buffers of a parameter each."""
    param_buffer_values: int = 100_000_000
    """Values of one of those; DeepSpeed's default."""
    params_in_host: int = 1_000_000_000
    """Offload to NVMe: values of a rank's parameters that stay in host memory all the same (max_in_cpu)."""

    maps_weights: bool = False
    """Weights are read through memory maps, and stay in the file's pages until they move to the device."""
    rounds_pinned: bool = False
    """Page-locked buffers are rounded up to powers of two."""
    expandable: bool = True
    """The allocator's segments grow (PYTORCH_ALLOC_CONF), so that little between blocks is lost."""

    pixels: tuple[int, ...] = ()
    """Pixel values of the prepared samples with the most, descending; (): the rows are not prepared."""
    pixels_of_image: int = 0
    """Of the largest image, where `pixels` are known."""

    rollout: Rollout | None = None
    """How the model writes its own samples; None: it does not."""

    def to_json(self) -> dict[str, Any]:
        """Its fields, with the engine's name."""
        return {**asdict(self), "engine": self.engine.name}

    @property
    def sequences(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.sequences_per_sample

    @property
    def forwards(self) -> int:
        """Forward passes of a micro-batch that are followed by a backward pass."""
        if not self.mini_batch:
            return self.passes
        return self.passes * -(-self.sequences // self.passes // self.mini_batch)

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of a forward pass, and tokens of each."""
        sequences = self.sequences // self.passes
        if self.mini_batch:
            sequences = min(self.mini_batch, sequences)
        if self.one_row:
            return 1, sequences * self.sequence_length
        return sequences, self.sequence_length


@dataclass(frozen=True, slots=True)
class Components:
    """Bytes on one device at the moment that rules."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    temporary: int = 0
    context: int = 0
    nccl: int = 0
    """Buffers of NCCL's communicators."""

    @property
    def outside(self) -> int:
        """Not in tensors: what no estimate of them scales."""
        return self.context + self.nccl

    @property
    def total(self) -> int:
        resident = self.weights + self.gradients + self.optimizer + self.buffers + self.outside
        return resident + self.activations + self.logits + self.temporary
