"""Results as plain text: of runs, prepared data, merge, eval, submitted jobs and sweeps. Pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.execute.record import RunRecord
from launcher.report.data_sections import data_section
from launcher.report.memory_sections import memory_section
from launcher.report.model_card import merge_rows
from launcher.report.run_sections import adaptations, run_rows
from launcher.report.sections import Block, Code, Fact, Row, Rows, rows_of, table_of
from launcher.report.suites import suites_section
from launcher.report.tables import gib
from launcher.report.terminal import Page
from launcher.report.text import PLAIN, block_lines, flat, section_lines
from launcher.schedulers.submitted import Submitted


def result_text(record: RunRecord, try_command: Sequence[str], *, load: float = 0.0) -> str:
    """A run, as far as it came: figures, adaptations, memory. load: processes per core that want to run."""
    trial = [Row("try it", [Code(" ".join(map(shell_word, try_command)))])] if try_command else []
    rows = [*run_rows(record, load), *trial]
    blocks: list[Block] = [Rows(rows), *adaptations(record.result.get("adaptations"))]
    memory = memory_section(record.plan, record.result)
    state = "done" if record.state == "finished" else record.state
    return "\n".join([state, *block_lines(blocks), *section_lines([memory])]) + "\n"


def shell_word(word: str) -> str:
    """A word to paste into bash; characters that a terminal would not show become escapes."""
    if word.isprintable():
        return shlex.quote(word)
    quoted = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted) + "'"


def prepared_text(data: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], page: Page = PLAIN) -> str:
    """Counts of rows and tokens by split, and samples with their loss mask. data: data.json."""
    section = data_section({**data, "samples": samples}, len(samples), sys.maxsize)
    blocks = section.blocks if section is not None else ()
    return "\n".join([*block_lines(blocks, page), f"cache: {data['folder']}"]) + "\n"


# --- merge, export and eval


_MERGED = (
    Fact("merged", "{folder}", "{bytes:bytes}"),
    Fact("compared", "logits of {compared:count} tokens, of magnitude up to {largest_logit:number}"),
)
_QUANTIZED = Fact(
    "note", "The base is the dequantized one that trained, not quantized to {quantization} again."
)


def merged_text(found: Mapping[str, Any], pushed: Mapping[str, Any] | None) -> str:
    """What was written, and how far its logits are from those of the trained model."""
    rows = [
        *rows_of(_MERGED, found),
        *merge_rows(found),
        *(rows_of([_QUANTIZED], found) if found["quantized"] else []),
    ]
    return "\n".join([*block_lines([Rows(rows)]), *pushed_lines(pushed)])


_EVALUATED = (Fact("evaluated", "{weights}"), Fact("rows", "{rows:count} of {data}"))


def evaluated_text(found: Mapping[str, Any]) -> str:
    """The scores of an evaluation."""
    skipped = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    scores = {
        name.replace("_", " "): value for name, value in found["metrics"].items() if name not in skipped
    }
    scores |= {"loss at the end of the run": found["at_end"]} if found["at_end"] is not None else {}
    rows = [Row(name, ["not finite" if value is None else f"{value:.6g}"]) for name, value in scores.items()]
    return "\n".join(block_lines([Rows([*rows_of(_EVALUATED, found), *rows])]))


_EXPORTED = (
    Fact("exported", "{folder}", "for {to}, weights in {weights}"),
    Fact("compared", "the same token ids for {compared.texts:count} texts",
         "[; {template}][; {answers.equal:count} of {answers.compared:count} greedy answers are equal][; the "
         "others differ from a token on whose rival was at most {margin} behind; export.json has them]"),
    Fact("stops at", "{stops}"),
)  # fmt: skip


def exported_text(found: Mapping[str, Any]) -> str:
    """What was written, how it compares with the trained model, and how to serve it."""
    compared = found["compared"] or {}
    margins = [one["margin"] for one in compared.get("differences", ()) if one["margin"] is not None]
    same_template = compared.get("template", "none") != "none"
    scope = {
        **found,
        "weights": f"{found['quantize']}, {gib(found['bytes'])}" if "quantize" in found else found["dtype"],
        "answers": compared["answers"] if compared.get("answers", {}).get("compared") else None,
        "template": "the same chat template" if same_template else None,
        "margin": f"{max(margins):.2g}" if margins else None,
        "stops": ", ".join(str(end["text"]) for end in found.get("stop_tokens") or ()),
    }
    rows = [*rows_of(_EXPORTED, scope), *(Row("note", [text]) for text in found.get("notes", ()))]
    serve = [f"  serve     {shlex.join(found['command'])}"] if found.get("command") else []
    return "\n".join([*block_lines([Rows(rows)]), *serve])


def suites_text(found: Mapping[str, Any]) -> str:
    """The scores in benchmarks, and how each was asked."""
    section = suites_section(found["suites"])
    lines = [f"evaluated {flat(found['weights'])}", *section_lines([section])]
    if found["kept"]:
        lines.append(f"kept in {flat(found['run_dir'])}/result.json and report.html")
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
        f"  directory  {flat(str(submitted.folder))}\n"
        f"  follow     effilaunch submit {folder} --follow\n"
        f"  cancel     effilaunch submit {folder} --cancel\n"
    )


def cancelled_text(submitted: Submitted) -> str:
    others = f"; the other runs of {flat(str(submitted.folder))} continue" if submitted.is_part else ""
    return f"cancelled job(s) {', '.join(submitted.own_jobs)}; they are not requeued{others}\n"


def sweep_text(submitted: Submitted, rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per run: its values, its last losses, how it ended."""
    scopes = [{**row, "run": row["run_dir"].rpartition("/")[2].partition("-")[0]} for row in rows]
    for row, scope in zip(rows, scopes, strict=True):
        scope |= {f"value {at}": value for at, value in enumerate(row["values"].values())}
        # As many decimals as runs of a sweep differ in.
        scope |= {name: f"{row[name]:.4f}" for name in ("loss", "eval_loss") if row[name] is not None}
    names = {name: f"{{value {at}}}" for at, name in enumerate(rows[0]["values"])}
    losses = {"loss": "{loss}", "eval loss": "{eval_loss}"}
    columns = {"run": "{run}", **names, **losses, "seconds": "{seconds:count}", "state": "{state}"}
    table = block_lines(table_of("Runs", columns, scopes))
    lines = [f"sweep of {len(rows)} runs in {flat(str(submitted.folder))}", *table]
    done = [row for row in rows if row["seconds"] is not None]
    by = "loss" if all(row["eval_loss"] is None for row in rows) else "eval_loss"
    if done and all(row[by] is not None for row in done):
        best = min(done, key=lambda row: row[by])
        lines.append(f"lowest {by.replace('_', ' ')}: {flat(best['run_dir'])}")
    return "\n".join(lines) + "\n"
