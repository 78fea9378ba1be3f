"""Find settings of one file that contradict each other, and keys that its ZeRO stage or device ignores.

Checked against DeepSpeed 0.19.8: runtime/config.py `_do_error_check`, runtime/precision_config.py,
runtime/base_optimizer.py `_configure_master_weights`, runtime/lr_schedules.py, runtime/engine.py
`_configure_zero_optimizer` (which keys each stage's optimizer gets), runtime/zero/config.py, and `__init__`
of runtime/zero/stage3.py and stage_1_and_2.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from launcher.engines.deepspeed_config import STAGE3_ONLY
from launcher.knowledge.lint.document import Document, LintFinding, Member, TextEdit
from launcher.knowledge.lint.keys import deepspeed_version, fits, vocabulary
from launcher.knowledge.lint.values import check_value, for_trainer
from launcher.recipe.suggestions import close_key, is_spelling

ZERO = "zero_optimization"
# Two buckets of 16-bit numbers each, 4.5 times (transformers' guide to DeepSpeed).
OVERLAP_BYTES_PER_ELEMENT = 4.5 * 2
DEFAULT_BUCKET = 500_000_000
LARGEST_DEVICE = 288e9
"""Bytes of the largest device there is."""

# Handed to no optimizer, whatever the stage. At stages 1 and 2, true is what happens anyway.
READ_NOWHERE = frozenset({"allgather_partitions"})
_OFF_BY_DEFAULT = frozenset({"round_robin_gradients", "parameter_alignment", "elastic_checkpoint"})
"""Off unless they are set, so that false has no effect."""
BELOW_STAGE3_ONLY = _OFF_BY_DEFAULT | {
    "allgather_bucket_size",
    "ignore_unused_parameters",
    "use_multi_rank_bucket_allreduce",
}
"""Not handed to the optimizer of stage 3."""
_ANY_STAGE_BUT_0 = frozenset({"contiguous_gradients", "reduce_scatter", "overlap_comm", "reduce_bucket_size"})
_READ_BY_BLOCK = {"allgather_bucket_size": "pipeline", "reduce_bucket_size": "compile"}
"""Key -> the section that reads it, too."""
_ALLOWED = {"compute_grad_norm": (False, (1, 2)), "legacy_stage1": (True, (0,))}
"""Key -> a value, and the stages that accept it."""
_NVME_ONLY = {
    "offload_optimizer": ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write"),
    "offload_param": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}
_DYNAMIC_SCALE = (
    "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale",
)  # fmt: skip
"""Read by the dynamic loss scaler, which a fixed loss_scale replaces."""
_WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_DECAY_FROM = 0.001
"""WarmupDecayLR's warmup_max_lr where the file has none."""
ZERO_TESTED = ("adam", "adamw", "adagrad", "lion", "muon", "muadam", "muadamw")
"""Optimizers with which ZeRO trains without `zero_allow_untested_optimizer`, in small letters."""


def stage(document: Document) -> int | None:
    """The ZeRO stage; 0 without the key, None where the file leaves it open."""
    given = document.value(f"{ZERO}.stage")
    if given is None and document.member(f"{ZERO}.stage") is None:
        return 0
    return int(given) if str(given) in ("0", "1", "2", "3") else None


def written_stage(document: Document) -> int | None:
    """The ZeRO stage; None where it is missing, as in a base profile, or open."""
    return None if document.member(f"{ZERO}.stage") is None else stage(document)


def offloads(document: Document) -> bool:
    """Whether the optimizer is on the CPU."""
    device = document.value(f"{ZERO}.offload_optimizer.device")
    return device in ("cpu", "nvme") or document.value(f"{ZERO}.cpu_offload") is True


def _number(document: Document, where: str) -> int | float | None:
    found = document.value(where)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def check_conflicts(document: Document) -> Iterator[LintFinding]:
    """Find contradictions within one file."""
    yield from _precision(document)
    yield from _batch(document)
    yield from _zero(document)
    yield from overlap(document, None)
    for refusals in (_refused_precision, _refused_gradients, _refused_warmup):
        for where, why, hint, code in refusals(document, written_stage(document)):
            if document.member(where) is not None:
                message = f"`{where.rpartition('.')[2]}` = {document.source(where)[:40]}: {why}"
                yield document.report(where, code, message, hint, at_value=True)


