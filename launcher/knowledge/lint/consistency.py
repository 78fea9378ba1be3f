"""Settings that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from launcher.knowledge.lint.document import Document, Edit, Finding, Member
from launcher.knowledge.lint.keys import deepspeed_version, vocabulary
from launcher.knowledge.lint.values import for_trainer
from launcher.recipe.suggestions import close_key

ZERO = "zero_optimization"
# Two buckets of 16-bit numbers each, 4.5 times (transformers' guide to DeepSpeed).
OVERLAP_BYTES_PER_ELEMENT = 4.5 * 2
DEFAULT_BUCKET = 500_000_000
LARGEST_DEVICE = 288e9
"""Bytes of the largest device there is."""


def check_conflicts(document: Document) -> Iterator[Finding]:
    """Everything that one file alone can say."""
    yield from _precision(document)
    yield from _batch(document)
    yield from _zero(document)
    yield from overlap(document, None)


def value(document: Document, dotted: str) -> Any:
    """The value at a dotted path; None where there is none."""
    member = document.member(dotted)
    return None if member is None else member.node.plain()


def stage(document: Document) -> int | None:
    """The ZeRO stage; None where the file leaves it open."""
    said = value(document, f"{ZERO}.stage")
    if said is None and document.member(f"{ZERO}.stage") is None:
        return 0
    return int(said) if str(said) in ("0", "1", "2", "3") else None


def _precision(document: Document) -> Iterator[Finding]:
    fp16 = document.member("fp16.enabled")
    for name in ("bf16", "bfloat16"):
        bf16 = document.member(f"{name}.enabled")
        if fp16 is None or bf16 is None or (fp16.node.value, bf16.node.value) != (True, True):
            continue
        later = max(fp16, bf16, key=lambda member: member.start)
        where = f"{name if later is bf16 else 'fp16'}.enabled"
        yield document.found(
            later.node.start,
            where,
            "ds-fp16-and-bf16",
            "fp16 and bf16 are both on; DeepSpeed refuses that",
            "switch one of them off",
        )


def _count(document: Document, key: str) -> int | None:
    found = value(document, key)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def _batch(document: Document) -> Iterator[Finding]:
    whole = document.member("train_batch_size")
    micro = document.member("train_micro_batch_size_per_gpu")
    if whole is None and micro is None:
        yield document.found(
            0 if document.root is None else document.root.start,
            "",
            "ds-no-batch-size",
            "neither train_batch_size nor train_micro_batch_size_per_gpu is here; DeepSpeed refuses that, "
            "and the Trainer fills only keys that are",
            'write "train_micro_batch_size_per_gpu": "auto"',
        )
    total = _count(document, "train_batch_size")
    each = _count(document, "train_micro_batch_size_per_gpu")
    steps = _count(document, "gradient_accumulation_steps") or 1
    if whole is None or total is None or each is None or total % (each * steps) == 0:
        return
    product = f"{each} x {steps}" if steps > 1 else f"{each}"
    yield document.found(
        whole.node.start,
        "train_batch_size",
        "ds-batch-mismatch",
        f"train_batch_size {total} is no multiple of {product} (micro-batch x accumulation), whatever the "
        "number of ranks",
        "leave train_batch_size out: DeepSpeed computes it",
        edits=document.removal("train_batch_size"),
    )


def _zero(document: Document) -> Iterator[Finding]:
    section = document.member(ZERO)
    if section is None:
        if for_trainer(document) and document.root is not None:
            yield document.found(
                document.root.start,
                ZERO,
                "ds-no-zero-block",
                "no zero_optimization section: accelerate refuses that",
                'write "zero_optimization": {"stage": 0}',
            )
        return
    old, new = document.member(f"{ZERO}.cpu_offload"), document.member(f"{ZERO}.offload_optimizer")
    if old is not None and new is not None and old.node.value is not None:
        yield document.found(
            old.start,
            f"{ZERO}.cpu_offload",
            "ds-alias-twice",
            "cpu_offload and offload_optimizer are one setting; DeepSpeed refuses both together",
            "remove cpu_offload",
            edits=document.removal(f"{ZERO}.cpu_offload"),
        )


def overlap(document: Document, device_bytes: float | None) -> Iterator[Finding]:
    """Buckets of overlap_comm that take more than a quarter of the device; without one, of the largest."""
    if value(document, f"{ZERO}.overlap_comm") is not True or stage(document) not in (1, 2, 3, None):
        return
    names = ["reduce_bucket_size"] + (["allgather_bucket_size"] if stage(document) in (1, 2) else [])
    sizes = {name: value(document, f"{ZERO}.{name}") for name in names}
    elements = [DEFAULT_BUCKET if size is None else size for size in sizes.values()]
    if not all(isinstance(size, int | float) and not isinstance(size, bool) for size in elements):
        return
    need = OVERLAP_BYTES_PER_ELEMENT * sum(elements)
    room = LARGEST_DEVICE if device_bytes is None else device_bytes / 4
    if need <= room:
        return
    written = document.member(f"{ZERO}.{names[0]}") or document.member(f"{ZERO}.overlap_comm")
    assert written is not None, "overlap_comm is here"
    whose = "a quarter of this device" if device_bytes is not None else "any device has"
    yield document.found(
        written.node.start,
        f"{ZERO}.{written.key}",
        "ds-bucket-memory",
        f"with overlap_comm the buckets take up to {need / 1e9:.1f} GB, more than {whose}",
        "write smaller buckets (200000000 on devices of 24 GB), or overlap_comm false",
        severity="warning",
    )


_GONE = ("onebitadam", "zerooneadam", "onebitlamb", "deepspeed_adam", "cpuadam", "fusedadam")


def check_blocks(document: Document) -> Iterator[Finding]:
    """Findings of `optimizer` and of `scheduler`."""
    yield from _optimizer(document)
    yield from _scheduler(document)


def offloads(document: Document) -> bool:
    """Whether the optimizer is on the CPU."""
    device = document.member("zero_optimization.offload_optimizer.device")
    old = document.member("zero_optimization.cpu_offload")
    return (device is not None and device.node.value in ("cpu", "nvme")) or (
        old is not None and old.node.value is True
    )


def _named(document: Document, block: str) -> tuple[Member, str] | None:
    member = document.member(f"{block}.type")
    if member is None or not isinstance(member.node.value, str) or member.node.value == "auto":
        return None
    return member, member.node.value


def _unknown_type(document: Document, block: str, member: Member, names: Sequence[str], what: str) -> Finding:
    name = member.node.value
    near = close_key(name, names)
    edits = (Edit(member.node.start, member.node.end, f'"{near}"'),) if near else ()
    hint = f"did you mean {near}?" if near else f"one of {', '.join(names)}"
    where = f"{block}.type"
    return document.found(member.node.start, where, f"ds-{block}-type", what, hint, edits=edits)


def _optimizer(document: Document) -> Iterator[Finding]:
    table: dict[str, Any] = vocabulary()["optimizers"]
    named = _named(document, "optimizer")
    if named is None:
        return
    member, name = named
    row = table.get(name.lower()) if table.get(name.lower(), {}).get("any_case") else table.get(name)
    if row is None and name.lower() in _GONE:
        yield document.found(
            member.node.start,
            "optimizer.type",
            "ds-optimizer-type",
            f"DeepSpeed {deepspeed_version()} has no {name}; building the engine fails",
            "write Adam or AdamW: offload chooses the one for the CPU",
        )
    elif row is None:
        said = f"neither DeepSpeed {deepspeed_version()} nor torch has an optimizer {name}"
        yield _unknown_type(document, "optimizer", member, ["AdamW", "Adam", "Lamb", "Lion", *table], said)
    elif row.get("device"):
        yield from _params(document, name, _taken(document, row), name.lower() == "muon")


def _taken(document: Document, row: dict[str, Any]) -> list[str]:
    """The parameters that the class takes which this file would get."""
    own = document.member("optimizer.params.torch_adam")
    if own is not None and own.node.value is True and "torch" in row:
        return list(row["torch"])
    return list(row["offload"] if offloads(document) and "offload" in row else row["device"])


def _params(document: Document, name: str, taken: Sequence[str], silent: bool) -> Iterator[Finding]:
    params = document.member("optimizer.params")
    for member in (params.node.members or ()) if params is not None else ():
        where = f"optimizer.params.{member.key}"
        if member.key == "max_grad_norm":
            clipped = document.member("gradient_clipping") is not None
            yield document.found(
                member.start,
                where,
                "ds-max-grad-norm-param",
                "`max_grad_norm` is no parameter of an optimizer; building the engine fails",
                "remove it: `gradient_clipping` is here"
                if clipped
                else "write `gradient_clipping` at the top",
                edits=document.removal(where) if clipped else (),
            )
        elif member.key not in taken:
            near = close_key(member.key, taken) or {"learning_rate": "lr"}.get(member.key)
            effect = "it is dropped without a word" if silent else "building the engine fails"
            hint = f"did you mean `{near}`?" if near else f"known here: {', '.join(taken)}"
            free = near is not None and params is not None and params.node.get(near) is None
            edits = (Edit(member.start, member.end, f'"{near}"'),) if free else ()
            message = f"`{member.key}` is no parameter of {name} here; {effect}"
            yield document.found(member.start, where, "ds-typo-nested", message, hint, edits=edits)


def _scheduler(document: Document) -> Iterator[Finding]:
    table: dict[str, dict[str, bool]] = vocabulary()["schedulers"]
    named = _named(document, "scheduler")
    if named is None:
        return
    member, name = named
    row = table.get(name)
    if row is None:
        said = f"neither DeepSpeed {deepspeed_version()} nor torch has a scheduler {name}"
        yield _unknown_type(document, "scheduler", member, list(table), said)
        return
    params = document.member("scheduler.params")
    given = {} if params is None else {m.key: m for m in params.node.members or ()}
    for key, inner in given.items():
        if key not in row:
            near = close_key(key, row)
            edits = (Edit(inner.start, inner.end, f'"{near}"'),) if near and near not in given else ()
            message = f"`{key}` is no parameter of {name}; building the engine fails"
            hint = f"did you mean `{near}`?" if near else f"known here: {', '.join(row)}"
            where = f"scheduler.params.{key}"
            yield document.found(inner.start, where, "ds-typo-nested", message, hint, edits=edits)
    for key, needed in row.items():
        if needed and key not in given:
            code = "ds-total-steps" if key == "total_num_steps" else "ds-scheduler-params"
            message = f"{name} needs `{key}`; building the engine fails without it"
            yield document.found(member.node.start, "scheduler.params", code, message, f"write `{key}`")
    warmup = given.get("warmup_num_steps")
    steps = None if warmup is None else warmup.node.value
    if warmup is not None and isinstance(steps, int) and not isinstance(steps, bool) and steps <= 0:
        message = f"DeepSpeed {deepspeed_version()} refuses {steps} warm-up steps"
        where = "scheduler.params.warmup_num_steps"
        yield document.found(warmup.node.start, where, "ds-warmup-zero", message, "write 1 or more")


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
