"""Which error of a run is the cause, and which known failure it is.

Causes come before consequences (a rank that waits for a dead one), then the earlier before the later.
Patterns are applied to errors, and to arbitrary lines only for the failures that show themselves so.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from launcher.knowledge.diagnose import forms
from launcher.knowledge.diagnose.findings import Error, Finding
from launcher.knowledge.diagnose.reading import Learnt, clean
from launcher.knowledge.diagnose.tracebacks import TestRuns
from launcher.knowledge.failures.catalogue import GONE, Failure
from launcher.recipe.field_tables import TASK_TABLES, field_table
from launcher.recipe.suggestions import TRAINER_REMOVED, close_key

BY_A_LINE = ("zero-steps", "cache-disk", "double-peft")
"""Failures that stop no process: a line that is no error tells of them, and the run is none."""
NEEDS_A_FAILURE = ("cache-disk",)
"""Of those, the ones that are mere warnings in a run that goes on."""

TOLD_BEFORE = {"no-grad-fn": "adapter-not-trainable", "tokenizer-file-broken": "tokenizer-packages"}
"""Failure by its error -> the one it is where a line that is no error told of that."""

EXPLAINED = ((re.compile(r"Error no file named .{1,200} found in directory"), "zero3-no-gather"),)
"""An error that may have many causes, and the failure that is its cause where the logs show its sign."""

_FOLLOWS = re.compile(
    r"Connection (?:reset|closed|refused)|[Bb]roken pipe|Socket Timeout|Timed out waiting|store->get|"
    r"recvValue failed|sendBytes failed|NCCL error|ncclRemoteError|ncclSystemError|remote process exited|"
    r"[Rr]ead error \[|SignalException|got signal: \d+|SIGTERM|Signal 15|exit ?code ?: ?-15|"
    r"DataLoader worker \(pid.*killed by signal: Kill|abruptly died during map|KeyboardInterrupt|SystemExit|"
    r"[Cc]lient socket has |C10d store has failed|RendezvousTimeoutError|connect\(\) timed out\. Original"
)
_ASYNCHRONOUS = re.compile(r"CUDA error: device-side assert triggered")
"""Raised by some later call: the kernel's own line, which may have no rank, tells what was wrong."""
_OWN_NAME = re.compile(r"connectFullMesh failed with .{0,200}Connection refused, remote=\[127\.0\.1\.1\]")
"""Refused by an address that no other machine has: the ranks have never met, so none of them is gone."""
_TIMED_OUT = re.compile(
    r"[Ww]atchdog caught collective|collective operation timeout|Watchdog.*timeout|"
    r"To avoid data inconsistency|NCCL (?:operations|watchdog)|Some NCCL operations have failed"
)
_LAUNCHER = re.compile(
    r"ChildFailedError|CalledProcessError|exits with return code|failed \(exitcode|exitcode +:|"
    r"Exited with exit code|sigkill_handler|non-zero exit status|RayTaskError"
)
_STEP_ENDED = re.compile(
    r"^srun: error: .{1,200}: tasks? [\d,-]+: (?:Killed|Terminated)\b|"
    r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+ \*\*\*\s*$"
)
"""srun ends the other tasks of a step where one failed; of memory it says `Out Of Memory`."""
_HOST_KILLED = re.compile(r"oom.?kill|Out of memory: Kill|OUT_OF_MEMORY", re.IGNORECASE)
_SURVIVED_STEPS = 3
"""Logged steps after an error that prove that training went on."""


_HEAD, _END = 12_000, 4_000
"""Characters of an error's text that patterns are applied to, from its beginning and its end."""


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def recognise(texts: Sequence[str], registry: Iterable[Failure]) -> Failure | None:
    """The failure whose pattern fits one of the texts; of several, the one that fits most of it."""
    best: tuple[int, Failure] | None = None
    for failure in registry:
        for pattern in failure.patterns:
            for text in texts:
                found = _compiled(pattern).search(text)
                length = found.end() - found.start() if found else 0
                if found and (best is None or length > best[0]):
                    best = (length, failure)
    return None if best is None else best[1]


