"""Collect tracebacks and other errors from clean log lines, in one pass and bounded memory.

Ranks that write into one file without prefixes interleave their lines: a traceback may lack its header or its
last line, and two may be mixed. Frames are collected until a line that ends a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from launcher.knowledge.diagnose import forms
from launcher.knowledge.diagnose.findings import Announced, Error, Kind, TracebackFrame
from launcher.knowledge.diagnose.reading import Line

_STARTS = re.compile(r"^=+ test session starts =+$")
_CAPTURED = re.compile(r"^-{3,} Captured \w+ \w+ -{3,}$")
"""What a test printed, which pytest repeats in its report."""
_SUMMARY = re.compile(
    r"^(?:=+ )?(?P<counts>(?:\d+ (?:passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?|rerun)"
    r"(?:, | ))+)in [\d.]+s\b"
)
_FAILURE = re.compile(r"\b(?:failed|errors?)\b")
_RAN = re.compile(r"^Ran \d+ tests? in [\d.]+s$")
_VERDICT = re.compile(r"^(?:(?P<passed>OK)|FAILED)(?: \([\w ,=]+\))?$")
_VERDICT_WITHIN = 3
"""Lines from unittest's `Ran 3 tests in 0.1s` to its verdict."""
_REPORTED = re.compile(r"^(?:E {2,}|(?:FAILED|ERROR) \S+::)")
"""An error in pytest's own form."""


@dataclass(slots=True)
class _File:
    in_session: bool = False
    in_captured: bool = False
    ran: int | None = None
    """Number of the last line `Ran 3 tests in 0.1s`."""
    ends: list[tuple[int, bool]] = field(default_factory=list)
    """Order of the last line of each test run, and whether all its tests passed."""


