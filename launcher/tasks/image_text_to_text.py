"""Vision-language models: conversations about images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.errors import Problem
from launcher.tasks.rows import CHAT, PROMPT_COMPLETION, RowFormat
from launcher.tasks.task import Task, columns_needed

IMAGE_CHAT = RowFormat(
    "image-chat",
    "conversations with images",
    {"messages": "messages"},
    {"images": "images", "tools": "tools"},
    {**CHAT.related, "images": ("image", "img", "pictures", "photo")},
    other_names={"messages": "conversations", "images": "image"},
    rendered=True,
)
IMAGE_PROMPT = RowFormat(
    "image-prompt",
    "prompts with images, and completions",
    {"prompt": "text or messages", "completion": "text or messages"},
    {"images": "images", "tools": "tools"},
    {**PROMPT_COMPLETION.related, "images": IMAGE_CHAT.related["images"]},
    other_names={"images": "image"},
    rendered=True,
)


class ImageTextToText(Task):
    name = "image-text-to-text"
    loss_unit = "targets"
    counted_by_trainer = True
    aliases = (
        "vlm", "vision-language", "mllm", "multimodal", "image-to-text", "vqa", "vision2seq",
        "visual-question-answering",
    )  # fmt: skip
    packages = ("PIL",)
    extra = "vision"
    row_formats = (IMAGE_CHAT, IMAGE_PROMPT)
    learns = {
        "image-chat": ("assistant", "completion", "all"),
        "image-prompt": ("completion", "all"),
    }
    sees_images = True
    prepared_by = ("PIL", "transformers")
    architectures = ("vision-language",)
    model_class = "AutoModelForImageTextToText"
    head = "language-model"
    head_in_checkpoint = True
    peft_task = "CAUSAL_LM"
    trainer_defaults = {"remove_unused_columns": (False, "images are opened when a batch is made")}
    metrics = ("perplexity", "accuracy")
    keeps_token_predictions = True
    tool_defaults = {"trl": {"trainer.learning_rate": 2e-5}}
    goals = {"images": ("image-chat", "image-prompt")}
    first_models = ("Qwen/Qwen3-VL-8B-Instruct", "HuggingFaceTB/SmolVLM-Instruct")
    first_metrics = {"images": ("accuracy",)}
    pipeline = "image-text-to-text"
    example_input = "picture.png"

    def check_trainer(self, trainer: Mapping[str, Any]) -> list[Problem]:
        return columns_needed(trainer)
