"""Many cheap cases as one test: a case of pytest costs milliseconds, a line about one entry does not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

# What they change or record is undone after the test only: a case would see the case before it.
PER_TEST = {"capfd", "capsys", "caplog", "monkeypatch", "recwarn", "request"}
OFFENCES = (Exception, pytest.fail.Exception, pytest.skip.Exception)  # a skip would end the walk


def every(
    names: str | tuple[str, ...], cases: Iterable[Any], ids: Callable[[Any], str] = repr
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, as one test that walks all cases and names each that fails.

    For checks that take milliseconds and change nothing. `tmp_path` is a fresh folder in each case.
    """
    arguments = (names,) if isinstance(names, str) else names
    walked = list(cases)
    assert walked, "without a case nothing is checked"

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(check).parameters
        assert not PER_TEST & parameters.keys(), "needs cases of its own: use parametrize"

        @functools.wraps(check)
        def walk(**fixtures: Any) -> None:
            offenders = []
            for number, case in enumerate(walked):
                values = (case,) if len(arguments) == 1 else case
                try:
                    check(**dict(zip(arguments, values, strict=True)), **own_folder(fixtures, number))
                except OFFENCES as error:
                    offenders.append(f"{ids(case)}: {type(error).__name__}: {error}")
            assert not offenders, f"{len(offenders)} of {len(walked)}:\n" + "\n".join(offenders)

        fixtures = [parameter for name, parameter in parameters.items() if name not in arguments]
        walk.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return walk

    return decorate


def own_folder(fixtures: dict[str, Any], number: int) -> dict[str, Any]:
    """The fixtures of a case: those of the test, with a folder of its own below the test's."""
    if "tmp_path" not in fixtures:
        return fixtures
    folder: Path = fixtures["tmp_path"] / f"case{number}"
    folder.mkdir()
    return {**fixtures, "tmp_path": folder}
