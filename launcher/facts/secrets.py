"""What a secret looks like, and a text without the secrets of an environment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

SECRET = "<secret>"
"""Stands where a secret stood."""
GIVEN = "EFFILAUNCH_SECRETS"
"""Variable with the names, not the values, of the variables that a recipe gives by reference."""
TOKENS = (
    r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}",
    r"\b(?:ghp|gho|ghs|ghu|github_pat|glpat|xox[abprs]|sk|pk)[-_][A-Za-z0-9_-]{8,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}",
    r"\beyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)*",  # a JSON web token
)
"""Patterns of values that give themselves away, whatever their name. None is compiled before it is asked for:
each costs a command that starts as much as a module."""
_LONG_TOKENS = (
    r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}\b",
    r"\b(?:ghp|gho|ghs|ghu|github_pat|glpat)[-_][A-Za-z0-9_-]{16,}",
    r"\bsk-[A-Za-z0-9_-]{20,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+",
    r"://[^\s/:@]+:[^\s/@]+@",  # a password inside an address
)
_NAME = r"(?:TOKEN|KEY|SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIALS?|(?:^|_)AUTH)(?:_ID)?$"
_NO_SECRET = r"(?:(?:PAD|EOS|BOS|SEP|CLS|UNK|MASK)_TOKEN|IMPLICIT_TOKEN)$"
_LIKELY = r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE"
_UNLIKELY = ("TOKENIZERS_", "HF_TOKEN_PATH")
_SHORTEST = 8
"""Characters; what is shorter stands in logs for many other reasons."""


def names_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret, beyond doubt: HF_TOKEN, not MAX_TOKENS."""
    found = re.search(_NAME, name, re.IGNORECASE)
    return found is not None and re.search(_NO_SECRET, name, re.IGNORECASE) is None


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name is likely to hold a secret."""
    return re.search(_LIKELY, name, re.IGNORECASE) is not None and not name.startswith(_UNLIKELY)


def looks_secret(text: str) -> bool:
    """Whether a text holds what nothing but a token or a password looks like."""
    return any(re.search(pattern, text) for pattern in _LONG_TOKENS)


def is_written_secret(name: str, value: str) -> bool:
    """Whether a variable that is written out, name and value, is a secret: no path, no number, no switch."""
    named = names_secret(name) and len(value) >= _SHORTEST and not value.startswith(("/", "~", "."))
    return looks_secret(value) or named


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """Lines of the values that no log may hold, the longest first.

    Of each variable whose name says so, and of those that GIVEN lists. What is shorter than eight characters,
    a number, or the path of something that is here counts as none.
    """
    given = set(environ.get(GIVEN, "").split(","))
    values = {value for name, value in environ.items() if name in given or is_secret_name(name)}
    lines = {line.strip() for value in values if not _is_path(value) for line in value.splitlines()}
    return sorted((line for line in lines if _is_long(line)), key=lambda line: (-len(line), line))


def hider(values: Iterable[str]) -> Callable[[str], str]:
    """A function that takes these values out of a text."""
    known = [re.escape(value) for value in values]
    if not known:
        return str
    pattern = re.compile("|".join(known))
    return lambda text: pattern.sub(SECRET, text)


def _is_long(value: str) -> bool:
    return len(value) >= _SHORTEST and not value.replace(".", "").isdigit()


def _is_path(value: str) -> bool:
    try:
        return value.startswith("/") and Path(value).exists()
    except (OSError, ValueError):  # too long for a path, or not one
        return False
