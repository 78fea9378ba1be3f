"""Bad and odd input of the commands about memory: one clear answer each, and the right exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from counted_work import cpu_seconds, function_calls

from launcher.cli import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
RECIPE = """\
model: {config: huggyllama/llama-7b, tokenizer: x}
data: {train: [{path: train.jsonl}], max_length: 512}
adapter: {type: lora}
trainer: {max_steps: 10}
"""
RUN = {
    "schema_version": 1,
    "device": "A100-80GB",
    "method": "cuda-reserved+context",
    "torch": "2.9",
    "transformers": "5.0",
    "kind": {
        "model_type": "llama", "task": "causal-lm", "engine": "ddp", "zero_stage": 0, "precision": "bf16",
        "quantization": "none", "adapter": True, "checkpointing": False, "attention": "sdpa",
        "optim": "adamw_torch", "offload": "none",
    },
    "processes": 1, "params": 7 * 10**9, "steps": 9, "predicted_by": "closed-form",
    "predicted": 30 * 10**9, "components": {"weights": 29 * 10**9, "context": 10**9},
    "measured": 31 * 10**9, "allocated": 30 * 10**9, "context": 10**9, "device_bytes": 80 * 2**30,
}  # fmt: skip


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    """Exit code and the one JSON object of a command; a number that JSON has not is an error."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no number")

    def call(*argv: str) -> tuple[int, dict[str, Any]]:
        code = main([*argv, "--json"])
        found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=refuse)
        assert found["schema_version"] == 1
        assert bool(code) == bool(found.get("errors"))
        return code, found

    return call


def model(tmp_path: Path, text: str) -> str:
    (tmp_path / "config.json").write_text(text)
    return str(tmp_path)


def recipe(tmp_path: Path, more: str = "") -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE + more)
    return str(path)


@pytest.mark.parametrize("named", [7, True, 1.5, "LlamaForCausalLM", {"a": 1}, None, [None, 3]])
def test_architectures_of_any_shape(tmp_path: Path, answer: Any, named: object) -> None:
    code, found = answer(
        "estimate", model(tmp_path, json.dumps({**CONFIG, "architectures": named})), "--on", "1x24GB"
    )
    assert code == 0
    assert found["model"]["params"] > 0


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "[]", "\x00"])
def test_a_configuration_that_is_no_mapping(tmp_path: Path, answer: Any, text: str) -> None:
    code, found = answer("estimate", model(tmp_path, text), "--on", "1x24GB")
    assert (code, found["errors"][0]["code"]) == (2, "model-config-missing")


@pytest.mark.parametrize("name", ["x" * 5000, "/" + "x" * 5000, "a\0b", "~nobody-of-that-name/x"])
def test_a_model_that_no_file_system_could_hold(answer: Any, name: str) -> None:
    code, found = answer("estimate", name, "--on", "cpu")
    assert (code, found["errors"][0]["code"]) == (2, "model-config-missing")


@pytest.mark.parametrize(
    "hardware",
    ["1x0GB", "0x24GB", "9999999xcpu", "9" * 5000 + "xcpu", "1x" + "9" * 400 + "GB", "٣xcpu", "A" * 5000],
)
def test_hardware_that_nobody_has(tmp_path: Path, answer: Any, hardware: str) -> None:
    code, found = answer("plan", recipe(tmp_path), "--on", hardware)
    assert code == 2
    assert found["errors"][0]["code"] in {"bad-hardware", "unknown-device"}


