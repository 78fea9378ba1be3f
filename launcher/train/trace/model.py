"""The real model of a plan at a small depth, without data, and one training step of it on a tape."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from launcher.models.capabilities import holds_mask
from launcher.train.job import Job
from launcher.train.model.adapters import attach_adapter, narrow_again
from launcher.train.model.loss import chunk_loss
from launcher.train.model.models import auto_class
from launcher.train.model.vision import vision_modules
from launcher.train.tasks import train_task
from launcher.train.trace.kernels import adapters_over_quantized, stand_in
from launcher.train.trace.repeats import ALIKE, Repeats, find_repeats, kinds_of
from launcher.train.trace.tape import Recorder, Tape, name_kinds
from launcher.train.upstream.torch_seams import replace_tensors

SINGLE_TENSOR, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a trace."""

    job: Job
    """The settings of the plan."""
    memory: Mapping[str, Any]
    """The plan's MemoryJob."""
    config: Mapping[str, Any]
    labels: int | None
    """Outputs of a classification's head, None for language models."""
    on_cpu: bool
    capability: tuple[int, int] | None

    @property
    def task(self) -> str:
        return str(self.job.task.name)

    @property
    def autocast(self) -> torch.dtype | None:
        """DeepSpeed casts the model instead, and `-true` precisions load it as it is trained."""
        precision = self.memory["precision"]
        if not self.job.engine.has_autocast or precision not in ("bf16", "fp16"):
            return None
        return torch.bfloat16 if precision == "bf16" else torch.float16

    @property
    def one_by_one(self) -> bool:
        """Whether attention varlen calls a kernel for each document of a row."""
        return self.memory["attention"] == "varlen" and bool(self.memory.get("one_by_one", self.on_cpu))

    @property
    def document_mask(self) -> bool:
        """Whether a mask keeps the documents of a row apart."""
        return bool(self.memory["document_mask"]) and holds_mask(self.memory["attention"])


def language_config(config: Any) -> Any:
    """The part of a configuration that has the sizes of the language model: of text and images, an inner
    one; else the configuration itself."""
    inner = getattr(config, "sub_configs", None) or {}
    return config.get_text_config() if "vision_config" in inner else config


def depth_names(config: Any) -> tuple[str, ...]:
    """The configuration's attributes that hold the depth of a stack, one for each stack."""
    if getattr(config, "is_encoder_decoder", False):
        pairs = (("num_layers", "num_decoder_layers"), ("encoder_layers", "decoder_layers"))
        for pair in pairs:
            if all(getattr(config, name, None) for name in pair):
                return pair
    return ("num_hidden_layers",)


def whole_config(config: Mapping[str, Any], labels: int | None) -> Any:
    """The configuration at full depth. ValueError for a type that transformers does not know."""
    from transformers import AutoConfig

    given = {k: v for k, v in config.items() if k not in ("quantization_config", "num_labels")}
    if labels is not None:
        given |= {"num_labels": labels, "problem_type": "single_label_classification"}
        given.pop("id2label", None)
        given.pop("label2id", None)
    whole = AutoConfig.for_model(**given)
    text = language_config(whole)
    vocabulary = getattr(text, "vocab_size", None)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # A run takes the tokenizer's ids; the class defaults may be outside a small vocabulary.
        token = getattr(text, name, None)
        if isinstance(token, int) and vocabulary and token >= vocabulary:
            setattr(text, name, 0)
    if getattr(whole, "is_encoder_decoder", False) and getattr(whole, "decoder_start_token_id", None) is None:
        whole.decoder_start_token_id = 0
    return whole


def cut(config: Any, names: Sequence[str], depths: Sequence[int]) -> Any:
    """A copy of the configuration with stacks of these depths; what is listed layer by layer is cut too."""
    import copy

    shorter = copy.deepcopy(config)
    text = language_config(shorter)
    full = {getattr(text, name) for name in names}
    for key, value in vars(text).items():
        if isinstance(value, list) and len(value) in full:
            setattr(text, key, value[: max(depths)])
    for name, depth in zip(names, depths, strict=True):
        setattr(text, name, depth)
    return shorter


def repeats_of(request: Request, config: Any, names: Sequence[str]) -> Repeats:
    """How the layers of the model repeat; stacks of an encoder-decoder model are of alike layers."""
    if len(names) > 1:
        return ALIKE
    with torch.device("meta"):
        model = auto_class(request.task).from_config(config)
    layers = [stack for stack in stacks(model) if len(stack) == getattr(language_config(config), names[0])]
    return find_repeats(kinds_of(layers[0])) if layers else ALIKE


