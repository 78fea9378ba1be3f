"""`${ENV:NAME}` in any text of a recipe: no file that is written holds the variable's value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("torch")

from checkpoints import CONTENT, checkpoint
from factories import facts, recipe
from grounds import make_base
from launched import effilaunch
from pydantic import BaseModel

from launcher.errors import EffilaunchError, RecipeError
from launcher.execute.resume import Chosen
from launcher.execute.run_dir import write_run_dir
from launcher.execute.start_point import Beginning, check_resumption, stored_plan
from launcher.machine.hardware import parse_hardware
from launcher.planner.planner import make_plan
from launcher.planner.resuming import compare_plans
from launcher.recipe.schema import Recipe
from launcher.recipe.yaml_writer import snapshot
from launcher.render.bundle import render
from launcher.train.job import read_job

PLANTED = "planted-of-the-environment"
REFERENCE = "${ENV:PLANTED}"
BASE = """\
model: {name_or_path: huggyllama/llama-7b}
adapter: {type: lora, r: 8}
data: {train: [{path: rows.jsonl}], eval: [{path: rows.jsonl}], max_length: 512}
trainer: {max_steps: 10}
"""


def parts(annotation: Any) -> Iterator[Any]:
    """A type and all that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from parts(part)


def texts(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str]]:
    """(key, YAML value) of every key that may be a text, or a list or mapping with one."""
    for name, field in model.model_fields.items():
        key, found = f"{path}{name}", list(parts(field.annotation))
        for part in found:
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from texts(part, f"{key}[0]." if list in map(_origin, found) else f"{key}.")
        if any(part in (str, Any) for part in found):
            yield key, f"'{REFERENCE}'"
            yield key, f"'a/{REFERENCE}/b'"
            yield key, f"['x {REFERENCE}']"
            yield key, f"{{x: '{REFERENCE}'}}"


def _origin(part: Any) -> Any:
    return getattr(part, "__origin__", None)


MORE = (
    "model: {name_or_path: huggyllama/llama-7b}\n"
    "data: {train: [{path: org/rows, name: REF, split: REF, revision: REF, columns: {text: REF}}]}\n",
    "model: {name_or_path: huggyllama/llama-7b}\nadapter: {path: REF}\ndata: {train: [{path: rows.jsonl}]}\n",
    "task: embedding\nmodel: {name_or_path: huggyllama/llama-7b}\nembedding: {prompts: {query: REF}}\n"
    "data: {train: [{path: rows.jsonl}]}\n",
    "model: {name_or_path: huggyllama/llama-7b}\ndata: {train: [{path: rows.jsonl}]}\n"
    "runtime: {mirror: 's3://b/${ENV:PLANTED}'}\ntrainer: {run_name: REF}\n",
)


def files_of(loaded) -> dict[str, str]:
    """Every text that plan, run and submit write."""
    files = {"submitted.yaml": snapshot(loaded, parse_hardware("8xA100-80GB"))}
    try:
        made = make_plan(loaded, facts("8xA100-80GB", "huggyllama/llama-7b", loaded.recipe.task))
    except EffilaunchError:
        return files  # nothing more is written
    return files | render(made).files


def test_the_value_of_a_variable_is_in_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED", PLANTED)
    given = [(BASE, {key.replace(".", "__"): value}) for key, value in texts(Recipe)]
    accepted, planned = set(), 0
    for text, override in [*given, *((text.replace("REF", f"'{REFERENCE}'"), {}) for text in MORE)]:
        try:
            loaded = recipe(tmp_path, text, **override)
        except RecipeError:
            assert override, text
            continue
        accepted |= override.keys()
        files = files_of(loaded)
        planned += len(files) > 1
        assert not [name for name, text in files.items() if PLANTED in text], (override, text)
        assert loaded.of_jobs or "PLANTED" in files["submitted.yaml"], (override, text)
    assert {"model__cache_dir", "data__train[0]__path", "launch__kubernetes__setup", "python"} <= accepted
    assert planned > 20


def test_a_reference_in_setup_is_one_of_the_jobs_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED", PLANTED)
    for line, expected in (
        ("export DB=${ENV:PLANTED}", "export DB=${PLANTED}"),
        ("cd ${ENV:ELSEWHERE:/scratch/me}", "cd ${ELSEWHERE-/scratch/me}"),
        ("echo '${ENV:PLANTED}'", None),
        ('cd "${ENV:ELSEWHERE:$(id)}"', None),
    ):
        override = {"launch__kubernetes__setup": json.dumps([line])}
        if expected is not None:
            assert recipe(tmp_path, **override).recipe.launch.kubernetes.setup == [expected]
            continue
        (problem,) = recipe(tmp_path, **override).of_jobs
        assert (problem.code, problem.path) == ("env-reference", "launch.kubernetes.setup[0]")


WRITTEN = {
    "in clear": {"model__revision": "abc123"},
    "a reference": {"model__revision": "'${ENV:REVISION}'"},
    "another one": {"model__revision": "'${ENV:SHORT}123'"},
    "of 0.2.0": {"model__revision": "abc123"},
}


