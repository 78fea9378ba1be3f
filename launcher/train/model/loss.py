"""The loss of a causal LM in chunks of rows, without the full logits; and models that take target counts.

The head's own forward computes the loss, so that whatever an engine wraps around a module's call (ZeRO-3 and
FSDP gather its weights there) works as it does for logits. The model's own forward is kept, with all that it
adds to the loss.

torch.nn.functional.linear_cross_entropy does the same (torch 2.13), but sums the losses of 16-bit rows in 16
bits: 10368 instead of 10341, in bfloat16. On a CPU it also takes twice the time for them, and is not faster
for float32.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.nn import functional

from launcher.errors import Problem, RecipeError
from launcher.models.capabilities import chunk_rows
from launcher.rows.class_names import IGNORED
from launcher.train.data.host_counts import target_places


def chunk_loss(model: Any, *, without_values: bool = False) -> None:
    """Let `model`, with or without an adapter around it, compute its training loss in chunks.

    An evaluation, a call without labels and one for a part of the logits stay as they are.
    without_values: for fake tensors; every token counts as a target, and no value is read.
    RecipeError where the head is more than a matrix.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise _refusal(base, f"its head is a {type(head).__name__}, not a plain Linear")
    _Chunks(base, head, without_values=without_values)


class _Chunks:
    """What one forward of the model, its head and its loss function share."""

    def __init__(self, model: Any, head: torch.nn.Linear, *, without_values: bool) -> None:
        self._model = model
        self._without_values = self._checked = without_values
        self._clear()
        self._forward: Callable[..., Any] = model.forward
        self._loss: Callable[..., Any] = model.loss_function

        def forward(_: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self._of_model(*args, **kwargs)

        # Not by `wraps`: accelerate takes off whatever names what it wraps.
        forward.__signature__ = _with_self(self._forward)  # type: ignore[attr-defined]
        model.forward = MethodType(forward, model)
        model.loss_function = self._of_loss
        head.forward = MethodType(self._of_head, head)

    def _clear(self) -> None:
        self._targets: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._count: Any = None
        self._mean: torch.Tensor | None = None
        self._taken = False

    def _of_model(self, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if labels is None or not self._model.training or not torch.is_grad_enabled() or _in_part(kwargs):
            return self._forward(*args, **kwargs)
        targets = kwargs.get("shift_labels")
        if targets is None:
            targets = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        # Looked for before the layers are queued: if the host has not counted them, it waits for the device.
        self._rows = self._target_rows(targets.reshape(-1), labels)
        self._targets = targets
        self._count = kwargs.get("num_items_in_batch")
        try:
            found = self._forward(*args, **kwargs)
            if not self._taken:
                raise _refusal(self._model, "its forward does not hand the logits to its loss function")
            return found
        finally:
            self._clear()

    def _target_rows(self, targets: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Indices of the targets that are not masked, of [n]."""
        if self._without_values:
            return torch.arange(len(targets), device=targets.device)
        return target_places(targets, labels)

    def _of_head(self, head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Logits; while a loss is to be computed, the loss itself in their place.

        hidden: [..., width]; the targets have the shape without the width.
        """
        if self._targets is None or self._rows is None:
            return functional.linear(hidden, head.weight, head.bias)
        if self._mean is not None:
            raise _refusal(self._model, "its head is called more than once in a forward")
        if hidden.shape[:-1] != self._targets.shape:
            shapes = f"{list(hidden.shape[:-1])} rows for {list(self._targets.shape)} labels"
            raise _refusal(self._model, f"its head is not given every token: {shapes}")
        targets = self._targets.reshape(-1).to(hidden.device)
        rows = self._rows.to(hidden.device)
        kept = hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows)
        if torch.is_autocast_enabled(hidden.device.type):
            kept = kept.to(torch.get_autocast_dtype(hidden.device.type))
        total = SummedLoss.apply(kept, head.weight, head.bias, targets.index_select(0, rows))
        count = len(rows) if self._count is None else self._count
        self._mean = total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)
        return self._mean

    def _of_loss(
        self, logits: Any, labels: Any = None, *args: Any, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        if self._mean is None:
            return self._loss(logits, labels, *args, num_items_in_batch=num_items_in_batch, **kwargs)
        mean = self._mean.detach()
        if not self._checked:  # once, since it waits for the device
            if logits.dim() or not _same(logits, mean.to(logits.dtype)):
                raise _refusal(self._model, "its forward changes the logits before the loss")
            self._checked = True
        self._taken = True
        if logits.dtype == mean.dtype:
            return logits
        # FSDP2 casts what a module returns to 16 bits. The value is taken from before that; the gradient that
        # is rounded on its way back is the number of ranks, or a loss scale.
        return logits + (mean - logits.detach())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Two losses, which may both be nan."""
    return bool(torch.allclose(one.detach(), other, rtol=0, atol=0, equal_nan=True))


def _in_part(kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for what only whole logits give."""
    keep = kwargs.get("logits_to_keep", 0)
    return "ignore_index" in kwargs or isinstance(keep, torch.Tensor) or bool(keep)


def _with_self(method: Callable[..., Any]) -> Any:
    signature = inspect.signature(method)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def _refusal(model: Any, why: str) -> RecipeError:
    message = f"the loss of {type(model).__name__} cannot be computed in chunks: {why}"
    hint = "model.loss: full"
    return RecipeError(Problem("chunked-loss", message, path="model.loss", hint=hint))


class SummedLoss(torch.autograd.Function):
    """Sum of the cross entropies of rows (float32, 0-d), with the gradients made on the way.

    rows [n, width] in the dtype to multiply in; weight [vocabulary, width] and bias [vocabulary] or None in
    any dtype; targets [n], int64. As in the plain way, products are taken in the rows' dtype and the softmax
    in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        of_rows, of_weight, of_bias = ctx.needs_input_grad[:3]
        grads = (
            torch.empty_like(rows) if of_rows else None,
            _wide_zeros(weight) if of_weight else None,
            _wide_zeros(bias) if of_bias and bias is not None else None,
        )
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        step = chunk_rows(len(weight))
        with torch.autocast(rows.device.type, enabled=False):
            matrix, offset = weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)
            for start in range(0, len(rows), step):
                part = slice(start, start + step)
                total += _add_chunk(rows[part], matrix, offset, targets[part], grads, part)
        own = (rows, weight, bias)
        ctx.save_for_backward(*(g if g is None else g.to(x.dtype) for g, x in zip(grads, own, strict=True)))
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In place: a second backward through the same graph is refused by torch, not answered wrongly.
        return (*(None if own is None else own.mul_(grad) for own in ctx.saved_tensors), None)


def _wide_zeros(like: torch.Tensor) -> torch.Tensor:
    """For a sum over chunks, which 16 bits would round at each of them."""
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def _add_chunk(
    rows: torch.Tensor,
    matrix: torch.Tensor,
    offset: torch.Tensor | None,
    targets: torch.Tensor,
    grads: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    part: slice,
) -> torch.Tensor:
    """The summed loss of some rows; adds their share to the gradients that are wanted."""
    scores = functional.log_softmax(functional.linear(rows, matrix, offset), dim=-1, dtype=torch.float32)
    at = targets[:, None]
    loss = -scores.gather(1, at).sum()
    of_rows, of_weight, of_bias = grads
    if of_rows is None and of_weight is None and of_bias is None:
        return loss
    errors = scores.exp_().scatter_add_(1, at, scores.new_full(at.shape, -1.0)).to(rows.dtype)
    if of_rows is not None:
        torch.mm(errors, matrix, out=of_rows[part])
    if of_weight is not None and of_weight.dtype == rows.dtype:
        of_weight.addmm_(errors.T, rows)
    elif of_weight is not None:
        of_weight.add_(errors.T @ rows)
    if of_bias is not None:
        of_bias.add_(errors.sum(0))
    return loss


def takes_token_counts(model: Any) -> bool:
    """Whether the forward of `model` (without an adapter around it) hands its keywords to a loss.

    Read from its source: a call with `**` of something named like a loss. True where there is no source to
    read, which is what the Trainer assumes of all.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(model).forward)))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return True
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(
        "loss" in ast.unparse(call.func).lower() and any(word.arg is None for word in call.keywords)
        for call in calls
    )


def adds_router_loss(model: Any) -> bool:
    """Whether the forward of `model` adds the auxiliary loss of its routers to that of the labels."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "output_router_logits", False))
