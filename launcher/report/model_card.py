"""The model card of a result: what it is, how to load it, its data, its recipe. Pure.

It contains no row of the data, and no folder except those in the recipe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from launcher.execute.record import RunRecord
from launcher.recipe.data_paths import is_loaded_hub_id
from launcher.report.markdown import code, plain, section_text
from launcher.report.plan_sections import Plan, hardware_text, method_text, setting
from launcher.report.run_sections import HELD_OUT, run_rows
from launcher.report.sections import Fact, Listing, Row, Rows, Section, rows_of
from launcher.report.suites import suites_section
from launcher.report.values import at, mapping, objects
from launcher.tasks import task_named
from launcher.tasks.sequence_classification import MULTI

_LIBRARIES = (
    "transformers", "torch", "peft", "trl", "sentence-transformers", "accelerate", "deepspeed",
    "bitsandbytes", "datasets",
)  # fmt: skip
_RESULTS = ("loss", "steps", "tokens", "time")
"""Figures of a run that say something about its model; those of held-out rows are added."""


def model_card(record: RunRecord, place: str, merged: Mapping[str, Any] | None = None) -> str:
    """README.md of a model: metadata for the hub, then Markdown.

    record: without secrets; its name is that of the repository or the run. place: the argument of
    from_pretrained: the repository, or the name of the card's folder. merged: result of merging, if it was.
    """
    plan = record.plan
    versions = [
        Row(name, [str(record.environment[name])]) for name in _LIBRARIES if name in record.environment
    ]
    sections = (
        Section("use", "Use", [Listing("Use", _use(record, place), "python")]),
        Section("results", "Results", [Rows(_results(record))]),
        suites_section(record.result.get("suites")),
        Section("data", "Data", [Rows(_data(record))]),
        Section("weights", "Weights", [Rows(merge_rows(merged))] if merged else []),
        Section("recipe", "Recipe", [Listing("Recipe", record.recipe, "yaml")] if record.recipe else []),
        Section("versions", "Versions", [Rows(versions)]),
    )
    texts = [section_text(section) for section in sections if section is not None]
    title = f"# {plain(record.name)}\n\n{_summary(plan, is_merged=merged is not None)}"
    return "\n\n".join([_metadata(plan), title, *filter(None, texts)]) + "\n"


def _metadata(plan: Plan) -> str:
    """YAML with JSON strings. Without a licence: the owner chooses it, within that of the base model."""
    base = _base_id(plan)
    task = task_named(setting(plan, "task"))
    lines = [f"library_name: {task.library}"]
    if task.pipeline:
        lines.append(f"pipeline_tag: {task.pipeline}")
    if base is not None:
        lines += [f"base_model: {json.dumps(base)}", "base_model_relation: finetune"]
    paths = [str(source["path"]) for _, source in _sources(plan)]
    if datasets := dict.fromkeys(path for path in paths if _is_hub_id(path)):
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in datasets)]
    kind = setting(plan, "adapter.type")
    tags = ["effilaunch", *([kind] if kind else []), *task.tags]
    lines += ["tags:", *(f"- {tag}" for tag in tags)]
    return "---\n" + "\n".join(lines) + "\n---"


def _base_id(plan: Plan) -> str | None:
    """The base model's id on the hub; None for a folder and for random weights."""
    name = setting(plan, "model.name_or_path")
    return name if name and _is_hub_id(name) else None


def _is_hub_id(text: str) -> bool:
    """Whether a path of a plan is an id on the hub; the value of a variable is unknown here."""
    return "${" not in text and is_loaded_hub_id(text)


def _last_part(path: str) -> str:
    """The end of a path, with a reference to the environment whole."""
    before, mark, after = path.partition("${")
    return mark + after if mark else PurePath(before).name


def _base_name(plan: Plan) -> str:
    name = setting(plan, "model.name_or_path")
    if not name:
        return "a randomly initialised model"
    shown = _base_id(plan) or _last_part(name)
    revision, file = setting(plan, "model.revision"), setting(plan, "model.gguf_file")
    return (
        code(shown) + (f" at {code(revision)}" if revision else "") + (f", file {code(file)}" if file else "")
    )


