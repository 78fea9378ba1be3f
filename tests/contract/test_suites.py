"""`eval --suite`: real lm-eval on local tasks, the model before training beside the trained one."""

from __future__ import annotations

import fcntl
import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from launcher.cli import main
from launcher.commands.merge import card_record
from launcher.execute.run_dir import LOCK
from launcher.report.model_card import model_card
from launcher.train.results.suites import _failed

sys.path.insert(0, str(Path(__file__).parent))
from exported import chatted
from plans import LORA, trained

pytestmark = pytest.mark.usefixtures("warm")

CHOICES = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} "
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
- {{metric: acc, aggregation: mean, higher_is_better: true}}
- {{metric: brier_score, aggregation: brier_score, higher_is_better: false}}
metadata: {{version: 3}}
"""
WRITES = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: false}}
num_fewshot: 0
metric_list:
- {{metric: exact_match, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1}}
"""
ROWS = 12


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = folder / "rows.jsonl"
    made = [
        {"question": f"what is {i} + {i}?", "choices": [str(2 * i), str(2 * i + 1)], "label": i % 2}
        for i in range(ROWS)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in made))
    (folder / "sums.yaml").write_text(CHOICES.format(name="our_sums", rows=rows))
    (folder / "inner").mkdir()
    (folder / "inner" / "written.yaml").write_text(WRITES.format(name="our_answers", rows=rows))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = trained(
        tmp_path_factory.mktemp("runs") / "run",
        {"adapter": LORA, "trainer.max_steps": 2, "trainer.learning_rate": 1.0},
    )
    (folder / "COMPLETED").touch()
    return folder


def asked(run: Path, capsys, *words: str) -> dict:
    capsys.readouterr()  # of training
    assert main(["eval", str(run), "--json", *words]) == 0, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


def metric(found: dict, task: str, name: str) -> dict:
    (only,) = [one for one in found["suites"][task]["metrics"] if one["metric"] == name]
    return only


