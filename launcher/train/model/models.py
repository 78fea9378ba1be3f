"""The base model of a plan: from weights, from a GGUF file, or random; with its head; its layers compiled."""

from __future__ import annotations

import inspect
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.models.positions import stretched
from launcher.recipe.hooks import MAKE_MODELS
from launcher.tasks import task_named
from launcher.train.hooks import load_hooks
from launcher.train.job import Job, local_rank, rank
from launcher.train.model.experts import expert_parameters, flat_experts, packing_experts
from launcher.train.model.processing import first_line, fit_vocabulary, hub_options, model_reference, own_code
from launcher.train.model.processors import tokenizer_of
from launcher.train.model.vision import vision_modules
from launcher.train.tiny_processor import set_token_ids


def load_model(
    job: Job, processing: Any, labels: Sequence[str] | None = None, *, distributed: bool = True
) -> Any:
    """The base model with the task's head, quantised and placed as planned, a row for every token.

    labels: of a classification, by id; None keeps the checkpoint's own.
    distributed: False loads for a single process outside training, whatever the plan's engine is.
    RecipeError for weights that cannot be found, an adapter in their place, or a model that cannot recompute
    its layers as planned or cannot be saved; MachineError when quantisation did not take place, or
    the devices do not hold the model.
    """
    options, hooks = _weight_options(job, distributed), load_hooks(job, *MAKE_MODELS)
    head = label_settings(job, labels)
    with packing_experts(job.model.quantization):
        if hooks.make_model is not None:
            model = _own_model(job, processing, head, hooks.make_model)
        elif job.model.config:
            model = _random_model(job, processing, head, options)
        else:
            model = _pretrained_model(job, head, options)
    check_bare(model)
    leave_out_mtp(model)
    check_recomputes(job, model)
    check_shared(job, model)
    _check_window(job, model)
    _check_quantized(job, model)
    if distributed:
        _check_present(model)
        if job.fsdp.cpu_offload and hasattr(model, "hf_device_map"):
            del model.hf_device_map  # accelerate would refuse to train on GPUs what FSDP2 has yet to move
    if job.task.reads_tokens:
        tokenizer = tokenizer_of(processing)
        fit_vocabulary(job, model, tokenizer)
        # A decoder's classification finds the last token by it, and checkpoints may have another tokenizer's.
        if job.task.head == "classifier" or getattr(model.config, "pad_token_id", None) is None:
            model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if hooks.prepare_model is not None:
        model = hooks.prepare_model(model)
        check_recomputes(job, model)
        check_shared(job, model)
    return model


TEXT_KEYS = {
    r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?!lm_head\.)": "model.",
}
"""Names of a text model's weights in checkpoints for text and images -> names in its own class.

The names that transformers 5.23 gives them are `model.language_model.` or `model.text_model.`; older files
have `language_model.model.` and the head in `language_model.lm_head.`.
"""


_MTP = ("mtp_num_hidden_layers", "num_mtp_layers", "num_nextn_predict_layers")
"""Names of the number of MTP layers in configurations."""


def auto_class(task: str) -> Any:
    """transformers' AutoModel class for a task."""
    import transformers

    return getattr(transformers, task_named(task).model_class)


def _weight_options(job: Job, distributed: bool) -> dict[str, Any]:
    """Keyword arguments of from_pretrained that hold for every source of weights."""
    options: dict[str, Any] = {"dtype": job.model.dtype, **class_options(job)}
    attention = job.model.attn_implementation
    from launcher.train.upstream.model_seams import repeat_keys_for_fused_attention

    repeat_keys_for_fused_attention()
    if attention == "varlen":
        from launcher.train.model.attention import register_varlen

        register_varlen()
        attention = "varlen" if distributed else "sdpa"  # nothing but training flattens rows
    if attention:
        options["attn_implementation"] = attention
    device_map = job.model.device_map
    if device_map == "local":
        device_map = {"": "cpu" if distributed and job.fsdp.cpu_offload else _this_device(job)}
    if device_map is not None and not (distributed and job.zero_stage == 3):
        options["device_map"] = device_map
    quantization = quantization_config(job)
    if quantization is not None:
        options["quantization_config"] = quantization
    return options


def _this_device(job: Job) -> int | str:
    import torch

    on_cpu = job.trainer.use_cpu or not torch.cuda.is_available()
    return "cpu" if on_cpu else local_rank()


