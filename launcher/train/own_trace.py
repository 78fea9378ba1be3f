"""What a plan must know of the model and the datasets that hooks make: `python -m launcher.train.own_trace`.

Reads a request as JSON from standard input and answers with JSON on standard output (machine/child.py).
The hooks run here as in a rank. The model is made with fake tensors, which have shapes and dtypes alone; a
`make_model` that reads values is run again for real, and its weights are replaced by fake ones.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, Problem, RunFailed
from launcher.machine.child import answer
from launcher.train.job import Job

LOOKED_AT = 64
"""Samples from the first on, of which the largest is traced."""


def reply(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """`ask: model`: sizes of model and datasets; `ask: step`: the moments of a step. RunFailed where a step
    cannot be traced."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    job = Job(Path(), {"settings": request["settings"]})
    if request["ask"] == "model":
        return describe(job)
    try:
        return trace(job, request)
    except EffilaunchError:
        raise
    except Exception as error:  # whatever a model does that fake tensors cannot
        line = next(iter(str(error).strip().splitlines()), "")
        raise RunFailed(Problem("trace-failed", f"{type(error).__name__}: {line}")) from error


def describe(job: Job) -> dict[str, Any]:
    """Parameters, the rows of the datasets, and whether layers can be recomputed. Raises as own_data."""
    import torch

    from launcher.train.own import own_data, own_processing

    data = own_data(job, own_processing(job))
    ids = _largest(data).get("input_ids")

    def sizes(model: Any) -> dict[str, Any]:
        embedded = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        shapes = Counter((tuple(p.shape), id(p) in embedded) for p in model.parameters())
        return {
            "name": type(model).__name__,
            "params": sum(p.numel() for p in model.parameters()),
            "frozen": sum(p.numel() for p in model.parameters() if not p.requires_grad),
            "parameters": [
                {"shape": shape, "embedded": is_one, "count": n} for (shape, is_one), n in shapes.items()
            ],
            "recomputes": bool(getattr(model, "supports_gradient_checkpointing", False)),
        }

    return {
        **_of_fake_model(job, None, sizes),
        "length": None if ids is None or not torch.is_tensor(ids) else int(ids.shape[-1]),
        "looked_at": LOOKED_AT,
        "train_rows": data.counts["train"],
        "eval_rows": None if data.eval is None else data.counts["eval"],
    }


def _of_fake_model(job: Job, dtype: Any, work: Callable[[Any], Any]) -> Any:
    """What `work` makes of the hooks' model with fake tensors, floating ones in `dtype`, within their mode.

    The model is made of them at once; one that reads values is made for real, and its tensors replaced.
    """
    from launcher.train.hooks import load_hooks
    from launcher.train.own import own_config
    from launcher.train.upstream.torch_seams import fake_tensors

    hooks, config = load_hooks(job), own_config(job)
    assert hooks.make_model is not None, "a plan of this task has it"
    steps = [hooks.make_model, *([] if hooks.prepare_model is None else [hooks.prepare_model])]

    def made(calls: Sequence[Callable[[Any], Any]]) -> Any:
        return reduce(lambda value, call: call(value), calls, config)

    with fake_tensors():
        model = None
        with contextlib.suppress(Exception):
            model = _placed(made([inspect.unwrap(step) for step in steps]), dtype)
        if model is not None:
            return work(model)
    model = made(steps)
    with fake_tensors():
        return work(_placed(model, dtype))


def _placed(model: Any, dtype: Any) -> Any:
    """The model with fake CPU tensors, in a FakeTensorMode; tied weights stay tied. Modules' own ways swap
    tensors, which fake ones do not allow."""
    import torch

    from launcher.train.upstream.torch_seams import replace_tensors

    moved: dict[int, torch.Tensor] = {}

    def new(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            empty = torch.empty_like(tensor, device="cpu", dtype=kind)
            trained = isinstance(tensor, torch.nn.Parameter)
            moved[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if trained else empty
        return moved[id(tensor)]

    for module in model.modules():
        replace_tensors(module, new)
    return model


def _largest(data: Any) -> Mapping[str, Any]:
    """The collated batch of the largest of the first samples."""
    return max((data.collate([one]) for one in _first(data.train)), key=_size)


def _first(rows: Any) -> list[Any]:
    if hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
        return [rows[number] for number in range(min(LOOKED_AT, len(rows)))]
    return list(islice(iter(rows), LOOKED_AT))


def _size(batch: Any) -> int:
    from launcher.train.upstream.torch_seams import leaves

    return sum(
        one.numel() * one.element_size() for one in leaves(dict(batch)) if hasattr(one, "element_size")
    )


def trace(job: Job, request: Mapping[str, Any]) -> dict[str, Any]:
    """The moments of a step and the gradients' bytes, for micro-batches of the largest of the first samples.

    What a Trainer of the hooks adds to the model's own forward pass is not in them.
    """
    import torch
    import transformers

    from launcher.train.own import own_data, own_processing
    from launcher.train.trace.extend import extend, ruling, segment_rows, state_bytes
    from launcher.train.trace.model import Request
    from launcher.train.trace.run import device_of

    capability = request["capability"]
    asked = Request(
        job, request["memory"], {}, None, request["on_cpu"], tuple(capability) if capability else None
    )
    data = own_data(job, own_processing(job))
    collate = data.collate
    assert collate is not None, "own_data has one"
    row = max(_first(data.train), key=lambda one: _size(collate([one])))
    tapes: dict[tuple[tuple[int, ...], int], Any] = {}
    for batch in request["batches"]:
        inputs = collate([row] * batch)
        with device_of(asked):
            tapes[((1,), batch)] = _record(asked, inputs)
    parts = {corner: segment_rows(tape) for corner, tape in tapes.items()}
    return {
        "moments": ruling(extend(parts, [1])),
        "states": state_bytes(tapes, [1]),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _record(asked: Any, inputs: Mapping[str, Any]) -> Any:
    """The tape of one step with this batch."""
    import torch

    from launcher.train.trace.model import record_step

    if left := [name for name, value in inputs.items() if not torch.is_tensor(value)]:
        raise RunFailed(Problem("trace-failed", f"its batches hold more than tensors: {', '.join(left)}"))

    def step(model: Any) -> Any:
        fake = {name: torch.empty_like(value) for name, value in inputs.items()}
        return record_step(asked, _in_one_piece(_as_trained(asked, model)), fake, sys.maxsize)

    return _of_fake_model(asked.job, _dtype(asked), step)


def _dtype(asked: Any) -> Any:
    """Of the weights as the engine computes with them."""
    import torch

    memory = asked.memory
    precision = memory["precision"]
    if asked.job.engine.casts(precision) and precision != "fp32":
        return torch.bfloat16 if precision.startswith("bf16") else torch.float16
    return getattr(torch, memory["dtype"])


def _as_trained(asked: Any, model: Any) -> Any:
    """The model in training, recomputing its layers where the plan does."""
    if asked.memory["checkpointing"]:
        given = asked.job.trainer.activation_checkpointing_kwargs
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=given)
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False
    return model.train()


def _in_one_piece(model: Any) -> Any:
    """The model in a module whose stacks of layers the recorder does not look for; its loss by name."""
    import torch

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def get_base_model(self) -> torch.nn.Module:
            return torch.nn.Module()

        def forward(self, **inputs: Any) -> Mapping[str, Any]:
            out = self.inner(**inputs)
            return out if isinstance(out, Mapping) else {"loss": out[0]}

    return Whole()


def main() -> int:
    return answer(reply)


if __name__ == "__main__":
    sys.exit(main())