def _precision(document: Document) -> Iterator[LintFinding]:
    for name in ("fp16", "bf16"):
        section = document.member(name)
        if section is not None and section.node.members is not None and section.node.get("enabled") is None:
            message = f"`{name}` without `enabled` is off, and the Trainer does not switch it on"
            yield document.report(name, "ds-not-enabled", message, 'write "enabled": "auto", true or false')
    fp16 = document.member("fp16.enabled")
    for name in ("bf16", "bfloat16"):
        bf16 = document.member(f"{name}.enabled")
        if fp16 and bf16 and (fp16.node.value, bf16.node.value) == (True, True):
            where = f"{name}.enabled" if bf16.start > fp16.start else "fp16.enabled"
            message = "fp16 and bf16 are both enabled; DeepSpeed refuses that"
            yield document.report(where, "ds-fp16-and-bf16", message, "disable one of them", at_value=True)


def _batch(document: Document) -> Iterator[LintFinding]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if document.member(keys[0]) is None and document.member(keys[1]) is None:
        message = (
            "train_batch_size and train_micro_batch_size_per_gpu are both missing; DeepSpeed refuses that, "
            "and the Trainer fills only existing keys"
        )
        hint = 'write "train_micro_batch_size_per_gpu": "auto"'
        yield document.report("", "ds-no-batch-size", message, hint)
    counts = (_number(document, key) for key in keys)
    total, each, steps = (n if isinstance(n, int) and n > 0 else None for n in counts)
    if total is None or each is None or total % (each * (steps or 1)) == 0:
        return
    product = f"{each} x {steps}" if (steps or 1) > 1 else f"{each}"
    message = f"train_batch_size {total} is not a multiple of {product} (micro-batch x accumulation) for any "
    message += "number of ranks"
    hint = "write a multiple, or remove it: DeepSpeed computes it"
    yield document.report(keys[0], "ds-batch-mismatch", message, hint, at_value=True)


def _zero(document: Document) -> Iterator[LintFinding]:
    if document.member(ZERO) is None:
        if for_trainer(document):
            message = "zero_optimization is missing: accelerate requires it"
            hint = 'write "zero_optimization": {"stage": 0}'
            yield document.report(ZERO, "ds-no-zero-block", message, hint)
        return
    old, new = f"{ZERO}.cpu_offload", f"{ZERO}.offload_optimizer"
    if document.value(old) is not None and document.member(new) is not None:
        message = "cpu_offload and offload_optimizer are the same setting; DeepSpeed refuses both together"
        is_same = document.value(old) is (document.value(f"{new}.device") == "cpu")
        yield document.report(old, "ds-alias-twice", message, "remove cpu_offload", remove=is_same)


def overlap(document: Document, device_bytes: float | None) -> Iterator[LintFinding]:
    """Buckets of overlap_comm that use more than a quarter of the device; without one, of the largest."""
    level = stage(document)
    if document.value(f"{ZERO}.overlap_comm") is not True or level == 0:
        return
    names = ["reduce_bucket_size"] + (["allgather_bucket_size"] if level in (1, 2) else [])
    sizes = [document.value(f"{ZERO}.{name}") for name in names]
    elements = [DEFAULT_BUCKET if size is None else size for size in sizes]
    if not all(isinstance(size, int | float) and not isinstance(size, bool) for size in elements):
        return
    need = OVERLAP_BYTES_PER_ELEMENT * sum(elements)
    if need <= (LARGEST_DEVICE if device_bytes is None else device_bytes / 4):
        return
    where = f"{ZERO}.{names[0]}" if document.member(f"{ZERO}.{names[0]}") else f"{ZERO}.overlap_comm"
    most = "a quarter of this device" if device_bytes is not None else "any device has"
    message = f"with overlap_comm the buckets use up to {need / 1e9:.1f} GB, more than {most}"
    hint = "use smaller buckets (200000000 on 24 GB devices), or set overlap_comm to false"
    yield document.report(where, "ds-bucket-memory", message, hint, at_value=True, severity="warning")


def _scales_dynamically(document: Document) -> bool:
    fixed = (_number(document, "fp16.loss_scale") or 0) > 0
    return document.value("fp16.enabled") in (True, "auto") and not fixed


