"""The real model of a plan at a small depth, without data: its classes, adapter, dtypes and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from launcher.facts.capabilities import holds_mask
from launcher.train.job import Job
from launcher.train.model.adapters import attach_adapter
from launcher.train.model.head_loss import chunk_loss
from launcher.train.model.models import auto_class
from launcher.train.tasks import train_task
from launcher.train.trace.quantized import adapters_over_quantized, stand_in
from launcher.train.upstream.torch_seams import replace_tensors


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
    vocabulary = getattr(whole, "vocab_size", None)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # A run takes the tokenizer's ids; the class defaults may lie outside a small vocabulary.
        token = getattr(whole, name, None)
        if isinstance(token, int) and vocabulary and token >= vocabulary:
            setattr(whole, name, 0)
    if getattr(whole, "is_encoder_decoder", False) and getattr(whole, "decoder_start_token_id", None) is None:
        whole.decoder_start_token_id = 0
    return whole


def cut(config: Any, names: Sequence[str], depths: Sequence[int]) -> Any:
    """A copy of the configuration with stacks of these depths; what is listed layer by layer is cut too."""
    import copy

    shorter = copy.deepcopy(config)
    full = {getattr(config, name) for name in names}
    for key, value in vars(shorter).items():
        if isinstance(value, list) and len(value) in full:
            setattr(shorter, key, value[: max(depths)])
    for name, depth in zip(names, depths, strict=True):
        setattr(shorter, name, depth)
    return shorter


def build(request: Request, config: Any) -> Any:
    """The model as it would be trained, on the device "meta"."""
    with torch.device("meta"):
        return _build(request, config)


def place(model: Any) -> Any:
    """Move a model from "meta" to fake CPU tensors, in a FakeTensorMode; tied weights stay tied.

    Modules' own ways swap tensors, which fake ones do not allow.
    """
    moved: dict[int, torch.Tensor] = {}

    def new(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            empty = torch.empty_like(tensor, device="cpu")
            learnt = isinstance(tensor, torch.nn.Parameter)
            moved[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if learnt else empty
        return moved[id(tensor)]

    for module in model.modules():
        replace_tensors(module, new)
    return model


def _build(request: Request, config: Any) -> Any:
    memory, job = request.memory, request.job
    options: dict[str, Any] = {"dtype": getattr(torch, memory["dtype"])}
    if request.one_by_one or holds_mask(memory["attention"]):
        options["attn_implementation"] = memory["attention"]
    # Else torch's causal kernel over the whole row holds what they do; their packages are not asked for.
    model = auto_class(request.task).from_config(config, **options)
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = 0  # a decoder's classification finds the last token by it
    quantized = memory["quantization"]
    if quantized != "none":
        stand_in(model, quantized, _compute_dtype(request), on_cpu=request.on_cpu)
    model = attach_adapter(_without_files(job), model, None, whole=False)
    if quantized != "none":
        adapters_over_quantized(model)
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


def make_inputs(request: Request, config: Any, batch: int) -> dict[str, torch.Tensor]:
    """A micro-batch of full rows, as the collator of the task gives it."""
    return train_task(request.task).traced_inputs(request.memory, config, batch)
