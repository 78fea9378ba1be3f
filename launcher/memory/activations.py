"""Which layers a job runs, what they keep for the backward pass, and what evaluating takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from launcher.memory.across_layers import own_inputs
from launcher.memory.job import MemoryJob
from launcher.memory.operations import Block, Dtypes, Stack
from launcher.models.architectures import Layout
from launcher.models.lora import lora_width
from launcher.models.model import ModelSpec

EMBEDDING_DROPOUT = ("bert", "gpt2", "gpt_bigcode", "gpt_neox", "mt5", "t5", "vit")
"""Families that drop out a part of what the first layer reads."""

LIGER_FAMILIES = (
    "gemma", "gemma2", "gemma3_text", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
"""Families whose norms, positions, gates and loss liger-kernel 0.8 replaces; others run as they are."""
LIGER_EXPERTS = ("mixtral", "qwen3_moe")
"""Those of them whose experts it replaces, too."""


def make_block(spec: ModelSpec, d: Dtypes, layout: Layout, rows: int, length: int, attention: str) -> Block:
    return Block(
        spec.model_type,
        spec.hidden_size,
        spec.num_heads,
        layout.kv_heads or spec.num_kv_heads,
        layout.head_dim or spec.head_dim,
        layout,
        d,
        attention,
        rows,
        length,
    )


def lora_rank(spec: ModelSpec, job: MemoryJob) -> int:
    """Mean rank over the adapted products that gives this number of trainable parameters."""
    if not job.adapter:
        return 0
    if job.adapter_rank:
        return job.adapter_rank
    widths = lora_width(spec, job.adapted)
    adapter = job.trainable_params - (spec.head.own_params if spec.head.saved else 0)
    return max(1, adapter // max(widths, 1))


def make_stacks(spec: ModelSpec, job: MemoryJob, d: Dtypes) -> list[Stack]:
    """The stacks of a model in the order of the forward pass."""
    rows, length = job.rows
    rank = lora_rank(spec, job)
    # Checkpointing asks the embedding's output for a gradient, or the recomputed layers would have none.
    embedding = {*(job.adapted or ()), *job.whole} & set(spec.layout.embed_paths)
    asks = not job.adapter or job.checkpointing or bool(embedding)
    # Below the first adapter no gradient flows: an adapter of the head alone leaves all layers without.
    trained = {*(job.adapted or ()), *job.whole}
    reached, stacks = asks, []
    width = spec.layout.layer_table[1]
    inputs_grad = False
    masked = job.document_mask or job.padded

    def block_of(layout: Layout) -> Block:
        return replace(
            make_block(spec, d, layout, rows, length, job.attention),
            masked=masked or 0 < layout.window <= length,
            padded=job.padded,
            rank=rank,
            adapted=job.adapted,
            whole=job.whole,
            adapter_dropout=job.adapter_dropout > 0,
            quantization=job.quantization,
            liger=job.liger and spec.model_type in LIGER_FAMILIES,
            chunked=job.chunked,
            one_by_one=job.one_by_one,
            grouped=job.grouped,
            cast_inputs=job.cast_inputs,
            inputs_width=width,
            inputs_grad=inputs_grad,
        )

    if width:
        _, made = own_inputs(replace(block_of(spec.layout), grad=asks))
        inputs_grad = made.node is not None

    for part in (spec.layout, spec.layout.decoder):
        unmasked = 0 if masked else length
        kinds = [one for kind in (part.kinds if part else ()) for one in _by_window(kind, unmasked)]
        blocks = [block_of(kind) for kind in kinds]
        flows = asks
        for number, layers in _runs(kinds):
            block, still = blocks[number], replace(blocks[number], grad=False)
            first = block if flows else still
            reached = reached or job.adapted is None or any(x.path in trained for x in kinds[number].linears)
            stacks.append(Stack(block if reached else first, layers, first, part is not spec.layout))
            flows = reached
    return stacks


def _by_window(kind: Layout, unmasked: int) -> tuple[Layout, ...]:
    """Layers of one kind, those apart whose window has a mask of its own.

    `unmasked`: tokens of a row that needs none for other reasons: one shorter than the window has no mask
    (`_ignore_causal_mask_sdpa` of transformers 5.23). 0: all layers have masks.
    """
    if kind.windowed is None:
        return (kind,)
    inside = set(kind.windowed) & set(kind.indices)
    outside = set(kind.indices) - inside
    if kind.window > unmasked > 0 or not inside:
        return (replace(kind, window=0, windowed=None),)
    if not outside:
        return (replace(kind, windowed=None),)
    return tuple(
        replace(
            kind,
            window=window,
            windowed=None,
            linears=tuple(
                replace(one, count=len(indices), indices=tuple(sorted(indices))) if "{}" in one.path else one
                for one in kind.linears
            ),
        )
        for window, indices in ((kind.window, inside), (0, outside))
    )


def _runs(kinds: Sequence[Layout]) -> Iterator[tuple[int, int]]:
    """(kind, layers) of each stretch of equal layers."""
    order = sorted((index, number) for number, kind in enumerate(kinds) for index in kind.indices)
    for number, run in itertools.groupby(order, key=lambda one: one[1]):
        yield number, len(list(run))


def shared_bytes(stacks: Sequence[Stack]) -> int:
    """What all layers keep once; runs of one decoder share it, but for the positions of Gemma 4's kinds."""
    kinds: dict[tuple[bool, int], int] = {}
    for stack in stacks:
        kind = stack.decodes, stack.block.layout.window if stack.block.layout.head_dim else 0
        kinds[kind] = max(kinds.get(kind, 0), _shared(stack))
    first = stacks[0].first
    embedded = first.tokens * first.hidden * first.dtypes.residual
    return sum(kinds.values()) + (embedded if first.layout.embedding_norm and first.grad else 0)


