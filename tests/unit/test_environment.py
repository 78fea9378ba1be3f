"""The environment is mended before the start: nothing that is set is replaced, and all of it is told."""

from __future__ import annotations

import base64
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from launcher.execute.binding import fixed_environment
from launcher.machine import wandb_server

KEY = {"WANDB_API_KEY": "k" * 40}


class Server(BaseHTTPRequestHandler):
    """Knows one key; at /elsewhere it sends on to another server."""

    def do_POST(self):
        self.server.heard.append(self.headers["Authorization"])
        self.rfile.read(int(self.headers["Content-Length"]))
        right = self.headers["Authorization"] == "Basic " + base64.b64encode(b"api:" + b"k" * 40).decode()
        code = 302 if self.path.startswith("/elsewhere") else 500 if "broken" in self.path else 200
        self.send_response(code if right else 401)
        if code == 302:
            self.send_header("Location", f"http://localhost:{self.server.server_port}/graphql")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as found:
        found.heard = []
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture
def online(server):
    return {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}"}


@pytest.fixture
def home(tmp_path):
    return {"HOME": str(tmp_path)}


@pytest.mark.parametrize("report_to", ["wandb", ["wandb"], ["tensorboard", "wandb"], "all"])
def test_without_a_login_wandb_logs_offline(home, report_to):
    added, notes = fixed_environment(home, report_to)
    assert added == {"WANDB_MODE": "offline"}
    assert len(notes) == 1
    assert "WANDB_MODE=offline" in notes[0]


@pytest.mark.parametrize("report_to", ["none", None, [], ["tensorboard"]])
def test_who_does_not_report_to_wandb_needs_no_login(home, report_to):
    assert fixed_environment(home, report_to) == ({}, [])


@pytest.mark.parametrize(
    "said", [{"WANDB_MODE": "disabled"}, {"WANDB_MODE": "online"}, {"WANDB_IDENTITY_TOKEN_FILE": "/t"}]
)
def test_a_login_or_a_mode_of_ones_own_stays(home, said):
    assert fixed_environment({**home, **said}, "wandb") == ({}, [])


def test_a_login_in_the_environment_or_the_netrc_file_counts(home, tmp_path, server, online):
    assert fixed_environment({**home, **KEY, **online}, "wandb") == ({}, [])
    place = f"127.0.0.1:{server.server_port}"
    (tmp_path / ".netrc").write_text(f"machine {place} login user password " + "k" * 40 + "\n")
    assert fixed_environment({**home, **online}, "wandb") == ({}, [])
    other = {**home, "WANDB_BASE_URL": "https://wandb.example.org"}
    added, (note,) = fixed_environment(other, "wandb")
    assert added == {"WANDB_MODE": "offline"}
    assert note.startswith("no wandb login on this machine: ")


def test_a_key_that_the_server_refuses(home, online):
    added, (note,) = fixed_environment({**home, **online, "WANDB_API_KEY": "w" * 40}, "wandb")
    assert added == {"WANDB_MODE": "offline"}
    assert note.startswith(f"wandb's server {online['WANDB_BASE_URL']} rejects")
    assert "www" not in note


@pytest.mark.parametrize("listens", [False, True])
def test_a_server_that_does_not_answer_is_not_waited_for(home, monkeypatch, listens):
    monkeypatch.setattr(wandb_server, "ANSWERS_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        added, (note,) = fixed_environment({**home, **KEY, "WANDB_BASE_URL": address}, "wandb")
    assert added == {"WANDB_MODE": "offline"}
    assert note.startswith(f"wandb's server {address} does not answer: the run is logged offline")


def test_a_name_whose_look_up_hangs_is_not_waited_for(home, monkeypatch):
    monkeypatch.setattr(wandb_server, "ANSWERS_S", 0.1)
    gives_up = threading.Event()

    def look_up(*_, **__):
        gives_up.wait(3600)
        raise socket.gaierror("the resolver gave up")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert fixed_environment({**home, **KEY}, "wandb")[0] == {"WANDB_MODE": "offline"}
    gives_up.set()


@pytest.mark.parametrize("path", ["/broken", "/elsewhere"])
def test_what_is_no_clear_no_is_left_to_wandb(home, server, online, path):
    environ = {**home, **KEY, "WANDB_BASE_URL": online["WANDB_BASE_URL"] + path}
    assert fixed_environment(environ, "wandb") == ({}, [])
    assert len(server.heard) == 1, "the key goes to no other address"


@pytest.mark.parametrize(("value", "told"), [("true", True), ("1", True), ("false", False), ("", False)])
def test_a_variable_that_nobody_reads_any_more_is_told(home, online, value, told):
    environ = {**home, **KEY, **online, "WANDB_DISABLED": value}
    added, notes = fixed_environment(environ, "wandb")
    assert added == {}
    assert any("WANDB_DISABLED" in note for note in notes) is told
    assert fixed_environment(environ, "none") == ({}, [])


def test_the_old_cache_variable_is_mapped_to_the_new_one(home):
    added, notes = fixed_environment({**home, "TRANSFORMERS_CACHE": "/big/models"}, "none")
    assert added == {"HF_HUB_CACHE": "/big/models"}
    assert "TRANSFORMERS_CACHE" in notes[0]


@pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HF_HOME"])
def test_a_new_cache_variable_wins_over_the_old_one(home, name):
    environ = {**home, "TRANSFORMERS_CACHE": "/big/models", name: "/other"}
    assert fixed_environment(environ, "none") == ({}, [])
