"""The plan's page in terminals of several widths, and in pipes."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
from factories import plan
from terminal import terminal

from launcher.render.bundle import render
from launcher.report.plan_text import brief_text, plan_text
from launcher.report.terminal import Page, page_of

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def bundle(tmp_path):
    made = plan(tmp_path, "1xRTX4090-24GB", model__quantization="nf4")
    return render(replace(made, recipe_file="recipes/a.yaml"))  # a path is not broken


def without_command(text):
    """The text without the command, which is not wrapped so that it can be copied."""
    before, command, after = text.partition("\ncommand")
    return before + "".join(after.splitlines(keepends=True)[2:]) if command else text


def test_values_set_at_the_start_are_explained(bundle):
    assert "{run_dir}" in " ".join(bundle.command)
    assert "\ncommand (values in braces are set when it starts)\n" in plan_text(bundle)
    bound = replace(bundle, command=("python", "-m", "launcher.train.worker", "runs/{a}"))
    assert "\ncommand\n" in plan_text(bound), "braces of a path of the user's"


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120, 200])
def test_every_line_fits_the_page(bundle, columns):
    text = without_command(plan_text(bundle, Page(columns)))
    assert max(len(line) for line in text.splitlines()) <= max(columns, 60), "keys and values are not broken"
    if columns >= 60:
        assert max(len(line) for line in text.splitlines()) <= min(columns, 120)


def test_a_narrow_page_has_the_same_text(bundle):
    wide, narrow = (" ".join(plan_text(bundle, Page(columns)).split()) for columns in (None, 60))
    assert sorted(wide.split()) == sorted(narrow.split())


def test_colours_change_nothing_else(bundle):
    for columns in (60, 120, None):
        coloured = plan_text(bundle, Page(columns, coloured=True))
        assert COLOUR.sub("", coloured) == plan_text(bundle, Page(columns))
        assert "\x1b[1mdecisions\x1b[0m" in coloured


def test_a_run_says_in_a_few_lines_what_it_will_do(bundle):
    made = replace(bundle.plan, warnings=("rows are short",))
    lines = brief_text(made, "runs/a/report.html").splitlines()
    assert [line.split()[0] for line in lines] == [
        "recipes/a.yaml", "model", "batch", "length", "memory", "time", "plan", "warning:",
    ]  # fmt: skip
    whole = plan_text(bundle)
    assert all(line in whole for line in lines[:4])
    assert lines[4].split(maxsplit=1)[1] in whole
    assert lines[6].endswith("runs/a/report.html")
    assert max(map(len, brief_text(made, "p", Page(60)).splitlines())) <= 60


def test_what_does_not_fit_is_red(tmp_path):
    made = plan(tmp_path, "1xRTX4090-24GB")
    fits = plan_text(render(made), Page(120, coloured=True))
    assert "\x1b[1;32mmemory of each device" in fits
    assert "\x1b[31m" not in fits
    tight = replace(made, memory=replace(made.memory, fits=False))
    assert "\x1b[1;31mmemory of each device" in plan_text(render(tight), Page(120, coloured=True))


def test_a_pipe_gets_the_default_page(bundle, capsys):
    assert page_of(sys.stdout) == page_of(None) == Page()
    assert "\x1b" not in plan_text(bundle)


def test_a_terminal_has_its_width_and_colours(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with terminal(72) as shown:
        assert page_of(shown.stream) == Page(72, coloured=True)
        monkeypatch.setenv("NO_COLOR", "1")
        assert page_of(shown.stream) == Page(72)
        shown.resize(10)
        assert page_of(shown.stream).columns == 40
