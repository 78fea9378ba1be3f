"""The server of a page that follows runs: what it answers, and to whom."""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from patience import patience, wait_until
from reports import write_finished, write_run

from launcher.cli import main
from launcher.errors import RecipeError
from launcher.report import live, loopback
from launcher.report.live import serving, serving_apart


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "rank-0.log").write_text("first line\nA Warning <b>here</b>\nlast line\n")
    (tmp_path / "secret.log").write_text("not of this run\n")
    (folder / "logs" / "outside.log").symlink_to(tmp_path / "secret.log")
    return folder


@pytest.fixture
def served(run):
    with serving([run], ["run"], 0) as address:
        yield urlsplit(address)


def ask(address, path="/", method="GET", *, host=None, token=None, **more):
    own = parse_qs(address.query)["token"][0]
    words = {"token": own if token is None else token, **more}
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=patience(60))
    query = "&".join(f"{name}={quote(value)}" for name, value in words.items())
    with contextlib.closing(connection):
        connection.request(method, f"{path}?{query}", headers={} if host is None else {"Host": host})
        with connection.getresponse() as answer:
            return answer.status, answer.read().decode(), answer


def test_the_page_has_the_run_its_logs_and_a_policy_for_its_script(served):
    status, text, answer = ask(served)
    assert status == 200
    assert "<option>rank-0.log</option>" in text
    text = html.unescape(text)
    nonce = text.partition("script-src 'nonce-")[2].partition("'")[0]
    assert len(nonce) >= 16
    assert f'<script nonce="{nonce}">' in text
    assert "connect-src 'self'" in text
    assert text.count("<script") == 1
    assert answer.getheader("Cache-Control") == "no-store"
    assert answer.getheader("Referrer-Policy") == "no-referrer"
    assert ask(served)[1].partition("nonce-")[2][:16] != nonce[:16], "each page has its own"


def test_only_who_knows_the_token_and_asks_for_the_loopback_is_answered(served):
    assert served.hostname == "127.0.0.1"
    for path in ("/", "/events", "/log"):
        assert ask(served, path, token="")[0] == 403
        assert ask(served, path, token="x" * 22)[0] == 403
        assert ask(served, path, host="evil.example:80")[0] == 421
        assert "first line" not in ask(served, path, token="")[1]
    assert ask(served, host="localhost:9999")[0] == 200, "ssh -L has another port"
    assert ask(served, "/../plan.json")[0] == 404
    for method, status in (("POST", 404), ("PUT", 501), ("DELETE", 501)):
        assert ask(served, method=method)[0] == status


def test_logs_are_searched_and_only_those_of_the_run(served, run, tmp_path, monkeypatch):
    assert ask(served, "/log", name="rank-0.log")[1].splitlines()[-1] == "last line"
    assert ask(served, "/log", name="rank-0.log", search="warning")[1] == "A Warning <b>here</b>"
    assert ask(served, "/log", name="rank-0.log")[2].getheader("Content-Type") == "text/plain; charset=utf-8"
    for name in ("../plan.json", "/etc/passwd", "rank-1.log", ""):
        assert ask(served, "/log", name=name)[0] == 404
    monkeypatch.setenv("MY_TOKEN", "hf_0123456789abcdefgh")
    (run / "logs" / "rank-0.log").write_text("it is hf_0123456789abcdefgh\n")
    assert "hf_0123456789" not in ask(served, "/log", name="rank-0.log")[1]
    long = "\n".join(f"line {n}" for n in range(3000))
    (run / "logs" / "rank-0.log").write_text(long)
    assert ask(served, "/log", name="rank-0.log")[1].splitlines() == [
        f"line {n}" for n in range(3000 - live.LOG_LINES, 3000)
    ]


def test_a_link_in_the_logs_leads_nowhere_else(served):
    assert "not of this run" not in ask(served, "/log", name="outside.log")[1]
    assert "outside.log" not in ask(served)[1]


@contextlib.contextmanager
def silent(address, count):
    """Connections on which nothing is sent."""
    place = address.hostname, address.port
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(place, patience(60))) for _ in range(count)]


