"""Gather what `doctor` checks: the facts of this machine, without torch, whose facts come from a child
process.

Contains counts, sizes, product names and booleans, but no secrets.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from launcher.files.object_store import obstacle
from launcher.files.safe_files import is_file, parse_json
from launcher.files.secrets import is_secret_name
from launcher.machine.gpus import GpuFacts, read_gpus
from launcher.machine.hub_client import HUB_SECONDS, ask_config, hub_endpoint, hub_home, hub_token, is_offline
from launcher.machine.probe import host_memory_bytes, is_free, own_cores
from launcher.machine.software import SoftwareFacts, read_software
from launcher.machine.storage import (
    DiskFacts,
    Folder,
    extensions_root,
    on_network,
    read_disk,
    read_folder,
    stale_locks,
)
from launcher.machine.wandb_server import wandb_key, wandb_obstacle


@dataclass(frozen=True, slots=True)
class Subject:
    """The part of a plan that decides what is gathered."""

    python: str
    """The interpreter that starts the workers."""
    run_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the launcher sets for the workers."""
    hub_model: str | None = None
    """The model's hub id; None for a folder or no model."""
    revision: str = "main"
    cache_dir: str | None = None
    """model.cache_dir"""
    nvme_path: str | None = None
    wandb: bool = False
    """Whether the run reports to wandb."""
    mirror: str | None = None
    """runtime.mirror"""


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of one machine; checks are functions of it."""

    gpu: GpuFacts
    build: BuildFacts
    network: NetworkFacts
    disk: DiskFacts
    host: HostFacts
    software: SoftwareFacts
    stack: Stack
    hub_model: ModelFacts | None = None
    nvme: Folder | None = None
    wandb_obstacle: str | None = None
    """Why wandb's server would refuse a run; None where it would not, or was not asked."""
    mirror_obstacle: str | None = None
    """Why the mirror cannot be written; None where it can, or there is none."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def gather_machine(subject: Subject) -> Machine:
    """Gather the facts; takes as long as importing the training stack."""
    environ = {**os.environ, **subject.env}
    wrong = obstacle(subject.mirror) if subject.mirror else None
    network = read_network(environ)
    disk = read_disk(subject.run_dir, subject.cache_dir, environ)
    model = None
    if subject.hub_model is not None:
        cache = Path(disk.folders["hub"].path)
        ask = network.hub == "reachable"
        model = read_hub_model(subject.hub_model, subject.revision, cache, environ, ask=ask)
    return Machine(
        gpu=read_gpus(environ.get("CUDA_VISIBLE_DEVICES")),
        build=read_build(environ),
        network=network,
        disk=disk,
        host=read_host(os.environ),
        software=read_software(environ),
        stack=ask_stack(subject.python, environ),
        hub_model=model,
        nvme=read_folder(Path(subject.nvme_path)) if subject.nvme_path else None,
        wandb_obstacle=wandb_obstacle(environ) if subject.wandb else None,
        mirror_obstacle=None if wrong is None else wrong.reason,
    )


_SECONDS = 10


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """Compilers for the operators that DeepSpeed builds at the start of a run, and the build folder."""

    compiler: str | None
    """Version of the C++ compiler, e.g. `13.2.0`; None without one."""
    compiler_command: str
    """`$CXX`, else `c++`: the command that torch uses."""
    cuda_home: str | None
    """As torch finds it: $CUDA_HOME, $CUDA_PATH, the folder of nvcc on PATH, /usr/local/cuda."""
    nvcc: str | None
    """CUDA release of the nvcc under `cuda_home`, e.g. `12.8`; None without one."""
    ninja: str | None
    """Version of ninja next to the interpreter or on PATH; None without one."""
    python_headers: bool
    """Python.h of this interpreter."""
    libaio: bool
    """Library and header of libaio, for the async_io operator."""
    extensions: str
    """Folder in which torch builds."""
    extensions_on_network: bool
    stale_locks: tuple[str, ...]


def read_build(environ: Mapping[str, str]) -> BuildFacts:
    """Gather compilers and build folders."""
    compiler = environ.get("CXX") or "c++"
    home = _cuda_home(environ)
    root = extensions_root(environ)
    include, ninja = Path(sysconfig.get_path("include")), Path(sys.executable).parent / "ninja"
    nvcc = [f"{home}/bin/nvcc", "--version"]
    return BuildFacts(
        compiler=_said([compiler, "-dumpfullversion", "-dumpversion"], r"[0-9]+(\.[0-9]+)*", environ),
        compiler_command=compiler,
        cuda_home=home,
        nvcc=_said(nvcc, r"(?<=release )[0-9]+\.[0-9]+", environ) if home else None,
        ninja=_said(
            [str(ninja) if ninja.is_file() else "ninja", "--version"], r"[0-9]+(\.[0-9]+)+\S*", environ
        ),
        python_headers=(include / "Python.h").is_file(),
        libaio=_has_libaio(environ),
        extensions=str(root),
        extensions_on_network=on_network(root),
        stale_locks=tuple(str(lock) for lock in stale_locks(environ)),
    )


def _said(command: list[str], pattern: str, environ: Mapping[str, str]) -> str | None:
    """The match of `pattern` in a program's output; None where it fails or is missing."""
    found = shutil.which(command[0], path=environ.get("PATH"))
    if found is None:
        return None
    try:
        done = subprocess.run(
            [found, *command[1:]], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(pattern, done.stdout)
    return match[0] if match and done.returncode == 0 else None


def _cuda_home(environ: Mapping[str, str]) -> str | None:
    """As torch.utils.cpp_extension._find_cuda_home, without CUDA wheels."""
    named = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if named:
        return named
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc:
        return str(Path(nvcc).parent.parent)
    return "/usr/local/cuda" if Path("/usr/local/cuda").exists() else None


def _has_libaio(environ: Mapping[str, str]) -> bool:
    """Whether the header is in a folder that compilers search, and the library exists."""
    folders = [Path(p) for p in environ.get("CPATH", "").split(":") if p]
    flags = re.findall(r"-I\s*(\S+)", environ.get("CFLAGS", ""))
    places = [*folders, *(Path(flag) for flag in flags), Path("/usr/include"), Path("/usr/local/include")]
    header = any((place / "libaio.h").is_file() for place in places)
    return header and (ctypes.util.find_library("aio") is not None or bool(flags))


WATCHED = (
    "ACCELERATE_", "BITSANDBYTES_", "BNB_", "CUDA_", "DEEPSPEED_", "DS_", "FSDP_", "GLOO_", "HF_", "NCCL_",
    "OMP_", "PYTORCH_", "TORCH_", "TOKENIZERS_", "TRANSFORMERS_", "TRITON_", "WANDB_",
)  # fmt: skip
"""Prefixes of variables that the training stack reads."""
WATCHED_NAMES = (
    "CC", "CXX", "CFLAGS", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
    "MAX_JOBS", "NVIDIA_TF32_OVERRIDE", "PYTHONPATH", "RANK", "TORCH_EXTENSIONS_DIR", "WORLD_SIZE",
    "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY",
)  # fmt: skip
HIDDEN = "(set)"
"""Replaces a secret's value."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Memory, limits, logins and environment; bytes; None: no limit."""

    memory: int | None
    """Memory that this process may use: total, or the cgroup's limit."""
    available: int | None
    """Available memory."""
    cores: int
    memlock: int | None
    nofile: int | None
    environment: Mapping[str, str]
    """Variables that the training stack reads; a secret's value is `(set)`."""
    hub_login: bool
    wandb_login: bool
    accelerate_config: str | None
    """accelerate's default configuration file, where there is one."""


def read_host(environ: Mapping[str, str]) -> HostFacts:
    """Gather facts of the host; of logins only whether they exist."""
    return HostFacts(
        memory=host_memory_bytes(),
        available=available_memory(),
        cores=own_cores(),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        nofile=_limit(resource.RLIMIT_NOFILE),
        environment=watched_environment(environ),
        hub_login=bool(hub_token(environ)),
        wandb_login=wandb_key(environ) is not None,
        accelerate_config=_accelerate_config(environ),
    )


def watched_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that affect runs, without secrets and credentials in URLs."""
    found = {}
    for name in sorted(environ):
        if name.startswith(WATCHED) or name in WATCHED_NAMES:
            value = re.sub(r"(?<=//)[^/@\s]+@", "", environ[name])
            proxy = name.lower().endswith("_proxy")
            found[name] = HIDDEN if proxy or is_secret_name(name) else value
    return found


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def available_memory() -> int | None:
    """Available memory: the kernel's figure, or what the cgroup's limit leaves, if less."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = [int(size) * 1024 for size in re.findall(r"MemAvailable:\s*(\d+) kB", text)]
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        inactive = re.search(r"^inactive_file (\d+)", Path("/sys/fs/cgroup/memory.stat").read_text(), re.M)
        found.append(max(0, limit - used + (int(inactive[1]) if inactive else 0)))
    except (OSError, ValueError):  # no cgroup, or "max"
        pass
    return min(found, default=None)


def _accelerate_config(environ: Mapping[str, str]) -> str | None:
    folder = hub_home(environ) / "accelerate"
    for name in ("default_config.yaml", "default_config.json"):
        if is_file(folder / name):
            return str(folder / name)
    return None


WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model that is named by its hub id."""

    name: str
    cached: bool
    """Whether the cache has weights, possibly incomplete."""
    access: str
    """open | refused (gated or private for this login) | absent | unknown (hub not asked)"""


def read_hub_model(
    name: str, revision: str, cache: Path, environ: Mapping[str, str], *, ask: bool
) -> ModelFacts:
    """Look into the cache; if `ask`, ask the hub for access."""
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    cached = any(any(snapshots.glob(f"*/{pattern}")) for pattern in WEIGHTS)
    if not ask:
        return ModelFacts(name, cached, "unknown")
    answer = ask_config(name, revision, environ, method="HEAD")
    by_status = {401: "refused", 403: "refused", 404: "absent"}
    access = "open" if answer.state == "found" else by_status.get(answer.status or 0, "unknown")
    return ModelFacts(name, cached, access)


DEFAULT_PORT = 29500
"""MASTER_PORT of torchrun, accelerate and deepspeed."""
HOSTFILE = Path("/job/hostfile")
"""deepspeed's default --hostfile."""


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """Interfaces, ports, the hub, and deepspeed's default hostfile."""

    interfaces: tuple[str, ...]
    """Interfaces that are up, without loopback."""
    default_port_free: bool
    host_resolves: bool
    """Whether this machine's host name resolves, which process groups need."""
    offline: bool
    """HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is on."""
    hub: str
    """reachable | unreachable | offline"""
    endpoint: str
    """Host of the hub: $HF_ENDPOINT or huggingface.co."""
    hostfile: tuple[str, ...] | None
    """Lines of deepspeed's default hostfile; None without one."""


def read_network(environ: Mapping[str, str], hostfile: Path = HOSTFILE) -> NetworkFacts:
    """Gather facts of the network; connects to the hub (timeout HUB_SECONDS) unless offline mode is set."""
    offline, url = is_offline(environ), hub_endpoint(environ)
    answers = not offline and _succeeds(lambda: _connect(url, environ))
    lines = None
    with contextlib.suppress(OSError):
        lines = tuple(hostfile.read_text("utf-8", errors="replace").splitlines())
    return NetworkFacts(
        interfaces=_interfaces(),
        default_port_free=is_free(DEFAULT_PORT),
        host_resolves=_succeeds(lambda: socket.getaddrinfo(os.uname().nodename, None)),
        offline=offline,
        hub="offline" if offline else "reachable" if answers else "unreachable",
        endpoint=_host(url),
        hostfile=lines,
    )


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or "huggingface.co"
    except ValueError:  # e.g. an unclosed bracket
        return url


def _connect(url: str, environ: Mapping[str, str]) -> None:
    """Connect to the hub or its proxy. OSError, or ValueError for an invalid URL."""
    hub = urlsplit(url)
    host, port = hub.hostname or "huggingface.co", hub.port or (80 if hub.scheme == "http" else 443)
    proxy = environ.get(f"{hub.scheme}_proxy") or environ.get(f"{hub.scheme.upper()}_PROXY")
    if proxy:
        parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host, port = parts.hostname or host, parts.port or 8080
    socket.create_connection((host, port), HUB_SECONDS).close()


def _succeeds(attempt: Callable[[], object]) -> bool:
    """Whether `attempt` succeeds in time; in a thread, since name resolution has no timeout."""
    done = []

    def run() -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: invalid name or port
            done.append(attempt())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS + 0.5)
    return bool(done)


