"""Start a bundle's command on this machine, follow it, and tell how it truly ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from launcher.diagnose.findings import Finding
from launcher.diagnose.run_dir import LOST
from launcher.execute.build_locks import remove_stale_locks
from launcher.execute.converting import show_start
from launcher.execute.endings import STOPPED, interruption, was_stopped
from launcher.execute.environment import mend_environment
from launcher.execute.failed import (
    PREPARE_LOG,
    failures_while_stopping,
    find_known,
    run_failure,
    supervised_failure,
)
from launcher.execute.following import Ended, Start, follow
from launcher.execute.guard import WORKERS_LEAVE_S
from launcher.execute.run_dir import MARKER, record_bound, unwritable
from launcher.execute.shared_buffers import remove_shared_buffers
from launcher.execute.supervise import Limits, Watch
from launcher.facts.oom_kills import read_oom_kills
from launcher.plan.plan import Plan
from launcher.plan.stopping import slow_step_word
from launcher.recipe.env import resolve_env
from launcher.render.bundle import Bundle

RESUME = "EFFILAUNCH_RESUME"
"""Tells the workers which checkpoint they go on from."""
PREPARE_STOP_S = 10.0
"""The process that prepares data has nothing to save: what it wrote before stays."""
LEAST_STOP_S = 60.0
"""A step and a save, where the plan expects less."""
_TRY = "==== try "
"""Begins the line between two tries of a run in all its logs."""


def bind(bundle: Bundle, values: Mapping[str, str]) -> tuple[list[str], list[str], dict[str, str]]:
    """The bundle's two argvs (prepare, launch) and environment with the late values in place."""
    names = re.compile("{(" + "|".join(map(re.escape, values)) + ")}")

    def fill(text: str) -> str:  # in one pass: a folder may be called {devices}
        return names.sub(lambda found: values[found[1]], text)

    prepare, command = ([fill(word) for word in words] for words in (bundle.prepare, bundle.command))
    return prepare, command, {k: fill(v) for k, v in bundle.env.items()}


