"""The rows of the pages about coming from another tool are what its reader does."""

from __future__ import annotations

import pytest
from migration_tables import TOOLS, mapping_rows

from launcher.recipe.field_tables import TASK_TABLES, adapter_fields, trainer_fields
from launcher.recipe.problems import field_descriptions
from launcher.recipe.schema import Recipe

SECTIONS = {name for name in Recipe.model_fields}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_row_names_a_key_of_a_recipe_or_says_why_not(tool: str) -> None:
    rows = mapping_rows(tool)
    assert len(rows) > 15
    assert len({row[:2] for row in rows}) > 15
    for said, key, note in rows:
        assert said
        assert key or note, said
        for one in key.replace(" and ", ", ").split(", "):
            assert one.partition(".")[0].partition(":")[0] in {*SECTIONS, ""}, (said, key)


def test_keys_of_trainer_and_adapter_are_fields_that_are_there() -> None:
    assert field_descriptions(Recipe)
    fields = {name for task in (*TASK_TABLES, "causal-lm") for name in trainer_fields(task)}
    for tool in TOOLS:
        for _, key, _ in mapping_rows(tool):
            section, _, name = key.partition(".")
            if section == "trainer" and name.isidentifier():
                assert name in fields, key
            if section == "adapter" and name.isidentifier():
                assert name in {*adapter_fields(), "path", "type", "autocast_adapter_dtype"}, key
