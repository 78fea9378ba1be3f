"""Real trainings over two machines: right ranks, right losses, and an end for all when one is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from grounds import SLOW_STEPS
from network import NAMES, ROOT, Network
from patience import patience, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

RECIPE = """\
model: {{name_or_path: model}}
data: {{train: [{{path: rows.jsonl}}], max_length: 32}}
sharding: {sharding}
global_batch_size: 8
trainer: {{max_steps: {steps}, learning_rate: 1.0e-2, logging_steps: 1, save_steps: 100,
          per_device_train_batch_size: 4}}
{rest}
"""
TWO = "hardware: {num_nodes: 2, devices_per_node: 1, device: cpu}"
FILE = "launch: {hostfile: hosts}"
DDP, ZERO2 = "{engine: ddp}", "{zero_stage: 2}"


class Ground:
    """A folder that both machines see, and runs in it."""

    def __init__(self, folder: Path, base: Path, network: Network) -> None:
        self.folder, self.network, self.out = folder, network, folder / "out"
        for name in ("model", "rows.jsonl"):
            (folder / name).symlink_to(base / name)
        self.env = {"EFFILAUNCH_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}

    def recipe(self, sharding: str, rest: str, steps: int = 4) -> str:
        (self.folder / "r.yaml").write_text(RECIPE.format(sharding=sharding, rest=rest, steps=steps))
        return str(self.folder / "r.yaml")

    def hosts(self, text: str = "hosta slots=1\nhostb slots=1\n") -> None:
        (self.folder / "hosts").write_text(text)

    def start(self, name: str, *words: str, **env: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"{name}.log"
        return self.network.effilaunch(name, "run", *words, log=log, **{**self.env, **env})

    def pair(self, recipe: str, *words: str) -> list[subprocess.Popen[bytes]]:
        """Both machines, each by its own command."""
        address = ("--master-addr", self.network.machines["hosta"].address)
        given = (recipe, "--output-dir", str(self.out), *address, *words)
        return [self.start(name, *given, "--node-rank", str(number)) for number, name in enumerate(NAMES)]

    def said(self, name: str = "hosta") -> str:
        return (self.folder / f"{name}.log").read_text()

    def ended(self, process: subprocess.Popen[bytes], code: int, within_s: float, name: str = "hosta") -> str:
        process.wait(patience(within_s))
        assert process.returncode == code, self.said(name)[-4000:]
        return self.said(name)

    def training(self, *processes: subprocess.Popen[bytes]) -> None:
        def begun() -> bool:
            assert all(p.poll() is None for p in processes), "".join(map(self.said, NAMES))[-4000:]
            return (self.out / "metrics.jsonl").is_file()

        wait_until(begun, 240)

    def bound(self) -> dict:
        return json.loads((self.out / "environment.json").read_text())["bound"]

    def nodes(self) -> dict:
        return json.loads((self.out / "logs" / "nodes.json").read_text())


@pytest.fixture
def ground(tmp_path, base, network) -> Ground:
    return Ground(tmp_path, base, network)


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, base, network) -> list[float]:
    """The losses of the same run on one machine with two processes."""
    ground = Ground(tmp_path_factory.mktemp("alone"), base, network)
    recipe = ground.recipe(DDP, "hardware: {devices_per_node: 2, device: cpu}")
    ground.ended(ground.start("hosta", recipe, "--output-dir", str(ground.out)), 0, 300)
    return losses(ground.out)


def only_sshd_is_left(network: Network, *names: str) -> None:
    def left() -> dict[str, dict[int, str]]:
        return {name: found for name in names if (found := network.commands(name))}

    wait_until(lambda: not left(), 60, left)


def without_power(network: Network, name: str) -> None:
    """End all that runs on a machine but its sshd, which the next test needs."""
    for pid in network.commands(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow(share=3)
def test_zero_2_through_a_hostfile(ground, network, alone):
    ground.hosts("# ours\nhosta slots=1\nhostb slots=1 # the other\n")
    recipe = ground.recipe(ZERO2, FILE)
    began = ground.start("hosta", recipe, "--output-dir", str(ground.out), GLOO_SOCKET_IFNAME="")
    said = ground.ended(began, 0, 400)
    assert losses(ground.out) == pytest.approx(alone, rel=1e-6)
    address = network.machines["hosta"].address
    assert f"2 nodes (hosta, hostb) meet at {address} over eth0" in said
    nodes = ground.nodes()
    assert (nodes["interface"], nodes["master_addr"]) == ("eth0", address)
    assert [(node["node_rank"], node["host"]) for node in nodes["nodes"]] == [(0, "hosta"), (1, "hostb")]
    assert {path.name for path in (ground.out / "logs").glob("launcher*.log")} == {
        "launcher.log", "launcher-1.log"
    }  # fmt: skip
    statuses = [json.loads((ground.out / "logs" / f"status-rank-{r}.json").read_text()) for r in (0, 1)]
    assert [(s["host"], s["step"], s["code"]) for s in statuses] == [("hosta", 4, 0), ("hostb", 4, 0)]
    bound = ground.bound()
    assert (bound["master_addr"], bound["hostfile"]) == (address, str(ground.folder / "hosts"))
    only_sshd_is_left(network, *NAMES)


def test_ddp_by_the_same_command_on_both(ground, network, alone):
    first, second = ground.pair(ground.recipe(DDP, TWO))
    ground.ended(first, 0, 400)
    said = ground.ended(second, 0, 120, "hostb")
    assert "the first node is hosta" in said
    assert losses(ground.out) == pytest.approx(alone, rel=1e-6)
    command = ground.bound()["command"]
    assert command[command.index("--master-addr") + 1] == network.machines["hosta"].address
    only_sshd_is_left(network, *NAMES)


@pytest.mark.slow(share=3)
def test_a_machine_that_goes_down_ends_the_run_with_its_name(ground, network):
    """Its cable is pulled, so that nobody is told, and all that it ran is gone."""
    ground.hosts()
    first = ground.start("hosta", ground.recipe(DDP, FILE, steps=10**6), "--output-dir", str(ground.out))
    ground.training(first)
    network.cut()
    try:
        without_power(network, "hostb")
        said = ground.ended(first, 5, 240)
        assert "the node hostb was lost: no word for 20 s" in said
        only_sshd_is_left(network, "hosta")
    finally:
        network.mend()


@pytest.mark.slow(share=3)
def test_a_pulled_cable_ends_both(ground, network):
    first, second = ground.pair(ground.recipe(ZERO2, TWO, steps=10**6))
    ground.training(first, second)
    network.cut()
    try:
        assert "the node hostb was lost: no word" in ground.ended(first, 5, 240)
        assert "the first node, hosta, was lost: no word" in ground.ended(second, 5, 240, "hostb")
        only_sshd_is_left(network, *NAMES)
    finally:
        network.mend()


def test_killed_processes_of_a_machine_end_the_run_at_once(ground, network):
    first, second = ground.pair(ground.recipe(DDP, TWO, steps=10**6))
    ground.training(first, second)
    without_power(network, "hostb")
    said = ground.ended(first, 5, 240)
    assert "the node hostb was lost: " in said
    second.wait(patience(60))
    only_sshd_is_left(network, *NAMES)


@pytest.mark.slow(share=3)
def test_a_signal_to_one_host_stops_both_with_one_checkpoint_and_the_run_resumes(ground, network):
    """On an empty disk, from a store."""
    store = f"file://{ground.folder}/store"
    recipe = ground.recipe(DDP, f"{TWO}\nruntime: {{mirror: '{store}'}}", steps=10**6)
    first, second = ground.pair(recipe)
    ground.training(first, second)
    second.send_signal(signal.SIGTERM)
    said = [ground.ended(process, 130, 240, name) for process, name in ((first, "hosta"), (second, "hostb"))]
    stopped = json.loads((ground.out / "stopped.json").read_text())
    assert stopped["signal"] == "SIGTERM"
    assert all(f"with {stopped['checkpoint']}" in words for words in said)
    only_sshd_is_left(network, *NAMES)
    shutil.rmtree(ground.out)
    more = ("--set", f"trainer.max_steps={stopped['step'] + 2}", "--resume", "auto")
    for process, name in zip(ground.pair(recipe, *more), NAMES, strict=True):
        ground.ended(process, 0, 240, name)
    assert f"resumes from {store}/checkpoints/{stopped['checkpoint']}-" in ground.said()
    assert len(losses(ground.out)) == stopped["step"] + 2


@pytest.mark.slow(share=3)
def test_a_killed_rank_of_one_host_restarts_both_from_the_last_complete_checkpoint(ground, network):
    recipe = ground.recipe(DDP, f"{TWO}\nlaunch: {{max_restarts: 1}}", steps=300)
    pair = ground.pair(recipe)
    wait_until(lambda: (ground.out / "checkpoints" / "checkpoint-100" / "manifest.json").is_file(), 240)
    os.kill(json.loads((ground.out / "logs" / "status-rank-1.json").read_text())["pid"], signal.SIGKILL)
    for process, name in zip(pair, NAMES, strict=True):
        ground.ended(process, 0, 240, name)
    (row,) = [json.loads(line) for line in (ground.out / "restarts.jsonl").read_text().splitlines()]
    assert row["resumed_from"] in (100, 200)
    assert "on hostb) was killed by SIGKILL" in row["cause"]
    assert len(losses(ground.out)) == 300
    only_sshd_is_left(network, *NAMES)


def refused(ground: Ground, code: int = 4, **env: str) -> str:
    """What a run says that ends before anything is planned."""
    process = ground.start("hosta", ground.recipe(DDP, FILE), "--output-dir", str(ground.out), **env)
    said = ground.ended(process, code, 120)
    assert not ground.out.exists()
    assert "Traceback" not in said
    return said


def test_all_hosts_that_do_not_answer_are_named_at_once(ground, network):
    nobody = [f"10.77.{network.number}.{host}" for host in (98, 99)]
    ground.hosts("".join(f"{name} slots=1\n" for name in ("hosta", nobody[0], "hostb", nobody[1])))
    said = refused(ground)
    for name in nobody:
        assert re.search(rf"error: {name} does not answer: .*{name}", said), said
    assert "hostb does" not in said


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (
            "-o UserKnownHostsFile=/dev/null",
            "hostb has a key that ssh does not know: Host key verification failed",
        ),
        ("-o IdentityFile=/dev/null", "hostb does not let ssh in without a password: "),
        ("-p 2299", "hostb does not answer: ssh: connect to host hostb port 2299: Connection refused"),
    ],
)
def test_what_ssh_says_is_told_in_one_line(ground, network, option, expected):
    ground.hosts()
    command, config = network.environment()["EFFILAUNCH_SSH"].split(" -F ")
    text = Path(config).read_text()
    mine = ground.folder / "config"
    mine.write_text(re.sub(r"  IdentityFile \S+\n", "", text) if "Identity" in option else text)
    said = refused(ground, EFFILAUNCH_SSH=f"{command} -F {mine} {option}")
    assert f"error: {expected}" in said


def test_a_typo_in_the_hostfile_is_named_with_its_line(ground):
    ground.hosts("hosta slots=1\nhostb slot=1\n")
    said = refused(ground, code=2)
    assert f"{ground.folder / 'hosts'}:2: 'slot=1' is not `slots=N`" in said


def fake(folder: Path, package: str, version: str) -> str:
    """A folder in which a package has another version, as another environment would have."""
    info = folder / "other" / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return str(info.parent)


def test_different_versions_are_refused_with_a_table(ground, network):
    recipe, address = ground.recipe(DDP, TWO), network.machines["hosta"].address
    given = (recipe, "--output-dir", str(ground.out), "--master-addr", address)
    first = ground.start("hosta", *given, "--node-rank", "0")
    other = f"{fake(ground.folder, 'accelerate', '0.1')}:{ROOT}"
    log = ground.folder / "hostb.log"
    words = [sys.executable, "-m", "launcher.cli", "run", *given, "--node-rank", "1"]
    second = network.start("hostb", words, log, **{**ground.env, "PYTHONPATH": other})
    said = ground.ended(first, 4, 240)
    assert re.search(r"accelerate is not the same on all machines: hosta \S+, hostb 0\.1 ", said)
    assert "hostb 0.1" in ground.ended(second, 4, 120, "hostb")
    assert not list((ground.out / "logs").glob("rank-*.log")), "no rank was started"


@pytest.mark.parametrize("hidden", ["out", "cache"])
def test_a_folder_that_one_machine_does_not_see_is_named(ground, network, hidden):
    folder = ground.folder / hidden
    folder.mkdir()
    recipe, address = ground.recipe(DDP, TWO), network.machines["hosta"].address
    given = ["run", recipe, "--output-dir", str(ground.out), "--master-addr", address, "--node-rank"]
    first = network.effilaunch("hosta", *given, "0", log=ground.folder / "hosta.log", **ground.env)
    covered = ["sh", "-c", 'mount -t tmpfs none "$0"; exec "$@"', str(folder), sys.executable, "-m",
               "launcher.cli", *given, "1"]  # fmt: skip
    env = {**ground.env, "PYTHONPATH": str(ROOT)}
    second = network.start("hostb", covered, ground.folder / "hostb.log", **env)
    said = ground.ended(first, 4, 240)
    assert f"hostb does not see {folder}/" in said
    ground.ended(second, 4, 120, "hostb")


@pytest.mark.slow(share=3)
def test_a_run_continues_on_the_nodes_that_are_left_with_the_same_batches(ground, network):
    """Three nodes, two of them on hosta. hostb loses its power; later one of hosta's two is asked to stop."""
    (ground.folder / "slow.py").write_text(SLOW_STEPS)
    rows = (ground.folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (ground.folder / "rows.jsonl").unlink()  # a link to those of all tests
    (ground.folder / "rows.jsonl").write_text("".join(rows[:60]))  # five steps an epoch
    rest = (
        "hardware: {num_nodes: 3, devices_per_node: 1, device: cpu}\nlaunch: {min_nodes: 1}\npython: slow.py"
    )
    text = RECIPE.replace("global_batch_size: 8", "global_batch_size: 12").replace(
        "save_steps: 100", "save_steps: 5"
    )
    recipe = ground.folder / "r.yaml"
    recipe.write_text(text.format(sharding=ZERO2, rest=rest, steps=40))
    given = (str(recipe), "--output-dir", str(ground.out), "--master-addr", network.machines["hosta"].address)

    def node(name: str, number: int) -> subprocess.Popen[bytes]:
        log = ground.folder / f"{number}.log"
        words = ("run", *given, "--node-rank", str(number))
        return network.effilaunch(name, *words, log=log, **ground.env, STEP_S="0.3")

    nodes = [node("hosta", 0), node("hosta", 1), node("hostb", 2)]

    def saved(step: int) -> None:
        manifest = ground.out / "checkpoints" / f"checkpoint-{step}" / "manifest.json"
        wait_until(lambda: manifest.is_file() or nodes[0].poll() is not None, 240)
        assert manifest.is_file(), ground.said("0")[-4000:]

    try:
        saved(5)
        network.cut()
        without_power(network, "hostb")
        nodes[2].wait()
        saved(20)
    finally:
        network.mend()
    nodes[1].send_signal(signal.SIGTERM)
    ground.ended(nodes[1], 130, 240, "1")
    ground.ended(nodes[0], 0, 240, "0")
    first, second = [json.loads(line) for line in (ground.out / "restarts.jsonl").read_text().splitlines()]
    assert [row["num_nodes"] for row in (first, second)] == [2, 1]
    assert 5 <= first["resumed_from"] < second["resumed_from"]
    plans = [json.loads((ground.out / f"plan{end}.json").read_text()) for end in ("-1", "-2", "")]
    assert [plan["hardware"]["num_nodes"] for plan in plans] == [3, 2, 1]
    assert {plan["batch"]["global"] for plan in plans} == {12}
    recipe.write_text(recipe.read_text().replace("num_nodes: 3", "num_nodes: 1").replace("min_nodes: 1", ""))
    undisturbed = ground.folder / "undisturbed"
    ground.ended(ground.start("hosta", str(recipe), "--output-dir", str(undisturbed)), 0, 300)
    assert losses(ground.out) == pytest.approx(losses(undisturbed), rel=1e-4)
    only_sshd_is_left(network, *NAMES)
