"""Each fix acts where its condition holds and nowhere else, can be disabled, replaces no word of a recipe."""

from __future__ import annotations

import ast
import json
import re

import pytest
from every import every
from factories import BASE, facts, plan, recipe
from fix_cases import CASES, CONTRARY, NOT_ON_CPU, SHOWN, plan_of

from launcher.errors import DoesNotFit, RecipeError
from launcher.inputs.planning_facts import gather
from launcher.machine.requirements import holds, requirements
from launcher.plan.draft import EXPLICIT
from launcher.planner import decide, fixes
from launcher.planner.fixes import FIXES, apply_fixes
from launcher.planner.planner import make_plan
from launcher.planner.search import record_size, search, situation_of
from launcher.recipe.loading import load_recipe
from launcher.render.bundle import render
from launcher.report.plan_sections import fixes_section
from launcher.report.sections import Code, line
from launcher.tasks import task_named

TESTED = {
    "torch": "2.13.0+cpu", "transformers": "5.23.0", "accelerate": "1.15.0", "deepspeed": "0.19.8",
    "peft": "0.21.2", "bitsandbytes": "0.50.2", "trl": "1.16.0",
}  # fmt: skip
GC = {"trainer__activation_checkpointing": "true"}
BY_ID = {fix.id: fix for fix in FIXES}
SETTING = [fix.id for fix in FIXES if fix.action == "set"]
MACHINES = (None, "8xA100-80GB", "1xT4-16GB", "4xRTX4090-24GB")
"""Beside each shipped recipe's own."""


def pairs(side):
    """(id, case) of every fix; side 0: where it must act, 1: where it must not."""
    return [
        pytest.param(name, c, id=f"{name}-{i}")
        for name, both in CASES.items()
        for i, c in enumerate(both[side])
    ]


def acted(folder, name, given, **more):
    """Whether the fix set, warned or refused, and the plan or the refusal."""
    try:
        made = plan_of(folder, given, **more)
    except RecipeError as error:
        return f"fix-{name}" in {problem.code for problem in error.problems}, error
    return name in [fix.id for fix in made.fixes], made


def test_every_fix_has_cases_for_and_against():
    assert CASES.keys() == BY_ID.keys(), "a fix needs cases of both kinds in tests/fix_cases.py"
    assert len(BY_ID) == len(FIXES), "two fixes have one id"
    assert all(where and elsewhere for where, elsewhere in CASES.values())
    assert CONTRARY.keys() == set(SETTING), "what a recipe may say against a fix belongs in CONTRARY"


def test_every_fix_is_shown_with_the_real_library_or_cannot_be_on_a_cpu(root):
    assert not SHOWN.keys() & NOT_ON_CPU.keys()
    assert SHOWN.keys() | NOT_ON_CPU.keys() == BY_ID.keys()
    assert all(NOT_ON_CPU.values())
    for module, test in set(SHOWN.values()):
        code = ast.parse((root / "tests" / "contract" / f"{module}.py").read_text("utf-8"))
        assert test in {node.name for node in code.body if isinstance(node, ast.FunctionDef)}, test


@pytest.mark.parametrize(("name", "given"), pairs(0))
def test_a_fix_acts_where_its_condition_holds(tmp_path, name, given):
    fix = BY_ID[name]
    fired, made = acted(tmp_path, name, given, versions=TESTED)
    assert fired
    if fix.action == "refuse":
        problem = next(p for p in made.problems if p.code == f"fix-{name}")
        assert problem.path == given.setting
        assert fix.reason in problem.message
        assert fix.hint in problem.hint
        assert f"disable: [{name}]" in problem.hint
        return
    told = next(told for told in made.fixes if told.id == name)
    section = fixes_section(render(made).to_json())
    (_, changed, (why, source)) = next(row for row in section.blocks[0].rows if row[0][0] == [Code(name)])
    assert (line(why), line(source)) == (fix.reason, fix.source)
    if fix.action == "warn":
        assert told.changed == {}
        assert any(line.startswith(f"{fix.title}: {fix.reason}") for line in made.warnings)
        return
    assert told.changed[given.setting] == given.value == made.at(given.setting)
    assert (made.provenance[given.setting].source, made.provenance[given.setting].by) == ("fix", name)
    assert made.provenance[given.setting].reason == fix.reason
    assert f"{given.setting} = " in changed


@pytest.mark.parametrize(("name", "given"), pairs(1))
def test_a_fix_is_silent_elsewhere(tmp_path, name, given):
    assert name not in [fix.id for fix in plan_of(tmp_path, given, versions=TESTED).fixes]


@pytest.mark.parametrize(("name", "given"), pairs(0))
def test_a_fix_can_be_disabled(tmp_path, name, given):
    assert name not in [fix.id for fix in plan_of(tmp_path, given, fixes__disable=f"[{name}]").fixes]


