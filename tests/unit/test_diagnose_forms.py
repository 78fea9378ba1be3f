"""How other programs pass a traceback on: behind prefixes that no list has, in JSON, in other words."""

from __future__ import annotations

import codecs
import io
import json

import pytest
from every import every
from rich.console import Console
from rich.traceback import Traceback

from launcher.errors import RecipeError
from launcher.knowledge.diagnose.examine import Examination, diagnose
from launcher.knowledge.failures.catalogue import FAILURES, Failure
from launcher.report.diagnosis_sections import diagnosis_text

REGISTRY = tuple(
    Failure(name, name, "cause", "mend", "test", (), patterns=(pattern,))
    for name, pattern in (
        ("gpu-full", r"CUDA out of memory"),
        ("old-option", r"unexpected keyword argument 'load_in_4bit'"),
        ("wait", r"(?s)\n  File \S*file_baton\.py, line \d+, in wait\b"),
        ("double-peft", r"modify a model with PEFT for a second time"),
    )
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TRACEBACK = f"""Traceback (most recent call last):
  File "train.py", line 12, in <module>
    trainer.train()
{OOM}
"""


def see(text, registry=REGISTRY):
    examination = Examination(registry)
    examination.read(io.BytesIO(text.encode()), "log", None)
    return examination.verdict()


def name_of(diagnosis):
    if diagnosis.findings:
        return diagnosis.findings[0].failure.id
    return "unknown" if diagnosis.unknown else None


def behind(prefix, text):
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "prefix",
    [
        "Nov 22 05:48:08 ",
        "Nov  2 05:48:08 ",
        "[12/train/40 (pid 2800)] ",
        "2023-04-29 08:00:12.900 [12/train/40 (pid 2800)] ",
        "job-17.batch> ",
        "<trainer#4> ",
        "05:48 worker 3 | ",
        "train-job-master-0 pytorch ",
        "| ERROR    | stderr | ",
    ],
)
def test_a_prefix_that_is_learnt_from_the_tracebacks_first_line(prefix):
    (finding,) = see(behind(prefix, "starting\n" + TRACEBACK)).findings
    assert finding.failure.id == "gpu-full"
    assert finding.error.kind == "traceback"
    assert [frame.file for frame in finding.error.frames] == ["train.py"]


def test_two_processes_behind_learnt_prefixes_are_two_streams():
    first, second = (
        behind(f"<trainer#{n}> ", TRACEBACK.replace("train.py", f"train{n}.py")).splitlines(keepends=True)
        for n in (1, 2)
    )
    mixed = "".join(line for pair in zip(first, second, strict=True) for line in pair)
    (finding,) = see(mixed).findings
    assert [frame.file for frame in finding.error.frames] == ["train1.py"]


@pytest.mark.parametrize("before", ["It printed ", "> ", "see: "])
def test_words_before_a_traceback_are_no_prefix(before):
    text = f'{before}{TRACEBACK}{before}  File "other.py", line 1, in lost\n'
    (finding,) = see(text).findings
    assert [frame.file for frame in finding.error.frames] == ["train.py"]


def test_lines_as_containers_write_them():
    lines = ("starting\n" + TRACEBACK).splitlines(keepends=True)
    text = "".join(json.dumps({"log": line, "stream": "stderr", "time": "t"}) + "\n" for line in lines)
    (finding,) = see(text).findings
    assert finding.failure.id == "gpu-full"
    assert [frame.source for frame in finding.error.frames] == ["trainer.train()"]


def test_a_record_that_holds_the_traceback_in_a_field_of_its_own():
    record = {"message": "training failed", "level": "error", "exc_info": TRACEBACK}
    (finding,) = see(json.dumps(record) + "\n").findings
    assert finding.error.kind == "traceback"


@pytest.mark.parametrize("stamp", ["", "2026-11-22T09:03:58 ", "2026-11-22 09:03:58,123 "])
def test_a_record_behind_the_time(stamp):
    record = {"level": "ERROR", "logger": "finetune", "msg": "bad arguments", "exc": TRACEBACK}
    (finding,) = see(stamp + json.dumps(record) + "\n").findings
    assert (finding.failure.id, finding.error.kind) == ("gpu-full", "traceback")
    assert (finding.error.time is not None) == bool(stamp)


