"""`plan --trace` and models of unknown families; the tracing process's answers are canned."""

from __future__ import annotations

import json

import factories
import pytest

from launcher.cli import main
from launcher.errors import MachineError, Problem
from launcher.models.memory_trace import Untraceable

GIB = 2**30
BASE = factories.BASE
FULL_GRADIENTS = 100e6


def moment(segment, activations, gradients=0.0):
    return {
        "segment": segment,
        "gradients": [gradients, 0.0],
        "activations": activations,
        "logits": [0.0, 0.5 * GIB],
        "temporary": [0.0, 0.0],
    }


def answer(per_sample=1.0):
    return {
        "moments": [
            moment("step/start", [0.0, 0.0], FULL_GRADIENTS),
            moment("forward/head", [0.0, per_sample * GIB]),
        ],
        "states": {"weights": 13e9, "gradients": FULL_GRADIENTS, "optimizer": 200e6},
        "depths": [32],
        "replays": [{"batch": batch, "sizes": [3 * 2**20], "events": [0]} for batch in (1, 2)],
        "versions": {"torch": "2.99", "transformers": "5.99"},
    }


STABLELM = {
    "sizes": {
        "hidden": 64, "inner": 128, "layers": 8, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 1000,
        "positions": 4096,
    },
    "embedded": {"path": "model.embed_tokens", "rows": 1000, "width": 64},
    "params": 64000 + 8 * (12288 + 24576 + 128) + 64,
    "linears": [
        {"path": "model.layers.{}.self_attn.q_proj", "in": 64, "out": 64, "bias": False, "count": 8},
        {"path": "model.layers.{}.self_attn.k_proj", "in": 64, "out": 32, "bias": False, "count": 8},
        {"path": "model.layers.{}.self_attn.v_proj", "in": 64, "out": 32, "bias": False, "count": 8},
        {"path": "model.layers.{}.self_attn.o_proj", "in": 64, "out": 64, "bias": False, "count": 8},
        {"path": "model.layers.{}.mlp.gate_proj", "in": 64, "out": 128, "bias": False, "count": 8},
        {"path": "model.layers.{}.mlp.up_proj", "in": 64, "out": 128, "bias": False, "count": 8},
        {"path": "model.layers.{}.mlp.down_proj", "in": 128, "out": 64, "bias": False, "count": 8},
    ],
    "layer_extra": 128,
    "parameters": [
        {"shape": [1000, 64], "embedded": True, "count": 1},
        {"shape": [64, 64], "embedded": False, "count": 16},
        {"shape": [32, 64], "embedded": False, "count": 16},
        {"shape": [128, 64], "embedded": False, "count": 16},
        {"shape": [64, 128], "embedded": False, "count": 8},
        {"shape": [64], "embedded": False, "count": 17},
    ],
    "experts": [],
    "model_extra": 64,
    "head": {"name": "lm_head", "in": 64, "out": 1000, "bias": False, "tied": True, "own": 0},
    "norms": 2,
    "rms_norm": True,
    "vision": False,
    "has_sdpa": True,
}  # fmt: skip


@pytest.fixture
def child(monkeypatch):
    """Answers of the tracing process, by what it is asked; what it was asked is kept."""
    asked, answers = [], {"trace": answer(), "model": STABLELM}

    def ask(request, _python, _say):
        asked.append(json.loads(json.dumps(request)))
        found = answers[request["ask"]]
        if isinstance(found, Exception):
            raise found
        return found

    for module in ("inputs.model_trace", "models.memory_trace"):
        monkeypatch.setattr(f"launcher.{module}.ask_child", ask)
    for module in ("model_trace", "model_spec"):
        monkeypatch.setattr(f"launcher.inputs.{module}.require_modules", lambda _names: None)
    ask.asked, ask.answers = asked, answers
    return ask


def plan(capsys, tmp_path, text, *words):
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    code = main(["plan", str(path), "--on", "1xA100-80GB", *words])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if "--json" in words else captured.out, captured.err


