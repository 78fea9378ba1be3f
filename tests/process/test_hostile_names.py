"""Names that a shell, a terminal or a launcher would take for something else: nothing of them is ever run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.cli import main
from launcher.report.outcome import harmless

NAMES = {
    "quotes": """it's "quoted" """,
    "substitution": "$(touch RAN) `touch RAN` ${HOME} $HOME",
    "separators": "; touch RAN & touch RAN | touch RAN > RAN #",
    "newline": "first\nerror: forged line\ntouch RAN",
    "late": "{run_dir} {devices} {master_port}",
    "dashes": "--output-dir=-x",
    "escape": "\x1b]0;title\x07\x1b[2J\x1b[1;1Hred",
    "percent": "100%s %(name)s %n {0} {name}",
    "backslash": "a\\b\\'c\\",
    "unicode": "naïve-Ünï-日本-\u202egnp.exe",
    "glob": "a*b?[c]",
    "tilde": "~nobody here",
    "history": "!! !$ ^a^b",
    "long": "x" * 200,
}
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
HOOKS = """
def format_row(row):
    return row
"""
# Stands where the interpreter does: writes down what it was given.
SHIM = """#!{python}
import json, os, sys
with open({record!r}, "a") as record:
    record.write(json.dumps([sys.argv[1:], dict(os.environ)]) + "\\n")
"""


def recipe(folder: Path, name: str, **more) -> Path:
    """A recipe in which everything that has a name has this one."""
    home = folder / name
    (home / name).mkdir(parents=True)
    (home / name / "config.json").write_text(json.dumps(CONFIG))
    (home / f"{name}.jsonl").write_text(json.dumps({name: "w1 w2", "text": "w3"}) + "\n")
    (home / f"{name}.py").write_text(HOOKS)
    text = {
        "model": {"name_or_path": name, "tokenizer": name, "cache_dir": name},
        "data": {
            "train": [
                {"path": f"{name}.jsonl", "format": "prompt-completion",
                 "columns": {"prompt": name, "completion": "text"}}
            ],
            "max_length": 16,
        },
        "global_batch_size": 2,
        "trainer": {"max_steps": 1, "run_name": name, "report_to": "none"},
        "python": f"{name}.py",
        "launch": {"env": {"NOTE": name}},
        **more,
    }  # fmt: skip
    path = home / f"{name}.yaml"
    path.write_text(yaml.safe_dump(text, allow_unicode=True), encoding="utf-8")
    return path


@pytest.fixture(params=NAMES.values(), ids=NAMES)
def name(request):
    return request.param


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder that everything happens in; a file RAN there is the sign of a shell that ran a name."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not list(tmp_path.rglob("RAN"))
    assert not (Path.home() / "RAN").exists()


def checked(capsys, *words, expect: int = 0) -> dict:
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    assert code == expect, said
    return json.loads(said.out) if "--json" in words else {"out": said.out, "err": said.err}


def tame(text: str, name: str) -> None:
    """What reached the terminal moves no cursor and has no line of a name's own."""
    assert harmless(text) == text
    assert not [line for line in text.splitlines() if line.startswith(("error: forged", "touch RAN"))]


def test_a_recipe_of_any_name_is_planned_with_its_own_files(place, name, capsys):
    path = recipe(place, name)
    assert checked(capsys, "validate", path, "--json")
    plan = checked(capsys, "plan", path, "--on", "2xcpu", "--json")
    values = {key: entry["value"] for key, entry in plan["settings"].items()}
    assert plan["recipe"] == str(path)
    assert values["model.name_or_path"] == str(path.parent / name)
    assert values["model.cache_dir"] == str(path.parent / name)
    assert values["python.file"] == str(path.parent / f"{name}.py")
    assert values["data.train"][0]["path"] == str(path.parent / f"{name}.jsonl")
    assert values["launch.env.NOTE"] == plan["env"]["NOTE"] == name
    assert not plan["warnings"]
    for words in (["validate"], ["plan"], ["plan", "--explain"]):
        said = checked(capsys, words[0], path, *words[1:], *(["--on", "2xcpu"] if words[0] == "plan" else []))
        tame(said["out"] + said["err"], name)


@pytest.mark.parametrize(
    ("on", "engine"), [("cpu", "ddp"), ("2xcpu", "deepspeed"), ("2xA100-80GB", "deepspeed"), ("2xcpu", "ddp")]
)
def test_command_sh_gives_every_process_the_words_of_the_plan(place, name, engine, on, monkeypatch, capsys):
    """Run by bash; a stand-in for the interpreter, whose name needs quotes, writes down what it got."""
    folder = place / "bin" / "it's a venv"
    folder.mkdir(parents=True)
    shim, record = folder / "python", place / "record"
    shim.write_text(SHIM.format(python=sys.executable, record=str(record)))
    shim.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shim))
    path = recipe(place, name, sharding={"engine": engine}, precision="fp32")
    run_dir = place / "out" / name
    plan = checked(
        capsys, "run", path, "--on", on, "--dry-run", "--output-dir", run_dir, "--json"
    )  # fmt: skip
    script = run_dir / "command.sh"
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)
    env = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "0,1", "HOME": str(Path.home())}
    subprocess.run(["bash", str(script)], check=True, env=env, cwd=place)
    prepared, launched = (json.loads(line) for line in record.read_text().splitlines())
    late = {"{run_dir}": str(run_dir), "{devices}": "0,1", "{master_port}": "29500"}
    assert prepared[0] == ["-m", "launcher.train.prepare", str(run_dir)]
    assert launched[0] == [in_place(word, late) for word in plan["command"][1:]]
    for key, value in plan["env"].items():
        assert launched[1][key] == in_place(value, late), key


