"""Python code in a model's folder runs when the recipe says so, and never otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import main

pytest.importorskip("torch")

from launcher.errors import RecipeError
from launcher.train.model.models import load_config, load_model
from launcher.train.model.processing import load_processing

sys.path.insert(0, str(Path(__file__).parent))
from plans import generate
from small import job, llama, tokenizer

pytestmark = pytest.mark.usefixtures("warm")

CODE = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

with open({trace!r}, "a") as trace:
    trace.write({what!r})


class OwnConfig(LlamaConfig):
    model_type = "own-llama"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
RECIPE = """\
model: {{name_or_path: model{more}}}
data: {{train: [{{path: rows.jsonl}}], max_length: 16}}
global_batch_size: 2
trainer: {{max_steps: 1, per_device_train_batch_size: 2, report_to: none}}
"""


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """A file that the code of the model writes to; what was loaded before is forgotten.

    Somebody sits at the terminal who says yes to every question: consent is the recipe's alone.
    """
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "ran"


@pytest.fixture
def model(tmp_path, trace):
    """A model whose configuration, class and tokenizer are code in its folder."""
    folder = tmp_path / "model"
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for what in ("configuration", "modeling", "tokenization"):
        (folder / f"{what}_own.py").write_text(CODE.format(trace=str(trace), what=what[0]))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own-llama",
        "architectures": ["OwnModel"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnModel",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    known = json.loads((folder / "tokenizer_config.json").read_text())
    known |= {"tokenizer_class": "OwnTokenizer",
              "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w1 w2", "completion": " w3"}\n' * 8)
    return folder


def planned(folder: Path, *, trusted: bool):
    named = {"tiny": False, "model.config": None, "model.name_or_path": str(folder)}
    return job(folder.parent / "run", {**named, "model.trust_remote_code": trusted})


def answers(run):
    """What each reader of a model's folder says."""
    yield lambda: load_config(run)
    yield lambda: load_processing(run)
    yield lambda: load_model(run, tokenizer())


def test_nothing_of_it_runs_unasked(model, trace):
    run = planned(model, trusted=False)
    for answer in answers(run):
        with pytest.raises(RecipeError) as caught:
            answer()
        (problem,) = caught.value.problems
        assert (problem.code, problem.path) == ("remote-code", "model.trust_remote_code")
    assert not trace.exists()


def test_all_of_it_runs_with_consent(model, trace):
    run = planned(model, trusted=True)
    for answer in answers(run):
        answer()
    assert set(trace.read_text()) == {"c", "m", "t"}


def test_the_model_of_a_run_is_tried_with_the_recipes_consent_alone(model, trace):
    run = planned(model, trusted=False)
    model.rename(run.run_dir / "model")
    with pytest.raises((RecipeError, ValueError), match="trust_remote_code"):
        generate(run.run_dir, "w1")
    assert not trace.exists()


def recipe(folder: Path, more: str = "") -> str:
    path = folder / "r.yaml"
    path.write_text(RECIPE.format(more=more))
    return str(path)


def test_looking_at_a_recipe_never_runs_it(model, trace, tmp_path, capsys):
    """Not with consent either: `plan` reads the configuration's file."""
    for more in ("", ", trust_remote_code: true"):
        path = recipe(tmp_path, more)
        for words in (["validate", path], ["plan", path, "--on", "cpu", "--json"]):
            main(words)
    capsys.readouterr()
    assert not trace.exists()


@pytest.mark.parametrize("command", ["prepare", "run"])
def test_commands_refuse_it_by_name(model, trace, tmp_path, command):
    """In processes of their own, without a terminal to ask at. The model is a llama, its tokenizer is not."""
    config = json.loads((model / "config.json").read_text())
    config["model_type"] = "llama"
    del config["auto_map"]
    (model / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", command, recipe(tmp_path), "--on", "cpu", "--json"],
        capture_output=True, text=True, check=False, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-3000:] + done.stdout[-3000:]
    (problem,) = json.loads(done.stdout)["errors"]
    assert problem["code"] == "remote-code"
    assert not trace.exists()


def test_datasets_runs_no_script(tmp_path, trace, monkeypatch):
    """A folder like one of the hub's data sets whose rows a script of its own would make."""
    from launcher.train.data.hub_rows import hub_rows

    folder = tmp_path / "owner" / "rows"
    folder.mkdir(parents=True)
    (folder / "rows.py").write_text(CODE.format(trace=str(trace), what="d"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises((RecipeError, RuntimeError), match="scripts are no longer supported"):
        list(hub_rows({"path": "owner/rows"}, None))
    assert not trace.exists()
