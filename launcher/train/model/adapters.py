"""LoRA adapters: attached, continued, and compared with what was asked for.

For models with experts peft 0.21 rewrites `target_modules` into names of the fused weights
(utils/transformers_weight_conversion.py `_convert_peft_config_moe`): a pattern becomes the last parts of the
names that it matches, in every layer, and a weight has an adapter whatever `exclude_modules` and
`layers_to_transform` ask for. Linear layers of the same name outside the experts then have none.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import write_text
from launcher.models.lora import (
    chosen,
    idle_choice,
    idle_choices,
    idle_pattern,
    in_layers,
    is_all_linear,
    matches,
    named_by,
)
from launcher.tasks import task_named
from launcher.train.job import Job
from launcher.train.model.experts import seen_as_plain
from launcher.train.model.models import head_modules
from launcher.train.model.processing import (
    added_ids,
    check_continued,
    find_embeddings,
    is_named_by,
    keep_rows_alone,
    local_or_hub,
    train_added_rows,
)
from launcher.train.model.processors import tokenizer_of
from launcher.train.model.vision import freeze_parts, frozen_pattern
from launcher.train.upstream.model_seams import adapters_by_own_names, leave_casts_to_autocast

CARD = "README.md"
_REFUSALS = (
    ValueError, TypeError, AttributeError, LookupError, AssertionError, NotImplementedError, ImportError,
    re.error,
)  # fmt: skip
"""What peft raises for fields that it cannot use; a RuntimeError may be the device's."""
_ERROR = 600
"""Characters of an error that lists tensors."""
_BEFORE_FUSION = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "down_proj": ("down_proj", "w2")}
"""Names of an expert's own linear layers, by the weight of all experts that holds them now."""
_CHOICES = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")
_READ_ON = "cpu"
"""Where an adapter's file is read, before it is copied into the model. peft 0.21 would read it on "cuda", for
safetensors 0.8 GPU 0: each rank of a resumed run would open a context there."""


def attach_adapter(job: Job, model: Any, processing: Any, *, whole: bool = True) -> Any:
    """The model with the plan's adapter (the model itself when the plan has none), ready to train.

    processing: the tokenizer, for the ids of added tokens. whole: the model has all its layers, so that
    each name of the adapter must be in it.
    RecipeError when a named module is not in the model, or nothing would be trained.
    """
    narrow: list[torch.nn.Parameter] = []
    if job.model.prepare_for_kbit:
        from peft import prepare_model_for_kbit_training

        narrow = _in_16_bits(model)
        checkpointing = bool(job.trainer.activation_checkpointing)
        options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing, **options)
    if job.model.enable_input_require_grads:
        require_input_grads(model)
    if job.task.sees_images:
        frozen = freeze_parts(model, job.model.freeze)
        print(
            "frozen: " + (", ".join(f"{part} ({n:,} parameters)" for part, n in frozen.items()) or "nothing")
        )
    ids = added_ids(job, tokenizer_of(processing)) if job.has_adapter and job.model.add_tokens else []
    asked = job.fields(job.adapter)
    autocast = job.adapter.autocast_adapter_dtype
    continued = job.adapter.path
    with seen_as_plain(model):
        if continued:
            model = _continue_adapter(model, local_or_hub(continued), ids, autocast_adapter_dtype=autocast)
        elif job.has_adapter:
            apart = frozen_pattern(model, job.model.freeze) if job.task.sees_images else None
            model = new_adapter(
                asked, job.task.name, model, ids, sharded=job.zero_stage == 3, whole=whole, apart=apart
            )
    if ids:
        keep_rows_alone(model)
    if job.has_adapter:
        _keep_reference(job, model)
        model.load_adapter = partial(model.load_adapter, torch_device=_READ_ON)
    if job.adapter.cast_input_dtype_enabled is False:
        leave_casts_to_autocast(model)
    if job.has_adapter and job.trainer.fp16:
        _trainable_to_fp32(model)
    narrow_again(narrow, job.model.kbit_norms)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(Problem("nothing-trainable", "no parameter would be trained", path="adapter"))
    return model