def quantization_config(job: Job) -> Any | None:
    """BitsAndBytesConfig of the plan, None without quantisation."""
    asked = job.model.quantization
    if asked == "none":
        return None
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        message = "quantisation needs bitsandbytes"
        hint = "pip install bitsandbytes"
        raise MachineError(Problem("bitsandbytes-missing", message, hint=hint)) from error
    from transformers import BitsAndBytesConfig

    # Upstream spares the last parameter's module only, and a head's last parameter is often its bias.
    spares = job.task.adds_head or job.task.sees_images
    spared = {"llm_int8_skip_modules": _never_quantized(job)} if spares else {}
    if asked["type"] == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, **spared)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=asked["type"],
        bnb_4bit_use_double_quant=asked["double_quant"],
        bnb_4bit_compute_dtype=asked["compute_dtype"],
        bnb_4bit_quant_storage=asked.get("quant_storage"),
        **spared,
    )


def _never_quantized(job: Job) -> list[str]:
    """The head's modules, and those that read images; of a model without weights."""
    import torch

    with torch.device("meta"):
        model = auto_class(job.task.name).from_config(load_config(job))
    if job.task.adds_head:
        return head_modules(model)
    head = model.get_output_embeddings()
    return [*(name for name, module in model.named_modules() if module is head), *vision_modules(model)]


def _pretrained_model(job: Job, head: dict[str, Any], options: dict[str, Any]) -> Any:
    task, gguf = job.task.name, job.model.gguf_file
    if gguf and not task_named(task).gguf:
        raise RecipeError(
            Problem("gguf-task", f"a GGUF file holds a causal LM, not a {task} model", path="model.gguf_file")
        )
    reference = model_reference(job)
    hub = {} if gguf else hub_options(job)
    if not gguf and "quantization_config" in options and hasattr(load_config(job), "quantization_config"):
        options = {**options}
        del options["quantization_config"]  # the checkpoint is stored quantised: its own holds
    if job.model.text_only or job.model.rope_parameters:
        config = load_config(job)
        for name, value in head.items():
            setattr(config, name, value)
        head, hub = {}, {**hub, "config": config}
    if job.model.text_only:
        hub["key_mapping"] = TEXT_KEYS
    # A head for other labels has another size; check_loaded refuses any other difference.
    other_sizes = {"ignore_mismatched_sizes": True} if task_named(task).adds_head else {}
    try:
        model, info = auto_class(task).from_pretrained(
            reference, **hub, **options, **head, **other_sizes, output_loading_info=True
        )
    except OSError as error:
        message = f"cannot load {reference}: {first_line(error)}"
        raise RecipeError(Problem("model-missing", message, path="model.name_or_path")) from error
    except (ValueError, pickle.UnpicklingError) as error:
        refusal = own_code(error, str(reference)) or unsafe_weights(error, str(reference))
        if refusal is None:
            raise
        raise refusal from error
    check_loaded(job, model, info)
    if job.model.text_only:
        from launcher.train.upstream.model_seams import save_own_names

        save_own_names(model)
        tied = model.get_output_embeddings()
        if tied is not None:  # the wrapper's flag may say otherwise than its weights
            model.config.tie_word_embeddings = tied.weight is model.get_input_embeddings().weight
    return model


def unsafe_weights(error: Exception, folder: str) -> RecipeError | None:
    """The refusal of weights that hold more than tensors; None for another error."""
    if not isinstance(error, pickle.UnpicklingError):
        return None
    message = f"the weights in {folder} hold more than tensors; code is not run: {first_line(error)}"
    hint = "take weights in safetensors"
    return RecipeError(Problem("unsafe-pickle", message, path="model.name_or_path", hint=hint))


def _random_model(job: Job, processing: Any, head: dict[str, Any], options: dict[str, Any]) -> Any:
    """A model of that configuration with random weights, the same ones for the same seed."""
    from transformers import set_seed
    from transformers.modeling_utils import set_zero3_state

    make = auto_class(job.task.name)
    built = _random_config(job, processing, head)
    set_seed(job.seed)
    # Weights are quantised and placed while they are read, so such random ones take the way over a folder.
    if not {"quantization_config", "device_map"} & options.keys():
        passed = ("dtype", "attn_implementation", "add_pooling_layer")
        given = {name: options[name] for name in passed if name in options}
        if given["dtype"] == "auto":
            given.pop("dtype")
        return make.from_config(built, **given)
    # It is shared, because save_pretrained writes on the first rank only.
    folder = job.run_dir / ".random-weights"
    with set_zero3_state():  # ZeRO-3 would leave each rank a part of them to write
        make.from_config(built).save_pretrained(folder)
    _wait_for_all()
    model = make.from_pretrained(folder, **options)
    _wait_for_all()
    if rank() == 0:
        shutil.rmtree(folder)
    model.name_or_path = model.config.name_or_path = ""  # the folder is gone
    return model


