"""Runs that continue with fewer nodes: the plan of each number of nodes, and which nodes are left."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace

import pytest
from factories import facts, recipe
from nvidia_smi import H100, LOST, NvidiaSmi, row, uuid
from patience import wait_until

from launcher.commands.plan import plan_command
from launcher.errors import DoesNotFit, Interrupted, MachineError, Problem, RecipeError, RunFailed
from launcher.execute import attempts, fewer_nodes
from launcher.execute import nodes as module
from launcher.execute.binding import Order
from launcher.execute.endings import KnownFailure
from launcher.execute.fewer_nodes import excludes_faulty, is_loss, seats_left, take_seats
from launcher.execute.nodes import Nodes, Said
from launcher.execute.run_dir import write_run_dir
from launcher.knowledge.diagnose.findings import Error, Finding
from launcher.knowledge.failures.catalogue import FAILURES
from launcher.machine.gpus import Gpu
from launcher.machine.job_member import JobMember
from launcher.machine.node_facts import HOST_LOST, HOST_MISSING
from launcher.planner.adapting import adapt
from launcher.planner.elastic import plan_on
from launcher.render.bundle import render

FULL = """\
model: {name_or_path: huggyllama/llama-7b}
data: {train: [{path: data/train.jsonl}], max_length: 512}
sharding: {engine: deepspeed, zero_stage: 3}
global_batch_size: 64
trainer: {max_steps: 10, per_device_train_batch_size: 1}
launch: {min_nodes: 1}
"""


def planned(folder, on="4x4xA100-80GB", nodes=None, text=FULL, **changes):
    return plan_on(recipe(folder, text, **changes), facts(on), nodes)


def test_each_number_of_nodes_has_the_same_global_batch_and_its_own_memory(tmp_path):
    plan = planned(tmp_path)
    assert plan.hardware.num_nodes == 4
    found = {count.num_nodes: count for count in plan.elastic}
    batches = {number: (count.batch and count.batch.to_json()) for number, count in found.items()}
    assert batches[4] == {"micro": 1, "accumulation": 4, "data_parallel": 16, "global": 64}
    assert batches[2] == {"micro": 1, "accumulation": 8, "data_parallel": 8, "global": 64}
    assert batches[1] == {"micro": 1, "accumulation": 16, "data_parallel": 4, "global": 64}
    assert batches[3] is None
    assert "64 samples are no multiple" in found[3].refused
    assert found[1].needed > found[2].needed > found[4].needed, "each device holds a larger share"
    assert [count.conversion for count in plan.elastic] == [False, False, True, True]
    stored = json.loads(render(plan).files["plan.json"])["elastic"]
    assert [entry["num_nodes"] for entry in stored] == [4, 3, 2, 1]
    assert [entry["refused"] is None for entry in stored] == [True, False, True, True]


def test_a_plan_for_fewer_nodes_keeps_what_was_decided_for_all(tmp_path):
    whole, half = planned(tmp_path), planned(tmp_path, nodes=2)
    same = {name for name in whole.names if whole.at(name) == half.at(name)}
    differ = set(whole.names) - same
    timed = {"runtime.stop_seconds", "launch.env.TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
    assert differ - timed == {"trainer.gradient_accumulation_steps"}
    assert half.hardware.num_nodes == 2
    assert half.elastic == whole.elastic
    assert planned(tmp_path, nodes=3).hardware.num_nodes == 2, "three cannot share 64 samples"


def test_max_nodes_decides_the_batch_where_fewer_come(tmp_path):
    text = FULL.replace("global_batch_size: 64\n", "")
    plan = planned(tmp_path, "2x4xA100-80GB", text=text, launch__max_nodes=4)
    assert [count.num_nodes for count in plan.elastic if count.batch] == [4, 2, 1]
    assert {count.batch.global_size for count in plan.elastic if count.batch} == {plan.batch.global_size}
    assert plan.hardware.num_nodes == 2


@pytest.mark.parametrize(
    ("on", "changes", "path"),
    [
        ("2x4xA100-80GB", {"launch__min_nodes": 3}, "launch.min_nodes"),
        ("4xA100-80GB", {}, "launch.min_nodes"),
        ("4x4xA100-80GB", {"launch__max_nodes": 2}, "launch.max_nodes"),
        ("4x4xA100-80GB", {"launch__min_nodes": "null", "launch__max_nodes": 4}, "launch.max_nodes"),
        ("4x4xA100-80GB", {"launch__min_nodes": 3}, "launch.min_nodes"),
        ("2x4xA100-80GB", {"trainer__save_only_model": "true"}, "launch.min_nodes"),
        ("2x4xA100-80GB", {"data__streaming": "true"}, "launch.min_nodes"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_their_key(tmp_path, on, changes, path):
    with pytest.raises(RecipeError) as error:
        planned(tmp_path, on, **changes)
    (problem,) = error.value.problems
    assert (problem.code, problem.path) == ("elastic-nodes", path)


def test_a_least_number_that_lacks_memory_is_refused_with_3_and_the_number_that_fits(tmp_path, capsys):
    with pytest.raises(DoesNotFit) as error:
        planned(tmp_path, "8x1xA100-80GB")
    (problem,) = error.value.problems
    assert (problem.code, problem.path, problem.hint) == ("elastic-nodes", "launch.min_nodes", "write 2")
    loaded = recipe(tmp_path, FULL)
    shown = plan_command(
        str(loaded.path), overrides=(), on="8x1xA100-80GB", explain=None, trace=False, search=False, html=None
    )
    assert shown.exit_code == 3
    assert [count["fits"] for count in shown.data["elastic"]].count(False) == 1


def test_every_number_of_nodes_is_on_the_pages(tmp_path):
    path = tmp_path / "plan.html"
    loaded = recipe(tmp_path, FULL)
    shown = plan_command(
        str(loaded.path), overrides=(), on="4x4xA100-80GB", explain=None, trace=False, search=False,
        html=str(path),
    )  # fmt: skip
    table = path.read_text().partition('id="nodes"')[2].partition("</table>")[0]
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in table.split("<tr>")[2:]]
    counts = shown.data["elastic"]
    assert [row[0] for row in rows] == [str(count["num_nodes"]) for count in counts]
    assert [row[2] for row in rows if row[2].isdigit()] == ["4", "8", "16"]
    assert [row[5].startswith("not used: ") for row in rows] == [
        count["refused"] is not None for count in counts
    ]
    printed = [line.split() for line in shown.text.splitlines()]
    for count in counts:
        if batch := count["batch"]:
            numbers = [count["num_nodes"], batch["micro"], batch["accumulation"], batch["data_parallel"]]
            assert list(map(str, numbers)) in [words[:4] for words in printed]


@pytest.mark.parametrize("gathers", ["true", "false"])
def test_negatives_of_all_ranks_need_all_nodes(tmp_path, gathers):
    text = """\
    task: embedding
    model: {name_or_path: BAAI/bge-base-en-v1.5}
    data: {train: [{path: pairs.jsonl}], max_length: 128}
    trainer: {max_steps: 10, per_device_train_batch_size: 16}
    global_batch_size: 128
    launch: {min_nodes: 1}
    """
    asked = recipe(tmp_path, text, embedding__gather_across_devices=gathers)
    about = facts("2x2xA100-80GB", "BAAI/bge-base-en-v1.5", "embedding")
    if gathers == "true":
        with pytest.raises(RecipeError, match="gather_across_devices") as error:
            plan_on(asked, about)
        assert error.value.problems[0].path == "launch.min_nodes"
    else:
        assert [count.batch.micro for count in plan_on(asked, about).elastic] == [16, 16]


def test_less_memory_on_fewer_nodes_is_planned_for_those(tmp_path):
    asked, about = recipe(tmp_path, FULL, trainer__per_device_train_batch_size=4), facts("4x4xA100-80GB")
    half = plan_on(asked, about, 2)
    step = adapt(asked, about, half, before={})
    assert step is not None
    assert step.plan.hardware == half.hardware
    assert step.plan.batch.micro < half.batch.micro
    assert step.plan.elastic == half.elastic


# Which nodes are left.


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.1)
    monkeypatch.setattr(module, "SILENT_S", 1.5)


PLACES = [JobMember("ours", n, 4, 4, n, 1, 0, "127.0.0.1", 1, hosts=("a", "b", "c", "d")) for n in range(4)]
ORDER = Order("r", (), {}, 1, 16, 4, False, "none", 1.0, 1.0, None, elastic=True)


def test_the_nodes_that_are_left_get_new_ranks_in_their_order(tmp_path):
    plan = planned(tmp_path)
    said: list[str] = []
    with Nodes(PLACES[0], tmp_path, "") as head, Nodes(PLACES[1], tmp_path, "") as cut, \
            Nodes(PLACES[3], tmp_path, "") as other:  # fmt: skip
        silent = Nodes(PLACES[2], tmp_path, "")
        with silent:
            for node in (cut, silent, other):
                node.follow_run(head._own["run"])
            head.begin(ORDER)
            for node in (cut, silent, other):
                wait_until(lambda node=node: node.take_order(0) is not None)
        cut.end_part(5, "launcher-1.log", cut_off=True)
        other.end_part(5, "launcher-3.log")
        failure = RunFailed(Problem(HOST_LOST, "the node c was lost"))
        assert is_loss(failure, plan, head)
        assert seats_left(plan, head, failure, said.append) == 2
        assert head.seats == (0, 3)
        head.begin(ORDER)
        wait_until(lambda: other.take_order(1) is not None)
        assert (other.seat.node_rank, other.seat.num_nodes, other.seat.hosts) == (1, 2, ("a", "d"))
        assert list(other.seat.ranks(4)) == [4, 5, 6, 7]
        wait_until(lambda: cut.take_order(1) is not None)
        assert not cut.takes_part
        assert head.vanished == "", "a node that is left out is not missed"
        other.end_part(0, "launcher-3.log")
        wait_until(lambda: not head.running)


@pytest.mark.parametrize("first_too", [False, True])
def test_a_node_that_is_asked_to_stop_leaves_and_the_first_one_ends_all(tmp_path, first_too):
    plan = planned(tmp_path)
    with Nodes(PLACES[0], tmp_path, "") as head, Nodes(PLACES[1], tmp_path, "") as asked, \
            Nodes(PLACES[2], tmp_path, "") as other:  # fmt: skip
        for node in (asked, other):
            node.follow_run(head._own["run"])
        head.begin(ORDER)
        for node in (asked, other):
            wait_until(lambda node=node: node.take_order(0) is not None)
        other.end_part(130, "launcher-2.log")
        asked.tell(Said(stop=signal.SIGTERM))
        asked.end_part(130, "launcher-1.log")
        wait_until(lambda: head.stop == signal.SIGTERM)
        head.tell(Said(stop=signal.SIGTERM if first_too else None))
        failure = Interrupted(Problem("interrupted", "SIGTERM: stopped"))
        assert is_loss(failure, plan, head) is not first_too
        if not first_too:
            assert seats_left(plan, head, failure, lambda line: None) == 2
            assert head.seats == (0, 2)
            head.begin(ORDER)
            wait_until(lambda: other.take_order(1) is not None)
            assert (head.stop, other.stop) == (None, None), "the signal was not for these"
            other.end_part(0, "launcher-2.log")
            with pytest.raises(Interrupted):
                seats_left(planned(tmp_path, launch__min_nodes=4), head, failure, print)


def faulty(rank: int | None, code: str = "gpu-ecc") -> KnownFailure:
    failure = next(failure for failure in FAILURES if failure.id == code)
    return KnownFailure(Problem(code, "x"), Finding(failure, Error("", "x"), (), rank))


def test_the_node_of_a_faulty_gpu_is_left_out_where_others_are_enough(tmp_path):
    plan = planned(tmp_path)
    with Nodes(PLACES[0], tmp_path, "") as head, Nodes(PLACES[1], tmp_path, "") as good, \
            Nodes(PLACES[2], tmp_path, "") as bad:  # fmt: skip
        for node in (good, bad):
            node.follow_run(head._own["run"])
        head.begin(ORDER)
        for node in (good, bad):
            wait_until(lambda node=node: node.take_order(0) is not None)
            node.end_part(5, "launcher.log")
        for failure in (faulty(3), faulty(None), faulty(9, "nccl-error")):
            assert not excludes_faulty(failure, plan, head), "node rank 0, unknown, another failure"
        assert not excludes_faulty(faulty(9), planned(tmp_path, launch__min_nodes=4), head)
        assert not excludes_faulty(faulty(9), plan, None)
        assert excludes_faulty(faulty(9), plan, head)
        assert seats_left(plan, head, faulty(9), lambda line: None) == 2
        assert (head.seats, head.excluded) == ((0, 1), {2})


RESTARTED = FULL.replace("huggyllama/llama-7b", "Qwen/Qwen3-0.6B").replace("min_nodes", "max_restarts")


@pytest.mark.parametrize(
    ("code", "rows", "used"),
    [
        ("gpu-faulty", [*H100[:1], LOST[7], *H100[2:3]], ["0,7", "0,2"]),
        ("gpu-ecc", H100[:3], ["0,7", "0,1"]),
        ("gpu-ecc", H100[:1], ["0,7", "0,7"]),  # a new process usually runs
        ("gpu-faulty", H100[:1], ["0,7"]),
        ("gpu-faulty", [*H100[:1], row(2, "NVIDIA H100 80GB HBM3", 81559, "9.0", used=81000)], ["0,7"]),
        ("gpu-faulty", [*H100[:1], row(2, "Tesla T4", 15360, "7.5")], ["0,7"]),
        ("nccl-system-error", H100[:3], ["0,7", "0,7"]),
    ],
)
def test_another_gpu_of_the_node_takes_the_place_of_a_faulty_one(code, rows, used, tmp_path, monkeypatch):
    """As nvidia-smi shows them then; GPU 7 is that of rank 1, which fails once."""
    NvidiaSmi(tmp_path, monkeypatch).shows(*rows)
    loaded, about = recipe(tmp_path, RESTARTED), facts("2xH100-80GB")
    began: list[str] = []

    def ends(bundle, run_dir, *, gpus, **_):
        began.append(",".join(gpu.index for gpu in gpus))
        if len(began) == 1:
            raise faulty(1, code)
        return {"steps": 10}

    monkeypatch.setattr(attempts, "execute", ends)
    bundle, run_dir = render(plan_on(loaded, about)), tmp_path / "run"
    write_run_dir(bundle, run_dir, resume=False)
    gpus = [Gpu(str(n), uuid(n), "NVIDIA H100 80GB HBM3", 80 << 30, 0, (9, 0)) for n in (0, 7)]
    given = {"gpus": gpus, "resume": None, "say": lambda line: None, "first_pause_s": 0.0}
    if len(used) == 1:
        with pytest.raises(RunFailed) as failure:
            attempts.run_attempts(loaded, about, bundle, run_dir, **given)
        assert failure.value.problems[0].code == code
    else:
        attempts.run_attempts(loaded, about, bundle, run_dir, **given)
    assert began == used


def test_too_few_nodes_end_the_run_with_the_loss_and_its_status(tmp_path):
    plan = planned(tmp_path, launch__min_nodes=2)
    with Nodes(PLACES[0], tmp_path, "") as head:
        for kind, code in ((RunFailed, HOST_LOST), (MachineError, HOST_MISSING)):
            failure = kind(Problem(code, "nobody came"))
            with pytest.raises(kind, match="1 of at least 2 nodes") as error:
                seats_left(plan, head, failure, lambda line: None)
            assert error.value.problems[0].code == code


def test_one_task_per_device_cannot_be_elastic(tmp_path):
    plan, place = planned(tmp_path), replace(PLACES[0], tasks_per_node=4)
    with pytest.raises(RecipeError) as error:
        take_seats(plan, Nodes(place, tmp_path, ""))
    assert error.value.problems[0].code == "elastic-nodes"


def test_nodes_that_do_not_come_are_left_out_of_the_next_attempt(tmp_path, monkeypatch):
    """`execute` ends as it does after its time limit (tests/contract/test_agent.py); what follows is real."""
    loaded, about, run_dir = recipe(tmp_path, FULL), facts("4x4xA100-80GB"), tmp_path / "run"
    begun: list[tuple[int, tuple[int, ...]]] = []

    def ends(bundle, run_dir, *, nodes, **_):
        begun.append((bundle.plan.hardware.num_nodes, nodes.seats))
        nodes.begin(ORDER)
        if len(begun) == 1:
            raise MachineError(Problem(HOST_MISSING, "nodes 2, 3 of 4 did not come"))
        return {"steps": 10}

    monkeypatch.setattr(attempts, "execute", ends)
    bundle = render(plan_on(loaded, about))
    write_run_dir(bundle, run_dir, resume=False)
    with Nodes(PLACES[0], run_dir, "") as head, Nodes(PLACES[1], run_dir, "") as one:
        one.follow_run(head._own["run"])
        plan, result = attempts.run_attempts(
            loaded, about, bundle, run_dir, gpus=(), resume=None, say=lambda line: None, nodes=head
        )
    assert begun == [(4, (0, 1, 2, 3)), (2, (0, 1))]
    assert (plan.batch.accumulation, plan.batch.data_parallel) == (8, 8)
    (row,) = result["restarts"]
    assert (row["num_nodes"], row["resumed_from"]) == (2, 0)
    assert json.loads((run_dir / "plan.json").read_text())["hardware"]["num_nodes"] == 2


def test_a_run_without_min_nodes_takes_a_loss_for_its_end(tmp_path):
    plan = planned(tmp_path, launch__min_nodes="null")
    assert plan.elastic == ()
    assert not is_loss(RunFailed(Problem(HOST_LOST, "gone")), plan, Nodes(PLACES[0], tmp_path, ""))
    assert fewer_nodes.readable(None, render(plan), tmp_path, print, print) is None
