"""Reports as pages: every state of a run, missing and hostile files, nothing that breaks out or is loaded."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reports import GIB, SAMPLE, data, metrics, result, write_finished, write_run

from launcher.errors import RecipeError
from launcher.execute.record import RunRecord, keep_end, read_run, total_seconds, without_secrets
from launcher.report import compare
from launcher.report.html.elements import code
from launcher.report.memory_sections import measured_parts, memory_section
from launcher.report.run_pages import compare_page, run_page
from launcher.report.run_sections import recent_loss, run_rows, steps_done
from launcher.report.sections import Figure, line
from launcher.report.values import apart, duration, figure, number, size

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</script></style></pre>\"'><img src=x onerror=alert(1)><!-- & \x00\x1b[31m\x9b\r\ud800\u202e ]]>"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunRecord:
    return read_run(write_finished(tmp_path_factory.mktemp("runs") / "a"))


def parsed(page: str) -> ET.Element:
    """Well-formed, and UTF-8; ids are unique and every link of the page finds one."""
    page.encode("utf-8")
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    ids = [node.get("id") for node in root.iter() if node.get("id")]
    assert len(set(ids)) == len(ids)
    assert {a.get("href") for a in root.iter("a")} <= {f"#{name}" for name in ids}
    return root


def text(page: str) -> str:
    return " ".join("".join(parsed(page).itertext()).split())


def section(page: str, name: str) -> str:
    whole = parsed(page.replace("<wbr/>", ""))  # a place to break an identifier is no space
    found = next(node for node in whole.iter("section") if node.get("id") == name)
    return " ".join(" ".join(found.itertext()).split())


def test_an_identifier_is_broken_behind_its_separators():
    broken = code("trainer.learning_rate runs/a-1.5/x").split("<wbr/>")
    assert [re.sub("<.*?>", "", part) for part in broken] == [
        "trainer.",
        "learning_",
        "rate runs/",
        "a-1.5/",
        "x",
    ]
    assert code("<b>") == "<code>&lt;b&gt;</code>"


class Tags(HTMLParser):
    """The elements that a browser would create."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def assert_harmless(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert not {name for name, _ in tags.found} & {
        "script",
        "img",
        "iframe",
        "link",
        "object",
        "base",
        "form",
    }
    for _, attributes in tags.found:
        assert not any(name.startswith("on") for name in attributes)
    assert set(re.findall(r"https?://[^\"' ]*", page)) <= {"http://www.w3.org/2000/svg"}
    assert "url(" not in page
    assert not set(page) & set("\x00\x1b\x9b\r\u202e")


def test_gradients_are_compared_where_they_were_measured():
    parts = {"weights": GIB, "gradients": 0, "activations": GIB}
    measured = {
        "measured": 2 * GIB,
        "components": {
            "weights": {"predicted": GIB, "measured": GIB},
            "gradients": {"predicted": 2**24, "measured": 2**24},
        },
    }
    plan, result = {"memory": {"components": parts}}, {"memory": measured}
    assert measured_parts(plan, result) == {"weights": GIB, "activations and the rest": GIB}
    (beside,) = [block for block in memory_section(plan, result).blocks if hasattr(block, "blocks")]
    rows = [row for table in beside.blocks for row in table.rows if row[0] == "gradients"]
    assert [[cell.value for cell in row[1:3]] for row in rows] == [[2**24, 2**24]]


