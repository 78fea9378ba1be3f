"""One training step of a fake model on a tape, cut into segments that are the same at every depth."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from launcher.train.tasks import train_task
from launcher.train.trace.model import Request
from launcher.train.trace.tape import Recorder, Tape, name_kinds

SINGLE_TENSOR, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}


def record_step(request: Request, model: Any, inputs: dict[str, torch.Tensor], logits: int) -> Tape:
    """The tape of the optimizer's step, then of forward and backward pass with its states in place.

    So every moment is that of a later step: states exist, and with accumulation so do gradients.
    logits: elements of the head's output.
    """
    recorder = Recorder()
    tape = recorder.tape
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    with recorder:
        states = {recorder.add(t) for t in (*parameters, *model.buffers())}
        tape.classify((i for i in states if i is not None), "weights")
        keeps = request.memory["accumulation"] != 1
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        tape.classify(_pieces(recorder, (p.grad for p in trained)), "gradients")
        recorder.begin("step")
        optimizer = _step(request, trained)
        if optimizer is not None:
            held = (t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t))
            tape.classify(_pieces(recorder, held), "optimizer")
        if not keeps:
            for parameter in trained:
                parameter.grad = None
        backward = _pass(request, model, inputs, recorder)
        tape.classify(_pieces(recorder, (p.grad for p in trained if p.grad is not None)), "gradients")
        recorder.begin("clip")
        if request.job.trainer.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=not request.on_cpu)
    name_kinds(tape, backward, logits)
    return tape


def _pieces(recorder: Recorder, tensors: Any) -> list[int]:
    return [index for index in map(recorder.add, tensors) if index is not None]


def _step(request: Request, trained: list[torch.Tensor]) -> torch.optim.Optimizer | None:
    """A step of torch's own optimizers; others keep states that the closed form knows."""
    name = request.memory["optim"]
    kind = FUSED if name.endswith("_fused") else SINGLE_TENSOR if request.on_cpu else FOREACH
    # Upstream's two groups: with weight decay, and biases and norms without.
    groups = [[p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]]
    given: Any = [{"params": group} for group in groups if group]
    if name in ("adamw_torch", "adamw_torch_fused"):
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(given, **kind)
    elif name == "sgd":
        optimizer = torch.optim.SGD(given, lr=1e-3, **kind)
    else:
        return None
    optimizer.step()
    return optimizer


def _pass(request: Request, model: Any, inputs: dict[str, torch.Tensor], recorder: Recorder) -> int:
    """Forward and backward pass; the index of the first event of the backward pass."""
    recorder.begin("forward")
    follow_layers(model, recorder)
    dtype = request.autocast
    mixed = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
    # While a step runs, its batch and the next one are there, both with a mask of their padding.
    batch, waiting = ({k: torch.empty_like(v) for k, v in inputs.items()} for _ in range(2))
    unused = [torch.empty_like(v) for name, v in inputs.items() if name == "input_ids" for _ in range(2)]
    with mixed:
        out = model(**batch, **_loss_arguments(request, model))
        if dtype is not None:  # accelerate turns the outputs into float32 behind its autocast
            out = {name: x.float() for name, x in out.items() if torch.is_tensor(x)}
    loss = out["loss"]
    del out
    backward = len(recorder.tape.events)
    recorder.phase = "backward"
    recorder.mark("head")
    loss.backward()
    del batch, waiting, unused
    return backward


def _loss_arguments(request: Request, model: Any) -> dict[str, Any]:
    """The Trainer gives models that take it the number of learnt tokens, so that the loss is a sum."""
    base = model.get_base_model() if request.job.has_adapter else model
    if train_task(request.task).counts_targets and getattr(base, "accepts_loss_kwargs", True):
        return {"num_items_in_batch": torch.tensor(1)}
    return {}


def follow_layers(model: Any, recorder: Recorder) -> None:
    """Hooks that begin a segment at each layer, forwards and backwards, and one behind the last."""
    for number, layers in enumerate(stacks(model)):
        for index, layer in enumerate(layers):
            place = "first" if index == 0 else "last" if index == len(layers) - 1 else "middle"
            _follow(layer, f"stack{number}-{place}", index == len(layers) - 1, recorder)


def _follow(layer: Any, place: str, is_last: bool, recorder: Recorder) -> None:
    def before(_module: Any, _args: Any) -> None:
        recorder.mark(place)

    def after(_module: Any, _args: Any, out: Any) -> None:
        tensor = out[0] if isinstance(out, tuple) else out
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _gradients: recorder.mark(place))
        if is_last:
            recorder.mark("head")

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def stacks(model: Any) -> list[Any]:
    """The lists of layers: the outermost module lists of at least two alike modules."""
    found: list[Any] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if any(name.startswith(outer + ".") for outer in inside):
            continue
        if isinstance(module, torch.nn.ModuleList) and len(module) > 1:
            inside = (*inside, name)
            found.append(module)
    return found
