"""Each fix fires where its condition holds, is silent elsewhere, can be disabled; twice changes nothing."""

from __future__ import annotations

import pytest
from factories import BASE, facts, plan, recipe

from launcher.errors import DoesNotFit, RecipeError
from launcher.plan import decide
from launcher.plan.draft import Draft
from launcher.plan.fixes import FIXES, apply_fixes
from launcher.plan.fixes.fix import Situation
from launcher.plan.fixes.packing import PACKING_FIXES
from launcher.plan.planner import make_plan

FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "")
GC = {"trainer__activation_checkpointing": "true"}
DS = {"sharding__engine": "deepspeed"}

# id: (hardware, overrides, setting, value) where it sets, and (hardware, overrides) where it must not.
SETS = {
    "explicit-dtype": ("8xA100-80GB", {}, "model.dtype", "bfloat16",
                       "8xA100-80GB", {"model__dtype": "float32"}),
    "autocast-guard": ("1xV100-32GB", {}, "runtime.autocast", "float16", "1xA100-80GB", {}),
    "enable-input-require-grads": ("1xA100-80GB", GC, "model.enable_input_require_grads", True,
                                   "1xA100-80GB", {"trainer__activation_checkpointing": "false"}),
    "no-kbit-prepare-on-16-bit": ("1xA100-80GB", {}, "model.prepare_for_kbit", False,
                                  "1xA100-80GB", {"model__quantization": "int8"}),
    "kbit-prepare": ("1xA100-80GB", {"model__quantization": "nf4"}, "model.prepare_for_kbit", True,
                     "1xA100-80GB", {}),
    "non-reentrant-checkpointing": ("1xA100-80GB", GC, "trainer.activation_checkpointing_kwargs",
                                    {"use_reentrant": False},
                                    "1xA100-80GB", {"trainer__activation_checkpointing": "false"}),
    "ddp-find-unused": ("8xA100-80GB", {}, "trainer.ddp_find_unused_parameters", False, "1xA100-80GB", {}),
    "use-cache-off": ("1xA100-80GB", {}, "trainer.use_cache", False,
                      "1xA100-80GB", {"trainer__use_cache": "true"}),
    "local-device-map": ("1xA100-80GB", {"model__quantization": "int8"}, "model.device_map", "local",
                         "1xA100-80GB", {}),
    "zero3-no-device-map": ("8xA100-80GB", {"sharding__zero_stage": 3}, "model.device_map", None,
                            "8xA100-80GB", {"sharding__zero_stage": 2}),
    "zero3-args-before-model": ("8xA100-80GB", {"sharding__zero_stage": 3},
                                "runtime.training_arguments_first", True,
                                "8xA100-80GB", {"sharding__zero_stage": 2}),
    "nan-shown-as-zero": ("1xA100-80GB", {}, "trainer.logging_nan_inf_filter", False,
                          "1xA100-80GB", {"trainer__logging_nan_inf_filter": "true"}),
}  # fmt: skip

# id: (hardware, recipe, overrides, setting at fault)
REFUSES = {
    "bf16-emulated": ("8xV100-32GB", BASE, {"precision": "bf16"}, "precision"),
    "fp16-unscale": ("1xV100-32GB", FULL, {"model__dtype": "float16"}, "model.dtype"),
    "pure-half-training": ("1xA100-80GB", FULL, {"precision": "fp32", "model__dtype": "bfloat16"},
                           "model.dtype"),
    "tf32-pre-ampere": ("1xV100-32GB", BASE, {"trainer__tf32": "true"}, "trainer.tf32"),
    "fa2-pre-ampere": ("1xT4-16GB", BASE, {"model__attn_implementation": "flash_attention_2"},
                       "model.attn_implementation"),
    "purely-quantized": ("1xA100-80GB", FULL, {"model__quantization": "int8"}, "model.quantization"),
    "kbit-compile": ("1xA100-80GB", BASE, {"model__quantization": "nf4", "trainer__torch_compile": "true"},
                     "trainer.torch_compile"),
    "zero-device-map-asked": ("1xA100-80GB", BASE, {**DS, "model__device_map": "auto"}, "model.device_map"),
    "zero3-int8": ("8xA100-80GB", BASE, {"model__quantization": "int8", "sharding__zero_stage": 3},
                   "sharding.zero_stage"),
    "offload-needs-adamw": ("8xA100-80GB", BASE,
                            {"sharding__offload_optimizer": "cpu", "trainer__optim": "adafactor"},
                            "trainer.optim"),
    "offload-param-stage": ("8xA100-80GB", BASE,
                            {"sharding__offload_param": "cpu", "sharding__zero_stage": 2},
                            "sharding.offload_param"),
    "offload-optimizer-stage": ("8xA100-80GB", BASE,
                                {"sharding__offload_optimizer": "cpu", "sharding__zero_stage": 0},
                                "sharding.zero_stage"),
    "auto-find-batch-size": ("1xA100-80GB", BASE, {"trainer__auto_find_batch_size": "true"},
                             "trainer.auto_find_batch_size"),
    "device-map-distributed": ("8xA100-80GB", BASE,
                               {"model__device_map": "auto", "sharding__engine": "ddp",
                                "launch__launcher": "accelerate"}, "model.device_map"),
}  # fmt: skip


def ids(made):
    return {fix.id for fix in made.fixes}


@pytest.mark.parametrize("name", SETS)
def test_a_setting_fix_fires_and_is_silent_elsewhere(tmp_path, name):
    on, overrides, setting, value, off, others = SETS[name]
    fired = plan(tmp_path, on, **overrides)
    assert name in ids(fired)
    assert fired.value(setting) == value
    assert (fired.settings[setting].source, fired.settings[setting].by) == ("fix", name)
    assert name not in ids(plan(tmp_path, off, **others))


