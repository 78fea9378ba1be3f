"""Completion in the real shells, by the scripts that `completion` prints."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import Deadline, patience

from launcher.cli import main
from launcher.files.shipped import recipes_dir
from launcher.parsing import COMMANDS

COMMAND = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
SHIPPED = {path.stem for path in recipes_dir().glob("*.yaml")}
# the start of a line -> some of what is offered, some of what is not
OFFERED = [
    ("", {command.name for command in COMMANDS}, {"smoke", "mine.yaml"}),
    ("plan --se", {"--search", "--set"}, {"--on"}),
    ("plan ", {*SHIPPED, "mine.yaml", "runs/"}, {"rows.jsonl", "plan", "_base/lora"}),
    ("plan --on ", {"cpu", "H100-80GB"}, {"smoke", "mine.yaml"}),
    ("plan --on=A100", {"A100-40GB", "A100-80GB"}, {"H100-80GB"}),
    ("plan --on 8xH1", {"8xH100-80GB"}, {"H100-80GB", "8xA100-80GB"}),
    ("plan --on 2x8xcp", {"2x8xcpu"}, {"cpu"}),
    ("plan --json sm", {"smoke"}, {"starcoder_lora"}),
    ("plan smoke --json --s", {"--search", "--set"}, {"smoke"}),
    ("run smoke --set ", set(), {"smoke", "mine.yaml"}),
    ("submit --to ", {"slurm"}, {"smoke"}),
    ("lint ", {"rows.jsonl", "mine.yaml"}, {"smoke"}),
    ("lint --recipe ", {"smoke", "mine.yaml"}, {"rows.jsonl"}),
    ("generate ", {"runs/"}, {"smoke", "rows.jsonl"}),
    ("estimate Qwen/", {"Qwen/Qwen3-8B", "Qwen/Qwen2.5-7B-Instruct"}, {"smoke"}),
    ("estimate meta-llama/Llama-3.2", {"meta-llama/Llama-3.2-1B-Instruct"}, {"Qwen/Qwen3-8B"}),
    ("fixes pad", {"pad-token"}, {"smoke"}),
    ("recipes qwen3_8b_d", {"qwen3_8b_dpo"}, {"smoke"}),
]
# what is typed before the tab key -> what the line ends with afterwards
COMPLETED = [
    ("pla", "plan "), ("plan smok", "smoke "), ("plan mine", "mine.yaml "),
    ("plan smoke --expl", "--explain "), ("plan --on H200", "H200-141GB "),
    ("generate ru", "runs/"), ("completion zs", "zsh "),
]  # fmt: skip


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A working folder with a recipe, another file and a run directory; the command is on PATH."""
    folder = tmp_path / "here"
    (folder / "runs").mkdir(parents=True)
    for name in ("mine.yaml", "rows.jsonl"):
        (folder / name).touch()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    return folder


def script(shell: str, folder: Path, capsys) -> Path:
    assert main(["completion", shell]) == 0
    path = folder / f"effilaunch.{shell}"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


@pytest.mark.parametrize(("line", "some", "others"), OFFERED, ids=[line for line, _, _ in OFFERED])
def test_bash_is_offered(line, some, others, files, tmp_path, capsys):
    call = (
        f"source {script('bash', tmp_path, capsys)}; COMP_LINE='effilaunch {line}'; COMP_TYPE=9; "
        "COMP_POINT=${#COMP_LINE}; _python_argcomplete effilaunch; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    shell = ["bash", "--norc", "-c", call]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=patience(120), check=True)
    assert not done.stderr
    offered = {word.strip() for word in done.stdout.split("\n")}
    assert some <= offered
    assert not others & offered


class Terminal:
    """An interactive shell in a terminal."""

    def __init__(self, shell: str) -> None:
        pid, self.descriptor = pty.fork()
        if pid == 0:
            os.environ.update(TERM="dumb", PS1="ready> ", COLUMNS="200", LINES="100")
            os.execvp(COMMAND[shell][0], COMMAND[shell])
        self.pid = pid

    def type(self, text: str, until: str, seconds: float = 30) -> str:
        """What appears after the text is typed, when `until` is in it."""
        os.write(self.descriptor, text.encode())
        seen, deadline = "", Deadline(seconds)
        while until not in seen and not deadline.passed():
            if select.select([self.descriptor], [], [], 0.2)[0]:
                seen += os.read(self.descriptor, 65536).decode(errors="replace")
        assert until in seen
        return seen

    def close(self) -> None:
        os.close(self.descriptor)
        os.waitpid(self.pid, 0)


@pytest.mark.parametrize("shell", COMMAND)
def test_the_tab_key_completes(shell, files, tmp_path, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    start = f"source {script(shell, tmp_path, capsys)}"
    if shell == "zsh":
        start = f"autoload -Uz compinit; compinit -u -D; {start}"
    terminal = Terminal(shell)
    try:
        terminal.type(f"{start}; echo re''ady\n", "ready\r\n")
        for line, completed in COMPLETED:
            terminal.type(f"\x15effilaunch {line}\t", completed)
    finally:
        terminal.close()


def test_an_unknown_shell_is_a_usage_error(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "'tcsh'" in capsys.readouterr().err
