"""Secrets are planted in the environment; every byte that commands and runs leave is searched for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.files.redaction import hider, secret_values
from launcher.files.secrets import names_secret

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
PLANTED = {
    "HF_TOKEN": "hf_PlantedPlantedPlanted1234",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+planted",
    "AWS_ACCESS_KEY_ID": "AKIAPLANTEDPLANTED12",
    "MY_SECRET": "correct-horse-battery",
    "SIDE_DOOR": "swordfish-by-another-name",
    "NCCL_AUTH": "nccl-planted-secret",
    "DATABASE_PASSWORD": "line-one-of-it\nline-two-of-it",
}
RECIPE = """\
model: {{config: {config}, tokenizer: words}}
data: {{train: [{{path: rows.jsonl}}], max_length: 16}}
sharding: {{engine: {engine}}}
precision: fp32
global_batch_size: 4
trainer: {{max_steps: 3, save_steps: 1, logging_steps: 1, report_to: {report}, run_name: plain}}
python: hooks.py
launch:
  env: {{X: "${{ENV:MY_SECRET}}", PLAIN: "${{ENV:SIDE_DOOR}}", NCCL_Y: "${{ENV:NCCL_AUTH}}",
        ADDRESS: "https://user:${{ENV:MY_SECRET}}@host/x"}}
"""
# Says all it knows, as a library in its debug mode would, in each process and to both streams.
HOOKS = """
import os
import sys

from transformers import TrainerCallback

FAIL = {fail}


class Talks(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print(dict(os.environ))
        print(os.environ["DATABASE_PASSWORD"], file=sys.stderr)
        if FAIL and state.global_step == 2:
            key = os.environ["MY_SECRET"]
            raise ValueError(f"cannot log in with {{key}} of {{dict(os.environ)}}")


def callbacks():
    return [Talks()]
"""


@pytest.fixture
def planted(monkeypatch):
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")


def written(folder: Path, *, engine: str = "ddp", fail: bool = False, report: str = "none") -> Path:
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": 4 + i for i in range(60)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder / "words")
    (folder / "rows.jsonl").write_text('{"prompt": "w1 w2", "completion": " w3"}\n' * 32)
    (folder / "hooks.py").write_text(HOOKS.format(fail=fail))
    path = folder / "r.yaml"
    path.write_text(RECIPE.format(config=json.dumps(CONFIG), engine=engine, report=report))
    return path


def found_in(content: bytes) -> list[str]:
    lines = {line for value in PLANTED.values() for line in value.splitlines()}
    return sorted(
        line for line in lines if line.encode() in content or json.dumps(line)[1:-1].encode() in content
    )


def leaks(*folders: Path) -> dict[str, list[str]]:
    """File -> planted secrets in it, or in its name."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*"):
            content = os.fsencode(path) + (path.read_bytes() if path.is_file() else b"")
            content = content.replace(b"<wbr/>", b"")  # where a page may break an identifier
            if names := found_in(content):
                found[str(path)] = names
    return found


class CommandLines:
    """Looks at the command lines of all processes of this machine, again and again."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen.add(path.read_bytes())
                except OSError:
                    continue


def run(path: Path, on: str) -> tuple[int, bytes]:
    """A run, whose output and whose processes' command lines hold no secret."""
    with CommandLines() as lines:
        done = subprocess.run(
            [sys.executable, "-m", "launcher.cli", "run", str(path), "--on", on, "--output-dir",
             str(path.parent / "out")],
            capture_output=True, timeout=500, check=False, cwd=path.parent,
        )  # fmt: skip
    said = done.stdout + done.stderr
    assert any(b"launcher.train.worker" in line for line in lines.seen), said[-4000:]
    assert found_in(b"\n".join(lines.seen)) == []
    assert found_in(said) == []
    assert b"<secret>" in said, "the hook did print them"
    return done.returncode, said


