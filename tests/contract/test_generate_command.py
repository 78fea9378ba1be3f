"""The command `generate`: what it takes for a prompt, and what it leaves on stdout."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launcher.cli import main

sys.path.insert(0, str(Path(__file__).parent))
from small import llama
from test_generate import CHATML, chatty, finished


@pytest.fixture
def run(tmp_path) -> Path:
    finished(tmp_path, [2])
    (tmp_path / "COMPLETED").touch()
    return tmp_path


def stdin(monkeypatch, text: str, *, terminal: bool = False) -> None:
    stream = io.StringIO(text)
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stream)


def test_a_prompt_of_the_command_line_or_piped_in(run, monkeypatch, capsys):
    assert main(["generate", str(run), "w1 w2", "--max-new-tokens", "4"]) == 0
    given = capsys.readouterr().out
    assert len(given.split()) == 4
    stdin(monkeypatch, "w1 w2\n")
    assert main(["generate", str(run), "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out == given


def test_json_is_one_object_whatever_loading_says(run, monkeypatch, capsys):
    import launcher.train.results.generate as module

    real = module.trained_model
    monkeypatch.setattr(
        module, "trained_model", lambda *a, **k: sys.stdout.write("the embedding grew") and real(*a, **k)
    )
    assert main(["generate", str(run), "w1", "--max-new-tokens", "2", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["prompt"] == "w1"
    assert "the embedding grew" in said.err


@pytest.mark.parametrize(
    ("words", "piped", "what"),
    [
        ([], None, "no prompt"),
        ([], "  \n", "is empty"),
        (["-i", "--json"], None, "-i and --json"),
        (["w1", "--max-new-tokens", "0"], None, "expected 1 or more"),
    ],
)
def test_no_prompt_and_contradictions_are_usage_errors(run, monkeypatch, capsys, words, piped, what):
    stdin(monkeypatch, piped or "", terminal=piped is None)
    assert main(["generate", str(run), *words]) == 2
    said = capsys.readouterr()
    assert what in said.out + said.err


def test_a_closed_stdin_is_no_prompt(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", str(run)]) == 2
    assert "no prompt" in capsys.readouterr().err


def test_a_conversation_ends_with_its_input(run, monkeypatch, capsys):
    words = chatty(CHATML)
    model = llama()
    model.resize_token_embeddings(len(words))
    for part in (model, words):
        part.save_pretrained(run / "model")
    (run / "data.json").write_text(json.dumps({"formats": ["chat"]}))
    stdin(monkeypatch, "w1 w2\nw3\n")
    assert main(["generate", str(run), "-i", "--max-new-tokens", "3"]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2
    assert "a conversation" in said.err
    assert "Ctrl-D" in said.err


def test_ctrl_c_before_a_prompt_ends_it_cleanly(run, monkeypatch, capsys):
    def interrupted(_=""):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert main(["generate", str(run), "-i"]) == 0
    assert "error" not in capsys.readouterr().err


def test_an_answer_moves_no_cursor(run, monkeypatch, capsys):
    """A tokenizer may hold any bytes, and the model may say them."""
    import launcher.train.results.generate as module

    def answers(trained, prompt, tokens, before=(), write=None, images=()):
        write("\x1b]0;title\x07 done")
        return "done"

    monkeypatch.setattr(module, "answer", answers)
    stdin(monkeypatch, "w1\n")
    assert main(["generate", str(run), "-i"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def positions(run: Path) -> int:
    return json.loads((run / "model" / "config.json").read_text())["max_position_embeddings"]


def test_an_answer_ends_where_the_positions_do(run, capsys):
    given = positions(run) - 3
    words = ["--max-new-tokens", str(10**30), "--json"]
    assert main(["generate", str(run), " ".join(["w1"] * given), *words]) == 0
    assert 1 <= len(json.loads(capsys.readouterr().out)["text"].split()) <= 3


def test_a_prompt_beyond_the_positions_is_refused(run, monkeypatch, capsys):
    prompt = " ".join(["w1"] * positions(run))
    assert main(["generate", str(run), prompt, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "prompt-too-long"
    stdin(monkeypatch, f"{prompt}\nw1 w2\n")
    assert main(["generate", str(run), "-i", "--max-new-tokens", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2, "the conversation went on"


@pytest.mark.parametrize(
    ("prompt", "what"), [("", "is empty"), (" \n", "is empty"), ("w\udcff", "surrogate")]
)
def test_a_prompt_that_is_none(run, capsys, prompt, what):
    assert main(["generate", str(run), prompt]) == 2
    assert what in capsys.readouterr().err


def test_lines_that_are_no_text_end_a_conversation_with_a_word(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    assert main(["generate", str(run), "-i"]) == 2
    assert "UTF-8" in capsys.readouterr().err


def test_a_name_that_no_folder_can_have(capsys):
    for name in ("a\0b", "x" * 5000):
        for words in (["generate", name, "w1"], ["merge", name], ["eval", name], ["report", name]):
            assert main(words) == 2
            assert "Traceback" not in capsys.readouterr().err
