"""Recognise secrets by name and by value."""

from __future__ import annotations

import re

GIVEN = "EFFILAUNCH_SECRETS"
"""Environment variable: names of variables with secrets, such as those that a recipe refers to."""
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
    r"(?<![\w-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]+",  # a JSON web token
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?:(?!-----BEGIN )[\s\S])*?-----END [A-Z ]*PRIVATE KEY-----|"
    r"(?:\s|\\+[nr])*[A-Za-z0-9+/]{16,}=*(?:(?:\s|\\+[nr])+[A-Za-z0-9+/]{16,}=*)*)",  # it may be cut off
    r"""(?<=://)[^\s/:@"'<>]*:[^\s/"'<>]+(?=@)""",  # a password inside an address
    r"(?<=://)[A-Za-z0-9_-]{20,}(?=@)",
)
"""Patterns of values that are secrets under any name. Compiled on first use: compiling all of them is
slow."""
_SIEVE = (
    "hf_", "api_org_", "gh", "github_pat_", "gl", "xox", "sk-", "k_", "AKIA", "ASIA", "AIza", "npm_", "pypi-",
    "wandb_v1_", "eyJ", "-----BEGIN", "@",
)  # fmt: skip
"""Every match of TOKENS contains one of these."""
_WORDS = r"TOKEN|KEY|SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIALS?|COOKIE"
_PARTS = r"AUTH|PASS|PWD|PW|PAT|CREDS?|JWT|DSN"
"""Only as separate parts of a name: `NCCL_NET_PASS`, not `COMPASS`."""
_NAME = rf"(?:{_WORDS}|(?:^|[_.-])(?:{_PARTS}))(?:_ID)?$"
_NO_SECRET = r"^(?:OLD)?PWD$|(?:PAD|EOS|BOS|SEP|CLS|UNK|MASK)_TOKEN$|IMPLICIT_TOKEN$|TEMPLATE_THINKING_KEY$"
_LIKELY = rf"{_WORDS}|PASSW|AUTH(?!OR)|(?:^|[_-])(?:{_PARTS})(?:[_-]|$)"
_UNLIKELY = ("TOKENIZERS_", "HF_TOKEN_PATH", "PWD", "OLDPWD")
SHORTEST = 8
"""Minimum characters of a secret; shorter strings occur in logs for other reasons."""


def names_secret(name: str) -> bool:
    """Whether a variable of this name certainly contains a secret: HF_TOKEN, not MAX_TOKENS."""
    found = re.search(_NAME, name, re.IGNORECASE)
    return found is not None and re.search(_NO_SECRET, name, re.IGNORECASE) is None


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name is likely to contain a secret."""
    return re.search(_LIKELY, name, re.IGNORECASE) is not None and not name.startswith(_UNLIKELY)


def looks_secret(text: str) -> bool:
    """Whether a text contains a token or a password in a URL."""
    return may_hold_token(text) and any(re.search(pattern, text) for pattern in TOKENS)


def is_written_secret(name: str, value: str) -> bool:
    """Whether a literal value under this name is a secret (no path)."""
    named = names_secret(name) and len(value) >= SHORTEST and not value.startswith(("/", "~", "."))
    return looks_secret(value) or named


def may_hold_token(text: str) -> bool:
    """Whether a text can have a match of TOKENS."""
    for part in _SIEVE:  # noqa: SIM110 - any() with a generator takes three times as long
        if part in text:
            return True
    return False
