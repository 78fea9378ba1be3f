"""Every read from outside the recipe: devices, host memory, model configurations, free ports.

No import of torch or transformers, so that planning stays quick on a login node.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.facts.hardware import DEVICES, MIB, Hardware, with_host_memory
from launcher.facts.shipped import facts_file

if TYPE_CHECKING:
    import socket

_PACKAGE_REF = "package:"
_SMI_SECONDS = 10
_HUB_SECONDS = 2.0
_CALIBRATION_BYTES = 1 << 20
"""About a thousand runs."""


def resolve_path(ref: str) -> Path:
    """The path that `ref` names: `package:NAME/inner/path` in an installed package, else itself.

    The package is located, not imported. RecipeError when the package or the path in it is absent.
    """
    if not ref.startswith(_PACKAGE_REF):
        return Path(ref).expanduser()
    name, _, inner = ref.removeprefix(_PACKAGE_REF).partition("/")
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        message = f"no Python package {name!r} is installed, so {ref!r} names nothing"
        raise RecipeError(Problem("package-missing", message, hint="install the package"))
    for folder in folders:
        if (path := Path(folder) / inner).exists():
            return path
    raise RecipeError(Problem("path-missing", f"package {name!r} has no file or folder {inner!r}"))


def free_port() -> int:
    """A TCP port that nothing listens on just now, at no address of this machine."""
    with _bound_everywhere(0) as sock:
        return int(sock.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether nothing listens on a TCP port just now, at any address of this machine."""
    try:
        _bound_everywhere(port).close()
    except OSError:
        return False
    return True


def _bound_everywhere(port: int) -> socket.socket:
    """A socket that has the port at all addresses, as torch's store will; OSError where it is taken."""
    import socket

    both = socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if both:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", port))
    except OSError:
        sock.close()
        raise
    return sock


