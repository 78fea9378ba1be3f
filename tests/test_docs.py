"""What the documents say is what the code says: keys, tables, output (examples: test_doc_examples.py)."""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import json
import re
import shlex
import types
import typing
import zlib
from pathlib import Path

import pytest
import yaml
from factories import facts
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from launcher.cli import main
from launcher.commands.plan_page import PageRecipe, planned
from launcher.knowledge.diagnose.findings import Edit, TracebackFrame
from launcher.knowledge.doctor.check import CheckResult as Answer
from launcher.knowledge.doctor.check import Status, Verdict
from launcher.knowledge.doctor.examine import CHECKS
from launcher.knowledge.failures.catalogue import FAILURES as KNOWN
from launcher.lab.rehearsal.run import MEASURED
from launcher.lab.rehearsal.verdicts import TITLES as REHEARSED
from launcher.machine.machine_facts import Machine
from launcher.recipe.field_tables import METRICS, TASK_FORMATS, adapter_fields, task_fields, trainer_fields
from launcher.recipe.fields import ADAPTER_KEYS
from launcher.recipe.loading import load_recipe
from launcher.recipe.schema import Recipe, SlurmSection
from launcher.tasks import TASKS as ALL_TASKS
from launcher.tasks.causal_lm import CausalLM
from launcher.tasks.embedding import LOSSES as EMBEDDING_LOSSES
from launcher.tasks.image_text_to_text import ImageTextToText
from launcher.tasks.reranker import LOSSES as RERANKER_LOSSES

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
README = ROOT / "README.md"
RECIPE, DATA, TASKS, LADDER, MEMORY = (
    ROOT / "docs" / f"{name}.md" for name in ("recipe", "data", "tasks", "ladder", "memory")
)
CLUSTER, HOSTS, PARALLELISM = (ROOT / "docs" / f"{name}.md" for name in ("cluster", "hosts", "parallelism"))
LINT, DOCTOR, DIAGNOSE, FIXES, FAILURES, ON_OOM, FAULTS = (
    ROOT / "docs" / f"{name}.md"
    for name in ("lint", "doctor", "diagnose", "fixes", "failures", "out-of-memory", "faults")
)
KEYS = ROOT / "docs" / "reference" / "recipe.md"
TRACKING = ROOT / "docs" / "tracking.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"
GUIDES = [README, RECIPE, DATA, TASKS, LADDER, FIXES, ON_OOM, FAULTS, CLUSTER, HOSTS, PARALLELISM, TRACKING]


def blocks(path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def named_files(path) -> dict[str, str]:
    """Files that a page shows under their names, which its recipes and commands read."""
    text = path.read_text(encoding="utf-8")
    return dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))


def module_of(path):
    """A script of the documents, imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_has_every_page():
    """And each once; the hook leaves no link that the site cannot follow."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = re.findall(r"[\w/-]+\.md", json.dumps(config["nav"]))
    assert sorted(named) == sorted(str(path.relative_to(ROOT / "docs")) for path in DOCUMENTS[3:])


def test_the_site_publishes_pages_and_pictures_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")  # the theme sets it when it is imported
    from mkdocs.config import load_config
    from mkdocs.structure.files import get_files

    kept = {"index.md", "planner.gif", "migrate/axolotl.md"}
    left_out = {"make.py", "__pycache__/make.cpython-311.pyc", "notes.md~", "migrate/#axolotl.md#", ".swp"}
    for name in kept | left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# A page\n", encoding="utf-8")
    found = get_files(load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(tmp_path)))
    assert {file.src_uri for file in found if file.inclusion.is_included()} == kept


@pytest.mark.slow(share=1)
def test_the_site_has_what_its_pages_load(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path)))
    for page in ("index.html", "tasks/dpo.html"):
        text = (tmp_path / page).read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:link|script|img)[^>]* (?:href|src)="([^":]+)"', text)
        assert [name for name in loaded if name.endswith(".css")]
        missing = [name for name in loaded if not ((tmp_path / page).parent / name).is_file()]
        assert not missing, page