def _own_model(job: Job, processing: Any, head: dict[str, Any], make: Callable[[Any], Any]) -> Any:
    """What make_model makes of the configuration, which knows the labels, in the planned dtype."""
    import torch
    from transformers import PreTrainedModel, set_seed

    from launcher.train.upstream.model_seams import choose_attention

    config = _random_config(job, processing, head) if job.model.config else load_config(job)
    for name, value in head.items():
        setattr(config, name, value)
    if job.model.attn_implementation:
        choose_attention(config, job.model.attn_implementation)
    set_seed(job.seed)
    model = make(config)
    if not isinstance(model, PreTrainedModel):
        message = f"make_model returned a {type(model).__name__}, expected a PreTrainedModel of transformers"
        raise RecipeError(Problem("hook-result", message, str(job.python.file), path="python"))
    return model if job.model.dtype == "auto" else model.to(getattr(torch, job.model.dtype))


def _random_config(job: Job, processing: Any, head: dict[str, Any]) -> Any:
    """The configuration with the labels, and with the ids of the tokenizer that is used."""
    from transformers import AutoConfig

    given = dict(job.model.config or {})
    if head:
        given = {name: value for name, value in given.items() if name != "num_labels"} | head
    built = AutoConfig.for_model(**given)
    if not job.task.reads_tokens:
        return built
    if job.task.sees_images and job.tiny:
        set_token_ids(built, processing)
    tokenizer, text = tokenizer_of(processing), built.get_text_config() if job.task.sees_images else built
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # A configuration's ids belong to its own tokenizer, which may be a different one here.
        if getattr(text, name, None) is not None or name == "pad_token_id":
            setattr(text, name, getattr(tokenizer, name))
    if built.is_encoder_decoder:
        built.decoder_start_token_id = tokenizer.pad_token_id  # as T5 has it
    return built


def _wait_for_all() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def check_bare(model: Any) -> None:
    """RecipeError when the weights were an adapter's, which transformers puts on its base model by itself."""
    from launcher.train.upstream.model_seams import loads_an_adapter

    if loads_an_adapter(model):
        message = "this is the folder of an adapter, not of a model"
        hint = "name its base model here, and the adapter to continue in `adapter.path`"
        raise RecipeError(Problem("double-peft", message, path="model.name_or_path", hint=hint))


def leave_out_mtp(model: Any) -> None:
    """Set the configuration's number of MTP layers (multi-token prediction, for speculative decoding) to 0.

    transformers 5.23 loads them for `generate(use_mtp=True)` alone (generation/candidate_generator.py), so
    that no result has them. A class that reads the number itself keeps it.
    """
    read = inspect.getsource(sys.modules[type(model).__module__])
    for config in (model.config, model.config.get_text_config()):
        for name in _MTP:
            if name not in read and (count := getattr(config, name, None)):
                setattr(config, name, 0)
                if rank() == 0:
                    print(f"MTP layers of the base are not loaded, and what is saved has none: {name} "
                          f"is 0 there, in the base {count}")  # fmt: skip


def check_recomputes(job: Job, model: Any) -> None:
    """RecipeError when layers shall be recomputed and the model's class cannot."""
    if job.trainer.activation_checkpointing and not getattr(model, "supports_gradient_checkpointing", True):
        message = f"{type(model).__name__} does not support activation checkpointing"
        hint = "set it to false; a smaller trainer.per_device_train_batch_size saves memory too"
        raise RecipeError(
            Problem("checkpointing-unsupported", message, path="trainer.activation_checkpointing", hint=hint)
        )


def _check_window(job: Job, model: Any) -> None:
    """RecipeError where a model whose ranks share each sample's tokens attends within a window."""
    if job.sharding.sp_size * job.sharding.cp_size == 1:
        return
    config = model.config.get_text_config()
    windowed = getattr(config, "sliding_window", None) is not None
    if windowed or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise RecipeError(
            Problem(
                "parallel-model",
                f"{type(model).__name__} attends within a window, which sequence and context parallelism do "
                "not keep",
                path="sharding",
                hint="drop sp_size and cp_size; ZeRO-3 takes such models",
            )
        )


