"""What the nodes of a run tell each other through the run directory, without ranks."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from factories import plan
from patience import patience, wait_until

from launcher.commands.run import run_command
from launcher.errors import (
    DoesNotFit,
    EffilaunchError,
    Interrupted,
    MachineError,
    Problem,
    RecipeError,
    RunFailed,
)
from launcher.execute import nodes as module
from launcher.execute import start as starting
from launcher.execute import start_checks, taking_part
from launcher.execute.following import Ended, Start
from launcher.execute.nodes import Nodes, Said
from launcher.execute.output import Report
from launcher.execute.start_checks import check_machine
from launcher.execute.supervise import Limits
from launcher.execute.taking_part import take_part
from launcher.files.rank_status import RankStatus
from launcher.machine.gpus import Gpu
from launcher.machine.hardware import parse_hardware
from launcher.machine.job_member import JobMember
from launcher.machine.node_facts import HOST_LOST
from launcher.machine.probe import free_port
from launcher.recipe.loading import load_recipe
from launcher.render.bundle import render
from launcher.schedulers.local import rendezvous
from launcher.schedulers.rendezvous import digest_of_request, leading, shared_run_dir
from launcher.schedulers.scheduler import Gathering, StartRequest

RECIPE = (
    "model: {name_or_path: Qwen/Qwen3-0.6B}\ndata: {train: [{path: none.jsonl}], max_length: 32}\n"
    "global_batch_size: 8\ntrainer: {max_steps: 6}\n"
)
HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.1)
    monkeypatch.setattr(module, "SILENT_S", 1.5)
    # Signals are for main threads; the second node of these tests is none.
    monkeypatch.setattr("launcher.execute.signals.signal.signal", lambda number, handler: None)


@pytest.fixture
def first() -> JobMember:
    return JobMember("ours", 0, 2, 2, 0, 1, 0, "127.0.0.1", free_port())


def second(first: JobMember, **changes) -> JobMember:
    return replace(first, member=1, node_rank=1, **changes)


class Other:
    """Another node, in a thread, and how it ended."""

    def __init__(self, place: JobMember, run_dir: Path, come_s: float = 10.0) -> None:
        self.error: BaseException | None = None
        self.said: list[str] = []
        self._given = place, run_dir, come_s
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        place, run_dir, come_s = self._given
        try:
            take_part(place, run_dir, "asked", 1, self.said.append, Limits(come=come_s))
        except EffilaunchError as error:
            self.error = error

    def ended(self) -> BaseException | None:
        self.thread.join(patience(60))
        assert not self.thread.is_alive()
        return self.error


def led(first: JobMember, run_dir: Path, error: EffilaunchError) -> None:
    """The first node's command, which ends with this error when the other node has come."""
    with leading(Gathering(first), run_dir, "asked", print) as nodes:
        wait_until(here(nodes))
        raise error


def here(nodes: Nodes) -> Callable[[], bool]:
    """Whether the other node has come."""
    return lambda: len(nodes._others()) == 1


def test_a_node_leaves_as_the_first_one(first, tmp_path):
    error = RunFailed(Problem("rank-lost", "rank 3 was lost", hint="again"))
    other = Other(second(first), tmp_path)
    with pytest.raises(RunFailed):
        led(first, tmp_path, error)
    told = other.ended()
    assert (type(told), told.problems) == (RunFailed, error.problems)
    assert f"the first node is {HOST}" in other.said[-1]


@pytest.mark.parametrize("code", [None, 0])
def test_what_is_told_first_counts(first, tmp_path, code):
    with leading(Gathering(first), tmp_path, "asked", print) as nodes:
        other = Other(second(first), tmp_path)
        wait_until(here(nodes))
        if code is None:
            nodes.close(DoesNotFit(Problem("does-not-fit", "no plan fits")))
    told = other.ended()
    assert told is None if code == 0 else type(told) is DoesNotFit


def test_the_end_of_an_earlier_run_in_the_same_folder_is_not_taken(first, tmp_path, monkeypatch):
    with leading(Gathering(first), tmp_path, "asked", print):
        pass
    monkeypatch.setattr(taking_part, "_JUST_ENDED_S", 0.0)
    other = Other(second(first), tmp_path)
    time.sleep(1.0)
    assert other.thread.is_alive()
    with pytest.raises(Interrupted):
        led(first, tmp_path, Interrupted(Problem("interrupted", "SIGTERM")))
    assert type(other.ended()) is Interrupted


