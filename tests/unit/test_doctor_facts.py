"""What is read from a machine: stand-in programs, folders, and a hub on loopback."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from patience import patience

from launcher.execute.leftovers import remove_stale_locks
from launcher.machine import machine_facts
from launcher.machine.gpus import read_gpus
from launcher.machine.machine_facts import (
    SECTIONS,
    ask_stack,
    read_build,
    read_host,
    read_hub_model,
    read_network,
    read_sections,
    watched_environment,
)
from launcher.machine.software import RANGES, TESTED, outside_range
from launcher.machine.storage import read_disk, read_folder, stale_locks

GIB = 2**30
ROW = "{0}, GPU-{0:04d}, Tesla V100-SXM2-32GB, 32510, 512, 7.0, 535.104.05"
OVERVIEW = "| NVIDIA-SMI 535.104.05   Driver Version: 535.104.05   CUDA Version: 12.2 |"


@pytest.fixture
def env():
    """Undone before the suite's own guard compares the environment."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def script(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def smi(folder: Path, env, rows, *, status: int = 0) -> None:
    answer = "\n".join(rows)
    script(
        folder,
        "nvidia-smi",
        f"case \"$*\" in *query-gpu*) echo '{answer}'; exit {status};; topo*) echo 'GPU0 GPU1 NV12';; "
        f"*) echo '{OVERVIEW}';; esac",
    )
    env.setenv("PATH", str(folder), prepend=":")


def test_gpus_driver_and_topology(tmp_path, env):
    smi(tmp_path, env, [ROW.format(i) for i in range(4)])
    facts = read_gpus("2,GPU-0000,9,1")
    assert (facts.smi, facts.driver, facts.cuda) == ("ok", "535.104.05", "12.2")
    assert [gpu.total for gpu in facts.gpus] == [32510 * 2**20] * 4
    assert facts.gpus[0].used == 512 * 2**20
    assert facts.gpus[0].capability == (7, 0)
    assert [gpu.index for gpu in facts.usable] == ["2", "0"]  # the unknown 9 ends the list
    assert "NV12" in facts.topology


def test_a_driver_that_does_not_answer(tmp_path, env):
    smi(tmp_path, env, ["NVIDIA-SMI has failed because it could not communicate with the driver."], status=9)
    facts = read_gpus(None)
    assert (facts.smi, facts.gpus, facts.driver) == ("failed", (), None)
    assert "could not communicate" in facts.said


def test_an_answer_of_another_form_is_a_failure_of_the_driver(tmp_path, env):
    smi(tmp_path, env, ["No devices were found"])
    assert read_gpus(None).smi == "failed"


def test_no_nvidia_smi(tmp_path, env):
    env.setenv("PATH", str(tmp_path))
    assert read_gpus(None).smi == "absent"


def test_compilers(tmp_path):
    script(tmp_path, "c++", "echo 11.4.0")
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    script(tmp_path / "cuda" / "bin", "nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_HOME": str(tmp_path / "cuda"),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "ext"),
    }  # fmt: skip
    facts = read_build(environ)
    assert (facts.compiler, facts.compiler_command, facts.nvcc) == ("11.4.0", "c++", "12.4")
    bare = read_build({"PATH": str(tmp_path / "nothing"), "CXX": "no-such-c++", "HOME": str(tmp_path)})
    assert (bare.compiler, bare.compiler_command) == (None, "no-such-c++")
    broken = read_build({**environ, "CUDA_HOME": str(tmp_path / "ext")})
    assert broken.nvcc is None


def test_the_lock_of_a_dead_build_is_listed_and_left_alone(tmp_path):
    held, dead = (tmp_path / "py311_cpu" / op / "lock" for op in ("cpu_adam", "cpu_lion"))
    for lock in (held, dead):
        lock.parent.mkdir(parents=True)
        lock.touch()
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PATH": ""}
    with held.open():
        assert stale_locks(environ) == [dead]
        assert read_build(environ).stale_locks == (str(dead),)
        assert dead.exists()
        assert remove_stale_locks(environ) == [dead]
    assert held.exists()
    assert not dead.exists()


