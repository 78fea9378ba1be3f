"""Plots: well-formed XML, lengths that follow the values, and text that cannot break out of its place."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from launcher.report.plots import Bar, Point, Section, Series, lines, page, scatter, stacked_bars
from launcher.report.svg import COLOURS, STYLE, amount, log_ticks, round_ticks

GIB = 2**30
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text><script>alert('x')</script> \" & \x00\x1b[31m \ud800 ]]>"


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text)


def title(node: ET.Element) -> str | None:
    """What a pointer shows over it."""
    return node.findtext(f"{SVG}title")


def parts(root: ET.Element) -> list[ET.Element]:
    """The coloured parts of all bars, not the legend's squares."""
    return [
        r for r in root.iter(f"{SVG}rect") if r.get("class") == "part" and r.find(f"{SVG}title") is not None
    ]


def texts(root: ET.Element) -> list[str]:
    return [t.text or "" for t in root.iter(f"{SVG}text")]


def marks(root: ET.Element) -> list[float]:
    """x of the rows' marks."""
    named = [
        g
        for g in root.iter(f"{SVG}g")
        if g.find(f"{SVG}line") is not None and g.find(f"{SVG}title") is not None
    ]
    return [float(g.find(f"{SVG}line").get("x1")) for g in named]


def test_bars_have_the_lengths_of_their_values_and_touch_each_other():
    bars = [
        Bar("a", {"weights": 1 * GIB, "activations": 3 * GIB}, marker=2 * GIB),
        Bar("b", {"weights": 2 * GIB, "activations": 0.0}),
    ]
    root = parsed(stacked_bars("Memory", bars))
    first, second, third = parts(root)
    width = [float(p.get("width")) for p in (first, second, third)]
    assert width[1] == pytest.approx(3 * width[0], abs=0.05)
    assert width[2] == pytest.approx(2 * width[0], abs=0.05)
    left = [float(p.get("x")) for p in (first, second, third)]
    assert left[1] == pytest.approx(left[0] + width[0], abs=0.05)
    assert left[2] == left[0]
    assert float(third.get("y")) > float(first.get("y")) == float(second.get("y"))
    assert first.get("fill") == third.get("fill") == COLOURS[0] != second.get("fill")
    (mark,) = marks(root)
    assert mark == pytest.approx(left[0] + 2 * width[0], abs=0.05)


def test_totals_marks_and_components_are_also_said_in_words():
    root = parsed(stacked_bars("Memory", [Bar("a", {"w": GIB, "g": GIB}, marker=1.5 * GIB, note="fell")]))
    assert "2.00 GiB fell" in texts(root)
    said = root.find(f"{SVG}desc").text
    assert said == "a: 2.00 GiB (w 1.00 GiB, g 1.00 GiB), measured 1.50 GiB fell"
    assert (root.get("role"), root.get("aria-label"), root.find(f"{SVG}title").text) == (
        "img",
        "Memory",
        "Memory",
    )


def test_a_limit_stands_at_its_value_and_inside_the_picture():
    root = parsed(stacked_bars("m", [Bar("a", {"w": GIB})], limit=("device", 4 * GIB)))
    (line,) = [x for x in root.iter(f"{SVG}line") if x.get("class") == "limit"]
    (part,) = parts(root)
    assert float(line.get("x1")) == pytest.approx(
        float(part.get("x")) + 4 * float(part.get("width")), abs=0.1
    )
    assert "device 4.00 GiB" in texts(root)


def test_a_row_without_parts_shows_its_note():
    root = parsed(stacked_bars("m", [Bar("a", {"w": GIB}), Bar("nf4", {}, note="refused")]))
    assert "refused" in texts(root)
    assert len(parts(root)) == 1


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_what_is_not_an_amount_is_not_drawn(value):
    with pytest.raises(ValueError, match="cannot be drawn"):
        stacked_bars("m", [Bar("a", {"w": value})])
    with pytest.raises(ValueError, match="cannot be drawn"):
        scatter("m", [Point("a", value, 1.0)])


def test_points_lie_on_the_diagonal_exactly_when_prediction_and_measurement_agree():
    found = scatter("s", [Point("same", 2 * GIB, 2 * GIB), Point("low", 4 * GIB, GIB)], band=0.1)
    root = parsed(found)
    line = next(x for x in root.iter(f"{SVG}line") if x.get("class") == "axis")
    x1, y1, x2, y2 = (float(line.get(k)) for k in ("x1", "y1", "x2", "y2"))
    same, low = [c for c in root.iter(f"{SVG}circle") if c.find(f"{SVG}title") is not None]

    def above(point: ET.Element) -> float:
        """Pixels above the diagonal."""
        x, y = float(point.get("cx")), float(point.get("cy"))
        return y1 + (y2 - y1) * (x - x1) / (x2 - x1) - y

    assert above(same) == pytest.approx(0, abs=0.05)
    assert above(low) < -20
    assert low.find(f"{SVG}title").text == "low: measured 4.00 GiB, predicted 1.00 GiB (-75.0%)"
    assert [p.get("class") for p in root.iter(f"{SVG}polygon")] == ["band"]


