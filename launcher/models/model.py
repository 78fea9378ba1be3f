"""Read a model's sizes, parameters and head from its configuration.

Older configurations omit values that equal the defaults of their class: those are in
models/data/config_defaults.json. Heads are those of transformers 5.23's AutoModelFor... classes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.shipped import facts_file
from launcher.models.adapted import Adapted
from launcher.models.families import MODEL_TYPES, type_of
from launcher.models.families.model_type import ModelType
from launcher.models.layers.feed_forward import FOUR_BITS
from launcher.models.layers.layout import Layout
from launcher.models.layers.linears import Linear, Sizes
from launcher.models.layers.pre_norm import LayerNorms, PreNorm
from launcher.tasks import DEFAULT_TASK, task_named, tasks_of

FAMILY_TASKS: Mapping[str, tuple[str, ...]] = {
    name: tuple(task for task in tasks_of(kind.kind) if task_named(task).head not in kind.lacks)
    for name, kind in MODEL_TYPES.items()
}
"""Model type -> supported tasks, the most common first."""
# Size -> its names in configurations, the first one found wins.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    # Published Qwen3-MoE configurations use the first name, transformers writes the second.
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num_local_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
_LARGEST = {
    **dict.fromkeys(
        ("num_hidden_layers", "num_decoder_layers", "num_channels", "decoder_sparse_step"), 10**4
    ),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "head_dim", "num_local_experts", "num_experts",
         "num_experts_per_tok"),
        10**5,
    ),
    **dict.fromkeys(
        ("hidden_size", "word_embed_proj_dim", "relative_attention_num_buckets", "type_vocab_size"), 10**6
    ),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 10**7),
    **dict.fromkeys(("vocab_size", "num_labels"), 10**8),
    "max_position_embeddings": 10**9,
}  # fmt: skip
"""Upper limits of integers from 1 on, some hundred times above any published model."""
_SHARES = (
    "attn_pdrop", "attention_probs_dropout_prob", "dropout", "dropout_rate", "hidden_dropout",
    "hidden_dropout_prob", "resid_pdrop", "residual_dropout", "attention_dropout", "mlp_dropout",
    "embedding_dropout", "classifier_dropout",
)  # fmt: skip
_IMAGE_SIZES = ("image_size", "patch_size")


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer."""

    name: str
    """lm_head | score | classifier"""
    in_features: int
    out_features: int
    """Logits: the vocabulary, or the labels."""
    bias: bool = False
    per_token: bool = True
    """Logits for each token, else for each sample."""
    tied: bool = False
    """Its matrix is that of the token embedding."""
    dropout: float = 0.0
    """On its input, for a head per token."""
    saved: bool = False
    """Trained in full along with an adapter, as peft does for classification heads."""
    gathered: int = 0
    """Logits that each tensor-parallel rank gathers from all ranks; 0: none, it has `out_features`."""
    dense: Linear | None = None
    """Of a block before it: this product, an activation and a norm, of each token or sample as the logits."""
    mean: bool = False
    """A head for each sample reads the mean over its tokens, not the first one."""
    apart: bool = False
    """Each tensor-parallel rank computes its part of the loss from its own logits."""

    @property
    def own_params(self) -> int:
        """Parameters that no other module holds."""
        if self.tied:
            return 0
        return self.out_features * (self.in_features + (1 if self.bias else 0))


@dataclass(frozen=True, slots=True)
class Vision:
    """The parts of a model that read images: a tower and a projector."""

    params: int
    frozen: int
    """Of these, how many are not trained."""
    trains_tower: bool
    hidden: int
    """Sizes of the tower; 0 where its configuration does not name them."""
    inner: int
    layers: int
    widths: int
    """Values of width `hidden`, and `inners` of width `inner`, that a layer keeps of a patch for backward."""
    inners: int
    patch_values: int
    """Pixel values of a patch."""
    patches_per_token: int
    """Patches that the projector makes one token of."""
    projector: int = 0
    """Values per image token that the projectors save for backward; 0 where they are frozen."""
    masked: bool = False
    """Images are padded to the same number of patches, and attention has a mask between all of them."""


