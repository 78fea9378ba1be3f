"""Every known failure as data: one entry serves the plan, `lint`, `doctor`, `diagnose` and the documents.

The entries are in the YAML files next to this module: chapter -> id -> fields of `Failure`. In `patterns` and
`signs` each line is one regular expression; a line that is indented further continues the one before, and one
that begins with `# ` is a comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_FILES = (
    "precision", "adapters", "quantization", "deepspeed", "launching",
    "data", "saving", "hub", "installation", "serving",
)  # fmt: skip
"""In the order of docs/failures.md."""
GONE = (
    r"(?:evaluation_strategy|eval_strategy|no_cuda|use_mps_device|per_gpu_(?:train|eval)_batch_size|"
    r"overwrite_output_dir|logging_dir|fp16_backend|fp16_opt_level|half_precision_backend|"
    r"push_to_hub_(?:model_id|organization|token)|use_ipex|sharded_ddp|fsdp_min_num_params|"
    r"fsdp_transformer_layer_cls_to_wrap|tpu_metrics_debug|tpu_num_cores|torchdynamo|adafactor|"
    r"group_by_length|include_inputs_for_metrics|include_tokens_per_second|jit_mode_eval|dispatch_batches|"
    r"split_batches|save_safetensors|past_index|ray_scope|warmup_ratio|mp_parameters|xpu_backend|"
    r"evaluate_during_training)"
)
"""Fields of TrainingArguments that transformers 5 does not have; eval_strategy is missing before 4.41."""
_PARTS = {
    "GONE": GONE,
    "TRL": r"(?:SFT|DPO|KTO|ORPO|CPO|GRPO|GKD|PPO|RLOO|BCO|XPO|PRM|Reward|OnlineDPO|NashMD|IterativeSFT)",
    "FULL": r"(?:No space left on device|Disk quota exceeded)",
    # torch's allocator and driver calls, Triton, NCCL (src/include/alloc.h), bitsandbytes (csrc/common.cuh).
    "OOM": r"(?:out of memory\. Tried to allocate|(?:CUDA|HIP) (?:driver )?error: out of memory|"
    r"^(?:torch\.(?:cuda\.)?)?OutOfMemoryError\b|Triton Error \[(?:CUDA|HIP)\]: out of memory|"
    r"Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:calloc|malloc)\b|"
    r"^Error out of memory at line \d+ in file \S)",
}
"""Parts of expressions, written as `{NAME}`."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One known failure of the training stack."""

    id: str
    title: str
    cause: str
    """One or two sentences."""
    fix: str
    """What the user does about it, with keys of the recipe."""
    source: str
    """The upstream code that raises it, or public threads (`owner/name#1`)."""
    places: tuple[str, ...] = ()
    """Where it is handled, each `KIND REF`. REF is the id of a fix or of a doctor check, a problem code
    (refusal), a lint code, `module:function` of the code that avoids it (worker), or the reason why nothing
    is needed (none). `diagnose` is implied by patterns and signs."""
    versions: str = "*"
    """The affected versions, as `launcher.machine.requirements.holds` reads them."""
    patterns: tuple[str, ...] = ()
    """Regular expressions (`re.search`) over one error message or one log line, each sufficient alone."""
    signs: tuple[str, ...] = ()
    """Like `patterns`, for lines of a run that continues: `diagnose` reports them as noticed."""
    elsewhere: str = ""
    """The fix for a log of another tool, where `fix_elsewhere` cannot derive it from `fix`."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Recipe settings that fix it; None removes a key."""

    def handled(self) -> Iterator[tuple[str, str]]:
        """Kind and reference of each place."""
        for place in self.places:
            kind, _, reference = place.partition(" ")
            yield kind, reference
        if self.patterns or self.signs:
            yield "diagnose", ""


def _read(stem: str) -> dict[str, tuple[Failure, ...]]:
    """The chapters of one file."""
    text = Path(__file__).with_name(f"{stem}.yaml").read_text("utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    chapters: dict[str, dict[str, dict[str, Any]]] = yaml.load(text, Loader=loader)
    return {
        chapter: tuple(_failure(name, fields) for name, fields in entries.items())
        for chapter, entries in chapters.items()
    }


def _failure(name: str, fields: Mapping[str, Any]) -> Failure:
    made = {**fields, "id": name, "places": tuple(fields.get("places", ()))}
    for key in {"patterns", "signs"} & fields.keys():
        made[key] = _expressions(fields[key])
    return Failure(**made)


def _expressions(block: str) -> tuple[str, ...]:
    lines = "\n".join(line for line in block.splitlines() if not line.startswith("# "))
    text = re.sub(r"\{([A-Z]+)\}", lambda part: _PARTS[part[1]], re.sub(r"\n +", "", lines))
    return tuple(text.splitlines())


CHAPTERS: Mapping[str, tuple[Failure, ...]] = {
    chapter: failures for stem in _FILES for chapter, failures in _read(stem).items()
}
"""Title of a chapter of docs/failures.md -> its failures."""
FAILURES: tuple[Failure, ...] = tuple(failure for chapter in CHAPTERS.values() for failure in chapter)