def test_a_traced_plan_uses_and_shows_the_trace(child, capsys, tmp_path):
    code, data, _ = plan(capsys, tmp_path, BASE, "--trace", "--json")
    assert code == 0
    memory, batch = data["memory"], data["batch"]["micro"]
    assert memory["method"] == "trace"
    assert memory["components"]["activations"] == batch * GIB
    assert data["trace"]["traced"]["components"] == memory["components"]
    assert data["trace"]["closed_form"]["components"] != memory["components"]
    assert data["trace"]["versions"] == {"torch": "2.99", "transformers": "5.99"}
    request = child.asked[0]
    assert request["batches"][0] < request["batches"][1]
    assert data["batch"]["micro"] in request["batches"]
    assert (request["on_cpu"], request["capability"]) == (False, [8, 0])
    assert request["plan"]["settings"]["adapter.r"]["value"] == 8


GAP = {"sizes": [12 * 2**20, 12 * 2**20, 24 * 2**20], "events": [0, 1, ~0, ~1, 2]}
"""The last fits where the first two were only if those are neighbours."""


@pytest.mark.parametrize(
    ("env", "beyond"),
    [
        ({}, 16),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, 24),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, 24),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, 16),
    ],
    ids=str,
)
def test_the_allocator_is_that_of_the_workers_environment(child, capsys, tmp_path, env, beyond):
    child.answers["trace"]["replays"] = [{"batch": batch, **GAP} for batch in (1, 2)]
    sets = [word for name, value in env.items() for word in ("--set", f"launch.env.{name}={value}")]
    _, data, _ = plan(capsys, tmp_path, BASE, "--trace", "--json", *sets)
    assert data["memory"]["components"]["temporary"] == beyond * 2**20


def test_the_text_stands_the_two_side_by_side(child, capsys, tmp_path):
    _, out, _ = plan(capsys, tmp_path, BASE, "--trace")
    _, _, table = out.partition("trace of the real model (torch 2.99, transformers 5.99)")
    assert "closed form" in table
    rows = {line.split()[0]: line for line in table.splitlines()[2:] if line.strip()}
    assert rows.keys() >= {"weights", "activations", "logits", "temporary", "total"}
    assert rows["total"].rstrip().endswith("%")


def test_a_plan_that_no_longer_fits_is_decided_again(child, capsys, tmp_path):
    _, before, _ = plan(capsys, tmp_path, BASE, "--json")
    child.answers["trace"] = answer(per_sample=30.0)
    code, data, _ = plan(capsys, tmp_path, BASE, "--trace", "--json")
    changed = ("micro", "accumulation")
    settings = data["settings"]["trainer.activation_checkpointing"]["value"]
    was = before["settings"]["trainer.activation_checkpointing"]["value"]
    assert {n: data["batch"][n] for n in changed} != {
        n: before["batch"][n] for n in changed
    } or settings != was
    assert code == 0
    assert data["memory"]["method"] == "trace"
    assert data["memory"]["fits"]
    assert len(child.asked) > 1


def test_a_plan_that_cannot_fit_ends_with_its_code(child, capsys, tmp_path):
    child.answers["trace"] = answer(per_sample=500.0)
    text = BASE + "global_batch_size: 1\n"
    code, data, _ = plan(
        capsys, tmp_path, text, "--trace", "--json", "--set", "trainer.activation_checkpointing=true"
    )
    assert code == 3
    assert data["memory"]["method"] == "trace"
    assert data["errors"][0]["code"] == "does-not-fit"


def test_what_cannot_be_traced_is_a_warning(child, capsys, tmp_path):
    child.answers["trace"] = Untraceable("data dependent control flow")
    code, data, _ = plan(capsys, tmp_path, BASE, "--trace", "--json")
    assert code == 0
    assert data["memory"]["method"] == "closed-form"
    assert "trace" not in data
    assert any("data dependent control flow" in warning for warning in data["warnings"])


