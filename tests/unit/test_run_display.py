"""The display of a running run: the status line, the lines that stay, a terminal that is stopped or gone."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import socket
import termios
import threading
import time
from dataclasses import replace

import pytest
from every import every
from factories import plan
from patience import wait_until
from terminal import terminal

from launcher.execute.record import NewRows
from launcher.files.rank_status import RankStatus
from launcher.report.outcome import Outcome, echo, emit, harmless, note
from launcher.report.run_display import (
    Memory,
    RunState,
    Screen,
    Showing,
    columns_of,
    cut,
    live_line,
    row_line,
    showing,
)
from launcher.report.tables import duration
from launcher.report.terminal import is_coloured, is_terminal

GIB = 2**30


@pytest.fixture(autouse=True)
def of_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


NOW = RunState(
    phase="train", step=120, steps=2000, left_s=4321.0, loss=1.23456, speed="3,073 tokens/s",
    memory=Memory("GPU", 61 * GIB, 64 * GIB), restarts=1,
)  # fmt: skip


def test_a_run_is_one_line():
    assert live_line(NOW, 200) == (
        "step 120/2,000 · loss 1.235 · 1 h 12 min left · GPU 61.00 GiB of 64.00 GiB planned · 3,073 tokens/s "
        "· restarted 1 time"
    )


@every("columns", range(1, 140))
def test_the_line_fits_every_width(columns):
    wide = RunState(phase="load", title="重みを読み込む", done=3, total=7, unit="B")
    assert columns_of(live_line(NOW, columns)) <= columns
    assert columns_of(live_line(wide, columns)) <= columns
    assert live_line(NOW, columns)


def test_parts_that_do_not_fit_are_left_out():
    assert live_line(NOW, 60) == "step 120/2,000 · loss 1.235 · 1 h 12 min left"
    assert live_line(NOW, 10) == "step 120/…"


def test_long_operations_have_a_progress_bar():
    load = RunState(phase="load", title="Loading weights", done=68, total=272)
    assert live_line(load, 100) == "Loading weights [#####...............] 25%, 68 of 272"
    unknown = RunState(phase="load", title="Downloading", done=3 * GIB, unit="B")
    assert live_line(unknown, 100) == "Downloading: 3.00 GiB"
    save = RunState(
        phase="save", step=5, steps=9, title="Hashing", done=GIB, total=2 * GIB, unit="B", loss=1.0
    )
    assert live_line(save, 100).startswith(
        "step 5/9 · Hashing [##########..........] 50%, 1.00 GiB of 2.00 GiB"
    )
    assert live_line(RunState(phase="load"), 100) == "loading"
    assert live_line(RunState(phase="load", for_s=64.0), 100) == "loading, 1 min 4 s"
    assert live_line(RunState(phase="load", for_s=1.0), 100) == "loading, 1 s"
    assert live_line(RunState(phase="load", title="Converting x.gguf"), 100) == "Converting x.gguf"
    assert live_line(RunState(phase="load", title="Converting", for_s=9.0), 100) == "Converting, 9 s"
    assert live_line(RunState(phase="ended", steps=3), 100) == ""


def test_a_loss_that_is_not_finite_is_shown():
    assert live_line(replace(NOW, loss=math.nan), 60) == "step 120/2,000 · loss not finite · 1 h 12 min left"


def test_a_long_step_shows_its_time():
    assert "this step" not in live_line(replace(NOW, for_s=20.0), 200)
    assert "this step 2 s so far" in live_line(replace(NOW, step=0, for_s=2.0), 200), "nothing else moves"
    assert live_line(replace(NOW, for_s=2400.0), 75) == (
        "step 120/2,000 · loss 1.235 · 1 h 12 min left · this step 40 min so far"
    )


@pytest.mark.parametrize("columns", [20, 40, 70])
def test_a_title_stays_on_its_line(columns):
    title = "model\x1b[31m\tpart\x07\n\x1b]0;owned\x07 of all"
    line = live_line(RunState(phase="load", title=title, done=1, unit="fi\nles"), columns)
    assert columns_of(harmless(line)) <= columns
    assert harmless(line) == line
    assert "\t" not in line
    assert "\x1b" not in line


def test_rows_as_lines():
    row = {
        "step": 10,
        "loss": 1.27345,
        "learning_rate": 8.333e-05,
        "grad_norm": 0.4,
        "tokens_per_second": 106.4,
    }
    assert row_line(row, NOW) == (
        "step 10/2,000: loss 1.273, learning rate 8.333e-05, gradients 0.4, 3,073 tokens/s, 1 h 12 min left, "
        "GPU 61.00 GiB of 64.00 GiB planned, restarted 1 time"
    )
    assert row_line({"step": 3, "loss": None}, RunState()) == "step 3: loss not finite"
    scores = {"step": 20, "eval_loss": 1.5, "eval_accuracy": 0.25, "eval_runtime": 3.0}
    assert row_line(scores, NOW) == "step 20/2,000: evaluated: eval_loss 1.5, eval_accuracy 0.25"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.4, "0 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


def test_columns_of_wide_characters_and_combining_marks():
    assert [columns_of(text) for text in ("abc", "重み", "e\u0301", "\x1b[31mred\x1b[0m")] == [3, 4, 1, 3]
    assert cut("重みを", 4) == "重…"
    assert cut("abcd", 4) == "abcd"
    assert cut("abcde", 4) == "abc…"


def test_lines_stay_above_the_status_line():
    with terminal() as shown:
        screen = Screen(shown.stream)
        screen.draw(lambda columns: "step 1")
        screen.line("a warning")
        screen.draw(lambda columns: "step 2")
        screen.line("two\nlines \x1b[2J")
        wait_until(lambda: shown.screen() == "a warning\ntwo\nlines \\x1b[2J\nstep 2")
        screen.draw(lambda columns: "")
        screen.close()
        screen.close()
        assert shown.end() == "a warning\ntwo\nlines \\x1b[2J\n"


def test_colours_and_control_characters_are_removed_from_pipes(capsys, monkeypatch):
    painted_line = "\x1b[1;31mof a rank\x1b[0m, of \x1b[2Ja recipe"
    echo(painted_line)
    emit("plan", Outcome({}, painted_line), as_json=False)
    note(painted_line)
    assert {*capsys.readouterr().out.splitlines()} == {"of a rank, of \\x1b[2Ja recipe"}
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal() as shown:
        screen = Screen(shown.stream)
        screen.line(painted_line)
        screen.close()
        assert shown.end() == "of a rank, of \\x1b[2Ja recipe\n"
        assert b"\x1b[1;31m" not in shown.written


def test_a_colour_is_reset_at_the_end_of_its_line():
    with terminal() as shown:
        screen = Screen(shown.stream)
        screen.line("\x1b[31mred until it was cut o")
        screen.close()
        wait_until(lambda: b"\n" in shown.written)
        assert shown.written == b"\x1b[31mred until it was cut o\x1b[0m\r\n"


def test_the_width_is_read_at_each_drawing():
    with terminal(50) as shown:
        screen, widths = Screen(shown.stream), []
        screen.draw(lambda columns: widths.append(columns) or "x" * columns)
        shown.resize(30)
        screen.draw(lambda columns: widths.append(columns) or "y" * columns)
        assert widths == [49, 29]
        wait_until(lambda: b"y" in shown.written)
        assert b"\x1b[1A\r\x1b[J" in shown.written, "what was drawn before takes two rows by now"
        screen.close()


def test_a_stopped_terminal_does_not_block(monkeypatch):
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream:
        termios.tcflow(writer, termios.TCOOFF)  # Ctrl-S
        screen = Screen(stream)
        for step in range(1000):  # one that blocks meets the test's timeout
            screen.draw(lambda columns, step=step: f"step {step}")
            screen.line("x" * 2000)
        assert len(screen._waiting) <= 1 << 20
        termios.tcflow(writer, termios.TCOON)
        got = b""
        while b"last" not in got:
            screen.draw(lambda columns: "last")
            got += os.read(reader, 1 << 16)
        assert b"step 1" not in got, "nothing is drawn before what waits"
        screen.close()
    os.close(reader)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_stopped_terminal_without_a_status_line_does_not_block(monkeypatch, as_json):
    reader, writer = pty.openpty()
    monkeypatch.setenv("TERM", "xterm" if as_json else "dumb")
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stderr" if as_json else "sys.stdout", stream)
        termios.tcflow(writer, termios.TCOOFF)
        resumed = []
        saved = threading.Timer(
            60, lambda: resumed.append(termios.tcflow(writer, termios.TCOON))
        )  # a test that fails ends, too
        saved.start()
        with showing(as_json=as_json) as shown:
            for step in range(100):
                shown.say(f"step {step}")
                shown.look({})
            assert resumed == [], "it blocked"
            termios.tcflow(writer, termios.TCOON)
        saved.cancel()
        assert os.read(reader, 1 << 16).startswith(b"step 0\r\nstep 1\r\n")
    os.close(reader)


def test_a_closed_terminal_raises_no_error(capsys):
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream:
        screen = Screen(stream)
        os.close(reader)
        screen.draw(lambda columns: "step 1")
        screen.line("a line")
        screen.line("another")
        screen.draw(lambda columns: "step 2")
        screen.close()
    assert "another" in capsys.readouterr().out


def test_a_pipe_gets_only_the_lines_that_stay(capsys, monkeypatch):
    screen = Screen()
    assert not screen.is_live
    screen.draw(lambda columns: "step 1")
    screen.line("a line")
    screen.close()
    assert capsys.readouterr().out == "a line\n"
    with terminal() as shown:
        monkeypatch.setenv("TERM", "dumb")
        dumb = Screen(shown.stream)
        assert not dumb.is_live
        dumb.close()  # the terminal ends with the last who has it open


def test_a_background_job_draws_no_status_line(monkeypatch):
    with terminal() as shown:
        screen = Screen(shown.stream)
        monkeypatch.setattr("launcher.report.run_display.os.tcgetpgrp", lambda descriptor: 1)
        screen.draw(lambda columns: "step 1")
        screen.line("a line")
        screen.close()
        assert shown.end() == "a line\n"


def test_no_color_and_dumb_terminals_have_no_colours(monkeypatch):
    with terminal() as shown:
        assert is_terminal(shown.stream)
        assert is_coloured(shown.stream)
        monkeypatch.setenv("NO_COLOR", "1")
        assert not is_coloured(shown.stream)
        monkeypatch.setenv("NO_COLOR", "")
        monkeypatch.setenv("TERM", "dumb")
        assert not is_coloured(shown.stream)
    assert not is_terminal(io.StringIO())
    assert not is_terminal(None)


# --- from the statuses of the ranks

HERE = socket.gethostname()
FIRST = RankStatus(0, HERE, 7, 1, "train", 5, 0.0, 2.0, None, steps=20, memory=3 * GIB)


def shown(tmp_path, statuses, *rows, **settings):
    """The lines printed for these statuses."""
    said = []
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = plan(tmp_path, settings.pop("hardware", "2xA100-80GB"), **settings)
    Showing(said.append).looking(tmp_path)(made)({s.rank: s for s in statuses})
    return made, said


ROW = {"step": 5, "loss": 2.0, "tokens_per_second": 50.0}


def test_memory_is_that_of_the_fullest_gpu_with_its_context(tmp_path):
    ranks = [FIRST, replace(FIRST, rank=1, memory=4 * GIB, median=3.0, step=4, host="elsewhere")]
    made, said = shown(tmp_path, ranks, ROW)
    used, planned = 4 * GIB + made.memory.components.outside, made.memory.needed
    assert made.memory.components.nccl > 0
    memory = f"GPU {used / GIB:.2f} GiB of {planned / GIB:.2f} GiB planned"
    assert said == [f"step 5/20: loss 2, 50 tokens/s, 45 s left, {memory}"]


def test_without_gpus_memory_is_that_of_the_processes_of_this_host(tmp_path):
    ranks = [FIRST, replace(FIRST, rank=1), replace(FIRST, rank=2, host="elsewhere")]
    made, said = shown(tmp_path, ranks, ROW, hardware="2xcpu")
    planned = made.memory.host_bytes / GIB
    assert said[0].endswith(f"host 6.00 GiB of {planned:.2f} GiB planned")


def moments(tmp_path, status, *rows):
    """The Moment of the status line."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = Showing(lambda line: None).begin(plan(tmp_path, "2xA100-80GB"), tmp_path).__self__
    shown.look({0: status})
    return shown._moment({0: status})


