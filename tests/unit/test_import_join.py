"""Several files as one recipe."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from every import every

from launcher.errors import RecipeError
from launcher.importing.axolotl import SHIPPED
from launcher.importing.importers import LARGEST, read_file
from launcher.importing.join import PROFILE, Imported, import_files
from launcher.importing.reading import Effect
from launcher.importing.writing import files_of, recipe_text
from launcher.knowledge.lint.check import lint_text
from launcher.recipe.yaml_reader import parse_yaml
from launcher.recipe.yaml_writer import flow

SFT = {
    "model_name_or_path": "bigcode/starcoder",
    "dataset_name": "t.jsonl",
    "max_length": 64,
    "learning_rate": 1e-4,
    "completion_only_loss": True,
}
"""A recipe of TRL."""
FULL = {
    "model_name_or_path": "bigcode/starcoder",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
}
"""A recipe of LLaMA-Factory, which has no precision of its own."""
BOTH = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}


class Folder:
    """Files of one import."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, **files: Any) -> Imported:
        return import_files(self.write(**files))

    def write(self, **files: Any) -> list[str]:
        names = []
        for key, content in files.items():
            name, _, ending = key.rpartition("_")
            file = self.path / f"{name}.{ending}"
            file.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
            names.append(str(file))
        return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path)


def taken(made: Imported) -> dict[str, Any]:
    return {key: value.value for key, value in made.taken.items()}


def test_a_recipe_and_the_configs_beside_it(folder: Folder) -> None:
    (folder.path / "ds.json").write_text(json.dumps(BOTH))
    made = folder.read(
        sft_yaml={**SFT, "deepspeed": "ds.json"}, acc_yaml="distributed_type: MULTI_GPU\nnum_processes: 8"
    )
    assert made.tools == ["TRL recipe", "accelerate config", "DeepSpeed config"]
    assert (made.taken["sharding.zero_stage"].value, made.taken["trainer.learning_rate"].value) == (2, 1e-4)
    assert made.notes == ["hardware: made for 8 devices on 1 node; plan with --on 8xDEVICE"]
    assert not [key for key in made.taken if key.startswith("hardware")]


def test_a_named_file_that_is_not_there_is_needed(folder: Folder) -> None:
    made = folder.read(sft_yaml={**SFT, "deepspeed": "gone.json"})
    assert ("gone.json", Effect.NEEDED) in {(entry.key, entry.effect) for entry in made.dropped}


def test_the_deepspeed_config_that_is_given_stands_for_the_one_that_is_named(folder: Folder) -> None:
    made = folder.read(sft_yaml={**SFT, "deepspeed": "gone.json"}, other_json=BOTH)
    assert Effect.NEEDED not in {entry.effect for entry in made.dropped}
    assert made.taken["sharding.zero_stage"].value == 2


@pytest.mark.parametrize(
    ("files", "key", "wanted"),
    [
        # TrainingArguments go before accelerate's precision, and their default does not
        (
            {"lf_yaml": {**FULL, "fp16": True}, "acc_yaml": "distributed_type: FSDP\nmixed_precision: bf16"},
            "precision",
            "fp16",
        ),
        ({"lf_yaml": FULL, "acc_yaml": "distributed_type: FSDP\nmixed_precision: bf16"}, "precision", "bf16"),
        ({"sft_yaml": SFT, "acc_yaml": "distributed_type: FSDP\nmixed_precision: fp16"}, "precision", "bf16"),
        (
            {"sft_yaml": SFT, "acc_yaml": "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 8"},
            "hardware",
            [
                "hardware: made for 8 devices on 2 nodes; plan with --on 2x4xDEVICE",
                "several nodes: write launch.hostfile or launch.slurm, or start `run` on each",
            ],
        ),
        # DDP is how every engine begins
        (
            {
                "sft_yaml": {**SFT, "deepspeed": "ds.json"},
                "ds_json": BOTH,
                "acc_yaml": "distributed_type: MULTI_GPU",
            },
            "sharding.engine",
            "deepspeed",
        ),
        ({"acc_yaml": "distributed_type: MULTI_GPU", "ds_json": BOTH}, "sharding.engine", "deepspeed"),
        # said twice, and the same
        (
            {"sft_yaml": SFT, "ds_json": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}},
            "trainer.learning_rate",
            1e-4,
        ),
        # a config's own value goes before a default
        ({"lf_yaml": FULL, "ds_json": BOTH}, "precision", "bf16"),
    ],
)
def test_who_goes_before_whom(folder: Folder, files: dict[str, Any], key: str, wanted: Any) -> None:
    made = folder.read(**files)
    assert (made.notes if key == "hardware" else taken(made)[key]) == wanted