def _keep_reference(job: Job, model: Any) -> None:
    """Have the reference of `model.name_or_path` to the environment in the model cards that peft writes."""
    reference = job.kept.get(str(job.plan["settings"].get("model.name_or_path", {}).get("value")))
    if reference is None:
        return
    write = model.create_or_update_model_card

    def written(output_dir: str) -> None:
        write(output_dir)
        hide_base(Path(output_dir) / CARD, reference.value, reference.text)

    model.create_or_update_model_card = written


def hide_base(card: Path, base: str, name: str) -> None:
    """Replace the base in a model card, a folder's path or a reference's value, by a name; the hub's metadata
    takes neither."""
    if not card.is_file():
        return
    lines = card.read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not (base in line and re.match(r"base_model|- base_model", line))]
    text = re.sub(rf"\[{re.escape(base)}\]\([^)]*\)", lambda _: name, "".join(kept))
    write_text(card, text.replace(base, name))


def _in_16_bits(model: Any) -> list[torch.nn.Parameter]:
    """The parameters that prepare_model_for_kbit_training casts to float32 (peft 0.21, utils/other.py)."""
    return [
        parameter
        for parameter in model.parameters()
        if parameter.dtype in (torch.float16, torch.bfloat16) and type(parameter).__name__ != "Params4bit"
    ]


def narrow_again(parameters: Iterable[torch.nn.Parameter], dtype: str) -> None:
    """Cast those that are not trained to the plan's `model.kbit_norms`.

    After the adapter is there: copies of modules that are trained whole were made in float32, and stay so.
    """
    for parameter in parameters:
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, dtype))


