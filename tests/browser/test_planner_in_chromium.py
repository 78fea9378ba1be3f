"""The planner's page as the site has it: Python runs in the browser, with the plans of `plan --json`.

The screenshots lie in the test's folder (`--basetemp` chooses it), for people to look at.
"""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import wait_until
from test_report_in_chromium import CONTRAST, OUTSIDE

from launcher.commands.plan_page import answer
from launcher.files.shipped import facts_file, recipes_dir, shipped_names
from launcher.report.planner_page.page import PageStart, serving
from tools import planner_site

pytestmark = [pytest.mark.browser]
AXE = "4.14.1"
AXE_RUN = """axe.run().then(one => one.violations.map(rule =>
  [rule.id, rule.nodes.map(node => node.html.slice(0, 120))]))"""
DEVICES = ("1xRTX4090-24GB", "8xH100-80GB", "4xA100-40GB", "2x8xV100-32GB", "1xT4-16GB")
CASES = 30
RECIPE = (
    "model: {name_or_path: meta-llama/Llama-3.1-8B}\ndata: {train: [{path: rows.jsonl}], max_length: 2048}\n"
)
SHOWN = """JSON.parse(document.querySelector('#files details[data-name="plan --json"] code').textContent)"""
VERDICTS = "[...document.querySelectorAll('#table .state')].map(one => one.textContent)"


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("plan")
    try:
        planner_site.build(folder)
    except planner_site.NoPlannerSite as why:
        pytest.skip(str(why))
    with planner_site.served(folder) as served:
        yield served


@pytest.fixture(scope="module")
def page(browser, address):
    """The page, loaded once: it takes seconds, and each test gives it a state of its own."""
    browser.open(address)
    until(browser, "document.body.dataset.planned", 240)
    yield browser
    assert browser.complaints() == []
    browser.open("about:blank")


def until(browser, expression: str, seconds: float = 60):
    return wait_until(lambda: browser.ask(expression), seconds, lambda: (expression, browser.complaints()))


def link(recipes, on=("1xH100-80GB",), sets=None, configs=None) -> str:
    """The fragment of a state, made without the page."""
    given = [{"path": path, "text": text} for path, text in recipes]
    state = {"recipes": given, "on": list(on), "sets": sets or {}, "configs": configs or {}}
    packed = zlib.compressobj(wbits=-15)
    raw = packed.compress(json.dumps(state).encode()) + packed.flush()
    return "#plan=" + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def settled(browser, action: str) -> None:
    """Do something to the page, and wait until it has planned again."""
    browser.ask(f"document.body.dataset.planned = ''; {action}; null")
    until(browser, "document.body.dataset.planned")


def show(browser, *recipes: tuple[str, str], **more) -> None:
    settled(browser, f"location.hash = {link(recipes, **more)!r}")


def writing(selector: str, text: str) -> str:
    """The script that writes into a field, as a user does who has the cursor at its end."""
    return (
        f"(field => {{ field.focus(); field.value = {json.dumps(text)}; const end = field.value.length;"
        " if (field.setSelectionRange && field.type !== 'range') field.setSelectionRange(end, end);"
        f" field.dispatchEvent(new Event('input')); }})(document.querySelector({json.dumps(selector)}))"
    )


def file_shown(browser, name: str) -> str:
    return browser.ask(
        f"document.querySelector('#files details[data-name={json.dumps(name)}] code').textContent"
    )


def generated(seed: int) -> tuple[str, str, dict[str, str]]:
    """Name and text of a shipped recipe, and changes to it; some fit nowhere, some are refused."""
    chance = random.Random(seed)
    texts = {name: (recipes_dir() / f"{name}.yaml").read_text("utf-8") for name in shipped_names()}
    # Without bases, and what reads an installed package.
    names = [name for name, text in texts.items() if "/" not in name and "package:" not in text]
    name = chance.choice(names)
    choices = {
        "data.max_length": ["512", "4096", "32768"],
        "trainer.per_device_train_batch_size": ["1", "8", "64"],
        "adapter.r": ["8", "256"],
        "sharding.zero_stage": ["0", "2", "3"],
        "model.quantization": ["none", "int8", "nf4"],
    }
    keys = chance.sample(sorted(choices), chance.randint(0, 3))
    return name, texts[name], {key: chance.choice(choices[key]) for key in keys}


