"""docs/automation.md: its program drives real commands, and its tables are what they answer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from grounds import tokenizer_of_1024_words, write_rows
from patience import patience
from test_docs import ROOT, named_files

from launcher import errors
from launcher.cli import main
from launcher.parsing import COMMANDS
from launcher.schedulers.submitted import Submitted

pytest.importorskip("torch")
PAGE = ROOT / "docs" / "automation.md"
RECIPE = """\
model:
  config: {model_type: llama, vocab_size: 1024, hidden_size: 64, intermediate_size: 128,
           num_hidden_layers: 2, num_attention_heads: 4, max_position_embeddings: 128}
  tokenizer: tokenizer
data: {train: [{path: rows.jsonl}], max_length: 64}
global_batch_size: 4
trainer: {max_steps: 4, learning_rate: 1.0e-2, logging_steps: 1, save_strategy: "no"}
"""
FAILS = """\
import torch
from transformers import TrainerCallback


class Fails(TrainerCallback):
    def on_step_begin(self, *_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def callbacks():
    return [Fails()]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a recipe of a small model."""
    monkeypatch.chdir(tmp_path)
    tokenizer_of_1024_words().save_pretrained("tokenizer")
    write_rows(Path("rows.jsonl"), [{"prompt": f"w{i} w9", "completion": f" w{i + 1} w7"} for i in range(64)])
    Path("r.yaml").write_text(RECIPE, encoding="utf-8")
    return tmp_path


@dataclass
class Driver:
    """The program of the page; its `effilaunch` starts the processes of a run as forks."""

    environment: dict[str, str]

    def __call__(self, *words):
        """Its exit status and its line."""
        done = subprocess.run(
            [sys.executable, "drive.py", *words], env=self.environment, capture_output=True, text=True,
            check=False, timeout=patience(600),
        )  # fmt: skip
        assert done.stdout.count("\n") == 1, done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout)


@pytest.fixture
def drive(here, forks):
    (name, program), *_ = named_files(PAGE).items()
    Path(name).write_text(program, encoding="utf-8")
    command = Path("bin/effilaunch")
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {forks.python} -m launcher "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent.absolute()), os.environ["PATH"]])
    return Driver({**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""})


def test_the_program_trains_and_says_what_stops_it(here, drive):
    status, told = drive("r.yaml", "cpu", "run", "trainer.max_steps=3")
    assert (status, told.get("kept")) == (0, 64), told
    assert told["loss"] == json.loads((here / "run" / "result.json").read_text())["loss"]
    assert json.loads((here / "run" / "result.json").read_text())["steps"] == 3
    assert drive("r.yaml", "cpu", "run", "trainer.max_steps=3") == (0, told), "it has finished"
    status, told = drive("r.yaml", "cpu", "other", "trainer.max_stepz=3")
    assert (status, [error["code"] for error in told["errors"]]) == (2, ["unknown-key"])
    status, told = drive("starcoder_lora", "1xL4-24GB", "other", "model.quantization=none")
    assert status == 3
    assert {"sharding.offload_optimizer": "cpu", "sharding.offload_param": "cpu"} in told["would_fit"]
    (here / "hooks.py").write_text(FAILS, encoding="utf-8")
    status, told = drive("r.yaml", "cpu", "failed", f"python={here / 'hooks.py'}")
    assert (status, [cause["id"] for cause in told.get("causes", ())]) == (5, ["cuda-oom"]), told
    assert told["causes"][0]["changes"]


STATUSES = {
    0: None, 2: errors.RecipeError, 3: errors.DoesNotFit, 4: errors.MachineError, 5: errors.RunFailed,
    70: errors.EffilaunchError, 130: errors.Interrupted,
}  # fmt: skip


def table(heading: str) -> list[list[str]]:
    """The cells of the rows of the table below a heading of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_statuses_are_those_of_the_errors():
    assert [int(row[0]) for row in table("Exit statuses")] == list(STATUSES)
    assert all(kind is None or kind.exit_code == status for status, kind in STATUSES.items())


def promised() -> dict[str, set[str]]:
    """Command, with the option that decides its keys -> keys of its object."""
    found: dict[str, set[str]] = {}
    for commands, keys in table("The objects"):
        others, names = set(), set(re.findall(r"`(\w+)`", keys)) - {"command"}
        if keys.startswith("those of `plan`"):
            others, names = found["plan"], names - {"plan"}
        for command in re.findall(r"`([\w -]+)`", commands):
            found[command] = others | names or {command}
    return found


INIT = ("--model", "Qwen/Qwen3-0.6B", "--data", "rows.jsonl", "--goal", "instructions", "--output", "m.yaml")
LOG = str(ROOT / "tests/corpus/known/bf16-no-device.log")
TINY = ("smoke", "--tiny", "--on", "cpu")
QUICK = {
    "init": (*INIT, "--on", "1xL4-24GB"), "plan": ("smoke",), "plan --search": ("smoke",),
    "plan --html": ("smoke",), "plan --explain": ("smoke",), "validate": ("smoke",), "estimate": ("smoke",),
    "import": ("axolotl.yml", "--output", "i.yaml"), "lint": ("ds.json",), "diagnose": (LOG,),
    "doctor": ("smoke", "--on", "cpu"), "recipes": (), "fixes": (), "schema": (), "completion": ("bash",),
    "prepare": TINY, "run --dry-run": ("smoke", "--on", "cpu"), "run": (*TINY, "--output-dir", "run"),
    "report": ("run",), "submit --dry-run": ("m.yaml", "--to", "slurm"),
}  # fmt: skip
"""In this order: later ones use the files of earlier ones."""
SLOW = {"run": QUICK["run"], "generate": ("run", "Hello"), "merge": ("run",)}
AXOLOTL = """\
base_model: Qwen/Qwen3-0.6B
datasets: [{path: rows.jsonl, type: alpaca}]
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
learning_rate: 0.0002
"""


def answered(capsys, name: str, arguments: tuple[str, ...]) -> set[str]:
    command, *option = name.split()
    assert main([command, *arguments, *option, "--json"]) in (0, 4), capsys.readouterr()
    return set(json.loads(capsys.readouterr().out)) - {"schema_version", "command", "errors"}


@pytest.mark.parametrize("asked", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_the_objects_have_the_keys_of_the_page(here, warm, capsys, monkeypatch, asked):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("axolotl.yml").write_text(AXOLOTL, encoding="utf-8")
    Path("ds.json").write_text('{"train_batch_size": 8}', encoding="utf-8")
    told = promised()
    assert {name: answered(capsys, name, words) for name, words in asked.items()} == {
        name: told[name] for name in asked
    }


def test_every_row_of_the_page_is_asked():
    told = promised()
    assert told.keys() - QUICK.keys() - SLOW.keys() == {"submit --detach"}
    assert {name.split()[0] for name in told} <= {command.name for command in COMMANDS}
    submitted = Submitted(to="slurm", recipe="r.yaml", folder=Path("runs"), runs=(), job="1", prepare=None)
    assert told["submit --detach"] == set(submitted.to_json())
