"""Shipped configurations: their names, sources and counts, and that each plans without a network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.commands.estimate import _task_of
from launcher.errors import RecipeError
from launcher.files.shipped import facts_file
from launcher.inputs.planning_facts import find_spec
from launcher.machine.hardware import parse_hardware
from launcher.models.model_config import find_model_config, shipped_model_config, shipped_model_names
from launcher.plan.inputs import Facts
from launcher.planner.planner import make_plan
from launcher.planner.strategies import model_recipe
from launcher.recipe.loading import with_changes
from launcher.tasks import task_named

TABLE: dict[str, Any] = json.loads(facts_file("models.json").read_text("utf-8"))
MODELS: dict[str, Any] = TABLE["models"]
NAMES = [
    (home, name, changes) for home, row in MODELS.items() for name, changes in row.get("names", {}).items()
]
ON_IMAGES = {"Qwen/Qwen3-VL-8B-Instruct"}
"""Their text model is of no family with a closed form."""
EIGHT = parse_hardware("8xH100-80GB")


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def test_many_models_are_known_and_each_has_one_name_and_one_configuration():
    names = shipped_model_names()
    assert len(names) > 150
    assert len({name.casefold() for name in names}) == len(names)
    assert names[: len(MODELS)] == tuple(MODELS)  # a configuration's own name completes first


def test_a_name_that_shares_a_configuration_says_what_differs():
    for home, name, changes in NAMES:
        own = MODELS[home]["config"]
        assert shipped_model_config(name) == {**own, **changes}
        assert all(key not in own or own[key] != value for key, value in changes.items()), name
    assert shipped_model_config("Qwen/Qwen2.5-7B")["max_position_embeddings"] == 131_072
    assert shipped_model_config("Qwen/Qwen2.5-7B-Instruct")["max_position_embeddings"] == 32_768


def test_sources_are_addresses_or_named_ones():
    sourced = {name: row["source"] for name, row in MODELS.items() if "source" in row}
    assert len(sourced) > 100
    for name, sources in sourced.items():
        for source in sources:
            assert source in TABLE["sources"] or source.startswith("https://"), name
    assert all(address.startswith("https://") for address in TABLE["sources"].values())
    used = {source for sources in sourced.values() for source in sources}
    assert set(TABLE["sources"]) - used <= {"unsloth"}  # which tells of names


def test_published_counts_are_near_the_real_ones():
    """`make tables` holds them to a unit of the last digit; what is built there is counted here."""
    for name, row in MODELS.items():
        if "published" not in row:
            continue
        number, unit = re.fullmatch(r"([\d.]+)([MB])", row["published"]).groups()
        counted = float(number) * {"M": 1e6, "B": 1e9}[unit]
        assert row["params"] == pytest.approx(counted, rel=0.25), name


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ON_IMAGES])
def test_every_shipped_model_plans_offline(name):
    config, origin = find_model_config(name)
    assert origin == "shipped facts"
    task = _task_of(config)
    spec, _ = find_spec(name, config, origin, task, ask=False)
    spread = {"sharding.zero_stage": 3, "sharding.offload_optimizer": "cpu", "sharding.offload_param": "cpu"}
    recipe = with_changes(model_recipe(spec, task_named(task)), spread, "test")
    made = make_plan(recipe, Facts(EIGHT, spec, {}, cpu_cores=64))
    assert 0 < made.memory.total < EIGHT.device_bytes


@pytest.mark.parametrize("name", [name for _, name, _ in NAMES[::25]])
def test_a_name_of_a_shared_configuration_is_found_offline(name):
    assert find_model_config(name) == (shipped_model_config(name), "shipped facts")


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B-instruct", "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("BAAI/bge-small-en-v1.6", "BAAI/bge-small-en-v1.5"),
        ("openai/gpt-oss-20b", "unsloth/gpt-oss-20b-BF16"),
    ],
)
def test_an_unknown_name_offline_is_told_the_nearest(asked, near):
    with pytest.raises(RecipeError) as caught:
        find_model_config(asked)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("hub-offline", "model.name_or_path")
    assert re.search(rf"{re.escape(near)}(,|$)", problem.hint)


def test_a_folder_of_that_name_is_read_instead(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("Qwen/Qwen3-8B")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert find_model_config("Qwen/Qwen3-8B") == ({"model_type": "llama"}, "folder")
