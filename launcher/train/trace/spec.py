"""What planning must know of a model whose family it does not know: read from its class on "meta"."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from launcher.errors import RecipeError
from launcher.models.lora import is_router
from launcher.tasks import task_named
from launcher.train.model.adapters import find_adapted, left_out, new_adapter
from launcher.train.model.experts import expert_parameters
from launcher.train.model.models import auto_class, head_modules
from launcher.train.model.vision import frozen_pattern, vision_facts, vision_modules
from launcher.train.trace.model import language_config, stacks
from launcher.train.upstream.model_seams import has_sdpa

_NORM = re.compile(r"norm", re.IGNORECASE)


def describe(config: Any, task: str, freeze: Sequence[str] | None = None) -> dict[str, Any]:
    """Sizes, linears, embeddings and head of the model of this configuration; counts are exact.

    Of a model of images and text, sizes and linears are the language model's. freeze: its frozen parts.
    """
    with torch.device("meta"):
        model = auto_class(task).from_config(config)
    layers = [list(stack) for stack in stacks(model)]
    head = _head(model, task)
    apart = vision_modules(model)
    linears = list(_linears(model, (head["name"], *apart)))
    embedding = model.get_input_embeddings()
    rows, width = embedding.weight.shape if isinstance(embedding, torch.nn.Embedding) else (0, 0)
    first = [module for name, module in layers[0][0].named_modules() if name]
    norms = [module for module in first if _NORM.search(type(module).__name__)]
    params = sum(p.numel() for p in model.parameters())
    inside = sum(p.numel() for stack in layers for layer in stack for p in layer.parameters())
    depth = sum(len(stack) for stack in layers)
    in_layers = sum(x["weights"] for x in linears if "{}" in x["path"])
    outside = sum(x["weights"] for x in linears if "{}" not in x["path"])
    extra = (inside - in_layers) // depth
    return {
        "sizes": _sizes(language_config(config), linears, width, depth),
        "vision": vision_facts(model, config, freeze or ()) if task_named(task).sees_images else None,
        "params": params,
        "linears": linears,
        "layer_extra": extra,
        # What layers of several kinds have besides their mean counts outside of them.
        "model_extra": params - depth * extra - in_layers - outside - rows * width - head["own"],
        "parameters": _parameters(model),
        "experts": [
            getattr(module, last).numel()
            for name, module, last in expert_parameters(model)
            if not name.startswith(tuple(f"{part}." for part in apart))
        ],
        "embedded": {"path": _path_of(model, embedding), "rows": rows, "width": width},
        "head": head,
        "norms": len(norms),
        "rms_norm": any("RMS" in type(norm).__name__ for norm in norms),
        "has_sdpa": has_sdpa(model),
    }


def _parameters(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Shapes of all parameters, equal ones counted; a tied head is the embedding."""
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    found = Counter((tuple(p.shape), id(p) in embedded) for p in model.parameters())
    return [{"shape": shape, "embedded": is_one, "count": n} for (shape, is_one), n in found.items()]


def adapter(
    config: Any, task: str, fields: Mapping[str, Any], freeze: Sequence[str] | None = None
) -> dict[str, Any]:
    """What the real peft makes of an adapter: parameters, ranks and paths, or the problems that it has."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    with torch.device("meta"):
        model = auto_class(task).from_config(config)
        every = Counter(_template(name) for name, _ in model.named_modules())
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        experts = {name for name, _, _ in expert_parameters(model)}
        head = model.get_output_embeddings()
        linears = [
            name
            for name, module in model.named_modules()
            if isinstance(module, (torch.nn.Linear, Conv1D))
            and module is not head
            and not name.startswith(tuple(f"{part}." for part in vision_modules(model)))
        ]
        try:
            apart = frozen_pattern(model, freeze or ()) if task_named(task).sees_images else None
            adapted = new_adapter(_of_no_values(fields), task, model, apart=apart)
        except RecipeError as error:
            return {"problems": [[p.code, p.message, p.path, p.hint] for p in error.problems]}
    names = {name.removeprefix("base_model.model."): module for name, module in adapted.named_modules()}
    # A parameter's adapter is around its module, or around that of another parameter of it.
    layers = {
        name.replace(".base_layer", ""): module
        for name, module in names.items()
        if isinstance(module, LoraLayer)
    }
    ranks = [rank for layer in layers.values() for rank in layer.r.values()]
    paths = Counter(_template(name) for name in layers)
    return {
        "params": sum(p.numel() for p in adapted.parameters() if p.requires_grad),
        "lora": sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name),
        "paths": sorted(paths),
        "rank": round(sum(ranks) / max(len(ranks), 1)),
        "uneven": len(set(ranks)) > 1 or any(every[path] != count for path, count in paths.items()),
        "left_out": left_out(fields, linears, adapted),
        "reach": _reach(adapted, sizes, experts | {name for name in sizes if ".experts." in name}),
        "whole": sorted(_template(n) for n, m in names.items() if isinstance(m, ModulesToSaveWrapper)),
    }


def _reach(adapted: Any, sizes: Mapping[str, int], experts: Collection[str]) -> dict[str, Any]:
    """`Reach` of a model of peft, from the sizes of the parameters that the model had without adapters."""
    from peft.utils.other import ModulesToSaveWrapper

    found = find_adapted(adapted)
    whole = tuple(
        f"{name.removeprefix('base_model.model.')}."
        for name, module in adapted.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
    )
    named = {*(f"{path}.weight" for path in found.modules), *found.parameters}
    reached = {name for name in sizes if name in named or name.startswith(whole)}
    return {
        "params": sum(sizes[name] for name in reached),
        "experts": bool(reached & set(experts)) if experts else None,
        "router": any(map(is_router, reached)) if experts else None,
    }


def _of_no_values(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without a beginning that is computed from weights: "meta" has none, and sizes are equal."""
    begins = str(fields.get("init_lora_weights")).lower()
    left = {key: value for key, value in fields.items() if key != "loftq_config"}
    return left if begins == "mica" else left | {"init_lora_weights": True}


