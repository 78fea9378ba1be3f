"""Plans and results as plain text. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.knowledge.lint.document import printable
from launcher.plan.plan import Plan, Provenance
from launcher.planner.adapting import ways_out
from launcher.planner.parallel import NAMES
from launcher.recipe.suggestions import listed
from launcher.render.bundle import Bundle
from launcher.report.colour import YELLOW
from launcher.report.measured_text import measured_lines
from launcher.report.memory_text import memory_lines
from launcher.report.page import Page
from launcher.report.search_text import time_line
from launcher.report.tables import WIDTH, table, wrapped

# A word of the command with a value in it that is bound late: it needs no quotes.
_LATE = re.compile(r"[\w./:-]*\{(?:master_port|run_dir|devices)\}[\w./:-]*")
_SAID_OF_LATE = " (words in braces are bound when it starts)"

_PAGE = 120
"""Columns of the first page, but for what is there to be copied."""
_THREE_COLUMNS = 90
"""A narrower page has no room for the reasons beside the values."""
_PLAIN = Page()

# What the first page shows; `--explain` shows any of the others.
SHOWN = (
    "precision",
    "model.dtype",
    "model.quantization",
    "sharding.engine",
    "sharding.zero_stage",
    "launch.launcher",
    "trainer.activation_checkpointing",
    "trainer.per_device_train_batch_size",
    "trainer.gradient_accumulation_steps",
    "model.attn_implementation",
    "data.padding_free",
    "model.loss",
    "model.compile_blocks",
)


def plan_text(bundle: Bundle, page: Page = _PLAIN) -> str:
    """The plan as one page: job, decisions with reasons, memory, fixes, command."""
    plan, width = bundle.plan, page.within(WIDTH)
    lines = [
        *(
            page.heading(line)
            for line in page.fitted(f"{printable(plan.recipe_file)} on {plan.hardware.label}")
        ),
        *(part for line in _job(plan) for part in page.fitted(line, hang=10)),
        "",
        page.heading("decisions"),
        *_decisions(plan, page),
        "",
        *memory_lines(plan, page),
        "",
        *wrapped(time_line(plan.time.to_json(plan.schedule.steps)), "", width=width),
        "",
        *fix_lines(plan, page),
        "",
        page.heading(f"command{_SAID_OF_LATE if any(map(_LATE.fullmatch, bundle.command)) else ''}"),
        "  " + " ".join(_word(word) for word in bundle.command),  # whole, so that it can be copied
    ]
    if plan.warnings:
        lines += ["", page.heading("warnings", YELLOW)]
        lines += [line for warning in plan.warnings for line in wrapped(warning, width=width)]
    return "\n".join(lines) + "\n"


def _job(plan: Plan) -> list[str]:
    """What is trained, how much at a time, and for how long."""
    model, batch = plan.spec, plan.batch
    kind = "adapter" if plan.adapter.type else "full fine-tune"
    return [
        f"  model     {printable(model.name)}: {model.params / 1e9:.2f} B parameters ({model.origin}), "
        f"{plan.trainable_params / 1e6:.1f} M trained ({kind})",
        f"  batch     {batch.micro} x {batch.accumulation} accumulation x {batch.data_parallel} rank(s) "
        f"= {batch.global_size} samples, at most {plan.schedule.tokens_per_step:,} tokens a step",
        *_layout(plan),
        f"  length    {_length(plan)}",
        f"  on oom    {_out_of_memory(plan)}",
    ]


def _decisions(plan: Plan, page: Page) -> list[str]:
    """Key, value and reason in columns; on a narrow page a long reason below its key."""
    width = page.within(_PAGE)
    rows = [(key, _brief(plan.at(key)), _why(plan.provenance[key])) for key in SHOWN]
    if width >= _THREE_COLUMNS:
        return table(rows, width=width)
    lines = []
    for whole, named, row in zip(table(rows), table([row[:2] for row in rows]), rows, strict=True):
        fits = len(whole) <= width
        lines += [whole] if fits else [named, *wrapped(row[2], "      ", width=width)]
    return lines


def _layout(plan: Plan) -> list[str]:
    """Which devices share a copy, where any do."""
    sizes = {kind: getattr(plan.sharding, key) for key, kind in NAMES.items()}
    shared = [f"{size} {kind}-parallel" for kind, size in sizes.items() if size > 1]
    if not shared:
        return []
    copies = f"{plan.batch.data_parallel} data-parallel x {' x '.join(shared)}"
    return [f"  layout    {plan.hardware.num_devices} devices: {copies}"]


def fix_lines(plan: Plan, page: Page = _PLAIN) -> list[str]:
    """Which known fixes were applied, what each changed, and why."""
    rows = table([(fix.id, _changed(fix.changed)) for fix in plan.fixes])
    lines = [page.heading(f"known fixes applied: {len(plan.fixes)}")]
    for row, fix in zip(rows, plan.fixes, strict=True):
        lines += [*page.fitted(row), *wrapped(fix.reason, "    ", width=page.within(WIDTH))]
    return lines


def _word(word: str) -> str:
    return word if _LATE.fullmatch(word) else shlex.quote(word)


def _why(setting: Provenance) -> str:
    """The reason in one short line: who said it for what the user or a fix said."""
    if setting.source in ("recipe", "parent", "override"):
        return printable(Path(setting.by).name)
    return f"fix {setting.by}" if setting.source == "fix" else setting.reason


def _length(plan: Plan) -> str:
    if plan.schedule.steps is not None:
        return f"{plan.schedule.steps} steps"
    return f"{plan.schedule.epochs:g} epoch(s) (steps are known when the rows are read)"


def _out_of_memory(plan: Plan) -> str:
    """What the run does when memory runs out."""
    if plan.on_oom == "fail":
        return "fail"
    return f"adapt: {', then '.join(ways_out(plan)) or 'nothing is left to change'}"


def adapted_lines(adaptations: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a run has changed after it ran out of memory, one line a try."""
    return [f"  adapted   at step {entry['step']}: {entry['reason']}" for entry in adaptations]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{k}={v}" for k, v in value.items())
    return str(value)


