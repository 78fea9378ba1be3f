"""LoRA adapters: attached, continued, and checked so that nothing is left out in silence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.job import Job
from launcher.train.models import local_or_hub


def attach_adapter(job: Job, model: Any) -> Any:
    """The model with the plan's adapter (the model itself when the plan has none), ready to train.

    RecipeError when a named module is not in the model, or nothing would be trained.
    """
    checkpointing = bool(job.value("trainer.activation_checkpointing", False))
    if job.value("model.prepare_for_kbit", False):
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    if job.value("model.enable_input_require_grads", False):
        model.enable_input_require_grads()
    continued = job.value("adapter.path")
    if continued:
        model = _continue_adapter(model, local_or_hub(continued))
    elif job.has_adapter:
        model = _new_adapter(model, job.section("adapter"))
    if job.has_adapter and job.value("trainer.fp16", False):
        _trainable_to_fp32(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(Problem("nothing-trainable", "no parameter would be trained", path="adapter"))
    return model


def _new_adapter(model: Any, settings: dict[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    del settings["type"]
    check_names(model, settings)
    try:
        return get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **settings}))
    except (ValueError, TypeError) as error:
        raise RecipeError(Problem("bad-adapter", str(error), path="adapter")) from error


def _continue_adapter(model: Any, folder: str) -> Any:
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, folder, is_trainable=True)
    except (OSError, ValueError) as error:
        raise RecipeError(
            Problem(
                "adapter-missing",
                f"cannot continue the adapter: {error}",
                file=folder,
                path="adapter.path",
            )
        ) from error


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
    if problems:
        raise RecipeError(problems)


def unmatched(wanted: str | Sequence[str] | None, names: Iterable[str]) -> list[str]:
    """The wanted modules that no name of `names` matches, by the rules of peft.

    A list holds whole names or their ends; a single text is a pattern for whole names.
    """
    if not wanted or wanted == "all-linear":
        return []
    names = list(names)
    if isinstance(wanted, str):
        return [] if any(re.fullmatch(wanted, name) for name in names) else [wanted]
    return [end for end in wanted if not any(name == end or name.endswith(f".{end}") for name in names)]


def linear_suffixes(model: Any) -> list[str]:
    """The last parts of the names of all linear layers, sorted."""
    import torch

    found = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    return sorted(found)


def _trainable_to_fp32(model: Any) -> None:
    """The gradient scaler of fp16 refuses fp16 gradients; peft leaves modules_to_save in fp16."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