def test_groups_differ_in_form_and_in_colour():
    points = [Point(g, GIB, GIB, g) for g in ("T0", "T1", "held-out")]
    root = parsed(scatter("s", points))
    assert {"T0", "T1", "held-out"} <= set(texts(root))
    forms = [e for e in root.iter() if e.get("class") == "dot" and e.find(f"{SVG}title") is not None]
    corners = [0 if e.tag == f"{SVG}circle" else len(e.get("points").split()) for e in forms]
    colours = [e.get("fill") for e in forms]
    assert len(set(colours)) == 3
    # the same number of corners, but the first lies elsewhere
    assert corners == [0, 4, 4]
    assert forms[1].get("points") != forms[2].get("points")


def test_a_measurement_of_zero_is_refused_on_a_logarithmic_axis():
    with pytest.raises(ValueError, match="logarithmic"):
        scatter("s", [Point("a", 0.0, 1.0)])
    parsed(scatter("s", [Point("a", 0.0, 1.0)], log=False))


def test_a_line_has_a_gap_where_a_value_is_missing():
    root = parsed(lines("l", ["a", "b", "c", "d"], [Series("loss", [3.0, 2.0, None, 1.0])]))
    drawn = [x for x in root.iter(f"{SVG}line") if x.get("stroke")]
    assert len(drawn) == 1
    dots = [c for c in root.iter(f"{SVG}circle")]
    assert len(dots) == 3
    heights = [float(c.get("cy")) for c in dots]
    assert heights[0] < heights[1] < heights[2]
    assert "c no value" in root.find(f"{SVG}desc").text
    with pytest.raises(ValueError, match="finite"):
        lines("l", ["a"], [Series("loss", [float("nan")])])
    with pytest.raises(ValueError, match="each step"):
        lines("l", ["a"], [Series("loss", [1.0, 2.0])])


@pytest.mark.parametrize(
    "plot",
    [
        stacked_bars(HOSTILE, [Bar(HOSTILE, {HOSTILE: 1.0, "b": 2.0}, 1.0, HOSTILE)], marker=HOSTILE),
        scatter(HOSTILE, [Point(HOSTILE, 1.0, 2.0, HOSTILE)], unit=HOSTILE),
        lines(HOSTILE, [HOSTILE], [Series(HOSTILE, [1.0])], unit=HOSTILE),
        stacked_bars("empty", []),
        scatter("empty", []),
        lines("empty", [], []),
    ],
)
def test_hostile_names_stay_text(plot):
    root = parsed(plot)
    assert "script" not in {e.tag.removeprefix(SVG) for e in root.iter()}
    for node in root.iter():
        assert not any(name.startswith("on") for name in node.attrib)


def test_a_page_is_one_file_that_loads_and_runs_nothing():
    plot = stacked_bars("m", [Bar("a", {"w": 1.0})])
    table = [["rung", "bytes"], [HOSTILE, ""]]
    text = page(HOSTILE, [Section(HOSTILE, [HOSTILE], [plot, plot], table), Section("empty")])
    text.encode("utf-8")
    root = ET.fromstring(text)
    assert root.get("lang") == "en"
    tags = [e.tag for e in root.iter()]
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert tags.count(f"{SVG}svg") == 2
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    policy = next(m for m in root.iter("meta") if m.get("http-equiv"))
    assert policy.get("content").startswith("default-src 'none'")
    assert [th.get("scope") for th in root.iter("th")] == ["col", "col"]
    assert text.count("prefers-color-scheme:dark") == 1 + 2
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))


def test_text_on_a_part_and_on_the_page_can_be_read():
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    root = parsed(stacked_bars("m", [Bar("a", {f"p{i}": 1.0 for i in range(len(COLOURS))})]))
    on = [t.get("class") for t in root.iter(f"{SVG}text") if (t.get("class") or "").startswith("on-")]
    assert len(on) == len(COLOURS)
    for colour, kind in zip(COLOURS, on, strict=True):
        assert contrast(colour, {"on-light": "#000000", "on-dark": "#ffffff"}[kind]) > 4.5
    for ink, paper in (
        ("#1a1a1a", "#ffffff"),
        ("#595959", "#ffffff"),
        ("#f0f0f0", "#171717"),
        ("#b3b3b3", "#171717"),
    ):
        assert ink in STYLE
        assert paper in STYLE
        assert contrast(ink, paper) > 4.5


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (26.84e9, "bytes", "25.0 GiB"), (3.4 * 2**20, "bytes", "3.40 MiB"), (999, "bytes", "999 B"),
        (2048, "bytes", "2.00 KiB"), (0, "bytes", "0 B"), (0.01234, "", "0.0123"), (132.4, "s", "132 s"),
        (1.5e-9, "s", "1.50e-09 s"),
    ],
)  # fmt: skip
def test_amounts_have_three_digits(value, unit, text):
    assert amount(value, unit) == text


def test_ticks_are_round():
    assert [t for _, t in round_ticks(0, 26 * GIB, "bytes")] == ["0", "5", "10", "15", "20", "25"]
    assert [t for _, t in round_ticks(0, 0.7, "s")] == ["0", "0.2", "0.4", "0.6"]
    assert round_ticks(0, 26 * GIB, "bytes")[1][0] == 5 * GIB
    assert [t for _, t in log_ticks(2**20, 8 * 2**20, "bytes")] == ["1", "2", "5"]
