"""Links, recipes and commands of all documents: they resolve, plan, and are understood or run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from every import every
from test_docs import DOCUMENTS, ROOT, blocks, named_files

from launcher.cli import main
from launcher.parsing import parse
from launcher.recipe.hook_file import read_hooks
from launcher.tasks import task_named

LANGUAGES = {
    "": "figures and output", "sh": "commands", "yaml": "recipes", "console": "output", "json": "rows",
    "python": "hooks", "bash": "a job script", "yml": "another tool's config", "py": "a script",
    "diff": "a script that is moved over",
}  # fmt: skip
"""What the blocks of a language are; another one would be one that nothing looks at."""

ELSEWHERE = {
    "fixes.md": "1xA100-80GB",
    "hosts.md": "2x8xA100-80GB",
    "quickstart.md": "cpu",
    **{path.name: "cpu" for path in (ROOT / "docs" / "tasks").glob("*.md")},
}
"""Where a page's recipes without hardware are planned, if not on eight A100."""

LOOKS = ("plan", "validate", "estimate", "fixes", "recipes", "schema", "lint", "diagnose")
"""Commands that are run as they stand."""
PLANNED = ("run", "prepare", "submit", "ladder", "drill", "doctor")
"""Commands whose recipe is planned with the same overrides and hardware; what they do is tried by these:"""
TRIED = {
    "prepare": "contract/test_prepare.py",
    "run": "contract/test_recipes_tiny.py",
    "submit": "cluster/test_docs_page.py",
    "ladder": "contract/test_ladder_run.py",
    "drill": "process/test_drill.py",
    "doctor": "cli/test_doctor_cli.py",
    "generate": "contract/test_generate.py",
    "report": "cli/test_report_cli.py",
    "merge": "contract/test_merge.py",
    "import": "unit/test_import_same_job.py",
    "init": "cli/test_init_cli.py",
    "eval": "process/test_quickstart.py",
}
YOURS = ("recipe.yaml", "tune.yaml", "kettle.yaml")
"""How a recipe of the reader's is called, which a page need not show."""
SMALL = """
model: {name_or_path: HuggingFaceTB/SmolLM2-135M-Instruct}
data: {train: [{path: data/train.jsonl, format: chat}]}
trainer: {max_steps: 100}
"""
UNSHOWN = ("runs/", "logs/", "slurm-", "train.log")
"""How what a reader's own runs leave is called."""


def names(paths) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def slug(heading: str) -> str:
    """The anchor of a heading, as repositories and the site make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def prose(path: Path) -> str:
    """A document without its blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    return {slug(line) for line in re.findall(r"^#+ (.*)$", prose(path), flags=re.MULTILINE)}


@every("path", DOCUMENTS, ids=str)
def test_links_and_anchors_resolve(path):
    text = re.sub(r"`[^`\n]*`", "", prose(path))
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    wrong = []
    for link in links:
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name) if name else path
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