@dataclass(frozen=True, slots=True)
class Made:
    """What hooks make: a model of which only the parameters are counted, and its datasets."""

    length: int | None
    """Tokens of the largest of the first samples; None where they are not token ids."""
    train_rows: int
    """0 for a dataset without a length."""
    eval_rows: int | None
    """None without an evaluation dataset."""
    uncounted: str = ""
    """Why its step could not be traced; empty where it was, or has not been tried."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What memory and adapters depend on; sizes in elements."""

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
    """0 where positions are unbounded, or are not tokens."""
    params: int
    """Unique parameters: a tied head is counted once."""
    pretrained_dtype: str | None
    linears: tuple[Linear, ...]
    """Linear layers except the output head."""
    config: Mapping[str, Any]
    layout: Layout
    head: Head
    foreign: bool = False
    """Unknown family, read from its class: `layout` is approximate (`foreign_spec`)."""
    has_sdpa: bool = True
    """Whether transformers' class supports `attn_implementation: sdpa`."""
    wrapper: str | None = None
    """`model_type` of the checkpoint for text and images whose text model this is."""
    vision: Vision | None = None
    """The parts that read images; sizes, linears and layout are then the language model's, `params` those of
    all."""
    foreign_experts: tuple[int, ...] = ()
    """Of an unknown family: elements of each parameter that holds all experts of a layer."""
    foreign_parameters: tuple[tuple[tuple[int, ...], bool, int], ...] = ()
    """Of an unknown family: shapes of its parameters, whether embeddings, and how many of each."""
    frozen: int = 0
    """Parameters that hooks froze."""
    made: Made | None = None
    """Of a model that hooks make: layout, head and linears are a sketch of its size alone."""
    adapters: tuple[tuple[str, Adapted], ...] = ()
    """Results of the real peft for adapters without a closed form, by `adapter_key`."""

    @property
    def tokens_per_sample(self) -> int | None:
        """Sequence length of images, or of what hooks make; None for text."""
        if self.made is not None:
            return self.made.length or 1
        return self.layout.tokens_per_sample

    @property
    def uncounted(self) -> str:
        """Why the activations of what hooks make are not counted; empty where they are."""
        return "" if self.made is None else self.made.uncounted

    @property
    def loaded_params(self) -> int:
        """Unique parameters once the published checkpoint is loaded.

        A T5 checkpoint with `tie_word_embeddings: false` has a separate head, which transformers keeps when
        loading; without a checkpoint it builds the head tied.
        """
        own_head = self.layout.decoder is not None and self.config.get("tie_word_embeddings") is False
        return self.params + (self.head.in_features * self.head.out_features if own_head else 0)

    @property
    def trained_whole(self) -> int:
        """Parameters that a full fine-tune trains."""
        return self.loaded_params - (self.vision.frozen if self.vision else 0) - self.frozen

    @property
    def linear_weights(self) -> int:
        """Elements of the linears' matrices."""
        return sum(linear.weights * linear.count for linear in self.linears)

    @property
    def expert_weights(self) -> int:
        """Elements of all experts' matrices, which are no linears."""
        return sum(self.foreign_experts) + sum(s.experts * s.layers for s in self.layout.stacks)

    @property
    def router_loss(self) -> bool:
        """Whether its configuration adds the auxiliary loss of the routers to that of a language model."""
        return bool(self.expert_weights and self.config.get("output_router_logits"))

    def quantized_weights(self, quantization: str) -> int:
        """Elements of the matrices that are quantised; int8 leaves experts as they are."""
        return self.linear_weights + (self.expert_weights if quantization in FOUR_BITS else 0)

    @property
    def embedding_params(self) -> int:
        """Token and position embeddings."""
        rows = self.vocab_size * self.layout.embed_width
        return rows + self.layout.positions * self.hidden_size + self.layout.table_params


