"""Batches with images for rows of the grid, and the facts of their models, which have no closed form."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grids import MODELS, Row
from runner import in_process

from launcher.inputs import model_spec
from launcher.memory.job import MemoryJob
from launcher.models.memory_trace import Untraceable
from launcher.models.model import ModelSpec
from launcher.plan.plan import Plan

TASK = "image-text-to-text"
TIMEOUT_S = 300


def sees_images(row: Row) -> bool:
    return MODELS[row.model].task == TASK


def frozen_parts(row: Row) -> list[str]:
    return [] if row.trains_tower else ["vision", "projector"]


def image_spec(row: Row, adapter: Mapping[str, Any] | None) -> ModelSpec:
    """The spec of a model of images and text, from transformers' class."""
    changes = json.dumps(dict(row.config))
    return _spec(row.model, changes, json.dumps(adapter), tuple(frozen_parts(row)))


@functools.cache
def _spec(name: str, changes: str, adapter: str, freeze: tuple[str, ...]) -> ModelSpec:
    from launcher.models import memory_trace

    memory_trace.ask_child = ask_forked
    config = {**MODELS[name].config, **json.loads(changes)}
    fields = json.loads(adapter)
    spec, _ = model_spec.find_spec(name, config, "the grid", TASK, ask=True, adapter=fields, freeze=freeze)
    return spec


def ask_forked(request: Mapping[str, Any], python: str, say: object = None) -> dict[str, Any]:
    """In place of launcher.models.memory_trace.ask_child, which starts an interpreter for every question."""
    answer = in_process(_answer, TIMEOUT_S, request, quiet=True)
    if "error" in answer:
        raise Untraceable(answer["error"])
    return answer


def _answer(request: Mapping[str, Any]) -> Any:
    from launcher.train.trace.run import ANSWERS

    return ANSWERS[request["ask"]](request)


def with_pixels(row: Row, plan: Plan) -> MemoryJob:
    """The plan's job as it is once the rows are prepared: each sample has the row's one image."""
    vision = plan.spec.vision
    assert vision is not None, f"{row.name} sees no images"
    pixels = MODELS[row.model].patches * vision.patch_values
    return replace(plan.job, pixels=(pixels,), pixels_of_image=pixels)


def processor_of(row: Row) -> Any:
    """The family's processor with a generated tokenizer; an image keeps its size where a family allows it."""
    from transformers import AutoConfig

    from launcher.train.model.processors import with_sizes
    from launcher.train.tiny_processor import tiny_processor

    model = MODELS[row.model]
    processor = tiny_processor(AutoConfig.for_model(**model.config))
    if model.image_sizes:
        processor.image_processor = with_sizes(processor.image_processor, model.image_sizes)
    return processor


class ImageSamples:
    """Samples of one image and random text, `row.length` tokens long, and the batches of them.

    Pixels are numpy arrays until a batch is made: they shall not count as held by the training. Llama 4's
    image processor needs torchvision; its bfloat16 pixels are made float32, as `image_inputs` does.
    """

    def __init__(self, row: Row, processor: Any, count: int, vocabulary: int) -> None:
        import numpy as np
        from PIL import Image

        width, height = MODELS[row.model].image
        draw = np.random.default_rng(0)
        image = Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))
        texts, images = [processor.image_token] * row.micro_batch, [[image]] * row.micro_batch
        made = processor(text=texts, images=images, return_tensors="pt", padding=True)
        made = {n: (v.float() if v.is_floating_point() else v).numpy().copy() for n, v in made.items()}
        ids = made.pop("input_ids")
        own, rest = ids.shape[1], row.length - ids.shape[1]
        assert rest > 0, f"{row.name}: an image of {own} tokens in a row of {row.length}"
        special = {*processor.tokenizer.all_special_ids, *processor.image_token_ids}
        words = [number for number in range(4, min(vocabulary, 400)) if number not in special]
        text = draw.choice(words, (row.micro_batch, rest))
        self.batch = {"input_ids": np.concatenate([ids, text], axis=1)}
        self.batch["labels"] = np.concatenate([np.full_like(ids, -100), text], axis=1)
        del made["attention_mask"]
        for name, value in made.items():
            of_text = name.endswith("token_type_ids")
            self.batch[name] = np.pad(value, ((0, 0), (0, rest))) if of_text else value
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, samples: Sequence[int]) -> dict[str, Any]:
        import torch

        batch = {name: torch.tensor(value) for name, value in self.batch.items()}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        return batch