def _indented(text: str) -> str:
    """A text of several lines, such as a chat template, none of whose lines can pass for one of ours."""
    return "\n    ".join(text.split("\n"))


def _brief(value: Any) -> str:
    """A value of the first page: of a mapping with a type (a quantisation) only that."""
    return _value(value["type"] if isinstance(value, Mapping) and "type" in value else value)


def _changed(changed: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {_value(value)}" for key, value in changed.items()) or "warning"


def explain_text(plan: Plan, dotted: str) -> str:
    """Where a value came from; a section's name explains everything inside it, "" everything."""
    keys = [k for k in sorted(plan.names) if not dotted or k == dotted or k.startswith(dotted + ".")]
    lines = []
    for key in keys:
        known = plan.provenance[key]
        lines.append(f"{key} = {_indented(_value(plan.at(key)))}")
        lines.append(f"  from {known.source}, {printable(known.by)}: {known.reason}")
    return "\n".join(lines) + "\n"


def result_text(result: Mapping[str, Any], run_dir: str, try_command: Sequence[str]) -> str:
    """What a finished run says: loss, speed, memory predicted and measured, where the result lies."""
    loss, memory, rows = result["loss"], result["memory"], result["rows"]
    first, last = loss["first"], loss["last"]
    word = "fell" if last < first else "did not fall"
    lines = [
        "done",
        f"  loss      {first:.4f} at the first step, {last:.4f} at the last: it {word}",
        f"  steps     {result['steps']}{_since(result)} in {result['seconds']:.0f} s",
        *adapted_lines(result["adaptations"]),
        f"  speed     {result['tokens_per_second']:.1f} tokens/s (padding not counted)",
        *measured_lines(memory),
        f"  rows      {rows['read']:,} read, {rows['kept']:,} kept, {rows['truncated']:,} truncated, "
        f"{rows['split']:,} split, {rows['dropped']:,} dropped{_reasons(rows)}",
        *_noted(rows.get("notes") or {}, width=10),
        f"  samples   {rows['train']:,} to train on, {rows['eval']:,} held out",
        f"  {result['output']:9s} {printable(run_dir)}/{result['output']}",
    ]
    if result.get("eval"):
        scores = [f"{k} {v:.4g}" for k, v in result["eval"].items() if _is_score(k) and v is not None]
        lines.append(f"  eval      {', '.join(scores)}")
    if try_command:
        lines.append(f"  try it    {' '.join(map(shell_word, try_command))}")
    return "\n".join(lines) + "\n"


def _since(result: Mapping[str, Any]) -> str:
    """Of a run that was resumed: how many of its steps the time is of."""
    before = result.get("resumed_at")  # results of older versions do not say it
    return f", the last {result['steps'] - before} of them" if before else ""


def shell_word(word: str) -> str:
    """A word to paste into bash; what a terminal would not show stands as an escape."""
    if word.isprintable():
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in plain) + "'"


