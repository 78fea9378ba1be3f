"""What the supervisor makes of statuses, stacks, counters and output: pure, without any process."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import checkpoint

from launcher.errors import Problem, RunFailed
from launcher.execute import attempts
from launcher.execute.attempts import Begun, may_pass, pause_before
from launcher.execute.endings import KnownFailure, ProgramFailed, hang_problem, run_failure, was_stopped
from launcher.execute.following import Ended
from launcher.execute.output import LogFile, Output, errors_in
from launcher.execute.run_dir import EXCLUDES, FAULTY_GPU
from launcher.execute.supervise import LONGEST_LOOK_S, Limits, Watch, describe_lost, parse_stack, read_stacks
from launcher.files.rank_status import LEFT_EARLY, RankStatus
from launcher.knowledge.diagnose.findings import Error, Finding
from launcher.knowledge.failures.catalogue import FAILURES
from launcher.machine.probe import OomKills, has_killed, read_oom_kills

LIMITS = Limits(
    step=10.0, first_steps=40.0, start=20.0, load=30.0, evaluate=50.0, save=15.0, finish=60.0, skip=90.0
)


def status(rank=0, phase="train", step=5, since=0.0, median=1.0, code=None):
    return RankStatus(rank, "here", 100 + rank, 1, phase, step, since, median, code)


def watched(*statuses, seconds, factor=2.0, save_s=0.0, step_s=0.0, alive=None, tmp_path="/nowhere"):
    """A watch that saw the same statuses for so long."""
    watch = Watch(tmp_path, factor, save_s, step_s, LIMITS)
    found = {one.rank: one for one in statuses}
    living = found.keys() if alive is None else alive
    watch.see(found, living, 0.5)
    for _ in range(int(seconds * 2)):
        watch.see(found, living, 0.5)
    return watch


@pytest.mark.parametrize(
    ("one", "limit"),
    [
        (status(median=1.0), 10.0),
        (status(median=7.0), 14.0),
        (status(median=None), 40.0),
        (status(phase="start", median=None), 20.0),
        (status(phase="load", median=None), 30.0),
        (status(phase="evaluate"), 50.0),
        (status(phase="save"), 15.0),
        (status(phase="finish"), 60.0),
        (status(phase="skip"), 90.0),
    ],
    ids=lambda value: f"{value.phase}-{value.median}" if isinstance(value, RankStatus) else str(value),
)
def test_a_phase_hangs_after_its_own_limit(one, limit):
    assert watched(one, seconds=limit).hang() is None
    hang = watched(one, seconds=limit + 0.5).hang()
    assert (hang.seconds, hang.limit) == (limit + 0.5, limit)


def test_rows_may_take_any_time_to_prepare_while_other_ranks_wait():
    ranks = [status(phase="prepare", median=None), status(rank=1, phase="prepare", median=None)]
    assert watched(*ranks, seconds=500).hang() is None


def test_a_save_may_take_ten_times_what_the_plan_expects():
    assert watched(status(phase="save"), seconds=119, save_s=12.0).hang() is None
    assert watched(status(phase="save"), seconds=121, save_s=12.0).hang() is not None


def test_a_first_step_may_take_as_many_times_longer_than_the_plan_expects_as_any_other():
    assert watched(status(median=None), seconds=99, step_s=50.0).hang() is None
    assert watched(status(median=None), seconds=101, step_s=50.0).hang() is not None


def test_a_launcher_that_starts_no_rank_hangs():
    assert watched(seconds=19).hang() is None
    hang = watched(seconds=21).hang()
    assert (hang.limit, hang.statuses, hang.behind) == (20.0, {}, [])
    ended = Ended(hang=hang)
    assert hang_problem(Path("/run"), ended).message == "no rank had started after 22 s (limit 20 s)"


def test_a_rank_that_stays_behind_its_last_word_hangs_in_the_end():
    ended = status(0, "ended", code=0)
    assert watched(ended, seconds=59).hang() is None
    assert watched(ended, seconds=61).hang().limit == 60.0
    assert watched(ended, seconds=61, alive=()).hang() is None


def test_what_was_no_fault_of_the_ranks_is_forgiven():
    watch = watched(status(), seconds=11)
    watch.forgive()
    assert watch.hang() is None


def test_a_stop_may_take_twice_the_step_that_runs_and_a_save():
    assert watched(status(median=200.0), seconds=5, save_s=10.0).stop_s == 425.0
    long = watched(status(median=1.0), seconds=50)
    assert (long.pace, long.stop_s) == (50.0, 105.0)
    assert watched(status(median=None), seconds=1000).pace == 300.0, "it may be a hang as well"


def test_a_factor_of_0_never_finds_a_hang():
    assert watched(status(), seconds=100_000, factor=0.0).hang() is None


def test_one_rank_within_its_limit_is_enough():
    """The others wait for the one that saves."""
    saving = status(0, "save"), status(1, "train")
    assert watched(*saving, seconds=12).hang() is None
    assert watched(*saving, seconds=16).hang() is not None


def test_progress_of_one_rank_counts_for_all():
    watch = watched(status(0), status(1), seconds=9)
    watch.see({0: status(0), 1: status(1, step=6, since=3.0)}, {0, 1}, 0.5)
    for _ in range(10):
        watch.see({0: status(0), 1: status(1, step=6, since=3.0)}, {0, 1}, 0.5)
    assert watch.hang() is None


def test_the_rank_with_the_fewest_steps_is_behind():
    hang = watched(status(0, step=5), status(1, step=4), status(2, step=5), seconds=11).hang()
    assert hang.behind == [1]
    assert watched(status(0), status(1), seconds=11).hang().behind == []


def test_a_machine_that_was_suspended_does_not_hang():
    watch = watched(status(), seconds=3)
    watch.see({0: status()}, {0}, 8 * 3600.0)
    assert watch.hang() is None
    assert LIMITS.step > LONGEST_LOOK_S


def test_ranks_that_have_ended_are_not_waited_for():
    ended = status(0, "ended", code=0)
    assert watched(ended, seconds=1000, alive=()).hang() is None
    assert watched(ended, status(1), seconds=11, alive=(1,)).hang() is not None


def test_a_rank_that_vanished_is_lost_and_no_hang():
    watch = watched(status(0), status(1), seconds=100, alive=(0,))
    assert sorted(watch.lost) == [1]
    assert watch.lost_alone
    assert watch.in_trouble
    assert watch.hang() is None


def test_what_goes_down_later_is_no_cause():
    watch = watched(status(0), status(1), status(2), seconds=1, alive=(0, 2))
    watch.see({0: status(0), 1: status(1), 2: status(2, "ended", code=1)}, {0}, 0.5)
    watch.see({0: status(0), 1: status(1), 2: status(2, "ended", code=1)}, (), 0.5)
    assert sorted(watch.lost) == [1]
    assert watch.lost_alone
    assert watch.failed == [2]


def test_a_rank_that_failed_first_is_not_taken_for_lost():
    watch = watched(status(0), status(1, "ended", code=1), seconds=1, alive=(0,))
    watch.see({0: status(0), 1: status(1, "ended", code=1)}, (), 0.5)
    assert watch.failed == [1]
    assert sorted(watch.lost) == [0]
    assert not watch.lost_alone


def test_lost_ranks_are_told_with_their_last_step():
    one = describe_lost({1: status(1, step=3)}, "was killed by SIGKILL", 4)
    assert one == "rank 1 (pid 101) was killed by SIGKILL, last step 4, phase train"
    loading = describe_lost({1: status(1, "load", step=0)}, "was lost", 4)
    assert loading == "rank 1 (pid 101) was lost, last step 0, phase load"
    both = describe_lost({0: status(0), 1: status(1)}, "was killed by SIGKILL", 0)
    assert both == (
        "rank 0 (pid 100, last step 5, phase train) and rank 1 (pid 101, last step 5, phase train) "
        "were killed by SIGKILL"
    )


DUMP = """\
some line of before
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f2 (most recent call first):
  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 2934 in all_reduce
  File "/v/site-packages/transformers/trainer.py", line 100 in train
  File "/home/me/launcher/train/training.py", line 77 in fit
  File "/home/me/launcher/train/worker.py", line 60 in main
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 198 in _run_module_as_main
"""


def test_the_main_threads_calls_are_taken_out_of_a_dump():
    stack = parse_stack(DUMP)
    assert stack.waits
    assert str(stack) == (
        "all_reduce (distributed/distributed_c10d.py:2934), called from fit (train/training.py:77)"
    )
    own = parse_stack('Current thread 0x1 (most recent call first):\n  File "/h/hooks.py", line 3 in f\n')
    assert (str(own), own.waits) == ("f (h/hooks.py:3)", False)
    assert str(parse_stack("nothing")) == "somewhere (it wrote no calls)"


def test_a_rank_of_another_node_that_answers_at_once_is_read(tmp_path):
    log = tmp_path / "logs" / "rank-0.log"
    log.parent.mkdir()
    log.write_text("an older line\n")
    found = read_stacks(
        tmp_path, {0: status()}, 0.3, is_own=lambda rank: False, ask_others=lambda: log.write_text(DUMP)
    )
    assert len(found[0].frames) > 1


@pytest.mark.parametrize(
    ("before", "after", "killed"),
    [
        (OomKills(2, 5), OomKills(3, 6), True),
        (OomKills(2, 5), OomKills(2, 6), False),
        (OomKills(None, 5), OomKills(None, 6), True),
        (OomKills(None, 5), OomKills(None, 5), False),
        (OomKills(None, None), OomKills(None, None), None),
    ],
)
def test_the_groups_own_counter_decides(before, after, killed):
    """The machine's counts what other containers ran, too."""
    assert has_killed(before, after) is killed


