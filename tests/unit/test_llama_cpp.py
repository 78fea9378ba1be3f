"""llama.cpp's programs: what they write and refuse. The real ones run in contract/test_export_gguf."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launcher.errors import MachineError, RunFailed
from launcher.train.exports import llama_cpp

SERVER = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"status": "ok"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.send_error(500)

sys.stderr.write("a line of the log\\n" * 20_000)  # more than a pipe holds
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def talkative(tmp_path) -> tuple[str, ...]:
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    return (sys.executable, str(program))


def test_a_server_that_writes_much_is_not_stopped_by_it(talkative, tmp_path, monkeypatch):
    monkeypatch.setattr(llama_cpp, "_START_S", 60.0)
    with llama_cpp.serving(talkative, tmp_path / "model.gguf") as server:
        assert server.is_ready()


def test_what_the_server_refuses_is_an_error_and_a_template_is_none(talkative, tmp_path):
    with llama_cpp.serving(talkative, tmp_path / "model.gguf") as server:
        assert server.render([{"role": "user", "content": "x"}]) is None
        with pytest.raises(RunFailed) as refused:
            server.ids("x", special=True)
    assert [problem.code for problem in refused.value.problems] == ["gguf-failed"]


def test_a_server_that_ends_is_quoted(tmp_path):
    words = (sys.executable, "-c", "import sys; sys.exit('unknown architecture')")
    with pytest.raises(RunFailed) as failed, llama_cpp.serving(words, tmp_path / "model.gguf"):
        pass
    (problem,) = failed.value.problems
    assert problem.code == "gguf-unreadable"
    assert "unknown architecture" in problem.message


def test_a_program_that_is_none_is_named(tmp_path):
    """And not the folder of the export, whose permissions are good."""
    program = tmp_path / "llama-quantize"
    program.write_bytes(b"\x7fELF of another machine")
    for mode in (0o644, 0o755):
        program.chmod(mode)
        with pytest.raises(MachineError) as refused:
            llama_cpp.run([str(program)], "llama-quantize", "gguf-failed")
        (problem,) = refused.value.problems
        assert problem.code == "program-missing"
        assert str(Path(program)) in problem.message
