"""Which optimizers train over which engine, and what is said of the others before anything is started."""

from __future__ import annotations

import pytest
from factories import BASE, plan, recipe

from launcher.errors import RecipeError
from launcher.recipe.optimizer_needs import IN_SHARDS, OPTIMIZERS

ZERO, DDP = {"sharding__engine": "deepspeed"}, {"sharding__engine": "ddp"}
TARGETS = {"trainer__optim_target_modules": "all-linear"}
FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "")
ELSEWHERE = [name for name, needs in OPTIMIZERS.items() if needs.device]
WHOLE = [name for name, needs in OPTIMIZERS.items() if needs.whole and not needs.layerwise]
FLAT = [name for name, needs in OPTIMIZERS.items() if not (needs.whole or needs.device)]
LAYERWISE = [name for name, needs in OPTIMIZERS.items() if needs.layerwise]


def asked(name: str) -> dict[str, str]:
    return {"trainer__optim": name, **(TARGETS if OPTIMIZERS[name].targets else {})}


def refused(folder, on="8xA100-80GB", **overrides):
    with pytest.raises(RecipeError) as caught:
        plan(folder, on, **overrides)
    (problem,) = caught.value.problems
    assert problem.path == "trainer.optim"
    assert problem.hint
    return problem


@pytest.mark.parametrize("optim", WHOLE)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_needs_whole_tensors_is_refused_over_flat_partitions(tmp_path, optim, stage):
    problem = refused(tmp_path, **ZERO, **asked(optim), sharding__zero_stage=stage)
    assert problem.code == "zero-optimizer"
    assert "sharding.engine: ddp" in problem.hint


@pytest.mark.parametrize("optim", WHOLE)
def test_ddp_trains_it_and_is_chosen_where_the_engine_is_open(tmp_path, optim):
    for engine in (DDP, {}):
        assert plan(tmp_path, **engine, **asked(optim)).sharding.engine == "ddp"


@pytest.mark.parametrize("optim", FLAT)
def test_what_updates_value_by_value_is_planned_over_flat_partitions(tmp_path, optim):
    made = plan(tmp_path, **ZERO, **asked(optim), sharding__zero_stage=2)
    assert made.trainer.optim == optim
    told = [warning for warning in made.warnings if "flat partition" in warning]
    assert bool(told) == bool(OPTIMIZERS[optim].by_tensor)


def test_adagrad_trains_where_deepspeed_has_no_partitions(tmp_path):
    made = plan(tmp_path, **ZERO, **asked("adagrad"), sharding__zero_stage=0)
    assert made.trainer.optim == "adagrad"
    assert refused(tmp_path, **ZERO, **asked("lomo"), sharding__zero_stage=0).code == "zero-optimizer"


@pytest.mark.parametrize("optim", LAYERWISE)
def test_layerwise_optimizers_need_one_process(tmp_path, optim):
    for engine in (ZERO, DDP, {}):
        problem = refused(tmp_path, **engine, **asked(optim))
        assert problem.code == "optimizer-conflict"
        assert optim.removesuffix("_layerwise") in problem.hint
    assert plan(tmp_path, "1xA100-80GB", **asked(optim)).batch.accumulation == 1


def test_a_layerwise_step_has_one_micro_batch(tmp_path):
    one = {**asked("galore_adamw_layerwise"), "global_batch_size": 4}
    made = plan(tmp_path, "1xA100-80GB", **one)
    assert (made.batch.micro, made.batch.accumulation) == (4, 1)
    problem = refused(tmp_path, "1xA100-80GB", **one, trainer__per_device_train_batch_size=1)
    assert problem.code == "optimizer-conflict"
    assert "a step has 4" in problem.message


@pytest.mark.parametrize("optim", [name for name, needs in OPTIMIZERS.items() if needs.targets])
def test_what_is_projected_has_to_be_named(tmp_path, optim):
    with pytest.raises(RecipeError, match="optim_target_modules") as caught:
        recipe(tmp_path, trainer__optim=optim)
    assert caught.value.problems[0].path == "trainer.optim"
    recipe(tmp_path, **asked(optim))


@pytest.mark.parametrize("optim", ELSEWHERE)
def test_optimizers_of_other_devices_are_refused(tmp_path, optim):
    with pytest.raises(RecipeError, match="NVIDIA GPUs and CPUs"):
        recipe(tmp_path, trainer__optim=optim)


def test_what_updates_shards_needs_nothing_else():
    assert IN_SHARDS == ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop")


def test_every_optimizer_of_transformers_is_decided():
    names = pytest.importorskip("transformers.training_args").OptimizerNames
    assert {name.value for name in names} == set(OPTIMIZERS)
