"""`make tables` leaves the tree as it is: the shipped tables are those of the tested versions."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from launcher.models.capabilities import has_tp_plan
from launcher.recipe.field_tables import TABLES, shipped_table
from tools.tables import peers, shipped
from tools.tables.__main__ import table_text

ROOT = Path(__file__).parents[2]
TINY_BERT = {
    "model_type": "bert", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 500, "max_position_embeddings": 256,
}  # fmt: skip
PACKAGES = {
    **{shipped_table(name): package for name, package in TABLES.items()},
    **{ROOT / f"launcher/models/data/{name}.json": "transformers" for name in ("module_names", "tp_plans")},
    ROOT / "launcher/knowledge/lint/tables/deepspeed.json": "deepspeed",
    ROOT / "launcher/importing/tables/trl.json": "trl",
}


def test_every_table_is_what_its_generator_makes_of_the_installed_packages(warm):
    for file, package in PACKAGES.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed")
        if found != (tested := json.loads(file.read_text("utf-8"))["version"]):
            pytest.skip(f"{package} is {found}, the tables are of {tested}")
    done = subprocess.run(
        [sys.executable, "-m", "tools.tables", "--check", "--offline"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "differs" not in done.stdout


@pytest.mark.parametrize("name", sorted(peers.PEERS))
def test_a_table_of_another_tool_states_its_version_and_is_in_the_generators_format(name):
    text = (ROOT / f"launcher/importing/tables/{name}.json").read_text("utf-8")
    table = json.loads(text)
    assert table["version"]
    assert list(table["keys"]) == sorted(table["keys"])
    assert text == table_text(table)


def test_a_published_count_holds_a_configuration_to_a_unit_of_its_last_digit(tmp_path, monkeypatch):
    assert shipped.agrees(7_615_616_512, "7.61B")
    assert not shipped.agrees(7_630_000_000, "7.61B")
    assert shipped.agrees(134_515_008, "135M")
    row = {"config": {**TINY_BERT, "architectures": ["BertModel"]}, "published": "0.1M", "params": 1}
    models = {"org/right": row, "org/wrong": {**row, "published": "0.4M"}}
    table = tmp_path / "models.json"
    monkeypatch.setattr(shipped, "facts_file", lambda name: tmp_path / name)
    table.write_text(json.dumps({"models": models}))
    with pytest.raises(ValueError, match=r"^org/wrong: 119,744 parameters, published are 0\.4M$"):
        shipped.models()
    table.write_text(json.dumps({"models": {"org/right": row}}))
    assert shipped.models()["models"]["org/right"]["params"] == 119_744


def test_a_t5_with_its_own_head_is_published_with_it():
    t5 = {"model_type": "t5", "vocab_size": 100, "d_model": 8}
    assert [shipped.own_head({**t5, "tie_word_embeddings": tied}) for tied in (False, True)] == [800, 0]


def test_defaults_are_read_from_source(tmp_path):
    """A literal, a product, an enum's member, a Field with an alias, and an inherited field."""
    (tmp_path / "hparams").mkdir()
    (tmp_path / "extras").mkdir()
    (tmp_path / "extras" / "constants.py").write_text("class Kind:\n    A = 'a'\n")
    (tmp_path / "hparams" / "args.py").write_text(
        "class Base:\n    below: int = 1\n    low: int = 2\n"
        "class ModelArguments(Base):\n    low: int = 3\n    size: int = field(default=4 * 5, metadata={})\n"
        "    kind: Kind = field(default=Kind.A)\n    named: str = Field('x', alias='other')\n"
        "    made: list = field(default_factory=list)\n    _hidden: int = 0\n    kept: ClassVar[int] = 0\n"
    )
    assert peers.llamafactory(tmp_path, "1") == {
        "version": "1",
        "keys": {
            "below": 1, "kind": "a", "low": 3, "made": None, "named": "x", "other": "x", "size": 20,
        },
    }  # fmt: skip


def test_families_with_and_without_a_tensor_parallel_plan():
    assert has_tp_plan("llama")
    assert not has_tp_plan("gpt2")
    assert not has_tp_plan("unheard-of")
