"""The hostfile: every wrong line with its place, and what the recipe makes of a right one."""

from __future__ import annotations

import json
import socket
from functools import partial

import pytest
from factories import BASE, recipe

from launcher.cli import main
from launcher.errors import RecipeError
from launcher.inputs.planning_facts import find_hardware
from launcher.report.outcome import note
from launcher.schedulers.hostfile import Host, parse_hostfile
from launcher.schedulers.local import split_address
from launcher.schedulers.rendezvous import find_gathering
from launcher.schedulers.scheduler import Gathering, StartRequest

HERE = socket.gethostname()


def problems(call, *args, **kwargs):
    with pytest.raises(RecipeError) as caught:
        call(*args, **kwargs)
    return caught.value.problems


def test_comments_and_blank_lines_are_passed_over():
    text = "# ours\n\nnode1 slots=8\n  root@node2   slots=08 # the new one\n"
    assert parse_hostfile(text, "hosts") == (Host("node1", 8, 3), Host("root@node2", 8, 4))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("node2 slot=8", "'slot=8' is not `slots=N`"),
        ("node2 slots = 8", "'slots = 8' is not `slots=N`"),
        ("node2 slots=8 max_slots=9", "'slots=8 max_slots=9' is not `slots=N`"),
        ("node2 slots=eight", "'slots=eight' is not `slots=N`"),
        ("node2 slots=0", "node2 has 0 slots"),
        ("node2", "node2 has no slots"),
        ("node1 slots=8", "node1 is in line 1 already"),
        ("-oProxyCommand=x slots=8", "'-oProxyCommand=x' is not a host name"),
        ("-oProxyCommand=x@node2 slots=8", "'-oProxyCommand=x@node2' is not a host name"),
        ("node..2 slots=8", "'node..2' is not a host name"),
        (".node2 slots=8", "'.node2' is not a host name"),
        (f"{'n' * 70} slots=8", f"'{'n' * 70}' is not a host name"),
        pytest.param(f"node2 slots={'9' * 5000}", "'slots=9999", id="many digits"),
    ],
)
def test_a_wrong_line_is_named_with_its_place(line, said):
    (problem,) = problems(parse_hostfile, f"node1 slots=8\n{line}\n", "/x/hosts")
    assert problem.message.startswith(said)
    assert (problem.code, problem.file, problem.line) == ("bad-hostfile", "/x/hosts", 2)


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("node2,node3", "one host per line"),
        ("node[2-3]", "one host per line"),
        ("node[2]", "one host per line"),
        ("node2:22", "~/.ssh/config"),
        ("fd00::x", "write an address"),
        ("[fd00::1]", "without brackets"),
        ("[fd00::1]:22", "without brackets"),
        ("root@", "HOST or USER@HOST"),
        ("@node2", "HOST or USER@HOST"),
        ("no\0de2", "letters, digits"),
        ("ro\x1bot@node2", "letters, digits"),
        ("\ufeffnode2", "letters, digits"),
    ],
)
def test_what_is_no_name_is_told_with_a_hint(name, mend):
    (problem,) = problems(parse_hostfile, f"# ours\nnode1 slots=8\n{name} slots=8\n", "hosts")
    assert problem.message.startswith(f"{name!r} is not a host name")
    assert (problem.code, problem.line) == ("bad-hostfile", 3)
    assert mend in problem.hint


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("node2", "Node2"),
        ("node2", "u@node2"),
        ("u@node2", "root@NODE2."),
        ("fd00::1", "FD00:0::1"),
        ("10.0.0.1", "root@10.0.0.1"),
    ],
)
def test_a_machine_has_one_line_whatever_it_is_called(first, second):
    (problem,) = problems(parse_hostfile, f"{first} slots=8\n{second} slots=8\n", "hosts")
    assert problem.message.startswith(f"{second} is in line 1 already as {first}")
    assert problem.line == 2


def test_all_wrong_lines_are_told_at_once():
    assert [p.line for p in problems(parse_hostfile, "a\nb slots=1\nc slot=1\n", "hosts")] == [1, 3]
    (empty,) = problems(parse_hostfile, "# nothing\n", "hosts")
    assert "names no host" in empty.message


def with_hosts(folder, text, extra="", **overrides):
    (folder / "hosts").write_text(text)
    return recipe(folder, BASE + f"launch: {{hostfile: hosts}}\n{extra}", **overrides)


