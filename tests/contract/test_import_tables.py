"""Tables of `import` against the installed packages that they were read from."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from launcher.importing.adapters import PEFT_TARGETS
from launcher.importing.deepspeed import _DEFAULTS


def test_default_layers_are_those_of_the_installed_peft() -> None:
    """Read from the source: peft itself takes half a minute to import on a cold machine."""
    package = importlib.util.find_spec("peft")
    assert package is not None
    assert package.origin is not None
    tree = ast.parse((Path(package.origin).parent / "utils" / "constants.py").read_text(encoding="utf-8"))
    name = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"
    (theirs,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == name
    ]
    assert {kind: theirs[kind] for kind in PEFT_TARGETS} == PEFT_TARGETS


def test_values_that_need_no_word_are_deepspeeds_own() -> None:
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = DeepSpeedZeroConfig.model_fields
    aliases = {field.alias or name: field for name, field in zero.items()}
    for key, value in _DEFAULTS.items():
        block, _, name = key.partition(".")
        if block == "zero_optimization" and "." not in name:
            assert aliases[name].default == value, key
        elif block == "fp16":
            assert DeepSpeedFP16Config.model_fields[name].default == value, key
