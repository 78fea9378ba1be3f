"""The records of a run that a later start rewrites: nothing that cannot be read is lost."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from launcher.errors import RecipeError
from launcher.execute import run_dir
from launcher.execute.attempts import OomAdaptations, read_adapted
from launcher.files import safe_files
from launcher.schedulers import following
from launcher.train import tracking
from launcher.train.callbacks import Metrics
from launcher.train.job import Job


def resumed(path: Path, step: int) -> None:
    """What a start that resumes at `step` does to the metrics, and its next row."""
    metrics = Metrics(path, write=True)
    state = SimpleNamespace(global_step=step, max_steps=100, num_input_tokens_seen=0)
    metrics.on_train_begin(SimpleNamespace(max_steps=100), state, SimpleNamespace())
    state.global_step += 1
    metrics.on_log(None, state, SimpleNamespace(), logs={"loss": 0.5})


def steps(path: Path) -> list[object]:
    return [json.loads(line).get("step") for line in path.read_text().split("\n") if line]


def write(path: Path, *found: object) -> None:
    path.write_text("".join(f"{json.dumps({'step': step, 'loss': 1.0})}\n" for step in found))


@pytest.mark.parametrize(("warmup", "length", "warns"), [(11, -1, True), (10, -1, False), (11, 10, False)])
def test_a_warm_up_longer_than_the_epochs_is_a_warning(tmp_path, capsys, warmup, length, warns):
    """Of a written number of steps the plan warns."""
    from transformers import TrainingArguments

    args = TrainingArguments(str(tmp_path), max_steps=length, warmup_steps=warmup, use_cpu=True)
    state = SimpleNamespace(global_step=0, max_steps=10, num_input_tokens_seen=0)
    Metrics(tmp_path / "metrics.jsonl", write=True).on_train_begin(args, state, SimpleNamespace())
    assert ("trainer.warmup_steps" in capsys.readouterr().out) == warns


def test_a_resumed_run_keeps_the_rows_until_its_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 2.5, 4, 6)
    with path.open("a") as stream:
        stream.write('[1]\n{"text": "\u2028"}\n{"st')
    resumed(path, 4)
    assert steps(path) == [1, 2, 2.5, 4, None, 5]


@pytest.mark.parametrize("step", [None, "7", True, [7], {}])
def test_a_row_whose_step_is_no_number_is_kept(tmp_path, step):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, step, 9)
    resumed(path, 4)
    assert steps(path) == [1, step, 5]


def test_metrics_of_any_size_are_kept(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4, 5)
    monkeypatch.setattr(safe_files, "LARGEST_RECORD", 100)
    resumed(path, 4)
    assert steps(path) == [1, 2, 3, 4, 5]
    assert run_dir.last_step(tmp_path) == 5


def test_a_line_without_an_end_is_left_out_without_being_read_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(safe_files, "LONGEST_LINE", 50)
    path = tmp_path / "metrics.jsonl"
    write(path, 1)
    with path.open("a") as stream:
        stream.write("\0" * 50 + json.dumps({"step": 2}) + "\n" + json.dumps({"step": 3}))
    resumed(path, 4)
    assert steps(path) == [1, 3, 5]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_metrics_that_cannot_be_read_stay(tmp_path, monkeypatch, capsys, code):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 9)
    opened = safe_files.opened

    def unreadable(wanted):
        if Path(wanted) == path:
            raise OSError(code, "made up", str(wanted))
        return opened(wanted)

    monkeypatch.setattr(safe_files, "opened", unreadable)
    resumed(path, 4)
    assert steps(path) == [1, 2, 9, 5]
    assert [found.name for found in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert "WARNING" in capsys.readouterr().out


def test_metrics_whose_reading_fails_midway_stay(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 9)

    def half(_path):
        yield b'{"step": 1}\n', {"step": 1}
        raise OSError(errno.EIO, "made up")

    monkeypatch.setattr("launcher.train.callbacks.read_lines", half)
    resumed(path, 4)
    assert steps(path) == [1, 2, 9, 5]


@pytest.mark.parametrize("step", [None, "7", float("inf")])
def test_an_older_checkpoint_puts_rows_aside_whatever_their_steps_are(tmp_path, step):
    (tmp_path / "checkpoints" / "checkpoint-8").mkdir(parents=True)
    write(tmp_path / "metrics.jsonl", 1, step, 9)
    run_dir.set_aside_after(tmp_path, 4, lambda _: None)
    later = [] if step != float("inf") else [step]
    assert steps(tmp_path / "metrics.jsonl") == [1, *([step] if not later else [])]
    assert steps(tmp_path / "metrics-superseded-8.jsonl") == [*later, 9]


@pytest.mark.parametrize("content", ["{", "[]", '{"adapted": 3}', '{"adapted": {"changes": 1}}'])
def test_adaptations_are_not_lost_with_a_damaged_plan(tmp_path, content):
    assert read_adapted(tmp_path) == OomAdaptations()
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(RecipeError) as caught:
        read_adapted(tmp_path)
    (problem,) = caught.value.problems
    assert (problem.code, problem.file) == ("record-unreadable", str(tmp_path / "plan.json"))


def test_the_id_of_a_tracked_run_stays_where_it_cannot_be_read(tmp_path, monkeypatch):
    job = Job(tmp_path, {"recipe": "/x/chat.yaml"})
    first = tracking.identify(job, unique=False)
    (file,) = (path for path in tmp_path.rglob("run.json"))
    kept = file.read_text()

    def unreadable(*_args, **_options):
        raise OSError(errno.EIO, "made up")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", unreadable)
        assert tracking.identify(job, unique=False)["name"] == first["name"]
    assert file.read_text() == kept
    assert tracking.identify(job, unique=False) == first


def test_a_loss_that_is_not_finite_is_no_end_of_following(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": null}\n')
    said: list[str] = []
    assert following._print_loss(tmp_path, following._SeenJob(), said.append)
    assert len(said) == 1