def test_the_site_names_sources_that_it_cannot_link_to():
    site = module_of(ROOT / "docs" / "site_hooks.py")
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_path="reference/fixes.md"))
    link = "[`make_plan`](../../launcher/planner/planner.py#L1)"
    text = f"{link}, [cli.py](../../launcher/cli.py), [us](../a.md)"
    assert site.on_page_markdown(text, page=page) == (
        "`make_plan` (`launcher/planner/planner.py`), `launcher/cli.py`, [us](../a.md)"
    )


def test_readme_shows_the_main_job_on_its_first_screen():
    first_screen = "\n".join(README.read_text(encoding="utf-8").splitlines()[:50])
    for wanted in (
        "effilaunch plan recipes/llama3_8b_qlora_24gb.yaml",
        "effilaunch run recipes/llama3_8b_qlora_24gb.yaml",
        "make smoke",
        "make test",
        "(docs/planner.gif)",
        "did you mean",
        "it would fit",
        "--resume auto",
        "(docs/quickstart.md)",
    ):
        assert wanted in first_screen


def test_what_the_picture_shows_is_said_beside_it():
    (said,) = re.findall(r"!\[(.*)\]\(docs/planner\.gif\)", README.read_text(encoding="utf-8"))
    pictured = [scene["memory"][0].split()[0] for scene in scenes()]
    assert set(re.findall(r"\d+\.\d\d", said)) == set(pictured)


def test_the_picture_is_of_todays_planner():
    """`python docs/planner_picture.py` makes it anew."""
    for scene in scenes():
        packed = scene["state"].removeprefix("#plan=")
        state = json.loads(zlib.decompress(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)), -15))
        sets = [f"{key}={value}" for key, value in state["sets"].items()]
        (recipe,) = state["recipes"]
        plans = [planned(PageRecipe(**recipe, sets=sets, on=on)) for on in state["on"]]
        facts = [{name: value for name, value, _ in plan["facts"]} for plan in plans]
        assert [one["device memory"] for one in facts] == scene["memory"]


def test_pages_that_count_the_known_failures_have_the_number_of_the_list():
    rows = re.findall(r"^\| `.*", (ROOT / "docs" / "failures.md").read_text("utf-8"), flags=re.MULTILINE)
    diagnosed = [row for row in rows if "diagnose" in row.split(" | ")[2]]
    assert f"About {round(len(rows), -1)} ways in which" in README.read_text("utf-8")
    compared = (ROOT / "docs" / "comparison.md").read_text("utf-8")
    assert f"about {round(len(diagnosed), -1)} known" in compared


def scenes():
    """State and memory of each scene of the picture, from its comment."""
    from PIL import Image

    with Image.open(ROOT / "docs" / "planner.gif") as picture:
        return json.loads(picture.info["comment"])


def test_quickstart_shows_a_part_of_the_plan(capsys):
    """Every line of the block as `plan` prints it, in its order; three points stand for what is left out."""
    text = QUICKSTART.read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```\n(memory of each device.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert main(["plan", str(ROOT / "recipes" / "llama3_8b_qlora_24gb.yaml")]) == 0
    rest = capsys.readouterr().out
    for part in filter(None, re.split(r"^  \.\.\.\n", shown, flags=re.MULTILINE)):
        assert part in rest
        rest = rest.split(part, 1)[1]


def test_readme_lists_exactly_the_commands(capsys):
    table = README.read_text(encoding="utf-8").split("## Commands", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"^\| `([a-z]+)", table, flags=re.MULTILINE))
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert named
    assert named == set(re.findall(r"^    ([a-z]+) ", shown, flags=re.MULTILINE))


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if blocks(p, "console")], ids=lambda path: path.name)
def test_shown_output_is_what_the_commands_print(path, tmp_path, monkeypatch, capsys):
    """Blocks of `console`: one command each, in a folder with the page's named files and the real tests."""
    for name, content in named_files(path).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    examples = blocks(path, "console")
    assert examples
    for example in examples:
        command, shown = example.split("\n", 1)
        words = shlex.split(command)
        assert words[:2] == ["$", "effilaunch"]
        assert main(words[2:]) in (0, 2, 3)
        told = capsys.readouterr()
        assert (told.out + told.err).rstrip() == shown.rstrip()


def json_keys(path: Path) -> dict[str, set[str]]:
    """Key of the object under `--json` -> the keys that its row names, by the page's chapter JSON."""
    return {ticked(row[0])[0]: set(ticked(row[1])) for row in table_rows(path, "JSON") if "`" in row[0]}


