"""The typed settings of a plan: what reads and writes refuse, and that nothing reads them by text."""

from __future__ import annotations

import pickle
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import get_type_hints

import pytest
from factories import plan, with_settings

from launcher.errors import RecipeError
from launcher.plan.settings import OTHERS, AdapterSettings, Section, Settings, TrainerSettings
from launcher.recipe.field_tables import adapter_fields, trainer_fields
from launcher.tasks import TASKS
from launcher.train.job import Job

LITERAL_READ = re.compile(r"\.(?:at|value)\(\s*f?\"(?:task|\w+\.\w+)")
BY_TEXT = {"launcher/inputs/finished_run.py"}  # a plan.json of somebody else may lack any setting
KINDS = {"int": {int}, "float": {int, float}, "str": {str}, "bool": {bool}, "none": {type(None)}}


@pytest.mark.parametrize("name", ["sharding.zero_stages", "model", "nothing.here", "trainer", "data.train.x"])
def test_a_name_that_no_section_has_is_refused(name):
    with pytest.raises(KeyError, match=name):
        Settings.empty().put(name, 1)
    with pytest.raises(KeyError, match=name):
        Settings.empty().at(name)


def test_a_setting_that_is_not_decided_cannot_be_read():
    made = Settings.empty()
    with pytest.raises(AttributeError, match=r"sharding\.engine"):
        _ = made.sharding.engine
    assert made.sharding.zero_stage is None
    with pytest.raises(AttributeError, match="engines"):
        _ = made.sharding.engines  # type: ignore[attr-defined]


def test_open_sections_keep_what_nobody_reads():
    made = Settings.empty()
    for name, value in {
        "trainer.max_steps": 5, "trainer.lr_scheduler_kwargs": {"a": 1}, "adapter.use_dora": True,
        "launch.env.A.B": "1", "deepspeed.aio.block_size": 3, "deepspeed.offload_param.buffer_count": 4,
    }.items():  # fmt: skip
        made.put(name, value)
        assert made.at(name) == value
    assert made.trainer.max_steps == 5
    assert (made.trainer.others, made.adapter.others) == (
        {"lr_scheduler_kwargs": {"a": 1}},
        {"use_dora": True},
    )
    assert made.launch.env == {"A.B": "1"}
    assert made.deepspeed.offload_param.buffer_count == 4


def test_a_copy_is_of_its_own():
    first = Settings.empty()
    first.put("trainer.foo", 1)
    second = first.copy()
    assert second == first
    second.put("trainer.foo", 2)
    second.put("launch.env.A", "1")
    assert (first.trainer.others, first.launch.env) == ({"foo": 1}, {})
    assert second != first


def test_a_plan_is_frozen_and_knows_each_of_its_settings(tmp_path):
    made = plan(tmp_path)
    with pytest.raises(FrozenInstanceError):
        made.sharding.zero_stage = 3  # type: ignore[misc]
    assert set(made.names) == set(made.provenance)
    assert made.fields(made.trainer)["learning_rate"] == made.trainer.learning_rate
    assert with_settings(made, {"trainer.max_steps": 3}).trainer.max_steps == 3


@pytest.mark.parametrize(
    ("section", "fields"),
    [(TrainerSettings, [trainer_fields(task.name) for task in TASKS]), (AdapterSettings, [adapter_fields()])],
)
def test_attributes_of_upstream_fields_have_upstreams_types(section, fields):
    hints = {name: get_type_hints(section)[name] for name in section.KINDS}
    own = {"type", "path", "cast_input_dtype_enabled", "autocast_adapter_dtype", OTHERS}
    for name, hint in hints.items():
        known = [table[name] for table in fields if name in table]
        assert known or name in own, name
        given = {kind for entry in known for kind in entry["types"]}
        for kind in given & KINDS.keys() - {"none"}:
            assert any(one.__name__ in str(hint) for one in KINDS[kind]), (name, kind)
        for whole, text in (("dict", "Mapping"), ("list[str]", "list[str]"), ("list[int]", "list[int]")):
            assert whole not in given or text in str(hint), (name, whole)


def test_no_code_reads_a_setting_by_a_written_name(root):
    found = {
        str(path.relative_to(root))
        for path in (root / "launcher").rglob("*.py")
        # Other formats have dotted names, too: foreign files, DeepSpeed's.
        if not {"importing", "lint"} & {*path.parts} and LITERAL_READ.search(path.read_text("utf-8"))
    }
    assert found == BY_TEXT


def test_every_section_is_known():
    inner = {kind for owner in Section.__subclasses__() for kind in owner.KINDS.values() if kind}
    assert inner == {kind for kind in Section.__subclasses__() if kind is not Settings}


def test_settings_without_some_values_can_be_pickled(tmp_path: Path) -> None:
    """Workers of a DataLoader and the fingerprints of data sets pickle a job."""
    job = Job(tmp_path, {"settings": {"trainer.max_steps": {"value": 3}}})
    again = pickle.loads(pickle.dumps(job))
    assert again.trainer.max_steps == 3
    assert again.settings == job.settings
    copied = pickle.loads(pickle.dumps(job.settings))
    with pytest.raises(RecipeError) as caught:
        _ = copied.trainer.learning_rate
    assert caught.value.problems[0].code == "bad-plan"
