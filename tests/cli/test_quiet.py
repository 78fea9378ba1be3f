"""--quiet: errors, and the path of the result."""

from __future__ import annotations

import json

import pytest

from launcher.cli import main
from launcher.parsing import parse
from launcher.report import outcome
from launcher.report.outcome import Outcome, emit
from launcher.report.run_display import Screen


def test_a_dry_run_prints_its_path(tmp_path, capsys):
    words = [
        "run",
        "smoke",
        "--tiny",
        "--dry-run",
        "--on",
        "cpu",
        "--quiet",
        "--output-dir",
        str(tmp_path / "r"),
    ]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (f"{tmp_path / 'r'}\n", "")
    assert (
        main(["run", "smoke", "--tiny", "--dry-run", "--on", "cpu", "--output-dir", str(tmp_path / "s")]) == 0
    )
    assert "decisions" in capsys.readouterr().out, "the next command speaks"


def test_errors_are_printed(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text("nonsense: 1\n")
    assert main(["run", str(tmp_path / "r.yaml"), "--quiet"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "nonsense" in shown.err
    outcome.note("a word")
    assert capsys.readouterr().err == "a word\n"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"run_dir": "/r", "result": {"output": "adapter"}}, "/r/adapter\n"),
        ({"run_dir": "/r"}, "/r\n"),
        ({"folder": "/sweep", "runs": []}, "/sweep\n"),
        ({"runs": [{"run_dir": "/a"}, {"run_dir": "/b"}]}, "/a\n/b\n"),
        ({"data": {"folder": "/cache/x"}}, "/cache/x\n"),
        ({"member": 1}, ""),
    ],
)
def test_the_path_of_every_result(data, said, capsys):
    with outcome.silence():
        outcome.echo("a line")
        outcome.note("a word")
        assert not Screen().is_live
        assert emit("run", Outcome(data, "text"), as_json=False) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (said, "")


def test_json_stays_json(capsys):
    with outcome.silence():
        emit("run", Outcome({"run_dir": "/r"}, "text"), as_json=True)
    assert json.loads(capsys.readouterr().out)["run_dir"] == "/r"


@pytest.mark.parametrize("command", ["run", "ladder", "drill", "submit", "prepare"])
def test_commands_with_quiet(command):
    assert parse([command, "smoke", "--quiet"])[1]["quiet"]
    assert not parse([command, "smoke"])[1]["quiet"]