def read_model_spec(
    name: str,
    config: Mapping[str, Any],
    origin: str,
    task: str = DEFAULT_TASK,
    num_labels: int | None = None,
) -> ModelSpec:
    """The spec of a model with the head of `task`.

    `num_labels`: of a classifier; None: from the configuration.
    RecipeError `unknown-architecture` (family unknown, or not for this task) or `bad-model-config`.
    """
    check_task(name, config.get("model_type"), task)
    kind = MODEL_TYPES[str(config.get("model_type"))]
    filled = _fill(kind.name, config)
    check_config(name, filled)
    try:
        sizes = kind.sizes(_sizes(filled))
        layout = family_layout(kind, sizes, task)
        labels = num_labels if num_labels is not None else labels_of(config, task)
        head = task_head(task, kind, sizes, layout, labels)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise RecipeError(config_problem(name, repr(error))) from error
    linears = tuple(linear for stack in layout.stacks for linear in stack.linears)
    params = _count(sizes, layout, head)
    return _spec(name, config, origin, task, sizes, layout, head, linears, params)


def foreign_spec(
    name: str, config: Mapping[str, Any], origin: str, task: str, answer: Mapping[str, Any]
) -> ModelSpec:
    """The spec of a model of an unknown family, from what transformers' own class reports.

    Counts are exact; what a layer saves for the backward pass is only approximate: the plan traces it.
    `answer`: of the tracing process to {"ask": "model"}.
    """
    given = answer["head"]
    linears = tuple(
        Linear(x["path"].rpartition(".")[2], x["in"], x["out"], x["count"], x["path"], x["bias"])
        for x in answer["linears"]
    )
    head = Head(
        given["name"],
        given["in"],
        given["out"],
        bias=given["bias"],
        per_token=task_named(task).head not in ("classifier", "none"),
        tied=given["tied"],
        saved=task_named(task).adds_head,
    )
    sizes = Sizes(**{**answer["sizes"], "vocab": answer["embedded"]["rows"]}, config=config)
    layout = _sketch(answer, linears, task)
    spec = _spec(name, config, origin, task, sizes, layout, head, linears, answer["params"])
    vision = Vision(**answer["vision"]) if answer.get("vision") else None
    return replace(
        spec,
        foreign=True,
        has_sdpa=answer["has_sdpa"],
        vision=vision,
        foreign_experts=tuple(answer["experts"]),
        foreign_parameters=tuple(
            (tuple(x["shape"]), x["embedded"], x["count"]) for x in answer["parameters"]
        ),
    )


def _spec(
    name: str,
    config: Mapping[str, Any],
    origin: str,
    task: str,
    sizes: Sizes,
    layout: Layout,
    head: Head,
    linears: tuple[Linear, ...],
    params: int,
) -> ModelSpec:
    dtype = config.get("dtype") or config.get("torch_dtype")
    return ModelSpec(
        name=name,
        origin=origin,
        model_type=str(config.get("model_type")),
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
        params=params,
        pretrained_dtype=str(dtype).removeprefix("torch.") if dtype else None,
        linears=linears,
        config=dict(config),
        layout=layout,
        head=head,
    )


def _sketch(answer: Mapping[str, Any], linears: tuple[Linear, ...], task: str) -> Layout:
    """A decoder layer with the model's widths, for the search and until the trace is available."""
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
    return (PreNorm if answer["rms_norm"] else LayerNorms)(
        linears=tuple(
            Linear(name, i, o, layers, "{}." + name, False, reads) for name, i, o, reads in products
        ),
        layer_extra=answer["layer_extra"],
        model_extra=answer["model_extra"],
        embed_width=answer["embedded"]["width"],
        active_inner=inner,
        embed_paths=(answer["embedded"]["path"],),
        causal=task_named(task).writes,
    )


def architectures_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The class names of a configuration; none where the field is not a list of strings."""
    named = config.get("architectures")
    return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()


def labels_of(config: Mapping[str, Any], task: str) -> int:
    """Number of labels of the task or configuration; 2 by default, as in transformers."""
    fixed = task_named(task).num_labels
    if fixed is not None:
        return fixed
    if config.get("num_labels") is not None:
        return int(config["num_labels"])
    return len(config.get("id2label") or ()) or 2


def class_defaults(kind: str) -> dict[str, Any]:
    """Sizes of a known family's class, by the names of its configuration."""
    return {key: value for key, value in _defaults()[kind].items() if value is not None}


