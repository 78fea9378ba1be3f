"""torch.compile of a model's repeated layers, each by itself and in its place.

One compilation serves all layers, and takes a fraction of the whole model's time. A layer stays the module
that it was: names in checkpoints, the hooks of engines and of peft, and activation checkpointing around its
call are untouched. (`torch_compile: true` of the Trainer wraps the model, and puts `_orig_mod` into names.)

A layer that cannot be compiled here (no C compiler, no headers of Python, a kernel that Triton does not make)
trains as it is, with torch's warning in the log: speed is no reason to lose a run.
"""

from __future__ import annotations

from typing import Any

import torch

from launcher.errors import Problem, RecipeError
from launcher.train.job import Job
from launcher.train.upstream.model_seams import layer_classes
from launcher.train.upstream.torch_seams import compile_or_run_plainly


def compile_blocks(job: Job, model: Any) -> int:
    """Compile each layer of `model`, with or without an adapter around it; how many there are.

    Before anything else wraps the model. RecipeError when it does not say which modules are its layers.
    """
    layers = repeated_layers(model)
    if not layers:
        name = type(model).__name__
        raise RecipeError(
            Problem(
                "no-blocks",
                f"{name} does not name the layers that could be compiled one by one",
                path="model.compile_blocks",
                hint="model.compile_blocks: false, or name their classes in its _no_split_modules",
            )
        )
    compile_or_run_plainly()
    # Rows of text differ in length from batch to batch, and each length would be compiled anew.
    dynamic = True if job.task.reads_tokens else None
    for layer in layers:
        layer.compile(dynamic=dynamic)
    return len(layers)


def repeated_layers(model: Any) -> list[Any]:
    """The modules of a ModuleList whose class the model names as a layer (_no_split_modules)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    named = layer_classes(base)
    return [
        layer
        for part in base.modules()
        if isinstance(part, torch.nn.ModuleList)
        for layer in part
        if type(layer).__name__ in named
    ]
