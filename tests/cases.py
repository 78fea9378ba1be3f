"""Parameters of a test: the usual cases in `make test`, all of them in `make test-full`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def cases(every: Iterable[Any] | Mapping[str, Any], *usual: Any, named: bool = False) -> list[Any]:
    """Each case as a parameter; those that are not among the usual ones are `slow`.

    named: `every` maps names to values, which are the parameters; otherwise names or values themselves.
    """
    found = []
    for case in every:
        values = (every[case],) if named else case if isinstance(case, tuple) else (case,)
        marks = () if case in usual else pytest.mark.slow
        found.append(pytest.param(*values, marks=marks, id=case if isinstance(case, str) else None))
    assert sum(not case.marks for case in found) == len(usual), "a usual case is not there"
    return found
