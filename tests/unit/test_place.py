"""Places, and what each member starts: ranks, late values, interfaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace

import pytest
from factories import plan
from machines import gpus

from launcher.execute.binding import Order, bind_order
from launcher.execute.start import _order
from launcher.execute.supervise import Limits
from launcher.machine.gpus import STARTED_FOR
from launcher.machine.hardware import parse_hardware
from launcher.machine.interfaces import addresses, interface_of, is_this_machine, own_address_towards
from launcher.machine.job_member import JobMember
from launcher.machine.node_facts import (
    NodeFacts,
    another_command,
    differences,
    different_versions,
    missing_devices,
    one_machine_twice,
    smaller_devices,
)
from launcher.render.bundle import render
from launcher.schedulers import slurm_nodes
from launcher.schedulers.slurm_commands import SlurmResult
from launcher.schedulers.ssh import forwarded
from launcher.train.agent import Agent, bind_interfaces, elastic_arguments, read_agent
from launcher.train.job import RANKS, take_rank

ONE_A_NODE = JobMember("job", 1, 2, 2, 1, 1, 0, "node1", 29400)
ONE_A_RANK = JobMember("job", 3, 4, 2, 1, 2, 1, "node1", 29400)


def order_of(bundle, **changes) -> Order:
    hardware = bundle.plan.hardware
    given = Order(
        "/runs/{devices}", bundle.command, bundle.env, 4711, hardware.num_devices,
        hardware.devices_per_node, not hardware.is_cpu, "none", 60.0, 1.0, None, True, None,
        Limits(leave=1.0),
    )  # fmt: skip
    return replace(given, **changes)


def test_the_ranks_of_a_member():
    assert list(ONE_A_NODE.ranks(8)) == list(range(8, 16))
    assert list(ONE_A_RANK.ranks(2)) == [3]
    assert replace(ONE_A_NODE, member=0).is_head
    assert not ONE_A_NODE.is_head


@pytest.mark.parametrize("engine", ["deepspeed", "ddp"])
def test_each_node_starts_torchrun_with_its_place(tmp_path, engine):
    bundle = render(plan(tmp_path, "2x4xA100-80GB", sharding__engine=engine))
    bound = bind_order(order_of(bundle), ONE_A_NODE, gpus()[3:], "digest")
    words = " ".join(bound.argv)
    assert "{node_rank}" not in words
    assert "/runs/{devices} --nnodes 2" in words, "a folder's name is no late value"
    assert "--nproc-per-node 4 --node-rank 1 --master-addr node1 --master-port 4711" in words
    assert bound.env["CUDA_VISIBLE_DEVICES"] == "3,4,5,6"
    assert bound.env[STARTED_FOR] == "GPU-0003,GPU-0004,GPU-0005,GPU-0006"
    agent = read_agent(bound.argv[3:], bound.env)
    assert (agent.place, agent.asked, agent.ranks) == (ONE_A_NODE, "digest", 4)
    assert "hostfile" not in bundle.files
    assert "accelerate.yaml" not in bundle.files


def test_a_task_per_device_is_a_node_of_torchrun_with_one_rank(tmp_path, monkeypatch):
    bundle = render(plan(tmp_path, "2x2xA100-80GB"), worker="launcher.train.other")
    bound = bind_order(order_of(bundle), ONE_A_RANK, gpus(count=2))
    assert bound.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    agent = read_agent(bound.argv[3:], bound.env)
    assert (agent.ranks, agent.module) == (1, "launcher.train.other")
    monkeypatch.setenv(RANKS, "")
    nodes = [replace(facts_of(n, n // 2), address="127.0.0.1") for n in range(4)]
    words = elastic_arguments(agent, nodes)
    assert {"--nnodes=4", "--nproc-per-node=1", "--rdzv-backend=c10d", "--max-restarts=0"} <= set(words)
    for devices, local in (("0,1", "1"), ("5", "0")):  # with a device of its own it is number 0
        for name, value in {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices, "RANK": "9"}.items():
            monkeypatch.setenv(name, value)
        for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
            monkeypatch.setenv(name, "")
        elastic_arguments(agent, nodes)
        take_rank()
        told = {"RANK": "3", "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1",
                "MASTER_PORT": "29400"}  # fmt: skip
        assert told.items() <= os.environ.items()


@pytest.mark.parametrize("engine", ["deepspeed", "ddp"])
def test_tasks_of_one_node_are_one_job(tmp_path, engine):
    """The plan's launcher would start all ranks of the node in each task."""
    bundle = render(plan(tmp_path, "2xcpu", sharding__engine=engine), worker="launcher.train.other")
    place = JobMember("job", 1, 2, 1, 0, 2, 1, "node1", 29400)
    order = _order(bundle, tmp_path, 4711, None, Limits(), place)
    bound = bind_order(order, place, [])
    agent = read_agent(bound.argv[3:], bound.env)
    assert (agent.ranks, agent.place.members, agent.module) == (1, 2, "launcher.train.other")
    assert bound.argv[2] == "launcher.train.agent"


