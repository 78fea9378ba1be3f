"""The functions and classes that the file of `python:` may define, each declared once.

The file is checked against this table before a run starts (recipe/hook_file.py), and the workers load from it
what the table names (train/hooks.py). Which of them a task takes is `Task.hooks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Hook:
    """One name that the file may define at its top level."""

    name: str
    parameters: tuple[str, ...]
    """Of a function: what it is called with, by position."""
    returns: str
    """Of a function: what it must return; of a class: what it must be."""
    replaces: str
    """What of the run it replaces, or adds to."""
    kind: Literal["function", "class"] = "function"
    misnomers: tuple[str, ...] = ()
    """Names of other projects and likely mistakes that `did you mean` leads here."""

    @property
    def call(self) -> str:
        """The hook as a user writes it: `format_row(row)`, `class Trainer`."""
        return (
            f"{self.name}({', '.join(self.parameters)})" if self.kind == "function" else f"class {self.name}"
        )


HOOKS = (
    Hook(
        "format_row", ("row",), "a dict, or None to drop the row", "a row of the data files",
        misnomers=("format", "map_row", "process_row", "preprocess"),
    ),
    Hook(
        "compute_metrics", ("prediction",), "a dict of numbers", "nothing: adds to data.metrics",
        misnomers=("metrics",),
    ),
    Hook(
        "callbacks", (), "a list of TrainerCallbacks", "nothing: adds to the callbacks of the run",
        misnomers=("get_callbacks",),
    ),
    Hook(
        "compute_loss", ("outputs", "labels", "num_items_in_batch"), "a tensor with one number",
        "the loss of the task",
        misnomers=("loss", "loss_fn", "compute_loss_func", "custom_loss"),
    ),
    Hook(
        "optimizer", ("model", "args"), "a torch Optimizer, or (optimizer, scheduler)",
        "trainer.optim; with a scheduler, the learning rate schedule too",
        misnomers=("get_optimizer", "make_optimizer", "create_optimizer", "optimizers"),
    ),
    Hook(
        "data_collator", ("processing",), "a function from a list of samples to a batch",
        "the collator of the task",
        misnomers=("collate", "collate_fn", "collator", "get_data_collator", "make_data_collator"),
    ),
    Hook(
        "make_model", ("config",), "a torch Module", "the model that transformers would load",
        misnomers=("model_init", "get_model", "build_model", "load_model", "create_model"),
    ),
    Hook(
        "prepare_model", ("model",), "a torch Module", "the loaded model, before the adapter",
        misnomers=("patch_model", "modify_model", "change_model"),
    ),
    Hook(
        "make_datasets", (), "(training dataset, evaluation dataset or None)", "data.train and data.eval",
        misnomers=("get_datasets", "make_dataset", "load_datasets", "build_datasets"),
    ),
    Hook(
        "processing", (), "a tokenizer, an image processor or a processor", "the tokenizer of the model",
        misnomers=("get_processing", "processor", "get_processor", "tokenizer", "get_tokenizer"),
    ),
    Hook(
        "Trainer", (), "a subclass of the Trainer of the task", "the Trainer of the task", kind="class",
        misnomers=("MyTrainer", "CustomTrainer", "OwnTrainer"),
    ),
)  # fmt: skip
"""All hooks; this order is the one in plans and messages."""
HOOK = {hook.name: hook for hook in HOOKS}
