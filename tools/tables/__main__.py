"""Write all generated tables from the installed packages: `make tables`, `python -m tools.tables`.

A table states the version that it was read from. Of LLaMA-Factory and axolotl, which are not installed, the
pinned version is downloaded (without its dependencies) unless `--source NAME=DIR` names a checkout or an
unpacked wheel. What can neither be downloaded nor is named stays as it is, and is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.recipe.field_tables import TABLES, field_table, installed_package, shipped_table
from tools.tables import fields, peers

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "launcher"
SCHEMA = ROOT / "recipes" / "recipe.schema.json"
PINNED = {"llamafactory": "0.9.5", "axolotl": "0.21.0"}


def table_text(table: Mapping[str, Any]) -> str:
    """The text of a table file: one entry a line, so that differences between versions read well."""
    blocks = []
    for name, value in table.items():
        if isinstance(value, dict) and value:
            rows = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
            blocks.append(f"  {json.dumps(name)}: {{\n{rows}\n  }}")
        else:
            blocks.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def field_files() -> Iterator[tuple[Path, str]]:
    for name in TABLES:
        yield shipped_table(name), table_text(fields.generate(name))


def model_files() -> Iterator[tuple[Path, str]]:
    from tools.tables import models

    for name, make in models.TABLES.items():
        yield PACKAGE / "models" / "data" / f"{name}.json", table_text(make())


def deepspeed_files() -> Iterator[tuple[Path, str]]:
    from tools.tables import deepspeed_keys

    folder = PACKAGE / "knowledge" / "lint" / "tables"
    yield folder / "deepspeed.json", table_text(deepspeed_keys.vocabulary())


def peer_files(sources: Mapping[str, Path], *, offline: bool) -> Iterator[tuple[Path, str]]:
    for name, make in peers.PEERS.items():
        found = _source_of(name, sources, offline=offline)
        if found is None:
            print(f"{name}: no source of {PINNED[name]}; the table stays as it is", flush=True)
            continue
        folder, version = found
        yield PACKAGE / "importing" / "tables" / f"{name}.json", table_text(make(folder, version))


def _source_of(name: str, sources: Mapping[str, Path], *, offline: bool) -> tuple[Path, str] | None:
    """(package folder, version) of a project: as named, as installed, else downloaded."""
    if name in sources:
        folder = sources[name]
        package = next((one for one in (folder / "src" / name, folder / name) if one.is_dir()), folder)
        return package, _version_of(folder)
    if (installed := installed_package(name)) is not None:
        return installed[1], installed[0]
    if offline:
        return None
    folder = Path(tempfile.mkdtemp(prefix="effilaunch-tables-"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-d",
        str(folder),
    ]
    if subprocess.run([*pip, f"{name}=={PINNED[name]}"], capture_output=True).returncode:
        return None
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder / name, PINNED[name]


def _version_of(folder: Path) -> str:
    """The version that a checkout or an unpacked wheel states, with the commit of a checkout."""
    metadata = next(folder.glob("*.dist-info/METADATA"), None)
    if metadata is not None:
        return re.search(r"^Version: (.+)$", metadata.read_text("utf-8"), re.M)[1]  # type: ignore[index]
    stated = folder / "VERSION"
    version = stated.read_text("utf-8").strip() if stated.is_file() else "unknown"
    commit = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return f"{version}+{commit.stdout.strip()}" if commit.returncode == 0 else version


def main() -> int:
    """Write what differs, one line for each file; 1 where `--check` finds a difference, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--source", action="append", default=[], metavar="NAME=DIR", help="where the source of a project is"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where a table differs"
    )
    parser.add_argument("--offline", action="store_true", help="download nothing")
    asked = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # only names are read
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sources = dict(word.split("=", 1) for word in asked.source)
    if unknown := set(sources) - set(peers.PEERS):
        parser.error(f"no table is read from {', '.join(sorted(unknown))}; known: {', '.join(peers.PEERS)}")
    paths = {name: Path(folder).absolute() for name, folder in sources.items()}
    changed = [
        _is_changed(file, text, write=not asked.check)
        for files in (
            field_files(),
            model_files(),
            deepspeed_files(),
            peer_files(paths, offline=asked.offline),
        )
        for file, text in files
    ]
    field_table.cache_clear()  # the schema lists the fields of the tables that were just written
    changed.append(_is_changed(SCHEMA, fields.schema_text(), write=not asked.check))
    return int(asked.check and any(changed))


def _is_changed(file: Path, text: str, *, write: bool) -> bool:
    """Whether a file differs from its new text, which is then written."""
    if file.is_file() and file.read_text("utf-8") == text:
        return False
    if write:
        file.write_text(text, encoding="utf-8")
    print(f"{'changed' if write else 'differs'}: {file.relative_to(ROOT)}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
