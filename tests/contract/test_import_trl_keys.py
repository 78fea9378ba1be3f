"""The keys and defaults of TRL that `import` reads by, against the installed TRL."""

from __future__ import annotations

import dataclasses

from launcher.importing import trl


def test_trl_has_the_keys_and_defaults_that_are_shipped() -> None:
    from trl import DPOConfig, ModelConfig, ScriptArguments, SFTConfig
    from trl.scripts.utils import DatasetMixtureConfig

    tool = trl.tool()
    classes = (SFTConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig)
    found = {field.name: field.default for config in classes for field in dataclasses.fields(config)}
    assert set(tool.keys) <= set(found)
    given = {name: default for name, default in tool.keys.items() if default is not None}
    assert given == {name: found[name] for name in given}
    of_dpo = {field.name: field.default for field in dataclasses.fields(DPOConfig)}
    assert set(tool.lists["dpo"]) <= set(of_dpo)
    assert found["learning_rate"] == 2e-5
    assert of_dpo["learning_rate"] == 1e-6
    written = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "max_length": 1024, "dtype": "float32"}
    assert {name: found[name] for name in written} == written
