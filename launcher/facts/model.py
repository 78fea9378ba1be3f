"""A model's sizes from its configuration alone: parameters, linears, LoRA parameters. Pure.

Configurations of older checkpoints leave out what equals the class defaults, so those come from
facts/data/config_defaults.json.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.facts.architectures import Layout, Linear, Sizes
from launcher.facts.config_checks import check_config, config_problem
from launcher.facts.heads import Head, check_task, family_layout, labels_of, task_head
from launcher.facts.shipped import facts_file

__all__ = ["Linear", "ModelSpec", "read_model_spec"]

# Modules that peft adapts when no target is named, for the families here.
_DEFAULT_TARGETS: dict[str, list[str]] = {
    "gpt2": ["c_attn"],
    "gpt_bigcode": ["c_attn"],
    "gpt_neox": ["query_key_value"],
    "t5": ["q", "v"],
    "mt5": ["q", "v"],
    "bert": ["query", "value"],
    **{
        family: ["q_proj", "v_proj"]
        for family in (
            "gemma",
            "gemma2",
            "gemma3_text",
            "llama",
            "mistral",
            "mixtral",
            "opt",
            "qwen2",
            "qwen3",
        )
    },
}

# Other spellings of a size, first found wins.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What memory and adapters depend on; sizes are element counts."""

    name: str
    origin: str
    """Where the configuration was found."""
    model_type: str
    task: str
    architectures: tuple[str, ...]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """0 for images."""
    max_position_embeddings: int
    """0 where positions have no end, or are not tokens."""
    params: int
    """Unique parameters: a tied head is counted once."""
    pretrained_dtype: str | None
    linears: tuple[Linear, ...]
    """Linear layers except the output head."""
    config: Mapping[str, Any]
    layout: Layout
    head: Head

    @property
    def tokens_per_sample(self) -> int | None:
        """Sequence length that the configuration decides (images), None for text."""
        return self.layout.tokens_per_sample

    @property
    def loaded_params(self) -> int:
        """Unique parameters once the published checkpoint is loaded.

        A T5 whose configuration says `tie_word_embeddings: false` brings a head of its own, which
        transformers does not tie when it loads the two; without a checkpoint it builds them tied.
        """
        own_head = self.layout.decoder is not None and self.config.get("tie_word_embeddings") is False
        return self.params + (self.head.in_features * self.head.out_features if own_head else 0)

    @property
    def linear_weights(self) -> int:
        """Entries of the linears' matrices: what quantisation makes smaller."""
        return sum(linear.weights * linear.count for linear in self.linears)

    @property
    def embedding_params(self) -> int:
        """Token and position embeddings."""
        rows = self.vocab_size * self.layout.embed_width
        return rows + self.layout.positions * self.hidden_size

    def lora_params(self, r: int, target_modules: str | Sequence[str] | None) -> int:
        """Parameters that training with LoRA of rank `r` updates: the adapter, and a classifier.

        `target_modules` as in LoraConfig: `all-linear`, a pattern that matches whole module names,
        names (ends of module names), or None for peft's own choice. RecipeError
        `no-target-modules` when nothing matches.
        """
        total = sum(r * width * n for width, n in self._targets(target_modules))
        if total == 0:
            names = sorted({linear.name for linear in self.linears})
            raise RecipeError(
                Problem(
                    "no-target-modules",
                    f"target_modules {target_modules!r} match no module of {self.model_type}",
                    path="adapter.target_modules",
                    hint=f"its linear layers are {', '.join(names)}; all-linear takes them all",
                )
            )
        return total + (self.head.own_params if self.head.saved else 0)

    def adapted_paths(self, target_modules: str | Sequence[str] | None) -> tuple[str, ...] | None:
        """Paths of the modules that LoRA adapts, `{}` for the layer's index; None: `all-linear`."""
        target = _DEFAULT_TARGETS.get(self.model_type, []) if target_modules is None else target_modules
        if isinstance(target, str) and target.lower() == "all-linear":
            return None
        return tuple(
            path
            for path, count, _ in self._modules()
            if any(_matches(target, path.format(i)) for i in range(count if "{}" in path else 1))
        )

    def lora_width(self, paths: Sequence[str] | None) -> int:
        """Parameters of adapters of rank 1 on the modules of these paths, as of `adapted_paths`."""
        if paths is None:
            return sum(width * n for width, n in self._targets("all-linear"))
        return sum(width * count for path, count, width in self._modules() if path in paths)

    def _targets(self, target: str | Sequence[str] | None) -> Iterator[tuple[int, int]]:
        """(in + out features, copies) of each module that is adapted."""
        if target is None:
            target = _DEFAULT_TARGETS.get(self.model_type, [])
        if isinstance(target, str) and target.lower() == "all-linear":
            yield from ((x.in_features + x.out_features, x.count) for x in self.linears)
            yield from self._expert_targets()
            return
        for path, count, width in self._modules():
            paths = [path.format(i) for i in range(count)] if "{}" in path else [path]
            if matched := sum(_matches(target, p) for p in paths):
                yield width, matched

    def _expert_targets(self) -> Iterator[tuple[int, int]]:
        """What `all-linear` adapts of a mixture of experts, as peft 0.21 does for fused experts.

        The router, and each expert's two fused weights; gate_up_proj holds two matrices and gets rank 2r.
        """
        count, hidden = self.layout.num_experts, self.hidden_size
        if count == 0:
            return
        inner = self.layout.experts // (3 * count * hidden)
        yield hidden + count, self.num_layers
        yield 2 * count * (2 * inner + hidden) + count * (inner + hidden), self.num_layers

    def _modules(self) -> Iterator[tuple[str, int, int]]:
        """Every module that LoRA can adapt: path, copies, in + out features."""
        for linear in self.linears:
            yield linear.path, linear.count, linear.in_features + linear.out_features
        layout = self.layout
        if not self.head.saved:
            yield self.head.name, 1, self.head.in_features + self.head.out_features
        rows = (self.vocab_size, layout.positions, layout.segments)
        widths = (layout.embed_width, self.hidden_size, self.hidden_size)
        for path, row, width in zip(layout.embed_paths, rows, widths, strict=False):
            yield path, 1, row + width


