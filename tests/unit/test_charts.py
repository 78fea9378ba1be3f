"""Charts: positions of values, gaps, thinning that keeps extremes, descriptions for screen readers."""

from __future__ import annotations

import itertools
import math
import random
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report.html.charts import (
    COLUMNS,
    HEIGHT,
    Curve,
    Event,
    Scale,
    StackedBar,
    curves,
    stacked_bars,
    thinned,
)
from launcher.report.tables import amount

GIB = 2**30
HOSTILE = "</text><script>alert('x')</script> \" & \x00\x1b[31m \ud800 ]]>"
SVG = "{http://www.w3.org/2000/svg}"


def parsed(markup: str) -> ET.Element:
    return ET.fromstring(markup)


def places(root: ET.Element) -> list[list[tuple[float, float]]]:
    """The points of each line, in thousandths of the plot."""
    paths = [
        p
        for p in root.iter(f"{SVG}path")
        if p.get("class", "").startswith("line") and "H25" not in p.get("d")
    ]
    numbers = [[float(n) for n in re.findall(r"-?[\d.]+", p.get("d").replace("h0", ""))] for p in paths]
    return [list(zip(n[::2], n[1::2], strict=True)) for n in numbers]


def test_points_are_placed_by_their_values():
    root = parsed(curves("Loss", [Curve("a", [(0, 0.0), (5, 1.0), (10, 2.0)])], from_zero=True))
    (line,) = places(root)
    assert [x for x, _ in line] == [0, 500, 1000]
    assert line[0][1] == 1000
    assert line[1][1] == pytest.approx((line[0][1] + line[2][1]) / 2, abs=0.1)
    assert line[2][1] > 0, "with some air above"


def test_a_gap_splits_the_line_and_a_single_point_is_visible():
    points = [(1, 1.0), (2, 2.0), (3, None), (4, 1.5), (5, None), (6, 1.0), (7, 1.2)]
    (path,) = [p for p in parsed(curves("x", [Curve("a", points)])).iter(f"{SVG}path")]
    assert path.get("d").count("M") == 3
    assert path.get("d").count("h0") == 1, "round ends make a dot of no length"


@given(seed=st.integers(0, 2**32), count=st.integers(1, 9 * COLUMNS))
def test_thinning_keeps_ends_and_extremes(seed, count):
    chance = random.Random(seed)
    values = [chance.gauss(0, 1) for _ in range(count)]
    run = list(enumerate(values))
    kept = thinned(run, Scale(0, len(run), 0, 100))
    assert len(kept) <= 4 * (COLUMNS + 1)
    assert (kept[0], kept[-1]) == (run[0], run[-1])
    assert {min(values), max(values)} <= {value for _, value in kept}
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)


def test_many_steps_stay_one_short_path():
    points = [(step, math.sin(step)) for step in range(50_000)]
    drawn = curves("x", [Curve("a", points)])
    assert len(drawn) < 80_000
    assert len(places(parsed(drawn))) == 1
    assert len([r for r in parsed(drawn).iter(f"{SVG}rect") if r.get("class") == "hit"]) <= 120


def test_curves_are_described_as_text():
    lines = [Curve("training", [(1, 3.0), (2, None), (3, 1.0)]), Curve("held out", [(2, 2.0)], marked=True)]
    (svg,) = [
        s
        for s in parsed(curves("Loss", lines, events=[Event(2, "restart")])).iter(f"{SVG}svg")
        if s.get("role")
    ]
    assert (svg.get("role"), svg.get("aria-label"), svg.find(f"{SVG}title").text) == ("img", "Loss", "Loss")
    assert svg.find(f"{SVG}desc").text == (
        "training: 2 values, 3 at step 1, 1 at step 3, least 1 at step 3, largest 3 at step 1, "
        "1 value not finite; held out: 1 value, 2 at step 2, 2 at step 2, least 2 at step 2, "
        "largest 2 at step 2"
    )
    titles = [t.text for t in svg.iter(f"{SVG}title")]
    assert "restart at step 2" in titles
    assert "step 2: held out 2" in titles, "and a pointer finds each step's values"


def test_losses_of_many_magnitudes_have_a_logarithmic_axis():
    points = [(step, 10.0**-step) for step in range(5)]
    (line,) = places(parsed(curves("x", [Curve("a", points)], spread=True)))
    steps = [b - a for (_, a), (_, b) in itertools.pairwise(line)]
    assert max(steps) - min(steps) < 0.3
    (line,) = places(parsed(curves("x", [Curve("a", points)])))
    assert line[1][1] > 800


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-30, -3e15])
def test_a_constant_has_an_axis(value):
    (line,) = places(parsed(curves("x", [Curve("a", [(7, value), (8, value)])])))
    assert all(0 <= y <= 1000 for _, y in line)


