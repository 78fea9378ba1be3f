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
from launcher.importing.importers import LARGEST, read_file
from launcher.importing.join import Imported, import_files
from launcher.importing.reading import Effect
from launcher.importing.writing import files_of, recipe_text
from launcher.recipe.yaml_reader import parse_yaml
from launcher.recipe.yaml_writer import flow

LINE = (
    "accelerate launch --num_processes 8 run_clm.py --do_train --model_name_or_path bigcode/starcoder "
    "--train_file t.jsonl"
)
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


def test_what_a_launch_line_makes_impossible_has_its_line(folder: Folder) -> None:
    line = (
        "trl grpo --model_name_or_path a/b --dataset_name c/d --reward_funcs org/model --learning_rate 1e-6"
    )
    with pytest.raises(RecipeError) as caught:
        folder.read(run_sh=f"# GRPO\n{line}\n")
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.path) == (str(folder.path / "run.sh"), 2, "reward_funcs")


def test_a_line_alone_with_json_in_it_is_no_mapping(folder: Folder) -> None:
    """YAML reads `'{"num_cycles": 2}'` at its end as a key and a value."""
    line = "trl sft --model_name_or_path a/b --dataset_name c/d --lr_scheduler_kwargs '{\"num_cycles\": 2}'"
    made = folder.read(run_sh=f"{line}\n")
    assert taken(made)["trainer.lr_scheduler_kwargs"] == {"num_cycles": 2}


def test_a_launch_line_and_the_configs_beside_it(folder: Folder) -> None:
    (folder.path / "ds.json").write_text(json.dumps(BOTH))
    made = folder.read(run_sh=f"{LINE} --deepspeed ds.json --bf16 --learning_rate 1e-4")
    assert made.tools == ["launch line", "DeepSpeed config"]
    assert (made.taken["sharding.zero_stage"].value, made.taken["trainer.learning_rate"].value) == (2, 1e-4)
    assert made.notes == ["hardware: made for 8 devices on 1 node; plan with --on 8xDEVICE"]
    assert not [key for key in made.taken if key.startswith("hardware")]


def test_a_named_file_that_is_not_there_is_needed(folder: Folder) -> None:
    made = folder.read(run_sh=f"{LINE} --deepspeed gone.json")
    assert ("gone.json", Effect.NEEDED) in {(entry.key, entry.effect) for entry in made.dropped}


def test_the_deepspeed_config_that_is_given_stands_for_the_one_that_is_named(folder: Folder) -> None:
    made = folder.read(run_sh=f"{LINE} --deepspeed gone.json --bf16", other_json=BOTH)
    assert Effect.NEEDED not in {entry.effect for entry in made.dropped}
    assert made.taken["sharding.zero_stage"].value == 2


@pytest.mark.parametrize(
    ("files", "key", "wanted"),
    [
        # TrainingArguments go before accelerate's precision, and their default does not
        (
            {"run_sh": LINE + " --fp16", "acc_yaml": "distributed_type: MULTI_GPU\nmixed_precision: bf16"},
            "precision",
            "fp16",
        ),
        (
            {"run_sh": LINE, "acc_yaml": "distributed_type: MULTI_GPU\nmixed_precision: bf16"},
            "precision",
            "bf16",
        ),
        # options of the line go before the file
        (
            {"run_sh": LINE, "acc_yaml": "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 2"},
            "hardware",
            [
                "hardware: made for 8 devices on 2 nodes; plan with --on 2x4xDEVICE",
                "several nodes: write launch.hostfile or launch.slurm, or start `run` on each",
            ],
        ),
        # DDP is how every engine begins
        (
            {
                "run_sh": LINE + " --deepspeed ds.json",
                "ds_json": BOTH,
                "acc_yaml": "distributed_type: MULTI_GPU",
            },
            "sharding.engine",
            "deepspeed",
        ),
        ({"acc_yaml": "distributed_type: MULTI_GPU", "ds_json": BOTH}, "sharding.engine", "deepspeed"),
        # said twice, and the same
        (
            {
                "run_sh": LINE + " --learning_rate 3e-5 --deepspeed ds.json",
                "ds_json": {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}},
            },
            "trainer.learning_rate",
            3e-5,
        ),
        # a config's own word goes before a default
        ({"run_sh": LINE + " --deepspeed ds.json", "ds_json": BOTH}, "precision", "bf16"),
    ],
)
def test_who_goes_before_whom(folder: Folder, files: dict[str, Any], key: str, wanted: Any) -> None:
    made = folder.read(**files)
    assert (made.notes if key == "hardware" else taken(made)[key]) == wanted


