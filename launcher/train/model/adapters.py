"""LoRA adapters: attached, continued, and checked so that nothing is left out in silence."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from launcher.errors import Problem, RecipeError
from launcher.facts.lora import idle_choice, idle_choices, is_all_linear
from launcher.tasks import task_named
from launcher.train.job import Job
from launcher.train.model.adapted import check_adapted
from launcher.train.model.heads import head_modules
from launcher.train.model.processing import local_or_hub
from launcher.train.model.tokens import (
    added_ids,
    check_continued,
    find_embeddings,
    keep_rows_alone,
    matches,
    train_added_rows,
)
from launcher.train.upstream.model_seams import leave_casts_to_autocast

_REFUSALS = (
    ValueError, TypeError, AttributeError, LookupError, AssertionError, NotImplementedError, ImportError,
    re.error,
)  # fmt: skip
"""What peft raises for fields that it cannot use; a RuntimeError may be the device's."""


def attach_adapter(job: Job, model: Any, processing: Any, *, whole: bool = True) -> Any:
    """The model with the plan's adapter (the model itself when the plan has none), ready to train.

    processing: the tokenizer, for the ids of added tokens. whole: the model has all its layers, so that
    each name of the adapter must be in it.
    RecipeError when a named module is not in the model, or nothing would be trained.
    """
    checkpointing = bool(job.trainer.activation_checkpointing)
    if job.model.prepare_for_kbit:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    if job.model.enable_input_require_grads:
        require_input_grads(model)
    ids = added_ids(job, processing) if job.has_adapter and job.model.add_tokens else []
    asked = job.fields(job.adapter)
    autocast = job.adapter.autocast_adapter_dtype
    continued = job.adapter.path
    if continued:
        model = _continue_adapter(model, local_or_hub(continued), ids, autocast_adapter_dtype=autocast)
    elif job.has_adapter:
        model = new_adapter(asked, job.task.name, model, ids, sharded=job.zero_stage == 3, whole=whole)
    if ids:
        keep_rows_alone(model)
    if job.adapter.cast_input_dtype_enabled is False:
        leave_casts_to_autocast(model)
    if job.has_adapter and job.trainer.fp16:
        _trainable_to_fp32(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(Problem("nothing-trainable", "no parameter would be trained", path="adapter"))
    return model


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
    asked: Mapping[str, Any],
    task: str,
    model: Any,
    ids: Sequence[int] = (),
    *,
    sharded: bool = False,
    whole: bool = True,
) -> Any:
    """The model with a new LoRA adapter of the fields `asked`.

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
    if task_named(task).adds_head:
        settings["modules_to_save"] = _with_heads(settings.get("modules_to_save"), head_modules(model))
    if settings.get("modules_to_save") and model.main_input_name == "input_ids":
        settings = _keep_tied(settings, model)
    if _has_conv1d(model):
        settings.setdefault("fan_in_fan_out", True)  # peft would correct it, with a warning
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


def _keep_tied(settings: dict[str, Any], model: Any) -> dict[str, Any]:
    """One matrix for input and output stays one where it is trained whole; peft would copy it for each."""
    head = model.get_output_embeddings()
    if head is None or head.weight is not model.get_input_embeddings().weight:
        return settings
    both = (head, model.get_input_embeddings())
    names = [name for name, module in model.named_modules() if any(module is one for one in both)]
    if not any(matches(name, settings["modules_to_save"]) for name in names):
        return settings
    return {"ensure_weight_tying": True, **settings}


def _with_heads(given: Sequence[str] | None, heads: Sequence[str]) -> list[str]:
    """Heads are trained whole: they may be new, and peft adds only those named classifier and score."""
    return [*(given or ()), *(name for name in heads if name not in (given or ()))]


def _continue_adapter(
    model: Any, folder: str, ids: Sequence[int], *, autocast_adapter_dtype: bool = True
) -> Any:
    from peft import PeftModel

    try:
        continued = PeftModel.from_pretrained(
            model, folder, is_trainable=True, autocast_adapter_dtype=autocast_adapter_dtype
        )
    except (OSError, ValueError) as error:
        raise RecipeError(
            Problem(
                "adapter-missing",
                f"cannot continue the adapter: {error}",
                file=folder,
                path="adapter.path",
            )
        ) from error
    except pickle.UnpicklingError as error:
        raise RecipeError(
            Problem(
                "unsafe-pickle",
                f"the adapter holds more than tensors; code is not run: {first_lines(error, 1)}",
                file=folder,
                path="adapter.path",
                hint="take an adapter in safetensors",
            )
        ) from error
    except (IndexError, RuntimeError) as error:
        raise RecipeError(
            Problem(
                "adapter-mismatch",
                f"the adapter does not fit the model: {first_lines(error)}",
                file=folder,
                path="adapter.path",
                hint="name the base model, and the model.add_tokens, that it was trained with",
            )
        ) from error
    if ids:
        check_continued(continued, ids)
    return continued


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

    found = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D))
    }
    return sorted(found)


def _has_conv1d(model: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return any(isinstance(module, Conv1D) for module in model.modules())


def _trainable_to_fp32(model: Any) -> None:
    """The gradient scaler of fp16 refuses fp16 gradients; peft leaves modules_to_save in fp16."""

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
