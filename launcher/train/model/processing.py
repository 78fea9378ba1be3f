"""What turns rows into tensors: a plan's tokenizer, or its image processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.job import Job
from launcher.train.model.tokens import add_tokens, ensure_pad_token


def load_processing(job: Job) -> Any:
    """The image processor of an image task, the tokenizer of every other one.

    A tokenizer has the plan's chat template, added tokens and a pad token. RecipeError when the plan
    names none, or none can be found.
    """
    return _tokenizer(job) if job.task.reads_tokens else _image_processor(job)


def model_reference(job: Job) -> str | None:
    """Folder or hub id of the weights, None for random ones; a GGUF file's is its converted folder."""
    name = job.model.name_or_path
    if name is None:
        return None
    if job.model.gguf_file:
        from launcher.train.model.gguf import converted

        return str(converted(local_or_hub(name), job.model.gguf_file, hub_options(job)))
    return local_or_hub(name)


def local_or_hub(reference: str) -> str:
    """A `package:` reference as a folder; everything else (folder, hub id) as it is."""
    if not reference.startswith("package:"):
        return reference
    from launcher.facts.probe import resolve_path

    return str(resolve_path(reference))


def hub_options(job: Job, *, revision: bool = True) -> dict[str, Any]:
    """Keyword arguments that every from_pretrained takes.

    revision: False for a repository other than the weights', whose revisions are its own.
    """
    options = {
        "revision": job.model.revision if revision else None,
        "cache_dir": job.model.cache_dir,
        # Said either way: where nothing is said, transformers asks at the terminal.
        "trust_remote_code": bool(job.model.trust_remote_code),
    }
    return {name: value for name, value in options.items() if value is not None}


def first_line(error: Exception) -> str:
    """What an error says, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def own_code(error: Exception, reference: str) -> RecipeError | None:
    """The refusal of a repository whose code the recipe has not agreed to run; None for another error."""
    if "trust_remote_code" not in str(error):
        return None
    return RecipeError(
        Problem(
            "remote-code",
            f"{reference} comes with Python code of its own, which is not run unasked",
            path="model.trust_remote_code",
            hint="read that code; `trust_remote_code: true` under `model:` lets it run",
        )
    )


def _tokenizer(job: Job) -> Any:
    if job.tiny:
        from launcher.train.tiny import tiny_tokenizer

        config = job.model.config or {}
        tokenizer = tiny_tokenizer(int(str(config.get("vocab_size", 512))))
    else:
        tokenizer = _found_tokenizer(job)
    template = job.model.chat_template
    if template:
        tokenizer.chat_template = template
    add_tokens(job, tokenizer)
    if job.model.pad_token == "ensure":
        ensure_pad_token(tokenizer)
    return tokenizer


def _found_tokenizer(job: Job) -> Any:
    from transformers import AutoTokenizer

    own = job.model.tokenizer
    reference = model_reference(job) if own is None else local_or_hub(own)
    if reference is None:
        raise RecipeError(
            Problem(
                "tokenizer-missing",
                "a model without weights names no tokenizer",
                path="model.tokenizer",
            )
        )
    options = hub_options(job, revision=own is None and not Path(reference).is_dir())
    try:
        return AutoTokenizer.from_pretrained(reference, **options)
    except (OSError, ValueError, KeyError) as error:
        raise own_code(error, reference) or RecipeError(
            Problem(
                "tokenizer-missing",
                f"no tokenizer in {reference}: {first_line(error)}",
                path="model.tokenizer",
            )
        ) from error


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