def recognise_error(error: Error, registry: Sequence[Failure]) -> tuple[Failure, Error] | None:
    """The failure of an exception or of one that it was raised from, and that exception."""
    if not error.type and "\n" in error.message:  # several lines that may be the message
        for line in error.message.splitlines():
            failure = recognise((_shortened(line),), registry)
            if failure is not None:
                return failure, error
    for link in (error, *reversed(error.causes)):
        # A terminal's width, or the library that draws tracebacks, may have broken the message into lines.
        message, headline, text = map(_shortened, (link.message, link.headline, link.text()))
        texts = dict.fromkeys((message, headline, text, " ".join(headline.split())))
        failure = recognise(tuple(texts), registry)
        if failure is not None:
            return failure, link
    return None


def _shortened(text: str) -> str:
    """A message may be a whole list of weights; a pattern's time grows with more than its length."""
    return text if len(text) <= _HEAD + _END else f"{text[:_HEAD]}\n{text[-_END:]}"


def weight(error: Error) -> int:
    """0: a cause; more: the further down the list of consequences."""
    text = error.headline
    if _OWN_NAME.search(text):
        return 0
    if _HOST_KILLED.search(text) and error.kind == "line":
        return 0
    if _STEP_ENDED.search(text):
        return 8
    if forms.KILLED.search(text) and not _is_plain_exception(error):
        return 3
    if is_launchers(error):
        return 7
    if is_asynchronous(error):
        return 2
    if _TIMED_OUT.search(text):
        return 5
    if _FOLLOWS.search(text):
        return 4 if "abruptly" in text or "DataLoader" in text else 6
    if error.kind == "line":
        return 1
    return 6 if not (text or error.causes) else 0


def is_asynchronous(error: Error) -> bool:
    """Whether a CUDA kernel stopped before: the line of code that raised it need not be the one at fault."""
    return bool(_ASYNCHRONOUS.search(error.headline))


def is_cause(error: Error) -> bool:
    """Whether an error is no consequence of another one that the logs may show."""
    return weight(error) == 0 or is_asynchronous(error)


def is_launchers(error: Error) -> bool:
    """Whether it is a launcher's, which tells that a process ended and not why."""
    text = error.headline
    return bool(_LAUNCHER.search(text) or forms.EXITED.search(text) or _STEP_ENDED.search(text))


def _is_plain_exception(error: Error) -> bool:
    """Whether it is Python's own error that merely speaks of a signal."""
    return error.kind != "line" and "ChildFailedError" not in error.type


def candidates(
    errors: Iterable[Error], *, steps: Mapping[str, int], success: Mapping[str, int], tests: TestRuns
) -> list[Error]:
    """The errors that may be the end of the run, likeliest cause first.

    steps, success: file -> its logged steps, and the order of its last line that tells of a success. An error
    that training or a success came after was none, nor was one that a test expected.
    """
    left = [
        e
        for e in errors
        if e.last >= success.get(e.file, 0)
        and steps.get(e.file, 0) - e.steps_before < _SURVIVED_STEPS
        and not tests.dismisses(e)
    ]
    timed = all(error.time is not None for error in left if weight(error) == 0)

    def key(error: Error) -> tuple[float, ...]:
        return (weight(error), (error.time or 0.0) if timed else 0.0, error.order)

    return sorted(left, key=key)


def proves_failure(error: Error, *, success: bool) -> bool:
    """Whether a run that printed this did fail: an unmatched line of level ERROR alone does not.

    success: training told of a success before, so that an exit code may be another program's.
    """
    if error.kind in ("traceback", "exception"):
        return True
    text = error.message
    code = forms.EXITED.search(text)
    if success:
        return bool(_HOST_KILLED.search(text))
    if code is not None:
        return any(group not in (None, "0") for group in code.groups())
    return any(form.search(text) for form in (forms.KILLED, forms.CRASHED, forms.DIED, forms.ENDED))


_REFUSED = re.compile(
    r"\b(?P<owner>\w{0,60}TrainingArguments|LoraConfig|\w{1,60}Config)(?:\.__init__)?\(\) "
    r"got an unexpected keyword argument '(?P<name>\w{1,100})'"
)
_TABLES = {
    "TrainingArguments": ("training_arguments",),
    "LoraConfig": ("lora_config",),
    **{table.class_name: ("training_arguments", table.name) for table in TASK_TABLES.values()},
}
_TRL = ("training_arguments", *(table.name for table in TASK_TABLES.values() if table.package == "trl"))
"""Tables of fields that the configurations of trl's trainers have."""


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