class TestRuns:
    """Runs of pytest and unittest in any number of logs."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}

    def feed(self, line: Line, text: str) -> None:
        """The next line outside of tracebacks. text: without a box around it."""
        state = self._files.get(line.file)
        if state is None:
            state = self._files[line.file] = _File()
        if _STARTS.match(text):
            state.in_session, state.in_captured = True, False
        elif state.in_session and _CAPTURED.match(text):
            state.in_captured = True
        elif (summary := _SUMMARY.match(text)) is not None:
            self._end(state, line, passed=_FAILURE.search(summary["counts"]) is None)
        elif _RAN.match(text):
            state.ran = line.number
        elif state.ran is not None and line.number - state.ran <= _VERDICT_WITHIN:
            verdict = _VERDICT.match(text)
            if verdict is not None:
                self._end(state, line, passed=verdict["passed"] is not None)

    def _end(self, state: _File, line: Line, *, passed: bool) -> None:
        state.ends.append((line.order, passed))
        state.in_session, state.in_captured, state.ran = False, False, None

    def passed(self) -> bool:
        """Whether there were test runs, and the last one of every file passed."""
        ends = [state.ends[-1] for state in self._files.values() if state.ends]
        return bool(ends) and all(passed for _, passed in ends)

    def reports(self, line: Line, text: str, kind: Kind) -> bool:
        """Whether an error is a test run's report, and not a program's own error.

        A traceback is one only where pytest repeats what a test printed.
        """
        state = self._files.get(line.file) or _File()
        reported = state.in_session or _REPORTED.match(text) is not None
        return state.in_captured or (kind == "line" and reported)

    def dismisses(self, error: Error) -> bool:
        """Whether every test run that reported the error passed, so that the error was expected."""
        if not error.in_tests or error.file not in self._files:
            return False
        for order, passed in self._files[error.file].ends:
            if order >= error.order:
                if not passed:
                    return False
                if order >= error.last:
                    return True
        return False


_TOP = re.compile(r"^\s*[╭┌+][─━-]+ ?Traceback \(most recent call last\) ?[─━-]+(?:[╮┐+]|\s*$)")
_BOTTOM = re.compile(r"^\s*[╰└+][─━-]{2,}[╯┘+]?\s*$")
_ROW = re.compile(r"^\s*[│┃|] ?(?P<inner>.*?)(?: ?[│┃|])?\s*$")
_LOCALS = re.compile(r"^[╭│╰┌└+|]")
_CODE = re.compile(r"^(?P<mark>[❱>?])?\s*\d+(?: (?P<code>.*))?$")
# Without a blank where the path and the number fill a row.
_CALL = re.compile(r"^(?P<file>.+):(?P<line>\d{1,9}) ?in (?P<function>[\w.<>]+)")
_GUIDE = re.compile(r"[│|] {3}")
"""rich draws it instead of four columns of indentation."""
_LONGEST_CALL = 4000


class Box:
    """The frame that rich draws around a traceback: the state of one stream."""

    def __init__(self) -> None:
        self.inside = False
        self._call = ""
        """The beginning of a call that is broken into several rows."""
        self._is_complete = False
        """Whether the call was returned; further rows are the rest of a long name."""

    def plain(self, text: str) -> str:
        """The line as Python would have printed it; empty where Python prints none."""
        if _TOP.match(text):
            self.inside = True
            self._forget()
            return "Traceback (most recent call last):"
        if not self.inside:
            return text
        if _BOTTOM.match(text):
            self.inside = False
            return ""
        row = _ROW.match(text)
        return text if row is None else self._row(row["inner"])

    def _row(self, inner: str) -> str:
        content = inner.strip()
        if not content or _LOCALS.match(content):
            self._forget()
            return ""
        code = _CODE.match(content)
        if code is not None and (self._is_complete or not self._call):
            self._forget()
            return f"    {_GUIDE.sub('    ', code['code'] or '').strip()}" if code["mark"] else ""
        if self._is_complete or len(self._call) > _LONGEST_CALL:
            return ""
        # A row without a space at its end was broken inside a word.
        self._call += content if inner[-1:] != " " else f"{content} "
        call = _CALL.match(self._call.rstrip())
        if call is None:
            return ""
        self._is_complete = True
        return f'  File "{call["file"]}", line {call["line"]}, in {call["function"]}'

    def _forget(self) -> None:
        self._call, self._is_complete = "", False


_LONGEST_MESSAGE = 40
"""Lines of a message that are kept."""
_TOLD_WITHIN = 8
"""Lines from the one that announces a traceback to its first: of a message, or of other ranks."""
_UNTOLD: tuple[int, Announced] = (-_TOLD_WITHIN, "")
_LOST_AFTER = 200
"""Lines of other processes after which an open traceback counts as cut off."""
_MOST_ERRORS = 400
_MOST_STREAMS = 4096
_MOST_FRAMES = 200
_MOST_LOOSE = 10
_LONGEST_SOURCE = 200
_MOST_CAUSES = 50
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_ENDS_MESSAGE = re.compile(
    r"^\s*$|^\[?[EWIF](?:\d{3,4})? |^\[[EWI]\d|^\[(?:INFO|WARN|ERROR|DEBUG)|^(?:INFO|WARNING|ERROR|DEBUG)\b|"
    r"^- (?:INFO|WARN|ERROR)|^wandb|^srun|^slurmstepd|^={8}|^=+ .{1,200} =+$|^\*{4}|^\{'|^-{8}|"
    r"^Exception ignored|^Killed|^\S+\.cuh?:\d+: |^\"{3}$|^make(?:\[\d+\])?: \*\*\*|^real\s+\d+[m.]"
)


@dataclass(slots=True)
class _Open:
    """One stream's traceback while it is being read."""

    active: bool = False
    ignored: bool = False
    told: tuple[int, Announced] = _UNTOLD
    """Number and kind of the last line that announced a traceback."""
    announced: Announced = ""
    """How the open traceback was."""
    dumped: bool = False
    """Whether its innermost call comes first."""
    frames: list[TracebackFrame] = field(default_factory=list)
    indent: int | None = None
    """Of its calls."""
    named: str = ""
    """The exception's class, from the first line of a notebook's traceback."""
    loose: list[str] = field(default_factory=list)
    """Lines right after the calls: messages of exceptions whose class is lost, or of other processes."""
    inside: bool = False
    """Whether the line before belonged to the traceback."""
    foreign: int = 0
    start: Line | None = None
    ended: Error | None = None
    """The exception whose message may continue in the next lines."""
    length: int = 0
    bare: bool = False
    """Whether it is a class without a colon, so that no message follows."""
    blank: bool = False
    """Whether an empty line followed it."""
    chained: bool = False
    direct: bool = False
    pending: Error | None = None
    """The exception that the next one was raised from, or while handling."""
    box: Box = field(default_factory=Box)