def test_the_page_of_a_finished_run(finished):
    page = run_page(finished, "made now")
    assert_harmless(page)
    said = text(page)
    assert "✓ finished" in said
    for row in run_rows(finished):
        assert " ".join(f"{row.name} {line(row.parts)}".split()) in section(page, "result")
        assert not row.is_main or " ".join(f"{line(row.value)} {line(row.note)}".split()) in said
    mean, count = recent_loss(finished)
    rows = [row["loss"] for row in finished.metrics if row.get("loss") is not None]
    assert (count, mean) == (len(rows) // 5, pytest.approx(sum(rows[-count:]) / count))
    loss, *_ = run_rows(finished)
    assert [part.value for part in loss.parts if isinstance(part, Figure)] == [0.52, 1.4, mean, count]
    few = replace(finished, metrics=finished.metrics[:3])
    assert recent_loss(few)[1] == 1, "too few to average"
    assert [part.value for part in run_rows(few)[0].parts if isinstance(part, Figure)] == [0.52, 1.4]
    assert "All 1" in said or re.search(r"All \d+ settings", said)
    assert [node.get("aria-label") for node in parsed(page).iter(f"{SVG}svg") if node.get("role")] == [
        "Loss", "Learning rate", "Tokens per second", "Gradient norm",
        "Memory predicted by component, and measured",
    ]  # fmt: skip
    memory = section(page, "memory")
    assert "activations and the rest" in memory
    states = GIB + 2**20 + 2**19  # no gradients: at the peak of this plan they are not there yet
    assert size(int(3.8 * GIB) - states) in memory
    assert "rows read" in section(page, "data")
    assert "made now" in said
    assert "trainer.learning_rate" in section(page, "decisions")


def test_the_page_says_how_many_samples_are_held_out(finished):
    page = run_page(replace(finished, data={**data(), "held_out": 9}), "")
    assert re.search(r"\b81\b.*\b9\b", section(page, "data").partition("Tokens of a sample")[0])
    assert "held out" not in section(run_page(finished, ""), "data")


def test_target_pieces_are_marked_by_more_than_colour(finished):
    page = run_page(finished, "")
    marks = [node for node in parsed(page).iter("mark")]
    assert [node.text for node in marks] == ["It is_4."] * 3
    assert "mark{background:var(--target);color:inherit;border-bottom:2px" in page
    assert 'mark::before{content:" [target: "}' in page, "and a screen reader is told"


def test_all_files_except_the_plan_may_be_missing(tmp_path, finished):
    record = read_run(write_run(tmp_path / "r"))
    assert record.state == "not started"
    page = run_page(record, "")
    assert "○ not started" in text(page)
    ids = [node.get("id") for node in parsed(page).iter("section")]
    assert ids == ["memory", "decisions", "fixes", "warnings", "environment", "command"]
    bare = RunRecord("x", "failed", {"recipe": "x.yaml"})
    assert "No step was logged" in text(run_page(bare, ""))
    assert_harmless(compare_page([finished, bare], ["a", "b"], ""))


@pytest.mark.parametrize("name", ["result", "metrics", "data", "environment", "recipe", "logs/ended"])
def test_each_file_may_be_missing_or_broken(tmp_path, name):
    run = write_finished(tmp_path / "r")
    keep_end(run, ["x"], interrupted=False)
    (run / "COMPLETED").unlink()
    (path,) = run.glob(f"{name}.*")
    for content in (b"", b"{\xff\x00", b"[" * 5000, b'{"a": NaN}', b"null", b'"text"', b'{"problems": 3}'):
        path.write_bytes(content)
        parsed(run_page(read_run(run), ""))
    path.unlink()
    parsed(run_page(read_run(run), ""))
    path.mkdir()
    parsed(run_page(read_run(run), ""))


def test_hostile_text_is_escaped(tmp_path, finished):
    plan = json.loads(json.dumps(finished.plan).replace("tiny.yaml", "</title><script>.yaml"))
    plan["model"]["name"] = HOSTILE
    plan["settings"][HOSTILE] = {"value": HOSTILE, "source": HOSTILE, "by": HOSTILE, "reason": HOSTILE}
    plan["fixes"] = [{"id": HOSTILE, "title": HOSTILE, "reason": HOSTILE, "changed": {HOSTILE: HOSTILE}}]
    plan["warnings"] = [HOSTILE]
    plan["env"] = {HOSTILE: HOSTILE}
    plan["command"] = [HOSTILE]
    plan["adapted"] = {"adaptations": [{"step": 3, "reason": HOSTILE, "changed": {HOSTILE: [1, HOSTILE]}}]}
    sample = {**SAMPLE, "file": HOSTILE, "pieces": [[HOSTILE, False], [HOSTILE, True]]}
    names = ("id", "title", "cause", "mend", "file", "type", "message")
    finding = {name: HOSTILE for name in names} | {"ranks": [0], "first_rank": 0, "line": 1, "frames": []}
    finding["error"] = {"type": HOSTILE, "message": HOSTILE, "frames": []}
    finding["recipe"] = [{name: HOSTILE for name in ("file", "path", "old", "new")} | {"line": 1}]
    record = replace(
        finished, name=HOSTILE, state="failed", plan=plan, recipe=HOSTILE, run_dir=HOSTILE,
        data=data([sample]), environment={HOSTILE: HOSTILE, "bound": {"command": [HOSTILE]}},
        problems=[HOSTILE],
        restarts=[{"step": 2, "cause": HOSTILE}], diagnosis={"findings": [finding], "unknown": [finding]},
        checkpoints=[HOSTILE],
    )  # fmt: skip
    page = run_page(record, HOSTILE)
    assert_harmless(page)
    shown = HOSTILE.partition("\x00")[0] + "\\x00\ufffd[31m\\x9b\\r\ufffd\\u202e ]]>"
    assert text(page).count(shown) > 25
    assert_harmless(compare_page([record, finished], [HOSTILE, "b"], HOSTILE))


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([1e308, -1e308, 5e-324, 10**400, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def paths(value, before=()):
    """The place of everything inside an object."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*before, key)
        yield from paths(item, (*before, key))


@settings(max_examples=40, deadline=None)
@given(choose=st.data())
def test_any_value_anywhere_gives_a_page(finished, choose):
    files = {name: json.loads(json.dumps(getattr(finished, name))) for name in ("plan", "result", "data")}
    files["plan"]["settings"] = dict(list(files["plan"]["settings"].items())[:4])
    name = choose.draw(st.sampled_from(sorted(files)))
    place = choose.draw(st.sampled_from(sorted(paths(files[name]), key=str)))
    holder = files[name]
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = choose.draw(_ANY)
    state = choose.draw(st.sampled_from(["finished", "failed", "stopped", "running", "planned"]))
    record = replace(finished, **files, state=state, metrics=finished.metrics[:3])
    assert_harmless(run_page(record, ""))
    parsed(compare_page([record, finished], ["a", "b"], ""))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from(["step", "loss", "eval_loss", "grad_norm"]), _ANY), max_size=4
    )
)
def test_any_row_of_the_metrics_gives_a_page(finished, rows):
    parsed(run_page(replace(finished, metrics=[{"step": 1, **row} for row in rows]), ""))


def test_losses_that_are_not_finite_are_gaps(finished):
    rows = metrics(20)
    for row in rows[5:9]:
        if "loss" in row:
            row["loss"] = None
    page = run_page(replace(finished, metrics=rows), "")
    loss = next(node for node in parsed(page).iter(f"{SVG}svg") if node.get("aria-label") == "Loss")
    assert "4 values not finite" in loss.find(f"{SVG}desc").text
    (path,) = [p for p in loss.iter(f"{SVG}path") if p.get("class") == "line c0 d0"]
    assert path.get("d").count("M") == 2
    every = [{**row, "loss": math.nan, "eval_loss": math.inf} for row in rows]
    assert "no finite value was recorded" in text(run_page(replace(finished, metrics=every), ""))


def test_a_long_run_and_long_samples_stay_small(finished):
    long = {**SAMPLE, "pieces": [["x" * 100_000, False], ["y" * 100_000, True]]}
    record = replace(finished, metrics=metrics(20_000), data=data([long] * 50), recipe="# x\n" * 100_000)
    page = run_page(record, "")
    assert len(page) < 500_000
    assert len(list(parsed(page).iter("pre"))) < 10
    rows = next(
        t for t in parsed(page).iter("table") if "Logged steps" in "".join(t.find("caption").itertext())
    )
    assert 100 < len(rows.findall("tbody/tr")) <= 200
    assert rows.findall("tbody/tr")[-1].find("td").text
    assert "its first 3,000 characters" in text(page)


def test_events_are_drawn_at_their_steps(finished):
    adapted = {"adaptations": [{"step": 20, "reason": "micro-batch 2 -> 1", "changed": {"a": [2, 1]}}]}
    restarts = [{"time": 1.0, "step": 10, "cause": "rank 1 was lost", "resumed_from": 8, "waited_s": 10.0}]
    page = run_page(replace(finished, plan={**finished.plan, "adapted": adapted}, restarts=restarts), "")
    assert "rank 1 was lost" in section(page, "ending")
    assert "a: 2 → 1" in section(page, "ending")
    loss = next(node for node in parsed(page).iter(f"{SVG}svg") if node.get("aria-label") == "Loss")
    titles = [node.text for node in loss.iter(f"{SVG}title")]
    assert {"restart at step 10", "adapted at step 20"} <= set(titles)
    assert parsed(page).find(".//section").get("id") == "ending", "what happened stands first"


def test_the_time_of_a_resumed_run_covers_all_starts(finished):
    """Results of older versions do not have it: the time of the last start, with its first step."""
    assert "since step" not in text(run_page(finished, ""))
    resumed = {**finished.result, "resumed_at": 1_010, "seconds": 95.0}
    known = replace(finished, result={**resumed, "total_seconds": 7_295.0})
    unknown = replace(finished, result=resumed)
    assert total_seconds(known.result) == 7_295.0
    assert total_seconds(unknown.result) is None
    assert total_seconds(finished.result) == 95.0
    whole, last = duration(7_295.0), f"{duration(95.0)} since step 1,010"
    for page in (run_page(known, ""), compare_page([known, finished], ["a", "b"], "")):
        assert whole in text(page)
        assert last not in text(page)
    for page in (run_page(unknown, ""), compare_page([unknown, finished], ["a", "b"], "")):
        assert last in text(page)


def test_states_of_a_run_directory(tmp_path):
    run = write_run(tmp_path / "r", metrics=metrics(3))
    assert read_run(run).state == "failed"
    (run / "stopped.json").write_text('{"signal": "SIGTERM", "reason": "SIGTERM: all stopped"}', "utf-8")
    assert read_run(run).state == "stopped"
    assert "SIGTERM: all stopped. There is no complete checkpoint." in section(
        run_page(read_run(run), ""), "ending"
    )
    (run / "COMPLETED").touch()
    assert read_run(run).state == "finished"
    empty = write_run(tmp_path / "e")
    assert steps_done(read_run(empty)) == 0


def test_a_run_with_a_locked_directory_is_running(tmp_path):
    import subprocess
    import sys

    run = write_run(tmp_path / "r", metrics=metrics(3))
    script = "import sys; from pathlib import Path; from launcher.execute.run_dir import locked\n"
    script += "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        record = read_run(run)
        other.stdin.close()
    assert record.state == "running"
    assert "The run is at step 3" in section(run_page(record, ""), "ending")
    assert read_run(run).state == "failed"


def test_other_folders_are_refused_with_their_kind(tmp_path):
    def refused(folder: Path) -> str:
        with pytest.raises(RecipeError) as caught:
            read_run(folder)
        return str(caught.value.problems[0])

    assert "no such folder" in refused(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "no plan.json" in refused(tmp_path / "empty")
    write_run(tmp_path / "sweep" / "0")
    assert "contains 1 of them" in refused(tmp_path / "sweep")
    (tmp_path / "empty" / "ladder.json").touch()
    assert "ladder.html" in refused(tmp_path / "empty")


def test_runs_are_compared(finished):
    other = json.loads(json.dumps(finished.plan))
    other["settings"]["trainer.learning_rate"]["value"] = 3e-4
    slower = replace(
        finished, plan=other, result=result(tokens_per_second=111.0), metrics=metrics(level=1.3)
    )  # fmt: skip
    page = compare_page([finished, slower], ["a", "b"], "")
    assert_harmless(page)
    assert compare.differing([finished, slower]) == {"trainer.learning_rate": [1e-3, 3e-4]}
    assert "trainer.learning_rate 0.001 0.0003" in section(page, "settings")
    assert "speed 228 tokens/s (padding not counted) 111 tokens/s" in section(page, "results")
    assert "held-out loss 0.57 0.57" in section(page, "results")
    loss = next(node for node in parsed(page).iter(f"{SVG}svg") if node.get("aria-label") == "Loss")
    drawn = {p.get("class") for p in loss.iter(f"{SVG}path")}
    assert drawn == {"line c0 d0", "line c1 d1"}, "told apart by colour and by dashes"
    assert "weights optimizer activations" in section(page, "memory"), "the colours have names"
    assert "None of the" in section(compare_page([finished, finished], ["a", "b"], ""), "settings")


def test_secrets_are_removed_from_every_text(finished):
    secret = "hf_secret&secret"
    plan = {**finished.plan, "env": {"HF_TOKEN": secret}, "command": [f"--token={secret}"]}
    sample = {**SAMPLE, "pieces": [[f"it is {secret}", True]]}
    record = replace(finished, plan=plan, data=data([sample]), environment={}, recipe=f"# {secret}")
    clean = without_secrets(record, lambda text: text.replace(secret, "<secret>"))
    page = run_page(clean, "")
    assert "hf_secret" not in page
    assert text(page).count("<secret>") == 4
    assert {type(getattr(clean, each.name)) for each in fields(clean)} <= {str, int, dict, list}


def test_formatted_numbers():
    assert [number(v) for v in (1, True, "1", math.nan, 10**400, None)] == [1.0, None, None, None, None, None]
    assert [duration(s) for s in (0.5, 39, 125, 3600, 12_000, -1)] == [
        "0.5 s", "39 s", "2 min 5 s", "1 h", "3 h 20 min", "–",  # noqa: RUF001 no value
    ]  # fmt: skip
    assert [figure(v) for v in (0.00012345, 12.3456, 123456)] == ["0.0001234", "12.35", "123,456"]
    assert apart(100, 103) == "+3.0\N{NO-BREAK SPACE}%"
    assert size(1000) == "1000 B"


def test_images_of_samples_are_shown_small_and_nothing_else_is_loaded(finished):
    uri = "data:image/jpeg;base64,/9j/4AAQ="
    image = {"name": "/far/away/0.png", "size": [40, 48], "tokens": [5, 8], "thumbnail": uri}
    hostile = [
        {**image, "thumbnail": source} for source in ("http://x/a.jpg", "javascript:1", uri + '" onload="1')
    ]
    sample = {**SAMPLE, "images": [image, *hostile, {**image, "name": HOSTILE}], "more_images": 2}
    page = run_page(replace(finished, data=data([sample])), "")
    images = list(parsed(page).iter("img"))
    assert [node.get("src") for node in images] == [uri, uri]
    assert all({*node.keys()} == {"src", "alt"} for node in images)
    assert "0.png, 40 x 48 pixels, tokens 5 to 8" in section(page, "data")
    assert "and 2 more" in section(page, "data")
    assert "img-src data:" in page
    assert not list(parsed(run_page(finished, "")).iter("img"))
