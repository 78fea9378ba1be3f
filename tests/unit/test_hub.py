"""What planning asks of the hub, with which login, and how it tells the answers apart: a hub on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from launcher.cli import main
from launcher.errors import RecipeError
from launcher.machine.hub_client import hub_cache, hub_token
from launcher.models.model_config import find_model_config, has_chat_template

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 1024, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
GOOD = "hf_good"
ANSWERS = {
    "/nobody/none/": (401, "RepoNotFound"),
    "/gone/": (404, "RepoNotFound"),
    "/org/weights-only/": (404, "EntryNotFound"),
    "/org/open/resolve/v9/": (404, "RevisionNotFound"),
    "/org/down/": (503, None),
    "/mirror/closed/": (403, None),
    "/mirror/none/": (404, None),
}
"""Beginning of a path -> status and X-Error-Code, as the hub answers."""


class Hub(BaseHTTPRequestHandler):
    """`org/open` for everybody, `org/gated` for one token, `org/moved` behind a redirect."""

    def do_GET(self):
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        self.server.seen.append((self.path, token))
        for beginning, (status, code) in ANSWERS.items():
            if self.path.startswith(beginning):
                return self.answer(status, code)
        if self.path.startswith("/api/models/"):
            return self.answer(200, body={"config": {"model_type": "qwen3"}})
        if self.path.startswith("/org/moved/"):
            return self.answer(307, location="/api/resolve-cache/org/gated/config.json")
        if self.path.startswith("/org/elsewhere/"):
            return self.answer(302, location=f"{self.server.elsewhere}/config.json")
        if self.path.startswith("/org/text/"):
            return self.answer(200, body="<html>")
        if token and token != GOOD:
            return self.answer(401, message="Invalid credentials in Authorization header")
        if "gated" in self.path and token != GOOD:
            return self.answer(401, "GatedRepo")
        if "terms" in self.path:
            return self.answer(403, "GatedRepo")
        return self.answer(200, body=LLAMA)

    def answer(self, status, code=None, *, body=None, message=None, location=None):
        self.send_response(status)
        for name, value in (("X-Error-Code", code), ("X-Error-Message", message), ("Location", location)):
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write((body if isinstance(body, str) else json.dumps(body or "")).encode())

    def log_message(self, *arguments):
        """Quiet."""


@pytest.fixture
def started():
    """Starts servers, and ends them."""
    servers = []

    def start():
        server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
        server.seen, server.elsewhere = [], ""
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def address(server):
    return f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def hub(started, monkeypatch, tmp_path):
    """A hub that is asked, an empty cache and no login."""
    server = started()
    monkeypatch.setenv("HF_ENDPOINT", address(server))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN_PATH", "HF_HUB_CACHE",
                 "HUGGING_FACE_HUB_TOKEN", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "http_proxy"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    return server


def refused(name, **more):
    with pytest.raises(RecipeError) as caught:
        find_model_config(name, **more)
    (problem,) = caught.value.problems
    return problem


def log_in(monkeypatch, tmp_path, way, token=GOOD):
    """As `hf auth login` writes it, or by a variable."""
    path = {"file": tmp_path / "hf" / "token", "HF_TOKEN_PATH": tmp_path / "elsewhere"}.get(way)
    if path is None:
        monkeypatch.setenv(way, token)
        return
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{token}\n")
    if way == "HF_TOKEN_PATH":
        monkeypatch.setenv(way, str(path))


WAYS = ("file", "HF_TOKEN_PATH", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@pytest.mark.parametrize("way", WAYS)
def test_every_login_is_shown_to_the_hub(hub, monkeypatch, tmp_path, way):
    assert refused("org/gated").code == "hub-gated"
    log_in(monkeypatch, tmp_path, way)
    assert find_model_config("org/gated") == (LLAMA, "hub")
    assert hub.seen[-1] == ("/org/gated/resolve/main/config.json", GOOD)


def test_a_login_is_what_huggingface_hub_takes_it_for(hub, monkeypatch, tmp_path):
    """Each way alone, then on top of the ones before: the variables go before the file."""
    script = "import json; from huggingface_hub import constants, get_token; "
    script += "print(json.dumps([get_token() or '', constants.HF_HUB_CACHE]))"
    for way in WAYS:
        log_in(monkeypatch, tmp_path, way, f"hf_{way}")
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == [hub_token(os.environ), str(hub_cache(os.environ))]


@pytest.mark.parametrize(
    ("name", "code", "path"),
    [
        ("nobody/none", "hub-model-absent", "model.name_or_path"),
        ("gone/model", "hub-model-absent", "model.name_or_path"),
        ("mirror/none", "hub-model-absent", "model.name_or_path"),
        ("org/gated", "hub-gated", "model.name_or_path"),
        ("org/terms", "hub-gated", "model.name_or_path"),
        ("mirror/closed", "hub-gated", "model.name_or_path"),
        ("org/weights-only", "hub-config-absent", "model.name_or_path"),
        ("org/down", "hub-error", "model.name_or_path"),
        ("org/text", "hub-error", "model.name_or_path"),
    ],
)
def test_answers_are_told_apart(hub, capsys, name, code, path):
    problem = refused(name)
    assert (problem.code, problem.path) == (code, path)
    assert main(["estimate", name, "--on", "1x24GB", "--json"]) == 2
    (said,) = json.loads(capsys.readouterr().out)["errors"]
    assert said["code"] == code
    assert name in said["message"]


@pytest.mark.parametrize(
    "name", ["data/models/mine", "../llama", ".hidden/x", "my model", "a\0b", "package:x/y"]
)
def test_what_no_repository_is_called_is_not_asked_for(hub, name):
    assert refused(name).code in ("model-config-missing", "package-missing")
    assert not hub.seen


def test_a_revision_that_is_not_there(hub):
    problem = refused("org/open", revision="v9")
    assert (problem.code, problem.path) == ("hub-revision-absent", "model.revision")
    assert find_model_config("org/open", revision="refs/pr/1") == (LLAMA, "hub")
    assert hub.seen[-1][0] == "/org/open/resolve/refs%2Fpr%2F1/config.json"


def test_a_token_that_is_not_valid_is_no_gated_model(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    problem = refused("org/open")
    assert problem.code == "hub-token-refused"
    monkeypatch.setenv("HF_TOKEN", "hf_\u20ac-planted\x01")  # no header can hold it
    problem = refused("org/open")
    assert problem.code == "hub-unreachable"
    assert "planted" not in str(problem)


def test_no_network_and_offline(hub, monkeypatch):
    seen = len(hub.seen)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused("org/open").code == "hub-offline"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "true")
    assert refused("org/open").code == "hub-offline"
    monkeypatch.delenv("TRANSFORMERS_OFFLINE")
    assert len(hub.seen) == seen, "nothing was asked"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening
        monkeypatch.setenv("HF_ENDPOINT", f"http://user:planted@127.0.0.1:{closed.getsockname()[1]}")
        problem = refused("org/open")
    assert problem.code == "hub-unreachable"
    assert "planted" not in str(problem)


LONG = "org/" + "m" * 300


@pytest.mark.parametrize("ref", [b"\xff\xfe", b"", b"a\0b", b"m" * 300, b"x" * 2_000_000])
def test_a_damaged_reference_of_the_cache_is_as_if_nothing_were_there(hub, monkeypatch, tmp_path, ref):
    refs = tmp_path / "hf" / "hub" / "models--org--open" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_bytes(ref)
    assert find_model_config("org/open")[1] == "hub"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused("org/open").code == "hub-offline"
    assert has_chat_template("org/open") is None


@pytest.mark.parametrize("name", [LONG, "org/" + "m" * 250])
def test_a_name_that_no_cache_can_hold_is_refused(hub, monkeypatch, tmp_path, name):
    (tmp_path / "hf" / "hub" / "models--org--open" / "refs").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused(name).code in ("model-config-missing", "hub-offline")
    assert refused("org/open", revision="r" * 300).code == "hub-offline"
    assert has_chat_template(name) is None


def test_homes_of_nobody_are_no_homes(hub, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {name_or_path: org/open}\ndata: {train: [{path: absent.jsonl}]}\ntrainer: {max_steps: 1}\n"
    )
    homes = ("HF_HOME", "HF_TOKEN_PATH", "HF_HUB_CACHE")
    with monkeypatch.context() as patched:
        for name in homes:
            patched.setenv(name, "~nouser/x")
        assert main(["doctor"]) in (0, 4)
    for name in homes:
        with monkeypatch.context() as patched:
            patched.setenv(name, "~nouser/x")
            assert hub_token(os.environ) == ""
            assert find_model_config("org/open")[1] == "hub"
            assert main(["plan", str(recipe), "--on", "1xA100-80GB"]) in (0, 2)
    assert refused("~nouser/x").code == "model-config-missing"
    with pytest.raises(RecipeError) as caught:
        find_model_config("org/none", cache_dir="~nouser/x", allow_network=False)
    assert caught.value.problems[0].code == "model-config-missing"
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("token", [b"\xff\xfe", b"x" * 2_000_000])
def test_a_token_file_that_holds_no_token_is_no_login(hub, tmp_path, token):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_bytes(token)
    assert hub_token(os.environ) == ""


def test_siblings_are_named(hub, monkeypatch):
    """Of the architecture that the hub tells of a gated model; without an answer by the name."""
    assert "Qwen/Qwen3-" in refused("org/gated").hint
    assert refused("org/gated").hint.count("/Qwen") == 3
    assert "llama" not in refused("org/gated").hint.lower()
    assert "meta-llama/Llama-3.1-70B" in refused("gone/Llama-3.3-70B").hint
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "meta-llama/Llama-3.1-70B" in refused("meta-llama/Llama-3.3-70B").hint
    assert "plan without" not in refused("org/zzz").hint


def test_a_shipped_model_plans_whatever_the_hub_says(hub):
    config, origin = find_model_config("Qwen/Qwen3-8B", revision="main")
    assert origin == "hub"
    hub.shutdown()
    hub.server_close()
    config, origin = find_model_config("Qwen/Qwen3-8B")
    assert (config["model_type"], origin) == ("qwen3", "shipped facts")


def test_the_login_follows_to_the_same_host_alone(hub, started, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", GOOD)
    assert find_model_config("org/moved") == (LLAMA, "hub")
    assert hub.seen[-1] == ("/api/resolve-cache/org/gated/config.json", GOOD)
    other = started()
    hub.elsewhere = address(other)
    assert find_model_config("org/elsewhere") == (LLAMA, "hub")
    assert hub.seen[-1][1] == GOOD
    assert other.seen == [("/config.json", "")]