def test_the_most_hardware_that_can_be_written(tmp_path: Path, answer: Any) -> None:
    code, found = answer("plan", recipe(tmp_path, "global_batch_size: 1000000\n"), "--on", "1x999999GB")
    assert (code, found["memory"]["fits"]) == (0, True)
    most = "999999x999999xA100-80GB"
    words = ("estimate", model(tmp_path, json.dumps(CONFIG)), "--on", most, "--tensor-parallel", "2")
    code, found = answer(*words)
    assert (code, found["errors"][0]["code"]) == (2, "bad-tensor-parallel")
    assert function_calls(lambda: answer(*words)) < 900_000, "fewer than nodes"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("estimate", "x", "--tensor-parallel", "abc"), "invalid int value"),
        (("ladder", "smoke", "--steps", "1e9"), "invalid int value"),
        (("estimate",), "required"),
        (("plan", "smoke", "--search", "--explain"), "not allowed with"),
    ],
)
def test_a_wrong_command_line_is_answered_in_json(answer: Any, argv: tuple[str, ...], said: str) -> None:
    code, found = answer(*argv)
    assert (code, found["errors"][0]["code"]) == (2, "usage")
    assert said in found["errors"][0]["message"]
    assert f"effilaunch {argv[0]} --help" in found["errors"][0]["hint"]


def test_a_shipped_recipe_by_its_name(answer: Any) -> None:
    code, named = answer("estimate", "llama3_8b_full", "--on", "8xA100-80GB")
    assert code == 0
    assert named["rows"] == answer("estimate", "llama3_8b_full.yaml", "--on", "8xA100-80GB")[1]["rows"]


@pytest.mark.parametrize(
    "line",
    ["global_batch_size: 1000000000000", "hardware: {device: T4-16GB, num_nodes: 100000000000}"],
)
def test_sizes_beyond_all_measure(tmp_path: Path, answer: Any, line: str) -> None:
    code, found = answer("plan", recipe(tmp_path, line + "\n"), "--search", "--on", "1xA100-80GB")
    assert (code, found["errors"][0]["code"]) == (2, "wrong-value")


@pytest.mark.parametrize(
    ("batch", "times"), [(999_999_937, 100), pytest.param(735_134_400, 1500, marks=pytest.mark.slow)]
)
def test_divisors_of_a_large_batch_are_found_at_once(
    tmp_path: Path, answer: Any, batch: int, times: int
) -> None:
    """times: of the CPU time of a plan for a batch of 8. A division by each number takes 3000 of them; the
    second batch has 1344 divisors, each of which is estimated."""

    def plan(batch: int) -> tuple[int, dict[str, Any]]:
        path = recipe(tmp_path, f"global_batch_size: {batch}\n")
        answered: tuple[int, dict[str, Any]] = answer("plan", path, "--on", "1xA100-80GB")
        return answered

    plan(8)
    answers: list[tuple[int, dict[str, Any]]] = []
    small, large = (cpu_seconds(lambda size=size: answers.append(plan(size))) for size in (8, batch))
    code, found = answers[-1]
    assert (code, found["batch"]["global"]) == (3, batch)  # a step's micro-batches lie on the device together
    assert found["batch"]["micro"] * found["batch"]["accumulation"] == batch
    assert large < times * small


def test_a_batch_smaller_than_the_ranks(tmp_path: Path, answer: Any) -> None:
    code, found = answer("plan", recipe(tmp_path, "global_batch_size: 1\n"), "--on", "8xA100-80GB")
    assert (code, found["errors"][0]["hint"]) == (2, "use 8")


@pytest.mark.parametrize(
    "change",
    [
        {"context": -(10**12)},
        {"context": 10**15, "measured": 10**15 + 5},
        {"measured": 10**30},
        {"measured": 10**400},
        {"measured": 60 * 10**18, "device_bytes": None},
        {"device_bytes": -1},
        {"device_bytes": 0},
        {"processes": 0},
        {"params": -1},
        {"allocated": -1},
        {"components": {"weights": -(10**15), "context": 0}},
    ],
)
def test_a_run_that_no_device_can_have_made(
    tmp_path: Path, answer: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path))
    plan = ("plan", recipe(tmp_path, "global_batch_size: 8\n"), "--on", "1xA100-80GB")
    code, without = answer(*plan)
    (tmp_path / "calibration.jsonl").write_text(json.dumps({**RUN, **change}) + "\n")
    assert code == 0
    code, found = answer(*plan)
    assert (code, found["memory"]) == (0, without["memory"])
    assert any("skipped 1 line" in warning for warning in found["warnings"])
    (tmp_path / "calibration.jsonl").write_text(json.dumps(RUN) + "\n")
    assert answer(*plan)[1]["memory"]["calibration"] is not None


