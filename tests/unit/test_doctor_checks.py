"""Each check of `doctor`: a machine on which it is right, and machines on which it is not."""

from __future__ import annotations

from dataclasses import replace

import factories
import pytest
from every import every
from machines import (
    A100,
    ADA,
    GIB,
    HEALTHY,
    NO_GPU,
    V100,
    changed,
    folder,
    gpus,
    torch_section,
    verdict,
    with_folder,
    with_stack,
)  # fmt: skip

from launcher.commands.doctor import subject_of
from launcher.knowledge.doctor.examine import CHECKS, examine
from launcher.machine.machine_facts import ModelFacts
from launcher.machine.software import install_hint

FULL = factories.BASE.replace("adapter: {type: lora, r: 8}\n", "")
OFFLOAD = "sharding: {engine: deepspeed, zero_stage: 3, offload_optimizer: cpu}\nprecision: bf16\n"
MODEL = ModelFacts("huggyllama/llama-7b", cached=True, access="open")
READY = replace(HEALTHY, hub_model=MODEL)


@pytest.fixture
def offload_plan(tmp_path):
    return factories.plan(tmp_path, text=FULL + OFFLOAD)


@pytest.fixture
def plan(tmp_path):
    return factories.plan(tmp_path)


@pytest.fixture
def cpu_plan(tmp_path):
    return factories.plan(tmp_path, on="2xcpu")


def named(cases):
    """Names of parametrised cases."""
    return [f"{i}-{case[0]}" for i, case in enumerate(cases)]


def packages(**versions):
    """Other versions installed; None takes a package out."""
    new = {**HEALTHY.software.installed, **versions}
    return changed("software", installed={name: v for name, v in new.items() if v is not None})


HOSTS = ("node1 slots=8", "# x", "node2 slots=8")
OLD_DRIVER = replace(changed("gpu", cuda="11.8"), stack=with_stack("torch", available=False).stack)
SMALL_SHM = folder(60 * 2**20, total=64 * 2**20)
UNCACHED = replace(MODEL, cached=False)


def env(**variables):
    return changed("host", environment=variables)


def test_a_machine_on_which_everything_is_right():
    assert {
        f.id: f.verdict.status for f in examine(HEALTHY, None) if f.verdict.status not in ("ok", "skip")
    } == {}


def test_a_run_for_which_everything_is_right(plan):
    bad = [(f.id, f.verdict) for f in examine(READY, plan) if f.verdict.status not in ("ok", "skip")]
    assert bad == []


def test_a_machine_without_gpus_is_no_failure():
    found = {f.id: f.verdict.status for f in examine(NO_GPU, None)}
    assert set(found.values()) <= {"ok", "skip"}
    assert found["devices"] == found["driver"] == found["bf16"] == "skip"


def test_ids_are_unique():
    ids = [check.id for check in CHECKS]
    assert len(ids) == len(set(ids)) > 30


