"""The statistics and the token counts of the comparison of training speeds."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from patience import patience

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import throughput  # noqa: E402  (benchmarks is no package)
from paired import ratio_of  # noqa: E402
from peers.environments import NotInstalled, environment_of  # noqa: E402
from peers.process import Run, RunFailed, read_notes, run_together  # noqa: E402
from peers.work import cut, step_tokens, write_rows  # noqa: E402


def run(*seconds: float, cpu: tuple[float, ...] = (), rewards: tuple[float, ...] = ()) -> Run:
    return Run(9.0, list(seconds), 1.5, 10**9, [2.0, 1.5], list(rewards), list(cpu))


def test_a_ratio_is_of_the_times_that_steps_typically_take():
    slow_day = [[2.0, 4.0, 6.0], [20.0, 40.0, 60.0], [2.0, 4.0, 6.0]]
    fast = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [1.0, 2.0, 3.0]]
    found = ratio_of(fast, slow_day)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    spiked = ratio_of([[1.0, 2.0, 300.0], [10.0, 20.0, 30.0], [1.0, 2.0, 3.0]], slow_day)
    assert spiked.value == pytest.approx(12 / 33), "of three rounds two were slow in the last step"
    spiked = ratio_of([[1.0, 2.0, 300.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], slow_day)
    assert spiked.value == pytest.approx(2.0), "one slow moment does not move a step"
    assert ratio_of(slow_day, fast).value == pytest.approx(0.5)
    assert ratio_of([[1.0, 1.0]], [[1.0, 5.0]]).value == pytest.approx(3.0), "a long step counts for more"


def test_the_interval_holds_the_value_and_narrows_with_rounds():
    few = ratio_of([[1.0], [1.0], [1.0]], [[1.9], [2.0], [2.2]])
    assert 1.9 <= few.low <= few.value <= few.high <= 2.2
    many = ratio_of([[1.0]] * 30, [[1.9], [2.0], [2.2]] * 10)
    assert many.high - many.low < few.high - few.low
    assert ratio_of([[1.0]], [[2.0]], seed=1) == ratio_of([[1.0]], [[2.0]], seed=2)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([[1.0]], []), ([[1.0, 2.0]], [[1.0]])])
def test_what_does_not_pair_is_no_ratio(ours, theirs):
    with pytest.raises(ValueError, match=r"pair|no round"):
        ratio_of(ours, theirs)


def test_tokens_of_steps_are_those_of_the_rows_in_their_order():
    assert step_tokens([1, 2, 3, 4, 5, 6, 7], samples=2, steps=3) == [3, 7, 11]
    with pytest.raises(ValueError, match="need 8 rows, not 7"):
        step_tokens([1, 2, 3, 4, 5, 6, 7], samples=2, steps=4)


class Words:
    """A tokenizer that takes each word for a token."""

    def __call__(self, text: str, return_offsets_mapping: bool = False) -> dict:
        spans, end = [], 0
        for word in text.split():
            start = text.index(word, end)
            end = start + len(word)
            spans.append((start, end))
        return {"input_ids": spans, "offset_mapping": spans}


def test_rows_are_cut_so_that_no_side_has_to(tmp_path):
    assert cut("one two three", Words(), 2) == ("one two", 2)
    assert cut("one two", Words(), 2) == ("one two", 2)
    file = tmp_path / "rows.jsonl"
    lengths = write_rows(["one two three four", "one"], Words(), 3, file)
    assert lengths == (3, 2), "with the end-of-text token"
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert texts == ["one two", "one"]
    assert write_rows(["one", "a b", "one two three", "a"], Words(), 9, file, first=2) == (4, 3, 2, 2)
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert texts == ["one two three", "a b", "one", "a"]


def test_speed_leaves_the_first_steps_out():
    assert throughput.speed([run(5.0, 2.0, 2.0)], tokens=[100, 100, 40, 40], drop=2) == 20.0
    assert throughput.speed([run(5.0, 2.0, 2.0)], tokens=[100, 90, 40, 40], drop=1) == pytest.approx(170 / 9)
    slow = [run(5.0, 2.0, 9.0), run(5.0, 9.0, 2.0), run(5.0, 2.0, 2.0)]
    assert throughput.speed(slow, tokens=[100, 100, 40, 40], drop=2) == 20.0, "a step's time is the median"


def test_targets():
    runs = {
        "plain": [run(9.0, 1.0), run(9.0, 1.0)],
        "ours": [run(9.0, 0.5), run(9.0, 0.5)],
        "ours-equal": [run(9.0, 1.0), run(9.0, 1.1)],
        "trl-best": [run(9.0, 0.6), run(9.0, 0.6)],
        "trl-free": [run(9.0, 0.9), run(9.0, 0.9)],
    }
    found = {(one.side, one.others): holds for one, _, holds in throughput.judge(
        (*throughput.TARGETS_CPU, *throughput.TARGETS_GPU), runs, drop=2)}  # fmt: skip
    assert found[("ours", ("plain",))] is True
    assert found[("ours-equal", ("plain",))] is False, "the lower end of the interval is 1 / 1.1"
    assert found[("ours", ("trl",))] is None, "what did not run is no target met"
    assert found[("ours", throughput.BEST_OF_TRL)] is False, "the fastest of trl's counts"


def test_targets_of_tasks_are_of_cpu_time_step_by_step():
    runs = {
        "plain": [run(9.0, 1.0, 1.0, 1.0, cpu=(9.0, 0.2, 0.3, 0.2))],
        "ours": [run(9.0, 5.0, 5.0, 5.0, cpu=(9.0, 0.2, 0.3, 0.2))],
    }
    ((_, said, holds),) = throughput.judge(throughput.TARGETS_TASK[False], runs, drop=2)
    assert holds, said
    ((_, said, holds),) = throughput.judge(throughput.TARGETS_TASK[True], runs, drop=2)
    assert holds is False, said
    runs["ours"] = [run(9.0, 1.0, 1.0, 1.0, cpu=(9.0, 0.21, 0.3, 0.21))]
    ((_, said, holds),) = throughput.judge(throughput.TARGETS_TASK[False], runs, drop=2)
    assert holds is False, said
    found = throughput.ratios(runs, "plain", 2, "cpu", each=True)["ours"]
    assert found.value == pytest.approx(0.2 / 0.21)
    assert (found.low, found.high) == pytest.approx((0.2 / 0.21, 1.0)), "the interval is over steps"


def test_a_side_that_trains_otherwise_makes_no_claim():
    runs = {"plain": [run(1.0, rewards=(0.5, 0.25))], "ours": [run(1.0, rewards=(0.5, 0.25))]}
    assert throughput.other_course(runs) == {}
    runs["ours"][0].rewards[1] = 0.5
    assert throughput.other_course(runs).keys() == {"ours"}, "the second generation has another reward"
    runs["ours"] = [run(1.0, rewards=(0.5, 0.25))]
    runs["ours"][0].losses[1] = 1.51
    assert throughput.other_course(runs).keys() == {"ours"}
    assert throughput.other_work(runs) == {}, "which looks at the first loss"
    for side, loss in (("plain", 0.0), ("ours", 1e-8)):
        runs[side][0].losses[:] = [loss]
    assert throughput.other_course(runs) == {}, "GRPO's losses are rounding"


def test_notes_become_a_run(tmp_path):
    notes = tmp_path / "steps.jsonl"
    lines = [{"step": 1, "time": 112.0, "cpu": 4.0}, {"step": 1, "loss": 2.5, "reward": 0.5},
             {"step": 2, "time": 115.0, "cpu": 6.5}, {"step": 2, "loss": 2.0, "reward": 0.75},
             {"peak": None}]  # fmt: skip
    notes.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    found = read_notes(notes, started=100.0, steps=2, tree_bytes=7)
    assert found == Run(12.0, [3.0], 2.0, 7, [2.5, 2.0], [0.5, 0.75], [2.5])
    lines.insert(2, {"step": 2, "begun": 114.0, "cpu_begun": 6.0})
    notes.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    found = read_notes(notes, started=100.0, steps=2, tree_bytes=7)
    assert (found.seconds, found.cpu) == ([1.0], [0.5]), "from where its turn came"
    with pytest.raises(RunFailed, match="2 of 3 steps"):
        read_notes(notes, started=100.0, steps=3, tree_bytes=7)


STEPS = """
import os, sys, time
from types import SimpleNamespace
sys.path.insert(0, {peers!r})
# Stand-ins: their import takes seconds, and the clock only asks for a GPU and derives from a class.
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
sys.modules["transformers"] = SimpleNamespace(TrainerCallback=object)
from clock import callbacks
(clock,) = callbacks()
for step in range(1, 5):
    begun = time.time()
    time.sleep({seconds})
    with open({order!r}, "a") as file:
        file.write(f"{name} {{step}} {{begun}} {{time.time()}}\\n")
    state = SimpleNamespace(global_step=step, max_steps=4)
    clock.on_step_end(None, state, None)
    clock.on_log(None, state, None, {{"loss": 4.0 - step}})
