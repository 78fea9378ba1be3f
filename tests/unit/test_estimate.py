"""The estimate as a whole: what it answers, which moment rules, the largest batch, its speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counted_work import function_calls
from factories import BASE, facts, recipe
from hypothesis import given
from hypothesis import strategies as st
from memory_cases import A100, CPU, FULL, JOB_1B, LLAMA_1B, LLAMA_7B, LORA_1B, NODE, ZERO, spec

from launcher.commands.estimate import _task_of, estimate_command
from launcher.engines import ENGINES
from launcher.engines.deepspeed import DEEPSPEED
from launcher.engines.fsdp import FSDP
from launcher.inputs.model_spec import find_spec
from launcher.inputs.planning_facts import usable_cores
from launcher.machine.hardware import parse_hardware
from launcher.machine.software import installed_versions
from launcher.memory.estimate import MemoryEstimate, estimate_memory, max_micro_batch
from launcher.memory.job import MemoryJob
from launcher.models.lora import lora_params
from launcher.models.model_config import find_model_config
from launcher.plan.inputs import Facts
from launcher.planner.planner import make_plan
from launcher.planner.search import search
from launcher.planner.strategies import model_recipe, model_strategies, open_jobs, strategy_name
from launcher.recipe.loading import with_changes
from launcher.tasks import task_named


def test_json_is_complete_and_the_total_is_the_sum_of_the_components() -> None:
    answer = estimate_memory(LLAMA_7B, FULL, A100).to_json()
    assert sum(answer["components"].values()) == answer["total"]
    assert answer["low"] <= answer["total"] < answer["high"]
    assert set(answer) == {
        "device_bytes", "fits", "margin", "low", "expected", "high", "components", "total",
        "save_peak", "eval_peak", "eval_kept", "load_peak", "host_bytes", "host", "phase",
        "phases", "method", "calibration", "notes", "needed", "moment",
    }  # fmt: skip
    json.dumps(answer)


def test_unknown_device_memory_gives_no_verdict_and_no_batch() -> None:
    assert estimate_memory(LLAMA_7B, FULL, CPU).fits is None
    assert max_micro_batch(LLAMA_7B, FULL, CPU) is None


def test_cpu_has_no_cuda_context() -> None:
    assert estimate_memory(LLAMA_7B, FULL, CPU).components.context == 0


def sized(device_bytes: int) -> MemoryEstimate:
    """A LoRA job that evaluates with a larger batch than it trains, on a device of this size."""
    job = replace(JOB_1B, micro_batch=1, adapter=True, trainable_params=LORA_1B, eval_batch=64)
    return estimate_memory(LLAMA_1B, job, replace(A100, device_bytes=device_bytes))


def test_a_plan_fits_only_if_evaluation_fits_too() -> None:
    memory = sized(80 * 2**30)
    assert memory.eval_peak > memory.total
    assert (memory.needed, memory.moment) == (memory.eval_peak, "evaluating")
    between = (memory.total + memory.eval_peak) // 2
    assert sized(int(between / 0.95)).fits is False
    assert sized(int(memory.needed / 0.94)).fits is True


@pytest.mark.parametrize("field", ["total", "save_peak", "eval_peak", "load_peak"])
def test_the_moment_that_needs_most_rules(field: str) -> None:
    memory = estimate_memory(LLAMA_1B, JOB_1B, A100)
    names = {
        "total": "training", "save_peak": "saving", "eval_peak": "evaluating", "load_peak": "loading",
    }  # fmt: skip
    largest = replace(memory, **{field: 10**12})
    assert (largest.needed, largest.moment) == (10**12, names[field])


def test_saving_gathers_one_module_at_stage_3_and_nothing_below() -> None:
    largest = 32000 * 4096
    third = estimate_memory(LLAMA_7B, replace(ZERO, zero_stage=3), NODE)
    resident = third.phases["step"].total - third.phases["step"].temporary
    assert third.save_peak == resident + 2 * largest
    assert third.components.nccl > 0, "eight devices hold NCCL's buffers beside the context"
    assert third.load_peak == third.components.weights + third.components.outside + 2 * largest
    plain = estimate_memory(LLAMA_7B, FULL, A100)
    assert plain.save_peak == plain.phases["step"].total - plain.phases["step"].temporary


def test_quantising_needs_a_matrix_in_16_bits_beside_the_weights() -> None:
    lora = lora_params(LLAMA_7B, 16, "all-linear")
    job = replace(FULL, adapter=True, trainable_params=lora, quantization="nf4")
    memory = estimate_memory(LLAMA_7B, job, A100)
    assert memory.load_peak - memory.components.weights - memory.components.context == 2 * 4096 * 11008


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantised_base_is_whole_on_each_rank_while_it_loads_under_zero_3(kind: str) -> None:
    lora = lora_params(LLAMA_7B, 16, "all-linear")
    job = replace(ZERO, adapter=True, trainable_params=lora, quantization=kind)
    plain, sharded = (estimate_memory(LLAMA_7B, replace(job, zero_stage=stage), NODE) for stage in (2, 3))
    assert sharded.components.weights < plain.components.weights / 4
    assert sharded.load_peak > 0.99 * (plain.load_peak - 2 * plain.trainable_params)
    assert sharded.needed >= sharded.load_peak


def test_preference_pairs_are_evaluated_by_tiles_of_logits() -> None:
    pairs = spec("meta-llama/Llama-3.2-1B", "dpo")
    job = replace(JOB_1B, sequences_per_sample=2)
    few, many = (estimate_memory(pairs, replace(job, eval_batch=n), A100).eval_peak for n in (8, 16))
    tokens = 2 * 8 * JOB_1B.sequence_length
    # Beyond a tile only the layers' own step grows, by far less than two bytes a word of the vocabulary.
    assert many - few < tokens * pairs.vocab_size


def test_what_an_evaluation_batch_leaves_behind() -> None:
    job = replace(JOB_1B, eval_batch=4, data_parallel=2)
    # Token ids and labels of 64 bits each, gathered from both ranks.
    assert estimate_memory(LLAMA_1B, job, A100).eval_kept == 2 * 8 * 2 * 4 * 2048
    labelled = spec("meta-llama/Llama-3.2-1B", "sequence-classification")
    assert estimate_memory(labelled, job, A100).eval_kept == 2 * 4 * (4 * labelled.head.out_features + 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optim": "galore_adamw"}, "upper bound"),
        ({"optim": "paged_adamw_8bit"}, "host memory"),
        ({"optim": "adafactor", "engine": DEEPSPEED, "zero_stage": 1}, "factored"),
        ({"engine": FSDP, "accumulation": 2, "data_parallel": 2}, "unsharded"),
    ],
)
def test_notes_say_what_is_assumed(changes: dict[str, object], words: str) -> None:
    assert estimate_memory(LLAMA_7B, FULL, A100).notes == ()
    notes = estimate_memory(LLAMA_7B, replace(FULL, **changes), A100).notes  # type: ignore[arg-type]
    assert any(words in note for note in notes)


JOBS = st.builds(
    lambda engine, stage, precision, checkpointing, attention, adapter: replace(
        JOB_1B,
        engine=engine,
        zero_stage=stage,
        data_parallel=4,
        precision=precision,
        dtype="float32",
        checkpointing=checkpointing,
        attention=attention,
        adapter=adapter,
        trainable_params=LORA_1B if adapter else LLAMA_1B.params,
    ),
    st.sampled_from(ENGINES),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.booleans(),
    st.sampled_from(["eager", "sdpa", "flash_attention_2"]),
    st.booleans(),
)


@given(job=JOBS, batch=st.integers(1, 64), length=st.integers(8, 8192), more=st.integers(1, 64))
def test_estimate_grows_with_batch_and_length(job: MemoryJob, batch: int, length: int, more: int) -> None:
    def total(micro: int, tokens: int) -> int:
        grown = replace(job, micro_batch=micro, sequence_length=tokens)
        return estimate_memory(LLAMA_1B, grown, A100).total

    here = total(batch, length)
    assert total(batch + more, length) >= here
    assert total(batch, length + more) >= here


def test_largest_micro_batch_fits_and_the_next_does_not() -> None:
    best = max_micro_batch(LLAMA_1B, JOB_1B, A100)
    assert best is not None
    assert best > 1
    assert estimate_memory(LLAMA_1B, replace(JOB_1B, micro_batch=best), A100).fits
    assert not estimate_memory(LLAMA_1B, replace(JOB_1B, micro_batch=best + 1), A100).fits


def test_no_micro_batch_fits_a_small_device() -> None:
    assert max_micro_batch(LLAMA_7B, FULL, parse_hardware("1x24GB")) == 0


def test_an_estimate_takes_few_calls() -> None:
    estimate_memory(LLAMA_7B, FULL, A100)
    job = replace(FULL, micro_batch=7)
    assert function_calls(lambda: estimate_memory(LLAMA_7B, job, A100)) < 6000


@pytest.mark.parametrize("on", ["8xA100-80GB", "8xA100-40GB", "1x24GB"])
def test_the_closed_form_part_of_a_plan_takes_few_calls(tmp_path: Path, on: str) -> None:
    asked = BASE.replace("adapter: {type: lora, r: 8}\n", "") if on != "1x24GB" else BASE
    loaded, known = recipe(tmp_path, asked + "global_batch_size: 128\n"), facts(on)
    make_plan(loaded, known)
    assert function_calls(lambda: make_plan(loaded, known)) < 230_000


def estimated(model: str, *on: str, tensor_parallel: int = 1) -> dict[str, Any]:
    """`estimate --json` of a model; (hardware, strategy) -> row."""
    data = estimate_command(model, on=on, overrides=(), tensor_parallel=tensor_parallel).data
    return {(row["hardware"], row["strategy"]): row for row in data["rows"]}


def test_strategies_cover_engines_precisions_adapters_and_optimizers() -> None:
    ways = dict(model_strategies(LLAMA_7B, A100))
    assert len(ways) == len(model_strategies(LLAMA_7B, A100))
    values: dict[str, set[Any]] = {}
    for changes in ways.values():
        for key, value in changes.items():
            values.setdefault(key, set()).add(repr(value))
    assert values["sharding.engine"] == {repr(engine.name) for engine in ENGINES}
    assert values["sharding.zero_stage"] == {"0", "1", "2", "3"}
    assert values["sharding.offload_param"] == {"'none'", "'cpu'", "'nvme'"}
    assert values["model.quantization"] == {"'int8'", "'nf4'"}
    assert values["precision"] == {"'bf16-true'"}
    old = dict(model_strategies(LLAMA_7B, parse_hardware("4xV100-32GB")))
    assert old["full pure 16-bit, DDP"]["precision"] == "fp16-true"


@pytest.mark.parametrize(
    "name",
    ["google-bert/bert-large-uncased", "google/vit-large-patch16-224", "bigscience/mt0-large",
     "BAAI/bge-base-en-v1.5"],
)  # fmt: skip
def test_strategies_of_encoders(name: str) -> None:
    found = estimated(name, "8xA100-80GB")
    assert {name for _, name in found} >= {"full, DDP", "full, ZeRO-3", "LoRA r16, DDP"}
    assert all(row["memory"]["needed"] > 0 for row in found.values())


def test_nothing_is_sharded_over_one_copy() -> None:
    rows = {name for _, name in estimated("huggyllama/llama-7b", "1xA100-80GB")}
    assert {"full, DDP", "full, ZeRO-3, all on CPU"} <= rows
    assert not {"full, ZeRO-3", "full, FSDP2"} & rows
    within = {"full pure 16-bit, steps in backward", "nf4 LoRA r16, FSDP2, all on CPU"}
    assert within <= rows
    several = {name for _, name in estimated("huggyllama/llama-7b", "2xA100-80GB")}
    assert within & several == {"nf4 LoRA r16, FSDP2, all on CPU"}


@pytest.mark.parametrize(
    ("model", "on"),
    [("meta-llama/Llama-3.1-8B", "8xH100-80GB"), ("meta-llama/Llama-3.1-8B", "1xRTX4090-24GB"),
     ("Qwen/Qwen3-0.6B", "4xV100-32GB"), ("bigscience/mt0-large", "2xA100-40GB"),
     ("google-bert/bert-large-uncased", "1xT4-16GB")],
)  # fmt: skip
def test_estimate_and_plan_give_one_answer(model: str, on: str) -> None:
    """Of each strategy: the memory of its smallest batch, and the largest batch that fits."""
    hardware = parse_hardware(on)
    for (_, strategy), row in estimated(model, on).items():
        config, origin = find_model_config(model)
        task = _task_of(config)
        about, _ = find_spec(model, config, origin, task, ask=False)
        asked = with_changes(
            model_recipe(about, task_named(task)), dict(model_strategies(about, hardware))[strategy], "test"
        )
        known = Facts(hardware, about, installed_versions(), cpu_cores=usable_cores())
        assert search(asked, known).first.memory.needed == row["memory"]["needed"], strategy
        largest = row["max_micro_batch"]
        for size, fits in ((largest, True), (largest + 1, False)):
            if 0 < size <= 64:
                sized = with_changes(asked, {"trainer.per_device_train_batch_size": size}, "test")
                assert search(sized, known).first.fits is fits, (strategy, size)


def test_a_recipes_job_over_what_it_leaves_open() -> None:
    open_names = [name for name, _ in open_jobs(ZERO, ())]
    assert len(open_names) == len(set(open_names)) == 3 * (1 + 2 + 2 + 3)
    assert "ZeRO-3, all on CPU, checkpointing" in open_names
    fixed = ("sharding.zero_stage", "sharding.offload_param", "trainer.activation_checkpointing")
    assert [name for name, _ in open_jobs(replace(ZERO, zero_stage=2), fixed)] == ["ZeRO-2"]
    assert [name for name, _ in open_jobs(FULL, ())] == [
        "DDP", "DDP, checkpointing", "DDP, checkpointing on CPU",
    ]  # fmt: skip
    assert strategy_name(replace(ZERO, engine=FSDP, offload_param="cpu")) == "FSDP2, all on CPU"