@every("path", DOCUMENTS, ids=str)
def test_every_block_has_a_language_that_is_looked_at(path):
    fences = re.findall(r"^ *```(.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(fences) % 2 == 0
    assert {fence.strip() for fence in fences} <= set(LANGUAGES)


NARROW = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
"""The model that a page calls ./model."""
HOOKS = {
    "data.md": ("format_row", "compute_metrics", "callbacks"),
    "own-code.md": ("compute_loss", "optimizer", "prepare_model"),
}
"""What the hooks.py of a page defines."""
WITH_RECIPES = [path for path in DOCUMENTS if blocks(path, "yaml")]


@pytest.mark.usefixtures("answered", "warm")
@pytest.mark.parametrize("path", WITH_RECIPES, ids=names(WITH_RECIPES))
def test_every_recipe_plans(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = [code for code in blocks(path, "python") if code not in named_files(path).values()]
    for number, code in enumerate(own):
        assert number == 0, "one hooks.py a document"
        Path("hooks.py").write_text(code, encoding="utf-8")
        assert read_hooks(Path("hooks.py"), task_named("causal-lm")).names == HOOKS[path.name]
    Path("hosts").write_text("node1 slots=8\nnode2 slots=8\n")
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(NARROW))
    write_files(path)
    for number, text in enumerate(blocks(path, "yaml")):
        file = Path(f"example{number}.yaml")
        file.write_text(text, encoding="utf-8")
        given = "hardware" in yaml.safe_load(text) or "extends" in yaml.safe_load(text)
        place = [] if given else ["--on", ELSEWHERE.get(path.name, "8xA100-80GB")]
        assert main(["validate", str(file)]) == 0, (text, capsys.readouterr())
        assert main(["plan", str(file), *place]) == 0, (text, capsys.readouterr())


def write_files(path: Path) -> None:
    for name, text in named_files(path).items():
        Path(name).write_text(text, encoding="utf-8")


INFO = {
    "chats": {
        "file_name": "chats.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    }
}
"""LLaMA-Factory's dataset_info.json to the example of its page."""
WITH_CONFIGS = [path for path in DOCUMENTS if blocks(path, "yml")]


@pytest.mark.parametrize("path", WITH_CONFIGS, ids=names(WITH_CONFIGS))
def test_import_writes_the_recipe_that_stands_beside_the_config(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(INFO))
    for name in ("chats.json", "chats.jsonl"):
        Path("data", name).write_text('[{"messages": []}]' if name.endswith("json") else '{"messages": []}')
    (config,) = blocks(path, "yml")
    Path("config").write_text(config, encoding="utf-8")
    assert main(["import", "config"]) == 0, capsys.readouterr()
    written = capsys.readouterr().out
    assert yaml.safe_load(written) == yaml.safe_load(blocks(path, "yaml")[0])


def lines(path: Path) -> list[list[str]]:
    """The shell lines of a document as words, comments cut off."""
    text = "".join(blocks(path, "sh")).replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def ours(words: list[str]) -> list[list[str]]:
    """The calls of effilaunch in a line: behind a scheduler's word, and on both sides of `&&`."""
    calls, starts = [], [n for n, word in enumerate(words) if word == "effilaunch"]
    for start in starts:
        rest = words[start + 1 :]
        ends = [n for n, word in enumerate(rest) if word in ("&&", "|", ">", "<", "2>&1")]
        calls.append(rest[: ends[0]] if ends else rest)
    return calls


WITH_COMMANDS = [path for path in DOCUMENTS if lines(path)]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with what a checkout has for its users, in which a command may write."""
    for name in ("recipes", "ds_configs", "tests", "constraints.txt", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in YOURS:
        (tmp_path / name).write_text(SMALL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("answered", "warm")
@pytest.mark.parametrize("path", WITH_COMMANDS, ids=names(WITH_COMMANDS))
def test_every_command_runs_or_its_recipe_plans(path, checkout, capsys):
    write_files(path)
    for words in lines(path):
        for command, *arguments in ours(words):
            globbed = [sorted(map(str, Path().glob(word))) or [word] for word in arguments]
            arguments = [word for found in globbed for word in found]
            options = parse([command, *arguments])[1]
            if any(word.startswith(UNSHOWN) for word in arguments):
                continue  # parsed: the reader's own files
            if command in LOOKS:
                arguments = [word for word in arguments if word != "--browser"]  # serves until Ctrl-C
                assert main([command, *arguments]) == 0, (words, capsys.readouterr())
            elif recipe := options.get("recipe") or options.get("target"):
                assert command in PLANNED
                hardware = ["--on", options["on"]] if options["on"] else []
                assert main(["plan", recipe, *overrides(options), *hardware]) == 0, (
                    words,
                    capsys.readouterr(),
                )
            else:
                assert command in TRIED, words


def overrides(options) -> list[str]:
    """Those of a command, as words; the hosts of a page are not in this folder."""
    keys = [key for key in options["overrides"] if not key.startswith("launch.hostfile")]
    return [word for key in keys for word in ("--set", key)]


def test_what_is_only_planned_here_is_tried_elsewhere():
    assert set(PLANNED) <= set(TRIED)
    for command, file in TRIED.items():
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert command in text, file


@every("path", WITH_COMMANDS, ids=str)
def test_other_commands_name_what_is_there(path):
    """Targets of make, scripts and their options, extras of the package."""
    makefile, project = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "pyproject.toml"))
    for first, *rest in lines(path):
        if first == "make":
            assert re.search(rf"^{rest[0]}:", makefile, flags=re.MULTILINE), rest
        elif first == "python" and "/" in rest[0]:
            script = (ROOT / rest[0]).read_text(encoding="utf-8")
            assert all(word in script for word in rest if word.startswith("--")), rest
        elif first == "pip":
            extras = [name for word in rest for name in re.findall(r"\[(.*)\]", word)]
            assert all(
                re.search(rf"^{name} = \[", project, re.MULTILINE)
                for name in ",".join(extras).split(",")
                if name
            )
