"""Vision-language trainings of axolotl, LLaMA-Factory and TRL as recipes: the keys of their own examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.importing import axolotl, llamafactory, trl
from launcher.importing.reading import Effect, Reading

TASK = "image-text-to-text"
_LAYERS = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
AXOLOTL: dict[str, Any] = {
    "base_model": "org/vlm",
    "processor_type": "AutoProcessor",
    "skip_prepare_dataset": True,
    "remove_unused_columns": False,
    "sample_packing": False,
    "chat_template": "gemma3",
    "datasets": [{"path": "org/vqa", "type": "chat_template", "split": "train[:1%]", "field_messages": "m"}],
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_modules": _LAYERS,
    "sequence_len": 2048,
    "learning_rate": 2e-4,
}
LLAMAFACTORY: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct",
    "image_max_pixels": 262144,
    "video_max_pixels": 16384,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "dataset": "vqa,alpaca",
    "template": "qwen3_vl_nothink",
    "learning_rate": 1e-4,
    "bf16": True,
}
_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
INFO: dict[str, Any] = {
    "vqa": {
        "file_name": "vqa.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "pictures"},
        "tags": _TAGS,
    },
    "alpaca": {"file_name": "alpaca.json"},
    "film": {
        "file_name": "film.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "videos": "videos"},
        "tags": _TAGS,
    },
    "question": {
        "file_name": "question.json",
        "columns": {"prompt": "q", "response": "a", "images": "pictures"},
    },
}


def of_axolotl(**more: Any) -> Reading:
    return axolotl.read(yaml.safe_dump({**AXOLOTL, **more}), "a.yaml")


def of_llamafactory(info: Any = INFO, **more: Any) -> Reading:
    given = None if info is None else (info, "dataset_info.json")
    return llamafactory.read(yaml.safe_dump({**LLAMAFACTORY, **more}), "l.yaml", info=given)


def of_trl(**values: Any) -> Reading:
    return trl.read(yaml.safe_dump({"model_name_or_path": "org/vlm", **values}), "t.yaml")


def check_read(reading: Reading, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert not reading.refusals
    assert {*given} <= reading.seen
    assert {key: reading.value(key) for key in expected} == expected


def effects(reading: Reading) -> dict[str, Effect]:
    return {entry.key: entry.effect for entry in reading.dropped}


def hooked(reading: Reading, row: dict[str, Any]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(reading.texts["_hooks.py"], "hooks.py", "exec"), names)
    found: dict[str, Any] = names["format_row"](row)
    return found


def test_an_axolotl_recipe_with_a_processor_trains_on_images() -> None:
    reading = of_axolotl()
    check_read(reading, AXOLOTL, {
        "task": TASK,
        "model.freeze": [],
        "data.train": [{"path": "org/vqa", "format": "image-chat", "columns": {"messages": "m"}}],
        "adapter.target_modules": _LAYERS,
        "data.max_length": 2048,
        "data.overlong": "drop",
        "data.packing": None,
    })  # fmt: skip
    assert effects(reading)["chat_template"] is Effect.TRAINING
    assert effects(reading)["sequence_len"] is Effect.TRAINING
    assert "skip_prepare_dataset" not in effects(reading)


def test_what_axolotl_does_with_images_and_a_recipe_cannot_is_listed() -> None:
    reading = of_axolotl(image_size=512, image_resize_algorithm="bilinear", processor_kwargs={"a": 1},
                         unfrozen_parameters=["^lm_head"], sample_packing=True)  # fmt: skip
    keys = (
        "image_size",
        "image_resize_algorithm",
        "processor_kwargs",
        "unfrozen_parameters",
        "sample_packing",
    )
    assert {key: effects(reading).get(key) for key in keys} == dict.fromkeys(keys, Effect.TRAINING)
    other = of_axolotl(datasets=[{"path": "org/rows", "type": "alpaca"}])
    assert effects(other)["datasets[0].type"] is Effect.NEEDED
    assert of_axolotl(rl="dpo").refusals[0].path == "processor_type"


def test_without_a_processor_axolotl_trains_on_text() -> None:
    reading = of_axolotl(processor_type=None, skip_prepare_dataset=False, freeze_mm_modules=True)
    assert reading.value("task") is None
    assert reading.value("data.train")[0]["format"] == "chat"
    assert effects(reading)["freeze_mm_modules"] is Effect.NONE
    assert [problem.path for problem in of_axolotl(processor_type=None).refusals] == ["skip_prepare_dataset"]


def test_a_hook_for_other_names_of_roles_keeps_the_images() -> None:
    names = {"role": "who", "content": "says"}
    reading = of_axolotl(
        datasets=[{"path": "org/vqa", "type": "chat_template", "message_property_mappings": names}]
    )
    row = {"messages": [{"who": "human", "says": "<image>?"}], "image": "a.png"}
    assert hooked(reading, row) == {
        "messages": [{"role": "user", "content": "<image>?"}],
        "images": "a.png",
    }


def test_a_llamafactory_recipe_whose_data_sets_have_images() -> None:
    reading = of_llamafactory()
    check_read(reading, LLAMAFACTORY, {
        "task": TASK,
        "model.freeze": ["vision", "projector"],
        "model.image_sizes": {"max_pixels": 262144},
        "data.train": [
            {"path": "vqa.json", "format": "image-chat", "columns": {"images": "pictures"}},
            {"path": "alpaca.json", "format": "image-chat"},
        ],
    })  # fmt: skip
    assert effects(reading)["template"] is Effect.TRAINING
    assert effects(reading)["video_max_pixels"] is Effect.NONE


def test_the_limit_of_pixels_that_llamafactory_has_by_itself_is_written() -> None:
    reading = of_llamafactory(image_max_pixels=None)
    taken = reading.taken["model.image_sizes"]
    assert (taken.value, taken.is_default) == ({"max_pixels": 589824}, True)
    other = of_llamafactory(model_name_or_path="llava-hf/llava-1.5-7b-hf", template="llava")
    assert other.value("model.image_sizes") is None
    assert effects(other)["image_max_pixels"] is Effect.TRAINING


def test_an_exchange_of_columns_keeps_the_images() -> None:
    reading = of_llamafactory(dataset="question")
    assert reading.value("data.train") == [{"path": "question.json", "format": "image-chat"}]
    assert hooked(reading, {"q": "<image>?", "a": "A cat", "pictures": ["a.png"]})["images"] == ["a.png"]


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"dataset": "film"}, "dataset: film"),
        ({"freeze_language_model": True}, "freeze_language_model"),
        ({"stage": "pt"}, "stage"),
    ],
)
def test_of_llamafactory_is_refused(more: dict[str, Any], path: str) -> None:
    assert path in [problem.path for problem in of_llamafactory(**more).refusals]


def test_what_llamafactory_does_with_images_and_a_recipe_cannot_is_listed() -> None:
    reading = of_llamafactory(media_dir="media", neat_packing=True, streaming=True, max_steps=9)
    found = effects(reading)
    assert found["media_dir"] is Effect.NEEDED
    assert found["neat_packing"] is Effect.TRAINING
    assert found["streaming"] is Effect.NONE
    assert "data.packing" not in reading.taken


def test_keys_of_images_decide_where_no_dataset_info_is_there(tmp_path: Path) -> None:
    assert of_llamafactory(None, dataset_dir=str(tmp_path)).value("task") == TASK
    text = of_llamafactory(None, dataset_dir=str(tmp_path), image_max_pixels=None)
    assert text.value("task") == "causal-lm"
    assert of_llamafactory(dataset="alpaca,undescribed").value("task") == TASK
    alone = of_llamafactory(dataset="alpaca")
    assert alone.value("task") == "causal-lm"
    assert effects(alone)["image_max_pixels"] is Effect.NONE


def test_rows_that_are_here_tell_trl_sft_that_they_have_images(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [], "images": []}) + "\n")
    reading = of_trl(dataset_name=str(rows), packing=True, dataset_kwargs={"skip_prepare_dataset": True})
    assert not reading.refusals
    assert reading.value("task") == TASK
    assert reading.value("data.loss_on") == "all"
    assert effects(reading)["packing"] is Effect.TRAINING
    rows.write_text(json.dumps({"messages": []}) + "\n")
    text = of_trl(dataset_name=str(rows), dataset_kwargs={"skip_prepare_dataset": True})
    assert text.value("task") is None
    assert [problem.path for problem in text.refusals] == ["dataset_kwargs"]