def test_the_interface_is_named_unless_the_user_named_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "logs").mkdir()
    first = JobMember("job", 0, 2, 2, 0, 1, 0, "127.0.0.1", 29400)
    agent = Agent(tmp_path, first, "", 1, 1, "worker", 1.0)
    nodes = [facts_of(0, 0), replace(facts_of(1, 1), address="127.0.0.1")]
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    bind_interfaces(agent, nodes)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert "2 nodes (host0, host1) meet at 127.0.0.1 over lo" in capsys.readouterr().out
    told = json.loads((tmp_path / "logs" / "nodes.json").read_text())
    assert (told["interface"], [node["host"] for node in told["nodes"]]) == ("lo", ["host0", "host1"])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    bind_interfaces(agent, nodes)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_ranks_of_one_machine_meet_on_loopback(tmp_path, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    alone = JobMember("", 0, 1, 1, 0, 1, 0, "", 0)
    several, one = (order_of(render(plan(tmp_path, on))) for on in ("2xcpu", "cpu"))
    bound = bind_order(several, alone, [])
    assert (bound.env["GLOO_SOCKET_IFNAME"], bound.env["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert "GLOO_SOCKET_IFNAME" not in bind_order(one, alone, []).env
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert bind_order(several, alone, []).env["GLOO_SOCKET_IFNAME"] == "mine"


def test_an_order_survives_the_way(tmp_path):
    order = order_of(render(plan(tmp_path, "2x4xA100-80GB")), resume="/runs/a/checkpoints/checkpoint-3")
    assert Order.from_json(json.loads(json.dumps(order.to_json()))) == order


def test_this_machine_knows_its_addresses():
    assert addresses()["127.0.0.1"] == "lo"
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("203.0.113.9") is None
    assert is_this_machine("localhost")
    assert not is_this_machine("a.invalid")


def test_a_text_that_is_no_name_leads_nowhere(monkeypatch):
    assert not is_this_machine("a..b")
    with pytest.raises(OSError, match="label empty"):
        own_address_towards("a..b")
    monkeypatch.setattr(slurm_nodes, "ask", lambda *words: SlurmResult(1, "", "no such node"))
    assert slurm_nodes.node_address("a..b") == "a..b"


def test_what_other_machines_get_of_the_environment():
    environ = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "t", "CUDA_VISIBLE_DEVICES": "3", "CUDA_HOME": "/c",
               "EFFILAUNCH_CACHE": "/e", "EFFILAUNCH_RUN": "token", "SECRET": "x", "MINE": "y",
               "PYTHONPATH": "/p", "HOME": "/root", "PATH": "/bin"}  # fmt: skip
    kept = set(forwarded(environ, ["MINE"]))
    assert kept == {"NCCL_DEBUG", "HF_TOKEN", "CUDA_HOME", "EFFILAUNCH_CACHE", "MINE", "PYTHONPATH"}


def facts_of(member: int, node: int, devices=(), **versions) -> NodeFacts:
    there = {"effilaunch": "1", "python": "3.11", "torch": "2.13", **versions}
    uuids = tuple(f"GPU-{node}-{device}" for device in devices)
    return NodeFacts(
        member, node, 0, f"host{node}", "", "job", "asked", "digest", tuple(devices), there, uuids=uuids
    )


def test_nodes_of_another_job_or_with_other_options_are_named():
    names = {0: "host0", 1: "host1"}
    for changes, code in (({"job": "port 29401"}, "another-job"), ({"asked": "other"}, "command-differs")):
        (problem,) = another_command([facts_of(0, 0), replace(facts_of(1, 1), **changes)], names)
        assert problem.code == code
        assert problem.message.startswith("host1 ")
    assert another_command([facts_of(0, 0), facts_of(1, 1)], names) == []


@pytest.mark.parametrize(("digest", "sees"), [("", "does not see"), ("other", "sees another")])
def test_a_node_that_sees_another_plan_is_named(tmp_path, digest, sees):
    nodes = [facts_of(0, 0), replace(facts_of(1, 1), plan=digest)]
    (problem,) = differences(nodes, parse_hardware("2x1xcpu"), tmp_path)
    assert problem.code == "not-shared"
    assert problem.message.startswith(f"host1 {sees} {tmp_path}/plan.json")


def test_different_versions_are_told_as_a_table():
    names = {0: "host0", 1: "host1"}
    assert different_versions([facts_of(0, 0), facts_of(1, 1)], names) == []
    found = different_versions([facts_of(0, 0), facts_of(1, 1, torch="2.12", peft="0.21")], names)
    assert [p.message for p in found] == [
        "torch is not the same on all machines: host0 2.13, host1 2.12",
        "peft is not the same on all machines: host0 none, host1 0.21",
    ]


def test_too_few_devices_are_named():
    hardware = parse_hardware("2x2xA100-80GB")
    names = {0: "host0", 1: "host1", 2: "host1 (member 2)"}
    (problem,) = missing_devices([facts_of(0, 0, "01"), facts_of(1, 1, "0")], hardware, names)
    assert "host1 shows 1 GPUs" in problem.message
    tasks = [facts_of(0, 0, "01"), facts_of(1, 1, "0"), facts_of(2, 1, "0")]
    own = [*tasks[:2], replace(tasks[2], uuids=("GPU-1-1",))]  # each task sees its own GPU as 0
    assert missing_devices(own, hardware, names) == []
    (problem,) = missing_devices(tasks, hardware, names)
    assert "host1 shows 1 GPUs" in problem.message, "both tasks would use the same"
    some = [replace(facts_of(0, 0, "01")), facts_of(1, 0, "23"), *(facts_of(n, 0, "0123") for n in (2, 3))]
    (problem,) = missing_devices(some, parse_hardware("1x4xA100-80GB"), dict.fromkeys(range(4), "host0"))
    assert problem.message == "a task of host0 sees 2 of its 4 GPUs"
    assert missing_devices([facts_of(0, 0), facts_of(1, 1)], parse_hardware("2x2xcpu"), names) == []


def test_two_machines_are_one_where_a_gpu_of_theirs_is():
    hardware = parse_hardware("2x1xA100-80GB")
    names = {number: f"host{number}" for number in range(4)}
    one = replace(facts_of(0, 0, "0"), boot_id="b", uuids=("GPU-1",))
    (problem,) = one_machine_twice(
        [one, replace(facts_of(1, 1, "0"), boot_id="b", uuids=("GPU-1",))], hardware, names
    )
    assert problem.message == "host0 and host1 are one machine: both take GPU-1"
    for changes in ({"uuids": ("GPU-2", "GPU-1")}, {"boot_id": "c"}, {"node_rank": 0}, {"uuids": ()}):
        other = replace(facts_of(1, 1, "0"), **{"boot_id": "b", "uuids": ("GPU-1",), **changes})
        assert one_machine_twice([one, other], hardware, names) == [], changes


def test_a_machine_with_smaller_devices_is_named():
    hardware, gib = parse_hardware("2x2xA100-80GB"), 1 << 30
    names = {0: "host0", 1: "host1"}
    one = replace(facts_of(0, 0, "01"), sizes=(80 * gib, 78 * gib))
    (problem,) = smaller_devices(
        [one, replace(facts_of(1, 1, "01"), sizes=(80 * gib, 40 * gib))], hardware, names
    )
    assert "devices of 80 GiB, host1 has one of 40 GiB" in problem.message
    assert (
        smaller_devices([one, replace(facts_of(1, 1), sizes=(80 * gib, 80 * gib, gib))], hardware, names)
        == []
    )
    assert smaller_devices([facts_of(0, 0), facts_of(1, 1)], hardware, names) == []


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("on", ["2x8xA100-80GB", "2x2xcpu"])
@pytest.mark.parametrize("engine", ["deepspeed", "ddp"])
def test_command_sh_says_how_it_runs_by_hand(tmp_path, on, engine):
    script = render(plan(tmp_path, on, sharding__engine=engine)).files["command.sh"]
    subprocess.run(["shellcheck", "-"], input=script, text=True, check=True)
    path = tmp_path / "command.sh"
    path.write_text(script)
    told = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=False)
    assert told.returncode != 0
    assert "MASTER_ADDR: the address of the machine with NODE_RANK=0" in told.stderr