_VALUE, _STAGE = "ds-wrong-value", "ds-stage-refuses"
_Refusals = Iterator[tuple[str, str, str, str]]
"""Values that DeepSpeed refuses or replaces because of another key: path, reason, hint, code."""


def _refused_precision(document: Document, level: int | None) -> _Refusals:
    value = document.value
    for where in ("fp16.loss_scale_window", "fp16.min_loss_scale"):
        if _scales_dynamically(document) and (_number(document, where) or 0) <= 0:
            yield where, "must be more than 0 with a dynamic loss scale", "write 1 or more", _VALUE
    states = value("bf16.bf16_optimizer_states") is True
    for kind in ("fp16", "bf16"):
        where = f"{kind}.{kind}_master_weights_and_grads"
        if value(where) is not True:
            continue
        if level == 0:
            yield where, "refused at stage 0", "write a stage from 1 to 3", _STAGE
        elif level is not None and not offloads(document) and not (kind == "bf16" and states):
            why = "refused without offload_optimizer: only DeepSpeedCPUAdam supports it"
            yield where, why, "offload the optimizer, or remove it", _VALUE
    if states and value("bf16.bf16_master_weights_and_grads") is not True:
        why, hint = (
            "refused without bf16_master_weights_and_grads",
            "write bf16_master_weights_and_grads: true",
        )
        yield "bf16.bf16_optimizer_states", why, hint, _VALUE


def _refused_gradients(document: Document, level: int | None) -> _Refusals:
    value = document.value
    if (_number(document, "gradient_clipping") or 0) < 0:
        yield "gradient_clipping", "must not be negative", "write 0 to disable clipping", _VALUE
    if _number(document, "steps_per_print") == 0:
        yield "steps_per_print", "the first step divides by it", "remove it to print nothing", _VALUE
    where = f"{ZERO}.compute_grad_norm"
    if value(where) is False and level in (1, 2) and value("gradient_clipping") != 0:
        why = "refused unless gradient_clipping is 0 (the default is 1.0)"
        yield where, why, 'write "gradient_clipping": 0', _VALUE
    if level in (2, 3) and value(f"{ZERO}.reduce_scatter") is not False:
        for where, usual in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
            if value(where) not in (None, usual, "auto"):
                why = f"refused at stage {level} unless reduce_scatter is false (the default is true)"
                yield where, why, f'remove it, or write "reduce_scatter": false in {ZERO}', _STAGE
    where = f"{ZERO}.zero_quantized_weights"
    if level == 3 and value(where) is True and value("torch_autocast.enabled") is True:
        yield where, "refused together with torch_autocast", "remove one of them", _VALUE


def _refused_warmup(document: Document, _: int | None) -> _Refusals:
    kind = document.value("scheduler.type")
    if kind not in _WARMUPS:
        return
    where = "scheduler.params.total_num_steps"
    total, warmup = _number(document, where), _number(document, "scheduler.params.warmup_num_steps")
    if total is not None and warmup is not None and 0 < total < warmup:
        why = f"fewer than the {warmup:g} warm-up steps"
        yield where, why, "write the number of steps of the run", _VALUE
    low, high, rate = (
        _number(document, where)
        for where in (
            "scheduler.params.warmup_min_lr",
            "scheduler.params.warmup_max_lr",
            "optimizer.params.lr",
        )
    )
    if kind == "WarmupDecayLR" and document.member("scheduler.params.warmup_max_lr") is None:
        high = _DECAY_FROM
    if kind == "WarmupCosineLR" or high is None:
        return
    if low is not None and low > high:
        why = f"above warmup_max_lr {high:g}: the rate falls during the warm-up"
        yield "scheduler.params.warmup_min_lr", why, "write a lower rate", _VALUE
    if rate is not None and rate != high:
        why = f"{kind} replaces it by its warmup_max_lr {high:g}"
        yield "optimizer.params.lr", why, "write one rate for both", "ds-rate-replaced"


