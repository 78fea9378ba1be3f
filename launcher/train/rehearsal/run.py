"""One process of a rehearsal, started by the run's own launcher.

`python -m launcher.train.rehearsal.run RUN_DIR`.

Joins the process group that the run would have, then measures: all-reduce, links, devices, a save. It loads
no model and no data. Rank 0 writes what is known so far to result.json; nothing is judged here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.facts.rehearsal_course import COURSE, RESULT, Course, course_of
from launcher.facts.safe_files import parse_json, write_json
from launcher.train.job import Job, rank, read_job, world_size
from launcher.train.outcome import COMPLETED
from launcher.train.status import status
from launcher.train.worker import as_rank, leave, set_timeouts

SCHEMA_VERSION = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse in one run directory; the exit code of errors.py, 1 for the unforeseen.

    A signal ends a rehearsal at once: there is nothing to save.
    """
    return as_rank("rehearsal.run", lambda run_dir: rehearse(read_job(run_dir), read_course(run_dir)), argv)


def read_course(run_dir: Path) -> Course:
    """What to do. RecipeError where the file is absent or none."""
    path = run_dir / COURSE
    try:
        return course_of(parse_json(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecipeError(Problem("bad-plan", f"cannot read what to rehearse: {error}", str(path))) from error


class Measured:
    """What is known so far; rank 0 keeps it on the disk, so that it outlives a part that fails."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / RESULT
        self.values: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "world_size": world_size()}

    def add(self, **values: Any) -> None:
        self.values.update(values)
        if rank() == 0:
            write_json(self._path, self.values)


def rehearse(job: Job, course: Course) -> None:
    """All parts, one after the other; every rank runs it."""
    status().enter("load")
    measured = Measured(job.run_dir)
    backend = "gloo" if job.trainer.use_cpu else "nccl"
    if world_size() > 1:
        together(job, course, backend, measured)
    else:
        alone(job, course, measured)
    if rank() == 0:
        (job.run_dir / COMPLETED).write_text("", encoding="utf-8")


def alone(job: Job, course: Course, measured: Measured) -> None:
    """One process: nothing passes between ranks; its device and its disk are measured."""
    from launcher.train.arguments import make_arguments
    from launcher.train.rehearsal.device import speed
    from launcher.train.rehearsal.roll import Vigil, introduce
    from launcher.train.rehearsal.save import save

    vigil = Vigil(course, job.run_dir)
    ranks = [introduce("gloo", job.run_dir)]
    measured.add(ranks=ranks, backend=None)
    vigil.begin("joining as the run would", course.join_s)
    device = make_arguments(job).device
    status().enter("train")
    vigil.begin("its device", course.devices_s)
    measured.add(devices=[{"rank": 0, **speed(device)}])
    vigil.begin("saving", course.save_s)
    measured.add(save=save(course, job.checkpoints, ranks, 0))
    vigil.end()


def together(job: Job, course: Course, backend: str, measured: Measured) -> None:
    """Several ranks: the roll, the run's own process group, and what passes through it."""
    from launcher.train.rehearsal.roll import Vigil, call_roll, introduce, open_store

    vigil = Vigil(course, job.run_dir)
    begun = time.monotonic()
    store = open_store(course.meet_s, serve=True)  # held until the end: it may serve the process group
    left = max(0.0, course.meet_s - (time.monotonic() - begun))
    ranks = call_roll(store, introduce(backend, job.run_dir), left, job.run_dir)
    measured.add(ranks=ranks, backend=backend, met_s=time.monotonic() - begun)
    vigil.look_after(ranks)
    vigil.begin("joining as the run would", course.join_s)
    device = join(job)
    measured.add(joined_s=time.monotonic() - begun)
    status().enter("train")
    measure(job, course, ranks, device, vigil, measured)
    vigil.end()
    from launcher.train.together import of_all

    of_all(None)  # nobody leaves while another one still looks after it
    store.set(f"left/{rank()}", "1")
    if rank() == 0:
        _wait_for_the_rest(store)


def _wait_for_the_rest(store: Any, limit_s: float = 10.0) -> None:
    """The rank that may serve the store leaves last."""
    names, until = [f"left/{number}" for number in range(world_size())], time.monotonic() + limit_s
    while time.monotonic() < until and not store.check(names):
        time.sleep(0.05)


def join(job: Job) -> Any:
    """The process group, made as the run makes it; this rank's device."""
    from launcher.train.arguments import make_arguments

    set_timeouts(job)
    return make_arguments(job).device


def measure(
    job: Job, course: Course, ranks: list[dict[str, Any]], device: Any, vigil: Any, measured: Measured
) -> None:
    """What passes between the ranks, and what each can do."""
    from launcher.train.rehearsal.device import speed
    from launcher.train.rehearsal.network import all_reduce, links, waiting
    from launcher.train.rehearsal.save import save
    from launcher.train.together import of_all

    limit = course.seconds + course.reduce_more_s
    vigil.begin(f"all-reduce over {len(ranks)} ranks for {course.seconds:g} s", limit)
    measured.add(all_reduce=all_reduce(device, course.sizes, course.seconds))
    vigil.begin("links between " + ("machines" if len(ends_of(ranks)[1]) > 1 else "ranks"), course.links_s)
    measured.add(links=links(device, ends_of(ranks)[0]))
    vigil.begin("devices", course.devices_s)
    speeds = [{"rank": number, **told} for number, told in enumerate(of_all(speed(device)))]
    measured.add(devices=speeds)
    count = sorted(told["step_products"] for told in speeds)[len(speeds) // 2]
    measured.add(waiting=waiting(device, count))
    vigil.begin("saving", course.save_s)
    measured.add(save=save(course, job.checkpoints, ranks, rank()))


def ends_of(ranks: Sequence[dict[str, Any]]) -> tuple[list[int], list[tuple[int, str]]]:
    """(ranks between which links are measured, machines): the first of each machine, or all of a lone one."""
    firsts: dict[tuple[int, str], int] = {}
    for facts in ranks:
        firsts.setdefault((facts["node"], facts["host"]), facts["rank"])
    ends = list(firsts.values()) if len(firsts) > 1 else [facts["rank"] for facts in ranks]
    return ends, list(firsts)


if __name__ == "__main__":
    leave(main())
