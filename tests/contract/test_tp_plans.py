"""The table of tensor-parallel plans is what the installed transformers has."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from launcher.facts.heads import FAMILY_TASKS
from launcher.facts.shipped import facts_file
from launcher.facts.tp_plans import has_tp_plan, tp_plans

if not find_spec("transformers"):
    pytest.skip("transformers is not installed", allow_module_level=True)


def test_the_table_is_that_of_the_installed_transformers():
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    version = json.loads(facts_file("tp_plans.json").read_text())["version"]
    found = {name: CONFIG_MAPPING[name].base_model_tp_plan or {} for name in sorted(FAMILY_TASKS)}
    assert (version, tp_plans()) == (transformers.__version__, found)


def test_families_with_and_without():
    assert has_tp_plan("llama")
    assert not has_tp_plan("gpt2")
    assert not has_tp_plan("unheard-of")