def _interfaces() -> tuple[str, ...]:
    names = []
    for _, name in socket.if_nameindex():
        state = "unknown"
        with contextlib.suppress(OSError):
            state = Path(f"/sys/class/net/{name}/operstate").read_text().strip()
        if name != "lo" and state in ("up", "unknown"):
            names.append(name)
    return tuple(names)


CHILD = "launcher.train.machine"
TIMEOUT_S = 120
SECTIONS = ("torch", "bitsandbytes", "deepspeed")

Stack = Mapping[str, Mapping[str, Any]]
"""Section -> facts; `error`, one sentence, where the section failed."""


def ask_stack(python: str, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> Stack:
    """What the training stack reports, from a child process (launcher/train/machine.py).

    The child prints one JSON object per section, so that a crashing library loses only its own. Missing or
    broken libraries and a hanging child are facts, too. python: an interpreter with the training packages.
    """
    command = [python, "-m", CHILD]
    try:
        done = subprocess.run(
            command, capture_output=True, env=environ, stdin=subprocess.DEVNULL, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as late:
        return read_sections(_text(late.stdout), f"no answer within {timeout_s:g} s")
    except OSError as error:
        return read_sections("", f"{python} cannot be started: {error.strerror}")
    errors = [line.strip()[:300] for line in _text(done.stderr).splitlines() if line.strip()]
    why = f"the process exited with status {done.returncode}: {errors[-1] if errors else 'no output'}"
    return read_sections(_text(done.stdout), why)


def read_sections(text: str, why: str) -> Stack:
    """The sections in the child's output; `why`: the error of missing ones."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            answer = parse_json(line)
        except ValueError:  # incomplete last line of a crashed process
            continue
        if isinstance(answer, dict):
            found |= {name: facts for name, facts in answer.items() if name in SECTIONS}
    return {name: found.get(name, {"error": why}) for name in SECTIONS}


def _text(output: bytes | str | None) -> str:
    if isinstance(output, bytes):
        return output.decode("utf-8", errors="replace")
    return output or ""
