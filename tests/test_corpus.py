"""Run `diagnose` on real logs: failures get the right id, and healthy and unknown logs get none.

The logs were caused with the real libraries (tools/corpus/capture.py) or transcribed from public threads.
tests/corpus/README.md has the rule by which they were chosen and the measurements of the held-out sets.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from launcher.knowledge.diagnose.examine import diagnose
from launcher.knowledge.failures.catalogue import FAILURES
from tools.corpus import capture

CORPUS = Path(__file__).parent / "corpus"
ROOT = CORPUS.parents[1]
INDEX = [json.loads(line) for line in (CORPUS / "index.jsonl").read_text("utf-8").splitlines()]
FEWEST_FAILURES, FEWEST_HELD_OUT, FEWEST_HEALTHY, FEWEST_UNKNOWN = 60, 20, 30, 10
FAILED = ("known", "first_held_out", "held_out")
MISSED = {
    "first_held_out/kbit-reentrant-opt-int8.log": "ddp-ready-twice",
    "first_held_out/ds-auto-unresolved-engine-wrapped.log": "unknown",
    "first_held_out/fp16-bf16-pretrained-t5-11b.log": None,
    "first_held_out/fp16-bf16-pretrained-randeng-t5.log": None,
    "first_held_out/kbit-reentrant-qlora-ddp.log": "ddp-ready-twice",
    "first_held_out/jit-stale-lock-slurm.log": None,
    "first_held_out/labels-all-masked-trl-completion-truncated.log": "unknown",
    "held_out/labels-all-masked-z2-trl-completion.log": "unknown",
    "held_out/no-loss-z2-bert-headless.log": None,
    "held_out/oom-fragmentation-z2-engine-log.log": "cuda-oom",
    "held_out/ds-optimizer-block-y2-glamm.log": "jit-no-compiler",
    "held_out/exit-code-lost-y2-killed-launcher.log": None,
    "held_out/bnb-no-backend-x2-windows.log": None,
    "held_out/fp16-bf16-pretrained-v3-mt5-eval.log": None,
    "held_out/bnb-both-v3-env.log": "unknown",
    "held_out/labels-all-masked-v3-completion-loop.log": "unknown",
    "held_out/no-loss-v3-headless.log": "unknown",
    "held_out/logits-oom-w3-opt-bf16.log": "sigkill-oom",
    "held_out/ds-bucket-memory-w3-default-buckets.log": "sigkill-oom",
    "held_out/kbit-fp32-upcast-v3-cpu-limit.log": "sigkill-oom",
    "held_out/pure-half-training-v3-gpt2-stalls.log": None,
}
"""Logs that get another verdict than their label. None: no failure is seen."""
WITHOUT_A_LOG = {
    "adapter-of-newer-peft",
    "bnb-config-typo",
    "context-parallel-attention",
    "device-assert",
    "fabric-manager",
    "gpu-faulty",
    "gpu-operation-not-supported",
    "heads-not-divisible",
    "image-pull",
    "nccl-error",
    "parallelism-combined",
    "parallelism-processes",
    "sequence-not-divisible",
    "sequence-parallel-positions",
    "tensor-parallel-copies",
    "tensor-parallel-data",
    "tensor-parallel-plan",
    "whole-model-oom",
    "tensor-parallel-resume",
}
IDS = {failure.id for failure in FAILURES}
PRIVATE = re.compile(
    r"(?<![\w.])/root/|/home/(?!user\b|xxx\b)\w+|\.pyenv|/tmp/(?!torchelastic_|tmp|pip-|err_)\w|"
    r"\bhost +: (?!node\d|localhost)"
)
"""Folders and hosts of a real machine: in the corpus everybody is /home/user, on node1."""
MADE_BY = re.compile(r"5d14261:tools/corpus/\w+\.py:[\w-]+|[\w.-]+\.(?:py|sh)")
"""A script that is kept in that commit, or the name of one that is not kept."""


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
            assert entry["how"] in ("caused", "reached")
            assert entry["versions"]
            assert MADE_BY.fullmatch(entry["by"]), entry


def test_logs_that_pass_over_a_check_are_named():
    reached = [Path(entry["file"]).stem for entry in INDEX if entry["how"] == "reached"]
    section = (CORPUS / "README.md").read_text("utf-8").partition("## Reached")[2].partition("\n## ")[0]
    assert sorted(reached) == ["quantization-not-trainable", "trl-vllm-server"]
    assert all(f"`{name}`" in section for name in reached)


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


@pytest.mark.parametrize("kind", FAILED)
def test_failures_are_named(kind, capsys):
    with capsys.disabled():
        sys.stdout.write(f"\n{kind}: {len(of(kind))} logs")
    wrong = {entry["file"]: verdict(entry["file"]) for entry in of(kind) if not is_named(entry)}
    assert wrong == {file: called for file, called in MISSED.items() if file.startswith(f"{kind}/")}


def test_a_failure_with_patterns_has_a_log():
    logged = {entry["id"] for kind in FAILED for entry in of(kind)}
    assert {failure.id for failure in FAILURES if failure.patterns} - logged == WITHOUT_A_LOG


@pytest.mark.parametrize(("kind", "expected"), [("healthy", None), ("unknown", "unknown")])
def test_logs_without_a_known_failure_get_no_id(kind, expected):
    verdicts = {entry["file"]: verdict(entry["file"]) for entry in of(kind)}
    assert {file: found for file, found in verdicts.items() if found != expected} == {}


def test_no_log_tells_whose_machine_it_was():
    private = {}
    for entry in INDEX:
        text = (CORPUS / entry["file"]).read_text("utf-8", errors="replace")
        if found := PRIVATE.search(text):
            private[entry["file"]] = text[max(0, found.start() - 80) : found.end() + 80]
    assert private == {}


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Records a log as the command line does, in an empty corpus: its text and its line of the index."""
    monkeypatch.setattr(capture, "CORPUS", tmp_path)
    monkeypatch.setattr(capture, "INDEX", tmp_path / "index.jsonl")
    monkeypatch.setattr(capture, "PACKAGES", ("pytest",))

    def record(name, script, kind="known"):
        (tmp_path / kind).mkdir(exist_ok=True)
        (tmp_path / name).write_text(script, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["capture", "no-loss", str(tmp_path / name), "--set", kind])
        capture.main()
        lines = (tmp_path / "index.jsonl").read_text("utf-8").splitlines()
        entries = [json.loads(line) for line in lines]
        assert len({entry["file"] for entry in entries}) == len(entries)
        return (tmp_path / entries[-1]["file"]).read_text("utf-8"), entries[-1]

    return record


def test_a_log_is_recorded_with_its_line_of_the_index(recorded):
    script = "import os, sys\nimport tiny\nprint(os.getcwd(), tiny.WORDS, flush=True)\nsys.exit('lost')\n"
    text, entry = recorded("boom.py", script)
    assert text == "/home/user/project 60\nlost\n"
    assert entry == {
        "file": "known/no-loss.log", "id": "no-loss", "how": "caused", "by": "boom.py",
        "versions": {"pytest": pytest.__version__}, "set": "known",
    }  # fmt: skip
    assert MADE_BY.fullmatch(entry["by"])


def test_a_log_that_is_recorded_again_replaces_the_first(recorded):
    recorded("boom.sh", "echo first")
    text, entry = recorded("boom.sh", "echo second; pwd >&2")
    assert (text, entry["by"]) == ("second\n/home/user/project\n", "boom.sh")


def test_a_healthy_log_has_no_id(recorded):
    assert recorded("fine.sh", "echo fine", "healthy")[1]["id"] is None
