"""Who may join a job, and what members tell each other."""

from __future__ import annotations

import errno
import socket
import threading
import time
from dataclasses import replace

import pytest
from factories import plan
from joining import FAST, Closing, Other, second
from supervised import wait_for

from launcher.commands.run import run_command
from launcher.errors import DoesNotFit, Interrupted, MachineError, Problem, RecipeError, RunFailed
from launcher.execute import start, start_checks
from launcher.execute.binding import bind_order
from launcher.execute.nodes import group as members
from launcher.execute.nodes import member
from launcher.execute.nodes.group import Group, Members
from launcher.execute.nodes.hello import digest_of, look, own_hello
from launcher.execute.nodes.member import serve
from launcher.execute.nodes.wire import Channel, Closed, introduce
from launcher.execute.start_checks import check_machine
from launcher.execute.supervise import Limits
from launcher.facts.hardware import parse_hardware
from launcher.facts.probe import Gpu
from launcher.recipe.loading import load_recipe
from launcher.render.bundle import render
from launcher.schedulers.local import rendezvous
from launcher.schedulers.rendezvous import Request, digest_of_request

RECIPE = (
    "model: {name_or_path: Qwen/Qwen3-0.6B}\ndata: {train: [{path: none.jsonl}], max_length: 32}\n"
    "global_batch_size: 8\ntrainer: {max_steps: 6}\n"
)


pytestmark = pytest.mark.usefixtures("no_handlers")


def test_a_member_comes_and_leaves_with_the_heads_word(place, group):
    other = Other(second(place))
    group.await_all(10.0, print)
    assert [h.member for h in group.members.hellos()] == [0, 1]
    assert group.members.address_for() == "127.0.0.1"
    group.goodbye(RunFailed(Problem("rank-lost", "rank 3 was lost")))
    error = other.ended()
    assert isinstance(error, RunFailed)
    assert error.problems == [Problem("rank-lost", "rank 3 was lost")]


def test_members_that_come_late_get_the_goodbye_and_the_head_waits_for_no_more(place, group):
    group.linger_s, said = 30.0, []
    group.say = said.append
    late = threading.Timer(1.0, lambda: others.append(Other(second(place))))
    others: list[Other] = []
    began = time.monotonic()
    late.start()
    group.goodbye(DoesNotFit(Problem("does-not-fit", "no plan fits")))
    assert 1.0 <= time.monotonic() - began < 15
    error = others[0].ended()
    assert (type(error), error.problems[0].code) == (DoesNotFit, "does-not-fit")
    assert said == ["the run is over (does-not-fit): up to 30 s for member 1, not here yet, to be told"]


@pytest.mark.parametrize(
    "error",
    [Interrupted(Problem("interrupted", "SIGTERM")), MachineError(Problem("host-missing", "member 1"))],
)
def test_nobody_is_waited_for_behind_a_signal_or_when_they_did_not_come(group, error):
    group.linger_s = 30.0
    began = time.monotonic()
    group.goodbye(error)
    assert time.monotonic() - began < 5


def test_data_that_the_head_misses_is_told_to_all(place, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE)

    def run(rank: int) -> str:
        try:
            run_command(
                str(recipe), overrides=[], on="2x1xcpu", dry_run=False, tiny=False, resume=None,
                output_dir=str(tmp_path / "out"), as_json=True, node_rank=rank,
                master_addr=f"{place.head}:{place.port}",
            )  # fmt: skip
        except RecipeError as error:
            return error.problems[0].code
        return "no error"

    told: list[str] = []
    other = threading.Timer(1.0, lambda: told.append(run(1)))
    other.start()
    assert run(0) == "data-missing"
    other.join(15)
    assert told == ["data-missing"]


def test_a_member_finds_the_head_behind_a_port_of_another_job(place):
    with (
        Closing(Group(replace(place, job="theirs"), "asked", FAST)),
        Closing(Group(place, "asked", FAST)) as ours,
    ):
        other = Other(second(place))
        ours.await_all(10.0, print)
        ours.goodbye(None)
        assert other.ended() == 0


