"""Two nodes of a job on this machine, each with one of the small ranks of `supervised.py`.

`python tests/two_nodes.py FOLDER NODE SETTINGS` is one of them: node 0 leads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from factories import facts, plan, recipe
from patience import patience, wait_until
from supervised import PREPARED, ROOT, marked

MARK = "EFFILAUNCH_TEST_MARK"
HERE = "127.0.0.1"


class Pair:
    """Both, as processes of their own."""

    def __init__(self, folder: Path, script: str, port: int, **settings: Any) -> None:
        """script: of `supervised.ranks`, whose launcher starts the one rank of its node."""
        self.run_dir, self.mark = folder / "run", uuid.uuid4().hex
        alone = script.replace("for rank in range(2)]", "for rank in [int(sys.argv[2])]]")
        over = "while None in [rank.poll() for rank in ranks]"
        alone = alone.replace(over, f"{over} or any(rank.returncode for rank in ranks)")
        settings |= {"script": alone.replace('run / "tries"', 'run / f"tries-{sys.argv[2]}"'), "port": port}
        self.nodes = [self._start(folder, number, settings) for number in (0, 1)]

    def _start(self, folder: Path, number: int, settings: dict[str, Any]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__, str(folder), str(number), json.dumps(settings)],
            env={**os.environ, MARK: self.mark, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def training(self) -> Pair:
        """Once both ranks have taken a step."""
        wait_until(lambda: all(status.get("step", 0) >= 1 for status in map(self.status, (0, 1))))
        return self

    def status(self, rank: int) -> dict[str, Any]:
        file = self.run_dir / "logs" / f"status-rank-{rank}.json"
        return json.loads(file.read_text()) if file.is_file() else {}

    def send(self, node: int, number: int) -> Pair:
        self.nodes[node].send_signal(number)
        return self

    def ended(self, *codes: int, within_s: float = 120.0) -> list[str]:
        """What each said that has ended with its code; none of their processes is left."""
        said = [node.communicate(timeout=patience(within_s))[0] for node in self.nodes]
        assert tuple(node.returncode for node in self.nodes) == codes, "\n----\n".join(said)
        wait_until(lambda: not marked(MARK, self.mark), 60, lambda: marked(MARK, self.mark))
        return said

    def tries(self, node: int) -> list[str]:
        return [Path(word).name for word in (self.run_dir / f"tries-{node}").read_text().split()]


def main(folder: Path, number: int, settings: dict[str, Any]) -> int:
    from launcher.errors import EffilaunchError
    from launcher.execute import following, nodes
    from launcher.execute.supervise import Limits
    from launcher.execute.taking_part import take_part
    from launcher.machine.job_member import JobMember
    from launcher.report.outcome import echo

    following.VANISHED_S = settings.get("vanished_s", following.VANISHED_S)
    nodes.BEAT_S, nodes.SILENT_S = 0.3, settings.get("silent_s", 60.0)
    place = JobMember("two", number, 2, 2, number, 1, 0, HERE, settings["port"])
    try:
        if number == 0:
            lead(place, folder, settings)
        else:
            take_part(place, folder / "run", "", 1, echo, Limits(come=120.0))
    except EffilaunchError as error:
        echo(f"{error.problems[0].code}: {error}")
        return error.exit_code
    return 0


def lead(place: Any, folder: Path, settings: dict[str, Any]) -> None:
    """The command of node rank 0."""
    from launcher.execute.attempts import run_attempts
    from launcher.execute.run_dir import write_run_dir
    from launcher.execute.supervise import Limits
    from launcher.render.bundle import render
    from launcher.report.outcome import echo
    from launcher.schedulers.rendezvous import leading
    from launcher.schedulers.scheduler import Gathering

    given = {"launch__max_restarts": settings.get("restarts", 0), "launch__hang_factor": 2}
    bundle = replace(
        render(plan(folder, "2x1xcpu", **given)),
        prepare=(sys.executable, "-c", settings.get("prepare", PREPARED), "{run_dir}"),
        command=(sys.executable, "-c", settings["script"], "{run_dir}", "{node_rank}"),
    )
    with leading(Gathering(place), folder / "run", "", echo) as nodes:
        write_run_dir(bundle, folder / "run", resume=False)
        run_attempts(
            recipe(folder, **given), facts("2x1xcpu"), bundle, folder / "run", gpus=(), resume=None,
            say=echo, limits=Limits(**{"leave": 0.3, **settings.get("limits", {})}), first_pause_s=0.1,
            nodes=nodes,
        )  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))
