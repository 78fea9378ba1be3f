"""What goes to the hub: whole checkpoints and the result, in the background, and never what keeps a run from
ending."""

from __future__ import annotations

import json
import signal
import threading
from types import SimpleNamespace

import pytest
from patience import patience

pytest.importorskip("torch")

import huggingface_hub
from peft import LoraConfig, get_peft_model
from small import llama
from test_saving import made
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from launcher.errors import RunFailed
from launcher.files.checkpoint import defect
from launcher.train import callbacks, stopping
from launcher.train.memory_meter import Meter
from launcher.train.outcome import save_outcome
from launcher.train.training import fit

HUB = {"trainer.push_to_hub": True, "trainer.hub_model_id": "a/b", "trainer.hub_strategy": "end"}


class Hub:
    """In the place of the hub: what was uploaded, each with the files that it would hold."""

    def __init__(self, monkeypatch) -> None:
        self.uploads: list[tuple[str, str | None, list[str]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        monkeypatch.setattr(Trainer, "init_hf_repo", lambda trainer: setattr(trainer, "hub_model_id", "a/b"))
        hub = self

        class Api:
            def __init__(self, token=None):
                assert token is None, "no secret is in the plan"

            def upload_folder(self, **how):
                hub.upload(**how)

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)

    def upload(
        self, *, repo_id, folder_path, revision, commit_message, path_in_repo=None, ignore_patterns=None
    ):
        assert self.gate.wait(patience(60))
        if self.error is not None:
            raise self.error
        names = [
            path.relative_to(folder_path).as_posix() for path in folder_path.rglob("*") if path.is_file()
        ]
        kept = huggingface_hub.utils.filter_repo_objects(names, ignore_patterns=ignore_patterns)
        if path_in_repo is not None:
            assert defect(folder_path, hashes=True) is None
        self.uploads.append((commit_message, path_in_repo, sorted(kept)))


@pytest.fixture
def hub(monkeypatch) -> Hub:
    return Hub(monkeypatch)


def finish(work, trainer) -> None:
    measured = fit(work, trainer, Meter(on_cuda=False))
    data = SimpleNamespace(streaming=False, counts={}, labels=None)
    meter = Meter(on_cuda=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.train.memory_meter.memory_record", lambda *_: {})
        save_outcome(work, trainer, trainer.processing_class, data, measured, meter, 0.0)


def test_every_save_is_pushed_without_states_and_the_result_when_it_is_there(tmp_path, hub):
    work, trainer = made(tmp_path, {**HUB, "trainer.hub_strategy": "every_save", "trainer.max_steps": 2})
    finish(work, trainer)
    (first, place, names), (last, _, result) = hub.uploads
    assert (first, last, place) == ("Training in progress, step 2", "End of training", None)
    assert "model.safetensors" in names
    assert [
        name for name in names if "optim" in name or "rng" in name or name.endswith((".bin", ".pt"))
    ] == []
    assert set(result) == {*names, "README.md"}
    assert not (tmp_path / ".pushing").exists() or list((tmp_path / ".pushing").iterdir()) == []
    assert sorted(path.name for path in work.checkpoints.iterdir()) == ["checkpoint-2"], "nothing lies beside"
    assert (tmp_path / "COMPLETED").exists()


def test_a_checkpoint_on_its_way_survives_retention_and_others_are_left_out(tmp_path, hub, capsys):
    checkpoints = {"trainer.hub_strategy": "checkpoint", "trainer.save_total_limit": 1}
    work, trainer = made(tmp_path, {**HUB, **checkpoints})
    hub.gate.clear()
    fit(work, trainer, Meter(on_cuda=False))
    assert [path.name for path in work.checkpoints.iterdir()] == ["checkpoint-6"]
    said = capsys.readouterr().out
    assert [f"checkpoint-{step} is not pushed" in said for step in (2, 4, 6)] == [False, True, True]
    assert hub.uploads == [], "and training did not wait"
    hub.gate.set()
    trainer.pusher._thread.join(patience(60))
    assert [(message, place) for message, place, _ in hub.uploads] == [
        ("Training in progress, step 2", None),
        ("Training in progress, step 2, checkpoint", "last-checkpoint"),
    ]
    assert "optimizer.pt" in hub.uploads[1][2]


def test_with_always_push_each_waits_for_the_one_before(tmp_path, hub):
    all_of_them = {"trainer.hub_strategy": "all_checkpoints", "trainer.hub_always_push": True}
    work, trainer = made(tmp_path, {**HUB, **all_of_them, "trainer.save_total_limit": 1})
    hub.gate.clear()
    fit(work, trainer, Meter(on_cuda=False))
    hub.gate.set()
    trainer.pusher._thread.join(patience(60))
    assert [place for _, place, _ in hub.uploads if place] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_stop_neither_pushes_nor_waits(tmp_path, hub, monkeypatch):
    asked = stopping.Stop()
    monkeypatch.setattr(callbacks, "stop", asked)

    class Asks(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 3:
                asked.ask(signal.SIGTERM)

    work, trainer = made(tmp_path, {**HUB, "trainer.hub_strategy": "every_save"})
    trainer.add_callback(Asks())
    hub.gate.clear()
    fit(work, trainer, Meter(on_cuda=False))
    assert (trainer.stopping.stopped, trainer.state.global_step) == (True, 4)
    assert trainer.pusher._thread.daemon, "what ends the process ends it, too"
    hub.gate.set()
    trainer.pusher._thread.join(patience(60))
    assert [message for message, *_ in hub.uploads] == ["Training in progress, step 2"]


def test_a_push_that_fails_costs_neither_training_nor_the_weights(tmp_path, hub, capsys):
    work, trainer = made(tmp_path, {**HUB, "trainer.hub_strategy": "every_save", "trainer.max_steps": 2})
    hub.error = OSError("413 Payload too large")
    with pytest.raises(RunFailed) as caught:
        finish(work, trainer)
    (problem,) = caught.value.problems
    assert (problem.code, problem.file) == ("push-failed", str(tmp_path / "model"))
    assert f"hf upload a/b {tmp_path / '.pushing' / 'model-weights'} .`" in problem.hint
    assert "not pushed to a/b: 413 Payload too large" in problem.message
    assert "WARNING: checkpoint-2 was not pushed to a/b: 413" in capsys.readouterr().out
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert (tmp_path / "result.json").is_file()
    assert (tmp_path / "COMPLETED").exists(), "the run has finished"
    assert (tmp_path / ".pushing" / "model-weights" / "model.safetensors").is_file(), "to push again"


@pytest.mark.parametrize("adapted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_is_pushed_names_no_folder_of_this_machine(adapted, tmp_path, hub, monkeypatch):
    """Of an adapter we remove it; transformers 5.23 writes none into the config.json of a model."""
    base = tmp_path / "home" / "ada" / "base"
    llama().save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    asked = {**HUB, "trainer.hub_strategy": "every_save", "trainer.max_steps": 2}
    if adapted:
        asked["adapter.type"] = "lora"
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2))
    work, trainer = made(tmp_path / "run", asked, model)
    pushed = []

    def upload(**how):
        texts = [path.read_bytes() for path in how["folder_path"].rglob("*") if path.is_file()]
        pushed.append(str(base).encode() in b"".join(texts))

    monkeypatch.setattr(hub, "upload", upload)
    finish(work, trainer)
    assert pushed == [False, False]
    if adapted:
        config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(base)
