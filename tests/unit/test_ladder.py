"""The memory ladder: what each rung changes and keeps, what is refused, what is shown."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from factories import BASE, facts, recipe

from launcher.errors import RecipeError
from launcher.inputs.planning_facts import gather
from launcher.lab.ladder import (
    RUNGS,
    choose_rungs,
    ladder_page,
    ladder_text,
    plan_ladder,
    rung_line,
    start_batch,
)
from launcher.machine.hardware import parse_hardware
from launcher.planner.planner import predict_as_run
from launcher.recipe.loading import load_recipe, with_changes

VIT = """\
task: image-classification
model: {name_or_path: google/vit-large-patch16-224}
data: {train: [{path: images/, format: image}], eval: {split: 0.1}, metrics: [accuracy]}
global_batch_size: 64
trainer: {num_train_epochs: 1, learning_rate: 3.0e-5, warmup_steps: 100, eval_strategy: epoch,
          load_best_model_at_end: true, metric_for_best_model: accuracy, save_strategy: epoch}
early_stopping: {patience: 2}
"""
FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "")


def climbed(folder, on="1xA100-80GB", text=VIT, *, batch=None, steps=2, **overrides):
    """The planned steps by id."""
    loaded = recipe(folder, text, **overrides)
    told = facts(on, loaded.recipe.model.name_or_path, loaded.recipe.task)
    batch = batch or start_batch(loaded.recipe, tiny=False)
    return {step.rung.id: step for step in plan_ladder(loaded, told, batch, steps)}


def test_the_rungs_stand_in_the_order_of_the_ladder_and_on_lower_ones():
    ids = [rung.id for rung in RUNGS]
    assert ids == [
        "fp32", "mixed", "pure-16bit", "small-batch", "accumulation", "sgd", "adamw-8bit", "on-device",
        "checkpointing", "lora", "int8", "nf4", "sharding", "cpu-offload",
    ]  # fmt: skip
    for place, rung in enumerate(RUNGS):
        assert set(rung.keeps) <= set(ids[:place]), rung.id


def test_the_ladder_of_the_field_notes_falls_rung_by_rung(tmp_path):
    steps = climbed(tmp_path)
    names = ("fp32", "mixed", "pure-16bit", "small-batch", "accumulation", "sgd")
    totals = [steps[name].plan.memory.total for name in names]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > 3 * totals[4]
    assert [(steps[n].plan.batch.micro, steps[n].plan.batch.accumulation) for n in names] == [
        (64, 1), (64, 1), (64, 1), (16, 1), (4, 16), (4, 16),
    ]  # fmt: skip
    assert [steps[n].plan.precision for n in names[:3]] == ["fp32", "bf16", "bf16-true"]
    assert steps["sgd"].plan.trainer.lr_scheduler_type == "cosine"
    assert steps["checkpointing"].plan.memory.total < steps["on-device"].plan.memory.total
    assert steps["nf4"].plan.memory.total < steps["lora"].plan.memory.total


def test_each_rung_changes_what_it_says_and_keeps_what_it_stands_on(tmp_path):
    steps = climbed(tmp_path)
    lora, int8, nf4 = steps["lora"].plan, steps["int8"].plan, steps["nf4"].plan
    assert (lora.adapter.type, lora.trainer.optim) == ("lora", "adamw_torch_fused")
    assert (lora.precision, lora.model.quantization) == ("bf16", "none")
    assert int8.model.quantization == {"type": "int8"}
    assert nf4.model.quantization["type"] == "nf4"
    for plan in (lora, int8, nf4):
        assert plan.trainer.activation_checkpointing is True
        assert plan.batch.micro == 4
    assert steps["on-device"].plan.model.device_map == {"": 0}
    assert steps["on-device"].plan.trainer.optim == "sgd"
    assert steps["adamw-8bit"].plan.trainer.optim == "adamw_bnb_8bit"
    known = steps["sgd"].plan.provenance["precision"]
    assert (steps["sgd"].plan.precision, known.source, known.by) == (
        "bf16-true",
        "override",
        "ladder rung sgd",
    )


def test_every_rung_trains_on_the_same_samples_and_ends_with_one_evaluation(tmp_path):
    for step in climbed(tmp_path, "4xA100-80GB", steps=3).values():
        plan = step.plan
        assert plan.batch.global_size * plan.trainer.max_steps == 3 * 64, step.rung.id
        assert plan.trainer.eval_strategy == "no"
        assert plan.trainer.save_strategy == "no"
        assert plan.trainer.warmup_steps == 0
        assert plan.data.eval == {"split": 0.1}
        assert plan.early_stopping.patience is None
        assert "trainer.load_best_model_at_end" not in plan.names


@pytest.mark.parametrize(
    ("batch", "small", "micro"), [(64, 16, 4), (16, 4, 1), (6, 1, 1), (4, 1, 1), (30, 6, 1), (96, 24, 6)]
)
def test_batches_divide(tmp_path, batch, small, micro):
    steps = climbed(tmp_path, batch=batch)
    assert steps["small-batch"].plan.batch.global_size == small
    assert steps["accumulation"].plan.batch.micro == micro
    assert steps["accumulation"].plan.batch.global_size == batch


def test_a_batch_of_one_cannot_shrink(tmp_path):
    steps = climbed(tmp_path, batch=1)
    assert steps["small-batch"].refusal == steps["accumulation"].refusal == "the batch is one sample already"
    assert steps["sgd"].kept == ("pure-16bit",)


def test_old_devices_get_fp16(tmp_path):
    steps = climbed(tmp_path, "1xV100-32GB", model__name_or_path="google/vit-large-patch16-224")
    assert steps["mixed"].plan.precision == "fp16"
    assert steps["pure-16bit"].plan.precision == "fp16-true"


def test_a_refused_rung_says_why_and_hands_nothing_on(tmp_path):
    steps = climbed(tmp_path, "cpu")
    assert "no second memory" in steps["on-device"].refusal
    assert steps["on-device"].plan is None
    assert steps["checkpointing"].kept == ("pure-16bit", "accumulation", "sgd")
    assert steps["checkpointing"].plan.model.device_map is None
    assert steps["mixed"].plan.precision == "bf16"


def test_the_planners_own_refusal_is_the_reason(tmp_path):
    text = FULL.replace("huggyllama/llama-7b", "bigscience/mt0-large").replace(
        "model:", "task: seq2seq-lm\nmodel:"
    )
    loaded = recipe(tmp_path, text)
    told = facts("1xV100-32GB", "bigscience/mt0-large", "seq2seq-lm")
    steps = {s.rung.id: s for s in plan_ladder(loaded, told, 1, 1)}
    assert steps["fp32"].refusal is None
    assert "exceed fp16's 65504" in steps["mixed"].refusal
    assert steps["lora"].kept == ("on-device", "checkpointing")


def test_what_does_not_fit_is_shown_with_its_size_and_kept(tmp_path, monkeypatch):
    monkeypatch.delattr("launcher.planner.alternatives.would_fit")  # other hardware is not looked for
    steps = climbed(tmp_path, "1xRTX4090-24GB", FULL, batch=16)
    fp32 = steps["fp32"]
    assert "nothing fits" in fp32.refusal
    assert fp32.found.first.memory.total > 100 * 2**30
    assert "pure-16bit" in steps["accumulation"].kept
    assert steps["accumulation"].found.first.job.precision == "bf16-true"
    assert steps["nf4"].refusal is None


def test_the_recipes_adapter_serves_its_rungs_and_no_other(tmp_path):
    steps = climbed(
        tmp_path, "1xB300-288GB", BASE, trainer__learning_rate="7.0e-4", model__quantization="nf4"
    )
    assert steps["fp32"].plan.adapter.type is None
    assert steps["fp32"].plan.model.quantization == "none"
    assert steps["fp32"].plan.trainer.learning_rate == 2e-5
    lora = steps["lora"].plan
    assert (lora.adapter.others["r"], lora.trainer.learning_rate) == (8, 7e-4)
    full = climbed(tmp_path, "1xB300-288GB", FULL, trainer__learning_rate="3.0e-6")
    assert full["fp32"].plan.trainer.learning_rate == 3e-6
    assert full["lora"].plan.trainer.learning_rate == 2e-4


def test_flash_attention_gives_way_since_it_has_no_32_bit_kernel(tmp_path):
    steps = climbed(tmp_path, "1xB300-288GB", FULL, model__attn_implementation="flash_attention_2")
    assert {s.plan.model.attn_implementation for s in steps.values() if s.plan} == {"sdpa"}


def test_rows_are_held_out_where_the_recipe_names_none(tmp_path):
    assert climbed(tmp_path, "1xB300-288GB", FULL)["fp32"].plan.data.eval == {"split": 0.1}


def test_sharding_takes_all_devices_and_the_others_one(tmp_path):
    steps = climbed(tmp_path, "4xA100-80GB")
    for name, step in steps.items():
        spread = name in ("sharding", "cpu-offload")
        assert step.plan.hardware.num_devices == (4 if spread else 1)
        assert step.plan.sharding.engine == ("deepspeed" if spread else "ddp")
    assert steps["sharding"].plan.sharding.zero_stage == 3
    assert steps["sharding"].plan.sharding.offload_param == "none"
    assert steps["sharding"].plan.model.device_map is None
    offload = steps["cpu-offload"].plan
    assert [offload.at(f"sharding.offload_{k}") for k in ("optimizer", "param")] == ["cpu", "cpu"]
    assert offload.trainer.optim == "adamw_torch"
    assert offload.memory.total < steps["sharding"].plan.memory.total


def test_one_gpu_cannot_share_but_can_offload(tmp_path):
    steps = climbed(tmp_path, "1xA100-80GB")
    assert steps["sharding"].refusal.startswith("1xA100-80GB is one device")
    assert steps["cpu-offload"].plan.hardware.num_devices == 1


@pytest.mark.parametrize("on", ["cpu", "2xcpu"])
def test_a_cpu_shares_between_two_processes(tmp_path, on):
    steps = climbed(tmp_path, on, batch=16)
    one, two = steps["fp32"].plan.hardware, steps["sharding"].plan.hardware
    assert (one.num_devices, two.num_devices) == (1, 2)
    assert one.device_bytes == 2 * two.device_bytes == 64 * 10**9


def test_the_starting_batch_is_the_recipes(tmp_path):
    assert start_batch(recipe(tmp_path, VIT).recipe, tiny=False) == 64
    assert start_batch(recipe(tmp_path, VIT).recipe, tiny=True) == 16
    assert start_batch(recipe(tmp_path, BASE).recipe, tiny=False) == 8
    pinned = recipe(
        tmp_path, BASE, trainer__per_device_train_batch_size=3, trainer__gradient_accumulation_steps=4
    )
    assert start_batch(pinned.recipe, tiny=True) == 12


def test_only_takes_rungs_by_name():
    assert [rung.id for rung in choose_rungs("sgd, fp32")] == ["fp32", "sgd"]
    assert choose_rungs(None) == RUNGS
    with pytest.raises(RecipeError) as caught:
        choose_rungs("fp32,checkpoint,zzz")
    first, second = caught.value.problems
    assert first.hint == "did you mean checkpointing?"
    assert "fp32, mixed" in second.hint


def test_changes_replace_add_and_take_away(tmp_path):
    loaded = recipe(tmp_path, VIT)
    changed = with_changes(
        loaded, {"trainer.num_train_epochs": None, "trainer.max_steps": 4, "data.eval": None, "seed": 1}, "me"
    )
    assert "num_train_epochs" not in changed.recipe.trainer
    assert (changed.recipe.trainer["max_steps"], changed.recipe.seed) == (4, 1)
    assert changed.recipe.data.eval is None
    assert changed.recipe.trainer["learning_rate"] == 3e-5
    assert changed.origins["trainer.max_steps"].by == "me"
    assert "data.eval.split" not in changed.origins
    assert "trainer.num_train_epochs" not in changed.origins
    assert loaded.recipe.trainer["num_train_epochs"] == 1, "the given recipe stays as it is"


TRACED = {"gemma3_4b_vision_lora", "qwen3_vl_8b_lora_24gb", "smolvlm_lora"}
"""Models of images and text, whose memory on the CPU is traced."""
RECIPES = [
    pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in TRACED else ())
    for path in sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
]


@pytest.mark.parametrize("path", RECIPES)
def test_every_shipped_recipe_can_climb_in_small(path):
    loaded = load_recipe(path)
    planned, told = gather(loaded, "cpu", tiny=True, allow_network=False)
    told = replace(told, hardware=parse_hardware("cpu"))
    steps = plan_ladder(planned, told, start_batch(loaded.recipe, tiny=True), 2)
    expected = ["on-device", "int8"] if told.model.expert_weights else ["on-device"]  # int8-experts
    planned_one = next(step.plan for step in steps if step.plan is not None)
    if planned_one.task.least_batch_of(planned_one)[0] > 1:  # a batch of two rows cannot be divided
        expected = ["accumulation", "on-device", "sharding", "cpu-offload"]
    elif loaded.recipe.embedding is not None and loaded.recipe.embedding.loss.startswith("Cached"):
        expected += ["sharding", "cpu-offload"]  # several backward passes for a micro-batch
    assert [step.rung.id for step in steps if step.refusal is not None] == expected


def test_the_prediction_follows_the_length_of_what_was_trained(tmp_path):
    loaded = recipe(tmp_path, FULL)
    told = facts("8xA100-80GB")
    plan = next(s.plan for s in plan_ladder(loaded, told, 16, 1) if s.rung.id == "small-batch")
    micro, length = plan.batch.micro, plan.job.sequence_length
    assert predict_as_run(plan, told, None) == plan.memory
    assert predict_as_run(plan, told, micro * length) == plan.memory
    short = predict_as_run(plan, told, micro * 32)
    assert short.total < plan.memory.total
    assert short == predict_as_run(replace(plan, job=replace(plan.job, sequence_length=32)), told, None)


def record(name: str, **more: object) -> dict:
    return {
        "id": name, "title": f"title of {name}", "changed": {"precision": "fp32"}, "keeps": [],
        "hardware": "cpu", "planned": 3 * 2**30, "predicted": 2 * 2**30, "low": 2**30, "high": 3 * 2**30,
        "components": {"weights": 2**30, "activations": 2**30}, "measured": None, "load": None,
        "seconds": None, "metric": None, "status": "refused", "reason": "it </svg> cannot", "run_dir": None,
    } | more  # fmt: skip


DONE = {
    "measured": 2.5 * 2**30, "load": 2**30, "seconds": 12.34, "status": "done", "reason": None,
    "metric": {"name": "eval_accuracy", "value": 0.91234},
}  # fmt: skip


def shown(*rungs: dict) -> dict:
    return {
        "recipe": "r.yaml", "model": "m <b>", "hardware": "cpu", "device_bytes": 64 * 2**30, "batch": 16,
        "steps": 3, "tiny": False, "versions": {"torch": "2.13"}, "rungs": list(rungs),
    }  # fmt: skip


def test_a_line_and_a_table_show_predicted_beside_measured():
    assert rung_line(record("a", **DONE)) == (
        "a: measured 2.50 GiB, predicted 2.00 GiB (-20.0%), 12.3 s, eval_accuracy 0.9123"
    )
    assert rung_line(record("b")) == "b: refused: it </svg> cannot"
    lost = {**DONE, "metric": {"name": "eval_loss", "value": None}}
    text = ladder_text(shown(record("a", **DONE), record("b"), record("c", **lost)), Path("/out"))
    lines = text.splitlines()
    assert "r.yaml on cpu: 3 steps of 16 samples" in lines[1]
    assert lines[3].split() == [
        "a", "2.00", "GiB", "2.50", "GiB", "-20.0%", "1.00", "GiB", "12.3", "eval_accuracy", "0.9123",
        "title", "of", "a",
    ]  # fmt: skip
    assert "refused: it </svg> cannot" in lines[4]
    assert "eval_loss not finite" in lines[5]
    assert "/out/ladder.html" in lines[-1]


def test_the_page_has_bars_with_marks_times_and_metrics():
    lost = {**DONE, "metric": {"name": "eval_loss", "value": None}}
    nothing = {"components": None, "predicted": None, "reason": "no plan"}
    page = ladder_page(shown(record("a", **DONE), record("b"), record("c", **lost), record("d", **nothing)))
    root = ET.fromstring(page)
    svg = "{http://www.w3.org/2000/svg}"
    names = [s.get("aria-label") for s in root.iter(f"{svg}svg")]
    assert names == [
        "Predicted by component, and measured", "Seconds", "eval_accuracy at the end", "eval_loss at the end",
    ]  # fmt: skip
    assert "a: 2.00 GiB (weights 1.00 GiB, activations 1.00 GiB), measured 2.50 GiB" in page
    cells = [cell.text for cell in root.iter("td")]
    assert "refused: it </svg> cannot" in cells
    assert 'precision = "fp32"' in cells
    assert "device 64.0 GiB" not in page, "a device that is many times larger is left out"
    ET.fromstring(ladder_page(shown(record("d", **nothing))))
