"""What a plan turns off, refuses and leaves uncounted because of the hooks of `python:`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import facts, recipe

from launcher.errors import RecipeError
from launcher.planner.planner import make_plan
from launcher.planner.resuming import compare_settings
from launcher.recipe.hooks import HOOK

A100 = "1xA100-80GB"


def with_hooks(folder, *names: str, on: str = A100, digest: str = "d" * 64, versions=None, **overrides):
    loaded = recipe(folder, **overrides)
    known = facts(on, loaded.recipe.model.name_or_path, loaded.recipe.task)
    known = replace(known, hooks=names, hooks_digest=digest)
    return make_plan(loaded, known if versions is None else replace(known, versions=versions))


LIGER = {"liger-kernel": "0.8.5", "torch": "2.13", "transformers": "5.23"}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("callbacks", {"model.loss": "full", "trainer.use_liger_kernel": True, "data.padding_free": True}),
        ("compute_loss", {"model.loss": "full", "trainer.use_liger_kernel": False}),
        ("Trainer", {"model.loss": "full", "trainer.use_liger_kernel": False}),
        ("prepare_model", {"model.loss": "full", "trainer.use_liger_kernel": False,
                           "data.padding_free": False, "model.attn_implementation": "sdpa"}),
        ("make_model", {"model.loss": "full", "data.padding_free": False}),
        ("data_collator", {"data.padding_free": False, "data.pad_to_multiple_of": None}),
    ],
)  # fmt: skip
def test_what_a_hook_turns_off_has_its_reason(tmp_path, name, settings):
    made = with_hooks(tmp_path, name, versions=LIGER)
    assert {setting: made.at(setting) for setting in settings} == settings
    for setting in settings.keys() & HOOK[name].turns_off.keys():
        assert HOOK[name].turns_off[setting] in made.provenance[setting].reason


def test_the_loss_is_chunked_where_no_hook_reads_the_logits(tmp_path):
    assert with_hooks(tmp_path, "optimizer").model.loss == "chunked"
    assert with_hooks(tmp_path, "compute_loss").model.loss == "full"


@pytest.mark.parametrize(
    ("name", "given", "code", "path"),
    [
        ("compute_loss", {"model__loss": "chunked"}, "loss-conflict", "model.loss"),
        ("compute_loss", {"trainer__use_liger_kernel": "true"}, "hook-conflict", "trainer.use_liger_kernel"),
        ("compute_loss", {"trainer__label_smoothing_factor": "0.1"}, "hook-conflict",
         "trainer.label_smoothing_factor"),
        ("optimizer", {"trainer__optim": "adamw_torch"}, "hook-conflict", "trainer.optim"),
        ("data_collator", {"data__packing": "true"}, "hook-conflict", "data.packing"),
        ("prepare_model", {"model__compile_blocks": "true"}, "hook-conflict", "model.compile_blocks"),
        ("make_model", {"model__quantization": "nf4"}, "hook-conflict", "model.quantization"),
        ("optimizer", {"sharding__zero_stage": 2}, "hook-conflict", "python"),
        ("optimizer", {"sharding__engine": "fsdp"}, "hook-conflict", "python"),
    ],
)  # fmt: skip
def test_what_goes_with_no_hook_is_refused_at_its_line(tmp_path, name, given, code, path):
    with pytest.raises(RecipeError) as caught:
        with_hooks(tmp_path, name, **given)
    problem = caught.value.problems[0]
    assert (problem.code, problem.path) == (code, path)
    assert name in problem.message


def test_an_optimizer_of_the_file_trains_with_whole_weights(tmp_path):
    made = with_hooks(tmp_path, "optimizer", on="8xA100-80GB")
    assert made.sharding.engine == "ddp"
    assert "not used" in made.provenance["trainer.optim"].reason


def test_zero_takes_it_where_the_profile_says_that_it_may(tmp_path):
    loaded = recipe(tmp_path, sharding__zero_stage=2)
    known = facts(A100, loaded.recipe.model.name_or_path, loaded.recipe.task)
    known = replace(known, hooks=("optimizer",), profile={"zero_allow_untested_optimizer": True})
    assert make_plan(loaded, known).sharding.zero_stage == 2


@pytest.mark.parametrize("name", ["compute_loss", "optimizer", "prepare_model", "make_model", "Trainer"])
def test_what_is_not_counted_widens_the_range(tmp_path, name):
    plain, made = with_hooks(tmp_path, "callbacks").memory, with_hooks(tmp_path, name).memory
    assert made.low < 0.6 * made.total
    assert made.high > 1.4 * made.total
    assert any(HOOK[name].uncounted in note for note in made.notes)
    assert plain.low > 0.9 * plain.total


def test_a_traced_optimizer_is_counted_as_it_was_traced(tmp_path):
    loaded = recipe(tmp_path, adapter="null", precision="fp32", sharding__engine="ddp")
    known = facts("8xH200-141GB", loaded.recipe.model.name_or_path, loaded.recipe.task)
    known = replace(known, hooks=("optimizer",))
    two, one = (make_plan(loaded, replace(known, own_states=width)) for width in (8.0, 4.0))
    usual = make_plan(loaded, replace(known, hooks=()))
    assert two.memory.components.optimizer == usual.memory.components.optimizer
    assert one.memory.components.optimizer == two.memory.components.optimizer // 2
    assert two.memory.low == usual.memory.low
    assert not any("not counted" in text for text in two.memory.notes)


@pytest.mark.parametrize(
    ("names", "refused"), [(("optimizer",), ["python.digest"]), (("callbacks", "format_row"), [])]
)
def test_a_resumed_run_needs_the_same_file_where_it_decides_what_is_learned(tmp_path, names, refused):
    old, new = (with_hooks(tmp_path, *names, digest=digest * 64) for digest in "ab")
    assert [one.setting for one in compare_settings(old, new) if one.refused] == refused
