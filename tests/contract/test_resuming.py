"""Checkpoints that the Trainer goes on from wrongly, or not at all, and what is done before it reads them."""

from __future__ import annotations

import pickle

import pytest
from checkpoints import checkpoint as whole_checkpoint

from launcher.errors import RecipeError
from launcher.execute.resume import write_origin

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from launcher.train.checkpoint.resuming import ready_checkpoint  # noqa: E402
from launcher.train.engines.deepspeed import restore_groups, universal_folder  # noqa: E402
from launcher.train.engines.engine import innermost  # noqa: E402
from launcher.train.job import Job  # noqa: E402


def trainer(folder, steps, **given):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, max_steps=steps, save_steps=2, report_to="none", disable_tqdm=True, **given
    )
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 64
    return transformers.Trainer(transformers.LlamaForCausalLM(config), args, train_dataset=rows)


def test_random_states_that_torch_will_not_unpickle_are_put_aside(tmp_path, capsys):
    trainer(tmp_path, 2).train()
    checkpoint = tmp_path / "checkpoint-2"
    ready_checkpoint(checkpoint)
    assert (checkpoint / "rng_state.pth").is_file(), "sound states stay"
    states = torch.load(checkpoint / "rng_state.pth", weights_only=False)
    # An object outside the list of safe types, as another numpy's are.
    torch.save({**states, "python": pytest.approx(1)}, checkpoint / "rng_state.pth")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        trainer(tmp_path, 3).train(resume_from_checkpoint=str(checkpoint))
    ready_checkpoint(checkpoint)
    assert "cannot be read here" in capsys.readouterr().out
    resumed = trainer(tmp_path, 3)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 3


def test_a_checkpoint_of_weights_alone_is_refused(tmp_path):
    trainer(tmp_path, 2, save_only_model=True, optim="sgd", optim_args="momentum=0.9").train()
    checkpoint = tmp_path / "checkpoint-2"
    silent = trainer(tmp_path, 3, optim="sgd", optim_args="momentum=0.9")
    silent.train(resume_from_checkpoint=str(checkpoint))
    assert silent.state.global_step == 3, "the Trainer goes on without a word ..."
    schedule = getattr(silent.lr_scheduler, "scheduler", silent.lr_scheduler)
    assert schedule.last_epoch == 1, "... with a schedule that begins again"
    with pytest.raises(RecipeError) as caught:
        ready_checkpoint(checkpoint)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("checkpoint-without-states", "trainer.save_only_model")


def adam(weights):
    """Two groups, as the Trainer makes them: what decays, and what does not."""
    groups = [{"params": weights[:1], "weight_decay": 0.5}, {"params": weights[1:], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1)


def stepped(optimizer, weights, count):
    for _ in range(count):
        for weight in weights:
            weight.grad = 2 * weight.detach()
        optimizer.step()
    return [float(weight.detach()) for weight in weights]


@pytest.mark.parametrize("mended", [True, False])
def test_groups_that_share_a_step_and_a_decay_get_their_own_back(mended):
    """As stage 3 of DeepSpeed leaves them when it has read a universal checkpoint."""
    weights = [torch.nn.Parameter(torch.tensor(value)) for value in (1.0, 2.0)]
    optimizer = adam(weights)
    stepped(optimizer, weights, 3)
    saved = [dict(group) for group in optimizer.param_groups]
    twins = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    resumed = adam(twins)
    step = torch.tensor(3.0)
    for weight, twin in zip(weights, twins, strict=True):
        old = optimizer.state[weight]
        moments = {name: old[name].clone() for name in ("exp_avg", "exp_avg_sq")}
        resumed.state[twin] = {"step": step, **moments}
    resumed.param_groups[1]["weight_decay"] = 0.5
    if mended:
        restore_groups(innermost(resumed), saved)
    same = stepped(resumed, twins, 3) == pytest.approx(stepped(optimizer, weights, 3), rel=1e-6)
    assert same is mended
    assert resumed.param_groups[0]["params"] == twins[:1]


def test_a_converted_checkpoint_is_told_from_a_saved_one(tmp_path):
    assert universal_folder(tmp_path) is None
    (tmp_path / "latest_universal").write_text("global_step3_universal")
    assert universal_folder(tmp_path) == tmp_path / "global_step3_universal"


def seen_by(monkeypatch, rank, asked, told=None):
    """As rank `rank` of two, with its own environment; told: what rank 0 chose."""
    from launcher.train import training

    monkeypatch.setenv("EFFILAUNCH_RESUME", asked)
    monkeypatch.setattr(training, "SEEN_S", 0.0)
    monkeypatch.setattr(training, "rank", lambda: rank)
    monkeypatch.setattr(training, "of_rank_0", lambda own: own if rank == 0 else told)
    monkeypatch.setattr(training, "of_all", lambda own: [own, None] if rank == 0 else [None, own])
    return training.find_checkpoint


def test_rank_0_says_for_all_where_the_run_goes_on(tmp_path, monkeypatch):
    """Else ranks that see other files, or have another environment, would train from different steps."""
    checkpoints = tmp_path / "checkpoints"
    job = Job(tmp_path, {})
    for step in (2, 4):
        whole_checkpoint(checkpoints, step)
    assert seen_by(monkeypatch, 0, "auto")(job) == checkpoints / "checkpoint-4"
    told = (checkpoints / "checkpoint-2", None)
    assert seen_by(monkeypatch, 1, "auto", told)(job) == checkpoints / "checkpoint-2"
    assert seen_by(monkeypatch, 1, "auto", (None, None))(job) is None
    began = Job(tmp_path / "new", {})
    began.run_dir.mkdir()
    write_origin(began.run_dir, checkpoints / "checkpoint-2")
    assert seen_by(monkeypatch, 0, "auto")(began) == checkpoints / "checkpoint-2", "saved none of its own"
    with pytest.raises(RecipeError, match="checkpoint on rank 1: it has no manifest"):
        seen_by(monkeypatch, 1, "", (tmp_path / "elsewhere" / "checkpoint-2", None))(job)
    with pytest.raises(RecipeError, match="checkpoint: it has no manifest"):
        seen_by(monkeypatch, 0, str(tmp_path / "elsewhere"))(job)
