"""TRL's YAML as keys of a recipe: each key, its defaults, its data sets, and what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from every import every
from migration_tables import HANDLED

from launcher.errors import RecipeError
from launcher.importing import trl
from launcher.importing.reading import Effect, Reading
from launcher.importing.rollouts import OF_TRL
from launcher.importing.trl import TABLES
from launcher.recipe.field_tables import trainer_fields

FILE: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "dataset_name": "org/rows",
    "completion_only_loss": True,
}
LORA = {**FILE, "use_peft": True, "lora_target_modules": ["q_proj"]}
NF4 = {**LORA, "load_in_4bit": True}
ROLLOUTS = {
    "model_name_or_path": "org/model",
    "dataset_name": "org/sums",
    "reward_funcs": ["rwd.short"],
    "scale_rewards": True,
}
ROWS = [{"path": "org/rows"}]

# key -> (the file, recipe key, value)
CASES: dict[str, tuple[dict[str, Any], str, Any]] = {
    "model_name_or_path": (FILE, "model.name_or_path", "org/model"),
    "model_revision": ({**FILE, "model_revision": "v1"}, "model.revision", "v1"),
    "trust_remote_code": ({**FILE, "trust_remote_code": True}, "model.trust_remote_code", True),
    "activation_offloading": (
        {**FILE, "activation_offloading": True},
        "sharding.offload_activations",
        "cpu",
    ),
    "dataset_num_proc": ({**FILE, "dataset_num_proc": 4}, "data.num_proc", 4),
    "pad_to_multiple_of": ({**FILE, "pad_to_multiple_of": 8}, "data.pad_to_multiple_of", 8),
    "dataset_streaming": ({**FILE, "dataset_streaming": True}, "data.streaming", True),
    "streaming": ({**FILE, "streaming": True}, "data.streaming", True),
    "lora_r": ({**LORA, "lora_r": 4}, "adapter.r", 4),
    "lora_alpha": ({**LORA, "lora_alpha": 4}, "adapter.lora_alpha", 4),
    "lora_dropout": ({**LORA, "lora_dropout": 0}, "adapter.lora_dropout", 0),
    "lora_target_modules": (
        {**LORA, "lora_target_modules": ["all-linear"]},
        "adapter.target_modules",
        "all-linear",
    ),
    "lora_target_parameters": ({**LORA, "lora_target_parameters": ["w"]}, "adapter.target_parameters", ["w"]),
    "lora_modules_to_save": ({**LORA, "lora_modules_to_save": ["e"]}, "adapter.modules_to_save", ["e"]),
    "use_rslora": ({**LORA, "use_rslora": True}, "adapter.use_rslora", True),
    "use_dora": ({**LORA, "use_dora": True}, "adapter.use_dora", True),
    "dtype": ({**FILE, "dtype": "bfloat16"}, "model.dtype", "bfloat16"),
    "torch_dtype": ({**FILE, "torch_dtype": "auto"}, "model.dtype", "auto"),
    "attn_implementation": ({**FILE, "attn_implementation": "sdpa"}, "model.attn_implementation", "sdpa"),
    "model_init_kwargs": ({**FILE, "model_init_kwargs": {"dtype": "bfloat16"}}, "model.dtype", "bfloat16"),
    "use_peft": (LORA, "adapter.type", "lora"),
    "lora_task_type": ({**LORA, "lora_task_type": "CAUSAL_LM"}, "adapter.r", 16),
    "load_in_4bit": (
        NF4,
        "model.quantization",
        {"type": "nf4", "double_quant": False, "compute_dtype": "float32"},
    ),
    "load_in_8bit": ({**LORA, "load_in_8bit": True}, "model.quantization", {"type": "int8"}),
    "bnb_4bit_quant_type": (
        {**NF4, "bnb_4bit_quant_type": "fp4"},
        "model.quantization",
        {"type": "fp4", "double_quant": False, "compute_dtype": "float32"},
    ),
    "use_bnb_nested_quant": (
        {**NF4, "use_bnb_nested_quant": True, "dtype": "bfloat16"},
        "model.quantization",
        {"type": "nf4", "double_quant": True, "compute_dtype": "bfloat16"},
    ),
    "max_length": ({**FILE, "max_length": 4096}, "data.max_length", 4096),
    "max_seq_length": ({**FILE, "max_seq_length": 4096}, "data.max_length", 4096),
    "truncation_mode": ({**FILE, "truncation_mode": "keep_start"}, "data.overlong", "truncate"),
    "packing": ({**FILE, "packing": True}, "data.packing", True),
    "packing_strategy": (
        {**FILE, "packing": True, "packing_strategy": "bfd_split"},
        "data.overlong",
        "split",
    ),
    "padding_free": ({**FILE, "padding_free": True}, "data.padding_free", True),
    "dataset_text_field": (
        {**FILE, "dataset_text_field": "body"},
        "data.train",
        [{"path": "org/rows", "format": "text", "columns": {"text": "body"}}],
    ),
    "completion_only_loss": ({**FILE, "completion_only_loss": False}, "data.loss_on", "all"),
    "assistant_only_loss": ({**FILE, "assistant_only_loss": True}, "data.loss_on", "assistant"),
    "chat_template": ({**FILE, "chat_template": "{{ messages }}"}, "model.chat_template", "_template.jinja"),
    "chat_template_path": ({**FILE, "chat_template_path": "t.jinja"}, "model.chat_template", "t.jinja"),
    "accelerate_config": ({**FILE, "accelerate_config": "zero3"}, "sharding.zero_stage", 3),
    "num_processes": ({**FILE, "num_processes": 4}, "hardware.total", 4),
    "num_machines": ({**FILE, "num_machines": 2}, "hardware.num_nodes", 2),
    "env": ({**FILE, "env": {"NCCL_DEBUG": "INFO"}}, "launch.env.NCCL_DEBUG", "INFO"),
    "wandb_project": ({**FILE, "wandb_project": "p"}, "launch.env.WANDB_PROJECT", "p"),
    "wandb_entity": ({**FILE, "wandb_entity": "e"}, "launch.env.WANDB_ENTITY", "e"),
    "beta": ({**FILE, "beta": 0.2}, "trainer.beta", 0.2),
    "bf16": ({**FILE, "bf16": False}, "precision", "fp32"),
    "dataset_name": (FILE, "data.train", ROWS),
    "dataset_config": ({**FILE, "dataset_config": "en"}, "data.train", [{"path": "org/rows", "name": "en"}]),
    "dataset_configs": (
        {**FILE, "dataset_configs": ["a", "b"]},
        "data.train",
        [{"path": "org/rows", "name": "a"}, {"path": "org/rows", "name": "b"}],
    ),
    "dataset_train_split": (
        {**FILE, "dataset_train_split": "train_sft"},
        "data.train",
        [{"path": "org/rows", "split": "train_sft"}],
    ),
    "dataset_test_split": (
        {**FILE, "dataset_test_split": "dev", "eval_strategy": "epoch"},
        "data.eval",
        [{"path": "org/rows", "split": "dev"}],
    ),
    "datasets": (
        {"model_name_or_path": "m/m", "datasets": [{"path": "org/a", "split": "x", "name": "en"}]},
        "data.train",
        [{"path": "org/a", "name": "en", "split": "x"}],
    ),
    "dataset_mixture": (
        {
            "model_name_or_path": "m/m",
            "dataset_mixture": {
                "datasets": [
                    {"id": "org/a", "config": "c", "split": "s", "weight": 0.5, "columns": ["messages"]},
                    {"id": "org/b", "weight": 1.0, "columns": ["messages"]},
                ],
                "seed": 0,
            },
        },
        "data.train",
        [{"path": "org/a", "name": "c", "split": "s", "weight": 0.5}, {"path": "org/b"}],
    ),
    "dataset_mixer": (
        {"model_name_or_path": "m/m", "dataset_mixer": {"org/a": 0.5}},
        "data.train",
        [{"path": "org/a", "weight": 0.5}],
    ),
    "dataset_splits": (
        {
            "model_name_or_path": "m/m",
            "dataset_mixer": {"org/a": 1.0},
            "dataset_splits": ["train_sft", "test_sft"],
        },
        "data.eval",
        [{"path": "org/a", "split": "test_sft"}],
    ),
    "reward_funcs": (ROLLOUTS, "reward", [{"function": "rwd.py:short"}]),
    "reward_weights": (
        {**ROLLOUTS, "reward_weights": [0.5]},
        "reward",
        [{"function": "rwd.py:short", "weight": 0.5}],
    ),
    "use_vllm": ({**ROLLOUTS, "use_vllm": True}, "generation.backend", "vllm-colocate"),
    "vllm_mode": (
        {**ROLLOUTS, "use_vllm": True, "vllm_mode": "server"},
        "generation.backend",
        "vllm-server",
    ),
    "scale_rewards": (ROLLOUTS, "trainer.scale_rewards", "group"),
    "generation_batch_size": (
        {**ROLLOUTS, "generation_batch_size": 64},
        "trainer.steps_per_generation",
        None,
    ),
    "test_split_size": ({**FILE, "test_split_size": 0.1}, "data.eval", {"split": 0.1}),
}


def read(values: dict[str, Any], file: str = "t.yaml", word: str = "") -> Reading:
    return trl.read(yaml.safe_dump(values, sort_keys=False), f"{word}.yaml" if word else file)


def dropped(reading: Reading) -> dict[str, Effect]:
    return {entry.key: entry.effect for entry in reading.dropped}


def test_every_mapped_key_has_a_case() -> None:
    assert {*TABLES} | {row[0] for row in HANDLED["trl"]} == set(CASES)


@every("key", CASES)
def test_a_key_is_taken_and_none_vanishes(key: str) -> None:
    values, to, expected = CASES[key]
    reading = read(values)
    assert reading.value(to) == expected
    assert not reading.refusals
    assert set(values) <= reading.seen
    assert key in reading.seen


def test_every_key_of_trl_is_taken_or_listed() -> None:
    for value in ("x", 3, [1], {"a": 1}, True):
        keys = sorted({*trl.tool().keys, *trainer_fields("dpo"), *CASES})
        for at in range(0, len(keys), 15):
            some = keys[at : at + 15]
            for word in ("sft", "dpo"):
                assert set(some) <= read({**FILE, **dict.fromkeys(some, value)}, word=word).seen, value


def test_the_tables_name_keys_once() -> None:
    left = [name for entry in trl.tool().left["keys"] for name in entry.names]
    assert len(left) == len(set(left))
    assert not set(left) & set(CASES)


def test_what_trl_uses_where_the_file_is_silent() -> None:
    reading = read(LORA)
    expected = {
        "model.dtype": "float32",
        "precision": "bf16",
        "data.max_length": 1024,
        "data.overlong": "truncate",
        "trainer.learning_rate": 2e-5,
        "trainer.num_train_epochs": 3.0,
        "adapter.r": 16,
        "adapter.lora_alpha": 32,
        "adapter.lora_dropout": 0.05,
    }
    assert {key: reading.value(key) for key in expected} == expected
    assert all(reading.taken[key].is_default for key in expected)
    assert read({**FILE, "fp16": True}).value("precision") == "fp16"
    tuned = read(FILE, word="dpo")
    assert tuned.value("task") == "dpo"
    assert tuned.value("trainer.learning_rate") == 1e-6
    assert tuned.value("trainer.beta") == 0.1
    assert read({**FILE, "eval_strategy": "steps", "test_split_size": 0.1}).value("trainer.eval_steps") == 10


@pytest.mark.parametrize(
    ("more", "needed"),
    [
        ({"hub_model_id": "me/model-orpo"}, True),
        ({}, True),
        ({"output_dir": "out/my-DPO"}, False),
        ({"precompute_ref_log_probs": True}, True),
        ({"ld_alpha": 0.5}, False),
    ],
)
def test_beta_alone_does_not_say_which_training_it_is(more: dict[str, Any], needed: bool) -> None:
    made = read({**FILE, "beta": 0.1, **more})
    assert made.value("task") == "dpo"
    assert (dropped(made).get("kind of training") is Effect.NEEDED) is needed
    assert "kind of training" not in dropped(read({**FILE, "beta": 0.1, **more}, word="dpo"))


@pytest.mark.parametrize("key", ["reward_clip_range", "cpo_alpha", "num_ppo_epochs"])
def test_keys_of_trainings_that_are_not_here_are_refused(key: str) -> None:
    assert [problem.path for problem in read({**FILE, "beta": 0.1, key: 1}).refusals] == [key]


REWARD = {"model_name_or_path": "org/model", "dataset_name": "org/pairs"}


@pytest.mark.parametrize(
    ("values", "word"), [(REWARD, "reward"), ({**REWARD, "center_rewards_coefficient": 0.01}, "")]
)
def test_a_reward_model_is_read_by_its_name_or_its_own_key(values: dict[str, Any], word: str) -> None:
    reading = read({**values, "learning_rate": 1e-5, "eos_token": None, "packing": False}, word=word)
    found = {key: taken.value for key, taken in reading.taken.items()}
    assert found["task"] == "reward"
    assert (found["data.overlong"], found["data.max_length"]) == ("drop", 1024)
    assert found["trainer.learning_rate"] == 1e-5
    assert found.get("trainer.center_rewards_coefficient") == values.get("center_rewards_coefficient")
    assert "data.loss_on" not in found
    assert not reading.dropped
    assert read(REWARD, word="reward").value("trainer.learning_rate") == 1e-4


@pytest.mark.parametrize(
    ("more", "word", "file", "asked"),
    [
        ({"desirable_weight": 2.0}, "", "t.yaml", False),
        ({"beta": 0.2}, "kto", "t.yaml", False),
        ({"beta": 0.2}, "", "out/qwen-kto.yaml", False),
        ({"precompute_ref_log_probs": True, "output_dir": "runs/kto"}, "", "t.yaml", False),
    ],
)
def test_labelled_answers(more: dict[str, Any], word: str, file: str, asked: bool) -> None:
    reading = read({**REWARD, **more}, file, word)
    assert reading.value("task") == "kto"
    assert reading.value("trainer.train_sampling_strategy") == "sequential"
    assert reading.value("data.overlong") == "truncate"
    assert "data.loss_on" not in reading.taken
    assert ("kind of training" in dropped(reading)) is asked


@pytest.mark.parametrize(
    ("file", "output", "task", "asked"),
    [
        ("dpo/config.yaml", "out", "dpo", False),
        ("a.yaml", "data/zephyr-7b-dpo-full", "dpo", False),
        ("sft.yaml", "out", None, False),
        ("sft.yaml", "data/zephyr-dpo", None, True),
        ("undpo.yaml", "out", None, False),
    ],
)
def test_a_file_without_a_key_of_its_training_is_known_by_its_names(
    file: str, output: str, task: str | None, asked: bool
) -> None:
    reading = read({**REWARD, "output_dir": output}, file)
    assert reading.value("task") == task
    assert (dropped(reading).get("kind of training") is Effect.NEEDED) is asked


GRPO = {"model_name_or_path": "org/model", "dataset_name": "org/sums", "reward_funcs": ["accuracy_reward"]}


def test_rollouts() -> None:
    values = {
        **GRPO, "reward_funcs": ["my_lib.rewards.short", "think_format_reward"], "reward_weights": [0.5, 1.0],
        "num_generations": 4, "temperature": 0.7, "use_vllm": True, "scale_rewards": True, "beta": 0.04,
        "loss_type": "dr_grpo", "generation_batch_size": 64, "sync_ref_model": True, "log_completions": True,
        "shuffle_dataset": False, "max_completion_length": 256, "max_tool_calling_iterations": 3,
    }  # fmt: skip
    reading = read(values, word="grpo")
    found = {key: taken.value for key, taken in reading.taken.items()}
    assert not reading.refusals
    assert found["task"] == "grpo"
    assert found["reward"] == [
        {"function": "my_lib/rewards.py:short", "weight": 0.5},
        {"function": "_rewards.py:think_format_reward"},
    ]
    assert "from trl.rewards import think_format_reward" in reading.texts["_rewards.py"]
    sampling = {key.partition(".")[2]: value for key, value in found.items() if key.startswith("generation.")}
    assert sampling == {
        "num_generations": 4, "temperature": 0.7, "max_completion_length": 256, "backend": "vllm-colocate"
    }  # fmt: skip
    trainer = ("scale_rewards", "beta", "loss_type", "log_completions", "shuffle_dataset", "learning_rate")
    assert [found[f"trainer.{name}"] for name in trainer] == ["group", 0.04, "dr_grpo", True, False, 1e-6]
    assert "data.overlong" not in found
    assert dropped(reading) == {
        "generation_batch_size": Effect.TRAINING, "sync_ref_model": Effect.TRAINING,
        "max_tool_calling_iterations": Effect.TRAINING, "data.max_length": Effect.NEEDED,
    }  # fmt: skip


def test_the_file_of_trls_reward_functions_has_them() -> None:
    rewards = pytest.importorskip("trl.rewards")
    names = list(OF_TRL)
    reading = read({**GRPO, "reward_funcs": names}, word="grpo")
    made: dict[str, Any] = {}
    exec(reading.texts["_rewards.py"], made)
    assert made["accuracy_reward"] is rewards.accuracy_reward
    assert all(callable(made[name]) for name in names)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"reward_funcs": ["org/reward-model"]}, "reward_funcs"),
        ({"reward_model_name_or_path": "org/reward-model"}, "reward_model_name_or_path"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights"),
        ({"reward_weights": ["x"]}, "reward_weights"),
        ({"reward_weights": "heavy"}, "reward_weights"),
        ({"use_vllm": True, "vllm_mode": "beside"}, "vllm_mode"),
    ],
)
def test_rewards_that_are_no_functions_are_refused(more: dict[str, Any], key: str) -> None:
    assert [problem.path for problem in read({**GRPO, **more}, word="grpo").refusals] == [key]


def test_the_weight_of_a_single_reward_is_no_list() -> None:
    made = read({**GRPO, "reward_weights": 2.0}, word="grpo").value("reward")
    assert [entry["weight"] for entry in made] == [2.0]


def test_a_mapping_as_a_text_is_json() -> None:
    reading = read({**FILE, "model_init_kwargs": '{"dtype": "bfloat16"}'})
    assert reading.value("model.dtype") == "bfloat16"
    assert dropped(read({**FILE, "model_init_kwargs": "{dtype"}))["model_init_kwargs"] is Effect.NEEDED


@pytest.mark.parametrize(
    ("values", "file", "asked"),
    [
        (GRPO, "t.yaml", True),
        ({**GRPO, "beta": 0.1}, "t.yaml", True),
        ({**GRPO, "scale_rewards": "none"}, "t.yaml", False),
        (GRPO, "qwen-grpo.yaml", False),
    ],
)
def test_keys_that_rloo_has_too_do_not_say_that_it_is_grpo(
    values: dict[str, Any], file: str, asked: bool
) -> None:
    reading = read(values, file)
    assert reading.value("task") == "grpo"
    assert (dropped(reading).get("kind of training") is Effect.NEEDED) is asked


@pytest.mark.parametrize(
    ("more", "key"), [({"temperature": "warm"}, "temperature"), ({"num_generations": 2.5}, "num_generations")]
)
def test_wrong_values_of_the_sampling_must_be_set(more: dict[str, Any], key: str) -> None:
    assert dropped(read({**GRPO, **more}, word="grpo"))[key] is Effect.NEEDED


def test_an_option_that_changes_the_reference_is_not_without_effect() -> None:
    moved = {**FILE, "sync_ref_model": True, "ref_model_sync_steps": 64}
    del moved["completion_only_loss"]
    found = dropped(read(moved, word="dpo"))
    assert found["sync_ref_model"] is found["ref_model_sync_steps"] is Effect.TRAINING
    assert "sync_ref_model" not in dropped(read({**moved, "sync_ref_model": False}, word="dpo"))


def test_no_key_of_a_mixture_vanishes() -> None:
    entry = {"id": "org/a", "columns": ["messages", "chat_template_kwargs"]}
    other = {"id": "org/b", "columns": ["messages"]}
    made = read({"model_name_or_path": "m/m", "dataset_mixture": {"datasets": [entry, other], "seed": 3}})
    found = dropped(made)
    assert found["dataset_mixture.seed"] is Effect.NONE
    assert found["dataset_mixture.datasets[0].columns"] is Effect.TRAINING
    assert found["dataset_mixture.datasets[1].columns"] is Effect.NONE


def test_layers_that_nobody_names_are_pefts_own(tmp_path: Path) -> None:
    values = {key: value for key, value in LORA.items() if key != "lora_target_modules"}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    reading = read({**values, "model_name_or_path": "./model"}, str(tmp_path / "t.yaml"))
    assert reading.value("adapter.target_modules") == ["q_proj", "v_proj"]
    (tmp_path / "model" / "config.json").write_text('{"model_type": "nobody_knows"}')
    reading = read({**values, "model_name_or_path": "./model"}, str(tmp_path / "t.yaml"))
    assert dropped(reading)["adapter.target_modules"] is Effect.NEEDED


def test_one_name_of_a_layer_is_no_pattern() -> None:
    reading = read({**LORA, "lora_target_modules": "q_proj"})
    assert reading.value("adapter.target_modules") == ["q_proj"]


def test_lora_keys_without_use_peft() -> None:
    reading = read({**FILE, "lora_r": 8, "lora_target_modules": ["q_proj"]})
    assert not any(key.startswith("adapter") for key in reading.taken)
    assert dropped(reading)["lora_r"] is Effect.NONE


def test_the_adapter_of_a_quantised_model_is_kept_in_16_bits() -> None:
    assert read(NF4).value("adapter.autocast_adapter_dtype") is False
    assert "model.dtype" not in read(NF4).taken
    assert read({**NF4, "use_dora": True}).value("adapter.autocast_adapter_dtype") is None


def test_conversations_are_learnt_whole(tmp_path: Path) -> None:
    values = {key: value for key, value in FILE.items() if key != "completion_only_loss"}
    assert dropped(read(values))["data.loss_on"] is Effect.NEEDED
    row = {"messages": [{"role": "user", "content": "hi"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "text.jsonl").write_text('{"text": "hi"}\n')
    chat = read({**values, "dataset_name": "chat.jsonl"}, str(tmp_path / "t.yaml"))
    assert chat.value("data.loss_on") == "all"
    text = read({**values, "dataset_name": "text.jsonl"}, str(tmp_path / "t.yaml"))
    assert "data.loss_on" not in text.taken
    assert not text.dropped
    assert read(CASES["dataset_mixture"][0]).value("data.loss_on") == "all"
    assert "data.loss_on" not in read(values, word="dpo").taken


def test_a_length_without_a_limit_needs_a_word() -> None:
    for values in ({**FILE, "max_length": None}, {**FILE, "max_length": "None"}):
        reading = read(values)
        assert dropped(reading)["data.max_length"] is Effect.NEEDED
        assert "data.max_length" not in reading.taken


@pytest.mark.parametrize(
    ("more", "key", "effect"),
    [
        ({"packing": True, "packing_strategy": "wrapped"}, "packing_strategy", Effect.TRAINING),
        ({"truncation_mode": "keep_end"}, "truncation_mode", Effect.TRAINING),
        ({"loss_type": "dft"}, "loss_type", Effect.TRAINING),
        ({"eos_token": "<e>"}, "eos_token", Effect.TRAINING),
        ({"pad_token": "<p>"}, "pad_token", Effect.NONE),
        ({"attn_implementation": "kernels-community/flash-attn"}, "attn_implementation", Effect.NONE),
        ({"chat_template_path": "org/other"}, "chat_template_path", Effect.TRAINING),
        ({"test_split_size": 500}, "data.eval", Effect.NEEDED),
        ({"dataset_name": "imdb", "eval_strategy": "steps"}, "data.eval", Effect.NEEDED),
        ({"dataset_name": "imdb"}, "dataset_name", Effect.NEEDED),
        ({"dataset_name": "${DATA}"}, "dataset_name", Effect.NEEDED),
        ({"learning_rate": "$LR"}, "trainer.learning_rate", Effect.NEEDED),
        ({"dataset_train_split": "train[:10%]"}, "dataset_name split", Effect.TRAINING),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "CUDA_VISIBLE_DEVICES", Effect.NONE),
        ({"output_dir": "out"}, "output_dir", Effect.NONE),
        ({"predict_with_generate": True}, "predict_with_generate", Effect.TRAINING),
        ({"learning_rat": 1}, "learning_rat", Effect.TRAINING),
        (
            {"dataset_kwargs": {"add_special_tokens": True}},
            "dataset_kwargs.add_special_tokens",
            Effect.TRAINING,
        ),
        ({"model_init_kwargs": {"rope": 1}}, "model_init_kwargs.rope", Effect.TRAINING),
        ({"datasets": [{"path": "org/a", "fraction": 0.5}]}, "datasets[0].fraction", Effect.TRAINING),
        ({"datasets": [{"path": "org/a", "data_files": "x.json"}]}, "datasets[0].data_files", Effect.NEEDED),
    ],
)
def test_what_is_left(more: dict[str, Any], key: str, effect: Effect) -> None:
    assert dropped(read({**FILE, **more}))[key] is effect


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"lora_task_type": "SEQ_CLS"}, "lora_task_type"),
        ({"dataset_kwargs": {"skip_prepare_dataset": True}}, "dataset_kwargs"),
        ({"load_in_4bit": True}, "use_peft"),
        ({"use_peft": True, "load_in_4bit": True, "load_in_8bit": True}, "load_in_8bit"),
    ],
)
def test_another_kind_of_training_is_refused(more: dict[str, Any], key: str) -> None:
    assert [problem.path for problem in read({**FILE, **more}).refusals] == [key]


def test_where_rows_lie(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"text": "a"}\n')
    file = str(tmp_path / "t.yaml")
    assert read({**FILE, "dataset_name": "rows"}, file).value("data.train") == [{"path": "rows/train.jsonl"}]
    listed = {**FILE, "dataset_name": None, "datasets": [{"path": "json", "data_files": "rows/train.jsonl"}]}
    assert read(listed, file).value("data.train") == [{"path": "rows/train.jsonl"}]
    tested = read({**FILE, "dataset_name": "rows", "eval_strategy": "epoch"}, file)
    assert dropped(tested)["dataset_test_split"] is Effect.NEEDED
    assert "data.eval" not in read({**FILE, "dataset_test_split": "test"}).taken


def test_profiles_of_accelerate() -> None:
    assert read({**FILE, "accelerate_config": "fsdp2"}).value("sharding.engine") == "fsdp"
    assert set(read({**FILE, "accelerate_config": "own.yaml"}).names) == {"own.yaml"}
    assert "sharding.engine" not in read({**FILE, "accelerate_config": "single_gpu"}).taken


def test_secrets_are_not_repeated() -> None:
    reading = read({**FILE, "env": {"WANDB_API_KEY": "0123456789abcdef"}, "hub_token": "hf_abcdefghijklmnop"})
    assert "0123456789abcdef" not in str(reading)
    assert "hf_abcdefghijklmnop" not in str(reading)
    assert {"WANDB_API_KEY", "hub_token"} <= set(dropped(reading))


@pytest.mark.parametrize("value", ["many", -1, 0, [], {}, [[1]], "\x1b[31m", "9" * 400, 1e308, True, ".nan"])
def test_hostile_values_are_listed(value: Any) -> None:
    for key in (*CASES, "warmup_ratio", "max_steps", "loss_type", "eval_strategy", "dataset_kwargs"):
        assert key in read({**LORA, key: value}).seen, (key, value)
    with pytest.raises(RecipeError):
        trl.read("a: [", "t.yaml")


def test_whose_file_it_is() -> None:
    assert trl.is_recipe(FILE)
    assert trl.is_recipe({"model_name_or_path": "m", "learning_rate": 1e-4})
    assert trl.is_recipe({"model_name_or_path": "m", "datasets": [{"path": "a/b"}]})
    assert not trl.is_recipe({"model_name_or_path": "m"})
    assert not trl.is_recipe({"base_model": "m", "datasets": []})
    assert not read(FILE).dropped


@pytest.mark.parametrize(
    ("more", "key", "wanted"),
    [
        ({"use_fsdp": True}, "sharding.engine", "fsdp"),
        ({"use_deepspeed": True}, "sharding.zero_stage", 2),
        ({"use_deepspeed": True, "zero_stage": 3}, "sharding.zero_stage", 3),
        ({"mixed_precision": "fp16"}, "precision", "bf16"),
        ({"mixed_precision": "fp16", "bf16": False}, "precision", "fp16"),
        ({"dynamo_backend": "inductor"}, "trainer.torch_compile", True),
    ],
)
def test_options_of_accelerate_launch_are_taken_as_trl_hands_them_on(
    more: dict[str, Any], key: str, wanted: object
) -> None:
    reading = read({**FILE, **more})
    assert reading.value(key) == wanted
    assert set(more) <= reading.seen
    assert Effect.TRAINING not in dropped(reading).values()


def test_a_config_file_of_accelerate_is_followed_and_what_nobody_knows_is_listed() -> None:
    assert list(read({**FILE, "config_file": "a.yaml"}).names) == ["a.yaml"]
    assert dropped(read({**FILE, "my_option": 3}))["my_option"] is Effect.TRAINING


@pytest.mark.parametrize(
    ("more", "norms"),
    [({"dtype": "bfloat16"}, "bfloat16"), ({}, None), ({"dtype": "bfloat16", "bf16": False}, None)],
)
def test_norms_of_a_quantised_model_have_its_dtype(more: dict[str, Any], norms: str | None) -> None:
    assert read({**NF4, **more}).value("model.kbit_norms") == norms


@every(
    "values",
    [
        {"truncation_mode": "keep_start"},
        {"truncation_mode": "keep_start", "precompute_ref_log_probs": True},
        {"loss_type": "chunked_nll"},
        {"lora_task_type": "CAUSAL_LM"},
        {"packing": True, "packing_strategy": "bfd"},
    ],
)
def test_values_that_trl_has_here_are_not_listed(values: dict[str, Any]) -> None:
    reading = read({**FILE, **values})
    assert not {*values} & {entry.key for entry in reading.dropped}
    assert not reading.refusals