def check_shared(job: Job, model: Any) -> None:
    """RecipeError for parameters that are one tensor and are not declared tied: the first save would fail.

    An adapter's file holds none of them, and the pieces of a model under ZeRO-3 are gathered one by one.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    if job.has_adapter or job.zero_stage == 3:
        return
    try:
        remove_tied_weights_from_state_dict(dict(model.state_dict()), model)
    except RuntimeError as error:
        name = type(model).__name__
        message = f"{name} cannot be saved: {str(error).splitlines()[0]}"
        hint = f"declare them in _tied_weights_keys of {name}, or give each its own tensor"
        raise RecipeError(Problem("shared-tensors", message, path="model", hint=hint)) from error


def _check_quantized(job: Job, model: Any) -> None:
    """Misspelt quantisation options silently leave a model unquantised; check the model itself.

    A checkpoint that is stored quantised has a compute_dtype of its own; the one asked for replaces it.
    """
    asked = job.model.quantization
    if asked == "none":
        return
    kind = asked["type"]
    flag = "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit"
    if not getattr(model, flag, False):
        message = f"the model was loaded without {kind} quantisation"
        raise MachineError(Problem("not-quantized", message, path="model.quantization"))
    if kind != "int8":
        flat = list(flat_experts(model))
        left = [*flat, *(name for name, _, _ in expert_parameters(model))]
        if left:
            message = f"{len(left)} parameters of experts were not quantised to {kind}, such as {left[0]}"
            if flat:
                message += ": one matrix holds all experts of a layer, and bitsandbytes cannot quantise it"
            hint = "set model.quantization: none"
            raise MachineError(Problem("not-quantized", message, path="model.quantization", hint=hint))
        import torch
        from bitsandbytes.nn import Linear4bit

        for module in model.modules():
            if isinstance(module, Linear4bit):
                module.compute_dtype = getattr(torch, asked["compute_dtype"])


def _check_present(model: Any) -> None:
    """A device map sends to CPU memory and disk what the GPUs cannot hold; hooks fetch it, for inference."""
    absent = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if absent:
        raise MachineError(
            Problem(
                "weights-offloaded",
                f"the device map put {absent[0]} and {len(absent) - 1} more out of the devices' memory, "
                "where they cannot be trained",
                path="model.device_map",
                hint="more or larger GPUs, model.quantization: nf4, or ZeRO-3 with offload_param",
            )
        )


def label_order(job: Job, found: Sequence[str]) -> tuple[str, ...]:
    """The labels by id: the checkpoint's order when it knows exactly these, else as they are in `found`.

    Reads the configuration of the weights; RecipeError when there is none.
    """
    known: Mapping[str, int] = load_config(job).label2id or {}
    if set(known) == set(found):
        return tuple(sorted(known, key=lambda label: known[label]))
    return tuple(dict.fromkeys(found))


def load_config(job: Job) -> Any:
    """The model's configuration, as transformers reads it; of a wrapper that is loaded for its text model,
    the text model's. RecipeError when there is none."""
    from transformers import AutoConfig

    config = job.model.config
    if config:
        return AutoConfig.for_model(**config)
    reference = model_reference(job)
    try:
        found = AutoConfig.from_pretrained(reference, **hub_options(job))
        return _stretched(job, _text_config(found) if job.model.text_only else found)
    except (OSError, ValueError) as error:
        raise own_code(error, str(reference)) or RecipeError(
            Problem("model-missing", f"cannot read {reference}: {error}", path="model.name_or_path")
        ) from error


def _stretched(job: Job, config: Any) -> Any:
    """With the positions of `model.rope_parameters`, in what else transformers derives from them, too."""
    if job.model.rope_parameters is None:
        return config
    new = stretched(config.to_dict(), job.model.rope_parameters)
    original = "original_max_position_embeddings"
    if hasattr(config, original):  # Phi-3's own, which would win over rope_parameters
        setattr(config, original, new["rope_parameters"].get(original, new["max_position_embeddings"]))
    for name in ("rope_parameters", "max_position_embeddings"):
        setattr(config, name, new[name])
    config.standardize_rope_params()
    config.validate_rope()
    return config


