"""What `diagnose` says of real logs: how many failures it names rightly, and that it names nothing else.

The corpus is made by tests/corpus/make with the real libraries, or transcribed from public threads. The logs
of the held-out sets were collected after the patterns were committed, by somebody who had not read them; what
was measured then, before the misses were mended, is in tests/corpus/README.md.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from launcher.knowledge.diagnose.examine import diagnose
from launcher.knowledge.failures.catalogue import FAILURES

CORPUS = Path(__file__).parent / "corpus"
INDEX = [json.loads(line) for line in (CORPUS / "index.jsonl").read_text("utf-8").splitlines()]
NAMED, HELD_OUT_NAMED = 0.95, 0.85
FEWEST_FAILURES, FEWEST_HELD_OUT, FEWEST_HEALTHY, FEWEST_UNKNOWN = 60, 20, 30, 10
FAILED = ("known", "first_held_out", "held_out")
IDS = {failure.id for failure in FAILURES}
PRIVATE = re.compile(
    r"(?<![\w.])/root/|/home/(?!user\b|xxx\b)\w+|\.pyenv|/tmp/(?!torchelastic_|tmp|pip-|err_)\w|"
    r"\bhost +: (?!node\d|localhost)"
)
"""Folders and hosts of a real machine: in the corpus everybody is /home/user, on node1."""


def of(kind):
    return [entry for entry in INDEX if entry["set"] == kind]


@cache
def verdict(file):
    """The id that a log gets, `unknown`, or None where no failure is seen."""
    diagnosis = diagnosis_of(file)
    if diagnosis.findings:
        return diagnosis.findings[0].failure.id
    return "unknown" if diagnosis.unknown else None


@cache
def diagnosis_of(file):
    return diagnose([str(CORPUS / file)], FAILURES)


def is_named(entry):
    """Of a run that went on, what surprises people later is noticed, perhaps beside other things."""
    noticed = [finding.failure.id for finding in diagnosis_of(entry["file"]).noticed]
    return verdict(entry["file"]) == entry["id"] or entry["id"] in noticed


def share(entries):
    """Fraction named rightly, and the table of those that were not."""
    wrong = [entry for entry in entries if not is_named(entry)]
    rows = [f"  {e['file']}: {e['id']}, called {verdict(e['file'])}" for e in wrong]
    return (len(entries) - len(wrong)) / max(1, len(entries)), "\n".join(rows)


def test_every_log_is_indexed_once():
    indexed = [entry["file"] for entry in INDEX]
    there = [str(path.relative_to(CORPUS)) for path in CORPUS.rglob("*.log")]
    assert sorted(indexed) == sorted(there)


def test_the_index_says_where_each_log_is_from():
    for entry in INDEX:
        assert set(entry) == {"file", "id", "how", "by", "versions", "set"}, entry
        assert entry["file"].startswith(f"{entry['set']}/")
        assert (entry["id"] in IDS) if entry["set"] in FAILED else entry["id"] is None, entry
        if entry["how"] == "transcribed":
            assert entry["by"].startswith("https://"), entry
        else:
            assert entry["how"] == "caused"
            assert entry["versions"]
            module, _, maker = entry["by"].partition(
                ":"
            )  # a function, or the failure that a table's row causes
            source = (CORPUS / module).read_text("utf-8")
            assert f"def {maker}(" in source or f'"{maker}"' in source, entry


def test_there_are_enough_logs_of_each_kind():
    failures = [entry for kind in FAILED for entry in of(kind)]
    assert len(failures) >= FEWEST_FAILURES
    assert len(of("healthy")) >= FEWEST_HEALTHY
    assert len(of("unknown")) >= FEWEST_UNKNOWN
    transcribed = [entry for entry in failures if entry["how"] == "transcribed"]
    assert len(transcribed) < len(failures) / 2  # most are caused, not retold


def test_held_out_logs_are_a_third_of_the_failures():
    held_out = of("held_out")
    assert len(held_out) >= FEWEST_HELD_OUT
    assert 3 * len(held_out) >= sum(len(of(kind)) for kind in FAILED)


def test_failures_are_named(capsys):
    failures = [entry for kind in FAILED for entry in of(kind)]
    named, wrong = share(failures)
    with capsys.disabled():
        sys.stdout.write(f"\n{table()}\n{wrong}\n")
    assert named >= NAMED, wrong


def test_held_out_failures_are_named():
    held_out = of("held_out")
    named, wrong = share(held_out)
    assert held_out
    assert named >= HELD_OUT_NAMED, wrong


@pytest.mark.parametrize("entry", of("healthy"), ids=lambda entry: Path(entry["file"]).stem)
def test_a_healthy_log_has_no_failure(entry):
    assert verdict(entry["file"]) is None


@pytest.mark.parametrize("entry", of("unknown"), ids=lambda entry: Path(entry["file"]).stem)
def test_an_unknown_failure_stays_unknown(entry):
    assert verdict(entry["file"]) == "unknown"


@pytest.mark.parametrize("entry", INDEX, ids=lambda entry: entry["file"])
def test_no_log_tells_whose_machine_it_was(entry):
    text = (CORPUS / entry["file"]).read_text("utf-8", errors="replace")
    assert not (found := PRIVATE.search(text)), text[max(0, found.start() - 80) : found.end() + 80]


def table():
    """One row for each set: logs, rightly named, failures in it."""
    rows = [f"{'set':14} {'logs':>5} {'right':>6} {'ids':>4}"]
    for kind in (*FAILED, "healthy", "unknown"):
        entries = of(kind)
        wanted = {"healthy": None, "unknown": "unknown"}
        right = sum(is_named(e) if e["id"] else verdict(e["file"]) == wanted[kind] for e in entries)
        rows.append(f"{kind:14} {len(entries):5} {right:6} {len(Counter(e['id'] for e in entries)):4}")
    return "\n".join(rows)