def _shared(stack: Stack) -> int:
    """What all layers of a stack keep once: positions, learned distances, dropout of the embeddings."""
    block, d = stack.block, stack.block.dtypes
    layout, length = block.layout, block.length
    shared = 0
    if not layout.positions and not layout.position_bias:
        factors = 2 * length * int(block.head_dim * layout.rotary_share) * d.residual
        if layout.rotary_kind == "complex":
            factors = 4 * length * block.head_dim
        shared += factors // 2 if layout.rotary_kind == "halves" else factors
    if layout.position_bias:
        # Biases and the numbers of their distances, the same for all samples and layers.
        shared += length**2 * (4 * block.heads + 8)
    if layout.scaled_stream and stack.first.grad and not block.full:
        # The frozen embedding's output is made to ask for a gradient, and is kept for it beside its multiple.
        shared += block.tokens * block.hidden * d.residual
    if layout.dropout and stack.first.grad and block.model_type in EMBEDDING_DROPOUT:
        shared += block.tokens * block.hidden * (d.residual if d.on_cpu else 1)
    return shared


def mask_bytes(stacks: Sequence[Stack], *, documents: bool) -> int:
    """The masks of positions that all layers read, until the forward pass ends or checkpoints have run.

    `documents`: one mask of documents is counted among the buffers already.
    """
    block = stacks[-1].block
    maps = block.rows * block.length**2
    if block.attention == "eager":
        if not block.layout.causal:
            masked = {stack.block.layout.window for stack in stacks if stack.block.masked}
            return len(masked) * maps * block.dtypes.residual
        return 0 if documents else max(_eager_masks(stack.block, maps) for stack in stacks)
    if block.attention != "sdpa":
        return 0
    part = [stack.block for stack in stacks if stack.decodes == stacks[-1].decodes]
    kinds = {one.layout.window for one in part if one.masked}
    # Collators give full rows a mask of padding, too, so that a window's has a map for each of them.
    return maps * max(0, len(kinds) - int(documents))


def _eager_masks(block: Block, maps: int) -> int:
    return block.layout.masks * maps * block.dtypes.residual if block.layout.causal else 0
