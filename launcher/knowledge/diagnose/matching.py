"""Which error of a run is the cause, and which known failure it is.

Causes come before consequences (a rank that waits for a dead one), then the earlier before the later.
Patterns are applied to errors; to other lines only for the failures of BY_A_LINE and TOLD_BEFORE.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from launcher.knowledge.diagnose import forms
from launcher.knowledge.diagnose.device_memory import CONDITIONS
from launcher.knowledge.diagnose.findings import Error, Finding
from launcher.knowledge.diagnose.reading import Prefixes, clean
from launcher.knowledge.diagnose.tracebacks import TestRuns
from launcher.knowledge.diagnose.versions import NAMED
from launcher.knowledge.failures.catalogue import GONE, Failure
from launcher.recipe.field_tables import TASK_TABLES, field_table
from launcher.recipe.suggestions import TRAINER_REMOVED, close_key

BY_A_LINE = ("zero-steps", "cache-disk", "double-peft")
"""Failures of runs that end without an error, recognised by a line that is no error."""
NEEDS_A_FAILURE = ("cache-disk",)
"""Of those, the ones that are only warnings in a run that continues."""
TOLD_BEFORE = {
    "no-grad-fn": "adapter-not-trainable",
    "tokenizer-file-broken": "tokenizer-packages",
    "no-gpu": "fabric-manager",
}
"""Failure -> a more specific one, if a line before the error matches it."""
GENERAL = ("nccl-error", "nccl-system-error")
"""Failures that only name the library: any other that the same message shows is its reason."""
WAITING = ("nccl-timeout", "nccl-peer-died")
"""Failures of ranks that waited for another one: the rank without the error is the cause."""
EXPLAINED = ((re.compile(r"Error no file named .{1,200} found in directory"), "zero3-no-gather"),)
"""An error with many possible causes, and the failure that is its cause if the logs have its sign."""

_HOST_KILLED = re.compile(
    r"oom.?kill|Out of memory: Kill|OUT_OF_MEMORY|NVRM: Xid|fallen off the bus", re.IGNORECASE
)
"""What the kernel or the scheduler reports."""
_STEP_ENDED = re.compile(
    r"^srun: error: .{1,200}: tasks? [\d,-]+: (?:Killed|Terminated)\b|"
    r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+ \*\*\*\s*$"
)
"""srun ends the other tasks of a step where one failed; a task without memory is `Out Of Memory`."""
_ASYNCHRONOUS = re.compile(r"CUDA error: device-side assert triggered")
"""Raised by some later call: the line of the kernel, which may have no rank, has the cause."""
_OWN_NAME = re.compile(r"connectFullMesh failed with .{0,200}Connection refused, remote=\[127\.0\.1\.1\]")
"""Refused by an address that no other machine has: the ranks were never connected, so none has failed."""
_TIMED_OUT = re.compile(
    r"[Ww]atchdog caught collective|collective operation timeout|Watchdog.*timeout|"
    r"To avoid data inconsistency|NCCL (?:operations|watchdog)|Some NCCL operations have failed"
)
_WORKER_DIED = re.compile(r"DataLoader worker \(pid.*killed by signal: Kill|abruptly died during map")
_FOLLOWS = re.compile(
    r"^Fatal Python error: Aborted|"  # NCCL's watchdog and C++ abort after they wrote why
    r"Connection (?:reset|closed|refused)|[Bb]roken pipe|Socket Timeout|Timed out waiting|store->get|"
    r"recvValue failed|sendBytes failed|NCCL error|ncclRemoteError|ncclSystemError|remote process exited|"
    r"[Rr]ead error \[|SignalException|got signal: \d+|SIGTERM|Signal 15|exit ?code ?: ?-15|"
    r"KeyboardInterrupt|SystemExit|"
    r"[Cc]lient socket has |C10d store has failed|RendezvousTimeoutError|connect\(\) timed out\. Original|"
    r"_ARRAY_API not found"  # printed at import, and many programs continue
)
_WRAPS = re.compile(r"DatasetGenerationError: An error occurred while generating the dataset")
"""Exceptions that tell nothing of the one that they were raised from, which is named where the log has it."""
_LAUNCHER = re.compile(
    r"ChildFailedError|CalledProcessError|exits with return code|failed \(exitcode|exitcode +:|"
    r"Exited with exit code|sigkill_handler|non-zero exit status|RayTaskError"
)
_OF_A_RANK = re.compile(r"exits with return code = |failed \(exitcode: ")
"""What the launchers of ranks print of one that failed."""
_SURVIVED_STEPS = 3
"""Logged steps after an error that prove that training continued."""
_HEAD, _END = 12_000, 4_000
"""Characters of an error's text that patterns are applied to, from its beginning and its end."""


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def recognise(texts: Sequence[str], registry: Iterable[Failure]) -> Failure | None:
    """The failure whose pattern matches one of the texts; of several, the one with the longest match, and
    those of GENERAL last."""
    best: tuple[tuple[bool, int], Failure] | None = None
    for failure in registry:
        for pattern in failure.patterns:
            for text in texts:
                found = _compiled(pattern).search(text)
                if found and not CONDITIONS.get(failure.id, bool)(text):
                    continue
                rank = failure.id not in GENERAL, found.end() - found.start() if found else 0
                if found and (best is None or rank > best[0]):
                    best = rank, failure
    return None if best is None else best[1]