# check, machine, status, a word of the message
WITHOUT_RECIPE = [
    ("devices", changed("gpu", visible=""), "warn", "hides every GPU"),
    ("devices", changed("gpu", gpus=gpus(A100, 1) + gpus(V100, 1)), "warn", "differ"),
    ("device-memory", changed("gpu", gpus=gpus(used=40 * GIB)), "warn", "another process"),
    ("driver", changed("gpu", smi="failed", said="couldn't communicate", gpus=()), "fail", "couldn't"),
    ("driver", OLD_DRIVER, "fail", "12.8"),
    ("driver", changed("gpu", cuda="11.8"), "ok", "compatibility package"),
    ("driver", changed("gpu", cuda="12.2"), "ok", "minor-version"),
    ("bf16", changed("gpu", gpus=gpus(V100)), "warn", "emulated"),
    ("tf32", changed("gpu", gpus=gpus(V100)), "skip", ""),
    ("fp8", changed("gpu", gpus=gpus(ADA)), "ok", ""),
    ("fp8", HEALTHY, "skip", ""),
    ("torch", with_stack("torch", {"error": "cannot be imported: libcudart"}), "warn", "libcudart"),
    ("torch", with_stack("torch", cuda=None), "fail", "cannot use them"),
    ("torch", with_stack("torch", available=False, why="driver too old"), "fail", "driver too old"),
    ("torch", with_stack("torch", devices=torch_section()["devices"][:4]), "fail", "4 of 8"),
    ("torch", with_stack("torch", arch_list=["sm_90"]), "fail", "no code for"),
    ("torch", with_stack("torch", arch_list=["compute_75"]), "ok", ""),
    ("torch", with_stack("torch", arch_list=["sm_86"]), "fail", "no code for"),
    ("torch", with_stack("torch", hip="6.2"), "warn", "AMD"),
    ("p2p", with_stack("torch", p2p=[[True, False], [False, True]]), "warn", "slower"),
    ("p2p", changed("gpu", gpus=gpus(ADA, 2), driver="535.54"), "warn", "RTX 40"),
    ("nccl", env(NCCL_P2P_DISABLE="1"), "warn", "NCCL_P2P_DISABLE=1"),
    ("nccl", env(NCCL_DEBUG="INFO"), "ok", ""),
    ("nvcc", changed("build", nvcc="12.6"), "ok", "accepts"),
    ("nvcc", changed("build", nvcc="11.8"), "warn", "major"),
    ("nvcc", changed("build", nvcc=None, cuda_home=None), "ok", "cpu_adam"),
    ("compiler", changed("build", compiler=None), "warn", "offload"),
    ("compiler", changed("build", compiler="7.5.0"), "warn", "GCC 9"),
    ("ninja", changed("build", ninja=None), "warn", "operators"),
    ("python-headers", changed("build", python_headers=False), "warn", "Triton"),
    ("deepspeed-ops", with_stack("deepspeed", {"error": "cannot be imported: x"}), "warn", "deepspeed: "),
    (
        "deepspeed-ops",
        with_stack("deepspeed", installed=["cpu_adam"], built_with={"version": "2.8"}),
        "warn",
        "compiled for torch 2.8",
    ),
    ("build-locks", changed("build", stale_locks=("/x/cpu_adam/lock",)), "warn", "forever"),
    ("bitsandbytes", with_stack("bitsandbytes", loaded=False, said="no binary"), "warn", "no binary"),
    ("bitsandbytes", with_stack("bitsandbytes", compiled_with_cuda=False), "warn", "CUDA"),
    ("bitsandbytes", with_stack("bitsandbytes", {"error": "no answer within 120 s"}), "warn", "no answer"),
    ("interfaces", env(NCCL_SOCKET_IFNAME="ib0"), "warn", "names no interface"),
    ("interfaces", env(NCCL_SOCKET_IFNAME="eth"), "ok", ""),
    ("interfaces", changed("network", host_resolves=False), "warn", "host name"),
    ("ports", changed("network", default_port_free=False), "warn", "another job"),
    ("hostfile", changed("network", hostfile=HOSTS), "warn", "starts processes"),
    ("hostfile", changed("network", hostfile=("node1",)), "warn", "HOST slots=N"),
    ("mpi4py", changed("software", mpi4py=True), "ok", ""),
    ("shared-memory", changed("disk", shared_memory=SMALL_SHM), "warn", "Docker"),
    ("shared-memory", changed("disk", shared_memory=None), "warn", "NCCL"),
    ("shared-memory-leftovers", changed("disk", leftovers=("a",), leftover_bytes=2**20), "warn", "DeepSpeed"),
    ("environment", env(WANDB_DISABLED="true"), "warn", "no longer read"),
    ("environment", env(TRANSFORMERS_CACHE="/x"), "warn", "HF_HUB_CACHE"),
    ("environment", env(PYTORCH_PRETRAINED_BERT_CACHE="/x"), "warn", "HF_HUB_CACHE"),
    ("environment", env(ACCELERATE_MIXED_PRECISION="fp16"), "warn", "precision"),
    ("environment", env(HF_HOME="/x"), "ok", ""),
    ("accelerate-config", changed("host", accelerate_config="/h/default_config.yaml"), "warn", "silently"),
    ("ulimits", changed("host", nofile=1024), "warn", "Too many open files"),
    ("disk", with_folder("run", free=GIB), "warn", "little space"),
    ("disk", with_folder("run", writable=False), "warn", "not writable"),
    ("caches", with_folder("hub", free=GIB), "warn", "little space"),
    ("caches", with_folder("cache", writable=False), "warn", "not writable"),
    ("caches", with_folder("extensions", on_network=True), "warn", "network filesystem"),
    ("versions", changed("software", installed={}), "fail", "not installed"),
    ("versions", packages(transformers="4.57.0"), "warn", ">=5"),
    ("versions", packages(torch="2.99"), "ok", "newer"),
    ("hub", changed("network", hub="unreachable"), "warn", "cache"),
    ("gated", changed("host", hub_login=False), "ok", ""),
    ("wandb", changed("host", wandb_login=False), "skip", ""),
]  # fmt: skip


