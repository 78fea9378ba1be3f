"""Check before a run starts whether wandb's server accepts this machine's key."""

from __future__ import annotations

import base64
import netrc
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from launcher.files.safe_files import expanded

ANSWERS_S = 5.0
"""Timeout of the check, including name resolution and proxy."""
_WHO = b'{"query": "query Viewer { viewer { id } }"}'


def wandb_key(environ: Mapping[str, str]) -> str | None:
    """$WANDB_API_KEY, or the password in the server's netrc entry. Secret."""
    if environ.get("WANDB_API_KEY"):
        return environ["WANDB_API_KEY"]
    home = expanded(environ.get("HOME", "~"))
    paths = [Path(environ["NETRC"])] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for path in paths:
        try:
            found = netrc.netrc(path).hosts.get(re.sub(r"^\w+://|/.*$", "", _address(environ)))
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
        if found is not None:
            return found[2]
    return None


def wandb_obstacle(environ: Mapping[str, str]) -> str | None:
    """Why a run cannot be logged there; None where no reason is known.

    Takes at most ANSWERS_S. Unclear answers are left to wandb itself.
    """
    key, address = wandb_key(environ), _address(environ)
    if key is None:
        return "no wandb login on this machine"
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(_ask(address, key)), daemon=True)
    thread.start()
    thread.join(ANSWERS_S + 0.5)  # name resolution has no timeout
    return found[0] if found else f"{_server(address)} does not answer"


def _address(environ: Mapping[str, str]) -> str:
    return (environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").rstrip("/")


def _server(address: str) -> str:
    return "wandb's server " + re.sub(r"(?<=//)[^/@\s]*@", "", address)


def _ask(address: str, key: str) -> str | None:
    import ssl
    from http.client import HTTPException
    from urllib import error, request

    class Stays(request.HTTPRedirectHandler):
        """Never sends the key to another address."""

        def redirect_request(self, *_: object) -> None:
            return None

    login = base64.b64encode(f"api:{key}".encode()).decode()
    headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
    try:
        asked = request.Request(f"{address}/graphql", _WHO, headers)
        with request.build_opener(Stays).open(asked, timeout=ANSWERS_S):
            return None
    except error.HTTPError as answer:
        return f"{_server(address)} rejects this machine's key" if answer.code == 401 else None
    except (OSError, HTTPException) as failed:  # URLError is an OSError
        is_ssl = isinstance(getattr(failed, "reason", None), ssl.SSLError)
        return None if is_ssl else f"{_server(address)} does not answer"
    except ValueError:  # invalid URL: wandb reports it
        return None
