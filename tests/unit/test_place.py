"""Places, and what each member starts: ranks, late values, interfaces."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace

import pytest
from factories import plan

from launcher.execute.binding import Order, bind_order
from launcher.execute.nodes.hello import (
    Hello,
    different_versions,
    missing_devices,
    one_machine_twice,
    smaller_devices,
)
from launcher.execute.supervise import Limits
from launcher.facts.hardware import parse_hardware
from launcher.facts.interfaces import addresses, interface_of, is_this_machine, own_address_towards
from launcher.facts.job_member import JobMember
from launcher.render.bundle import render
from launcher.schedulers import slurm_queue
from launcher.schedulers.ssh import forwarded

ONE_A_NODE = JobMember("job", 1, 2, 2, 1, 1, 0, "node1", 29400)
ONE_A_RANK = JobMember("job", 3, 4, 2, 1, 2, 1, "node1", 29400)


def order_of(bundle, **changes) -> Order:
    hardware = bundle.plan.hardware
    given = Order(
        "/runs/{devices}", bundle.command, bundle.worker, bundle.env, "127.0.0.1", 4711, hardware.num_devices,
        hardware.devices_per_node, not hardware.is_cpu, "none", 60.0, 1.0, None, None, Limits(leave=1.0),
    )  # fmt: skip
    return replace(given, **changes)


def test_the_ranks_of_a_member():
    assert list(ONE_A_NODE.ranks(8)) == list(range(8, 16))
    assert list(ONE_A_RANK.ranks(2)) == [3]
    assert replace(ONE_A_NODE, member=0).is_head
    assert not ONE_A_NODE.is_head


@pytest.mark.parametrize("engine", ["deepspeed", "ddp"])
def test_each_machine_names_itself_and_the_first_one(tmp_path, engine):
    bundle = render(plan(tmp_path, "2x4xA100-80GB", sharding__engine=engine))
    bound = bind_order(order_of(bundle), ONE_A_NODE, ["4", "5", "6", "7", "8"])
    words = " ".join(bound.argv)
    assert "{node_rank}" not in words
    if engine == "deepspeed":
        assert (
            "--no_ssh --node_rank 1 --master_addr 127.0.0.1 --include node-0:4,5,6,7@node-1:4,5,6,7" in words
        )
        assert "--hostfile /runs/{devices}/hostfile" in words, "a folder's name is no late value"
    else:
        assert "--machine_rank 1 --main_process_ip 127.0.0.1 --main_process_port 4711" in words
        assert bound.env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_the_hostfile_names_the_nodes_in_order(tmp_path):
    bundle = render(plan(tmp_path, "3x2xcpu", sharding__engine="deepspeed"))
    lines = bundle.files["hostfile"].splitlines()
    assert [line for line in lines if not line.startswith("#")] == [f"node-{n} slots=2" for n in range(3)]
    assert "hostfile" not in render(plan(tmp_path, "2xcpu", sharding__engine="deepspeed")).files
    assert "hostfile" not in render(plan(tmp_path, "2x2xcpu", sharding__engine="ddp")).files


def test_the_launchers_of_the_real_deepspeed_take_the_command(tmp_path):
    """Its own parser and filter, up to the world that it would hand to the ranks."""
    runner = pytest.importorskip("deepspeed.launcher.runner")
    bundle = render(plan(tmp_path, "2x2xA100-80GB", sharding__engine="deepspeed"))
    hosts = tmp_path / "hostfile"
    hosts.write_text(bundle.files["hostfile"].replace("slots=2", "slots=8"))
    bound = bind_order(order_of(bundle, run_dir=str(tmp_path)), ONE_A_NODE, ["6", "7"])
    args = runner.parse_args(bound.argv[3:])
    pool = runner.fetch_hostfile(args.hostfile)
    world = runner.parse_inclusion_exclusion(pool, args.include, args.exclude)
    assert dict(world) == {"node-0": [6, 7], "node-1": [6, 7]}
    assert (args.no_ssh, args.node_rank, args.master_addr, args.master_port) == (True, 1, "127.0.0.1", 4711)


def test_a_member_a_rank_starts_the_worker_with_what_a_launcher_would_tell(tmp_path):
    bundle = render(plan(tmp_path, "2x2xA100-80GB"), worker="launcher.train.other")
    bound = bind_order(order_of(bundle), ONE_A_RANK, ["0", "1"])
    assert bound.argv[1:] == ["-m", "launcher.train.other", "/runs/{devices}"]
    told = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711", "CUDA_VISIBLE_DEVICES": "0,1"}  # fmt: skip
    assert told.items() <= bound.env.items()
    alone = bind_order(order_of(bundle), ONE_A_RANK, ["5"])
    assert (alone.env["CUDA_VISIBLE_DEVICES"], alone.env["LOCAL_RANK"]) == ("5", "0")


def test_the_interface_is_named_unless_the_user_named_one(tmp_path, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    bundle = render(plan(tmp_path, "2x1xcpu"))
    bound = bind_order(order_of(bundle), ONE_A_NODE, [])
    assert (bound.env["GLOO_SOCKET_IFNAME"], bound.env["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert bound.interface == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    users = bind_order(order_of(bundle), ONE_A_NODE, [])
    assert (users.env["GLOO_SOCKET_IFNAME"], users.env["NCCL_SOCKET_IFNAME"]) == ("mine", "ib0")
    assert users.interface == ""


def test_ranks_of_one_machine_meet_on_loopback(tmp_path, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    alone = JobMember("", 0, 1, 1, 0, 1, 0, "", 0)
    several, one = (order_of(render(plan(tmp_path, on))) for on in ("2xcpu", "cpu"))
    bound = bind_order(several, alone, [])
    assert (bound.env["GLOO_SOCKET_IFNAME"], bound.env["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert bound.interface == "", "nothing to tell the user"
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
    monkeypatch.setattr(slurm_queue, "ask", lambda *words: slurm_queue.Answer(1, "", "no such node"))
    assert slurm_queue.node_address("a..b") == "a..b"


def test_what_other_machines_get_of_the_environment():
    environ = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "t", "CUDA_VISIBLE_DEVICES": "3", "CUDA_HOME": "/c",
               "EFFILAUNCH_CACHE": "/e", "EFFILAUNCH_RUN": "token", "SECRET": "x", "MINE": "y",
               "PYTHONPATH": "/p", "HOME": "/root", "PATH": "/bin"}  # fmt: skip
    kept = set(forwarded(environ, ["MINE"]))
    assert kept == {"NCCL_DEBUG", "HF_TOKEN", "CUDA_HOME", "EFFILAUNCH_CACHE", "MINE", "PYTHONPATH"}


def hello(member: int, node: int, devices=(), **versions) -> Hello:
    there = {"effilaunch": "1", "python": "3.11", "torch": "2.13", **versions}
    return Hello("job", "", member, node, 0, f"host{node}", 1, tuple(devices), there)


def test_different_versions_are_told_as_a_table():
    names = {0: "host0", 1: "host1"}
    assert different_versions([hello(0, 0), hello(1, 1)], names) == []
    found = different_versions([hello(0, 0), hello(1, 1, torch="2.12", peft="0.21")], names)
    assert [p.message for p in found] == [
        "torch is not the same on all machines: host0 2.13, host1 2.12",
        "peft is not the same on all machines: host0 none, host1 0.21",
    ]


def test_too_few_devices_are_named():
    hardware = parse_hardware("2x2xA100-80GB")
    names = {0: "host0", 1: "host1", 2: "host1 (member 2)"}
    (problem,) = missing_devices([hello(0, 0, "01"), hello(1, 1, "0")], hardware, names)
    assert "host1 shows 1 GPUs" in problem.message
    own = [hello(0, 0, "01"), hello(1, 1, "0"), hello(2, 1, "0")]  # each task sees its own GPU as 0
    assert missing_devices(own, hardware, names) == []
    assert missing_devices([hello(0, 0), hello(1, 1)], parse_hardware("2x2xcpu"), names) == []


def test_two_machines_are_one_where_a_gpu_of_theirs_is():
    hardware = parse_hardware("2x1xA100-80GB")
    names = {number: f"host{number}" for number in range(4)}
    one = replace(hello(0, 0, "0"), boot_id="b", uuids=("GPU-1",))
    (problem,) = one_machine_twice(
        [one, replace(hello(1, 1, "0"), boot_id="b", uuids=("GPU-1",))], hardware, names
    )
    assert problem.message == "host0 and host1 are one machine: both take GPU-1"
    for changes in ({"uuids": ("GPU-2", "GPU-1")}, {"boot_id": "c"}, {"node_rank": 0}, {"uuids": ()}):
        other = replace(hello(1, 1, "0"), **{"boot_id": "b", "uuids": ("GPU-1",), **changes})
        assert one_machine_twice([one, other], hardware, names) == [], changes


def test_a_machine_with_smaller_devices_is_named():
    hardware, gib = parse_hardware("2x2xA100-80GB"), 1 << 30
    names = {0: "host0", 1: "host1"}
    one = replace(hello(0, 0, "01"), sizes=(80 * gib, 78 * gib))
    (problem,) = smaller_devices(
        [one, replace(hello(1, 1, "01"), sizes=(80 * gib, 40 * gib))], hardware, names
    )
    assert "devices of 80 GiB, host1 has one of 40 GiB" in problem.message
    assert (
        smaller_devices([one, replace(hello(1, 1), sizes=(80 * gib, 80 * gib, gib))], hardware, names) == []
    )
    assert smaller_devices([hello(0, 0), hello(1, 1)], hardware, names) == []


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
