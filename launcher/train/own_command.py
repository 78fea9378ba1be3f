"""What a run of a user's own command does inside its processes (`effilaunch run -- COMMAND`).

The supervisor copies this file as effilaunch_rank.py into RUN_DIR/python, which is on PYTHONPATH of the
command (execute/own_command.py). Its environment may be another one than effilaunch's: the top of this file
imports the standard library alone. sitecustomize.py there calls `begin` in every Python process; a script
calls `callback` through effilaunch.py.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import hashlib
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import FrameType, TracebackType
from typing import Any, TextIO

RUN_DIR, RESUME, SUPERVISOR = "EFFILAUNCH_RUN_DIR", "EFFILAUNCH_RESUME", "EFFILAUNCH_SUPERVISOR"
SECRETS = "EFFILAUNCH_SECRETS"
"""Names of the variables whose values do not appear in logs."""
LOGGED = "EFFILAUNCH_LOGGED"
"""Set where the output of a rank goes to its log: its children do not open it again."""
PACKAGES = ("accelerate", "datasets", "deepspeed", "peft", "torch", "transformers", "trl")
"""Whose versions are recorded."""
SUPERVISOR_GONE = 255
AGREE_S, MOST_STEPS = 2.0, 64
"""The ranks agree whether to stop about so often, and at least after so many steps."""
WRITE_S = 0.5
KEPT_STEPS, LEAST_STEPS = 50, 3
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def started_at(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None where it does not exist."""
    try:
        rest = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if rest[0] in "ZXx" else int(rest[19])


# --- every Python process


def begin() -> None:
    """Prepare this process: its versions, its log where it is a rank, its calls and its errors.

    A rank is known by RANK and WORLD_SIZE, which launchers set.
    """
    run_dir = Path(os.environ.get(RUN_DIR, ""))
    with contextlib.suppress(Exception):  # what goes wrong here must not keep a command from running
        _record_versions(run_dir / "logs" / "versions.json")
        rank = os.environ.get("RANK", "")
        if rank.isdigit() and os.environ.get("WORLD_SIZE", "").isdigit() and LOGGED not in os.environ:
            os.environ[LOGGED] = rank
            _keep_log(run_dir, int(rank), shows=rank == "0")
    _run_hidden_sitecustomize()


def _record_versions(path: Path) -> None:
    """Write the versions of this environment, once in each attempt."""
    with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as stream:
        from importlib import metadata

        found = {"python": sys.version.split()[0], "interpreter": sys.executable}
        for name in PACKAGES:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
        stream.write(json.dumps(found))


