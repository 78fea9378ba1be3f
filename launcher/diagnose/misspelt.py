"""The field that an unknown keyword argument was probably meant to be."""

from __future__ import annotations

import re

from launcher.failures.installation import GONE
from launcher.recipe.field_tables import field_table
from launcher.recipe.suggestions import TRAINER_REMOVED, close_key

_REFUSED = re.compile(
    r"\b(?P<owner>\w{0,60}TrainingArguments|LoraConfig|\w{1,60}Config)(?:\.__init__)?\(\) "
    r"got an unexpected keyword argument '(?P<name>\w{1,100})'"
)
_TABLES = {
    "TrainingArguments": ("transformers",),
    "Seq2SeqTrainingArguments": ("transformers", "seq2seq"),
    "LoraConfig": ("peft",),
}
_TRL = ("transformers", "trl")
"""Tables of the fields that the configurations of trl's trainers have."""


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