def test_a_row_of_data_is_no_record():
    assert name_of(see(json.dumps({"log": TRACEBACK, "label": 1}) + "\n")) is None


@pytest.mark.parametrize(
    "line",
    [
        f"E       {OOM}",
        f"FAILED tests/test_sft.py::test_train[bf16-True] - {OOM}",
        f"worker 0 could not start: {OOM}",
        "training stopped: OutOfMemoryError('CUDA out of memory')",
    ],
)
def test_an_exception_that_is_told_in_a_line(line):
    assert name_of(see(line + "\n")) == "gpu-full"
    assert name_of(see(line + "\n{'train_runtime': 12.3}\n")) is None, "the run went on"
    assert name_of(see(line.replace("CUDA out of memory", "no such thing") + "\n")) is None


def test_what_is_told_does_not_hide_an_unknown_traceback():
    other = TRACEBACK.replace(OOM, "ValueError: nobody knows this")
    assert name_of(see(f"caught, going on: {OOM}\n{other}")) == "unknown"


def test_a_message_that_announces_the_traceback_of_its_cause():
    inner = TRACEBACK.replace(OOM, "TypeError: __init__() got an unexpected keyword argument 'load_in_4bit'")
    outer = TRACEBACK.replace(OOM, "ValueError: Could not load the model. See the original errors:")
    (finding,) = see(f"{outer}\nwhile loading with LlamaForCausalLM, an error is thrown:\n{inner}").findings
    assert finding.failure.id == "old-option"


def test_an_interrupted_wait_is_known_by_its_calls():
    text = """Traceback (most recent call last):
  File "/venv/torch/utils/file_baton.py", line 50, in wait
    time.sleep(self.wait_seconds)
KeyboardInterrupt
"""
    assert name_of(see(text)) == "wait"
    assert name_of(see(text.replace("file_baton", "other"))) == "unknown"


def test_a_warning_that_a_model_is_wrapped_twice_is_a_failure_of_its_own():
    said = "mapping_func.py:148: UserWarning: You are trying to modify a model with PEFT for a second time.\n"
    assert name_of(see(said + "{'train_runtime': 12.3}\n")) == "double-peft"


TABLE = """Traceback (most recent call last):
  File "/venv/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
"""


def test_behind_the_launchers_error_stands_what_the_process_said():
    text = f"error: hooks.py:4: python: the hook Mine.on_step_end raised RuntimeError: my own\n{TABLE}"
    (unknown,) = see(text).unknown
    assert unknown.error.message.startswith("error: hooks.py:4")
    (alone,) = see(TABLE).unknown
    assert alone.error.type.endswith("ChildFailedError")


def test_a_step_that_tells_its_runtime_is_no_success():
    row = "{'loss': '6.9', 'grad_norm': '1.3', 'train_runtime': '0.32'}\n"
    killed = "job.sh: line 3: 71 Segmentation fault (core dumped) python train.py\n"
    assert name_of(see(row + killed)) == "unknown"
    assert name_of(see("{'train_runtime': '9.1', 'train_loss': '6.9'}\n" + killed)) is None


def test_the_quotes_that_end_a_quoted_traceback_are_no_message():
    quoted = '"""\n' + TRACEBACK.replace(OOM, "KeyError: 'prompt'") + '"""\n'
    (unknown,) = see(quoted).unknown
    assert unknown.error.message == "'prompt'"


def write_run(folder, message):
    (folder / "logs").mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "logs" / "launcher.log").write_text(TABLE)
    record = {"type": "ValueError", "message": message, "traceback": "", "rank": 0, "time": 1.0}
    (folder / "logs" / "error-rank-0.json").write_text(json.dumps(record))


def test_the_one_run_directory_below_a_folder_is_taken(tmp_path):
    write_run(tmp_path / "recipe" / "20261122T0800Z", "nobody knows this")
    for folder in (tmp_path, tmp_path / "recipe"):
        (unknown,) = diagnose([str(folder)], REGISTRY).unknown
        assert unknown.error.message == "nobody knows this"


def test_of_several_run_directories_one_has_to_be_named(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / name, "nobody knows this")
    with pytest.raises(RecipeError, match="2 run directories") as caught:
        diagnose([str(tmp_path)], REGISTRY)
    assert "the latest is" in caught.value.problems[0].hint


