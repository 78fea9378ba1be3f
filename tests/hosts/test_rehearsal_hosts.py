"""`doctor --rehearse` over several machines. Named are: the one with the slow port, the one on another disk,
the one that does not see the run directory. Over two from a hostfile all is well."""

from __future__ import annotations

import json
import shutil

import pytest
from bridge import NAMES, Bridge
from network import missing
from patience import patience
from rehearsals import recipe, rows

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()) or shutil.which("tc") is None, reason=missing() or "no tc"),
]


@pytest.fixture
def bridge():
    made = Bridge()
    try:
        made.up()
        yield made
    finally:
        made.down()


def test_the_bad_machines_are_named(bridge, tmp_path):
    """gpu02 has a slow port, and gpu01 sees an empty disk where the others save."""
    bridge.slow("gpu02")
    out = tmp_path / "out"
    words = ["doctor", str(recipe(tmp_path)), "--rehearse", "--on", "3x1xcpu", "--seconds", "2", "--json",
             "--output-dir", str(out), "--master-addr", bridge.address("gpu00")]  # fmt: skip
    members = [
        bridge.effilaunch(
            name, *words, "--node-rank", str(number),
            hidden=out / "checkpoints" if name == "gpu01" else None,
        )
        for number, name in enumerate(NAMES)
    ]  # fmt: skip
    told, said = members[0].communicate(timeout=patience(300))
    assert members[0].returncode == 4, said[-4000:] + told[-4000:]
    found = rows(json.loads(told))
    assert found["rehearsal-ranks"]["found"] == "1 on gpu00, 1 on gpu01, 1 on gpu02, gloo"
    assert found["rehearsal-interfaces"]["found"] == "eth0 on gpu00, gpu01, gpu02"
    slow = found["rehearsal-links"]
    assert slow["status"] == "fail"
    for does in ("sends", "receives"):
        assert f"node gpu02 (eth0) {does} " in slow["message"]
    assert "gpu00" not in slow["message"] + slow["hint"]
    assert "gpu01" not in slow["message"] + slow["hint"]
    links = json.loads(told)["rehearsal"]["links"]
    assert len(links) == 6
    speeds = {slow: [link["bytes_per_s"] for link in links if (2 in (link["from"], link["to"])) is slow]
              for slow in (True, False)}  # fmt: skip
    assert max(speeds[True]) < min(speeds[False])
    alone = found["rehearsal-shared"]
    assert alone["status"] == "fail"
    assert alone["message"].startswith("node gpu01 (eth0) does not share the run directory with the others (")
    assert "gpu01 (eth0): tmpfs none" in alone["message"]
    assert list((out / "checkpoints").iterdir()) == []
    for other in members[1:]:
        answer, _ = other.communicate(timeout=patience(120))
        assert other.returncode == 4
        assert "gpu02 (eth0)" in json.loads(answer)["errors"][0]["message"]


@pytest.mark.slow(share=3)
def test_a_machine_that_does_not_see_the_run_directory(bridge, tmp_path):
    apart = tmp_path / "runs"
    apart.mkdir()
    words = ["doctor", str(recipe(tmp_path)), "--rehearse", "--on", "2x1xcpu", "--json",
             "--output-dir", str(apart / "out"), "--master-addr", bridge.address("gpu00")]  # fmt: skip
    members = [
        bridge.effilaunch(name, *words, "--node-rank", str(number), hidden=apart if number else None)
        for number, name in enumerate(NAMES[:2])
    ]
    told, said = members[0].communicate(timeout=patience(240))
    assert members[0].returncode == 4, said[-4000:] + told[-4000:]
    row = rows(json.loads(told))["rehearsal-start"]
    assert row["message"].startswith("gpu01 does not see ")
    assert "on a disk that they share" in row["hint"]
    answer, _ = members[1].communicate(timeout=patience(120))
    assert members[1].returncode == 4
    assert json.loads(answer)["errors"][0]["code"] == "not-shared"


@pytest.mark.slow(share=3)
def test_two_machines_of_a_hostfile(network, tmp_path):
    (tmp_path / "hosts").write_text("hosta slots=1\nhostb slots=1\n")
    out, log = tmp_path / "out", tmp_path / "log"
    path = recipe(tmp_path, "{zero_stage: 2}", "{hostfile: hosts}")
    words = ("doctor", str(path), "--rehearse", "--on", "2x1xcpu", "--seconds", "2", "--output-dir", str(out))
    process = network.effilaunch("hosta", *words, log=log)
    assert process.wait(patience(300)) == 0, log.read_text()[-6000:]
    found = rows({"checks": json.loads((out / "result.json").read_text())["verdicts"]})
    assert {row["status"] for row in found.values()} <= {"ok", "warn"}
    assert found["rehearsal-start"]["found"].startswith("2 ranks by torchrun")
    assert found["rehearsal-ranks"]["found"] == "1 on hosta, 1 on hostb, gloo"
    assert found["rehearsal-interfaces"]["found"] == "eth0 on hosta, hostb"
    assert found["rehearsal-shared"]["found"].endswith("seen by all 2 nodes")
    assert "two nodes: no third" in found["rehearsal-links"]["message"]
