"""Settings that contradict each other, and settings that do nothing beside others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.lint.finding import Finding
from launcher.lint.positions import Document, Member
from launcher.lint.types import for_trainer
from launcher.plan.profile import STAGE3_ONLY

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
    level = stage(document)
    for member in section.node.members or ():
        yield from _without_effect(document, member, level)
    for name in ("offload_optimizer", "offload_param"):
        yield from _nvme(document, name, level)
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


def _without_effect(document: Document, member: Member, level: int | None) -> Iterator[Finding]:
    where = f"{ZERO}.{member.key}"
    given = member.node.plain()
    if member.key == "offload_param":
        device = given.get("device", "none") if isinstance(given, dict) else "none"
        if level in (0, 1, 2) and device in ("cpu", "nvme"):
            yield document.found(
                member.start,
                where,
                "ds-stage2-offload-param",
                f"offload_param does nothing at stage {level}: only stage 3 splits the weights",
                "write stage 3, or remove it",
                edits=document.removal(where),
            )
    elif (
        level in (1, 2)
        and member.key.removeprefix("stage3_") in STAGE3_ONLY
        and given is not False
        and given is not None
        and not _gathers_parts(document, member.key)
    ):
        yield document.found(
            member.start,
            where,
            "ds-no-effect",
            f"`{member.key}` does nothing at stage {level}: it is read at stage 3 alone",
            "write stage 3, or remove it",
            severity="warning",
            edits=document.removal(where),
        )


def _gathers_parts(document: Document, key: str) -> bool:
    """Whether a key counts at other stages, too: accelerate asks for it to put AutoTP's parts together."""
    size = value(document, "tensor_parallel.autotp_size")
    return "weights_on_model_save" in key and isinstance(size, int) and size > 1


def _nvme(document: Document, name: str, level: int | None) -> Iterator[Finding]:
    device = document.member(f"{ZERO}.{name}.device")
    if device is None or device.node.value != "nvme":
        return
    where = f"{ZERO}.{name}.device"
    if level in (1, 2) and name == "offload_optimizer":
        yield document.found(
            device.node.start,
            where,
            "ds-no-effect",
            f"nvme at stage {level} is offload to the CPU's memory: only stage 3 writes to a disk",
            'write stage 3, or "cpu"',
            severity="warning",
        )
    elif level in (3, None) and not value(document, f"{ZERO}.{name}.nvme_path"):
        yield document.found(
            device.node.start,
            where,
            "ds-nvme-path-missing",
            "offload to nvme without nvme_path: the file is read, and building the engine fails",
            'write "nvme_path": "/a/local/disk"',
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
