"""The host: memory, limits, logins, and the settings outside a recipe that change a run."""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.facts.hub import hub_home, hub_token
from launcher.facts.probe import host_memory_bytes, own_cores
from launcher.facts.secrets import is_secret_name
from launcher.facts.user_files import is_file
from launcher.facts.wandb_server import wandb_key

WATCHED = (
    "ACCELERATE_", "BITSANDBYTES_", "BNB_", "CUDA_", "DEEPSPEED_", "DS_", "FSDP_", "GLOO_", "HF_", "NCCL_",
    "OMP_", "PYTORCH_", "TORCH_", "TOKENIZERS_", "TRANSFORMERS_", "TRITON_", "WANDB_",
)  # fmt: skip
"""Beginnings of variables that the training stack reads."""
WATCHED_NAMES = (
    "CC", "CXX", "CFLAGS", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
    "MAX_JOBS", "NVIDIA_TF32_OVERRIDE", "PYTHONPATH", "RANK", "TORCH_EXTENSIONS_DIR", "WORLD_SIZE",
    "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY",
)  # fmt: skip
HIDDEN = "(set)"
"""In place of a secret's value."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Sizes in bytes; limits of this process, None where there is none."""

    memory: int | None
    """What this process may use: the machine's memory or its control group's limit."""
    available: int | None
    """What nobody uses now."""
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
    """Logins are looked for, never read out."""
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
    """The variables that change runs, without secrets or credentials inside addresses."""
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
    """The least of what the kernel calls available and what the control group leaves."""
    found = []
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"MemAvailable:\s*(\d+) kB", text)
    if match:
        found.append(int(match[1]) * 1024)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        inactive = re.search(r"^inactive_file (\d+)", Path("/sys/fs/cgroup/memory.stat").read_text(), re.M)
        found.append(max(0, limit - used + (int(inactive[1]) if inactive else 0)))
    except (OSError, ValueError):  # no control group, or the word "max"
        pass
    return min(found, default=None)


def _accelerate_config(environ: Mapping[str, str]) -> str | None:
    folder = hub_home(environ) / "accelerate"
    for name in ("default_config.yaml", "default_config.json"):
        if is_file(folder / name):
            return str(folder / name)
    return None
