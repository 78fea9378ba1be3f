"""The search: what it may choose, how it ranks, and that the plan is what it ranks first."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counted_work import function_calls
from factories import BASE, facts, recipe

from launcher.errors import DoesNotFit, RecipeError
from launcher.machine.hardware import DEVICES, device_facts, parse_hardware
from launcher.memory.estimate import estimate_memory
from launcher.planner import candidates
from launcher.planner.alternatives import _larger_devices
from launcher.planner.candidates import Candidate
from launcher.planner.planner import make_plan
from launcher.planner.search import Search, search, search_rows, trade
from launcher.recipe.loading import LoadedRecipe
from launcher.report.plan_text import strategy_name

FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "") + "global_batch_size: 32\n"
LORA = BASE + "global_batch_size: 64\n"
OPEN = LORA.replace("llama-7b}", "llama-7b, quantization: auto}") + (
    "sharding: {offload_optimizer: auto, offload_param: auto}\n"
)
FULL_OPEN = FULL + "sharding: {offload_optimizer: auto, offload_param: auto}\n"
SETTINGS = (
    "model.quantization", "sharding.engine", "sharding.zero_stage", "sharding.offload_optimizer",
    "sharding.offload_param", "trainer.activation_checkpointing",
)  # fmt: skip


def searched(folder: Path, text: str, on: str = "8xA100-80GB", **extra: Any) -> Search:
    return search(recipe(folder, text), facts(on, **extra))


def values(found: Search, dotted: str) -> set[Any]:
    return {candidate.choices[dotted] for candidate in (*found.ranked, *found.misses)}


@pytest.mark.parametrize("text", [LORA, OPEN, FULL, FULL_OPEN], ids=["lora", "open", "full", "full-open"])
@pytest.mark.parametrize("on", ["8xA100-80GB", "2xA10-24GB", "1xT4-16GB", "1x24GB", "2xcpu", "4x8xV100-32GB"])
def test_the_plan_is_what_stands_first(tmp_path, text, on):
    loaded, known = recipe(tmp_path, text), facts(on)
    found = search(loaded, known)
    try:
        plan = make_plan(loaded, known)
    except DoesNotFit as error:
        assert not found.ranked
        plan = error.nearest_miss
    first = found.first
    assert (plan.job, plan.memory, plan.batch, plan.time) == (
        first.job,
        first.memory,
        first.batch,
        first.time,
    )
    for dotted, value in first.choices.items():
        planned = plan.at(dotted)
        assert (planned["type"] if isinstance(planned, dict) else planned) == value
    assert plan.trainer.per_device_train_batch_size == first.batch.micro


@pytest.mark.parametrize("on", ["8xA100-80GB", "2xA10-24GB", "1xT4-16GB", "1x24GB"])
def test_the_fastest_stands_first_and_nothing_slower_does_less(tmp_path, on):
    found = searched(tmp_path, OPEN, on)
    speeds = [(not candidate.safe, candidate.seconds_per_sample) for candidate in found.ranked]
    assert speeds == sorted(speeds)
    assert len(speeds) > 5
    place = {(candidate.safe, *_key(candidate)): rank for rank, candidate in enumerate(found.ranked)}
    compared = 0
    for candidate in found.ranked:
        for dotted, less in _less(candidate):
            rank = place.get((candidate.safe, *_key(candidate, {dotted: less})))
            if rank is not None:
                compared += 1
                assert rank < place[(candidate.safe, *_key(candidate))], (candidate.choices, dotted)
    assert compared > 5


def test_what_may_not_fit_stands_behind_what_surely_does(tmp_path):
    found = searched(tmp_path, OPEN, "1xRTX4090-24GB")
    unsure = [c for bench in found.benches.values() for c in bench.seen.values() if c.fits and not c.safe]
    assert unsure, "a case at the edge of the device"
    first = found.first
    assert first.safe
    assert first.memory.high <= 24564 * 2**20 < min(c.memory.high for c in unsure)
    larger = [c for c in unsure if c.strategy == first.strategy and c.variant == first.variant]
    assert all(c.batch.micro > first.batch.micro for c in larger)


def _key(candidate: Candidate, changes: dict[str, Any] | None = None) -> tuple[Any, ...]:
    return (*{**candidate.choices, **(changes or {})}.values(), candidate.batch.micro)


def _less(candidate: Candidate) -> list[tuple[str, Any]]:
    """The same with one thing less: recomputation, a stage, an offload."""
    choices = candidate.choices
    found = [("sharding.zero_stage", choices["sharding.zero_stage"] - 1)] if candidate.zero_stage else []
    found += [("trainer.activation_checkpointing", False)] if choices[SETTINGS[5]] else []
    return found + [(name, "none") for name in SETTINGS[3:5] if choices[name] == "cpu"]


SDPA = LORA.replace("7b}", "7b, attn_implementation: sdpa, loss: full}")
FLAT = SDPA.replace("max_length: 512", "max_length: 4096, padding_free: true")


@pytest.mark.parametrize("text", [OPEN, FULL_OPEN, FLAT])
def test_smaller_micro_batches_are_left_unseen_only_where_they_are_no_faster(tmp_path, text):
    """Each strategy estimated at all its micro-batches: none that fits beats the one that was taken."""
    found = searched(tmp_path, text, "2xA100-40GB")
    for candidate in found.ranked:
        bench = found.of(candidate)
        everything = [bench.candidate(candidate.strategy, batch) for batch in bench.batches]
        fastest = min((c for c in everything if c.fits), key=lambda c: c.rank_key)
        assert fastest == candidate
    for candidate in found.misses:
        bench = found.of(candidate)
        assert not any(bench.candidate(candidate.strategy, batch).fits for batch in bench.batches)


def test_a_flattened_batch_is_kept_small_where_attention_is_computed_between_its_samples(tmp_path):
    sdpa = searched(tmp_path, FLAT, "1xH200-141GB").first
    for kernel in ("flash_attention_2", "varlen"):
        found = searched(tmp_path, FLAT.replace("sdpa", kernel), "1xH200-141GB")
        assert sdpa.batch.micro < found.first.batch.micro


@pytest.mark.parametrize("on", ["cpu", "1xV100-32GB", "1xH200-141GB"])
def test_sample_by_sample_a_larger_micro_batch_is_never_slower(tmp_path, on):
    found = searched(tmp_path, LORA, on)
    bench = found.of(found.first)
    assert bench.draft.model.attn_implementation == "varlen"
    assert bench.larger_is_faster
    given = [bench.candidate(found.first.strategy, batch).seconds_per_sample for batch in bench.batches]
    assert given == sorted(given), "the largest stands first"


def test_the_global_batch_is_the_same_for_all(tmp_path):
    found = searched(tmp_path, OPEN)
    assert {c.batch.global_size for c in (*found.ranked, *found.misses)} == {64}


def test_what_the_recipe_writes_is_fixed(tmp_path):
    written = LORA.replace("llama-7b}", "llama-7b, quantization: int8}") + (
        "sharding: {engine: deepspeed, zero_stage: 2}\n"
    )
    found = searched(tmp_path, written)
    assert [values(found, dotted) for dotted in SETTINGS[:5]] == [
        {"int8"}, {"deepspeed"}, {2}, {"none"}, {"none"},
    ]  # fmt: skip
    assert len(found.ranked) == 2, "with and without checkpointing"


def test_absent_opens_engine_stage_and_checkpointing_but_nothing_that_changes_the_result(tmp_path):
    found = searched(tmp_path, LORA)
    assert values(found, "sharding.engine") == {"deepspeed", "ddp"}
    assert values(found, "sharding.zero_stage") == {None, 1, 2, 3}
    assert values(found, "trainer.activation_checkpointing") == {False, True}
    for dotted in ("model.quantization", "sharding.offload_optimizer", "sharding.offload_param"):
        assert values(found, dotted) == {"none"}


def test_nobody_has_said_what_auto_becomes(tmp_path):
    """A fix may set it, where it would only refuse to replace a value of the recipe."""
    found = searched(tmp_path, OPEN)
    for bench in found.benches.values():
        assert not any(bench.draft.explicit(dotted) for dotted in bench.variant.values)


def test_auto_opens_quantisation_only_over_an_adapter(tmp_path):
    assert values(searched(tmp_path, OPEN), "model.quantization") == {"none", "int8", "nf4"}
    full = FULL.replace("llama-7b}", "llama-7b, quantization: auto}")
    full += "fixes: {disable: [purely-quantized]}\n"
    assert values(searched(tmp_path, full), "model.quantization") == {"none"}


def test_quantisation_is_chosen_where_16_bits_do_not_fit_with_all_that_follows(tmp_path):
    asked = LORA.replace("llama-7b}", "llama-7b, quantization: auto}")
    roomy = make_plan(recipe(tmp_path, asked), facts("1xA100-80GB"))
    assert roomy.model.quantization == "none"
    tight = make_plan(recipe(tmp_path, asked), facts("1xRTX2080Ti-11GB"))
    assert tight.model.quantization == {
        "type": "nf4", "double_quant": True, "compute_dtype": "float16",
    }  # fmt: skip
    assert tight.model.prepare_for_kbit is True
    assert tight.model.device_map == "local"
    assert tight.model.enable_input_require_grads is False
    setting = tight.provenance["model.quantization"]
    assert setting.source == "search"
    assert "none needs" in setting.reason
    assert roomy.provenance["model.quantization"].reason.count("slower") == 2


def test_offload_is_chosen_where_nothing_else_fits_with_all_that_follows(tmp_path):
    roomy = make_plan(recipe(tmp_path, FULL_OPEN), facts("8xA100-80GB"))
    assert roomy.sharding.offload_optimizer == roomy.sharding.offload_param == "none"
    assert "launch.env.OMP_NUM_THREADS" not in roomy.names
    tight = make_plan(recipe(tmp_path, FULL_OPEN), facts("1xA100-40GB"))
    assert tight.sharding.offload_optimizer == "cpu"
    assert tight.sharding.engine == "deepspeed"
    assert tight.launch.env["OMP_NUM_THREADS"] == "8"
    assert tight.provenance["sharding.offload_optimizer"].source == "search"
    assert "none needs" in tight.provenance["sharding.offload_optimizer"].reason
    with pytest.raises(DoesNotFit):
        make_plan(recipe(tmp_path, FULL), facts("1xA100-40GB"))


def test_a_cpu_has_no_memory_to_offload_from(tmp_path):
    found = searched(tmp_path, FULL_OPEN, "2xcpu")
    assert values(found, "sharding.offload_optimizer") == values(found, "sharding.offload_param") == {"none"}


def test_the_base_profile_has_the_word_about_offload(tmp_path):
    loaded = recipe(tmp_path, FULL + "sharding: {config: mine, offload_optimizer: auto}\n")
    profile = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    found = search(loaded, facts(profile=profile))
    assert values(found, "sharding.offload_optimizer") == {"cpu"}
    assert values(found, "sharding.zero_stage") == {2}


def test_what_a_fix_refuses_is_left_out_with_its_reason_and_is_no_error(tmp_path):
    asked = FULL_OPEN.replace("max_steps: 10", "max_steps: 10, optim: adafactor")
    found = searched(tmp_path, asked)
    assert values(found, "sharding.offload_optimizer") == {"none"}
    (reason,) = {entry.reason for entry in found.left_out if "DeepSpeedCPUAdam" in entry.reason}
    assert "Adafactor" in reason
    with pytest.raises(RecipeError, match="DeepSpeedCPUAdam"):
        searched(tmp_path, asked.replace("auto", "cpu"))


def test_int8_is_never_put_under_zero_3(tmp_path):
    found = searched(tmp_path, OPEN)
    stages = {c.zero_stage for c in (*found.ranked, *found.misses) if c.job.quantization == "int8"}
    assert stages == {None, 1, 2}
    (entry,) = [entry for entry in found.left_out if "int8" in entry.reason]
    assert "sharding.zero_stage 3" in entry.what
    assert "model.quantization int8" in entry.what


def test_an_engine_that_cannot_train_the_precision_is_left_out(tmp_path):
    found = searched(tmp_path, LORA + "precision: bf16-true\n")
    assert values(found, "sharding.engine") == {"ddp"}
    assert found.left_out[0].what == "sharding.engine deepspeed"
    plan = make_plan(recipe(tmp_path, LORA + "precision: bf16-true\n"), facts())
    assert plan.launch.launcher == "accelerate"


def test_offload_needs_room_in_the_hosts_memory_where_that_is_known(tmp_path):
    loaded, unknown = recipe(tmp_path, FULL_OPEN), facts("1xA100-40GB")
    needed = search(loaded, unknown).first.memory.host_bytes
    assert search(loaded, replace(unknown, host_bytes=needed)).first.job.offload_optimizer == "cpu"
    assert not search(loaded, replace(unknown, host_bytes=8 * 10**9)).ranked
    forced = recipe(tmp_path, FULL + "sharding: {zero_stage: 3, offload_optimizer: cpu}\n")
    with pytest.raises(DoesNotFit, match=r"of 7\.50 GiB in the host's memory"):
        make_plan(forced, facts("4xA100-80GB", host_bytes=8 * 2**30 - 2**29))
    plain = facts("8xA100-80GB", host_bytes=1)
    assert search(loaded, plain).first.job.offload_optimizer == "none", "only offload is judged by it"


def test_an_unnamed_device_is_ranked_without_seconds(tmp_path):
    found = searched(tmp_path, OPEN, "2x24GB")
    assert len(found.ranked) > 5
    rows = search_rows(found, 10)
    assert {row["time"]["seconds_per_step"] for row in rows} == {None}
    assert rows[0]["relative_speed"] == 1.0
    assert "%" not in "".join(row["trade"] for row in rows)
    assert "%" not in make_plan(recipe(tmp_path, OPEN), facts("2x24GB")).provenance[SETTINGS[0]].reason


def test_two_hundred_configurations_are_searched_with_few_calls(tmp_path):
    """Less than two seconds."""
    loaded, known = recipe(tmp_path, OPEN), facts("2xT4-16GB")
    found = []
    calls = function_calls(lambda: found.append(search(loaded, known)))
    assert found[0].estimated >= 200
    assert calls < 16_000 * found[0].estimated


def test_trace_and_calibration_reach_the_estimate(tmp_path, monkeypatch):
    given = []

    def recorded(*arguments: Any, trace: Any, calibration: Any) -> Any:
        given.append((trace, calibration))
        return estimate_memory(*arguments)

    monkeypatch.setattr(candidates, "estimate_memory", recorded)
    search(recipe(tmp_path, LORA), facts(trace="the trace", calibration="the calibration"))
    assert set(given) == {("the trace", "the calibration")}


EVALUATED = LORA.replace("max_length: 512}", "max_length: 512, eval: {split: 0.1}}")


def test_an_evaluation_takes_a_smaller_batch_before_training_does(tmp_path, monkeypatch):
    def hungry(spec: Any, job: Any, hardware: Any, **facts_: Any) -> Any:
        memory = estimate_memory(spec, job, hardware)
        eval_peak = job.eval_batch * (memory.device_bytes or 0) // 4
        fits = memory.fits is not False and eval_peak + memory.margin <= (memory.device_bytes or 0)
        return replace(memory, eval_peak=eval_peak, fits=fits)

    loaded, known = recipe(tmp_path, EVALUATED), facts("8xA100-80GB")
    plain = make_plan(loaded, known)
    assert plain.trainer.per_device_eval_batch_size == plain.batch.micro == 8
    monkeypatch.setattr(candidates, "estimate_memory", hungry)
    tight = make_plan(loaded, known)
    assert tight.batch.micro == 8
    assert tight.trainer.per_device_eval_batch_size == 2
    assert "halved" in tight.provenance["trainer.per_device_eval_batch_size"].reason


def test_settings_say_what_they_were_weighed_against(tmp_path):
    plan = make_plan(recipe(tmp_path, FULL), facts("8xA100-40GB"))
    reasons = {name: plan.provenance[name] for name in (*SETTINGS[1:3], SETTINGS[5])}
    assert {setting.source for setting in reasons.values()} == {"search"}
    stage = reasons["sharding.zero_stage"].reason
    assert stage.count("GiB") + stage.count("slower") + stage.count("no faster") == 2


def test_the_trade_says_what_is_saved_and_what_it_costs(tmp_path):
    found = searched(tmp_path, FULL, "8xA100-80GB")
    by_name = {(c.choices[SETTINGS[1]], c.strategy): trade(found, c) for c in found.ranked}
    plain, again = by_name["deepspeed", (3, False)], by_name["deepspeed", (3, True)]
    number = r"\d+\.\d GiB"
    saved = rf"ZeRO-3: saves {number}, costs about \d+ % time; deepspeed: saves {number}, .*"
    assert re.fullmatch(saved, plain)
    assert re.fullmatch(
        rf"checkpointing: saves {number}, costs about \d+ % time; ZeRO-3: saves {number}.*", again
    )


def test_nothing_fits_says_what_would_and_each_of_it_does(tmp_path):
    loaded, known = recipe(tmp_path, FULL), facts("2xT4-16GB")
    with pytest.raises(DoesNotFit) as caught:
        make_plan(loaded, known)
    (problem,) = caught.value.problems
    changes = [other.change for other in caught.value.would_fit]
    assert [set(change) for change in changes][-2:] == [{"on"}, {"on"}], "other hardware comes last"
    for other in caught.value.would_fit:
        assert other.text in problem.hint
        hardware = parse_hardware(other.change.get("on", "2xT4-16GB"))
        asked = "".join(f"{_as_yaml(k, v)}\n" for k, v in other.change.items() if k != "on")
        made = make_plan(recipe(tmp_path, FULL + asked), replace(known, hardware=hardware))
        assert made.memory == other.candidate.memory, "what is said is what would be planned"
    assert {"sharding.offload_optimizer": "cpu"} in changes
    assert {"adapter": {"type": "lora"}} in changes


def _as_yaml(dotted: str, value: Any) -> str:
    section, _, name = dotted.partition(".")
    inner = {name: value} if name else value
    return f"{section}: {{{', '.join(f'{key}: {item}' for key, item in inner.items())}}}"


def test_no_device_is_suggested_whose_capacity_alone_is_known():
    smaller = parse_hardware("1xB200-180GB")
    larger = [device_facts(name) for name in DEVICES if DEVICES[name].bytes > (smaller.device_bytes or 0)]
    assert None in {capability for _, _, capability in larger}
    offered = [hardware.device for hardware in _larger_devices(smaller)]
    assert offered == ["GB200-186GB", "B300-288GB"]


@pytest.mark.parametrize("on", ["2xT4-16GB", "2xA100-40GB"])
def test_the_device_and_the_number_that_would_fit_are_the_smallest(tmp_path, on):
    loaded, known = recipe(tmp_path, FULL), facts(on)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(loaded, known)
    bigger, more = (parse_hardware(other.change["on"]) for other in caught.value.would_fit[-2:])
    for name in DEVICES:
        if (device_facts(name)[1] or 0) < (bigger.device_bytes or 0):
            assert not search(loaded, replace(known, hardware=parse_hardware(f"2x{name}"))).ranked, name
    assert more.device == known.hardware.device
    assert more.num_devices > 2
    for fewer in (4, 8):
        if fewer < more.num_devices:
            there = parse_hardware(f"{fewer}x{more.device}")
            assert not search(loaded, replace(known, hardware=there)).ranked, fewer


def test_the_longest_rows_that_fit_are_said(tmp_path):
    text = LORA.replace("max_length: 512", "max_length: 65536") + "precision: fp16\n"
    loaded, known = recipe(tmp_path, text), facts("1xV100-32GB")
    with pytest.raises(DoesNotFit) as caught:
        make_plan(loaded, known)
    (length,) = [o.change["data.max_length"] for o in caught.value.would_fit if "data.max_length" in o.change]
    assert 0 < length < 65536
    for tokens, fits in ((length, True), (length + 64, False)):
        shorter = recipe(tmp_path, text.replace("65536", str(tokens)))
        assert bool(search(shorter, known).ranked) is fits


def test_the_fewest_ranks_that_share_a_sample_are_said(tmp_path):
    name = "meta-llama/Llama-3.1-8B"
    text = FULL.replace("huggyllama/llama-7b", name).replace("max_length: 512", "max_length: 131072")
    loaded, known = recipe(tmp_path, text), facts("8xH100-80GB", name)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(loaded, known)
    (other,) = [one for one in caught.value.would_fit if "sharding.sp_size" in one.change]
    assert other.change == {"sharding.sp_size": 8}
    for size, fits in ((4, False), (8, True)):
        asked = recipe(tmp_path, text, sharding__sp_size=size)
        assert bool(search(asked, known).ranked) is fits
    assert make_plan(asked, known).memory == other.candidate.memory
    assert not [one for one in caught.value.would_fit if "sharding.cp_size" in one.change], "never run"


GRPO = (
    "reward: [{function: length, arguments: {tokens: 40}}]\n"
    "generation: {num_generations: 4, max_completion_length: 256}\n"
)


@pytest.mark.parametrize(
    ("task", "loss", "other", "over", "why"),
    [
        ("kto", "kto", "apo_zero_unpaired", "rows and KL term", "all rows of an evaluation"),
        ("dpo", "aot", "sigmoid", "micro-batch", "per_device_eval_batch_size"),
        ("dpo", "[sigmoid, sft]", "[sigmoid, hinge]", "micro-batch", "per_device_eval_batch_size"),
    ],
)
def test_no_device_chooses_how_many_samples_a_loss_compares(tmp_path, task, loss, other, over, why):
    def asked(kind: str, size: int | None = None) -> LoadedRecipe:
        micro = f", per_device_train_batch_size: {size}" if size else ""
        trainer = f"trainer: {{max_steps: 10, loss_type: {kind}{micro}}}"
        text = LORA.replace("max_length: 512", "max_length: 2048").replace(
            "trainer: {max_steps: 10}", trainer
        )
        return recipe(tmp_path, f"task: {task}\n{text}")

    known = facts("1xA100-40GB")
    assert 1 <= search(asked(other), known).first.batch.micro < 64
    assert make_plan(asked(loss), facts("8xH200-141GB")).batch.micro == 8
    with pytest.raises(DoesNotFit) as caught:
        make_plan(asked(loss), known)
    name = "trainer.per_device_train_batch_size"
    (size,) = [one.change[name] for one in caught.value.would_fit if set(one.change) == {name}]
    smaller = make_plan(asked(loss, size), known)
    assert smaller.runtime.loss_over == over
    assert why in smaller.provenance["runtime.loss_over"].reason
    assert not search(asked(loss, 2 * size), known).ranked


def test_a_smaller_micro_batch_is_tried_for_a_loss_of_grpo_unless_it_is_one_of_micro_batches(tmp_path):
    tried = {}
    for loss in ("bnpo", "dapo", "grpo"):
        text = LORA.replace("max_steps: 10", f"max_steps: 10, loss_type: {loss}")
        found = search(recipe(tmp_path, f"task: grpo\n{text}{GRPO}"), facts("1xA100-80GB"))
        tried[loss] = len(found.of(found.first).batches)
    assert tried == {"bnpo": 1, "dapo": 7, "grpo": 7}


@pytest.mark.parametrize(
    ("length", "loss"), [(256, "chunked"), (512, "full"), (2048, "full"), (4096, "chunked")]
)
def test_the_loss_is_computed_as_needs_less(tmp_path, length, loss):
    """With 256 tokens the optimizer's step rules, and both need as much."""
    text = FULL.replace("max_length: 512", f"max_length: {length}") + "sharding: {zero_stage: 3}\n"
    known = facts("8xA100-80GB")
    asked = {"trainer__per_device_train_batch_size": 1}
    full, chunked = (
        make_plan(recipe(tmp_path, text, model__loss=one, **asked), known) for one in ("full", "chunked")
    )
    made = make_plan(recipe(tmp_path, text, **asked), known)
    assert (made.model.loss, made.memory.needed) == (loss, min(full.memory.needed, chunked.memory.needed))
    assert made.job.chunked is (made.model.loss == "chunked")


