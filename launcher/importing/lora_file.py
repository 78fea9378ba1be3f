"""peft's adapter_config.json: the LoRA that an adapter was trained with."""

from __future__ import annotations

from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.importing.adapter import PEFT_DEFAULTS, take_adapter
from launcher.importing.arguments import fill_defaults
from launcher.importing.found import Effect, Reading
from launcher.knowledge.lint.document import read_json

TOOL = "adapter_config.json"


def tells(data: Any) -> bool:
    """Whether a mapping that was read is one."""
    return isinstance(data, dict) and "peft_type" in data


def read(text: str, file: str) -> Reading:
    """Read one. RecipeError when it is no JSON object."""
    document = read_json(text, file)
    if document.root is None or document.root.members is None:
        raise RecipeError(Problem("import-unreadable", "expected a JSON object", file, 1))
    reading = Reading(TOOL, file)
    for member in document.root.members:
        key, value, line = member.key, member.node.plain(), document.place(member.start)[0]
        if key == "peft_type":
            reading.know(key)
            if value != "LORA":
                reading.refuse(key, line, f"is {value}: adapters here are LoRA")
        elif key == "base_model_name_or_path" and value:
            reading.take("model.name_or_path", value, line, key)
        elif value in ({}, [], False, "") or not take_adapter(reading, key, value, line):
            if value in (None, {}, [], False, ""):
                reading.know(key)
            else:
                reading.drop(key, value, line, Effect.TRAINING, "no field of LoraConfig that is known here")
    fill_defaults(reading, PEFT_DEFAULTS)
    return reading
