"""Members that are started through ssh's place: a script here, which runs the command on this machine."""

from __future__ import annotations

import socket
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import MachineError
from launcher.execute.nodes.group import Group
from launcher.execute.nodes.wire import Rhythm
from launcher.facts.job_member import JobMember
from launcher.schedulers.ssh import Starting

RUNS = 'for last; do :; done\nexec sh -c "$last"\n'


def program(folder: Path, text: str) -> dict[str, str]:
    """The environment in which this script takes the place of ssh."""
    path = folder / "ssh"
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"EFFILAUNCH_SSH": str(path)}


@pytest.fixture
def place() -> JobMember:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    return JobMember("ours", 0, 3, 3, 0, 1, 0, "127.0.0.1", port)


def problems(folder: Path, text: str, place: JobMember, hosts=("hostb", "hostc")):
    """What is said of hosts whose ssh is this script."""
    starting = Starting(program(folder, text))
    group = Group(place, starting.token, Rhythm())
    try:
        for number, host in enumerate(hosts, 1):
            told = replace(place, member=number, node_rank=number, port=group.members.port)
            starting.start(host, told, {})
        with pytest.raises(MachineError) as caught:
            group.await_all(60.0, print, lambda: starting.problems(group.members.numbers))
    finally:
        group.goodbye(None)
        starting.end()
    return caught.value.problems


def test_members_come_and_know_what_they_were_told(place, tmp_path):
    # What goes through standard input is kept, and so is what stood on the command line.
    text = RUNS.replace("exec sh", f'tee "{tmp_path}/seen-$$" | sh') + f'echo "$@" > "{tmp_path}/argv"\n'
    starting = Starting(program(tmp_path, text))
    group = Group(place, starting.token, Rhythm())
    try:
        for number in (1, 2):
            told = replace(place, member=number, node_rank=number, port=group.members.port)
            starting.start(f"host{number}", told, {"HF_TOKEN": "s3cret"})
        group.await_all(60.0, print, lambda: starting.problems(group.members.numbers))
        assert group.members.numbers() == [1, 2]
    finally:
        group.goodbye(None)
        began = time.monotonic()
        starting.end()
    assert time.monotonic() - began < 8, "they left by themselves"
    assert all('"HF_TOKEN": "s3cret"' in path.read_text() for path in tmp_path.glob("seen-*"))
    argv = (tmp_path / "argv").read_text()
    assert "s3cret" not in argv, "no secret on a command line"
    assert starting.token not in argv


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("echo 'ssh: Could not resolve hostname x: Name or service not known'; exit 255", "host-unreachable",
         "hostb does not answer: ssh: Could not resolve hostname"),
        ("echo 'ssh: connect to host x port 22: No route to host'; exit 255", "host-unreachable",
         "hostb does not answer: ssh: connect to host x port 22: No route to host"),
        ("echo 'Host key verification failed.'; exit 255", "host-key",
         "hostb has a key that ssh does not know"),
        ("echo 'u@x: Permission denied (publickey).'; exit 255", "ssh-denied",
         "hostb does not let ssh in without a password: u@x: Permission denied"),
        ("echo 'sh: 1: exec: /opt/python: not found'; exit 127", "python-missing", "hostb has no /"),
        ("echo \"ModuleNotFoundError: No module named 'launcher'\"; exit 1", "effilaunch-missing",
         "hostb does not see effilaunch"),
        ("echo head-missing: it is not there; exit 4", "head-unreachable", "hostb cannot reach this machine"),
        ("echo something else; exit 9", "host-failed", "hostb could not join: something else"),
    ],
)  # fmt: skip
def test_every_way_of_not_coming_has_its_name(place, tmp_path, text, code, said):
    began = time.monotonic()
    found = problems(tmp_path, text, place)
    assert [problem.code for problem in found] == [code, code], "all hosts at once"
    assert said in found[0].message
    assert "hostc" in found[1].message
    assert time.monotonic() - began < 10


def test_one_that_came_is_not_blamed_and_no_ssh_is_told(place, tmp_path):
    text = f'case "$*" in *hostb*) {RUNS} ;; *) echo Connection refused; exit 255;; esac'
    (problem,) = problems(tmp_path, text, place)
    assert problem.message == "hostc does not answer: Connection refused"
    starting = Starting({"EFFILAUNCH_SSH": str(tmp_path / "none")})
    with pytest.raises(MachineError, match="cannot be started: No such file") as caught:
        starting.start("hostb", place, {})
    assert caught.value.problems[0].code == "ssh-missing"
