"""What of the ranks' statuses and rows becomes one line."""

from __future__ import annotations

import json
import math
import socket
import time
from dataclasses import replace

import pytest
from factories import plan

from launcher.execute.record import NewRows
from launcher.facts.rank_status import RankStatus
from launcher.report.run_display import Showing

GIB = 2**30
HERE = socket.gethostname()
FIRST = RankStatus(0, HERE, 7, 1, "train", 5, 0.0, 2.0, None, steps=20, memory=3 * GIB)


def shown(tmp_path, statuses, *rows, **settings):
    """The lines of one look at these."""
    said = []
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = plan(tmp_path, settings.pop("hardware", "2xA100-80GB"), **settings)
    Showing(said.append).looking(tmp_path)(made)({s.rank: s for s in statuses})
    return made, said


ROW = {"step": 5, "loss": 2.0, "tokens_per_second": 50.0}


def test_the_fullest_gpu_and_its_context_stand_beside_the_plan(tmp_path):
    ranks = [FIRST, replace(FIRST, rank=1, memory=4 * GIB, median=3.0, step=4, host="elsewhere")]
    made, said = shown(tmp_path, ranks, ROW)
    used, planned = 4 * GIB + made.memory.components.context, made.memory.needed
    memory = f"GPU {used / GIB:.2f} GiB of {planned / GIB:.2f} GiB planned"
    assert said == [f"step 5/20: loss 2, 50 tokens/s, 45 s left, {memory}"]


def test_without_gpus_the_processes_of_this_machine_do(tmp_path):
    ranks = [FIRST, replace(FIRST, rank=1), replace(FIRST, rank=2, host="elsewhere")]
    made, said = shown(tmp_path, ranks, ROW, hardware="2xcpu")
    planned = made.memory.host_bytes / GIB
    assert said[0].endswith(f"host 6.00 GiB of {planned:.2f} GiB planned")


def moments(tmp_path, status, *rows):
    """What the line at the bottom is made of."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = Showing(lambda line: None).begin(plan(tmp_path, "2xA100-80GB"), tmp_path).__self__
    shown.look({0: status})
    return shown._moment({0: status})


def test_the_time_left_goes_down_within_a_step(tmp_path):
    hour = replace(FIRST, median=3600.0, since=time.time() - 1800.0)
    assert moments(tmp_path, hour).left_s == pytest.approx(14.5 * 3600, abs=5)
    late = replace(hour, since=time.time() - 9000.0)
    assert moments(tmp_path, late).left_s == pytest.approx(14 * 3600)
    assert moments(tmp_path, replace(hour, phase="evaluate")).left_s == pytest.approx(15 * 3600)
    assert moments(tmp_path, replace(hour, step=20)).left_s == 0


def test_a_loss_of_null_was_not_finite(tmp_path):
    assert math.isnan(moments(tmp_path, FIRST, {"step": 5, "loss": None}).loss)
    assert moments(tmp_path, FIRST).loss is None


def test_pictures_have_no_tokens(tmp_path):
    made, said = shown(tmp_path, [FIRST], {**ROW, "tokens_per_second": 0.0})
    assert f"{made.batch.global_size / 2:.1f} samples/s" in said[0]


def test_rows_of_an_earlier_start_are_not_said_again(tmp_path):
    _, said = shown(tmp_path, [replace(FIRST, begun=5)], ROW, {"step": 6, "loss": 1.5})
    assert [line.partition(":")[0] for line in said] == ["step 6/20"]
    assert shown(tmp_path, [replace(FIRST, steps=None)], ROW)[1] == [], "the file may be an earlier start's"


def test_each_try_counts_as_a_restart(tmp_path):
    said = []
    looking = Showing(said.append).looking(tmp_path)
    made = plan(tmp_path, "2xA100-80GB")
    looking(made)
    look = looking(made)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    look({0: FIRST})
    assert said[0].endswith("restarted 1 time")


@pytest.mark.parametrize("replaced", [False, True])
def test_rows_are_read_on_where_reading_stopped(tmp_path, replaced):
    path = tmp_path / "metrics.jsonl"
    rows = NewRows(path)
    assert rows.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert rows.read() == [{"step": 1}]
    if replaced:
        aside = tmp_path / "aside"
        aside.write_text('{"step": 2}\n')
        aside.replace(path)
        assert rows.read() == [{"step": 2}]
    with path.open("a") as stream:
        stream.write('ep": 3}\nnonsense\n[]\n' if not replaced else '{"step": 3}\n')
    assert rows.read() == [{"step": 3}]
    assert rows.read() == []
