"""Offload to NVMe: what is planned, what is refused, what a machine must have, whose the files are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import factories
import pytest
from factories import facts, recipe
from machines import GIB, HEALTHY, folder, verdict
from memory_cases import states_of

from launcher.errors import MachineError, RecipeError
from launcher.execute import start_checks
from launcher.execute.leftovers import LOCK, reserved_folder, swap_files
from launcher.inputs import planning_facts
from launcher.knowledge.doctor.needs import built_ops, nvme_path
from launcher.knowledge.lint.check import lint_text
from launcher.plan.stored import StoredPlan
from launcher.planner.adapting import ways_out
from launcher.planner.planner import make_plan
from launcher.planner.resuming import compare_plans
from launcher.planner.tiny import tiny_on_cpu
from launcher.render.bundle import render

FULL = factories.BASE.replace("adapter: {type: lora, r: 8}\n", "")
NVME = FULL + "sharding: {offload_optimizer: nvme, nvme_path: /local/nvme}\n"
BOTH = NVME.replace("{offload", "{offload_param: nvme, offload")
PARAMS = 6_738_415_616


def planned(folder, text=NVME, on="8xA100-80GB", profile=None, **values):
    return make_plan(recipe(folder, text, **values), facts(on, profile=profile))


def refused(folder, code, *words, **given):
    with pytest.raises(RecipeError) as raised:
        planned(folder, **given)
    (problem,) = raised.value.problems
    assert problem.code == code
    assert problem.line is not None, "the place in the recipe"
    assert all(word in f"{problem.path} {problem.message} {problem.hint}" for word in words), problem


def test_the_stage_becomes_3_and_every_value_is_rendered_with_its_reason(tmp_path):
    plan = planned(tmp_path, BOTH)
    config = render(plan).ds_config
    zero = config["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"] == {
        "device": "nvme", "nvme_path": "/local/nvme", "pin_memory": True, "buffer_count": 4,
        "pipeline_read": False, "pipeline_write": False,
    }  # fmt: skip
    assert zero["offload_param"].items() >= {"device": "nvme", "nvme_path": "/local/nvme"}.items()
    assert config["aio"] == {
        "block_size": 2**20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False,
        "overlap_events": True,
    }  # fmt: skip
    decided = [
        s for key, s in plan.provenance.items() if key.startswith(("deepspeed.offload", "deepspeed.aio"))
    ]
    assert len(decided) >= 13
    assert all(setting.reason for setting in decided)
    assert lint_text(json.dumps(config), "ds_config.json") == []
    assert any("cannot be resumed" in warning for warning in plan.warnings)


def test_parameters_on_a_disk_do_not_wait_for_reuse(tmp_path, root):
    """With DeepSpeed's default of 1e9 values more of them wait than there are buffers."""
    config = render(planned(tmp_path, BOTH)).ds_config
    assert config["zero_optimization"]["stage3_max_reuse_distance"] == 0
    profile = json.loads((root / "ds_configs" / "zero3_nvme.json").read_text())
    profile["zero_optimization"]["stage3_max_reuse_distance"] = 1_000_000_000
    plan = planned(tmp_path, FULL + "sharding: {config: zero3_nvme}\n", profile=profile)
    assert render(plan).ds_config["zero_optimization"]["stage3_max_reuse_distance"] == 1_000_000_000
    assert any("Not enough buffers" in warning for warning in plan.warnings)


def test_states_alone_leave_the_parameters_where_they_are(tmp_path):
    config = render(planned(tmp_path)).ds_config
    assert "offload_param" not in config["zero_optimization"]
    assert "stage3_max_reuse_distance" not in config["zero_optimization"]


