"""Run a user's own command under the supervisor: its files, its attempts and its result.

Nothing is planned: plan.json has the command and the settings of `launch`. RUN_DIR/python is on PYTHONPATH of
the command, with effilaunch.py (the line of the script) and what it does in the processes
(launcher/train/own_command.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, Interrupted, Problem, RecipeError, RunFailed
from launcher.execute.activity import RUN_DIR, Activity
from launcher.execute.attempts import FIRST_PAUSE_S, Begun, Restarts
from launcher.execute.binding import RESUME
from launcher.execute.endings import (
    LAUNCHER_LOG,
    failures_while_stopping,
    find_known,
    interruption,
    killed_pids,
    supervised_failure,
    was_stopped,
)
from launcher.execute.following import Ended, Look, Start, follow
from launcher.execute.logged import read_logged
from launcher.execute.processes import WORKERS_LEAVE_S
from launcher.execute.run_dir import MARKER, locked, read_stopped, unwritable
from launcher.execute.start import begin_attempt
from launcher.execute.supervise import Limits, Watch
from launcher.files.checkpoint import complete_checkpoints
from launcher.files.redaction import SECRET, hider, secret_values
from launcher.files.safe_files import read_json, write_json, write_text
from launcher.files.secrets import GIVEN, is_secret_name
from launcher.knowledge.diagnose.findings import Finding
from launcher.machine.gpus import Gpu
from launcher.machine.probe import read_oom_kills
from launcher.plan.stored import OWN_COMMAND
from launcher.recipe.env import has_reference, resolve_env
from launcher.recipe.schema import LaunchSection
from launcher.render.bundle import dump_json

PYTHON = "python"
"""Folder in RUN_DIR that is on PYTHONPATH of the command."""
TRAINED, VERSIONS = "trained.json", "versions.json"
"""In logs/: what rank 0 trained, and the environment of the command; its processes write them."""
STOP_S = 600.0
"""A stop may take so long where the ranks do not tell how long their steps take; a second Ctrl-C ends it."""
LEAVE_S = 30.0
"""After the command has ended: what it started may finish, such as an upload."""
LEFT = "command-left-processes"
_SITE = """\
# Written by effilaunch: runs in each Python process of this run, then the sitecustomize that it hides.
import effilaunch_rank
effilaunch_rank.begin()
"""
_UNSEEN = (
    "no Python process of the command was seen: did it start a container or another machine, whose processes "
    "are not supervised, or train at all?"
)
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class OwnCommand:
    """What is supervised in place of a plan."""

    words: tuple[str, ...]
    program: str
    """The file of the first word."""
    launch: LaunchSection

    @property
    def name(self) -> str:
        """`train.py`, or the program where no word is a script."""
        script = next((Path(word).name for word in self.words if word.endswith(".py")), None)
        return script or Path(self.words[0]).name

    @property
    def shown(self) -> list[str]:
        """The words without secrets."""
        hide, found = hider(secret_values(os.environ)), list[str]()
        for before, word in zip(("", *self.words), self.words, strict=False):
            text = hide(word)
            if (
                before.startswith("-")
                and "=" not in before
                and hide(f"{before}={word}") != f"{before}={word}"
            ):
                text = SECRET
            found.append(text)
        return found


def own_command(words: Sequence[str], launch: LaunchSection) -> OwnCommand:
    """The command. RecipeError (2) where there is none, or its program is not found."""
    if not words:
        hint = "write it behind `--`, such as `effilaunch run -- torchrun --nproc-per-node 2 train.py`"
        raise RecipeError(Problem("usage", "no command follows `--`", hint=hint))
    if Path(words[0]).name == "effilaunch":
        hint = "leave out `--`: `effilaunch run RECIPE`"
        raise RecipeError(Problem("usage", "effilaunch does not supervise itself", hint=hint))
    program = shutil.which(words[0])
    if program is None:
        path = Path(words[0])
        if path.is_file():
            message = f"{words[0]} is a file that cannot be executed"
            hint = f"did you mean `-- python {words[0]}`?" if path.suffix == ".py" else "`chmod +x` it"
        else:
            message = f"the command {words[0]!r} is not found on PATH"
            hint = "such as torchrun, accelerate, deepspeed or python; is its environment active?"
        raise RecipeError(Problem("command-missing", message, hint=hint))
    return OwnCommand(tuple(words), program, launch)


def files_of(command: OwnCommand, gpus: Sequence[Gpu]) -> dict[str, str]:
    """The files of its run directory."""
    launch = command.launch
    settings = {
        f"launch.{name}": {
            "value": getattr(launch, name),
            "source": "recipe" if name in launch.model_fields_set else "default",
            "by": "",
            "reason": "",
        }
        for name in ("max_restarts", "hang_factor")
    }
    hardware = {
        "num_nodes": 1,
        "devices_per_node": len(gpus) or 1,
        "device": gpus[0].device if gpus else "cpu",
    }
    plan: Mapping[str, Any] = {
        "kind": OWN_COMMAND, "recipe": command.name, "command": command.shown, "settings": settings,
        "hardware": hardware, "env": dict(launch.env),
    }  # fmt: skip
    return {"plan.json": dump_json(plan), "environment.json": dump_json({})}


def run_own(
    command: OwnCommand,
    run_dir: Path,
    *,
    gpus: Sequence[Gpu],
    resume: str | None,
    say: Callable[[str], None],
    looking: Callable[[None], Look],
) -> dict[str, Any]:
    """Run the command in a written run directory, with its restarts; result.json.

    resume: the checkpoint that a Trainer with the callback resumes. Raises RunFailed (5), Interrupted (130),
    and RecipeError or MachineError where the run directory cannot be written or is in use.
    """
    with locked(run_dir) as lock:
        restarts = Restarts(Begun(run_dir, resume), command.launch.max_restarts, say, FIRST_PAUSE_S)
        while True:
            try:
                attempt = _Attempt(command, run_dir, gpus, resume, say, Limits(leave=LEAVE_S), lock)
                result = attempt.run(looking(None))
            except RunFailed as failure:
                resume = restarts.next(failure)
            else:
                return restarts.recorded(result, {})


@dataclass(slots=True)
class _Attempt:
    """One start of the command."""

    command: OwnCommand
    run_dir: Path
    gpus: Sequence[Gpu]
    resume: str | None
    say: Callable[[str], None]
    limits: Limits
    lock: int

    def run(self, look: Look) -> dict[str, Any]:
        """Follow the command to its end; result.json. Raises as `run_own`."""
        logs, began = self.run_dir / "logs", time.monotonic()
        env = self._environment()
        activity = Activity(self.run_dir, [gpu.uuid for gpu in self.gpus])
        watch = Watch(self.run_dir, self.command.launch.hang_factor, limits=self.limits)
        watch.unreported = activity.ranks
        start = Start(
            [self.command.program, *self.command.words[1:]], env, logs / LAUNCHER_LOG, self.say,
            stop_s=STOP_S, orphaned_s=WORKERS_LEAVE_S, lock=self.lock, watch=watch,
            passes_on=(signal.SIGINT,), look=look,
        )  # fmt: skip
        try:
            self._write_files()
        except OSError as error:
            raise unwritable(self.run_dir, error) from error
        known, before = list[Finding](), read_oom_kills()
        ended = follow(start, lambda: known.extend(find_known(self.run_dir)))

        def cause() -> EffilaunchError:
            if not watch.lost:  # of ranks without a status only their launcher tells how they ended
                pids = killed_pids(self.run_dir)
                watch.lost = {rank: one for rank, one in activity.seen.items() if one.pid in pids}
            return supervised_failure(self.run_dir, ended, before, known)

        failure = self._failure(ended, cause)
        return self._result(ended, failure, activity.world_size, time.monotonic() - began)

    def _environment(self) -> dict[str, str]:
        given = self.command.launch.env
        env = {**os.environ, **{name: resolve_env(value, os.environ) for name, value in given.items()}}
        env.pop(RESUME, None)
        if self.resume is not None:
            env[RESUME] = self.resume
        references = {name for name, value in given.items() if has_reference(value)}
        # By name: the processes judge no name themselves, and a value belongs on no disk.
        env[GIVEN] = ",".join(sorted(references | {name for name in env if is_secret_name(name)}))
        path = [str(self.run_dir / PYTHON), *filter(None, [env.get("PYTHONPATH")])]
        return {**env, RUN_DIR: str(self.run_dir), "PYTHONPATH": os.pathsep.join(path)}

    def _write_files(self) -> None:
        """Begin the attempt in the run directory."""
        folder = self.run_dir / PYTHON
        folder.mkdir(exist_ok=True)
        sources = {"effilaunch.py": _PACKAGE.parent / "effilaunch.py",
                   "effilaunch_rank.py": _PACKAGE / "train" / "own_command.py"}  # fmt: skip
        for name, source in sources.items():
            write_text(folder / name, source.read_text("utf-8"))
        write_text(folder / "sitecustomize.py", _SITE)
        for name in (TRAINED, VERSIONS):
            (self.run_dir / "logs" / name).unlink(missing_ok=True)
        begin_attempt(self.run_dir, {"command": self.command.shown, "cwd": str(Path.cwd())}, self.resume)

    def _failure(self, ended: Ended, cause: Callable[[], EffilaunchError]) -> EffilaunchError | None:
        """The error of how it ended; None where it finished."""
        failed = failures_while_stopping(self.run_dir, ended.reports)
        if ended.stopped_by is not None or (not failed and was_stopped(self.run_dir, ended)):
            if read_stopped(self.run_dir) or complete_checkpoints(self.run_dir / "checkpoints"):
                return interruption(self.run_dir, ended, failed=failed)
            again = "start it again; whether it resumes is its own matter"
            return interruption(self.run_dir, ended, failed=failed, again=again)
        if ended.code == 0 and ended.hang is None and not ended.killed and not failed:
            return self._left(ended.left) if ended.left else None
        return cause()

    def _left(self, left: Sequence[str]) -> RunFailed:
        """The error of a command that went to the background."""
        message = (
            f"the command has ended, but processes that it started still ran {self.limits.leave:.0f} s later "
            f"and were ended: {'; '.join(left[:3])}"
        )
        hint = "start what trains in the foreground, without `&`, nohup, setsid or an option that detaches it"
        return RunFailed(Problem(LEFT, message, file=str(self.run_dir / "logs" / LAUNCHER_LOG), hint=hint))

    def _result(
        self, ended: Ended, failure: EffilaunchError | None, ranks: int, seconds: float
    ) -> dict[str, Any]:
        """Write result.json, and the marker of a finished run; raises the error."""
        logs = self.run_dir / "logs"
        states = {0: "finished", Interrupted.exit_code: "stopped"}
        status = states.get(0 if failure is None else failure.exit_code, "failed")
        rows = [row["loss"] for row in read_logged(self.run_dir / "metrics.jsonl").rows if "loss" in row]
        result: dict[str, Any] = {
            "schema_version": 1, "status": status, "exit_code": ended.code, "seconds": round(seconds, 3),
            **({"processes": ranks} if ranks else {}),
            **({"loss": {"first": rows[0], "last": rows[-1]}} if rows else {}),
            **_read(logs / TRAINED),
        }  # fmt: skip
        versions = _read(logs / VERSIONS)
        try:
            write_json(self.run_dir / "result.json", result)
            known = _read(self.run_dir / "environment.json")
            write_json(self.run_dir / "environment.json", {**known, **versions})
            if failure is None:
                (self.run_dir / MARKER).touch()
        except OSError as full:
            self.say(f"{self.run_dir / 'result.json'} cannot be written ({full.strerror})")
        if failure is not None:
            raise failure
        if not versions:
            self.say(f"WARNING: {_UNSEEN}")
        return result


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