def require_input_grads(model: Any) -> None:
    """Make the first block's input require grad, so that reentrant checkpointing has something to follow.

    Token models do it at their embedding. Image models' patch embeddings are not all plain tensors, so
    there the pixels themselves require grad.
    """
    if model.main_input_name == "input_ids":
        model.enable_input_require_grads()
        return

    def pixels_require_grad(_module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        pixels = kwargs.get(model.main_input_name, args[0] if args else None)
        if model.training and pixels is not None and pixels.is_floating_point():
            pixels.requires_grad_(True)

    model.register_forward_pre_hook(pixels_require_grad, with_kwargs=True)


def new_adapter(
    asked: Mapping[str, Any], task: str, model: Any, ids: Sequence[int] = (), *, sharded: bool = False,
    whole: bool = True, apart: str | None = None,
) -> Any:  # fmt: skip
    """The model with a new LoRA adapter of the fields `asked`. apart: pattern of modules that get none.

    RecipeError where peft refuses them, and, in a `whole` model, where it would train something else.
    """
    from peft import LoraConfig, get_peft_model

    settings = {key: value for key, value in asked.items() if key != "type"}
    settings.pop("cast_input_dtype_enabled", None)
    autocast = settings.pop("autocast_adapter_dtype", True)
    try:
        if whole:
            check_names(model, settings)
    except re.error as error:
        message = f"{error.pattern!r} is no regular expression: {error}"
        raise RecipeError(Problem("bad-adapter", message, path="adapter")) from error
    if apart is not None:
        settings["exclude_modules"] = _excluded_too(settings.get("exclude_modules"), apart)
    if task_named(task).adds_head:
        # Trained whole: they may be new, and peft adds only those named classifier and score.
        settings["modules_to_save"] = list(
            dict.fromkeys([*(settings.get("modules_to_save") or ()), *head_modules(model)])
        )
    if settings.get("modules_to_save") and model.main_input_name == "input_ids":
        settings = _keep_tied(settings, model)
    if _has_conv1d(model):
        settings.setdefault("fan_in_fan_out", True)  # peft would correct it, with a warning
    settings |= exclusions(settings, model)
    if ids:
        found = find_embeddings(model)
        settings = train_added_rows(settings, found, ids, sharded=sharded)
    try:
        config = LoraConfig(**{"task_type": task_named(task).peft_task, **settings})
        adapted = get_peft_model(model, config, autocast_adapter_dtype=autocast)
    except _REFUSALS as error:
        raise RecipeError(Problem("bad-adapter", str(error), path="adapter")) from error
    if whole:
        check_adapted(settings, adapted)
    return adapted


_MAMBA = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
_READ_BY_KERNELS = ("out_proj", "dt_proj")
"""Linear layers of these types whose weights are read without calling the layer, so that an adapter around it
is not applied. peft 0.21.2 refuses the first (tuners_utils.py), and lets the second idle."""


def exclusions(settings: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """`exclude_modules` of an adapter of all linear layers, with those that it has to leave out."""
    if not is_all_linear(settings.get("target_modules")):
        return {}
    without, namesakes = not_adaptable(model), _namesakes(model)
    patterns = [*([rf"(.*\.)?({'|'.join(without)})"] if without else []), *namesakes]
    if not patterns:
        return {}
    return {"exclude_modules": _excluded_too(settings.get("exclude_modules"), "|".join(patterns))}


def _namesakes(model: Any) -> list[str]:
    """Patterns for modules that are no linear layers and whose name ends with the number of one, as blocks of
    a list beside the parts of an nn.Sequential: peft takes layers by the last part of their names."""
    modules = [(*name.rpartition("."), module) for name, module in model.named_modules()]
    numbers = {last for *_, last, module in modules if last.isdigit() and isinstance(module, torch.nn.Linear)}
    return sorted({
        re.sub(r"\d+", r"\\d+", re.escape(outer)) + rf"\.{last}"
        for outer, _, last, module in modules
        if last in numbers and not isinstance(module, torch.nn.Linear)
    })  # fmt: skip


def not_adaptable(model: Any) -> list[str]:
    """Last parts of the names of linear layers that `all-linear` has to leave out.

    Those whose weight a Mamba kernel reads, and those whose class returns something else than a product, as
    routers that return several tensors: an adapter would add to that.
    """
    mamba = getattr(model.config, "model_type", None) in _MAMBA
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and ((mamba and name.rpartition(".")[2] in _READ_BY_KERNELS) or not _returns_product(module))
    }
    return sorted(names)


def _returns_product(layer: torch.nn.Linear) -> bool:
    """Whether a call returns one tensor of the layer's width; a class of a model's own is tried on "meta"."""
    own = type(layer).forward is not torch.nn.Linear.forward
    if not own or type(layer).__module__.partition(".")[0] in ("bitsandbytes", "launcher"):
        return True
    width, out = layer.in_features, layer.out_features
    with torch.device("meta"):
        weights = {"weight": torch.empty(out, width)}
        if layer.bias is not None:
            weights["bias"] = torch.empty(out)
        rows = torch.empty(2, width)
    try:
        made = torch.func.functional_call(layer, weights, (rows,))
    except (RuntimeError, TypeError, ValueError):
        return False
    return isinstance(made, torch.Tensor) and made.shape == (2, out)


def _excluded_too(asked: str | Sequence[str] | None, pattern: str) -> str:
    """A pattern for what `exclude_modules` names by peft's rules, and for names that match `pattern`."""
    if not asked:
        return pattern
    own = asked if isinstance(asked, str) else rf"(.*\.)?({'|'.join(map(re.escape, asked))})"
    return f"({own})|({pattern})"


def _keep_tied(settings: dict[str, Any], model: Any) -> dict[str, Any]:
    """One matrix for input and output stays one where it is trained whole; peft would copy it for each."""
    head = model.get_output_embeddings()
    if head is None or head.weight is not model.get_input_embeddings().weight:
        return settings
    if any(is_named_by(name, settings["modules_to_save"]) for name in _head_and_embedding(model)):
        return {"ensure_weight_tying": True, **settings}
    return settings


def _head_and_embedding(model: Any) -> list[str]:
    """Names of the output layer and of the input embedding."""
    both = (model.get_output_embeddings(), model.get_input_embeddings())
    return [name for name, module in model.named_modules() if any(module is one for one in both)]


def _continue_adapter(
    model: Any, folder: str, ids: Sequence[int], *, autocast_adapter_dtype: bool = True
) -> Any:
    from peft import PeftModel

    try:
        with adapters_by_own_names(), warnings.catch_warnings():  # peft would go on with new values
            warnings.filterwarnings("error", message="Found missing adapter keys")
            continued = PeftModel.from_pretrained(
                model, folder, is_trainable=True, autocast_adapter_dtype=autocast_adapter_dtype,
                torch_device=_READ_ON,
            )  # fmt: skip
    except (OSError, ValueError) as error:
        message = f"cannot continue the adapter: {error}"
        raise RecipeError(Problem("adapter-missing", message, file=folder, path="adapter.path")) from error
    except pickle.UnpicklingError as error:
        message = f"the adapter holds more than tensors; code is not run: {first_lines(error, 1)}"
        hint = "take an adapter in safetensors"
        raise RecipeError(
            Problem("unsafe-pickle", message, file=folder, path="adapter.path", hint=hint)
        ) from error
    except (IndexError, RuntimeError, UserWarning) as error:
        message = f"the adapter does not fit the model: {first_lines(error)[:_ERROR]}"
        hint = "name the base model, and the model.add_tokens, that it was trained with"
        raise RecipeError(
            Problem("adapter-mismatch", message, file=folder, path="adapter.path", hint=hint)
        ) from error
    check_restored(continued, folder)
    if ids:
        check_continued(continued, ids)
    return continued


def check_restored(adapted: Any, folder: str) -> None:
    """RecipeError for an adapter that began with a random change of its base: loading draws another."""
    init = str(adapted.peft_config["default"].init_lora_weights)
    if init.startswith("pissa_niter"):
        message = f"began with init_lora_weights: {init}, which draws what it subtracts from the base again"
        hint = "its base cannot be restored: train it again with `pissa`"
        raise RecipeError(Problem("adapter-mismatch", message, file=folder, hint=hint))


def first_lines(error: Exception, count: int = 3) -> str:
    """The beginning of an error; a state dict's lists every tensor."""
    return " ".join(line.strip() for line in str(error).strip().splitlines()[:count])


def check_names(model: Any, settings: dict[str, Any]) -> None:
    """Refuse module names that the model does not have; peft ignores them once one name matches."""
    names = [name for name, _ in model.named_modules()]
    linears = ", ".join(linear_suffixes(model))
    problems = [
        Problem(
            "target-modules-missing",
            f"the model has no module {wanted!r}; its linear layers are {linears}",
            path=f"adapter.{field}",
            hint="use names from that list, or target_modules: all-linear",
        )
        for field in ("target_modules", "modules_to_save")
        for wanted in unmatched(settings.get(field), names)
    ]
    problems += [
        Problem(
            "target-modules-missing",
            f"{key!r} matches no module, and peft would ignore it",
            path=f"adapter.{field}",
        )
        for field in ("rank_pattern", "alpha_pattern")
        for key in settings.get(field) or ()
        if not settings.get("target_parameters")
        and not any(re.match(rf"(.*\.)?({key})$", name) for name in names)
    ]
    problems += [idle_choice(field, value) for field, value in idle_choices(names, settings)]
    if problems:
        raise RecipeError(problems)


def unmatched(wanted: str | Sequence[str] | None, names: Iterable[str]) -> list[str]:
    """The wanted modules that no name of `names` matches, by the rules of peft.

    A list holds whole names or their ends; a single text is a pattern for whole names.
    """
    if not wanted or is_all_linear(wanted):
        return []
    names = list(names)
    if isinstance(wanted, str):
        return [] if any(re.fullmatch(wanted, name) for name in names) else [wanted]
    return [end for end in wanted if not any(name == end or name.endswith(f".{end}") for name in names)]


def linear_suffixes(model: Any) -> list[str]:
    """The last parts of the names of all linear layers, sorted; GPT-2's Conv1D is one."""
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, Conv1D)
    return sorted(
        {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)}
    )


def _has_conv1d(model: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return any(isinstance(module, Conv1D) for module in model.modules())


def _trainable_to_fp32(model: Any) -> None:
    """The gradient scaler of fp16 refuses fp16 gradients; peft leaves modules_to_save in fp16."""

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """Names without peft's own parts of them."""

    modules: tuple[str, ...]
    """With an adapter of their own."""
    parameters: tuple[str, ...]
    """With an adapter around them, `module.parameter`."""


def find_adapted(model: Any) -> AdapterNames:
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
    return AdapterNames(tuple(modules), tuple(parameters))


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
    return _head_and_embedding(model.get_base_model())


def _unasked(settings: Mapping[str, Any], found: AdapterNames, tied: Sequence[str]) -> list[str]:
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