WATCHDOG = (
    "[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds"
)


@every(
    ("prefix", "rank"),
    [
        ("[80746] ", None),
        ("[pid=80746] ", None),
        ("[80746] [rank0]:", 0),
        ("pid 80746: ", None),
        (" 7: ", 7),
        ("[trainer-0] ", None),
        ("[worker 0] ", None),
        ("[node1:rank0] ", None),
        ("train-job-master-0 pytorch ", None),
        ("node-0 | ", None),
        ("[2026-02-22 23:55:59] worker-0 >> ", None),
        ("stderr | ", None),
        ("(worker, rank=3, pid=80746) ", 3),
        ("(worker1, rank=1, pid=123, ip=10.0.0.2) ", 1),
        ("(RayTrainWorker pid=123, ip=10.0.0.1) ", None),
        ("(RayTrainWorker(rank=2) pid=22) ", 2),
        ("train\tRun tests\t2026-03-01T10:00:00.1234567Z ", None),
        ("2026-03-01T10:00:00.123456Z 01E ", None),
        ("2026-03-01 10:00:00 UTC ", None),
        ("2026-03-01T10:00:00+0100 node1 python[12]: ", None),
        ("03/01/2026 10:00:00 ", None),
        ("Sun Mar  1 10:00:00 2026 ", None),
        ("[   12.345678] ", None),
        ("1709287200.123 ", None),
        ("1709287200123\t", None),
        ("2026-03-01 10:00:00.123 +0000 [stderr] ", None),
        ("    [rank3]: ", 3),
        ("#033[31m", None),
        ("^[[31m", None),
    ],
)
def test_a_line_alone_and_a_traceback_after_what_a_launcher_writes(prefix, rank):
    registry = (*REGISTRY, Failure("late", "late", "c", "m", "t", (), patterns=(r"Watchdog caught",)))
    for text, name in ((WATCHDOG, "late"), (TRACEBACK, "gpu-full")):
        examination = Examination(registry)
        examination.read(io.BytesIO(behind(prefix, "starting\n" + text).encode()), "log", None)
        (finding,) = examination.verdict().findings
        assert (finding.failure.id, finding.first_rank) == (name, rank)
    assert [frame.file for frame in finding.error.frames] == ["train.py"]


@pytest.mark.parametrize(
    "form", ["{:6}\t", "{:5} ", "{:4} | ", "{}. ", "{}:", "[{}] ", "{:>3}) ", "> ", ">", "> > "]
)
@pytest.mark.parametrize("first", [1, 512])
def test_lines_that_are_numbered_or_quoted(form, first):
    if form == "{}:":  # elsewhere it cannot be told from a task's number
        first = 1
    lines = ("starting\nloading\n[rank1]: ready\n" + TRACEBACK).splitlines()
    text = "".join(form.format(n) + line + "\n" for n, line in enumerate(lines, first))
    diagnosis = see(text)
    (finding,) = diagnosis.findings
    assert finding.failure.id == "gpu-full"
    assert [(frame.file, frame.source) for frame in finding.error.frames] == [("train.py", "trainer.train()")]
    assert (finding.ranks, diagnosis.ranks) == ((), 1), "a number of a line is no rank"


def test_nl_numbers_no_empty_lines():
    lines, number = ["starting", "", "", *TRACEBACK.splitlines()], 0
    text = ""
    for line in lines:
        number += bool(line)
        text += f"{number:6}\t{line}\n" if line else "       \n"
    (finding,) = see(text).findings
    assert len(finding.error.frames) == 1


def test_one_quoted_line_among_others_is_no_log():
    assert name_of(see(f"Notes\nOn an A10 it said\n> {OOM}\nso use less\n")) is None


def test_tasks_whose_lines_count_up_stay_tasks():
    text = "".join(f"{n}: {line}\n" for line in TRACEBACK.splitlines() for n in range(4))
    diagnosis = see(text)
    assert (len(diagnosis.findings[0].error.frames), diagnosis.ranks) == (1, 4)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_the_number_of_one_task_is_no_number_of_a_line(first):
    """`srun --label`: some line of task 2's has the number 2, and belongs to the others."""
    text = behind("2: ", "starting\n" * first + TRACEBACK)
    (finding,) = see(text).findings
    assert (len(finding.error.frames), finding.error.type) == (1, "torch.OutOfMemoryError")