def _text_config(wrapper: Any) -> Any:
    """The configuration of the text model in that of a checkpoint for text and images."""
    config = wrapper.get_text_config()
    # Tied weights are tied unless the checkpoint has both; a head that it lacks would start at random.
    config.tie_word_embeddings = any(getattr(one, "tie_word_embeddings", False) for one in (wrapper, config))
    if config.dtype is None:
        config.dtype = wrapper.dtype
    return config


def label_settings(job: Job, labels: Sequence[str] | None) -> dict[str, Any]:
    """Configuration fields of a head for these labels; nothing for tasks without labels."""
    if job.task.num_labels is not None:
        return {"num_labels": job.task.num_labels}
    if not job.task.classifies or labels is None:
        return {}
    names = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
    }
    # A checkpoint may have been of another kind.
    kind = {"problem_type": job.data.problem_type} if job.task.head == "classifier" else {}
    return {**names, **kind}


def class_options(job: Job) -> dict[str, Any]:
    """Arguments of the model's class beside its configuration: without the pooler of a model without a head,
    which reads the first token and which no loss would reach."""
    import transformers

    if job.task.head != "none":
        return {}
    kind, known = type(load_config(job)), transformers.MODEL_MAPPING
    names = inspect.signature(known[kind].__init__).parameters if kind in known else ()
    return {"add_pooling_layer": False} if "add_pooling_layer" in names else {}


def head_modules(model: Any) -> list[str]:
    """Names of the modules outside the body of a classification model, those that hold parameters."""
    return [
        name
        for name, module in model.named_children()
        if name != model.base_model_prefix and any(True for _ in module.parameters())
    ]


_IN_LAYER = re.compile(r"\.\d+\.")


def check_loaded(job: Job, model: Any, info: Mapping[str, Any]) -> None:
    """Say which weights the checkpoint did not give, or not in this shape.

    RecipeError when the shapes differ elsewhere than in a classification head, or weights are missing that
    would start at random: any of a language model, those of the layers of another.
    """
    heads = head_modules(model) if job.task.adds_head else []
    differing = {str(entry[0]): entry[1:] for entry in info.get("mismatched_keys") or ()}
    wrong = [name for name in sorted(differing) if name.partition(".")[0] not in heads]
    if wrong:
        there, here = (tuple(shape) for shape in differing[wrong[0]][:2])
        message = f"{wrong[0]} is {there} in the checkpoint and {here} in the model"
        hint = "the weights do not belong to this configuration"
        raise RecipeError(Problem("weights-mismatch", message, path="model.name_or_path", hint=hint))
    absent = sorted(set(info.get("missing_keys") or ()) | set(differing))
    needed = [name for name in absent if not job.task.adds_head or _IN_LAYER.search(name)]
    if needed:
        message = f"the checkpoint lacks {len(needed)} weights of the model, such as {needed[0]}"
        hint = "the weights do not belong to this configuration, or a file of them is incomplete"
        raise RecipeError(Problem("weights-missing", message, path="model.name_or_path", hint=hint))
    if absent:
        shown = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        print(f"newly initialised, not from the checkpoint: {shown}")
    elif heads:
        print(f"the classification head {' and '.join(heads)} starts from the checkpoint's weights")


def compile_blocks(job: Job, model: Any) -> int:
    """Compile each layer of `model`, with or without an adapter around it; how many there are.

    Before anything else wraps the model. RecipeError when it does not name its layers.
    """
    from launcher.train.upstream.torch_seams import compile_or_run_plainly

    layers = repeated_layers(model)
    if not layers:
        name = type(model).__name__
        message = f"{name} does not name the layers that could be compiled one by one"
        hint = "model.compile_blocks: false, or name their classes in its _no_split_modules"
        raise RecipeError(Problem("no-blocks", message, path="model.compile_blocks", hint=hint))
    compile_or_run_plainly()
    # Rows of text differ in length from batch to batch, and each length would be compiled anew.
    dynamic = True if job.task.reads_tokens else None
    for layer in layers:
        layer.compile(dynamic=dynamic)
    return len(layers)


def repeated_layers(model: Any) -> list[Any]:
    """The modules of a ModuleList whose class the model names as a layer (_no_split_modules)."""
    import torch

    from launcher.train.upstream.model_seams import layer_classes

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    named = layer_classes(base)
    return [
        layer
        for part in base.modules()
        if isinstance(part, torch.nn.ModuleList)
        for layer in part
        if type(layer).__name__ in named
    ]
