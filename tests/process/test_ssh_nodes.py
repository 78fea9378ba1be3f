"""Hosts that are started through ssh's place: a script here, which runs the command on this machine."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from patience import wait_until

from launcher.errors import MachineError
from launcher.schedulers import ssh
from launcher.schedulers.ssh import Starting

RUNS = 'for last; do :; done\nexec sh -c "$last"\n'


def program(folder: Path, text: str) -> dict[str, str]:
    """The environment in which this script takes the place of ssh."""
    path = folder / "ssh"
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"EFFILAUNCH_SSH": str(path)}


def problems(folder: Path, text: str, hosts=("hostb", "hostc")):
    """What is said of hosts whose ssh is this script."""
    starting = Starting(program(folder, text))
    try:
        for host in hosts:
            starting.start(host, ["recipes"], {})
        with pytest.raises(MachineError) as caught:
            starting.await_started()
    finally:
        starting.end()
    return caught.value.problems


def test_hosts_start_and_know_what_they_were_told(tmp_path):
    # What goes through standard input is kept, and so is what stood on the command line.
    text = RUNS.replace("exec sh", f'tee "{tmp_path}/seen-$$" | sh') + f'echo "$@" > "{tmp_path}/argv"\n'
    starting = Starting(program(tmp_path, text))
    try:
        for number in (1, 2):
            starting.start(f"host{number}", ["recipes"], {"HF_TOKEN": "s3cret"})
        starting.await_started()
        wait_until(lambda: all(one.process.poll() == 0 for one in starting._started), 60)
        assert starting.problems() == []
    finally:
        starting.end()
    assert all('"HF_TOKEN": "s3cret"' in path.read_text() for path in tmp_path.glob("seen-*"))
    assert "s3cret" not in (tmp_path / "argv").read_text(), "no secret on a command line"


def test_effilaunch_that_ends_with_an_error_on_a_host_is_told(tmp_path):
    starting = Starting(program(tmp_path, RUNS))
    try:
        starting.start("hostb", ["run", str(tmp_path / "none.yaml")], {})
        starting.await_started()
        wait_until(lambda: starting.problems(), 60)
        (problem,) = starting.problems()
    finally:
        starting.end()
    assert problem.code == "host-failed"
    assert "none.yaml" in problem.message


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
        ("echo something else; exit 9", "host-failed", "hostb could not join: something else"),
    ],
)  # fmt: skip
def test_every_way_of_not_coming_has_its_name(tmp_path, text, code, said, monkeypatch):
    for name in ("ANSWER_S", "START_S"):  # where all hosts have ended, nothing is waited for
        monkeypatch.setattr(ssh, name, 3600.0)
    found = problems(tmp_path, text)
    assert [problem.code for problem in found] == [code, code], "all hosts at once"
    assert said in found[0].message
    assert "hostc" in found[1].message


def test_one_that_started_is_not_blamed_and_no_ssh_is_told(tmp_path):
    text = f'case "$*" in *hostb*) {RUNS} ;; *) echo Connection refused; exit 255;; esac'
    (problem,) = problems(tmp_path, text)
    assert problem.message == "hostc does not answer: Connection refused"
    starting = Starting({"EFFILAUNCH_SSH": str(tmp_path / "none")})
    with pytest.raises(MachineError, match="cannot be started: No such file") as caught:
        starting.start("hostb", ["recipes"], {})
    assert caught.value.problems[0].code == "ssh-missing"