def has_sizes(config: Mapping[str, Any]) -> bool:
    """Whether a configuration names its own width and depth."""
    return all(
        any(config.get(name) is not None for name in _SPELLINGS[size])
        for size in ("hidden_size", "num_hidden_layers")
    )


@functools.cache
def _defaults() -> dict[str, dict[str, Any]]:
    return dict(json.loads(facts_file("config_defaults.json").read_text("utf-8"))["defaults"])


def _fill(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` over the class defaults, with the first name of each size."""
    filled = dict(_defaults()[kind])
    for name, spellings in _SPELLINGS.items():
        given = [config[s] for s in spellings if config.get(s) is not None]
        own = [filled[s] for s in spellings if filled.get(s) is not None]
        filled[name] = (given or own or [None])[0]
    known = {spelling for spellings in _SPELLINGS.values() for spelling in spellings}
    filled.update({key: value for key, value in config.items() if key not in known})
    return filled


def _sizes(c: Mapping[str, Any]) -> Sizes:
    hidden, heads = int(c["hidden_size"]), int(c["num_attention_heads"])
    return Sizes(
        hidden=hidden,
        inner=int(c["intermediate_size"] or 4 * hidden),
        layers=int(c["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(c.get("num_key_value_heads") or heads),
        head_dim=int(c.get("head_dim") or hidden // heads),
        vocab=int(c.get("vocab_size") or 0),
        positions=int(c["max_position_embeddings"] or 0),
        config=c,
    )


def _count(s: Sizes, layout: Layout, head: Head) -> int:
    embeddings = s.vocab * layout.embed_width + layout.positions * s.hidden + layout.table_params
    stacks = sum(
        sum(linear.params for linear in stack.linears) + stack.layers * stack.layer_extra + stack.model_extra
        for stack in layout.stacks
    )
    return embeddings + stacks + head.own_params


def check_task(name: str, kind: Any, task: str) -> None:
    """RecipeError `unknown-architecture` for a family that is unknown or does not support the task."""
    tasks = FAMILY_TASKS.get(str(kind), ())
    if task in tasks:
        return
    if tasks:
        message = f"model {name!r} does not support {task}: {kind} supports {', '.join(tasks)}"
    else:
        message = f"model {name!r} has the unsupported model_type {kind!r}"
    known = [family for family, supported in FAMILY_TASKS.items() if task in supported]
    hint = f"supported for {task}: {', '.join(known) or 'what the installed transformers has'}"
    raise RecipeError(Problem("unknown-architecture", message, path="model.name_or_path", hint=hint))


def family_layout(kind: ModelType, sizes: Sizes, task: str) -> Layout:
    """The layout of a type that `check_task` accepted."""
    layout = kind.layout(sizes)
    window, layers = kind.window(sizes.config, sizes.layers)
    if window and layers:
        others = tuple(replace(one, window=window, windowed=layers) for one in layout.others)
        layout = replace(layout, window=window, windowed=layers, others=others)
    head = task_named(task).head
    layout = layout.with_head(sizes, head)
    return _bare(layout) if head == "none" else layout


def _bare(layout: Layout) -> Layout:
    """The layout under the names of the class without a head, which lack the model's own: `layers.{}.…`."""
    linears = tuple(replace(one, path=one.path.partition(".")[2]) for one in layout.linears)
    paths = tuple(path.partition(".")[2] for path in layout.embed_paths)
    return replace(layout, linears=linears, embed_paths=paths, others=tuple(map(_bare, layout.others)))


def task_head(task: str, kind: ModelType, sizes: Sizes, layout: Layout, num_labels: int) -> Head:
    """The head that `task` puts on a model of this type."""
    if task_named(task).head == "language-model":
        # transformers 5.23 ties every T5, regardless of the configuration.
        tied = layout.decoder is not None or bool(sizes.config["tie_word_embeddings"])
        return Head("lm_head", layout.embed_width, sizes.vocab, tied=tied)
    if task_named(task).head == "none":
        return Head("", layout.embed_width, 0, per_token=False)
    dense = next((one for one in layout.linears if one.reads == "head"), None)
    if task_named(task).head == "token-classifier":
        keys = ("classifier_dropout", "hidden_dropout", "hidden_dropout_prob")
        given = [sizes.config[key] for key in keys if sizes.config.get(key) is not None]
        dropout = float([*given, 0.0 if dense else 0.1][0])
        return Head(
            kind.token_head, sizes.hidden, num_labels, bias=True, saved=True, dropout=dropout, dense=dense
        )
    if kind.kind != "decoder":
        mean = sizes.config.get("classifier_pooling") == "mean"
        more = {"bias": True, "per_token": False, "saved": True}
        return Head("classifier", sizes.hidden, num_labels, dense=dense, mean=mean, **more)
    # Logits of every token, of which the last token's are used.
    return Head("score", layout.embed_width, num_labels, saved=True)


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """RecipeError `bad-model-config` with every impossible size of model `name`.

    config: with the class defaults filled in, under the first name of each size.
    """
    wrong = [*_wrong_values(config)]
    wrong = wrong or [*_wrong_relations(config)]
    if wrong:
        raise RecipeError([config_problem(name, message) for message in wrong])


def config_problem(name: str, message: str) -> Problem:
    message = f"the configuration of {name!r} is incomplete or wrong: {message}"
    hint = "compare it with the published config.json"
    return Problem("bad-model-config", message, path="model.config", hint=hint)


def _wrong_values(config: Mapping[str, Any]) -> Iterator[str]:
    for key, largest in _LARGEST.items():
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"{key} is {value!r}, expected an integer"
        elif not (least := _least(key, config)) <= value <= largest:
            yield f"{key} is {value}, expected {least} to {largest}"
    for key in _IMAGE_SIZES:
        value = config.get(key)
        parts = value if isinstance(value, list | tuple) else [value]
        if value is not None and (
            len(parts) not in (1, 2) or any(type(part) is not int or not 1 <= part <= 10**5 for part in parts)
        ):
            yield f"{key} is {value!r}, expected one or two integers (pixels)"
    for key, value in config.items():
        if key in _SHARES and value is not None:
            yield from _wrong_share(key, value)
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{key} is {value}, expected a finite number"


def _least(key: str, config: Mapping[str, Any]) -> int:
    """Types whose layers have a block for all tokens may do without experts."""
    return 0 if "experts" in key and type_of(str(config.get("model_type"))).has_dense else 1


def _wrong_share(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        yield f"{key} is {value!r}, expected a number"
    elif not 0 <= value <= 1:  # also for NaN
        yield f"{key} is {value}, expected 0 to 1"


def _wrong_relations(config: Mapping[str, Any]) -> Iterator[str]:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
        if config.get(key) is None:
            yield f"{key} is missing"
            return
    if config.get("vocab_size") is None and "image_size" not in config:
        yield "vocab_size is missing"
    assert isinstance(hidden, int), "checked above"
    assert isinstance(heads, int), "checked above"
    if config.get("head_dim") is None and hidden % heads and "qk_rope_head_dim" not in config:
        yield f"hidden_size {hidden} is not divisible by {heads} attention heads"
    for key in type_of(str(config.get("model_type"))).needs:
        if config.get(key) is None:
            yield f"{key} is missing, which transformers' class needs"
    groups = config.get("num_key_value_heads") or heads
    if groups > heads:
        yield f"num_key_value_heads {groups} is more than num_attention_heads {heads}"
    elif heads % groups:
        yield f"num_attention_heads {heads} is not divisible by {groups} key-value heads"
    count = config.get("num_experts") or config.get("num_local_experts")
    chosen = config.get("num_experts_per_tok")
    if count and chosen and chosen > count:
        yield f"num_experts_per_tok {chosen} is more than the {count} experts"
    sides = (config.get(key) or 0 for key in _IMAGE_SIZES)
    image, patch = (int(min(side) if isinstance(side, list | tuple) else side) for side in sides)
    if image and patch > image:
        yield f"patch_size {patch} is larger than image_size {image}"
