"""`effilaunch doctor`: the real command on this machine, and with a stand-in nvidia-smi.

But for the first test the training stack's answers are canned: asking it takes seconds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from factories import BASE
from machines import A100, BITSANDBYTES, DEEPSPEED, V100, torch_section

from launcher.cli import main
from launcher.knowledge.doctor.examine import CHECKS
from launcher.machine import machine_facts as machine_module

FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "")
KEYS = {"id", "title", "status", "found", "message", "hint"}
CPU_TORCH = {
    **torch_section(count=0),
    "version": "2.13.0+cpu",
    "cuda": None,
    "available": False,
    "nccl": None,
}


@pytest.fixture
def stack(monkeypatch, tmp_path):
    """Runs in a folder of its own, with canned answers of torch, bitsandbytes and DeepSpeed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(torch=CPU_TORCH):
        answer = {"torch": torch, "bitsandbytes": BITSANDBYTES, "deepspeed": DEEPSPEED}
        monkeypatch.setattr(machine_module, "ask_stack", lambda python, environ: answer)

    install()
    return install


@pytest.fixture
def smi(monkeypatch, tmp_path, stack):
    def install(kind=A100, count=8, *, said=None):
        folder = tmp_path / "bin"
        folder.mkdir()
        name, mib, (major, minor) = kind
        # The planner asks for five fields, the doctor for seven.
        shapes = ("{}, GPU-{}, {}, {}, {}.{}", "{}, GPU-{}, {}, {}, 3, {}.{}, 570.86.15")
        five, seven = (
            "\n".join(shape.format(i, i, name, mib, major, minor) for i in range(count)) for shape in shapes
        )
        body = f"echo '{said}'; exit 9" if said else (
            f"case \"$*\" in *memory.used*) echo '{seven}';; *query-gpu*) echo '{five}';; "
            "*topo*) echo NV12;; *) echo 'CUDA Version: 12.8';; esac"
        )  # fmt: skip
        shim = folder / "nvidia-smi"
        shim.write_text(f"#!/bin/sh\n{body}\n")
        shim.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        stack(CPU_TORCH if said else torch_section(kind, count))

    return install


def asked(capsys, *arguments):
    """Exit code, the JSON object, and the checks by id."""
    code = main(["doctor", *arguments, "--json"])
    answer = json.loads(capsys.readouterr().out)
    return code, answer, {check["id"]: check for check in answer.get("checks", [])}


def recipe(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "train.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    return str(path)


def test_the_real_command_on_this_machine(tmp_path, warm):
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        timeout=200,
        check=False,
    )
    answer = json.loads(done.stdout)
    assert [set(check) for check in answer["checks"]] == [KEYS] * len(CHECKS)
    assert {check["status"] for check in answer["checks"]} <= {"ok", "warn", "fail", "skip"}
    assert answer["machine"]["stack"]["torch"].keys() & {"version", "error"}
    assert done.returncode == (0 if answer["ready"] else 4), done.stderr


def test_eight_a100(smi, capsys, tmp_path):
    smi()
    code, answer, checks = asked(capsys, recipe(tmp_path, BASE))
    assert checks["devices"]["status"] == "ok"
    assert "8x NVIDIA A100-SXM4-80GB" in checks["devices"]["found"]
    assert checks["plan"]["found"].startswith("8xA100-80GB")
    assert checks["bf16"]["status"] == checks["driver"]["status"] == "ok"
    # Offline, and the model is in no cache. (Host memory is that of the machine under test.)
    assert {c["id"] for c in answer["checks"] if c["status"] == "fail"} - {"host-memory"} == {"hub"}
    assert (code, answer["ready"]) == (4, False)


def test_a_machine_on_which_the_recipe_runs(smi, capsys, tmp_path, monkeypatch):
    smi(count=1)
    weights = tmp_path / "hub" / "models--facebook--opt-125m" / "snapshots" / "0"
    weights.mkdir(parents=True)
    (weights / "model.safetensors").touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    code, answer, checks = asked(
        capsys, recipe(tmp_path, BASE.replace("huggyllama/llama-7b", "facebook/opt-125m"))
    )
    assert [c for c in answer["checks"] if c["status"] == "fail"] == []
    assert (code, answer["ready"]) == (0, True)
    assert "in the cache" in checks["hub"]["message"]


def test_a_v100_only_emulates_bf16(smi, capsys):
    smi(V100, 1)
    code, answer, checks = asked(capsys)
    assert checks["bf16"]["status"] == "warn"
    assert "emulated" in checks["bf16"]["message"]
    assert checks["torch"]["status"] == "ok"
    assert (code, answer["ready"]) == (0, True)


def test_a_broken_driver_fails(smi, capsys):
    smi(said="Failed to initialize NVML: Driver/library version mismatch")
    code, answer, checks = asked(capsys)
    assert checks["driver"]["status"] == "fail"
    assert "version mismatch" in checks["driver"]["message"]
    assert (code, answer["ready"]) == (4, False)


def test_hardware_that_is_not_here_fails(stack, capsys, tmp_path):
    code, _, checks = asked(capsys, recipe(tmp_path, BASE), "--on", "8xA100-80GB")
    assert code == 4
    assert checks["plan"]["status"] == "ok"
    assert checks["devices"]["status"] == "fail"
    assert "0 visible" in checks["devices"]["message"]


