"""`plan --search`: the ranking as text and JSON, and what is said when nothing fits."""

from __future__ import annotations

import json
import re

import pytest
from factories import BASE

from launcher.cli import main
from launcher.inputs.planning_facts import gather
from launcher.machine.hardware import Processor
from launcher.machine.probe import host_memory_bytes
from launcher.recipe.loading import load_recipe
from launcher.report.values import duration

FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "") + "global_batch_size: 32\n"
OPEN = BASE.replace("llama-7b}", "llama-7b, quantization: auto}") + (
    "global_batch_size: 64\nsharding: {offload_optimizer: auto, offload_param: auto}\n"
)
ROW_KEYS = {"rank", "settings", "batch", "memory", "time", "relative_speed", "fits", "fits_surely", "trade"}


def called(capsys, text, tmp_path, *argv):
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    code = main(["plan", str(path), *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_ranking_as_json(capsys, tmp_path):
    code, out, _ = called(capsys, OPEN, tmp_path, "--search", "--on", "2xA10-24GB", "--json")
    data = json.loads(out)
    assert code == 0
    rows = data["search"]
    assert all(row.keys() == ROW_KEYS for row in rows)
    fitting = [row for row in rows if row["fits"]]
    assert [row["rank"] for row in fitting] == list(range(1, len(fitting) + 1))
    assert all(row["rank"] is None for row in rows[len(fitting) :])
    assert fitting[0]["relative_speed"] == 1.0
    speeds = [(row["fits_surely"], row["relative_speed"]) for row in fitting]
    assert speeds == sorted(speeds, reverse=True)
    assert data["compared"]["configurations"] == sum(data["compared"][k] for k in ("estimated", "implied"))
    first = rows[0]
    assert first["batch"] == data["batch"]
    assert first["memory"] == data["memory"]
    assert first["time"] == data["time"]
    for dotted in ("sharding.engine", "sharding.zero_stage", "trainer.activation_checkpointing"):
        assert first["settings"][dotted] == data["settings"][dotted]["value"]
    assert {"what", "reason"} == data["left_out"][0].keys()


def test_the_plain_plan_is_the_first_of_the_ranking(capsys, tmp_path):
    plain = json.loads(called(capsys, OPEN, tmp_path, "--on", "2xA10-24GB", "--json")[1])
    ranked = json.loads(called(capsys, OPEN, tmp_path, "--search", "--on", "2xA10-24GB", "--json")[1])
    assert "search" not in plain
    assert {key: ranked[key] for key in plain} == plain


def test_the_time_is_one_estimate_with_its_basis(capsys, tmp_path):
    out = called(capsys, OPEN, tmp_path, "--on", "2xA10-24GB", "--json")[1]
    time = json.loads(out)["time"]
    low, high = time["seconds_per_step"]
    assert 0 < low < time["likely"]["seconds_per_step"] < high
    assert time["total"] == pytest.approx([10 * low, 10 * high], rel=0.02)
    text = called(capsys, OPEN, tmp_path, "--on", "2xA10-24GB")[1]
    line = next(line for line in text.splitlines() if line.startswith("time: "))
    assert all(duration(time["likely"][key]) in line for key in ("seconds_per_step", "total"))
    assert time["likely"]["basis"] in " ".join(text.split())


@pytest.mark.parametrize("on", ["2x24GB", "2xcpu"])
def test_no_time_without_published_figures(capsys, tmp_path, monkeypatch, on):
    monkeypatch.setattr("launcher.inputs.planning_facts.probe_processor", lambda: None)
    small = OPEN.replace("huggyllama/llama-7b", "facebook/opt-125m")
    code, out, _ = called(capsys, small, tmp_path, "--search", "--on", on, "--json")
    assert code == 0
    assert json.loads(out)["time"] == {"seconds_per_step": None, "total": None}
    text = called(capsys, small, tmp_path, "--search", "--on", on)[1]
    assert "ranked by a stand-in's, without seconds" in text
    assert "s/step" not in text
    assert "not estimated" in called(capsys, small, tmp_path, "--on", on)[1]


def test_a_processor_whose_units_are_known_is_timed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "launcher.inputs.planning_facts.probe_processor", lambda: Processor(1e11, 4e11, "made up")
    )
    small = OPEN.replace("huggyllama/llama-7b", "facebook/opt-125m")
    time = json.loads(called(capsys, small, tmp_path, "--on", "2xcpu", "--json")[1])["time"]
    likely = time["likely"]["seconds_per_step"]
    assert likely > 60
    assert f"{duration(likely)} each" in called(capsys, small, tmp_path, "--on", "2xcpu")[1]


def test_the_ranking_as_text(capsys, tmp_path):
    code, out, _ = called(capsys, OPEN, tmp_path, "--search", "--on", "2xT4-16GB")
    assert code == 0
    lines = out.splitlines()
    match = re.match(r"search: (\d+) configurations at one global batch of 64 samples", lines[0])
    assert match, lines[0]
    assert int(match[1]) >= 200
    head = next(i for i, line in enumerate(lines) if line.startswith("  rank"))
    assert re.match(r"  1 +\S.* \d+ x \d+ +\d+\.\d+ to \d+\.\d+ +1 +[\d.]+", lines[head + 1])
    assert max(map(len, lines[head : head + 25])) <= 120
    assert any(line.startswith("does not fit: ") for line in lines)
    assert "left out" in lines
    assert sum("int8 base under ZeRO-3" in line for line in lines) == 1


def test_a_miss_keeps_every_key_and_says_what_would_fit(capsys, tmp_path):
    code, out, _ = called(capsys, FULL, tmp_path, "--search", "--on", "1xT4-16GB", "--json")
    data = json.loads(out)
    assert code == 3
    whole = json.loads(called(capsys, FULL, tmp_path, "--on", "8xH100-80GB", "--json")[1])
    assert data.keys() >= whole.keys()
    assert data["memory"]["fits"] is False
    assert {(row["rank"], row["fits"]) for row in data["search"]} == {(None, False)}
    assert data["search"][0]["memory"] == data["memory"]
    (error,) = data["errors"]
    assert error["code"] == "does-not-fit"
    assert data["would_fit"]
    for entry in data["would_fit"]:
        assert entry.keys() == {"change", "settings", "batch", "memory"}
        assert entry["memory"]["fits"] is True
        assert f"{entry['memory']['needed'] / 2**30:.1f} of" in error["hint"]


def test_a_miss_as_text(capsys, tmp_path):
    code, out, err = called(capsys, FULL, tmp_path, "--search", "--on", "1xT4-16GB")
    assert code == 3
    assert "nothing fits" in out
    assert out.index("it would fit\n  with ") < out.index("\n  on 1x")
    changes = json.loads(called(capsys, FULL, tmp_path, "--on", "1xT4-16GB", "--json")[1])["would_fit"]
    first, title, *listed = err.splitlines()
    assert "GiB to spare, of 15.00 GiB" in first
    assert title == "  it would fit"
    assert len(listed) == len(changes) > 1
    assert err.count("error: ") == 1, "one clear problem"


def test_run_and_plan_choose_the_same(capsys, tmp_path):
    plan = json.loads(called(capsys, OPEN, tmp_path, "--on", "2xA10-24GB", "--json")[1])
    target = tmp_path / "out"
    arguments = ["run", str(tmp_path / "r.yaml"), "--dry-run", "--on", "2xA10-24GB"]
    assert main([*arguments, "--output-dir", str(target)]) == 0
    capsys.readouterr()
    written = json.loads((target / "plan.json").read_text(encoding="utf-8"))
    assert (written["settings"], written["batch"]) == (plan["settings"], plan["batch"])


def test_the_hosts_memory_is_known_for_this_machine_alone(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(OPEN, encoding="utf-8")
    loaded = load_recipe(path)
    assert gather(loaded, None, allow_network=False)[1].host_bytes == host_memory_bytes()
    assert gather(loaded, "8xA100-80GB", allow_network=False)[1].host_bytes is None


def test_explain_and_search_are_two_views(capsys, tmp_path):
    code, _, err = called(capsys, OPEN, tmp_path, "--search", "--explain", "trainer")
    assert code == 2
    assert "not allowed with" in err