def check_effects(document: Document) -> Iterator[LintFinding]:
    """Find keys without effect, and keys that the stage refuses."""
    if document.value("fp16.enabled") in (True, "auto") and not _scales_dynamically(document):
        for key in _DYNAMIC_SCALE:
            if document.value(where := f"fp16.{key}") not in (None, False):
                hint = 'remove it, or write "loss_scale": 0'
                yield _no_effect(document, where, "with a fixed loss_scale", hint)
    yield from (
        trainers_checkpointing(document) if for_trainer(document) else _contiguous_checkpoints(document)
    )
    section, level = document.member(ZERO), written_stage(document)
    for member in (section.node.members or ()) if section is not None else ():
        where = f"{ZERO}.{member.key}"
        if member.key in _NVME_ONLY:
            yield from _offload(document, member, where, level)
            continue
        reason = _reason(document, member.key, member.node.plain(), level)
        if reason is not None:
            yield _no_effect(document, where, f"at stage {level}: {reason[0]}", reason[1], member)
        refused, stages = _ALLOWED.get(member.key, (None, ()))
        if level is not None and level not in stages and member.node.value is refused is not None:
            message = f"`{member.key}` = {str(refused).lower()} is refused at stage {level}"
            yield document.report(where, "ds-stage-refuses", message, "remove it", member=member, remove=True)


def _no_effect(
    document: Document, where: str, why: str, hint: str, member: Member | None = None
) -> LintFinding:
    message = f"`{where.rpartition('.')[2]}` has no effect {why}"
    remove = hint == "remove it"
    return document.report(
        where, "ds-no-effect", message, hint, member=member, severity="warning", remove=remove
    )


def _reason(document: Document, key: str, given: Any, level: int | None) -> tuple[str, str] | None:
    """Why a key of `zero_optimization` has no effect, and what to do; None where it has one."""
    name = key.removeprefix("stage3_")
    if given is None or level is None:
        return None
    if name in STAGE3_ONLY:
        ignored = level < 3 and given is not False and not _gathers_parts(document, key)
        return ("only stage 3 reads it", "set stage 3, or remove it") if ignored else None
    if name in READ_NOWHERE:
        is_default = given == "auto" or (given is True and level in (1, 2))
        return None if is_default else (f"DeepSpeed {deepspeed_version()} never reads it", "remove it")
    if given == "auto" or (given is False and (level == 0 or name in _OFF_BY_DEFAULT)):
        return None
    if level == 0 and name in BELOW_STAGE3_ONLY | _ANY_STAGE_BUT_0:
        by_block = name in _READ_BY_BLOCK and document.member(_READ_BY_BLOCK[name]) is not None
        return None if by_block else ("nothing is sharded", "set another stage, or remove it")
    if level == 3 and name in BELOW_STAGE3_ONLY:
        return "only stages 1 and 2 read it", "remove it"
    if name == "ignore_unused_parameters" and given is False and not offloads(document):
        return "it is read only with offload_optimizer", "remove it"
    return None


def _gathers_parts(document: Document, key: str) -> bool:
    """Whether accelerate reads the key at other stages, too, to gather the shards of AutoTP."""
    size = document.value("tensor_parallel.autotp_size")
    return "weights_on_model_save" in key and isinstance(size, int) and size > 1


def _offload(document: Document, section: Member, where: str, level: int | None) -> Iterator[LintFinding]:
    given = section.node.plain()
    device = given.get("device", "none") if isinstance(given, dict) else "none"
    if device not in ("cpu", "nvme"):
        return
    if section.key == "offload_param" and level in (0, 1, 2):
        message = f"offload_param has no effect at stage {level}: only stage 3 shards the weights"
        hint = "set stage 3, or remove it"
        yield document.report(where, "ds-stage2-offload-param", message, hint, member=section)
        return
    if level == 0:
        message = "offload_optimizer at stage 0: the CPU optimizer is created, and its first step refuses "
        message += "weights on a GPU"
        hint = "set a stage from 1 to 3, or remove it"
        yield document.report(where, "ds-stage-refuses", message, hint, member=section)
        return
    at = f"{where}.device"
    if device == "nvme" and level in (1, 2):
        message = f"nvme at stage {level} offloads to CPU memory: only stage 3 writes to disk"
        hint = 'set stage 3, or "cpu"'
        yield document.report(at, "ds-no-effect", message, hint, at_value=True, severity="warning")
    elif device == "nvme" and not document.value(f"{where}.nvme_path"):
        message = "offload to nvme without nvme_path: DeepSpeed fails at engine start"
        hint = 'write "nvme_path": "/a/local/disk"'
        yield document.report(at, "ds-nvme-path-missing", message, hint, at_value=True)
    for member in section.node.members or ():
        yield from _offload_key(document, section.key, member, level, device)


