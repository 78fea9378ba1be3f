"""The parts of a vision-language model: its vision tower, and the projector between tower and language model.

Found by the names that transformers gives them. A model with other parts is refused: what would be frozen,
and where adapters would go, is then not known.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.errors import Problem, RecipeError

TOWERS = frozenset({
    "vision_tower", "visual", "vision_model", "vision_encoder", "image_tower", "high_res_vision_model",
    "high_res_vision_neck",
})  # fmt: skip
PROJECTORS = frozenset({
    "multi_modal_projector", "connector", "projector", "mm_projector", "aligner", "merger", "embed_vision",
    "vision_projection", "vision_adapter", "resampler_model", "vision_resampler", "perception_emb_norm",
    "qformer", "language_projection", "image_to_text_projection", "high_res_vision_proj",
    "visual_embeddings_table", "layerwise_projectors", "spatial_projectors",
})  # fmt: skip
IN_TOWER = frozenset({"merger", "deepstack_merger_list", "vision_adapter"})
"""Projectors that are modules of the tower: those of Qwen-VL and Llama 4."""
LANGUAGE = frozenset({"language_model", "text_model", "lm_head", "model"})
IDLE = frozenset({
    "audio_tower", "embed_audio", "video_tower", "vqmodel", "generation_embeddings", "generation_aligner",
    "generation_head", "sound_encoder", "sound_projector", "audio_projector", "audio_projection",
})  # fmt: skip
"""Parts that no image reaches, for sound, video or images that a model draws: always frozen, as are
modules of a tower that nothing reads."""
PARTS = ("vision", "projector")


def find_parts(model: Any) -> dict[str, list[str]]:
    """Part -> names of its modules: `vision` without the projectors in it, `projector`, and `idle`.

    RecipeError for a model without a tower, or with parts that are not known.
    """
    found: dict[str, list[str]] = {"vision": [], "projector": [], "idle": []}
    strange = []
    for name, module in _children(model):
        last = name.rpartition(".")[2]
        if last in TOWERS:
            found["vision"].append(name)
            inner = [child for child, _ in module.named_children() if child in IN_TOWER]
            found["projector"] += [f"{name}.{child}" for child in inner]
            found["idle"] += _unread(name, module, model.config)
        elif last in PROJECTORS:
            found["projector"].append(name)
        elif last in IDLE:
            found["idle"].append(name)
        elif last not in LANGUAGE and any(True for _ in module.parameters()):
            strange.append(name)
    if strange or not (found["vision"] or found["projector"]):
        what = f"has {', '.join(strange)}" if strange else "has no vision tower"
        named = ", ".join(name for name, _ in _children(model))
        message = f"{type(model).__name__} {what}, which is not supported; its parts are {named}"
        hint = "use a model with a vision tower, a projector and a language model"
        raise RecipeError(Problem("vision-layout", message, path="model.name_or_path", hint=hint))
    return found


def _unread(name: str, tower: Any, config: Any) -> list[str]:
    """Modules of a tower whose output no language model reads: SigLIP's pooling head, and in LLaVA the layers
    after the one that is read (`vision_feature_layer`), with the last norm. They never have a gradient."""
    inside = dict(tower.named_modules())
    unread = ["head"] if "head" in inside and hasattr(inside["head"], "probe") else []
    read = getattr(config, "vision_feature_layer", None)
    layers = inside.get("encoder.layers")
    if read is not None and layers is not None:
        last = max(one % (len(layers) + 1) for one in (read if isinstance(read, list | tuple) else [read]))
        unread += [f"encoder.layers.{number}" for number in range(last, len(layers))]
        unread += ["post_layernorm"] if "post_layernorm" in inside else []
    return [f"{name}.{one}" for one in unread]


def _children(model: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a model: its children, and those of its body."""
    for name, module in model.named_children():
        if name == "model":
            yield from ((f"model.{child}", part) for child, part in module.named_children())
        else:
            yield name, module


def vision_modules(model: Any) -> tuple[str, ...]:
    """Names of the parts beside a language model that read images or sound; none for other models."""
    names = [name for name, _ in _children(model)]
    last = [name.rpartition(".")[2] for name in names]
    if not {"language_model", "text_model"}.intersection(last):
        return ()
    return tuple(n for n, end in zip(names, last, strict=True) if end in (*TOWERS, *PROJECTORS, *IDLE))


def frozen_pattern(model: Any, freeze: Sequence[str]) -> str:
    """A pattern for whole names of the modules in frozen parts."""
    parts = find_parts(model)
    frozen = [*parts["idle"], *(name for part in freeze for name in parts[part])]
    kept = [name for part in PARTS if part not in freeze for name in parts[part]]
    inside = [name for name in kept if any(name.startswith(f"{outer}.") for outer in frozen)]
    without = "".join(rf"(?!{re.escape(name)}(\.|$))" for name in inside)
    inner = "|".join(map(re.escape, frozen))
    return rf"{without}({inner})(\..+)?"


