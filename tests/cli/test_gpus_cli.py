"""Commands on machines with GPUs, by a stand-in nvidia-smi: what is planned, started and refused."""

from __future__ import annotations

import json
import os

import nvidia_smi
import pytest
from factories import BASE, plan
from nvidia_smi import H100, LOST, MIXED, SLICED, SPARK, STATION, T4, WORKSTATION, NvidiaSmi, row, uuid

from launcher.cli import main
from launcher.errors import MachineError
from launcher.execute import start_checks
from launcher.execute.start_checks import check_free_memory, check_machine
from launcher.machine import gpus, probe
from launcher.machine.hardware import MIB

GIB = 2**30


@pytest.fixture
def env():
    """Undone before the suite's own guard compares the environment."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def smi(tmp_path, env) -> NvidiaSmi:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        env.delenv(name)
    env.setattr(probe, "host_memory_bytes", lambda: 2**41)  # as machines with such GPUs have
    return NvidiaSmi(tmp_path, env)


@pytest.fixture
def ask(tmp_path, env, capsys):
    """Runs a command on a recipe; exit status and the JSON object."""
    env.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "r.yaml").write_text(BASE)

    def run(*words):
        capsys.readouterr()
        code = main([*words, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def code_of(answer) -> str:
    return answer["errors"][0]["code"]


def words_after(text: str, word: str) -> str:
    """What a hint says to write."""
    return text.split(word)[1].split()[0].strip(";,)")


FAILURES = {
    "mismatch": ("Failed to initialize NVML: Driver/library version mismatch", 18),
    "old": ('Field "compute_cap" is not a valid field to query.', 2),
    "none": ("No devices were found", 6),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_driver_that_fails_is_no_cpu(smi, ask, failure):
    smi.fails(*FAILURES[failure])
    for command in ("plan", "run"):
        code, answer = ask(command, "r.yaml")
        assert (code, code_of(answer)) == (4, "driver-failed")
        assert FAILURES[failure][0] in answer["errors"][0]["message"]
    assert "--on cpu" in answer["errors"][0]["hint"]
    code, answer = ask("plan", "r.yaml", "--on", "cpu")
    assert answer["hardware"]["device"] == "cpu"
    smi.env.setenv("CUDA_VISIBLE_DEVICES", "")
    code, answer = ask("plan", "r.yaml")
    assert answer["hardware"]["device"] == "cpu"


@pytest.mark.parametrize("said", ["No devices were found", "", "| NVIDIA-SMI 580.65 |"])
def test_an_answer_without_gpus_is_a_failure_too(smi, ask, said):
    smi.fails(said, status=0)
    code, answer = ask("plan", "r.yaml")
    assert (code, code_of(answer)) == (4, "driver-failed")


def test_a_late_answer_is_a_failure_after_a_minute(smi, ask, monkeypatch):
    assert gpus.SMI_SECONDS == 60
    monkeypatch.setattr(gpus, "SMI_SECONDS", 0.2)
    smi.env.setenv("FAKE_SLEEP", "30")
    code, answer = ask("plan", "r.yaml")
    assert (code, code_of(answer)) == (4, "driver-failed")


def test_consent_to_the_cpu_asks_nothing(smi, ask, tmp_path):
    smi.fails("broken").env.setenv("FAKE_LOG", str(tmp_path / "asked"))
    for words in (("plan", "r.yaml", "--on", "cpu"), ("run", "r.yaml", "--tiny", "--dry-run", "--on", "cpu")):
        assert ask(*words)[1]["hardware"]["device"] == "cpu", words
    assert ask("validate", "r.yaml")[0] == 0
    assert not (tmp_path / "asked").exists()
    (tmp_path / "r.yaml").write_text(BASE + "hardware: {device: A100-80GB}\n")
    assert ask("validate", "r.yaml")[0] == 0, "a recipe for another machine"


def test_a_rehearsal_on_a_cpu_is_one_beside_gpus_too(smi, ask):
    smi.shows(*H100)
    code, answer = ask("run", "r.yaml", "--tiny", "--dry-run", "--on", "2xcpu")
    assert (code, answer["hardware"]["device"], answer["hardware"]["devices_per_node"]) == (0, "cpu", 2)


def test_without_the_program_a_device_file_or_the_variable_shows_a_gpu(ask, env, tmp_path, monkeypatch):
    env.setenv("PATH", str(tmp_path))
    env.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "DEVICE_FILES", tmp_path)
    assert ask("plan", "r.yaml")[1]["hardware"]["device"] == "cpu", "no sign of a GPU"
    for sign in ("0", "GPU-0"):
        env.setenv("CUDA_VISIBLE_DEVICES", sign)
        code, answer = ask("plan", "r.yaml")
        assert (code, code_of(answer)) == (4, "nvidia-smi-missing")
    for none in ("", "-1", "NoDevFiles"):
        env.setenv("CUDA_VISIBLE_DEVICES", none)
        assert ask("plan", "r.yaml")[1]["hardware"]["device"] == "cpu"
    env.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia0").touch()
    code, answer = ask("plan", "r.yaml")
    assert (code, code_of(answer)) == (4, "nvidia-smi-missing")
    assert "nvidia0" in answer["errors"][0]["message"]


@pytest.mark.parametrize(("rows", "bad", "count"), [(LOST, 7, 7), (SLICED, 0, 1)])
def test_a_gpu_that_cannot_be_used_is_named_and_can_be_left_out(smi, ask, rows, bad, count):
    smi.shows(*rows)
    for command in ("plan", "run"):
        code, answer = ask(command, "r.yaml")
        (problem,) = answer["errors"]
        assert (code, problem["code"]) == (4, "device-unusable")
        assert f"GPU {bad} (" in problem["message"]
        assert uuid(bad) in problem["message"]
    smi.env.setenv("CUDA_VISIBLE_DEVICES", words_after(problem["hint"], "CUDA_VISIBLE_DEVICES="))
    code, answer = ask("plan", "r.yaml")
    assert (code, answer["hardware"]["devices_per_node"]) == (0, count)


def test_memory_that_is_not_reported_is_set_by_hand(smi, ask, tmp_path):
    smi.shows(*SPARK)
    code, answer = ask("plan", "r.yaml")
    assert (code, code_of(answer)) == (4, "device-memory-unknown")
    on = words_after(answer["errors"][0]["hint"], "--on")
    code, answer = ask("plan", "r.yaml", "--on", on)
    assert answer["hardware"]["device_bytes"] == int(on.removeprefix("1x").removesuffix("GB")) * 10**9
    (gpu,) = check_machine(plan(tmp_path, "1x119GB"))
    check_free_memory(100 * GIB, [gpu], pytest.fail)


def test_cards_for_a_display_are_left_out_unless_named(smi, ask):
    smi.shows(*STATION)
    code, answer = ask("plan", "r.yaml")
    found = answer["hardware"]
    assert (code, found["device"], found["devices_per_node"]) == (0, "A100-80GB", 4)
    assert any(uuid(4) in warning for warning in answer["warnings"])
    smi.env.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert ask("plan", "r.yaml")[1]["hardware"]["device"] == "NVIDIA T400 4GB"
    smi.env.delenv("CUDA_VISIBLE_DEVICES")
    pair = [row(i, "NVIDIA GeForce RTX 4090", 24564, "8.9", display="Enabled" if i else "") for i in (0, 1)]
    smi.shows(*pair)
    assert ask("plan", "r.yaml")[1]["hardware"]["devices_per_node"] == 2, "it computes as well"


def test_numbers_are_those_of_nvidia_smi(smi, ask, tmp_path):
    smi.shows(*WORKSTATION)
    answer = ask("plan", "r.yaml")[1]
    assert answer["hardware"]["device"] == "RTX3090-24GB"
    assert answer["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    made = plan(tmp_path, "1xRTX3090-24GB")
    assert [gpu.index for gpu in check_machine(made)] == ["1"]
    smi.env.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [gpu.index for gpu in check_machine(made)] == ["1"], "the other one has less memory"
    smi.env.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(MachineError) as caught:
        check_machine(made)
    assert caught.value.problems[0].code == "device-missing"
    assert uuid(0) in caught.value.problems[0].message


def test_least_memory_and_lowest_capability_are_facts_of_their_own(smi, ask):
    smi.shows(*MIXED)
    answer = ask("plan", "r.yaml")[1]
    found = answer["hardware"]
    assert (found["device_bytes"], found["compute_capability"]) == (24576 * MIB, 7.0)
    assert answer["settings"]["precision"]["value"] == "fp16"
    assert any("different kinds" in warning for warning in answer["warnings"])
    assert found["device"] not in ("RTX3090-24GB", "V100-32GB"), "neither one's speed"


BUSY = [row(i, "NVIDIA H100 80GB HBM3", 81559, "9.0", used=80000 if i < 2 else 4) for i in range(8)]


def test_memory_that_others_hold_ends_the_run_before_it_starts(smi, ask, monkeypatch, tmp_path):
    monkeypatch.setattr(start_checks, "FREE_S", 0.0)
    smi.shows(*BUSY).apps(f"4711, {uuid(1)}, 79990, python3", f"4712, {uuid(5)}, 100, other")
    code, answer = ask("run", "r.yaml")
    first, second = answer["errors"]
    assert (code, first["code"], second["code"]) == (4, "device-memory-held", "device-memory-held")
    assert (uuid(0) in first["message"], uuid(1) in second["message"]) == (True, True)
    assert "process 4711 (python3) holds 78.1 GiB" in second["message"]
    assert "4712" not in second["message"]
    assert "no process" in first["message"]
    assert not (tmp_path / "runs").exists()
    smi.env.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    made = plan(tmp_path, "2xH100-80GB")
    check_free_memory(made.memory.needed, check_machine(made), pytest.fail)


def test_the_memory_of_a_run_that_has_just_ended_is_waited_for(smi, monkeypatch, tmp_path):
    monkeypatch.setattr(start_checks, "_POLL_S", 0.01)
    smi.shows(*BUSY)
    found = check_machine(plan(tmp_path, "8xH100-80GB"))
    one_is_free = [*BUSY[:1], *H100[1:]]
    smi.shows(*one_is_free, later=H100).env.setenv("FAKE_LOG", str(tmp_path / "asked"))
    told = []
    check_free_memory(60 * GIB, found, told.append)
    assert len(told) == 1
    assert (tmp_path / "asked").read_text().count("memory.free") == 2, "until both are free"


def test_ranks_know_the_gpus_of_the_run(smi, tmp_path):
    from launcher.execute.binding import bind_order
    from launcher.execute.start import ALONE, _order
    from launcher.execute.supervise import Limits
    from launcher.render.bundle import render

    smi.shows(*WORKSTATION)
    made = plan(tmp_path, "1xRTX3090-24GB")
    smi.env.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    order = _order(render(made), tmp_path, 4711, None, Limits(), ALONE)
    bound = bind_order(order, ALONE, check_machine(made))
    assert bound.env[gpus.STARTED_FOR] == uuid(1)
    assert bound.env["CUDA_VISIBLE_DEVICES"] == "1"
    assert bound.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert any("FASTEST_FIRST" in note for note in bound.notes)
    assert order.needed == made.memory.needed
    rehearsal = _order(
        render(made, worker="launcher.train.rehearsal.run"), tmp_path, 1, None, Limits(), ALONE
    )
    assert rehearsal.needed == 0


STEP = (
    "SLURM_JOB_ID=1 SLURM_JOB_NODELIST=n1 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n1 SLURM_NODEID=0 "
    "SLURM_STEP_TASKS_PER_NODE=4 SLURM_PROCID=0 SLURM_LOCALID=0"
)


def test_tasks_whose_gpus_are_hidden_from_each_other_are_warned(smi, ask):
    for name, value in (word.split("=", 1) for word in STEP.split()):
        smi.env.setenv(name, value)
    for rows, visible, hidden in ((H100[:1], None, True), (H100[:4], "2", False), (H100[:4], None, False)):
        smi.shows(*rows)
        smi.env.setenv("CUDA_VISIBLE_DEVICES", visible) if visible else None
        answer = ask("plan", "r.yaml")[1]
        assert answer["hardware"]["devices_per_node"] == 4
        said = [warning for warning in answer["warnings"] if "--gpu-bind=none" in warning]
        assert len(said) == hidden, rows
        smi.env.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_doctor_says_which_gpu_is_the_matter(smi, ask, monkeypatch):
    from launcher.machine import machine_facts

    stack = {name: {"error": "not asked"} for name in machine_facts.SECTIONS}
    monkeypatch.setattr(machine_facts, "ask_stack", lambda python, environ: stack)
    smi.shows(*LOST)
    code, answer = ask("doctor", "r.yaml")
    checks = {check["id"]: check for check in answer["checks"]}
    assert (code, checks["devices"]["status"], checks["plan"]["status"]) == (4, "fail", "fail")
    assert uuid(7) in checks["devices"]["message"]
    smi.shows(*STATION)
    checks = {check["id"]: check for check in ask("doctor")[1]["checks"]}
    assert checks["devices"]["status"] == "ok"
    assert uuid(4) in checks["devices"]["found"]


def test_the_stand_in_refuses_what_it_does_not_know(smi):
    """As the real program: a column that no row has is asked for in vain."""
    smi.shows("0, GPU-0", columns="index, uuid")
    with pytest.raises(MachineError) as caught:
        gpus.visible_gpus()
    assert "not a valid field" in caught.value.problems[0].message
    assert nvidia_smi.COLUMNS.split(", ") == list(gpus._COLUMNS)


@pytest.mark.slow
def test_a_plan_for_gpus_that_torch_does_not_see_trains_nothing(smi, ask, warm):
    """Two T4 by nvidia-smi, and this torch is a build for the CPU."""
    if __import__("torch").version.cuda is not None:
        pytest.skip("torch is built for CUDA")
    smi.shows(*T4[:1])
    code, answer = ask("run", "smoke")
    assert (code, code_of(answer)) == (4, "device-differs")
    assert "is built for the CPU" in answer["errors"][0]["message"]
