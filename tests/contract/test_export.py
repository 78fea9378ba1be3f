"""`export --to transformers` and `--to vllm`: what is written answers as the trained model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launcher.cli import main
from launcher.errors import RecipeError
from launcher.parsing import EXPORTS
from launcher.train.exports.export import TARGETS
from launcher.train.exports.vllm import CHANGE_BASE
from launcher.train.results.trained import on_base

sys.path.insert(0, str(Path(__file__).parent))
from exported import chatted
from plans import LORA, trained

pytestmark = pytest.mark.usefixtures("warm")

CLOSED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Turns that end with another token than the tokenizer's EOS, <|im_end|>."""
CLASSIFIES = {
    "task": "sequence-classification", "trainer.max_steps": 1,
    "data.train": [{"path": "unused.jsonl", "format": "classification", "columns": {}}],
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return chatted(tmp_path_factory.mktemp("runs") / "run", {"model.chat_template": CLOSED})


def exported(capsys, run: Path, *words: str) -> dict:
    capsys.readouterr()
    assert main(["export", str(run), "--json", *words]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys, run: Path, *words: str, status: int = 2) -> str:
    capsys.readouterr()
    assert main(["export", str(run), "--json", *words]) == status
    (problem,) = json.loads(capsys.readouterr().out)["errors"]
    return problem["code"]


def test_the_names_of_the_command_line_are_those_of_the_targets():
    assert sorted(EXPORTS) == sorted(target.name for target in TARGETS)


def test_a_plain_folder_answers_alike_and_stops_where_training_ended_turns(run, tmp_path, capsys):
    out = tmp_path / "plain"
    (tmp_path / ".plain.part-999999999").mkdir()  # of an export that was killed
    found = exported(capsys, run, "--to", "transformers", "--output", str(out))
    assert found["compared"]["answers"] == {"compared": 50, "equal": 50}
    assert (found["compared"]["texts"], found["compared"]["template"]) == (200, "identical")
    settings = json.loads((out / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [0, 2]
    assert [end["text"] for end in found["stop_tokens"]] == ["<|endoftext|>", "<|im_end|>"]
    assert (out / "chat_template.jinja").read_text() == CLOSED
    assert json.loads((out / "export.json").read_text())["compared"] == found["compared"]
    assert not list(tmp_path.glob(".*"))


def test_the_command_for_vllm_has_what_the_model_was_trained_with(run, tmp_path, capsys):
    out = tmp_path / "a folder"
    found = exported(capsys, run, "--to", "vllm", "--output", str(out))
    words = found["command"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["vllm", "serve", str(out)]
    assert options == {
        "--served-model-name": "run", "--dtype": "float32", "--max-model-len": "512",
        "--generation-config": str(out), "--chat-template": str(out / "chat_template.jinja"),
    }  # fmt: skip
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\nprintf '%s\\n' vllm \"$@\"\n")
    program.chmod(0o755)
    shown = subprocess.run(
        [str(out / "serve.sh")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.splitlines() == words
    assert (out / "serve.sh").stat().st_mode & 0o111


def test_an_adapter_is_served_on_its_base(run, tmp_path, capsys):
    out = tmp_path / "adapter"
    found = exported(capsys, run, "--to", "vllm", "--adapter", "--output", str(out))
    words = found["command"]
    assert found["compared"]["answers"] == {"compared": 50, "equal": 50}
    assert words[2] == str(run.parent / "base")
    assert f"run={out}" in words
    assert words[words.index("--max-lora-rank") + 1] == "8"
    assert words[words.index("--tokenizer") + 1] == str(out)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (out / name).read_bytes() == (run / "adapter" / name).read_bytes()
    assert not (out / "config.json").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"alpha_pattern": {"q_proj": 4}},
        {"rank_pattern": {"q_proj": 4}}, {"bias": "all"}, {"r": 1024}, {"trainable_token_indices": [1]},
        {"target_parameters": ["experts.down_proj"]},
        *({"init_lora_weights": init} for init in ("pissa_niter_4", "loftq", "corda", "lora_ga")),
    ],
)  # fmt: skip
def test_what_vllm_would_leave_out_of_an_adapter_is_refused(run, tmp_path, capsys, changes):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    config = copy / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    assert refused(capsys, copy, "--to", "vllm", "--adapter") == "export-adapter"
    assert not (copy / "export-vllm").exists()


INITS = (True, False, "gaussian", "olora", "pissa", "pissa_niter_4", "orthogonal", "mica")
"""Of peft 0.21 without loftq, which needs CUDA, and corda, eva and lora_ga, which need batches of rows."""


def begun(folder, init, seed=0, saved=None):
    """The weight of a layer of the base after an adapter of this beginning was attached."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, set_seed

    model = AutoModelForCausalLM.from_pretrained(folder)
    layer = model.model.layers[0].self_attn.q_proj
    set_seed(seed)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj"], init_lora_weights=init))
    if saved is not None:
        adapted.save_pretrained(saved)
    return layer.weight


def test_what_changes_the_base_is_known(run):
    base = run.parent / "base"
    changed = {init for init in INITS if not begun(base, init).equal(begun(base, True))}
    assert changed == {init for init in INITS if str(init).lower().startswith(CHANGE_BASE)}


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_eva_leaves_the_base_alone():
    """It computes values of the adapter from batches of rows; such an adapter may be continued."""
    import torch
    from peft import EvaConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights
    from small import llama

    base = llama()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    asked = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="eva", eva_config=EvaConfig(rho=1.0))
    adapted = get_peft_model(base, asked)
    layer = base.model.layers[0].self_attn.q_proj
    drawn = layer.lora_A["default"].weight.clone()
    batches = [{"input_ids": torch.randint(3, 60, (4, 16))} for _ in range(6)]
    initialize_lora_eva_weights(adapted, batches)
    assert not layer.lora_A["default"].weight.equal(drawn)
    plain = adapted.unload().state_dict()
    assert all(plain[name].equal(value) for name, value in before.items())
    assert not "eva".startswith(CHANGE_BASE)


def test_a_base_is_restored_only_without_chance(run):
    """An adapter is loaded by attaching a new one of its configuration and replacing its values."""
    base = run.parent / "base"
    restored = {init for init in INITS if begun(base, init, seed=1).equal(begun(base, init, seed=2))}
    assert {*INITS} - restored == {"pissa_niter_4"}


def test_an_adapter_whose_base_cannot_be_restored_is_not_loaded(run, tmp_path):
    from transformers import AutoModelForCausalLM

    begun(run.parent / "base", "pissa_niter_4", saved=tmp_path)
    with pytest.raises(RecipeError) as refusal:
        on_base(AutoModelForCausalLM.from_pretrained(run.parent / "base"), tmp_path)
    assert refusal.value.problems[0].code == "adapter-mismatch"


@pytest.mark.slow(share=2)
def test_an_adapter_that_began_in_the_base_is_exported_merged(run, capsys):
    run = chatted(run.parent / "began", {"adapter": {**LORA, "init_lora_weights": "pissa"}})
    assert refused(capsys, run, "--to", "vllm", "--adapter") == "export-adapter"
    found = exported(capsys, run, "--to", "vllm")
    assert found["compared"]["answers"] == {"compared": 50, "equal": 50}


def test_a_folder_that_answers_otherwise_is_not_left(run, tmp_path, capsys, monkeypatch):
    """The tokenizer in the folder is another one than the trained one."""
    import launcher.train.exports.plain as module

    real = module.write_plain

    def spoilt(asked, source, part):
        found = real(asked, source, part)
        file = part / "tokenizer.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": {"type": "Lowercase"}}))
        return found

    monkeypatch.setattr(module, "write_plain", spoilt)
    assert refused(capsys, run, "--to", "transformers", "--output", str(tmp_path / "out"), status=5) == (
        "export-differs"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_classifier_is_exported_and_not_served_as_a_writer(tmp_path, capsys):
    run = trained(tmp_path / "run", CLASSIFIES)
    (run / "COMPLETED").touch()
    found = exported(capsys, run, "--to", "transformers")
    assert found["compared"]["answers"] == {"compared": 0, "equal": 0}
    for program in ("vllm", "ollama", "gguf"):
        assert refused(capsys, run, "--to", program) == "export-unsupported"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--to", "vllm", "--quantize", "q4_k_m"], "usage"),
        (["--to", "transformers", "--adapter"], "usage"),
        (["--to", "vllm", "--llama-cpp", "."], "usage"),
        (["--to", "gguf", "--quantize", "q9"], "usage"),
        (["--to", "sglang"], "usage"),
        ([], "usage"),
        (["--to", "vllm", "--output", "."], "file-exists"),
    ],
)
def test_wrong_requests_are_refused(run, capsys, words, code):
    assert refused(capsys, run, *words) == code


@pytest.mark.parametrize("program", ["gguf", "ollama"])
def test_without_llama_cpp_it_is_said_before_any_work(run, tmp_path, capsys, monkeypatch, program):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refused(capsys, run, "--to", program, status=4) == "program-missing"
    assert refused(capsys, run, "--to", program, "--llama-cpp", str(tmp_path), status=4) == "program-missing"
