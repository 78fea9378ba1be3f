"""The first words of a connection: both ends prove that they were asked the same, which is never said.

What was asked is a digest of the recipe and the options, or a random token where the head has started the
member over ssh. It is a key: a hash of it tells whether both have the same, and each end signs the other's
nonce with it. So nobody takes orders from whoever happens to listen on the head's port.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any

from launcher.execute.channel import Channel, Closed, Message


class Unproven(Closed):
    """The other end does not know what this one was asked."""


def fingerprint(asked: str) -> str:
    """The same for the same request. Nothing can be proved with it."""
    return hashlib.sha256(f"effilaunch request {asked}".encode()).hexdigest()


def introduce(channel: Channel, hello: Message, asked: str, limit_s: float) -> Message:
    """A member's part: the head's welcome, or its refusal.

    hello: as the head is told it. Unproven where the head proves nothing; Closed where it says nothing.
    """
    own = secrets.token_hex(16)
    channel.send({**hello, "nonce": own})
    answer = channel.receive(limit_s)
    if answer["kind"] == "refused":
        return answer
    nonces = own, str(answer.get("nonce"))
    if answer["kind"] != "proof" or not _is_right(answer, "head", hello["job"], asked, nonces):
        raise Unproven("it does not prove that it is the first machine of this run")
    channel.send({"kind": "proof", "proof": _proof("member", hello["job"], asked, nonces)})
    answer = channel.receive(limit_s)
    if answer["kind"] not in ("welcome", "refused"):
        raise Closed("it gave no answer to a proof")
    return answer


def ask_for_proof(channel: Channel, hello: Mapping[str, Any], asked: str, limit_s: float) -> None:
    """The head's part: it proves itself to a member, which must do so, too.

    hello: what the member said. Unproven where it does not; KeyError where it said no nonce.
    """
    own = secrets.token_hex(16)
    nonces = str(hello["nonce"]), own
    channel.send({"kind": "proof", "nonce": own, "proof": _proof("head", hello["job"], asked, nonces)})
    if not _is_right(channel.receive(limit_s), "member", hello["job"], asked, nonces):
        raise Unproven("it does not prove that it takes part in this run")


def _proof(who: str, job: str, asked: str, nonces: tuple[str, str]) -> str:
    """who: head or member, so that neither end can be answered with its own words."""
    key = hashlib.sha256(json.dumps([job, asked]).encode()).digest()
    return hmac.new(key, json.dumps([who, *nonces]).encode(), "sha256").hexdigest()


def _is_right(answer: Message, who: str, job: str, asked: str, nonces: tuple[str, str]) -> bool:
    told = str(answer.get("proof")).encode()
    return hmac.compare_digest(told, _proof(who, job, asked, nonces).encode())
