"""Which package to change where two versions do not fit: read from the message, its calls and the log."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.knowledge.diagnose.findings import Error, TracebackFrame

NAMED = re.compile(
    rb"\b(accelerate|bitsandbytes|datasets|deepspeed|huggingface[_-]hub|numpy|peft|tokenizers|torch|torchao|"
    rb"transformers|triton|trl|unsloth|vllm)\b`?(?: version)?(?:==|[: ]{1,4}v?)(\d+\.\d+[\w.+]{0,20})",
    re.IGNORECASE,
)
"""A package and its version in a line of a log."""
_REQUIRED = re.compile(
    r"(?P<wanted>(?P<name>[\w-]+)[<>=!~][^ ]{1,60}) is required .{0,80}"
    r"but found [\w-]+==(?P<found>[\w.+-]*\w)"
)
_MINIMUM = re.compile(
    r"incompatible version of (?P<name>\w+)\. Found version (?P<found>[\w.+]*\w), but only versions above "
    r"(?P<wanted>[\w.+]*\w)"
)
_CHANGED: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (re.compile(r"No module named 'triton\.ops"), "bitsandbytes", "bitsandbytes>=0.45.1"),
    (re.compile(r"keep_torch_compile"), "accelerate", "accelerate>=1.3"),
    (re.compile(r"GuidedDecodingParams"), "trl", "trl"),
)
"""Message -> the package that is too old for the others, and what to install."""
_ABSENT = re.compile(
    r"cannot import name '(?P<name>\w+)' from '(?P<package>\w+)|"
    r"No module named '(?P<parent>\w+)\.(?P<module>[\w.]+)'"
)
REMOVED: Mapping[str, tuple[str, ...]] = {
    "datasets": ("load_metric",),
    "huggingface_hub": ("HfFolder", "ModelFilter", "cached_download"),
    "peft": ("prepare_model_for_int8_training",),
    "torch": ("_six",),
    "transformers": (
        "AutoModelForVision2Seq", "HybridCache", "LlamaFlashAttention2", "LossKwargs", "TRANSFORMERS_CACHE",
        "is_quanto_available", "is_safetensors_available", "is_tf_available", "shard_checkpoint",
        "top_k_top_p_filtering",
    ),
    "trl": ("AutoModelForCausalLMWithValueHead", "ConstantLengthDataset", "DataCollatorForCompletionOnlyLM"),
}  # fmt: skip
"""Package -> names that its newer versions lack, so that the importing package is the older one."""
_INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/](\w+)")


def version_fix(error: Error, versions: Mapping[str, str]) -> str | None:
    """What to install; None if the error does not tell. versions: package -> its version in the log."""
    text = error.headline
    if (found := _REQUIRED.search(text)) is not None:
        return (
            f'`pip install "{found["wanted"].rstrip(".,")}"` ({found["name"]} {found["found"]} is installed)'
        )
    if (found := _MINIMUM.search(text)) is not None:
        name = found["name"]
        return (
            f'`pip install -U "{name}>{found["wanted"]}"` ({found["found"]} is installed), or remove {name}'
        )
    for form, name, wanted in _CHANGED:
        if form.search(text):
            return f'`pip install -U "{wanted}"`{_installed(name, versions)}'
    if (found := _ABSENT.search(text)) is None:
        return None
    package, name = found["package"] or found["parent"], found["name"] or found["module"]
    importer = next(
        (own for own in map(_package_of, reversed(error.frames)) if own not in (None, package)), None
    )
    if name not in REMOVED.get(package, ()):
        wants = f"; {importer} wants a newer one" if importer else ""
        return f"`pip install -U {package}`{_installed(package, versions)}, which lacks {name}{wants}"
    if importer is None:
        return f"change the script: {name} was removed from {package}{_installed(package, versions)}"
    return f"`pip install -U {importer}`{_installed(importer, versions)}: {name} was removed from {package}"


def _package_of(frame: TracebackFrame) -> str | None:
    found = _INSTALLED.search(frame.file)
    return found[1] if found else None


def _installed(package: str, versions: Mapping[str, str]) -> str:
    version = versions.get(package.lower().replace("-", "_"))
    return f" ({package} {version} is installed)" if version else ""
