"""`import`: exit codes, what goes where, and that each written case plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli import main
from launcher.errors import RecipeError
from launcher.importing.importers import MAPPINGS
from launcher.importing.join import import_files
from launcher.recipe.loading import load_recipe

CASES = Path(__file__).parent.parent / "importing_cases"
ON = "8xA100-80GB"
TOKENS = ("hf_abcdefghijklmnopqrstuvwxyz0123", "0123456789abcdef0123456789abcdef01234567")


def called(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["import", *map(str, words)])
    captured = capsys.readouterr()
    assert not [token for token in TOKENS if token in captured.out + captured.err]
    return code, captured.out, captured.err


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["axolotl_lora.yml", "llamafactory_lora.yaml", "trl_sft.yaml", "trl_full.yaml"]
)
def test_each_written_case_is_a_recipe_that_plans(
    capsys: pytest.CaptureFixture[str], workplace: Path, name: str
) -> None:
    code, out, err = called(capsys, CASES / name, "--on", ON, "--output", "mine.yaml")
    assert (code, err) == (0, "")
    assert f"it plans on {ON}" in out
    assert "wrote mine.yaml" in out
    loaded = load_recipe("mine.yaml")
    assert loaded.recipe.trainer["learning_rate"] > 0
    # what is written is what was read, with nothing of its own
    made = import_files([str(CASES / name)])
    told = {key for key in made.taken if not key.startswith(("data.train", "data.eval"))}
    given = {path for path in loaded.origins if path in told}
    assert given == told


def test_an_axolotl_recipe_brings_its_deepspeed_config(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    assert called(capsys, CASES / "axolotl_lora.yml", "--on", ON, "--output", "mine.yaml")[0] == 0
    recipe = load_recipe("mine.yaml").recipe
    assert (recipe.sharding.zero_stage, recipe.model.name_or_path) == (2, "bigcode/starcoder")
    assert json.loads(Path("mine_deepspeed.json").read_text()) == {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 200_000_000},
    }


def test_paths_of_what_is_not_there_yet_are_written_for_the_recipes_folder(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    Path("ax.yml").write_text(
        "base_model: ./base\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlearning_rate: 1e-4\nbf16: true\n"
        "datasets: [{path: rows.jsonl, type: completion}, {path: org/rows, type: completion}]\n"
    )
    written = []
    for output in ("here.yaml", "below/there.yaml"):
        Path(output).parent.mkdir(exist_ok=True)
        called(capsys, "ax.yml", "--on", ON, "--output", output)
        recipe = yaml.safe_load(Path(output).read_text())
        paths = [source["path"] for source in recipe["data"]["train"]]
        written.append([recipe["model"]["name_or_path"], *paths])
    assert written == [["./base", "rows.jsonl", "org/rows"], ["../base", "../rows.jsonl", "org/rows"]]


def test_without_output_the_recipe_alone_is_on_stdout(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    code, out, err = called(capsys, CASES / "trl_sft.yaml", "--on", ON)
    Path("piped.yaml").write_text(out)
    assert code == 0
    assert load_recipe("piped.yaml").recipe.trainer["learning_rate"] == 1e-4
    assert "it plans on 8xA100-80GB" in err


def test_the_list_comes_first_with_places_and_reasons(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    code, out, _ = called(capsys, CASES / "trl_full.yaml", "--output", "mine.yaml")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "changes the training and has no recipe key:"
    assert any(line.startswith(f"  {CASES}/trl_full.yaml:6 packing_strategy: wrapped - ") for line in lines)
    heads = [line for line in lines if line.endswith(":")]
    assert heads[1] == "has no effect on the training result:"
    assert "hardware: made for 8 devices on 1 node; plan with --on 8xDEVICE" in lines
    assert lines[-1] == "wrote mine.yaml, mine_deepspeed.json"


def test_a_value_that_must_be_set_is_refused_by_plan_too(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    code, out, err = called(capsys, CASES / "ds_zero2.json", "--output", "mine.yaml")
    assert code == 2
    assert "model.name_or_path: must be set in the recipe" in err
    with pytest.raises(RecipeError) as caught:
        load_recipe("mine.yaml")
    found = {(problem.path, problem.code, problem.line) for problem in caught.value.problems}
    assert {("todo[0]", "recipe-todo", 4), ("todo[1]", "recipe-todo", 5)} <= found
    assert "2 values must be set in the recipe" in out


LORA = """\
model_name_or_path: bigcode/starcoder
dataset_name: a/b
learning_rate: nan
max_length: 64
completion_only_loss: true
"""


def test_what_import_asks_for_is_not_planned_with_a_default(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    """Without `todo` the recipe would be planned with the learning rate of a recipe."""
    Path("sft.yaml").write_text(LORA)
    code, _, err = called(capsys, "sft.yaml", "--on", ON, "--output", "mine.yaml")
    assert (code, "learning_rate: must be set in the recipe" in err) == (2, True)
    assert main(["plan", "mine.yaml", "--on", ON]) == 2
    assert "todo[0]" in capsys.readouterr().err
    text = Path("mine.yaml").read_text()
    left = [line for line in text.splitlines(keepends=True) if "learning_rate" not in line]
    Path("mine.yaml").write_text("".join(left))
    assert main(["plan", "mine.yaml", "--on", ON]) == 0


def test_the_data_of_a_program(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    code, out, _ = called(capsys, CASES / "trl_full.yaml", "--on", ON, "--json")
    data: dict[str, Any] = json.loads(out)
    assert code == 0
    assert {"recipe", "dropped", "files", "notes", "plan", "tools", "output"} <= data.keys()
    assert {entry["effect"] for entry in data["dropped"]} == {"changes the training", "no effect"}
    tools = [entry["tool"] for entry in data["tools"]]
    assert tools == ["TRL recipe", "DeepSpeed config"]
    code, out, _ = called(capsys, CASES / "ds_zero2.json", "--json")
    assert (code, json.loads(out)["errors"][0]["code"]) == (2, "import-needs-word")


def test_nothing_is_overwritten(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    for there in ("mine.yaml", "mine_deepspeed.json"):
        Path(there).write_text("mine")
        code, _, err = called(capsys, CASES / "trl_full.yaml", "--output", "mine.yaml")
        assert (code, Path(there).read_text()) == (2, "mine")
        assert there in err
        Path(there).unlink()
        assert not list(workplace.iterdir())


def test_the_commands_of_the_page(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    """On files of the names that docs/import.md has; only prepare, which wants weights, is left out."""
    cases = {"axolotl.yml": "axolotl_lora.yml", "ds_config.json": "ds_zero2.json",
             "accelerate.yaml": "accelerate.yaml", "sft.yaml": "trl_sft.yaml"}  # fmt: skip
    for name, case in cases.items():
        Path(name).write_text((CASES / case).read_text().replace("ds_zero2", "ds_config"))
    text = (CASES.parent.parent / "docs" / "import.md").read_text(encoding="utf-8")
    lines = [line.split()[2:] for line in text.splitlines() if line.startswith("effilaunch import ")]
    assert len(lines) == 3
    for words in lines:
        assert called(capsys, *words)[0] == 0, words
        Path("recipe.yaml").unlink(missing_ok=True)
        for file in workplace.glob("recipe_*"):
            file.unlink()


@pytest.mark.parametrize("target", ["no/such/folder/x.yaml", "/", "/proc/x.yaml", "x" * 300])
def test_where_nothing_can_be_written(
    capsys: pytest.CaptureFixture[str], workplace: Path, target: str
) -> None:
    assert called(capsys, CASES / "trl_sft.yaml", "--output", target)[0] == 2


def test_what_no_recipe_is_made_of_leaves_nothing(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    Path("x.yaml").write_text("base_model: m\nadapter: lora\nrl: ppo\n")
    code, out, err = called(capsys, "x.yaml", "--output", "mine.yaml")
    assert (code, out, Path("mine.yaml").exists()) == (2, "", False)
    assert "x.yaml:3" in err


ARGUMENTS = "from transformers import TrainingArguments\nTrainingArguments('o', learning_rate=3e-4)\n"
PAGE = "docs/migrate/script.md"
SCRIPTS = {
    "train.py": ARGUMENTS,
    "empty.py": "",
    "old.py": "print 'x'\n",
    "TRAIN.PY": "torchrun run_clm.py --do_train --model_name_or_path a/b\n",
    "mapping.py": "model_name_or_path: a/b\nlearning_rate: 1e-4\n",
    "script": f'"""torchrun run_clm.py --do_train"""\n{ARGUMENTS}',
    "train.txt": ARGUMENTS,
    "run.sh": "python train.py --learning_rate 1e-4",
    "one.sh": "bash: train",
    "open.sh": "echo '",
    "job.slurm": "srun train",
    "line": "python run_clm.py --do_train --model_name_or_path $1",
    "hashbang": "#!/usr/bin/env bash\npython train.py\n",
    "batch": "#SBATCH --nodes=1\npython train.py\n",
    "rows.sh": "python train.py --train_file rows.json --config_overrides n_layer=3",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_refused_with_the_page_and_nothing_is_guessed(
    capsys: pytest.CaptureFixture[str], workplace: Path, name: str
) -> None:
    Path(name).write_text(SCRIPTS[name])
    status, out, _ = called(capsys, name, "--output", "mine.yaml", "--json")
    (problem,) = json.loads(out)["errors"]
    assert (status, problem["code"], problem["file"]) == (2, "import-script", name)
    assert PAGE in problem["hint"]
    assert {file.name for file in workplace.iterdir()} == {name}


@pytest.mark.parametrize(
    ("line", "named", "absent"),
    [
        ("trl sft --config sft.yaml --learning_rate 1e-5", ["sft.yaml (TRL recipe)"], []),
        ("deepspeed t.py --deepspeed=ds.json", ["ds.json (DeepSpeed config)"], []),
        ("x --config $DIR/own.yaml --deepspeed_config gone.json", [], ["$DIR/own.yaml", "gone.json"]),
        ("C=${CFG:-sft.yaml}\nx --config $C # old.yaml", ["sft.yaml (TRL recipe)"], []),
        ("x --train_file rows.json --data train.jsonl other.yaml.bak", [], []),
    ],
)
def test_a_shell_file_names_the_configs_in_it(
    capsys: pytest.CaptureFixture[str], workplace: Path, line: str, named: list[str], absent: list[str]
) -> None:
    for case, name in {"trl_sft.yaml": "sft.yaml", "ds_zero2.json": "ds.json"}.items():
        Path(name).write_text((CASES / case).read_text())
    Path("rows.json").write_text('{"a": 1}')
    Path("run.sh").write_text(f"#!/bin/bash\n{line}\n")
    status, out, _ = called(capsys, "run.sh", "--json")
    (problem,) = json.loads(out)["errors"]
    assert (status, problem["code"]) == (2, "import-script")
    assert all(text in problem["hint"] for text in named)
    assert all(f"{text} (not found)" in problem["hint"] for text in absent)
    assert not [text for text in ("rows.json", "train.jsonl", "old.yaml", "bak") if text in problem["hint"]]


def test_a_script_beside_a_config_is_refused_alone(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    Path("run.sh").write_text("trl sft --config sft.yaml")
    Path("sft.yaml").write_text((CASES / "trl_sft.yaml").read_text())
    status, out, _ = called(capsys, "sft.yaml", "run.sh", "--json")
    (problem,) = json.loads(out)["errors"]
    assert (status, problem["code"], problem["file"]) == (2, "import-script", "run.sh")


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    code, _, err = called(capsys, CASES / "trl_full.yaml", "--on", "1x24GB")
    assert code in (2, 3)
    assert "error" in err


def test_every_kind_is_known_by_one_reader_alone() -> None:
    """Of the narrower readers; what TRL takes is what they leave."""
    keys: dict[str, dict[str, Any]] = {
        "DeepSpeed config": {"zero_optimization": {"stage": 2}},
        "accelerate config": {"distributed_type": "NO"},
        "adapter_config.json": {"peft_type": "LORA"},
        "axolotl recipe": {"base_model": "m", "adapter": "lora", "lora_r": 8, "datasets": [{"path": "x"}]},
        "LLaMA-Factory recipe": {"model_name_or_path": "m", "stage": "sft"},
        "TRL recipe": {"model_name_or_path": "m", "lora_r": 8, "datasets": [{"path": "x"}]},
    }
    assert list(keys) == [reader.name for reader in MAPPINGS]
    for name, data in keys.items():
        assert next(reader.name for reader in MAPPINGS if reader.matches(data)) == name


def test_a_model_that_is_not_here_is_no_error(
    capsys: pytest.CaptureFixture[str], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the hub answers: the recipe is whole without it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(workplace))
    Path("sft.yaml").write_text(LORA.replace("bigcode/starcoder", "nobody/nothing").replace("nan", "1e-4"))
    code, out, err = called(capsys, "sft.yaml", "--on", ON, "--output", "mine.yaml")
    assert (code, err) == (0, "")
    assert "not planned: no configuration found" in out


def test_what_only_several_processes_train_is_planned_on_several(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    Path("sft.yaml").write_text(LORA.replace("nan", "1e-4") + "fsdp: full_shard\n")
    code, out, err = called(capsys, "sft.yaml", "--output", "mine.yaml")
    assert (code, err) == (0, "")
    assert "plans on 8xA100-80GB" in out
