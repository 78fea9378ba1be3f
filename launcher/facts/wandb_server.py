"""Whether wandb's server would take a run of this machine: asked once, before the run starts."""

from __future__ import annotations

import base64
import netrc
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from launcher.facts.safe_files import expanded

ANSWERS_S = 5.0
"""So long the server may take, its name's look-up and a proxy included."""
_WHO = b'{"query": "query Viewer { viewer { id } }"}'


def wandb_key(environ: Mapping[str, str]) -> str | None:
    """$WANDB_API_KEY, or the password of the netrc file's entry for the server. Not to be shown."""
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
    """What keeps a run from being logged there, in words; None where nothing is known to.

    Takes ANSWERS_S at most. What is no clear no is for wandb itself to try.
    """
    key, address = wandb_key(environ), _address(environ)
    if key is None:
        return "no wandb login on this machine"
    said: list[str | None] = []
    thread = threading.Thread(target=lambda: said.append(_asked(address, key)), daemon=True)
    thread.start()
    thread.join(ANSWERS_S + 0.5)  # the look-up of a name has no time limit of its own
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
        """The key goes to no other address."""

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
        return f"wandb's server {_shown(address)} refuses this machine's key" if refused else None
    except error.URLError as failed:
        return None if isinstance(failed.reason, ssl.SSLError) else _silent(address)
    except (OSError, HTTPException):
        return _silent(address)
    except ValueError:  # no address: wandb says why
        return None