@pytest.mark.slow
def test_base_and_trained_answer_the_same_prompts_and_all_is_kept(run, tasks, capsys):
    found = asked(run, capsys, "--suite", str(tasks / "sums.yaml"), "--batch-size", "4")
    task = found["suites"]["our_sums"]
    assert (task["samples"], task["version"], task["fewshot"], task["chat_template"]) == (ROWS, 3, 0, False)
    acc = metric(found, "our_sums", "acc")
    for whose in ("base", "trained"):
        share = acc[whose]
        # the standard error of a mean of zeros and ones
        assert acc[f"{whose}_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (ROWS - 1)), rel=1e-6)
    brier = metric(found, "our_sums", "brier_score")
    assert brier["base"] != brier["trained"]  # a continuous score: two models
    assert brier["higher_is_better"] is False
    kept = json.loads((run / "result.json").read_text())
    assert kept["suites"] == found["suites"]
    assert kept["output"] == "adapter"
    assert "our_sums" in (run / "report.html").read_text()
    card = model_card(card_record(run, "me/x"), "me/x")
    assert f"| our_sums | acc | {acc['base']:.4f} ± " in card


@pytest.mark.slow
def test_a_folder_has_several_tasks_and_earlier_scores_stay(run, tasks, capsys):
    asked(run, capsys, "--suite", str(tasks / "sums.yaml"), "--limit", "3")
    found = asked(run, capsys, "--suite", str(tasks / "inner"), "--limit", "3", "--no-base")
    assert [*found["suites"]] == ["our_answers"]
    assert metric(found, "our_answers", "exact_match")["base"] is None
    kept = json.loads((run / "result.json").read_text())["suites"]
    assert {name: task["samples"] for name, task in kept.items()} == {"our_sums": 3, "our_answers": 3}


@pytest.mark.slow
def test_an_untrained_adapter_scores_as_the_base(tmp_path, tasks, capsys):
    """The learning rate is 0, so both models are one: any difference would be one of loading or prompts."""
    same = trained(tmp_path / "run", {"adapter": LORA, "trainer.max_steps": 1, "trainer.learning_rate": 0.0})
    (same / "COMPLETED").touch()
    found = asked(same, capsys, "--suite", f"{tasks / 'sums.yaml'},{tasks / 'inner'}")
    for name, score in (("our_sums", "brier_score"), ("our_answers", "exact_match")):
        both = metric(found, name, score)
        assert both["base"] == both["trained"]


@pytest.mark.slow
def test_a_model_of_conversations_gets_its_template_and_examples_as_turns(tmp_path, tasks, capsys):
    run = chatted(tmp_path / "run")
    found = asked(
        run, capsys, "--suite", str(tasks / "sums.yaml"), "--limit", "2", "--fewshot", "1", "--seed", "7"
    )
    task = found["suites"]["our_sums"]
    assert (task["chat_template"], task["samples"], task["seed"]) == (True, 2, 7)
    begin, end = "<|im_start|>assistant\n", "<|im_end|>\n"
    example, answered, asked_for = task["example"].split(begin)
    assert example.endswith(end)
    assert end in answered
    assert asked_for == ""
    assert "<|im_start|>user\nwhat is" in answered


@pytest.mark.parametrize(
    ("words", "code"),
    [
        pytest.param(["--suite", "gsm8kk"], "unknown-suite", marks=pytest.mark.slow),
        (["--suite", "nowhere/task.yaml"], "file-missing"),
        (["--suite", ","], "usage"),
        (["--limit", "3"], "usage"),
        (["--no-base"], "usage"),
        (["--suite", "gsm8k", "--limit", "0"], "usage"),
        (["--suite", "gsm8k", "--data", "x.jsonl"], "usage"),
    ],
)
def test_wrong_requests_are_refused(run, capsys, words, code):
    assert main(["eval", str(run), "--json", *words]) == 2
    assert [problem["code"] for problem in json.loads(capsys.readouterr().out)["errors"]] == [code]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("task: a\n  b: [1\n", "yaml-syntax", 2),
        ("just text\n", "unknown-suite", None),
    ],
)
def test_a_file_without_a_task_is_refused(run, tmp_path, capsys, text, code, line):
    file = tmp_path / "task.yaml"
    file.write_text(text)
    assert main(["eval", str(run), "--json", "--suite", str(file)]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["errors"]
    assert (problem["code"], problem["file"], problem["line"]) == (code, str(file), line)


@pytest.mark.slow
def test_what_a_task_lacks_on_this_machine_is_said_before_a_model_is_loaded(
    run, tasks, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = tmp_path / "own.yaml"
    text = CHOICES.format(name="our_own", rows=tasks / "rows.jsonl")
    own.write_text(f"{text}process_docs: !function needs.rows\n")
    (tmp_path / "needs.py").write_text("import a_package_that_is_not_here\n")
    for suite, code in (("gsm8k", "suite-data"), (str(own), "package-missing")):
        capsys.readouterr()
        assert main(["eval", str(run), "--json", "--suite", suite]) == 4
        assert [one["code"] for one in json.loads(capsys.readouterr().out)["errors"]] == [code]


def test_a_run_that_is_in_use_is_refused_before_the_work(run, capsys):
    with (run / LOCK).open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(["eval", str(run), "--json", "--suite", "gsm8kk"]) == 2
    assert [one["code"] for one in json.loads(capsys.readouterr().out)["errors"]] == ["run-dir-in-use"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "suite-memory"),
        (ValueError("task x is marked as unsafe. Set confirm_run_unsafe_code=True"), "foreign-code"),
        (ValueError("an unsafe name of a file"), "suite-failed"),
        (ConnectionError("no network"), "suite-data"),
    ],
)
def test_each_failure_of_a_task_has_a_code(error, code):
    assert [problem.code for problem in _failed(error).problems] == [code]


@pytest.mark.slow
def test_a_name_that_is_nearly_right_is_suggested(run, capsys):
    assert main(["eval", str(run), "--suite", "gsm8kk"]) == 2
    assert "gsm8k" in capsys.readouterr().err


@pytest.mark.slow
def test_without_lm_eval_the_extra_is_named(run, capsys, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else real(name))
    assert main(["eval", str(run), "--suite", "gsm8k"]) == 4
    assert "pip install 'effilaunch[eval]'" in capsys.readouterr().err