def test_silent_connections_are_few_and_not_for_long(served, monkeypatch):
    monkeypatch.setattr(loopback._Handler, "timeout", 1.0)
    with silent(served, loopback.CONNECTIONS + 20) as waiting:
        assert {one.recv(1) for one in waiting} == {b""}, "closed at once, or when they were idle"
        assert ask(served)[0] == 200


def descriptors():
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_server_of_a_run_is_a_process_of_its_own_and_ends_with_it(run):
    before = descriptors()
    with serving_apart(run) as text:
        address = urlsplit(text)
        assert ask(address)[0] == 200
        own = descriptors()
        with silent(address, 50):
            assert descriptors() == own + 50, "those of the clients"
    assert descriptors() == before
    with pytest.raises(ConnectionRefusedError):
        ask(address)
    parent = "import sys; from pathlib import Path; from launcher.report.live import serving_apart\n"
    parent += f"with serving_apart(Path({str(run)!r})) as text: print(text, flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", parent]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        address = urlsplit(process.stdout.readline().strip())
        process.kill()

    def gone():
        with contextlib.suppress(ConnectionError):
            return not ask(address)
        return True

    wait_until(gone)


def test_a_change_is_told(served, run):
    own = parse_qs(served.query)["token"][0]
    connection = http.client.HTTPConnection(served.hostname, served.port, timeout=patience(60))
    connection.request("GET", f"/events?token={own}")
    answer = connection.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    assert answer.readline() == b": waiting\n", "nothing was written"
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 999, "loss": 0.25}) + "\n")
    lines = [answer.readline() for _ in range(5)]
    assert b"data: changed\n" in lines
    answer.close()
    connection.close()


def test_a_page_that_takes_long_is_drawn_less_often(run, monkeypatch):
    monkeypatch.setattr(live, "LOOK_S", 0.01)
    for drawing_s, least, most in ((0.0, 1, 1), (0.01, 10, 10)):
        page = live.Live([run], ["run"])
        page.page("")
        assert page.drawing_s > 0
        page.drawing_s = drawing_s
        changes = page.changes()
        next(changes)
        (run / f"file-{drawing_s}").touch()
        quiet = 1
        while not next(changes):
            quiet += 1
        assert least <= quiet <= most
        page.ended.set()
        assert list(changes) == []


def test_several_runs_and_a_folder_that_goes_away(tmp_path, run):
    other = write_finished(tmp_path / "other")
    with serving([run, other], ["run", "other"], 0) as text:
        address = urlsplit(text)
        page = ask(address)[1]
        assert "<option>run: rank-0.log</option>" in page
        assert "2 runs compared" in page
        (other / "plan.json").unlink()
        assert ask(address)[0] == 410
    with pytest.raises(ConnectionRefusedError):
        ask(address)


def test_what_cannot_be_served(run, tmp_path, capsys):
    with serving([run], ["run"], 0) as text:
        port = urlsplit(text).port
        with pytest.raises(RecipeError) as caught, serving([run], ["run"], port):
            pass
        assert (caught.value.problems[0].code, caught.value.problems[0].path) == ("port-in-use", "--port")
    with pytest.raises(RecipeError), serving([tmp_path], ["x"], 0):
        pass
    for words in (["--json"], ["--output", "x.html"]):
        assert main(["report", str(run), "--serve", *words]) == 2
    assert main(["report", str(run), "--serve", "--port", "99999"]) == 2
    assert main(["report", str(run), "--port", "8000"]) == 2
    assert not (run / "report.html").exists()


def test_the_command_serves_until_ctrl_c(run):
    command = [sys.executable, "-m", "launcher", "report", str(run), "--serve"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        line = process.stdout.readline()
        address = urlsplit(line.split()[1])
        assert ask(address)[0] == 200
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=patience(60))
        assert (process.returncode, err) == (0, "")
    finally:
        process.kill()
    with pytest.raises(ConnectionRefusedError):
        ask(address)