@pytest.mark.parametrize(
    "files",
    [
        {"sft_yaml": SFT, "ds_json": {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}},
        {"sft_yaml": {**SFT, "fp16": True}, "ds_json": BOTH},
        {
            "sft_yaml": {**SFT, "deepspeed": "ds.json"},
            "ds_json": BOTH,
            "acc_yaml": "distributed_type: FSDP",
        },
        {"sft_yaml": {**SFT, "num_processes": 2}, "acc_yaml": "distributed_type: FSDP\nnum_processes: 4"},
        {"a_json": BOTH, "b_json": BOTH},
        {"a_yaml": "base_model: m\nadapter: lora", "b_yaml": "model_name_or_path: m\nstage: sft"},
        {"a_yaml": SFT, "b_yaml": SFT},
    ],
)
def test_contradictions_name_both_places(folder: Folder, files: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as caught:
        folder.read(**files)
    message = str(caught.value)
    assert all(str(folder.path / name.replace("_", ".")) in message for name in list(files)[:1])
    assert caught.value.problems[0].code == "import-conflict"


def test_all_that_is_wrong_with_several_files_is_told_at_once(folder: Folder) -> None:
    with pytest.raises(RecipeError) as caught:
        folder.read(a_json="{", b_yaml="x: [", c_txt="hello")
    assert [Path(problem.file or "").name for problem in caught.value.problems] == [
        "a.json",
        "b.yaml",
        "c.txt",
    ]


def test_an_adapter_config(folder: Folder) -> None:
    made = folder.read(
        adapter_json={
            "peft_type": "LORA",
            "r": 4,
            "base_model_name_or_path": "a/b",
            "target_modules": ["q"],
            "lora_alpha": 3,
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "made_up": 1,
        }
    )
    assert taken(made) == {
        "adapter.r": 4,
        "model.name_or_path": "a/b",
        "adapter.target_modules": ["q"],
        "adapter.lora_alpha": 3,
        "adapter.lora_dropout": 0.0,
    }


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        ({"eval_strategy": "epoch"}, "trainer.eval_strategy"),
        ({"eval_strategy": "steps", "eval_steps": 5}, "trainer.eval_steps"),
        ({"load_best_model_at_end": True}, "trainer.load_best_model_at_end"),
        ({"push_to_hub": True}, "trainer.push_to_hub"),
        ({"hub_model_id": "a/b"}, "trainer.hub_model_id"),
        ({"max_steps": 5, "num_train_epochs": 2}, "trainer.num_train_epochs"),
    ],
)
def test_what_a_recipe_refuses_beside_the_rest_is_listed(
    folder: Folder, given: dict[str, Any], gone: str
) -> None:
    made = folder.read(lf_yaml={**FULL, **given})
    assert gone not in made.taken
    assert gone.removeprefix("trainer.") in {entry.key for entry in made.dropped}


DECIDED_THERE = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""Besides what is set, in each of axolotl's files; and in their section on ZeRO, for stages 2 and 3:"""
ALSO_OF_ZERO = {
    "contiguous_gradients": True,
    "reduce_bucket_size": "auto",
    "prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "gather_16bit_weights_on_model_save": True,
}