def test_a_node_that_comes_a_moment_after_the_end_is_told(first, tmp_path):
    with leading(Gathering(first), tmp_path, "asked", print) as nodes:
        nodes.close(DoesNotFit(Problem("does-not-fit", "no plan fits")))
    assert type(Other(second(first), tmp_path).ended()) is DoesNotFit


def test_a_job_that_starts_a_moment_after_another_one_in_the_same_folder_is_a_new_one(first, tmp_path):
    """A scheduler starts a run again within seconds: the error of the job before is not this one's."""
    with leading(Gathering(replace(first, job="before")), tmp_path, "asked", print) as nodes:
        nodes.close(RunFailed(Problem("node-lost", "node 1 was lost")))
    other = Other(second(first), tmp_path)
    time.sleep(1.0)
    assert other.thread.is_alive()
    with pytest.raises(Interrupted):
        led(first, tmp_path, Interrupted(Problem("interrupted", "SIGTERM")))
    assert type(other.ended()) is Interrupted


def test_a_node_that_is_started_again_at_once_is_not_told_the_end_it_took_part_in(first, tmp_path):
    """As pods are after a stop: node rank 0 of the restart comes later than this one."""
    for code in ("stopped", "again"):
        other = Other(second(first), tmp_path)
        time.sleep(1.0)
        assert other.thread.is_alive()
        with pytest.raises(Interrupted):
            led(first, tmp_path, Interrupted(Problem(code, "SIGTERM")))
        assert other.ended().problems[0].code == code


def run_on(folder: Path, rank: int, port: int, output_dir: str | None) -> str:
    try:
        run_command(
            str(folder / "r.yaml"), overrides=[], on="2x1xcpu", dry_run=False, tiny=False, resume=None,
            output_dir=output_dir, as_json=True, node_rank=rank, master_addr=f"127.0.0.1:{port}",
        )  # fmt: skip
    except RecipeError as error:
        return error.problems[0].code
    return "no error"


def test_data_that_the_first_node_misses_is_told_to_all(tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE)
    told, port, out = [], free_port(), str(tmp_path / "out")
    other = threading.Thread(target=lambda: told.append(run_on(tmp_path, 1, port, out)), daemon=True)
    other.start()
    time.sleep(1.0)  # it looks for a file that changes
    told.append(run_on(tmp_path, 0, port, out))
    other.join(patience(60))
    assert told == ["data-missing", "data-missing"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".nodes"], "it may be used again"


def test_nodes_that_are_started_manually_name_their_run_directory(tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE)
    assert run_on(tmp_path, 0, free_port(), None) == "usage"


def test_a_job_with_a_name_names_its_run_directory(first):
    proposed = Path("/runs/r/20260101T000000Z")
    named = replace(first, name="slurm-12.0")
    assert shared_run_dir(proposed, True, named) == Path("/runs/r/slurm-12.0")
    assert shared_run_dir(proposed, False, named) == proposed


def test_what_was_asked_has_the_values_of_set(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE)

    def digest(*overrides: str) -> str:
        return digest_of_request(load_recipe(str(recipe), overrides), on=None, resume=None)

    one, two = (f"trainer.learning_rate={rate}" for rate in ("1.0e-4", "2.0e-4"))
    assert digest(one) == digest(one)
    assert len({digest(one), digest(two), digest()}) == 3


def test_a_first_node_that_does_not_come_is_told(first, tmp_path):
    error = Other(second(first), tmp_path, come_s=0.5).ended()
    assert (error.exit_code, error.problems[0].code) == (4, "head-missing")
    assert f"127.0.0.1:{first.port}" in error.problems[0].message


def test_a_name_that_nobody_knows_is_waited_for_shortly(first, tmp_path, monkeypatch):
    def look_up(host, *_):
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "it is not known")

    asked: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(taking_part, "NAME_S", 1.0)
    error = Other(second(first, head="nodee1"), tmp_path, come_s=600).ended()
    assert (error.exit_code, error.problems[0].code) == (4, "head-missing")
    assert "within 1 s" in error.problems[0].message
    assert len(asked) > 1, "the name of a node that is starting"


@pytest.mark.parametrize("head", ["node..1", "a" * 300])
def test_a_text_that_is_no_name(first, tmp_path, head):
    error = Other(second(first, head=head), tmp_path, come_s=0.5).ended()
    assert (error.exit_code, error.problems[0].code) == (4, "head-missing")