def _keep_layers(model: Any, chosen: Sequence[int]) -> None:
    """Leave these layers alone in the model, and what is listed layer by layer in its configuration."""
    config = language_config(model.config)
    layers = next(stack for stack in stacks(model) if len(stack) == config.num_hidden_layers)
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == len(layers):
            setattr(config, key, [value[i] for i in chosen])
    config.num_hidden_layers = len(chosen)
    for index in sorted(set(range(len(layers))) - set(chosen), reverse=True):
        del layers[index]


def build(request: Request, config: Any, chosen: Sequence[int] | None = None) -> Any:
    """The model as it would be trained, on the device "meta"; `chosen`: with these layers alone."""
    with torch.device("meta"):
        return _build(request, config, chosen)


def place(model: Any) -> Any:
    """Move a model from "meta" to fake CPU tensors, in a FakeTensorMode; tied weights stay tied.

    Modules' own ways swap tensors, which fake ones do not allow.
    """
    moved: dict[int, torch.Tensor] = {}

    def new(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            empty = torch.empty_like(tensor, device="cpu")
            trained = isinstance(tensor, torch.nn.Parameter)
            moved[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if trained else empty
        return moved[id(tensor)]

    for module in model.modules():
        replace_tensors(module, new)
    return model


def _build(request: Request, config: Any, chosen: Sequence[int] | None) -> Any:
    memory, job = request.memory, request.job
    options: dict[str, Any] = {"dtype": getattr(torch, memory["dtype"])}
    if request.one_by_one or holds_mask(memory["attention"]):
        options["attn_implementation"] = memory["attention"]
    # Else torch's causal kernel over the whole row holds what they do; their packages are not asked for.
    model = auto_class(request.task).from_config(config, **options)
    if chosen is not None:
        _keep_layers(model, chosen)
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = 0  # a decoder's classification finds the last token by it
    quantized = memory["quantization"]
    if quantized != "none":
        widened = stand_in(model, quantized, _compute_dtype(request), on_cpu=request.on_cpu)
    model = attach_adapter(_without_files(job), model, None, whole=False)
    if quantized != "none":
        adapters_over_quantized(model)
        narrow_again(widened, memory["kbit_norms"])
    if memory["checkpointing"]:
        given = job.trainer.activation_checkpointing_kwargs
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=given)
    if job.engine.casts(memory["precision"]):
        model = model.to(torch.float32 if memory["precision"] == "fp32" else _half(memory["precision"]))
    model.config.use_cache = False
    model.train()
    if memory["chunked"]:
        chunk_loss(model, without_values=True)
    return model


def _compute_dtype(request: Request) -> str:
    asked = request.job.model.quantization
    named = None if asked == "none" else asked.get("compute_dtype")
    return str(named or request.memory["dtype"])


def _half(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision.startswith("bf16") else torch.float16


def _without_files(job: Job) -> Job:
    """The job without added tokens, and with peft's preparation of quantised models done already."""
    settings = {**job.plan["settings"], "model.add_tokens": {"value": []}}
    if job.adapter.init_lora_weights == "loftq":  # computed from weights, on a device
        settings["adapter.init_lora_weights"] = {"value": True}
    if settings["model.prepare_for_kbit"]["value"]:
        settings["model.prepare_for_kbit"] = {"value": False}
        checkpointing = bool(settings["trainer.activation_checkpointing"]["value"])
        settings["model.enable_input_require_grads"] = {"value": checkpointing}
    return Job(job.run_dir, {**job.plan, "settings": settings})


def record_step(
    request: Request,
    model: Any,
    inputs: dict[str, torch.Tensor],
    logits: int,
    repeats: Repeats = ALIKE,
    longest: int | None = None,
) -> Tape:
    """The tape of the optimizer's step, then of forward and backward pass with its states in place.

    So every moment is that of a later step: states exist, and with accumulation so do gradients.
    logits: elements of the head's output. longest: as of the recorder.
    """
    recorder = Recorder(on_cpu=request.on_cpu, longest=longest)
    tape = recorder.tape
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    with recorder:
        states = {recorder.add(t) for t in (*parameters, *model.buffers())}
        tape.classify((i for i in states if i is not None), "weights")
        keeps = request.memory["accumulation"] != 1
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        tape.classify(_pieces(recorder, (p.grad for p in trained)), "gradients")
        recorder.begin("step")
        optimizer = _step(request, trained)
        if optimizer is not None:
            held = (t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t))
            tape.classify(_pieces(recorder, held), "optimizer")
        if not keeps:
            for parameter in trained:
                parameter.grad = None
        follow_layers(model, recorder, repeats)
        backward = _pass(request, model, inputs, recorder)
        tape.classify(_pieces(recorder, (p.grad for p in trained if p.grad is not None)), "gradients")
        recorder.begin("clip")
        if request.job.trainer.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=not request.on_cpu)
    name_kinds(tape, backward, logits)
    return tape