def test_the_time_left_decreases_within_a_step(tmp_path):
    hour = replace(FIRST, median=3600.0, since=time.time() - 1800.0)
    assert moments(tmp_path, hour).left_s == pytest.approx(14.5 * 3600, abs=5)
    late = replace(hour, since=time.time() - 9000.0)
    assert moments(tmp_path, late).left_s == pytest.approx(14 * 3600)
    assert moments(tmp_path, replace(hour, phase="evaluate")).left_s == pytest.approx(15 * 3600)
    assert moments(tmp_path, replace(hour, step=20)).left_s == 0


def test_a_loss_of_null_is_not_finite(tmp_path):
    assert math.isnan(moments(tmp_path, FIRST, {"step": 5, "loss": None}).loss)
    assert moments(tmp_path, FIRST).loss is None


def test_speed_is_in_samples_without_tokens(tmp_path):
    made, said = shown(tmp_path, [FIRST], {**ROW, "tokens_per_second": 0.0})
    assert f"{made.batch.global_size / 2:.1f} samples/s" in said[0]


def test_rows_of_an_earlier_attempt_are_not_shown_again(tmp_path):
    _, said = shown(tmp_path, [replace(FIRST, begun=5)], ROW, {"step": 6, "loss": 1.5})
    assert [line.partition(":")[0] for line in said] == ["step 6/20"]
    assert shown(tmp_path, [replace(FIRST, steps=None)], ROW)[1] == [], "the file may be an earlier start's"


def test_each_attempt_counts_as_a_restart(tmp_path):
    said = []
    looking = Showing(said.append).looking(tmp_path)
    made = plan(tmp_path, "2xA100-80GB")
    looking(made)
    look = looking(made)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    look({0: FIRST})
    assert said[0].endswith("restarted 1 time")


@pytest.mark.parametrize("replaced", [False, True])
def test_reading_continues_where_it_stopped(tmp_path, replaced):
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
