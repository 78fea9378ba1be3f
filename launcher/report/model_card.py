"""The model card of a result: what it is, how to load it, its data, its recipe. Pure.

It contains no row of the data, and no folder except those in the recipe.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from launcher.recipe.data_paths import is_loaded_hub_id
from launcher.report import suites
from launcher.tasks import task_named
from launcher.tasks.sequence_classification import MULTI

_LIBRARIES = (
    "transformers", "torch", "peft", "trl", "sentence-transformers", "accelerate", "deepspeed",
    "bitsandbytes", "datasets",
)  # fmt: skip
_VARIANTS = (("use_dora", "DoRA"), ("use_rslora", "rsLoRA"))


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Files of a run directory; what is absent is left out of the card."""

    plan: Mapping[str, Any]
    result: Mapping[str, Any]
    data: Mapping[str, Any]
    """data.json"""
    environment: Mapping[str, Any]
    recipe: str
    """The text, without secrets."""
    merged: Mapping[str, Any] | None
    """The result of merging; None for a full fine-tune."""
    name: str
    """The repository, or the name of the run."""
    place: str
    """The argument of from_pretrained: the repository, or the name of the card's folder."""

    def setting(self, dotted: str) -> Any:
        found = self.plan["settings"].get(dotted)
        return None if found is None else found["value"]


def model_card(facts: CardFacts) -> str:
    """README.md of a model: metadata for the hub, then Markdown."""
    versions = [(name, str(facts.environment[name])) for name in _LIBRARIES if name in facts.environment]
    parts = [
        _metadata(facts),
        f"# {_plain(facts.name)}\n\n{_summary(facts)}",
        f"## Use\n\n{_fenced(_use(facts), 'python')}",
        _section("Results", _results(facts)),
        _benchmarks(facts),
        _section("Data", _data(facts)),
        _section("Weights", _weights(facts)),
        f"## Recipe\n\n{_fenced(facts.recipe, 'yaml')}" if facts.recipe else "",
        _section("Versions", versions),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(facts: CardFacts) -> str:
    """YAML with JSON strings. Without a licence: the owner chooses it, within that of the base model."""
    base = _base_id(facts)
    task = task_named(facts.setting("task"))
    lines = [f"library_name: {task.library}"]
    if task.pipeline:
        lines.append(f"pipeline_tag: {task.pipeline}")
    if base is not None:
        lines += [f"base_model: {json.dumps(base)}", "base_model_relation: finetune"]
    paths = [str(source["path"]) for _, source in _sources(facts)]
    if datasets := dict.fromkeys(path for path in paths if _is_hub_id(path)):
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in datasets)]
    kind = facts.setting("adapter.type")
    tags = ["effilaunch", *([kind] if kind else []), *task.tags]
    lines += ["tags:", *(f"- {tag}" for tag in tags)]
    return "---\n" + "\n".join(lines) + "\n---"


def _base_id(facts: CardFacts) -> str | None:
    """The base model's id on the hub; None for a folder and for random weights."""
    name = facts.setting("model.name_or_path")
    return name if name and _is_hub_id(name) else None


def _is_hub_id(text: str) -> bool:
    """Whether a path of a plan is an id on the hub; the value of a variable is unknown here."""
    return "${" not in text and is_loaded_hub_id(text)


def _last_part(path: str) -> str:
    """The end of a path, with a reference to the environment whole."""
    before, mark, after = path.partition("${")
    return mark + after if mark else PurePath(before).name


def _base_name(facts: CardFacts) -> str:
    name = facts.setting("model.name_or_path")
    if not name:
        return "a randomly initialised model"
    shown = _base_id(facts) or _last_part(name)
    revision, file = facts.setting("model.revision"), facts.setting("model.gguf_file")
    return (
        _code(shown)
        + (f" at {_code(revision)}" if revision else "")
        + (f", file {_code(file)}" if file else "")
    )


def _sources(facts: CardFacts) -> list[tuple[str, Mapping[str, Any]]]:
    """(split, source) of the recipe."""
    found = [("train", source) for source in facts.setting("data.train") or ()]
    held_out = facts.setting("data.eval")
    return found + [("eval", source) for source in (held_out if isinstance(held_out, list) else ())]


def _summary(facts: CardFacts) -> str:
    method = "fine-tuned in all parameters"
    if facts.setting("adapter.type"):
        name = next((name for key, name in _VARIANTS if facts.setting(f"adapter.{key}")), "LoRA")
        rank = facts.setting("adapter.r")
        method = f"fine-tuned with {name}"
        method += f" (r {rank}, alpha {facts.setting('adapter.lora_alpha')})" if rank else ""
    quantization = facts.setting("model.quantization")
    base = "" if quantization in (None, "none") else f" on an {quantization['type']} base"
    merged = ", and merged: it needs no peft" if facts.merged else ""
    kind = facts.setting("data.problem_type")
    kind = f" (`{kind}`)" if kind else ""
    return f"{_base_name(facts)}, {method}{base} for `{facts.setting('task')}`{kind}{merged}."


def _use(facts: CardFacts) -> str:
    task, place = task_named(facts.setting("task")), json.dumps(facts.place)
    trusted = ", trust_remote_code=True" if facts.setting("model.trust_remote_code") else ""
    if task.example_code:
        texts = f"({', '.join(map(json.dumps, task.example_texts))})"
        return task.example_code.replace("PLACE", place + trusted).replace("TEXTS", texts)
    if task.adds_head:
        options = task.pipeline_options
        if facts.setting("data.problem_type") == MULTI:
            options += ", top_k=None"  # every label with its probability
        return (
            f"from transformers import pipeline\n\n"
            f"classify = pipeline({json.dumps(task.pipeline)}, {place}{trusted})\n"
            f"print(classify({json.dumps(task.example_input)}{options}))"
        )
    chat = "chat" in (facts.data.get("formats") or ())
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


