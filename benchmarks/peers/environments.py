"""Virtual environments of the peers whose packages go with no others: made once, within a time limit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

INSTALL_S = 900.0


class NotInstalled(Exception):
    """The installation failed; the message is the end of what pip said."""


def environment_of(requirements: str, version: str, cache: Path, timeout_s: float = INSTALL_S) -> Path:
    """Python of the environment that has `requirements`, installing it at the first call.

    version: of Python, such as 3.12; empty: this one. NotInstalled, also at later calls, when it did not
    install: `cache` keeps what pip said.
    """
    wanted = requirements.split()
    folder = cache / "venvs" / wanted[0].replace("==", "-")
    python, failed = folder / "bin" / "python", folder.with_name(f"{folder.name}.failed")
    if failed.is_file():
        raise NotInstalled(f"{failed.read_text(encoding='utf-8')} (kept in {failed}, which may be deleted)")
    if (folder / "installed").is_file():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        _call([_python(version), "-m", "venv", str(folder)], 120.0)
        _call([str(python), "-m", "pip", "install", "-q", "--prefer-binary", *wanted], timeout_s)
    except NotInstalled as error:
        shutil.rmtree(folder, ignore_errors=True)
        failed.write_text(str(error), encoding="utf-8")
        raise
    (folder / "installed").touch()
    return python


def _python(version: str) -> str:
    """A Python of that version that starts: on the path, or pyenv's."""
    if not version:
        return sys.executable
    found = [shutil.which(f"python{version}")]
    found += map(str, sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python")))
    for python in filter(None, found):
        if subprocess.run([python, "-c", "pass"], capture_output=True, check=False).returncode == 0:
            return python
    raise NotInstalled(f"needs Python {version}, which is not here")


def _call(command: list[str], timeout_s: float) -> None:
    """Run a command in a process group of its own. NotInstalled with the end of its errors."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise NotInstalled(f"not installed within {timeout_s:.0f} s: {' '.join(command[-1:])}") from None
    if process.returncode != 0:
        lines = [line for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines()
        raise NotInstalled("; ".join(lines[-2:])[:600] or f"ended with code {process.returncode}")
