"""moto's S3 server on loopback, with faults: requests may be answered late, wrongly or not at all."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

BUCKET = "effilaunch-test"
KEY, SECRET = "AKIATESTTESTTESTTEST", "store-secret-0123456789abcdef"


@dataclass
class Server:
    """The server, and what it does wrong."""

    port: int
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(method, path) of all that came."""
    fault: Callable[[str, str], Any] = lambda method, path: None
    """Called with method and path: None, seconds to wait, `cut`, or (status, S3's code) to answer."""

    def clear(self) -> None:
        """Without objects, faults and memory of requests."""
        from moto.s3.models import s3_backends

        next(iter(s3_backends.values()))["global"].buckets[BUCKET].keys.clear()
        self.fault = lambda method, path: None
        self.requests.clear()

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def keys(self, prefix: str = "") -> dict[str, bytes]:
        """Key -> content of everything in the bucket below a prefix."""
        from moto.s3.models import s3_backends

        bucket = next(iter(s3_backends.values()))["global"].buckets[BUCKET]
        return {name: key.value for name, key in bucket.keys.items() if name.startswith(prefix)}

    def put(self, name: str, content: bytes) -> None:
        from moto.s3.models import s3_backends

        next(iter(s3_backends.values()))["global"].put_object(BUCKET, name, content)


def _answer(start: Any, status: int, code: str) -> list[bytes]:
    body = (
        f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} injected</Message></Error>".encode()
    )
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
    start(f"{status} Injected", headers)
    return [body]


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """A new server with one bucket."""
    from moto.backends import get_backend
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    get_backend("s3").reset()
    application = DomainDispatcherApplication(create_backend_app)
    server = Server(0)

    def faulty(environ: dict[str, Any], start: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        server.requests.append((method, path))
        wrong = server.fault(method, path)
        if isinstance(wrong, tuple):
            with contextlib.suppress(Exception):  # the body of the request must be read
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _answer(start, *wrong)
        if wrong == "cut":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        if wrong:
            time.sleep(wrong)
        return application(environ, start)

    class Quiet(WSGIRequestHandler):
        def log(self, *_: Any, **__: Any) -> None:
            pass

    http = make_server("127.0.0.1", 0, faulty, threaded=True, request_handler=Quiet)
    http.daemon_threads = True
    server.port = http.server_port
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        _create_bucket(server)
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def _create_bucket(server: Server) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=server.env["AWS_ENDPOINT_URL"], aws_access_key_id=KEY,
        aws_secret_access_key=SECRET, region_name="us-east-1",
    )  # fmt: skip
    client.create_bucket(Bucket=BUCKET)
    client.close()
    server.requests.clear()
