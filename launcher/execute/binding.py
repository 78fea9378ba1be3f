"""The command and the environment of an attempt on one node, with late values and fixed variables."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.execute.supervise import Limits
from launcher.files.rank_status import PREPARES
from launcher.knowledge.doctor.needs import trackers
from launcher.machine.gpus import STARTED_FOR, Gpu
from launcher.machine.interfaces import INTERFACES
from launcher.machine.job_member import JobMember
from launcher.machine.node_facts import JOB
from launcher.machine.wandb_server import wandb_obstacle
from launcher.plan.settings import Strings
from launcher.recipe.env import resolve_env
from launcher.render.command import DEVICE_ORDER

RESUME = "EFFILAUNCH_RESUME"
"""Environment variable: the checkpoint that the workers resume from."""


@dataclass(frozen=True, slots=True)
class Order:
    """One attempt of a run as every node starts its part of it. Values are those of the bundle."""

    run_dir: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    """With unresolved `${ENV:…}`: each node resolves it, so no secret is written."""
    master_port: int
    num_devices: int
    devices_per_node: int
    on_gpus: bool
    report_to: Strings
    stop_s: float
    save_s: float
    resume: str | None
    prepares: bool = False
    """Whether rank 0 prepares the data while the others wait."""
    nvme: str | None = None
    """Folder on each node's own disk that an offload writes to."""
    limits: Limits = field(default_factory=Limits)
    seats: tuple[int, ...] = ()
    """Members that take part; the others wait."""
    elastic: bool = False
    """Whether the run continues without a node that is lost."""
    needed: int = 0
    """Bytes that a rank needs on its GPU; 0: not counted, as of a rehearsal."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Order:
        limits = Limits(**values["limits"])
        tuples = {name: tuple(values[name]) for name in ("command", "seats")}
        return Order(**{**values, **tuples, "limits": limits})


@dataclass(frozen=True, slots=True)
class Bound:
    """What a node starts."""

    argv: list[str]
    env: dict[str, str]
    """The complete environment."""
    notes: list[str]
    """Changes of the environment, for the user."""


def with_late_values(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The arguments with late values filled in, in one pass: a folder may be called {devices}."""
    names = re.compile("{(" + "|".join(map(re.escape, values)) + ")}")
    return [names.sub(lambda found: values[found[1]], word) for word in words]


def complete_environment(env: Mapping[str, str], report_to: Strings) -> tuple[dict[str, str], list[str]]:
    """This process's environment with the plan's variables, references resolved; and notes on changes."""
    full = {**os.environ, **{k: resolve_env(v, os.environ) for k, v in env.items()}}
    order = os.environ.get(DEVICE_ORDER)
    # ninja and the launchers' children are found next to this interpreter.
    full["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), full.get("PATH", "")])
    added, notes = fixed_environment(full, report_to)
    if order not in (None, full.get(DEVICE_ORDER)):
        notes.append(f"{DEVICE_ORDER}={order} is not used: devices have nvidia-smi's numbers")
    return {**full, **added}, notes


def bind_order(order: Order, place: JobMember, gpus: Sequence[Gpu], asked: str = "") -> Bound:
    """What this node starts for an order. gpus: those that it may use, none on a CPU.

    asked: the digest that all nodes must share.
    """
    used = gpus if place.is_one_rank else gpus[: order.devices_per_node]
    devices = ",".join(gpu.index for gpu in used)
    values = {
        "run_dir": order.run_dir, "devices": devices, "master_port": str(order.master_port),
        "master_addr": place.head, "node_rank": str(place.node_rank),
    }  # fmt: skip
    env = dict(zip(order.env, with_late_values(tuple(order.env.values()), values), strict=True))
    if place.is_one_rank and order.on_gpus:
        env["CUDA_VISIBLE_DEVICES"] = devices
    if place.members > 1:
        env[JOB] = json.dumps({"place": asdict(place), "asked": asked, "limit_s": order.limits.come})
    full, notes = complete_environment(env, order.report_to)
    if place.members == 1 and order.num_devices > 1:  # all ranks are on this machine
        full |= {name: INTERFACES[name].format("lo") for name in INTERFACES if not full.get(name)}
    full.pop(RESUME, None)  # of the user's shell
    if order.resume is not None:
        full[RESUME] = order.resume
    full[PREPARES] = "1" if order.prepares else ""
    full[STARTED_FOR] = ",".join(gpu.uuid for gpu in used)
    return Bound(with_late_values(order.command, values), full, notes)


_TRUE = {"1", "true", "yes", "on"}
_OLD_CACHES = ("TRANSFORMERS_CACHE", "PYTORCH_TRANSFORMERS_CACHE", "PYTORCH_PRETRAINED_BERT_CACHE")
_NEW_CACHES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME")
_WANDB_IDENTITIES = ("WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE")


def fixed_environment(environ: Mapping[str, str], report_to: Strings) -> tuple[dict[str, str], list[str]]:
    """Variables to set in addition, and notes for the user.

    environ: the environment of the workers; nothing in it is replaced. report_to: trainer.report_to. With
    wandb its server is contacted, for a few seconds.
    """
    added: dict[str, str] = {}
    notes: list[str] = []
    old = next((name for name in _OLD_CACHES if environ.get(name)), None)
    if old is not None and not any(environ.get(name) for name in _NEW_CACHES):
        added["HF_HUB_CACHE"] = environ[old]
        notes.append(f"{old} is no longer read: its folder is used as HF_HUB_CACHE")
    if "wandb" not in trackers(report_to):
        return added, notes
    if environ.get("WANDB_DISABLED", "").lower() in _TRUE:
        notes.append(
            "WANDB_DISABLED is no longer read: the run reports to wandb; trainer.report_to: none stops it"
        )
    chosen = any(environ.get(name) for name in _WANDB_IDENTITIES)
    if not chosen and (obstacle := wandb_obstacle(environ)) is not None:
        added["WANDB_MODE"] = "offline"
        notes.append(
            f"{obstacle}: the run is logged offline (WANDB_MODE=offline); `wandb sync` uploads it later"
        )
    return added, notes
