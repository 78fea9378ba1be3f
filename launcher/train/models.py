"""Tokenizer and base model of a plan: from weights, from a GGUF file, or random."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.train.job import Job, local_rank, rank

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


def load_tokenizer(job: Job) -> Any:
    """The plan's tokenizer, with a chat template where the plan gives one and a pad token.

    RecipeError when the plan names none, or none can be found.
    """
    if job.tiny:
        from launcher.train.tiny import tiny_tokenizer

        config = job.value("model.config") or {}
        return tiny_tokenizer(int(config.get("vocab_size", 512)))
    from transformers import AutoTokenizer

    reference = job.value("model.tokenizer")
    if reference is None and job.value("model.gguf_file"):
        reference = str(_gguf_folder(job))
    reference = reference or job.value("model.name_or_path")
    if reference is None:
        raise RecipeError(
            Problem(
                "tokenizer-missing",
                "a model without weights names no tokenizer",
                path="model.tokenizer",
            )
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(local_or_hub(reference), **_hub_options(job))
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(
            Problem(
                "tokenizer-missing",
                f"no tokenizer in {reference}: {_first_line(error)}",
                path="model.tokenizer",
            )
        ) from error
    template = job.value("model.chat_template")
    if template:
        tokenizer.chat_template = template
    if job.value("model.pad_token", "ensure") == "ensure":
        ensure_pad_token(tokenizer)
    return tokenizer


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


def load_model(job: Job, tokenizer: Any, *, distributed: bool = True) -> Any:
    """The base model in the plan's dtype, quantised and placed as planned.

    distributed: False loads for a single process outside training, whatever the plan's engine is.
    RecipeError for weights that cannot be found; MachineError when quantisation did not take place.
    """
    options = _weight_options(job, distributed)
    config = job.value("model.config")
    model = _random_model(job, config, tokenizer, options) if config else _pretrained_model(job, options)
    _check_quantized(job, model)
    _fit_vocabulary(job, model, tokenizer)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model


def local_or_hub(reference: str) -> str:
    """A `package:` reference as a folder; everything else (folder, hub id) as it is."""
    if not reference.startswith("package:"):
        return reference
    from launcher.facts.probe import resolve_path

    return str(resolve_path(reference))


def _hub_options(job: Job) -> dict[str, Any]:
    options = {
        "revision": job.value("model.revision"),
        "cache_dir": job.value("model.cache_dir"),
        "trust_remote_code": job.value("model.trust_remote_code") or None,
    }
    return {name: value for name, value in options.items() if value is not None}


def _weight_options(job: Job, distributed: bool) -> dict[str, Any]:
    """Keyword arguments of from_pretrained that hold for every source of weights."""
    options: dict[str, Any] = {"dtype": job.value("model.dtype", "float32")}
    attention = job.value("model.attn_implementation")
    if attention:
        options["attn_implementation"] = attention
    device_map = job.value("model.device_map")
    if device_map == "local":
        device_map = {"": _this_device(job)}
    if device_map is not None and not (distributed and job.zero_stage == 3):
        options["device_map"] = device_map
    quantization = quantization_config(job)
    if quantization is not None:
        options["quantization_config"] = quantization
    return options


def _this_device(job: Job) -> int | str:
    import torch

    on_cpu = job.value("trainer.use_cpu", False) or not torch.cuda.is_available()
    return "cpu" if on_cpu else local_rank()


def quantization_config(job: Job) -> Any | None:
    """BitsAndBytesConfig of the plan, None without quantisation."""
    asked = job.value("model.quantization", "none")
    if asked in (None, "none"):
        return None
    settings = {"type": asked} if isinstance(asked, str) else dict(asked)
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise MachineError(
            Problem(
                "bitsandbytes-missing",
                "quantisation needs bitsandbytes",
                hint="pip install bitsandbytes",
            )
        ) from error
    from transformers import BitsAndBytesConfig

    if settings["type"] == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=settings["type"],
        bnb_4bit_use_double_quant=settings.get("double_quant", True),
        bnb_4bit_compute_dtype=settings.get("compute_dtype") or "float32",
    )


def _pretrained_model(job: Job, options: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    if job.value("model.gguf_file"):
        reference, hub = str(_gguf_folder(job)), {}
    else:
        reference, hub = local_or_hub(job.value("model.name_or_path")), _hub_options(job)
    try:
        return AutoModelForCausalLM.from_pretrained(reference, **hub, **options)
    except OSError as error:
        raise RecipeError(
            Problem(
                "model-missing",
                f"cannot load {reference}: {_first_line(error)}",
                path="model.name_or_path",
            )
        ) from error


def _random_model(job: Job, config: dict[str, Any], tokenizer: Any, options: dict[str, Any]) -> Any:
    """A model of that configuration with random weights, the same ones for the same seed."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    built = AutoConfig.for_model(**config)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # A configuration's ids belong to its own tokenizer, which may be a different one here.
        if getattr(built, name, None) is not None or name == "pad_token_id":
            setattr(built, name, getattr(tokenizer, name))
    set_seed(job.seed)
    if "quantization_config" not in options:
        given = {name: options[name] for name in ("dtype", "attn_implementation") if name in options}
        if given["dtype"] == "auto":
            given.pop("dtype")
        return AutoModelForCausalLM.from_config(built, **given)
    # Quantisation happens while weights are read, so random ones take the way over a folder. It is shared,
    # because save_pretrained writes on the first rank only.
    folder = job.run_dir / ".random-weights"
    AutoModelForCausalLM.from_config(built).save_pretrained(folder)
    _wait_for_all()
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    _wait_for_all()
    if rank() == 0:
        shutil.rmtree(folder)
    model.name_or_path = model.config.name_or_path = ""  # the folder is gone
    return model


def _wait_for_all() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _gguf_folder(job: Job) -> Path:
    from launcher.train.gguf import converted

    root = local_or_hub(job.value("model.name_or_path"))
    return converted(root, job.value("model.gguf_file"), _hub_options(job))


def _check_quantized(job: Job, model: Any) -> None:
    """Misspelt quantisation options leave a model unquantised without a word; look at the model itself."""
    asked = job.value("model.quantization", "none")
    if asked in (None, "none"):
        return
    kind = asked if isinstance(asked, str) else asked["type"]
    flag = "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit"
    if not getattr(model, flag, False):
        raise MachineError(
            Problem(
                "not-quantized",
                f"the model was loaded without {kind} quantisation",
                path="model.quantization",
            )
        )


def _fit_vocabulary(job: Job, model: Any, tokenizer: Any) -> None:
    """A token id beyond the embedding is an index error on CPU and a dead device on CUDA."""
    rows = model.config.get_text_config().vocab_size
    if len(tokenizer) <= rows:
        return
    raise RecipeError(
        Problem(
            "token-id-range",
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows",
            path="model.tokenizer" if job.value("model.tokenizer") else "model.name_or_path",
            hint="use the tokenizer that belongs to the model",
        )
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