def _run_hidden_sitecustomize() -> None:
    """Run the sitecustomize of this environment, which the one beside this file hides."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _keep_log(run_dir: Path, rank: int, *, shows: bool) -> None:
    """Send what Python prints here to logs/rank-N.log, also to the terminal with `shows`."""
    log = (run_dir / "logs" / f"rank-{rank}.log").open("a", buffering=1, encoding="utf-8", errors="replace")
    hide = _hider()
    tees: list[Any] = [_Tee(stream, log, hide, shows=shows) for stream in (sys.stdout, sys.stderr)]
    sys.stdout, sys.stderr = tees
    _write_calls_and_errors(run_dir, rank, log)


def _write_calls_and_errors(run_dir: Path, rank: int, log: TextIO) -> None:
    """SIGUSR2 writes the calls of this process to its log; an uncaught error, a report."""
    faulthandler.register(signal.SIGUSR2, file=log, all_threads=True)
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            _write_error(run_dir, rank, error)
        _leave(1)
        before(kind, error, trace)

    sys.excepthook = report


def _write_error(run_dir: Path, rank: int, error: BaseException) -> None:
    hide = _hider()
    found = {
        "type": type(error).__name__,
        "message": hide(str(error)),
        "traceback": hide("".join(traceback.format_exception(error))),
        "rank": rank,
        "time": time.time(),
        "exit_code": 1,
        "problems": [],
    }
    write_text(run_dir / "logs" / f"error-rank-{rank}.json", json.dumps(found))


def _hider() -> Callable[[str], str]:
    """Removes the values of the variables that the supervisor names."""
    values = {os.environ.get(name, "") for name in os.environ.get(SECRETS, "").split(",")}
    lines = {
        line for value in values if not value.isdigit() and value[:1] != "/" for line in value.split("\n")
    }
    known = "|".join(re.escape(line) for line in sorted(lines, key=len, reverse=True) if len(line) >= 8)
    return (lambda text: re.sub(known, "<secret>", text)) if known else str


class _Tee:
    """A text stream whose text goes to a log, and with `shows` to the stream as well."""

    def __init__(self, stream: TextIO, log: TextIO, hide: Callable[[str], str], *, shows: bool) -> None:
        self._stream, self._hide = stream, hide
        self._all = [log, stream] if shows else [log]

    def write(self, text: str) -> int:
        """Ignore errors: a full disk does not end the run."""
        shown = self._hide(text)
        for stream in self._all:
            with contextlib.suppress(OSError, ValueError):
                stream.write(shown)
        return len(text)

    def flush(self) -> None:
        for stream in self._all:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# --- a rank with the callback


class _Status:
    """logs/status-rank-N.json while the Trainer trains, for files/rank_status.py; a thread writes it."""

    def __init__(self, run_dir: Path, rank: int, begun: int, steps: int, memory: Callable[[], int]) -> None:
        self._file = run_dir / "logs" / f"status-rank-{rank}.json"
        self._fixed = {
            "rank": rank, "host": socket.gethostname(), "pid": os.getpid(),
            "started": started_at(os.getpid()) or 0, "begun": begun, "steps": steps,
        }  # fmt: skip
        self._memory, self._seconds = memory, deque[float](maxlen=KEPT_STEPS)
        self._phase, self._step, self._code = "train", begun, -1
        self._since, self._begun = time.time(), time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._changed = True
        self.write()
        threading.Thread(target=self._keep, name="effilaunch-status", daemon=True).start()

    def enter(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self.moved()

    def moved(self) -> None:
        self._since, self._begun, self._changed = time.time(), time.monotonic(), True

    def step_ended(self, step: int) -> None:
        self._seconds.append(time.monotonic() - self._begun)
        self._step = step
        self.moved()

    @property
    def median(self) -> float | None:
        seconds = list(self._seconds)
        return median(seconds) if len(seconds) >= LEAST_STEPS else None

    def write(self) -> None:
        """Write it now, if it has changed; a status that cannot be written is skipped."""
        with self._lock, contextlib.suppress(OSError):
            if not self._changed:
                return
            self._changed = False
            values = {
                **self._fixed, "phase": self._phase, "step": self._step, "since": self._since,
                "median": self.median, "code": None if self._code < 0 else self._code,
                "memory": self._memory(),
            }  # fmt: skip
            write_text(self._file, json.dumps(values) + "\n")

    def end(self, code: int) -> None:
        """The process ends with an error."""
        self._phase, self._code, self._changed = "ended", code, True
        self.write()
        self._over.set()

    def remove(self) -> None:
        """The Trainer no longer trains here: what the script does now has no steps."""
        self._over.set()
        with self._lock, contextlib.suppress(OSError):
            self._changed = False
            self._file.unlink(missing_ok=True)

    def _keep(self) -> None:
        while not self._over.wait(WRITE_S):
            self.write()


class _Stop:
    """The first signal that asked this process to stop while it trains."""

    def __init__(self) -> None:
        self.number, self._at = 0, 0.0
        self._before: dict[int, Any] = {}
        self._supervisor = _read_supervisor(os.environ.get(SUPERVISOR, ""))
        self._looked = time.monotonic()

    def watch(self) -> None:
        """Note signals from now on. They must come to the main thread."""
        if threading.current_thread() is threading.main_thread() and not self._before:
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def unwatch(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            if number == signal.SIGINT:
                signal.default_int_handler(number, frame)
            return
        self.ask(number)

    def ask(self, number: int) -> None:
        self.number, self._at = number, time.monotonic()

    def look(self) -> None:
        """Ask to stop where the supervisor is gone; it is looked for every two seconds."""
        if self._supervisor is None or self.number or time.monotonic() - self._looked < AGREE_S:
            return
        self._looked = time.monotonic()
        if started_at(self._supervisor[0]) != self._supervisor[1]:
            self.ask(SUPERVISOR_GONE)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._at if self.number else 0.0

    @property
    def cause(self) -> str | None:
        return None if self.number == SUPERVISOR_GONE else signal.Signals(self.number).name


def _read_supervisor(text: str) -> tuple[int, int] | None:
    """(pid, start ticks) in `HOST:PID:TICKS`; None where it runs on another node."""
    host, _, rest = text.partition(":")
    pid, _, ticks = rest.partition(":")
    is_here = host == socket.gethostname() and pid.isdigit() and ticks.isdigit()
    return (int(pid), int(ticks)) if is_here else None


_running: _Callback | None = None
"""The callback whose Trainer trains now."""


def _leave(code: int = 0) -> None:
    """The process ends while its Trainer trains: with an error, else as its exit status will tell."""
    global _running
    if _running is not None:
        _running.status.end(code) if code else _running.status.remove()
    _running = None


def callback() -> Any:
    """The callback of the Trainer in a run of `effilaunch run -- COMMAND`."""
    from transformers import Trainer, TrainerCallback

    _resume_trainers(Trainer)
    kind = type("EffilaunchCallback", (_Callback, TrainerCallback), {})
    return kind(Path(os.environ[RUN_DIR]))


def _resume_trainers(trainer: Any) -> None:
    """Let `train()` of Trainers with the callback resume the checkpoint of EFFILAUNCH_RESUME, once."""
    original = trainer.train
    if getattr(original, "of_effilaunch", False):
        return

    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **named: Any) -> Any:
        if any(isinstance(one, _Callback) for one in self.callback_handler.callbacks):
            resume_from_checkpoint = _checkpoint_for(self.args, resume_from_checkpoint)
        return original(self, resume_from_checkpoint, *args, **named)

    train.of_effilaunch = True  # type: ignore[attr-defined]
    trainer.train = train


def _checkpoint_for(args: Any, asked: Any) -> Any:
    """What `train()` resumes: what the script asks for, else the run's checkpoint if it is its own."""
    ours = _of_rank_0(os.environ.pop(RESUME, ""))
    if not ours:
        return asked
    checkpoint = Path(ours).resolve()
    if asked:
        why = f"the script resumes from {asked} itself"
    elif checkpoint.parent != Path(args.output_dir).resolve():
        why = f"this Trainer writes to another folder, {args.output_dir}"
    else:
        _say(args, f"resumes from {checkpoint}")
        return str(checkpoint)
    _say(args, f"WARNING: does not resume from {checkpoint}: {why}")
    return asked


