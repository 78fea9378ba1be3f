"""Log bytes to clean lines: without colours, bars and prefixes, with rank and time. Bounded memory."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any, Literal

from launcher.files.safe_files import parse_json

_CHUNK = 1 << 20
_LONGEST = 1 << 14
"""Bytes of a line that are kept: half of them from its beginning, half from its end."""

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_ANSI_SPELLED = re.compile(r"(?:#033|\^\[|\\x1b|\\033|\\e|\\u001[bB])\[[\d;]*[mK]")
"""The same as syslog, `cat -v` or a repr spell them."""
_BAR = re.compile(r"\d{1,3}%\|?[^\[\]]{0,200}\[[^\[\]]{0,80}/(?:s|it|example|examples)\b[^\[\]]{0,20}\]")
_RANK = re.compile(r"\s{0,16}\[rank ?(\d{1,6})\]:[ ]?")
"""Also in a log that was pasted as an indented block."""
_LOCAL = re.compile(r"\[(?:default|trainer|worker)(\d{1,6})\]:[ ]?")
_MPI = re.compile(
    r"\[\d+,(?:mpirank:)?(\d{1,6})(?:,algo-\d+)?\](?:<std(?:err|out)>:?[ ]?|<std(?:err|out)> ?:[ ]?|:[ ])"
)
_TASK = re.compile(r"(\d{1,6}): ?(?![\d:])|^ {1,5}(\d{1,6}): ")
"""Labels of ten or more tasks are padded with spaces."""
_RAY = re.compile(
    r"\((?:[\w./-]+(?:\(rank=(?P<own>\d{1,6})\))?,? )?"
    r"(?:rank=(?P<rank>\d{1,6})|(?:pid|ip)=[\w.:]+)"
    r"(?:, (?:rank=(?P<later>\d{1,6})|(?:pid|ip)=[\w.:]+)){0,3}\)[ ]?"
)
_PID = re.compile(r"\[(?:pid ?[=: ]?)?\d{3,8}\]:? ?|pid[ =]\d{1,8}: ?")
_HOST = re.compile(r"(?!slurm|srun|https?|wandb)[a-z][a-z0-9.-]{0,60}\d(?:\.[a-z0-9.-]{1,80})?: ")
_STD = re.compile(r"(?:stderr|stdout)(?: ?[:|] ?| [FP] )|\[std(?:err|out)\]:? ?|(?<=Z )\d\d[EO][ +]")
"""Also GitLab's `01E `, after the time."""
_CONTAINER = re.compile(
    r"\[pod/\S+\] |#\d+ \d+\.\d+ |[\w.-]{1,60}[-_]\d{1,6} +(?:\| |>> )|"
    r"[^\t]{1,100}\t[^\t]{0,100}\t\ufeff?(?=\d{4}-\d\d-)"
)
"""The last one: job and step, as `gh run view --log` writes them."""
_SYSLOG = re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (\S+ [\w./-]+(?:\[\d+\])?): ")
_DATE = re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? ")
_CLOCK = re.compile(
    r"\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]? (?=\S| +File \"|    )|"
    r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d(?: [AP]M)? |"
    r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?: [A-Z]{3,4})? \d{4}:? |"
    r"\[ *\d+\.\d{6}\] |1\d{9}\.\d{1,9} |1\d{12}(?:\t| (?=\S))"
)
"""Also a full date, the kernel's seconds since its start, and seconds or milliseconds since the epoch."""
_LEVEL = re.compile(
    r"(?:[EWI]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]+:\d+\] |"
    r"\[?(?:ERROR|CRITICAL|INFO|WARNING)\]?(?:[:|-]| [:|-]?)(?:[\w.]+(?::| [:|-])) ?|"
    r"\[?(?:ERROR|CRITICAL|INFO|WARNING)\]?(?:[:|-]? | [:|-] ))"
    r"(?=Traceback \(|  |(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception): )"
)
"""Before each line of a traceback that a launcher or a logger repeats. Other lines keep it."""
_STAMP = re.compile(
    r"\[?(\d{4}[-/]\d\d[-/]\d\d)[T _](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z| ?[+-]\d\d:?\d\d)?"
    r"(?: (?:UTC|GMT|CES?T|[PMCE][SD]T|BST|IST|JST|KST|MSK)\b)?\]?[ ]?"
)
_RECORD = re.compile(r"\s*\{.*\"(?:level|levelname|levelno|severity|lvl|stream)\": ?")
"""A line of a log as JSON; a row of data may contain a traceback, too."""
_TEXT_KEYS = ("log", "message", "msg")
"""Keys of such a line's text."""
_OUTPUTS = re.compile(r'\s*(?:\{.*)?"(?:output_type|cell_type)": ?"')
"""A notebook as JSON, or one of its cells: a line of it, or all of it in one line."""
_SOURCE = re.compile(r'\s*"source": ?\[')
_STRING = re.compile(r'\s*"(?:[^"\\]|\\.)*",?\s*')
"""A line of a notebook's output or source, as JSON."""
_JSON_LINE = re.compile(rf'{_STRING.pattern}|\s*[\[\]{{}}]+,?\s*|\s*"\w+": .*')
_ESCAPED = r"Traceback (most recent call last):\n"
_CALLSTACK = '"py_callstack": "'
"""The key of a traceback in torchelastic's error file, which its launcher prints line by line."""
_HEADER = "Traceback (most recent call last):"
_LEARNABLE = re.compile(r"\S.{0,118}(?:[:|\]>)-]|\d) ?|[a-z][a-z0-9]*(?:-[a-z0-9]+)+ [\w.-]{1,60} ")
"""A possible prefix of all lines of a log: it ends like a prefix, or names a pod and its container."""
_QUOTED = re.compile(r"(?:> ?)+")
_NUMBERED = re.compile(r" {0,8}(?:(\d{1,9})(\t| ?[|│] ?|[:.)-](?![\d:]) ?| )|\[(\d{1,9})\] ?)")
_CLOCKED = re.compile(r"\d\d?[:.]\d\d[:.]\d\d")
_MAX_PREFIXES = 6
_MAX_LEARNT = 8