def test_lines_without_values():
    assert "no finite value" in curves("x", [Curve("a", [(1, None)])])
    assert "no finite value" in curves("x", [])
    with pytest.raises(ValueError, match="finite"):
        curves("x", [Curve("a", [(1, math.nan)])])


def test_bars_have_the_lengths_of_their_values():
    bars = [
        StackedBar("predicted", {"weights": 1.0 * GIB, "activations": 3.0 * GIB}),
        StackedBar("measured", {"weights": 2.0 * GIB}),
    ]
    root = parsed(
        stacked_bars("Memory", bars, limit=("the device holds", 5.0 * GIB), mark=("peak", 2.0 * GIB))
    )
    parts = [r for r in root.iter(f"{SVG}rect")]
    width = [float(r.get("width").rstrip("%")) for r in parts]
    assert width[1] == pytest.approx(3 * width[0], abs=0.01)
    assert width[2] == pytest.approx(2 * width[0], abs=0.01)
    assert float(parts[1].get("x").rstrip("%")) == pytest.approx(width[0], abs=0.01)
    assert parts[0].get("class") == parts[2].get("class") == "part m0"
    (svg,) = [s for s in root.iter(f"{SVG}svg")]
    assert svg.find(f"{SVG}desc").text == (
        "predicted: 4.00 GiB (weights 1.00 GiB, activations 3.00 GiB); "
        "measured: 2.00 GiB (weights 2.00 GiB); peak 2.00 GiB; the device holds 5.00 GiB"
    )
    assert float(svg.get("height")) < HEIGHT


def test_a_much_larger_device_is_described_but_not_drawn():
    drawn = stacked_bars(
        "Memory", [StackedBar("predicted", {"weights": 1.0 * GIB})], limit=("the device holds", 80.0 * GIB)
    )
    root = parsed(drawn)
    assert not [line for line in root.iter(f"{SVG}line") if line.get("class") == "limit"]
    assert "the device holds 80.00 GiB" in root.find(f".//{SVG}desc").text


def test_a_measurement_is_a_mark_at_its_value():
    bars = [
        StackedBar("a", {"weights": 2.0 * GIB, "logits": 0.0}, measured=GIB),
        StackedBar("nf4", {}, "refused"),
    ]
    drawn = stacked_bars("Memory", bars)
    root = parsed(drawn)
    (part,) = root.iter(f"{SVG}rect")
    (mark,) = [line for line in root.iter(f"{SVG}line") if line.get("class") == "mark"]
    assert float(mark.get("x1").rstrip("%")) == pytest.approx(
        float(part.get("width").rstrip("%")) / 2, abs=0.01
    )
    assert "a: 2.00 GiB (weights 2.00 GiB), measured 1.00 GiB" in root.find(f".//{SVG}desc").text
    assert "refused" in drawn


def test_bars_of_other_values_have_their_unit():
    root = parsed(stacked_bars("Seconds", [StackedBar("a", {"seconds": 2.5})], unit="s"))
    assert "2.50 s" in "".join(root.itertext())


@pytest.mark.parametrize(
    "chart",
    [
        stacked_bars(HOSTILE, [StackedBar(HOSTILE, {HOSTILE: 1.0}, HOSTILE, (0.5, 2.0), 1.0)], unit=HOSTILE,
                     limit=(HOSTILE, 3.0), mark=(HOSTILE, 2.0)),
        curves(HOSTILE, [Curve(HOSTILE, [(1, 1.0)])], events=[Event(1, HOSTILE)]),
        stacked_bars("empty", []),
    ],
)  # fmt: skip
def test_hostile_names_stay_text(chart):
    root = parsed(chart)
    assert "script" not in {node.tag.removeprefix(SVG) for node in root.iter()}
    assert not any(name.startswith("on") for node in root.iter() for name in node.attrib)


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
    ticks = Scale(0, 26 * GIB, 0, 100).ticks("bytes")
    assert [text for _, text in ticks] == ["0", "10", "20"]
    assert ticks[1][0] == 10 * GIB
    assert [text for _, text in Scale(0, 0.7, 0, 100).ticks("s")] == ["0", "0.2", "0.4", "0.6"]