def _matches(target: str | Sequence[str], path: str) -> bool:
    if isinstance(target, str):
        return re.fullmatch(target, path) is not None
    return any(path == name or path.endswith("." + name) for name in target)


@functools.cache
def _defaults() -> dict[str, dict[str, Any]]:
    text = facts_file("config_defaults.json").read_text(encoding="utf-8")
    defaults: dict[str, dict[str, Any]] = json.loads(text)["defaults"]
    return defaults


def architectures_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The class names that a published configuration gives; none where the field is no list of them."""
    named = config.get("architectures")
    return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()


def read_model_spec(
    name: str,
    config: Mapping[str, Any],
    origin: str,
    task: str = "causal-lm",
    num_labels: int | None = None,
) -> ModelSpec:
    """The spec of a model with the head of `task`.

    `num_labels` of a classification; None: as many as the configuration names.
    RecipeError `unknown-architecture` (family unknown, or not for this task) or `bad-model-config`.
    """
    model_type = str(config.get("model_type"))
    check_task(name, config.get("model_type"), task)
    filled = _fill(model_type, config)
    check_config(name, filled)
    try:
        sizes = _sizes(filled)
        layout = family_layout(model_type, sizes)
        labels = num_labels if num_labels is not None else labels_of(config)
        head = task_head(task, model_type, sizes, layout, labels)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise RecipeError(config_problem(name, repr(error))) from error
    dtype = config.get("dtype") or config.get("torch_dtype")
    return ModelSpec(
        name=name,
        origin=origin,
        model_type=model_type,
        task=task,
        architectures=architectures_of(config),
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        max_position_embeddings=sizes.positions,
        params=_count(sizes, layout, head),
        pretrained_dtype=str(dtype).removeprefix("torch.") if dtype else None,
        linears=tuple(linear for stack in layout.stacks for linear in stack.linears),
        config=dict(config),
        layout=layout,
        head=head,
    )


def _fill(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` over the class defaults, under the first spelling of each size."""
    filled = dict(_defaults()[model_type])
    for name, spellings in _SPELLINGS.items():
        given = [config[s] for s in spellings if config.get(s) is not None]
        own = [filled[s] for s in spellings if filled.get(s) is not None]
        filled[name] = (given or own or [None])[0]
    known = {spelling for spellings in _SPELLINGS.values() for spelling in spellings}
    filled.update({key: value for key, value in config.items() if key not in known})
    return filled


def _sizes(c: Mapping[str, Any]) -> Sizes:
    hidden, heads = int(c["hidden_size"]), int(c["num_attention_heads"])
    if c.get("model_type") == "gpt_bigcode":
        kv_heads = 1 if c["multi_query"] else heads
    else:
        kv_heads = int(c.get("num_key_value_heads") or heads)
    return Sizes(
        hidden=hidden,
        inner=int(c["intermediate_size"] or 4 * hidden),
        layers=int(c["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(c.get("head_dim") or hidden // heads),
        vocab=int(c.get("vocab_size") or 0),
        # T5's n_positions bounds nothing: its positions are distances.
        positions=0 if "relative_attention_num_buckets" in c else int(c["max_position_embeddings"] or 0),
        config=c,
    )


def _count(s: Sizes, layout: Layout, head: Head) -> int:
    embeddings = s.vocab * layout.embed_width + layout.positions * s.hidden
    stacks = sum(
        sum(linear.params for linear in stack.linears) + stack.layers * stack.layer_extra + stack.model_extra
        for stack in layout.stacks
    )
    return embeddings + stacks + head.own_params
