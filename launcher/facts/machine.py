"""Everything that a check of this machine may ask, gathered once. Without torch: its facts come from a child.

Only counts, sizes, names of products and answers of yes or no are kept; a secret is never read out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.facts.machine_build import BuildFacts, read_build
from launcher.facts.machine_disk import DiskFacts, Folder, read_disk, read_folder
from launcher.facts.machine_gpu import GpuFacts, read_gpus
from launcher.facts.machine_host import HostFacts, read_host
from launcher.facts.machine_model import ModelFacts, read_hub_model
from launcher.facts.machine_network import NetworkFacts, read_network
from launcher.facts.machine_software import SoftwareFacts, read_software
from launcher.facts.stack import Stack, ask_stack
from launcher.facts.wandb_server import wandb_obstacle


@dataclass(frozen=True, slots=True)
class Subject:
    """What of a plan decides where to look."""

    python: str
    """The interpreter that starts the workers."""
    run_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """What the launcher sets for the workers."""
    hub_model: str | None = None
    """The model's hub id; None where it lies in a folder, or nowhere."""
    revision: str = "main"
    cache_dir: str | None = None
    """model.cache_dir"""
    nvme_path: str | None = None
    wandb: bool = False
    """Whether it reports there."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, as a value: verdicts are functions of it."""

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
    """Why wandb's server would not take a run of it, in words; None where it would, or nobody asked."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def gather_machine(subject: Subject) -> Machine:
    """Look at this machine; takes as long as the training stack takes to import."""
    environ = {**os.environ, **subject.env}
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
    )
