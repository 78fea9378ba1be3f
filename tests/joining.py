"""A head and members in threads of one process, over loopback, with a fast heartbeat."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

from launcher.execute.nodes.group import Group
from launcher.execute.nodes.member import serve
from launcher.execute.nodes.wire import Rhythm
from launcher.facts.job_member import JobMember

FAST = Rhythm(0.1, 0.6)


def a_place() -> JobMember:
    """The head's, of two, on a port that is free."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    return JobMember("ours", 0, 2, 2, 0, 1, 0, "127.0.0.1", port)


def second(place: JobMember, **changes) -> JobMember:
    return replace(place, member=1, node_rank=1, **changes)


class Closing:
    def __init__(self, group: Group) -> None:
        self.group = group

    def __enter__(self) -> Group:
        return self.group

    def __exit__(self, *_: object) -> None:
        self.group.goodbye(None)


class Other:
    """A member in a thread, and how it ended."""

    def __init__(self, place: JobMember, asked: str = "asked", come_s: float = 10.0) -> None:
        self.place, self.code, self.error = place, None, None
        self._given = asked, come_s
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asked, come_s = self._given
        try:
            self.code = serve(self.place, asked, lambda line: None, come_s=come_s, rhythm=FAST)
        except Exception as error:
            self.error = error

    def ended(self):
        self.thread.join(15)
        assert not self.thread.is_alive()
        return self.error if self.error is not None else self.code