ENGINES = [
    pytest.param("cpu", "ddp", id="python"),
    pytest.param("2xcpu", "deepspeed", id="deepspeed", marks=pytest.mark.slow),
    pytest.param("2xcpu", "ddp", id="accelerate", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("on", "engine"), ENGINES)
def test_a_run_leaves_no_secret(planted, tmp_path, request, on, engine):
    pytest.importorskip("deepspeed")
    if on == "cpu":  # the launchers of the others are real
        request.getfixturevalue("warm")
    path = written(tmp_path, engine=engine, report="wandb" if on == "cpu" else "none")
    code, said = run(path, on)
    assert code == 0, said[-4000:]
    assert leaks(tmp_path, Path.home()) == {}
    out = tmp_path / "out"
    assert (out / "COMPLETED").is_file()
    assert "finished" in (out / "report.html").read_text("utf-8"), "the page is searched, too"
    logs = "".join(log.read_text() for log in (out / "logs").glob("rank-*.log"))
    assert logs.count("<secret>") > 10
    assert "'PLAIN': '<secret>'" in logs
    assert [line for line in logs.splitlines() if "'HOME': '/" in line], "what is no secret stays"
    if on == "cpu":
        assert list(tmp_path.rglob("*.wandb")), "wandb wrote nothing to search"


def test_a_run_that_fails_tells_its_error_without_secrets(planted, tmp_path, capsys, warm):
    pytest.importorskip("deepspeed")
    path = written(tmp_path, fail=True)
    code, said = run(path, "cpu")
    assert code == 5, said[-4000:]
    assert b"cannot log in with <secret>" in said
    assert leaks(tmp_path, Path.home()) == {}
    assert main(["diagnose", str(tmp_path / "out"), "--json"]) in (0, 5)
    assert found_in(capsys.readouterr().out.encode()) == []


def test_commands_that_look_show_no_secret(planted, tmp_path, capsys):
    path = str(written(tmp_path))
    bundle = str(tmp_path / "report.md")
    for words in (
        ["validate", path], ["plan", path, "--on", "2xcpu"], ["plan", path, "--on", "2xcpu", "--json"],
        ["plan", path, "--on", "2xcpu", "--explain"], ["doctor", path, "--on", "cpu", "--bundle", bundle],
        ["run", path, "--on", "2xcpu", "--dry-run", "--output-dir", str(tmp_path / "dry")],
    ):  # fmt: skip
        assert main(words) in (0, 4), words
        said = capsys.readouterr()
        assert found_in((said.out + said.err).encode()) == []
    assert leaks(tmp_path, Path.home()) == {}
    script = (tmp_path / "dry" / "command.sh").read_text()
    assert 'export X="${MY_SECRET}"' in script


@pytest.mark.parametrize(
    "override",
    [
        "launch.env.WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567",
        "launch.env.MY_PASSWORD=swordfish-and-chips",
        "launch.env.NOTE=hf_PlantedPlantedPlanted1234",
        "launch.env.PROXY=http://user:swordfish@proxy:3128",
        "model.name_or_path=https://user:swordfish@hub/model",
        "trainer.run_name=hf_PlantedPlantedPlanted1234",
        "trainer.hub_token=hf_PlantedPlantedPlanted1234",
        "trainer.run_name='${ENV:MY_SECRET}'",
        "model.tokenizer='${ENV:HF_TOKEN}'",
        "precision='${ENV:HF_TOKEN}'",
        "data.train[0].path='s3://${ENV:AWS_SECRET_ACCESS_KEY}/x.jsonl'",
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(planted, tmp_path, capsys, override):
    path = str(written(tmp_path))
    assert main(["validate", path, "--json"]) == 0
    capsys.readouterr()
    out = str(tmp_path / "out")
    words = ["run", path, "--set", override, "--on", "cpu", "--dry-run", "--output-dir", out, "--json"]
    assert main(words) == 2
    said = capsys.readouterr()
    assert "swordfish" not in said.out + said.err
    assert found_in((said.out + said.err).encode()) == []
    codes = {problem["code"] for problem in json.loads(said.out)["errors"]}
    assert "secret-in-recipe" in codes or codes == {"owned-key"}
    assert not Path(out).exists()


@pytest.mark.parametrize(
    "override",
    [
        "launch.env.HF_TOKEN_PATH=/home/me/token",
        "launch.env.TOKENIZERS_PARALLELISM='false'",
        "launch.env.HF_HUB_DISABLE_IMPLICIT_TOKEN='1'",
        "launch.env.GIT_COMMIT=0123456789abcdef0123456789abcdef01234567",
        "launch.env.SSH_KEY=/home/me/.ssh/id_ed25519",
        "trainer.run_name='${ENV:MAX_TOKENS:5}'",
        "model.add_tokens=['${ENV:PAD_TOKEN:<pad>}']",
        "trainer.hub_model_id=me/sk-learn-model",
    ],
)
def test_what_is_no_secret_is_accepted(planted, tmp_path, override):
    assert main(["plan", str(written(tmp_path)), "--on", "cpu", "--set", override]) == 0


def test_what_a_launcher_prints_is_taken_out(planted, tmp_path):
    """DeepSpeed's launcher writes every variable that has NCCL in its name (launcher/launch.py main)."""
    from launcher.execute.following import Start, follow

    said: list[str] = []
    code = "import os; [print(f'{k}={v}') for k, v in os.environ.items() if 'NCCL' in k or k == 'GIVEN']"
    env = {**os.environ, "NCCL_DEBUG": "INFO", "GIVEN": "by-reference", "EFFILAUNCH_SECRETS": "GIVEN"}
    log = tmp_path / "launcher.log"
    follow(Start([sys.executable, "-c", code], env, log, said.append, stop_s=5.0, orphaned_s=5.0))
    assert sorted(said) == ["GIVEN=<secret>", "NCCL_AUTH=<secret>", "NCCL_DEBUG=INFO"]
    assert sorted(log.read_text().split()) == sorted(said)


RANK = """
import os
import sys
from pathlib import Path

from launcher.train.outcome import redirect_output

redirect_output(Path(sys.argv[1]), int(sys.argv[2]))
heard = []
write = sys.stdout.write


def listening(text):
    heard.append(text)
    return write(text)


sys.stdout.write = listening
print("key", os.environ["MY_SECRET"])
print("again " + os.environ["MY_SECRET"], file=sys.stderr)
Path(sys.argv[1], "heard").write_text("".join(heard))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_writes_one_and_no_listener_hears_one(planted, tmp_path, rank):
    """A listener puts its own `write` in place, as wandb does for the console log that it uploads."""
    argv = [sys.executable, "-c", RANK, str(tmp_path), str(rank)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
    assert sorted(log.splitlines()) == ["again <secret>", "key <secret>"]
    assert (tmp_path / "heard").read_text() == "key <secret>\n"
    assert done.stdout + done.stderr == ("key <secret>\nagain <secret>\n" if rank == 0 else "")


def test_every_planted_name_is_known_by_its_name():
    assert [name for name in PLANTED if not names_secret(name)] == ["SIDE_DOOR"]


def test_only_secrets_are_taken_out(tmp_path):
    environ = {"A_TOKEN": "0123456789", "B_KEY": "short", "C_KEY": str(tmp_path), "D_KEY": "x.y-long-enough",
               "E": "given-by-reference", "F": "a-plain-value", "EFFILAUNCH_SECRETS": "E"}  # fmt: skip
    assert secret_values(environ) == ["given-by-reference", "x.y-long-enough"]
    hide = hider(secret_values(environ))
    assert hide("x.y-long-enough xzy-long-enough") == "<secret> xzy-long-enough"
    assert hider([])("as it is") == "as it is"
    plain = f"{tmp_path} 0123456789 short a-plain-value"
    assert hide(plain) == plain
