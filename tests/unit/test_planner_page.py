"""What the planner's page is answered: plans of edited recipes; by whom, at `plan --browser`."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest
from counted_work import function_calls
from patience import patience

from launcher.cli import main
from launcher.commands.plan_page import answer
from launcher.files.shipped import recipes_dir
from launcher.report.planner_page.page import PageStart, planner_page, serving

RECIPE = """\
model: {name_or_path: meta-llama/Llama-3.1-8B}
data: {train: [{path: rows.jsonl}], max_length: 2048}
adapter: {type: lora}
"""
ON = "1xH100-80GB"


def asked(**question):
    return json.loads(answer(json.dumps(question)))


def plan(text=RECIPE, path="tune.yaml", on=ON, **more):
    return asked(ask="plan", path=path, text=text, on=on, **more)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_keystroke_asks_for_little_work():
    """146,000 calls, which a browser does in 0.2 s (docs/plan-page.md)."""
    text = (recipes_dir() / "llama3_8b_full.yaml").read_text("utf-8")
    on = "8xH100-80GB"
    assert plan(text, on=on)["status"] == 0
    assert function_calls(lambda: plan(text + "# and", on=on)) < 200_000


@pytest.mark.parametrize(
    ("on", "sets", "status"),
    [(ON, [], 0), (ON, ["adapter=null"], 3), ("2xH1000", [], 2), (ON, ["trainer.learning_rat=1"], 2)],
)
def test_a_plan_is_that_of_plan_json(tmp_path, capsys, on, sets, status):
    (tmp_path / "tune.yaml").write_text(RECIPE)
    words = [word for one in sets for word in ("--set", one)]
    assert main(["plan", "tune.yaml", "--on", on, *words, "--json"]) == status
    found = plan(on=on, sets=sets)
    assert found["status"] == status
    assert found["json"] == capsys.readouterr().out.rstrip("\n")
    printed = json.loads(found["json"])
    assert found["problems"] == printed.get("errors", [])
    if status != 2:
        assert found["files"] == printed["files"]
        assert found["memory"] == printed["memory"]
        assert [one["change"] for one in found["changes"]] == [
            o["change"] for o in printed.get("would_fit", [])
        ]


def test_the_text_counts_and_not_the_file(tmp_path):
    (tmp_path / "tune.yaml").write_text("this: is another one\n")
    assert plan()["status"] == 0
    assert (tmp_path / "tune.yaml").read_text() == "this: is another one\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tune.yaml"]
    wrong = plan(RECIPE + "trainer: {learning_rat: 1}\n")["problems"]
    assert [(one["code"], one["file"], one["line"]) for one in wrong] == [("unknown-key", "tune.yaml", 4)]


def test_what_a_recipe_extends_is_beside_it(tmp_path):
    (tmp_path / "base.yaml").write_text(RECIPE)
    found = plan("extends: base.yaml\ndata: {max_length: 512}\n")
    assert json.loads(found["json"])["settings"]["data.max_length"]["value"] == 512
    assert plan("extends: absent.yaml\n")["problems"][0]["code"] == "extends-missing"


def test_a_given_configuration_counts_for_its_name_alone():
    models = {name: entry for name, entry in _configs().items() if name == "meta-llama/Llama-3.1-8B"}
    (config,) = models.values()
    text = RECIPE.replace("meta-llama/Llama-3.1-8B", "someone/new")
    assert plan(text)["problems"][0]["code"] == "hub-offline"
    assert plan(text, configs={"someone/other": config})["problems"][0]["code"] == "hub-offline"
    found = plan(text, configs={"someone/new": {**config, "num_hidden_layers": 2}})
    model = json.loads(found["json"])["model"]
    assert (model["name"], model["origin"]) == ("someone/new", "a given configuration")
    assert model["params"] < 2e9
    broken = plan(text, configs={"someone/new": {**config, "model_type": "no-such"}})
    assert broken["problems"][0]["code"] == "unknown-architecture"


def _configs():
    from launcher.files.shipped import facts_file

    models = json.loads(facts_file("models.json").read_text())["models"]
    return {name: entry["config"] for name, entry in models.items()}


def test_the_catalogue_is_what_the_package_has(capsys):
    found = asked(ask="catalogue")
    assert main(["schema"]) == 0
    assert found["schema"] == json.loads(capsys.readouterr().out)
    assert {"H100-80GB", "RTX4090-24GB"} <= set(found["devices"])
    assert "smoke" in found["recipes"]
    assert "meta-llama/Llama-3.1-8B" in found["models"]


def test_plans_are_drawn_on_one_scale():
    plans = {on: plan(on=on)["memory"] for on in (ON, "1xRTX4090-24GB")}
    drawn = asked(ask="chart", columns=[{"name": on, "memory": memory} for on, memory in plans.items()])[
        "chart"
    ]
    assert drawn.count("<svg") == 1
    assert all(f"{on}: the device holds " in drawn for on in plans)
    assert asked(ask="chart", columns=[])["chart"] == ""


ODD = (None, 3, [1], {"a": 1}, "\ud800", "\0")
"""Of no field's type, or text that no file is named."""