@pytest.mark.parametrize("name", SHIPPED)
def test_configs_that_axolotl_ships_are_known_by_name_and_content(folder: Folder, name: str) -> None:
    file = f"deepspeed_configs/{name}.json"
    rows = [{"path": "org/rows", "type": "completion"}]
    recipe = {"base_model": "a/b", "datasets": rows, "bf16": "auto", "learning_rate": 1e-4, "deepspeed": file}
    lora = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
    by_name = folder.read(a_yaml={**recipe, **lora})
    assert {entry.effect for entry in by_name.dropped} == {Effect.NONE}
    assert taken(by_name)["precision"] == ("bf16" if "bf16" in name else "auto")
    assert lint_text(by_name.texts[PROFILE], "x.json") == []
    (folder.path / "deepspeed_configs").mkdir()
    zero = SHIPPED[name]["zero_optimization"]
    zero = {**zero, **(ALSO_OF_ZERO if zero["stage"] == 3 else {"contiguous_gradients": True})}
    content = {**SHIPPED[name], **DECIDED_THERE, "zero_optimization": zero}
    (folder.path / file).write_text(json.dumps(content))
    by_content = folder.read(a_yaml={**recipe, **lora})
    assert (taken(by_content), by_content.texts) == (taken(by_name), by_name.texts)
    (folder.path / file).write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    assert taken(folder.read(a_yaml={**recipe, **lora}))["sharding.zero_stage"] == 0


def test_a_number_of_evaluation_rows_drops_no_evaluation(folder: Folder) -> None:
    evaluated = {"test_split_size": 500, "eval_strategy": "steps", "load_best_model_at_end": True}
    made = folder.read(sft_yaml={**SFT, **evaluated})
    assert {(entry.key, entry.effect) for entry in made.dropped} == {("data.eval", Effect.NEEDED)}
    assert taken(made)["trainer.eval_strategy"] == "steps"
    assert taken(made)["trainer.load_best_model_at_end"] is True


def test_evaluation_rows_without_a_time_are_not_evaluated(folder: Folder) -> None:
    made = folder.read(sft_yaml={**SFT, "test_split_size": 0.1})
    assert made.taken["trainer.eval_strategy"].value == "no"


@every(
    "value",
    [
        "no",
        "none",
        "a/b",
        "~",
        "yes",
        "1e-4",
        "24:00:00",
        "a: b",
        "#x",
        " x",
        "x ",
        "",
        "[a]",
        "'",
        "2024-01-01",
        "<s>",
        "%x",
        "true",
        1,
        1.5,
        2e-05,
        True,
        None,
        [1, "a,b"],
        {"k": "v:w"},
        ["no"],
        "ä",
        "a\nb",
        "\u2028",
        "-",
        "- a",
        "?",
        "a #b",
        "0x1f",
        "1_000",
        "null",
        ".inf",
        "on",
        "=",
        "@x",
        "`x`",
        "|",
        "a|b",
    ],
)
def test_values_are_read_back_as_they_were(value: Any) -> None:
    assert parse_yaml(f"k: {flow(value)}", "").data == {"k": value}
    assert parse_yaml(f"k: [{flow(value)}]", "").data == {"k": [value]}


def test_words_that_other_yaml_reads_as_switches_are_quoted() -> None:
    words = ("yes", "no", "on", "y", "true", "null")
    assert [flow(text) for text in words] == [f'"{text}"' for text in words]


def test_plain_words_need_no_quotes() -> None:
    words = ("bigcode/starcoder", "adamw_torch", "./a.jsonl")
    assert tuple(map(flow, words)) == words