def test_what_does_not_fit_fails_with_the_planners_words(stack, capsys, tmp_path):
    code, _, checks = asked(capsys, recipe(tmp_path, FULL), "--on", "1xT4-16GB")
    assert code == 4
    assert checks["plan"]["status"] == "fail"
    assert "fit" in checks["plan"]["message"]
    assert checks["plan"]["found"].startswith("1xT4-16GB")  # the nearest miss


def test_a_device_that_the_planner_refuses_fails(stack, capsys, tmp_path):
    code, _, checks = asked(capsys, recipe(tmp_path, BASE + "precision: bf16\n"), "--on", "1xT4-16GB")
    assert (code, checks["plan"]["status"]) == (4, "fail")
    assert "bf16" in checks["plan"]["message"]


def test_missing_data_fails(stack, capsys, tmp_path):
    path = recipe(tmp_path, BASE)
    (tmp_path / "data" / "train.jsonl").unlink()
    _, _, checks = asked(capsys, path, "--on", "8xA100-80GB")
    assert checks["data"]["status"] == "fail"


def test_a_model_that_is_nowhere_is_a_failure_of_the_plan(stack, capsys, tmp_path):
    text = BASE.replace("huggyllama/llama-7b", "nobody/nothing")
    code, _, checks = asked(capsys, recipe(tmp_path, text), "--on", "8xA100-80GB")
    assert (code, checks["plan"]["status"]) == (4, "fail")
    assert "nobody/nothing" in checks["plan"]["message"]


def test_a_wrong_recipe_is_no_fault_of_the_machine(stack, capsys, tmp_path):
    code, answer, _ = asked(capsys, recipe(tmp_path, BASE + "no_such_key: 1\n"))
    assert code == 2
    assert answer["errors"][0]["code"] == "unknown-key"


def test_on_without_a_recipe_is_refused(stack, capsys):
    code, answer, _ = asked(capsys, "--on", "cpu")
    assert (code, answer["errors"][0]["code"]) == (2, "usage")


def test_the_text_explains_what_is_wrong(smi, capsys):
    smi(said="no devices")
    assert main(["doctor"]) == 4
    out = capsys.readouterr().out
    assert re.search(r"^ *FAIL +NVIDIA driver +nvidia-smi fails$", out, re.MULTILINE)
    assert ": no devices" in out
    # A machine under load may add a warning: "; 1 warning".
    assert out.rstrip().splitlines()[-1].partition(";")[0].endswith(": driver")


PLANTED = {
    "HF_TOKEN": "hf_plantedTOKENvalue123",
    "WANDB_API_KEY": "planted0wandb1key2",
    "AWS_SECRET_ACCESS_KEY": "planted/aws/secret",
    "https_proxy": "http://planteduser:plantedpass@10.9.8.7:3128",
    "NCCL_SOCKET_IFNAME": "eth0",
    "MASTER_ADDR": "10.1.2.3",
    "USER": "plantedlogin",
    "DS_NOTE": "planted/aws/secret at 02:42:ac:11:00:02 of plantedlogin",
}


def test_the_bundle_holds_nothing_private(smi, capsys, tmp_path, monkeypatch):
    smi()
    home = tmp_path / "plantedlogin"
    (home / "hf").mkdir(parents=True)
    (home / "hf" / "token").write_text("hf_plantedfiletoken99")
    (home / ".netrc").write_text("machine api.wandb.ai login user password plantednetrc")
    (home / ".netrc").chmod(0o600)
    for name, value in {**PLANTED, "HOME": str(home), "HF_HOME": str(home / "hf")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    file = tmp_path / "report.md"
    code, answer, checks = asked(capsys, "--bundle", str(file))
    assert answer["bundle"] == str(file)
    text = file.read_text("utf-8")
    assert not re.search(rf"(?i)\b{re.escape(os.uname().nodename)}\b", text)
    for private in ("planted", str(home), "10.1.2.3", "10.9.8.7", "02:42"):
        assert private.lower() not in text.lower(), text[text.lower().index(private.lower()) - 80 :][:200]
    # The JSON answer is for this user's own terminal, but no secret belongs there either.
    printed = json.dumps(answer)
    for secret in ("hf_planted", "planted0wandb", "plantedpass", "plantednetrc"):
        assert secret not in printed
    assert checks["wandb"]["found"] == "logged in to wandb"
    assert "NVIDIA A100-SXM4-80GB" in text
    assert "~/hf" in text
    assert code == (0 if answer["ready"] else 4)


def test_a_bundle_overwrites_nothing(stack, capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("precious")
    code, answer, _ = asked(capsys, "--bundle", str(file))
    assert (code, answer["errors"][0]["code"]) == (2, "bundle-exists")
    assert "before --bundle" in answer["errors"][0]["hint"]
    assert file.read_text() == "precious"
    code, answer, _ = asked(capsys, "--bundle", str(tmp_path / "no" / "x.md"))
    assert (code, answer["errors"][0]["code"]) == (2, "bundle-folder")


def test_a_bundle_without_a_name_gets_one(stack, capsys, tmp_path):
    assert main(["doctor", "--bundle"]) in (0, 4)
    (file,) = tmp_path.glob("effilaunch-doctor-*.md")
    assert f"wrote {file}" in capsys.readouterr().out
    assert file.read_text().startswith("# effilaunch ")