def test_a_prefix_before_a_bar_is_before_the_traceback_too():
    bar = "  0%|          | 0/100 [00:00<?, ?it/s]"
    (finding,) = see(behind("train-job-master-0 pytorch ", bar + TRACEBACK)).findings
    assert (finding.failure.id, len(finding.error.frames)) == ("gpu-full", 1)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_a_log_in_the_encoding_of_another_shell(encoding):
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    examination = Examination(REGISTRY)
    examination.read(io.BytesIO(mark + TRACEBACK.encode(encoding)), "log", None)
    (finding,) = examination.verdict().findings
    assert (finding.failure.id, finding.error.line, len(finding.error.frames)) == ("gpu-full", 4, 1)


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_the_error_file_of_torchelastic_as_its_launcher_prints_it(prefix):
    stack = json.dumps(TRACEBACK)
    text = f"""ERROR:torch.distributed.elastic.multiprocessing.errors.error_handler:{{
  "message": {{
    "message": "RuntimeError: failed",
    "extraInfo": {{
      "py_callstack": {stack},
      "timestamp": "1635590000"
    }}
  }}
}}
"""
    (finding,) = see(behind(prefix, text)).findings
    assert (finding.failure.id, len(finding.error.frames), finding.error.line) == ("gpu-full", 1, 5)


def draw(raises, width, encoding, locals_shown):
    """What rich prints for an exception; an encoding without box characters makes it take plain ones."""
    file = io.TextIOWrapper(io.BytesIO(), encoding, errors="replace")
    console = Console(file=file, width=width)
    try:
        raises()
    except Exception:
        console.print(Traceback(width=width, show_locals=locals_shown))
    file.flush()
    return file.buffer.getvalue().decode()


def raise_on_lines():
    raise ValueError("\n      the card is small:\n      CUDA out of memory. Tried to allocate 2.00 GiB")


def raise_from():
    try:
        raise_on_lines()
    except ValueError as error:
        raise RuntimeError("got an unexpected keyword argument 'load_in_4bit' " + "x " * 60) from error


@pytest.mark.parametrize("width", [100, 72, 50])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "(RayTrainWorker pid=3) "])
@pytest.mark.parametrize("locals_shown", [False, True])
def test_a_traceback_in_a_box(width, encoding, prefix, locals_shown):
    for raises, name in ((raise_on_lines, "gpu-full"), (raise_from, "old-option")):
        text = draw(raises, width, encoding, locals_shown)
        (finding,) = see(behind(prefix, text)).findings
        assert finding.failure.id == name
        last = finding.error.frames[-1]
        assert (last.file, last.function) == (__file__, raises.__name__)
        assert last.source.startswith("raise ")
        assert len(finding.error.frames) == 2


def test_a_call_whose_path_fills_a_row_of_the_box():
    rows = ["/home/ada/train.py:12", "in step", "? 12  raise ValueError(size)"]
    top, bottom = "+- Traceback (most recent call last) -+", f"+{'-' * 23}+"
    text = "\n".join([top, *(f"| {row:21} |" for row in rows), bottom, f"RuntimeError: {OOM}", ""])
    (finding,) = see(text).findings
    frame = finding.error.frames[-1]
    assert (frame.file, frame.line, frame.function) == ("/home/ada/train.py", 12, "step")


def test_a_box_without_a_traceback_is_left_as_it_is():
    text = "╭─ Error ─────────────╮\n│ no such option: --x │\n╰─────────────────────╯\n"
    assert name_of(see(text)) is None
    assert name_of(see(text + TRACEBACK)) == "gpu-full"


@pytest.mark.parametrize(
    "line",
    [
        f"XFAIL tests/test_sft.py::test_train - {OOM}",
        f"tests/test_sft.py::test_train XFAIL (known: {OOM})",
        f"SKIPPED [1] tests/test_sft.py:7: no card: {OOM}",
        f"test_train (tests.Sft) ... expected failure: {OOM}",
    ],
)
def test_a_test_that_was_to_fail_is_no_failure(line):
    assert name_of(see(line + "\n")) is None


