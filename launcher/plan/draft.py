"""The planner's work sheet: settings under construction. Lives only inside `make_plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.plan.plan import Setting, Source
from launcher.recipe.loading import Origin

EXPLICIT: frozenset[Source] = frozenset({"recipe", "parent", "override"})


class Draft:
    """Dotted setting -> Setting. A later `put` replaces an earlier one; fixes check `explicit` first."""

    def __init__(self, origins: Mapping[str, Origin]) -> None:
        self.settings: dict[str, Setting] = {}
        self.warnings: list[str] = []
        self._origins = origins

    def copy(self) -> Draft:
        """A draft of its own with the same settings and warnings."""
        twin = Draft(self._origins)
        twin.settings, twin.warnings = dict(self.settings), list(self.warnings)
        return twin

    def put(self, dotted: str, value: Any, reason: str, *, source: Source = "default", by: str = "") -> None:
        self.settings[dotted] = Setting(value, source, by or source, reason)

    def warn(self, text: str) -> None:
        """Say something beside the plan, once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def put_recipe(self, dotted: str, value: Any, default_reason: str, *, origin: str | None = None) -> None:
        """Record what the recipe says about `dotted`, or the schema's default.

        origin: the recipe's key, where it is not the setting's own name.
        """
        said = self.origin(origin or dotted)
        if said is None:
            self.put(dotted, value, default_reason)
        else:
            self.settings[dotted] = Setting(value, said.source, said.by, "said by the recipe")

    def origin(self, dotted: str) -> Origin | None:
        """Where the recipe says `dotted` or something inside it; None where it does not."""
        if dotted in self._origins:
            return self._origins[dotted]
        inside = (dotted + ".", dotted + "[")
        return next((o for key, o in self._origins.items() if key.startswith(inside)), None)

    def get(self, dotted: str, default: Any = None) -> Any:
        setting = self.settings.get(dotted)
        return default if setting is None else setting.value

    def section(self, prefix: str) -> dict[str, Any]:
        """Values of the settings below `prefix.`, by the rest of their names."""
        start = prefix + "."
        found = self.settings.items()
        return {key.removeprefix(start): one.value for key, one in found if key.startswith(start)}

    def explicit(self, dotted: str) -> bool:
        """True when the user wrote this value (recipe, parent or --set)."""
        setting = self.settings.get(dotted)
        return setting is not None and setting.source in EXPLICIT

    def place(self, dotted: str) -> tuple[str | None, int | None]:
        """File and line of an explicit setting, for error messages."""
        origin = self.origin(dotted)
        if origin is None:
            return None, None
        file, _, line = origin.by.rpartition(":")
        return (file, int(line)) if line.isdigit() else (origin.by, None)
