"""Ranks of one machine: nothing of a run listens where another machine could reach it."""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta

import pytest

pytest.importorskip("torch")

from grounds import make_base

from launcher.cli import main
from launcher.machine.probe import free_port
from launcher.train.loopback import make_store

HOOKS = '''
import json, os, pathlib
from transformers import TrainerCallback


def sockets(pid):
    """Addresses, as the kernel writes them, where a process listens."""
    held = {os.readlink(fd) for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in held:
                yield address


class Look(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        """This rank and all that it descends from: the launcher serves the store for some engines."""
        found, pid = [], os.getpid()
        while pid != int(os.environ["LOOK_UP_TO"]):
            found += sockets(pid)
            pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        path = pathlib.Path(__file__).parent / f"listens-{os.environ['RANK']}.json"
        path.write_text(json.dumps(found))


def callbacks():
    return [Look()]
'''
RECIPE = """
model: {name_or_path: model}
data: {train: [{path: rows.jsonl}], max_length: 32}
precision: fp32
trainer: {max_steps: 2, per_device_train_batch_size: 2, save_strategy: 'no'}
python: hooks.py
launch: {env: {LOOK_UP_TO: "PID"}}
"""
HERE = ("0100007F", "00000000000000000000000001000000")
"""127.0.0.1 and ::1."""


@pytest.mark.slow(share=3)
@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_a_run_on_one_machine_listens_on_loopback_alone(tmp_path, capfd, engine):
    make_base(tmp_path)
    (tmp_path / "hooks.py").write_text(HOOKS)
    (tmp_path / "r.yaml").write_text(RECIPE.replace("PID", str(os.getpid())))
    words = ["run", str(tmp_path / "r.yaml"), "--on", "2xcpu", "--set", f"sharding.engine={engine}"]
    assert main([*words, "--output-dir", str(tmp_path / "out"), "--json"]) == 0, capfd.readouterr()
    found = [json.loads((tmp_path / f"listens-{rank}.json").read_text()) for rank in (0, 1)]
    assert all(found), "gloo listens in each rank"
    assert {address.partition(":")[0] for rank in found for address in rank} <= set(HERE)
    port = json.loads((tmp_path / "out" / "environment.json").read_text())["bound"]["master_port"]
    assert f"{int(port):04X}" in {address.partition(":")[2] for rank in found for address in rank}


def test_a_store_is_shared_by_who_makes_it_again():
    port = free_port()
    wait = timedelta(seconds=20)
    first = make_store("127.0.0.1", port, 1, True, wait, multi_tenant=True)
    first.set("key", "value")
    second = make_store("localhost", port, 1, is_master=True, timeout=wait, multi_tenant=True)
    assert second.get("key") == b"value"
    client = make_store("127.0.0.1", port, 1, False, wait)
    assert client.get("key") == b"value"
    own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in own - {"127.0.0.1"}:
        with pytest.raises(OSError, match="refused"), socket.create_connection((address, port), 5):
            pass
