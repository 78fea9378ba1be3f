"""The spec of a model whose family is not known here, from what transformers' own class says.

Counts are exact. What a layer keeps for the backward pass is only sketched: the plan traces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.facts.architectures import Layout, Linear
from launcher.facts.heads import Head
from launcher.facts.model import ModelSpec, architectures_of
from launcher.tasks import task_named


def foreign_spec(
    name: str, config: Mapping[str, Any], origin: str, task: str, answer: Mapping[str, Any]
) -> ModelSpec:
    """`answer`: of the tracing process to {"ask": "model"}."""
    sizes, embedding, head = answer["sizes"], answer["embedding"], answer["head"]
    linears = tuple(
        Linear(x["path"].rpartition(".")[2], x["in"], x["out"], x["count"], x["path"], x["bias"])
        for x in answer["linears"]
    )
    dtype = config.get("dtype") or config.get("torch_dtype")
    return ModelSpec(
        name=name,
        origin=origin,
        model_type=str(config.get("model_type")),
        task=task,
        architectures=architectures_of(config),
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["inner"],
        num_layers=sizes["layers"],
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        vocab_size=embedding["rows"],
        max_position_embeddings=sizes["positions"],
        params=answer["params"],
        pretrained_dtype=str(dtype).removeprefix("torch.") if dtype else None,
        linears=linears,
        config=dict(config),
        layout=_sketch(answer, linears, task),
        head=Head(
            head["name"],
            head["in"],
            head["out"],
            bias=head["bias"],
            per_token=task_named(task).head != "classifier",
            tied=head["tied"],
            saved=task_named(task).adds_head,
        ),
        foreign=True,
        has_sdpa=answer["has_sdpa"],
    )


def _sketch(answer: Mapping[str, Any], linears: tuple[Linear, ...], task: str) -> Layout:
    """A layer of the usual kind with the model's widths: for the search, and until the trace is there."""
    sizes = answer["sizes"]
    hidden, inner, layers = sizes["hidden"], sizes["inner"], sizes["layers"]
    query, keys = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    gated = sum(x.out_features == inner and "{}" in x.path for x in linears) > 1
    products = [
        ("q", hidden, query, "norm1"),
        ("k", hidden, keys, "norm1"),
        ("v", hidden, keys, "norm1"),
        ("o", query, hidden, "attn"),
        *((name, hidden, inner, "norm2") for name in (("gate", "up") if gated else ("up",))),
        ("down", inner, hidden, "act"),
    ]
    return Layout(
        linears=tuple(
            Linear(name, i, o, layers, "{}." + name, False, reads) for name, i, o, reads in products
        ),
        layer_extra=answer["layer_extra"],
        model_extra=answer["model_extra"],
        embed_width=answer["embedding"]["width"],
        gated=gated,
        rms_norm=answer["rms_norm"],
        active_inner=inner,
        embed_paths=(answer["embedding"]["path"],),
        causal=not task_named(task).adds_head,
    )