@pytest.mark.parametrize("name", [fix.id for fix in FIXES if fix.versions != "*"])
def test_a_fix_is_left_out_for_versions_that_it_is_not_for(tmp_path, name):
    old = {requirement.name: "0.1" for requirement in requirements(BY_ID[name].versions)}
    for given in CASES[name][0]:
        made = plan_of(tmp_path, given, versions={**TESTED, **old})
        assert name not in [fix.id for fix in made.fixes]


@pytest.mark.parametrize("name", SETTING)
def test_a_fix_never_replaces_a_word_of_the_recipe_silently(tmp_path, name):
    given, against = CASES[name][0][0], CONTRARY[name]
    if against is None:
        with pytest.raises(RecipeError):
            recipe(tmp_path, BASE, **{given.setting.replace(".", "__"): "true"})
        return
    _, made = acted(tmp_path, name, given, **against)
    if isinstance(made, RecipeError):
        assert given.setting in {problem.path for problem in made.problems}
        return
    assert made.provenance[given.setting].source in EXPLICIT
    assert made.at(given.setting) != given.value
    # A recipe that says a dtype has said what `explicit-dtype` wants said.
    noted = any(given.setting in warning for warning in made.warnings)
    assert noted or name == "explicit-dtype"
    assert all(given.setting not in fix.changed for fix in made.fixes)


def test_of_two_settings_the_one_that_the_recipe_leaves_open_is_set(tmp_path):
    made = plan(tmp_path, "4xRTX4090-24GB", model__quantization="nf4", launch__env="{NCCL_P2P_DISABLE: '0'}")
    told = next(fix for fix in made.fixes if fix.id == "rtx40-p2p")
    assert dict(told.changed) == {"launch.env.NCCL_IB_DISABLE": "1"}
    assert made.launch.env["NCCL_P2P_DISABLE"] == "0"


def test_what_the_recipe_says_already_is_no_fix(tmp_path):
    made = plan(tmp_path, "1xA100-80GB", trainer__use_cache="false")
    assert "use-cache-off" not in [fix.id for fix in made.fixes]
    assert made.provenance["trainer.use_cache"].source == "override"
    assert not [warning for warning in made.warnings if "use_cache" in warning]


def test_an_unknown_id_is_refused_with_the_nearest(tmp_path):
    text = BASE + "fixes: {disable: [use-cache-of, xyzzy]}\n"
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, text=text)
    near, far = caught.value.problems
    assert (near.code, near.path, near.line) == ("unknown-fix", "fixes.disable", 5)
    assert near.hint == "did you mean use-cache-off?"
    assert "effilaunch fixes" in far.hint


def drafts(folder, root):
    """Situation and disabled ids after the first pass: every case that plans, every shipped recipe."""
    asked = []
    for name, both in CASES.items():
        for given in (*both[0], *both[1]):
            off = f"[{name}]" if BY_ID[name].action == "refuse" else "[]"
            loaded = recipe(folder, BASE, **given.overrides, fixes__disable=off)
            asked.append((loaded, facts(given.on, loaded.recipe.model.name_or_path, loaded.recipe.task)))
    for path in sorted((root / "recipes").glob("*.yaml")):
        loaded = load_recipe(str(path), [])
        if not task_named(loaded.recipe.task).sees_images:  # each would be traced on each machine
            asked += [gather(loaded, on, tiny=False) for on in MACHINES]
    for loaded, told in asked:
        try:
            found = search(loaded, told)
        except RecipeError:
            continue
        draft = found.of(found.first).draft.copy()
        record_size(draft, found.first)
        situation = situation_of(draft, told)
        apply_fixes(situation, loaded.recipe.fixes.disable, early=False)
        yield situation, loaded.recipe.fixes.disable


def state(draft):
    return {key: draft.at(key) for key in draft.names}, list(draft.warnings)


def test_a_second_pass_changes_nothing_and_no_fix_needs_another_before_it(tmp_path, root, monkeypatch):
    straight = []
    for situation, disabled in drafts(tmp_path, root):
        first, before = state(situation.draft), dict(situation.draft.provenance)
        straight.append(first[0])
        for early in (True, False):
            apply_fixes(situation, disabled, early=early)
        assert state(situation.draft) == first
        assert situation.draft.provenance == before
    assert len(straight) > 150
    monkeypatch.setattr(fixes, "FIXES", tuple(reversed(FIXES)))
    assert [state(situation.draft)[0] for situation, _ in drafts(tmp_path, root)] == straight


def test_fixes_are_applied_in_the_order_of_the_tuple(tmp_path):
    place = {fix.id: i for i, fix in enumerate(FIXES)}
    assert [fix.early for fix in FIXES] == sorted((fix.early for fix in FIXES), reverse=True)
    for name in SETTING:
        made = [place[fix.id] for fix in plan_of(tmp_path, CASES[name][0][0]).fixes]
        assert made == sorted(made)
        assert len(set(made)) == len(made), "each fix acts once"