@pytest.mark.parametrize(("on", "ranks"), [("1xA100-80GB", 1), ("8xA100-80GB", 8)])
def test_a_parameter_buffer_holds_a_ranks_share_of_the_largest_parameter(tmp_path, on, ranks):
    config = render(planned(tmp_path, BOTH, on)).ds_config
    size = config["zero_optimization"]["offload_param"]["buffer_size"]
    share = -(-32000 * 4096 // ranks)
    assert share <= size < share + 1024


def test_added_tokens_make_the_largest_parameter_larger(tmp_path):
    text = BOTH.replace("llama-7b}", "llama-7b, add_tokens: [<a>, <b>, <c>]}")
    config = render(planned(tmp_path, text, "1xA100-80GB")).ds_config
    assert config["zero_optimization"]["offload_param"]["buffer_size"] >= 32003 * 4096


def test_memory_counts_disk_and_buffers(tmp_path):
    plan = planned(tmp_path)
    host, owned = plan.memory.host, -(-PARAMS // 8)
    # Master weights, two moments and the gradient, in four bytes each.
    assert host.nvme == pytest.approx(16 * PARAMS, rel=1e-6)
    # The partition of 16-bit gradients, and four buffers of a sub-group, on each rank.
    assert host.staging == pytest.approx(8 * (2 + 16) * owned, rel=1e-6)
    assert host.offloaded == 0
    assert planned(tmp_path, BOTH).memory.host.nvme > host.nvme


def test_an_offload_that_the_hosts_buffers_do_not_fit_is_a_miss(tmp_path):
    from launcher.errors import DoesNotFit

    loaded = recipe(tmp_path, NVME)
    with pytest.raises(DoesNotFit, match="in the host's memory"):
        make_plan(loaded, replace(facts(), host_bytes=10 * 10**9))


def test_auto_never_chooses_a_disk(tmp_path):
    text = FULL + "sharding: {offload_optimizer: auto, offload_param: auto}\n"
    plan = planned(tmp_path, text, "1xA100-40GB")
    assert plan.job.offload_optimizer == "cpu"
    assert nvme_path(plan) is None


@pytest.mark.parametrize("stage", [1, 2])
def test_below_stage_3_it_is_refused(tmp_path, stage):
    text = NVME.replace("nvme_path", f"zero_stage: {stage}, nvme_path")
    refused(tmp_path, "nvme-stage", "sharding.offload_optimizer", "ZeRO-3", text=text)


def test_without_a_folder_it_is_refused_unless_the_profile_names_one(tmp_path, root):
    text = NVME.replace(", nvme_path: /local/nvme", "")
    refused(tmp_path, "nvme-path-missing", "sharding.offload_optimizer", text=text)
    profile = json.loads((root / "ds_configs" / "zero3_nvme.json").read_text())
    named = FULL + "sharding: {config: zero3_nvme}\n"
    plan = planned(tmp_path, named, profile=profile)
    assert nvme_path(plan) == "/local_nvme"
    # The recipe's own folder stands in place of the profile's, in both blocks.
    named = FULL + "sharding: {config: zero3_nvme, nvme_path: /mine}\n"
    zero = render(planned(tmp_path, named, profile=profile)).ds_config["zero_optimization"]
    assert {zero[name]["nvme_path"] for name in ("offload_optimizer", "offload_param")} == {"/mine"}


def test_a_folder_that_nothing_uses_is_refused(tmp_path):
    text = FULL + "sharding: {zero_stage: 3, nvme_path: /local/nvme}\n"
    refused(tmp_path, "nvme-path-unused", "sharding.nvme_path", text=text)


def test_parameters_on_a_disk_are_refused_to_one_process_on_a_cpu(tmp_path):
    refused(tmp_path, "nvme-one-cpu", "sharding.offload_param", "wrong", text=BOTH, on="cpu")
    assert planned(tmp_path, BOTH, on="2xcpu").job.offload_param == "nvme"
    assert planned(tmp_path, NVME, on="cpu").job.offload_optimizer == "nvme"


@pytest.mark.parametrize(("states", "path"), [("nvme", "/local/nvme"), ("none", None)])
def test_a_rehearsal_on_one_cpu_leaves_the_parameters_in_memory(tmp_path, states, path):
    text = BOTH + "adapter: {type: lora, r: 8}\n"  # which leaves room on a small machine
    loaded = tiny_on_cpu(recipe(tmp_path, text, sharding__offload_optimizer=states))
    plan = make_plan(loaded, facts("cpu"))
    assert (plan.job.offload_optimizer, plan.job.offload_param) == (states, "none")
    assert nvme_path(plan) == path


def test_restarts_are_refused_because_nothing_can_be_gone_on_from(tmp_path):
    text = NVME + "launch: {max_restarts: 2}\n"
    refused(tmp_path, "nvme-restarts", "launch.max_restarts", text=text)


@pytest.mark.parametrize(
    ("block", "key", "value"),
    [
        ("offload_optimizer", "buffer_count", 3),
        ("offload_optimizer", "pipeline_read", True),
        ("offload_param", "buffer_size", 10_000_000),
        ("offload_param", "buffer_count", 1),
    ],
)
def test_buffers_of_a_profile_at_which_deepspeed_stops_are_refused(tmp_path, root, block, key, value):
    profile = json.loads((root / "ds_configs" / "zero3_nvme.json").read_text())
    profile["zero_optimization"][block][key] = value
    text = FULL + "sharding: {config: zero3_nvme}\n"
    refused(tmp_path, "nvme-buffers", "at least", text=text, on="1xA100-80GB", profile=profile)


def test_larger_buffers_of_a_profile_are_kept_and_counted(tmp_path, root):
    profile = json.loads((root / "ds_configs" / "zero3_nvme.json").read_text())
    text = FULL + "sharding: {config: zero3_nvme}\n"
    before = planned(tmp_path, text, profile=profile)
    profile["zero_optimization"]["offload_optimizer"]["buffer_count"] = 6
    profile["aio"]["queue_depth"] = 32
    after = planned(tmp_path, text, profile=profile)
    config = render(after).ds_config
    assert config["zero_optimization"]["offload_optimizer"]["buffer_count"] == 6
    assert config["aio"]["queue_depth"] == 32
    more = states_of(after.spec, after.job).staging - states_of(before.spec, before.job).staging
    assert more == 2 * 4 * -(-PARAMS // 8)


def test_an_optimizer_that_the_cpu_has_none_of_is_refused_as_with_cpu(tmp_path):
    text = NVME.replace("max_steps: 10", "max_steps: 10, optim: adafactor")
    with pytest.raises(RecipeError, match="DeepSpeedCPUAdam") as refused:
        planned(tmp_path, text)
    (problem,) = refused.value.problems
    assert (problem.code, problem.path) == ("fix-offload-needs-adamw", "trainer.optim")


def test_paths_are_relative_to_the_recipe_and_may_name_a_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH_OF_NODE", "/scratch/7")
    text = NVME.replace("/local/nvme", '"${ENV:SCRATCH_OF_NODE}/swap"')
    assert nvme_path(planned(tmp_path, text)) == "/scratch/7/swap"
    assert nvme_path(planned(tmp_path, NVME.replace("/local/nvme", "swap"))) == str(tmp_path / "swap")


def test_what_runs_out_of_memory_stays_on_the_disk(tmp_path):
    text = NVME.replace("trainer: {", "global_batch_size: 8\ntrainer: {per_device_train_batch_size: 1, ")
    plan = planned(tmp_path, text)
    assert "offload" in ways_out(plan)
    assert "async_io" in built_ops(plan)


def test_the_guard_refuses_its_checkpoints_to_every_plan(tmp_path):
    """Also to the same one: DeepSpeed would begin with fresh moments."""
    disk, host = (
        json.loads(render(planned(tmp_path, text)).files["plan.json"])
        for text in (NVME, NVME.replace("offload_optimizer: nvme, nvme_path: /local/nvme", "zero_stage: 3"))
    )
    for old, new in ((disk, disk), (disk, host), (host, disk)):
        (refusal,) = [
            found
            for found in compare_plans(StoredPlan(old), StoredPlan(new), 8).refused
            if "NVMe" in found.reason
        ]
        assert refusal.setting == "sharding.offload_optimizer"
        assert "model.name_or_path" in refusal.fix
    assert compare_plans(StoredPlan(host), StoredPlan(host), 8).refused == []


# --- the machine -----------------------------------------------------------------------------------------


def test_doctor_asks_for_room_and_rights(tmp_path):
    plan = planned(tmp_path)
    wanted = plan.memory.host.nvme
    said = verdict("nvme", replace(HEALTHY, nvme=folder(free=wanted + GIB)), plan)
    assert said.status == "ok"
    assert verdict("nvme", replace(HEALTHY, nvme=folder(free=wanted - GIB)), plan).status == "fail"
    assert verdict("nvme", replace(HEALTHY, nvme=folder(writable=False)), plan).status == "fail"
    assert verdict("nvme", replace(HEALTHY, nvme=folder(on_network=True)), plan).status == "warn"
    assert verdict("nvme", HEALTHY, factories.plan(tmp_path)).status == "skip"


def small(tmp_path, where):
    """A plan that this machine's disk has room for, with its folder at `where`."""
    plan = planned(tmp_path, NVME.replace("/local/nvme", f'"{where}"'))
    host = replace(plan.memory.host, nvme=2**20)
    return replace(plan, memory=replace(plan.memory, host=host))


@pytest.fixture
def machine(monkeypatch):
    """What `run` reads of the machine, healthy unless changed."""
    found = {"build": HEALTHY.build, "stack": dict(HEALTHY.stack)}
    monkeypatch.setattr(start_checks, "read_build", lambda environ: found["build"])
    monkeypatch.setattr(start_checks, "ask_stack", lambda python, environ: found["stack"])
    return found


def test_a_run_starts_where_folder_and_libaio_are(tmp_path, machine):
    plan = small(tmp_path, tmp_path / "new" / "swap")
    start_checks.check_operators(plan)
    assert not (tmp_path / "new").exists(), "a check makes nothing"
    without = {**machine["stack"]["deepspeed"], "compatible": {"cpu_adam": True, "async_io": False}}
    machine["build"] = replace(HEALTHY.build, libaio=False)
    machine["stack"]["deepspeed"] = without
    with pytest.raises(MachineError) as raised:
        start_checks.check_operators(plan)
    said = {problem.code: problem for problem in raised.value.problems}
    assert MachineError.exit_code == 4
    assert {"aio-missing", "deepspeed-ops"} == set(said)
    assert "libaio-dev (Debian, Ubuntu)" in said["aio-missing"].hint
    assert "libaio-devel (Fedora, RHEL)" in said["aio-missing"].hint
    doctor = verdict("libaio", replace(HEALTHY, build=machine["build"], stack=machine["stack"]), plan)
    assert said["aio-missing"].hint == doctor.hint, "the same words"


def test_a_plan_only_warns_of_what_is_missing_here(tmp_path, machine):
    assert start_checks.missing_for_operators(small(tmp_path, tmp_path / "swap")) == []
    machine["build"] = replace(HEALTHY.build, libaio=False)
    (tmp_path / "file").write_text("x")
    first, second = start_checks.missing_for_operators(small(tmp_path, tmp_path / "file" / "swap"))
    assert "not writable" in first
    assert "libaio-dev" in second
    assert planning_facts.operator_warnings(factories.plan(tmp_path)) == []


def test_a_run_without_such_an_offload_asks_nothing(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("the machine was asked")

    monkeypatch.setattr(start_checks, "read_build", never)
    monkeypatch.setattr(start_checks, "ask_stack", never)
    plan = factories.plan(tmp_path)
    start_checks.check_operators(plan)
    with start_checks.holding_nvme(plan, never):
        pass


def test_a_folder_that_cannot_be_and_one_without_room_are_refused(tmp_path, machine):
    (tmp_path / "file").write_text("x")
    with pytest.raises(MachineError) as raised:
        start_checks.check_operators(small(tmp_path, tmp_path / "file" / "swap"))
    assert raised.value.problems[0].code == "nvme-folder"
    assert "not writable" in raised.value.problems[0].message
    plan = small(tmp_path, tmp_path / "swap")
    host = replace(plan.memory.host, nvme=10**18)
    with pytest.raises(MachineError, match="the run needs"):
        start_checks.check_operators(replace(plan, memory=replace(plan.memory, host=host)))


# --- whose the files are ---------------------------------------------------------------------------------


def leave_files(where):
    """What DeepSpeed 0.19.8 leaves behind, and a file that is not its own."""
    names = ("optimizer/rank0/0_20.tensor.swp", "optimizer/rank1/exp_avg-0_20.tensor.swp",
             "bfloat16params/rank0/3_param.tensor.swp")  # fmt: skip
    for name in names:
        path = where / "zero_stage_3" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
    (where / "precious.txt").write_text("mine")
    (where / "zero_stage_3" / "optimizer" / "rank0" / "notes.txt").write_text("mine, too")


def test_files_of_a_killed_run_are_removed_and_no_others(tmp_path):
    where = tmp_path / "swap"
    with reserved_folder(where):
        leave_files(where)
        assert len(swap_files(where)) == 3
    assert swap_files(where) == {}, "the end of a run leaves none"
    leave_files(where)
    with reserved_folder(where) as freed:
        assert freed == 3000
    left = {str(path.relative_to(where)) for path in where.rglob("*") if path.is_file()}
    assert left == {LOCK, "precious.txt", "zero_stage_3/optimizer/rank0/notes.txt"}
    assert not (where / "zero_stage_3" / "bfloat16params").exists()


def test_what_a_killed_run_left_counts_as_room(tmp_path, machine):
    where = tmp_path / "swap"
    plan = small(tmp_path, where)
    free = start_checks.read_folder(where).free
    host = replace(plan.memory.host, nvme=free + 10 * GIB)
    plan = replace(plan, memory=replace(plan.memory, host=host))
    with reserved_folder(where):
        pass
    leave_files(where)
    with pytest.raises(MachineError, match="the run needs"):
        start_checks.check_operators(plan)
    os.truncate(where / "zero_stage_3" / "optimizer" / "rank0" / "0_20.tensor.swp", 20 * GIB)
    start_checks.check_operators(plan)


def test_files_of_somebody_elses_run_are_not_touched(tmp_path):
    where = tmp_path / "swap"
    leave_files(where)
    with pytest.raises(MachineError, match="no run of effilaunch wrote") as raised, reserved_folder(where):
        pass
    assert raised.value.problems[0].code == "nvme-foreign"
    assert len(swap_files(where)) == 3


def test_two_runs_do_not_share_a_folder(tmp_path):
    where = tmp_path / "swap"
    code = (
        "import sys; from pathlib import Path; from launcher.errors import MachineError\n"
        "from launcher.execute.leftovers import reserved_folder\n"
        "try:\n    with reserved_folder(Path(sys.argv[1])): print('got it')\n"
        "except MachineError as error: print(error.problems[0].code, error.problems[0].message)\n"
    )

    def other():
        return subprocess.run(
            [sys.executable, "-c", code, str(where)], capture_output=True, text=True, check=True
        ).stdout

    with reserved_folder(where):
        assert other().startswith(f"nvme-in-use another run (process {os.getpid()})")
    assert other() == "got it\n"