def test_the_file_says_how_many_machines_and_devices_there_are(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = find_hardware(with_hosts(tmp_path, "a slots=2\nb slots=2\n").recipe, None)
    assert found.label == "2x2xcpu"
    assert find_hardware(with_hosts(tmp_path, "a slots=2\nb slots=2\n").recipe, "8xA100-80GB").num_nodes == 1
    (unlike,) = problems(find_hardware, with_hosts(tmp_path, "a slots=2\nb slots=1\n").recipe, None)
    assert (unlike.line, unlike.file) == (2, str(tmp_path / "hosts"))


def gathering(loaded, on=None, node_rank=None, master_addr=None, alone="") -> Gathering | None:
    hardware = partial(find_hardware, loaded.recipe, on)
    return find_gathering(StartRequest(loaded, hardware, note, node_rank, master_addr, (), alone))


def test_this_machine_leads_wherever_it_stands_and_the_others_follow_in_order(tmp_path):
    found = gathering(with_hosts(tmp_path, f"a.invalid slots=1\n{HERE} slots=1\nb.invalid slots=1\n"))
    assert (found.place.member, found.place.members, found.place.num_nodes) == (0, 3, 3)
    assert [host.name for host in found.hosts] == ["a.invalid", "b.invalid"]
    fewer = gathering(
        with_hosts(tmp_path, f"{HERE} slots=4\na.invalid slots=4\nb.invalid slots=4\n"), "2x2xcpu"
    )
    assert [host.name for host in fewer.hosts] == ["a.invalid"]
    assert gathering(with_hosts(tmp_path, f"{HERE} slots=4\na.invalid slots=4\n"), "2xcpu") is None


@pytest.mark.parametrize(
    ("text", "on", "said"),
    [
        ("a.invalid slots=1\nb.invalid slots=1\n", None, "this machine is not in the hostfile"),
        (f"{HERE} slots=1\nlocalhost slots=1\n", None, f"{HERE} and localhost"),
        (f"{HERE} slots=1\na.invalid slots=1\n", "3x1xcpu", "asks for 3 nodes, the hostfile names 2"),
        (
            f"{HERE} slots=4\na.invalid slots=1\n",
            "2x2xcpu",
            "needs 2 devices per node, a.invalid has 1",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, text, on, said):
    (problem,) = problems(gathering, with_hosts(tmp_path, text), on)
    assert said in problem.message
    assert problem.code == "bad-hostfile"


def written(folder, text, extra=""):
    (folder / "hosts").write_text(text)
    (folder / "r.yaml").write_text(BASE + f"launch: {{hostfile: hosts}}\n{extra}")
    return str(folder / "r.yaml")


WRITTEN_FOR = "hardware: {num_nodes: 4, devices_per_node: 8, device: A100-80GB}\n"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a slots=8\nb slot=8\nc slots=8\nd slots=8\n", ":2", "'slot=8' is not `slots=N`"),
        ("a slots=8\nb slots=8\n", "", "asks for 4 nodes, the hostfile names 2"),
        ("a slots=8\nb slots=4\nc slots=8\nd slots=8\n", ":2", "8 devices per node, b has 4 slots"),
        ("a slots=8\nb slots=8\nc slots=8\nd slots=4\n", ":4", "8 devices per node, d has 4 slots"),
    ],
)
def test_validate_and_plan_find_what_run_would(tmp_path, capsys, text, line, said):
    file = written(tmp_path, text, WRITTEN_FOR)
    for argv in (
        ["validate", file],
        ["plan", file],
        ["run", file, "--dry-run", "--output-dir", f"{tmp_path}/o"],
    ):
        assert main(argv) == 2, argv
        shown = capsys.readouterr().err
        assert f"{tmp_path}/hosts{line}: " in shown, argv
        assert said in shown, argv
    assert not (tmp_path / "o").exists()


def test_the_machine_that_leads_need_not_be_among_the_first(tmp_path, capsys):
    four = written(tmp_path, "a slots=8\nb slots=8\nc slots=8\nd slots=4\ne slots=8\n", WRITTEN_FOR)
    assert main(["plan", four]) == 0
    assert main(["plan", four, "--on", "8xA100-80GB"]) == 0
    assert main(["plan", four, "--on", "2x16xA100-80GB"]) == 2
    assert capsys.readouterr().err.count("devices per node") == 2  # a and the best of the others


def test_plans_for_machines_of_which_none_is_this_one_only_warn(tmp_path, capsys):
    file = written(tmp_path, "", WRITTEN_FOR)
    (tmp_path / "hosts").unlink()
    said = f"cannot read {tmp_path}/hosts: No such file or directory (launch.hostfile)"
    assert main(["validate", file]) == 0
    assert f"warning: {said}" in capsys.readouterr().out
    assert main(["plan", file, "--json"]) == 0
    assert said in json.loads(capsys.readouterr().out)["warnings"]
    assert main(["run", file, "--dry-run", "--output-dir", f"{tmp_path}/o"]) == 0
    assert said in capsys.readouterr().err
    (tmp_path / "hosts").mkdir()
    assert main(["validate", file]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_validate_reads_a_file_that_alone_says_what_there_is(tmp_path, capsys):
    assert main(["validate", written(tmp_path, "a slots=2\nb slots=1\nc slots=3\n")]) == 2
    assert capsys.readouterr().err.count("hosts must be equal") == 2
    assert main(["validate", written(tmp_path, "a slots=2\nb slots=2\n")]) == 0


def test_a_file_that_is_not_there_is_named(tmp_path):
    (problem,) = problems(gathering, recipe(tmp_path, BASE + "launch: {hostfile: nowhere}\n"))
    assert (problem.code, problem.path) == ("hostfile-missing", "launch.hostfile")
    assert str(tmp_path / "nowhere") in problem.message


def test_variables_that_the_recipe_names_are_known(tmp_path, monkeypatch):
    monkeypatch.setenv("OUR_KEY", "s3cret")
    (tmp_path / "hosts").write_text(f"{HERE} slots=1\na.invalid slots=1\n")
    monkeypatch.setenv("OUR_CACHE", str(tmp_path))
    text = BASE + "launch: {hostfile: hosts, env: {KEY: 'x-${ENV:OUR_KEY}'}}\n"
    loaded = recipe(tmp_path, text, model__cache_dir="'${ENV:OUR_CACHE}/hub'")
    assert gathering(loaded).env == ("OUR_KEY", "OUR_CACHE")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("node1", ("node1", 29400)),
        ("node1:30000", ("node1", 30000)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("fd00::1", ("fd00::1", 29400)),
        ("fe80::1%eth0", ("fe80::1%eth0", 29400)),
        ("node_1.a-b.example.", ("node_1.a-b.example.", 29400)),
        ("[fd00::1]:500", ("fd00::1", 500)),
    ],
)
def test_an_address_with_and_without_a_port(given, expected):
    assert split_address(given) == expected


@pytest.mark.parametrize(
    "given",
    ["", ":29400", "node1:", "node1:0", "node1:70000", "node1:x", "node1:٣", "node..1",
     ".node1", "node 1", "-node1", "n" * 70, ".".join(["n" * 50] * 6), "nöde1", "[fd00::1", "fd00::x",
     pytest.param(f"node1:{'9' * 5000}", id="many digits")],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(given):
    (problem,) = problems(split_address, given)
    assert problem.code == "usage"
    assert len(problem.message) < 200


@pytest.mark.parametrize(
    ("rank", "address", "on", "said"),
    [
        (0, None, "2x1xcpu", "--master-addr is missing"),
        (None, "node1", "2x1xcpu", "--node-rank is missing"),
        (2, "node1", "2x1xcpu", "0 to 1"),
        (-1, "node1", "2x1xcpu", "0 to 1"),
        (0, "node1", "8xA100-80GB", "one node"),
    ],
)
def test_a_rendezvous_that_cannot_be_is_refused(tmp_path, rank, address, on, said):
    (problem,) = problems(gathering, recipe(tmp_path), on, rank, address)
    assert said in problem.message


def test_a_hostfile_beside_a_rank_is_told_to_start_nothing(tmp_path, capsys):
    loaded = with_hosts(tmp_path, "a slots=1\nb slots=1\n")
    assert not hasattr(gathering(loaded, "2x1xcpu", 1, "node1"), "hosts")
    assert "launch.hostfile is ignored" in capsys.readouterr().err
    gathering(recipe(tmp_path), "2x1xcpu", 1, "node1")
    assert capsys.readouterr().err == ""


def test_a_rehearsal_is_done_on_one_machine(tmp_path):
    (problem,) = problems(gathering, recipe(tmp_path), "2x1xcpu", 0, "node1", alone="--tiny")
    assert problem.message.startswith("--tiny ")
