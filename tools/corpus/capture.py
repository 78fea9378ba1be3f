"""Run a script as a user would, and keep what `2>&1 | tee log` would have kept.

A maker is a function whose body is the script: it is written out as train.py and run in a process of its own.
It may import `tiny` (tools/corpus/tiny.py), which is put beside it.
"""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "corpus"
INDEX = CORPUS / "index.jsonl"
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "trl", "datasets")
EXTENSIONS = ROOT / "build" / "corpus-extensions"
"""Where DeepSpeed's extensions are compiled, once for all logs."""
SHARED_MEMORY = Path("/dev/shm")

Script = Callable[[], object]
_LAUNCHERS: dict[str, Callable[[int], list[str]]] = {
    "python": lambda ranks: [],
    "torchrun": lambda ranks: ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"],
    "deepspeed": lambda ranks: [
        "-m",
        "deepspeed.launcher.runner",
        f"--num_accelerators={ranks}",
        f"--master_port={_free_port()}",
    ],
    "accelerate": lambda ranks: ["-m", "accelerate.commands.launch", f"--num_processes={ranks}"],
}
MADE: dict[str, Callable[[], None]] = {}
"""Name of a log -> what makes it, for every maker of the modules imported so far."""


def caused(failure: str, variant: str = "", **how: object) -> Callable[[Script], Script]:
    """Register a script as the cause of `failure`; `how` goes to `capture`."""

    def register(script: Script) -> Script:
        name = f"{failure}-{variant}" if variant else failure
        MADE[name] = lambda: capture(name, failure, script, **how)  # type: ignore[arg-type]
        return script

    return register


def main() -> None:
    """Remake the logs named on the command line, or all of the module."""
    for name in sys.argv[1:] or list(MADE):
        MADE[name]()


def capture(
    name: str,
    failure: str,
    script: Script | str,
    *,
    ranks: int = 1,
    launcher: str = "python",
    env: Mapping[str, str] = {},
    arguments: Sequence[str] = (),
    launcher_arguments: Sequence[str] = (),
    files: Mapping[str, object] = {},
    kind: str = "known",
    by: str = "",
    limit: float = 150.0,
) -> None:
    """Run `script`, and write CORPUS/kind/name.log and its line of the index.

    script: a function whose body is the script, or a shell command. arguments: of the script. files: name ->
    text, or an object to write as JSON, beside the script. by: where a shell command is made. limit: seconds
    after which the run is killed, as a user would.
    """
    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        home = Path(folder) / "home"
        work = home / "project"
        work.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("tiny.py"), work)
        for file, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2)
            (work / file).parent.mkdir(parents=True, exist_ok=True)
            (work / file).write_text(text, encoding="utf-8")
        if isinstance(script, str):
            command = ["bash", "-c", script]
        else:
            (work / "train.py").write_text(body(script), encoding="utf-8")
            by = by or f"tools/corpus/{Path(inspect.getfile(script)).name}:{script.__name__}"
            options = [*_LAUNCHERS[launcher](ranks), *launcher_arguments]
            if launcher == "accelerate":
                options += [f"--main_process_port={_free_port()}", *([] if launcher_arguments else ["--cpu"])]
            command = [sys.executable, *options, "train.py", *arguments]
        code, output = _run(command, work, _environment(home, env), limit)
    log = CORPUS / kind / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    text = neutral(output, home)
    log.write_text(text, encoding="utf-8", newline="")
    _record(f"{kind}/{name}.log", failure, by, kind)
    print(f"{name}: exit {code}, {text.count(chr(10))} lines: {text.strip().splitlines()[-1:]}", flush=True)


def body(script: Script) -> str:
    """The body of a function, as a script of its own."""
    source = textwrap.dedent(inspect.getsource(script))
    _, _, rest = source.partition(f"def {script.__name__}()")
    return textwrap.dedent(rest.partition("\n")[2])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _environment(home: Path, more: Mapping[str, str]) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ}
    # Another ninja than the packages' own compiles everything again: its log names the commands otherwise.
    path = os.pathsep.join((str(_packages().parent.parent.parent / "bin"), os.environ["PATH"]))
    return {
        **kept,
        "PATH": path,
        "HOME": str(home),
        "USER": "user",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        **more,
    }


def _run(command: list[str], work: Path, env: dict[str, str], limit: float) -> tuple[int, str]:
    """Exit code and output, both streams in the order in which they came."""
    shared = set(SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*"))
    with (work.parent / "output").open("w+b") as output:
        process = subprocess.Popen(
            command, cwd=work, env=env, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        for path in set(SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*")) - shared:
            path.unlink(missing_ok=True)
        output.seek(0)
        return code, output.read().decode("utf-8", errors="replace")


def neutral(text: str, home: Path) -> str:
    """The output with this machine's folders and name replaced by a user's; all else as it came."""
    base = Path(sys.base_prefix)
    packages = _packages()
    lib = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
    for path, other in (
        (str(home), "/home/user"),
        (str(packages), f"/home/user/venv/{lib}/site-packages"),
        (str(packages.parent.parent.parent), "/home/user/venv"),
        (str(base / lib / "site-packages"), f"/home/user/venv/{lib}/site-packages"),
        (str(Path(sys.prefix) / lib / "site-packages"), f"/home/user/venv/{lib}/site-packages"),
        (sys.prefix, "/home/user/venv"),
        (str(ROOT), "/home/user/effilaunch"),
        (str(base / lib), f"/usr/{lib}"),
        (str(base), "/usr"),
        (str(Path.home()), "/home/user"),
    ):
        text = text.replace(path, other)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b(?![./\w-])", "node1", text)


def _packages() -> Path:
    """site-packages, which may be another environment's than this interpreter's."""
    torch = find_spec("torch")
    return Path(str(torch and torch.origin)).parent.parent


def _record(file: str, failure: str, by: str, kind: str) -> None:
    """Add the log's line to the index, in the place of an earlier one."""
    versions = {name: version(name) for name in PACKAGES}
    line = {"file": file, "id": failure, "how": "caused", "by": by, "versions": versions, "set": kind}
    with INDEX.open("a+", encoding="utf-8") as index:
        fcntl.flock(index, fcntl.LOCK_EX)
        index.seek(0)
        lines = index.read().splitlines()
        others = [old for old in lines if json.loads(old)["file"] != file]
        if len(others) < len(lines):
            index.truncate(0)
            index.write("".join(f"{old}\n" for old in others))
        index.write(json.dumps(line) + "\n")