def test_a_member_finds_its_head_behind_another_run_on_the_same_machines(place):
    """With --master-addr a job has no name but its address."""
    with (
        Closing(Group(place, "another --set", FAST)) as theirs,
        Closing(Group(place, "asked", FAST)) as ours,
    ):
        other = Other(second(place))
        ours.await_all(10.0, print)
        assert theirs.members.numbers() == []
        again = Other(second(place)).ended()
        assert again.problems[0].code == "command-differs", "of the first that refused"
        ours.goodbye(None)
        assert other.ended() == 0


def gpus(*indices: str, gib: int = 80) -> list[Gpu]:
    return [Gpu(i, f"GPU-{i}", "NVIDIA A100-SXM4-80GB", gib << 30, 0, (8, 0)) for i in indices]


def test_one_machine_under_two_names_is_refused(place, tmp_path, monkeypatch):
    """As node2 and node2.cluster in a hostfile: its GPUs would be used twice."""
    monkeypatch.setattr(start_checks.probe, "visible_gpus", lambda: gpus("0", "1"))
    monkeypatch.setattr(start_checks, "require_modules", lambda names: None)
    with Closing(Group(place, "asked", FAST)) as group:
        other = Other(second(place))
        group.await_all(10.0, print)
        with pytest.raises(MachineError) as caught:
            check_machine(plan(tmp_path, "2x2xA100-80GB"), group)
        (problem,) = caught.value.problems
        assert problem.code == "machine-twice"
        host = socket.gethostname()
        assert problem.message == f"{host} (member 0) and {host} (member 1) are one machine: both take GPU-0"
        group.members.check(plan(tmp_path, "2x1xcpu").hardware)
        group.goodbye(None)
        assert other.ended() == 0


@pytest.mark.parametrize("sees", [["0"], ["4", "5"]])
def test_one_task_a_device_runs_with_a_gpu_of_its_own_or_all(place, tmp_path, monkeypatch, sees):
    """As under srun --gpus-per-task=1, where each task sees its own as number 0; and without it."""
    monkeypatch.setattr(start_checks.probe, "visible_gpus", lambda: gpus(*sees))
    monkeypatch.setattr(start_checks, "require_modules", lambda names: None)
    place = replace(place, num_nodes=1, tasks_per_node=2)
    bundle = render(plan(tmp_path, "2xA100-80GB"))
    with Closing(Group(place, "asked", FAST)) as group:
        other = Other(replace(place, member=1, local_task=1))
        group.await_all(10.0, print)
        devices = check_machine(bundle.plan, group)
        assert devices == ",".join(sees)
        order = start._order(bundle, tmp_path, 4711, None, Limits(), group)
        head = bind_order(order, place, devices.split(","))
        assert (head.env["CUDA_VISIBLE_DEVICES"], head.env["LOCAL_RANK"]) == (devices, "0")
        group.goodbye(None)
        assert other.ended() == 0


def test_a_gpu_too_few_is_told_with_its_machine(place, tmp_path, monkeypatch):
    monkeypatch.setattr(start_checks.probe, "visible_gpus", lambda: gpus("0"))
    monkeypatch.setattr(start_checks, "require_modules", lambda names: None)
    with Closing(Group(place, "asked", FAST)) as group:
        other = Other(second(place))
        group.await_all(10.0, print)
        with pytest.raises(MachineError, match="shows 1 GPUs"):
            check_machine(plan(tmp_path, "2x2xA100-80GB"), group)
        group.goodbye(None)
        assert other.ended() == 0


def test_what_was_asked_has_the_values_of_set(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE)

    def digest(*overrides: str) -> str:
        return digest_of_request(load_recipe(str(recipe), overrides), overrides, on=None, resume=None)

    one, two = (f"trainer.learning_rate={rate}" for rate in ("1.0e-4", "2.0e-4"))
    assert digest(one) == digest(one)
    assert len({digest(one), digest(two), digest()}) == 3


