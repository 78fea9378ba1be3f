"""What a secret looks like, by its name and by its value, and texts without secrets.

One list for recipes, imports, logs, errors and reports. `detect-secrets` is not used: it needs `requests`,
reads files rather than lines, and its entropy rules take hashes for secrets.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

SECRET = "<secret>"
"""Stands where a secret stood."""
GIVEN = "EFFILAUNCH_SECRETS"
"""Variable with the names, not the values, of the variables that a recipe gives by reference."""
TOKENS = (
    r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}\b",
    r"\b(?:gh[opsur]|github_pat)_[A-Za-z0-9_]{20,}",
    r"\bgl(?:pat|ptt|dt|rt)-[A-Za-z0-9_-]{16,}",
    r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    r"(?<![\w-])sk-(?=[\w-]{0,60}?[A-Za-z0-9_]{16})(?=[\w-]{0,60}?[0-9])[\w-]{20,}",  # not sk-learn-model
    r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\bAIza[A-Za-z0-9_-]{35}",
    r"\b(?:npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{32,}|wandb_v1_[A-Za-z0-9_]{20,})",
    r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]+",  # a JSON web token
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?!-----BEGIN )[\s\S])*?-----END [A-Z ]*PRIVATE KEY-----",
    r"""(?<=://)[^\s/:@"'<>]*:[^\s/"'<>]+(?=@)""",  # a password inside an address
    r"(?<=://)[A-Za-z0-9_-]{20,}(?=@)",
)
"""Patterns of values that give themselves away, whatever their name. None is compiled before it is asked for:
each costs a command that starts as much as a module."""
_SIEVE = (
    "hf_", "api_org_", "gh", "github_pat_", "gl", "xox", "sk-", "k_", "AKIA", "ASIA", "AIza", "npm_", "pypi-",
    "wandb_v1_", "eyJ", "-----BEGIN", "@",
)  # fmt: skip
"""One of these is in every text in which one of TOKENS is."""
_WORDS = r"TOKEN|KEY|SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIALS?|COOKIE"
_PARTS = r"AUTH|PASS|PWD|PW|PAT|CREDS?|JWT|DSN"
"""Say it where they stand as a part of their own: `NCCL_NET_PASS`, not `COMPASS`."""
_NAME = rf"(?:{_WORDS}|(?:^|[_.-])(?:{_PARTS}))(?:_ID)?$"
_NO_SECRET = r"^(?:OLD)?PWD$|(?:PAD|EOS|BOS|SEP|CLS|UNK|MASK)_TOKEN$|IMPLICIT_TOKEN$"
_LIKELY = rf"{_WORDS}|PASSW|AUTH(?!OR)|(?:^|[_-])(?:{_PARTS})(?:[_-]|$)"
_UNLIKELY = ("TOKENIZERS_", "HF_TOKEN_PATH", "PWD", "OLDPWD")
_SHORTEST = 8
"""Characters; what is shorter stands in logs for many other reasons."""
_NAMED = (
    "token", "key", "secret", "pass", "auth", "credential", "creds", "cookie", "pwd", "pat", "pw", "jwt",
    "dsn",
)  # fmt: skip
_WRITTEN = re.compile(
    rf"(?ix) (?<![\w.-]) (?=[\w.-]{{0,80}}?(?:{'|'.join(_NAMED)}))"
    r"""
    (?P<name> (?P<option>--?)? [A-Z_][\w.-]{0,80} )
    (?P<sep> (?:\\*["'])? \s? [:=] \s? | (?(option) (?:\\*["'])?,?\s+ | (?!)) )
    (?: (?P<quote> \\*["']) (?P<quoted> (?:(?!(?P=quote)) [^\n]){1,4096} ) (?P=quote)
      | (?P<scheme> (?:bearer|basic|token)\s+ )? (?P<bare> [^\s"',;&)}\]]{1,4096} ) )"""
)
"""A name and its value: in shell, YAML, JSON, a repr, a command line, a header."""
_SURE = re.compile(
    r"(?i)(?:(?:api|access|auth|private|secret|hf|hub|refresh|bearer|session|security|account|signing|bot|user|login|"
    r"client|personal|wandb|github|gitlab)[_-]?(?:key|token)|secret|passw(?:or)?d|passphrase|credentials?|cookie|"
    r"authorization|hub[_-]auth|(?:^|[_.-])(?:pass|pwd|pw))$"
)
"""Names in small letters whose value is a secret however it looks; of others it must look random."""
_OPAQUE = re.compile(r"(?=[^\s]*[A-Za-z])(?=[^\s]*?(?=[A-Za-z]*[0-9])[A-Za-z0-9]{12})[A-Za-z0-9_+=.~-]{20,}")
"""A part of it has no separators, as the names of modules, files and models have."""
_HASH = re.compile(r"(?:sha\d+[:-])?[0-9a-f]{7,128}")
_PLAIN = re.compile(
    r"(?i)none|null|true|false|missing|required|invalid|expected|hidden|unset|not|object|string|<.*|\$.*|\(.*|\[.*|"
    r"\{.*|[*x.…]+|[/~.].*|[-+]?[\d.,_]+(?:e[-+]?\d+)?|file:.*"
)
"""Values that are no secret, whatever they are called: switches, references, numbers, paths."""
_BEARER = re.compile(r"(?i)\b(bearer\s+)(?=[^\s]*[0-9])[A-Za-z0-9._~+/=-]{16,}")
_KEY_BEGINS, _KEY_ENDS = (
    re.compile("-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    re.compile("-----END [A-Z ]*KEY-----"),
)
_KEY_LONGEST = 1 << 14
"""Characters after the beginning of a private key that may belong to it."""


def names_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret, beyond doubt: HF_TOKEN, not MAX_TOKENS."""
    found = re.search(_NAME, name, re.IGNORECASE)
    return found is not None and re.search(_NO_SECRET, name, re.IGNORECASE) is None


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name is likely to hold a secret."""
    return re.search(_LIKELY, name, re.IGNORECASE) is not None and not name.startswith(_UNLIKELY)


def looks_secret(text: str) -> bool:
    """Whether a text holds what nothing but a token or a password looks like."""
    return _may_hold_token(text) and any(re.search(pattern, text) for pattern in TOKENS)


def is_written_secret(name: str, value: str) -> bool:
    """Whether a variable that is written out, name and value, is a secret: no path, no number, no switch."""
    named = names_secret(name) and len(value) >= _SHORTEST and not value.startswith(("/", "~", "."))
    return looks_secret(value) or named


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """Lines of the values that no log may hold, the longest first.

    Of each variable whose name says so, of those that GIVEN lists, and the passwords of addresses in all
    others. What is shorter than eight characters, a number, or the path of something that is here counts as
    none.
    """
    given = set(environ.get(GIVEN, "").split(","))
    values = {value for name, value in environ.items() if name in given or is_secret_name(name)}
    for value in environ.values():
        if "://" in value and "@" in value:
            values.update(re.findall(r"""://[^\s/:@"'<>]*:([^\s/"'<>]+)@""", value))
    lines = {line.strip() for value in values if not _is_path(value) for line in value.splitlines()}
    return sorted((line for line in lines if _is_long(line)), key=lambda line: (-len(line), line))


def hider(values: Iterable[str] = ()) -> Callable[[str], str]:
    """A function that takes these values, however they are escaped, and what looks secret out of a text."""
    forms = sorted({form for value in values for form in _forms(value)}, key=lambda form: (-len(form), form))
    known = re.compile("|".join(map(re.escape, forms))) if forms else None

    def hide(text: str) -> str:
        return hide_unknown(known.sub(SECRET, text) if known is not None else text)

    return hide


def line_hider(values: Iterable[str] = ()) -> Callable[[str], str]:
    """The same for the lines of one stream, in their order: a private key has several."""
    hide, left = hider(values), 0

    def of_stream(text: str) -> str:
        nonlocal left
        if left > 0:
            end = _KEY_ENDS.search(text)
            left = 0 if end else left - len(text)
            inside, text = (text, "") if end is None else (text[: end.end()], text[end.end() :])
            return (SECRET if inside.strip() else "") + ("\n" if inside.endswith("\n") else "") + hide(text)
        text = hide(text)
        begins = _KEY_BEGINS.search(text) if "-----BEGIN" in text else None
        if begins is None:
            return text
        left = _KEY_LONGEST
        return text[: begins.start()] + SECRET + ("\n" if text.endswith("\n") else "")

    return of_stream


def hide_unknown(text: str) -> str:
    """The text without what looks like a secret, by its own shape or by the name before it."""
    text = hide_tokens(text)
    folded = text.lower()
    if "bearer" in folded:
        text = _BEARER.sub(rf"\1{SECRET}", text)
    if any(word in folded for word in _NAMED):
        text = _WRITTEN.sub(_without_value, text)
    return text


def hide_tokens(text: str) -> str:
    """The text without values that give themselves away."""
    if _may_hold_token(text):
        for pattern in TOKENS:
            text = re.sub(pattern, SECRET, text)
    return text


def hide_in(value: Any, hide: Callable[[str], str]) -> Any:
    """A JSON value with its texts, keys too, as `hide` leaves them; one under a secret's name is hidden."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {hide(str(key)): _hidden_member(str(key), item, hide) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide_in(item, hide) for item in value]
    return value


def _hidden_member(name: str, item: Any, hide: Callable[[str], str]) -> Any:
    return SECRET if isinstance(item, str) and _is_assigned(name, item) else hide_in(item, hide)


def _may_hold_token(text: str) -> bool:
    for part in _SIEVE:  # noqa: SIM110 - any() with a generator takes three times as long
        if part in text:
            return True
    return False


def _without_value(found: re.Match[str]) -> str:
    value = found["quoted"] or found["bare"]
    name, known = found["name"].lstrip("-"), found["quoted"] is not None or found["scheme"] is not None
    is_option = found["option"] is not None and name.lower() in ("token", "auth")
    if not _is_assigned(f"hub-{name}" if is_option else name, value, known or is_option):
        return found[0]
    return found[0].replace(value, SECRET) if value not in found["name"] else f"{found['name']}={SECRET}"


def _is_assigned(name: str, value: str, sure: bool = True) -> bool:
    """Whether a value that a log shows under a name is a secret. sure: whether it is a value, not prose."""
    name = name.rpartition(".")[2].replace("-", "_")
    value = value.strip()
    if len(value) < 4 or _PLAIN.fullmatch(value) or SECRET in value:
        return False
    if _SURE.search(name):
        return len(value) >= _SHORTEST or re.search("(?i)pass|pwd|pw$", name) is not None
    if not names_secret(name) or len(value) < _SHORTEST:
        return False
    if name.isupper() and ("_" in name or name not in ("KEY", "TOKEN")):
        return not _HASH.fullmatch(value) or "KEY" not in name or "API" in name
    return sure and _OPAQUE.fullmatch(value) is not None and not _HASH.fullmatch(value)


def _forms(value: str) -> set[str]:
    """A value as it is, and as a repr, JSON, an address and HTML write it."""
    escaped = {repr(value)[1:-1], json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    return {value, *escaped, json.dumps(json.dumps(value))[3:-3], quote(value), quote(value, safe=""),
            quote_plus(value), html.escape(value)}  # fmt: skip


def _is_long(value: str) -> bool:
    return len(value) >= _SHORTEST and not value.replace(".", "").isdigit()


def _is_path(value: str) -> bool:
    try:
        return value.startswith("/") and Path(value).exists()
    except (OSError, ValueError):  # too long for a path, or not one
        return False
