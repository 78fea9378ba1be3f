"""Words that recipe and worker share: row formats, what each task reads, learns and measures. Pure."""

from __future__ import annotations

from collections.abc import Mapping

FORMAT_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ()),
    "instruction": (("instruction", "output"), ("input",)),
    "prompt-completion": (("prompt", "completion"), ()),
    "chat": (("messages",), ("tools",)),
    "preference": (("chosen", "rejected"), ("prompt", "tools")),
    "classification": (("text", "label"), ("text_pair",)),
    "image": (("image", "label"), ()),
}
"""Format of rows -> (fields that it must have, fields that it may have)."""

TASK_FORMATS: Mapping[str, tuple[str, ...]] = {
    "causal-lm": ("text", "instruction", "prompt-completion", "chat"),
    "seq2seq-lm": ("prompt-completion", "instruction"),
    "sequence-classification": ("classification",),
    "image-classification": ("image",),
    "dpo": ("preference",),
}
"""Task -> formats that it can train on."""

LOSS_OF_FORMAT: Mapping[str, tuple[str, ...]] = {
    "text": ("all",),
    "instruction": ("completion", "all"),
    "prompt-completion": ("completion", "all"),
    "chat": ("assistant", "completion", "all"),
}
"""Format -> values of `data.loss_on` that mean something for it, the default first (causal-lm only)."""

METRICS: Mapping[str, tuple[str, ...]] = {
    "causal-lm": ("perplexity", "accuracy"),
    "seq2seq-lm": ("perplexity", "exact_match", "bleu", "chrf", "rouge1", "rouge2", "rougeL"),
    "sequence-classification": ("accuracy", "f1", "precision", "recall", "matthews_correlation"),
    "image-classification": ("accuracy", "f1", "precision", "recall", "matthews_correlation"),
    "dpo": (),
}
"""Task -> names that `data.metrics` may hold; the evaluation loss is always reported.

causal-lm accuracy is that of the learnt tokens; f1, precision and recall are macro averages.
"""

GENERATED_METRICS = tuple(name for name in METRICS["seq2seq-lm"] if name != "perplexity")
"""Metrics of text that the model writes, so that the evaluation must generate."""