PYTEST = f"""collected 3 items

=================================== XFAILURES ===================================
___________________________________ test_big ____________________________________
>       allocate()
E       {OOM}
"""


@pytest.mark.parametrize(
    ("end", "name"),
    [
        ("======================== 2 passed, 1 xfailed in 0.31s ========================", None),
        ("=========== 1 failed, 1 passed, 1 xfailed in 0.31s ===========", "gpu-full"),
        ("Ran 3 tests in 0.1s\n\nOK (expected failures=1)", None),
        ("Ran 3 tests in 0.1s\n\nFAILED (errors=1)", "gpu-full"),
    ],
)
def test_the_last_line_of_a_test_run_says_whether_a_test_failed(end, name):
    assert name_of(see(f"{PYTEST}{end}\n")) == name


TESTS_END = (
    "===== 1 passed in 2s =====",
    "1 passed in 2.01s",
    "----------------------------------------------------------------------\nRan 3 tests in 0.1s\n\nOK",
)


@pytest.mark.parametrize("end", [*TESTS_END, "OK", "OK (skipped=1)"])
@pytest.mark.parametrize("begin", ["", "============= test session starts =============\n"])
def test_tests_that_passed_say_nothing_of_a_program_that_failed(begin, end):
    assert name_of(see(f"{TRACEBACK}\n{begin}{end}\n")) == "gpu-full"
    unknown = TRACEBACK.replace(OOM, "RuntimeError: nobody has seen this")
    assert name_of(see(f"{unknown}\n{begin}{end}\n")) == "unknown"
    assert name_of(see(f"{begin}{unknown}\n{end}\n")) == "unknown"


@pytest.mark.parametrize("end", TESTS_END)
def test_nor_of_one_that_was_killed(end):
    killed = "task 0: Killed\n"
    assert name_of(see(f"{killed}{end}\n")) == name_of(see(killed)) is not None


def test_ok_alone_is_no_end_of_tests():
    assert name_of(see(f"E       {OOM}\n\nOK\n")) == "gpu-full"
    assert name_of(see(f"Ran 3 tests in 0.1s\n\nFAILED (errors=1)\nE       {OOM}\n\nOK\n")) == "gpu-full"


def test_each_test_run_answers_for_its_own_errors():
    failed = "=========== 1 failed, 1 passed in 0.31s ==========="
    passed = "=========== 2 passed in 0.31s ==========="
    assert name_of(see(f"{PYTEST}{failed}\n{passed}\n")) == "gpu-full"
    assert name_of(see(f"{PYTEST}{failed}\n{PYTEST}{passed}\n")) == "gpu-full"
    assert name_of(see(f"{PYTEST}{passed}\n{PYTEST}{passed}\n")) is None
    assert name_of(see(f"{PYTEST}{passed}\n{TRACEBACK}\n{passed}\n")) == "gpu-full"


def test_what_an_expected_failure_printed_belongs_to_its_test():
    captured = "----------------------------- Captured stderr call -----------------------------\n"
    start, end = "=== test session starts ===\n", "=== 1 passed, 1 xfailed in 0.31s ===\n"
    assert name_of(see(f"{start}{captured}{TRACEBACK}{end}")) is None
    assert name_of(see(f"{start}{captured}{TRACEBACK}=== 1 failed in 0.31s ===\n")) == "gpu-full"
    assert name_of(see(f"{captured}{TRACEBACK}{end}")) == "gpu-full"


@pytest.mark.parametrize(
    "line",
    [
        "/venv/bin/python: Error while finding module specification for 'axolotl.cli.train' "
        "(ModuleNotFoundError: No module named 'axolotl')",
        "/venv/bin/python3.11: No module named axolotl",
        "python: can't open file '/home/user/train.py': [Errno 2] No such file or directory",
    ],
)
def test_python_that_could_not_start_the_program(line):
    assert name_of(see(line + "\n")) == "unknown"