def test_a_folder_that_does_not_exist_yet_is_judged_by_the_one_above(tmp_path):
    there, later = read_folder(tmp_path), read_folder(tmp_path / "a" / "b")
    assert later.writable
    assert (later.filesystem, later.total) == (there.filesystem, there.total)
    assert later.path == str(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    assert not read_folder(tmp_path / "file").writable


def test_buffers_of_dead_runs(tmp_path):
    dead = tmp_path / "deepspeed_allreduce_buffer_0_127.0.0.1_29500_0"
    dead.write_bytes(b"x" * 8192)
    (tmp_path / "other").touch()
    facts = read_disk(tmp_path, None, {"HOME": str(tmp_path)}, shared_memory=tmp_path)
    assert facts.leftovers == (dead.name,)
    assert facts.leftover_bytes >= 8192
    assert facts.folders["hub"].path == str(Path("~/.cache/huggingface/hub").expanduser())
    named = read_disk(tmp_path, "/models", {"HF_HOME": "/h"}, shared_memory=tmp_path / "none")
    assert (named.folders["hub"].path, named.folders["datasets"].path) == ("/models", "/h/datasets")
    assert named.shared_memory is None


def test_logins_are_yes_or_no(tmp_path):
    bare = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path)}
    facts = read_host(bare)
    assert (facts.hub_login, facts.wandb_login, facts.accelerate_config) == (False, False, None)
    (tmp_path / "hf" / "accelerate").mkdir(parents=True)
    (tmp_path / "hf" / "accelerate" / "default_config.yaml").touch()
    (tmp_path / "hf" / "token").write_text("hf_planted_secret")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password planted_key")
    (tmp_path / ".netrc").chmod(0o600)
    facts = read_host(bare)
    assert (facts.hub_login, facts.wandb_login) == (True, True)
    assert facts.accelerate_config.endswith("default_config.yaml")
    assert "planted" not in repr(facts)
    assert read_host({**bare, "WANDB_BASE_URL": "https://wandb.corp.example"}).wandb_login is False
    by_variable = read_host({"HOME": "/none", "HF_TOKEN": "hf_planted", "WANDB_API_KEY": "planted"})
    assert (by_variable.hub_login, by_variable.wandb_login) == (True, True)
    assert "planted" not in repr(by_variable)


def test_watched_variables_hide_secrets():
    found = watched_environment(
        {
            "HF_TOKEN": "planted", "WANDB_API_KEY": "planted", "https_proxy": "http://u:planted@p:1",
            "HF_ENDPOINT": "https://user:planted@hub.example/x", "TOKENIZERS_PARALLELISM": "false",
            "NCCL_DEBUG": "INFO", "HOME": "/home/x",
        }
    )  # fmt: skip
    assert "planted" not in repr(found)
    assert found["HF_ENDPOINT"] == "https://hub.example/x"
    assert (found["TOKENIZERS_PARALLELISM"], found["NCCL_DEBUG"]) == ("false", "INFO")
    assert "HOME" not in found


class _Hub(BaseHTTPRequestHandler):
    """`gated/x` asks for a login, `absent/x` is not there."""

    def do_HEAD(self):
        seen = self.headers.get("Authorization")
        status = 200
        if self.path.startswith("/gated") and seen != "Bearer hf_good":
            status = 401
        if self.path.startswith("/absent"):
            status = 404
        self.send_response(status)
        self.end_headers()

    def log_message(self, *arguments):
        """Quiet."""


@pytest.fixture
def hub():
    server = HTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": "/none"}
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_the_hub_hands_out(hub, tmp_path):
    def access(name, **more):
        return read_hub_model(name, "main", tmp_path, {**hub, **more}, ask=True).access

    assert access("open/x") == "open"
    assert access("gated/x") == "refused"
    assert access("gated/x", HF_TOKEN="hf_good") == "open"
    assert access("gated/x", HUGGING_FACE_HUB_TOKEN="hf_good") == "open", "what counts as a login is sent"
    assert access("absent/x") == "absent"
    assert read_hub_model("gated/x", "main", tmp_path, hub, ask=False).access == "unknown"
    assert read_network(hub).hub == "reachable"


