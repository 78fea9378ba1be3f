"""Results as plain text: of runs, prepared data, merge, eval, submitted jobs and sweeps. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.knowledge.lint.document import printable
from launcher.models.lora import describe_idle_adapters
from launcher.recipe.suggestions import listed
from launcher.report import suites
from launcher.report.tables import duration, gib, table, wrapped
from launcher.report.terminal import DIM, GREEN, Page
from launcher.schedulers.submitted import Submitted

_NOTES = {
    "turn-masked": "masked by the rows",
    "empty-turn-masked": "of the assistant empty, and masked",
    "inserted-text-masked": "with text of the template that is masked",
    "reasoning-left-out": "whose reasoning the template leaves out",
    "word-without-token": "of which the tokenizer leaves no token",
    "invalid-tags": "with tags in an order that their scheme excludes",
    "without-label": "with none of the labels",
    "anchor-repeated": "whose anchor is also one of their other texts",
    "contradicting-labels": "of texts with different labels",
    "special-token-in-text": "whose text holds the special token",
}
"""Text of the notes in a split's counts."""
_COUNTED = {
    "word-without-token": "words",
    **dict.fromkeys(("invalid-tags", "without-label", "anchor-repeated", "special-token-in-text"), "rows"),
    "contradicting-labels": "pairs",
}
"""Note -> what is counted, where it is not the turns of conversations."""
_LABELS = 20
"""Labels whose counts are shown."""
_TIMINGS = ("_runtime", "_per_second", "_time")
"""Endings of an evaluation's numbers that are no scores."""


# --- a run


def _learned_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The losses; where completions are rewarded, whose loss does not fall, the rewards."""
    first, last = result["loss"]["first"], result["loss"]["last"]
    line = f"  loss      {first:.4f} at the first step, {last:.4f} at the last"
    rollouts = result.get("rollouts")
    if rollouts is None:
        yield f"{line}: it {'fell' if last < first else 'did not fall'}"
        return
    yield line
    yield (
        f"  reward    {rollouts['first']:.4g} in the first generation, {rollouts['last']:.4g} in the last; "
        f"{rollouts['groups_without_signal']} of {rollouts['groups']} prompts without a signal"
    )
    yield f"  generated {rollouts['completions']:,} completions in {rollouts['seconds']:.0f} s, scored"
    for warning in rollouts["warnings"]:
        yield f"  WARNING: {printable(warning)}"


_BUSY = 1.2
"""Processes per core that want to run, from which others take time from a run."""
_AS_PLANNED = 1.5
"""Up to this many times the estimate, and down to its reciprocal, the time of a run is not commented."""


def _pace(result: Mapping[str, Any], step_s: float | None, load: float | None) -> str:
    """Where the steps took another time than estimated: both, and a busy machine."""
    steps = result["steps"] - (result.get("resumed_at") or 0)
    if not step_s or steps < 1:
        return ""
    planned = step_s * steps
    ratio = result["train_seconds"] / planned
    if 1 / _AS_PLANNED <= ratio <= _AS_PLANNED:
        return ""
    busy = ratio > 1 and (load or 0) > _BUSY
    note = f"; this machine is busy: {load:.1f} processes per core" if busy else ""
    return f", {ratio:.2g} times the {duration(planned)} that the plan estimated{note}"


def result_text(
    result: Mapping[str, Any],
    run_dir: str,
    try_command: Sequence[str],
    *,
    step_s: float | None = None,
    load: float | None = None,
) -> str:
    """A finished run: loss, speed, memory predicted and measured, rows, output.

    step_s: seconds of a step as planned. load: processes per core that want to run on this machine.
    """
    rows, before = result["rows"], result.get("resumed_at")  # older versions do not write it
    since = f", the last {result['steps'] - before} of them" if before else ""
    reasons = ", ".join(f"{name} {count:,}" for name, count in (rows.get("dropped_reasons") or {}).items())
    lines = [
        "done",
        *_learned_lines(result),
        f"  steps     {result['steps']}{since} in {result['seconds']:.0f} s{_pace(result, step_s, load)}",
        *adapted_lines(result["adaptations"]),
        f"  speed     {result['tokens_per_second']:.1f} tokens/s (padding not counted)",
        *measured_lines(result["memory"]),
        f"  rows      {rows['read']:,} read, {rows['kept']:,} kept, {rows['truncated']:,} truncated, "
        f"{rows['split']:,} split, {rows['dropped']:,} dropped{f' ({reasons})' if reasons else ''}",
        *_note_lines(rows.get("notes") or {}, width=10),
        f"  samples   {rows['train']:,} to train on, {rows['eval']:,} held out",
        f"  {result['output']:9s} {printable(run_dir)}/{result['output']}",
    ]
    if mirror := result.get("mirror"):
        lines.append(f"  mirror    {printable(mirror_line(mirror))}")
    if result.get("idle_adapters"):  # older versions do not write it
        lines.append(f"  adapters  {printable(describe_idle_adapters(result['idle_adapters']))}")
    if result.get("eval"):
        names = [k for k in result["eval"] if k.startswith("eval_") and not k.endswith(_TIMINGS)]
        scores = {name: result["eval"][name] for name in names}
        lines.append(f"  eval      {', '.join(f'{k} {v:.4g}' for k, v in scores.items() if v is not None)}")
    if try_command:
        lines.append(f"  try it    {' '.join(map(shell_word, try_command))}")
    return "\n".join(lines) + "\n"


def mirror_line(mirror: Mapping[str, Any]) -> str:
    """What of a run is in its object store; `mirror` of result.json, or mirror.json."""
    held = [f"checkpoint-{row['step']}" for row in mirror["checkpoints"]]
    held += ["the result"] if mirror["result"] else []
    return f"{', '.join(held) or 'nothing yet'} in {mirror['url']}"


def adapted_lines(adaptations: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a run has changed after it ran out of memory, one line per attempt."""
    return [f"  adapted   at step {entry['step']}: {entry['reason']}" for entry in adaptations]