def _template(name: str) -> str:
    """A module's name with `{}` for the layer's index."""
    return re.sub(r"\.\d+(?=\.|$)", ".{}", name, count=1)


def _sizes(config: Any, linears: list[dict[str, Any]], width: int, depth: int) -> dict[str, int]:
    """Sizes for the sketch of a layer; `width` of the embedding and `depth` where the configuration has none.

    Layers without attention count as one head.
    """
    text = config.get_text_config()
    hidden = _size(text, "hidden_size") or width
    heads = _size(text, "num_attention_heads") or 1
    inner = _size(text, "intermediate_size", "ffn_dim", "n_inner")
    return {
        "hidden": hidden,
        "inner": inner or max((x["out"] for x in linears if "{}" in x["path"]), default=4 * hidden),
        "layers": _size(text, "num_hidden_layers") or depth,
        "heads": heads,
        "kv_heads": _size(text, "num_key_value_heads", "num_kv_heads") or heads,
        "head_dim": _size(text, "head_dim") or hidden // heads,
        "vocab": _size(text, "vocab_size"),
        "positions": _size(text, "max_position_embeddings"),
    }


def _size(config: Any, *names: str) -> int:
    """The first of these sizes that a configuration has, the largest of several layers'; else 0."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:
            # A size that differs from layer to layer, of which the dictionary has the usual one.
            value = config.to_dict().get(name)
        if isinstance(value, list | tuple) and value and all(isinstance(one, int) for one in value):
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _head(model: Any, task: str) -> dict[str, Any]:
    """The output layer, and the parameters that it alone holds."""
    if task_named(task).adds_head:
        names = head_modules(model)
        parts = [model.get_submodule(name) for name in names]
        products = [m for part in parts for m in part.modules() if isinstance(m, torch.nn.Linear)]
        last = products[-1]
        own = sum(p.numel() for part in parts for p in part.parameters())
        tied, name = False, names[-1]
    else:
        last = model.get_output_embeddings() or model.language_model.get_output_embeddings()
        tied = last.weight is model.get_input_embeddings().weight
        own = 0 if tied else sum(p.numel() for p in last.parameters())
        name = _path_of(model, last)
    return {
        "name": name,
        "in": last.in_features,
        "out": last.out_features,
        "bias": last.bias is not None,
        "tied": tied,
        "own": own,
    }


def _linears(model: Any, apart: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Linears outside the modules `apart`, alike ones of all layers as one; `weights` counts their
    parameters."""
    found: dict[tuple[str, int, int, bool], int] = {}
    for name, module in model.named_modules():
        if any(name == one or name.startswith(one + ".") for one in apart):
            continue
        if not isinstance(module, (torch.nn.Linear, Conv1D)):
            continue
        wide, deep = module.weight.shape if isinstance(module, Conv1D) else reversed(module.weight.shape)
        key = (re.sub(r"\.\d+\.", ".{}.", name, count=1), wide, deep, module.bias is not None)
        found[key] = found.get(key, 0) + 1
    for (path, wide, deep, bias), count in found.items():
        weights = count * (wide * deep + (deep if bias else 0))
        yield {"path": path, "in": wide, "out": deep, "bias": bias, "count": count, "weights": weights}


def _path_of(model: Any, wanted: Any) -> str:
    name: str = next(name for name, module in model.named_modules() if module is wanted)
    return name
