"""Configurations of named models that are shipped: `launcher/models/data/models.json`.

Each is written there by hand with its source. This builds the class that a model is published as on the
meta device, writes its count of parameters, and compares it with the published one.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from launcher.files.shipped import facts_file

UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}


def models() -> dict[str, Any]:
    """The table with every count; ValueError with all models whose published count is another."""
    table: dict[str, Any] = json.loads(facts_file("models.json").read_text("utf-8"))
    wrong = []
    for name, entry in table["models"].items():
        config = entry["config"]
        entry["params"] = count(config)
        if not agrees(entry["params"] + own_head(config), entry.get("published")):
            wrong.append(f"{name}: {entry['params']:,} parameters, published are {entry['published']}")
    if wrong:
        raise ValueError("\n".join(wrong))
    return table


def count(config: Mapping[str, Any]) -> int:
    """Unique parameters of the class in `architectures`."""
    kind = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = kind(transformers.AutoConfig.for_model(**copy.deepcopy(dict(config))))  # which changes it
    return sum(parameter.numel() for parameter in model.parameters())


def own_head(config: Mapping[str, Any]) -> int:
    """Parameters of the head that a T5 is published with, and that its class ties until it is loaded."""
    is_untied = config["model_type"] in ("t5", "mt5") and config.get("tie_word_embeddings") is False
    return config["vocab_size"] * config["d_model"] if is_untied else 0


def agrees(params: int, published: str | None) -> bool:
    """Whether a count like `7.61B` is the given one, within a unit of its last digit."""
    if published is None:
        return True
    parts = re.fullmatch(r"(\d+)(?:\.(\d+))?([KMB])", published)
    if parts is None:
        raise ValueError(f"not a count of parameters: {published!r}")
    unit = UNITS[parts[3]] // 10 ** len(parts[2] or "")
    return abs(params - int(parts[1] + (parts[2] or "")) * unit) <= unit