class Errors:
    """The errors of any number of logs: `feed` all lines, then read `found`."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Error] = {}
        self.steps: dict[str, int] = {}
        """File -> training steps logged in it."""
        self.begun: dict[str, int] = {}
        """File -> order of its last line of training: its begin, or a step."""
        self.success: dict[str, int] = {}
        """File -> order of its last line that reports success."""
        self.part_succeeded = False
        """Whether a line reports the success of one pod or rank."""
        self.tests = TestRuns()
        self.root_rank: int | None = None
        """The rank that torchrun's table names as the root cause."""
        self._in_table = False
        self._streams: dict[tuple[str, str, int | None], _Open] = {}
        self._busy = 0

    @property
    def idle(self) -> bool:
        """Whether no traceback is open, so that lines without a word of forms.WORDS need not be fed."""
        return self._busy == 0

    def feed(self, line: Line) -> None:
        """The next line of any stream."""
        key = (line.file, line.stream, line.rank)
        state = self._streams.get(key)
        if state is None:
            if len(self._streams) >= _MOST_STREAMS:
                return
            state = self._streams[key] = _Open()
        was = state.active or state.ended is not None
        self._step(state, line)
        self._busy += (state.active or state.ended is not None) - was

    def close(self) -> None:
        """End of a file: tracebacks that are still open are cut off."""
        for state in self._streams.values():
            cut = state.ended is None  # after the line that announces the next exception
            state.chained = False
            self._finish(state)
            if state.active or cut:
                self._lost(state)
        self._streams.clear()
        self._busy = 0

    def add(self, error: Error) -> None:
        """Add an error; equal errors of several ranks are one."""
        key = (error.type.rpartition(".")[2], _NUMBERS.sub("0", error.message[:400]))
        known = self.found.get(key)
        if known is None:
            if len(self.found) < _MOST_ERRORS:
                self.found[key] = error
            return
        known.ranks |= error.ranks
        known.last = max(known.last, error.last)
        known.in_tests &= error.in_tests
        known.steps_before = max(known.steps_before, error.steps_before)
        if not known.frames:
            known.frames, known.kind = error.frames, error.kind
        if error.time is not None and known.time is not None and error.time < known.time:
            error.ranks, error.last = known.ranks, known.last
            self.found[key] = error

    def _step(self, state: _Open, line: Line) -> None:
        text = state.box.plain(line.text)
        if forms.GROUP.match(text):
            state.chained = state.ended is not None and state.ended.type.endswith("Group")
            state.direct = False
            self._finish(state)
            return
        if forms.GROUP_MARGIN.match(text):
            text = forms.GROUP_MARGIN.sub("", text, count=1)
        if self._continues(state, text):
            return
        if forms.IGNORED.match(text):
            state.ignored, state.told = True, (line.number, "continues")
        elif forms.DUMP.match(text):
            if state.active:
                self._lost(state)
            self._begin(state, line, wrapped=False)
            state.dumped = True
        elif forms.HEADER.search(text):
            self._begin(state, line, wrapped=bool(forms.WRAPPED.search(text)))
        elif (frame := forms.FRAME.match(text) or forms.CELL_FRAME.match(text)) is not None:
            self._frame(state, line, frame)
        elif state.active and state.dumped and text.startswith(forms.AFTER_DUMPS):
            self._lost(state)
        elif state.active:
            self._inside(state, line, text)
        else:
            self._outside(state, line, text)

    def _continues(self, state: _Open, text: str) -> bool:
        """Whether the line belongs to the message of the exception that just ended."""
        if forms.DIRECT in text or forms.HANDLING in text:
            state.chained, state.direct = True, forms.DIRECT in text
            self._finish(state)
            return True
        if state.ended is None:
            return False
        alone = state.ended.kind == "exception" or (state.bare and text)
        if not state.ended.message and alone and not text[:1].isspace():
            self._finish(state)
            return False
        if not text.strip() and state.ended.message:  # the line that chains exceptions may follow
            state.blank = not state.ended.message.endswith(":")
            return True
        if forms.WRAPPED.search(text) or (forms.HEADER.match(text) and state.ended.message.endswith(":")):
            state.chained, state.direct = True, False  # the message is the traceback that follows
        empty = not state.ended.message
        announced = state.ended.message.endswith(":") and text != state.ended.headline
        state.length += 1
        if (
            state.blank
            or forms.HEADER.search(text)
            or forms.FRAME.match(text)
            or forms.STEP.search(text)
            or state.length > _LONGEST_MESSAGE
            or (_ENDS_MESSAGE.match(text) and not announced and (not empty or text.startswith("====")))
            or (forms.EXCEPTION.match(text) and not text[:1].isspace() and not announced)
        ):
            self._finish(state)
            return False
        state.ended.message += text.strip() if empty else "\n" + text
        return True

    def _begin(self, state: _Open, line: Line, *, wrapped: bool) -> None:
        if state.active and state.frames:  # another rank's, or one that was cut off
            return
        if not (wrapped or state.chained):
            state.pending = None
            number, kind = state.told
            state.announced = kind if line.number - number <= _TOLD_WITHIN else _announces(line.text)
            state.ignored &= state.announced == "continues"
            state.told = _UNTOLD
        state.active, state.frames, state.indent, state.loose = True, [], None, []
        state.start, state.foreign, state.inside, state.dumped = line, 0, True, False
        named = forms.CELL_HEADER.match(line.text)
        state.named = named["type"] if named else ""

    def _frame(self, state: _Open, line: Line, found: re.Match[str]) -> None:
        if not state.active:
            state.active, state.frames, state.start, state.loose, state.named = True, [], line, [], ""
        state.indent = len(found.groupdict().get("indent") or "")
        state.inside, state.foreign = True, 0
        if len(state.frames) < _MOST_FRAMES:
            function = found["function"] or "<module>"
            frame = TracebackFrame(found["file"], int(found["line"] or 0), function.strip())
            state.frames.insert(0 if state.dumped else len(state.frames), frame)

    def _inside(self, state: _Open, line: Line, text: str) -> None:
        """A line while a traceback is open: source, marks, its end, or a line of another process."""
        doubled = forms.undouble(text)
        found = forms.EXCEPTION.match(text) or (forms.ANY_CLASS.match(text) if state.inside else None)
        if doubled is not None:
            self._end(state, line, *doubled)
        elif found is not None and _ends(found, state):
            self._end(state, line, found["type"], found["message"])
        elif (called := forms.CELL_SOURCE.match(text)) is not None:
            self._source(state, (called["code"] or "").strip(), marked=True)
        elif text[:1].isspace() or not text:
            self._source(state, text.strip())
        else:
            if state.inside and state.frames:
                state.loose.append(text)
                del state.loose[_MOST_LOOSE:]
            state.inside = False
            state.foreign += 1
            if state.foreign > _LOST_AFTER:
                self._lost(state)
            elif forms.is_error(text):
                self._line(line, text, "line")

    def _source(self, state: _Open, code: str, *, marked: bool = False) -> None:
        """The line of code of the last call. marked: with an arrow, among several."""
        fits = state.frames and (marked or (state.inside and not state.frames[-1].source))
        if fits and code.strip("^~- "):
            state.frames[-1] = replace(state.frames[-1], source=code[:_LONGEST_SOURCE])

    def _outside(self, state: _Open, line: Line, text: str) -> None:
        if forms.STEP.search(text):  # such a row may name `train_runtime` too
            self.steps[line.file] = self.steps.get(line.file, 0) + 1
            self.begun[line.file] = line.order
            return
        self.tests.feed(line, text)
        if forms.RUNNING.search(text):
            self.begun[line.file] = line.order
        if forms.SUCCESS.search(text):
            self.success[line.file] = line.order
        self.part_succeeded |= bool(forms.PART_SUCCEEDED.search(text))
        self._in_table |= "Root Cause (first observed" in text
        if self._in_table and (row := forms.TABLE_RANK.match(text)) is not None:
            self.root_rank = int(row.group(1)) if self.root_rank is None else self.root_rank
            self._in_table = False
        if kind := _announces(text):
            state.told = (line.number, kind)
        doubled = forms.undouble(text)
        found = forms.EXCEPTION.match(text)
        if doubled is not None:
            self._line(line, doubled[1], "exception", doubled[0])
        elif found is not None and found["indent"] and found["message"]:  # an indented block, or a report
            self._line(line, found["message"], "line", found["type"])
        elif found is not None and found["message"] is not None and not found["indent"]:
            state.start = line
            self._end(state, line, found["type"], found["message"], "exception")
        elif forms.is_error(text):
            self._line(line, text, "line")
        elif (reported := forms.TOLD.match(text)) is not None:
            self._line(line, reported["message"], "line", reported["type"])
        elif (stopped := forms.STOPPED.match(text)) is not None:
            self._line(line, stopped["message"], "line")

    def _end(
        self, state: _Open, line: Line, name: str, message: str | None, kind: Kind = "traceback"
    ) -> None:
        """The exception's own line. message: None without a colon."""
        ignored = state.ignored
        frames = tuple(state.frames) if kind == "traceback" else ()
        state.active, state.ignored, state.frames, state.foreign = False, False, [], 0
        if ignored:
            state.ended, state.pending, state.chained = None, None, False
            return
        error = self._error(line, name, message or "", kind, frames)
        if kind == "traceback":
            error.announced = state.announced
            error.start = error.order if state.start is None else state.start.order
        if state.chained and state.pending is not None:
            error.causes, error.direct = _chain(state.pending), state.direct
        state.pending, state.chained = None, False
        state.ended, state.length, state.blank, state.bare = error, 0, False, message is None

    def _lost(self, state: _Open) -> None:
        """A traceback whose last line is missing: its message may be the line right after the calls."""
        frames, start = tuple(state.frames), state.start
        state.active, state.frames, state.foreign = False, [], 0
        if frames and start is not None and not state.ignored:
            message = "" if state.named else "\n".join(dict.fromkeys(state.loose))
            error = self._error(start, state.named, message, "traceback", frames)
            if state.pending is not None:
                error.causes = _chain(state.pending)
            self.add(error)
        elif state.pending is not None and not state.ignored:
            self.add(state.pending)
        state.ignored, state.pending = False, None

    def _finish(self, state: _Open) -> None:
        """The message is complete; the exception is an error, or the cause of the next one."""
        error, state.ended = state.ended, None
        if error is not None and error.kind == "exception" and not error.message:
            return  # a class alone, without a traceback: its message did not follow
        if state.chained:
            state.pending = error or state.pending
        elif error is not None:
            self.add(error)

    def _line(self, line: Line, text: str, kind: Kind, name: str = "") -> None:
        self.add(self._error(line, name, text.strip(), kind, ()))

    def _error(
        self, line: Line, name: str, message: str, kind: Kind, frames: Iterable[TracebackFrame]
    ) -> Error:
        return Error(
            name,
            message,
            tuple(frames),
            kind,
            ranks=set() if line.rank is None else {line.rank},
            first_rank=line.rank,
            task=line.task,
            time=line.time,
            file=line.file,
            line=line.number,
            order=line.order,
            last=line.order,
            in_tests=self.tests.reports(line, line.text, kind),
            steps_before=self.steps.get(line.file, 0),
        )


def _announces(text: str) -> Announced:
    """How a line announces the traceback after it, or at its own end."""
    if forms.CONTINUES.match(text):
        return "continues"
    return "error" if forms.LEVEL.match(text) else ""


def _ends(found: re.Match[str], state: _Open) -> bool:
    """Whether the line of an exception ends the open traceback: by its indentation, or without calls, because
    it has a message."""
    if state.frames:
        return len(found["indent"]) <= max((state.indent or 0) - 2, 0)
    return bool(found.re is forms.EXCEPTION and found["message"] and not found["indent"])


def _chain(error: Error) -> tuple[Error, ...]:
    """An exception and those that it was raised from; the first and the last ones of a long chain."""
    first, rest = error.causes[:1], error.causes[1:]
    return (*first, *rest[2 - _MOST_CAUSES :], replace(error, causes=()))
