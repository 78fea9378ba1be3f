"""Whether the checkpoints of a run have room where they will lie, asked before anything is started."""

from __future__ import annotations

from pathlib import Path

from launcher.doctor.check import size
from launcher.doctor.needs import saved_text, written_bytes
from launcher.errors import MachineError, Problem
from launcher.facts.machine_disk import read_folder
from launcher.plan.plan import Plan


def check_room(plan: Plan, run_dir: Path) -> None:
    """MachineError (4) where the disk of `run_dir` (which need not exist) holds less than the run will write.

    What an earlier start of the same run has written there is taken off.
    """
    folder = read_folder(run_dir)
    wanted = written_bytes(plan) - _written(run_dir / "checkpoints")
    if folder.free >= wanted:
        return
    raise MachineError(
        Problem(
            "disk-full",
            f"the run writes {size(wanted)} ({saved_text(plan)} and the result) to {run_dir}, where "
            f"{size(folder.free)} are free",
            path="trainer.save_total_limit",
            hint="make room, name another folder with --output-dir, lower trainer.save_total_limit, or save "
            "weights alone with trainer.save_only_model: true",
        )
    )


def _written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
