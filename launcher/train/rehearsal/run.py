"""One process of a rehearsal, started by the run's own launcher.

`python -m launcher.train.rehearsal.run RUN_DIR`.

Joins the process group that the run would have, then measures all-reduce, links, devices and a save. It loads
no model and no data. Rank 0 writes the measurements so far to result.json.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import parse_json, write_json
from launcher.plan.rehearsal import PLANNED, RESULT, Rehearsal, rehearsal_of
from launcher.train.job import Job, rank, read_job, world_size
from launcher.train.outcome import COMPLETED
from launcher.train.status import status
from launcher.train.worker import as_rank, leave, set_timeouts

SCHEMA_VERSION = 1
LEAVE_S = 10.0
"""Seconds that rank 0, which may serve the store, waits at the end until the other ranks have left."""


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse in one run directory; the exit status of errors.py, 1 for an unforeseen error.

    A signal ends a rehearsal at once: there is nothing to save.
    """
    return as_rank("rehearsal.run", lambda run_dir: rehearse(read_job(run_dir), read_planned(run_dir)), argv)


def read_planned(run_dir: Path) -> Rehearsal:
    """Read rehearsal.json."""
    path = run_dir / PLANNED
    try:
        return rehearsal_of(parse_json(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecipeError(Problem("bad-plan", f"cannot read the rehearsal: {error}", str(path))) from error


class MeasuredParts:
    """The measurements so far; rank 0 writes them at once, so that they outlive a part that fails."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / RESULT
        self.values: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "world_size": world_size()}

    def add(self, **values: Any) -> None:
        self.values.update(values)
        if rank() == 0:
            write_json(self._path, self.values)


def rehearse(job: Job, planned: Rehearsal) -> None:
    """All parts, one after the other, on every rank."""
    status().enter("load")
    measured = MeasuredParts(job.run_dir)
    if world_size() > 1:
        _together(job, planned, measured)
    else:
        _alone(job, planned, measured)
    if rank() == 0:
        (job.run_dir / COMPLETED).write_text("", encoding="utf-8")


def _alone(job: Job, planned: Rehearsal, measured: MeasuredParts) -> None:
    """One process: measure its device and its disk."""
    from launcher.train.rehearsal.measurements import save, speed
    from launcher.train.rehearsal.roll import Watchdog, introduce

    watchdog = Watchdog(planned, job.run_dir)
    ranks = [introduce("gloo", job.run_dir)]
    measured.add(ranks=ranks, backend=None)
    device = _join(job, planned, watchdog)
    watchdog.begin("its device", planned.devices_s)
    measured.add(devices=[{"rank": 0, **speed(device)}])
    watchdog.begin("saving", planned.save_s)
    measured.add(save=save(planned, job.checkpoints, ranks, 0))
    watchdog.end()


def _together(job: Job, planned: Rehearsal, measured: MeasuredParts) -> None:
    """Several ranks: wait for all, join the run's process group, and measure."""
    from launcher.train.collectives import of_all
    from launcher.train.rehearsal.roll import Watchdog, call_roll, introduce, open_store

    backend = "gloo" if job.trainer.use_cpu else "nccl"
    watchdog = Watchdog(planned, job.run_dir)
    begun = time.monotonic()
    store = open_store(planned.meet_s, serve=True)  # kept open: it may serve the process group
    left = max(0.0, planned.meet_s - (time.monotonic() - begun))
    ranks = call_roll(store, introduce(backend, job.run_dir), left, job.run_dir)
    measured.add(ranks=ranks, backend=backend, met_s=time.monotonic() - begun)
    watchdog.watch(ranks)
    device = _join(job, planned, watchdog, store)
    measured.add(joined_s=time.monotonic() - begun)
    _measure(job, planned, ranks, device, watchdog, measured)
    watchdog.end()
    of_all(None)  # nobody leaves while another rank still watches it
    _arrive(store, "left", LEAVE_S if rank() == 0 else 0.0)


def _join(job: Job, planned: Rehearsal, watchdog: Any, store: Any = None) -> Any:
    """Make the process group as the run does; with a store, wait until all ranks have. This rank's device.

    One node may still be compiling a DeepSpeed operator that the others have cached. That time counts as
    joining: the limit of the all-reduce is far shorter.
    """
    from launcher.train.own_device import arguments_on_planned_device

    watchdog.begin("joining as the run would", planned.join_s)
    set_timeouts(job)
    device = arguments_on_planned_device(job).device
    if store is not None:
        _arrive(store, "joined", planned.join_s)
    status().enter("train")
    return device


def _arrive(store: Any, place: str, limit_s: float) -> None:
    """Report that this rank has reached `place`, and wait at most `limit_s` seconds for the other ranks."""
    store.set(f"{place}/{rank()}", "1")
    names, until = [f"{place}/{number}" for number in range(world_size())], time.monotonic() + limit_s
    while time.monotonic() < until and not store.check(names):
        time.sleep(0.05)


def _measure(
    job: Job,
    planned: Rehearsal,
    ranks: list[dict[str, Any]],
    device: Any,
    watchdog: Any,
    measured: MeasuredParts,
) -> None:
    """The network between the ranks, their devices and a save."""
    from launcher.train.collectives import of_all
    from launcher.train.rehearsal.measurements import all_reduce, links, save, speed, waiting

    limit = planned.seconds + planned.reduce_more_s
    watchdog.begin(f"all-reduce over {len(ranks)} ranks for {planned.seconds:g} s", limit)
    measured.add(all_reduce=all_reduce(device, planned.sizes, planned.seconds))
    watchdog.begin("links", planned.links_s)
    measured.add(links=links(device, ends_of(ranks)))
    watchdog.begin("devices", planned.devices_s)
    speeds = [{"rank": number, **of_rank} for number, of_rank in enumerate(of_all(speed(device)))]
    measured.add(devices=speeds)
    count = sorted(of_rank["step_products"] for of_rank in speeds)[len(speeds) // 2]
    measured.add(waiting=waiting(device, count))
    watchdog.begin("saving", planned.save_s)
    measured.add(save=save(planned, job.checkpoints, ranks, rank()))


def ends_of(ranks: Sequence[dict[str, Any]]) -> list[int]:
    """Ranks between which links are measured: the first of each node, or all of a single node."""
    firsts: dict[tuple[int, str], int] = {}
    for facts in ranks:
        firsts.setdefault((facts["node"], facts["host"]), facts["rank"])
    return list(firsts.values()) if len(firsts) > 1 else [facts["rank"] for facts in ranks]


if __name__ == "__main__":
    leave(main())
