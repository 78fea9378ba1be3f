"""Tracebacks that rich draws in a box, rewritten line by line into Python's own form."""

from __future__ import annotations

import re

_TOP = re.compile(r"^\s*[╭┌+][─━-]+ ?Traceback \(most recent call last\) ?[─━-]+(?:[╮┐+]|\s*$)")
_BOTTOM = re.compile(r"^\s*[╰└+][─━-]{2,}[╯┘+]?\s*$")
_ROW = re.compile(r"^\s*[│┃|] ?(?P<inner>.*?)(?: ?[│┃|])?\s*$")
_LOCALS = re.compile(r"^[╭│╰┌└+|]")
_CODE = re.compile(r"^(?P<mark>[❱>?])?\s*\d+(?: (?P<code>.*))?$")
_CALL = re.compile(r"^(?P<file>.+):(?P<line>\d{1,9}) in (?P<function>[\w.<>]+)")
_GUIDE = re.compile(r"[│|] {3}")
"""What rich draws in the place of four columns of indentation."""
_LONGEST_CALL = 4000


class Box:
    """One stream's box: whether a line is inside, and the part of a call that a narrow box broke off."""

    def __init__(self) -> None:
        self.inside = False
        self._call = ""
        self._told = False
        """Whether the call was handed on; what follows of it is the rest of a long name."""

    def plain(self, text: str) -> str:
        """The line as Python would have written it; empty where it has no such line."""
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
        if code is not None and not (self._call and not self._told):
            self._forget()
            return f"    {_GUIDE.sub('    ', code['code'] or '').strip()}" if code["mark"] else ""
        if self._told or len(self._call) > _LONGEST_CALL:
            return ""
        # A word that was cut fills the row; a space at its end is where the text was broken.
        self._call += content if inner[-1:] != " " else f"{content} "
        call = _CALL.match(self._call.rstrip())
        if call is None:
            return ""
        self._told = True
        return f'  File "{call["file"]}", line {call["line"]}, in {call["function"]}'

    def _forget(self) -> None:
        self._call, self._told = "", False
