"""Completion: the scripts know all commands, and each shell completes with its own."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.commands.completion import KIND_OF
from launcher.facts.shipped import recipes_dir
from launcher.parsing import COMMANDS
from launcher.render.completion import KINDS

NAMES = [name for name, _, _ in COMMANDS]
SHIPPED = sorted(path.stem for path in recipes_dir().glob("*.yaml"))


def script(shell, folder, capsys) -> str:
    assert main(["completion", shell]) == 0
    path = folder / f"effilaunch.{shell}"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return str(path)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A working folder with a recipe, another file and a run directory."""
    folder = tmp_path / "here"
    (folder / "runs").mkdir(parents=True)
    for name in ("mine.yaml", "rows.jsonl"):
        (folder / name).touch()
    monkeypatch.chdir(folder)
    return folder


def offered_by_bash(path: str, line: str) -> set[str]:
    """What bash offers for the last word of a line; `=` is a word of its own, as readline cuts it."""
    words = ["effilaunch", *(word for part in line.split(" ") for word in re.split("(=)", part))]
    if len(words) > 2 and words[-2:] == ["=", ""]:
        words.pop()
    listed = " ".join(f"'{word}'" for word in words)
    call = (
        f"source {path}; COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _effilaunch; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", call], capture_output=True, text=True, check=True, timeout=30
    )
    assert not done.stderr
    return set(done.stdout.split())


# what is typed after the command's name -> (some of what is offered, some of what is not)
OFFERS = [
    ("", NAMES, ["smoke", "mine.yaml"]),
    ("pl", ["plan"], ["run"]),
    ("plan sm", ["smoke"], ["plan", "starcoder_lora"]),
    ("plan ", [*SHIPPED, "mine.yaml"], ["rows.jsonl"]),
    ("plan --se", ["--search", "--set"], ["--on"]),
    ("plan --on 1x", [], ["smoke"]),
    ("plan --on A100", ["A100-40GB", "A100-80GB"], ["H100-80GB", "smoke"]),
    ("plan smoke --on=A100", ["A100-80GB"], ["smoke"]),
    ("plan --json sm", ["smoke"], []),
    ("plan smoke --json ", [], ["smoke"]),
    ("generate r", ["runs"], ["rows.jsonl", "smoke"]),
    ("validate smoke star", ["starcoder_lora"], ["smoke"]),
    ("submit --to ", ["slurm"], ["smoke"]),
    ("lint r", ["rows.jsonl"], ["smoke"]),
    ("lint --recipe smo", ["smoke"], ["rows.jsonl"]),
    ("fixes pad", ["pad-token"], []),
    ("recipes qwen3_8b_d", ["qwen3_8b_dpo"], []),
    ("completion ", ["bash", "zsh", "fish"], ["smoke"]),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(files, tmp_path, capsys):
    path = script("bash", tmp_path, capsys)
    for line, some, others in OFFERS:
        offered = offered_by_bash(path, line)
        assert set(some) <= offered, line
        assert not set(others) & offered, line
    assert offered_by_bash(path, "plan --on ") >= {"cpu", "H100-80GB"}
    assert offered_by_bash(path, "plan --on=") >= {"cpu", "H100-80GB"}
    assert offered_by_bash(path, "run --set ") == set()


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(files, tmp_path, capsys):
    path = script("fish", tmp_path, capsys)
    subprocess.run(["fish", "-n", path], check=True, timeout=30)
    asked = "; ".join(f"echo '>>'; complete -C 'effilaunch {line}'" for line, _, _ in OFFERS)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {path}; {asked}"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert not done.stderr
    answers = done.stdout.split(">>\n")[1:]
    for (line, some, others), answer in zip(OFFERS, answers, strict=True):
        offered = {row.split("\t")[0].removeprefix("--on=").rstrip("/") for row in answer.splitlines()}
        assert set(some) <= offered, (line, offered)
        assert not set(others) & offered, (line, offered)


class Terminal:
    """A zsh that believes to be used by a person."""

    def __init__(self) -> None:
        pid, self.descriptor = pty.fork()
        if pid == 0:
            os.environ.update(TERM="dumb", PS1="ready> ", COLUMNS="200", LINES="100")
            os.execvp("zsh", ["zsh", "-f", "-i"])
        self.pid, self.seen = pid, ""

    def type(self, text: str, until: str, seconds: float = 20) -> str:
        """What appears after the text is typed, once `until` is in it."""
        os.write(self.descriptor, text.encode())
        self.seen, end = "", time.monotonic() + seconds
        while until not in self.seen and time.monotonic() < end:
            if select.select([self.descriptor], [], [], 0.2)[0]:
                self.seen += os.read(self.descriptor, 65536).decode(errors="replace")
        assert until in self.seen, self.seen
        return self.seen

    def close(self) -> None:
        os.close(self.descriptor)
        os.waitpid(self.pid, 0)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(files, tmp_path, capsys):
    path = script("zsh", tmp_path, capsys)
    subprocess.run(["zsh", "-n", path], check=True, timeout=30)
    zsh = Terminal()
    try:
        zsh.type(f"autoload -Uz compinit; compinit -u -D; source {path}; print 're''ady now'\n", "ready now")
        for line, completed in [
            ("pla", "plan "),
            ("plan smo", "smoke "),
            ("plan min", "mine.yaml"),
            ("plan smoke --expl", "--explain"),
            ("plan --on=A100-8", "A100-80GB"),
            ("plan --on H20", "H200-141GB"),
            ("generate ru", "runs"),
            ("fixes pad-tok", "pad-token"),
            ("completion zs", "zsh"),
        ]:
            zsh.type(f"\x15effilaunch {line}\t", completed)
    finally:
        zsh.close()


def test_every_value_is_of_a_known_kind():
    assert set(KIND_OF.values()) <= set(KINDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_hold_every_command_and_option(shell, tmp_path, capsys):
    text = Path(script(shell, tmp_path, capsys)).read_text("utf-8")
    for name in NAMES:
        assert re.search(rf"\b{name}\b", text)
    for word in ("dry-run", "max-new-tokens", "rehearse", "tensor-parallel"):
        assert word in text
    assert not re.search(r"^\s+.* $", text, flags=re.MULTILINE), "no ends of lines that hold a blank"


def test_an_unknown_shell_is_a_wrong_word(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
