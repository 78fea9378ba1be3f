"""What compiles the operators that DeepSpeed builds at the start of a run."""

from __future__ import annotations

import ctypes.util
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.facts.build_locks import extensions_root, on_network, stale_locks

_SECONDS = 10


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """Compilers, and where they build."""

    compiler: str | None
    """Version of the C++ compiler, e.g. `13.2.0`; None without one."""
    compiler_command: str
    """`$CXX`, else `c++`: what torch calls."""
    cuda_home: str | None
    """As torch finds it: $CUDA_HOME, $CUDA_PATH, the folder of nvcc on PATH, /usr/local/cuda."""
    nvcc: str | None
    """CUDA release of the nvcc under `cuda_home`, e.g. `12.8`; None without one."""
    ninja: str | None
    """Version of ninja on PATH or beside the interpreter, where a run looks too; None without one."""
    python_headers: bool
    """Python.h of this interpreter."""
    libaio: bool
    """The library and its header, which the async_io operator links."""
    extensions: str
    """Folder in which torch builds."""
    extensions_on_network: bool
    stale_locks: tuple[str, ...]


def read_build(environ: Mapping[str, str]) -> BuildFacts:
    """Ask the compilers on PATH and read the folders."""
    compiler = environ.get("CXX") or "c++"
    home = _cuda_home(environ)
    root = extensions_root(environ)
    include = Path(sysconfig.get_path("include"))
    return BuildFacts(
        compiler=_said([compiler, "-dumpfullversion", "-dumpversion"], r"[0-9]+(\.[0-9]+)*", environ),
        compiler_command=compiler,
        cuda_home=home,
        nvcc=_said([f"{home}/bin/nvcc", "--version"], r"(?<=release )[0-9]+\.[0-9]+", environ)
        if home
        else None,
        ninja=_ninja(environ),
        python_headers=(include / "Python.h").is_file(),
        libaio=_has_libaio(environ),
        extensions=str(root),
        extensions_on_network=on_network(root),
        stale_locks=tuple(str(lock) for lock in stale_locks(environ)),
    )


def _said(command: list[str], pattern: str, environ: Mapping[str, str]) -> str | None:
    """What of a program's answer matches; None where there is no such program, or no such answer."""
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
    """In the order of torch.utils.cpp_extension._find_cuda_home, less the wheels of CUDA."""
    named = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if named:
        return named
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc:
        return str(Path(nvcc).parent.parent)
    return "/usr/local/cuda" if Path("/usr/local/cuda").exists() else None


def _ninja(environ: Mapping[str, str]) -> str | None:
    beside = Path(sys.executable).parent / "ninja"
    command = str(beside) if beside.is_file() else "ninja"
    return _said([command, "--version"], r"[0-9]+(\.[0-9]+)+\S*", environ)


def _has_libaio(environ: Mapping[str, str]) -> bool:
    """The header in a folder that compilers search, and a library of that name."""
    folders = [Path(p) for p in environ.get("CPATH", "").split(":") if p]
    flags = re.findall(r"-I\s*(\S+)", environ.get("CFLAGS", ""))
    places = [*folders, *(Path(flag) for flag in flags), Path("/usr/include"), Path("/usr/local/include")]
    header = any((place / "libaio.h").is_file() for place in places)
    return header and (ctypes.util.find_library("aio") is not None or bool(flags))