def cache_root() -> Path:
    """Where prepared data, converted models and the calibration file are kept.

    $EFFILAUNCH_CACHE, else ~/.cache/effilaunch.
    """
    given = os.environ.get("EFFILAUNCH_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "effilaunch"


def calibration_file() -> Path:
    """What finished runs measured beside what was predicted, one JSON object a line."""
    return cache_root() / "calibration.jsonl"


def calibration_text() -> str:
    """The newest part of the calibration file, "" without one."""
    try:
        with calibration_file().open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            start = max(0, size - _CALIBRATION_BYTES)
            stream.seek(start)
            found = stream.read()
    except OSError:
        return ""
    if start:
        found = found.partition(b"\n")[2]
    return found.decode("utf-8", errors="replace")


def host_memory_bytes() -> int | None:
    """Memory this process may use: the machine's, or the control group's limit where lower."""
    limits = []
    with contextlib.suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit_file in (
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ):
        try:
            limits.append(int(limit_file.read_text()))
        except (OSError, ValueError):  # absent, or the word "max"
            continue
    return min(limits, default=None)


def probe_hardware() -> Hardware:
    """This machine's devices: GPUs that `CUDA_VISIBLE_DEVICES` leaves, else one CPU process."""
    return probe_hardware_with_notes()[0]


def probe_hardware_with_notes() -> tuple[Hardware, tuple[str, ...]]:
    """As `probe_hardware`, and remarks on what it had to decide (unlike devices)."""
    devices = _visible(_query_gpus(), os.environ)
    if not devices:
        cpu = Hardware(1, 1, "cpu", None, None)
        return with_host_memory(cpu, host_memory_bytes()), ()
    weakest = min(devices, key=lambda d: (d.size, d.capability or (0, 0)))
    notes: tuple[str, ...] = ()
    if len({(d.name, d.size) for d in devices}) > 1:
        names = ", ".join(sorted({d.name for d in devices}))
        notes = (f"devices differ ({names}); all are planned as the smallest, {weakest.name}",)
    return weakest.as_hardware(len(devices)), notes


def visible_devices() -> list[str]:
    """Indices of the GPUs that this process may use, as nvidia-smi numbers them."""
    return [gpu.index for gpu in visible_gpus()]


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process may use."""
    return _visible(_query_gpus(), os.environ)


def boot_id() -> str:
    """The same for all processes of a machine, until it is started again; empty where nobody tells."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


_NO_GPU = ("", "-1", "NoDevFiles")
"""First entries of CUDA_VISIBLE_DEVICES that mean none; the last one is Slurm's."""


class Gpu:
    """One line of nvidia-smi's answer."""

    __slots__ = ("capability", "index", "name", "size", "uuid")

    def __init__(self, fields: list[str]) -> None:
        index, uuid, name, mib, capability = (field.strip() for field in fields)
        self.index, self.uuid = index, uuid
        self.size = int(mib) * MIB
        match = re.fullmatch(r"(\d+)\.(\d+)", capability)
        self.capability = (int(match[1]), int(match[2])) if match else None
        self.name = _catalogue_name(name, int(mib)) or name

    def as_hardware(self, count: int) -> Hardware:
        return Hardware(1, count, self.name, self.size, self.capability)


def _catalogue_name(marketing: str, mib: int) -> str | None:
    """`NVIDIA A100-SXM4-80GB` -> `A100-80GB` when the memory agrees within 3 %."""
    words = re.split(r"[^a-z0-9]+", marketing.lower())
    joined = "".join(words)
    for name, (known_mib, _) in DEVICES.items():
        family = name.rpartition("-")[0].lower()
        # Whole words, so that an L4 is not taken for an L40S; RTX cards join two words.
        named = family in words or (family.startswith("rtx") and joined.endswith(family[3:]))
        if named and abs(mib - known_mib) <= 0.03 * known_mib:
            return name
    return None


def _query_gpus() -> list[Gpu]:
    import subprocess

    query = "index,uuid,name,memory.total,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
        return [Gpu(row) for row in csv.reader(answer.stdout.splitlines()) if row]
    except (OSError, subprocess.SubprocessError, ValueError):
        # No driver, a driver that does not answer, or another form of answer: no GPU to plan for.
        return []


def _visible(devices: list[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """The devices that `CUDA_VISIBLE_DEVICES` names; as in CUDA, an unknown entry ends the list.

    MachineError where it asks for devices and none of these is meant: a run would train on the CPU.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return devices
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in wanted.split(",")):
        match = [d for d in devices if entry and (d.index == entry or d.uuid.startswith(entry))]
        if not match or match[0] in chosen:
            break
        chosen.append(match[0])
    if devices and not chosen and wanted.split(",")[0].strip() not in _NO_GPU:
        raise MachineError(_names_none(wanted))
    return chosen


def _names_none(wanted: str) -> Problem:
    message = f"CUDA_VISIBLE_DEVICES={wanted} names no GPU that nvidia-smi shows"
    if "MIG-" in wanted:
        message += ": a slice of a GPU (MIG) is not planned for"
    hint = "name whole GPUs by number or UUID (nvidia-smi -L); an empty value means a run on the CPU"
    return Problem("device-missing", message, hint=hint)


@functools.cache
def _shipped_models() -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = json.loads(facts_file("models.json").read_text())["models"]
    return models


def shipped_model_names() -> tuple[str, ...]:
    """Names of the models whose published configurations come with the package."""
    return tuple(_shipped_models())


def shipped_model_config(name: str) -> dict[str, Any] | None:
    """Published configuration values that come with the package, or None for another model."""
    entry = _shipped_models().get(name)
    return dict(entry["config"]) if entry else None


def find_model_config(
    name_or_path: str,
    *,
    gguf_file: str | None = None,
    revision: str | None = None,
    cache_dir: str | None = None,
    allow_network: bool = True,
) -> tuple[dict[str, Any], str]:
    """The model's configuration and where it was found (`folder`, `GGUF header`, `hub cache`, ...).

    RecipeError `model-config-missing` when no place has it.
    """
    try:
        folder = resolve_path(name_or_path)
        is_folder = folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # e.g. a name that no file system would take
        raise _missing(name_or_path, "no folder has such a name") from None
    if gguf_file is not None and is_folder:
        path = folder / gguf_file
        if not path.is_file():
            raise _missing(name_or_path, f"the folder has no file {gguf_file!r}")
        from launcher.facts.gguf import read_gguf_config

        return read_gguf_config(path), "GGUF header"
    if is_folder:
        if not (folder / "config.json").is_file():
            raise _missing(name_or_path, "the folder has no config.json")
        return _read_json(folder / "config.json"), "folder"
    if name_or_path.startswith((_PACKAGE_REF, "/", "./", "../", "~")):
        raise _missing(name_or_path, "there is no such folder")
    if gguf_file is None:
        cached = _cached_config(name_or_path, revision or "main", cache_dir)
        if cached is not None:
            return cached, "hub cache"
        if allow_network and not _offline():
            fetched = _hub_config(name_or_path, revision or "main")
            if fetched is not None:
                return fetched, "hub"
    shipped = shipped_model_config(name_or_path)
    if shipped is not None:
        return shipped, "shipped facts"
    raise _missing(name_or_path, "neither a folder, nor in the hub cache, nor in the shipped facts")


def _missing(name: str, why: str) -> RecipeError:
    return RecipeError(
        Problem(
            "model-config-missing",
            f"no configuration found for model {name!r}: {why}",
            path="model.name_or_path",
            hint="give a folder with config.json, download the model, or set model.config",
        )
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise _missing(str(path.parent), f"config.json cannot be read ({problem})") from problem
    if not isinstance(value, dict):
        raise _missing(str(path.parent), "config.json holds no mapping")
    return value


def _cached_config(name: str, revision: str, cache_dir: str | None) -> dict[str, Any] | None:
    path = _snapshot(name, revision, cache_dir) / "config.json"
    return _read_json(path) if path.is_file() else None


def _snapshot(name: str, revision: str, cache_dir: str | None) -> Path:
    """Where a model lies in the hub's cache layout: models--ORG--NAME/{refs,snapshots}."""
    home = os.environ.get("HF_HOME") or str(Path("~/.cache/huggingface").expanduser())
    root = cache_dir or os.environ.get("HF_HUB_CACHE") or str(Path(home) / "hub")
    repo = Path(root).expanduser() / f"models--{name.replace('/', '--')}"
    ref = repo / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    return repo / "snapshots" / commit


def has_chat_template(name_or_path: str) -> bool | None:
    """Whether the tokenizer's files here have a chat template; None where there are none."""
    places = [resolve_path(name_or_path), _snapshot(name_or_path, "main", None)]
    for folder in places:
        if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
            return True
        settings = folder / "tokenizer_config.json"
        if settings.is_file():
            return '"chat_template"' in settings.read_text("utf-8", errors="replace")
    return None


def _offline() -> bool:
    on = {"1", "ON", "YES", "TRUE"}
    return any(os.environ.get(name, "").upper() in on for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def _hub_config(name: str, revision: str) -> dict[str, Any] | None:
    """`config.json` from the hub; None on any failure, since the shipped facts come next."""
    from http.client import HTTPException
    from urllib import request as urlrequest  # 20 ms that only a look at the hub is worth

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = urlrequest.Request(f"{endpoint}/{name}/resolve/{revision}/config.json")
    if token := os.environ.get("HF_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urlrequest.urlopen(request, timeout=_HUB_SECONDS) as answer:
            value = json.load(answer)
    except (OSError, ValueError, RecursionError, HTTPException):  # URLError is an OSError
        return None
    return value if isinstance(value, dict) else None