def recognise_error(error: Error, registry: Sequence[Failure]) -> tuple[Failure, Error] | None:
    """The failure of an exception or of one that it was raised from, and that exception."""
    if not error.type and "\n" in error.message:  # several lines that may be the message
        by_line = [recognise((_shortened(line),), registry) for line in error.message.splitlines()]
        known = sorted(filter(None, by_line), key=lambda failure: failure.id in GENERAL)
        if known:
            return known[0], error
    links = (error, *reversed(error.causes))
    for link in links[1:] if error.direct and _WRAPS.search(error.headline) else links:
        # A narrow terminal, or the library that draws tracebacks, may have split the message into lines.
        # Below the message another program may have written, such as make or a shell.
        forms_of = (link, link.first_line())
        texts = dict.fromkeys(
            _shortened(text)
            for form in forms_of
            for text in (form.message, form.headline, form.text(), " ".join(form.headline.split()))
        )
        if (failure := recognise(tuple(texts), registry)) is not None:
            return failure, link
    return None


def _shortened(text: str) -> str:
    """A message may list all weights, and the time of a pattern is more than linear in the length."""
    return text if len(text) <= _HEAD + _END else f"{text[:_HEAD]}\n{text[-_END:]}"


def weight(error: Error) -> int:
    """0 for a cause; the larger, the further an error is from the cause."""
    text, is_line = error.headline, error.kind == "line"
    is_plain_exception = not is_line and "ChildFailedError" not in error.type  # it only mentions a signal
    for applies, found in (
        (_OWN_NAME.search(text) or (is_line and _HOST_KILLED.search(text)), 0),
        (_STEP_ENDED.search(text), 8),
        (not is_plain_exception and forms.KILLED.search(text), 3),
        (is_launchers(error), 7),
        (is_asynchronous(error), 2),
        (_TIMED_OUT.search(text), 5),
        (_WORKER_DIED.search(text), 4),
        (_FOLLOWS.search(text) or _WRAPS.search(text), 6),
        (is_line, 1),
    ):
        if applies:
            return found
    return 0 if text or error.causes else 6


def is_asynchronous(error: Error) -> bool:
    """Whether a CUDA kernel stopped before: the line of code that raised it need not be the one at fault."""
    return bool(_ASYNCHRONOUS.search(error.headline))


def is_cause(error: Error) -> bool:
    """Whether an error is no consequence of another one that the logs may show."""
    return weight(error) == 0 or is_asynchronous(error)


def is_launchers(error: Error) -> bool:
    """Whether a launcher printed it, which knows that a process ended but not why."""
    return any(form.search(error.headline) for form in (_LAUNCHER, forms.EXITED, _STEP_ENDED))


def candidates(
    errors: Iterable[Error],
    *,
    steps: Mapping[str, int],
    begun: Mapping[str, int],
    success: Mapping[str, int],
    tests: TestRuns,
) -> list[Error]:
    """The errors that may have ended the run, likeliest cause first.

    steps, begun, success: file -> its logged steps, and the order of its last line that reports the begin of
    training or success. Errors that training or a success followed are left out, and those that a test
    expected; a traceback that was logged, already where training began after it.
    """
    left = [
        e
        for e in errors
        if e.last >= success.get(e.file, 0)
        and steps.get(e.file, 0) - e.steps_before < _SURVIVED_STEPS
        and not (e.last < begun.get(e.file, 0) and _continues(e))
        and not tests.dismisses(e)
    ]
    timed = all(error.time is not None for error in left if weight(error) == 0)
    return sorted(left, key=lambda e: (weight(e), (e.time or 0.0) if timed else 0.0, e.order))


_MAIN = ("<module>", "_run_module_as_main")
"""The outermost call of a traceback that ended a program."""
_OF_A_PROCESS = ("_bootstrap", "_wrap")
"""The outermost call in a process that multiprocessing started: its end is a cause for the program's."""
_POINTS_BACK = re.compile(r"root cause above|exited unexpectedly|See stack trace above")


def _outermost(error: Error) -> str:
    return error.frames[0].function if error.frames else ""


def _continues(error: Error) -> bool:
    """Whether the process continued: where a program ends, a line of level ERROR may come before it."""
    return error.announced == "continues" or (error.announced == "error" and _outermost(error) not in _MAIN)


def outlived(error: Error, other: Error) -> bool:
    """Whether the process of `error` continued until `other` ended it.

    The earlier traceback was logged, a thread's, or printed by a function that caught it and more output
    followed; the later one, of the same process as far as the log tells, is the program's own.
    """
    later = other.kind == "traceback" and _outermost(other) in _MAIN
    same = error.file == other.file and error.ranks == other.ranks and error.task == other.task
    if not (later and same) or other.announced or other.order <= error.order:
        return False
    if not is_cause(other) or _POINTS_BACK.search(other.headline):
        return False
    is_printed = _outermost(error) not in ("", *_MAIN, *_OF_A_PROCESS)
    return bool(error.announced) or (is_printed and other.start > error.last + 1)


