"""Run a failing script as a user would, and keep what `2>&1 | tee log` would have kept.

`python -m tools.corpus.capture FAILURE SCRIPT.py`; tests/corpus/README.md says which logs are kept.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "corpus"
INDEX = CORPUS / "index.jsonl"
WITHOUT_ID = ("healthy", "unknown")
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "trl", "datasets")
EXTENSIONS = ROOT / "build" / "corpus-extensions"
"""Where DeepSpeed's extensions are compiled, once for all logs."""
SHARED_MEMORY = Path("/dev/shm")

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


def main() -> None:
    parser = argparse.ArgumentParser(description="Cause a failure and record its log.")
    parser.add_argument("failure", help="id (launcher/knowledge/failures/); without one, the log's name")
    parser.add_argument("script", type=Path, help="Python script, or a shell script (.sh)")
    parser.add_argument("arguments", nargs="*", help="of the script")
    parser.add_argument("--variant", default="", help="added to the log's name")
    parser.add_argument("--set", choices=("known", "held_out", *WITHOUT_ID), default="known", dest="kind")
    parser.add_argument("--launcher", choices=_LAUNCHERS, default="python")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which it is killed")
    given = parser.parse_args()
    name = f"{given.failure}-{given.variant}" if given.variant else given.failure
    failure = None if given.kind in WITHOUT_ID else given.failure
    capture(
        name, failure, given.script, ranks=given.ranks, launcher=given.launcher,
        arguments=given.arguments, kind=given.kind, limit=given.limit,
    )  # fmt: skip


def capture(
    name: str,
    failure: str | None,
    script: Path,
    *,
    ranks: int = 1,
    launcher: str = "python",
    arguments: Sequence[str] = (),
    kind: str = "known",
    limit: float = 150.0,
) -> None:
    """Run a Python or shell script, and write CORPUS/kind/name.log and its line of the index.

    arguments: of the script. limit: seconds after which the run is killed, as a user would.
    """
    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        home = Path(folder) / "home"
        work = home / "project"
        work.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("tiny.py"), work)
        if script.suffix == ".sh":
            command = ["bash", "-c", script.read_text("utf-8"), script.name, *arguments]
        else:
            shutil.copy(script, work / "train.py")
            options = _LAUNCHERS[launcher](ranks)
            if launcher == "accelerate":
                options += [f"--main_process_port={_free_port()}", "--cpu"]
            command = [sys.executable, *options, "train.py", *arguments]
        code, output = _run(command, work, _environment(home), limit)
    log = CORPUS / kind / f"{name}.log"
    log.write_text(text := neutral(output, home), encoding="utf-8", newline="")
    _record(f"{kind}/{name}.log", failure, script.name, kind)
    print(f"{name}: exit {code}, {text.count(chr(10))} lines: {text.strip().splitlines()[-1:]}", flush=True)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _environment(home: Path) -> dict[str, str]:
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


def _record(file: str, failure: str | None, by: str, kind: str) -> None:
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


if __name__ == "__main__":
    main()