clock.on_train_end(None, None, None)
"""


def trained(tmp_path, name: str, seconds: float) -> tuple[list[str], Path]:
    """A side whose steps sleep, and write where and when they did."""
    (tmp_path / name).mkdir()
    told = {"peers": str(ROOT / "benchmarks" / "peers"), "order": str(tmp_path / "order"), "name": name}
    return [sys.executable, "-c", STEPS.format(seconds=seconds, **told)], tmp_path / name


def test_sides_take_their_steps_in_turn(tmp_path):
    sides = {"fast": trained(tmp_path, "fast", 0.05), "slow": trained(tmp_path, "slow", 0.3)}
    runs, failed = run_together(sides, 4, dict(os.environ), patience(120))
    assert failed == {}
    lines = [line.split() for line in (tmp_path / "order").read_text().splitlines()]
    taken = [(name, int(step)) for name, step, _, _ in lines]
    assert sorted(taken[:2]) == [("fast", 1), ("slow", 1)]
    for step in (2, 3, 4):
        assert {entry for entry in taken[2 * step - 2 : 2 * step]} == {("fast", step), ("slow", step)}
    assert taken[4][0] != taken[6][0], "another begins each turn"
    spans = sorted((float(begun), float(ended)) for _, step, begun, ended in lines if int(step) > 1)
    assert all(ended <= later for (_, ended), (later, _) in pairwise(spans)), "one computes at a time"
    assert min(runs["slow"].seconds) >= 0.3
    order = sorted((float(begun), float(ended), name, int(step)) for name, step, begun, ended in lines)
    for (_, before, *_), (*_, name, step), (after, *_) in zip(order, order[1:], order[2:], strict=False):
        if step > 1:  # between the steps of the others
            assert runs[name].seconds[step - 2] <= after - before, "waiting is no part of a step"
    assert runs["slow"].losses == [3.0, 2.0, 1.0, 0.0]


def test_a_side_that_is_alone_waits_for_nobody(tmp_path):
    runs, failed = run_together({"one": trained(tmp_path, "one", 0.0)}, 4, dict(os.environ), patience(120))
    assert failed == {}
    assert len(runs["one"].seconds) == 3
    assert not (tmp_path / "one" / "gate").exists()


def test_a_side_that_fails_says_why_and_one_that_hangs_is_ended(tmp_path):
    def told(name: str, code: str) -> tuple[list[str], Path]:
        (tmp_path / name).mkdir()
        return [sys.executable, "-c", code], tmp_path / name

    limit_s = patience(5.0)
    sides = {
        "broken": told("broken", "raise ValueError('no such thing')"),
        "deaf": told("deaf", "import time; time.sleep(3600)"),
        "well": trained(tmp_path, "well", 0.0),
    }
    runs, failed = run_together(sides, 4, dict(os.environ), limit_s)
    assert runs.keys() == {"well"}
    assert failed["broken"] == "ended with code 1 before step 1: ValueError: no such thing"
    assert failed["deaf"].startswith(f"stopped after {limit_s:.0f} s without step 1")


def test_an_installation_that_failed_is_not_tried_again(tmp_path):
    with pytest.raises(NotInstalled, match=r"Python 9\.9"):
        environment_of("nothing==1", "9.9", tmp_path)
    (tmp_path / "venvs" / "nothing-1.failed").write_text("ERROR: no such package", encoding="utf-8")
    with pytest.raises(NotInstalled, match=r"no such package .*may be deleted"):
        environment_of("nothing==1", "", tmp_path)


def test_page_of_performance_is_what_the_records_say(tmp_path):
    from performance_page import ABSENT, filled

    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert filled(page) == page, "python benchmarks/performance_page.py docs/performance.md writes it"
    assert filled(page, tmp_path).count(ABSENT) == 8
    row = {"side": "ours", "tokens_per_second": 120.5, "peak_bytes": 2e9, "first_step_s": 9.5,
           "final_loss": 1.25, "to_plain": {"value": 1.4, "low": 1.3, "high": 1.5},
           "cpu_to_plain": {"value": 1.1, "low": 1.05, "high": 1.2}}  # fmt: skip
    record = {"machine": "2 CPU cores", "date": "2026-11-23", "versions": {"torch": "2.13.0"},
              "model": "smollm2", "rows": [row], "failed": {"axolotl": "no driver"}}  # fmt: skip
    (tmp_path / "throughput_here.json").write_text(json.dumps(record), encoding="utf-8")
    trained = {"name": "full-sdpa", "model": "meta-llama/Llama-3.1-8B", "tokens_per_second": 9000.0,
               "step_s": 1.0, "flops_per_second": 4e14, "mfu": 0.4,
               "mfu_square": 0.43, "of_measured": None}  # fmt: skip
    skipped = {"name": "full-liger", "skipped": "liger_kernel not installed"}
    gpu = {"device": "H200", "date": "2026-11-23", "versions": {}, "rows": [trained, skipped]}
    (tmp_path / "gpu_throughput_h200.json").write_text(json.dumps(gpu), encoding="utf-8")
    text = filled(page, tmp_path)
    assert "| `ours` | 120.5 | 1.40 (1.30 to 1.50) | 1.10 (1.05 to 1.20) | 2.00 | 9.5 | 1.2500 |" in text
    assert "- `axolotl`: no claim; no driver" in text
    assert "| `full-sdpa` | Llama-3.1-8B | 9,000 | 400 | 40.0% | 43.0% |  |" in text
    assert "| `full-liger` |  |  |  |  |  | liger_kernel not installed |" in text
    assert filled(text, tmp_path) == text, "again changes nothing"