def _results(facts: CardFacts) -> list[tuple[str, str]]:
    result = facts.result
    loss = result.get("loss") or {}
    rows = [("training loss, first and last logged", _numbers(loss.get("first"), loss.get("last")))]
    skipped = ("step", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    for name, value in (result.get("eval") or {}).items():
        if name not in skipped:
            rows.append((f"held-out {name.removeprefix('eval_').replace('_', ' ')}", _numbers(value)))
    # the time before the last start is not known
    since, seconds = result.get("resumed_at"), result.get("train_seconds")
    hardware = facts.plan.get("hardware") or {}
    devices = hardware.get("num_nodes", 1) * hardware.get("devices_per_node", 1)
    rows += [
        ("steps", _numbers(result.get("steps"))),
        ("tokens", _numbers(result.get("tokens") or None)),
        (f"training time since step {since:,}" if since else "training time",
         f"{seconds:,.0f} s" if seconds else ""),
        ("hardware", f"{devices} x {hardware['device']}" if hardware.get("device") else ""),
    ]  # fmt: skip
    return [row for row in rows if row[1]]


def _benchmarks(facts: CardFacts) -> str:
    """The scores of `eval --suite`; nothing without."""
    rows = suites.rows(facts.result.get("suites"))
    if not rows:
        return ""
    cells = [" | ".join(_cell(text) for text in row) for row in (suites.HEAD, *rows)]
    lines = [f"| {line} |" for line in (cells[0], "---|---|---|---|---", *cells[1:])]
    notes = [f"- {task}: {text}" for task, text in suites.settings(facts.result.get("suites"))]
    return "\n".join(["## Benchmarks", "", *lines, "", "± is the standard error.", "", *notes])


def _data(facts: CardFacts) -> list[tuple[str, str]]:
    splits = facts.data.get("splits") or {}
    read = {split: iter(found.get("sources", ())) for split, found in splits.items()}
    rows = []
    for split, source in _sources(facts):
        found: Mapping[str, Any] = next(read.get(split, iter(())), {})
        path = str(source["path"])
        name = path if _is_hub_id(path) or path.startswith("package:") else _last_part(path)
        count = "" if found.get("rows") is None else f"{found['rows']:,} rows"
        parts = [*["evaluation"] * (split == "eval"), found.get("format") or source.get("format"), count]
        rows.append((_code(name), ", ".join(part for part in parts if part)))
    held_out, counts = facts.setting("data.eval"), facts.result.get("rows") or {}
    if isinstance(held_out, Mapping):
        rows.append(("held out for evaluation", f"{held_out['split']:.3g} of the rows, by seed"))
    for key, title in (("truncated", "rows cut to the longest length"), ("dropped", "rows left out")):
        if counts.get(key):
            rows.append((title, _numbers(counts[key])))
    return rows


def _weights(facts: CardFacts) -> list[tuple[str, str]]:
    merged = facts.merged
    if merged is None:
        return []
    dtype, kind = merged["dtype"], merged["quantization"]
    compared = merged["merge"].get("dtype", "float32")
    rows = [
        ("dtype", str(dtype)),
        ("weights", _numbers(merged["params"])),
        (
            f"logits from those of base and adapter, in {compared}",
            f"{merged['merge']['largest']:.2g} at most",
        ),
    ]
    if dtype != "float32":
        rows.append((f"the same after rounding to {dtype}", _difference(merged["cast"])))
    if merged["quantized"] is not None:
        title = f"the same from the {kind} base with the adapter, as it trained"
        rows.append((title, _difference(merged["quantized"])))
    return rows


def _difference(found: Mapping[str, float | None]) -> str:
    """The largest difference, and the share of equal choices where there is more than one logit."""
    same = found["same_choice"]
    chosen = "" if same is None else f", the same first choice at {same:.1%} of the tokens"
    return f"{found['largest']:.2g} at most{chosen}"


def _section(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """A heading and a table; nothing without rows."""
    cells = ((_cell(text) for text in row) for row in rows)
    lines = [f"| {name} | {value} |" for name, value in cells]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines]) if rows else ""


def _plain(text: str) -> str:
    """The text on one line, of which Markdown and HTML take nothing as markup."""
    return html.escape(re.sub(r"([\\`*_\[\]#|!~])", r"\\\1", " ".join(text.split())), quote=False)


def _code(text: str) -> str:
    """The text on one line as inline code, which none of its backticks ends."""
    line = " ".join(text.split())
    fence = _fence(line, 1)
    return f"{fence}{line}{fence}" if fence == "`" else f"{fence} {line} {fence}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _fenced(text: str, language: str) -> str:
    """A code block that no line of the text can end."""
    fence = _fence(text, 3)
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def _fence(text: str, least: int) -> str:
    """More backticks than the text has in a row."""
    return "`" * max(least, 1 + max(map(len, re.findall(r"`+", text)), default=0))


def _numbers(*values: Any) -> str:
    """Formatted numbers, without None."""
    shown = [
        f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for value in values if value is not None
    ]
    return ", ".join(shown)