def _of_rank_0(value: str) -> str:
    """The value that rank 0 has: the run directory of its node has the checkpoints."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return value
    found = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _say(args: Any, text: str) -> None:
    if args.process_index == 0:
        print(f"effilaunch: {text}", flush=True)


class _Callback:
    """Status, metrics, one stop for all ranks, and a record of each complete checkpoint."""

    status: _Status

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._stop = _Stop()
        self._group: Any = None
        self._distributed = False
        self._rank = 0
        self._left = self._between = 0
        """Steps until the next agreement, and between two."""
        self._slowest, self._last_end = 0.0, 0.0
        self._hashing: threading.Thread | None = None
        self._stopped = False
        self._elapsed = 0.0
        self._began = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        import torch.distributed as dist

        global _running
        self._rank, self._stopped = int(args.process_index), False
        self._distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if self._distributed and self._group is None:
            self._group = dist.new_group(backend="gloo")  # on the CPU: no rank waits for its device's queue
        if self._rank == 0:
            self._forget_after(state.global_step)
        if state.global_step >= state.max_steps:
            control.should_training_stop = True
        if LOGGED not in os.environ:  # the only process, which no launcher calls a rank
            os.environ[LOGGED] = str(self._rank)
            _keep_log(self._run_dir, self._rank, shows=True)
        self._stop.watch()
        self._began, self._last_end = time.monotonic(), 0.0
        atexit.register(_leave)
        self.status = _Status(self._run_dir, self._rank, state.global_step, state.max_steps, _memory)
        _running = self

    def _forget_after(self, step: int) -> None:
        """Remove rows and links to checkpoints after a step: they are written again."""
        path, links = self._run_dir / "metrics.jsonl", self._run_dir / "checkpoints"
        with contextlib.suppress(OSError):
            for link in links.glob("checkpoint-*"):
                if link.is_symlink() and int(link.name.rpartition("-")[2]) > step:
                    link.unlink()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            if kept != lines:
                write_text(path, "".join(kept))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.status.enter("train")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.status.step_ended(state.global_step)
        if not control.should_training_stop and self._asked():
            self._stopped = control.should_training_stop = True
            control.should_log = control.should_save = True
            control.should_evaluate = False
        if control.should_save:
            self.status.enter("save")
        elif state.global_step >= state.max_steps:
            self.status.enter("finish")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._stopped:  # the checkpoint is saved
            control.should_save = control.should_evaluate = False
        if control.should_save:
            self.status.enter("save")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if _running is self:
            self.status.enter("evaluate")
            self.status.moved()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        is_row = logs and ("loss" in logs or any(name.startswith("eval_") for name in logs))
        if self._rank != 0 or not is_row or _running is not self:
            return
        numbers = {
            name: _finite(value)
            for name, value in logs.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "epoch"
        }
        with contextlib.suppress(OSError), (self._run_dir / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": state.global_step, **numbers, "memory": _memory()}) + "\n")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._distributed:
            import torch.distributed as dist

            dist.barrier(group=self._group)  # every rank has written its part
        if self._rank == 0:
            self._await_hashes()
            folder = Path(args.output_dir).resolve() / f"checkpoint-{state.global_step}"
            took = time.monotonic() - self.status._begun
            arguments = (folder, state.global_step, int(args.world_size), took)
            self._hashing = threading.Thread(target=self._record, args=arguments, name="effilaunch-hash")
            self._hashing.start()
        self.status.enter("finish" if control.should_training_stop else "train")

    def _record(self, folder: Path, step: int, ranks: int, seconds: float) -> None:
        """Write the manifest of a complete checkpoint, for files/checkpoint.py, and the run's link to it.

        A checkpoint that is removed meanwhile gets none.
        """
        with contextlib.suppress(OSError):
            files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
            files.pop("manifest.json", None)
            sizes = {name: path.stat().st_size for name, path in files.items()}
            facts = {name: {"bytes": sizes[name], "sha256": _sha256(path)} for name, path in files.items()}
            manifest = {
                "schema_version": 1, "step": step, "world_size": ranks, "files": facts,
                "bytes": sum(sizes.values()), "seconds": seconds,
                "data": None, "versions": {}, "elapsed": time.monotonic() - self._began,
            }  # fmt: skip
            write_text(folder / "manifest.json", json.dumps(manifest))
            link = self._run_dir / "checkpoints" / folder.name
            if link.is_symlink():
                link.unlink()
            link.symlink_to(folder)

    def _await_hashes(self) -> None:
        if self._hashing is not None:
            self._hashing.join()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        global _running
        self._await_hashes()
        _running = None
        if self._rank == 0 or os.environ.get("LOCAL_RANK") == "0":  # for the supervisor of each node
            name = "stopped.json" if self._stopped else "logs/trained.json"
            found = self._stop_record(state.global_step) if self._stopped else self._result(args, state)
            write_text(self._run_dir / name, json.dumps(found) + "\n")
        self.status.remove()
        self._stop.unwatch()
        if self._stopped:
            _say(args, f"stopped after step {state.global_step}; the script ends here")
            raise SystemExit(0)  # what follows `train()` in the script would take a part for the whole

    def _stop_record(self, step: int) -> dict[str, Any]:
        name = f"checkpoint-{step}"
        has_it = (self._run_dir / "checkpoints" / name / "manifest.json").is_file()
        cause = self._stop.cause
        reason = f"{cause or 'the supervising process is gone'}: all ranks stopped at the end of step {step}"
        return {
            "signal": cause, "step": step, "checkpoint": name if has_it else None,
            "seconds": round(self._stop.seconds, 3), "reason": reason,
        }  # fmt: skip

    def _result(self, args: Any, state: Any) -> dict[str, Any]:
        return {
            "steps": state.global_step, "processes": int(args.world_size),
            "tokens": state.num_input_tokens_seen or None,
            "train_seconds": round(time.monotonic() - self._began, 3),
        }  # fmt: skip

    def _asked(self) -> bool:
        """Whether any rank was asked to stop; all ranks ask at the same steps.

        As launcher/train/agreement.py: each agreement fixes the step of the next one, from the slowest rank's
        step, since ranks that asked their own clocks would wait for each other for ever.
        """
        now = time.monotonic()
        if self._last_end:
            self._slowest = max(self._slowest, now - self._last_end)
        self._last_end = now
        if not self._distributed:
            self._stop.look()
            return self._stop.number != 0
        self._left -= 1
        if self._left > 0:
            return False
        import torch
        import torch.distributed as dist

        self._stop.look()
        latest = torch.tensor([self._stop.number, int(self._slowest * 1e6)])
        dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=self._group)
        number, slowest = latest.tolist()
        fitting = int(AGREE_S * 1e6 / slowest) if slowest else MOST_STEPS
        self._left = self._between = max(1, min(2 * self._between, fitting, MOST_STEPS))
        self._slowest, self._last_end = 0.0, time.monotonic()
        if number and not self._stop.number:
            self._stop.ask(number)
        return bool(number)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for piece in _pieces(stream):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(stream: Any) -> Iterator[bytes]:
    return iter(lambda: stream.read(1 << 20), b"")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _memory() -> int:
    """Peak bytes so far: of the device on CUDA, else of this process."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