def test_counters_of_both_versions_are_read(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert read_oom_kills(tmp_path) == OomKills(None, None)
    write("proc/vmstat", "nr_free_pages 7\noom_kill 4\n")
    write("proc/self/cgroup", "0::/job\n")
    assert read_oom_kills(tmp_path) == OomKills(None, 4)
    write("sys/fs/cgroup/job/memory.events", "low 0\noom 1\noom_kill 2\noom_group_kill 0\n")
    assert read_oom_kills(tmp_path) == OomKills(2, 4)
    write("proc/self/cgroup", "5:cpu:/\n4:memory:/of/the/host\n0::/\n")
    write("sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 9\n")
    assert read_oom_kills(tmp_path) == OomKills(9, 4)


@pytest.mark.parametrize(
    ("codes", "log", "ended", "stopped"),
    [
        ((143, 143), "", Ended(143), True),
        ((143, None), "exitcode  : -15 (pid: 101)", Ended(1), True),
        ((143, 143), "exits with return code = 143", Ended(143), True),
        ((143,), "exitcode  : -9 (pid: 101)", Ended(1), False),
        ((143,), "exits with return code = -11", Ended(245), False),
        ((143, 143), "", Ended(-9, asked=True), False),
        ((143, 143), "", Ended(-15, asked=True), True),
        ((1, 0), "", Ended(1), False),
    ],
)
def test_a_schedulers_signal_before_the_first_step_is_a_stop(tmp_path, codes, log, ended, stopped):
    """Ranks have nothing to save then; nor do those that a launcher ends since another rank failed."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "launcher.log").write_text(log)
    ranks = [
        status(rank, "load" if code is None else "ended", 0, code=code) for rank, code in enumerate(codes)
    ]
    ended.watch = watched(*ranks, seconds=0)
    assert was_stopped(tmp_path, ended) is stopped


def test_a_rank_that_vanished_before_the_first_step_is_no_stop(tmp_path):
    ended = Ended(1, watch=watched(status(0, "load", 0), status(1, "load", 0), seconds=0, alive=[0]))
    both = {0: status(0, "ended", 0, code=LEFT_EARLY), 1: status(1, "load", 0)}
    ended.watch.see(both, [], 0.5)
    assert not was_stopped(tmp_path, ended)


def test_a_restart_tells_the_step_of_the_checkpoint_and_not_of_its_name(tmp_path):
    given_up = checkpoint(tmp_path, 100).rename(tmp_path / "superseded-100-2")
    assert Begun(tmp_path / "new", str(given_up)).resumes()[:2] == (str(given_up), 100)


def known(name):
    failure = next(failure for failure in FAILURES if failure.id == name)
    return KnownFailure(Problem(name, "x"), Finding(failure, Error("", "x"), (), None))


@pytest.mark.parametrize(
    ("failure", "passes"),
    [
        (RunFailed(Problem("rank-lost", "x")), True),
        (RunFailed(Problem("hang", "x")), True),
        (RunFailed(Problem("launcher-lost", "x")), True),
        (RunFailed(Problem("run-failed", "x")), True),
        (RunFailed(Problem("loss-not-finite", "x")), False),
        (RunFailed(Problem("prepare-failed", "x")), False),
        (known("nccl-timeout"), True),
        (known("nccl-peer-died"), True),
        (known("segmentation-fault"), True),
        (known("nccl-system-error"), True),
        (known("gpu-ecc"), True),
        (ProgramFailed(Problem("run-failed", "x")), False),
        (known("gpu-faulty"), False),
        (known("nccl-error"), False),
        (known("shared-memory-full"), False),
        (known("fabric-manager"), False),
        (known("illegal-access"), False),
        (known("hub-unreachable"), True),
        (known("cuda-oom"), False),
        (known("sigkill-oom"), False),
        (known("checkpoint-disk"), False),
        (known("target-modules-missing"), False),
    ],
    ids=lambda value: value.problems[0].code if isinstance(value, RunFailed) else str(value),
)
def test_what_is_bound_to_fail_again_is_not_restarted(failure, passes):
    assert may_pass(failure) is passes


@pytest.mark.parametrize(
    ("kind", "passes"),
    [("TypeError", False), ("ModuleNotFoundError", False), ("ValueError", True), ("Mine", True)],
)
def test_an_error_of_the_users_own_code_is_not_restarted(kind, passes, tmp_path):
    (tmp_path / "logs").mkdir()
    for rank, when, name in ((0, 2.0, "RuntimeError"), (1, 1.0, kind)):
        report = {"rank": rank, "time": when, "type": name, "message": "a thing of hooks.py", "exit_code": 1}
        (tmp_path / "logs" / f"error-rank-{rank}.json").write_text(json.dumps(report))
    failure = run_failure(tmp_path, 1, "launcher.log")
    assert isinstance(failure, RunFailed)
    assert failure.problems[0].code == "run-failed"
    assert may_pass(failure) is passes


@pytest.mark.parametrize("code", ["gpu-ecc", "nccl-system-error"])
def test_a_job_that_leaves_out_faulty_nodes_is_not_restarted_on_them(code, monkeypatch):
    failure, bundle = known(code), SimpleNamespace(plan=SimpleNamespace(elastic=(), on_oom="fail"))
    restarts = SimpleNamespace(next=lambda *_, **__: "again", allowed=1)
    following = attempts._NextAttempt(None, None, restarts, None, None, None, ())
    assert following.after(failure, bundle) == (bundle, "again")
    monkeypatch.setenv(EXCLUDES, "1")
    if code in FAULTY_GPU:
        with pytest.raises(KnownFailure):
            following.after(failure, bundle)
    else:
        assert following.after(failure, bundle) == (bundle, "again")


def test_pauses_double_up_to_five_minutes():
    assert [pause_before(n) for n in range(1, 8)] == [10, 20, 40, 80, 160, 300, 300]
    assert pause_before(1000) == 300


def copied(tmp_path, text, *calls, told=()):
    """What `echo` got of this text, and the log."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    shown = []
    (tmp_path / "log").unlink(missing_ok=True)
    with open(reader, "rb") as stream, LogFile(tmp_path / "log", shown.append) as log:  # noqa: PTH123  # a pipe
        output = Output(stream, log, shown.append, told=lambda: told)
        while not output.ended:
            output.copy(0.1)
        for call in calls:
            call(output)
        output.close()
    return shown, (tmp_path / "log").read_text()


def test_a_ranks_error_that_is_told_in_the_end_is_in_the_log_alone(tmp_path):
    (tmp_path / "error-rank-0.json").write_text(r'{"message": "the loss was nan\nsee there"}')
    (tmp_path / "error-rank-1.json").write_text("{")
    text = "error: the loss was nan\nsee there\nsee there\nerror: gcc failed\nthe loss was nan\n"
    shown, log = copied(tmp_path, text, told=errors_in(tmp_path))
    assert shown == ["error: gcc failed", "the loss was nan"]
    assert log == text


TRACEBACK = "Traceback (most recent call last):\n  File x\nRuntimeError: Connection closed by peer\n"
TABLE = (
    "E1122 10:00:00.1 7 torch/distributed/elastic/multiprocessing/api.py:1000] failed (exitcode: 1)\n"
    "Traceback (most recent call last):\n  File launch.py\nChildFailedError:\n"
)
ELSEWHERE = "a process ended; the output of its launcher and of the other ranks is in "


def test_a_launchers_table_is_in_the_log_alone(tmp_path):
    shown, log = copied(tmp_path, "step 1\n" + TABLE, lambda output: output.release(0.0))
    assert shown == ["step 1", f"{ELSEWHERE}{tmp_path / 'log'}"]
    assert log == "step 1\n" + TABLE


def test_deepspeeds_last_words_too(tmp_path):
    line = "[2026-11-22 10:00:00,1] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 77\n"
    shown, _ = copied(tmp_path, line + line)
    assert shown == [f"{ELSEWHERE}{tmp_path / 'log'}"]


def test_a_traceback_is_shown_before_the_table_unless_a_rank_was_lost(tmp_path):
    text = TRACEBACK + TABLE
    shown, _ = copied(tmp_path, text, lambda output: output.release(0.0))
    assert shown == [*TRACEBACK.splitlines(), f"{ELSEWHERE}{tmp_path / 'log'}"]
    shown, log = copied(tmp_path, text, lambda o: o.silence("a rank was lost"), lambda o: o.release(0.0))
    assert shown == [f"{ELSEWHERE.replace('process ended', 'rank was lost')}{tmp_path / 'log'}"]
    assert log == text


def test_a_bar_that_draws_for_hours_takes_no_memory(tmp_path):
    reader, writer = os.pipe()
    shown = []
    with open(reader, "rb") as stream, LogFile(tmp_path / "log", shown.append) as log:  # noqa: PTH123  # a pipe
        output = Output(stream, log, shown.append)
        for step in range(100):
            os.write(writer, b"%d %%\r" % step + b"x" * 1000 + b"\r%d %%\r" % step)
            output.copy(0.1)
            assert len(output._rest) < 10
        os.write(writer, b"\n")
        os.close(writer)
        while not output.ended:
            output.copy(0.1)
        output.close()
    assert shown == ["99 %"]


def test_a_warning_of_the_launcher_at_the_start_hides_nothing(tmp_path):
    text = "W1122 10:00:00.1 7 torch/distributed/run.py:852] Setting OMP_NUM_THREADS\nstep 1\n"
    assert copied(tmp_path, text)[0] == text.splitlines()


@pytest.mark.parametrize(
    ("phase", "hangs"),
    [("load", False), ("save", False), ("train", True), ("evaluate", True), ("skip", True)],
)
def test_a_bar_that_moves_is_progress_where_nothing_else_tells_of_any(phase, hangs):
    watch = Watch(
        Path("/nowhere"), 2.0, limits=Limits(save=3600.0, load=3600.0, evaluate=3600.0, skip=3600.0)
    )
    for second in range(0, 2 * 3600, 5):
        said = replace(status(phase=phase, median=1.0), title="Loading weights", done=second)
        watch.see({0: said}, [0], 5.0)
    assert (watch.hang() is not None) == hangs
