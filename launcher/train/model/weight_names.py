"""Weights of a checkpoint under the names that the model's own modules have.

transformers 5 saves many models (ViT, Swin, Mixtral, Qwen's experts, ...) under the names and in the shapes
of their first releases (modeling_utils.py save_pretrained, revert_weight_conversion). Its from_pretrained
translates them, its Trainer does not: a resumed run would go on with the weights that it began with, and only
log a warning (5.23, trainer.py _load_from_checkpoint, _load_best_model). DeepSpeed's and FSDP's own states
have the modules' names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from launcher.errors import Problem, RunFailed
from launcher.train.upstream.model_seams import names_not_saved


def weight_files(checkpoint: Path) -> list[Path]:
    """The files of a whole model's weights; none where the checkpoint holds an adapter or other states."""
    return sorted(checkpoint.glob("model*.safetensors"))


def read_weights(model: Any, checkpoint: Path) -> tuple[list[str], list[str]]:
    """Copy a checkpoint's weights and buffers into a model; of a tensor that is cut for ranks, its part.

    Returns the names that the checkpoint lacks, and those that the model lacks.
    """
    own = model.state_dict()
    missing, unexpected = set(own), set[str]()
    with torch.no_grad():
        for piece in translated(model, stored(checkpoint)):
            parts = {name: _part(value, own.get(name)) for name, value in piece.items()}
            result = model.load_state_dict(parts, strict=False)
            missing -= piece.keys()
            unexpected.update(result.unexpected_keys)
    return sorted(missing), sorted(unexpected)


def _part(whole: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
    """A tensor as transformers' tensor parallelism has cut the model's own; every rank reads the whole."""
    placements = getattr(own, "placements", None)
    if own is None or placements is None:
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(own, DTensor)
    return distribute_tensor(whole.to(own.device), own.device_mesh, placements, src_data_rank=None)


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All weights of a whole model, on the CPU, under the names of the files."""
    return {name: value for file in weight_files(checkpoint) for name, value in load_file(file).items()}


def translated(model: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors under the model's own names and in its shapes, one or a few at a time.

    As core_model_loading.py convert_and_load_state_dict_in_model does, which would also choose other dtypes
    and initialise what is not there. Names that the model does not have stay as they are.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    own, prefix = model.state_dict(), model.base_model_prefix
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    gathered: dict[str, Any] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own:
            target, pattern = rename_source_key(name, [], [], prefix, own)
        if pattern is None:
            yield {target: tensors[name]}
            continue
        rule = gathered.setdefault(target, deepcopy(by_pattern[pattern]))
        rule.add_tensor(target, name, pattern, tensors[name])
    for target in list(gathered):
        made = gathered.pop(target).convert(target, model=model, config=model.config)
        yield {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def check_missing(model: Any, missing: list[str], checkpoint: Path | None) -> None:
    """RunFailed where weights were not in a checkpoint, unless a save leaves them out: a tied weight's twin.

    checkpoint: its folder, None where nobody knows.
    """
    own = model.state_dict(keep_vars=True)
    ignored = names_not_saved(model)
    read = {id(value) for name, value in own.items() if name not in missing}
    lost = [name for name in missing if name in own and name not in ignored and id(own[name]) not in read]
    if lost:
        raise RunFailed(
            Problem(
                "checkpoint-names",
                f"the checkpoint lacks {len(lost)} of the model's weights, first {lost[0]}: they would keep "
                "the values that they have now",
                file=None if checkpoint is None else str(checkpoint),
                hint="go on with the release of transformers that wrote it: `versions` in its manifest.json",
            )
        )