def test_who_was_asked_something_else_is_refused(place, group):
    error = Other(second(place), asked="another recipe").ended()
    assert isinstance(error, RecipeError)
    assert error.problems[0].code == "command-differs"


@pytest.mark.parametrize("member", [0, 2])
def test_a_number_that_is_taken_or_none_is_refused(place, group, member):
    error = Other(replace(place, member=member)).ended()
    assert isinstance(error, RecipeError)
    assert error.problems[0].code == "rank-taken"


def test_two_with_one_number_are_told_apart(place, group):
    first = Other(second(place))
    group.await_all(10.0, print)
    assert Other(second(place)).ended().problems[0].code == "rank-taken"
    group.goodbye(None)
    assert first.ended() == 0


def test_two_that_come_at_once_with_one_number_are_told_apart(place, group, monkeypatch):
    def slowly(self, hello):
        problem = taken(self, hello)
        time.sleep(0.5)
        return problem

    taken = Members._taken
    monkeypatch.setattr(Members, "_taken", slowly)
    others = [Other(second(place)), Other(second(place))]
    wait_for(lambda: not all(other.thread.is_alive() for other in others))
    (error,) = [other.error for other in others if other.error is not None]
    assert error.problems[0].code == "rank-taken"
    assert group.members.numbers() == [1]


def test_who_left_before_its_welcome_has_not_come(place, group, monkeypatch):
    def send(self, message):
        if message["kind"] == "welcome" and not told:
            told.append(message)
            raise Closed("the connection failed: Broken pipe")
        return sent(self, message)

    told, sent = [], Channel.send
    monkeypatch.setattr(Channel, "send", send)
    other = Other(second(place))
    wait_for(lambda: told)
    group.await_all(10.0, print)
    assert not group.vanished
    group.goodbye(None)
    assert other.ended() == 0


def test_a_head_goes_on_listening_when_a_connection_cannot_be_taken(place, monkeypatch):
    class Full(socket.socket):
        def accept(self):
            if not failed:
                failed.append(True)
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    failed: list[bool] = []
    sock = socket.create_server(("", place.port))
    listener = Full(fileno=sock.detach())
    monkeypatch.setattr(members, "_listening", lambda place: listener)
    with Closing(Group(place, "asked", FAST)) as group:
        other = Other(second(place), come_s=3.0)
        group.await_all(5.0, print)
        assert failed
        group.goodbye(None)
        assert other.ended() == 0
    wait_for(lambda: "members" not in [thread.name for thread in threading.enumerate()])


def test_a_head_that_is_not_there_is_told(place):
    error = Other(second(place), come_s=0.5).ended()
    assert isinstance(error, MachineError)
    assert error.problems[0].code == "head-missing"
    assert f"127.0.0.1:{place.port}" in error.problems[0].message


