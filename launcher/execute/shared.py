"""What all machines of a run must see alike: its run directory, the prepared data, the interpreter."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from launcher.facts.user_files import read_record


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def prepared_data(run_dir: Path) -> dict[str, str | None]:
    """The folder of prepared samples that the ranks read, as `look` takes it; none for ranks without data."""
    if not (run_dir / "data.json").is_file():
        return {}
    folder = read_record(run_dir / "data.json").get("folder")
    return {} if folder is None else {str(folder): None}


def look(files: Mapping[str, str | None]) -> list[dict[str, str]]:
    """What is wrong with files that the head sees; `{host}` in a message stands for this machine."""
    problems = []
    for name, digest in files.items():
        path = Path(name)
        try:
            there = path.exists()
            found = digest_of(path) if there and digest is not None else None
        except OSError as error:
            problems.append(_unseen(f"{{host}} cannot read {name}: {error.strerror}"))
            continue
        if not there:
            problems.append(_unseen(f"{{host}} does not see {name}, which the first machine has"))
        elif found != digest:
            problems.append(_unseen(f"{{host}} sees another {name} than the first machine"))
    return problems


def _unseen(message: str) -> dict[str, str]:
    hint = (
        "all machines must see it under this path, on a disk that they share (--output-dir, EFFILAUNCH_CACHE)"
    )
    return {"code": "not-shared", "message": message, "hint": hint}