def test_what_the_recipe_pins_is_among_the_hints(tmp_path):
    copying = SDPA.replace("r: 8}", "r: 8, cast_input_dtype_enabled: true}")
    pinned = copying.replace("max_length: 512", "max_length: 4096").replace(
        "max_steps: 10", "max_steps: 10, per_device_train_batch_size: 64, activation_checkpointing: false"
    )
    with pytest.raises(DoesNotFit) as caught:
        make_plan(recipe(tmp_path, pinned), facts("1xA100-40GB"))
    changes = [other.change for other in caught.value.would_fit]
    both = {"trainer.activation_checkpointing": True, "trainer.per_device_train_batch_size": None}
    assert changes == [both], "neither alone is enough"
    assert "per_device_train_batch_size: left out" in (caught.value.problems[0].hint or "")


def test_a_recipe_without_a_global_batch_keeps_its_accumulation(tmp_path):
    asked = BASE.replace("max_steps: 10", "max_steps: 10, gradient_accumulation_steps: 4")
    found = searched(tmp_path, asked, "1xA100-80GB")
    assert found.first.batch.micro == 8, "ranked by samples a second, not by the shortest step"
    assert {c.batch.accumulation for c in found.ranked} == {4}
    bench, strategy = found.of(found.first), found.first.strategy
    eight, four = (bench.candidate(strategy, batch) for batch in bench.batches[:2])
    assert eight.time.likely > four.time.likely
    assert eight.rank_key < four.rank_key


@pytest.mark.parametrize(("engine", "name"), [("fsdp", "FSDP2"), ("ddp", "DDP"), ("deepspeed", "ZeRO-")])
def test_engines_are_called_by_their_names(tmp_path, engine, name):
    found = searched(tmp_path, LORA + f"sharding: {{engine: {engine}}}\n")
    assert {strategy_name(one.choices)[: len(name)] for one in found.ranked} == {name}


def test_a_70b_qlora_does_not_fit_small_cards_through_zero_3(tmp_path):
    """Each rank has the whole 4-bit base while it loads; no hint says otherwise."""
    name = "meta-llama/Llama-3.1-70B"
    text = BASE.replace("huggyllama/llama-7b", name) + "sharding: {engine: deepspeed, zero_stage: 3}\n"
    with pytest.raises(DoesNotFit) as caught:
        make_plan(recipe(tmp_path, text, model__quantization="nf4"), facts("8x24GB", name))
    assert caught.value.nearest_miss.memory.load_peak > 33 * 2**30
    quantised = [one.candidate for one in caught.value.would_fit if one.candidate.job.quantization == "nf4"]
    assert all(one.memory.load_peak > 33 * 2**30 for one in quantised)
