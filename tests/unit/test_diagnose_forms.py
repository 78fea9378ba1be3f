"""How other programs pass a traceback on: behind prefixes that no list has, in JSON, in other words."""

from __future__ import annotations

import io
import json

import pytest

from launcher.diagnose.examine import Examination, diagnose
from launcher.errors import RecipeError
from launcher.failures.failure import Failure

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


def see(text):
    examination = Examination(REGISTRY)
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