@pytest.mark.parametrize("name", SETS)
def test_a_setting_fix_can_be_disabled(tmp_path, name):
    on, overrides, *_ = SETS[name]
    assert name not in ids(plan(tmp_path, on, fixes__disable=f"[{name}]", **overrides))


@pytest.mark.parametrize("name", REFUSES)
def test_a_refusing_fix_names_the_setting_and_the_mend(tmp_path, name):
    on, text, overrides, setting = REFUSES[name]
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, on, text, **overrides)
    problem = next(p for p in caught.value.problems if p.code == f"fix-{name}")
    assert problem.path == setting
    assert problem.hint
    assert name in problem.hint


@pytest.mark.parametrize("name", REFUSES)
def test_a_refusing_fix_can_be_disabled(tmp_path, name):
    on, text, overrides, _ = REFUSES[name]
    loaded = recipe(tmp_path, text, fixes__disable=f"[{name}]", **overrides)
    codes: set[str] = set()
    try:
        make_plan(loaded, facts(on))
    except (RecipeError, DoesNotFit) as error:
        codes = {problem.code for problem in error.problems}
    assert f"fix-{name}" not in codes


@pytest.mark.parametrize("name", REFUSES)
def test_a_plain_recipe_is_not_refused(tmp_path, name):
    assert name not in ids(plan(tmp_path, "1xA100-80GB"))


def test_gemma_in_fp16_is_refused_and_in_bf16_not(tmp_path):
    text = BASE.replace("huggyllama/llama-7b", "google/gemma-2-9b")
    with pytest.raises(RecipeError, match="65504"):
        plan(tmp_path, "8xA100-80GB", text, precision="fp16")
    assert "fp16-bf16-pretrained" not in ids(plan(tmp_path, "8xA100-80GB", text))


def test_a_kernel_that_the_model_lacks_is_refused_before_the_weights_are_loaded(tmp_path):
    gemma = BASE.replace("huggyllama/llama-7b", "google/gemma-2-9b")
    assert plan(tmp_path, text=gemma).value("model.attn_implementation") == "eager"
    with pytest.raises(RecipeError, match="caps its scores"):
        plan(tmp_path, text=gemma, model__attn_implementation="sdpa")
    assert plan(tmp_path, model__attn_implementation="sdpa").value("model.attn_implementation") == "sdpa"
    mt0 = BASE.replace("huggyllama/llama-7b", "bigscience/mt0-large")
    with pytest.raises(RecipeError, match="bias to each pair"):
        plan(tmp_path, text=mt0, task="seq2seq-lm", model__attn_implementation="flash_attention_2")


def test_dropout_that_trl_turns_off_is_said(tmp_path):
    text = BASE.replace("adapter: {", "task: dpo\nadapter: {lora_dropout: 0.1, ")
    warned = plan(tmp_path, "1xA100-80GB", text)
    assert any("trl turns dropout off" in warning for warning in warned.warnings)
    for silent in ({"adapter__lora_dropout": 0.0}, {"trainer__disable_dropout": "false"}):
        assert "dpo-dropout" not in ids(plan(tmp_path, "1xA100-80GB", text, **silent))
    assert "dpo-dropout" not in ids(plan(tmp_path, adapter__lora_dropout=0.1))


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


def test_a_fix_never_replaces_an_explicit_value(tmp_path):
    kept = plan(tmp_path, "1xA100-80GB", model__dtype="float32")
    assert kept.settings["model.dtype"].source == "override"
    assert kept.value("model.dtype") == "float32"


def test_an_explicit_reentrant_choice_is_kept(tmp_path):
    made = plan(
        tmp_path, "1xA100-80GB", trainer__activation_checkpointing_kwargs="{use_reentrant: true}", **GC
    )
    assert made.value("trainer.activation_checkpointing_kwargs") == {"use_reentrant": True}


def test_checkpointing_kwargs_of_the_recipe_are_added_to_not_replaced(tmp_path):
    given = "{preserve_rng_state: false}"
    made = plan(tmp_path, "1xA100-80GB", trainer__activation_checkpointing_kwargs=given, **GC)
    kwargs = made.value("trainer.activation_checkpointing_kwargs")
    assert kwargs == {"use_reentrant": False, "preserve_rng_state": False}


def test_every_fix_is_covered_here():
    elsewhere = {"fp16-bf16-pretrained", "bf16-unknown-device", "pad-token"}
    elsewhere |= {"attention-kernel", "dpo-dropout"}
    elsewhere |= {fix.id for fix in PACKING_FIXES}  # test_packing_fixes.py
    assert {fix.id for fix in FIXES} == SETS.keys() | REFUSES.keys() | elsewhere
    assert len({fix.id for fix in FIXES}) == len(FIXES)


@pytest.mark.parametrize("fix", FIXES, ids=lambda f: f.id)
def test_every_fix_says_why_and_whence(fix):
    assert all((fix.title, fix.condition, fix.reason, fix.source, fix.versions))
    assert fix.action in ("set", "warn", "refuse")
    if fix.action == "refuse":
        assert fix.hint


def test_a_second_pass_changes_nothing(tmp_path):
    loaded = recipe(tmp_path, model__quantization="nf4", **GC)
    given = facts("1xV100-32GB")
    made = make_plan(loaded, given)
    draft = Draft(loaded.origins)
    draft.settings = dict(made.settings)
    situation = Situation(draft, given.model, given.hardware, {})
    for early in (True, False):
        apply_fixes(situation, [], early=early)
    assert {k: s.value for k, s in draft.settings.items()} == {k: s.value for k, s in made.settings.items()}


def test_precision_names_are_the_documented_ones():
    assert set(decide.HALF) == {"bf16", "bf16-true", "fp16", "fp16-true"}
