"""What one of the devices holds that share a model's matrices, or the tokens of a sample. Pure.

As transformers' plans (`base_model_tp_plan`), which DeepSpeed's AutoTP follows, split a layer: products that
read the stream between layers by columns, those that return to it by rows, attention by complete heads. The
stream itself is complete on each rank. How head and embedding are split is up to the engine (`_rank_head`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from launcher.errors import Problem, RecipeError
from launcher.machine.hardware import Hardware
from launcher.memory.job import EngineMemory, MemoryJob
from launcher.memory.states import model_shapes
from launcher.models.families import type_of
from launcher.models.layers.layout import Layout
from launcher.models.layers.linears import Linear
from launcher.models.model import Head, ModelSpec

_BACK_TO_THE_STREAM = ("attn", "attn_cross", "act")
"""What the products read that are split by rows: each rank has its part of the input."""


def check_ranks(spec: ModelSpec, ranks: int, hardware: Hardware) -> None:
    """RecipeError `bad-tensor-parallel` where `ranks` cannot share this model on these devices."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if ranks < 1:
        message, hint = f"{ranks} tensor-parallel ranks: expected at least 1", None
    elif ranks > heads:
        message = f"{ranks} tensor-parallel ranks are more than the {heads} attention heads of {spec.name}"
        hint = f"each rank needs a whole head: at most {heads}"
    elif heads % ranks:
        message = f"the {heads} attention heads of {spec.name} do not divide among {ranks} ranks"
        hint = f"use {_divisors(heads)}"
    elif kv_heads % ranks:
        message = f"the {kv_heads} key-value heads of {spec.name} do not divide among {ranks} ranks"
        hint = f"use {_divisors(kv_heads)}"
    elif hardware.num_devices % ranks:
        message = f"{hardware.num_devices} devices of {hardware.label} do not divide into groups of {ranks}"
        hint = f"use {_divisors(hardware.num_devices)}"
    elif hardware.devices_per_node % ranks and ranks % hardware.devices_per_node:
        message = f"groups of {ranks} do not fit nodes of {hardware.devices_per_node} devices"
        hint = f"use {_divisors(hardware.devices_per_node)}"
    else:
        return
    raise RecipeError(Problem("bad-tensor-parallel", message, path="--tensor-parallel", hint=hint))


def divisors(number: int) -> list[int]:
    """All divisors of a number of at least 1 in ascending order."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return [*low, *(number // d for d in reversed(low) if d * d != number)]


def _divisors(number: int) -> str:
    return ", ".join(map(str, divisors(number)))


def rank_spec(spec: ModelSpec, ranks: int, engine: EngineMemory) -> ModelSpec:
    """The model as one of `ranks` tensor-parallel ranks of `engine` holds it."""
    layout = _rank_layout(spec, spec.layout, ranks)
    head, cut_embedding = _rank_head(spec, ranks, engine)
    part = replace(
        spec,
        num_heads=spec.num_heads // ranks,
        num_kv_heads=max(1, spec.num_kv_heads // ranks),
        intermediate_size=-(-spec.intermediate_size // ranks),
        vocab_size=-(-spec.vocab_size // ranks) if cut_embedding else spec.vocab_size,
        layout=layout,
        head=head,
        linears=tuple(linear for stack in layout.stacks for linear in stack.linears),
    )
    held = sum(shape.values * shape.count for shape in model_shapes(part))
    return replace(part, params=held - (part.loaded_params - part.params))


def _rank_head(spec: ModelSpec, ranks: int, engine: EngineMemory) -> tuple[Head, bool]:
    """The head as a rank holds it, and whether its token embedding is split by tokens, too.

    As read in DeepSpeed 0.19.8 (module_inject/auto_tp.py, engine.py _apply_autotp_partitioning) and
    transformers 5.23 (distributed/mixin.py): both gather the logits of a head that they split, so that
    each rank holds all of them. AutoTP alone leaves them distributed where the head is also the embedding,
    and uses a loss made for that; what it cannot split so stays complete. transformers splits every
    embedding, but the gradient of one that is no head comes back complete: counted so, an upper bound.
    """
    head = spec.head
    cut = replace(head, out_features=-(-head.out_features // ranks))
    if not engine.splits_tied_head or not head.tied:
        return replace(cut, gathered=head.out_features), head.tied
    if type_of(spec.model_type).scales_embeddings:
        return head, False
    return replace(cut, apart=True), True


def _rank_layout(spec: ModelSpec, layout: Layout, ranks: int) -> Layout:
    experts = -(-layout.experts // ranks)
    return replace(
        layout,
        linears=tuple(_rank_linear(spec, linear, ranks) for linear in layout.linears),
        layer_extra=layout.layer_extra - layout.experts + experts,
        experts=experts,
        active_inner=-(-layout.active_inner // ranks),
        decoder=None if layout.decoder is None else _rank_layout(spec, layout.decoder, ranks),
        others=tuple(_rank_layout(spec, kind, ranks) for kind in layout.others),
    )


def _rank_linear(spec: ModelSpec, linear: Linear, ranks: int) -> Linear:
    if linear.reads in _BACK_TO_THE_STREAM:
        return replace(linear, in_features=-(-linear.in_features // ranks))
    if linear.reads == "":
        # A pooler or a projection around the layers: each rank holds all of it.
        return linear
    out, query = linear.out_features, spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    rank_keys = max(1, spec.num_kv_heads // ranks) * spec.head_dim
    if spec.num_kv_heads < spec.num_heads and linear.reads == "norm1":
        if out == keys:
            return replace(linear, out_features=rank_keys)
        if out == query + 2 * keys:
            return replace(linear, out_features=query // ranks + 2 * rank_keys)
    return replace(linear, out_features=-(-out // ranks))


def on_token_rank(job: MemoryJob) -> MemoryJob:
    """The job as one of the ranks has it that share each sample's tokens.

    ZeRO and FSDP2 spread the states over these ranks as over copies (DeepSpeed's sequence-data-parallel
    group, accelerate's mesh dimension dp_shard_cp). Attention swaps tokens for heads: no more values.
    """
    ranks = job.sequence_parallel
    if ranks == 1:
        return job
    length = -(-job.sequence_length // ranks)
    return replace(job, sequence_length=length, data_parallel=job.data_parallel * ranks, sequence_parallel=1)


def on_rank(spec: ModelSpec, job: MemoryJob) -> tuple[ModelSpec, MemoryJob]:
    """Model and job as one of the ranks of a copy has them; as they are where each rank is a copy."""
    job = on_token_rank(job)
    if job.tensor_parallel == 1:
        return spec, job
    part = rank_spec(spec, job.tensor_parallel, job.engine)
    if job.adapter:
        widths = [
            sum((linear.in_features + linear.out_features) * linear.count for linear in one.linears)
            for one in (part, spec)
        ]
        trained = job.trainable_params * widths[0] // widths[1]
    else:
        trained = job.trainable_params * part.loaded_params // spec.loaded_params
    return part, replace(job, tensor_parallel=1, trainable_params=trained)
