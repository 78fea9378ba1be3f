"""Ranks for tests of the supervisor: small scripts with the real statuses and stops, under a small launcher.

`python tests/supervised.py RUN_DIR SETTINGS` runs them under `execute` in a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from factories import plan

from launcher.execute import start
from launcher.execute.run_dir import written
from launcher.execute.start import execute
from launcher.execute.supervise import Limits
from launcher.render.bundle import Bundle, render

ROOT = Path(__file__).resolve().parents[1]
PREPARED = "import pathlib, sys; (pathlib.Path(sys.argv[1]) / 'data.json').write_text('{}')"
# One rank: it trains STEPS steps of 50 ms, runs `each` before every one of them, and obeys a stop.
RANK = """
import faulthandler, json, os, pathlib, signal, subprocess, sys, time
sys.path[:0] = [ROOT, ROOT + "/tests"]
from patience import Deadline
from launcher.train import stopping
from launcher.train.status import start_status, status
run, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])
log = (run / "logs" / f"rank-{rank}.log").open("a", buffering=1)
start_status(run, rank)
stopping.watch(os.environ)
faulthandler.register(signal.SIGUSR2, file=log, all_threads=True)
# What it starts leaves its session and its parent.
subprocess.Popen([sys.executable, "-c", '''
import os, time
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    time.sleep(600)
''']).wait()
def save(step):
    import hashlib
    folder = run / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").write_text(str(step))
    facts = {"bytes": len(str(step)), "sha256": hashlib.sha256(str(step).encode()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"schema_version": 1, "step": step, "world_size": 2,
        "files": {"weights": facts}, "bytes": facts["bytes"], "seconds": 0.1, "data": None, "versions": {}}))
resumed = os.environ.get("EFFILAUNCH_RESUME")
begin = int(resumed.rpartition("-")[2]) if resumed else 0
try_number = int(sys.argv[3])
def meet(step):
    # As in a collective: nobody is a step ahead, and who was asked to stop waits for the others a while.
    (run / f"at-{try_number}-{step}-{rank}").touch()
    others_come = Deadline(2.0)
    while not all((run / f"at-{try_number}-{step}-{other}").exists() for other in range(RANKS)):
        time.sleep(0.02)
        if stopping.stop.number and others_come.passed():
            print("Traceback (most recent call last):\\nRuntimeError: Connection closed by peer", flush=True)
            status().end(1)
            os._exit(1)
def fail(what):
    (run / "logs" / f"error-rank-{rank}.json").write_text(json.dumps({"rank": rank, "time": time.time(),
        "type": "RuntimeError", "message": what, "problems": [], "exit_code": 1}))
    status().end(1)
    os._exit(1)
status().enter("load")
EARLY
status().begin_training(begin, STEPS, lambda: 3 << 30)
stopping.stop.at_once = False
for step in range(begin, STEPS):
    EACH
    time.sleep(0.05)
    if stopping.stop.number:
        (run / f"stop-{try_number}-{step}").write_text(str(int(stopping.stop.number)))
    meet(step)
    status()._written = 0  # every step is told
    status().step_ended(step + 1)
    if rank == 0:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step + 1, "loss": 1 / (step + 1)}) + "\\n")
        if (step + 1) % SAVES == 0:
            save(step + 1)
    if (run / f"stop-{try_number}-{step}").exists():
        if rank == 0:
            save(step + 1)
            # As ranks agree: the signal may have reached another one alone.
            name = stopping.cause(int((run / f"stop-{try_number}-{step}").read_text()))
            (run / "stopped.json").write_text(json.dumps(
                {"signal": name, "step": step + 1, "checkpoint": f"checkpoint-{step + 1}"}))
        status().end(0)
        os._exit(0)
if rank == 0:
    (run / "result.json").write_text(json.dumps({"steps": STEPS}))
    (run / "COMPLETED").write_text("")
status().end(0)
os._exit(0)
"""
# Its ranks live in sessions of their own; it dies of SIGTERM without a word to them, as deepspeed's does, and
# when one fails it tells the others to end.
LAUNCHER = """
import os, pathlib, subprocess, sys, time
run = pathlib.Path(sys.argv[1])
tries = run / "tries"
number = len(tries.read_text().split()) if tries.exists() else 0
with tries.open("a") as file:
    file.write(os.environ.get("EFFILAUNCH_RESUME", "start") + " ")
ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(run), str(rank), str(number)],
                          start_new_session=True)
         for rank in range(RANKS)]
(run / "launcher-pid").write_text(str(os.getpid()))
print("ranks are started", flush=True)
while None in [rank.poll() for rank in ranks]:
    if any(rank.returncode for rank in ranks):
        for rank in ranks:
            rank.terminate()
        for rank in ranks:
            try:
                rank.wait(30)
            except subprocess.TimeoutExpired:
                rank.kill()
        print("E1122 10:00:00.1 1 torch/distributed/elastic/multiprocessing/api.py:1000] failed (exitcode")
        for number, rank in enumerate(ranks):
            print(f"  rank      : {number} (local_rank: {number})")
            print(f"  exitcode  : {rank.returncode} (pid: {rank.pid})")
        sys.exit(1)
    time.sleep(0.1)
"""


def ranks(each: str = "", *, early: str = "", steps: int = 8, saves: int = 3, count: int = 2) -> str:
    """The launcher's script. each, early: lines of every rank, before each step and while it loads."""
    rank = RANK.replace("EACH", each.replace("\n", "\n    ") or "pass").replace("EARLY", early)
    for name, value in {"ROOT": repr(str(ROOT)), "STEPS": str(steps), "SAVES": str(saves)}.items():
        rank = rank.replace(name, value)
    return LAUNCHER.replace("RANKS", str(count)).replace("RANK", repr(rank.replace("RANKS", str(count))))


def bundle_of(folder: Path, script: str, **overrides: object) -> Bundle:
    """A bundle whose two commands are scripts."""
    return replace(
        render(plan(folder, "2xcpu", **overrides)),
        prepare=(sys.executable, "-c", PREPARED, "{run_dir}"),
        command=(sys.executable, "-c", script, "{run_dir}"),
    )


def started(
    folder: Path, script: str, echo: Callable[[str], None], limits: Limits | None = None, **overrides: object
) -> dict[str, Any]:
    """Run a script as launcher in `folder`/run; its result.json."""
    bundle = bundle_of(folder, script, **overrides)
    with written(bundle.files, folder / "run", resume=False) as lock:
        return execute(
            bundle, folder / "run", gpus=(), master_port=29517, resume=None, echo=echo, limits=limits,
            lock=lock,
        )  # fmt: skip


def marked(name: str, value: str) -> dict[int, str]:
    """Every living process that carries this variable -> its command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "environ").read_bytes().split(b"\0")
            if f"{name}={value}".encode() in words:
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")[:80]
        except OSError:
            continue
    return found


def main(folder: Path, settings: Mapping[str, Any]) -> None:
    """In a process of its own: errors become exit codes."""
    from launcher.errors import EffilaunchError
    from launcher.report import outcome

    start.LEAST_STOP_S = settings.get("stop_s", start.LEAST_STOP_S)
    start.WORKERS_LEAVE_S = settings.get("leave_s", start.WORKERS_LEAVE_S)

    def echo(line: str) -> None:
        if settings.get("broken") and line == "ranks are started":
            time.sleep(1)
            raise ValueError("our own code is wrong")
        outcome.echo(line)

    try:
        started(folder, settings["script"], echo, Limits(**{"leave": 0.3, **settings.get("limits", {})}))
    except EffilaunchError as error:
        outcome.echo(f"{error.problems[0].code}: {error}")
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