def test_a_first_node_that_falls_silent_is_lost(first, tmp_path):
    with Nodes(first, tmp_path, "asked") as nodes:
        other = Other(second(first), tmp_path)
        wait_until(here(nodes))
    error = other.ended()
    assert (type(error), error.problems[0].code) == (RunFailed, HOST_LOST)
    assert f"the first node {HOST} was lost" in error.problems[0].message


def test_a_node_that_falls_silent_between_attempts_ends_the_run(first, tmp_path):
    with leading(Gathering(first), tmp_path, "asked", print) as nodes:
        with Nodes(second(first), tmp_path, "asked") as other:
            other.follow_run(nodes._own["run"])
            wait_until(here(nodes))
            nodes.raise_if_over()
        wait_until(lambda: nodes.vanished)
        with pytest.raises(RunFailed) as caught:
            nodes.raise_if_over()
        assert caught.value.problems[0].code == HOST_LOST


def order_in(folder: Path):
    return starting._order(render(plan(folder, "2x1xcpu")), folder, 4711, None, Limits(), starting.ALONE)


def test_stops_failures_and_stacks_go_to_all_through_the_first_node(tmp_path):
    places = [JobMember("ours", n, 3, 3, n, 1, 0, "127.0.0.1", 1) for n in range(3)]
    with (
        Nodes(places[0], tmp_path, "") as head,
        Nodes(places[1], tmp_path, "") as one,
        Nodes(places[2], tmp_path, "") as two,
    ):
        for node in (one, two):
            node.follow_run(head._own["run"])
        head.begin(order_in(tmp_path))
        for node in (one, two):
            wait_until(lambda node=node: node.take_order(0) is not None)
        wait_until(lambda: head.running)
        one.tell(Said(signal.SIGUSR1, "rank 1 was lost", (1,), "it hung"))
        wait_until(lambda: head.stop == signal.SIGUSR1 and head.lost == {1})
        assert head.trouble == f"on {HOST}: rank 1 was lost"
        head.tell(Said())
        wait_until(lambda: two.stop == signal.SIGUSR1)
        assert two.trouble == head.trouble
        assert two.end == f"on {HOST}: it hung"
        with pytest.raises(Interrupted, match="SIGUSR1: stopped by a signal to"):
            head.raise_if_over()
        head.ask_stacks()
        wait_until(two.wants_stacks)
        assert not two.wants_stacks()
        one.end_part(3, "launcher-1.log", oom=True)
        assert head.running
        two.end_part(0, "launcher-2.log")
        head.await_ended(10.0)
        parts = head.parts()
    bad, good = (parts[f"{HOST} (node {number})"] for number in (1, 2))
    assert (bad.code, bad.oom, bad.log, bad.lost, bad.first) == (3, True, "launcher-1.log", {1}, True)
    assert (good.code, good.trouble, good.first) == (0, "", False)


class Asked:
    """Takes the place of `Stops`: a scheduler asks to stop."""

    first, at_once = None, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("started", [False, True])
def test_a_node_that_was_asked_to_stop_leaves_by_itself_only_before_its_first_start(
    first, tmp_path, monkeypatch, started
):
    """Later rank 0 may be the last one that stops, by more than a minute."""
    stops = Asked()
    monkeypatch.setattr(taking_part, "_LEAVE_S", 0.5)
    monkeypatch.setattr(taking_part, "Stops", lambda: stops)
    monkeypatch.setattr(taking_part, "_take_part", lambda *_: Ended())
    with leading(Gathering(first), tmp_path, "asked", print) as nodes:
        other = Other(second(first), tmp_path)
        wait_until(here(nodes))
        if started:
            nodes.begin(order_in(tmp_path))
            wait_until(lambda: nodes._others()[0].values["attempt"] == 1)
        stops.first = signal.SIGUSR1
        wait_until(lambda: nodes.stop == signal.SIGUSR1)
        time.sleep(1.5)
        assert other.thread.is_alive() == started
    error = other.ended()
    assert error is None if started else type(error) is Interrupted