LINKS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("rest", ["", "\n", "\n\nTraceback (most recent call last):\n"])
def test_a_log_that_is_cut_before_the_next_exception_of_a_chain(link, rest):
    diagnosis = see(f"{TRACEBACK}\n{link}{rest}")
    assert name_of(diagnosis) == "gpu-full"
    assert diagnosis.findings[0].error.line == 4


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RuntimeError: \n        CUDA out of memory.\ntry less\n", "gpu-full"),
        ("│   23 │   run()   │\n╰───────╯\nRuntimeError:\n    CUDA out of memory.\n", "gpu-full"),
        ("RuntimeError:\n\tsomething else\n", "unknown"),
        ("RuntimeError:\nCUDA out of memory is what it means\n", None),
        ("RuntimeError:\n\n    CUDA out of memory is what it means\n", None),
        ("RuntimeError:\n", None),
    ],
)
def test_a_message_that_begins_on_the_line_after_its_class(text, name):
    assert name_of(see(text)) == name


@pytest.mark.parametrize("indent", [" ", "    ", "\t"])
def test_an_exception_that_was_pasted_with_an_indentation(indent):
    text = f"I get this when I train:\n\n{indent}{OOM}\n{indent}See the documentation.\n\nWhat can I do?\n"
    diagnosis = see(text)
    assert name_of(diagnosis) == "gpu-full"
    assert diagnosis.findings[0].error.type == "torch.OutOfMemoryError"
    assert name_of(see(text + "{'train_runtime': 12.5}\n")) is None  # somebody caught it


NOTEBOOK = """---------------------------------------------------------------------------
OutOfMemoryError                          Traceback (most recent call last)
{first}
      2
----> 3 trainer.train()
      4 print('done')

2 frames
{second}
   2014             if stop:
-> 2015                 return inner(
   2016
{end}"""
CELLS = (
    "[<ipython-input-5-7297eba501cf>](https://localhost:8080/#) in <cell line: 0>()",
    "[/usr/lib/transformers/trainer.py](https://localhost:8080/#) in train(self, *args)",
)


def test_a_traceback_of_colab_whose_files_are_links():
    diagnosis = see(NOTEBOOK.format(first=CELLS[0], second=CELLS[1], end=f"\n{OOM}\n"))
    assert name_of(diagnosis) == "gpu-full"
    frames = diagnosis.findings[0].error.frames
    assert [(frame.file, frame.function) for frame in frames] == [
        ("<ipython-input-5-7297eba501cf>", "<cell line: 0>"),
        ("/usr/lib/transformers/trainer.py", "train"),
    ]
    assert [frame.source for frame in frames] == ["trainer.train()", "return inner("]


def test_a_traceback_whose_calls_have_no_known_form_ends_with_its_exception():
    diagnosis = see(NOTEBOOK.format(first="#1 cell five", second="#2 the trainer", end=f"\n{OOM}\n"))
    assert name_of(diagnosis) == "gpu-full"


def test_a_notebooks_traceback_that_is_cut_has_the_class_of_its_first_line():
    diagnosis = see(NOTEBOOK.format(first=CELLS[0], second=CELLS[1], end=""))
    assert name_of(diagnosis) == "unknown"
    assert (diagnosis.unknown[0].error.type, diagnosis.unknown[0].error.message) == ("OutOfMemoryError", "")


AFTER = ("(base) user@node1:~/project$ ", "make: *** [Makefile:12: train] Error 1", "real\t0m12.3s", ">>> ")
LAST_LINES = {
    "index out of range in self": "token-id-range",
    "No module named 'accelerate'": "package-missing",
    "KeyError: 'mistral3'": "model-type-unknown",
    "MemoryError": "sigkill-oom",
}


def test_a_line_after_the_last_one_changes_no_name():
    calls = (
        TRACEBACK.rpartition("torch")[0] + '  File "/v/transformers/configuration_auto.py", line 3, in f\n'
    )
    for last, name in LAST_LINES.items():
        error = {"i": "IndexError: ", "N": "ModuleNotFoundError: "}.get(last[0], "") + last
        for after in AFTER:
            (finding,) = see(f"{calls}{error}\n{after}\n", FAILURES).findings
            assert finding.failure.id == name, (error, after)
            assert finding.error.headline.startswith(error)


