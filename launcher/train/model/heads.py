"""Classification heads: the order of the labels, the head's modules, what starts from random values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.job import Job
from launcher.train.model.processing import hub_options, model_reference, own_code


def label_order(job: Job, found: Sequence[str]) -> tuple[str, ...]:
    """The labels by id: the checkpoint's order when it knows exactly these, else as they are in `found`.

    Reads the configuration of the weights; RecipeError when there is none.
    """
    known: Mapping[str, int] = load_config(job).label2id or {}
    if set(known) == set(found):
        return tuple(sorted(known, key=lambda label: known[label]))
    return tuple(dict.fromkeys(found))


def load_config(job: Job) -> Any:
    """The model's configuration, as transformers reads it. RecipeError when there is none."""
    from transformers import AutoConfig

    config = job.model.config
    if config:
        return AutoConfig.for_model(**config)
    reference = model_reference(job)
    try:
        return AutoConfig.from_pretrained(reference, **hub_options(job))
    except (OSError, ValueError) as error:
        raise own_code(error, str(reference)) or RecipeError(
            Problem("model-missing", f"cannot read {reference}: {error}", path="model.name_or_path")
        ) from error


def label_settings(job: Job, labels: Sequence[str] | None) -> dict[str, Any]:
    """Configuration fields of a head for these labels; nothing for tasks without labels."""
    if job.task.num_labels is not None:
        return {"num_labels": job.task.num_labels}
    if not job.task.classifies or labels is None:
        return {}
    names = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
    }
    # A checkpoint may have been a regression, or have had several labels a row.
    kind = {"problem_type": "single_label_classification"} if job.task.head == "classifier" else {}
    return {**names, **kind}


def head_modules(model: Any) -> list[str]:
    """Names of the modules outside the body of a classification model, those that hold parameters."""
    return [
        name
        for name, module in model.named_children()
        if name != model.base_model_prefix and any(True for _ in module.parameters())
    ]


def check_loaded(job: Job, model: Any, info: Mapping[str, Any]) -> None:
    """Say which weights the checkpoint did not give, or not in this shape.

    RecipeError when the shapes differ elsewhere than in a classification head.
    """
    heads = head_modules(model) if job.task.adds_head else []
    differing = {str(entry[0]): entry[1:] for entry in info.get("mismatched_keys") or ()}
    wrong = [name for name in sorted(differing) if name.partition(".")[0] not in heads]
    if wrong:
        there, here = (tuple(shape) for shape in differing[wrong[0]][:2])
        raise RecipeError(
            Problem(
                "weights-mismatch",
                f"{wrong[0]} is {there} in the checkpoint and {here} in the model",
                path="model.name_or_path",
                hint="the weights do not belong to this configuration",
            )
        )
    absent = sorted(set(info.get("missing_keys") or ()) | set(differing))
    if absent:
        shown = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        print(f"newly initialised, not from the checkpoint: {shown}")
    elif heads:
        print(f"the classification head {' and '.join(heads)} starts from the checkpoint's weights")
