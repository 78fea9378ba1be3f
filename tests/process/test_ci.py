"""What CI does with a failed test: once more, alone; and the list of tests that were flaky."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import patience, wait_until

ROOT = Path(__file__).resolve().parents[2]
FLAKY = [json.loads(line) for line in (ROOT / "tests" / "flaky.jsonl").read_text("utf-8").splitlines()]
FAILS_ONCE = """
import pathlib
import pytest

@pytest.mark.parametrize("value", ["a::b", "c"])
def test_fails_once(value):
    print("said", value)
    seen = pathlib.Path(f"seen-{value.replace(':', '')}")
    assert seen.exists() or seen.touch()
"""
FAILS = "def test_fails():\n    assert 1 == 2\n"
PASSES = "def test_passes():\n    pass\n"
SKIPPED = """
import pathlib
import pytest

def test_is_skipped_the_second_time():
    if pathlib.Path("seen").exists():
        pytest.skip("gone")
    pathlib.Path("seen").touch()
    assert False
"""


@pytest.fixture
def ci(tmp_path, monkeypatch):
    """.ci/parts.py in a folder of its own, whose `make test` is a pytest there."""
    spec = importlib.util.spec_from_file_location("ci_parts", ROOT / ".ci" / "parts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["ci_parts"] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)  # those of the test's process stay
    monkeypatch.setattr(module, "RECORDS", tmp_path / "build" / "tests")
    monkeypatch.setattr(module, "LANES", (("test SLOW=some",), ("check",)))
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text((ROOT / "tests" / "cpu_seconds.py").read_text("utf-8"))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = "rm -rf build/tests/$@; TEST_RECORD=build/tests/$@.json .venv/bin/pytest -p no:xdist"
    run += " -o cache_dir=build/tests/$@ --junitxml=build/tests/$@.xml"
    (tmp_path / "Makefile").write_text(f"dev check:\n\t@true\ntest:\n\t{run} tests\n")
    yield module
    del sys.modules["ci_parts"]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / "tests" / f"test_{name}.py").write_text(text)


def flaky_of(folder: Path) -> list[str]:
    parts = json.loads((folder / "build" / "tests" / "ci.json").read_text())["parts"]
    return [name for part in parts for name in part["flaky"]]


def test_a_test_that_passes_alone_is_named_and_ci_passes(ci, tmp_path, capsys):
    write(tmp_path, once=FAILS_ONCE, good=PASSES)
    assert ci.main() == 0
    names = [f"tests/test_once.py::test_fails_once[{value}]" for value in ("a::b", "c")]
    assert flaky_of(tmp_path) == names
    said = capsys.readouterr().out
    for name in names:
        block = said.partition(f"FLAKY {name}")[2].partition("for tests/flaky.jsonl: ")
        assert "assert (False or None)" in block[0]
        assert json.loads(block[2].partition("\n")[0])["path"] == name


def test_a_test_that_fails_again_fails_ci(ci, tmp_path):
    write(tmp_path, once=FAILS_ONCE, bad=FAILS)
    assert ci.main() == 1
    assert flaky_of(tmp_path) == []


def test_a_test_that_is_skipped_the_second_time_has_not_passed(ci, tmp_path):
    write(tmp_path, gone=SKIPPED)
    assert ci.main() == 1


def test_many_failed_tests_are_no_accident(ci, tmp_path):
    write(tmp_path, **{f"once{number}": FAILS_ONCE for number in range(6)})
    for number in range(6):
        text = FAILS_ONCE.replace("seen-", f"seen-{number}-")
        write(tmp_path, **{f"once{number}": text})
    assert ci.main() == 1


@pytest.mark.parametrize(
    "stops", ["import nowhere\n", "import os\nos._exit(1)\n", "raise KeyboardInterrupt\n"]
)
def test_a_session_that_did_not_end_is_not_tried_again(ci, tmp_path, stops):
    """Whatever failed before it ended, other tests have not run."""
    write(tmp_path, a_once=FAILS_ONCE, b_stops=f"def test_stops():\n    {stops.splitlines()[-1]}\n")
    if "nowhere" in stops:
        write(tmp_path, b_stops=stops)
    elif "_exit" in stops:
        write(tmp_path, b_stops="import os\ndef test_stops():\n    os._exit(1)\n")
    assert ci.main() == 1
    assert flaky_of(tmp_path) == []


def test_a_part_that_was_not_run_fails_ci(ci, tmp_path, capsys):
    (tmp_path / "Makefile").write_text("dev:\n\t@exit 3\n")
    assert ci.main() == 1
    assert [line.split() for line in capsys.readouterr().out.splitlines() if "was not run" in line] == [
        ["test", "SLOW=some", "was", "not", "run"],
        ["check", "was", "not", "run"],
    ]


def test_the_budget_ends_a_part_with_all_its_processes(ci, tmp_path):
    (tmp_path / "Makefile").write_text("check:\n\t@sleep 987 & sleep 986\n")
    ci.RECORDS.mkdir(parents=True)
    ended = ci.command("check", ["make", "check"], time.monotonic() - 1)
    assert ended.status == 124
    left = subprocess.run(["pgrep", "-fx", "sleep 98[67]"], capture_output=True, text=True, check=False)
    assert left.stdout == ""


def test_a_signal_ends_ci_with_all_its_processes(ci, tmp_path):
    """In a process of its own, as CI is started."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "parts.py").write_text((ROOT / ".ci" / "parts.py").read_text("utf-8"))
    (tmp_path / "Makefile").write_text("dev:\n\t@touch begun; sleep 985\n")
    started = subprocess.Popen([sys.executable, ".ci/parts.py"], stdout=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "begun").exists())
    started.send_signal(signal.SIGTERM)
    assert started.wait(patience(60)) == 128 + signal.SIGTERM
    wait_until(lambda: subprocess.run(["pgrep", "-fx", "sleep 985"], check=False).returncode == 1)


def test_a_build_folder_that_cannot_be_written_is_said_before_anything_runs(ci, tmp_path, capsys):
    (tmp_path / "build").write_text("a file")
    assert ci.main() == 1
    assert "build" in capsys.readouterr().out


def test_the_list_of_flaky_tests_is_short_and_of_tests_that_are_there():
    """A test that is flaky a second time is corrected or removed, and with it its lines here."""
    for entry in FLAKY:
        assert set(entry) == {"path", "commit", "cause"}, entry
        path, _, name = entry["path"].partition("::")
        assert f"def {name.partition('[')[0].rpartition('::')[2]}(" in (ROOT / path).read_text("utf-8"), entry
    paths = [entry["path"] for entry in FLAKY]
    assert sorted(set(paths)) == sorted(paths), "corrected or removed, not listed twice"
