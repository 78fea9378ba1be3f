"""A server for one user's browser: on this machine's loopback, its addresses with a token.

A name of the loopback is asked for, too: a page elsewhere that has its own name point here gets nothing. Over
`ssh -L` any port will do.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from launcher.errors import Problem, RecipeError
from launcher.report.outcome import echo

LOOPBACK = "127.0.0.1"
LARGEST_BODY = 8 << 20
"""Bytes of what a page sends."""
CONNECTIONS = 32
"""At a time; a browser opens 6. Others are closed unread."""
IDLE_S = 15.0
"""After which a connection is closed on which nothing comes, or nobody reads."""
_MOST_DIGITS = 20
"""Of a length that is read: Python converts no number of thousands of digits."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request."""

    query: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole text, or its parts as they come."""

    text: str | bytes | Iterator[bytes]
    kind: str = "text/plain"
    status: HTTPStatus = HTTPStatus.OK


Routes = Mapping[str, Callable[[HttpRequest], Reply]]
"""Path -> what answers it."""


class _Handler(BaseHTTPRequestHandler):
    """`token` and the routes are set in the class that `serving` makes."""

    token: str
    gets: Routes
    posts: Routes
    timeout = IDLE_S
    protocol_version = "HTTP/1.1"
    server_version = "effilaunch"
    sys_version = ""

    def do_GET(self) -> None:
        self._route(self.gets)

    def do_POST(self) -> None:
        self._route(self.posts)

    def _address(self) -> tuple[str, dict[str, str]]:
        """Path and query; of an address that is none, nothing."""
        try:
            found = urlsplit(self.path)
        except ValueError:
            return "", {}
        return found.path, {name: values[-1] for name, values in parse_qs(found.query).items()}

    def _route(self, routes: Routes) -> None:
        path, query = self._address()
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        length = self._length()
        refused = None
        if host not in (LOOPBACK, "localhost"):
            refused = (HTTPStatus.MISDIRECTED_REQUEST, "this server answers on the loopback only")
        elif not secrets.compare_digest(query.get("token", "").encode(), self.token.encode()):
            refused = (HTTPStatus.FORBIDDEN, "open the address that was printed, with its token")
        elif path not in routes:
            refused = (HTTPStatus.NOT_FOUND, "there is nothing here")
        elif length is None:
            refused = (HTTPStatus.LENGTH_REQUIRED, "Content-Length must be the number of bytes that follow")
        elif length > LARGEST_BODY:
            refused = (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {LARGEST_BODY} bytes are read")
        with contextlib.suppress(ConnectionError, TimeoutError):  # the browser has gone
            if refused is not None:
                self.close_connection = True  # what it sent is not read
                self._answer(Reply(refused[1], status=refused[0]))
            else:
                self._answer(_answered(routes[path], HttpRequest(query, self.rfile.read(length or 0))))

    def _length(self) -> int | None:
        """Bytes of the body; None where the request does not say, as when it comes in chunks."""
        given = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (given.isascii() and given.isdigit()):
            return None
        return int(given.lstrip("0")[:_MOST_DIGITS] or "0")

    def _answer(self, answer: Reply) -> None:
        text = answer.text
        body = text.encode("utf-8", errors="replace") if isinstance(text, str) else text
        self.send_response(answer.status)
        self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if isinstance(body, bytes):
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        for part in body:
            self.wfile.write(part)
            self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Nothing is printed for a request."""


def _answered(route: Callable[[HttpRequest], Reply], asked: HttpRequest) -> Reply:
    try:
        return route(asked)
    except Exception as error:  # a bug of ours: the page shows it, and the terminal has no traceback
        message = f"this is a bug of effilaunch: {type(error).__name__}: {error}"
        return Reply(message, status=HTTPStatus.INTERNAL_SERVER_ERROR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 2 * CONNECTIONS  # who is not accepted waits for a minute

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        super().__init__(address, handler)
        self._open = set[Any]()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        self._open.add(request)
        return len(self._open) <= CONNECTIONS

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing is printed where the browser has gone."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def wait_for_interrupt(address: str) -> None:
    """Say where the page is, and wait for Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):  # also one that comes as soon as the address is shown
        echo(f"serving {address}\nCtrl-C ends it; over ssh: ssh -L PORT:{urlsplit(address).netloc} HOST")
        threading.Event().wait()


@contextlib.contextmanager
def listening(token: str, gets: Routes, posts: Routes, port: int) -> Iterator[str]:
    """Serve in a thread until the block ends; the address with its token.

    port: 0 for any that is free. RecipeError where it is taken.
    """
    handler = type("Handler", (_Handler,), {"token": token, "gets": gets, "posts": posts})
    try:
        server = _Server((LOOPBACK, port), handler)
    except (OSError, OverflowError) as error:
        message = f"cannot listen on {LOOPBACK}:{port}: {getattr(error, 'strerror', None) or error}"
        raise RecipeError(Problem("port-in-use", message, path="--port", hint="leave it out")) from error
    thread = threading.Thread(target=server.serve_forever, name="server", daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_address[1]}/?token={token}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
