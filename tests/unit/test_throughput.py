"""What trains faster: kernels of any length, the loss by chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import facts, plan, recipe

from launcher.errors import RecipeError
from launcher.machine.hardware import parse_hardware
from launcher.models.capabilities import CHUNK_BYTES, chunk_rows, holds_mask, is_varlen
from launcher.planner.planner import NOT_COMPILED, make_plan

A100, V100 = "1xA100-80GB", "1xV100-32GB"
ATTENTION, FREE, MULTIPLE = "model.attn_implementation", "data.padding_free", "data.pad_to_multiple_of"
CAST = "adapter.cast_input_dtype_enabled"
GEMMA2 = {"model__name_or_path": "google/gemma-2-9b"}
GPT2 = {"model__name_or_path": "openai-community/gpt2"}
OPT = {"model__name_or_path": "facebook/opt-6.7b"}
MIXTRAL = {"model__name_or_path": "mistralai/Mixtral-8x7B-v0.1"}
TP = {"sharding__tp_size": 2, "adapter": "null", "precision": "bf16"}
SP = {"sharding__sp_size": 2, "adapter": "null"}
MEASURED = {"data__eval": "{split: 0.1}", "data__metrics": "[accuracy]"}


@pytest.mark.parametrize(
    ("kernel", "varlen"),
    [("flash_attention_2", True), ("varlen", True), ("sdpa", False), ("eager", False),
     ("flex_attention", False), (None, False)],
)  # fmt: skip
def test_which_kernels_take_documents_of_any_length(kernel, varlen):
    assert is_varlen(kernel) is varlen
    assert holds_mask(kernel) is (kernel not in ("flash_attention_2", "varlen", "flex_attention"))


@pytest.mark.parametrize("vocab", [2, 1024, 32000, 49152, 128256, 151936, 262144, 10**7])
def test_a_chunk_of_logits_is_a_multiple_of_256_rows_within_its_bytes(vocab):
    rows = chunk_rows(vocab)
    assert rows % 256 == 0
    assert rows >= 256
    assert rows == 256 or rows * vocab * 4 <= CHUNK_BYTES
    assert (rows + 256) * vocab * 4 > CHUNK_BYTES


def of(made, *names):
    return tuple(made.at(name) for name in names)


def versioned(folder, on, versions, **overrides):
    loaded = recipe(folder, **overrides)
    told = facts(on, loaded.recipe.model.name_or_path, loaded.recipe.task)
    return make_plan(loaded, replace(told, versions=versions))


@pytest.mark.parametrize("on", ["cpu", V100, A100, "1x24GB", "8xA100-80GB"])
def test_the_samples_of_a_batch_lie_in_one_row_by_themselves(tmp_path, on):
    assert of(plan(tmp_path, on), ATTENTION, FREE) == ("varlen", True)


@pytest.mark.parametrize(
    ("given", "kernel", "free", "why"),
    [
        ({"model__attn_implementation": "sdpa"}, "sdpa", False, "mask"),
        ({"model__attn_implementation": "eager"}, "eager", False, "mask"),
        ({"model__attn_implementation": "flex_attention"}, "flex_attention", False, "mask"),
        ({"model__attn_implementation": "flash_attention_2"}, "flash_attention_2", True, "side by side"),
        ({"data__padding_free": "false"}, "sdpa", False, "set in the recipe"),
        ({"data__padding_free": "true"}, "varlen", True, "set in the recipe"),
        ({"data__packing": "true"}, "varlen", True, "side by side"),
        (OPT, "varlen", True, "side by side"),
        ({**OPT, "model__attn_implementation": "sdpa"}, "sdpa", False, "under sdpa"),
        (GEMMA2, "eager", False, "eager would pay"),
        (GPT2, "sdpa", False, "sdpa would pay"),  # drops attention weights
        ({"trainer__neftune_noise_alpha": 5.0}, "sdpa", False, "noise"),
        ({**MEASURED, "data__packing": "true"}, "sdpa", False, "predictions"),
        (MEASURED, "varlen", True, "side by side"),
        ({"task": "dpo"}, "sdpa", False, "padded"),
    ],
)
def test_what_keeps_a_batch_padded(tmp_path, given, kernel, free, why):
    made = plan(tmp_path, A100, **given)
    assert of(made, ATTENTION, FREE) == (kernel, free)
    assert why in made.provenance[FREE].reason


@pytest.mark.parametrize("shared", [TP, SP])
def test_ranks_that_share_a_copy_keep_what_was_tried(tmp_path, shared):
    made = plan(tmp_path, "8xA100-80GB", **shared)
    assert of(made, ATTENTION, FREE, "model.loss", "model.compile_blocks") == ("sdpa", False, "full", False)


@pytest.mark.parametrize(
    ("given", "on", "code", "words"),
    [
        ({"model__attn_implementation": "varlen", **GEMMA2}, A100, "attention-conflict", "caps"),
        ({"model__attn_implementation": "varlen", "task": "dpo"}, A100, "attention-conflict", "dpo"),
        ({"model__attn_implementation": "varlen", **TP}, "8xA100-80GB", "attention-conflict", "share"),
        ({"model__attn_implementation": "flex_attention"}, "cpu", "attention-conflict", "CPU"),
        ({"model__attn_implementation": "flex_attention", **OPT}, A100, "attention-conflict", "tried"),
        ({"model__loss": "chunked", **GEMMA2}, A100, "loss-conflict", "gemma2"),
        ({"model__loss": "chunked", "task": "dpo"}, A100, "loss-conflict", "dpo"),
        ({"model__loss": "chunked", **TP}, "8xA100-80GB", "loss-conflict", "share"),
        ({"model__loss": "chunked", "trainer__use_liger_kernel": "true"}, A100, "loss-conflict", "Liger"),
        ({"model__loss": "chunked", "trainer__label_smoothing_factor": 0.1}, A100, "loss-conflict", "smooth"),
        ({"model__compile_blocks": "true", **TP}, "8xA100-80GB", "compile-conflict", "share"),
        ({"model__vocab_multiple": 64, **TP}, "8xA100-80GB", "vocabulary-conflict", "split"),
        ({"adapter__autocast_adapter_dtype": "false"}, V100, "adapter-dtype", "scaler"),
        (
            {"model__compile_blocks": "true", "trainer__torch_compile": "true"},
            A100,
            "conflict",
            "whole model",
        ),
        (
            {"data__pad_to_multiple_of": 8, "trainer__pad_to_multiple_of": 8, "task": "dpo"},
            A100,
            "conflict",
            MULTIPLE,
        ),
    ],
)
def test_what_cannot_be_had_is_refused_at_its_line(tmp_path, given, on, code, words):
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, on, **given)
    problem = caught.value.problems[0]
    assert problem.code == code
    assert words in problem.message
    assert problem.hint


@pytest.mark.parametrize(
    ("given", "loss", "why"),
    [
        ({}, "chunked", "2,048 target tokens"),
        (OPT, "chunked", "1,280 target tokens"),
        ({"model__loss": "full"}, "full", "set in the recipe"),
        (GEMMA2, "full", "gemma2"),
        ({"adapter__target_modules": "[q_proj, lm_head]"}, "full", "head"),
        ({"adapter__modules_to_save": "[lm_head]"}, "full", "head"),
        ({"model__add_tokens": "[<a>]"}, "full", "added tokens"),
        ({"trainer__label_smoothing_factor": 0.1}, "full", "smoothing"),
        ({"trainer__use_liger_kernel": "true"}, "full", "Liger"),
        ({"model__device_map": "auto"}, "full", "device_map"),
        ({"task": "dpo"}, "full", "dpo"),
    ],
)
def test_where_the_loss_is_computed_by_chunks(tmp_path, given, loss, why):
    made = plan(tmp_path, A100, **given)
    assert made.model.loss == loss
    assert why in made.provenance["model.loss"].reason


def test_a_mixture_of_experts_has_what_its_routers_allow(tmp_path):
    """The chunked loss keeps the loss of routers; in padding-free batches it would count other tokens."""
    made = plan(tmp_path, "8xH200-141GB", **MIXTRAL)
    assert of(made, "model.loss", FREE) == ("chunked", True)
    told = facts("8xH200-141GB", MIXTRAL["model__name_or_path"])
    config = {**told.model.config, "output_router_logits": True}
    counted = make_plan(recipe(tmp_path, **MIXTRAL), replace(told, model=replace(told.model, config=config)))
    assert of(counted, "model.loss", FREE) == ("chunked", False)
    assert made.runtime.loss_over == "targets"
    assert "routers" not in made.provenance["runtime.loss_over"].reason
    assert counted.runtime.loss_over == "targets and routers"
    assert "auxiliary loss of the routers" in counted.provenance["runtime.loss_over"].reason


@pytest.mark.parametrize(
    ("on", "given", "multiple"),
    [("cpu", {}, None), (V100, {}, 8), ("1x24GB", {}, 8), (A100, {}, 64),
     (A100, {"data__pad_to_multiple_of": 1}, 1), ("cpu", {"data__pad_to_multiple_of": 16}, 16)],
)  # fmt: skip
def test_to_what_multiple_rows_are_filled_up(tmp_path, on, given, multiple):
    assert plan(tmp_path, on, **given).at(MULTIPLE) == multiple


@pytest.mark.parametrize(
    ("task", "length", "more"),
    [
        ("dpo", 512, {}),
        ("kto", 512, {}),
        ("reward", 512, {}),
        ("grpo", 448 + 128, {"reward": "[{function: format}]", "generation__max_completion_length": 100}),
    ],
)
def test_trl_pads_to_the_multiple_that_is_asked_for(tmp_path, task, length, more):
    made = plan(tmp_path, A100, task=task, data__pad_to_multiple_of=64, data__max_length=500, **more)
    assert made.at("trainer.pad_to_multiple_of") == made.at(MULTIPLE) == 64
    assert made.job.sequence_length == length
    unasked = plan(tmp_path, A100, task=task, **more)
    assert (unasked.at(MULTIPLE), "trainer.pad_to_multiple_of" in unasked.names) == (None, False)


def test_sizes_that_tensor_cores_do_not_want_are_said(tmp_path):
    reason = plan(tmp_path, A100, data__max_length=500).provenance[MULTIPLE].reason
    assert "data.max_length 500 is none" in reason
    assert "512" in reason
    made = plan(tmp_path, A100, model__add_tokens="[<a>]")
    assert made.model.vocab_multiple is None
    assert any("32,001 words" in warning and "vocab_multiple: 64" in warning for warning in made.warnings)
    assert not any("words" in warning for warning in plan(tmp_path, A100).warnings)
    assert plan(tmp_path, A100, model__vocab_multiple=64).model.vocab_multiple == 64


def test_a_multiple_that_tensor_cores_do_not_want_is_said(tmp_path):
    def said(on: str, multiple: int) -> bool:
        made = plan(tmp_path, on, data__pad_to_multiple_of=multiple)
        return any(f"{MULTIPLE}: {multiple} is no multiple of" in warning for warning in made.warnings)

    assert said(A100, 8)
    assert said(V100, 10)
    assert not any((said(A100, 128), said(A100, 1), said(V100, 8), said("cpu", 10)))


def test_padded_rows_are_priced_as_they_are_filled_up(tmp_path):
    given = {"data__padding_free": "false", "data__max_length": 500}
    assert plan(tmp_path, A100, **given).job.sequence_length == 512
    assert plan(tmp_path, A100, **given, data__pad_to_multiple_of=1).job.sequence_length == 500
    assert plan(tmp_path, A100, data__max_length=500).job.sequence_length == 500


@pytest.mark.parametrize(
    ("on", "given", "casts", "why"),
    [
        (A100, {"sharding__engine": "ddp"}, False, "same numbers"),
        ("8xA100-80GB", {"sharding__engine": "deepspeed"}, True, "no autocast"),
        ("cpu", {}, True, "no autocast"),
        (A100, {"precision": "fp32"}, True, "no autocast"),
        (A100, {"adapter__lora_dropout": 0.1}, True, "dropout"),
        (A100, {"adapter__use_dora": "true"}, True, "use_dora"),
        (A100, {"adapter__use_rslora": "true"}, False, "same numbers"),
        (A100, {"adapter__cast_input_dtype_enabled": "true"}, True, "set in the recipe"),
        (A100, {"adapter": "{path: /tmp/adapter}"}, True, "continued"),
        (A100, {"adapter": "{path: /tmp/adapter, cast_input_dtype_enabled: false}"}, False, "set"),
    ],
)
def test_where_adapters_copy_their_input(tmp_path, on, given, casts, why):
    made = plan(tmp_path, on, **given)
    assert made.at(CAST) is casts
    assert why in made.provenance[CAST].reason
    assert made.adapter.autocast_adapter_dtype is True
    assert made.job.cast_inputs is casts


def test_a_full_fine_tune_has_no_adapter_to_cast(tmp_path):
    assert CAST not in plan(tmp_path, "8xA100-80GB", adapter="null").names


def test_liger_rules_the_loss_where_it_is_installed(tmp_path):
    key = "trainer.use_liger_kernel"
    installed = {"liger-kernel": "0.8.5"}
    made = versioned(tmp_path, A100, installed)
    assert of(made, key, "model.loss") == (True, "full")
    assert made.job.liger
    assert not made.job.chunked
    assert versioned(tmp_path, A100, installed, trainer__use_liger_kernel="false").at(key) is False
    assert versioned(tmp_path, A100, installed, **OPT).at(key) is False
    assert versioned(tmp_path, A100, installed, model__add_tokens="[<a>]").at(key) is False
    assert versioned(tmp_path, A100, {}).at(key) is False
    assert key not in versioned(tmp_path, "cpu", installed).names


@pytest.mark.parametrize(
    ("given", "uses"),
    [
        ({"adapter": "{type: lora}"}, True),
        ({"adapter": "{type: lora}", "model__quantization": "nf4"}, False),
        ({"adapter": "null", "sharding__engine": "ddp", "precision": "bf16"}, False),
        ({"adapter": "null", "sharding__engine": "ddp", "precision": "bf16-true"}, True),
        ({"adapter": "null", "sharding__zero_stage": 3}, True),
    ],
)
def test_ligers_kernels_for_experts_get_the_dtype_of_the_weights(tmp_path, given, uses):
    """On an H100 a 4-bit base ended with "Both operands must be same dtype" in its first step."""
    key, installed, on = "trainer.use_liger_kernel", {"liger-kernel": "0.8.5"}, "1x1000GB"
    given = {**MIXTRAL, **given}

    def made(**more):
        loaded = recipe(tmp_path, **given, **more)
        hopper = replace(parse_hardware(on), compute_capability=(9, 0))
        told = replace(facts(on, loaded.recipe.model.name_or_path, loaded.recipe.task), hardware=hopper)
        return make_plan(loaded, replace(told, versions=installed))

    assert made().at(key) is uses
    if not uses:
        with pytest.raises(RecipeError) as wrong:
            made(trainer__use_liger_kernel="true")
        assert [(one.code, one.path) for one in wrong.value.problems] == [("liger-conflict", key)]


@pytest.mark.parametrize(
    ("on", "given", "tf32"),
    [(A100, {}, True), (A100, {"precision": "fp32"}, None), (A100, {"trainer__tf32": "false"}, False)],
)
def test_tf32_is_for_what_16_bits_leave_in_float32(tmp_path, on, given, tf32):
    assert plan(tmp_path, on, **given).trainer.tf32 is tf32


def test_tf32_is_not_said_of_devices_without_it(tmp_path):
    assert "trainer.tf32" not in plan(tmp_path, V100).names
    assert "trainer.tf32" not in plan(tmp_path, "cpu").names


@pytest.mark.parametrize(
    ("on", "cores", "host", "given", "workers"),
    [
        ("cpu", 16, None, {}, 0),
        (A100, 16, None, {}, 2),
        (A100, 16, 2**37, {}, 4),
        ("8xA100-80GB", 24, 2**40, {}, 2),
        ("8xA100-80GB", 8, 2**40, {}, 0),
        (A100, 16, 2**37, {"data__streaming": "true"}, 0),
        (A100, 16, 2**37, {"trainer__dataloader_num_workers": 7}, 7),
    ],
)
def test_workers_that_make_batches(tmp_path, on, cores, host, given, workers):
    loaded = recipe(tmp_path, **given)
    made = make_plan(loaded, replace(facts(on), cpu_cores=cores, host_bytes=host))
    assert made.trainer.dataloader_num_workers == workers
    ahead = {"trainer.dataloader_prefetch_factor", "trainer.dataloader_persistent_workers"}
    said = "trainer__dataloader_num_workers" in given
    assert bool(ahead & {*made.names}) is (workers > 0 and not said)


@pytest.mark.parametrize("key", ["prefetch_factor: 4", "persistent_workers: true"])
def test_what_is_said_of_workers_brings_one(tmp_path, key):
    """TrainingArguments and the DataLoader refuse either without workers."""
    name, value = key.split(": ")
    made = plan(tmp_path, "cpu", **{f"trainer__dataloader_{name}": value})
    assert made.trainer.dataloader_num_workers == 1
    assert name in made.provenance["trainer.dataloader_num_workers"].reason
    none = {f"trainer__dataloader_{name}": value, "trainer__dataloader_num_workers": 0}
    with pytest.raises(RecipeError, match=rf"dataloader_{name}: there are no workers for it") as caught:
        plan(tmp_path, A100, **none)
    assert caught.value.problems[0].file == "--set", "where it was said"


def test_a_compiled_model_has_all_its_logits(tmp_path):
    made = plan(tmp_path, A100, trainer__torch_compile="true")
    assert made.model.loss == "full"
    assert "torch_compile" in made.provenance["model.loss"].reason


LONG = {"trainer__max_steps": 200000}


@pytest.mark.parametrize(
    ("on", "given", "compiled", "why"),
    [
        (A100, LONG, True, "h or more"),
        (A100, {}, False, "less than an hour"),
        (A100, {"trainer": "{num_train_epochs: 3}"}, False, "not known"),
        ("cpu", LONG, False, "CPU"),
        (V100, LONG, False, "8.0"),
        (A100, {**LONG, "model__quantization": "nf4"}, False, "bitsandbytes"),
        ("8xA100-80GB", {**LONG, "sharding__zero_stage": 3}, False, "gathered"),
        ("8xA100-80GB", {**LONG, "sharding__zero_stage": 2}, True, "h or more"),
        (A100, {**LONG, "model__compile_blocks": "false"}, False, "set in the recipe"),
        ("cpu", {"model__compile_blocks": "true"}, True, "set in the recipe"),
    ],
)
def test_layers_are_compiled_where_the_run_is_long(tmp_path, on, given, compiled, why):
    made = plan(tmp_path, on, **given)
    assert made.model.compile_blocks is compiled
    assert why in made.provenance["model.compile_blocks"].reason
    assert (NOT_COMPILED in made.memory.notes) is compiled


@pytest.mark.parametrize("on", ["cpu", V100, A100, "8xA100-80GB"])
def test_every_decision_has_its_reason(tmp_path, on):
    made = plan(tmp_path, on)
    names = [ATTENTION, FREE, MULTIPLE, CAST, "model.loss", "model.compile_blocks", "model.vocab_multiple"]
    for name in names:
        setting = made.provenance[name]
        assert setting.reason, name
        assert setting.source in ("default", "hardware"), name
