"""What turns rows into tensors: a plan's tokenizer with its vocabulary, or its image processor."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.models.lora import is_all_linear
from launcher.train.job import Job

# Tokens that model makers reserve and never train, in the order of preference.
_SPARE_TOKENS = (
    "<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|fim_pad|>", "<fim_pad>",
    "<|reserved_special_token_0|>", "<unk>",
)  # fmt: skip
# Those of GPT-NeoX and DeepSeek; and the end of a document, where EOS is the end of a turn.
_UNLIKE_EOS = (*_SPARE_TOKENS, "<|padding|>", "<｜▁pad▁｜>", "<|endoftext|>")  # noqa: RUF001


def load_processing(job: Job) -> Any:
    """The image processor of an image task, the processor of a task with images and text, else the tokenizer.

    A tokenizer, also that of a processor, has the plan's chat template, added tokens and a pad token.
    RecipeError when the plan names none, or none can be found.
    """
    if job.task.sees_images:
        return _processor(job)
    return _tokenizer(job, _any_tokenizer(job)) if job.task.reads_tokens else _image_processor(job)


def model_reference(job: Job) -> str | None:
    """Folder or hub id of the weights, None for random ones; a GGUF file's is its converted folder."""
    name = job.model.name_or_path
    if name is None:
        return None
    if job.model.gguf_file:
        from launcher.train.model.weights import converted

        return str(converted(local_or_hub(name), job.model.gguf_file, hub_options(job)))
    return local_or_hub(name)


def local_or_hub(reference: str) -> str:
    """A `package:` reference as a folder; everything else (folder, hub id) as it is."""
    if not reference.startswith("package:"):
        return reference
    from launcher.machine.probe import resolve_path

    return str(resolve_path(reference))


def hub_options(job: Job, *, revision: bool = True) -> dict[str, Any]:
    """Keyword arguments that every from_pretrained takes.

    revision: False for a repository other than the weights', whose revisions are its own.
    """
    options = {
        "revision": job.model.revision if revision else None,
        "cache_dir": job.model.cache_dir,
        # Always given: without it, transformers asks at the terminal.
        "trust_remote_code": bool(job.model.trust_remote_code),
    }
    return {name: value for name, value in options.items() if value is not None}


def first_line(error: Exception) -> str:
    """The first line of an error, or its kind where it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def own_code(error: Exception, reference: str) -> RecipeError | None:
    """The refusal of a repository whose code the recipe has not agreed to run; None for another error."""
    if "trust_remote_code" not in str(error):
        return None
    message = f"{reference} comes with Python code of its own, which is not run unasked"
    hint = "read that code; `trust_remote_code: true` under `model:` lets it run"
    return RecipeError(Problem("remote-code", message, path="model.trust_remote_code", hint=hint))


def _any_tokenizer(job: Job) -> Any:
    if not job.tiny:
        return _found_tokenizer(job)
    from launcher.train.tiny import tiny_tokenizer

    config = job.model.config or {}
    return tiny_tokenizer(int(str(config.get("vocab_size", 512))))


def _processor(job: Job) -> Any:
    """The processor of a vision-language model; its tokenizer is made ready as any other."""
    if job.tiny:
        from transformers import AutoConfig

        from launcher.train.tiny_processor import tiny_processor

        processor = tiny_processor(AutoConfig.for_model(**(job.model.config or {})))
    else:
        from launcher.train.model.processors import read_processor

        def read(place: str, options: dict[str, Any]) -> Any:
            return read_processor(place, options, job.model.image_sizes)

        processor = _read(job, "processor", "processor-missing", read)
    if processor.chat_template:
        processor.tokenizer.chat_template = processor.chat_template
    _tokenizer(job, processor.tokenizer)
    processor.chat_template = processor.tokenizer.chat_template
    return processor


def _tokenizer(job: Job, tokenizer: Any) -> Any:
    """The tokenizer with the plan's template, added tokens and pad token."""
    template = job.model.chat_template
    if template:
        tokenizer.chat_template = template
    add_tokens(job, tokenizer)
    if job.model.pad_token == "ensure":
        ensure_pad_token(tokenizer, unlike_eos=job.task.head == "classifier")
    return tokenizer


def _found_tokenizer(job: Job) -> Any:
    from transformers import AutoTokenizer

    def read(place: str, options: dict[str, Any]) -> Any:
        return AutoTokenizer.from_pretrained(place, **options)

    return _read(job, "tokenizer", "tokenizer-missing", read)


def _read(job: Job, what: str, code: str, read: Callable[[str, dict[str, Any]], Any]) -> Any:
    """The plan's own tokenizer or processor (`what`), or the model's. RecipeError `code` without one."""
    own = job.model.tokenizer
    reference = model_reference(job) if own is None else local_or_hub(own)
    if reference is None:
        message = f"a model without weights names no {what}"
        raise RecipeError(Problem(code, message, path="model.tokenizer"))
    if reference.lower().endswith(".gguf"):
        reference, file = str(Path(reference).parent), {"gguf_file": Path(reference).name}
    else:
        file = {}
    options = hub_options(job, revision=own is None and not Path(reference).is_dir()) | file
    try:
        return read(reference, options)
    except (OSError, ValueError, KeyError) as error:
        message = f"no {what} in {reference}: {first_line(error)}"
        place = "model.name_or_path" if own is None and job.task.sees_images else "model.tokenizer"
        raise own_code(error, reference) or RecipeError(Problem(code, message, path=place)) from error