COMMON = {"schema_version", "command"}


def test_json_keys_of_lint_and_diagnose_are_documented(tmp_path, capsys):
    wrong = tmp_path / "ds.json"
    wrong.write_text('{"train_batch_size": 8, "gradient_cliping": 1.0}', encoding="utf-8")
    main(["lint", str(wrong), "--fix", "--json"])
    said = json.loads(capsys.readouterr().out)
    documented = json_keys(LINT)
    assert said.keys() - COMMON == documented.keys()
    assert said["findings"][0].keys() == documented["findings"]
    assert said["fixed"][0].keys() == documented["fixed"] - {"--fix"}

    log = tmp_path / "train.log"
    error = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"
    frame = 'Traceback (most recent call last):\n  File "a.py", line 1, in main\n    go()\n'
    documented = json_keys(DIAGNOSE)
    for text, kind in ((error, "findings"), ("KeyError: 'of my own'", "unknown")):
        log.write_text(f"{frame}{text}\n", encoding="utf-8")
        main(["diagnose", str(log), "--json"])
        said = json.loads(capsys.readouterr().out)
        assert said.keys() - COMMON == documented.keys() - {"mended"}
        assert said[kind][0].keys() <= documented[kind], "and `recipe` names the keys of an edit"
        assert documented[kind] - said[kind][0].keys() <= {"path", "old", "new"}
    assert {field.name for field in dataclasses.fields(Edit)} <= documented["findings"]
    (frames,) = re.findall(r"`frames` \(([^)]*)\)", DIAGNOSE.read_text(encoding="utf-8"))
    assert ticked(frames) == [field.name for field in dataclasses.fields(TracebackFrame)]