def vision_facts(model: Any, config: Any, freeze: Sequence[str]) -> dict[str, Any]:
    """What memory depends on of the parts that read images (`facts.model.Vision`)."""
    pattern = re.compile(frozen_pattern(model, freeze))
    parts = find_parts(model)
    apart = tuple(f"{name}." for names in parts.values() for name in names)
    own = [(name, p.numel()) for name, p in model.named_parameters() if name.startswith(apart)]
    vision = vision_part(config)
    sizes = {key: _first(vision, names) for key, names in _SIZES.items()}
    side = _first(vision, ("patch_size",))
    values = 3 * side * side * (_first(vision, ("temporal_patch_size",), 1)) if side else 0
    trained = [] if "projector" in freeze else parts["projector"]
    return {
        "params": sum(count for _, count in own),
        "frozen": sum(count for name, count in own if pattern.fullmatch(name)),
        "trains_tower": "vision" not in freeze,
        "patch_values": values,
        "patches_per_token": patches_per_token(config),
        **sizes,
        "projector": sum(_of_projector(model.get_submodule(name)) for name in trained),
        **_kept(model.get_submodule((parts["vision"] or parts["projector"])[0]), sizes["inner"]),
    }


def _kept(tower: Any, inner: int) -> dict[str, Any]:
    """How often a layer keeps a patch's hidden and inner values.

    Input, norms, queries, keys and values, attention and two residuals are eight hidden values, rotary
    positions three more (none as complex numbers), each norm beyond two (RMS norms in Python) two more; both
    sides of the activation function are two inner values, of a gated one with its product four. Counted with
    saved_tensors_hooks on CPU in towers of Qwen3-VL (10.7, 1.9), Gemma 4 (18, 3.8) and Llama 4 (8, 2). Gemma
    4's also keeps a mask between all patches of an image for each layer.
    """
    from torch import nn

    stacks = [module for module in tower.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    inside = list(stacks[0][0].modules()) if stacks else []
    norms = sum("norm" in type(module).__name__.lower() for module in inside)
    wide = sum(isinstance(module, nn.Linear) and module.out_features == inner for module in inside)
    turned = any(
        "rotary" in type(module).__name__.lower() and not any(one.is_complex() for one in module.buffers())
        for module in tower.modules()
    )
    few = max(norms - 2, 0)
    return {
        "widths": 8 + 2 * few + 3 * (turned and not few),
        "inners": 4 if wide > 1 else 2,
        "masked": "pixel_position_ids" in inspect.signature(tower.forward).parameters,
    }


def _of_projector(module: Any) -> int:
    """Values of a token that a projector keeps: what its products read, and activation functions between."""
    from torch import nn

    sides: list[tuple[int, int]] = [
        (one.in_features, one.out_features) for one in module.modules() if isinstance(one, nn.Linear)
    ]
    return sum(wide for wide, _ in sides) + sum(out for _, out in sides[:-1])


_SIZES = {
    "hidden": ("hidden_size", "embed_dim"),
    "inner": ("intermediate_size", "mlp_dim"),
    "layers": ("num_hidden_layers", "depth"),
}
"""Size of a tower -> its names in configurations."""


def _first(config: Any, names: Sequence[str], default: int = 0) -> int:
    found = (getattr(config, name, None) for name in names)
    single = (one[0] if isinstance(one, list | tuple) and one else one for one in found)
    return next((one for one in single if isinstance(one, int)), default)


_MERGED_SIDES = (
    "spatial_merge_size", "merge_size", "scale_factor", "pooling_kernel_size", "downsample_factor",
    "merge_kernel_size",
)  # fmt: skip
"""Names for how many patches beside each other, and below each other, become one token."""


def vision_part(config: Any) -> Any:
    """The part of a configuration that has the sizes of images; the configuration itself without one."""
    parts = [part for name in ("vision_config", *_parts_of(config)) if (part := getattr(config, name, None))]
    inner = [getattr(part, name, None) for part in parts for name in _parts_of(part)]
    parts += [part for part in inner if part is not None]
    sized = (part for part in parts if getattr(part, "patch_size", None) is not None)
    return next(sized, parts[0] if hasattr(config, "vision_config") and parts else config)


def _parts_of(config: Any) -> Sequence[str]:
    return tuple(getattr(config, "sub_configs", None) or ())


def patches_per_token(config: Any) -> int:
    """Patches of the tower that the projector makes one token of."""
    vision = vision_part(config)
    for holder in (config, vision):
        for name in _MERGED_SIDES:
            if side := _first(holder, (name,)):
                return side * side
        for name in ("pixel_shuffle_ratio", "downsample_ratio"):
            if share := getattr(holder, name, None):
                return round(1 / float(share) ** 2)
    if tokens := _first(config, ("mm_tokens_per_image",)):
        return int((_first(vision, ("image_size",)) // _first(vision, ("patch_size",))) ** 2 // tokens)
    return 1


def freeze_parts(model: Any, freeze: Sequence[str]) -> Mapping[str, int]:
    """Freeze parts of a model; part -> parameters that are frozen."""
    pattern = re.compile(frozen_pattern(model, freeze))
    counts = dict.fromkeys(freeze, 0)
    parts = find_parts(model)
    for name, parameter in model.named_parameters():
        if not pattern.fullmatch(name):
            continue
        parameter.requires_grad_(False)
        owner = "projector" if any(name.startswith(f"{one}.") for one in parts["projector"]) else "vision"
        if owner in counts:
            counts[owner] += parameter.numel()
    return counts