@dataclass(slots=True)
class Line:
    """One line of a log."""

    text: str
    """Without prefixes; its own indentation is kept."""
    number: int
    """In its file, from 1."""
    file: str = ""
    rank: int | None = None
    """The rank in the line, or in the name of its file."""
    task: int | None = None
    """A bare number before the line (`0: `): Slurm's task, a rank or a node."""
    stream: str = ""
    """All of its prefixes but the time: lines of one stream probably come from one process."""
    time: float | None = None
    order: int = 0


def raw_lines(
    stream: IO[bytes], skip: int = 0, words: Sequence[bytes] = ()
) -> Iterator[tuple[int, bytes, bool]]:
    """Each line, and each redraw after a \\r: line number, bytes, whether it contains one of the words.

    skip: number of bytes at the beginning that are not read.
    """
    number, rest = 1, b""
    while skip > 0 and (chunk := stream.read(min(skip, _CHUNK))):
        skip -= len(chunk)
        number += chunk.count(b"\n")
    for chunk in _chunks(stream):
        whole, newline, rest = (rest + chunk).rpartition(b"\n")
        if newline:
            present = [word for word in words if word in whole]
            for line in whole.split(b"\n"):
                yield from _redraws(number, line, present)
                number += 1
        if len(rest) > _CHUNK:  # a bar that never ends its line
            done, _, rest = rest.rpartition(b"\r")
            yield from _redraws(number, done, words)
            rest = _cut(rest)
    yield from _redraws(number, rest, words)


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    """The rest of a log as UTF-8, without a byte order mark: PowerShell's `>` writes UTF-16."""
    chunk = stream.read(_CHUNK)
    begins = chunk[:400]
    wide = begins.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not wide or begins.count(0) * 4 < len(begins):  # every second byte of Latin text is 0
        chunk = chunk.removeprefix(codecs.BOM_UTF8)
        while chunk:
            yield chunk
            chunk = stream.read(_CHUNK)
        return
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    while chunk:
        yield decoder.decode(chunk).encode("utf-8", "replace")
        chunk = stream.read(_CHUNK)