@every(
    ("check", "machine", "status", "word"), WITHOUT_RECIPE, ids=lambda case: case[0]
)  # fmt: skip
def test_what_is_said_without_a_recipe(check, machine, status, word):
    said = verdict(check, machine)
    assert said.status == status
    assert word in said.message
    assert said.found


WITH_RECIPE = [
    ("devices", NO_GPU, "has 0 visible"),
    ("devices", changed("gpu", visible="0,1"), "has 2 visible"),
    ("devices", changed("gpu", gpus=gpus(V100)), "less memory"),
    ("devices", changed("gpu", gpus=(replace(gpus()[0], fault="GPU is lost"),)), "GPU is lost"),
    ("devices", changed("gpu", gpus=(replace(gpus()[0], is_mig=True),)), "MIG"),
    ("device-memory", changed("gpu", gpus=gpus(used=79 * GIB)), "less free"),
    ("driver", NO_GPU, "no NVIDIA driver"),
    ("bf16", changed("gpu", gpus=gpus(V100)), "emulated"),
    ("torch", with_stack("torch", {"error": "cannot be imported: no module"}), "no module"),
    ("nccl", with_stack("torch", nccl=None), "ranks on GPUs"),
    ("interfaces", env(NCCL_SOCKET_IFNAME="ib0"), "names no interface"),
    ("p2p", changed("gpu", gpus=gpus(ADA, 2), driver="535.54"), "NCCL hangs"),
    ("shared-memory", changed("disk", shared_memory=folder(GIB // 32, total=GIB // 16)), "Docker"),
    ("disk", with_folder("run", free=1000), "checkpoint"),
    ("disk", with_folder("run", writable=False), "not writable"),
    ("host-memory", changed("host", memory=GIB), "the run needs"),
    ("caches", with_folder("datasets", writable=False), "not writable"),
    ("hub", replace(changed("network", hub="offline"), hub_model=UNCACHED), "not in the cache"),
    ("hub", replace(HEALTHY, hub_model=replace(UNCACHED, access="absent")), "has no"),
    ("gated", replace(HEALTHY, hub_model=replace(UNCACHED, access="refused")), "denies"),
    ("versions", packages(peft=None), "peft"),
    ("versions", packages(transformers="4.57.0"), "4.57.0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "machine", "word"), WITH_RECIPE, ids=named(WITH_RECIPE)
)  # fmt: skip
def test_what_a_run_needs_and_is_not_there_fails(plan, check, machine, word):
    said = verdict(check, machine, plan)
    assert (said.status, word in said.message) == ("fail", True), said
    assert verdict(check, READY, plan).status in ("ok", "skip")


BUILDING = [
    ("compiler", changed("build", compiler=None), "cpu_adam"),
    ("compiler", changed("build", compiler="7.5.0"), "GCC 9"),
    ("ninja", changed("build", ninja=None), "cpu_adam"),
    ("python-headers", changed("build", python_headers=False), "cpu_adam"),
    ("deepspeed-ops", with_stack("deepspeed", {"error": "cannot be imported: x"}), "deepspeed"),
    ("deepspeed-ops", with_stack("deepspeed", compatible={"cpu_adam": False}), "cpu_adam"),
]


@pytest.mark.parametrize(
    ("check", "machine", "word"), BUILDING, ids=named(BUILDING)
)  # fmt: skip
def test_offload_needs_what_builds_cpu_adam(offload_plan, plan, check, machine, word):
    said = verdict(check, machine, offload_plan)
    assert (said.status, word in said.message) == ("fail", True), said
    assert verdict(check, READY, offload_plan).status == "ok"
    if check != "deepspeed-ops":
        assert verdict(check, machine, plan).status == "warn"  # nothing is built without offload


def test_an_operator_that_came_compiled_needs_no_compiler(offload_plan):
    machine = replace(
        changed("build", compiler=None), stack=with_stack("deepspeed", installed=["cpu_adam"]).stack
    )
    assert verdict("compiler", machine, offload_plan).status == "warn"


def test_a_cuda_operator_of_the_profile_needs_nvcc(tmp_path):
    plan = factories.plan(tmp_path, text=FULL + "sharding: {engine: deepspeed, zero_stage: 2}\n")
    plan = factories.with_settings(plan, {"deepspeed.profile": {"optimizer.type": "AdamW"}})
    assert verdict("nvcc", HEALTHY, plan).status == "ok"
    assert verdict("nvcc", changed("build", nvcc=None), plan).status == "fail"
    assert verdict("nvcc", changed("build", nvcc="11.8"), plan).status == "fail"


def test_nvme_offload_needs_libaio_and_a_folder(offload_plan):
    job = replace(offload_plan.job, offload_optimizer="nvme")
    profile = {"zero_optimization.offload_optimizer.nvme_path": "/nvme"}
    plan = factories.with_settings(replace(offload_plan, job=job), {"deepspeed.profile": profile})
    machine = replace(HEALTHY, nvme=folder())
    assert verdict("nvme", machine, plan).status == "ok"
    assert verdict("nvme", HEALTHY, plan).status == "fail"
    assert verdict("nvme", replace(HEALTHY, nvme=folder(writable=False)), plan).status == "fail"
    assert verdict("nvme", replace(HEALTHY, nvme=folder(on_network=True)), plan).status == "warn"
    assert verdict("nvme", machine, offload_plan).status == "skip"
    bare = replace(
        changed("build", libaio=False), stack=with_stack("deepspeed", compatible={"async_io": False}).stack
    )
    assert verdict("libaio", bare, plan).status == "fail"
    assert verdict("libaio", bare, offload_plan).status == "skip"
    assert verdict("libaio", machine, plan).status == "ok"


def test_a_quantised_run_needs_bitsandbytes(tmp_path):
    text = factories.BASE.replace("llama-7b}", "llama-7b, quantization: nf4}")
    plan = factories.plan(tmp_path, text=text)
    for broken in (
        with_stack("bitsandbytes", loaded=False, said="no binary"),
        with_stack("bitsandbytes", compiled_with_cuda=False),
        with_stack("bitsandbytes", {"error": "cannot be imported: x"}),
    ):
        assert verdict("bitsandbytes", broken, plan).status == "fail"
    assert verdict("bitsandbytes", HEALTHY, plan).status == "ok"


def test_wandb_is_asked_for_a_login_only_where_a_run_reports_to_it(tmp_path, plan):
    text = factories.BASE.replace("max_steps: 10}", "max_steps: 10, report_to: wandb}")
    reporting = factories.plan(tmp_path, text=text)
    out = changed("host", wandb_login=False)
    assert verdict("wandb", out, reporting).status == "warn"
    assert verdict("wandb", HEALTHY, reporting).status == "ok"
    silent = verdict("wandb", replace(HEALTHY, wandb_obstacle="it does not answer"), reporting)
    assert silent.status == "warn"
    assert silent.message.startswith("it does not answer: the run will be logged offline")
    assert subject_of(reporting, "r.yaml").wandb
    assert not subject_of(plan, "r.yaml").wandb
    assert verdict("wandb", out, plan).status == "skip"
    offline = changed("host", wandb_login=False, environment={"WANDB_MODE": "offline"})
    assert verdict("wandb", offline, reporting).status == "ok"


def test_tf32_is_refused_by_transformers_on_old_devices(tmp_path, plan):
    asking = factories.with_settings(plan, {"trainer.tf32": True})
    old = changed("gpu", gpus=gpus(V100))
    assert verdict("tf32", old, asking).status == "fail"
    assert verdict("tf32", HEALTHY, asking).status == "ok"
    assert verdict("tf32", old, plan).status == "fail", "planned for another device"
    silent = factories.with_settings(plan, {"trainer.tf32": None})
    assert verdict("tf32", old, silent).status == "skip"


def test_host_memory_that_others_use_is_a_warning(plan):
    busy = changed("host", available=1)
    assert verdict("host-memory", busy, plan).status == "warn"
    assert verdict("host-memory", HEALTHY, plan).status == "ok"


def test_checkpoints_without_a_limit_are_a_warning(tmp_path):
    text = factories.BASE.replace("max_steps: 10", "num_train_epochs: 3")
    plan = factories.plan(tmp_path, text=text)
    unlimited = factories.with_settings(plan, {"trainer.save_total_limit": None})
    said = verdict("disk", HEALTHY, unlimited)
    assert (said.status, "not limited" in said.message) == ("warn", True)


def test_the_download_counts_where_the_caches_share_the_disk_of_the_run(plan):
    room = {**HEALTHY.disk.folders, "run": folder(12 * GIB)}
    machine = replace(changed("disk", folders=room), hub_model=UNCACHED)
    assert verdict("disk", machine, plan).status == "fail"
    assert verdict("disk", replace(machine, hub_model=MODEL), plan).status == "ok"
    apart = {**room, "hub": folder(900 * GIB, filesystem=7)}
    elsewhere = replace(changed("disk", folders=apart), hub_model=UNCACHED)
    assert verdict("disk", elsewhere, plan).status == "ok"


def test_the_hub_is_not_missed_by_a_run_that_fetches_nothing(plan):
    away = changed("network", hub="unreachable")
    row = {"path": "/data/train.jsonl"}
    for path, status in (("/data/train.jsonl", "skip"), ("org/rows", "warn")):
        there = factories.with_settings(plan, {"data.train": [{**row, "path": path}]})
        assert verdict("hub", away, there).status == status


def test_a_cpu_plan_asks_for_no_gpu(cpu_plan):
    machine = replace(NO_GPU, hub_model=MODEL)
    for check in ("devices", "driver", "bf16", "tf32"):
        assert verdict(check, machine, cpu_plan).status == "skip"


def test_what_the_plan_switches_off_between_rtx_40_cards_is_not_missed(plan):
    machine = changed("gpu", gpus=gpus(ADA, 2), driver="535.54")
    two = replace(plan, hardware=replace(plan.hardware, devices_per_node=2))
    assert verdict("p2p", machine, two).status == "fail"
    names = ("launch.env.NCCL_P2P_DISABLE", "launch.env.NCCL_IB_DISABLE")
    without = factories.with_settings(two, dict.fromkeys(names, "1"))
    assert verdict("p2p", machine, without).status == "ok"


def test_of_several_machines_this_one_must_have_its_share(plan):
    two = replace(plan, hardware=replace(plan.hardware, num_nodes=2))
    assert verdict("devices", READY, two).status == "ok"
    more = replace(plan, hardware=replace(plan.hardware, num_nodes=2, devices_per_node=64))
    said = verdict("devices", READY, more)
    assert (said.status, "on each node" in said.message) == ("fail", True)


@pytest.mark.parametrize(
    ("setting", "value", "package"),
    [
        ("trainer.use_liger_kernel", True, "liger_kernel"),
        ("model.attn_implementation", "flash_attention_2", "flash_attn"),
    ],
)
def test_a_package_of_no_extra_is_asked_for_by_its_own_name(plan, monkeypatch, setting, value, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # without `kernels`
    asking = factories.with_settings(plan, {setting: value})
    said = verdict("versions", HEALTHY, asking)
    assert (said.status, said.message) == ("fail", f"not installed: {package}")
    assert said.hint == install_hint([package])
    assert verdict("versions", packages(**{package: "1.0"}), asking).status == "ok"
    assert verdict("versions", HEALTHY, plan).status == "ok"


def test_the_cache_that_a_run_takes_is_the_one_that_is_looked_at(plan, monkeypatch):
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRANSFORMERS_CACHE", "/data/models")
    assert subject_of(plan, "r.yaml").env["HF_HUB_CACHE"] == "/data/models"
