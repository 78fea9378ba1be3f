"""Reports that follow their runs: a page on this machine's loopback, drawn again when a run has written.

The browser asks only this server, which only reads. Each address has a token, and a name of the loopback is
asked for (a page elsewhere that has its own name point here gets nothing). Over `ssh -L` any port will do.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from launcher.errors import EffilaunchError, Problem, RecipeError
from launcher.execute.record import read_run
from launcher.facts.rank_status import read_statuses
from launcher.facts.safe_files import opened
from launcher.report.html.live_sections import SCRIPT, logs_section, ranks_section
from launcher.report.html.page import Section
from launcher.report.run_pages import compare_page, hide_secrets, made, run_page, shown_record

LOOPBACK = "127.0.0.1"
LOOK_S = 1.0
"""Between two looks at the files of the runs."""
ANYWAY_S = 15.0
"""After which a page is drawn again although nothing was written: a process may have ended."""
SHARE = 10
"""Times that drawing a page takes, which pass before the next: a long record costs the run little."""
LOG_BYTES = 4 << 20
"""Of the end of a log."""
LOG_LINES = 1000
"""Of these, or of those that were searched for, the last."""


@dataclass(slots=True)
class Live:
    """What is served: the pages of some runs, their logs, and when they changed."""

    folders: Sequence[Path]
    names: Sequence[str]
    """Of the runs, each different."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    ended: threading.Event = field(default_factory=threading.Event)
    drawing_s: float = 0.0
    """How long the last page took."""

    def page(self, nonce: str) -> str:
        """Raises EffilaunchError where a run can no longer be read."""
        begun = time.monotonic()
        try:
            return self._page(nonce)
        finally:
            self.drawing_s = time.monotonic() - begun

    def _page(self, nonce: str) -> str:
        records = [shown_record(read_run(folder), folder) for folder in self.folders]
        if len(records) > 1:
            return compare_page(records, self.names, made(), more=[self._logs()], script=(nonce, SCRIPT))
        ranks = ranks_section(read_statuses(self.folders[0]))
        return run_page(records[0], made(), more=[ranks, self._logs()], script=(nonce, SCRIPT))

    def _logs(self) -> Section:
        return logs_section(list(self.logs()))

    def logs(self) -> dict[str, Path]:
        """Name -> file; with the name of the run where there are several."""
        several = len(self.folders) > 1
        return {
            f"{name}: {path.name}" if several else path.name: path
            for name, folder in zip(self.names, self.folders, strict=True)
            for path in sorted((folder / "logs").glob("*.log"))
            if path.is_file() and not path.is_symlink()
        }

    def log(self, name: str, wanted: str) -> str | None:
        """The last lines of a log that contain `wanted`; None for a name that is none of `logs`."""
        path = self.logs().get(name)
        if path is None:
            return None
        with opened(path) as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - LOG_BYTES))
            text = hide_secrets()(stream.read().decode("utf-8", errors="replace"))
        found = [line for line in text.splitlines() if wanted.lower() in line.lower()]
        return "\n".join(found[-LOG_LINES:])

    def state(self) -> tuple[tuple[str, int, int], ...]:
        """Changes when a run writes: its files with their times and sizes."""
        found = []
        for folder in self.folders:
            for path in sorted([*folder.glob("*"), *(folder / "logs").glob("*")]):
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    found.append((str(path), stat.st_mtime_ns, stat.st_size))
        return tuple(found)

    def changes(self) -> Iterator[bool]:
        """True when the page is to be drawn again, else False every LOOK_S, until the server ends."""
        before, waited = self.state(), 0.0
        while not self.ended.wait(LOOK_S):
            now, waited = self.state(), waited + LOOK_S
            due = waited >= SHARE * self.drawing_s and (now != before or waited >= ANYWAY_S)
            if due:
                before, waited = now, 0.0
            yield due


class _Handler(BaseHTTPRequestHandler):
    """Answers GET; `live` is set in the class that `serving` makes."""

    live: Live
    protocol_version = "HTTP/1.1"
    server_version = "effilaunch"
    sys_version = ""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(address.query).items()}
        answers: Mapping[str, Callable[[Mapping[str, str]], None]] = {
            "/": self._page, "/events": self._events, "/log": self._log,
        }  # fmt: skip
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in (LOOPBACK, "localhost"):
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "this server answers on the loopback only")
        elif not secrets.compare_digest(asked.get("token", "").encode(), self.live.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "open the address that was printed, with its token")
        elif address.path not in answers:
            self._answer(HTTPStatus.NOT_FOUND, "there is nothing here")
        else:
            with contextlib.suppress(ConnectionError, TimeoutError):  # the browser has gone
                answers[address.path](asked)

    def _page(self, _asked: Mapping[str, str]) -> None:
        try:
            text = self.live.page(secrets.token_urlsafe(12))
        except EffilaunchError as error:
            self._answer(HTTPStatus.GONE, str(error))
        else:
            self._answer(HTTPStatus.OK, text, "text/html")

    def _log(self, asked: Mapping[str, str]) -> None:
        try:
            text = self.live.log(asked.get("name", ""), asked.get("search", ""))
        except OSError as error:
            text = f"cannot be read: {error.strerror}"
        if text is None:
            self._answer(HTTPStatus.NOT_FOUND, "no such log")
        else:
            self._answer(HTTPStatus.OK, text)

    def _events(self, _asked: Mapping[str, str]) -> None:
        self._begin(HTTPStatus.OK, "text/event-stream", None)
        for changed in self.live.changes():
            self.wfile.write(b"data: changed\n\n" if changed else b": waiting\n\n")
            self.wfile.flush()

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode("utf-8", errors="replace")
        self._begin(status, kind, len(body))
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str, length: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if length is None:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing is printed for a request."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True


@contextlib.contextmanager
def serving(folders: Sequence[Path], names: Sequence[str], port: int) -> Iterator[str]:
    """Serve the runs in a thread until the block ends; the address with its token.

    port: 0 for any that is free. Raises RecipeError where it is taken, or a folder is no run directory.
    """
    live = Live(folders, names)
    live.page("")
    handler = type("Handler", (_Handler,), {"live": live})
    try:
        server = _Server((LOOPBACK, port), handler)
    except (OSError, OverflowError) as error:
        message = f"cannot listen on {LOOPBACK}:{port}: {getattr(error, 'strerror', None) or error}"
        raise RecipeError(Problem("port-in-use", message, path="--port", hint="leave it out")) from error
    thread = threading.Thread(target=server.serve_forever, name="report", daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_address[1]}/?token={live.token}"
    finally:
        live.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
