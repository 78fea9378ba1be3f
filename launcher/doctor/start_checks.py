"""Whether the checkpoints of a run have room where they will lie, asked before anything is started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

from launcher.errors import MachineError, Problem
from launcher.execute.leftovers import LOCK, claimed, swap_files
from launcher.facts.checkpoint import SAVING, complete_checkpoints, read_manifest
from launcher.facts.machine_facts import BuildFacts, Stack, ask_stack, read_build
from launcher.facts.storage import read_folder
from launcher.knowledge.doctor.build_checks import compiler, deepspeed_ops, libaio, ninja, python_headers
from launcher.knowledge.doctor.check import Verdict, size
from launcher.knowledge.doctor.needs import (
    checkpoint_bytes,
    checkpoints_kept,
    nvme_path,
    result_bytes,
    saved_text,
)
from launcher.knowledge.doctor.storage_checks import nvme_folder
from launcher.plan.plan import Plan


def check_room(plan: Plan, run_dir: Path, begins: float = inf) -> None:
    """MachineError (4) where the disk of `run_dir` (which need not exist) holds less than the run will write.

    The checkpoints that an earlier start of the same run has written there are taken off, up to the step that
    it goes on from (`begins`): later ones are put aside, and stay.
    """
    folder = read_folder(run_dir)
    wanted = result_bytes(plan) + _to_come(plan, run_dir / "checkpoints", begins)
    if folder.free >= wanted:
        return
    raise MachineError(
        Problem(
            "disk-full",
            f"the run still writes {size(wanted)} ({saved_text(plan)} and the result) to {run_dir}, where "
            f"{size(folder.free)} are free",
            path="trainer.save_total_limit",
            hint="make room, name another folder with --output-dir, lower trainer.save_total_limit, or save "
            "weights alone with trainer.save_only_model: true",
        )
    )


def _to_come(plan: Plan, checkpoints: Path, begins: float) -> int:
    """Bytes of the checkpoints that are still to be written: what one really took, where one is there.

    A half-written one goes before the next save. Where neither limit nor length is known, one more is.
    """
    whole = complete_checkpoints(checkpoints)
    there = [read_manifest(path) for step, path in whole.items() if step <= begins]
    each = max([checkpoint_bytes(plan), *(manifest.bytes for manifest in there if manifest is not None)])
    kept = checkpoints_kept(plan)
    more = 1 if kept is None else max(0, kept - len(there))
    return more * each - _written(checkpoints / SAVING)


def _written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


_BUILD = {
    "libaio": libaio,
    "compiler": compiler,
    "ninja": ninja,
    "python-headers": python_headers,
    "deepspeed-ops": deepspeed_ops,
}


@dataclass(frozen=True, slots=True)
class _Builder:
    build: BuildFacts
    stack: Stack


def _folder(plan: Plan) -> Path | None:
    """The folder of an offload to NVMe; None where nothing is offloaded to it."""
    path = nvme_path(plan)
    return None if path is None else Path(path)


def check_nvme(plan: Plan) -> None:
    """MachineError (4) where the folder has no room or async_io cannot be built.

    Asks the training stack in a process of its own, which takes seconds; nothing where nothing is offloaded.
    """
    folder = _folder(plan)
    if folder is None:
        return
    verdicts = {"nvme": nvme_folder(read_folder(folder), plan, _left(folder))}
    if verdicts["nvme"].status != "fail":
        machine = _Builder(read_build(os.environ), ask_stack(plan.interpreter, os.environ))
        verdicts |= {name: check(machine, plan) for name, check in _BUILD.items()}
    failed = [_problem(name, said) for name, said in verdicts.items() if said.status == "fail"]
    if failed:
        raise MachineError(failed)


def nvme_words(plan: Plan) -> list[str]:
    """What on this machine stands in the way, for a plan that may run on another."""
    folder = _folder(plan)
    if folder is None:
        return []
    machine = _Builder(read_build(os.environ), {"deepspeed": {}})
    verdicts = {
        "nvme": nvme_folder(read_folder(folder), plan, _left(folder)),
        "libaio": libaio(machine, plan),
    }
    bad = [_problem(name, said) for name, said in verdicts.items() if said.status in ("fail", "warn")]
    return [f"here a run would not start, or be slow: {p.message} ({p.hint})" for p in bad]


def _left(folder: Path) -> int:
    """Bytes that a killed run of ours left there: the next one removes them before it starts."""
    return sum(swap_files(folder).values()) if (folder / LOCK).exists() else 0


@contextlib.contextmanager
def holding_nvme(plan: Plan, say: Callable[[str], None]) -> Iterator[None]:
    """While the run lives, the folder of its offload is its own; nothing where nothing is offloaded.

    MachineError (4) where another run has it.
    """
    folder = _folder(plan)
    if folder is None:
        yield
        return
    with claimed(folder) as freed:
        if freed:
            say(f"removed {size(freed)} that a killed run left in {folder}")
        slow = nvme_folder(read_folder(folder), plan)
        if slow.status == "warn":
            say(f"{slow.found}: {slow.message} ({slow.hint})")
        yield


def _problem(name: str, said: Verdict) -> Problem:
    code = {"nvme": "nvme-folder", "libaio": "aio-missing"}.get(name, name)
    path = "sharding.nvme_path" if name == "nvme" else None
    return Problem(code, f"{said.found}: {said.message}", path=path, hint=said.hint)
