"""Settings that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.lint.finding import Finding
from launcher.lint.positions import Document
from launcher.lint.types import for_trainer

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
