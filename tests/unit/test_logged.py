"""The rows of a long record that a page is made of."""

from __future__ import annotations

import json
import math

import pytest

from launcher.execute.logged import LAST, PARTS, WHOLE, read_logged

COUNT = 3 * WHOLE


def rows(count=COUNT):
    return [
        {"step": n, "loss": 2 + math.sin(n), "grad_norm": 1.0, "tokens_per_second": float(n % 97)}
        for n in range(1, count + 1)
    ]


def write(path, found):
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def test_a_short_record_is_read_as_it_is(tmp_path):
    found = rows(WHOLE)
    logged = read_logged(write(tmp_path / "m", found))
    assert (list(logged.rows), logged.count) == (found, WHOLE)
    assert (list(read_logged(tmp_path / "absent").rows), read_logged(tmp_path / "absent").count) == ([], 0)


def test_a_long_record_keeps_what_a_curve_shows(tmp_path):
    found = rows()
    found[12_345]["loss"] = 50.0
    found[12_400]["grad_norm"] = -3.0
    found[20_000]["loss"] = None
    found[20_001] = {"step": 20_002, "eval_loss": 1.5}
    logged = read_logged(write(tmp_path / "m", found))
    kept = list(logged.rows)
    assert logged.count == COUNT
    assert LAST + PARTS <= len(kept) <= LAST + 11 * PARTS
    for at in (0, 12_345, 12_400, 20_000, 20_001):
        assert found[at] in kept
    assert kept[-LAST:] == found[-LAST:]
    steps = [row["step"] for row in kept]
    assert steps == sorted(set(steps))
    size = (COUNT - LAST) // PARTS
    for start in range(0, 10_000, size):  # each part has its extremes
        values = [row["loss"] for row in found[start : start + size]]
        inside = [row["loss"] for row in kept if start < row["step"] <= start + size]
        assert (min(inside), max(inside)) == (min(values), max(values))


@pytest.mark.parametrize("line", ["{", "[1, 2]", '"text"', '{"loss": 3}', '{"step": "x"}', "[" * 5000])
def test_lines_that_are_no_row_are_skipped(tmp_path, line):
    found = rows()
    text = [json.dumps(row) for row in found]
    text[15_000] = line
    path = tmp_path / "m"
    path.write_text("\n".join(text))  # without an end: the last line is still being written
    logged = read_logged(path)
    assert {row["step"] for row in logged.rows} <= {row["step"] for row in found} - {15_001}
    assert logged.rows[-1] == found[-1]


def test_a_page_of_a_long_run_says_how_many_rows_were_logged(tmp_path):
    from reports import write_run

    from launcher.execute.record import read_run
    from launcher.report.run_pages import run_page

    run = write_run(tmp_path / "run")
    write(run / "metrics.jsonl", rows())
    record = read_run(run)
    assert record.logged == COUNT
    assert f"of {COUNT:,}; a curve has" in run_page(record, "now")