def test_weights_in_the_cache(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert not read_hub_model("a/b", "main", tmp_path, {}, ask=False).cached
    (snapshot / "model.safetensors").touch()
    assert read_hub_model("a/b", "main", tmp_path, {}, ask=False).cached


def test_offline_is_not_asked_and_a_closed_port_is_unreachable(tmp_path, monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # bound, not listening: refused
        closed = {"HF_ENDPOINT": f"http://127.0.0.1:{listener.getsockname()[1]}"}
        assert read_network({**closed, "HF_HUB_OFFLINE": "1"}).hub == "offline"
        monkeypatch.setattr(machine_facts, "HUB_SECONDS", 3600.0)  # one that waits meets the test's timeout
        assert read_network(closed).hub == "unreachable"
    path = tmp_path / "hostfile"
    path.write_text("node1 slots=8\n")
    assert read_network({"HF_HUB_OFFLINE": "1"}, path).hostfile == ("node1 slots=8",)
    assert read_network({"HF_HUB_OFFLINE": "1"}, tmp_path / "none").hostfile is None


@pytest.mark.parametrize("url", ["http://x:99999", "http://[x", "http://a..b"])
def test_an_endpoint_that_is_no_url_is_unreachable(url, tmp_path):
    found = read_network({"HF_ENDPOINT": url}, tmp_path / "none")
    assert (found.hub, found.endpoint) == ("unreachable", url if "[" in url else url[7:].split(":")[0])


def test_tested_versions_and_ranges_are_the_projects(root):
    lines = (root / "constraints.txt").read_text().splitlines()
    pinned = dict(line.strip().lower().split("==") for line in lines if "==" in line)
    assert {name: pinned[name.lower()] for name in TESTED} == TESTED
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["train"], *extras["dpo"], *extras["trackers"]]
    assert {name + limits for name, limits in RANGES.items()} == set(wanted)
    assert RANGES.keys() <= TESTED.keys()
    assert outside_range("transformers", "4.57.1") == ">=5.23,<6"
    assert outside_range("transformers", "5.23.0") is None
    assert outside_range("unheard-of", "1") is None


def test_sections_of_a_child_that_died():
    text = 'a line of a library\n{"torch": {"version": "2"}}\n{"bitsan'
    found = read_sections(text, "it died")
    assert found["torch"] == {"version": "2"}
    assert found["bitsandbytes"] == found["deepspeed"] == {"error": "it died"}


def python_stand_in(folder: Path, body: str) -> str:
    return str(script(folder, "python", body))


def test_a_child_that_hangs_keeps_what_it_said(tmp_path):
    limit_s = patience(2.0)  # in which the child starts and prints
    said = json.dumps({"torch": {"version": "2"}})
    python = python_stand_in(tmp_path, f"echo '{said}'; exec sleep 3600")
    found = ask_stack(python, os.environ, timeout_s=limit_s)
    assert found["torch"] == {"version": "2"}
    assert found["deepspeed"] == {"error": f"no answer within {limit_s:g} s"}


def test_a_child_that_crashes_says_why(tmp_path):
    python = python_stand_in(tmp_path, "echo 'Segmentation fault' >&2; kill -SEGV $$")
    error = ask_stack(python, os.environ)["bitsandbytes"]["error"]
    assert re.search(r"-11: Segmentation fault", error)
    assert "cannot be started" in ask_stack(str(tmp_path / "none"), {})["torch"]["error"]


def test_the_real_child_calls_broken_and_missing_libraries_facts(tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('libcudart.so.12: no such file')\n")
    (tmp_path / "bitsandbytes.py").write_text("raise ImportError('No module named bitsandbytes')\n")
    (tmp_path / "deepspeed.py").write_text("print('a banner'); import os; os._exit(3)\n")
    root = Path(__file__).resolve().parents[2]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    found = ask_stack(sys.executable, environ, timeout_s=patience(120))
    assert tuple(found) == SECTIONS
    assert found["torch"]["error"] == "RuntimeError: libcudart.so.12: no such file"
    assert found["bitsandbytes"]["error"].startswith("cannot be imported: No module")
    assert "status 3: a banner" in found["deepspeed"]["error"]