def _redraws(number: int, line: bytes, words: Sequence[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    if b"\r" not in line:
        yield number, _cut(line), _holds(line, words)
        return
    for part in line.split(b"\r"):
        if part:
            yield number, _cut(part), _holds(part, words)


def _holds(line: bytes, words: Sequence[bytes]) -> bool:
    for word in words:  # noqa: SIM110 - any() with a generator takes three times as long
        if word in line:
            return True
    return False


def _cut(line: bytes) -> bytes:
    if len(line) <= _LONGEST:
        return line
    return line[: _LONGEST // 2] + b" ... " + line[-_LONGEST // 2 :]


class Prefixes:
    """Prefixes of one log: quotation marks, line numbers, and other prefixes.

    The text before the first line of a traceback is before its other lines, too.
    """

    def __init__(self) -> None:
        self._shapes: dict[str, re.Pattern[str]] = {}
        self._last = 0
        self.filled = 0
        """Lines so far that are not empty, as `nl` counts them."""
        self._quoted = 0
        self._ahead: int | None = None
        """Difference of the last line's number and `filled`."""
        self.notebook: Literal["outputs", "source"] | None = None
        """The part of a cell, if the log is a notebook as JSON."""

    def count(self, raw: bytes, number: int) -> None:
        """Count a line of the log; fast."""
        if raw and number != self._last and not raw.isspace():
            self._last = number
            self.filled += 1
            self._quoted += raw[:1] == b">"

    def start(self, text: str) -> int:
        """Position of the text after quotation marks and a line number.

        A log is quoted if most of its lines are. A number is a line number if it is this line's, or differs
        from it as much as the number of the line before.
        """
        position = 0
        quoted = _QUOTED.match(text)
        if quoted is not None and self._quoted * 2 > self.filled:
            position = quoted.end()
        found = _NUMBERED.match(text, position)
        if found is None:
            return position
        ahead, before = int(found[1] or found[3]) - self.filled, self._ahead
        self._ahead = ahead
        if (found[2] or "").startswith(":"):  # perhaps a task, whose number may be a line's by chance
            counts = ahead == 0 and before in (None, 0)
        else:
            counts = ahead in (0, before)
        return found.end() if self.filled and counts else position

    def end(self, text: str, position: int) -> int:
        """Position of the text after a recorded prefix; `position` without one.

        position: after the known prefixes. The prefix of a traceback's first line is recorded.
        """
        before, header, after = text[position:].partition(_HEADER)
        begins = header and not after.strip() and len(self._shapes) < _MAX_LEARNT
        if (
            begins
            and (any(c.isdigit() for c in before) or before.endswith("| "))
            and _LEARNABLE.fullmatch(before)
        ):
            shape = re.sub(r"\d+", r"\\d+", re.escape(before))
            self._shapes.setdefault(shape, re.compile(shape))
        found = (shape.match(text, position) for shape in self._shapes.values())
        return max((match.end() for match in found if match), default=position)


def clean(
    raw: bytes, number: int, file: str = "", rank: int | None = None, prefixes: Prefixes | None = None
) -> Iterator[Line]:
    """The lines within one raw line: the text before, between and after progress bars.

    prefixes: the prefixes of this log, to which this line may add.
    """
    text = raw.decode("utf-8", errors="replace")
    if prefixes is not None and (lines := _notebook_lines(text, prefixes)) is not None:
        for line in lines:
            yield from clean(line.encode("utf-8", "replace"), number, file, rank)
        return
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "m" in text and ("33[" in text or "^[[" in text or "1b[" in text or "e[" in text):
        text = _ANSI_SPELLED.sub("", text)
    text = text.replace("\x00", "")
    parts: Sequence[str] = _BAR.split(text) if "%" in text and "/" in text else (text,)
    stamp = text[: found.end()] if (found := _STAMP.match(text)) is not None else ""
    record = text[len(stamp) :]
    if record.lstrip()[:1] == "{" and _RECORD.match(record):
        parts = [stamp + line for line in _json_lines(record) or ()] or parts
    elif _CALLSTACK in text and _ESCAPED in text:
        before, _, escaped = text.partition(_CALLSTACK)
        parts = [before.rstrip() + " " * bool(before.strip()) + line for line in _unescaped(escaped)]
    elif len(parts) > 1 and prefixes is not None and any(part.startswith(_HEADER) for part in parts[1:]):
        # The text before the bar is before the traceback's other lines, too.
        _unprefixed(f"{parts[0].rstrip()} {_HEADER}", number, file, rank, prefixes)
    for part in parts:
        if part.strip() or len(parts) == 1:
            yield _unprefixed(part, number, file, rank, prefixes or Prefixes())


def _notebook_lines(text: str, prefixes: Prefixes) -> list[str] | None:
    """The output in a line of a notebook as JSON; None for a line of any other log."""
    texts: list[str] = []
    with suppress(ValueError, RecursionError):  # the beginning of a cell
        if _OUTPUTS.match(text):
            prefixes.notebook = "outputs"
            if text.lstrip().startswith("{"):
                texts = list(_outputs(parse_json(text.rstrip().rstrip(","))))
        elif prefixes.notebook is None or not _JSON_LINE.fullmatch(text):
            return None
        elif _SOURCE.match(text):
            prefixes.notebook = "source"
        elif prefixes.notebook == "outputs" and _STRING.fullmatch(text):
            texts = [str(parse_json(text.strip().rstrip(",")))]
    # Half a character, escaped, is valid JSON and cannot be printed.
    return [line for part in texts for line in part.encode("utf-8", "replace").decode().splitlines()]


def _outputs(value: Any) -> Iterator[str]:
    """The texts that the cells of a notebook wrote."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("traceback", "text") and isinstance(inner, list | str):
                yield ("\n" if key == "traceback" else "").join(map(str, inner))
            elif key in ("cells", "outputs"):
                yield from _outputs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _outputs(inner)


def _json_lines(text: str) -> list[str] | None:
    """The lines of text in one line of JSON; None if it is no line of a log."""
    try:
        record = parse_json(text)
    except ValueError:  # cut, or quoted once more
        return _unescaped(text) if _ESCAPED in text else None
    if _ESCAPED in text:  # under any key
        texts = [value for value in record.values() if isinstance(value, str)]
        return [line for value in texts for line in value.encode("utf-8", "replace").decode().splitlines()]
    found = next((record[key] for key in _TEXT_KEYS if isinstance(record.get(key), str)), None)
    # Half a character, escaped, is valid JSON and cannot be printed.
    return None if found is None else found.encode("utf-8", "replace").decode().splitlines() or [""]


def _unescaped(text: str) -> list[str]:
    """The lines of a JSON text, which may be cut off or quoted once more."""
    return text.replace(r"\\", "\\").replace(r"\"", '"').split(r"\n")


def _unprefixed(text: str, number: int, file: str, rank: int | None, prefixes: Prefixes) -> Line:
    """Remove the prefixes, in any order, each with one space, but not the indentation."""
    line = Line(text, number, file, rank)
    position, names = prefixes.start(text), []
    for _ in range(_MAX_PREFIXES):
        before = position
        for kind, pattern in _PREFIXES:
            found = pattern.match(text, position)
            if found is None or found.end() == position:
                continue
            position = found.end()
            if kind == "time":
                line.time = _seconds(found)
                continue
            if kind in ("clock", "level"):
                continue
            names.append(found.group(1) if kind == "syslog" else found.group().strip())
            if kind == "ray-worker":
                named = found["own"] or found["rank"] or found["later"]
                line.rank = line.rank if named is None else int(named)
            elif kind == "rank" or (kind == "local" and line.rank is None):
                line.rank = int(found.group(1))
            elif kind == "task" and line.task is None:
                line.task = int(found.group(1) or found.group(2))
        if position == before:
            position = prefixes.end(text, position)
            if position == before:
                break
            if not _CLOCKED.search(prefix := text[before:position]):
                names.append(prefix.strip())
    line.text = text[position:].rstrip()
    line.stream = " ".join(names)
    return line


_PREFIXES = (
    ("time", _STAMP),
    ("rank", _RANK),
    ("rank", _MPI),
    ("local", _LOCAL),
    ("ray-worker", _RAY),
    ("pid", _PID),
    ("std", _STD),
    ("container", _CONTAINER),
    ("syslog", _SYSLOG),
    ("clock", _DATE),
    ("clock", _CLOCK),
    ("level", _LEVEL),
    ("task", _TASK),
    ("host", _HOST),
)


def _seconds(found: re.Match[str]) -> float | None:
    day, clock, fraction, zone = found.groups()
    text = f"{day.replace('/', '-')}T{clock}" + ("+00:00" if zone in (None, "Z") else zone.strip())
    try:
        return datetime.fromisoformat(text).timestamp() + float(f"0.{fraction or 0}")
    except ValueError:
        return None
