"""What saves of the real Trainer leave behind: whole checkpoints or none, within limit and room."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from safetensors import SafetensorError
from transformers import Trainer, TrainerCallback

from launcher.files.checkpoint import (
    bytes_beside_tensors,
    complete_checkpoints,
    defect,
    incomplete_checkpoints,
    read_manifest,
)
from launcher.train.checkpoint import disk, saving
from launcher.train.checkpoint.disk import SaveFailed, is_full
from launcher.train.checkpoint.saving import surplus
from launcher.train.data.batches import make_collator
from launcher.train.memory_meter import Meter
from launcher.train.outcome import _Tee, write_error
from launcher.train.status import status
from launcher.train.trainers import PlannedTrainer
from launcher.train.training import fit, make_arguments, make_trainer

sys.path.insert(0, str(Path(__file__).parent))
from small import Rows, job, llama, lora, sequences, tokenizer

SAVES = {"trainer.save_strategy": "steps", "trainer.save_steps": 2, "trainer.max_steps": 6}


class Seen(TrainerCallback):
    """The steps of which callbacks hear that they were saved."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def on_save(self, args, state, control, **_):
        self.saved.append(state.global_step)
        assert (Path(args.output_dir) / f"checkpoint-{state.global_step}").is_dir()


def made(folder: Path, changes: dict | None = None, model=None):
    """(job, trainer) of a run on one CPU process; trainer.seen holds the saves that callbacks heard of."""
    from datasets import Dataset

    work = job(folder, {**SAVES, **(changes or {})})
    held_out = Dataset.from_list(sequences(4)) if "trainer.eval_strategy" in (changes or {}) else None
    rows = Rows(Dataset.from_list(sequences(32)), held_out, make_collator("pad", tokenizer()))
    trainer = make_trainer(work, make_arguments(work), model or llama(), tokenizer(), rows)
    trainer.seen = Seen()
    trainer.add_callback(trainer.seen)
    return work, trainer


def trained(folder: Path, changes: dict | None = None, model=None):
    work, trainer = made(folder, changes, model)
    fit(work, trainer, Meter(on_cuda=False))
    return trainer


def steps(folder: Path) -> list[int]:
    return list(complete_checkpoints(folder / "checkpoints"))


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith("."))


# --- what a save leaves