def _sources(plan: Plan) -> list[tuple[str, Mapping[str, Any]]]:
    """(split, source) of the recipe."""
    found = [("train", source) for source in setting(plan, "data.train") or ()]
    held_out = setting(plan, "data.eval")
    return found + [("eval", source) for source in (held_out if isinstance(held_out, list) else ())]


def _summary(plan: Plan, *, is_merged: bool) -> str:
    merged = ", and merged: it needs no peft" if is_merged else ""
    kind = setting(plan, "data.problem_type")
    task = f"`{setting(plan, 'task')}`{f' (`{kind}`)' if kind else ''}"
    return f"{_base_name(plan)}, fine-tuned for {task}: {method_text(plan)}{merged}."


def _use(record: RunRecord, place: str) -> str:
    plan, place = record.plan, json.dumps(place)
    task = task_named(setting(plan, "task"))
    trusted = ", trust_remote_code=True" if setting(plan, "model.trust_remote_code") else ""
    if task.example_code:
        texts = f"({', '.join(map(json.dumps, task.example_texts))})"
        return task.example_code.replace("PLACE", place + trusted).replace("TEXTS", texts)
    if task.adds_head:
        options = task.pipeline_options
        if setting(plan, "data.problem_type") == MULTI:
            options += ", top_k=None"  # every label with its probability
        return (
            f"from transformers import pipeline\n\n"
            f"classify = pipeline({json.dumps(task.pipeline)}, {place}{trusted})\n"
            f"print(classify({json.dumps(task.example_input)}{options}))"
        )
    chat = "chat" in (record.data.get("formats") or ())
    inputs = (
        'tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True,\n'
        '                                       return_dict=True, return_tensors="pt")'
        if chat
        else 'tokenizer("Hello", return_tensors="pt")'
    )
    return (
        f"from transformers import {task.model_class}, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({place}{trusted})\n"
        f'model = {task.model_class}.from_pretrained({place}, dtype="auto"{trusted})\n'
        f"inputs = {inputs}\n"
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0], skip_special_tokens=True))"
    )


def _results(record: RunRecord) -> list[Row]:
    chosen = [row for row in run_rows(record) if row.name in _RESULTS or row.name.startswith(HELD_OUT)]
    return [*chosen, Row("hardware", [hardware_text(record.plan)])] if record.result else []


_SOURCE = Fact("`{name}`", "[{evaluation}][{read}][, {rows:count} rows]")
_HELD_OUT = (
    Fact("held out for evaluation", "{eval} of the rows, by seed"),
    Fact("rows cut to the longest length", "{truncated:count}"),
    Fact("rows left out", "{dropped:count}"),
)


def _data(record: RunRecord) -> list[Row]:
    plan, splits = record.plan, mapping(record.data.get("splits"))
    read = {split: iter(objects(at(found, "sources"))) for split, found in splits.items()}
    rows = []
    for split, source in _sources(plan):
        found: Mapping[str, Any] = next(read.get(split, iter(())), {})
        path = str(source["path"])
        name = path if _is_hub_id(path) or path.startswith("package:") else _last_part(path)
        own = {"name": name, "read": found.get("format") or source.get("format")}
        rows += rows_of(
            [_SOURCE], {**found, **own, "evaluation": "evaluation, " if split == "eval" else None}
        )
    counts = {key: value or None for key, value in mapping(record.result.get("rows")).items()}
    return rows + rows_of(_HELD_OUT, {**counts, "eval": at(setting(plan, "data.eval"), "split")})


_MERGED = (
    Fact("weights", "{params:count}", "in {dtype}"),
    Fact("logits from those of base and adapter", "{merge.largest:number} at most",
         "in {merge.dtype}; {merge.allowed:number} is allowed"),
    Fact("the same after rounding to {dtype}",
         "{cast.largest:number} at most",
         "[, the same first choice at {cast.same_choice:share} of the tokens]"),
    Fact("the same from the {quantization} base with the adapter, as it trained",
         "{quantized.largest:number} at most",
         "[, the same first choice at {quantized.same_choice:share} of the tokens]"),
)  # fmt: skip


def merge_rows(merged: Mapping[str, Any]) -> list[Row]:
    """What was written, and how far its logits are from those of the trained model."""
    rounded = {} if merged["dtype"] == "float32" else {"cast": merged["cast"]}
    same = {"merge": {"dtype": "float32", **merged["merge"]}, "cast": None}
    return rows_of(_MERGED, {**merged, **same, **rounded})
