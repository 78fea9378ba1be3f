"""Whether the checkpoints of a run have room where they will lie, asked before anything is started."""

from __future__ import annotations

from math import inf
from pathlib import Path

from launcher.errors import MachineError, Problem
from launcher.facts.checkpoint import SAVING, complete_checkpoints, read_manifest
from launcher.facts.storage import read_folder
from launcher.knowledge.doctor.check import size
from launcher.knowledge.doctor.needs import checkpoint_bytes, checkpoints_kept, result_bytes, saved_text
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
