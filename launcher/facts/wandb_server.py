"""Check before a run starts whether wandb's server accepts this machine's key."""

from __future__ import annotations

import base64
import netrc
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from launcher.facts.safe_files import expanded

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
    said: list[str | None] = []
    thread = threading.Thread(target=lambda: said.append(_asked(address, key)), daemon=True)
    thread.start()
    thread.join(ANSWERS_S + 0.5)  # name resolution has no timeout
    return said[0] if said else _silent(address)


def _address(environ: Mapping[str, str]) -> str:
    return (environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").rstrip("/")


def _silent(address: str) -> str:
    return f"wandb's server {_shown(address)} does not answer"


def _shown(address: str) -> str:
    return re.sub(r"(?<=//)[^/@\s]*@", "", address)


def _asked(address: str, key: str) -> str | None:
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
        refused = answer.code == 401
        return f"wandb's server {_shown(address)} rejects this machine's key" if refused else None
    except error.URLError as failed:
        return None if isinstance(failed.reason, ssl.SSLError) else _silent(address)
    except (OSError, HTTPException):
        return _silent(address)
    except ValueError:  # invalid URL: wandb reports it
        return None
