"""Rows of tables of other tools' keys: which values of a key one means, defaults, and what a recipe needs."""

from __future__ import annotations

from typing import Any

import pytest
from every import every

from launcher.importing import axolotl, llamafactory, trl
from launcher.importing.arguments import Field
from launcher.importing.conversions import To, text
from launcher.importing.key_tables import Left, Peer, Tool
from launcher.importing.reading import Effect, Reading

TOOL = Tool("tool", "Tool", "1", {"lr": 1e-4, "mix": None}, "ignores it", {}, {})


def peer(**values: Any) -> Peer:
    return Peer(TOOL, Reading("Tool recipe", "t.yaml"), values, {name: 3 for name in values})


def left(peer: Peer, names: dict[str, str], effect: Effect | None = Effect.TRAINING) -> list[str]:
    peer.leave([Left(effect, "why", names, "what to do")])
    return [entry.key for entry in peer.reading.dropped]


@every(
    ("values", "value", "is_meant"),
    [
        ("=muon|dion", "dion", True),
        ("=muon|dion", "Muon", True),
        ("=muon|dion", "adamw", False),
        ("!=turn", "all", True),
        ("!=turn", "turn", False),
        ("=false", False, True),
        ("=false", "no", True),
        ("=false", True, False),
        ("=true", 1, True),
        ("!=a|b", ["a"], True),
    ],
)
def test_an_entry_means_the_values_that_it_names(values: str, value: Any, is_meant: bool) -> None:
    made = peer(key=value)
    assert left(made, {"key": values}) == ["key"] * is_meant
    assert ("key" in made.reading.seen) is is_meant


def test_a_key_without_values_is_listed_unless_it_is_off_or_has_its_default() -> None:
    names = {"lr": "", "mix": "", "other": "", "absent": ""}
    assert left(peer(lr=1e-4, mix=False, other="x"), names) == ["other"]
    assert left(peer(lr=2e-4, mix="concat"), names) == ["lr", "mix"]


def test_a_refused_value_ends_the_import_with_its_hint() -> None:
    made = peer(rl="orpo")
    assert left(made, {"rl": "=orpo"}, None) == []
    (problem,) = made.reading.refusals
    assert (problem.path, problem.line, problem.hint) == ("rl", 3, "what to do")


def test_defaults_and_needs_of_a_table() -> None:
    keys = {
        "model": To("model.name_or_path", text, required=""),
        "lr": Field("trainer.learning_rate", default=1e-4),
        "epochs": Field("trainer.num_train_epochs", default=3.0),
    }
    made = peer(lr=2e-4)
    made.take_keys(keys)
    made.fill(keys)
    assert {key: (value.value, value.is_default) for key, value in made.reading.taken.items()} == {
        "trainer.learning_rate": (2e-4, False),
        "trainer.num_train_epochs": (3.0, True),
    }
    assert [(entry.key, entry.effect) for entry in made.reading.dropped] == [
        ("model.name_or_path", Effect.NEEDED)
    ]
    made = peer(model="org/model", max_steps=5)
    made.take_keys({**keys, "max_steps": Field("trainer.max_steps")})
    made.fill(keys)
    assert "trainer.num_train_epochs" not in made.reading.taken
    assert not made.reading.dropped


@pytest.mark.parametrize("module", [axolotl, llamafactory, trl])
def test_values_are_of_keys_that_the_tool_has(module: Any) -> None:
    tool = module.tool()
    known = {*tool.keys, *(name for names in tool.lists.values() for name in names)}
    named = [
        (section, name)
        for section, table in tool.left.items()
        for entry in table
        for name, values in entry.names.items()
        if values
    ]
    assert named
    assert {name for section, name in named if section != "mixture"} <= known
