"""JSON files of other kinds that are taken for a DeepSpeed config: one finding in the place of one a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.lint import vocabulary
from launcher.lint.finding import Finding
from launcher.lint.positions import Document, Node
from launcher.lint.unknown import RENAMED
from launcher.recipe.field_tables import trainer_fields
from launcher.recipe.suggestions import close_key

OWN = frozenset(
    {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "activation_checkpointing"}
)
"""Keys that no file of another kind has."""
_FEWEST = 3
"""Unknown keys beside no known one that make a file one of another kind, whichever."""
_FEWEST_FIELDS = 3
"""Fields of TrainingArguments beside output_dir, or at all, that DeepSpeed does not have."""


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    any_of: frozenset[str] = frozenset()
    """One of them is enough."""
    all_of: frozenset[str] = frozenset()
    """Or all of these together, where no other key at the top level is DeepSpeed's: such names are common."""


def _kind(name: str, any_of: str = "", all_of: str = "") -> _Kind:
    return _Kind(name, frozenset(any_of.split()), frozenset(all_of.split()))


KINDS = (
    _kind("an adapter's adapter_config.json", "peft_type"),
    _kind("a tokenizer's tokenizer_config.json", "tokenizer_class added_tokens_decoder chat_template"),
    _kind("a tokenizer.json", all_of="added_tokens model normalizer"),
    _kind("a model's config.json", "model_type architectures", "hidden_size num_hidden_layers"),
    _kind("a processor's config", "image_processor_type feature_extractor_type processor_class"),
    _kind("an index of a model's weights", "weight_map"),
    _kind("a model's generation_config.json", "_from_model_config", "transformers_version eos_token_id"),
    _kind("a checkpoint's trainer_state.json", "log_history"),
    _kind("accelerate's own config", "compute_environment distributed_type"),
    _kind("a package.json", "devDependencies", "name version"),
    _kind("a recipe of effilaunch", all_of="model data"),
    _kind("LLaMA-Factory's arguments", "model_name_or_path finetuning_type"),
)


def another_kind(document: Document) -> Finding | None:
    """The one finding of a file that is no DeepSpeed config; None for one, however broken."""
    root = document.root
    if root is None or not root.members:
        return None
    keys = {member.key: member.node for member in root.members}
    if keys.keys() & OWN:
        return None
    below = _wrapped(keys)
    name = below or _named(keys) or _arguments(keys) or _nothing_known(keys)
    if name is None:
        return None
    hint = (
        f"write the object under `{below}` into a file of its own"
        if below
        else "name the file that TrainingArguments' `deepspeed`, or `--deepspeed_config`, names"
    )
    what = f"holds a DeepSpeed config under `{below}`" if below else f"is {name}"
    return document.found(root.start, "", "ds-not-a-config", f"not a DeepSpeed config: this {what}", hint)


def _named(keys: Mapping[str, Node]) -> str | None:
    known = vocabulary.names(vocabulary.keys()).keys() | RENAMED.keys() | vocabulary.table()["removed"].keys()
    for kind in KINDS:
        together = kind.all_of and kind.all_of <= keys.keys() and not keys.keys() & known
        if kind.any_of & keys.keys() or together:
            return kind.name
    return None


def _arguments(keys: Mapping[str, Node]) -> str | None:
    fields = keys.keys() & trainer_fields().keys() - vocabulary.names(vocabulary.keys()).keys()
    return "TrainingArguments as JSON" if len(fields) >= _FEWEST_FIELDS else None


def _nothing_known(keys: Mapping[str, Node]) -> str | None:
    """A file of which no key is one of DeepSpeed's, or nearly one, at any level."""
    known = vocabulary.names(vocabulary.keys())
    removed = vocabulary.table()["removed"]
    if len(keys) < _FEWEST:
        return None
    for key in keys:
        misplaced = "_" in key and vocabulary.homes(key)  # `type` and `name` are everybody's
        if key in known or key in RENAMED or key in removed or misplaced or close_key(key, known):
            return None
    return f"something else: none of its {len(keys)} keys is one of DeepSpeed's"


def _wrapped(keys: Mapping[str, Node]) -> str | None:
    """The key below which a DeepSpeed config is."""
    for key, node in keys.items():
        if OWN & {member.key for member in node.members or ()}:
            return key
    return None
