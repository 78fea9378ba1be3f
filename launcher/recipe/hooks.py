"""The functions and classes that the file of `python:` may define, each declared once.

The file is checked against this table before a run starts (recipe/hook_file.py), and the workers load from it
what the table names (train/hooks.py). Which of them a task takes is `Task.hooks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    trains: bool = True
    """Whether it decides what is learned: a run is resumed with the same file."""
    turns_off: Mapping[str, str] = field(default_factory=dict)
    """Setting of the plan that is off with it -> why."""
    uncounted: str = ""
    """What of the memory the plan does not count because of it."""
    makes_model: bool = False
    """Whether a result is of a model that only the file makes: commands on a result refuse it."""

    @property
    def call(self) -> str:
        """The hook as a user writes it: `format_row(row)`, `class Trainer`."""
        return (
            f"{self.name}({', '.join(self.parameters)})" if self.kind == "function" else f"class {self.name}"
        )


_ALL_LOGITS = {
    "model.loss": "it may read all logits",
    "trainer.use_liger_kernel": "it may read the logits, which Liger's loss does not make",
}
_OTHER_LAYERS = {
    "model.loss": "the head may be another",
    "trainer.use_liger_kernel": "Liger's kernels know the layers of transformers alone",
    "model.compile_blocks": "compiling was tried with the layers of transformers alone",
    "data.padding_free": "nobody knows whether samples in one row stay apart",
}

HOOKS = (
    Hook(
        "format_row", ("row",), "a dict, or None to drop the row", "a row of the data files",
        misnomers=("format", "map_row", "process_row", "preprocess"), trains=False,
    ),
    Hook(
        "compute_metrics", ("prediction",), "a dict of numbers", "nothing: adds to data.metrics",
        misnomers=("metrics",), trains=False,
    ),
    Hook(
        "callbacks", (), "a list of TrainerCallbacks", "nothing: adds to the callbacks of the run",
        misnomers=("get_callbacks",), trains=False,
    ),
    Hook(
        "compute_loss", ("outputs", "labels", "num_items_in_batch"), "a tensor with one number",
        "the loss of the task",
        misnomers=("loss", "loss_fn", "compute_loss_func", "custom_loss"),
        turns_off={**_ALL_LOGITS, "trainer.label_smoothing_factor": "it is the loss, and smooths no labels"},
        uncounted="what compute_loss keeps",
    ),
    Hook(
        "optimizer", ("model", "args"), "a torch Optimizer, or (optimizer, scheduler)",
        "trainer.optim; with a scheduler, the learning rate schedule too",
        misnomers=("get_optimizer", "make_optimizer", "create_optimizer", "optimizers"),
        turns_off={
            "trainer.optim": "it makes the optimizer",
            "sharding.optim_in_backward": "its weights are updated together, after the backward pass",
        },
        uncounted="your optimizer",
    ),
    Hook(
        "data_collator", ("processing",), "a function from a list of samples to a batch",
        "the collator of the task",
        misnomers=("collate", "collate_fn", "collator", "get_data_collator", "make_data_collator"),
        turns_off={
            "data.packing": "it makes the batches, and packs have a collator of their own",
            "data.padding_free": "it makes the batches",
            "data.pad_to_multiple_of": "it makes the batches",
        },
    ),
    Hook(
        "make_model", ("config",), "a torch Module", "the model that transformers would load",
        misnomers=("model_init", "get_model", "build_model", "load_model", "create_model"),
        turns_off={**_OTHER_LAYERS, "model.quantization": "it makes the model, and quantises it itself"},
        uncounted="what make_model makes otherwise", makes_model=True,
    ),
    Hook(
        "prepare_model", ("model",), "a torch Module", "the loaded model, before the adapter",
        misnomers=("patch_model", "modify_model", "change_model"),
        turns_off=_OTHER_LAYERS, uncounted="what prepare_model changes", makes_model=True,
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
        turns_off=_ALL_LOGITS, uncounted="what your Trainer keeps",
    ),
)  # fmt: skip
"""All hooks; this order is the one in plans and messages."""
HOOK = {hook.name: hook for hook in HOOKS}
MAKE_MODELS = tuple(hook.name for hook in HOOKS if hook.makes_model)

_LOOP = "steps are counted, stopped and resumed there: react in a TrainerCallback of callbacks()"
_SAVES = "a checkpoint is complete, or it does not exist: write more files in on_save of a callback"
_LOADS = "a resumed run is the same run: keep state of your own in a callback with `state()`"
_BATCHES = "the place in the data is exact: `data`, format_row and data_collator decide the batches"
_JUDGES = "each row counts once on all ranks: use prediction_step, evaluate or compute_metrics"
_OPTIMIZER = "write the hook optimizer(model, args)"
_PLACED = "the plan decides it: `sharding`, `precision` and `trainer`"
_PUSHED = "set trainer.push_to_hub"
_OWNED = {
    **dict.fromkeys(
        ("train", "_inner_training_loop", "_run_epoch", "_prepare_for_training", "_init_training_state",
         "set_initial_training_values", "_finalize_training", "hyperparameter_search"), _LOOP,
    ),
    **dict.fromkeys(
        ("save_model", "save_state", "_save", "_save_checkpoint", "_save_optimizer_and_scheduler",
         "_save_rng_state", "_save_scaler"), _SAVES,
    ),
    **dict.fromkeys(
        ("_load_from_checkpoint", "_load_best_model", "_load_optimizer_and_scheduler", "_load_rng_state",
         "_load_scaler", "_load_callback_state"), _LOADS,
    ),
    **dict.fromkeys(
        ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_dataloader",
         "_get_train_sampler", "_get_eval_sampler", "get_batch_samples", "_get_num_items_in_batch",
         "loss_is_scaled_for_ga", "_track_num_input_tokens", "get_total_train_batch_size"), _BATCHES,
    ),
    **dict.fromkeys(
        ("evaluation_loop", "_evaluate", "_maybe_log_save_evaluate", "_determine_best_metric"), _JUDGES,
    ),
    **dict.fromkeys(
        ("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler",
         "get_optimizer_cls_and_kwargs"), _OPTIMIZER,
    ),
    **dict.fromkeys(
        ("create_accelerator_and_postprocess", "_build_accelerator_args", "_wrap_model"), _PLACED,
    ),
    **dict.fromkeys(("push_to_hub", "_push_from_checkpoint", "init_hf_repo"), _PUSHED),
}  # fmt: skip


def owned_method(name: str) -> str:
    """What to do instead of overriding a method of the Trainer that a run must own; empty where it may be."""
    return _OWNED.get(name, "")
