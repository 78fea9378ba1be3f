"""LLaMA-Factory's YAML as keys of a recipe: each key, its defaults, its data sets, and what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from every import every
from migration_tables import HANDLED

from launcher.errors import RecipeError
from launcher.importing import llamafactory
from launcher.importing.llamafactory import TABLES
from launcher.importing.reading import Effect, Reading
from launcher.recipe.field_tables import trainer_fields

FILE: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "stage": "sft",
    "do_train": True,
    "dataset": "chats",
    "learning_rate": 1e-4,
}
INFO: dict[str, Any] = {
    "chats": {"hf_hub_url": "org/chats", "formatting": "sharegpt"},
    "texts": {"hf_hub_url": "org/texts", "columns": {"prompt": "text"}},
    "tasks": {"hf_hub_url": "org/tasks", "ms_hub_url": "x/tasks"},
    "vqa": {
        "hf_hub_url": "org/vqa",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "pictures"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    },
    "judged": {
        "hf_hub_url": "org/judged",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "good"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    },
    "ranked": {
        "hf_hub_url": "org/ranked",
        "subset": "en",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
}
KTO = {"stage": "kto", "dataset": "judged"}
DPO = {"stage": "dpo", "dataset": "ranked"}
IMAGES = {"dataset": "vqa", "template": "qwen2_vl"}

# key -> (what the file says beside FILE, recipe key, value)
CASES: dict[str, tuple[dict[str, Any], str, Any]] = {
    "model_name_or_path": ({}, "model.name_or_path", "org/model"),
    "model_revision": ({"model_revision": "v1"}, "model.revision", "v1"),
    "cache_dir": ({"cache_dir": "c"}, "model.cache_dir", "c"),
    "trust_remote_code": ({"trust_remote_code": True}, "model.trust_remote_code", True),
    "enable_liger_kernel": ({"enable_liger_kernel": True}, "trainer.use_liger_kernel", True),
    "preprocessing_num_workers": ({"preprocessing_num_workers": 4}, "data.num_proc", 4),
    "kto_chosen_weight": ({**KTO, "kto_chosen_weight": 0.5}, "trainer.desirable_weight", 0.5),
    "kto_rejected_weight": ({**KTO, "kto_rejected_weight": 2.0}, "trainer.undesirable_weight", 2.0),
    "cutoff_len": ({"cutoff_len": 512}, "data.max_length", 512),
    "streaming": ({"streaming": True, "max_steps": 9}, "data.streaming", True),
    "lora_rank": ({"lora_rank": 4}, "adapter.lora_alpha", 8),
    "lora_alpha": ({"lora_alpha": 4}, "adapter.lora_alpha", 4),
    "lora_dropout": ({"lora_dropout": 0.1}, "adapter.lora_dropout", 0.1),
    "use_rslora": ({"use_rslora": True}, "adapter.use_rslora", True),
    "use_dora": ({"use_dora": "yes"}, "adapter.use_dora", True),
    "additional_target": (
        {"additional_target": "embed_tokens,lm_head"},
        "adapter.modules_to_save",
        ["embed_tokens", "lm_head"],
    ),
    "pref_beta": ({**DPO, "pref_beta": 0.3}, "trainer.beta", 0.3),
    "pref_loss": ({**DPO, "pref_loss": "hinge"}, "trainer.loss_type", "hinge"),
    "dpo_label_smoothing": ({**DPO, "dpo_label_smoothing": 0.1}, "trainer.label_smoothing", 0.1),
    "ld_alpha": ({**DPO, "ld_alpha": 0.5}, "trainer.ld_alpha", 0.5),
    "stage": (DPO, "task", "dpo"),
    "finetuning_type": ({"finetuning_type": "lora"}, "adapter.type", "lora"),
    "lora_target": ({"lora_target": "q_proj, v_proj"}, "adapter.target_modules", ["q_proj", "v_proj"]),
    "pissa_init": ({"pissa_init": True}, "adapter.init_lora_weights", "pissa"),
    "pissa_iter": ({"pissa_init": True, "pissa_iter": 16}, "adapter.init_lora_weights", "pissa"),
    "adapter_name_or_path": ({"adapter_name_or_path": "old"}, "adapter.path", "old"),
    "quantization_bit": ({"quantization_bit": 8}, "model.quantization", {"type": "int8"}),
    "quantization_type": (
        {"quantization_bit": 4, "quantization_type": "fp4"},
        "model.quantization",
        {"type": "fp4", "double_quant": True},
    ),
    "double_quantization": (
        {"quantization_bit": 4, "double_quantization": False},
        "model.quantization",
        {"type": "nf4", "double_quant": False},
    ),
    "quantization_method": (
        {"quantization_bit": 4, "quantization_method": "bnb"},
        "model.quantization",
        {"type": "nf4", "double_quant": True},
    ),
    "flash_attn": ({"flash_attn": "fa2"}, "model.attn_implementation", "flash_attention_2"),
    "add_tokens": ({"add_tokens": "<a>,<b>"}, "model.add_tokens", ["<a>", "<b>"]),
    "new_special_tokens": ({"new_special_tokens": "<d>, <e>"}, "model.add_tokens", ["<d>", "<e>"]),
    "add_special_tokens": ({"add_special_tokens": "<c>"}, "model.add_tokens", ["<c>"]),
    "pure_bf16": ({"pure_bf16": True}, "precision", "bf16-true"),
    "bf16": ({"bf16": True}, "precision", "bf16"),
    "fp16": ({"fp16": True}, "precision", "fp16"),
    "disable_gradient_checkpointing": (
        {"disable_gradient_checkpointing": True},
        "trainer.activation_checkpointing",
        False,
    ),
    "use_reentrant_gc": (
        {"use_reentrant_gc": False},
        "trainer.activation_checkpointing_kwargs",
        {"use_reentrant": False},
    ),
    "packing": ({"packing": True}, "data.packing", True),
    "neat_packing": ({"neat_packing": True}, "data.packing", True),
    "template": ({"template": "llama3"}, "model.chat_template", None),
    "train_on_prompt": ({"train_on_prompt": True}, "data.loss_on", "all"),
    "mask_history": ({"mask_history": True}, "data.loss_on", "completion"),
    "dataset": (
        {},
        "data.train",
        [{"path": "org/chats", "format": "chat", "columns": {"messages": "conversations"}}],
    ),
    "dataset_dir": (
        {"dataset_dir": "ONLINE", "dataset": "org/live"},
        "data.train",
        [{"path": "org/live", "format": "chat"}],
    ),
    "eval_dataset": ({"eval_dataset": "tasks"}, "data.eval", [{"path": "org/tasks", "format": "chat"}]),
    "val_size": ({"val_size": 0.1}, "data.eval", {"split": 0.1}),
    "mix_strategy": ({"mix_strategy": "concat"}, "data.max_length", 2048),
    "compute_accuracy": ({"compute_accuracy": True, "val_size": 0.1}, "data.metrics", ["accuracy"]),
    "early_stopping_steps": ({"early_stopping_steps": 3}, "early_stopping.patience", 3),
    "disable_shuffling": ({"disable_shuffling": True}, "trainer.train_sampling_strategy", "sequential"),
    "do_train": ({}, "task", "causal-lm"),
    "freeze_vision_tower": ({**IMAGES, "freeze_vision_tower": False}, "model.freeze", ["projector"]),
    "freeze_multi_modal_projector": (
        {**IMAGES, "freeze_multi_modal_projector": False},
        "model.freeze",
        ["vision"],
    ),
    "image_max_pixels": (
        {**IMAGES, "image_max_pixels": 262144},
        "model.image_sizes",
        {"max_pixels": 262144},
    ),
    "image_min_pixels": (
        {**IMAGES, "image_min_pixels": 4096},
        "model.image_sizes",
        {"min_pixels": 4096, "max_pixels": 589824},
    ),
    "image_do_pan_and_scan": (
        {**IMAGES, "template": "gemma3", "image_do_pan_and_scan": True},
        "model.image_sizes",
        {"do_pan_and_scan": True},
    ),
    "crop_to_patches": (
        {**IMAGES, "template": "intern_vl", "crop_to_patches": True},
        "model.image_sizes",
        {"crop_to_patches": True},
    ),
    "freeze_language_model": ({**IMAGES, "freeze_language_model": False}, "task", "image-text-to-text"),
    "media_dir": ({**IMAGES, "media_dir": "images"}, "task", "image-text-to-text"),
}


def read(values: dict[str, Any], file: str = "l.yaml", info: dict[str, Any] | None = None) -> Reading:
    text = yaml.safe_dump(values, sort_keys=False)
    return llamafactory.read(text, file, info=(info or INFO, "dataset_info.json"))


def dropped(reading: Reading) -> dict[str, Effect]:
    return {entry.key: entry.effect for entry in reading.dropped}


def format_row(reading: Reading) -> Any:
    names: dict[str, Any] = {}
    exec(compile(reading.texts["_hooks.py"], "hooks.py", "exec"), names)
    return names["format_row"]


def test_every_mapped_key_has_a_case() -> None:
    named = {*TABLES} | {row[0] for row in HANDLED["llamafactory"]}
    assert named == set(CASES)


@every("key", CASES)
def test_a_key_is_taken_and_none_vanishes(key: str) -> None:
    more, to, expected = CASES[key]
    reading = read({**FILE, **more})
    assert reading.value(to) == expected
    assert not reading.refusals
    assert {*FILE, *more} <= reading.seen


def test_every_key_of_the_tool_is_taken_or_listed() -> None:
    for value in ("x", 3, [1], {"a": 1}, True):
        keys = sorted({*llamafactory.tool().keys, *trainer_fields()})
        for at in range(0, len(keys), 15):
            some = keys[at : at + 15]
            assert set(some) <= read({**FILE, **dict.fromkeys(some, value)}).seen, value


def test_the_tables_name_keys_of_the_tool_once() -> None:
    left = [name for entry in llamafactory.tool().left["keys"] for name in entry.names]
    of_ray = "ray_run_name ray_storage_path ray_storage_filesystem placement_strategy resources_per_worker"
    earlier = set(of_ray.split())
    assert dropped(read({**FILE, **dict.fromkeys(earlier, "x")})) == dict.fromkeys(earlier, Effect.NONE)
    known = {*llamafactory.tool().keys, *trainer_fields("seq2seq-lm"), *earlier}
    assert len(left) == len(set(left))
    assert set(left) <= known
    assert not set(left) & set(CASES) - {"mix_strategy"}


def test_what_the_tool_uses_where_the_file_is_silent() -> None:
    reading = read(FILE)
    expected = {
        "adapter.type": "lora",
        "adapter.r": 8,
        "adapter.lora_alpha": 16,
        "adapter.lora_dropout": 0.0,
        "adapter.target_modules": "all-linear",
        "data.max_length": 2048,
        "data.overlong": "truncate",
        "precision": "fp32",
        "trainer.num_train_epochs": 3.0,
    }
    assert {key: reading.value(key) for key in expected} == expected
    assert read({**FILE, "learning_rate": None}).value("trainer.learning_rate") == 5e-5
    assert not any(key.startswith("adapter") for key in read({**FILE, "finetuning_type": "full"}).taken)
    texts = read({**FILE, "stage": "pt", "dataset": "texts", "template": "llama3"})
    assert texts.value("data.packing") is True
    assert texts.value("data.overlong") == "split"
    assert dropped(texts) == {"packing": Effect.TRAINING, "template": Effect.NONE}
    assert texts.value("data.train") == [{"path": "org/texts", "format": "text"}]
    cut = read({**FILE, "stage": "pt", "dataset": "texts", "packing": False})
    assert cut.value("data.overlong") == "truncate"
    assert cut.value("data.packing") is None


def test_arguments_of_transformers_are_taken_as_such() -> None:
    more = {
        "warmup_ratio": 0.1,
        "evaluation_strategy": "no",
        "deepspeed": "z3.json",
        "beta": 1,
        "ddp_timeout": 9,
    }
    reading = read({**FILE, **more, "predict_with_generate": True})
    assert reading.value("trainer.warmup_steps") == 0.1
    assert reading.value("trainer.ddp_timeout") == 9
    assert set(reading.names) == {"z3.json"}
    assert dropped(reading) == {"beta": Effect.TRAINING, "predict_with_generate": Effect.NONE}


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"stage": "rm"}, "dataset: chats"),
        ({"stage": "ppo"}, "stage"),
        ({"stage": "kto"}, "dataset: chats"),
        ({"stage": "kto", "dataset": "ranked"}, "dataset: ranked"),
        ({"dataset": "judged"}, "dataset: judged"),
        ({"finetuning_type": "freeze"}, "finetuning_type"),
        ({"finetuning_type": "oft"}, "finetuning_type"),
        ({"do_train": False}, "do_train"),
        ({"quantization_bit": 3}, "quantization_bit"),
        ({"quantization_bit": 4, "quantization_method": "hqq"}, "quantization_method"),
        ({"adapter_name_or_path": "a,b"}, "adapter_name_or_path"),
        ({"fp8": True}, "fp8"),
        ({"use_mca": True}, "use_mca"),
        ({"tokenized_path": "t"}, "tokenized_path"),
        ({**DPO, "pref_loss": "orpo"}, "pref_loss"),
        ({**DPO, "pref_loss": "kto_pair"}, "pref_loss"),
        ({"dataset": "ranked"}, "dataset: ranked"),
        ({"train_from_scratch": True}, "train_from_scratch"),
    ],
)
def test_another_kind_of_training_is_refused(more: dict[str, Any], key: str) -> None:
    assert [problem.path for problem in read({**FILE, **more}).refusals] == [key]


def test_labelled_answers() -> None:
    reading = read({**FILE, **KTO, "pref_beta": 0.2, "kto_rejected_weight": 2.0, "pref_loss": "sigmoid"})
    found = {key: taken.value for key, taken in reading.taken.items()}
    assert not reading.refusals
    assert (found["task"], found["trainer.beta"], found["trainer.undesirable_weight"]) == ("kto", 0.2, 2.0)
    assert found["data.train"] == [
        {"path": "org/judged", "format": "unpaired-chat", "columns": {"label": "good"}}
    ]
    assert dropped(reading) == {"pref_loss": Effect.NONE, "stage: kto": Effect.TRAINING}
    columns = {"prompt": "q", "response": "a", "kto_tag": "good"}
    made = format_row(entry({"columns": columns}, "kto"))({"q": "Q", "a": "A", "good": False})
    assert made["label"] is False
    assert [turn["content"] for turn in made["messages"]] == ["Q", "A"]


def test_a_reward_model() -> None:
    reading = read({**FILE, **DPO, "stage": "rm", "pref_beta": 0.2, "cutoff_len": 512})
    assert not reading.refusals
    found = {key: taken.value for key, taken in reading.taken.items()}
    assert (found["task"], found["data.overlong"], found["data.max_length"]) == ("reward", "drop", 512)
    assert "trainer.beta" not in found
    assert found["data.train"][0]["format"] == "preference"
    assert dropped(reading) == {
        "pref_beta": Effect.NONE, "cutoff_len": Effect.TRAINING, "stage: rm": Effect.TRAINING
    }  # fmt: skip


@every(
    ("more", "key", "effect"),
    [
        ({"max_samples": 1000}, "max_samples", Effect.TRAINING),
        ({"template": "qwen"}, "template", Effect.TRAINING),
        ({"loraplus_lr_ratio": 16.0}, "loraplus_lr_ratio", Effect.TRAINING),
        ({"use_galore": True}, "use_galore", Effect.TRAINING),
        ({"ignore_pad_token_for_loss": False}, "ignore_pad_token_for_loss", Effect.TRAINING),
        ({"use_galore": True, "galore_rank": 128}, "galore_rank", Effect.TRAINING),
        ({"use_galore": False, "galore_rank": 128}, "galore_rank", Effect.NONE),
        ({"use_apollo": True, "galore_rank": 128, "apollo_rank": 3}, "apollo_rank", Effect.TRAINING),
        ({"use_badam": True, "badam_verbose": 2}, "badam_verbose", Effect.TRAINING),
        ({"use_asft_loss": True, "asft_alpha": 0.05}, "asft_alpha", Effect.TRAINING),
        (
            {"loraplus_lr_ratio": 16.0, "loraplus_lr_embedding": 1e-4},
            "loraplus_lr_embedding",
            Effect.TRAINING,
        ),
        ({"plot_loss": True}, "plot_loss", Effect.NONE),
        ({"rope_scaling": "linear"}, "rope_scaling", Effect.TRAINING),
        ({"enable_thinking": False}, "enable_thinking", Effect.TRAINING),
        ({"mix_strategy": "interleave_under"}, "mix_strategy", Effect.TRAINING),
        ({"val_size": 500}, "data.eval", Effect.NEEDED),
        ({"packing": True}, "packing", Effect.TRAINING),
        ({"cutoff_length": 9}, "cutoff_length", Effect.TRAINING),
        ({"finetuning_type": "full", "lora_rank": 8}, "lora_rank", Effect.NONE),
        ({"cutoff_len": "long"}, "cutoff_len", Effect.NEEDED),
        ({"model_name_or_path": "${MODEL}"}, "model.name_or_path", Effect.NEEDED),
        ({"learning_rate": "$LR"}, "trainer.learning_rate", Effect.NEEDED),
        ({"pref_beta": 0.3}, "pref_beta", Effect.NONE),
    ],
)
def test_what_is_left(more: dict[str, Any], key: str, effect: Effect) -> None:
    assert dropped(read({**FILE, **more}))[key] is effect


def entry(more: dict[str, Any], stage: str = "sft") -> Reading:
    info = {"it": {"hf_hub_url": "org/it", **more}}
    return read({**FILE, "stage": stage, "dataset": "it"}, info=info)


def test_alpaca_rows_are_chats_there() -> None:
    row = {"instruction": "Add", "input": "1 and 2", "output": "3"}
    reading = entry({})
    assert reading.value("data.train") == [{"path": "org/it", "format": "chat"}]
    assert format_row(reading)(row) == {
        "messages": [{"role": "user", "content": "Add\n1 and 2"}, {"role": "assistant", "content": "3"}]
    }
    columns = {"prompt": "q", "response": "a", "system": "s", "history": "h"}
    row = {"q": "Now?", "a": "Yes", "input": "unread", "s": "Be kind", "h": [["Hi", "Ho"]]}
    assert format_row(entry({"columns": columns}))(row)["messages"] == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "Now?"},
        {"role": "assistant", "content": "Yes"},
    ]
    ranked = entry({"ranking": True, "columns": {"prompt": "q", "chosen": "c", "rejected": "r"}}, "dpo")
    made = format_row(ranked)({"q": "Q", "c": "C", "r": "R"})
    assert made["prompt"] == [{"role": "user", "content": "Q"}]
    assert made["rejected"] == [{"role": "assistant", "content": "R"}]


def test_messages_and_their_tags() -> None:
    openai = {
        "formatting": "openai",
        "columns": {"messages": "messages", "tools": "tools"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    }
    assert entry(openai).value("data.train") == [{"path": "org/it", "format": "chat"}]
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "U", "assistant_tag": "A"}
    own = entry({"formatting": "sharegpt", "tags": tags, "columns": {"messages": "turns", "system": "sys"}})
    row = {"turns": [{"who": "U", "says": "hi"}, {"who": "A", "says": "ho"}], "sys": "S"}
    assert format_row(own)(row)["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
    ]
    assert read({**FILE, **DPO}).value("data.train") == [
        {"path": "org/ranked", "name": "en", "format": "preference", "columns": {"prompt": "conversations"}}
    ]
    assert entry({"columns": {"messages": "m", "videos": "i"}, "formatting": "sharegpt"}).refusals


@pytest.mark.parametrize(
    "more",
    [
        {"hf_hub_url": "wiki_qa"},
        {"hf_hub_url": None, "ms_hub_url": "x/y"},
        {"hf_hub_url": None, "script_url": "s"},
        {"folder": "sub"},
        {"columns": {"query": "q"}},
        {"formatting": "sharegpt", "columns": {"prompt": "q"}},
        {"hf_hub_url": None, "cloud_file_name": "s3://x"},
    ],
)
def test_rows_that_need_a_word(more: dict[str, Any]) -> None:
    reading = entry(more)
    assert dropped(reading)["data.train"] is Effect.NEEDED
    assert any(found.key.startswith("dataset: it") for found in reading.dropped)


def test_dataset_info_is_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.json").write_text("[]")
    info = {"rows": {"file_name": "rows.json", "num_samples": 5}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "examples" / "lora").mkdir(parents=True)
    text = yaml.safe_dump({**FILE, "dataset": "rows, other"})
    near = llamafactory.read(text, str(tmp_path / "l.yaml"))
    assert near.value("data.train") == [{"path": "data/rows.json", "format": "chat"}]
    assert dropped(near)["dataset: rows num_samples"] is Effect.TRAINING
    assert dropped(near)["dataset: other"] is Effect.NEEDED
    inner = llamafactory.read(text, str(tmp_path / "examples" / "lora" / "l.yaml"))
    assert inner.value("data.train") == [{"path": "../../data/rows.json", "format": "chat"}]
    (tmp_path / "data" / "dataset_info.json").write_text("[" * 100_000)
    lost = llamafactory.read(text, str(tmp_path / "l.yaml"))
    assert dropped(lost)["dataset: rows"] is Effect.NEEDED
    assert llamafactory.is_dataset_info(info)
    assert not llamafactory.is_dataset_info({"a": {"path": "x"}})


def test_secrets_are_not_repeated() -> None:
    reading = read({**FILE, "hf_hub_token": "hf_abcdefghijklmnop", "swanlab_api_key": "s" * 12})
    assert "hf_abcdefghijklmnop" not in str(reading)
    assert "s" * 12 not in str(reading)
    assert {"hf_hub_token", "swanlab_api_key"} <= set(dropped(reading))


@pytest.mark.parametrize(
    "value",
    ["many", -1, 0, [], {}, [[1]], "\x1b[31m", "9" * 400, 1e308, True, ".nan", float("inf"), float("nan")],
)
def test_hostile_values_are_listed(value: Any) -> None:
    for key in (*CASES, "warmup_ratio", "max_steps", "save_steps", "dataloader_num_workers"):
        if key == "model_name_or_path":
            continue
        assert key in read({**FILE, key: value}).seen, (key, value)


def test_broken_yaml_is_an_error() -> None:
    with pytest.raises(RecipeError):
        llamafactory.read("a: [", "l.yaml")


def test_columns_that_nobody_reads_there_are_left_out(tmp_path: Path) -> None:
    row = {"conversations": [{"from": "human", "value": "a"}], "system": "s", "tools": "", "n": 1}
    (tmp_path / "rows.json").write_text(json.dumps([row, row], indent=1))
    info = {"mine": {"file_name": "rows.json", "formatting": "sharegpt"}}
    text = yaml.safe_dump({**FILE, "dataset": "mine"})
    reading = llamafactory.read(text, str(tmp_path / "l.yaml"), (info, str(tmp_path / "i.json")))
    (source,) = reading.value("data.train")
    assert source["columns"]["system"] is None
    assert "n" not in source["columns"]
    (tmp_path / "rows.json").write_text(json.dumps({"data": [row]}))
    reading = llamafactory.read(text, str(tmp_path / "l.yaml"), (info, str(tmp_path / "i.json")))
    assert reading.value("data.train")[0]["columns"] == {"messages": "conversations"}


def test_whose_file_it_is() -> None:
    assert llamafactory.is_recipe(FILE)
    assert llamafactory.is_recipe({"model_name_or_path": "m", "dataset": "a,b"})
    assert not llamafactory.is_recipe({"model_name_or_path": "m", "dataset_name": "a/b", "lora_r": 8})
    without = {key: value for key, value in FILE.items() if key != "model_name_or_path"}
    assert llamafactory.is_recipe(without)
    assert dropped(read(without))["model.name_or_path"] is Effect.NEEDED
    assert not read(FILE).dropped


_QLORA = {"finetuning_type": "lora", "quantization_bit": 4, "bf16": True}


@pytest.mark.parametrize(
    ("more", "norms"),
    [
        ({}, "bfloat16"),
        ({"upcast_layernorm": True}, None),
        ({"bf16": False, "fp16": True}, None),
        ({"bf16": False, "pure_bf16": True}, "bfloat16"),
        ({"additional_target": "embed_tokens"}, None),
    ],
)
def test_norms_of_a_quantised_model_are_in_16_bits_there(more: dict[str, Any], norms: str | None) -> None:
    assert read({**FILE, **_QLORA, **more}).value("model.kbit_norms") == norms
