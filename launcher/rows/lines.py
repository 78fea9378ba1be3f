"""Lines of a data file, unpacked on the way, and errors with its place."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import itertools
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from launcher.errors import Problem, RecipeError

Numbered = tuple[int, dict[str, Any]]
"""(1-based physical line, or row where the file has no lines; the row's values)."""
BUFFER_BYTES = 1 << 20
BROKEN_PACKING = (EOFError, OSError, zlib.error, lzma.LZMAError)
_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_SAMPLE_BYTES = 4 << 20
_SAMPLE_LINES = 200
_CHAOS = 0.2
"""From which share of odd characters on charset-normalizer takes a text for a wrong reading."""
_ENCODINGS = ("gb18030", "big5", "cp932", "euc_jp", "cp949", "cp1252", "cp1251", "cp1250", "koi8_r")
"""Those that data files were found in; of two that read a text equally well, the first one is proposed."""


class CutOffError(Exception):
    """The bytes that were to be read are used up, and the file is not."""


def fault(path: Path, line: int | None, message: str, hint: str | None = None) -> RecipeError:
    """A RecipeError about a place in a data file."""
    return RecipeError(Problem("data-unreadable", message, file=str(path), line=line, hint=hint))


def open_file(path: Path) -> IO[bytes]:
    """The file's bytes, unpacked on the way."""
    opener = OPENERS.get(path.suffix.lower())
    return io.BufferedReader(opener(path), BUFFER_BYTES) if opener else path.open("rb", BUFFER_BYTES)


def _open_zst(path: Path) -> Any:
    import pyarrow  # comes with datasets; the standard library reads zstd from Python 3.14 on

    return pyarrow.input_stream(str(path), compression="zstd")


OPENERS: Mapping[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zst,
}


def read_lines(path: Path, limit: int | None) -> Iterator[tuple[int, str]]:
    """Numbered lines with their line ends, only `\\n` counting as one (JSON text may hold U+2028)."""
    number = 0
    try:
        with open_file(path) as stream:
            lines = stream if limit is None else _first_lines(stream, limit)
            for number, raw in enumerate(lines, start=1):
                if number == 1:
                    raw = _without_mark(path, raw)
                yield number, raw.decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1} of the line"
        raise fault(path, number, why, _encoding_hint(path, error.object)) from error
    except BROKEN_PACKING as error:
        hint = "the file is cut off or damaged; copy it anew"
        raise fault(path, number or None, f"cannot be read further: {error}", hint) from error


def _first_lines(stream: IO[bytes], limit: int) -> Iterator[bytes]:
    while raw := stream.readline(limit + 1):
        limit -= len(raw)
        if limit < 0:
            raise CutOffError
        yield raw


def _without_mark(path: Path, first: bytes) -> bytes:
    """The first line without UTF-8's byte order mark; UTF-16 is named as what it is."""
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise fault(path, 1, "is UTF-16, expected UTF-8", "convert it: `iconv -f utf-16 -t utf-8`")
    return first.removeprefix(codecs.BOM_UTF8)


def _encoding_hint(path: Path, line: bytes) -> str:
    """How to convert a file one of whose lines is not UTF-8; the encoding is one that reads its beginning."""
    unknown = "convert it to UTF-8 from the encoding it was written in: `iconv -f ENCODING -t utf-8`"
    try:
        from charset_normalizer import from_bytes  # comes with gguf, which planning runs without
    except ImportError:
        return unknown
    with open_file(path) as stream:
        text = stream.read(_SAMPLE_BYTES)
    text = text[: text.rfind(b"\n") + 1] or text
    sample = list(
        itertools.islice((raw for raw in text.splitlines(True) if not raw.isascii()), _SAMPLE_LINES)
    )
    if any(_decodes(raw, "utf-8") for raw in sample):
        return "other lines are UTF-8: correct this one"
    data = b"".join(sample) or line
    # One at a time and with a high threshold: of several, those that are as good as the first are left out.
    tried = [from_bytes(data, cp_isolation=[name], threshold=0.5).best() for name in _ENCODINGS]
    found = [m for m in tried if m is not None and m.encoding in _ENCODINGS and m.chaos < _CHAOS]
    for name in (m.encoding for m in sorted(found, key=lambda match: (match.chaos, -match.coherence))):
        if _decodes(text, name) and _decodes(line, name):
            start = max(next(place for place, byte in enumerate(line) if byte > 127) - 1, 0)
            shown = line[start:].decode(name, "ignore").strip()[:30]
            command = f"iconv -f {name.replace('_', '-')} -t utf-8"
            return f"it may be {name}, as which the line has {shown!r}: if that is right, `{command}`"
    return unknown


def _decodes(text: bytes, encoding: str) -> bool:
    try:
        text.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def refuse_pointer(path: Path) -> None:
    """RecipeError for what Git LFS leaves in the place of a file that was not fetched."""
    with path.open("rb") as stream:
        is_pointer = stream.read(len(_POINTER)) == _POINTER
    if is_pointer:
        message = "is a pointer of Git LFS: the file itself was not fetched"
        raise fault(path, None, message, "run `git lfs pull` in its repository")


def unpacked_name(path: Path) -> Path:
    """The path without the suffix of its packing."""
    return path.with_suffix("") if path.suffix.lower() in OPENERS else path