@pytest.mark.parametrize(
    "rest", ["{'labels': 'odd'}", "-------- a box", "KeyError: 'inner'", "ERROR in a kernel"]
)
def test_a_message_goes_on_after_a_colon(rest):
    text = TRACEBACK.replace(OOM, f"RuntimeError: it failed because of:\n{rest}\nand more")
    (unknown,) = see(text).unknown
    assert unknown.error.message == f"it failed because of:\n{rest}\nand more"


def test_a_step_is_no_part_of_a_message():
    text = TRACEBACK.replace(OOM, "RuntimeError: retrying:") + "{'loss': 2.5, 'epoch': 0.1}\n" * 4
    assert name_of(see(text)) is None


def test_of_a_chain_both_ends_are_shown():
    outer = "\nThe above exception was the direct cause of the following exception:\n\n" + TRACEBACK
    known = TRACEBACK.replace(OOM, "KeyError: 'a'") + outer
    (finding,) = see(known).findings
    assert (finding.error.headline, finding.other_end.headline) == (OOM, "KeyError: 'a'")
    (unknown,) = see(known.replace(OOM, "ValueError: b")).unknown
    assert (unknown.error.headline, unknown.other_end.headline) == ("KeyError: 'a'", "ValueError: b")
    (finding,) = see(TRACEBACK + outer.replace(OOM, "ValueError: b")).findings
    assert (finding.error.headline, finding.other_end.headline) == (OOM, "ValueError: b")
    for diagnosis in (see(known), see(known.replace(OOM, "ValueError: b"))):
        assert "KeyError: 'a'" in diagnosis_text(diagnosis)
    (alone,) = see(TRACEBACK).findings
    assert alone.other_end is None


def test_a_notebook_and_a_cell_of_it_as_json(tmp_path):
    error = {"ename": "OutOfMemoryError", "evalue": "…", "output_type": "error"}
    error["traceback"] = [
        "\x1b[0;31m---------------------------------------------------------------------------\x1b[0m",
        "\x1b[0;31mOutOfMemoryError\x1b[0m                  Traceback (most recent call last)",
        "Cell \x1b[0;32mIn[3], line 1\x1b[0m\n\x1b[0;32m----> 1\x1b[0m trainer.train()\n",
        "File \x1b[0;32m/v/torch/a.py:338\x1b[0m, in run(self)\n--> 338     go()\n",
        "\x1b[0;31mOutOfMemoryError\x1b[0m: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]
    stream = {"name": "stderr", "output_type": "stream", "text": ["loading\n", "ready\n"]}
    source = ["raise\n", "RuntimeError: in the source\n", "trainer.train()"]
    cell = {"cell_type": "code", "execution_count": 3, "outputs": [stream, error], "source": source}
    notebook = {
        "cells": [{"cell_type": "markdown", "source": ["KeyError: 'no'\n"]}, cell, cell],
        "metadata": {},
    }
    for value in (notebook, cell, error):
        for indent in (1, None):
            (finding,) = see(json.dumps(value, indent=indent)).findings
            assert finding.error.headline.startswith("OutOfMemoryError: CUDA out of memory"), (value, indent)
            assert [frame.function for frame in finding.error.frames][-1] == "run"
    assert name_of(see(json.dumps({**cell, "outputs": []}, indent=1) + "\n" + TRACEBACK)) == "gpu-full", (
        "after it"
    )
    saved = tmp_path / "train.ipynb"
    saved.write_text(json.dumps({"metadata": {"long": "x" * 40_000}, **notebook}), encoding="utf-8")
    assert name_of(diagnose([str(saved)], REGISTRY)) == "gpu-full", "all of it in one long line"
    saved.write_text(json.dumps(notebook, indent=1)[:-300], encoding="utf-8")
    assert name_of(diagnose([str(saved)], REGISTRY)) == "gpu-full", "cut off"
    notebook["cells"][1:] = [{**cell, "outputs": [stream]}]
    for indent in (1, None):
        assert name_of(see(json.dumps(notebook, indent=indent))) is None
    deep = '{"outputs": [' * 400 + "]}" * 400
    for odd in ('{"cell_type": "code", "outputs": [{"text": [1, null], "traceback": {}}]}', deep):
        assert name_of(see(odd + '\n{"output_type": "error", ' + odd[1:])) is None
    assert name_of(see('{"cell_type": "code", "outputs": [\n"\\x not JSON"\n{"output_type": ')) is None