def proves_failure(error: Error, *, success: bool) -> bool:
    """Whether a run that printed this has failed: an unknown line of level ERROR is no proof.

    success: training reported success before, so that an exit code may be another program's, if it is not
    a rank's.
    """
    if error.kind in ("traceback", "exception"):
        return True
    text = error.message
    if success and not _OF_A_RANK.search(text):
        return bool(_HOST_KILLED.search(text))
    if (code := forms.EXITED.search(text)) is not None:
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
    """The field whose name resembles the one that a constructor refused; None for one of other versions."""
    found = _REFUSED.search(message)
    if found is None:
        return None
    fields = [name for table in _TABLES.get(found["owner"], _TRL) for name in field_table(table)["fields"]]
    name = found["name"]
    if name in fields or name in TRAINER_REMOVED or re.fullmatch(GONE, name):
        return None
    return close_key(name, fields)


_TAIL = 40
"""Last lines in which a failure is looked for if only a launcher reported an error."""
_LAST = 10
"""Last lines that are shown where nothing is known."""
_MOST_NOTICED = 20
_LONGEST_VERSIONS = 2000
"""Bytes of a line in which versions are looked for."""


class Lines:
    """Lines of the logs that a known failure matches, whether or not they are errors."""

    def __init__(self, registry: Sequence[Failure]) -> None:
        self._registry = registry
        by_line = {*BY_A_LINE, *TOLD_BEFORE.values()}
        self._patterns = [
            (re.compile(p.encode()), f) for f in registry if f.id in by_line for p in f.patterns
        ]
        self._signs = [(re.compile(sign.encode()), f) for f in registry for sign in f.signs]
        self.by_line: list[tuple[Failure, Error]] = []
        self._noticed: dict[str, Finding] = {}
        self._tail: deque[tuple[str, int, bytes]] = deque(maxlen=_TAIL)
        self.versions: dict[str, str] = {}
        """Package -> its version, as the logs name it last."""

    def every(self, raw: bytes, number: int, name: str) -> None:
        """Any line, also one without a word of forms.WORDS: fast."""
        if raw and not raw.isspace():
            self._tail.append((name, number, raw))
            if (b"==" in raw or b"ersion" in raw) and len(raw) < _LONGEST_VERSIONS:
                for package, version in NAMED.findall(raw):
                    self.versions[package.decode().lower().replace("-", "_")] = version.decode()

    def some(self, raw: bytes, text: str, number: int, name: str) -> None:
        """A line with one of forms.WORDS; text: without its prefixes."""
        for pattern, failure in self._patterns:
            if pattern.search(raw):
                self.by_line.append((failure, _error(text, name, number)))
                break
        if len(self._noticed) < _MOST_NOTICED:
            for pattern, failure in self._signs:
                if failure.id not in self._noticed and pattern.search(raw):
                    self._noticed[failure.id] = Finding(failure, _error(text, name, number), (), None)

    def closer(self, failure: Failure) -> Failure:
        """The failure, or the more specific one that a line of the same logs shows."""
        wanted = TOLD_BEFORE.get(failure.id)
        return next((specific for specific, _ in self.by_line if specific.id == wanted), failure)

    def shown(self, *, failed: bool) -> list[Finding]:
        """The first failure of BY_A_LINE."""
        for failure, error in self.by_line:
            if failure.id in BY_A_LINE and (failed or failure.id not in NEEDS_A_FAILURE):
                return [Finding(failure, error, (), None)]
        return []

    def explained(self, errors: Sequence[Error]) -> tuple[Failure, Error] | None:
        """The first error of EXPLAINED, and its cause."""
        for error in errors:
            for form, cause in EXPLAINED:
                if form.search(error.message) and cause in self._noticed:
                    return self._noticed[cause].failure, error
        return None

    def before_the_end(self) -> list[Finding]:
        """A known failure in the last lines, whatever their form: for a run that is known to have failed."""
        prefixes = Prefixes()
        for name, number, raw in reversed(self._tail):
            for line in clean(raw, number, name, None, prefixes):
                failure = recognise((line.text,), self._registry)
                if failure is not None:
                    return [Finding(self.closer(failure), _error(line.text, name, number), (), None)]
        return []

    def last(self) -> list[str]:
        """The last lines, without their prefixes."""
        prefixes = Prefixes()
        lines = [line for name, n, raw in self._tail for line in clean(raw, n, name, None, prefixes)]
        return [line.text for line in lines if line.text.strip()][-_LAST:]

    def noticed(self) -> list[Finding]:
        """Failures whose signs the logs have, in the order of their lines."""
        return list(self._noticed.values())


def _error(text: str, name: str, number: int) -> Error:
    return Error("", text, kind="line", file=name, line=number)
