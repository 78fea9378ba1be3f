"""Folders of the cache: whole or written again, whoever damaged, left or owns them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from launcher.errors import EffilaunchError, MachineError
from launcher.train.data import store as module
from launcher.train.data.store import ABSENT, MANIFEST, cached, defect, seal

KEY = "0123456789abcdef" * 2
NOBODY = 65534


@pytest.fixture
def target(tmp_path):
    return tmp_path / "cache" / "data" / KEY


def build(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "rows").write_bytes(b"0123456789")
    (folder / "rows").chmod(0o600)  # as safetensors does
    (folder / "inner" / "record.json").write_text("{}")


def opened(target, rehash=True, build=build):
    cached(target, "prepared data", build, rehash=rehash)
    return (target / "rows").read_bytes(), (target / "inner" / "record.json").read_text()


def never(folder):
    raise AssertionError("it was written again")


def change(target: Path, name: str, content: bytes) -> None:
    """Other bytes, with the time of the old ones."""
    state = (target / name).stat()
    (target / name).write_bytes(content)
    os.utime(target / name, ns=(state.st_atime_ns, state.st_mtime_ns))


DAMAGES = {
    "a changed byte": lambda target: change(target, "rows", b"0123456780"),
    "an empty file": lambda target: change(target, "rows", b""),
    "half a file": lambda target: change(target, "rows", b"01234"),
    "a longer file": lambda target: change(target, "rows", b"0123456789\0"),
    "an empty record": lambda target: change(target, "inner/record.json", b""),
    "no file": lambda target: (target / "rows").unlink(),
    "a folder in its place": lambda target: ((target / "rows").unlink(), (target / "rows").mkdir()),
    "a pipe in its place": lambda target: ((target / "rows").unlink(), os.mkfifo(target / "rows")),
    "no manifest": lambda target: (target / MANIFEST).unlink(),
    "an empty manifest": lambda target: change(target, MANIFEST, b""),
    "a manifest of nothing": lambda target: change(target, MANIFEST, b"[]"),
    "a manifest without files": lambda target: edit(target, files={}),
    "a manifest of another version": lambda target: edit(target, schema_version=99),
    "a manifest that leads out": lambda target: edit(
        target, files={"../x": {"bytes": 1, "sha256": "0" * 64}}
    ),
    "a manifest with a null byte": lambda target: edit(
        target, files={"a\0": {"bytes": 1, "sha256": "0" * 64}}
    ),
    "a file in the folder's place": lambda target: (shutil.rmtree(target), target.write_text("x")),
}


def edit(target, **changes):
    found = json.loads((target / MANIFEST).read_text())
    (target / MANIFEST).write_text(json.dumps({**found, **changes}))


@pytest.mark.parametrize("rehash", [True, False])
@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_written_again_and_a_line_says_so(target, capsys, name, rehash):
    whole = opened(target, rehash)
    assert capsys.readouterr().err == ""
    DAMAGES[name](target)
    assert defect(target, "prepared data", rehash=rehash) not in (None, ABSENT)
    assert opened(target, rehash) == whole
    (line,) = [line for line in capsys.readouterr().err.splitlines() if str(target) in line]
    assert "damaged" in line
    assert opened(target, rehash, never) == whole
    assert sorted(path.name for path in target.parent.iterdir()) == [KEY]


def test_what_is_whole_is_not_written_again_wherever_it_was_copied_to(target, tmp_path):
    whole = opened(target)
    other = tmp_path / "copied" / KEY
    shutil.copytree(target, other)
    before = (other / MANIFEST).read_bytes()
    assert opened(other, False, never) == whole
    assert (other / MANIFEST).read_bytes() != before  # the next one need not read the files again
    DAMAGES["a changed byte"](other)
    assert opened(other, False) == whole


def test_a_byte_that_changed_below_the_filesystem_is_found_where_all_is_read(target):
    """The state of the file is that of the manifest, the content is not."""
    opened(target)
    change(target, "rows", b"0123456780")
    edit(target, states={name: module._state(target / name) for name in ("rows", "inner/record.json")})
    assert defect(target, "prepared data", rehash=False) is None
    assert "rows" in (defect(target, "prepared data", rehash=True) or "")


def test_files_and_folders_are_on_the_disk_before_the_name_is(target, monkeypatch):
    done: list[str] = []
    sync, rename = os.fsync, Path.rename

    def fsync(number):
        done.append(str(Path(f"/proc/self/fd/{number}").readlink()))
        sync(number)

    def renamed(self, to):
        done.append("rename")
        return rename(self, to)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    opened(target)
    before, after = done[: done.index("rename")], done[done.index("rename") :]
    aside = {Path(name) for name in before}
    folder = min(aside, key=lambda path: len(path.parts))
    manifest = {path for path in aside if path.name.startswith(f".{MANIFEST}")}
    assert len(manifest) == 1
    assert aside - manifest == {folder, folder / "rows", folder / "inner", folder / "inner" / "record.json"}
    assert after == ["rename", str(target.parent)]


def test_what_killed_processes_left_is_removed_and_nothing_else(target):
    parent = target.parent
    parent.mkdir(parents=True)
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True)
    machine, other = module._machine(), "0" * 8
    gone, here = f"{int(ended.stdout)}-1", f"{os.getppid()}-{module.process_started(os.getppid())}"
    leftovers = [f".{KEY}-{machine}-{gone}", f".{KEY}-{machine}-{os.getppid()}-1"]
    kept = [f".{KEY}-{machine}-{here}", f".{KEY}-{other}-{gone}", f".{KEY}-old1abc_", "unknown", f".{KEY}"]
    for name in leftovers + kept:
        (parent / name).mkdir()
        (parent / name / "half").write_text("x")
    stale = [f".{KEY}-{other}-{gone}", f".{KEY}-old1abc_", "unknown"]
    module.remove_leftovers(parent)
    assert {path.name for path in parent.iterdir()} == set(kept)
    long_ago = time.time() - module.STALE_S - 60
    for name in stale:
        for path in (parent / name / "half", parent / name):
            os.utime(path, (long_ago, long_ago))
    opened(target)
    left = {f".{KEY}-{machine}-{here}", "unknown", f".{KEY}", KEY}
    assert {path.name for path in parent.iterdir()} == left


def test_a_build_that_fails_leaves_nothing(target):
    def fail(folder):
        build(folder)
        raise KeyError("row")

    with pytest.raises(KeyError, match="row"):
        opened(target, build=fail)
    assert list(target.parent.iterdir()) == []


def test_whoever_is_second_takes_what_the_first_has_made(target):
    def late(folder):
        assert in_child(lambda: opened(target)[1]) == ("done", "{}")
        (folder / "rows").write_bytes(b"other")

    cached(target, "prepared data", late, rehash=True)
    assert opened(target, build=never)[0] == b"0123456789"


def test_names_of_samples_alone_may_be_sealed(tmp_path):
    (tmp_path / "rows").write_text("x")
    seal(tmp_path, ["rows"])
    (tmp_path / "later").write_text("y")
    assert defect(tmp_path, "prepared data", rehash=True) is None


def as_nobody(call) -> tuple[str, str]:
    """The same as a user without rights."""
    return in_child(call, NOBODY)


def in_child(call, user: int | None = None) -> tuple[str, str]:
    """What a call returns in a process of its own, or its problem's code and file."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            said = ["done", str(call())]
        except EffilaunchError as error:
            said = [error.problems[0].code, str(error.problems[0].file)]
        except BaseException as error:
            said = [type(error).__name__, str(error)]
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        found = json.load(answer)
    os.waitpid(child, 0)
    return tuple(found)