@pytest.mark.parametrize(
    "question",
    [b"{}", b"[]", b"no json", b'{"ask": "other"}', b'{"ask": "plan"}', b"\xff", b"[" * 200_000, b"9" * 5000,
     b'{"ask": []}', b'{"ask": "chart", "columns": [[]]}', b'{"ask": "chart", "columns": 1}'],
)  # fmt: skip
def test_another_question_is_refused(question, capfd):
    with serving(PageStart("tune.yaml", RECIPE, (ON,)), answer, 0) as address:
        assert ask(address, question)[0] == 400
    assert capfd.readouterr() == ("", "")


def test_a_question_with_a_value_of_another_type_is_refused():
    right = {"ask": "plan", "path": "tune.yaml", "text": RECIPE, "on": ON, "sets": [], "configs": {}}
    wrong = [(key, value) for key in ("path", "text") for value in ODD[:4]]
    wrong += [("path", value) for value in ODD[4:]]
    wrong += [("on", value) for value in ODD[1:4]] + [("sets", value) for value in (None, "a=1", [1], {})]
    wrong += [("configs", value) for value in (None, 1, "", [], {"name": 1}, {"name": None})]
    for key, value in wrong:
        with pytest.raises(ValueError, match=rf"^plan\.{key}"):
            asked(**{**right, key: value})
    assert asked(**right)["status"] == 0


def test_a_text_that_no_recipe_file_may_have_is_refused():
    found = plan(RECIPE + "# " + "x" * 1_000_000)
    assert (found["status"], found["problems"][0]["code"]) == (2, "unreadable")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST /ask?{} HTTP/1.1\r\nHost: localhost\r\nContent-Length: \xb2\r\n\r\n{{}}", 411),
        ("POST /ask?{} HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n{{}}", 411),
        ("POST /ask?{} HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + "9" * 5000 + "\r\n\r\n", 413),
        ("POST /ask?{} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n", 411),
        ("POST /ask?{} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0002\r\n\r\n{{}}", 400),
        ("GET http://[?{} HTTP/1.1\r\nHost: localhost\r\n\r\n", 403),
        ("GET", None),
    ],
)  # fmt: skip
def test_a_malformed_request_is_answered_and_prints_nothing(capfd, head, status):
    """status: None where the connection is reset before the request is whole."""
    with serving(PageStart("tune.yaml", RECIPE, (ON,)), answer, 0) as address:
        parts = urlsplit(address)
        with socket.create_connection((parts.hostname, parts.port), timeout=patience(60)) as connection:
            connection.sendall(head.format(parts.query).encode("latin-1"))
            if status is None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                assert connection.recv(100).startswith(f"HTTP/1.1 {status} ".encode())
        assert ask(address, None, path="/", method="GET")[0] == 200
    time.sleep(0.1)  # another thread would print it
    assert capfd.readouterr() == ("", "")


def test_a_bug_is_answered_and_prints_nothing(capfd):
    def broken(_text):
        raise AttributeError("x")

    with serving(PageStart("tune.yaml", RECIPE, (ON,)), broken, 0) as address:
        assert ask(address, b"{}")[0] == 500
    assert capfd.readouterr() == ("", "")


