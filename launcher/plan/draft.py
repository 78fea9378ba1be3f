"""The planner's draft: settings under construction. Exists only inside `make_plan`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from launcher.errors import Problem, RecipeError
from launcher.plan.plan import Provenance, Source
from launcher.plan.settings import HasSettings, Settings
from launcher.recipe.loading import Origin

Refusal = tuple[str, str, str, str]
"""(code, setting at fault, message, hint)"""
EXPLICIT: frozenset[Source] = frozenset({"recipe", "parent", "override"})


class Draft(HasSettings):
    """Settings and their provenance. A later `put` replaces an earlier one; fixes check `explicit` first."""

    def __init__(self, origins: Mapping[str, Origin]) -> None:
        self._settings = Settings.empty()
        self.provenance: dict[str, Provenance] = {}
        self.warnings: list[str] = []
        self._origins = origins

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def names(self) -> Collection[str]:
        return self.provenance

    def copy(self) -> Draft:
        """A draft of its own with the same settings and warnings."""
        twin = Draft(self._origins)
        twin._settings = self._settings.copy()
        twin.provenance, twin.warnings = dict(self.provenance), list(self.warnings)
        return twin

    def put(
        self, dotted: str, value: object, reason: str, *, source: Source = "default", by: str = ""
    ) -> None:
        self._settings.put(dotted, value)
        self.provenance[dotted] = Provenance(source, by or source, reason)

    def explain(self, dotted: str, reason: str, *, source: Source) -> None:
        """Replace what is known about a setting; its value stays."""
        self.provenance[dotted] = Provenance(source, source, reason)

    def warn(self, text: str) -> None:
        """Add a warning to the plan, once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def problem(self, code: str, dotted: str, message: str, hint: str) -> Problem:
        """A problem at the recipe line of a setting."""
        file, line = self.place(dotted)
        return Problem(code, message, file, line, dotted, hint)

    def refuse(self, *refusal: *Refusal) -> RecipeError:
        """The error of a problem at the recipe line of a setting."""
        return RecipeError(self.problem(*refusal))

    def put_recipe(
        self, dotted: str, value: object, default_reason: str, *, origin: str | None = None
    ) -> None:
        """Set what the recipe has for `dotted`, or the schema's default.

        origin: the recipe's key, where it is not the setting's own name.
        """
        found = self.origin(origin or dotted)
        if found is None:
            self.put(dotted, value, default_reason)
        else:
            self.put(dotted, value, "set in the recipe", source=found.source, by=found.by)

    def origin(self, dotted: str) -> Origin | None:
        """Where the recipe sets `dotted` or something inside it; None where it does not."""
        if dotted in self._origins:
            return self._origins[dotted]
        inside = (dotted + ".", dotted + "[")
        return next((o for key, o in self._origins.items() if key.startswith(inside)), None)

    def explicit(self, dotted: str) -> bool:
        """Whether the user set this value (recipe, parent or --set)."""
        known = self.provenance.get(dotted)
        return known is not None and known.source in EXPLICIT

    def place(self, dotted: str) -> tuple[str | None, int | None]:
        """File and line of an explicit setting, for error messages."""
        origin = self.origin(dotted)
        if origin is None:
            return None, None
        file, _, line = origin.by.rpartition(":")
        return (file, int(line)) if line.isdigit() else (origin.by, None)