def _offload_key(
    document: Document, name: str, member: Member, level: int | None, device: str
) -> Iterator[LintFinding]:
    """One key of an offload section whose device is `cpu` or `nvme`."""
    where, given = f"{ZERO}.{name}.{member.key}", member.node.plain()
    if given is None or given is False:
        return
    if member.key in _NVME_ONLY[name] and device == "cpu":
        why = 'with device "cpu": only "nvme" reads it'
    elif member.key == "super_offload" and level in (1, 2):
        why = f"at stage {level}: only stage 3 reads it"
    elif member.key == "fast_init" and "nvme" not in (device, document.value(f"{ZERO}.offload_param.device")):
        why = "without nvme"
    elif member.key == "ratio" and level in (1, 2) and isinstance(given, int | float) and given < 1:
        message = f"`ratio` below 1 is refused at stage {level}: only stage 3 supports partial offload"
        hint = "set it to 1, or stage 3"
        yield document.report(where, "ds-stage-refuses", message, hint, member=member)
        return
    else:
        return
    yield _no_effect(document, where, why, "remove it", member)


def trainers_checkpointing(document: Document) -> Iterator[LintFinding]:
    """A section that neither the Trainer nor accelerate passes to deepspeed.checkpointing.configure."""
    block = "activation_checkpointing"
    section = document.value(block)
    if isinstance(section, dict) and any(section.values()):
        hint = "set gradient_checkpointing in TrainingArguments, or remove it"
        yield _no_effect(document, block, "under the Trainer: it checkpoints activations itself", hint)


def _contiguous_checkpoints(document: Document) -> Iterator[LintFinding]:
    """What `configure` of runtime/activation_checkpointing/checkpointing.py asserts."""
    block = "activation_checkpointing"
    where = f"{block}.contiguous_memory_optimization"
    if document.value(where) is not True:
        return
    if document.value(f"{block}.partition_activations") is not True:
        key, needs = "partition_activations", "true"
    elif document.value(f"{block}.number_checkpoints") is None:
        key, needs = "number_checkpoints", "the number of layers"
    else:
        return
    message = (
        f"`contiguous_memory_optimization` needs `{key}`: DeepSpeed refuses it unless the script sets it"
    )
    hint = f'write "{key}": {needs}, or contiguous_memory_optimization false'
    yield document.report(where, "ds-contiguous-checkpoints", message, hint, severity="warning")


_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
_GONE = (*_ONE_BIT, "deepspeed_adam", "cpuadam", "fusedadam")
"""Optimizers of earlier versions, in small letters."""


def check_blocks(document: Document) -> Iterator[LintFinding]:
    """Find classes and parameters of `optimizer` and `scheduler` that DeepSpeed does not have."""
    for block in ("optimizer", "scheduler"):
        name = document.value(f"{block}.type")
        if document.value(block) is not None and document.member(f"{block}.type") is None:
            message = f"`{block}` without `type`: DeepSpeed ignores the section"
            yield document.report(block, f"ds-{block}-type", message, "write `type`, or remove the section")
        if not isinstance(name, str) or name == "auto":
            continue
        table: dict[str, dict[str, Any]] = vocabulary()[f"{block}s"]
        row = table.get(name.lower()) if table.get(name.lower(), {}).get("any_case") else table.get(name)
        if row is None:
            yield _unknown_class(document, block, name, list(table))
        elif block == "scheduler":
            yield from _scheduler(document, name, row)
        else:
            if row.get("device"):
                yield from _params(document, block, name, _accepted(document, row))
            if (written_stage(document) or 0) > 0 and name.lower() not in ZERO_TESTED:
                yield from _untested(document, name)


def _untested(document: Document, name: str) -> Iterator[LintFinding]:
    """`_do_optimizer_sanity_check` of runtime/engine.py."""
    key = "zero_allow_untested_optimizer"
    if document.value(key) is not True:
        message = f"ZeRO refuses {name} unless {key} is true; the engine fails to start"
        hint = f'write "{key}": true, or use AdamW'
        yield document.report("optimizer.type", "ds-untested-optimizer", message, hint, at_value=True)