def prepare_data(
    bundle: Bundle, run_dir: Path, *, samples: int | None = None, echo: Callable[[str], None]
) -> None:
    """Prepare the data of a written run directory, in a process that ends before any rank starts.

    samples: how many of them data.json shall hold; None: as many as a run keeps. Raises as `execute`.
    """
    prepare, _, env = bind(bundle, {"run_dir": str(run_dir), "devices": "", "master_port": "0"})
    if samples is not None:
        prepare.append(str(samples))
    log = run_dir / "logs" / PREPARE_LOG
    full_env, _ = _mended(bundle, env)
    start = Start(
        prepare, full_env, log, echo, stop_s=PREPARE_STOP_S, orphaned_s=PREPARE_STOP_S, own_stderr=True
    )
    ended = follow(start)
    if ended.stopped_by is not None:
        again = "run the command again; what was prepared before stays in the cache"
        raise interruption(run_dir, ended, again=again)
    if ended.code != 0 or not (run_dir / "data.json").is_file():
        raise run_failure(run_dir, ended.code, log.name)


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """This process's environment under the plan's; references are resolved."""
    full = {**os.environ, **{k: resolve_env(v, os.environ) for k, v in env.items()}}
    # ninja and the launchers' children are looked up beside this interpreter.
    full["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), full.get("PATH", "")])
    return full


def _mended(bundle: Bundle, env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The whole environment of the workers, and what was changed in it."""
    full = _environment(env)
    added, notes = mend_environment(full, bundle.plan.value("trainer.report_to"))
    return {**full, **added}, notes


def execute(
    bundle: Bundle,
    run_dir: Path,
    *,
    devices: str,
    master_port: int,
    resume: str | None,
    echo: Callable[[str], None],
    prepare: bool = True,
    limits: Limits | None = None,
    lock: int | None = None,
) -> dict[str, Any]:
    """Run the bundle in `run_dir` (already written) and return result.json.

    `echo` gets each output line. The data is prepared first, in a process of its own; without `prepare` the
    run directory has its data.json already. lock: descriptor of the run directory's lock, where it is held.
    Raises MachineError (4) or RecipeError (2) where the run directory cannot be written before the start;
    RunFailed (5; KnownFailure where the workers met a failure of the registry), RecipeError (2) or
    MachineError (4) when a process found the recipe, its data or the machine at fault, Interrupted (130)
    after a signal that asks to stop. No process that it started outlives this call, whatever ends it.
    """
    bound = {"master_port": str(master_port), "run_dir": str(run_dir), "devices": devices}
    _, argv, env = bind(bundle, bound)
    try:
        _begin_try(run_dir, bound, argv, resume)
        show_start(bundle, run_dir, resume)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    full_env, notes = _mended(bundle, env)
    for note in notes:
        echo(note)
    if prepare:
        prepare_data(bundle, run_dir, echo=echo)
    for build_lock in remove_stale_locks(full_env):
        echo(f"removed {build_lock}: a killed build left it, and every later build would wait for it")
    full_env.pop(RESUME, None)  # one that the user's shell has from elsewhere
    if resume is not None:
        full_env[RESUME] = resume
    watch = _watch(bundle.plan, run_dir, limits or Limits())
    start = Start(
        argv, full_env, run_dir / "logs" / "launcher.log", echo,
        stop_s=max(LEAST_STOP_S, 2 * watch.save_s) + 5.0, orphaned_s=WORKERS_LEAVE_S,
        master_port=master_port, lock=lock, watch=watch, judge_step=partial(slow_step_word, bundle.plan),
    )  # fmt: skip
    return _outcome(run_dir, start)


def _outcome(run_dir: Path, start: Start) -> dict[str, Any]:
    """Run the ranks to their end; result.json, or the error that says how they ended."""
    known: Sequence[Finding] = ()

    def look_before_the_kill() -> None:
        nonlocal known
        known = find_known(run_dir)

    before = read_oom_kills()
    remove_shared_buffers(start.master_port)
    try:
        ended: Ended = follow(start, look_before_the_kill)
    finally:
        remove_shared_buffers(start.master_port)
    if (run_dir / MARKER).is_file():
        result: dict[str, Any] = json.loads((run_dir / "result.json").read_text("utf-8"))
        return result
    failed = failures_while_stopping(run_dir)
    if ended.stopped_by is not None or (not failed and was_stopped(run_dir, ended)):
        raise interruption(run_dir, ended, failed=failed)
    raise supervised_failure(run_dir, ended, before, known)


def _watch(plan: Plan, run_dir: Path, limits: Limits) -> Watch:
    """What to expect of the ranks."""
    known = "runtime.stop_seconds" in plan.settings
    expected = float(plan.value("runtime.stop_seconds")) if known else 0.0
    step = 0.0 if plan.time.seconds is None else plan.time.seconds[1]
    return Watch(run_dir, float(plan.value("launch.hang_factor")), expected, step, limits)


def _begin_try(run_dir: Path, bound: Mapping[str, str], argv: Sequence[str], resume: str | None) -> None:
    """Clear away what an earlier try said of itself, and tell in every log which try comes now."""
    logs = run_dir / "logs"
    number = _tries_in(logs / "launcher.log") + 1
    begins = f"from {Path(resume).name}" if resume else "from the start"
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for log in logs.glob("*.log"):
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as stream:
            stream.write(f"{_TRY}{number}, {moment}, {begins} ====\n")
    # Without these sizes an earlier try's errors would be taken for the ones of this.
    written = {log.name: log.stat().st_size for log in logs.glob("*.log")}
    record_bound(run_dir, {**bound, "command": list(argv), "log_bytes": written})
    stale = [
        run_dir / MARKER,
        run_dir / STOPPED,
        logs / LOST,
        *logs.glob("error-*.json"),
        *logs.glob("status-rank-*.json"),
    ]
    for path in stale:
        path.unlink(missing_ok=True)


def _tries_in(log: Path) -> int:
    """How often the ranks were started before: the first time leaves no line, only the log."""
    if not log.is_file():
        return 0
    with log.open(encoding="utf-8", errors="replace") as stream:
        return 1 + sum(line.startswith(_TRY) for line in stream)