def _reasons(rows: Mapping[str, Any]) -> str:
    reasons = rows.get("dropped_reasons") or {}
    return f" ({', '.join(f'{name} {count:,}' for name, count in reasons.items())})" if reasons else ""


def _is_score(name: str) -> bool:
    """Whether a number of an evaluation says how good it is, rather than how long it took."""
    return name.startswith("eval_") and not name.endswith(("_runtime", "_per_second", "_time"))


_NOTES = {
    "turn-masked": "masked by the rows",
    "inserted-text-masked": "with text of the template that is masked",
    "reasoning-left-out": "whose reasoning the template leaves out",
    "word-without-token": "of which the tokenizer leaves no token",
}
"""Notes of a split's counts, in words."""


def _noted(notes: Mapping[str, int], width: int) -> list[str]:
    """What was masked or left out of turns of conversations or of labelled words, as a line of each."""
    lines = []
    for title, of_words in (("turns", False), ("words", True)):
        own = {name: count for name, count in notes.items() if name.startswith("word-") is of_words}
        shown = "; ".join(f"{count:,} {_NOTES.get(name, name)}" for name, count in own.items())
        lines += [f"  {title:{width}s}{shown}"] if shown else []
    return lines


def prepared_text(record: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], *, colour: bool) -> str:
    """What became of the rows, how long the samples are, and some of them with their loss mask."""
    lines = []
    for name, split in record["splits"].items():
        counts, lengths = split["counts"], split["lengths"]
        lost = counts["tokens_lost"] / counts["tokens"] if counts["tokens"] else 0.0
        dropped = ", ".join(
            f"{rows:,} {reason} ({rows / counts['read']:.1%})" for reason, rows in counts["dropped"].items()
        )
        lines += [
            f"{name}: {counts['read']:,} rows read, {counts['kept']:,} kept, {split['samples']:,} samples",
            f"  dropped    {dropped or 'none'}",
            f"  truncated  {counts['truncated']:,} rows, {lost:.1%} of the tokens; split {counts['split']:,}",
        ]
        lines += _noted(counts.get("notes") or {}, width=11)
        if lengths:
            lines.append(
                f"  tokens     {counts['tokens'] - counts['tokens_lost']:,}; a sample has "
                f"{lengths['mean']:.0f} in the mean, {lengths['p50']:.0f} in the median, "
                f"{lengths['p95']:.0f} at 95 %, {lengths['max']:,} at most"
            )
        for source in split["sources"]:
            if source["unused"]:
                lines.append(f"  not read   {listed(source['unused'])} of {source['path']}")
    lines.append(f"cache: {record['folder']}")
    for number, sample in enumerate(samples, start=1):
        place = f"{sample['file']}:{sample['line']}" if "file" in sample else "from the stream"
        tokens, targets = sample["tokens"], sample["targets"]
        lines += ["", f"sample {number} ({place}): {tokens} tokens, {targets} learnt"]
        lines.append("".join(_piece(text, learnt, colour=colour) for text, learnt in sample["pieces"]))
    return "\n".join(lines) + "\n"


def _piece(text: str, learnt: bool, *, colour: bool) -> str:
    """Learnt text green, the rest dim; without colours the learnt text stands between brackets."""
    if colour:
        return f"\x1b[32m{text}\x1b[0m" if learnt else f"\x1b[2m{text}\x1b[0m"
    return f"⟦{text}⟧" if learnt else text
