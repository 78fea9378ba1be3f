"""lint, doctor and diagnose against hurried and hostile users: no bug (70), and nothing left behind."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.commands.doctor import bundle_path, private_here
from launcher.errors import RecipeError
from launcher.render.new_file import write_new

FAILED = (
    "Traceback (most recent call last):\n"
    '  File "/a/train.py", line 10, in <module>\n'
    "    main()\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0\n"
)
TOO_LONG = "x" * 5000


def called(capsys, *argv):
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


class FullDisk:
    """A file whose disk is full once it is open."""

    def __init__(self, path: Path) -> None:
        self.real = path.open.__func__(path, "xb")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.real.close()

    def write(self, content):
        self.real.write(content[:3])

    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_no_half_of_a_file(monkeypatch, tmp_path):
    target = tmp_path / "new.json"
    opened = FullDisk(target)
    monkeypatch.setattr(Path, "open", lambda *_: opened)
    with pytest.raises(OSError, match="No space left"):
        write_new(target, "text")
    assert not target.exists()


def test_what_is_there_stays(tmp_path):
    target = tmp_path / "own"
    target.write_text("mine")
    with pytest.raises(FileExistsError):
        write_new(target, "text")
    assert target.read_text() == "mine"


def test_half_a_character_is_written_as_an_escape(tmp_path):
    write_new(tmp_path / "a", "bad\udcff")
    assert (tmp_path / "a").read_text("utf-8") == r"bad\udcff"


def test_lint_reads_no_more_of_an_endless_file_than_a_config_has(capsys):
    code, out, _ = called(capsys, "lint", "/dev/zero")
    assert code == 2
    assert "100000 bytes" in out


@pytest.mark.parametrize("command", ["lint", "diagnose"])
def test_a_closed_standard_input_is_said(capsys, monkeypatch, command):
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = called(capsys, command, "-")
    assert (code, "standard input is closed" in err) == (2, True)


@pytest.mark.parametrize("command", ["lint", "diagnose"])
def test_an_error_message_given_as_a_file_is_no_bug(capsys, command):
    code, out, _ = called(capsys, command, TOO_LONG, "--json")
    assert code == 2
    assert "name too long" in json.loads(out)["errors"][0]["message"]


def test_a_compressed_log_that_was_cut_off_is_said(capsys, tmp_path):
    log = tmp_path / "a.log.gz"
    whole = gzip.compress((FAILED * 100).encode())
    for content in (whole[:-20], whole[:30] + b"\xff" * 50):
        log.write_bytes(content)
        code, _, err = called(capsys, "diagnose", log)
        assert (code, "truncated or damaged" in err) == (2, True)
    log.write_bytes(whole)
    code, out, _ = called(capsys, "diagnose", log)
    assert (code, out.partition(":")[0]) == (0, "cuda-oom")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (FAILED.encode("utf-16"), "UTF-16"),
        (FAILED.encode("utf-16-le"), "UTF-16"),
        (FAILED.encode("utf-16-be"), "UTF-16"),
        (gzip.compress(FAILED.encode()), "gzip"),
        (b"\xfd7zXZ\0\0" + FAILED.encode(), "xz"),
        (b"PK\x03\x04" + FAILED.encode(), "zip"),
        (bytes(range(256)) * 20, "binary"),
    ],
)
def test_what_is_no_text_is_refused_rather_than_called_healthy(capsys, tmp_path, content, what):
    log = tmp_path / "a.log"
    log.write_bytes(content)
    code, _, err = called(capsys, "diagnose", log)
    assert code == 2
    assert what in err


@pytest.mark.parametrize(
    "before", [b"\0" * 5000, b"\0" * 100, b"\xe9\xe8 latin 1\n", "█▏".encode() * 50 + b"\n"]
)
def test_text_is_text_whatever_it_begins_with(capsys, tmp_path, before):
    log = tmp_path / "a.log"
    log.write_bytes(before + FAILED.encode())
    code, out, _ = called(capsys, "diagnose", log)
    assert (code, out.partition(":")[0]) == (0, "cuda-oom")


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "logs" / "rank-0.log").write_text(FAILED)
    (folder / "recipe.yaml").write_text("on_oom: fail\n")
    return folder


@pytest.mark.parametrize("recipe", ["on_oom: [", "a: 1\na: 2\n", "[" * 500, "- list\n", ""])
def test_a_broken_recipe_does_not_hide_what_the_logs_tell(capsys, run_dir, recipe):
    (run_dir / "recipe.yaml").write_text(recipe)
    code, out, _ = called(capsys, "diagnose", run_dir)
    assert (code, out.partition(":")[0]) == (0, "cuda-oom")


def test_a_recipe_that_may_not_be_read_does_not_either(capsys, monkeypatch, run_dir):
    def forbidden(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", forbidden)
    code, out, _ = called(capsys, "diagnose", run_dir)
    assert (code, out.partition(":")[0]) == (0, "cuda-oom")


def test_what_cannot_be_applied_is_diagnosed_all_the_same(capsys, run_dir):
    (run_dir / "recipe.mended.yaml").write_text("mine")
    code, out, err = called(capsys, "diagnose", run_dir, "--apply")
    assert (code, out.partition(":")[0]) == (2, "cuda-oom")
    assert "already exists" in err
    code, out, _ = called(capsys, "diagnose", run_dir, "--apply", "--json")
    answer = json.loads(out)
    assert (code, answer["findings"][0]["id"], answer["errors"][0]["code"]) == (
        2,
        "cuda-oom",
        "mended-exists",
    )
    assert "mended" not in answer
    assert (run_dir / "recipe.mended.yaml").read_text() == "mine"


def test_a_folder_that_may_not_be_entered_is_said(capsys, monkeypatch, tmp_path):
    real = Path.is_file

    def forbidden(path: Path) -> bool:
        if path.name == "plan.json":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "is_file", forbidden)
    code, _, err = called(capsys, "diagnose", tmp_path)
    assert (code, "cannot diagnose: Permission denied" in err) == (2, True)


@pytest.mark.parametrize("plan", ["", "[]", '{"recipe": 3}', '{"recipe": "a\\u0000b"}', "[" * 100_000, "NaN"])
def test_a_broken_plan_does_not_either(capsys, run_dir, plan):
    (run_dir / "plan.json").write_text(plan)
    code, out, _ = called(capsys, "diagnose", run_dir)
    assert (code, out.partition(":")[0]) == (0, "cuda-oom")


@pytest.mark.parametrize("name", ["~nobody-has-this-name/x.md", TOO_LONG])
def test_a_bundle_that_no_file_can_be_is_refused(tmp_path, name):
    with pytest.raises(RecipeError, match="file name"):
        bundle_path(name, tmp_path)


def test_a_bundle_is_refused_before_the_checks(monkeypatch, tmp_path):
    (tmp_path / "link.md").symlink_to(tmp_path / "nothing" / "x")
    with pytest.raises(RecipeError, match="exists already"):
        bundle_path("link.md", tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)  # whoever runs the tests may be root
    with pytest.raises(RecipeError, match=r"new\.md"):
        bundle_path("new.md", tmp_path)


def test_a_user_without_a_home_has_a_bundle(monkeypatch):
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.setenv("WANDB_ENTITY", "alice-team")
    assert "alice-team" in private_here().users


def test_a_terminal_without_the_letters_of_a_name_is_no_bug(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "lint", "größe.json"],
        cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, "gr\\xf6\\xdfe.json" in done.stderr) == (2, True), done.stderr
