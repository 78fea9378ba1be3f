"""A class for each image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.errors import Problem
from launcher.tasks.rows import LABEL_WORDS, RowFormat
from launcher.tasks.sequence_classification import CLASS_METRICS, CLASS_PACKAGES
from launcher.tasks.task import Task, columns_needed

IMAGE = RowFormat(
    "image",
    "labelled images",
    {"image": "image", "label": "label"},
    related={"image": ("img", "picture", "photo", "file"), "label": LABEL_WORDS},
)


class ImageClassification(Task):
    name = "image-classification"
    aliases = ("vit", "image", "vision", "image-cls")
    packages = ("PIL",)
    row_formats = (IMAGE,)
    reads_tokens = False
    own_padding = "images are not made of tokens"
    classifies = True
    architectures = ("image-encoder",)
    model_class = "AutoModelForImageClassification"
    trainer_defaults = {
        "remove_unused_columns": (False, "images are prepared as they are read"),
        "include_num_input_tokens_seen": ("no", "images are not made of tokens"),
    }
    metrics = CLASS_METRICS
    metric_packages = CLASS_PACKAGES
    goals = {"classify": ("image",)}
    first_models = ("google/vit-large-patch16-224",)
    first_methods = ("full", "lora")
    first_metrics = {"classify": ("accuracy", "f1")}
    pipeline = "image-classification"
    example_input = "picture.png"

    def check_trainer(self, trainer: Mapping[str, Any]) -> list[Problem]:
        return columns_needed(trainer)
