"""Classify data paths: local file or folder, glob, part of a package, URL, or hub dataset."""

from __future__ import annotations

import re
from pathlib import Path

_SUFFIX = re.compile(
    r"\.(jsonl?|ndjson|csv|tsv|parquet|txt|text|arrow)(\.(gz|bz2|xz|zst|zip))?$", re.IGNORECASE
)
_URL = re.compile(r"[A-Za-z][\w+.-]*://|(?:hf|hub|s3|gs|https?):")
# organisation/name, as the hub allows them
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def is_package(text: str) -> bool:
    """Whether `text` is package:NAME/inner/path of an installed Python package."""
    return text.startswith("package:")


def is_url(text: str) -> bool:
    """Whether `text` is a URL: https://, s3://, hf://, …"""
    return not is_package(text) and _URL.match(text) is not None


def is_glob(text: str) -> bool:
    """Whether `text` is a glob pattern (`*`, `?`, `[…]`)."""
    return not is_package(text) and not is_url(text) and any(char in text for char in "*?[")


def is_file(text: str) -> bool:
    """Whether `text` ends like a data file, and is no pattern."""
    return _SUFFIX.search(text) is not None and not any(char in text for char in "*?[")


def is_loaded_hub_id(text: str) -> bool:
    """`is_hub_id` for a path of a loaded recipe or a plan, where every local path is absolute."""
    return not (is_package(text) or is_url(text) or Path(text).is_absolute())


def is_hub_id(text: str, folder: Path) -> bool:
    """Whether `text` is a hub dataset (organisation/name) rather than a path under `folder`.

    False where it has a data file's suffix, or where its first part exists in `folder`.
    """
    if _HUB_ID.fullmatch(text) is None or ".." in text or "--" in text or _SUFFIX.search(text):
        return False
    if text.endswith(("-", ".", ".git")):
        return False
    try:
        return not (folder / text.partition("/")[0]).exists()
    except OSError:
        return True
