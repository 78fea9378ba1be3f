"""Whether a plan may go on from a checkpoint of another plan: every rule, each way."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from every import every
from golden_plans import whole_plans

from launcher.engines.deepspeed import ADAM
from launcher.errors import RecipeError
from launcher.files.checkpoint import same_samples
from launcher.plan.settings import LEARNED, declared_keys
from launcher.plan.stored import StoredPlan
from launcher.planner.resuming import (
    RESUMES,
    Resumption,
    compare_data,
    compare_plans,
    compare_settings,
    compare_versions,
    resume_of,
)
from launcher.train.job import Job

BASE = {
    "task": "causal-lm", "seed": 42, "precision": "bf16", "tiny": False, "global_batch_size": 8,
    "model.name_or_path": "m", "model.config": None, "model.dtype": "bfloat16", "model.quantization": "none",
    "model.attn_implementation": "sdpa", "adapter.type": "lora", "adapter.r": 8, "adapter.lora_alpha": 16,
    "adapter.lora_dropout": 0.0, "adapter.target_modules": "all-linear", "data.train": [{"path": "a.jsonl"}],
    "data.max_length": 32, "data.packing": False, "data.streaming": False, "data.metrics": [],
    "sharding.engine": "deepspeed", "sharding.zero_stage": 2, "sharding.offload_optimizer": "none",
    "sharding.offload_param": "none", "trainer.optim": "adamw_torch_fused", "trainer.learning_rate": 1e-4,
    "trainer.lr_scheduler_type": "cosine", "trainer.max_steps": 10, "trainer.weight_decay": 0.0,
    "trainer.per_device_train_batch_size": 4, "trainer.gradient_accumulation_steps": 1, "on_oom": "fail",
    "trainer.logging_steps": 10, "launch.env.OMP_NUM_THREADS": "1", "trainer.max_grad_norm": 1.0,
    "python.hooks": [],
}  # fmt: skip


def plan(ranks: int = 2, **changed: Any) -> dict[str, Any]:
    """A plan.json; a setting's dots are written as two underscores."""
    values = {**BASE, **{name.replace("__", "."): value for name, value in changed.items()}}
    micro, accumulation = (
        values[f"trainer.{name}"] for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    return {
        "settings": {key: {"value": value, "by": "r.yaml:7"} for key, value in values.items()},
        "hardware": {"num_nodes": 1, "devices_per_node": ranks},
        "batch": {"micro": micro, "accumulation": accumulation},
    }


def judge(old: dict[str, Any], new: dict[str, Any], ranks: int) -> Resumption:
    return compare_plans(StoredPlan(old), StoredPlan(new), ranks)


def refused(old: dict[str, Any], new: dict[str, Any], ranks: int = 2) -> list[str]:
    return [difference.setting for difference in judge(old, new, ranks).refused]


def other(value: Any) -> Any:
    """Some other value of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    return value + 1 if isinstance(value, (int, float)) else f"other {value}"


def test_the_same_plan_goes_on():
    assert judge(plan(), plan(), 2).differences == ()
    assert judge(plan(), plan(), 2).conversion == ""


OF_KEYS = tuple(((name,), key.resume) for name, key in declared_keys().items() if key.resume is not None)


@every(("names", "resume"), (*RESUMES, *OF_KEYS))
def test_each_rule_judges_a_change_and_not_its_absence(names, resume):
    for pattern in names:
        setting = pattern.replace("*", "zz")
        if resume_of(setting) is not resume:
            pytest.fail(f"{setting} is judged by an earlier rule, {resume_of(setting)}")
        old, new = plan(), plan()
        old["settings"][setting] = {"value": 1, "by": "default"}
        new["settings"][setting] = {"value": 2, "by": "r.yaml:9"}
        found = compare_settings(StoredPlan(old), StoredPlan(new))
        assert compare_settings(StoredPlan(old), StoredPlan(copy.deepcopy(old))) == []
        if resume.verdict in ("free", "states", "samples"):
            assert found == []
            continue
        (difference,) = found
        assert difference.refused == (resume.verdict == "refuse")
        assert (difference.old, difference.new, difference.reason) == (1, 2, resume.reason)
        problem = difference.problem()
        assert (problem.code, problem.path, problem.file, problem.line) == (
            "resume-differs", setting, "r.yaml", 9,
        )  # fmt: skip
        assert "1" in problem.message
        assert "2" in problem.message
        assert problem.hint


def test_every_setting_of_the_shipped_plans_was_thought_of():
    """No setting that a plan has today falls to the last rule, which is for what nobody knows yet."""
    plans = whole_plans()
    assert len(plans) > 20
    settings = {key for plan in plans.values() for key in plan["settings"]}
    assert [key for key in sorted(settings) if resume_of(key) is LEARNED] == ["task", "tiny"]
    assert resume_of("something.new") is LEARNED


@pytest.mark.parametrize(
    "setting",
    ["adapter.r", "adapter.lora_alpha", "adapter.target_modules", "model.name_or_path", "model.quantization",
     "precision", "task", "data.train", "data.max_length", "data.packing", "seed", "global_batch_size",
     "trainer.learning_rate", "trainer.lr_scheduler_type", "trainer.weight_decay", "trainer.max_grad_norm"],
)  # fmt: skip
def test_what_decides_what_is_learnt_is_refused(setting):
    found = refused(plan(), plan(**{setting.replace(".", "__"): other(BASE[setting])}))
    assert [name for name in found if name != "runtime.loss_over"] == [setting]


@pytest.mark.parametrize(
    ("task", "loss_over", "differs"),
    [
        ("causal-lm", "targets", False), ("image-text-to-text", "targets", False),
        ("grpo", "micro-batch", False), ("kto", "rows and KL term", True),
        ("causal-lm", "targets and routers", True),
        ("token-classification", "targets", True), ("seq2seq-lm", "targets", True), ("dpo", "rows", True),
    ],
)  # fmt: skip
def test_a_run_of_0_2_0_with_another_loss_is_finished_by_0_2_0(task, loss_over, differs):
    """Its plan does not say what the loss is a mean of."""
    found = judge(plan(task=task), plan(task=task, runtime__loss_over=loss_over), 2)
    assert [difference.setting for difference in found.refused] == ["runtime.loss_over"] * differs
    assert all("effilaunch 0.2.0" in difference.fix for difference in found.refused)


@pytest.mark.parametrize(
    "setting", ["on_oom", "trainer.logging_steps", "launch.env.OMP_NUM_THREADS", "trainer.save_steps"]
)
def test_what_only_changes_how_it_runs_is_free(setting):
    found = judge(plan(), plan(**{setting.replace(".", "__"): other(BASE.get(setting))}), 2)
    assert found.differences == ()


def test_all_differences_are_told_at_once():
    changed = plan(adapter__r=16, seed=1, precision="fp32", trainer__logging_steps=1)
    assert refused(plan(), changed) == ["adapter.r", "precision", "seed"]


def test_more_steps_stretch_a_schedule_and_nothing_else():
    longer = judge(plan(), plan(trainer__max_steps=20), 2)
    assert not longer.refused
    assert "has another end: the learning rate jumps" in longer.words[0]  # shorter runs get it, too
    assert "10 -> 20" in longer.words[0]
    constant = {"trainer__lr_scheduler_type": "constant"}
    (word,) = judge(plan(**constant), plan(trainer__max_steps=20, **constant), 2).words
    assert "10 -> 20" in word
    assert "jump" not in word
    share = {**constant, "trainer__warmup_steps": 0.1}
    assert len(judge(plan(**share), plan(trainer__max_steps=20, **share), 2).words) == 1


def test_micro_batch_and_accumulation_may_change_within_the_global_batch():
    half = {"trainer__per_device_train_batch_size": 2, "trainer__gradient_accumulation_steps": 2}
    assert judge(plan(), plan(**half), 2).differences == ()
    by_length = {"trainer__group_by_length": True}
    halved = {**half, "trainer__gradient_accumulation_steps": 4}
    assert judge(plan(**by_length), plan(**half, **by_length), 2).differences == ()
    assert refused(plan(**by_length), plan(1, **halved, **by_length)) == [
        "trainer.per_device_train_batch_size"
    ]


@pytest.mark.parametrize("optim", ADAM)
def test_one_adam_goes_on_for_the_other_and_for_no_third(optim):
    for new in ADAM:
        found = judge(plan(trainer__optim=optim), plan(trainer__optim=new), 2)
        assert not found.refused
        assert len(found.words) == (optim != new)
    assert refused(plan(trainer__optim=optim), plan(trainer__optim="sgd")) == ["trainer.optim"]


STAGES = [
    # old stage, new stage, ranks before and now, conversion needed
    (2, 2, 2, 2, False), (1, 2, 2, 2, False), (2, 1, 2, 2, False), (3, 3, 2, 2, False),
    (2, 2, 2, 1, True), (3, 3, 1, 2, True), (2, 3, 2, 2, True), (3, 2, 2, 2, True), (3, 1, 4, 2, True),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "before", "now", "needed"), STAGES)
def test_other_ranks_or_other_files_are_converted(old, new, before, now, needed):
    found = judge(plan(before, sharding__zero_stage=old), plan(now, sharding__zero_stage=new), before)
    assert not found.refused
    assert bool(found.conversion) == needed
    assert any("random states" in word for word in found.words) == (before != now)


UNCONVERTIBLE = [
    ({"sharding__zero_stage": 0}, "ZeRO-0"),
    ({"trainer__optim": "sgd"}, "those of sgd"),
]


@pytest.mark.parametrize(("given", "why"), UNCONVERTIBLE, ids=[why for _, why in UNCONVERTIBLE])
def test_what_cannot_be_converted_is_refused_with_both_ways_out(given, why):
    assert judge(plan(**given), plan(**given), 2).differences == ()
    (difference,) = judge(plan(**given), plan(1, **given), 2).refused
    assert difference.setting == "number of ranks"
    assert why in difference.reason
    assert "adapter.path" in difference.reason
    assert "2 ranks (--on)" in difference.fix


def test_random_frozen_weights_keep_their_stage():
    drawn = {"model__config": {"model_type": "llama"}}
    assert refused(plan(**drawn), plan(sharding__zero_stage=3, **drawn)) == ["sharding.zero_stage"]
    assert refused(plan(**drawn), plan(1, **drawn)) == []
    whole = {**drawn, "adapter__type": None}
    assert refused(plan(**whole), plan(sharding__zero_stage=3, **whole)) == []


@pytest.mark.parametrize(("old", "new"), [("none", "cpu"), ("cpu", "none")])
def test_an_offloaded_optimizer_goes_on_with_its_own_kind(old, new):
    before, after = ({"sharding__offload_optimizer": where} for where in (old, new))
    assert judge(plan(**before), plan(**before), 2).differences == ()
    (difference,) = judge(plan(**before), plan(**after), 2).refused
    assert difference.setting == "sharding.offload_optimizer"
    assert "bias_correction" in difference.reason


def test_states_on_nvme_are_not_gone_on_from():
    nvme = {"sharding__zero_stage": 3, "sharding__offload_optimizer": "nvme"}
    (difference,) = judge(plan(**nvme), plan(**nvme), 2).refused
    assert difference.setting == "sharding.offload_optimizer"
    assert difference.fix.startswith("start a new run")


def test_no_engine_reads_the_files_of_another():
    alone = {"sharding__engine": "ddp", "sharding__zero_stage": None}
    for old, new in ((plan(), plan(**alone)), (plan(**alone), plan())):
        (difference,) = judge(old, new, 2).refused
        assert difference.setting == "sharding.engine"
        assert "sharding.engine: " in difference.reason
        assert "begin a new run" in difference.reason


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_ddp_and_fsdp_go_on_with_other_ranks(engine):
    said = {"sharding__engine": engine, "sharding__zero_stage": None}
    found = judge(plan(2, **said), plan(4, **said), 2)
    assert (found.refused, found.conversion) == ([], "")
    assert "start afresh" in found.words[0]
    assert judge(plan(2, **said), plan(2, **said), 2).differences == ()


@pytest.mark.parametrize(
    ("path", "before", "differs"),
    [
        ("rows", {}, True),
        ("rows/*.jsonl", {}, True),
        ("a.jsonl.gz", {}, False),
        ("rows", {"references": {}}, False),
    ],
)
def test_a_stream_of_several_files_that_0_2_0_began_is_finished_by_0_2_0(path, before, differs):
    """It read the files of all splits; without streaming the key of the prepared data tells."""
    stream = {"sharding__engine": "ddp", "sharding__zero_stage": None, "data__train": [{"path": path}]}
    now = plan(**stream, data__streaming=True)
    found = judge({**now, **before}, now, 2).refused
    assert [difference.setting for difference in found] == ["data.train"] * differs
    assert refused(plan(**stream), plan(**stream)) == []


def test_a_stream_keeps_its_ranks_and_workers():
    stream = {"data__streaming": True, "sharding__engine": "ddp", "sharding__zero_stage": None}
    assert refused(plan(**stream), plan(1, **stream)) == ["number of ranks"]
    workers = {"trainer__dataloader_num_workers": 2}
    assert refused(plan(**stream), plan(**stream, **workers)) == ["trainer.dataloader_num_workers"]
    assert refused(plan(), plan(**workers)) == []


def test_weights_alone_are_refused_and_more_weights_alone_are_not():
    alone = {"trainer__save_only_model": True}
    assert refused(plan(**alone), plan(**alone)) == ["trainer.save_only_model"]
    assert refused(plan(), plan(**alone)) == []


def test_other_versions_are_a_word():
    assert compare_versions({"torch": "2.13.0"}, {"torch": "2.13.0"}) == []
    assert compare_versions({"torch": "2.13.0", "rich": "1"}, {"rich": "2"}) == []
    (difference,) = compare_versions({"torch": "2.13.0"}, {"torch": "2.14.0"})
    assert not difference.refused
    assert "2.13.0" in difference.line()
    assert "2.14.0" in difference.line()


def test_other_data_is_refused():
    for references, version in (({"references": {}}, "the version that began it"), ({}, "effilaunch 0.2.0")):
        began = StoredPlan(plan() | references)
        for same in (("abc", "abc"), (None, "abc"), ("abc", None)):
            assert compare_data(*same, began) == []
        (difference,) = compare_data("abc", "xyz", began)
        assert difference.refused
        assert "bring the old files back" in difference.problem().hint
        assert version in difference.problem().hint


def test_what_decides_only_the_samples_is_judged_by_the_prepared_samples():
    """A plan written before `data.loss_on_inserted` existed learned what a template inserts."""
    now = {"data__loss_on_inserted": False}
    assert refused(plan(), plan(**now)) == []
    stream = {"data__streaming": True, "sharding__engine": "ddp", "sharding__zero_stage": None}
    assert refused(plan(**stream), plan(**now, **stream)) == ["data.loss_on_inserted"]


def prepared(folder: Path, task: str = "causal-lm", labels: list[str] | None = None, **files: bytes) -> Path:
    folder.mkdir()
    (folder / "data.json").write_text(json.dumps({"key": folder.name, "task": task, "labels": labels}))
    for name, content in files.items():
        (folder / f"{name}.arrow").write_bytes(content)
    return folder


def test_the_same_samples_under_two_keys_are_the_same_data(tmp_path):
    old = prepared(tmp_path / "old", train=b"samples", eval=b"more")
    assert same_samples(old, prepared(tmp_path / "new", train=b"samples", eval=b"more"))
    assert not same_samples(old, prepared(tmp_path / "fewer", train=b"samples"))
    assert not same_samples(old, prepared(tmp_path / "others", train=b"samples", eval=b"less"))
    assert not same_samples(tmp_path / "gone", old)
    assert not same_samples(tmp_path / "gone", tmp_path / "gone too")
    assert not same_samples(prepared(tmp_path / "a"), prepared(tmp_path / "b"))


def test_other_labels_and_images_are_other_data(tmp_path):
    """The samples of images are paths: a replaced image shows in the key alone."""
    classes, images = "sequence-classification", "image-classification"
    old = prepared(tmp_path / "old", classes, ["bad", "good"], train=b"x")
    assert same_samples(old, prepared(tmp_path / "same", classes, ["bad", "good"], train=b"x"))
    assert not same_samples(old, prepared(tmp_path / "renamed", classes, ["poor", "rich"], train=b"x"))
    first = prepared(tmp_path / "first", images, ["cat", "dog"], train=b"x")
    assert not same_samples(first, prepared(tmp_path / "second", images, ["cat", "dog"], train=b"x"))


NEW = {
    "model.attn_implementation": "varlen", "model.loss": "chunked", "model.compile_blocks": True,
    "model.vocab_multiple": None, "data.padding_free": True, "data.pad_to_multiple_of": 64,
    "adapter.cast_input_dtype_enabled": False, "adapter.autocast_adapter_dtype": True,
    "trainer.use_liger_kernel": False, "trainer.tf32": True, "trainer.dataloader_num_workers": 4,
}  # fmt: skip


def test_a_checkpoint_of_an_older_plan_goes_on_with_a_word_for_what_computes_it_now():
    old = plan(**{"model.attn_implementation": "sdpa", "data.padding_free": False})
    for name in NEW.keys() - {"model.attn_implementation", "data.padding_free"}:
        old["settings"].pop(name, None)
    found = compare_settings(StoredPlan(old), StoredPlan(plan(**NEW)))
    assert not any(difference.refused for difference in found)
    told = {difference.setting: difference.line() for difference in found}
    assert told.keys() == NEW.keys() - {
        "model.vocab_multiple", "adapter.autocast_adapter_dtype", "trainer.dataloader_num_workers",
        "trainer.use_liger_kernel",
    }  # fmt: skip
    assert "'full' -> 'chunked'" in told["model.loss"]
    assert "True -> False" in told["adapter.cast_input_dtype_enabled"]


@pytest.mark.parametrize(
    ("setting", "value"), [("model.vocab_multiple", 64), ("adapter.autocast_adapter_dtype", False)]
)
def test_other_tensors_are_refused_also_against_an_older_plan(setting, value):
    old, new = plan(), plan(**{**NEW, setting: value})
    assert setting in [d.setting for d in compare_settings(StoredPlan(old), StoredPlan(new)) if d.refused]


def test_the_worker_reads_an_older_plan_as_it_was_meant(tmp_path):
    job = Job(tmp_path, plan())
    assert job.model.loss == "full"
    assert job.model.compile_blocks is False
    assert job.adapter.cast_input_dtype_enabled is True
    assert job.sharding.tp_size == 1
    assert Job(tmp_path, plan(model__loss="chunked")).model.loss == "chunked"
    with pytest.raises(RecipeError, match="the plan has no setting"):
        assert job.model.revision


@pytest.mark.parametrize(
    ("now", "differs"),
    [
        ({"steps_per_generation": 4}, False),
        ({"steps_per_generation": 8, "per_device_train_batch_size": 2}, False),
        ({"steps_per_generation": 8, "ranks": 1}, False),
        ({"steps_per_generation": 4, "ranks": 1}, True),
        ({"steps_per_generation": 2}, True),
        ({}, True),
    ],
)
def test_a_generation_keeps_its_completions(now, differs):
    groups = {"task": "grpo", "trainer__num_generations": 8, "sharding__engine": "ddp"}
    old = plan(**groups, trainer__steps_per_generation=4)
    ranks, values = now.get("ranks", 2), {f"trainer__{k}": v for k, v in now.items() if k != "ranks"}
    assert refused(old, plan(ranks, **groups, **values)) == ["trainer.steps_per_generation"] * differs
