"""What an export is: the request, and the protocol of the programs that a result is exported to."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from launcher.errors import EffilaunchError, Problem, RecipeError
from launcher.train.checkpoint.disk import sync_folder, sync_tree
from launcher.train.job import Job
from launcher.train.results.merge import refuse_existing, unwritten

RECORD = "export.json"
"""In the exported folder: settings, checks, and every answer that differs."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Asked:
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
class Source:
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

    def check(self, asked: Asked, source: Source) -> None:
        """Raise, before any work, where the result cannot be exported as asked or a program is missing."""

    def write(self, asked: Asked, source: Source, part: Path) -> dict[str, Any]:
        """Write the folder and compare it with the trained model; the record, without the settings."""
        raise NotImplementedError


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A folder beside the target that gets its name when it is complete, and is removed on failure."""
    part = target.with_name(f".{target.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        yield part
        for file in part.iterdir():  # safetensors makes files that only their owner may read
            file.chmod((part / RECORD).stat().st_mode & 0o777 | (file.stat().st_mode & 0o111))
        sync_tree(part)
        refuse_existing(target)
        part.rename(target)
        sync_folder(target.parent)
    except EffilaunchError:
        raise
    except Exception as error:
        refusal = unwritten(target, error)
        if refusal is None:
            raise
        raise refusal from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


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