def test_paths_hold_from_where_the_recipe_lies(folder: Folder) -> None:
    (folder.path / "t.jsonl").write_text("{}")
    made = folder.read(sft_yaml=SFT)
    (folder.path / "sub").mkdir()
    text = recipe_text(made, "r", folder.path / "sub")
    assert "../t.jsonl" in text
    assert "- path: t.jsonl\n" in recipe_text(made, "r", folder.path)


def test_files_beside_a_recipe_have_its_name(folder: Folder) -> None:
    made = folder.read(ds_json={"zero_optimization": {"stage": 2, "overlap_comm": True}})
    assert list(files_of(made, "mine")) == ["mine_deepspeed.json"]
    assert "config: mine_deepspeed.json" in recipe_text(made, "mine", folder.path)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\x00\x01", "binary"),
        (b"\xff\xfe{", "binary"),
        (b"", "known kind"),
        (b"hello", "known kind"),
        (b"42", "known kind"),
        (b"- a\n- b", "known kind"),
        (b"model:\n  _component_: torchtune.models.llama", "torchtune"),
        (b"model: {name_or_path: x}\ndata: {train: []}", "effilaunch plan"),
        (b"a: " + b"[" * 500, "kind|deep"),
        (b"&a [*a]", "kind|YAML|end"),
        (b"x = " + b"(" * 5000, "kind"),
        (b"#" * (LARGEST + 1), "bytes"),
    ],
)
def test_hostile_files_are_said_to_be_none(tmp_path: Path, content: bytes, word: str) -> None:
    file = tmp_path / "x.txt"
    file.write_bytes(content)
    with pytest.raises(RecipeError, match=word):
        read_file(str(file))


def test_what_can_be_read_once_is_read_once(folder: Folder) -> None:
    """As a shell's <(…) is."""
    pipe = folder.path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=[json.dumps(SFT)])
    writer.start()
    made = import_files([str(pipe)])
    writer.join()
    assert made.tools == ["TRL recipe"]


@pytest.mark.parametrize("name", ["/dev/zero", "/", "no-such-file", "x" * 5000])
def test_what_is_no_file_is_said(name: str) -> None:
    with pytest.raises(RecipeError):
        read_file(name)


def test_a_deepspeed_config_makes_its_own_schedule_and_optimizer(folder: Folder) -> None:
    blocks = {"scheduler": {"type": "WarmupLR", "params": {}}, "optimizer": {"type": "AdamW", "params": {}}}
    made = folder.read(
        sft_yaml={
            **SFT,
            "lr_scheduler_type": "cosine",
            "optim": "adamw_bnb_8bit",
            "warmup_steps": 1000,
            "learning_rate": 1e-3,
        },
        d_json={**BOTH, **blocks},
    )
    assert made.taken["trainer.lr_scheduler_type"].value == "constant_with_warmup"
    assert made.taken["trainer.optim"].value == "adamw_torch"
    overruled = {entry.key: entry for entry in made.dropped}["lr_scheduler_type"]
    assert (overruled.value, overruled.effect) == ("cosine", Effect.NONE)


@pytest.mark.parametrize(
    ("name", "metrics", "needed"),
    [("accuracy", ["accuracy"], False), ("own_score", None, True), ("eval_loss", None, False)],
)
def test_what_the_best_checkpoint_is_chosen_by_is_measured(
    folder: Folder, name: str, metrics: list[str] | None, needed: bool
) -> None:
    evaluated = {"test_split_size": 0.1, "eval_strategy": "epoch", "metric_for_best_model": name}
    made = folder.read(sft_yaml={**SFT, **evaluated})
    assert taken(made).get("data.metrics") == metrics
    words = {entry.key for entry in made.dropped if entry.effect is Effect.NEEDED}
    assert ("metric_for_best_model" in words) == needed


def test_a_file_in_utf_16_is_told_as_such(folder: Folder) -> None:
    file = folder.path / "x.yml"
    file.write_bytes("base_model: a/b".encode("utf-16"))
    with pytest.raises(RecipeError, match="UTF-16"):
        import_files([str(file)])
