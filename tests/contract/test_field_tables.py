"""The shipped field tables are those of the installed libraries."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from launcher.recipe.field_tables import (
    TASK_OWNED,
    TASK_TABLES,
    installed_package,
    task_fields,
    trainer_fields,
)
from tools.tables.fields import generate


def _defaults(config: type) -> dict[str, Any]:
    """Name -> default of the fields of a dataclass; MISSING where there is none."""
    found = {}
    for field in dataclasses.fields(config):
        factory = field.default_factory
        found[field.name] = field.default if factory is dataclasses.MISSING else factory()
    return found


def test_names_and_defaults_equal_the_real_training_arguments() -> None:
    transformers = pytest.importorskip("transformers")
    table = generate("training_arguments")["fields"]
    real = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments)}
    assert list(table) == list(real)
    for name, field in real.items():
        if field.default is not dataclasses.MISSING:
            assert table[name]["default"] == field.default, name


def test_names_and_defaults_equal_what_seq2seq_arguments_add() -> None:
    transformers = pytest.importorskip("transformers")
    general = _defaults(transformers.TrainingArguments)
    real = {
        name: default
        for name, default in _defaults(transformers.Seq2SeqTrainingArguments).items()
        if name not in general
    }
    assert {name: entry["default"] for name, entry in generate("seq2seq_arguments")["fields"].items()} == real


def test_names_and_defaults_equal_those_of_the_dpo_config() -> None:
    trl = pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    general, real = _defaults(transformers.TrainingArguments), _defaults(trl.DPOConfig)
    table = generate("dpo_config")["fields"]
    assert set(real) - set(general) <= set(table) <= set(real)
    assert {name: entry["default"] for name, entry in table.items()} == {name: real[name] for name in table}
    # what the table leaves out is as in TrainingArguments
    assert {name for name in general if real[name] != general[name]} <= set(table)


def test_a_recipe_can_give_a_dpo_config_every_field_that_it_may(tmp_path: Any) -> None:
    """Each default of the table is a value that the real class takes, alone and as text where it may be."""
    trl = pytest.importorskip("trl")
    fields = task_fields("dpo")
    given = {name: entry["default"] for name, entry in fields.items()}
    args = trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)
    assert args.beta == given["beta"]
    assert trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, loss_type="ipo").loss_type == [
        "ipo"
    ]
    assert "str" in fields["loss_type"]["types"]


def test_the_choices_of_the_dpo_losses_are_those_of_the_trainer() -> None:
    """The help text lists them; the trainer compares with each."""
    found = installed_package("trl")
    if found is None:
        pytest.skip("trl is not installed")
    source = (found[1] / "trainer/dpo_trainer.py").read_text(encoding="utf-8")
    fields = generate("dpo_config")["fields"]
    for name, least in (("loss_type", 10), ("f_divergence_type", 4)):
        assert len(fields[name]["choices"]) >= least
        for choice in fields[name]["choices"]:
            assert f'"{choice}"' in source, choice


@pytest.mark.parametrize("task", sorted(TASK_OWNED))
def test_the_fields_that_the_launcher_decides_exist(task: str) -> None:
    assert set(TASK_OWNED[task]) <= set(generate(TASK_TABLES[task].name)["fields"])
    assert not set(TASK_OWNED[task]) & set(trainer_fields())


def test_names_equal_the_real_lora_config() -> None:
    peft = pytest.importorskip("peft")
    real = [field.name for field in dataclasses.fields(peft.LoraConfig) if field.init]
    assert set(generate("lora_config")["fields"]) == set(real)


def test_a_machine_without_the_libraries_reads_the_shipped_tables() -> None:
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p];"
        "from launcher.recipe import field_tables as t;"
        "assert t.installed_package('trl') is None;"
        "print(sorted(t.task_fields('dpo'))[0], 'learning_rate' in t.trainer_fields('dpo'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "activation_offloading True\n"


def test_a_table_that_cannot_be_read_falls_back_to_the_shipped_one(tmp_path: Any) -> None:
    """An installed version whose source has another shape must not break planning."""
    (tmp_path / "trl/trainer").mkdir(parents=True)
    (tmp_path / "trl/__init__.py").touch()
    (tmp_path / "trl/trainer/dpo_config.py").write_text("class Renamed: pass\n", encoding="utf-8")
    (tmp_path / "trl-99.0.dist-info").mkdir()
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "from launcher.recipe import field_tables as t;"
        "assert t.installed_package('trl')[0] == '99.0';"
        "print('beta' in t.task_fields('dpo'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
