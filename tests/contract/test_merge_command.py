"""The command `merge`: what it prints, and what it sends to the hub."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from launcher.cli import main
from launcher.commands.merge import card_record

sys.path.insert(0, str(Path(__file__).parent))
from plans import LORA, trained


class Hub:
    """In the place of the hub: repositories that exist, and what was uploaded."""

    def __init__(self, monkeypatch) -> None:
        self.private = {"me/open": False}
        self.files: dict[str, str] = {}
        self.error: Exception | None = None
        self.full = False
        hub = self

        class Api:
            def __init__(self, token=None):
                assert token is None, "the token is the environment's"

            def create_repo(self, name, *, private, exist_ok):
                assert (private, exist_ok) == (True, True)
                if hub.error is not None:
                    raise hub.error
                hub.private.setdefault(f"me/{name.removeprefix('me/')}", True)
                return Url(f"https://hub/me/{name.removeprefix('me/')}")

            def repo_info(self, name):
                return SimpleNamespace(private=hub.private[name])

            def upload_folder(self, *, repo_id, folder_path, commit_message, ignore_patterns):
                if hub.full:
                    raise OSError("413 Payload too large")
                names = [path.relative_to(folder_path).as_posix() for path in folder_path.rglob("*")]
                for name in huggingface_hub.utils.filter_repo_objects(names, ignore_patterns=ignore_patterns):
                    hub.files[f"{repo_id}/{name}"] = (folder_path / name).read_text(errors="replace")

            def upload_file(self, *, repo_id, path_or_fileobj, path_in_repo, commit_message):
                hub.files[f"{repo_id}/{path_in_repo}"] = path_or_fileobj.decode()

        class Url(str):
            @property
            def repo_id(self):
                return self.removeprefix("https://hub/")

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch) -> Hub:
    return Hub(monkeypatch)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "run", {"trainer.max_steps": 1, "adapter": LORA})


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "run", {"trainer.max_steps": 1})


def test_it_says_what_it_wrote_and_how_far_that_is(adapted, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["merge", str(adapted), "--output", str(out), "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].split()[:2] == ["merged", str(out)]
    for word in ("is allowed", "in bfloat16", "rounding to bfloat16", "first choice"):
        assert word in " ".join(said.split())
    assert (out / "README.md").read_text().startswith("---\nlibrary_name: transformers\n")


def test_json_is_one_object(adapted, tmp_path, capsys):
    assert main(["merge", str(adapted), "--output", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["merged"]["merge"]["largest"] <= found["merged"]["merge"]["allowed"]
    assert (found["merged"]["quantized"], found["pushed"]) == (None, None)


def test_the_target_is_in_the_run_directory_and_is_never_overwritten(adapted, capsys):
    assert main(["merge", str(adapted)]) == 0
    before = (adapted / "merged" / "model.safetensors").stat().st_mtime_ns
    assert main(["merge", str(adapted)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (adapted / "merged" / "model.safetensors").stat().st_mtime_ns == before


def test_an_unfinished_run_is_not_merged(tmp_path, capsys):
    assert main(["merge", str(tmp_path)]) == 2
    assert "no finished run" in capsys.readouterr().err


def test_a_push_sends_the_model_and_its_card_and_is_private(adapted, tmp_path, hub, capsys, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "very-secret-value")
    (adapted / "recipe.yaml").write_text("model: {name_or_path: x}\n# very-secret-value\n")
    assert main(["merge", str(adapted), "--output", str(tmp_path / "out"), "--push", "mine"]) == 0
    said = capsys.readouterr().out
    assert "https://hub/me/mine  (private)" in said
    names = {name.removeprefix("me/mine/") for name in hub.files}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names
    card = hub.files["me/mine/README.md"]
    assert card == (tmp_path / "out" / "README.md").read_text()
    assert 'from_pretrained("me/mine"' in card
    assert "name_or_path: x" in card
    assert "very-secret-value" not in "".join(hub.files.values())


def test_a_push_without_a_name_goes_to_the_recipes_own(whole, tmp_path, hub, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    assert main(["merge", str(run), "--push"]) == 2
    assert "--push OWNER/NAME" in capsys.readouterr().err
    plan = json.loads((run / "plan.json").read_text())
    plan["settings"]["trainer.hub_model_id"] = {"value": "me/own"}
    (run / "plan.json").write_text(json.dumps(plan))
    assert main(["merge", str(run), "--push"]) == 0
    assert "https://hub/me/own  (private)" in capsys.readouterr().out
    assert "me/own/model.safetensors" in hub.files


def test_a_repository_that_is_public_is_called_so(whole, hub, capsys):
    assert main(["merge", str(whole), "--push", "me/open"]) == 0
    assert "PUBLIC" in capsys.readouterr().out


def test_a_run_without_an_adapter_pushes_its_model_and_stays_as_it_is(whole, hub, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    assert main(["merge", str(whole), "--push", "mine"]) == 0
    assert "model/ is pushed unchanged" in capsys.readouterr().out
    names = {name.removeprefix("me/mine/") for name in hub.files}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names
    assert "training_args.bin" not in names
    assert "all parameters" in hub.files["me/mine/README.md"]
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


@pytest.mark.parametrize(
    "words", [[], ["--output", "x", "--push", "mine"], ["--dtype", "float16", "--push", "m"]]
)
def test_without_an_adapter_nothing_is_merged(whole, hub, capsys, words):
    assert main(["merge", str(whole), *words]) == 2
    said = capsys.readouterr().err
    assert "adapter" in said
    assert "--push" in said or "model/ is pushed" in said
    assert hub.files == {}


def refused(status: int) -> Exception:
    import httpx

    request = httpx.Request("POST", "https://hub")
    return HfHubHTTPError("no", response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "code", "what"),
    [
        (LocalTokenNotFoundError("no token"), 4, "HF_TOKEN"),
        (refused(403), 4, "HF_TOKEN"),
        (ConnectionError("no route"), 4, "--push"),
        (huggingface_hub.errors.HFValidationError("bad name"), 2, "OWNER/NAME"),
    ],
)
def test_the_hub_is_asked_before_anything_is_merged(adapted, tmp_path, hub, capsys, error, code, what):
    hub.error = error
    assert main(["merge", str(adapted), "--output", str(tmp_path / "out"), "--push", "mine"]) == code
    assert what in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_offline_is_said_before_anything_is_merged(adapted, tmp_path, hub, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(["merge", str(adapted), "--output", str(tmp_path / "out"), "--push", "mine"]) == 4
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_push_that_fails_leaves_the_folder_and_says_how_to_send_it(adapted, tmp_path, hub, capsys):
    hub.full = True
    out = tmp_path / "out"
    assert main(["merge", str(adapted), "--output", str(out), "--push", "mine"]) == 5
    said = capsys.readouterr().err
    assert "413 Payload too large" in said
    assert f"`hf upload me/mine {out}`" in said
    assert (out / "model.safetensors").is_file()


def test_the_card_leaves_out_what_cannot_be_read_and_every_spelling_of_a_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", 'very"secret\\value')
    (tmp_path / "plan.json").write_text('{"settings": {}}')
    (tmp_path / "environment.json").write_text(json.dumps({"torch": 'very"secret\\value'}))
    record = card_record(tmp_path, "me/mine")
    assert record.environment["torch"] == "<secret>"
    (tmp_path / "result.json").write_text("{half")
    assert card_record(tmp_path, "me/mine").result == {}
