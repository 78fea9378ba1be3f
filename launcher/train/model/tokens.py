"""The vocabulary: a pad token, added tokens, embedding rows for them, and their training under an adapter."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.facts.lora import is_all_linear
from launcher.train.job import Job

# Tokens that model makers reserve and never train, in the order of preference.
_SPARE_TOKENS = (
    "<|pad|>",
    "<pad>",
    "[PAD]",
    "<|finetune_right_pad_id|>",
    "<|fim_pad|>",
    "<fim_pad>",
    "<|reserved_special_token_0|>",
    "<unk>",
)


def ensure_pad_token(tokenizer: Any) -> None:
    """Give a tokenizer a pad token without making the vocabulary larger.

    EOS is the last resort and harmless here: labels are made before padding, so EOS stays learnt.
    """
    if tokenizer.pad_token_id is not None:
        return
    vocabulary = tokenizer.get_vocab()
    spare = next((token for token in _SPARE_TOKENS if token in vocabulary), None)
    tokenizer.pad_token = spare or tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise RecipeError(
            Problem(
                "pad-token-missing",
                "the tokenizer has neither a pad token nor an EOS",
                path="model.tokenizer",
            )
        )


def add_tokens(job: Job, tokenizer: Any) -> None:
    """Give the tokenizer the plan's `model.add_tokens`, saying which of them it had already."""
    wanted = list(job.model.add_tokens)
    if not wanted:
        return
    vocabulary = tokenizer.get_vocab()
    known = [token for token in wanted if token in vocabulary]
    tokenizer.add_tokens(wanted)
    new = [f"{token!r} = {tokenizer.convert_tokens_to_ids(token)}" for token in wanted if token not in known]
    if new:
        print(f"added tokens: {', '.join(new)}")
    if known:
        print(f"of model.add_tokens the tokenizer has already: {', '.join(map(repr, known))}")


def added_ids(job: Job, tokenizer: Any) -> list[int]:
    """Ids of the plan's `model.add_tokens`, sorted; also of those that the tokenizer had before."""
    wanted = job.model.add_tokens
    return sorted({int(tokenizer.convert_tokens_to_ids(token)) for token in wanted})


