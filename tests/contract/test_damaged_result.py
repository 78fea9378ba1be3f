"""Run directories that are half deleted, cut off or mixed up: generate, merge and eval say so in one line."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from launcher.cli import main
from launcher.execute.run_dir import MARKER

sys.path.insert(0, str(Path(__file__).parent))
from plans import LORA, trained

WEIGHTS = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    changes = {"trainer.max_steps": 1, "adapter": LORA, "data.eval": {"split": 0.25}}
    run = trained(tmp_path_factory.mktemp("runs") / "run", changes)
    (run / MARKER).touch()
    return run


def _written(name: str, text: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text(text) and None


def _cut(run: Path) -> None:
    content = (run / WEIGHTS).read_bytes()
    (run / WEIGHTS).write_bytes(content[: len(content) // 2])


def _without_a_layer(run: Path) -> None:
    tensors = load_file(run / WEIGHTS)
    save_file({n: t for n, t in tensors.items() if ".layers.1." not in n}, run / WEIGHTS, {"format": "pt"})


def _of_another_base(run: Path) -> None:
    tensors = load_file(run / WEIGHTS)
    save_file(
        {n: t[..., :-1].contiguous() for n, t in tensors.items()}, run / WEIGHTS, metadata={"format": "pt"}
    )


DAMAGE = {
    "plan without settings": (_written("plan.json", '{"settings": null}'), "plan.json: no `settings`"),
    "plan of other values": (_written("plan.json", '{"settings": {"task": 1}}'), "plan.json: no `settings`"),
    "data.json cut": (_written("data.json", "{"), "data.json: "),
    "data.json a list": (_written("data.json", "[1]"), "data.json: "),
    "nothing": (lambda run: shutil.rmtree(run / "adapter"), "neither adapter/ nor model/"),
    "no weights": (
        lambda run: (run / WEIGHTS).unlink(),
        "adapter: the result cannot be read: it has no weights",
    ),
    "weights cut": (_cut, "adapter_model.safetensors: the result cannot be read"),
    "weights of nothing": (
        _written(WEIGHTS, ""),
        "adapter_model.safetensors: the result cannot be read",
    ),
    "config cut": (_written("adapter/adapter_config.json", "{"), "adapter_config.json: the result"),
    "config a list": (_written("adapter/adapter_config.json", "[]"), "adapter_config.json: the result"),
    "tokenizer cut": (_written("adapter/tokenizer.json", "{"), "its tokenizer: "),
    "no tokenizer": (lambda run: (run / "adapter/tokenizer.json").unlink(), "its tokenizer: "),
    "another base": (_of_another_base, "the adapter does not fit the model"),
    "a layer less": (_without_a_layer, "the adapter does not fit the model: Found missing adapter keys"),
}


@pytest.mark.parametrize("command", ["generate", "merge", "eval"])
@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_it_is_named(whole, tmp_path, capsys, command, damage, said):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    damage(run)
    if command == "eval" and said == "data.json: ":
        said = "data"  # prepared again, or refused
    prompt = ["hello"] if command == "generate" else []
    assert main([command, str(run), *prompt]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not list(run.glob("*merged*"))


@pytest.mark.parametrize("content", ["{", "[1]", "null"])
def test_what_only_the_card_tells_is_left_out_of_it(whole, tmp_path, content):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for name in ("environment.json", "result.json"):
        (run / name).write_text(content)
    (run / "recipe.yaml").write_bytes(b"# \xff\n")
    assert main(["merge", str(run)]) == 0
    assert (run / "merged" / "README.md").read_text().startswith("---\n")


def test_a_repository_is_not_made_for_what_cannot_be_merged(whole, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    _cut(run)
    asked: list[str] = []
    monkeypatch.setattr("launcher.train.results.publishing.reach_repository", asked.append)
    assert main(["merge", str(run), "--push", "me/x"]) == 2
    assert asked == []
    assert json.loads((run / "plan.json").read_text())


@pytest.mark.parametrize(
    ("command", "name"),
    [("merge", "a\0b"), ("merge", "x" * 240), ("eval", "a\0b"), ("eval", "absent/x.json")],
    ids=["merge-nul", "merge-long", "eval-nul", "eval-absent"],
)
def test_an_output_that_cannot_be_is_refused_before_the_work(
    whole, monkeypatch, capsys, tmp_path, command, name
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("launcher.train.model.models.load_model", None)
    assert main([command, str(whole), "--output", name, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "file-unwritable"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a\0b", "x" * 5000, "checkpoint-1/"])
def test_a_checkpoint_is_a_name(whole, capsys, name):
    assert main(["eval", str(whole), "--checkpoint", name]) == 2
    assert "the run has no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", '{"eval": 3}', '{"eval": {"eval_loss": "no"}}'])
def test_a_result_that_says_nothing_is_not_compared_with(whole, tmp_path, capsys, content):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "result.json").write_text(content)
    assert main(["eval", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["at_end"] is None