def _unknown_class(document: Document, block: str, name: str, names: list[str]) -> LintFinding:
    if block == "optimizer" and name.lower() in _GONE:
        message = f"DeepSpeed {deepspeed_version()} has no {name}; the engine fails to start"
        near, hint = None, "use Adam or AdamW: offload selects the CPU version"
        if name.lower() in _ONE_BIT:
            hint = f"use {'Lamb' if 'lamb' in name.lower() else 'Adam'}: 1-bit optimizers were removed"
    else:
        message = f"neither DeepSpeed {deepspeed_version()} nor torch has "
        message += f"{'an optimizer' if block == 'optimizer' else 'a scheduler'} {name}"
        # Another name is another class: Adan is not a misspelt Adam.
        near = next((known for known in names if known.lower() == name.lower()), None)
        hint = f"did you mean {near}?" if near else f"one of {', '.join(names)}"
    new = f'"{near}"' if near else None
    return document.report(f"{block}.type", f"ds-{block}-type", message, hint, at_value=True, new=new)


def _accepted(document: Document, row: dict[str, Any]) -> list[str]:
    """Parameters of the optimizer class that DeepSpeed would choose for this file."""
    if document.value("optimizer.params.torch_adam") is True and "torch" in row:
        return list(row["torch"])
    return list(row["offload"] if offloads(document) and "offload" in row else row["device"])


def _params(document: Document, block: str, name: str, accepted: list[str]) -> Iterator[LintFinding]:
    params = document.member(f"{block}.params")
    for member in (params.node.members or ()) if params is not None else ():
        where = f"{block}.params.{member.key}"
        rows = vocabulary()[f"{block}_params"]
        if member.key in accepted and member.key != "max_grad_norm":
            row = rows.get(f"{name}.{member.key}") or rows[member.key]
            yield from check_value(document, member, where, row, converted=bool(row.get("converted")))
        elif member.key == "max_grad_norm" and block == "optimizer":
            clips = document.member("gradient_clipping") is not None
            same = clips and document.value("gradient_clipping") == member.node.value
            message = "`max_grad_norm` is not an optimizer parameter; the engine fails to start"
            hint = (
                "remove it: `gradient_clipping` is set"
                if clips
                else "set `gradient_clipping` at the top level"
            )
            yield document.report(where, "ds-max-grad-norm-param", message, hint, member=member, remove=same)
        else:
            near = close_key(member.key, accepted) or {"learning_rate": "lr"}.get(member.key)
            effect = "it is silently ignored" if name.lower() == "muon" else "the engine fails to start"
            hint = f"did you mean `{near}`?" if near else f"known parameters: {', '.join(accepted)}"
            free = near is not None and params is not None and params.node.get(near) is None
            row = rows.get(f"{name}.{near}") or rows.get(near)
            is_sure = near and (near == "lr" or is_spelling(member.key, near)) and fits(row, member.node)
            edits = (TextEdit(member.start, member.end, f'"{near}"'),) if free and is_sure else ()
            message = f"`{member.key}` is not a parameter of {name}; {effect}"
            yield document.found(member.start, where, "ds-typo-nested", message, hint, edits=edits)


def _scheduler(document: Document, name: str, row: dict[str, Any]) -> Iterator[LintFinding]:
    yield from _params(document, "scheduler", name, list(row))
    for key, needed in row.items():
        if needed and document.member(f"scheduler.params.{key}") is None:
            code = "ds-total-steps" if key == "total_num_steps" else "ds-scheduler-params"
            message = f"{name} requires `{key}`; the engine fails to start"
            finding = document.report("scheduler.type", code, message, f"write `{key}`", at_value=True)
            yield replace(finding, path="scheduler.params")
    where = "scheduler.params.warmup_num_steps"
    steps = _number(document, where)
    if isinstance(steps, int) and steps <= 0:
        message = f"DeepSpeed {deepspeed_version()} refuses {steps} warm-up steps"
        yield document.report(where, "ds-warmup-zero", message, "write 1 or more", at_value=True)
