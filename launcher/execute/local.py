"""Start a bundle's command on this machine, follow it, and tell how it truly ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import IO, Any

from launcher.errors import Interrupted, Problem
from launcher.execute.build_locks import remove_stale_locks
from launcher.execute.environment import mend_environment
from launcher.execute.failed import PREPARE_LOG, run_failure
from launcher.execute.run_dir import MARKER, record_bound
from launcher.execute.shared_buffers import remove_shared_buffers
from launcher.recipe.env import resolve_env
from launcher.render.bundle import Bundle

GRACE_S = 35.0
"""DeepSpeed's launcher and torchrun kill their workers 30 s after SIGTERM; ours waits a little longer."""

KILL_S = 2.0
"""A killed process is gone at once, unless it hangs in the kernel; nothing can be done about that one."""


def bind(bundle: Bundle, values: Mapping[str, str]) -> tuple[list[str], list[str], dict[str, str]]:
    """The bundle's two argvs (prepare, launch) and environment with the late values in place."""

    def fill(text: str) -> str:
        for name, value in values.items():
            text = text.replace("{" + name + "}", value)
        return text

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
    again = "run the command again; what was prepared before stays in the cache"
    full_env, _ = _mended(bundle, env)
    code = _follow(prepare, full_env, log, echo, own_stderr=True, again=again)
    if code != 0 or not (run_dir / "data.json").is_file():
        raise run_failure(run_dir, code, log.name)


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
) -> dict[str, Any]:
    """Run the bundle in `run_dir` (already written) and return result.json.

    `echo` gets each output line. The data is prepared first, in a process of its own; without `prepare` the
    run directory has its data.json already. Raises RunFailed (5; KnownFailure where the workers met a failure
    of the registry), RecipeError (2) or MachineError (4) when a process found the recipe, its data or the
    machine at fault, Interrupted (130) after SIGINT or SIGTERM. No process of the group outlives this call.
    """
    bound = {"master_port": str(master_port), "run_dir": str(run_dir), "devices": devices}
    _, argv, env = bind(bundle, bound)
    written = {log.name: log.stat().st_size for log in (run_dir / "logs").glob("*.log")}
    record_bound(run_dir, {**bound, "command": argv, "log_bytes": written})
    (run_dir / MARKER).unlink(missing_ok=True)
    for stale in (run_dir / "logs").glob("error-*.json"):
        stale.unlink()
    full_env, notes = _mended(bundle, env)
    for note in notes:
        echo(note)
    if prepare:
        prepare_data(bundle, run_dir, echo=echo)
    for lock in remove_stale_locks(full_env):
        echo(f"removed {lock}: a killed build left it, and every later build would wait for it")
    if resume is not None:
        full_env["EFFILAUNCH_RESUME"] = resume
    remove_shared_buffers(master_port)
    try:
        code = _follow(argv, full_env, run_dir / "logs" / "launcher.log", echo)
    finally:
        remove_shared_buffers(master_port)
    if (run_dir / MARKER).is_file():
        result: dict[str, Any] = json.loads((run_dir / "result.json").read_text("utf-8"))
        return result
    raise run_failure(run_dir, code, "launcher.log")


def _follow(
    argv: list[str],
    env: dict[str, str],
    log: Path,
    echo: Callable[[str], None],
    *,
    own_stderr: bool = False,
    again: str = "continue it with --resume auto",
) -> int:
    """Start `argv` in a session of its own, copy its output, empty the group, return its exit code.

    own_stderr: in a terminal the process writes its stderr there itself, so that its bars can move.
    again: what an interrupted user may do next.
    """
    caught: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        _signal_group(process.pid, signal.SIGTERM)

    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if own_stderr and sys.stderr.isatty() else subprocess.STDOUT,
            start_new_session=True,
        )
        old = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            assert process.stdout is not None, "stdout is a pipe"
            _copy_lines(process.stdout, file, echo)
            code = process.wait()
            _empty_group(process.pid, GRACE_S if caught else 5.0)
        finally:
            _empty_group(process.pid, 0.0)
            if process.stdout is not None:
                process.stdout.close()
            for number, handler in old.items():
                signal.signal(number, handler)
    if caught:
        message = f"{signal.Signals(caught[0]).name}: the run was stopped"
        raise Interrupted(Problem("interrupted", message, file=str(log.parent.parent), hint=again))
    return code


def _copy_lines(stream: IO[bytes], log: IO[str], echo: Callable[[str], None]) -> None:
    for raw in stream:
        # A progress bar redraws itself after each \r; what it showed last is what is kept.
        line = raw.decode("utf-8", errors="replace").rstrip("\r\n").rpartition("\r")[2]
        log.write(line + "\n")
        log.flush()
        echo(line)


def _signal_group(group: int, number: int) -> bool:
    """Signal a process group; False when nobody is left in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _empty_group(group: int, wait_s: float) -> None:
    """Wait for the group to empty, then kill what is left: no orphan survives."""
    _wait_until_empty(group, wait_s)
    if _signal_group(group, signal.SIGKILL):
        _wait_until_empty(group, KILL_S)


def _wait_until_empty(group: int, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and _signal_group(group, 0):
        time.sleep(0.05)
