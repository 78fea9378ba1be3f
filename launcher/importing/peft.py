"""peft's adapter_config.json: the LoRA that an adapter was trained with."""

from __future__ import annotations

from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.importing.arguments import PEFT_DEFAULTS, fill_defaults, take_adapter
from launcher.importing.reading import Effect, Given, Reading
from launcher.knowledge.lint.document import read_json

TOOL = "adapter_config.json"


def is_config(data: Any) -> bool:
    """Whether a mapping is an adapter_config.json."""
    return isinstance(data, dict) and "peft_type" in data


def read(text: str, file: str) -> Reading:
    """Read an adapter_config.json. Raises RecipeError if it is no JSON object."""
    document = read_json(text, file)
    if document.root is None or document.root.members is None:
        raise RecipeError(Problem("import-unreadable", "expected a JSON object", file, 1))
    reading = Reading(TOOL, file)
    for member in document.root.members:
        given = Given(member.key, member.node.plain(), document.place(member.start)[0])
        empty = given.value in (None, {}, [], False, "")
        if given.name == "peft_type":
            reading.know(given.name)
            if given.value != "LORA":
                reading.refuse(given, f"is {given.value}: adapters here are LoRA")
        elif given.name == "base_model_name_or_path" and given.value:
            reading.take("model.name_or_path", given.value, given)
        elif (empty and given.value is not None) or not take_adapter(reading, given.name, given):
            if empty:
                reading.know(given.name)
            else:
                reading.drop(given, Effect.TRAINING, "no field of LoraConfig that is known here")
    fill_defaults(reading, PEFT_DEFAULTS)
    return reading
