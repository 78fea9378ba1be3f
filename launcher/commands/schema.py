"""`schema`: the JSON Schema of recipes, for editors."""

from __future__ import annotations

import json

from launcher.recipe.json_schema import recipe_json_schema
from launcher.report.outcome import Outcome


def schema_command() -> Outcome:
    """Print the schema."""
    schema = recipe_json_schema()
    return Outcome({"schema": schema}, json.dumps(schema, indent=2))
