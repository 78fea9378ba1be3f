"""The page of model types: what benchmarks/coverage.py found out about each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe_page import NOTE, table

RECORD = Path(__file__).parents[1] / "benchmarks" / "records" / "coverage_cpu.json"
HEAD = (
    "model type", "memory planned by", "trains", "merges", "documents in one row", "chunked loss", "compiled",
)  # fmt: skip
KERNELS = ("sdpa", "eager", "varlen", "flash_attention_2")
INTRO = """\
Every type with a causal language model in transformers {transformers}, as `benchmarks/coverage.py`
found it on a CPU with torch {torch}: the default configuration of its class made small, with random
weights.

- **trains**: 4 steps of LoRA on all linear layers, through the workers' own code, with finite
  losses.
- **merges**: the adapter is saved, read back and merged, and the merged model has the same logits
  when it is read again.
- **documents in one row**: the attention kernels under which several documents in one row have the
  logits that each has alone, as packing and padding-free batches need it. In place of
  FlashAttention ran a kernel that, like it, knows documents by their bounds alone.
- **chunked loss**: it has the value and the gradients of the full loss.
- **compiled**: layers that `torch.compile` compiled, with dynamic shapes, have the loss and the
  gradients of plain ones; `?`: not tried.

What is missing has its reason below. A configuration may have switches that the default one has not:
kinds of layers, windows, scaled logits. Each was changed and tried too; one that fails, or for which
there was no value to try, counts as not shown.

{whole} of {types} types plan, train and merge; of the {young} types of {year} and later,
{young_whole}. {closed_form} have their memory in closed form.

A plan follows this table. Padding-free batches are on by default for the {varlen} types that keep
documents apart under varlen, `data.packing` is accepted for {packed} under a kernel that does, and
the chunked loss is on for {chunked}. Long runs on a GPU compile the layers of {compiled} types, of
{compile_tried} that were tried. [Performance](performance.md) has what else each of them needs.

Tasks on text load the text model alone of a checkpoint for text and images; [Tasks](tasks.md) has
the task on images."""


IMAGE_HEAD = ("model type", "memory planned by", "trains", "merges")
IMAGES = """\
The same of every type of `AutoModelForImageTextToText`, with `task: image-text-to-text` on rows with
images in one colour, the processor that `--tiny` generates, and the tower and its projector frozen:
{trained} of {types} types plan and train, {whole} also save, read back and merge. torchvision
{torchvision} was installed, of which image processors use the Python code; without it, families that
have no image processor of Pillow's cannot run. A type whose
processor cannot be generated may still train with the processor of its checkpoint."""


def models_page() -> str:
    """A row for each type, then the reasons of what is missing; of text models, then of those with images."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows: Mapping[str, Mapping[str, Any]] = record["causal_lm"]
    intro = INTRO.format(**record["versions"], **record["summary"]["causal_lm"])
    listed = [_row(kind, found) for kind, found in rows.items()]
    images: Mapping[str, Mapping[str, Any]] = record["image_text_to_text"]
    of_images = IMAGES.format(**record["versions"], **record["summary"]["image_text_to_text"])
    return "\n\n".join(
        ["# Model types", NOTE, intro, table(HEAD, listed), "## What is missing, and why", _missing(rows),
         "## Images and text", of_images,
         table(IMAGE_HEAD, [_row(kind, found)[: len(IMAGE_HEAD)] for kind, found in images.items()]),
         "## What is missing with images, and why", _missing(images)]
    ) + "\n"  # fmt: skip


def _missing(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each step that a type did not pass."""
    found = [
        (f"`{kind}`", field, reason)
        for kind, one in rows.items()
        for field, reason in one.get("reasons", {}).items()
        if field in ("configured", "planned", "trained", "merged") and reason
    ]
    return table(("model type", "step", "reason"), found)


def _row(kind: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    kernels = ", ".join(kernel for kernel in KERNELS if found.get(kernel) is True)
    return (
        f"`{kind}`",
        str(found.get("planned") or "-"),
        _mark(found.get("trained")),
        _mark(found.get("merged")),
        kernels or "-",
        _mark(found.get("chunked")),
        _mark(found["compiled"]) if "compiled" in found else "?",
    )


def _mark(value: Any) -> str:
    return "yes" if value else "-"
