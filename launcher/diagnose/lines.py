"""What single lines tell that have not the form of an error: kept while logs are read, for the verdict."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import cache

from launcher.diagnose.findings import Error, Finding
from launcher.diagnose.matching import BY_A_LINE, EXPLAINED, NEEDS_A_FAILURE, TOLD_BEFORE, recognise
from launcher.diagnose.reading import Learnt, clean
from launcher.failures.failure import Failure

_TAIL = 40
"""Lines before a launcher's error among which a program's own words for the cause are looked for."""
_MOST_NOTICED = 20


class Lines:
    """The lines of all logs that the registry has a word for."""

    def __init__(self, registry: Sequence[Failure]) -> None:
        self._registry = registry
        told = {*BY_A_LINE, *TOLD_BEFORE.values()}
        self._told = [(_bytes(p), f) for f in registry if f.id in told for p in f.patterns]
        self._signs = [(_bytes(sign), failure) for failure in registry for sign in failure.signs]
        self.by_line: list[tuple[Failure, Error]] = []
        self._noticed: dict[str, Finding] = {}
        self._tail: deque[tuple[str, int, bytes]] = deque(maxlen=_TAIL)

    def every(self, raw: bytes, number: int, name: str) -> None:
        """Any line, also one that nobody looks at: fast."""
        if raw and not raw.isspace():
            self._tail.append((name, number, raw))

    def some(self, raw: bytes, text: str, number: int, name: str) -> None:
        """A line with one of forms.WORDS; text: without its prefixes."""
        for pattern, failure in self._told:
            if pattern.search(raw):
                self.by_line.append((failure, _error(text, name, number)))
                break
        if len(self._noticed) < _MOST_NOTICED:
            for pattern, failure in self._signs:
                if failure.id not in self._noticed and pattern.search(raw):
                    self._noticed[failure.id] = Finding(failure, _error(text, name, number), (), None)

    def closer(self, failure: Failure) -> Failure:
        """The failure, or the one that it is by a line of the same logs."""
        wanted = TOLD_BEFORE.get(failure.id)
        return next((told for told, _ in self.by_line if told.id == wanted), failure)

    def shown(self, *, failed: bool) -> list[Finding]:
        """The failures that a line tells of that is no error."""
        for failure, error in self.by_line:
            if failure.id in BY_A_LINE and (failed or failure.id not in NEEDS_A_FAILURE):
                return [Finding(failure, error, (), None)]
        return []

    def explained(self, errors: Sequence[Error]) -> tuple[Failure, Error] | None:
        """The first error whose cause a sign in the same logs tells."""
        for error in errors:
            for form, cause in EXPLAINED:
                if form.search(error.message) and cause in self._noticed:
                    return self._noticed[cause].failure, error
        return None

    def before_the_end(self) -> list[Finding]:
        """A known failure in the last lines, whatever their form: of a run that is known to have failed."""
        learnt = Learnt()
        for name, number, raw in reversed(self._tail):
            for line in clean(raw, number, name, None, learnt):
                failure = recognise((line.text,), self._registry)
                if failure is not None:
                    return [Finding(self.closer(failure), _error(line.text, name, number), (), None)]
        return []

    def noticed(self) -> list[Finding]:
        """Known causes of surprise that stopped nothing, in the order of their lines."""
        return list(self._noticed.values())


@cache
def _bytes(pattern: str) -> re.Pattern[bytes]:
    return re.compile(pattern.encode())


def _error(text: str, name: str, number: int) -> Error:
    return Error("", text, kind="line", file=name, line=number)
