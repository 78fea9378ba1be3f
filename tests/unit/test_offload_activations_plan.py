"""`sharding.offload_activations` in the plan: what it needs, moves and costs, and where it is offered."""

from __future__ import annotations

import pytest
from factories import facts, plan, recipe

from launcher.errors import DoesNotFit, RecipeError
from launcher.planner.planner import make_plan
from launcher.planner.search import search, search_rows

LONG = {"data__max_length": 16384, "global_batch_size": 1, "trainer__activation_checkpointing": "true"}
MOVED = {**LONG, "sharding__offload_activations": "cpu"}
ON = "1xA100-80GB"
KEY = "sharding.offload_activations"


@pytest.mark.parametrize(
    ("overrides", "on", "path"),
    [
        ({"trainer__activation_checkpointing": "false"}, ON, "trainer.activation_checkpointing"),
        ({"model__device_map": "auto"}, "2xA100-80GB", "model.device_map"),
        ({"sharding__tp_size": 2, "sharding__engine": "deepspeed"}, "2xA100-80GB", "sharding.tp_size"),
        ({"trainer__torch_compile": "true"}, ON, "trainer.torch_compile"),
        ({"model__compile_blocks": "true"}, ON, "model.compile_blocks"),
        (
            {KEY.replace(".", "__"): "none", "trainer__activation_checkpointing_kwargs": "{offload: true}"},
            ON, "trainer.activation_checkpointing_kwargs",
        ),
    ],
)  # fmt: skip
def test_what_it_excludes_is_refused_at_its_key(tmp_path, overrides, on, path):
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, on, **{**MOVED, **overrides})
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("offload-activations", path)
    assert problem.hint


@pytest.mark.parametrize("engine", ["ddp", "deepspeed", "fsdp"])
def test_inputs_of_layers_move_from_the_device_to_the_host(tmp_path, engine):
    on, both = "2xA100-80GB", {"sharding__engine": engine, "global_batch_size": 2}
    stays, moved = plan(tmp_path, on, **{**LONG, **both}), plan(tmp_path, on, **{**MOVED, **both})
    spec = moved.spec
    one = 2 * 16384 * spec.hidden_size
    assert moved.memory.host.activations == 2 * spec.num_layers * one, "of both ranks"
    assert stays.memory.host.activations == 0
    for phase, parts in moved.memory.phases.items():
        before = stays.memory.phases[phase]
        if phase == "recompute":
            # The top layer's input and the one below it stay.
            assert before.activations - parts.activations == (spec.num_layers - 2) * one
        assert parts.weights == before.weights
    assert moved.memory.host_bytes - stays.memory.host_bytes <= moved.memory.host.activations


def test_copies_take_time_that_the_computation_hides_in_part(tmp_path):
    stays, moved = plan(tmp_path, ON, **LONG), plan(tmp_path, ON, **MOVED)
    copied = 2 * 32 * 2 * 16384 * 4096
    alone = copied / (0.6 * 32e9)
    assert moved.time.likely - stays.time.likely == pytest.approx(alone / 2, rel=0.3)
    assert moved.time.low == pytest.approx(stays.time.low)


def test_a_cpu_has_no_other_memory(tmp_path):
    stays, moved = plan(tmp_path, "cpu", **LONG), plan(tmp_path, "cpu", **MOVED)
    assert moved.memory.needed == stays.memory.needed
    assert moved.memory.host_bytes == stays.memory.host_bytes


def test_auto_takes_it_where_nothing_else_fits(tmp_path):
    asked = {**LONG, "sharding__offload_activations": "auto"}
    assert plan(tmp_path, ON, **asked).sharding.offload_activations == "none"
    made = plan(tmp_path, ON, **{**asked, "data__max_length": 163840})
    assert made.sharding.offload_activations == "cpu"
    assert made.trainer.activation_checkpointing is True
    assert made.provenance[KEY].reason
    loaded, known = recipe(tmp_path, **{**asked, "data__max_length": 163840}), facts(ON)
    rows = search_rows(search(loaded, known), None)
    assert {row["settings"][KEY] for row in rows} == {"none", "cpu"}
    assert [row["settings"][KEY] for row in rows if row["fits"]] == ["cpu"]


def test_it_is_offered_before_larger_hardware(tmp_path):
    long = {**LONG, "data__max_length": 163840}
    with pytest.raises(DoesNotFit) as caught:
        make_plan(recipe(tmp_path, **long), facts(ON))
    changes = [other.change for other in caught.value.would_fit]
    place = changes.index({KEY: "cpu"})
    assert place < min(i for i, change in enumerate(changes) if "on" in change)
    made = plan(tmp_path, ON, **{**long, "sharding__offload_activations": "cpu"})
    assert made.memory == caught.value.would_fit[place].candidate.memory, "what is offered is what is planned"


def test_without_recomputation_both_are_offered(tmp_path):
    long = {**LONG, "data__max_length": 163840, "trainer__activation_checkpointing": "false"}
    with pytest.raises(DoesNotFit) as caught:
        make_plan(recipe(tmp_path, **long), facts(ON))
    change = {KEY: "cpu", "trainer.activation_checkpointing": True}
    assert change in [other.change for other in caught.value.would_fit]


def test_two_passes_of_a_pair_are_kept_at_once(tmp_path):
    pairs = {"task": "dpo", "trainer__precompute_ref_log_probs": "false"}
    made = plan(tmp_path, ON, **{**MOVED, **pairs})
    sequences = made.job.sequences
    assert made.memory.host.activations == sequences * 32 * 2 * 16384 * 4096
