"""`--to transformers`: a folder that from_pretrained reads, and what the other exports begin with."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from launcher.files.safe_files import read_json, write_json
from launcher.machine.child import ask
from launcher.train.exports.compare import ProbeAnswers, compared
from launcher.train.exports.probes import encoded, greedy, prompts, texts
from launcher.train.exports.target import ExportRequest, Target, TrainedSource
from launcher.train.job import Job
from launcher.train.model.processors import save_processing, tokenizer_of
from launcher.train.results.generate import is_chat, stop_tokens
from launcher.train.results.merge import DTYPES, merge, on_cpu
from launcher.train.results.trained import (
    ADAPTER,
    is_trained,
    place_of,
    settle,
    trained_model,
    trust,
)
from launcher.train.tasks import train_task

READ_BACK = "launcher.train.exports.read_back"
_SETTINGS = "generation_config.json"


class Transformers(Target):
    name = "transformers"
    options = ("dtype",)
    serves_text = False

    def write(self, asked: ExportRequest, source: TrainedSource, part: Path) -> dict[str, Any]:
        merged = write_plain(asked, source, part)
        return {"merged": merged, **facts(source, part), "compared": check_plain(source, part)}


def write_plain(asked: ExportRequest, source: TrainedSource, part: Path) -> dict[str, Any] | None:
    """Write the whole model in plain form, with the settings that end its answers; what merging found."""
    job, folder = source.job, source.folder
    found = None
    if is_trained(folder) == ADAPTER:
        inner = part / "merged"
        source.say("merging: load the model, merge in float32, compare logits, write, read back")
        done = merge(
            asked.run_dir, inner, asked.dtype, lambda merged: source.card(merged.to_json()), asked.checkpoint
        )
        for file in inner.iterdir():
            file.rename(part / file.name)
        inner.rmdir()
        found = {**done.to_json(), "folder": str(asked.output)}
    else:
        _write_whole(asked, source, part)
    if job.task.writes:
        _write_stops(source, part)
    gc.collect()
    return found


def _write_whole(asked: ExportRequest, source: TrainedSource, part: Path) -> None:
    """A model that was trained as a whole, with its weights unchanged or in another dtype."""
    job = on_cpu(source.job)
    model = trained_model(job, source.folder, source.processing)
    if asked.dtype in DTYPES:
        model = model.to(getattr(torch, asked.dtype))
    model.save_pretrained(part)
    save_processing(source.processing, part)
    train_task(job.task.name).write_beside(job, model, part)
    (part / "README.md").write_text(source.card(None), encoding="utf-8")


def stops(source: TrainedSource, settings: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer, as `generate` uses them."""
    return stop_tokens(source.processing, settings.get("eos_token_id"))


def _write_stops(source: TrainedSource, part: Path) -> None:
    """The ends of an answer into the generation settings: servers stop there and nowhere else."""
    settings = read_settings(part)
    ends, pad = stops(source, settings), tokenizer_of(source.processing).pad_token_id
    settings["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if pad is not None:
        settings["pad_token_id"] = pad
    write_json(part / _SETTINGS, settings)


def read_settings(folder: Path) -> dict[str, Any]:
    """The generation settings of a folder; else those of its model's configuration."""
    if (folder / _SETTINGS).is_file():
        found: dict[str, Any] = read_json(folder / _SETTINGS)
        return found
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}


def facts(source: TrainedSource, part: Path) -> dict[str, Any]:
    """What decides how the model is asked: dtype, length, template, ends, BOS."""
    config = read_json(part / "config.json")
    text = config.get("text_config") or config
    found = {
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "positions": text.get("max_position_embeddings"),
        "trained_length": source.job.data.max_length,
    }
    if not source.job.task.reads_tokens:
        return found
    tokenizer = tokenizer_of(source.processing)
    ends = stops(source, read_settings(part)) if source.job.task.writes else []
    return {
        **found,
        "chat_template": is_chat(source.job, source.processing),
        "stop_tokens": [{"id": end, "text": tokenizer.convert_ids_to_tokens(end)} for end in ends],
        "bos": bos_facts(tokenizer),
    }


def bos_facts(tokenizer: Any) -> dict[str, bool]:
    """Who writes the token that begins a text. Both: a prompt that was rendered by hand has it twice."""
    bos, ids = tokenizer.bos_token_id, tokenizer("x")["input_ids"]
    adds = bos is not None and ids[:1] == [bos]
    text = None
    if tokenizer.chat_template:
        from launcher.train.exports.probes import rendered

        text = rendered(tokenizer, [{"role": "user", "content": "x"}])
    writes = bool(text and tokenizer.bos_token and text.startswith(tokenizer.bos_token))
    return {"tokenizer_adds": adds, "template_writes": writes}


def asks_text(job: Job) -> bool:
    return job.task.reads_tokens and not job.task.sees_images


def answers_of(source: TrainedSource, model: Any = None) -> ProbeAnswers:
    """The trained model's, or another model's, with its own tokenizer."""
    tokenizer = tokenizer_of(source.processing)
    asked = [encoded(tokenizer, prompt) for prompt in prompts(source.job, source.processing)]
    answers = []
    if source.job.task.writes:
        if model is None:
            place = place_of(source.job, source.folder)
            spread = "auto" if place == "auto" else None
            model = trained_model(source.job, source.folder, source.processing, device_map=spread)
            settle(model, place)
        ends = stop_tokens(source.processing, model.generation_config.eos_token_id)
        ending = {"eos_token_id": ends, "pad_token_id": tokenizer.pad_token_id}
        answers = [greedy(model, ids, **ending) for ids in asked]
    return ProbeAnswers(tokenizer(texts())["input_ids"], asked, tokenizer.chat_template, answers)


def check_plain(
    source: TrainedSource, part: Path, base: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Compare the folder, loaded in a process of its own, with the trained model; None for images.

    base: arguments of from_pretrained for the model that the adapter in the folder is added to.
    """
    if not asks_text(source.job):
        return None
    source.say("comparing: token ids of 200 texts and greedy answers to 50 prompts, read in a new process")
    trained = answers_of(source)
    gc.collect()
    request = {
        "folder": str(part), "base": base,
        "model_class": source.job.task.model_class, "writes": source.job.task.writes,
        "texts": texts(), "prompts": prompts(source.job, source.processing), **trust(source.job),
    }  # fmt: skip
    found = ProbeAnswers(**ask(READ_BACK, request))
    return compared(trained, found, tokenizer_of(source.processing).decode, "the exported model")
