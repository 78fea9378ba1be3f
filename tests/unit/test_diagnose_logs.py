"""Logs of one rank or many: what is taken for the cause, what for its consequence, and what for nothing."""

from __future__ import annotations

import io
import itertools
import json

import pytest
from every import every

from launcher.errors import RecipeError
from launcher.knowledge.diagnose.examine import Examination, diagnose
from launcher.knowledge.diagnose.findings import Diagnosis
from launcher.knowledge.diagnose.reading import clean, raw_lines
from launcher.knowledge.failures.catalogue import FAILURES, Failure
from launcher.report.diagnosis_sections import diagnosis_text


def known(name, *patterns, **changes):
    return Failure(name, name, f"cause of {name}.", "mend", "test", (), patterns=patterns, changes=changes)


REGISTRY = (
    known("gpu-full", r"CUDA out of memory"),
    known("gpu-full-in-loss", r"(?s)CUDA out of memory.*in compute_loss"),
    known("no-network", r"cannot reach the hub"),
    known("bad-batch", r"train_batch_size is not"),
    known("killed", r"return code = -9", r"oom_kill", r"Signal 9", r"^Killed$"),
    known("rank-waits", r"Watchdog caught collective operation timeout"),
    known("zero-steps", r"not a single sample in your epoch"),
    known("stage", r"AssertionError\n.* in check_list"),
)

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 12, in <module>
    main()
  File "train.py", line 8, in main
    trainer.train()
{error}
"""
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def see(text, *more, registry=REGISTRY):
    examination = Examination(registry)
    for number, log in enumerate((text, *more)):
        data = log if isinstance(log, bytes) else log.encode()
        examination.read(io.BytesIO(data), f"log{number}", None)
    return examination.verdict()


def name_of(diagnosis):
    assert len(diagnosis.findings) + len(diagnosis.unknown) <= 1
    if diagnosis.findings:
        return diagnosis.findings[0].failure.id
    return "unknown" if diagnosis.unknown else None


def prefixed(prefix, text):
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def test_a_traceback_with_its_calls_and_place():
    diagnosis = see("starting\n" + TRACEBACK.format(error=OOM))
    (finding,) = diagnosis.findings
    assert finding.failure.id == "gpu-full"
    assert (finding.error.file, finding.error.line) == ("log0", 7)
    assert [(f.file, f.line, f.function) for f in finding.error.frames] == [
        ("train.py", 12, "<module>"),
        ("train.py", 8, "main"),
    ]
    assert (finding.ranks, finding.first_rank, diagnosis.ranks) == ((), None, 1)


@every(
    ("prefix", "rank"),
    [
        ("[rank3]: ", 3),
        ("[default3]:", 3),
        ("3: ", 3),
        ("[1,3]<stderr>:", 3),
        ("2026-03-01 10:00:00,123 [rank3]: ", 3),
        ("[2026-03-01 10:00:00] ", None),
        ("2026-03-01T10:00:00.123456Z ", None),
        ("node7: ", None),
        ("0: [rank3]: ", 3),
        ("node7: 2026-03-01T10:00:00Z [rank3]: ", 3),
        ("\x1b[31m[rank3]:\x1b[0m ", 3),
        ("(Worker pid=123) ", None),
        ("[1,mpirank:3,algo-1]<stderr>:", 3),
        ("2026/03/01 10:00:00 ", None),
        ("[10:00:00] ", None),
        ("Mar  1 10:00:00 node7 train[12]: ", None),
        ("trainer-1  | ", None),
        ("[pod/trainer-0/main] ", None),
        ("#12 3.456 ", None),
        ("2026-03-01T10:00:00.123456789Z stderr F ", None),
        ("E0301 10:00:00.013000 204 torch/distributed/elastic/multiprocessing/api.py:732] ", None),
        ("[2026-03-01 10:00:00,123][ERROR] ", None),
        ("ERROR:root:", None),
    ],
)
def test_prefixes(prefix, rank):
    diagnosis = see(prefixed(prefix, TRACEBACK.format(error=OOM)))
    (finding,) = diagnosis.findings
    assert finding.failure.id == "gpu-full"
    assert finding.first_rank == rank
    assert len(finding.error.frames) == 2


def test_lines_whose_prefix_tells_the_time_are_one_stream():
    lines = TRACEBACK.format(error=OOM).splitlines()
    diagnosis = see("".join(f"Mar  1 10:00:{n:02} node7 t[1]: {line}\n" for n, line in enumerate(lines)))
    assert name_of(diagnosis) == "gpu-full"
    assert len(diagnosis.findings[0].error.frames) == 2


def test_a_record_of_json_is_a_log_and_a_row_of_data_is_none():
    text = TRACEBACK.format(error=OOM)
    diagnosis = see(json.dumps({"level": "error", "exception": text}) + "\n")
    assert name_of(diagnosis) == "gpu-full"
    assert len(diagnosis.findings[0].error.frames) == 2
    assert name_of(see(json.dumps({"prompt": "why?", "completion": text}) + "\n")) is None


def test_a_progress_bar_before_a_traceback():
    bar = "  5%|▌         | 55/1095 [00:31<08:56,  1.94it/s]"
    diagnosis = see(f"\r  0%|  | 0/1095 [00:00<?, ?it/s]\r{bar}" + TRACEBACK.format(error=OOM))
    assert name_of(diagnosis) == "gpu-full"
    assert len(diagnosis.findings[0].error.frames) == 2


def test_equal_tracebacks_of_all_ranks_are_one():
    text = "".join(
        prefixed(f"[rank{rank}]: ", TRACEBACK.format(error=OOM.replace("2.00", f"{rank}.5")))
        for rank in (2, 0, 1, 3)
    )
    diagnosis = see(text)
    (finding,) = diagnosis.findings
    assert (finding.ranks, diagnosis.ranks) == ((0, 1, 2, 3), 4)
    assert finding.first_rank == 2


def test_lines_of_two_ranks_in_one_another():
    one = prefixed("[rank0]: ", TRACEBACK.format(error="KeyError: 'text'")).splitlines()
    two = prefixed("[rank1]: ", TRACEBACK.format(error="KeyError: 'text'")).splitlines()
    diagnosis = see("\n".join(itertools.chain.from_iterable(zip(one, two, strict=True))))
    (unknown,) = diagnosis.unknown
    assert (unknown.error.type, unknown.error.message, unknown.ranks) == ("KeyError", "'text'", (0, 1))
    assert len(unknown.error.frames) == 2


def test_lines_of_two_unnamed_ranks_in_one_another():
    lines = TRACEBACK.format(error=OOM).splitlines()
    assert name_of(see("\n".join(line for line in lines for _ in range(2)))) == "gpu-full"


def test_two_ranks_within_one_line():
    text = TRACEBACK.format(error="OSErrorOSError: : cannot reach the hubcannot reach the hub")
    assert name_of(see(text)) == "no-network"


def test_a_message_whose_class_is_lost():
    text = TRACEBACK.format(error="cannot reach the hub").partition("\n")[2]
    assert name_of(see(text + "other output\n" * 3)) == "no-network"


@pytest.mark.parametrize(
    ("between", "real"),
    [
        ("The above exception was the direct cause of the following exception:", "KeyError"),
        ("During handling of the above exception, another exception occurred:", "ValueError"),
    ],
)
def test_chained_unknown_tracebacks(between, real):
    text = (
        TRACEBACK.format(error="KeyError: 'a'") + f"\n{between}\n\n" + TRACEBACK.format(error="ValueError: b")
    )
    (unknown,) = see(text).unknown
    assert unknown.error.type == real


@pytest.mark.parametrize("errors", [(OOM, "ValueError: b"), ("KeyError: 'a'", OOM)])
def test_any_exception_of_a_chain_is_recognised(errors):
    between = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert name_of(see(between.join(TRACEBACK.format(error=error) for error in errors))) == "gpu-full"


def test_the_error_inside_a_data_worker():
    wrapper = "RuntimeError: Caught OSError in DataLoader worker process 0.\n"
    wrapper += "Original Traceback (most recent call last):"
    text = (
        TRACEBACK.format(error=wrapper) + "  File \"data.py\", line 3, in fetch\n    get()\nKeyError: 'row'\n"
    )
    (unknown,) = see(text).unknown
    assert unknown.error.type == "KeyError"
    assert unknown.error.frames[-1].function == "fetch"


def test_an_exception_group():
    text = """  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 2, in <module>
  |     main()
  | ExceptionGroup: several (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "a.py", line 1, in load
    |     get()
    | OSError: cannot reach the hub
    +------------------------------------
"""
    assert name_of(see(text)) == "no-network"


def test_a_message_of_several_lines_and_a_note():
    text = TRACEBACK.format(error="ValueError: first line\nsecond line\nwhile loading the data")
    (unknown,) = see(text + "\nanother line\n").unknown
    assert unknown.error.message == "first line\nsecond line\nwhile loading the data"


def test_a_message_that_was_broken_into_lines():
    text = "│ ❱ 12 main() │\nOSError: cannot reach \nthe hub\n"
    assert name_of(see(text)) == "no-network"


def test_calls_take_part_in_a_pattern():
    text = TRACEBACK.format(error="AssertionError").replace("in main", "in check_list")
    assert name_of(see(text)) == "stage"
    assert name_of(see(TRACEBACK.format(error="AssertionError"))) == "unknown"


def test_the_code_of_the_innermost_calls_takes_part_in_a_pattern():
    calls = "".join(
        f'  File "train.py", line {n}, in step{n}\n    {code}\n    ^^^^^^^\n'
        for n, code in enumerate(("logits.outer()", "a()", "b()", "c()", "d()", "e()", "logits.inner()"))
    )
    registry = (known("inner", r"logits\.inner"), known("outer", r"logits\.outer"))
    diagnosis = see(f"Traceback (most recent call last):\n{calls}ValueError: no\n", registry=registry)
    assert name_of(diagnosis) == "inner"
    assert diagnosis.findings[0].error.frames[-1].source == "logits.inner()"


def test_the_pattern_that_fits_more_wins():
    assert (
        name_of(see(TRACEBACK.format(error=OOM).replace("in main", "in compute_loss"))) == "gpu-full-in-loss"
    )


CHILD_FAILED = """Traceback (most recent call last):
  File "/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-03-01_10:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 77)
  error_file: <N/A>
  traceback : {why}
============================================================
"""
RESET = TRACEBACK.format(error="torch.distributed.DistBackendError: Connection reset by peer")
WATCHDOG = (
    "[rank0]:[E301 10:30:00.1 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=4) ran for 600000 milliseconds before timing out.\n"
)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_consequence_never_wins_over_the_cause(place):
    parts = [RESET, WATCHDOG, CHILD_FAILED.format(code=1, why="see above")]
    parts.insert(
        place, prefixed("[rank1]: ", TRACEBACK.format(error="ValueError: train_batch_size is not 8"))
    )
    diagnosis = see("\n".join(parts))
    assert name_of(diagnosis) == "bad-batch"
    assert diagnosis.findings[0].first_rank == 1


def test_an_unknown_cause_is_not_named_after_its_consequence():
    (unknown,) = see(WATCHDOG + prefixed("[rank1]: ", TRACEBACK.format(error="KeyError: 'x'"))).unknown
    assert (unknown.error.type, unknown.first_rank) == ("KeyError", 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WATCHDOG + CHILD_FAILED.format(code=-6, why="Signal 6 (SIGABRT)"), "rank-waits"),
        (CHILD_FAILED.format(code=-9, why="Signal 9 (SIGKILL) received by PID 77"), "killed"),
        ("[ERROR] [launch.py:322:sigkill_handler] ['python'] exits with return code = -9\n", "killed"),
        ("Killed\n", "killed"),
        (
            TRACEBACK.format(
                error="RuntimeError: One of the subprocesses has abruptly died during map operation."
            )
            + "slurmstepd-n1: error: Detected 4 oom_kill events in StepId=1.batch.\n",
            "killed",
        ),
        ("slurm_script: line 5: 389 Segmentation fault      (core dumped) python train.py\n", "unknown"),
        (CHILD_FAILED.format(code=1, why="unknown"), "unknown"),
        ("train.py: error: unrecognized arguments: --local_rank=0\nexits with return code = 2\n", "unknown"),
        ("2026-03-01 10:00:00 - ERROR - cannot reach the hub\n", "no-network"),
    ],
)
def test_failures_without_a_traceback_of_their_own(text, expected):
    assert name_of(see(text)) == expected


def test_the_clock_decides_which_rank_was_first():
    late = prefixed("2026-03-01 10:00:09 [rank0]: ", TRACEBACK.format(error=OOM))
    early = prefixed(
        "2026-03-01 10:00:02 [rank1]: ", TRACEBACK.format(error="ValueError: train_batch_size is not")
    )
    diagnosis = see(late, early)
    assert (name_of(diagnosis), diagnosis.findings[0].first_rank) == ("bad-batch", 1)


STEP = "{'loss': 1.25, 'grad_norm': 0.5, 'learning_rate': 1e-05, 'epoch': 0.1}\n"
DONE = "{'train_runtime': 12.3, 'train_loss': 1.2, 'epoch': 1.0}\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "just words\n" * 20,
        STEP * 5,
        "a sample: CUDA out of memory, cannot reach the hub\n" + DONE,
        "WARNING: CUDA out of memory is what you get without checkpointing\n",
        "UserWarning: cannot reach the hub, using the cache\n" + STEP * 5,
        "row 3: 'answer': 'torch.OutOfMemoryError: CUDA out of memory'\n",
        '{"text": "Traceback (most recent call last):\\n  File ... CUDA out of memory"}\n' + STEP,
        TRACEBACK.format(error=OOM) + STEP * 5,
        TRACEBACK.format(error=OOM) + DONE,
        DONE + "Exception ignored in: <function A.__del__>\n" + TRACEBACK.format(error="AttributeError: x"),
        DONE + "srun: error: node01: task 0: Exited with exit code 2\n",
    ],
)
def test_no_failure(text):
    assert name_of(see(text)) is None


LOGGED = """{before}
Traceback (most recent call last):
  File "/home/user/metrics.py", line 3, in {function}
    answer["gpu"]
KeyError: 'gpu'
"""


def test_a_traceback_after_which_the_process_continued_is_not_its_end():
    announced = (
        "Exception in thread Thread-5 (poll):", "2026-05-01 10:00:00,000 - ERROR - no metrics",
        "ERROR:root:no",
        "bitsandbytes library load error: libcusparse.so.12: cannot open shared object file",
        "Could not load bitsandbytes native library: libcusparse.so.12: cannot open shared object file",
    )  # fmt: skip
    printed = [LOGGED.format(before=before, function="<module>") for before in announced]
    printed.append(LOGGED.format(before="", function="push") + "continuing without metrics\n")
    for text in printed:
        assert name_of(see(text)) == "unknown", text
        assert name_of(see(text + TRACEBACK.format(error=OOM))) == "gpu-full", text
        (unknown,) = see(text + TRACEBACK.format(error="ValueError: of the end")).unknown
        assert (unknown.error.type, unknown.error.order > 6) == ("ValueError", True), text
    ends = LOGGED.format(before="[rank1]:[E611 ProcessGroupNCCL.cpp:1] stopping", function="<module>")
    assert name_of(see(ends + STEP)) == "unknown", "rank 1 ended, and rank 0 logs one more step"
    printed[1:3] = [text.replace("<module>", "push") for text in printed[1:3]]
    for text in printed[:-1]:  # a young run
        for line in ("***** Running training *****\n", STEP):
            diagnosis = see(text + line)
            assert (name_of(diagnosis), diagnosis.succeeded) == (None, False), text
    # The real cause: a known one that was logged, the one that the program points at, one of two ranks.
    known = TRACEBACK.format(error="ValueError: train_batch_size is not")
    assert name_of(see("ERROR: worker died\n" + known + TRACEBACK.format(error="KeyError: 1"))) == "bad-batch"
    for later in (
        "RuntimeError: failed to start, see root cause above",
        "RuntimeError: worker exited unexpectedly",
    ):
        (unknown,) = see(printed[1] + TRACEBACK.format(error=later)).unknown
        assert unknown.error.type == "KeyError", later
    one = prefixed("[rank0]: ", TRACEBACK.format(error="KeyError: 1"))
    (unknown,) = see(one + prefixed("[rank0]: ", TRACEBACK.format(error="TypeError: 2"))).unknown
    assert unknown.error.type == "KeyError"


@pytest.mark.parametrize(
    "line",
    [
        "If the launcher says `exits with return code = -9`, the host's memory ran out.",
        '    "exits with return code = -9": "more host memory",',
        "it exits with return code = -9 when the host's memory ran out",
        "E       assert 'CUDA out of memory' == 'Killed'",
        "* `torch.OutOfMemoryError: CUDA out of memory` -> a smaller batch",
    ],
)
def test_what_is_spoken_about_is_no_error(line):
    assert name_of(see(f"# Notes\n{line}\nmore\n")) is None


def test_a_traceback_that_is_quoted_whole_is_read_as_one():
    """People hand over failures in letters and issues; a text and a log cannot be told apart there."""
    letter = f"Hello, since Monday I get\n\n```\n{TRACEBACK.format(error=OOM)}```\n\nWhat can I do?\n"
    assert name_of(see(letter)) == "gpu-full"


@pytest.mark.parametrize(
    "line",
    [
        "train.py: error: the following arguments are required: --model",
        "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-03-01T10:00:00 DUE TO NODE FAILURE, "
        "SEE SLURMCTLD LOG FOR DETAILS ***",
    ],
)
def test_an_end_without_a_traceback_is_an_unknown_failure(line):
    assert name_of(see(f"starting\n{line}\n")) == "unknown"


def test_a_failure_after_a_success_counts():
    assert name_of(see(DONE + TRACEBACK.format(error=OOM))) == "gpu-full"


def test_a_failure_that_stops_nothing_is_told_by_its_line():
    assert (
        name_of(see("There seems not to be not a single sample in your epoch_iterator\n" + DONE))
        == "zero-steps"
    )


def test_tasks_that_srun_ended_are_no_cause():
    step = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-07-14T08:00:36 ***\n"
    exited = "srun: error: n1: task 5: Exited with exit code 1\n"
    killed = "srun: error: n1: tasks 3,7: Killed\nsrun: error: n2: task 8: Killed\n"
    assert see(exited + step + killed).unknown[0].error.line == 1
    assert see(killed).unknown[0].error.line == 1  # it is all that there is
    assert see(step).unknown[0].error.line == 1
    assert name_of(see(killed + TRACEBACK.format(error=OOM))) == "gpu-full"


def test_bytes_that_are_no_text():
    assert name_of(see(b"\xff\xfe\x00\n" + TRACEBACK.format(error=OOM).encode() + b"\x80")) == "gpu-full"


def test_a_long_log_is_read_in_pieces():
    class Endless(io.RawIOBase):
        left = 400
        largest = 0

        def read(self, size=-1):
            assert 0 < size <= 1 << 20
            self.left -= 1
            return b"" if self.left < 0 else b"x" * (size - 1) + (b"\n" if self.left % 3 else b"\r")

    assert sum(1 for _ in raw_lines(Endless())) >= 260
    assert max(len(line) for _, line, _ in raw_lines(Endless())) < 1 << 15


def test_indentation_survives_a_prefix():
    (line,) = clean(b'[rank1]:   File "a.py", line 1, in f', 4, "log")
    assert (line.text, line.rank, line.number) == ('  File "a.py", line 1, in f', 1, 4)


def test_ranks_that_never_met_are_no_consequence_of_the_one_that_was_killed_then():
    met = (
        "RuntimeError: Gloo connectFullMesh failed with [/x/tcp/pair.cc:152] timed out connecting: SO_ERROR: "
        "Connection refused, remote=[{address}]:39846$0"
    )
    killed = CHILD_FAILED.format(code=-9, why="Signal 9 (SIGKILL) received by PID 77")
    ours = (*REGISTRY, *(failure for failure in FAILURES if failure.id == "socket-interface"))

    def first(address: str) -> str:
        log = prefixed("[rank1]: ", TRACEBACK.format(error=met.format(address=address))) + killed
        return name_of(see(log, registry=ours))

    assert first("127.0.1.1") == "socket-interface"
    assert first("10.0.0.2") == "killed", "that rank had met the others, and is gone"


def test_what_is_absent_or_empty_is_refused(tmp_path):
    for path in (tmp_path / "absent.log", tmp_path):
        with pytest.raises(RecipeError, match="cannot diagnose"):
            diagnose([str(path)], REGISTRY)


def test_a_device_without_an_end_is_refused():
    with pytest.raises(RecipeError) as refused:
        diagnose(["/dev/null"], REGISTRY)
    assert refused.value.problems[0].code == "log-unreadable"


def test_a_run_directory_starts_from_what_its_ranks_wrote(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "plan.json").write_text("{}")
    for rank, (moment, error) in enumerate([(9.0, "ConnectionError: Connection reset"), (5.0, OOM)]):
        kind, _, message = error.partition(": ")
        record = {"rank": rank, "time": moment, "type": kind, "message": message, "problems": []}
        record["traceback"] = TRACEBACK.format(error=error)
        (logs / f"error-rank-{rank}.json").write_text(json.dumps(record))
    old = TRACEBACK.format(error="ValueError: train_batch_size is not 4")
    (logs / "rank-0.log").write_text(old)
    (tmp_path / "environment.json").write_text(json.dumps({"bound": {"log_bytes": {"rank-0.log": len(old)}}}))
    diagnosis = diagnose([str(tmp_path)], REGISTRY)
    assert (name_of(diagnosis), diagnosis.findings[0].first_rank, diagnosis.ranks) == ("gpu-full", 1, 2)
    assert diagnosis.findings[0].error.frames[-1].function == "main"


def test_the_launchers_table_names_the_rank_of_an_unnamed_traceback():
    text = TRACEBACK.format(error=OOM) + CHILD_FAILED.format(code=1, why="see above")
    (finding,) = see(text).findings
    assert (finding.ranks, finding.first_rank) == ((1,), 1)


def test_ranks_that_meet_one_failure_in_other_words_are_counted():
    one = prefixed("[rank0]: ", TRACEBACK.format(error="OSError: cannot reach the hub: a.json"))
    two = prefixed("[rank2]: ", TRACEBACK.format(error="ValueError: cannot reach the hub for b"))
    (finding,) = see(one + two).findings
    assert (finding.ranks, finding.first_rank) == ((0, 2), 0)


def test_one_ranks_success_says_nothing_of_another_ranks_log():
    assert name_of(see(TRACEBACK.format(error=OOM), STEP * 5 + DONE)) == "gpu-full"


def test_a_run_directory_that_finished_has_no_failure(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "logs" / "rank-0.log").write_text(DONE + TRACEBACK.format(error=OOM))
    assert name_of(diagnose([str(tmp_path)], REGISTRY)) == "gpu-full"
    (tmp_path / "COMPLETED").touch()
    assert name_of(diagnose([str(tmp_path)], REGISTRY)) is None


KERNEL = (
    "../aten/src/ATen/native/cuda/Indexing.cu:1308: indexSelectLargeIndex: block: [61,0,0], thread: [{},0,0] "
    "Assertion `{}` failed.\n"
)
ASYNCHRONOUS = TRACEBACK.format(
    error="RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be "
    "asynchronously reported at some other API call, so the stacktrace below might be incorrect."
)


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
@pytest.mark.parametrize("before", [True, False])
def test_a_kernels_assertion_tells_more_than_the_call_that_raised_it(prefix, before):
    said = "".join(KERNEL.format(n, "srcIndex < srcSelectDimSize") for n in range(3))
    raised = prefixed(prefix, ASYNCHRONOUS)
    diagnosis = see(said + raised if before else raised + said, registry=FAILURES)
    (finding,) = diagnosis.findings
    assert finding.failure.id == "token-id-range"
    assert finding.error.line == (1 if before else 8)
    assert finding.ranks == ((1,) if prefix else ()), "the ranks are those that raised it"


def test_an_assertion_that_nobody_knows_leaves_the_exception():
    (unknown,) = see(KERNEL.format(1, "x < y") + ASYNCHRONOUS).unknown
    assert unknown.error.type == "RuntimeError"


def test_other_ranks_that_waited_do_not_hide_a_kernels_error():
    waited = "[rank0]: RuntimeError: [Rank 0] Watchdog caught collective operation timeout\n"
    assert name_of(see(prefixed("[rank1]: ", ASYNCHRONOUS) + waited)) == "unknown"


@pytest.mark.parametrize(
    ("owner", "name", "meant"),
    [
        ("TrainingArguments", "learningrate", "learning_rate"),
        ("Seq2SeqTrainingArguments", "generation_maxlength", "generation_max_length"),
        ("transformers.TrainingArguments", "num_train_epoch", "num_train_epochs"),
        ("TrainingArguments", "evaluation_strategy", None),  # it is gone
        ("TrainingArguments", "fp16_backend", None),
        ("TrainingArguments", "eval_strategy", None),  # of another version
        ("TrainingArguments", "quux", None),
        ("SFTConfig", "learning_rat", "learning_rate"),
        ("LoraConfig", "lora_alfa", "lora_alpha"),
        ("SFTTrainer", "learningrate", None),  # it has no such fields
    ],
)
@pytest.mark.parametrize("init", ["", ".__init__"])
def test_a_misspelt_field_is_told_from_one_of_another_version(owner, name, meant, init):
    error = f"TypeError: {owner}{init}() got an unexpected keyword argument '{name}'"
    (finding,) = see(TRACEBACK.format(error=error), registry=FAILURES).findings
    assert finding.meant == meant
    assert finding.to_json()["did_you_mean"] == meant
    assert (f"did you mean {meant}?" in diagnosis_text(Diagnosis([finding], [], 1))) == (meant is not None)