def ask(address, body, token=None, path="/ask", host=None, method="POST", length=None):
    parts = urlsplit(address)
    query = parts.query if token is None else f"token={token}"
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=patience(120))
    with contextlib.closing(connection):
        headers = {"Host": host, "Content-Length": length}
        given = {name: str(value) for name, value in headers.items() if value is not None}
        connection.request(method, f"{path}?{query}", body, given)
        with connection.getresponse() as reply:
            return reply.status, reply.read().decode()


def test_only_who_knows_the_token_and_asks_for_the_loopback_is_answered():
    question = json.dumps({"ask": "plan", "path": "tune.yaml", "text": RECIPE, "on": ON}).encode()
    with serving(PageStart("tune.yaml", RECIPE, (ON,)), answer, 0) as address:
        status, said = ask(address, question)
        assert (status, json.loads(said)["status"]) == (200, 0)
        assert ask(address, question, token="x" * 22)[0] == 403
        assert ask(address, question, host="evil.example:80")[0] == 421
        assert ask(address, None, length=9 << 20)[0] == 413
        assert ask(address, None, method="GET")[0] == 404
        for name, begun in (("planner.js", "// The planner's page."), ("planner.css", "body > header")):
            assert ask(address, None, path=f"/{name}", method="GET")[1].startswith(begun)
        assert ask(address, None, path="/page.py", method="GET")[0] == 404


def test_a_recipe_is_text_in_the_page():
    page = planner_page(PageStart("x.yaml", "# </script><script>alert(1)</script>", (ON,)))
    assert page.count("<script") == 2
    assert "alert(1)" in page


def test_the_command_serves_until_ctrl_c(tmp_path):
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(RECIPE)
    words = [
        sys.executable,
        "-u",
        "-m",
        "launcher",
        "plan",
        str(recipe),
        "--browser",
        "--on",
        "2xL4-24GB",
        "--set",
        "seed=3",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        address = re.fullmatch(r"serving (http://127\.0\.0\.1:\d+/\?token=\S+)\n", line)[1]
        page = ask(address, None, path="/", method="GET")[1]
        start = json.loads(re.search(r'<script type="application/json" id="start">(.*?)</script>', page)[1])
        assert (start["path"], start["text"], start["on"], start["sets"]) == (
            str(recipe),
            RECIPE,
            ["2xL4-24GB"],
            ["seed=3"],
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(patience(60)) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["absent", "--browser"], "recipe-missing"),
        (["tune.yaml", "--browser", "--json"], "usage"),
        (["tune.yaml", "--browser", "--trace"], "usage"),
        (["tune.yaml", "--port", "8000"], "usage"),
        (["tune.yaml", "--browser", "--port", "70000"], "port-in-use"),
        (["tune.yaml", "--browser", "--on", ""], "bad-hardware"),
        (["tune.yaml", "--browser", "--on", "2xH1000"], "unknown-device"),
        (["tune.yaml", "--browser", "--set", "garbage"], "override"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path, words, code):
    (tmp_path / "tune.yaml").write_text(RECIPE)
    from launcher.commands.plan import plan_command
    from launcher.errors import RecipeError

    def option(name):
        return words[words.index(name) + 1] if name in words else None

    sets = [option("--set")] if "--set" in words else []
    given = {"overrides": sets, "on": option("--on"), "explain": None, "search": False, "html": None}
    port = int(option("--port") or 0)
    with pytest.raises(RecipeError) as refused:
        plan_command(
            words[0], **given, trace="--trace" in words, browser="--browser" in words, port=port,
            as_json="--json" in words,
        )  # fmt: skip
    assert refused.value.problems[0].code == code


def test_the_hardware_of_the_recipe_is_begun_with():
    from launcher.commands.plan_page import _own_hardware

    def own(text):
        from pathlib import Path

        Path("own.yaml").write_text(RECIPE + text)
        return _own_hardware(Path("own.yaml"), ())

    assert own("hardware: {device: A100-80GB, devices_per_node: 4, num_nodes: 2}\n") == "2x4xA100-80GB"
    assert own("hardware: {device: A100-80GB, devices_per_node: 4}\n") == "4xA100-80GB"
    assert own("") is None
