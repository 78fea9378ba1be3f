"""Sections as data: templates of figures, and the three renderers of the same section."""

from __future__ import annotations

import math

import pytest

from launcher.report.html.blocks import drawn
from launcher.report.markdown import section_text
from launcher.report.sections import Code, Fact, Figure, Rows, Section, filled, line, rows_of, table_of
from launcher.report.text import section_lines

SCOPE = {
    "steps": 40,
    "plan": {"steps": 1200},
    "name": "a",
    "none": None,
    "nan": math.nan,
    "flag": True,
    "list": [],
}


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("{steps:count} of {plan.steps:count}", [Figure(40, "count"), " of ", Figure(1200, "count")]),
        ("{steps:count}[ of {none:count}][ in {name}]", [Figure(40, "count"), " in ", "a"]),
        ("in `{name}/x`", ["in ", "a/x"]),
        ("{none}", None),
        ("{name:count}", None),
        ("{flag:count}", None),
        ("{list}{name}", None),
        ("{steps.deeper}", None),
        ("{flag}", ["true"]),
        ("[{none}]", []),
    ],
)
def test_a_template_is_filled_with_what_is_known(template, parts):
    assert filled(template, SCOPE) == parts


def test_code_is_told_from_text_and_a_backtick_of_a_value_is_none():
    (_, code) = filled("in `{name}`", SCOPE)
    assert isinstance(code, Code)
    (text,) = filled("{name}", {"name": "`x` [y] {z}"})
    assert (text, isinstance(text, Code)) == ("`x` [y] {z}", False)


def test_a_number_that_is_not_finite_is_shown_as_such():
    assert line(filled("{nan:number}", SCOPE)) == "not finite"


def test_facts_without_a_value_have_no_row_and_a_note_is_optional():
    facts = (
        Fact("a", "{steps:count}", "of {none:count}"),
        Fact("b", "{none}"),
        Fact("`{name}`", "{steps:count}"),
    )
    rows = rows_of(facts, SCOPE)
    assert [(row.name, line(row.parts)) for row in rows] == [("a", "40"), ("a", "40")]
    assert [isinstance(row.name, Code) for row in rows] == [False, True]


def test_columns_that_nothing_is_in_are_left_out():
    columns = {"name": "{name}", "steps": "{steps:count}", "left": "{left:bytes}", "note": "[{note}]"}
    (table,) = table_of("t", columns, [{"name": "a", "steps": 1}, {"name": "b"}])
    assert table.head == ["name", "steps"]
    assert table.rows == [["a", Figure(1, "count")], ["b", "\N{EN DASH}"]]
    assert table_of("t", columns, []) == []


HOSTILE = "<b>|`x`\x1b[31m"


def test_every_renderer_shows_every_figure_and_no_text_becomes_markup():
    columns = {"setting": "`{key}`", "value": "{value:bytes}", "why": ("{why}", "{more}")}
    scopes = [{"key": HOSTILE, "value": 2**30, "why": HOSTILE, "more": "from here"}]
    rows = Rows(rows_of([Fact("{key}", "{value:bytes}", "of `{why}`")], scopes[0]))
    section = Section("s", "Title", [rows, *table_of("t", columns, scopes)])
    terminal, page, markdown = "\n".join(section_lines([section])), drawn(section), section_text(section)
    for text in (terminal, page, markdown):
        assert text.count("1.00 GiB") == 2
    assert "\x1b" not in terminal + page
    assert "<b>" not in page
    assert "from here" in page, "a page has room for the lines that matter less"
    cells = [row.replace("\\|", "").count("|") for row in markdown.splitlines() if row.startswith("|")]
    assert cells == [3, 3, 3, 4, 4, 4]
