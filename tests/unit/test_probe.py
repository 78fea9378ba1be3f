"""Reads from outside: a stand-in nvidia-smi on PATH, folders, the hub cache, shipped facts."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.errors import MachineError, RecipeError
from launcher.machine.gpus import memory_of_process
from launcher.machine.hardware import MIB
from launcher.machine.probe import (
    free_port,
    host_memory_bytes,
    is_free,
    probe_hardware,
    resolve_path,
)
from launcher.machine.software import installed_versions
from launcher.models.model_config import find_model_config

Smi = Callable[..., None]


@pytest.fixture
def env() -> Iterator[pytest.MonkeyPatch]:
    """Undone before the suite's own guard compares the environment."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def smi(tmp_path: Path, env: pytest.MonkeyPatch) -> Smi:
    """Puts an nvidia-smi on PATH that prints the given lines and leaves with the given status."""
    env.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*lines: str, status: int = 0) -> None:
        shim = tmp_path / "nvidia-smi"
        answer = "\n".join(lines)
        shim.write_text(
            f"#!/bin/sh\ncase \"$*\" in *--query-gpu=*) ;; *) exit 9;; esac\necho '{answer}'\nexit {status}\n"
        )
        shim.chmod(0o755)
        env.setenv("PATH", str(tmp_path), prepend=":")

    return install


def test_what_a_process_holds_on_each_gpu(tmp_path: Path, env: pytest.MonkeyPatch) -> None:
    rows = "11, GPU-a, 742\n12, GPU-a, 9000\n11, GPU-b, 1024\n11, GPU-c, [N/A]"
    shim = tmp_path / "nvidia-smi"
    shim.write_text(f"#!/bin/sh\ncase \"$*\" in *--query-compute-apps=*) echo '{rows}';; *) exit 9;; esac\n")
    shim.chmod(0o755)
    env.setenv("PATH", str(tmp_path), prepend=":")
    assert memory_of_process(11) == {"GPU-a": 742 * MIB, "GPU-b": 1024 * MIB}
    assert memory_of_process(13) == {}
    shim.write_text("#!/bin/sh\nexit 9\n")
    assert memory_of_process(11) == {}


def gpu(index: int, name: str, mib: int, capability: str) -> str:
    return f"{index}, GPU-{index:04d}, {name}, {mib}, 0, {capability}, 550.54.15"


@pytest.mark.parametrize(
    ("name", "mib", "capability", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "8.0", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", 40960, "8.0", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", 81559, "9.0", "H100-80GB"),
        ("NVIDIA L40S", 46068, "8.9", "L40S-48GB"),
        ("NVIDIA L4", 23034, "8.9", "L4-24GB"),
        ("Tesla T4", 15360, "7.5", "T4-16GB"),
        ("NVIDIA GeForce RTX 4090", 24564, "8.9", "RTX4090-24GB"),
        ("NVIDIA A800 80GB PCIe", 81920, "8.0", "A800-80GB"),
        ("NVIDIA H800", 81559, "9.0", "H800-80GB"),
        ("NVIDIA H20", 97871, "9.0", "H20-96GB"),
        ("NVIDIA GH200 480GB", 97871, "9.0", "GH200-96GB"),
        ("NVIDIA GB200", 189471, "10.0", "GB200-186GB"),
        ("NVIDIA B300 SXM6 AC", 275040, "10.3", "B300-288GB"),
        ("NVIDIA L20", 46068, "8.9", "L20-48GB"),
        ("NVIDIA GeForce RTX 4070", 12282, "8.9", "RTX4070-12GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376, "8.9", "RTX4070TiSuper-16GB"),
        ("NVIDIA GeForce RTX 4080 SUPER", 16376, "8.9", "NVIDIA GeForce RTX 4080 SUPER"),
        ("NVIDIA GeForce RTX 4080 Laptop GPU", 12282, "8.9", "NVIDIA GeForce RTX 4080 Laptop GPU"),
        ("NVIDIA GeForce RTX 5080", 16303, "12.0", "RTX5080-16GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "12.0", "RTXPRO6000-96GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "12.0", "RTXPRO6000-96GB"),
        ("NVIDIA RTX A6000", 49140, "8.6", "A6000-48GB"),
        ("NVIDIA GeForce GTX 1080", 8192, "6.1", "NVIDIA GeForce GTX 1080"),
    ],
)
def test_gpu_names(smi: Smi, name: str, mib: int, capability: str, expected: str) -> None:
    smi(gpu(0, name, mib, capability), gpu(1, name, mib, capability))
    hardware = probe_hardware()
    major, minor = capability.split(".")
    assert hardware.device == expected
    assert hardware.devices_per_node == 2
    assert hardware.device_bytes == mib * MIB
    assert hardware.compute_capability == (int(major), int(minor))


