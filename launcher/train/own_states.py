"""Bytes that the optimizer of `python:` keeps of each trained value: `python -m launcher.train.own_states`.

Reads a request as JSON from standard input and answers with JSON on standard output. The model has its real
sizes on torch's meta device, so nothing is allocated: the hook makes its optimizer, which takes one step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError
from launcher.machine.child import read_request
from launcher.train.hooks import error_text, load_hooks
from launcher.train.job import Job

_PASSED = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_steps",
    "num_train_epochs", "optim_args",
)  # fmt: skip
"""Fields of `trainer` that an optimizer may read; others would ask for a device."""


def main() -> int:
    """Answer one request; a failure is an answer too: {"error": …}."""
    request = read_request()
    out, sys.stdout = sys.stdout, sys.stderr  # libraries and the user's code print
    warnings.simplefilter("ignore")
    answer: dict[str, Any]
    try:
        answer = {"bytes_of_value": bytes_of_value(Job(Path(), request["plan"]), request["config"])}
    except EffilaunchError as error:
        answer = {"error": str(error)}
    except Exception as error:  # whatever an optimizer does that tensors without values cannot
        answer = {"error": error_text(error)}
    json.dump(answer, out)
    return 0


def bytes_of_value(job: Job, config: Mapping[str, Any]) -> float:
    """Bytes of all states after one step, over the number of trained values. RecipeError as the hook's."""
    import torch
    from transformers import AutoConfig, TrainingArguments

    from launcher.train.model.models import auto_class

    hooks, trainer = load_hooks(job), job.fields(job.trainer)
    assert hooks.optimizer is not None, "asked for it alone"
    kind = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = auto_class(job.task.name).from_config(kind, dtype=getattr(torch, job.model.dtype))
    if hooks.prepare_model is not None:
        model = hooks.prepare_model(model)
    given = {name: trainer[name] for name in _PASSED if trainer.get(name) is not None}
    with tempfile.TemporaryDirectory() as folder:
        made = hooks.optimizer(model, TrainingArguments(output_dir=folder, use_cpu=True, **given))
    optimizer = made[0] if isinstance(made, tuple) else made
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    for one in trained:
        one.grad = torch.empty_like(one)
    optimizer.step()
    held: int = sum(one.numel() * one.element_size() for one in _tensors(optimizer.state))
    return held / float(sum(one.numel() for one in trained))


def _tensors(value: Any) -> Iterator[Any]:
    """All tensors in nested states."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


if __name__ == "__main__":
    sys.exit(main())
