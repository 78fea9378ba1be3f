"""`export --to gguf` and `--to ollama` with llama.cpp's real converter, quantiser and runtime."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launcher.cli import main

sys.path.insert(0, str(Path(__file__).parent))
from exported import chatted
from llama_cpp_programs import install

pytestmark = [pytest.mark.slow]
UNKNOWN_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<jupyter_start>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Turns end with a special token that llama.cpp does not know as an end."""
ROLES_AND_PLACES = (
    "{% for m in messages %}<|im_start|>{{ loop.index }} {{ m.role }}\n{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    return install(tmp_path_factory.mktemp("llama") / "llama.cpp")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return chatted(tmp_path_factory.mktemp("runs") / "run")


def exported(capsys, run: Path, programs: Path, *words: str) -> tuple[int, dict]:
    capsys.readouterr()
    status = main(["export", str(run), "--json", "--llama-cpp", str(programs), *words])
    return status, json.loads(capsys.readouterr().out)


def test_a_file_for_ollama_answers_alike(run, programs, tmp_path, capsys):
    status, found = exported(capsys, run, programs, "--to", "ollama", "--output", str(tmp_path / "out"))
    assert status == 0
    compared = found["compared"]
    assert (compared["texts"], compared["template"], compared["rendered_otherwise"]) == (200, "identical", [])
    assert compared["answers"] == {"compared": 50, "equal": 50}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "Modelfile",
        "export.json",
        "run-f32.gguf",
    ]
    lines = (tmp_path / "out" / "Modelfile").read_text()
    assert lines.startswith('FROM ./run-f32.gguf\nTEMPLATE """')
    assert 'PARAMETER stop "<|im_end|>"\nPARAMETER num_ctx 512\n' in lines


def test_a_quantised_file_is_smaller_and_its_other_answers_are_reported(run, programs, tmp_path, capsys):
    status, found = exported(
        capsys, run, programs, "--to", "gguf", "--quantize", "q4_k_m", "--output", str(tmp_path / "out")
    )
    assert status == 0
    file = tmp_path / "out" / found["file"]
    assert file.name == "run-q4_k_m.gguf"
    assert file.stat().st_size == found["bytes"] < found["merged"]["bytes"] / 3
    answers = found["compared"]["answers"]
    assert len(found["compared"]["differences"]) == answers["compared"] - answers["equal"]
    assert all(one["margin"] is not None for one in found["compared"]["differences"])


def test_an_end_that_llama_cpp_does_not_stop_at_is_refused(programs, tmp_path, capsys):
    run = chatted(tmp_path / "run", {"model.chat_template": UNKNOWN_END})
    status, found = exported(capsys, run, programs, "--to", "gguf")
    assert (status, [one["code"] for one in found["errors"]]) == (5, ["export-differs"])
    assert "<jupyter_start>" in found["errors"][0]["message"]
    assert not (run / "export-gguf").exists()


def test_a_template_that_go_cannot_have_is_refused_before_any_work(programs, tmp_path, capsys):
    run = chatted(tmp_path / "run", {"model.chat_template": ROLES_AND_PLACES})
    status, found = exported(capsys, run, programs, "--to", "ollama")
    assert (status, [one["code"] for one in found["errors"]]) == (2, ["export-template"])
