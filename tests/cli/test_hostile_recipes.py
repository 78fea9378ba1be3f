"""Recipes that are no files, and recipes with a problem in every line."""

from __future__ import annotations

import json
import os

import pytest

from launcher.cli import main


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_a_path_that_is_no_file_is_told_as_what_it_is(kind, tmp_path, capsys):
    path = tmp_path / "r.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    assert main(["plan", str(path), "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "recipe-missing"
    assert "did you mean" not in (error["hint"] or "")
    assert "no such file" not in error["message"]


def test_the_environment_is_searched_for_secrets_once_for_all_problems(tmp_path, capsys, monkeypatch):
    from launcher.files import redaction

    calls = []
    real = redaction.secret_values
    monkeypatch.setattr(redaction, "secret_values", lambda environ: calls.append(1) or real(environ))
    path = tmp_path / "r.yaml"
    path.write_text("".join(f"key{i}: 1\n" for i in range(50)))
    assert main(["plan", str(path), "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["errors"]) >= 50
    assert len(calls) == 1


@pytest.mark.parametrize("steps", [-1, -5])
def test_no_number_of_steps_leaves_the_length_to_the_epochs(steps, capsys):
    words = ["plan", "qwen3_0_6b_full", "--set", "trainer.num_train_epochs=null", "--json"]
    assert main([*words, "--set", f"trainer.max_steps={steps}"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["trainer.num_train_epochs"]["value"] == 3.0
