"""The last act of a save: every file hashed and put on the disk, the manifest behind them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from launcher.errors import Problem, RunFailed
from launcher.facts.checkpoint import MANIFEST, SCHEMA_VERSION, FileFacts
from launcher.facts.safe_files import parse_json, write_json
from launcher.facts.software import installed_versions
from launcher.train.checkpoint.moving import hash_and_sync, sync_file, sync_folder
from launcher.train.job import rank, world_size
from launcher.train.together import of_all, of_rank_0

SEEN_S = 60.0
"""So long rank 0 waits for the files of other machines: a network filesystem may show them late."""


def seal(folder: Path, run_dir: Path, step: int, begun: float, elapsed: float | None = None) -> int:
    """Finish a checkpoint that all ranks have written to `folder`; returns its bytes. All ranks must call it.

    begun: time.monotonic() when the save began. elapsed: seconds that the run took up to here, None where
    nobody knows. Raises OSError where a file cannot be read or brought to the
    disk.
    """
    of_all(None)  # all have written
    plan = run_dir / "plan.json"
    if rank() == 0 and plan.is_file():
        shutil.copyfile(plan, folder / "plan.json")
    of_rank_0(None)
    shares = _share(of_all(_sizes(folder)))
    found: dict[str, FileFacts] = {}
    for part in of_all(hash_and_sync(folder, shares[rank()])):
        found.update(part)
    if rank() == 0:
        _await(folder, found)
        _write_manifest(folder, run_dir, step, found, time.monotonic() - begun, elapsed)
    return sum(facts.bytes for facts in found.values())


def _sizes(folder: Path) -> dict[str, int]:
    """Path below `folder`, with slashes -> bytes, of all files that this machine sees."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _share(listings: Sequence[Mapping[str, int]]) -> list[list[str]]:
    """The files dealt out by size among the ranks that see them; every rank comes to the same."""
    sizes: dict[str, int] = {}
    for listing in listings:
        sizes.update(listing)
    shares: list[list[str]] = [[] for _ in listings]
    loads = [0] * len(listings)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        who = min((n for n, seen in enumerate(listings) if name in seen), key=lambda n: (loads[n], n))
        shares[who].append(name)
        loads[who] += sizes[name]
    return shares


def _await(folder: Path, found: Mapping[str, FileFacts]) -> None:
    """RunFailed where rank 0 does not see the files of other ranks: the checkpoint would be half of one."""
    until = time.monotonic() + SEEN_S
    while absent := sorted(found.keys() - _sizes(folder).keys()):
        if time.monotonic() > until:
            raise RunFailed(
                Problem(
                    "checkpoints-not-shared",
                    f"the first machine does not see what others wrote of a checkpoint ({absent[0]}, "
                    f"{len(absent)} files)",
                    file=str(folder),
                    hint="name a run directory that all machines share with --output-dir",
                )
            )
        time.sleep(0.5)


def _write_manifest(
    folder: Path,
    run_dir: Path,
    step: int,
    files: Mapping[str, FileFacts],
    seconds: float,
    elapsed: float | None,
) -> None:
    write_json(
        folder / MANIFEST,
        {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "world_size": world_size(),
            "files": {name: asdict(files[name]) for name in sorted(files)},
            "bytes": sum(facts.bytes for facts in files.values()),
            "seconds": round(seconds, 3),
            "elapsed": None if elapsed is None else round(elapsed, 3),
            "data": _data_key(run_dir),
            "versions": installed_versions(),
        },
    )
    sync_file(folder / MANIFEST)
    for place in {folder, *(folder / name for name in map(os.path.dirname, files) if name)}:
        sync_folder(place)


def _data_key(run_dir: Path) -> str | None:
    """The key of the prepared data; None where it is streamed, or no launcher prepared it."""
    try:
        found = parse_json((run_dir / "data.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("key") if isinstance(found, dict) else None
