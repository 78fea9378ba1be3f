"""What an export is: the request, and the protocol of the programs that a result is exported to."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from launcher.errors import Problem, RecipeError
from launcher.train.job import Job

RECORD = "export.json"
"""In the exported folder: settings, checks, and every answer that differs."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The request of a user."""

    run_dir: Path
    output: Path
    """The folder to write."""
    name: str
    """Of the model, for the servers."""
    checkpoint: str | None
    dtype: str
    """`auto`, or the dtype of the written weights."""
    adapter: bool
    """Serve the adapter on its base instead of merging it."""
    quantize: str | None
    llama_cpp: Path | None
    """The folder with llama.cpp's converter and programs; None: those on PATH."""


@dataclass(frozen=True, slots=True)
class TrainedSource:
    """The trained result."""

    job: Job
    folder: Path
    processing: Any
    card: Callable[[Mapping[str, Any] | None], str]
    """The model card, from what merging found."""
    say: Say


class Target:
    """A program that a result is exported to."""

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    """Fields of Asked beyond those of all targets that it reads."""
    serves_text: ClassVar[bool] = True
    """Whether it takes only models that answer text with text, without images."""

    def check(self, asked: ExportRequest, source: TrainedSource) -> None:
        """Raise, before any work, where the result cannot be exported as asked or a program is missing."""

    def write(self, asked: ExportRequest, source: TrainedSource, part: Path) -> dict[str, Any]:
        """Write the folder and compare it with the trained model; the record, without the settings."""
        raise NotImplementedError


def check_serves_text(job: Job, target: str) -> None:
    """RecipeError for a model that does not answer text with text."""
    task = job.task
    if task.writes and task.reads_tokens and not task.sees_images and not task.is_encoder_decoder:
        return
    message = f"{target} is exported to for text generation, and the run's task is {task.name}"
    hint = "use --to transformers, and see that program's documentation for this kind of model"
    raise RecipeError(Problem("export-unsupported", message, path="task", hint=hint))


def shown(words: list[str]) -> str:
    """A command as one line for a shell."""
    return " ".join(word if word == "\\\n " else shlex.quote(word) for word in words)