@pytest.fixture
def reachable():
    """A folder that every user can come to; pytest's own are closed to others."""
    if os.getuid() != 0:
        pytest.skip("only root becomes another user")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o027, 0o750), (0o077, 0o700)])
def test_the_umask_decides_who_may_read(target, umask, mode):
    before = os.umask(umask)
    try:
        opened(target)
    finally:
        os.umask(before)
    for path in (target, target / "inner"):
        assert path.stat().st_mode & 0o777 == mode
    for path in (target / "rows", target / MANIFEST):
        assert path.stat().st_mode & 0o777 == mode & 0o666


def test_a_second_user_reads_and_is_told_where_that_is_not_allowed(reachable):
    target = reachable / "cache" / "data" / KEY
    opened(target)
    assert as_nobody(lambda: opened(target, build=never)[0].decode()) == ("done", "0123456789")
    for closed in (target / "rows", target / MANIFEST, target, target.parent, target.parent.parent):
        mode = closed.stat().st_mode
        closed.chmod(0o700)
        assert as_nobody(lambda: opened(target)) == ("cache-unreadable", str(target)), closed
        closed.chmod(mode)
    change(target, "rows", b"")
    assert as_nobody(lambda: opened(target)) == ("cache-unwritable", str(target))
    other = target.with_name(KEY[::-1])
    assert as_nobody(lambda: opened(other)) == ("cache-unwritable", str(other))


def test_a_cache_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(MachineError) as caught:
        opened(tmp_path / "cache" / "data" / KEY)
    assert caught.value.problems[0].code == "cache-unwritable"
