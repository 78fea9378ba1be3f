"""Redact secrets from texts.

Used for recipes, imports, logs, errors and reports. `detect-secrets` is not used: it needs `requests`, reads
files rather than lines, and its entropy rules flag hashes.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from launcher.files.secrets import GIVEN, SHORTEST, TOKENS, is_secret_name, may_hold_token, names_secret

SECRET = "<secret>"
"""Replaces a secret."""
_NAMED = (
    "token", "key", "secret", "pass", "auth", "credential", "creds", "cookie", "pwd", "pat", "pw", "jwt",
    "dsn",
)  # fmt: skip
_WRITTEN = re.compile(
    rf"(?ix) (?<![\w.-]) (?=[\w.-]{{0,80}}?(?:{'|'.join(_NAMED)}))"
    r"""
    (?P<name> (?P<option>--?)? [A-Z_][\w.-]{0,80} )
    (?P<sep> (?:\\*["'])? \]? (?:[ \t]{0,20}|\s) [:=] (?:[ \t]{0,20}|\s)
           | (?P<listed> \\*["'] \s?,\s? (?=\\*["']) )
           | (?(option) (?:\\*["'])?,?\s+ | (?!)) )
    (?: (?P<quote> \\*["']) | (?P<scheme> (?:bearer|basic|token)\s+ )? ) (?=\S)"""
)
"""A name and the separator before its value: shell, Python, YAML, JSON, repr, command line, header."""
_QUOTE = re.compile(r"""(?<!\\)(\\*)(["'\n])""")
_BARE = re.compile(r"""[^\s"',;&)}\]]*""")
_ENDS_PLAIN = re.compile(r"""["',;&)}\]]+(?:[\s"')}\]]|$|[\w.-]+\s?[=:])""")
"""After an unquoted value: its end, or the next name."""
_CLOSING = "\"',;&)}]"
_LONGEST = 4096
"""Characters of a value that are inspected; a redacted value is removed completely."""
_SPACE = re.compile(r"\s|$")
_WANDB_KEY = re.compile("[0-9a-f]{40}")
_SETS = re.compile(r"""(?:setdefault|putenv|setenv)\(\s?\\*["']$""")
"""Before a name that is the first argument of a function that sets a variable."""
_SURE = re.compile(
    r"(?i)(?:(?:api|access|auth|private|secret|hf|hub|refresh|bearer|session|security|account|signing|bot|user|login|"
    r"client|personal|wandb|github|gitlab)[_-]?(?:key|token)|secret|passw(?:or)?d|passphrase|credentials?|cookie|"
    r"authorization|hub[_-]auth|(?:^|[_.-])(?:pass|pwd|pw))$"
)
"""Names whose value is always a secret; under other names it must also look random."""
_OPAQUE = re.compile(r"[A-Za-z0-9_+=.~-]{20,}")
_RUN = re.compile(r"[A-Za-z0-9]{12,}")
"""Random strings have such a run; names of modules, files and models have separators."""
_HASH = re.compile(r"(?:sha\d+[:-])?[0-9a-f]{7,128}")
_PLAIN = re.compile(
    r"(?i)none|null|true|false|missing|required|invalid|expected|hidden|unset|not|object|string|<.*|\$.*|\(.*|\[.*|"
    r"\{.*|[*x.…]+|[/~.].*|[-+]?[\d.,_]+(?:e[-+]?\d+)?|file:.*|(?:optional|union|literal)\[.*|"
    r"(?:os|self|args|cfg|config|settings|secrets|userdata|getpass)\.\w[\w.]*(?:[\[(].*)?|get\w*\(.*"
)
"""Values that are never secrets: switches, references, numbers, paths, code."""
_BEARER = re.compile(r"(?i)\b(bearer\s+)(?=[^\s]*[0-9])[A-Za-z0-9._~+/=-]{16,}")
_KEY_BEGINS, _KEY_ENDS = (
    re.compile("-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    re.compile("-----END [A-Z ]*KEY-----"),
)
_KEY_LONGEST = 1 << 14
"""Characters after the BEGIN line of a private key in which its lines are expected."""
_KEY_RUN = re.compile(r"[A-Za-z0-9+/]{40,}")
_KEY_WORD = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_KEY_HEADER = re.compile(r"\b(?:Proc-Type|DEK-Info|Comment|Version): ")
_SIGNED = re.compile(
    r"(?i)((?:[?&;]|%3f|%26|\\u0026)"
    r"(?:x-(?:amz|goog|oss)-(?:signature|credential|security-token)|signature|sig)(?:=|%3d))[^\s&\"'<>#]{4,}"
)
"""Signatures in pre-signed URLs."""
_LOGIN = re.compile(
    r"(?i)\b(wandb\s+login\s+(?:\S{1,200}\s+){0,4}?)[0-9a-f]{40}\b|"
    r"\b(login\s+\S{1,200}\s+password\s+)\S+|\b(password\s+)[0-9a-f]{40}\b"
)
"""`wandb login KEY`, and lines of .netrc."""
_COOKIE = re.compile(r"(?i)\b((?:set-)?cookie:[ \t]*)[\w.-]+=[^\s;\"']*(?:;[ \t]*[\w.-]+=[^\s;\"']*)*")


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """Lines of the values that must not appear in logs, the longest first.

    Of variables with a secret's name, of those that GIVEN lists, and passwords in URLs of all others. Values
    under eight characters, numbers and existing paths do not count.
    """
    given = set(environ.get(GIVEN, "").split(","))
    values = {value for name, value in environ.items() if name in given or is_secret_name(name)}
    for value in environ.values():
        if "://" in value and "@" in value:
            values.update(re.findall(r"""://[^\s/:@"'<>]*:([^\s/"'<>]+)@""", value))
    lines = {line.strip() for value in values if not _is_path(value) for line in value.splitlines()}
    found = (line for line in lines if len(line) >= SHORTEST and not line.replace(".", "").isdigit())
    return sorted(found, key=lambda line: (-len(line), line))


def hider(values: Iterable[str] = ()) -> Callable[[str], str]:
    """A function that redacts these values, in any escaping, and what looks like a secret."""
    forms = sorted({form for value in values for form in _forms(value)}, key=lambda form: (-len(form), form))
    known = re.compile("|".join(map(re.escape, forms))) if forms else None

    def hide(text: str) -> str:
        return hide_unknown(known.sub(SECRET, text) if known is not None else text)

    return hide


def line_hider(values: Iterable[str] = ()) -> Callable[[str], str]:
    """The same for the lines of one stream, in order, for private keys of several lines.

    If the END line is missing, the lines of a key are recognised by their form.
    """
    hide, left = hider(values), 0

    def of_stream(text: str) -> str:
        nonlocal left
        if "\n" in text[:-1] and (left > 0 or "-----BEGIN" in text):
            return "".join(map(of_stream, text.splitlines(keepends=True)))
        newline = "\n" if text.endswith("\n") else ""
        if left > 0:
            left -= len(text)
            end = _KEY_ENDS.search(text)
            if end is not None:
                left = 0
                rest = text[end.end() :]
                return SECRET + (hide(rest) if rest.strip() else newline)
            if _is_of_key(text):
                return (SECRET if text.strip() else "") + newline
        begins = list(_KEY_BEGINS.finditer(text)) if "-----BEGIN" in text else []
        if not begins or _KEY_ENDS.search(text, begins[-1].end()):
            return hide(text)
        left = _KEY_LONGEST
        return hide(text[: begins[-1].start()]) + SECRET + newline

    return of_stream


def _is_of_key(line: str) -> bool:
    """Whether a line after BEGIN may belong to the private key: headers and Base64."""
    words = line.split()
    if len(words) <= 1:
        word = words[0] if words else ""
        if _KEY_WORD.fullmatch(word) is None:
            return not word
        if len(word) % 4 == 0 or word.endswith("="):
            return True
    runs = [run for run in _KEY_RUN.findall(line) if any(map(str.isdigit, run)) and run.lower() != run]
    return bool(runs) or words[-1].endswith("==") or _KEY_HEADER.search(line) is not None


def hide_unknown(text: str) -> str:
    """Redact what looks like a secret, by its own form or by the name before it."""
    text = hide_tokens(text)
    folded = text.lower()
    if "bearer" in folded:
        text = _BEARER.sub(rf"\1{SECRET}", text)
    if "sig" in folded or "x-" in folded:
        text = _SIGNED.sub(rf"\1{SECRET}", text)
    if "login" in folded or "password" in folded:
        text = _LOGIN.sub(lambda found: f"{found[1] or found[2] or found[3]}{SECRET}", text)
    if "cookie" in folded:
        text = _COOKIE.sub(rf"\1{SECRET}", text)
    if any(word in folded for word in _NAMED):
        text = _hide_written(text)
    return text


def hide_tokens(text: str) -> str:
    """Redact values that match TOKENS."""
    if may_hold_token(text):
        for pattern in TOKENS:
            text = re.sub(pattern, SECRET, text)
    return text


def hide_in(value: Any, hide: Callable[[str], str]) -> Any:
    """Apply `hide` to all strings of a JSON value, keys too; redact values under a secret's name."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {
            hide(str(key)): SECRET
            if isinstance(item, str) and _is_assigned(str(key), item)
            else hide_in(item, hide)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [hide_in(item, hide) for item in value]
    return value


def _hide_written(text: str) -> str:
    """Redact values that follow a secret's name."""
    parts, done, at = [], 0, 0
    while (found := _WRITTEN.search(text, at)) is not None:
        at = found.end()  # the value may itself contain a name: "key": "password=..."
        end = _secret_end(text, found)
        if end is not None:
            parts += [text[done : found.end()], SECRET]
            done = at = end
    return "".join([*parts, text[done:]])


def _secret_end(text: str, found: re.Match[str]) -> int | None:
    """End of the secret that follows a name; None without one."""
    start, quote = found.end(), found["quote"]
    name = found["name"].lstrip("-")
    in_address = text[found.start() - 1 : found.start()] in ("?", "&")
    is_option = (found["option"] is not None or in_address) and name.lower() in ("token", "auth")
    if is_option:
        name = f"hub-{name}"
    if not (names_secret(name.rpartition(".")[2]) or _is_sure(name)):
        return None
    if quote and (end := _closing_quote(text, start, quote)) is not None:
        value = text[start:end]
        before = text[max(0, found.start() - 40) : found.start()]
        if found["listed"] and not (any(map(str.isdigit, value)) or _SETS.search(before)):
            return None  # a list of names
        return end if _is_assigned(name, value) or _is_login_key(found, value) else None
    bare = _BARE.match(text, start, start + _LONGEST)
    assert bare is not None, "it may be empty"
    known = bool(quote or found["scheme"] or is_option or in_address)
    if _is_login_key(found, bare[0]):
        return bare.end()
    if not _is_sure(name):
        if not _is_assigned(name, bare[0], known):
            return None
        return _BARE.match(text, start).end()  # type: ignore[union-attr]  # it matches anything
    if (not bare[0] or _PLAIN.fullmatch(bare[0])) and _ENDS_PLAIN.match(text, bare.end()):
        return None
    whole = text[start : start + _LONGEST].split(maxsplit=1)[0]
    value = whole.rstrip(_CLOSING)
    if not _is_assigned(name, value):
        return None
    if len(whole) < _LONGEST:
        return start + len(value)
    return _SPACE.search(text, start).start()  # type: ignore[union-attr]  # also the end of the text


def _closing_quote(text: str, start: int, quote: str) -> int | None:
    """End of a quoted value; None where the quote is not closed in the same line.

    Of quotes within, each level of escaping doubles the backslashes and adds one: ", \\", \\\\\\".
    """
    level, sign = len(quote) - 1, quote[-1]
    for found in _QUOTE.finditer(text, start, start + _LONGEST):
        if found[2] == "\n":
            return None
        if found[2] == sign and len(found[1]) % (2 * (level + 1)) == level:
            return found.end() - 1 - level
    return None


def _is_login_key(found: re.Match[str], value: str) -> bool:
    """Whether it is a wandb key given as keyword argument; it looks like a commit."""
    return found["name"].lower() == "key" and "=" in found["sep"] and bool(_WANDB_KEY.fullmatch(value))


@lru_cache(maxsize=1024)
def _is_sure(name: str) -> bool:
    """Whether the value of this name is always a secret, whether or not it looks random."""
    name = name.rpartition(".")[2].replace("-", "_")
    if _SURE.search(name):
        return True
    return names_secret(name) and name.isupper() and ("_" in name or name not in ("KEY", "TOKEN"))


def _is_assigned(name: str, value: str, sure: bool = True) -> bool:
    """Whether a value after a name in a log is a secret. sure: it is a value, not prose."""
    name = name.rpartition(".")[2].replace("-", "_")
    value = value.strip()
    if len(value) < 4 or _PLAIN.fullmatch(value) or SECRET in value:
        return False
    if _SURE.search(name):
        return len(value) >= SHORTEST or re.search("(?i)pass|pwd|pw$", name) is not None
    if not names_secret(name) or len(value) < SHORTEST:
        return False
    if _is_sure(name):
        return not _HASH.fullmatch(value) or "KEY" not in name or "API" in name
    return sure and _is_opaque(value) and not _HASH.fullmatch(value)


def _is_opaque(value: str) -> bool:
    """Whether a value looks random."""
    if _OPAQUE.fullmatch(value) is None or not any(map(str.isalpha, value)):
        return False
    return any(any(map(str.isdigit, run)) for run in _RUN.findall(value))


def _forms(value: str) -> set[str]:
    """A value, and its forms in repr, JSON, URLs and HTML."""
    escaped = {repr(value)[1:-1], json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    return {value, *escaped, json.dumps(json.dumps(value))[3:-3], quote(value), quote(value, safe=""),
            quote_plus(value), html.escape(value)}  # fmt: skip


def _is_path(value: str) -> bool:
    try:
        return value.startswith("/") and Path(value).exists()
    except (OSError, ValueError):  # not a valid path
        return False