def _image_processor(job: Job) -> Any:
    """Pillow's processors everywhere: they need no torchvision, and give the same pixels on each machine."""
    from transformers import AutoImageProcessor, ViTImageProcessorPil

    reference = None if job.tiny else model_reference(job)
    if reference is None:
        height, width = _image_size(job.model.config or {})
        return ViTImageProcessorPil(size={"height": height, "width": width})
    try:
        return AutoImageProcessor.from_pretrained(reference, backend="pil", **hub_options(job))
    except (OSError, ValueError, KeyError) as error:
        raise own_code(error, reference) or RecipeError(
            Problem(
                "image-processor-missing",
                f"no image processor in {reference}: {first_line(error)}",
                path="model.name_or_path",
                hint="save it beside the weights: preprocessor_config.json",
            )
        ) from error


def _image_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """(height, width) in pixels; a configuration that names none has its class's."""
    from transformers import AutoConfig

    size = getattr(AutoConfig.for_model(**config), "image_size", None)
    if size is None:
        raise RecipeError(
            Problem("image-size-missing", "the configuration has no image_size", path="model.config")
        )
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def ensure_pad_token(tokenizer: Any, *, unlike_eos: bool = False) -> None:
    """Give a tokenizer a pad token without making the vocabulary larger.

    EOS is the last resort and harmless for language models: labels are made before padding, so EOS stays a
    target. unlike_eos: replace a pad token that is EOS where there is another; classifiers of decoders read
    the last token that is not padding (`refuse_padded_end`).
    """
    if tokenizer.pad_token_id not in ((None, tokenizer.eos_token_id) if unlike_eos else (None,)):
        return
    vocabulary = tokenizer.get_vocab()
    known = _UNLIKE_EOS if unlike_eos else _SPARE_TOKENS
    spare = (token for token in known if token in vocabulary and token != tokenizer.eos_token)
    tokenizer.pad_token = next(spare, tokenizer.eos_token)
    if tokenizer.pad_token_id is None:
        message = "the tokenizer has neither a pad token nor an EOS"
        raise RecipeError(Problem("pad-token-missing", message, path="model.tokenizer"))


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
    return sorted({int(tokenizer.convert_tokens_to_ids(token)) for token in job.model.add_tokens})


def fit_vocabulary(job: Job, model: Any, tokenizer: Any) -> None:
    """Give the embedding a row for every added token, and rows up to a multiple of the plan's vocab_multiple.

    RecipeError for any other id without a row: an index error on CPU, and a dead device on CUDA.
    """
    rows = int(model.config.get_text_config().vocab_size)
    added = set(added_ids(job, tokenizer))
    ids = set(tokenizer.get_vocab().values())
    homeless = sorted(number for number in ids - added if number >= rows)
    if homeless:
        message = f"the tokenizer's ids go up to {homeless[-1]}, the model's embedding has {rows} rows"
        hint = "use the tokenizer that belongs to the model, or list new tokens in model.add_tokens"
        path = "model.tokenizer" if job.model.tokenizer else "model.name_or_path"
        raise RecipeError(Problem("token-id-range", message, path=path, hint=hint))
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
        if is_named_by(name, whole):
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
    if found.tied and any(is_named_by(name, whole) for name in found.names):
        changed["ensure_weight_tying"] = True
    kept = []
    if rows:
        kept.append(f"{len(ids)} rows of {' and '.join(rows)}{' (tied to the head)' if found.tied else ''}")
    if full := [name for name in found.names if is_named_by(name, whole)]:
        why = " (ZeRO-3 cannot train single rows)" if sharded else ""
        kept.append(f"all of {' and '.join(full)}{why}")
    print(f"added tokens: trained and saved with the adapter are {' and '.join(kept)}")
    return changed


def is_named_by(name: str, ends: Sequence[str]) -> bool:
    """Whether one of `ends` is the module's complete name, or the end of it after a dot."""
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
        message = "the adapter was trained without these tokens, and its trained rows cannot change"
        hint = "give the add_tokens of the run that made the adapter, or start a new adapter"
        raise RecipeError(Problem("adapter-add-tokens", message, path="model.add_tokens", hint=hint))


def _refuse_overlap(settings: dict[str, Any], found: Embeddings) -> None:
    """LoRA on an embedding and trained rows of it cannot be combined."""
    wanted = settings.get("target_modules") or ()
    if isinstance(wanted, str):
        hit = [] if is_all_linear(wanted) else [name for name in found.names if re.fullmatch(wanted, name)]
    else:
        hit = [name for name in found.names if is_named_by(name, wanted)]
    if hit:
        message = f"{' and '.join(hit)} cannot have both LoRA and trained rows for added tokens"
        hint = "leave it out there, or name it in adapter.modules_to_save"
        raise RecipeError(Problem("adapter-add-tokens", message, path="adapter.target_modules", hint=hint))
    if found.tied and found.biased:
        message = "peft cannot train single rows of a tied output layer that has a bias"
        hint = "train without an adapter, or without add_tokens"
        raise RecipeError(Problem("adapter-add-tokens", message, path="model.add_tokens", hint=hint))
