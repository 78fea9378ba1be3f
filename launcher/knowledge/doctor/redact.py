"""Remove names of people and machines, addresses and secrets from a text. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.files.redaction import hide_unknown

_SECRETS = (
    # A report for other people hides also the beginning of a token.
    re.compile(r"\b(?:hf|api_org|gh[opsur]|github_pat)_[A-Za-z0-9]{8,}|\b(?:sk|pk|glpat)-[A-Za-z0-9_-]{8,}"),
    re.compile(r"\b[0-9a-fA-F]{32,}\b"),  # wandb's keys are 40 hexadecimal digits
    re.compile(r"(?i)\b(?:bearer|basic) +[A-Za-z0-9._~+/=-]{8,}"),
)
_ASSIGNED = re.compile(
    r"""(?ix)(?<![A-Z0-9_-])([A-Z0-9_-]*
    (?:token|api_?key|secret|passw(?:or)?d|passphrase|credential|signature|\bsig|\bpwd)
    [A-Z0-9_-]*["']?\s*[=:]\s*["']?)(?!\(set\))[^\s"',}&]{4,}"""
)
# To the last @ of the word: a password may hold an @ or a slash.
_CREDENTIALS = re.compile(r"""(?<=://)[^\s"'<>]+@""")
_OTHER_HOME = re.compile(r"(?i)(/(?:home|users)/)[^/\s:\"',<>]+")
_SECRET_KEY = re.compile(
    r"(?i)(?:token(?!izers)|secret|passw|passphrase|credential|cookie|(?:^|_)(?:key|auth|pw|pwd|pass|pat)(?:_|$))"
)
_HIDDEN = ("(set)", "")
_MAIL = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+")
_MAC = re.compile(r"(?i)(?<![0-9a-f:-])[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}(?:[:-][0-9a-f]{2})*(?![0-9a-f:-])")
_GPU = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F]+(?:-[0-9a-fA-F]+)*")
_V4 = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_V6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(?![\w:])")


@dataclass(frozen=True, slots=True)
class Private:
    """What is private here; empty strings are ignored."""

    homes: Sequence[str] = ()
    users: Sequence[str] = ()
    hosts: Sequence[str] = ()
    secrets: Sequence[str] = ()
    """Values of secret variables."""


def redact(text: str, private: Private) -> str:
    """The text without secrets, names and addresses."""
    for secret in _longest_first(private.secrets):
        text = text.replace(secret, "<secret>")
    for home in _longest_first(private.homes):
        text = re.sub(re.escape(home.rstrip("/")) + r"(?![\w-])", "~", text)
    text = _OTHER_HOME.sub(r"\1<user>", text)
    text = _CREDENTIALS.sub("<secret>@", text)
    text = hide_unknown(text)
    text = _ASSIGNED.sub(r"\1<secret>", text)
    for pattern in _SECRETS:
        text = pattern.sub("<secret>", text)
    text = _GPU.sub("<uuid>", text)
    text = _MAIL.sub("<mail>", text)
    text = _MAC.sub("<mac>", text)
    text = _V4.sub(_address, text)
    text = _V6.sub(_address, text)
    for host in _longest_first(private.hosts):
        text = _word(host, "<host>", text)
    for user in _longest_first(private.users):
        text = _word(user, "<user>", text)
    return text


def redact_json(value: object, private: Private) -> object:
    """The same of every string of a JSON value, keys included."""
    if isinstance(value, str):
        return redact(value, private)
    if isinstance(value, Mapping):
        return {
            redact(str(key), private): "<secret>"
            if isinstance(inner, str) and inner not in _HIDDEN and _SECRET_KEY.search(str(key))
            else redact_json(inner, private)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_json(inner, private) for inner in value]
    return value


def _longest_first(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if name.strip("/")}, key=len, reverse=True)


def _word(name: str, stand_in: str, text: str) -> str:
    """A name where no letter or digit continues it."""
    return re.sub(rf"(?i)(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", stand_in, text)


def _address(match: re.Match[str]) -> str:
    try:
        ipaddress.ip_address(match[0].rstrip("."))
    except ValueError:  # a time, or a version of four numbers above 255
        return match[0]
    return "<address>"