# A Python without the packages that train, as a browser is: status and output of each command.
BARE = """
import contextlib, io, json, sys
sys.path[:0] = sys.argv[1:3]
from launcher.cli import main
done = []
for words in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        done.append([main(words), out.getvalue()])
json.dump(done, sys.stdout)
"""
NEEDED = (
    "pydantic", "pydantic_core", "yaml", "packaging", "argcomplete", "annotated_types", "typing_inspection",
    "typing_extensions.py",
)  # fmt: skip


def of_the_command_line(tmp_path: Path, cases) -> list[tuple[int, str]]:
    """Status and output of `plan --json` for each case and device, with the places that the page has."""
    packages, folder = tmp_path / "packages", tmp_path / "recipe"
    packages.mkdir()
    folder.mkdir()
    for name in NEEDED:
        (packages / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    commands = []
    for name, text, sets in cases:
        (folder / f"{name}.yaml").write_text(text, "utf-8")
        words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        commands += [["plan", f"{name}.yaml", "--on", on, *words, "--json"] for on in DEVICES]
    done = subprocess.run(
        [sys.executable, "-S", "-c", BARE, planner_site.ROOT, packages], input=json.dumps(commands),
        cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    version = ".".join(map(str, sys.version_info[:3]))
    places = {
        str(recipes_dir()): "/site/launcher/_data/recipes", str(folder): "/recipe", sys.executable: "python3",
        f'python\\": \\"{version}': 'python\\": \\"3.14.2',
    }  # fmt: skip
    found = []
    for status, said in json.loads(done.stdout):
        for ours, theirs in places.items():
            said = said.replace(ours, theirs)
        found.append((status, said.rstrip("\n")))
    return found


def test_its_plans_are_those_of_the_command_line_to_the_byte(page, tmp_path):
    statuses: dict[int, int] = {}
    cases = [generated(seed) for seed in range(CASES)]
    expected = iter(of_the_command_line(tmp_path, cases))
    for seed, (name, text, sets) in enumerate(cases):
        show(page, (f"{name}.yaml", text), on=DEVICES, sets=sets)
        cells = page.ask(VERDICTS)
        for at, on in enumerate(DEVICES):
            page.ask(f"document.querySelectorAll('#table button.column')[{at}].click()")
            shown = file_shown(page, "plan --json")
            status, said = next(expected)
            assert shown == said, (seed, name, on, sets)
            statuses[status] = statuses.get(status, 0) + 1
            kinds = {0: ("✓ fits", "size unknown"), 3: ("✕ does not fit",), 2: ("✕ error",)}
            assert cells[at] in kinds[status], (name, on)
            if status != 2:
                files = json.loads(said)["files"]
                for file in {"ds_config.json"} & set(files):
                    assert file_shown(page, file) == files[file]
    assert min(statuses[0], statuses[2], statuses[3]) >= 5, statuses


def test_a_mistake_is_shown_at_its_line(page):
    show(page, ("tune.yaml", RECIPE + "trainer:\n  learning_rat: 1.0e-4\n"))
    assert page.ask("[...document.querySelectorAll('.problems li')].map(one => one.dataset.code)") == [
        "unknown-key"
    ]
    assert page.ask("document.querySelector('.problems button').textContent") == "line 4"
    assert page.ask("[...document.querySelectorAll('.gutter .wrong')].map(one => one.textContent)") == ["4"]
    assert page.ask("document.querySelector('textarea').getAttribute('aria-invalid')") == "true"
    page.ask("document.querySelector('.problems button').click()")
    chosen = page.ask(
        "(area => area.value.slice(area.selectionStart, area.selectionEnd))(document.activeElement)"
    )
    assert chosen == "  learning_rat: 1.0e-4"
    settled(page, writing("textarea", RECIPE + "trainer:\n  learning_rate: 1.0e-4\n"))
    assert page.ask("document.querySelectorAll('.problems li, .gutter .wrong').length") == 0
    assert page.ask(VERDICTS) == ["✕ does not fit"]


def test_a_link_holds_all_and_another_window_shows_the_same(page, address):
    show(
        page,
        ("a.yaml", RECIPE),
        ("b.yaml", RECIPE + "adapter: {type: lora}\n"),
        on=DEVICES[:2],
        sets={"data.max_length": "1024"},
    )
    before = page.ask("[location.hash, document.getElementById('table').innerText]")
    assert "b on 8xH100-80GB" in before[1]
    assert page.ask("document.querySelector('[data-key=\"data.max_length\"]').value") == "3"
    page.open("about:blank")  # the same address with another fragment would load nothing
    page.open(address + before[0])
    until(page, "document.body.dataset.planned", 240)
    assert page.ask("[location.hash, document.getElementById('table').innerText]") == before
    assert page.ask("document.querySelectorAll('textarea')[1].value") == RECIPE + "adapter: {type: lora}\n"
    assert all(
        asked.startswith(address.rpartition("/")[0]) and "plan=" not in asked for asked in page.requests()
    )


@pytest.mark.parametrize(
    "fragment", ["#plan=AAAA", "#plan=%00", "#memory", link([], on=[]), link([("a", "b")], on=[])]
)
def test_a_link_that_is_none_changes_nothing(page, fragment):
    show(page, ("tune.yaml", RECIPE))
    page.ask(f"location.hash = {fragment!r}")
    time.sleep(0.3)
    assert page.ask("document.querySelector('textarea').value") == RECIPE
    assert page.ask("document.querySelectorAll('#table button.column').length") == 1


def test_it_goes_on_without_a_network(page):
    show(page, ("tune.yaml", RECIPE + "adapter: {type: lora, r: 8}\n"))
    page.call(
        "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
    )
    try:
        before = page.ask("document.getElementById('table').innerText")
        settled(page, writing('[data-key="adapter.r"]', "6"))
        assert "adapter.r=128" in page.ask("document.getElementById('sets').innerText")
        assert page.ask("document.getElementById('table').innerText") != before
        assert "--set adapter.r=128" in file_shown(page, "command line")
    finally:
        page.call(
            "Network.emulateNetworkConditions",
            offline=False,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )


def typed(page, text: str) -> list[str]:
    """What is offered for the end of this text."""
    page.ask(writing("textarea", text))
    return page.ask(
        "[...document.querySelectorAll('.completions:not([hidden]) b')].map(one => one.textContent)"
    )


def test_keys_and_values_are_completed_by_the_schema(page):
    show(page, ("tune.yaml", RECIPE))
    assert typed(page, "prec")[0] == "precision"
    assert "bf16" in typed(page, "precision: b")
    assert typed(page, "model:\n  name_or_path: Qwen/Qwen3-8")[0].startswith("Qwen/Qwen3-8B")
    assert "learning_rate" in typed(page, "model: {}\ntrainer:\n  save_steps: 3\n  learn")
    assert "max_length" in typed(page, "data: {train: [{path: x}], max_")
    assert "format" in typed(page, "data:\n  train:\n    - path: x\n      for")
    assert "format" in typed(page, "data:\n  train:\n    - for")
    assert typed(page, "# prec") == typed(page, "notes: x # prec") == []
    typed(page, "prec")
    for key in ("ArrowDown", "ArrowUp", "Enter"):
        pressed = f"new KeyboardEvent('keydown', {{key: '{key}', cancelable: true}})"
        page.ask(f"document.activeElement.dispatchEvent({pressed})")
    assert page.ask("document.activeElement.value") == "precision: "


def test_text_of_a_recipe_is_text(page):
    hostile = "<img src=x onerror='window.ran = 1'>"
    named = RECIPE.replace("rows.jsonl", f'"{hostile}.jsonl"')
    show(page, (f"{hostile}.yaml", named), (f"{hostile}2.yaml", named + f'"{hostile}": 1\n'), on=DEVICES[:2])
    assert hostile in page.ask("document.body.innerText")
    assert page.ask("document.images.length") == 0
    assert page.ask("window.ran") is None


def test_what_would_fit_is_tried_with_a_click(page):
    show(page, ("tune.yaml", RECIPE))
    assert page.ask("document.querySelector('#problems [data-code]').dataset.code") == "does-not-fit"
    settled(page, "document.querySelector('#problems li button').click()")
    assert page.ask(VERDICTS) == ["✓ fits"]
    assert page.ask("document.getElementById('problems').innerText") == ""


def test_a_model_that_is_not_known_is_planned_from_its_configuration(page):
    show(page, ("tune.yaml", RECIPE.replace("meta-llama/Llama-3.1-8B", "someone/new-model")))
    assert page.ask("document.querySelector('.problems li').dataset.code") == "hub-offline"
    models = json.loads(facts_file("models.json").read_text("utf-8"))["models"]
    config = {**models["meta-llama/Llama-3.1-8B"]["config"], "num_hidden_layers": 4}
    settled(page, writing("#config", json.dumps(config)))
    assert page.ask(VERDICTS) == ["✓ fits"]
    plan = json.loads(file_shown(page, "plan --json"))
    # 8 of 32 heads are keys and values
    layer = 4 * 4096 * 4096 - 2 * 3072 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    assert plan["model"]["params"] == 4 * layer + 2 * 128256 * 4096 + 4096
    assert plan["model"]["origin"] == "a given configuration"
    page.ask(writing("#config", "[1]"))
    assert "model_type" in page.ask("document.getElementById('config-said').textContent")


@pytest.mark.parametrize(("width", "dark"), [(360, True), (800, False), (1280, True), (3840, False)])
def test_it_is_legible_and_named_at_every_width(page, tmp_path, width, dark):
    """axe-core's rules, and that nothing sticks out; with an error and with plans."""
    page.resize(width)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    page.call("Emulation.setEmulatedMedia", features=[scheme])
    axe = (planner_site.npm_package("axe-core", AXE) / "axe.min.js").read_text("utf-8")
    page.ask(f"{axe}; null")
    wrong = ("wrong.yaml", RECIPE + "precison: bf16\n")
    right = ("right.yaml", (recipes_dir() / "llama3_8b_qlora_24gb.yaml").read_text("utf-8"))
    for name, recipes, on in (
        ("plans", (right, wrong), DEVICES[:2]),
        ("miss", (("miss.yaml", RECIPE),), DEVICES[:1]),
    ):
        show(page, *recipes, on=on)
        page.screenshot(tmp_path / f"planner-{name}-{width}.png")
        found = page.ask(AXE_RUN)
        assert found == []
        assert page.ask(OUTSIDE) == []
        assert [text for text in page.ask(CONTRAST) if text[1] < text[2]] == []


def test_fast_typing_makes_no_queue_of_plans(page):
    """Of the states that were typed while a plan was made, only the newest is planned."""
    text = RECIPE + "adapter: {type: lora}\n"
    show(page, ("tune.yaml", text))
    page.ask("""(() => { const plain = Worker.prototype.postMessage; window.asked = 0;
      Worker.prototype.postMessage = function(asked) {
        if (asked.text.includes('"ask":"plan"')) window.asked += 1;
        plain.call(this, asked);
      };
      window.putBack = () => { Worker.prototype.postMessage = plain; }; })()""")
    try:
        page.ask(f"""(async () => {{
          const area = document.querySelector('textarea');
          for (let batch = 8; batch <= 320; batch += 8) {{
            area.value = {json.dumps(text)} + `global_batch_size: ${{batch}}\\n`;
            area.dispatchEvent(new Event('input'));
            await new Promise(done => setTimeout(done, 45));
          }}
        }})()""")
        until(page, f"{SHOWN}.settings.global_batch_size?.value === 320")
        assert page.ask("window.asked") < 40
    finally:
        page.ask("putBack()")


# --- with a server, as at `plan --browser`

OWN = PageStart("tune.yaml", RECIPE, on=("1xH100-80GB",), sets=("data.max_length=3000",))
UNSAVED = "[...document.querySelectorAll('#files > p')].map(one => one.textContent)"


@pytest.fixture
def own(browser):
    """The page of a server."""
    with serving(OWN, answer, 0) as served:
        browser.open(served)
        until(browser, "document.body.dataset.planned")
        yield browser
        browser.open("about:blank")


def test_a_command_that_reads_another_text_than_the_page_is_said(own):
    assert own.ask(UNSAVED) == []
    settled(own, writing("textarea", RECIPE + "adapter: {type: lora}\n"))
    (said,) = own.ask(UNSAVED)
    assert "tune.yaml" in said


def test_a_value_between_those_of_a_slider_is_shown_there(own):
    shown = "document.querySelector('[data-key=\"data.max_length\"]').parentElement.querySelector('output')"
    assert own.ask(f"{shown}.textContent") == "3000"
    settled(own, writing('[data-key="data.max_length"]', "3"))
    assert own.ask(f"{shown}.textContent") == "1024"


def test_a_damaged_link_is_said(own):
    whole = link([("other.yaml", RECIPE)], on=["1xT4-16GB"])
    bomb = link([("tune.yaml", RECIPE + "#" * (5 << 20))])
    for damaged in (whole[:-8], "#plan=%00", link([("tune.yaml", RECIPE)], on=[]), bomb):
        own.ask(f"location.hash = {damaged!r}")
        until(own, "document.getElementById('said').textContent")
        assert own.ask("document.querySelector('textarea').value") == RECIPE
        settled(own, f"location.hash = {whole!r}")
        assert own.ask("document.getElementById('said').textContent") == ""
        show(own, ("tune.yaml", RECIPE))


def test_no_verdict_is_left_of_before_the_server_ended(own):
    settled(own, writing("textarea", RECIPE + "adapter: {type: lora}\n"))
    assert own.ask(VERDICTS) == ["✓ fits"]
    network = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    own.call("Network.emulateNetworkConditions", offline=True, **network)
    try:
        settled(own, writing("textarea", RECIPE))
        assert own.ask(VERDICTS) == ["✕ error"]
        assert own.ask("document.querySelector('#problems [data-code]').dataset.code") == "no-answer"
    finally:
        own.call("Network.emulateNetworkConditions", offline=False, **network)


def test_the_hub_is_not_asked_for_half_a_name(browser, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts = []

    def listening(question: str) -> str:
        texts.append(json.loads(question).get("text"))
        return answer(question)

    name = "someone/new-model"
    with serving(OWN, listening, 0) as served:
        browser.open(served)
        until(browser, "document.body.dataset.planned")
        texts.clear()
        for end in range(1, len(name) + 1):
            part = RECIPE.replace("meta-llama/Llama-3.1-8B", name[:end])
            browser.ask(f"document.body.dataset.planned = ''; {writing('textarea', part)}; null")
            time.sleep(0.06)
        until(browser, "document.body.dataset.planned")
        browser.open("about:blank")
    assert {text for text in texts if text} == {RECIPE.replace("meta-llama/Llama-3.1-8B", name)}
