"""`run --serve`: a real run is followed while it trains."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from patience import patience

from launcher.cli import main

SMOKE = Path(__file__).resolve().parents[2] / "recipes" / "smoke.yaml"


@pytest.mark.slow
def test_a_run_is_followed_while_it_trains(tmp_path):
    command = [
        sys.executable, "-u", "-m", "launcher", "run", str(SMOKE), "--tiny", "--serve", "--on", "cpu",
        "--set", "trainer.max_steps=40", "--output-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    seen = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        lines = iter(process.stdout.readline, "")
        line = next(line for line in lines if line.startswith("following it at "))
        address = line.split()[-1]
        while process.poll() is None:
            try:
                with urllib.request.urlopen(address, timeout=patience(60)) as answer:
                    seen.append(answer.read().decode())
            except (urllib.error.URLError, ConnectionError):
                break  # it has just ended
            time.sleep(0.5)
        rest = "".join(lines)
        assert process.wait(patience(120)) == 0, rest
    assert any("▸ running" in page for page in seen)
    assert any('id="ranks"' in page and ">train<" in page for page in seen), "a rank and its phase"
    assert any("<option>rank-0.log</option>" in page for page in seen)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(address, timeout=5)


def test_a_run_goes_on_where_its_page_cannot_be_served(tmp_path, capsys):
    from launcher.commands.run import _served

    said = []
    with _served(tmp_path, said.append) as follow:
        follow()  # the folder is no run directory
    assert said == []
    assert "no page is served" in capsys.readouterr().err


def test_a_dry_run_is_not_followed(capsys):
    assert main(["run", str(SMOKE), "--dry-run", "--serve"]) == 2
    assert "--serve excludes --dry-run" in capsys.readouterr().err