DPO = BASE.replace("{path: data/train.jsonl}", "{path: data/train.jsonl, format: preference}")
UNTRACED = {
    "dpo": ("task: dpo\n" + DPO, (), "trl"),
    "liger": (BASE, ("trainer.use_liger_kernel=true",), "Liger"),
    "device-map": (BASE, ("model.device_map=auto",), "device_map"),
    "continued": (BASE.replace("{type: lora, r: 8}", "{path: runs/old}"), (), "from files"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNTRACED)
def test_a_job_that_cannot_be_traced_gets_one_warning_that_says_why(child, capsys, tmp_path, case):
    text, changes, reason = UNTRACED[case]
    old = tmp_path / "runs" / "old"
    old.mkdir(parents=True)
    (old / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    sets = [word for change in changes for word in ("--set", change)]
    on = ("--on", "2xA100-80GB", "--json", *sets)
    code, before, err = plan(capsys, tmp_path, text, *on)
    assert code == 0, err
    code, data, _ = plan(capsys, tmp_path, text, *on, "--trace")
    assert code == 0
    added = [warning for warning in data["warnings"] if warning not in before["warnings"]]
    assert len(added) == 1
    assert "could not be traced" in added[0]
    assert reason in added[0]
    assert (data["memory"]["method"], child.asked) == ("closed-form", [])


def test_plans_that_change_with_each_trace_end_with_a_warning(child, capsys, tmp_path, monkeypatch):
    lengths = iter(range(100))
    monkeypatch.setattr(
        "launcher.inputs.model_trace.choices_of", lambda *_: {"sequence_length": next(lengths)}
    )
    code, data, _ = plan(capsys, tmp_path, BASE, "--trace", "--json")
    assert code == 0
    assert [w for w in data["warnings"] if "each of 4 traces led to another plan" in w]
    assert len(child.asked) == 4


def test_missing_packages_end_with_four(child, capsys, tmp_path, monkeypatch):
    def missing(_names):
        raise MachineError(
            Problem("package-missing", "not installed: torch", hint="pip install 'effilaunch[train]'")
        )

    monkeypatch.setattr("launcher.inputs.model_trace.require_modules", missing)
    code, _, err = plan(capsys, tmp_path, BASE, "--trace")
    assert code == 4
    assert "effilaunch[train]" in err


UNKNOWN = factories.BASE.replace(
    "{name_or_path: huggyllama/llama-7b}", "{config: {model_type: stablelm}, tokenizer: some/tokenizer}"
)


def test_an_unknown_family_is_read_from_its_class_and_traced(child, capsys, tmp_path):
    code, data, err = plan(capsys, tmp_path, UNKNOWN, "--json")
    assert code == 0, err
    assert data["model"]["params"] == STABLELM["params"]
    assert data["memory"]["method"] == "trace"
    assert any("stablelm is not known here" in warning for warning in data["warnings"])
    assert [request["ask"] for request in child.asked][:2] == ["model", "trace"]


def test_an_unknown_family_that_cannot_be_traced_is_warned_of_once(child, capsys, tmp_path):
    child.answers["trace"] = Untraceable("data dependent control flow")
    code, data, _ = plan(capsys, tmp_path, UNKNOWN, "--trace", "--json")
    assert code == 0
    assert sum("data dependent" in warning for warning in data["warnings"]) == 1


def test_validate_and_estimate_start_no_child_for_an_unknown_family(child, capsys, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(UNKNOWN + "hardware: {num_nodes: 1, devices_per_node: 1, device: A100-80GB}\n")
    assert main(["validate", str(path)]) == 0
    assert "model_type 'stablelm', which is not known in closed form" in capsys.readouterr().out
    (tmp_path / "config.json").write_text('{"model_type": "stablelm"}')
    for target in (path, tmp_path):
        assert main(["estimate", str(target), "--on", "1xA100-80GB"]) == 2
        assert "plan RECIPE --trace" in capsys.readouterr().err
    assert child.asked == []


def test_a_type_that_transformers_does_not_know_is_refused(child, capsys, tmp_path):
    child.answers["model"] = Untraceable("Unrecognized model identifier: stablelm")
    code, _, err = plan(capsys, tmp_path, UNKNOWN)
    assert code == 2
    assert "unsupported model_type 'stablelm'" in err
    assert "Unrecognized model identifier" in err


def test_without_the_training_packages_it_is_refused_with_the_way_out(child, capsys, tmp_path, monkeypatch):
    def missing(_names):
        raise MachineError(Problem("package-missing", "not installed: torch", hint="pip"))

    monkeypatch.setattr("launcher.inputs.model_spec.require_modules", missing)
    code, _, err = plan(capsys, tmp_path, UNKNOWN)
    assert code == 2
    assert "not installed: torch" in err