def test_formulas_of_memory_give_what_the_plans_have(capsys):
    """Each formula of the page, evaluated, is the figure beside it and the plan's."""
    rows = [row for row in table_rows(MEMORY, "The formulas") if len(row) == 4 and row[0].startswith("`")]
    assert len({row[0] for row in rows}) == 2
    for recipe, component, formula, shown in rows:
        assert main(["plan", *ticked(recipe), "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        model = facts(model=plan["model"]["name"]).model
        names = {"P": model.params, "L": model.linear_weights, "A": plan["model"]["trainable"],
                 "N": plan["batch"]["data_parallel"]}  # fmt: skip
        wanted = plan["memory"]["components"][component]
        assert (eval(*ticked(formula), names), int(shown.replace(",", ""))) == (wanted, wanted), formula


def test_fixes_page_names_the_actions_and_the_keys(capsys):
    assert main(["fixes", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["fixes"]
    (keys,) = re.findall(r"`fixes\[\{([^}]*)\}\]`", FIXES.read_text(encoding="utf-8"))
    assert said[0].keys() == set(keys.split(", "))
    assert {fix["action"] for fix in said} == {
        ticked(row[0])[0] for row in table_rows(FIXES) if "`" in row[0]
    }


def test_doctor_page_has_every_check_and_key():
    rows = [row for row in table_rows(DOCTOR, "The checks") if row[0].startswith("`")]
    wanted = [("plan", "plan"), ("data", "data"), *((check.id, check.title) for check in CHECKS)]
    assert [(ticked(row[0])[0], row[1]) for row in rows] == wanted
    shown = DOCTOR.read_text(encoding="utf-8").split("$ effilaunch doctor", 1)[1].split("```", 1)[0]
    titles = re.findall(r"^  (?:ok|FAIL|WARN|-) +(\S.*?)  ", shown, re.MULTILINE)
    assert titles
    assert set(titles) <= {check.title for check in CHECKS} | {"plan", "data"}
    documented = json_keys(DOCTOR)
    assert documented.keys() == {"checks", "ready", "machine", "bundle", "rehearsal", "run_dir"}
    answer = Answer("torch", "torch", Verdict("ok", "there")).to_json()
    assert documented["checks"] - set(typing.get_args(Status)) == set(answer)
    assert documented["machine"] == {field.name for field in dataclasses.fields(Machine)}


def test_doctor_page_has_every_check_of_a_rehearsal():
    rows = [row for row in table_rows(DOCTOR, "A rehearsal") if row[0].startswith("`")]
    assert [(ticked(row[0])[0], row[1]) for row in rows] == list(REHEARSED.items())
    shown = DOCTOR.read_text(encoding="utf-8").split("## A rehearsal", 1)[1].split("## A bug report", 1)[0]
    titles = re.findall(r"^  (?:ok|FAIL|WARN|-) +(\S.*?)  ", shown, re.MULTILINE)
    assert set(titles) == set(REHEARSED.values())
    assert json_keys(DOCTOR)["rehearsal"] - {"--rehearse"} == {*MEASURED, "verdicts", "limits", "completed"}


def test_page_of_known_failures_has_a_row_for_each():
    rows = [row for row in table_rows(FAILURES) if row[0].startswith("`")]
    assert [ticked(row[0])[0] for row in rows] == [failure.id for failure in KNOWN]
    assert all(all(row) and len(row) == 4 for row in rows)


def test_page_of_faults_names_what_is_there():
    """Codes, phases and their limits, the manifest's keys, the drill's table, and what may change."""
    from launcher.execute.supervise import DAY, HOUR, MINUTE, Limits
    from launcher.files.checkpoint import Manifest
    from launcher.files.rank_status import PHASES
    from launcher.lab.drill import FAULTS as DRILLED
    from launcher.lab.drill import HEAD
    from launcher.planner.resuming import resume_of

    text = FAULTS.read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "launcher").rglob("*.py"))
    codes = {code for row in table_rows(FAULTS, "What survives what") for code in ticked(row[2])}
    codes |= set(re.findall(r"\(`([a-z]+-[a-z-]+)`\)", text))
    assert {"rank-lost", "checkpoint-disk", "resume-differs", "unsafe-pickle", "secret-in-recipe"} <= codes
    assert {code for code in codes - {"result.json"} if f'"{code}"' not in source} == set()

    limits = {row[0]: row[1] for row in table_rows(FAULTS, "Restarts and hangs")[1:]}
    spans = {5 * MINUTE: "5 minutes", HOUR: "1 hour", 2 * HOUR: "2 hours", 4 * HOUR: "4 hours"}
    spans[DAY] = "24 hours"
    given = dataclasses.asdict(Limits())
    assert limits.pop("prepare") == "none"
    for phase, said in limits.items():
        name = {"train": "step", "train, before there is a median": "first_steps"}.get(phase, phase)
        assert spans[given[name]] in said, phase
    assert {*PHASES, "train, before there is a median"} - {"ended", "prepare"} == limits.keys()

    keys = {key for row in table_rows(FAULTS, "What a checkpoint is")[1:] for key in ticked(row[0])}
    assert keys == {field.name for field in dataclasses.fields(Manifest)} | {"schema_version"}

    (shown,) = re.findall(r"^```\n(\s*fault .*?)^```", text, re.MULTILINE | re.DOTALL)
    rows = [re.split(r"  +", line.strip()) for line in shown.splitlines()]
    assert rows[0] == list(HEAD)
    assert [row[0] for row in rows[1:]] == [fault.title for fault in DRILLED]
    assert {row[0]: row[-1] for row in rows[1:] if row[-1] != "passed"} == {"SIGKILL of one rank": "same"}

    changed = {row[0]: row[1] for row in table_rows(FAULTS, "What a resumed run may change")[1:]}
    for names, outcome in changed.items():
        verdicts = {resume_of(name).verdict for name in ticked(names)}
        allowed = {"refuse", "states"} if "refused" in outcome else {"free", "note"}
        assert verdicts <= allowed, names


def table_rows(path: Path, heading: str = "") -> list[list[str]]:
    """Cells of the table rows of a document, or of one of its chapters."""
    text = path.read_text(encoding="utf-8")
    chapter = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0] if heading else text
    rows = [line.strip("|").split(" | ") for line in chapter.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


def ticked(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def parts_of(annotation) -> list:
    """What a type is made of, at any depth."""
    return [annotation, *(part for inner in typing.get_args(annotation) for part in parts_of(inner))]


def schema_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, typing.Any]:
    """Dotted key -> pydantic field of every key of a recipe; a source of rows is described once."""
    found: dict[str, typing.Any] = {}
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        found[key] = field
        parts = parts_of(field.annotation)
        in_list = any(typing.get_origin(part) is list for part in parts)
        for part in parts:
            if not (isinstance(part, type) and issubclass(part, BaseModel)):
                continue
            is_source = part.__name__ == "DataSource"
            if not (is_source and name == "eval"):
                found |= schema_keys(part, f"{key}[]." if is_source and in_list else f"{key}.")
    return found


def test_every_key_of_slurm_is_documented():
    named = {key for row in table_rows(CLUSTER) for key in ticked(row[0])}
    assert set(SlurmSection.model_fields) <= named


def test_every_key_of_a_recipe_is_documented():
    """With its default and the words that it may be; `make.py` writes the page, but does not judge it."""
    keys = schema_keys()
    rows = {ticked(row[0])[0]: row for row in table_rows(KEYS) if row[0].startswith("`")}
    assert keys.keys() - rows.keys() == set()
    for key, field in keys.items():
        _, value, default, meaning = rows[key]
        choices = {choice for part in parts_of(field.annotation) if typing.get_origin(part) is typing.Literal
                   for choice in typing.get_args(part)}  # fmt: skip
        assert {str(choice).lower() for choice in choices} <= {word.lower() for word in ticked(value)}, key
        assert meaning, key
        given = field.get_default(call_default_factory=True)
        if given is PydanticUndefined:
            assert default == "required", key
        elif isinstance(given, BaseModel):
            assert default == "its defaults", key
        elif given is None:
            assert default == "*absent*", key
        else:
            assert [yaml.safe_load(text) for text in ticked(default)] == [given], key


def test_every_field_of_upstream_is_documented():
    rows = [ticked(row[0])[0] for row in table_rows(KEYS) if row[0].startswith("`")]
    fields = {*trainer_fields("seq2seq-lm"), *trainer_fields("dpo"), *adapter_fields()}
    renamed = {"gradient_checkpointing", "gradient_checkpointing_kwargs"}
    assert {name for name in fields if not {name, f"trainer.{name}"} & set(rows)} == renamed


def test_pages_made_from_the_code_are_current():
    made = module_of(ROOT / "docs" / "make.py").PAGES_OF
    for name, text in made.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text(), f"python docs/make.py: {name}"


def test_trainer_and_adapter_fields_that_are_named_exist():
    fields = {*trainer_fields("seq2seq-lm"), *trainer_fields("dpo"), *adapter_fields(), *ADAPTER_KEYS}
    for path in GUIDES:
        prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for text in ticked(prose):
            match = re.fullmatch(r"(?:trainer|adapter)\.(\w+)", text)
            assert match is None or match[1] in fields, (path.name, text)


def test_tables_say_what_the_vocabulary_says():
    formats = {ticked(row[0])[0]: row for row in table_rows(TASKS) if len(row) == 5 and ticked(row[0])}
    formats.pop("task")
    assert {task: tuple(ticked(row[1])) for task, row in formats.items()} == dict(TASK_FORMATS)
    for task, row in formats.items():
        (recipe,) = ticked(row[4])
        assert load_recipe(recipe).recipe.task == task
    metrics = {task: set(ticked(row[1])) for row in table_rows(TASKS, "Metrics") for task in ticked(row[0])}
    assert {task: metrics[task] for task in METRICS} == {task: set(names) for task, names in METRICS.items()}
    learnt = [row for row in table_rows(DATA, "Target tokens") if row[0].startswith("`")]
    loss = {fmt: tuple(ticked(row[1] + row[2])) for row in learnt for fmt in ticked(row[0])}
    assert loss == {**CausalLM.learns, **ImageTextToText.learns}


CHAPTERS = ["Rows", "Try it on a CPU", "What is special", "Metrics", "Memory", "The result"]


LOSSES = {
    "dpo": [*task_fields("dpo")["loss_type"]["choices"], "sft among others"],
    "kto": task_fields("kto")["loss_type"]["choices"],
    "embedding": EMBEDDING_LOSSES,
    "reranker": RERANKER_LOSSES,
}
"""Task -> its losses, where they are not all means of the same."""


def test_the_page_says_what_each_loss_is_a_mean_of():
    said = {}
    for tasks, losses, over in re.findall(r"^\| (`.+) \| (.*)\| `([\w -]+)` \|$", TASKS.read_text(), re.M):
        for task in re.findall(r"`([\w-]+)`", tasks):
            named = [loss.replace("`", "").replace(" alone", "") for loss in losses.strip().split(", ")]
            for loss in named if losses.strip() else LOSSES.get(task, [None]):
                assert said.setdefault((task, loss or None), over) == over
    found = {}
    for task in ALL_TASKS:
        for loss in LOSSES.get(task.name, [None]):
            kinds = ["sigmoid", "sft"] if loss == "sft among others" else loss
            section = types.SimpleNamespace(loss=loss, negatives=0)
            settings = types.SimpleNamespace(
                trainer={},
                fields=lambda _, kinds=kinds: {"loss_type": kinds},
                embedding=section,
                reranker=section,
            )
            found[task.name, loss] = task.loss_over(settings)
    assert said == found
    assert len(found) > 30


def test_every_task_has_a_page_of_the_same_chapters():
    pages = {path.stem: path for path in (ROOT / "docs" / "tasks").glob("*.md")}
    assert set(pages) == set(TASK_FORMATS)
    for task, path in pages.items():
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == CHAPTERS, task
        formats = chapter_of(text, "Rows")
        assert [one for one in TASK_FORMATS[task] if f"`{one}`" not in formats] == [], task
        assert [one for one in METRICS[task] if f"`{one}`" not in chapter_of(text, "Metrics")] == [], task
        assert f"(tasks/{task}.md)" in TASKS.read_text(encoding="utf-8")


def chapter_of(text: str, chapter: str) -> str:
    """The text of a chapter."""
    return text.split(f"\n## {chapter}\n", 1)[1].split("\n## ", 1)[0]


def test_rows_in_the_documents_have_their_format(tmp_path):
    from launcher.rows import recognise
    from launcher.rows.sources import Row

    text = DATA.read_text(encoding="utf-8")
    examples = dict(re.findall(r"^### `([a-z-]+)`\n\n```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert set(examples) == {fmt for known in TASK_FORMATS.values() for fmt in known}
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "0001.jpg").touch()
    for fmt, lines in examples.items():
        task = next(task for task, known in TASK_FORMATS.items() if fmt in known)
        for number, line in enumerate(lines.splitlines(), start=1):
            row = Row(json.loads(line), str(tmp_path / "rows.jsonl"), number)
            detected = recognise.detect([row], "auto", {}, task, row.file)
            assert detected.format == fmt
            assert recognise.canonical(row, detected).values


def test_the_page_on_engines_names_what_is_taken_and_refused():
    """Families and optimizers stand in the page as in the plan; its two recipes share as it says."""
    from launcher.planner.parallel import FAMILIES
    from launcher.recipe.optimizer_needs import IN_SHARDS

    text = PARALLELISM.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in IN_SHARDS)
    said = re.search(r"families other than ([\w\s,]+?), sliding", text)
    assert said is not None
    named = re.findall(r"[A-Z]\w+", said.group(1))
    assert sorted(name.lower() for name in named) == sorted(FAMILIES)


def test_contributing_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./]+/[\w]+\.(?:py|json|txt|yaml|md))`", text))
    files = {f"/{path.relative_to(ROOT)}" for path in ROOT.glob("*/**/*.*") if ".venv" not in path.parts}
    assert len(named) > 40
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} == set()


@pytest.mark.parametrize(
    ("machine", "kind", "offloaded"),
    [("1xRTX4090-24GB", "all weights", False), ("1xRTX4070-12GB", "QLoRA", True)],
)
def test_what_can_be_trained_is_what_the_planner_says(machine, kind, offloaded):
    """Two cells of the page, which is made by a script of its own: `python docs/reach_page.py`."""
    reach = module_of(ROOT / "docs" / "reach_page.py")
    rows = [line for line in reach.PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {machine} |")]
    column = [*reach.KINDS].index(kind) + (len(reach.KINDS) if offloaded else 0)
    assert rows[0].strip("| ").split(" | ")[1 + column] == reach.cell(machine, kind, offloaded=offloaded)
    assert rows[1].strip("| ").split(" | ")[1] == reach.longest(
        reach.CONTEXTS["8B"], machine, offloaded=False
    )
