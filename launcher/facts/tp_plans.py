"""Which model families transformers has a tensor-parallel plan for (`base_model_tp_plan`)."""

from __future__ import annotations

import functools
import json

from launcher.facts.shipped import facts_file


@functools.cache
def tp_plans() -> dict[str, dict[str, str]]:
    """Model type -> module pattern -> style, as in the tested transformers; {} for a family without one."""
    text = facts_file("tp_plans.json").read_text(encoding="utf-8")
    plans: dict[str, dict[str, str]] = json.loads(text)["plans"]
    return plans


def has_tp_plan(model_type: str) -> bool:
    """Whether transformers can cut this family's layers by itself."""
    return bool(tp_plans().get(model_type))