def measured_lines(memory: Mapping[str, Any]) -> list[str]:
    """The peak and its error in one line, then a row per part; `memory` of result.json."""
    predicted, measured = memory["predicted"], memory["measured"]
    off = measured / predicted - 1 if predicted else 0.0
    error = f": {abs(off):.1%} {'more' if off > 0 else 'less'}" if predicted else ""
    named = {
        **memory["components"],
        "loading": memory["load"],
        "evaluating": memory["eval"],
        "saving": memory["save"],
        "host": memory["host"],
    }
    rows = [
        (name, gib(pair["predicted"]), gib(pair["measured"]))
        for name, pair in named.items()
        if pair["measured"]
    ]
    lines = [
        f"  memory    predicted {gib(predicted)}, measured {gib(measured)}{error} ({memory['method']})",
        *table([("", "predicted", "measured"), *rows], indent=" " * 12),
    ]
    largest, planned = memory["tokens"]["largest"], memory["tokens"]["planned"]
    if largest and planned and largest < planned:
        tokens = f"{largest:,} of the {planned:,} tokens that were planned for"
        lines.append(f"            the longest batch had {tokens}")
    return lines


def shell_word(word: str) -> str:
    """A word to paste into bash; characters that a terminal would not show become escapes."""
    if word.isprintable():
        return shlex.quote(word)
    quoted = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted) + "'"


# --- prepared data


def _note_lines(notes: Mapping[str, int], width: int) -> list[str]:
    """Turns of conversations, labelled words and rows with something particular, a line each."""
    lines: dict[str, list[str]] = {"turns": [], **{title: [] for title in _COUNTED.values()}}
    for name, count in notes.items():
        kind, _, what = name.partition(": ")
        text = f"{_NOTES[kind]} {what}".rstrip() if kind in _NOTES else name
        lines[_COUNTED.get(kind, "turns")].append(f"{count:,} {text}")
    return [f"  {title:{width}s}{'; '.join(own)}" for title, own in lines.items() if own]


def prepared_text(record: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], page: Page) -> str:
    """Counts of rows and tokens by split, and samples with their loss mask."""
    held_out = record.get("held_out") or 0
    lines = [line for name, split in record["splits"].items() for line in _split_lines(name, split, held_out)]
    lines.append(f"cache: {record['folder']}")
    for number, sample in enumerate(samples, start=1):
        place = f"{sample['file']}:{sample['line']}" if "file" in sample else "from the stream"
        lines += [
            "",
            f"sample {number} ({place}): {sample['tokens']} tokens, {sample['targets']} of them targets",
        ]
        lines.append("".join(_piece(text, is_target, page) for text, is_target in sample["pieces"]))
    return "\n".join(lines) + "\n"


