"""Export a result: written aside, compared with the trained model, then renamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launcher.files.safe_files import write_json
from launcher.train.exports.gguf import GGUF
from launcher.train.exports.ollama import Ollama
from launcher.train.exports.plain import Transformers
from launcher.train.exports.target import RECORD, ExportRequest, Say, Target, TrainedSource, check_serves_text
from launcher.train.exports.vllm import VLLM
from launcher.train.job import read_job
from launcher.train.results.merge import refuse_existing, written_aside
from launcher.train.results.trained import check_readable, trained_folder, trained_processing

TARGETS: tuple[Target, ...] = (Transformers(), VLLM(), Ollama(), GGUF())
"""Their names are also in launcher/parsing.py, which imports no torch."""


def target_named(name: str) -> Target:
    return next(target for target in TARGETS if target.name == name)


def export(
    name: str, asked: ExportRequest, card: Callable[[Mapping[str, Any] | None], str], say: Say
) -> dict[str, Any]:
    """Write asked.output, or nothing; the record.

    RecipeError for what the program cannot serve; MachineError without a program that this takes; RunFailed
    if the export has other token ids, another template, or ends answers elsewhere than the trained model.
    """
    target, job = target_named(name), read_job(asked.run_dir)
    folder = trained_folder(job, asked.checkpoint)
    check_readable(folder)
    if target.serves_text:
        check_serves_text(job, name)
    refuse_existing(asked.output)
    source = TrainedSource(job, folder, trained_processing(job, folder), card, say)
    target.check(asked, source)
    with written_aside(asked.output, like=RECORD) as part:
        found = target.write(asked, source, part)
        record = {
            "to": name, "folder": str(asked.output), "name": asked.name, "weights": str(folder), **found
        }  # fmt: skip
        write_json(part / RECORD, record)
    return record