def fit_vocabulary(job: Job, model: Any, tokenizer: Any) -> None:
    """Give the embedding a row for every added token, and rows up to a multiple of the plan's vocab_multiple.

    RecipeError for any other id without a row: an index error on CPU, and a dead device on CUDA.
    """
    rows = int(model.config.get_text_config().vocab_size)
    added = set(added_ids(job, tokenizer))
    ids = set(tokenizer.get_vocab().values())
    homeless = sorted(number for number in ids - added if number >= rows)
    if homeless:
        raise RecipeError(
            Problem(
                "token-id-range",
                f"the tokenizer's ids go up to {homeless[-1]}, the model's embedding has {rows} rows",
                path="model.tokenizer" if job.model.tokenizer else "model.name_or_path",
                hint="use the tokenizer that belongs to the model, or list new tokens in model.add_tokens",
            )
        )
    needed = max(ids, default=-1) + 1
    multiple = job.model.vocab_multiple or 1
    wanted = -(-max(needed, rows) // multiple) * multiple
    if needed <= rows and added:
        print(f"the added tokens take spare rows of the embedding, which has {rows}")
    if wanted > rows:
        with _drawn_again(job, model) if multiple > 1 else contextlib.nullcontext():
            model.resize_token_embeddings(wanted)
        reasons = ["for the added tokens"] * (needed > rows) + [f"a multiple of {multiple}"] * (multiple > 1)
        print(f"the embedding grew from {rows} to {wanted} rows, {', '.join(reasons)}")


@contextlib.contextmanager
def _drawn_again(job: Job, model: Any) -> Iterator[None]:
    """The same random numbers whenever the model is read: no adapter holds the rows that have no token."""
    import torch

    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(job.seed)
        yield


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Where a model holds a row per token."""

    names: tuple[str, ...]
    """The input embedding and, where it has a matrix of its own, the output layer."""
    tied: bool
    """The output layer has the input embedding's matrix."""
    biased: bool
    """The output layer has a bias."""


def find_embeddings(model: Any) -> Embeddings:
    """The embeddings of a transformers model by their module names."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    if head is None:
        return Embeddings((names[id(embedding)],), tied=False, biased=False)
    tied = head.weight is embedding.weight
    own = (names[id(embedding)],) if tied else (names[id(embedding)], names[id(head)])
    return Embeddings(own, tied, biased=getattr(head, "bias", None) is not None)


def train_added_rows(
    settings: dict[str, Any], found: Embeddings, ids: Sequence[int], *, sharded: bool
) -> dict[str, Any]:
    """LoraConfig fields with which the rows `ids` are trained, and saved with the adapter.

    Only these rows where peft can (`trainable_token_indices`); whole layers in `modules_to_save` where
    it cannot: under ZeRO-3 (`sharded`), and for an output layer with a bias, which peft would drop.
    RecipeError where the plan's own fields stand against it.
    """
    _refuse_overlap(settings, found)
    whole = list(settings.get("modules_to_save") or ())
    rows: dict[str, list[int]] = {}
    for position, name in enumerate(found.names):
        if matches(name, whole):
            continue
        if sharded or (found.biased and position == 1):
            whole.append(name)
        else:
            rows[name] = list(ids)
    changed = dict(settings)
    if rows:
        changed["trainable_token_indices"] = rows
    if whole:
        changed["modules_to_save"] = whole
    if found.tied and any(matches(name, whole) for name in found.names):
        changed["ensure_weight_tying"] = True
    print(_said(found, rows, whole, sharded=sharded))
    return changed


def matches(name: str, ends: Sequence[str]) -> bool:
    """Does one of `ends` name the module: its whole name, or the end of it after a dot?"""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def keep_rows_alone(model: Any) -> None:
    """Save the trained rows without the embedding's other rows, which did not change.

    peft's own choice depends on whether it can reach the base model's configuration at the time.
    """
    model.save_pretrained = functools.partial(model.save_pretrained, save_embedding_layers=False)


def check_continued(model: Any, ids: Sequence[int]) -> None:
    """RecipeError when the adapter that is continued does not train the rows of the added tokens."""
    from peft.utils.other import ModulesToSaveWrapper

    base = model.get_base_model()
    if isinstance(base.get_input_embeddings(), ModulesToSaveWrapper):
        return
    trained = model.peft_config["default"].trainable_token_indices or {}
    indices = [set(rows) for rows in trained.values()] if isinstance(trained, dict) else [set(trained)]
    if not indices or any(not found.issuperset(ids) for found in indices):
        raise RecipeError(
            Problem(
                "adapter-add-tokens",
                "the adapter was trained without these tokens, and its trained rows cannot change",
                path="model.add_tokens",
                hint="give the add_tokens of the run that made the adapter, or start a new adapter",
            )
        )


def _refuse_overlap(settings: dict[str, Any], found: Embeddings) -> None:
    """LoRA on an embedding and trained rows of it cannot be combined."""
    import re

    wanted = settings.get("target_modules") or ()
    if isinstance(wanted, str):
        hit = [] if is_all_linear(wanted) else [name for name in found.names if re.fullmatch(wanted, name)]
    else:
        hit = [name for name in found.names if matches(name, wanted)]
    if hit:
        raise RecipeError(
            Problem(
                "adapter-add-tokens",
                f"{' and '.join(hit)} cannot have both LoRA and trained rows for added tokens",
                path="adapter.target_modules",
                hint="leave it out there, or name it in adapter.modules_to_save",
            )
        )
    if found.tied and found.biased:
        raise RecipeError(
            Problem(
                "adapter-add-tokens",
                "peft cannot train single rows of a tied output layer that has a bias",
                path="model.add_tokens",
                hint="train without an adapter, or without add_tokens",
            )
        )


def _said(found: Embeddings, rows: dict[str, list[int]], whole: Sequence[str], *, sharded: bool) -> str:
    parts = []
    if rows:
        count = len(next(iter(rows.values())))
        parts.append(f"{count} rows of {' and '.join(rows)}{' (tied to the head)' if found.tied else ''}")
    full = [name for name in found.names if matches(name, whole)]
    if full:
        why = " (ZeRO-3 cannot train single rows)" if sharded else ""
        parts.append(f"the whole of {' and '.join(full)}{why}")
    return f"added tokens: trained and saved with the adapter are {' and '.join(parts)}"
