"""The plan's page in terminals of several widths, and in pipes."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
from factories import plan
from terminal import terminal

from launcher.cli import main
from launcher.render.bundle import render
from launcher.report.plan_sections import command_section, facts
from launcher.report.plan_text import brief_text, plan_text
from launcher.report.sections import Text
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
    plan = bundle.to_json()
    bound = {**plan, "command": ["python", "-m", "launcher.train.worker", "runs/{a}"]}
    for command, late in ((plan, True), (bound, False)):  # braces of a path of the user's
        blocks = command_section(command, {}, "").blocks
        assert any(isinstance(block, Text) for block in blocks) is late


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
    lines = brief_text(render(made), "runs/a/report.html").splitlines()
    shown = [row.name for row in facts(bundle.to_json())]
    first = [word.split()[0] for word in ("recipes/a.yaml", *shown, "plan", "warning:")]
    assert [line.split()[0] for line in lines] == first
    whole = " ".join(plan_text(bundle).split())
    assert all(" ".join(line.split()) in whole for line in lines[:5])
    assert lines[-2].endswith("runs/a/report.html")
    assert max(map(len, brief_text(render(made), "p", Page(60)).splitlines())) <= 60


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


SETS = ["on_oom=adapt", "runtime.mirror=s3://bucket/runs"]


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("mixtral_8x7b_lora", {"model", "trained", "adapters", "router", "batch", "length"}),
        ("smolvlm_lora", {"frozen", "images"}),
        ("qwen3_embedding_0_6b", {"texts", "negatives"}),
        ("qwen3_8b_lora", {"on oom", "mirror"}),
    ],
)
def test_what_a_plan_has_is_among_its_facts(capsys, recipe, names):
    sets = [word for one in SETS if "mirror" in names for word in ("--set", one)]
    assert main(["plan", recipe, "--on", "8xA100-80GB", *sets]) == 0
    lines = capsys.readouterr().out.partition("\n\ndecisions")[0].splitlines()
    assert names <= {re.split(r"  +", line.strip())[0] for line in lines[1:]}
