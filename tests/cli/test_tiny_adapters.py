"""`--tiny` of recipes whose adapter names layers that a model of two does not have."""

from __future__ import annotations

import json

import pytest

from launcher.cli import main

RECIPE = """\
model: {name_or_path: Qwen/Qwen3-8B}
adapter: {type: lora, %s}
data: {train: [{path: rows.jsonl, format: text}]}
"""
DEEP = "model.layers.30"


@pytest.mark.parametrize(
    ("adapter", "wanted"),
    [
        (r'target_modules: ".*layers\\.(1[0-9])\\..*q_proj"', {"target_modules": "all-linear"}),
        (
            f"target_modules: [{DEEP}.self_attn.q_proj, {DEEP}.self_attn.v_proj, k_proj]",
            {"target_modules": ["q_proj", "v_proj", "k_proj"]},
        ),
        (
            f"target_modules: [q_proj], modules_to_save: [{DEEP}.mlp.down_proj]",
            {"target_modules": ["q_proj"], "modules_to_save": ["down_proj"]},
        ),
        ("target_modules: [q_proj], layers_to_transform: [30]", {"layers_to_transform": [0]}),
    ],
)
def test_layers_that_the_tiny_model_lacks_are_rehearsed_in_others(adapter, wanted, tmp_path, capsys) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE % adapter)
    out = tmp_path / "out"
    assert main(["run", str(path), "--tiny", "--dry-run", "--json", "--output-dir", str(out)]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    for name, value in wanted.items():
        found = settings[f"adapter.{name}"]
        assert found["value"] == value
        if value != ["q_proj"]:
            assert (found["source"], found["by"]) == ("override", "--tiny")


def test_the_moment_that_decides_leads(capsys) -> None:
    """Each rank loads the whole 4-bit base under ZeRO-3: more than training needs."""
    words = ["plan", "llama3_70b_qlora", "--on", "8xRTX3090-24GB"]
    sets = ["--set", "sharding.engine=deepspeed", "--set", "sharding.zero_stage=3"]
    assert main([*words, *sets, "--json"]) == 3
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["moment"] == "loading"
    assert memory["needed"] > memory["device_bytes"] > memory["total"]
    assert main([*words, *sets]) == 3
    said = capsys.readouterr()
    (line,) = [
        line for line in (said.out + said.err).splitlines() if line.startswith("memory of each device")
    ]
    assert f"{memory['needed'] / 2**30:.2f} GiB of" in line
    assert "loading" in line