def test_a_save_is_what_the_trainer_writes_and_a_manifest_of_it(tmp_path):
    trainer = trained(tmp_path / "run", {"trainer.max_steps": 2})
    saved = tmp_path / "run" / "checkpoints" / "checkpoint-2"
    assert defect(saved, hashes=True) is None
    plain = tmp_path / "plain"
    trainer.args.output_dir = str(plain)
    Trainer._save_checkpoint(SimplyPlain(trainer), trainer.model, None)

    def names(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    manifest = read_manifest(saved)
    assert names(saved) == names(plain / "checkpoint-2") | {"manifest.json", "plan.json"}
    assert manifest.files.keys() == names(saved) - {"manifest.json"}
    assert (manifest.step, manifest.world_size) == (2, 1)
    assert manifest.bytes == sum((saved / name).stat().st_size for name in manifest.files)
    assert manifest.versions["torch"] == torch.__version__
    assert (saved / "plan.json").read_text() == (tmp_path / "run" / "plan.json").read_text()
    assert trainer.saver.record.to_json() == {
        "saved": 1, "skipped": [], "seconds": trainer.saver.record.seconds, "bytes": manifest.bytes,
    }  # fmt: skip
    assert manifest.seconds <= trainer.saver.record.seconds


class SimplyPlain:
    """A Trainer with upstream's own way to save."""

    def __init__(self, trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name):
        found = getattr(Trainer, name, None)
        return found.__get__(self._trainer) if callable(found) else getattr(self._trainer, name)


def test_the_key_of_the_prepared_data_is_in_the_manifest(tmp_path):
    work, trainer = made(tmp_path, {"trainer.max_steps": 2})
    (tmp_path / "data.json").write_text('{"key": "5eed"}')
    fit(work, trainer, Meter(on_cuda=False))
    assert read_manifest(tmp_path / "checkpoints" / "checkpoint-2").data == "5eed"


def test_a_limit_keeps_the_newest_and_leaves_nothing_else(tmp_path):
    trainer = trained(tmp_path, {"trainer.save_total_limit": 2, "trainer.max_steps": 8})
    assert steps(tmp_path) == [6, 8]
    assert left_over(tmp_path) == []
    assert trainer.seen.saved == [2, 4, 6, 8]
    assert incomplete_checkpoints(tmp_path / "checkpoints") == {}


def test_with_a_limit_of_one_the_best_and_the_last_stay(tmp_path, monkeypatch):
    """Upstream removes at the end of training all but the best one, the only one to go on from, too."""
    scores = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5}

    def evaluate(self, *_, **__):
        numbers = {"eval_loss": scores[self.state.global_step]}
        self.log(dict(numbers))
        return numbers

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    phases = []
    for kind, name in ((PlannedTrainer, "_load_best_model"), (Trainer, "_finish_current_push")):
        call = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda self, call=call: (phases.append(status().phase), call(self)))
    best = {
        "trainer.eval_strategy": "steps", "trainer.eval_steps": 2, "trainer.max_steps": 8,
        "trainer.load_best_model_at_end": True, "trainer.save_total_limit": 1,
    }  # fmt: skip
    trainer = trained(tmp_path, best)
    checkpoints = tmp_path / "checkpoints"
    assert steps(tmp_path) == [4, 8]
    assert trainer.state.best_model_checkpoint == str(checkpoints / "checkpoint-4")
    assert phases == ["finish", "finish"], "no step is expected then"
    for step in (4, 8):
        state = json.loads((checkpoints / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(checkpoints / "checkpoint-4")
        assert defect(checkpoints / f"checkpoint-{step}", hashes=True) is None


@pytest.mark.parametrize(
    ("there", "now", "limit", "best", "gone"),
    [
        ([2, 4, 6], 6, None, None, []),
        ([2, 4, 6], 6, 0, None, []),
        ([2, 4, 6], 6, 3, None, []),
        ([2, 4, 6], 6, 2, None, [2]),
        ([2, 4, 6], 6, 1, None, [2, 4]),
        ([2, 4, 6], 6, 1, 2, [4]),
        ([2, 4, 6], 6, 2, 2, [4]),
        ([2, 4, 6], 6, 1, 6, [2, 4]),
        ([2, 4, 6], 6, 1, 3, [2, 4]),
        ([2, 4, 6, 8], 4, 2, None, [8, 6]),
        ([2, 4, 6, 8], 4, 1, 8, [6, 2]),
        ([6], 6, 1, None, []),
        ([], 6, 1, None, []),
    ],
)
def test_what_goes_is_never_the_one_just_saved_nor_the_best(there, now, limit, best, gone):
    assert surplus(there, now, limit, best) == gone


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_checkpoint_that_is_there_already_is_replaced(tmp_path, monkeypatch, exchanges):
    """The run goes back and trains these steps once more."""
    if not exchanges:  # as on NFS
        monkeypatch.setattr(disk, "_exchange", lambda *_: False)
    trained(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    old = checkpoints / "checkpoint-4"
    (old / "of-the-old-one").write_text("")
    monkeypatch.setenv("EFFILAUNCH_RESUME", str(checkpoints / "checkpoint-2"))
    trained(tmp_path, {"trainer.max_steps": 4})
    assert steps(tmp_path) == [2, 4, 6]
    assert defect(old, hashes=True) is None
    assert not (old / "of-the-old-one").exists()
    assert left_over(tmp_path) == []


def test_names_are_exchanged_at_once_here(tmp_path):
    """Else the case above shows nothing of it."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    assert disk._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").is_file()
    assert not disk._exchange(tmp_path / "a", tmp_path / "none")


def test_a_removal_that_is_cut_off_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    trained(tmp_path, {"trainer.max_steps": 2})
    real = disk.shutil.rmtree

    def dies(path, **more):
        for weights in Path(path).rglob("model.safetensors"):
            weights.unlink()
            raise KeyboardInterrupt
        real(path, **more)

    monkeypatch.setattr(disk.shutil, "rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        disk.remove_folder(tmp_path / "checkpoints" / "checkpoint-2")
    monkeypatch.setattr(disk.shutil, "rmtree", real)
    assert left_over(tmp_path) == [".removed"]
    assert steps(tmp_path) == []
    assert incomplete_checkpoints(tmp_path / "checkpoints") == {}
    trained(tmp_path)
    assert steps(tmp_path) == [2, 4, 6]
    assert left_over(tmp_path) == []


# --- room


class Disk:
    """A disk of so many bytes beside what the checkpoints hold, in the place of the real one."""

    def __init__(self, monkeypatch, folder: Path, free: float) -> None:
        self.folder, self.free = folder / "checkpoints", free
        monkeypatch.setattr(saving, "free_bytes", self.left)

    def left(self, _: Path) -> int:
        used = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        return int(self.free - used)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> int:
    """Bytes of a checkpoint of these runs."""
    folder = tmp_path_factory.mktemp("one")
    trained(folder, {"trainer.max_steps": 2})
    return read_manifest(folder / "checkpoints" / "checkpoint-2").bytes


def test_a_save_without_room_is_left_out_and_the_run_goes_on(tmp_path, monkeypatch, capsys, one):
    disk = Disk(monkeypatch, tmp_path, 1e9)

    class Filling(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 3:
                disk.free = one * 1.5
            if state.global_step == 5:
                disk.free = 1e9

    work, trainer = made(tmp_path)
    trainer.add_callback(Filling())
    fit(work, trainer, Meter(on_cuda=False))
    assert trainer.state.global_step == 6
    assert steps(tmp_path) == [2, 6]
    assert trainer.seen.saved == [2, 6], "no callback hears of a checkpoint that there is not"
    record = trainer.saver.record.to_json()
    assert (record["saved"], [row["step"] for row in record["skipped"]]) == (2, [4])
    said = capsys.readouterr().out
    assert "WARNING: checkpoint-4 is not saved: it takes" in said
    assert record["skipped"][0]["reason"] in said
    assert f"are free in {tmp_path / 'checkpoints'}" in record["skipped"][0]["reason"]
    assert "checkpoint-2" in said.partition("WARNING")[2]


def test_the_first_save_is_foreseen_from_the_tensors(tmp_path, monkeypatch, one):
    Disk(monkeypatch, tmp_path, one)
    trainer = trained(tmp_path)
    assert steps(tmp_path) == []
    assert [row["step"] for row in trainer.saver.record.skipped] == [2, 4, 6]


def test_the_first_estimate_is_what_the_tensors_take(tmp_path, one):
    _, trainer = made(tmp_path, {"trainer.max_steps": 1, "trainer.save_strategy": "no"})
    trainer.train()
    told = saving.first_save_bytes(trainer, weights_alone=False) - bytes_beside_tensors(64)
    weights = sum(p.numel() * 4 for p in trainer.model.parameters())
    assert told == 3 * weights + 4 * len(list(trainer.model.parameters())), (
        "both moments, and a count of steps"
    )
    assert told < one < told + 2**17


def test_of_an_adapter_the_base_is_not_counted(tmp_path):
    _, trainer = made(tmp_path, {"trainer.max_steps": 1, "trainer.save_strategy": "no"}, lora(llama()))
    trainer.train()
    adapter = sum(p.numel() * 4 for p in trainer.model.parameters() if p.requires_grad)
    assert saving.first_save_bytes(trainer, weights_alone=True) == adapter


@pytest.mark.parametrize(
    ("limit", "room", "kept", "skipped"),
    [
        (2, 4.0, [4, 6], []),
        (2, 2.9, [4, 6], []),  # 2 goes before 6 is written: it would go behind it
        (2, 1.9, [2], [4, 6]),
        (1, 2.9, [6], []),
        (1, 1.9, [2], [4, 6]),  # 2 would go behind the save, and is the last good one until then
    ],
)
def test_what_would_go_anyway_goes_first_but_never_the_last_good_one(
    tmp_path, monkeypatch, one, limit, room, kept, skipped
):
    monkeypatch.setattr(saving, "SPARE", 0)
    monkeypatch.setattr(saving, "GROWTH", 0.05)
    disk = Disk(monkeypatch, tmp_path, 1e9)

    class Filling(TrainerCallback):
        def on_save(self, args, state, control, **_):
            disk.free = one * room * 1.04

    work, trainer = made(tmp_path, {"trainer.save_total_limit": limit})
    trainer.add_callback(Filling())
    fit(work, trainer, Meter(on_cuda=False))
    assert steps(tmp_path) == kept
    assert [row["step"] for row in trainer.saver.record.skipped] == skipped


def test_nothing_goes_where_that_would_not_be_enough(tmp_path, monkeypatch, one):
    disk = Disk(monkeypatch, tmp_path, 1e9)

    class Filling(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 5:
                disk.free = 2 * one

    work, trainer = made(tmp_path, {"trainer.save_total_limit": 2})
    trainer.add_callback(Filling())
    fit(work, trainer, Meter(on_cuda=False))
    assert steps(tmp_path) == [2, 4]


# --- a disk that gives out in the middle

ENDINGS = {
    "ENOSPC": OSError(errno.ENOSPC, "No space left on device"),
    "quota": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "EFBIG": OSError(errno.EFBIG, "File too large"),
    "torch": RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
    "torch-writer": RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed"),
    "safetensors": SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_disk_that_gives_out_ends_the_run_and_costs_no_earlier_checkpoint(tmp_path, monkeypatch, ending):
    real = torch.save

    def full(what, where, **more):
        if "checkpoint-4" in str(where) and "scheduler" in str(where):
            raise ENDINGS[ending]
        real(what, where, **more)

    work, trainer = made(tmp_path)
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SaveFailed) as caught:
        fit(work, trainer, Meter(on_cuda=False))
    (problem,) = caught.value.problems
    assert (caught.value.exit_code, problem.code) == (5, "checkpoint-disk")
    assert problem.file == str(tmp_path / "checkpoints")
    for word in ("checkpoint-4", "are free", "checkpoint-2 is complete", str(ENDINGS[ending])):
        assert word in problem.message
    assert "--resume auto" in problem.hint
    assert defect(tmp_path / "checkpoints" / "checkpoint-2", hashes=True) is None
    assert steps(tmp_path) == [2]
    assert left_over(tmp_path) == []
    (tmp_path / "logs").mkdir(exist_ok=True)
    write_error(tmp_path, 0, caught.value)
    told = json.loads((tmp_path / "logs" / "error-rank-0.json").read_text())
    assert told["time"] == caught.value.at, "other ranks that stumble over the removed folder come later"
    monkeypatch.setattr(torch, "save", real)
    monkeypatch.setenv("EFFILAUNCH_RESUME", "auto")
    assert trained(tmp_path).state.global_step == 6
    assert steps(tmp_path) == [2, 4, 6]


@pytest.mark.parametrize(
    "ending", ["removed", PermissionError(errno.EACCES, "Permission denied"), "unreadable"]
)
def test_a_folder_that_gives_out_is_named_and_costs_no_other_checkpoint(tmp_path, monkeypatch, ending):
    """Another process removes what is written, or its rights are taken away: upstream, a traceback."""
    checkpoints, real = tmp_path / "checkpoints", torch.save

    def fails(what, where, **more):
        if "checkpoint-4" in str(where) and "scheduler" in str(where):
            if isinstance(ending, OSError):
                raise ending
            if ending == "unreadable":
                raise SafetensorError("I/O error: Stale file handle (os error 116)")
            shutil.rmtree(checkpoints)
        real(what, where, **more)

    work, trainer = made(tmp_path)
    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(SaveFailed) as caught:
        fit(work, trainer, Meter(on_cuda=False))
    (problem,) = caught.value.problems
    assert (caught.value.exit_code, problem.code) == (5, "checkpoint-unwritable")
    assert problem.file == str(checkpoints)
    behind = "there is no earlier checkpoint" if ending == "removed" else "checkpoint-2 is complete"
    assert problem.message.startswith("checkpoint-4 could not be written: ")
    assert behind in problem.message
    assert ending == "removed" or left_over(tmp_path) == []


def test_a_folder_without_rights_is_named_before_anything_is_written(tmp_path, monkeypatch):
    def refuses(self, *_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(saving.Saver, "_make_space", refuses)
    work, trainer = made(tmp_path)
    with pytest.raises(SaveFailed, match="checkpoint-2 could not be written: PermissionError"):
        fit(work, trainer, Meter(on_cuda=False))


def test_rows_that_a_full_disk_does_not_take_do_not_end_the_run(tmp_path, monkeypatch, capsys):
    """And those that were there stay."""
    work, trainer = made(tmp_path, {"trainer.save_strategy": "no"})
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    real = Path.open

    def full(path, *given, **more):
        if "metrics" in path.name and set(given) & {"a", "w"}:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *given, **more)

    monkeypatch.setattr(Path, "open", full)
    fit(work, trainer, Meter(on_cuda=False))
    monkeypatch.undo()
    assert trainer.state.global_step == 6
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "loss": 1.0}\n'
    assert capsys.readouterr().out.count("metrics.jsonl lacks rows, the run continues: [Errno 28]") == 1


def test_lines_that_a_full_disk_does_not_take_do_not_end_the_run():
    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    full = SimpleNamespace(write=fails, flush=fails)
    tee = _Tee(full, full, str)
    assert tee.write("a line\n") == 7
    tee.flush()


def test_another_error_keeps_its_name_and_leaves_nothing_half(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "_save_rng_state", lambda *_: 1 / 0)
    work, trainer = made(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fit(work, trainer, Meter(on_cuda=False))
    assert steps(tmp_path) == []
    assert left_over(tmp_path) == []


def test_a_full_disk_is_told_from_other_errors():
    assert not is_full(OSError(errno.EACCES, "Permission denied"))
    assert not is_full(RuntimeError("Some tensors share memory"))
    behind = ValueError("could not save")
    behind.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert is_full(behind), "what was going on counts, too"


def test_a_half_written_checkpoint_is_passed_over_with_a_word(tmp_path, monkeypatch, capsys):
    trained(tmp_path)
    (tmp_path / "checkpoints" / "checkpoint-6" / "manifest.json").unlink()
    (tmp_path / "checkpoints" / "checkpoint-4").rename(tmp_path / "checkpoints" / "checkpoint-5")
    monkeypatch.setenv("EFFILAUNCH_RESUME", "auto")
    trained(tmp_path)
    said = capsys.readouterr().out
    assert "checkpoint-6 is skipped: it has no manifest.json" in said
    assert "checkpoint-5 is skipped: its manifest.json is of step 4" in said
    assert f"resuming from {tmp_path / 'checkpoints' / 'checkpoint-2'}" in said
    assert steps(tmp_path) == [2, 4, 6]


# --- the result


def test_a_result_without_room_is_refused_and_what_was_there_stays(tmp_path, monkeypatch):
    trainer = trained(tmp_path)
    result = tmp_path / "model"
    write = SimpleNamespace(aside=lambda aside: trainer.save_model(str(aside))).aside
    trainer.saver.save_result(trainer, result, write)
    before = (result / "model.safetensors").read_bytes()
    monkeypatch.setattr(saving, "free_bytes", lambda _: 1000)
    with pytest.raises(SaveFailed) as caught:
        trainer.saver.save_result(trainer, result, write)
    assert "not enough free space for the result" in str(caught.value)
    assert "checkpoint-6 is complete" in str(caught.value)
    assert (result / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_result_that_breaks_off_leaves_no_half_of_one(tmp_path):
    trainer = trained(tmp_path)

    def write(aside: Path) -> None:
        trainer.save_model(str(aside))
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SaveFailed):
        trainer.saver.save_result(trainer, tmp_path / "model", write)
    assert not (tmp_path / "model").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
