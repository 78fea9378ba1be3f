"""Processes as forks of one that has imported the training stack: hundreds of starts in a test, not ten.

A start of torch, transformers and DeepSpeed takes most of ten seconds; a fork of a process that has them
takes none of it. The forking process computes nothing itself, so that no thread of torch's is lost by the
fork: a test asks for `threads`.

`Forks.run` starts ranks of a run directory that lies ready. `Forks.python` is an interpreter for everything
else (`warm_python.py`): what it runs is a fork, and it stands in for the launchers of several ranks. With it
as `sys.executable`, `effilaunch run` is the real one but for the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from patience import Deadline, patience
from warm_python import Started

import launcher

RANKS = tuple(f"launcher.train.{name}" for name in ("worker", "prepare", "rehearsal.run"))
"""Modules that take their arguments, and that are imported here already."""
KILL = "TEST_KILL_AFTER"
"""The variable with the step after which a rank with `KILL_HOOKS` kills itself."""
KILL_HOOKS = f"""
import os
import signal

from transformers import TrainerCallback


class Kill(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if os.environ.get("{KILL}") == str(state.global_step):
            os.kill(os.getpid(), signal.SIGKILL)


def callbacks():
    return [Kill()]
"""
ROOM, ROOM_BYTES = "TEST_ROOM", 100_000
"""A variable that only takes room in the forking process's environment: a fork writes its own over it."""
GRACE_S = 2.0
"""How long the others may live on when one rank has failed, as a launcher would see to."""
HEAVY = (
    "torch", "torch.distributed", "torch.distributed.fsdp", "datasets", "accelerate", "peft", "deepspeed",
    "transformers.trainer", "transformers.models.llama.modeling_llama", "transformers.integrations.deepspeed",
    "torch.utils.cpp_extension", "deepspeed.ops.op_builder.all_ops", "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    *(
        module.name
        for folder in ("", ".data", ".model", ".checkpoint")
        for module in pkgutil.iter_modules(
            [str(Path(launcher.__file__).parent / "train" / folder.strip("."))], f"launcher.train{folder}."
        )
        if not module.ispkg and module.name not in ("launcher.train.loopback", "launcher.train.machine")
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ended:
    """How the ranks of one start ended."""

    codes: tuple[int, ...]
    """Exit codes by rank; negative: the signal."""
    seconds: float
    said: str
    """The last lines of all ranks."""


class Forks:
    """The process that forks. A context manager; `run` starts ranks and waits for them."""

    def __init__(self, environ: Mapping[str, str], folder: Path) -> None:
        """environ: what every rank gets beneath its own variables. folder: for socket and interpreter."""
        root = Path(__file__).resolve().parents[1]
        paths = (root, root / "tests", root / "tests" / "contract")
        self.environ = {**environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        self.socket = str(folder / "forks")
        self._server = subprocess.Popen(
            [sys.executable, __file__, self.socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**self.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), ROOM: "x" * ROOM_BYTES},
        )  # fmt: skip
        assert self._server.stdout is not None
        self.pid = self._server.pid
        self.threads: list[str] = json.loads(self._server.stdout.readline())
        """Names of the forking process's threads, but for its own and for the one of Arrow's memory pool,
        which knows forks (jemalloc's own handlers)."""
        self.python = folder / "bin" / "python"
        self.python.parent.mkdir()
        script = Path(__file__).with_name("warm_python.py").read_text(encoding="utf-8")
        script = script.replace('SERVER = ""', f"SERVER = {self.socket!r}")
        self.python.write_text(
            f"#!{sys.executable} -SE\n" + script.replace('PYTHON = ""', f"PYTHON = {sys.executable!r}")
        )
        self.python.chmod(0o755)

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        # Closing alone would not do: a process that a test forked meanwhile holds the pipe open too.
        self._server.stdin.write("\n")
        self._server.stdin.close()
        self._server.wait(patience(60))
        self._server.stdout.close()

    def as_interpreter(self) -> contextlib.AbstractContextManager[Any]:
        """Within, `sys.executable` of this process is the interpreter whose programs are forks."""
        return mock.patch.object(sys, "executable", str(self.python))

    def load(self, *modules: str) -> None:
        """Import modules in the forking process too: every fork after this has them."""
        asked = Started([], {}, imports=modules, server=self.socket)
        assert asked.wait() == 0, f"one of {modules} cannot be imported"

    def run(
        self,
        run_dir: Path,
        world: int,
        env: Mapping[str, str],
        *,
        module: str = "worker",
        prelude: str | None = None,
        timeout_s: float = 240.0,
    ) -> Ended:
        """Start `world` ranks of launcher.train.`module` on `run_dir` and wait until all have ended.

        prelude: a module of the tests that is imported in the rank first. world 0: one process without a
        launcher's variables.
        """
        port = free_port()
        common = {
            **self.environ,
            **{name: text.replace("{master_port}", str(port)) for name, text in env.items()},
        }
        (run_dir / "logs").mkdir(exist_ok=True)
        words = ["-m", f"launcher.train.{module}", str(run_dir)]
        began = time.monotonic()
        ranks = []
        for rank in range(max(world, 1)):
            told = {**common, **(launched(rank, world, port) if world else {})}
            with (run_dir / "logs" / f"forked-{rank}.log").open("ab") as log:
                fds = (os.open(os.devnull, os.O_RDONLY), log.fileno(), log.fileno())
                ranks.append(Started(words, told, fds, prelude=prelude, server=self.socket))
                os.close(fds[0])
        codes = attend(ranks, timeout_s)
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink()
        said = "\n".join(_last_lines(log) for log in sorted((run_dir / "logs").glob("*.log")))
        return Ended(codes, time.monotonic() - began, said)


def launched(rank: int, world: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {name: str(number) for name, number in numbers.items()} | address


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_lines(log: Path, count: int = 12) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([f"== {log.name}", *lines[-count:]])


def die_with_parent() -> None:
    """A rank does not outlive the test that started it."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def other_threads() -> list[str]:
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    return [name for task in tasks if (name := (task / "comm").read_text().strip()) != "jemalloc_bg_thd"]


def attend(ranks: list[Started], timeout_s: float) -> tuple[int, ...]:
    """Wait for all; when one has failed, or after `timeout_s`, the others are killed."""
    deadline, grace = Deadline(timeout_s), None
    while waiting := [rank for rank in ranks if rank.code is None]:
        select.select([rank.connection for rank in waiting], [], [], 0.2)
        if any(rank.poll() for rank in waiting) and grace is None:
            grace = Deadline(GRACE_S)
        if deadline.passed() or (grace is not None and grace.passed()):
            for rank in waiting:
                rank.send(signal.SIGKILL)
    return tuple(rank.code for rank in ranks if rank.code is not None)


def serve(path: str) -> None:
    """Import everything, then fork what connections ask for, until a line on stdin or its end."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print where the answers would be
    assert imported(HEAVY) == 0
    sys.stdout.flush()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    answers.write(json.dumps(other_threads()) + "\n")
    answers.flush()
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [], 0.01 if running else None)
        if sys.stdin in ready:
            os._exit(0)  # what the libraries do at an exit is not of this test, and can hang
        if listener in ready:
            connection, _ = listener.accept()
            order, fds = received(connection)
            if order["imports"]:
                tell(connection, {"pid": os.getpid()})
                tell(connection, {"code": imported(order["imports"])}, last=True)
            else:
                running[fork(order, fds, [listener, *running.values(), connection])] = connection
            for number in fds:
                os.close(number)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            tell(running.pop(pid), {"code": os.waitstatus_to_exitcode(status)}, last=True)


def imported(names: Iterable[str]) -> int:
    """Import them; 0, or 1 where one cannot be."""
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            if not name.startswith("deepspeed."):  # older releases lack some modules
                traceback.print_exc()
                return 1
    # accelerate and DeepSpeed collect garbage at every start, which would walk through all that was imported.
    gc.collect()
    gc.freeze()
    return 0


def received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """An order, and the three streams for who carries it out."""
    text, fds, _, _ = socket.recv_fds(connection, 2**16, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(2**16)
    return json.loads(text), fds


def tell(connection: socket.socket, answer: dict[str, int], *, last: bool = False) -> None:
    """Nothing where the asker is gone."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(answer).encode() + b"\n")
    if last:
        connection.close()


def fork(order: Mapping[str, Any], fds: list[int], held: list[socket.socket]) -> int:
    """The process id of a new process, which its asker is told first."""
    found = os.fork()
    if found:
        tell(held[-1], {"pid": found})
        return found
    code = 70
    try:
        die_with_parent()
        os.setsid()
        for number, target in zip(fds, (0, 1, 2), strict=True):
            os.dup2(number, target)
            os.close(number)
        for each in held:
            each.close()
        os.environ.clear()
        os.environ.update(order["env"])
        show_environ(order["env"])
        os.chdir(order["cwd"])
        if order["prelude"]:
            importlib.import_module(order["prelude"])
        code = carried_out(order["words"])
        sys.stdout.flush()
        importlib.import_module("launcher.train.worker").leave(code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def carried_out(words: list[str]) -> int:
    """Do what an interpreter does with these words; the exit code."""
    kind, what, *rest = words if words[0] in ("-m", "-c") else ("", *words)
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path.insert(0, str(Path(what).parent) if kind == "" else "")
    sys.argv = [what if kind == "" else kind, *rest]
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if (Path(folder) / "sitecustomize.py").is_file():
            sys.modules.pop("sitecustomize", None)  # Debian's
            importlib.import_module("sitecustomize")
    try:
        if kind == "-m" and what in RANKS:
            return int(importlib.import_module(what).main(rest) or 0)
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            program = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), program.__dict__)
        else:
            runpy.run_path(what, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # there is one
        return 1
    return 0


def show_environ(environ: Mapping[str, str]) -> None:
    """Let /proc/PID/environ be this: by it a supervisor finds the processes that it started.

    It reads the memory in which the process was started, which `ROOM` made large enough.
    """
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    text = b"".join(f"{name}={value}\0".encode() for name, value in environ.items())
    assert len(text) <= end - start, "the environment is too large: raise ROOM_BYTES"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


if __name__ == "__main__":
    serve(sys.argv[1])
