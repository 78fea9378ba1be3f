"""Golden plans that share a file: each change of a plan is noticed, and rewrites only what changed."""

from __future__ import annotations

import json
import shutil

import pytest
from golden_plans import GOLDEN, SECTIONS, difference, files_of, text_of, update, whole_plans

PLANS = whole_plans()
COMMON = json.loads((GOLDEN / "common.json").read_text(encoding="utf-8"))


@pytest.fixture
def golden(tmp_path):
    """A copy of the golden plans."""
    shutil.copytree(GOLDEN / "plans", tmp_path / "plans")
    shutil.copy(GOLDEN / "common.json", tmp_path)
    return tmp_path


def changed_file(file, section, **keys):
    """Change keys of one golden file; None removes the key."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content[section].update(keys)
    content[section] = {key: value for key, value in content[section].items() if value is not None}
    file.write_text(json.dumps(content), encoding="utf-8")


def noticed(folder):
    """Names of plans that differ from their golden one."""
    return {name for name, plan in PLANS.items() if difference(name, plan, folder)}


def texts(folder):
    return {file.name: file.read_text(encoding="utf-8") for file in folder.rglob("*.json")}


def rewritten(folder, plans):
    """Names of the files that an update with these plans changes."""
    before = texts(folder)
    update(plans, folder=folder)
    return sorted(name for name, text in texts(folder).items() if before.get(name) != text)


def with_setting(name, **settings):
    return {**PLANS[name], "settings": {**PLANS[name]["settings"], **settings}}


def test_unchanged_plans_have_no_difference(golden):
    assert noticed(golden) == set()
    assert rewritten(golden, PLANS) == []


@pytest.mark.parametrize(("section", "key"), [("settings", "seed"), ("env", "PYTHONUNBUFFERED")])
@pytest.mark.parametrize("value", ["another", None], ids=["changed", "removed"])
def test_a_changed_common_value_is_noticed_in_all_plans_that_share_it(golden, section, key, value):
    sharing = {name for name, plan in PLANS.items() if plan[section][key] == COMMON[section][key]}
    changed_file(golden / "common.json", section, **{key: value})
    assert noticed(golden) == sharing
    assert len(sharing) > len(PLANS) / 2


def test_an_extra_common_key_is_noticed_in_all_plans(golden):
    changed_file(golden / "common.json", "settings", **{"trainer.new": 1})
    assert noticed(golden) == set(PLANS)


@pytest.mark.parametrize("key", ["task", "trainer.new", "seed"])
def test_a_changed_own_value_is_noticed_in_its_plan(golden, key):
    changed_file(golden / "plans" / "qwen3_8b_dpo.json", "settings", **{key: "another"})
    assert noticed(golden) == {"qwen3_8b_dpo"}


def test_a_removed_own_key_is_noticed_in_its_plan(golden):
    changed_file(golden / "plans" / "qwen3_8b_dpo.json", "settings", task=None)
    assert noticed(golden) == {"qwen3_8b_dpo"}


def test_a_key_that_a_golden_plan_lacks_without_need_is_noticed(golden):
    file = golden / "plans" / "qwen3_8b_dpo.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content.setdefault("absent", {}).setdefault("settings", []).append("seed")
    file.write_text(json.dumps(content), encoding="utf-8")
    assert noticed(golden) == {"qwen3_8b_dpo"}


def test_a_plan_without_a_common_key_needs_it_named(golden):
    file = golden / "plans" / "bert_large.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    assert "adapter.r" in content.pop("absent")["settings"]
    file.write_text(json.dumps(content), encoding="utf-8")
    assert noticed(golden) == {"bert_large"}


@pytest.mark.parametrize("key", ["seed", "task"], ids=["common", "own"])
def test_a_setting_that_vanishes_from_one_plan_is_noticed(golden, key):
    settings = {name: value for name, value in PLANS["qwen3_8b_dpo"]["settings"].items() if name != key}
    plan = {**PLANS["qwen3_8b_dpo"], "settings": settings}
    shown = difference("qwen3_8b_dpo", plan, golden)
    assert [line for line in shown.splitlines() if line.startswith("-  ")] == [
        f'-    "{key}": {json.dumps(PLANS["qwen3_8b_dpo"]["settings"][key])},'
    ]
    assert rewritten(golden, {"qwen3_8b_dpo": plan}) == ["qwen3_8b_dpo.json"]
    assert whole_plans(golden)["qwen3_8b_dpo"] == plan


def test_a_new_setting_of_all_plans_is_one_changed_file(golden):
    plans = {name: with_setting(name, new=1) for name in PLANS}
    assert rewritten(golden, plans) == ["common.json"]
    assert whole_plans(golden) == plans
    assert json.loads((golden / "common.json").read_text())["settings"]["new"] == 1


def test_a_changed_plan_rewrites_its_own_file_alone(golden):
    assert rewritten(golden, {"smoke": with_setting("smoke", seed=7)}) == ["smoke.json"]


def small(**settings):
    """Name -> a plan that has only these settings, one value for each plan."""
    ((key, values),) = settings.items()
    return {
        f"p{number}": {"env": {}, "settings": {} if value is None else {key: value}}
        for number, value in enumerate(values)
    }


def common_setting(folder):
    return json.loads((folder / "common.json").read_text())["settings"].get("a")


def test_the_common_value_changes_when_another_is_more_frequent(tmp_path):
    for values, common in [
        ([1, 1, 2, 2], 1),  # equally frequent at the beginning: the first
        ([1, 2, 2, 2], 2),
        ([1, 1, 2, 2], 2),  # equally frequent: it stays
        ([1, 1, 1, 2], 1),
        ([1, 1, None, None], 1),
        ([1, None, None, None], None),
        ([1, 1, None, None], None),
        ([1, 1.0, 1, None], 1),
    ]:
        plans = small(a=values)
        update(plans, folder=tmp_path)
        assert common_setting(tmp_path) == common, values
        assert {name: text_of(plan) for name, plan in whole_plans(tmp_path).items()} == {
            name: text_of(plan) for name, plan in plans.items()
        }


def test_plans_are_updated_one_by_one_in_any_order(tmp_path):
    """As by several test processes: each knows the plans of its tests alone."""
    plans = small(a=[1, 1, 2, 3])
    update(plans, folder=tmp_path)
    changed = {name: {"env": {"NEW": "x"}, "settings": {"a": 4}} for name in reversed(plans)}
    for name, plan in changed.items():
        update({name: plan}, folder=tmp_path)
    assert texts(tmp_path) == {file.name: text for file, text in files_of(changed, tmp_path).items()}
    assert json.loads(texts(tmp_path)["common.json"]) == {"env": {"NEW": "x"}, "settings": {"a": 4}}
    assert json.loads(texts(tmp_path)["p0.json"]) == {"env": {}, "settings": {}}


def test_a_removed_plan_no_longer_counts(tmp_path):
    update(small(a=[1, 2, 2]), folder=tmp_path)
    update({}, removed=["p1", "p2"], folder=tmp_path)
    assert common_setting(tmp_path) == 1
    assert list(whole_plans(tmp_path)) == ["p0"]


def test_every_shared_section_is_in_the_common_file():
    assert set(COMMON) == set(SECTIONS)
    assert all(COMMON.values())