def in_place(text: str, late: dict[str, str]) -> str:
    """Late values in one pass."""
    import re

    return re.sub("|".join(map(re.escape, late)), lambda match: late[match[0]], text)


def test_a_default_of_a_reference_is_text_to_the_shell(place, capsys):
    path = recipe(place, "r", launch={"env": {"NOTE": "${ENV:ABSENT_HERE:$(touch RAN)`touch RAN`\"'\\}"}})
    checked(capsys, "run", path, "--on", "cpu", "--dry-run", "--output-dir", place / "out")
    lines = (place / "out" / "command.sh").read_text().splitlines()
    script = "\n".join(line for line in lines if line.startswith(("export NOTE=", "default_1=")))
    shown = subprocess.run(
        ["bash", "-uc", f'{script}\nprintf %s "$NOTE"'], capture_output=True, text=True, check=True
    )
    assert shown.stdout == "$(touch RAN)`touch RAN`\"'\\"


@pytest.mark.parametrize("key", ["A; touch RAN", "$(touch RAN)", "A=B", "-x", "1A", "A B", "Ü"])
def test_a_name_that_is_no_variables_is_refused(place, key, capsys):
    path = recipe(place, "r", launch={"env": {key: "1"}})
    said = checked(capsys, "validate", path, "--json", expect=2)
    assert [problem["code"] for problem in said["errors"]] == ["wrong-value"]


def test_problems_with_such_names_stay_on_their_line(place, name, capsys):
    path = recipe(place, name, fixes={"disable": [name]}, **{name: 1})
    said = checked(capsys, "validate", path, expect=2)
    tame(said["err"], name)
    lines = said["err"].splitlines()
    assert all(line.startswith(("error: ", "  ")) or line.endswith("problems") for line in lines)


def test_diagnose_shows_such_names_as_text(place, name, capsys):
    logs = place / name / "logs"
    logs.mkdir(parents=True)
    trace = f'Traceback (most recent call last):\n  File "{name}", line 1, in f\n'
    (logs / "rank-0.log").write_text(f"{trace}RuntimeError: {name}\n")
    tame(checked(capsys, "diagnose", place / name)["out"], name)


def test_doctor_shows_such_names_as_text(place, capsys):
    name = "".join(NAMES[key] for key in ("quotes", "substitution", "newline", "escape", "unicode", "late"))
    path = recipe(place / "r", name)
    code = main(["doctor", str(path), "--on", "cpu", "--bundle", str(place / "report.md")])
    assert code in (0, 4)
    said = capsys.readouterr()
    tame(said.out + said.err, name)
    tame((place / "report.md").read_text(), name)


SEEN = """
import json
import os
from pathlib import Path


def format_row(row):
    Path(__file__).with_name("note.json").write_text(json.dumps(os.environ["NOTE"]))
    return row
"""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"), ("a\x1b[2Jb", r"a\x1b[2Jb"), ("\x9b31m", r"\x9b31m"),
        ("back\rover\x08", r"back\rover\x08"), ("\u202egnp.exe", r"\u202egnp.exe"), ("\x7f\0", r"\x7f\x00"),
        ("\x1b[32mgreen\x1b[0m\ttab\nline ü日本", "\x1b[32mgreen\x1b[0m\ttab\nline ü日本"),
    ],
)  # fmt: skip
def test_what_a_terminal_would_obey_is_shown_as_an_escape(text, shown):
    assert harmless(text) == shown


ALL = "".join(NAMES[key] for key in ("quotes", "substitution", "newline", "escape", "late", "percent"))
RUNS = [
    pytest.param("cpu", "ddp", id="python"),
    pytest.param("2xcpu", "deepspeed", id="deepspeed", marks=pytest.mark.slow),
    pytest.param("2xcpu", "ddp", id="accelerate", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("on", "engine"), RUNS)
def test_a_run_of_such_a_name_trains(place, request, on, engine):
    """Under each real launcher: recipe, rows, hooks, column, variable, model and run directory have it."""
    pytest.importorskip("deepspeed")
    if on == "cpu":
        request.getfixturevalue("warm")
    path = recipe(
        place, ALL, sharding={"engine": engine}, precision="fp32",
        model={"config": CONFIG, "tokenizer": ALL},
    )  # fmt: skip
    home = path.parent
    make_tokenizer(home / ALL)
    row = json.dumps({ALL: "w1 w2", "text": "w3 w4"})
    (home / f"{ALL}.jsonl").write_text(f"{row}\n" * 8)
    (home / f"{ALL}.py").write_text(SEEN)
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "run", str(path), "--on", on, "--output-dir",
         str(place / "out" / ALL)],
        capture_output=True, text=True, timeout=500, check=False, cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-3000:]
    run_dir = place / "out" / ALL
    assert (run_dir / "COMPLETED").is_file()
    assert json.loads((run_dir / "result.json").read_text())["steps"] == 1
    said = done.stdout + done.stderr
    if engine == "deepspeed":  # its launcher writes its own command line, as it is
        said = "\n".join(said.partition("\ndone\n")[1:])
    tame(said, ALL)
    (shown,) = [line.partition("generate ")[2] for line in said.splitlines() if "  try it " in line]
    pasted = subprocess.run(["bash", "-c", f"printf '%s\\0' {shown}"], capture_output=True, check=True)
    assert pasted.stdout.split(b"\0")[0] == os.fsencode(run_dir)
    assert sorted(entry.name for entry in (place / "out").iterdir()) == [ALL], "no name was split"
    seen = in_place(json.loads((home / "note.json").read_text()), {str(run_dir): "{run_dir}"})
    assert seen.startswith(ALL.partition("{devices}")[0])


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": 4 + i for i in range(60)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