@pytest.mark.parametrize("first", WRITTEN)
def test_a_resumed_run_compares_the_values_of_references(first, tmp_path, monkeypatch):
    """Not only their texts, whether the value was a reference before or is one now."""

    def bundle(value: str, written: str):
        monkeypatch.setenv("REVISION", value)
        monkeypatch.setenv("SHORT", value.removesuffix("123"))
        more = {"trainer__run_name": "'${ENV:REVISION}'", "data__train[0]__path": "'/${ENV:SHORT}.jsonl'"}
        return render(make_plan(recipe(tmp_path, BASE, **WRITTEN[written], **more), facts()))

    def resumed(now) -> list[str]:
        write_run_dir(now, run_dir, resume=True)
        found = check_resumption(Beginning(run_dir, Chosen(folder, 2)), now, print)
        return [difference.setting for difference in found.differences]

    run_dir = tmp_path / "run"
    folder = checkpoint(run_dir / "checkpoints", 2, {**CONTENT, "plan.json": b"{}"}, world_size=8)
    plan = json.loads(bundle("abc123", first).files["plan.json"])
    if first == "of 0.2.0":
        plan["settings"]["data.train"]["value"][0]["path"] = "/abc.jsonl"
        del plan["references"]
    (folder / "plan.json").write_text(json.dumps(plan))
    for now in WRITTEN:
        same = WRITTEN[now] == WRITTEN[first]
        expected = ([] if same else ["model.revision"]) + ["data.train"] * (first == "of 0.2.0")
        assert sorted(resumed(bundle("abc123", now))) == sorted(expected), now
        if "ENV" not in WRITTEN[now]["model__revision"]:
            continue
        with pytest.raises(RecipeError) as caught:
            resumed(bundle("def456", now))
        assert {problem.path for problem in caught.value.problems} == {"model.revision", "data.train"}


@pytest.mark.parametrize("path", ["parts/*.jsonl", "parts", "org/rows"])
def test_a_stream_without_references_is_resumed(tmp_path, path):
    """A plan without any says so, which one of 0.2.0 does not."""
    loaded = recipe(tmp_path, BASE, **{"data__train[0]__path": path, "data__streaming": True})
    bundle = render(make_plan(loaded, facts()))
    plan = stored_plan(bundle)
    assert compare_plans(plan, stored_plan(bundle), plan.ranks).refused == []


def test_numbers_of_the_trainer_are_decided_in_the_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("N", "2")
    names = ("num_train_epochs", "warmup_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
             "save_total_limit", "max_steps")  # fmt: skip
    text = BASE.replace("{max_steps: 10}", "{}")
    for name in names:
        made = make_plan(recipe(tmp_path, text, **{f"trainer__{name}": "'${ENV:N}'"}), facts())
        assert made.fields(made.trainer)[name] == 2, name


def test_the_worker_reads_the_values(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", str(tmp_path / "place"))
    loaded = recipe(tmp_path, BASE, **{"data__train[0]__path": "'${ENV:PLACE}/x.jsonl'"})
    (tmp_path / "plan.json").write_text(render(make_plan(loaded, facts())).files["plan.json"])
    stored = json.loads((tmp_path / "plan.json").read_text())["settings"]["data.train"]["value"]
    assert stored[0]["path"] == "${ENV:PLACE}/x.jsonl"
    assert read_job(tmp_path).data.train[0]["path"] == str(tmp_path / "place" / "x.jsonl")
    monkeypatch.setenv("PLACE", str(tmp_path / "elsewhere"))
    with pytest.raises(RecipeError) as caught:  # another base is not silently merged
        _ = read_job(tmp_path).data.train
    assert caught.value.problems[0].code == "env-changed"
    assert read_job(tmp_path).data.max_length == loaded.recipe.data.max_length
    monkeypatch.setenv("RELATIVE", "y.jsonl")
    loaded = recipe(tmp_path, BASE, **{"data__train[0]__path": "'${ENV:RELATIVE}'"})
    assert loaded.kept["data.train[0].path"].text == f"{Path.cwd()}/${{ENV:RELATIVE}}"


def test_the_model_card_of_an_adapter_has_the_reference(tmp_path, monkeypatch):
    """peft writes the base into it, and the hub takes no reference as metadata."""
    from transformers import AutoModelForCausalLM

    from launcher.train.model.adapters import attach_adapter

    place = tmp_path / PLANTED
    make_base(place, hidden_size=32, layers=1, heads=2)
    monkeypatch.setenv("PLANTED", str(place))
    loaded = recipe(tmp_path, BASE, model__name_or_path=f"'{REFERENCE}/model'")
    (tmp_path / "plan.json").write_text(render(make_plan(loaded, facts())).files["plan.json"])
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    adapted = attach_adapter(read_job(tmp_path), model, None)
    adapted.save_pretrained(tmp_path / "adapter")
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert PLANTED not in card
    assert "base_model:" not in card


@pytest.mark.slow
def test_what_a_run_writes_has_the_reference_and_a_resumed_one_reads_it(tmp_path, warm):
    """Except what peft needs to load an adapter: the base."""
    place, out = tmp_path / PLANTED, tmp_path / "out"
    place.mkdir()
    make_base(place, hidden_size=32, layers=1, heads=2)
    path = tmp_path / "r.yaml"
    path.write_text(
        "model: {name_or_path: 'REF/model', cache_dir: 'REF/cache'}\nadapter: {type: lora, r: 4}\n"
        "data: {train: [{path: 'REF/rows.jsonl'}], eval: [{path: 'REF/rows.jsonl'}], max_length: 32}\n"
        "trainer: {max_steps: 2, save_steps: 2, report_to: none}\n".replace("REF", REFERENCE)
    )
    for more in ((), ("--resume", "auto", "--set", "trainer.max_steps=4")):
        effilaunch("run", path, "--on", "cpu", "--output-dir", out, *more, PLANTED=str(place))
    files = [file for file in out.rglob("*") if file.is_file()]
    leaking = {file.name for file in files if PLANTED.encode() in file.read_bytes()}
    assert leaking == {"adapter_config.json"}
    assert {"README.md", "rank-0.log"} <= {file.name for file in files}