def _split_lines(name: str, split: Mapping[str, Any], held_out: int) -> list[str]:
    """Counts of a split; held_out: of the samples of `train`, those that are not trained on."""
    counts, lengths = split["counts"], split["lengths"]
    lost = counts["tokens_lost"] / counts["tokens"] if counts["tokens"] else 0.0
    dropped = ", ".join(
        f"{rows:,} {reason} ({rows / counts['read']:.1%})" for reason, rows in counts["dropped"].items()
    )
    samples = f"{split['samples']:,} samples"
    if held_out and name == "train":
        samples += f": {split['samples'] - held_out:,} to train on, {held_out:,} held out"
    lines = [
        f"{name}: {counts['read']:,} rows read, {counts['kept']:,} kept, {samples}",
        f"  dropped    {dropped or 'none'}",
        f"  truncated  {counts['truncated']:,} rows, {lost:.1%} of the tokens; split {counts['split']:,}",
        *_note_lines(counts.get("notes") or {}, width=11),
    ]
    if labels := sorted((split.get("labels") or {}).items(), key=lambda one: -one[1]):
        shown = ", ".join(f"{name} {count:,}" for name, count in labels[:_LABELS])
        more = f", and {len(labels) - _LABELS} more" if len(labels) > _LABELS else ""
        lines.append(f"  labels     {printable(shown)}{more}")
    if lengths:
        lines.append(
            f"  tokens     {counts['tokens'] - counts['tokens_lost']:,}; per sample: mean "
            f"{lengths['mean']:.0f}, median {lengths['p50']:.0f}, 95 % {lengths['p95']:.0f}, "
            f"maximum {lengths['max']:,}"
        )
    if images := split.get("image_tokens"):
        lines.append(
            f"  of images  tokens per sample: mean {images['mean']:.0f}, median {images['p50']:.0f}, "
            f"95 % {images['p95']:.0f}, maximum {images['max']:,}"
        )
    if images := split.get("images"):
        number = images["images"]
        lines.append(
            f"  images     per sample: mean {number['mean']:.1f}, median {number['p50']:.0f}, "
            f"95 % {number['p95']:.0f}, maximum {number['max']:,}"
        )
    lines += [f"  files      {line}" for source in split["sources"] for line in source["files"]]
    unused = [source for source in split["sources"] if source["unused"]]
    return [*lines, *(f"  not read   {listed(source['unused'])} of {source['path']}" for source in unused)]


def _piece(text: str, is_target: bool, page: Page) -> str:
    """Target text green, the rest dim; without colours the target text is in brackets."""
    if page.coloured:
        return page.paint(text, GREEN if is_target else DIM)
    return f"⟦{text}⟧" if is_target else text


# --- merge and eval


def merged_text(found: Mapping[str, Any], pushed: Mapping[str, Any] | None) -> str:
    """What was written, and how far its logits are from those of the trained model."""
    dtype, kind, size = found["dtype"], found["quantization"], gib(found["bytes"])
    rows = [
        (
            "adapter on its base",
            found["merge"],
            f"{found['merge']['dtype']}; {found['merge']['allowed']:.1g} is allowed",
        )
    ]
    rows.append(("after the cast", found["cast"], f"weights in {dtype}{_same_choice(found['cast'])}"))
    lines = [
        f"merged    {printable(found['folder'])}  {found['params']:,} weights in {dtype}, {size}",
        f"compared  logits of {found['compared']} tokens, of magnitude up to {found['largest_logit']:.3g}; "
        "largest difference from",
    ]
    note = []
    if quantized := found["quantized"]:
        rows.append(("running adapter", quantized, f"the {kind} model that trained{_same_choice(quantized)}"))
        note = [f"  The base is the dequantised one that trained, not quantised to {kind} again."]
    cells = [(name, f"{gap['largest']:.2g}", text) for name, gap, text in rows]
    return "\n".join([*lines, *table(cells), *note, *pushed_lines(pushed)])


def _same_choice(found: Mapping[str, float | None]) -> str:
    """Nothing for a single logit, which leaves no choice."""
    same = found["same_choice"]
    return "" if same is None else f"; the same first choice at {same:.1%}"


def evaluated_text(found: Mapping[str, Any]) -> str:
    """The scores of an evaluation."""
    rows = [
        (name.replace("_", " "), "not finite" if value is None else f"{value:.6g}")
        for name, value in found["metrics"].items()
        if name not in ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    ]
    if found["at_end"] is not None:
        rows.append(("loss at the end of the run", f"{found['at_end']:.6g}"))
    lines = [f"evaluated {found['weights']}", f"rows      {found['rows']:,} of {found['data']}"]
    return "\n".join(lines + table(rows))


