"""The page of all known failures: `python -m launcher.failures.page docs/failures.md` writes it anew."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.failures.adapters import ADAPTERS
from launcher.failures.catalogue import FAILURES
from launcher.failures.data import DATA
from launcher.failures.deepspeed_build import DEEPSPEED_BUILD
from launcher.failures.deepspeed_config import DEEPSPEED_CONFIG
from launcher.failures.deepspeed_engine import DEEPSPEED_ENGINE
from launcher.failures.distributed import DISTRIBUTED
from launcher.failures.failure import Failure, Place
from launcher.failures.hub import HUB
from launcher.failures.installation import INSTALLATION
from launcher.failures.memory import MEMORY
from launcher.failures.parallel import PARALLEL
from launcher.failures.precision import PRECISION
from launcher.failures.quantization import QUANTIZATION
from launcher.failures.saving import SAVING
from launcher.failures.slurm import SLURM

CHAPTERS: Mapping[str, tuple[Failure, ...]] = {
    "Precision": PRECISION,
    "Adapters and activation checkpointing": ADAPTERS,
    "Quantisation": QUANTIZATION,
    "DeepSpeed: the config": DEEPSPEED_CONFIG,
    "DeepSpeed: the engine": DEEPSPEED_ENGINE,
    "DeepSpeed: compiled operators": DEEPSPEED_BUILD,
    "Launching": DISTRIBUTED,
    "Slurm": SLURM,
    "Ranks that share a copy": PARALLEL,
    "Data": DATA,
    "Resuming and saving": SAVING,
    "Memory": MEMORY,
    "Trackers, hub, caches": HUB,
    "Installed packages": INSTALLATION,
}
"""Every failure once, in the order of FAILURES (a test holds that)."""

HEAD = """\
# Known failures

<!-- Written by `python -m launcher.failures.page docs/failures.md`; a test compares them. -->

What is known to go wrong with transformers, accelerate, DeepSpeed, peft and bitsandbytes: {count} failures.
Where each is dealt with:

| word | means |
|---|---|
| fix | the plan sets a value, warns or refuses: `effilaunch fixes ID` tells why ([fixes.md](fixes.md)) |
| refusal | `plan` or `run` stops with this code, or a worker does before the first step |
| lint | `effilaunch lint` finds it in a DeepSpeed config ([lint.md](lint.md)) |
| doctor | this check of `effilaunch doctor` looks for it ([doctor.md](doctor.md)) |
| handled | this code avoids it, counts it, or stops the run in time |
| diagnose | `effilaunch diagnose` recognises it in a log ([diagnose.md](diagnose.md)) |

The source is where the failure is raised, or a public thread about it; requirements beside a title say for
which versions it is known. The entries are data in `launcher/failures/`, with the cause and the mend of each.
"""


def page_text() -> str:
    """The page, as Markdown."""
    parts = [HEAD.format(count=len(FAILURES))]
    for title, failures in CHAPTERS.items():
        rows = [_row(failure) for failure in failures]
        parts.append(
            "\n".join([f"## {title}\n", "| id | what | where | source |", "|---|---|---|---|", *rows]) + "\n"
        )
    return "\n".join(parts)


def _row(failure: Failure) -> str:
    title = failure.title if failure.versions == "*" else f"{failure.title} ({_code(failure.versions)})"
    where = ", ".join(map(_place, failure.places))
    cells = (_code(failure.id), title, where, linked(failure.source))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _place(place: Place) -> str:
    if place.kind == "diagnose":
        return "diagnose"
    if place.kind == "none":
        return f"not needed: {place.ref}"
    if place.kind == "worker":
        module, _, name = place.ref.partition(":")
        return f"handled: [{_code(name)}](../{module.replace('.', '/')}.py)"
    return f"{place.kind} {_code(place.ref)}"


def _code(text: str) -> str:
    return f"`{text}`"


def linked(source: str) -> str:
    """Threads (`owner/name#1, #2`) as links; underscores of paths are no emphasis."""
    threads = re.sub(r"([A-Za-z0-9-]+/[\w.-]+)#\d+(?:, #\d+)*", _threads, source)
    return threads.replace("__", "\\_\\_")


def _threads(found: re.Match[str]) -> str:
    numbers = re.findall(r"#(\d+)", found[0])
    address = f"https://github.com/{found[1]}/issues/"
    shown = [f"{found[1]}#{numbers[0]}", *(f"#{number}" for number in numbers[1:])]
    return ", ".join(f"[{text}]({address}{n})" for text, n in zip(shown, numbers, strict=True))


def main() -> None:
    """Write the page to the file that is named."""
    (name,) = sys.argv[1:]
    Path(name).write_text(page_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
