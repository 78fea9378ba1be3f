"""The field that an unknown keyword argument was probably meant to be."""

from __future__ import annotations

import re

from launcher.failures.installation import GONE
from launcher.recipe.field_tables import TASK_TABLES, field_table
from launcher.recipe.suggestions import TRAINER_REMOVED, close_key

_REFUSED = re.compile(
    r"\b(?P<owner>\w{0,60}TrainingArguments|LoraConfig|\w{1,60}Config)(?:\.__init__)?\(\) "
    r"got an unexpected keyword argument '(?P<name>\w{1,100})'"
)
_TABLES = {
    "TrainingArguments": ("training_arguments",),
    "LoraConfig": ("lora_config",),
    **{table.class_name: ("training_arguments", table.name) for table in TASK_TABLES.values()},
}
_TRL = ("training_arguments", *(table.name for table in TASK_TABLES.values() if table.package == "trl"))
"""Tables of fields that the configurations of trl's trainers have."""


def meant_field(message: str) -> str | None:
    """The field whose name resembles the one that a constructor refused; None where nothing does.

    None too for a field that another version has: it is spelt as it was meant.
    """
    found = _REFUSED.search(message)
    if found is None:
        return None
    tables = _TABLES.get(found["owner"], _TRL)
    fields = [name for table in tables for name in field_table(table)["fields"]]
    name = found["name"]
    if name in fields or name in TRAINER_REMOVED or re.fullmatch(GONE, name):
        return None
    return close_key(name, fields)
