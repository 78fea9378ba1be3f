"""The planner's page for a web server that only sends files: `make docs` puts it into the site.

    python -m tools.planner_site FOLDER

Pyodide comes from npm, and what planning imports from the package index; both are kept in build/, and neither
is part of the repository. What is written: index.html, planner.js, planner.css, worker.js, pyodide/, and
effilaunch.zip with the package, its data and its dependencies.
"""

from __future__ import annotations

import contextlib
import http.server
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import yaml

from launcher.files.shipped import ds_configs_dir, recipes_dir
from launcher.report.planner_page.page import KINDS, PageStart, file_text, planner_page

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "planner-site"
PYODIDE = "314.0.7"
"""Version of the npm package; its first digits are Python's."""
WASM = ("--python-version", "3.14", "--platform", "pyemscripten_2026_0_wasm32", "--implementation", "cp")
"""For which pip brings packages."""
NEEDED = ("pydantic", "packaging", "argcomplete")
"""What the package imports, beside PyYAML: that has no wheel for WebAssembly, and needs none without C."""
_PYODIDE_FILES = (
    "pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json",
)  # fmt: skip
LARGEST = 20 << 20
"""Bytes of the first load."""
FIRST = "llama3_8b_qlora_24gb"
"""The recipe that the page begins with."""


class NoPlannerSite(Exception):
    """Why the page cannot be made here."""


def pyodide() -> Path:
    """The folder of Pyodide's npm package."""
    return npm_package("pyodide", PYODIDE)


def npm_package(name: str, version: str) -> Path:
    """The folder of a package of npm, installed where it is absent. NoPlannerSite where it cannot be had."""

    def install(made: Path) -> None:
        if shutil.which("npm") is None:
            raise NoPlannerSite(f"npm is not installed, which brings {name}: install Node.js")
        _call("npm", "install", "--no-save", "--prefix", str(made), f"{name}@{version}")

    return kept(CACHE / f"{name}-{version}", install) / "node_modules" / name


def dependencies() -> Path:
    """A folder with what the package imports, as Pyodide imports it."""

    def install(made: Path) -> None:
        pip = (sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check")
        into = ("-c", str(ROOT / "constraints.txt"), "--target", str(made), "--only-binary", ":all:")
        _call(*pip, *into, *WASM, *NEEDED)
        pure = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(Path(yaml.__file__).parent, made / "yaml", ignore=pure)

    return kept(CACHE / f"packages-{PYODIDE}-{int((ROOT / 'constraints.txt').stat().st_mtime)}", install)


def kept(folder: Path, install: Callable[[Path], None]) -> Path:
    """The folder, filled by `install` where it is absent; several processes may ask for it at once."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as part:
        made = Path(part) / "made"
        made.mkdir()
        install(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # no other process was faster
                raise
    return folder


def _call(*words: str) -> None:
    done = subprocess.run(words, cwd=CACHE, capture_output=True, text=True)
    if done.returncode:
        raise NoPlannerSite(f"{words[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")


def _packed() -> Iterator[tuple[Path, str]]:
    """Each file of effilaunch.zip, and its name there."""
    package, needed = ROOT / "launcher", dependencies()
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path, str(path.relative_to(ROOT))
    for folder in (recipes_dir(), ds_configs_dir()):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield path, f"launcher/_data/{folder.name}/{path.relative_to(folder)}"
    for path in sorted(needed.rglob("*")):
        if (path.is_file() and path.suffix in (".py", ".so", ".typed")) or path.name == "METADATA":
            yield path, str(path.relative_to(needed))


def build(target: Path) -> dict[str, int]:
    """Write the page into `target`; name -> bytes of what it loads. NoPlannerSite where it cannot be made."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "pyodide").mkdir(parents=True)
    source = pyodide()
    for name in _PYODIDE_FILES:
        shutil.copyfile(source / name, target / "pyodide" / name)
    with zipfile.ZipFile(target / "effilaunch.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path, name in _packed():
            packed.write(path, name)
    for name in KINDS:
        (target / name).write_text(file_text(name), encoding="utf-8")
    sizes = {
        str(path.relative_to(target)): path.stat().st_size for path in target.rglob("*") if path.is_file()
    }
    if sum(sizes.values()) > LARGEST:
        raise NoPlannerSite(f"the page would load {sum(sizes.values()) >> 20} MiB, and may {LARGEST >> 20}")
    fetched = {name: size for name, size in sizes.items() if name.endswith((".wasm", ".zip", ".json"))}
    text = (recipes_dir() / f"{FIRST}.yaml").read_text(encoding="utf-8")
    start = PageStart(f"{FIRST}.yaml", text, on=("1xRTX4090-24GB", "8xH100-80GB"), files=fetched)
    (target / "index.html").write_text(planner_page(start), encoding="utf-8")
    return sizes


class _Files(http.server.SimpleHTTPRequestHandler):
    """Sends files, and nothing of its own."""

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """What `build` wrote, on this machine's loopback until the block ends; the page's address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/index.html"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    try:
        total = sum(build(Path(sys.argv[1])).values())
    except NoPlannerSite as why:
        sys.exit(f"error: {why}")
    print(f"{sys.argv[1]}: {total / 2**20:.1f} MiB")
