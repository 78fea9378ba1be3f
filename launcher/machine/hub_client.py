"""Ask the Hugging Face hub for a model's configuration; find its home, cache and token.

Without huggingface_hub, which planning does not need, but with its rules for variables, tokens and errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.files.safe_files import LARGEST_TEXT, expanded, parse_json, read_text

if TYPE_CHECKING:
    from email.message import Message
    from urllib.request import OpenerDirector, Request

HUB_SECONDS = 2.0
"""Timeout of a request."""
_ON = ("1", "ON", "YES", "TRUE")

State = Literal["found", "gated", "token-refused", "absent", "no-revision", "no-file", "unreachable", "error"]


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """The hub's answer to a request for config.json."""

    state: State
    status: int | None = None
    """HTTP status; None without an answer."""
    detail: str = ""
    """The error."""
    config: dict[str, Any] | None = None


def hub_home(environ: Mapping[str, str]) -> Path:
    """HF_HOME as huggingface_hub finds it."""
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(os.path.expandvars(environ.get("HF_HOME") or f"{cache}/huggingface"))


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The hub cache, as huggingface_hub finds it."""
    named = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    return expanded(os.path.expandvars(named)) if named else hub_home(environ) / "hub"


def hub_token(environ: Mapping[str, str]) -> str:
    """The hub token as huggingface_hub finds it, "" without a login. Never store it."""
    if named := environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN"):
        return re.sub(r"\s", "", named)
    path = os.path.expandvars(environ.get("HF_TOKEN_PATH") or str(hub_home(environ) / "token"))
    try:
        return read_text(expanded(path), LARGEST_TEXT).strip()
    except (OSError, ValueError):
        return ""


def is_offline(environ: Mapping[str, str]) -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set."""
    return any(environ.get(name, "").upper() in _ON for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def hub_endpoint(environ: Mapping[str, str]) -> str:
    """The hub's address, or a mirror's."""
    return (environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def ask_config(name: str, revision: str, environ: Mapping[str, str], method: str = "GET") -> HubAnswer:
    """Request config.json with the user's token; `HEAD`: only check access."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.parse import quote

    try:
        text = _read(f"{quote(name)}/resolve/{quote(revision, safe='')}/config.json", environ, method)
    except HTTPError as refused:
        refused.close()
        return _refused(refused.code, refused.headers)
    except ValueError:  # its message may quote the token
        return HubAnswer("unreachable", detail="HF_ENDPOINT is not a valid URL, or the token is malformed")
    except (OSError, HTTPException) as silent:  # URLError is an OSError
        return HubAnswer("unreachable", detail=str(getattr(silent, "reason", "") or silent or "no answer"))
    if method == "HEAD":
        return HubAnswer("found", 200)
    try:
        config = parse_json(text)
    except ValueError as wrong:
        return HubAnswer("error", 200, f"its config.json is not JSON ({wrong})")
    if not isinstance(config, dict):
        return HubAnswer("error", 200, "its config.json is not a JSON object")
    return HubAnswer("found", 200, config=config)


def _refused(status: int, headers: Message) -> HubAnswer:
    """The state of an HTTP error, as in huggingface_hub (utils/_http.py hf_raise_for_status).

    Without a login, a repository that does not exist is 401, too.
    """
    code, message = headers.get("X-Error-Code") or "", headers.get("X-Error-Message") or ""
    by_code: dict[str, State] = {
        "GatedRepo": "gated", "RepoNotFound": "absent",
        "RevisionNotFound": "no-revision", "EntryNotFound": "no-file",
    }  # fmt: skip
    if code in by_code:
        return HubAnswer(by_code[code], status, message)
    if status == 401:
        wrong_token = "Invalid credentials" in message or "Invalid username or password" in message
        return HubAnswer("token-refused" if wrong_token else "gated", status, message)
    by_status: dict[int, State] = {403: "gated", 404: "absent"}
    return HubAnswer(by_status.get(status, "error"), status, message)


def ask_model_type(name: str, environ: Mapping[str, str]) -> str | None:
    """A model's `model_type`, which the hub shows for gated models, too; None where unknown."""
    from http.client import HTTPException
    from urllib.parse import quote

    try:
        found = parse_json(_read(f"api/models/{quote(name)}", environ))["config"]["model_type"]
    except (OSError, ValueError, TypeError, KeyError, HTTPException):
        return None
    return found if isinstance(found, str) else None


def _read(path: str, environ: Mapping[str, str], method: str = "GET") -> bytes:
    """The body of the response. OSError, HTTPException; ValueError for an invalid request."""
    from urllib.request import Request  # takes 20 ms

    request = Request(f"{hub_endpoint(environ)}/{path}", method=method)
    token = "" if environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _ON else hub_token(environ)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with _opener().open(request, timeout=HUB_SECONDS) as answer:
        body: bytes = answer.read()
    return body


def _opener() -> OpenerDirector:
    """Follows redirects without sending the token to other hosts, which urllib would do."""
    from urllib.parse import urlsplit
    from urllib.request import HTTPRedirectHandler, build_opener

    class SameHost(HTTPRedirectHandler):
        def redirect_request(self, req: Request, *args: Any) -> Request | None:
            followed = super().redirect_request(req, *args)
            if followed is not None and urlsplit(followed.full_url)[:2] != urlsplit(req.full_url)[:2]:
                followed.remove_header("Authorization")
            return followed

    return build_opener(SameHost)