def _pieces(recorder: Recorder, tensors: Any) -> list[int]:
    return [index for index in map(recorder.add, tensors) if index is not None]


def _step(request: Request, trained: list[torch.Tensor]) -> torch.optim.Optimizer | None:
    """A step of torch's own optimizers; others keep states that the closed form knows."""
    name = request.memory["optim"]
    kind = FUSED if name.endswith("_fused") else SINGLE_TENSOR if request.on_cpu else FOREACH
    # Upstream's two groups: with weight decay, and biases and norms without.
    groups = [[p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]]
    given: Any = [{"params": group} for group in groups if group]
    if name in ("adamw_torch", "adamw_torch_fused"):
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(given, **kind)
    elif name == "sgd":
        optimizer = torch.optim.SGD(given, lr=1e-3, **kind)
    else:
        return None
    optimizer.step()
    return optimizer


def _pass(request: Request, model: Any, inputs: dict[str, torch.Tensor], recorder: Recorder) -> int:
    """Forward and backward pass; the index of the first event of the backward pass."""
    recorder.begin("forward")
    dtype = request.autocast
    mixed = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
    # While a step runs, its batch and the next one are there, both with a mask of their padding.
    batch, waiting = ({k: torch.empty_like(v) for k, v in inputs.items()} for _ in range(2))
    unused = [torch.empty_like(v) for name, v in inputs.items() if name == "input_ids" for _ in range(2)]
    with mixed:
        out = model(**batch, **_loss_arguments(request, model))
        if dtype is not None:  # accelerate turns the outputs into float32 after its autocast
            out = {name: x.float() for name, x in out.items() if torch.is_tensor(x)}
    loss = out["loss"]
    del out
    backward = len(recorder.tape.events)
    recorder.phase = "backward"
    recorder.mark("head")
    loss.backward()
    del batch, waiting, unused
    return backward


def _loss_arguments(request: Request, model: Any) -> dict[str, Any]:
    """The Trainer gives models that take it the number of target tokens, so that the loss is a sum."""
    base = model.get_base_model() if request.job.has_adapter else model
    if train_task(request.task).counts_targets and getattr(base, "accepts_loss_kwargs", True):
        return {"num_items_in_batch": torch.tensor(1)}
    return {}


def follow_layers(model: Any, recorder: Recorder, repeats: Repeats) -> None:
    """Hooks that begin a segment at each place, forwards and backwards, and one after the last layer."""
    for number, layers in enumerate(stacks(model)):
        for index, layer in enumerate(layers):
            place, begins, ends = repeats.place(index, len(layers))
            is_last = index == len(layers) - 1
            _follow(layer, f"stack{number}-{place}", (begins, ends, is_last), recorder)


def _follow(layer: Any, place: str, marks: tuple[bool, bool, bool], recorder: Recorder) -> None:
    """`marks`: whether it is the first and the last layer of its place, and the last of all."""
    begins, ends, is_last = marks

    def before(_module: Any, _args: Any) -> None:
        if begins:
            recorder.mark(place)

    def after(_module: Any, _args: Any, out: Any) -> None:
        tensor = out[0] if isinstance(out, tuple) else out
        if ends and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _gradients: recorder.mark(place))
        if is_last:
            recorder.mark("head")

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def stacks(model: Any) -> list[Any]:
    """The lists of layers: the outermost module lists of at least two alike modules, without those of a
    vision tower beside a language model."""
    found: list[Any] = []
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    inside: tuple[str, ...] = vision_modules(base)
    for name, module in base.named_modules():
        if any(name.startswith(outer + ".") for outer in inside):
            continue
        if isinstance(module, torch.nn.ModuleList) and len(module) > 1:
            inside = (*inside, name)
            found.append(module)
    return found