def test_unlike_gpus_are_planned_as_the_weakest(smi: Smi) -> None:
    smi(gpu(0, "NVIDIA A100-SXM4-80GB", 81920, "8.0"), gpu(1, "Tesla T4", 15360, "7.5"))
    hardware = probe_hardware()
    assert (hardware.device, hardware.devices_per_node) == ("T4-16GB", 2)


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0", 1), ("1,0", 2), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("GPU-0001", 1), ("0,7,1", 1)],
)
def test_visible_devices(smi: Smi, env: pytest.MonkeyPatch, visible: str, count: int) -> None:
    smi(gpu(0, "Tesla T4", 15360, "7.5"), gpu(1, "Tesla T4", 15360, "7.5"))
    env.setenv("CUDA_VISIBLE_DEVICES", visible)
    hardware = probe_hardware()
    assert hardware.is_cpu == (count == 0)
    assert hardware.devices_per_node == max(count, 1)


@pytest.mark.parametrize("visible", ["MIG-4f0c", "7", "GPU-9999,0"])
def test_devices_that_are_not_there_are_no_cpu(smi: Smi, env: pytest.MonkeyPatch, visible: str) -> None:
    smi(gpu(0, "Tesla T4", 15360, "7.5"))
    env.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(MachineError, match=f"CUDA_VISIBLE_DEVICES={visible} names no GPU") as caught:
        probe_hardware()
    assert ("MIG" in caught.value.problems[0].message) == visible.startswith("MIG")


def test_a_cpu_has_the_memory_of_the_host(env: pytest.MonkeyPatch) -> None:
    env.setenv("CUDA_VISIBLE_DEVICES", "")
    hardware = probe_hardware()
    assert hardware.is_cpu
    assert hardware.device_bytes == host_memory_bytes()


def test_resolve_path_leaves_paths_alone() -> None:
    assert resolve_path("data/train.jsonl") == Path("data/train.jsonl")


def test_resolve_path_inside_a_package() -> None:
    assert resolve_path("package:launcher/models/data/models.json").is_file()


@pytest.mark.parametrize(
    ("ref", "code"),
    [("package:no_such_package_x/a", "package-missing"), ("package:launcher/none", "path-missing")],
)
def test_resolve_path_problems(ref: str, code: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve_path(ref)
    assert caught.value.problems[0].code == code


def test_free_port_can_be_bound() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "", "::1"])
def test_a_port_that_one_address_has_is_not_free(address: str) -> None:
    """As one of an outer address: torch's store binds all of them."""
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6")
    family = socket.AF_INET6 if address == "::1" else socket.AF_INET
    with socket.create_server((address, 0), family=family) as taken:
        port = taken.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)


def test_a_free_port_is_looked_for_at_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spy(socket.socket):
        def bind(self, address: tuple[str, int]) -> None:
            bound.append(address)
            super().bind(address)

    bound: list[tuple[str, int]] = []
    monkeypatch.setattr("socket.socket", Spy)
    assert is_free(free_port())
    assert bound[0] == ("", 0)


@pytest.fixture
def hub(tmp_path: Path, env: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    env.setenv("HF_HUB_OFFLINE", "1")
    env.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_config_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert find_model_config(str(tmp_path)) == ({"model_type": "llama"}, "folder")


def test_hub_cache_comes_before_shipped_facts(hub: Path) -> None:
    name = "huggyllama/llama-7b"
    config, origin = find_model_config(name)
    assert (config["hidden_size"], origin) == (4096, "shipped facts")
    repo = hub / "models--huggyllama--llama-7b"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots" / "abc").mkdir(parents=True)
    (repo / "snapshots" / "abc" / "config.json").write_text(json.dumps({"hidden_size": 1}))
    assert find_model_config(name) == ({"hidden_size": 1}, "hub cache")


@pytest.mark.parametrize(
    ("name", "code"), [("nobody/none", "hub-offline"), ("./no/such/folder", "model-config-missing")]
)
def test_model_that_is_nowhere(hub: Path, name: str, code: str) -> None:
    with pytest.raises(RecipeError) as caught:
        find_model_config(name)
    assert caught.value.problems[0].code == code


def test_missing_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"none\.gguf"):
        find_model_config(str(tmp_path), gguf_file="none.gguf")


def test_a_folder_of_gguf_files_names_them(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf", "notes.txt"):
        (tmp_path / name).touch()
    with pytest.raises(RecipeError) as caught:
        find_model_config(str(tmp_path))
    (problem,) = caught.value.problems
    assert problem.code == "model-config-missing"
    assert problem.hint.endswith("model.gguf_file to one of: a.gguf, b.gguf")


def test_versions_name_python_and_only_what_is_installed() -> None:
    versions = installed_versions()
    assert versions["python"].startswith("3.")
    assert all(versions.values())
