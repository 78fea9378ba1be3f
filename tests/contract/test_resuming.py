"""Checkpoints that the Trainer goes on from wrongly, or not at all, and what is done before it reads them."""

from __future__ import annotations

import pickle

import pytest

from launcher.errors import RecipeError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from launcher.train.restoring import innermost, restore_groups, universal_folder  # noqa: E402
from launcher.train.resuming import ready_checkpoint  # noqa: E402


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
