"""Values that DeepSpeed reads and, because of another key, refuses or replaces when the engine is built.

Checked against DeepSpeed 0.19.8: runtime/config.py `_do_error_check`, runtime/precision_config.py,
runtime/base_optimizer.py `_configure_master_weights`, runtime/lr_schedules.py, runtime/zero/stage3.py and
stage_1_and_2.py `__init__`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.lint.blocks import offloads
from launcher.lint.conflicts import ZERO, stage, value
from launcher.lint.finding import Finding
from launcher.lint.positions import Document

_DYNAMIC = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
"""Read by the loss scaler that adapts itself, which a fixed loss_scale replaces."""
_WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def check_combinations(document: Document) -> Iterator[Finding]:
    """Everything of the docstring, in one file."""
    yield from _loss_scale(document)
    yield from _low_precision_weights(document)
    yield from _gradients(document)
    yield from _warmup(document)


def _number(document: Document, where: str) -> float | None:
    found = value(document, where)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def _refused(document: Document, where: str, why: str, hint: str, code: str = "ds-wrong-value") -> Finding:
    member = document.member(where)
    assert member is not None, "it was read before"
    given = document.text[member.node.start : member.node.end]
    return document.found(member.node.start, where, code, f"`{member.key}` = {given[:40]}: {why}", hint)


def _loss_scale(document: Document) -> Iterator[Finding]:
    """Of fp16: a scale that adapts itself has to stay above 0, and a fixed one does not adapt itself."""
    if value(document, "fp16.enabled") not in (True, "auto"):
        return
    if document.member("fp16.loss_scale") is not None and (_number(document, "fp16.loss_scale") or 0) > 0:
        for key in _DYNAMIC:
            member = document.member(f"fp16.{key}")
            if member is not None and member.node.value not in (None, False):
                yield document.found(
                    member.start,
                    f"fp16.{key}",
                    "ds-no-effect",
                    f"`{key}` does nothing with a fixed loss_scale",
                    'remove it, or write "loss_scale": 0',
                    severity="warning",
                    edits=document.removal(f"fp16.{key}"),
                )
        return
    for key in ("loss_scale_window", "min_loss_scale"):
        given = _number(document, f"fp16.{key}")
        if given is not None and given <= 0:
            why = "must be more than 0 while the loss scale adapts itself"
            yield _refused(document, f"fp16.{key}", why, "write 1 or more")


def _low_precision_weights(document: Document) -> Iterator[Finding]:
    level = None if document.member(f"{ZERO}.stage") is None else stage(document)
    states = value(document, "bf16.bf16_optimizer_states") is True
    for kind in ("fp16", "bf16"):
        where = f"{kind}.{kind}_master_weights_and_grads"
        if value(document, where) is not True:
            continue
        if level == 0:
            yield _refused(
                document, where, "refused at stage 0", "write a stage from 1 to 3", "ds-stage-refuses"
            )
        elif level is not None and not offloads(document) and not (kind == "bf16" and states):
            why = "refused without offload_optimizer: DeepSpeed's CPU Adam alone keeps such weights"
            yield _refused(document, where, why, "offload the optimizer, or remove it")
    if states and value(document, "bf16.bf16_master_weights_and_grads") is not True:
        why = "refused without bf16_master_weights_and_grads"
        yield _refused(
            document, "bf16.bf16_optimizer_states", why, "write bf16_master_weights_and_grads: true"
        )


def _gradients(document: Document) -> Iterator[Finding]:
    level = None if document.member(f"{ZERO}.stage") is None else stage(document)
    clip = _number(document, "gradient_clipping")
    if clip is not None and clip < 0:
        yield _refused(document, "gradient_clipping", "no gradient is clipped", "write 0 for that, or more")
    if document.member("steps_per_print") is not None and _number(document, "steps_per_print") == 0:
        yield _refused(
            document, "steps_per_print", "the first step divides by it", "leave it out to print nothing"
        )
    unnormed = value(document, f"{ZERO}.compute_grad_norm") is False
    if unnormed and level in (1, 2) and value(document, "gradient_clipping") != 0:
        why = "refused unless gradient_clipping is 0, which is 1.0 where it is left out"
        yield _refused(document, f"{ZERO}.compute_grad_norm", why, 'write "gradient_clipping": 0')
    if level in (2, 3) and value(document, f"{ZERO}.reduce_scatter") is not False:
        for key, usual in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
            if value(document, key) not in (None, usual, "auto"):
                why = f"refused at stage {level} unless reduce_scatter is false, which is on by default"
                hint = f'remove it, or write "reduce_scatter": false in {ZERO}'
                yield _refused(document, key, why, hint, "ds-stage-refuses")
    quantized = f"{ZERO}.zero_quantized_weights"
    if (
        level == 3
        and value(document, quantized) is True
        and value(document, "torch_autocast.enabled") is True
    ):
        yield _refused(document, quantized, "refused beside torch_autocast", "remove one of them")


def _warmup(document: Document) -> Iterator[Finding]:
    if value(document, "scheduler.type") not in _WARMUPS:
        return
    params = "scheduler.params"
    form: Any = value(document, f"{params}.warmup_type")
    if form not in (None, "log", "linear", "auto"):
        why = "DeepSpeed knows log and linear, and takes log in its place"
        yield _refused(document, f"{params}.warmup_type", why, 'write "log" or "linear"')
    total, warmup = (
        _number(document, f"{params}.total_num_steps"),
        _number(document, f"{params}.warmup_num_steps"),
    )
    if total is not None and warmup is not None and 0 < total < warmup:
        why = f"fewer than the {warmup:g} steps of the warm-up, whose end is never reached"
        yield _refused(document, f"{params}.total_num_steps", why, "write the steps of the whole run")
