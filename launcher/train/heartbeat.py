"""The agents of a run's nodes tell each other through torch's store that they live.

Neither gloo, nor NCCL, nor torchelastic notices a node whose cable is pulled before minutes have passed: a
collective waits, and an agent does not look at the members of a job that runs. Each agent therefore writes a
counter every BEAT_S seconds and reads the others'. A node whose counter stands still is lost. An agent that
cannot reach the store, which node rank 0 has, takes node rank 0 for lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher.machine.node_facts import FIRST

BEAT_S, SILENT_S = 2.0, 20.0
_LOOK_S = 1.0
_LEAVE_S = 30.0
"""Node rank 0 keeps the store for the others so long; longer than SILENT_S, so that a lost one is noticed."""
_LEFT = "left"


def beat_key(member: int) -> str:
    return f"effilaunch/beat/{member}"


class Heartbeat:
    """This agent's, and what it has heard of the others."""

    def __init__(
        self,
        connect: Callable[[], Any],
        own: int,
        names: Mapping[int, str],
        lose: Callable[[str], None],
    ) -> None:
        """connect: a connection to the store for this alone, since an operation of a connection waits for the
        one before it. lose: called once, in a thread, with what happened.
        """
        self._connect, self._own, self._lose = connect, own, lose
        self._names = dict(names)
        self._others = sorted(names.keys() - {own})
        now = time.monotonic()
        self._reached = now
        """When the store answered last."""
        self._heard: dict[int, tuple[str, float]] = {number: ("", now) for number in self._others}
        self._text = "0"
        self._over = self._told = False
        """Whether this agent leaves, and whether the store knows that."""

    def start(self) -> None:
        """From now on, until `leave`."""
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        """The thread that talks to the store; an operation may never return."""
        store: Any = None
        count = 0
        while True:
            try:
                store = store or self._connect()
                count += 1
                over = self._over
                store.set(beat_key(self._own), _LEFT if over else str(count))
                self._told = over
                self._hear(store.multi_get([beat_key(number) for number in self._others]))
            except Exception:  # torch's DistError: it is tried again until `_watch` has seen enough
                store = None
            time.sleep(BEAT_S / 4 if self._over else BEAT_S)

    def _hear(self, values: list[bytes]) -> None:
        now = self._reached = time.monotonic()
        for number, raw in zip(self._others, values, strict=True):
            text = raw.decode()
            if text != self._heard[number][0]:
                self._heard[number] = text, now

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            if now - last > 5 * _LOOK_S:  # this process itself was stopped: first it has to listen again
                self._forgive(now)
            last = now
            if (lost := self.lost()) and not self._over:
                self._lose(lost)
                return

    def _forgive(self, now: float) -> None:
        self._reached = now
        self._heard = {number: (text, now) for number, (text, _) in self._heard.items()}

    def lost(self) -> str:
        """Which nodes are lost, and how; empty while all are there or have left."""
        now = time.monotonic()
        if self._own != 0 and self._heard[0][0] != _LEFT and now - self._reached > SILENT_S:
            return f"{FIRST}, {self._names[0]}, was lost: no word from it for {SILENT_S:.0f} s"
        silent = [
            self._names[number]
            for number, (text, heard) in sorted(self._heard.items())
            if text != _LEFT and now - heard > SILENT_S
        ]
        if not silent:
            return ""
        who = f"the node {silent[0]} was" if len(silent) == 1 else f"the nodes {', '.join(silent)} were"
        return f"{who} lost: no word for {SILENT_S:.0f} s"

    def leave(self, *, failed: bool) -> str:
        """Tell the others that this agent ends; which node was lost, if that is why this one failed.

        Node rank 0 waits for the others, which need its store. After a failure all wait: ranks fail at once
        when those of another node are killed, and only its silence tells which node is gone.
        """
        self._over = True
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline:
            if self._own != 0 and self._heard[0][0] == _LEFT:
                break
            if self._told and all(text == _LEFT for text, _ in self._heard.values()):
                break  # before the others know it, they would take this node for lost
            if lost := self.lost():
                return lost if failed else ""
            if self._told and self._own != 0 and not failed:
                break
            time.sleep(0.1)
        if self._own == 0:
            time.sleep(BEAT_S)  # the others hear that it has left
        return ""