def test_gemma_in_fp16_is_refused_and_in_bf16_not(tmp_path):
    text = BASE.replace("huggyllama/llama-7b", "google/gemma-2-9b")
    with pytest.raises(RecipeError, match="65504"):
        plan(tmp_path, "8xA100-80GB", text, precision="fp16")
    assert plan(tmp_path, "8xA100-80GB", text).precision == "bf16"


def test_a_kernel_that_the_model_lacks_is_refused_before_the_weights_are_loaded(tmp_path):
    gemma = BASE.replace("huggyllama/llama-7b", "google/gemma-2-9b")
    assert plan(tmp_path, text=gemma).model.attn_implementation == "eager"
    with pytest.raises(RecipeError, match="caps its scores"):
        plan(tmp_path, text=gemma, model__attn_implementation="sdpa")
    assert plan(tmp_path, model__attn_implementation="sdpa").model.attn_implementation == "sdpa"
    mt0 = BASE.replace("huggyllama/llama-7b", "bigscience/mt0-large")
    with pytest.raises(RecipeError, match="bias to each pair"):
        plan(tmp_path, text=mt0, task="seq2seq-lm", model__attn_implementation="flash_attention_2")


def test_a_device_map_shares_the_layers_out_in_one_process(tmp_path):
    text = "model: {name_or_path: meta-llama/Llama-3.1-70B}\n" + BASE.partition("\n")[2]
    text = text.replace("huggyllama/llama-7b", "meta-llama/Llama-3.1-70B")
    with pytest.raises(DoesNotFit):
        plan(tmp_path, "1xA100-80GB", text)
    spread = plan(tmp_path, "8xA100-80GB", text, model__device_map="auto")
    assert spread.batch.data_parallel == 1
    assert spread.job.spread == 8
    assert any("naive model parallelism" in warning for warning in spread.warnings)
    assert 8 * spread.memory.components.weights == pytest.approx(2 * 70_553_706_496, rel=0.005)
    two = {"": 0, "lm_head": 1}
    named = plan(tmp_path, "8xA100-80GB", text, model__device_map=str(two).replace("'", '"'))
    assert named.job.spread == 2


def test_checkpointing_kwargs_of_the_recipe_are_added_to_not_replaced(tmp_path):
    given = "{preserve_rng_state: false}"
    made = plan(tmp_path, "1xA100-80GB", trainer__activation_checkpointing_kwargs=given, **GC)
    kwargs = made.trainer.activation_checkpointing_kwargs
    assert kwargs == {"use_reentrant": False, "preserve_rng_state": False}


def test_precision_names_are_the_documented_ones():
    assert set(decide.HALF) == {"bf16", "bf16-true", "fp16", "fp16-true"}


@every("fix", FIXES, ids=lambda f: f.id)
def test_every_fix_says_why_and_whence(fix):
    assert all((fix.title, fix.condition, fix.reason, fix.source, fix.versions))
    assert len(re.findall(r"[.!?]( [A-Z]|$)", fix.reason)) in (1, 2), "one or two sentences"
    assert holds(fix.versions, TESTED), f"{fix.versions} leaves the tested versions out"
    assert {requirement.name for requirement in requirements(fix.versions)} <= TESTED.keys()
    assert fix.action in ("set", "warn", "refuse")
    if fix.action == "refuse":
        assert fix.hint


@pytest.mark.parametrize(
    ("profile", "acts"),
    [
        ({"communication_data_type": "bf16"}, True),
        ({"seq_parallel_communication_data_type": "bfloat16"}, True),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, True),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, True),
        ({"communication_data_type": "fp16", "data_types": {"grad_accum_dtype": "fp32"}}, False),
        ({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}, False),
    ],
)
def test_a_dtype_of_a_base_profile_is_looked_at_too(tmp_path, profile, acts):
    (tmp_path / "ds.json").write_text(json.dumps(profile))
    loaded = recipe(tmp_path, sharding__config=str(tmp_path / "ds.json"))
    volta, ampere = (facts(on, profile=profile) for on in ("8xV100-32GB", "8xA100-80GB"))
    assert make_plan(loaded, ampere), "the device has the units"
    if not acts:
        assert make_plan(loaded, volta)
        return
    with pytest.raises(RecipeError) as caught:
        make_plan(loaded, volta)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("fix-bf16-dtype-emulated", "sharding.config")


def test_every_setting_that_names_bf16_is_refused_at_once(tmp_path):
    given = {"trainer__bf16_full_eval": "true", "model__dtype": "bfloat16"}
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe(tmp_path, **given), facts("1xT4-16GB"))
    assert {problem.path for problem in caught.value.problems} == {
        "trainer.bf16_full_eval", "model.dtype",
    }  # fmt: skip
    loaded = recipe(tmp_path, model__quantization="nf4")
    assert make_plan(loaded, facts("1xT4-16GB")).model.quantization["compute_dtype"] == "float16"