@pytest.mark.parametrize("stopped_by", [signal.SIGUSR1, None])
@pytest.mark.parametrize("by_agent", [False, True])
def test_a_stop_with_its_checkpoint_is_no_lost_node(tmp_path, monkeypatch, stopped_by, by_agent):
    """Exit status 130, after which a job is queued again, and not 5."""
    what = "the node b was lost: no word for 20 s"

    def follow(start, when_hanging):
        saved = {"signal": "SIGUSR1", "step": 4, "checkpoint": "checkpoint-4"}
        (tmp_path / "stopped.json").write_text(json.dumps(saved))
        reports = [Report("node-0", "RunFailed", what, 0.0, 5, [Problem(HOST_LOST, what)])]
        return Ended(stopped_by=stopped_by, reports=reports if by_agent else [])

    nodes = Mock(vanished="" if by_agent else what)
    nodes.not_started.return_value = ()
    monkeypatch.setattr(starting, "follow", follow)
    start = Start([], {}, tmp_path / "logs" / "launcher.log", print, stop_s=1, orphaned_s=1, peers=nodes)
    with pytest.raises(RunFailed if stopped_by is None else Interrupted) as caught:
        starting._outcome(tmp_path, start, nodes)
    for words in (what, "after step 4, with checkpoint-4"):
        assert words in str(caught.value)


def test_one_task_a_rank_reads_as_many_files_as_one_task_a_node(first, tmp_path, monkeypatch):
    """In all, for the same ranks: 64 nodes of 8."""

    def reads(place: JobMember) -> int:
        read: list[int] = []
        monkeypatch.setattr(module, "read_node", lambda _, number: read.append(number))
        nodes = Nodes(place, tmp_path, "asked")
        for half in range(200, 360):
            monkeypatch.setattr(module.time, "monotonic", lambda now=half / 2: now)
            nodes._look()
        return len(read)

    monkeypatch.setattr(module, "_LOOK_S", 0.5)
    by_node = reads(replace(first, members=64, num_nodes=64))
    assert by_node == 160 * 63
    assert reads(replace(first, members=512, num_nodes=64, tasks_per_node=8)) == 20 * 511
    assert reads(replace(first, members=96, num_nodes=1, tasks_per_node=96)) == 20 * 95


@pytest.mark.parametrize(("tasks", "writes"), [(1, 16), (8, 2)])
def test_a_task_writes_the_steps_of_its_ranks(first, tmp_path, monkeypatch, tasks, writes):
    nodes = Nodes(replace(first, member=1, node_rank=1, tasks_per_node=tasks), tmp_path, "asked")
    put: list[int] = []
    monkeypatch.setattr(nodes, "_put", lambda **values: (put.append(1), nodes._own.update(values)))
    for step in range(32):
        monkeypatch.setattr(module.time, "monotonic", lambda now=100 + step / 2: now)
        status = RankStatus(1, "a", 7, 1, "train", step, float(step), 0.5, None)
        nodes.tell(Said(ranks={1: status}))
    assert len(put) == writes


def gpus(*indices: str) -> list[Gpu]:
    return [Gpu(i, f"GPU-{i}", "NVIDIA A100-SXM4-80GB", 80 << 30, 0, (8, 0)) for i in indices]


@pytest.mark.parametrize("sees", [["0"], ["4", "5"]])
def test_one_task_a_device_runs_with_a_gpu_of_its_own_or_all(first, tmp_path, monkeypatch, sees):
    """As under srun --gpus-per-task=1, where each task sees its own as number 0; and without it."""
    monkeypatch.setattr(start_checks, "visible_gpus", lambda: gpus(*sees))
    monkeypatch.setattr(start_checks, "require_modules", lambda names: None)
    monkeypatch.setattr(start_checks.probe, "host_memory_bytes", lambda: 2**41)
    place = replace(first, num_nodes=1, tasks_per_node=2)
    assert check_machine(plan(tmp_path, "2xA100-80GB"), Nodes(place, tmp_path, "")) == gpus(*sees)


def test_the_number_of_nodes_is_that_of_the_plan(first, tmp_path):
    for on, nodes in (("3x1xcpu", Nodes(first, tmp_path, "")), ("2x1xcpu", None)):
        with pytest.raises(MachineError) as caught:
            check_machine(plan(tmp_path, on), nodes)
        assert caught.value.problems[0].code == "several-machines"


def test_the_first_node_may_be_written_in_another_way_on_each(tmp_path):
    """As node1 and node1.cluster, or its address."""
    (tmp_path / "r.yaml").write_text(RECIPE)
    loaded = load_recipe(str(tmp_path / "r.yaml"), [])
    jobs = {
        rendezvous(StartRequest(loaded, lambda: parse_hardware("2x1xcpu"), print, rank, f"{name}:29500")).job
        for rank, name in enumerate(("127.0.0.1", "localhost"))
    }
    assert jobs == {"port 29500"}
