"""Which layers a job runs, what they keep for the backward pass, and what evaluating takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from launcher.memory.job import MemoryJob
from launcher.models.families import type_of
from launcher.models.layers.layout import Block, Dtypes, Layout, Stack
from launcher.models.lora import lora_width
from launcher.models.model import ModelSpec


def make_block(spec: ModelSpec, d: Dtypes, layout: Layout, rows: int, length: int, attention: str) -> Block:
    heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    return layout.fit(Block(spec.hidden_size, heads, kv_heads, head_dim, layout, d, attention, rows, length))


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
            liger=job.liger and type_of(spec.model_type).liger,
            chunked=job.chunked,
            one_by_one=job.one_by_one,
            grouped=job.grouped,
            cast_inputs=job.cast_inputs,
            inputs_grad=inputs_grad,
        )

    if made := spec.layout.own_inputs(replace(block_of(spec.layout), grad=asks)):
        inputs_grad = made[1].node is not None

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


def offloaded_inputs(spec: ModelSpec, job: MemoryJob) -> list[int]:
    """Bytes of each layer's input that checkpoints of one forward pass keep in the host memory of a GPU."""
    if not job.checkpointing or job.offload_activations == "none":
        return []
    stacks = make_stacks(spec, job, job.engine.dtypes(job, on_cpu=False))
    return [stack.input_bytes for stack in stacks for _ in range(stack.layers)]


def shared_bytes(stacks: Sequence[Stack]) -> int:
    """What all layers keep once; runs of one decoder share it."""
    kinds: dict[tuple[bool, int], int] = {}
    for stack in stacks:
        layout = stack.block.layout
        kind, shared = (stack.decodes, layout.shared_by), layout.shared(stack.block, stack.first.grad)
        kinds[kind] = max(kinds.get(kind, 0), shared)
    first = stacks[0].first
    return sum(kinds.values()) + first.layout.embedded(first)


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