def exported_text(found: Mapping[str, Any]) -> str:
    """What was written, how it compares with the trained model, and how to serve it."""
    lines = [f"exported  {printable(found['folder'])}  for {found['to']}, weights in {_weights(found)}"]
    if compared := found["compared"]:
        answers = compared["answers"]
        same = f"{answers['equal']} of {answers['compared']} greedy answers are equal"
        template = "" if compared["template"] == "none" else "; the same chat template"
        lines.append(
            f"compared  the same token ids for {compared['texts']} texts{template}"
            + (f"; {same}" if answers["compared"] else "")
        )
        margins = [one["margin"] for one in compared["differences"] if one["margin"] is not None]
        if margins:
            text = f"the others differ from a token on whose rival was at most {max(margins):.2g} behind"
            lines += wrapped(f"{text}; export.json has them", " " * 10, hang=0)
    if ends := found.get("stop_tokens"):
        lines.append(f"stops at  {', '.join(str(end['text']) for end in ends)}")
    for text in found.get("notes", ()):
        lines += wrapped(f"note      {text}", "", hang=10)
    if found.get("command"):
        lines.append(f"serve     {shlex.join(found['command'])}")
    return "\n".join(lines)


def _weights(found: Mapping[str, Any]) -> str:
    if "quantize" not in found:
        return str(found["dtype"])
    return f"{found['quantize']}, {gib(found['bytes'])}"


def suites_text(found: Mapping[str, Any]) -> str:
    """The scores in benchmarks, and how each was asked."""
    lines = [f"evaluated {printable(found['weights'])}", *table([suites.HEAD, *suites.rows(found["suites"])])]
    for task, settings in suites.settings(found["suites"]):
        lines += wrapped(f"{task}: {settings}")
    if found["kept"]:
        lines.append(f"kept in {printable(found['run_dir'])}/result.json and report.html")
    return "\n".join(lines)


def pushed_lines(pushed: Mapping[str, Any] | None) -> list[str]:
    """The address, and who can read it."""
    if pushed is None:
        return []
    readers = "private" if pushed["private"] else "PUBLIC: anybody can read it"
    return [f"pushed    {pushed['url']}  ({readers})"]


# --- jobs of a scheduler


def dry_run_text(plan: str, scripts: Mapping[str, str], answers: Sequence[str]) -> str:
    """The plan's page, every script, and the answers of the scheduler."""
    shown = [f"{name}\n" + "".join(f"  {line}\n" for line in s.splitlines()) for name, s in scripts.items()]
    return "\n".join([plan, *shown, *answers, "nothing was written or submitted"]) + "\n"


def submitted_text(submitted: Submitted) -> str:
    """The submitted jobs, and how to follow or cancel them."""
    folder = shell_word(str(submitted.folder))
    array = f"array {submitted.job} of {len(submitted.runs)} jobs"
    after = f", after job {submitted.prepare} that prepares the data" if submitted.prepare else ""
    return (
        f"submitted {array if submitted.is_sweep else f'job {submitted.job}'}{after}\n"
        f"  directory  {printable(str(submitted.folder))}\n"
        f"  follow     effilaunch submit {folder} --follow\n"
        f"  cancel     effilaunch submit {folder} --cancel\n"
    )


def cancelled_text(submitted: Submitted) -> str:
    others = f"; the other runs of {printable(str(submitted.folder))} continue" if submitted.is_part else ""
    return f"cancelled job(s) {', '.join(submitted.own_jobs)}; they are not requeued{others}\n"


def sweep_text(submitted: Submitted, rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per run: its values, its last losses, how it ended."""
    losses = ["loss", *(["eval_loss"] if any(row["eval_loss"] is not None for row in rows) else [])]
    names = list(rows[0]["values"])
    head = ["run", *names, *(name.replace("_", " ") for name in losses), "seconds", "state"]
    body = [
        [
            row["run_dir"].rpartition("/")[2].partition("-")[0],
            *(_setting(row["values"][name]) for name in names),
            *("-" if row[name] is None else f"{row[name]:.4f}" for name in losses),
            "-" if row["seconds"] is None else f"{row['seconds']:.0f}",
            row["state"],
        ]
        for row in rows
    ]
    lines = [f"sweep of {len(rows)} runs in {printable(str(submitted.folder))}", *table([head, *body])]
    done, by = [row for row in rows if row["seconds"] is not None], losses[-1]
    if done and all(row[by] is not None for row in done):
        best = min(done, key=lambda row: row[by])
        lines.append(f"lowest {by.replace('_', ' ')}: {printable(best['run_dir'])}")
    return "\n".join(lines) + "\n"


def _setting(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
