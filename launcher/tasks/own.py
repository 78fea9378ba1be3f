"""Whatever a Trainer trains: the hooks make the model, the datasets and the batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.errors import Problem
from launcher.tasks.task import Task

_NEEDED = ("make_model", "make_datasets", "data_collator")
_MODEL_KEYS = ("name_or_path", "revision", "cache_dir", "trust_remote_code", "config")
_MADE = {
    "data": "the hook make_datasets makes the datasets",
    "adapter": "the hook make_model makes the model: put the adapter on it there",
}
"""Sections that it does not read -> why."""


class Own(Task):
    name = "own"
    aliases = ("custom", "own-trainer")
    made_by_hooks = True
    needed_hooks = _NEEDED
    hooks = (
        *_NEEDED, "processing", "compute_metrics", "callbacks", "compute_loss", "optimizer", "prepare_model",
        "Trainer",
    )  # fmt: skip
    row_formats = ()
    reads_tokens = False
    own_padding = "the hook data_collator makes the batches"
    architectures = ()
    model_class = "AutoModel"
    head = "own"
    trainer_defaults = {
        "remove_unused_columns": (False, "the hook data_collator gets the samples as the datasets have them"),
        "include_num_input_tokens_seen": ("no", "samples need not be made of tokens"),
    }
    first_methods = ()

    def check_section(self, given: Mapping[str, Any], rest: Mapping[str, Any]) -> list[Problem]:
        """The sections and keys that the hooks replace."""
        found = {name: why for name, why in _MADE.items() if rest.get(name) is not None}
        model = rest.get("model")
        if isinstance(model, Mapping):
            why = "the hook make_model makes the model"
            found |= {f"model.{key}": why for key in model if key not in _MODEL_KEYS}
        problems = [
            Problem("conflict", f"has no effect with task {self.name}: {why}", path=path, hint="remove it")
            for path, why in found.items()
        ]
        if rest.get("python") is None:
            message = (
                f"required with task {self.name}, but missing: the file that defines {', '.join(_NEEDED)}"
            )
            problems.append(Problem("missing-key", message, path="python", hint="e.g. python: hooks.py"))
        return problems

    def loss_over(self, settings: Any) -> str:
        return "means of micro-batches"