def test_a_foreign_file_in_the_place_of_the_calibration(
    tmp_path: Path, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path))
    plan, lines = ("plan", recipe(tmp_path, "global_batch_size: 8\n"), "--on", "1xA100-80GB"), 20_000
    answer(*plan)
    without = function_calls(lambda: answer(*plan))
    (tmp_path / "calibration.jsonl").write_text("x\n" * lines)
    assert answer(*plan)[0] == 0
    assert function_calls(lambda: answer(*plan)) < without + 6 * lines
    (tmp_path / "calibration.jsonl").unlink()
    (tmp_path / "calibration.jsonl").mkdir()
    assert answer(*plan)[0] == 0


@pytest.mark.parametrize("argv", [("--search",), ()])
def test_pages_keep_to_their_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    more = (
        "sharding: {offload_optimizer: auto, offload_param: auto}\nprecision: bf16\nglobal_batch_size: 64\n"
    )
    path = recipe(tmp_path, more)
    code = main(["plan", path, "--set", "model.quantization=auto", "--on", "8x24GB", *argv])
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    # to be copied whole
    command = [number + 1 for number, line in enumerate(lines) if line.startswith("command")]
    assert max(len(line) for number, line in enumerate(lines) if number not in command) <= 120


@pytest.mark.parametrize(
    "hardware", ["", "hardware: {num_nodes: 1, devices_per_node: 1, device: A100-80GB}\n"]
)
@pytest.mark.parametrize(
    ("adapter", "code", "path"),
    [
        ("target_modules: [c_attn, q_proj]", "target-modules-missing", "adapter.target_modules"),
        ("target_modules: [c_attn]", "no-target-modules", "adapter.target_modules"),
        ("target_modules: '*.q_proj'", "bad-adapter", "adapter.target_modules"),
        ("target_modules: '.*mlp'", "bad-adapter", "adapter.target_modules"),
        (
            "target_modules: [q_proj], modules_to_save: [head]",
            "target-modules-missing",
            "adapter.modules_to_save",
        ),
        (
            "target_modules: [q_proj], rank_pattern: {up_proj: 4}",
            "target-modules-missing",
            "adapter.rank_pattern",
        ),
        (
            "target_modules: [q_proj], alpha_pattern: {c_attn: 4}",
            "target-modules-missing",
            "adapter.alpha_pattern",
        ),
        (
            "target_modules: [q_proj], layers_to_transform: [90]",
            "target-modules-missing",
            "adapter.layers_to_transform",
        ),
    ],
)
def test_adapters_that_match_nothing(
    tmp_path: Path, answer: Any, hardware: str, adapter: str, code: str, path: str
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE.replace("{type: lora}", f"{{type: lora, {adapter}}}") + hardware)
    for command in (["validate"], ["plan", "--on", "1xA100-80GB"], ["estimate", "--on", "1xA100-80GB"]):
        status, data = answer(command[0], str(recipe), *command[1:])
        assert status == 2
        assert (code, path) in {(e["code"], e["path"]) for e in data["errors"]}


@pytest.mark.parametrize(
    "target", ["'.*lm_head'", "[lm_head]", "[embed_tokens]", "'.*layers\\.1\\.mlp\\.up_proj'"]
)
def test_adapters_outside_the_usual_layers_are_planned(tmp_path: Path, answer: Any, target: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE.replace("{type: lora}", f"{{type: lora, target_modules: {target}}}"))
    status, data = answer("estimate", str(recipe), "--on", "1xA100-80GB")
    assert (status, data.get("errors")) == (0, None)
