"""What peft adapted is what was asked for: modules and parameters of an adapter, compared after it is made.

For models with experts peft 0.21 rewrites `target_modules` into names of the fused weights
(utils/transformers_weight_conversion.py `_convert_peft_config_moe`): a pattern becomes the last parts of the
names that it matches, in every layer, and a weight has an adapter whatever `exclude_modules` and
`layers_to_transform` say. Linear layers of the same name outside the experts then have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.facts.lora import chosen, idle_pattern, in_layers, is_all_linear, matches, named_by

_BEFORE_FUSION = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "down_proj": ("down_proj", "w2")}
"""Names of an expert's own linear layers, by the weight of all experts that holds them now."""
_CHOICES = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")


@dataclass(frozen=True, slots=True)
class Found:
    """Names without peft's own parts of them."""

    modules: tuple[str, ...]
    """With an adapter of their own."""
    parameters: tuple[str, ...]
    """With an adapter around them, `module.parameter`."""


def find_adapted(model: Any) -> Found:
    """What has an adapter in a model of peft."""
    from peft.tuners.lora import LoraLayer

    modules, parameters = [], []
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        wrapped = getattr(module, "parameter_name", None)
        if wrapped is None:
            modules.append(plain)
        else:
            parameters.append(f"{plain}.{wrapped}")
    return Found(tuple(modules), tuple(parameters))


def check_adapted(settings: Mapping[str, Any], model: Any) -> None:
    """RecipeError where `model`, of peft, adapts what `settings` do not name, or a key of theirs is idle."""
    if settings.get("layer_replication"):
        return  # layers have new names
    found = find_adapted(model)
    names = (*found.modules, *found.parameters)
    asked = settings.get("target_parameters") or ()
    problems = [
        Problem(
            "target-modules-missing",
            f"{key!r} matches no parameter of the model, and peft would ignore it",
            path="adapter.target_parameters",
            hint="write the last parts of a parameter's name, as mlp.experts.gate_up_proj",
        )
        for key in asked
        if not any(matches([key], name) for name in found.parameters)
    ]
    problems += [
        idle_pattern(field, key)
        for field in ("rank_pattern", "alpha_pattern")
        for key in settings.get(field) or ()
        if not any(named_by(key, name) for name in names)
    ]
    if more := _unasked(settings, found, _tied(settings, model)):
        problems.append(_too_many(settings, more))
    if problems:
        raise RecipeError(problems)


def left_out(settings: Mapping[str, Any], layers: Iterable[str], model: Any) -> list[str]:
    """Which linear layers the fields name and `model`, of peft, does not adapt.

    layers: names of all linear layers before, without the output layer.
    """
    if settings.get("layer_replication") or not settings.get("target_modules"):
        return []
    fields, targets = _choices(settings)
    found = find_adapted(model)
    there = {*found.modules, *(name.rpartition(".")[0] for name in found.parameters)}
    return [name for name in layers if name not in there and chosen(name, fields, targets)]


def _choices(settings: Mapping[str, Any]) -> tuple[dict[str, Any], str | Sequence[str] | None]:
    fields = {name: settings[name] for name in _CHOICES if settings.get(name) is not None}
    targets = fields.get("target_modules")
    return fields, None if is_all_linear(targets) else targets


def _tied(settings: Mapping[str, Any], model: Any) -> Sequence[str]:
    """The output layer, where peft gives it the adapter of the embedding that it shares."""
    if not settings.get("ensure_weight_tying"):
        return ()
    base = model.get_base_model()
    both = (base.get_output_embeddings(), base.get_input_embeddings())
    return [name for name, module in base.named_modules() if any(module is one for one in both)]


def _unasked(settings: Mapping[str, Any], found: Found, tied: Sequence[str]) -> list[str]:
    fields, targets = _choices(settings)
    excluded = fields.get("exclude_modules") or ()
    more = [name for name in found.modules if name not in tied and not chosen(name, fields, targets)]
    for name in found.parameters:
        every = _names_of(name)
        asked = any(matches([key], name) for key in settings.get("target_parameters") or ())
        wanted = in_layers(name, fields) if asked else any(chosen(one, fields, targets) for one in every)
        if not wanted or (excluded and any(matches(excluded, one) for one in every)):
            more.append(name)
    return more


def _names_of(parameter: str) -> list[str]:
    """What a pattern or a name may mean this parameter by: today's names, and those before the fusion."""
    module, _, last = parameter.rpartition(".")
    old = _BEFORE_FUSION.get(last, ())
    return [parameter, module, *(f"{module}.{name}" for name in old), *(f"{module}.0.{name}" for name in old)]


def _too_many(settings: Mapping[str, Any], more: Sequence[str]) -> Problem:
    field = next(
        (name for name in ("exclude_modules", "layers_to_transform") if settings.get(name) not in (None, [])),
        "target_modules",
    )
    parts = "module is" if len(more) == 1 else "modules and parameters are"
    return Problem(
        "bad-adapter",
        f"does not hold for this model: {len(more)} {parts} adapted beyond what it names, such as {more[0]}; "
        "peft rewrites names and patterns for models with experts, for every layer",
        path=f"adapter.{field}",
        hint="name attention layers in a list, as [q_proj, v_proj], and weights of experts by whole paths in "
        "target_parameters",
    )
