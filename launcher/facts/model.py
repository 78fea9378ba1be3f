"""A model's sizes from its configuration alone: parameters, linears, LoRA parameters. Pure.

Configurations of older checkpoints leave out what equals the class defaults, so those come from
facts/data/config_defaults.json.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import RecipeError
from launcher.facts.architectures import Layout, Linear, Sizes
from launcher.facts.config_checks import check_config, config_problem
from launcher.facts.heads import Head, check_task, check_text_only, family_layout, labels_of, task_head
from launcher.facts.lora import Adapted, adapted_by, lora_width
from launcher.facts.shipped import facts_file
from launcher.tasks import DEFAULT_TASK

__all__ = ["Linear", "ModelSpec", "read_model_spec"]

# Other spellings of a size, first found wins.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    # transformers writes a Qwen3-MoE's under the second name, the published file has the first.
    "num_experts": ("num_experts", "num_local_experts"),
    "num_local_experts": ("num_local_experts", "num_experts"),
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
    foreign: bool = False
    """Of a family that is not known here: read from its class, `layout` is a sketch (facts/foreign.py)."""
    has_sdpa: bool = True
    """Whether transformers' class takes `attn_implementation: sdpa`; asked of families not known here."""
    adapters: tuple[tuple[str, Adapted], ...] = ()
    """What the real peft answered about adapters that have no closed form, by `adapter_key`."""

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
        """Parameters that training with LoRA of rank `r` on these targets updates, a classifier included."""
        return adapted_by(self, {"r": r, "target_modules": target_modules}).params

    def adapted_paths(self, target_modules: str | Sequence[str] | None) -> tuple[str, ...] | None:
        """Paths of the modules that LoRA adapts, `{}` for the layer's index; None: `all-linear`."""
        return adapted_by(self, {"target_modules": target_modules}).paths

    def lora_width(self, paths: Sequence[str] | None) -> int:
        """Parameters of adapters of rank 1 on the modules of these paths, as of `adapted_paths`."""
        return lora_width(self, paths)


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
    task: str = DEFAULT_TASK,
    num_labels: int | None = None,
) -> ModelSpec:
    """The spec of a model with the head of `task`.

    `num_labels` of a classification; None: as many as the configuration names.
    RecipeError `unknown-architecture` (family unknown, or not for this task), `multimodal-model` or
    `bad-model-config`.
    """
    model_type = str(config.get("model_type"))
    check_text_only(name, config)
    check_task(name, config.get("model_type"), task)
    filled = _fill(model_type, config)
    check_config(name, filled)
    try:
        sizes = _sizes(filled)
        layout = family_layout(model_type, sizes, task)
        labels = num_labels if num_labels is not None else labels_of(config, task)
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