@pytest.mark.parametrize(
    "files",
    [
        {
            "run_sh": LINE + " --learning_rate 1e-5 --deepspeed ds.json",
            "ds_json": {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}},
        },
        {"run_sh": LINE + " --fp16 --deepspeed ds.json", "ds_json": BOTH},
        {"run_sh": LINE + " --deepspeed ds.json", "ds_json": BOTH, "acc_yaml": "distributed_type: FSDP"},
        {"a_json": BOTH, "b_json": BOTH},
        {"a_yaml": "base_model: m\nadapter: lora", "b_yaml": "model_name_or_path: m\nstage: sft"},
        {"a_sh": LINE, "b_sh": LINE},
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


def test_a_recipe_with_flags_over_it(folder: Folder) -> None:
    (folder.path / "sft.yaml").write_text(
        "model_name_or_path: bigcode/starcoder\ndataset_name: a/b\nlearning_rate: 1e-5\nmax_length: 64\n"
        "completion_only_loss: true\n"
    )
    made = folder.read(run_sh="trl sft --config sft.yaml --learning_rate 2e-5")
    assert made.taken["trainer.learning_rate"].value == 2e-5
    assert str(made.taken["trainer.learning_rate"].place).endswith("run.sh:1")
    assert str(made.taken["data.max_length"].place).endswith("sft.yaml:4")
    both = folder.read(
        run_sh="trl sft --config sft.yaml --learning_rate 2e-5",
        sft_yaml=(folder.path / "sft.yaml").read_text(),
    )
    assert taken(both) == taken(made)


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
        ("--eval_strategy epoch", "trainer.eval_strategy"),
        ("--eval_strategy steps --eval_steps 5", "trainer.eval_steps"),
        ("--load_best_model_at_end", "trainer.load_best_model_at_end"),
        ("--push_to_hub", "trainer.push_to_hub"),
        ("--hub_model_id a/b", "trainer.hub_model_id"),
        ("--max_steps 5 --num_train_epochs 2", "trainer.num_train_epochs"),
        ("--predict_with_generate", "trainer.predict_with_generate"),
        ("--beta 0.2", "trainer.beta"),
    ],
)
def test_what_a_recipe_refuses_beside_the_rest_is_listed(folder: Folder, given: str, gone: str) -> None:
    made = folder.read(run_sh=f"{LINE} {given}")
    assert gone not in made.taken
    assert gone.removeprefix("trainer.") in {entry.key for entry in made.dropped}


def test_evaluation_rows_without_a_time_are_not_evaluated(folder: Folder) -> None:
    made = folder.read(run_sh=f"{LINE} --validation_file v.jsonl")
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
    made = folder.read(run_sh=LINE)
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
    writer = threading.Thread(target=pipe.write_text, args=[LINE])
    writer.start()
    made = import_files([str(pipe)])
    writer.join()
    assert made.tools == ["launch line"]


@pytest.mark.parametrize("name", ["/dev/zero", "/", "no-such-file", "x" * 5000])
def test_what_is_no_file_is_said(name: str) -> None:
    with pytest.raises(RecipeError):
        read_file(name)


def test_a_deepspeed_config_makes_its_own_schedule_and_optimizer(folder: Folder) -> None:
    blocks = {"scheduler": {"type": "WarmupLR", "params": {}}, "optimizer": {"type": "AdamW", "params": {}}}
    made = folder.read(
        run_sh=f"{LINE} --deepspeed d.json --lr_scheduler_type cosine --optim adamw_bnb_8bit "
        "--warmup_steps 1000 --learning_rate 1e-3",
        d_json={**BOTH, **blocks},
    )
    assert made.taken["trainer.lr_scheduler_type"].value == "constant_with_warmup"
    assert made.taken["trainer.optim"].value == "adamw_torch"
    overruled = {entry.key: entry for entry in made.dropped}["lr_scheduler_type"]
    assert (overruled.value, overruled.effect) == ("cosine", Effect.NONE)


@pytest.mark.parametrize(
    ("script", "name", "metrics", "needed"),
    [
        ("run_glue.py", "eval_f1", ["f1"], False),
        ("run_image_classification.py", "accuracy", ["accuracy"], False),
        ("run_glue.py", "pearson", ["pearson"], False),
        ("run_glue.py", "own_score", None, True),
        ("run_glue.py", "eval_loss", None, False),
    ],
)
def test_what_the_best_checkpoint_is_chosen_by_is_measured(
    folder: Folder, script: str, name: str, metrics: list[str] | None, needed: bool
) -> None:
    made = folder.read(
        run_sh=f"python {script} --do_train --model_name_or_path a/b --train_file t.csv "
        f"--validation_file v.csv --eval_strategy epoch --metric_for_best_model {name}"
    )
    assert taken(made).get("data.metrics") == metrics
    assert taken(made).get("data.problem_type") == ("regression" if name == "pearson" else None)
    words = {entry.key for entry in made.dropped if entry.effect is Effect.NEEDED}
    assert ("metric_for_best_model" in words) == needed


def test_a_file_in_utf_16_is_told_as_such(folder: Folder) -> None:
    file = folder.path / "x.yml"
    file.write_bytes("base_model: a/b".encode("utf-16"))
    with pytest.raises(RecipeError, match="UTF-16"):
        import_files([str(file)])