def looked_up(monkeypatch, number: int) -> list[str]:
    """The names that are asked for from now on, and nobody answers."""
    asked = []

    def look_up(host, *_):
        asked.append(host)
        raise socket.gaierror(number, "it is not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asked


def test_a_name_that_nobody_knows_is_waited_for_shortly(place, monkeypatch):
    asked = looked_up(monkeypatch, socket.EAI_NONAME)
    monkeypatch.setattr(member, "_NAME_S", 1.5)
    error = Other(replace(second(place), head="nodee1"), come_s=600).ended()
    assert (error.exit_code, error.problems[0].code) == (4, "head-missing")
    assert error.problems[0].message.endswith("within 2 s: no machine is known here as nodee1")
    assert len(asked) > 1, "the name of a machine that is only starting"


def test_a_text_that_is_no_name(place):
    error = Other(replace(second(place), head="node..1"), come_s=0.5).ended()
    assert (error.exit_code, error.problems[0].code) == (4, "head-missing")


def test_who_waits_for_the_head_is_told_so_once(place, monkeypatch):
    asked, said = looked_up(monkeypatch, socket.EAI_AGAIN), []
    monkeypatch.setattr(member, "_SILENT_S", 0.1)
    monkeypatch.setattr(member, "_RETRY_S", 0.2)
    with pytest.raises(MachineError, match="not found within 1 s: node1:"):
        serve(replace(second(place), head="node1"), "asked", print, come_s=0.7, waits=said.append)
    assert said == [f"waiting for node1:{place.port}, up to 1 s (node1:{place.port}: it is not known)"]
    assert len(asked) > 2, "a server of names that does not answer just now is asked again"


def test_the_first_machine_may_be_written_in_another_way_on_each(place, tmp_path):
    """As node1 and node1.cluster, or its address."""
    (tmp_path / "r.yaml").write_text(RECIPE)
    loaded = load_recipe(str(tmp_path / "r.yaml"), [])
    head, other = (
        rendezvous(Request(loaded, lambda: parse_hardware("2x1xcpu"), print, rank, f"{name}:{place.port}"))
        for rank, name in enumerate(("127.0.0.1", "localhost"))
    )
    with Closing(Group(head, "asked", FAST)) as group:
        member = Other(other, come_s=3.0)
        group.await_all(5.0, print)
        group.goodbye(None)
        assert member.ended() == 0


def test_the_port_of_another_job_is_told_with_both_names(place):
    with Closing(Group(replace(place, job="port 29401"), "asked", FAST)):
        (problem,) = Other(replace(second(place), job="port 29400"), come_s=0.5).ended().problems
    assert "belongs to another job ('port 29401', and not 'port 29400')" in problem.message


def test_members_that_do_not_come_are_named(place, group):
    with pytest.raises(MachineError) as caught:
        group.await_all(0.5, print)
    (problem,) = caught.value.problems
    assert problem.code == "host-missing"
    assert "member 1 of 2 did not come" in problem.message


def test_a_stranger_on_the_port_is_let_go(place, group):
    with socket.create_connection(("127.0.0.1", group.members.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(10) == b""
    other = Other(second(place))
    group.await_all(10.0, print)
    group.goodbye(None)
    assert other.ended() == 0


def test_a_member_that_is_lost_between_tries_ends_the_run(place, group):
    with socket.create_connection(("127.0.0.1", group.members.port)) as sock:
        channel = Channel(sock, FAST)
        answer = introduce(channel, own_hello(second(place), "asked").to_json(), "asked", 5.0)
        assert answer["kind"] == "welcome"
        group.await_all(10.0, print)
        wait_for(lambda: group.vanished)
        with pytest.raises(RunFailed, match="was lost: no word from it for 1 s"):
            group.raise_if_over()


def test_a_member_that_is_stopped_between_tries_stops_the_run(place, group):
    with socket.create_connection(("127.0.0.1", group.members.port)) as sock:
        channel = Channel(sock, FAST)
        introduce(channel, own_hello(second(place), "asked").to_json(), "asked", 5.0)
        group.await_all(10.0, print)
        channel.send({"kind": "stop", "signal": 15})
        wait_for(lambda: group.stop)
        with pytest.raises(Interrupted, match="SIGTERM: stopped by a signal to"):
            group.raise_if_over()


def test_what_a_member_does_not_see_is_told_with_its_name(place, group, tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    other = Other(second(place))
    group.await_all(10.0, print)
    plan = str(tmp_path / "plan.json")
    group.look({plan: digest_of(tmp_path / "plan.json"), str(tmp_path): None})
    with pytest.raises(MachineError) as caught:
        group.look({plan: "0" * 64, f"{tmp_path}/{{none}}": None})
    host = socket.gethostname()
    assert [p.message for p in caught.value.problems] == [
        f"{host} (member 1) sees another {plan} than the first machine",
        f"{host} (member 1) does not see {tmp_path}/{{none}}, which the first machine has",
    ]
    group.goodbye(caught.value)
    assert isinstance(other.ended(), MachineError)


def test_a_look_finds_nothing_wrong_with_what_is_there(tmp_path):
    assert look({str(tmp_path): None}) == []
