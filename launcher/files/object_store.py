"""Files below one URL of an object store, through fsspec: S3, Google Cloud Storage, or another file system.

fsspec is imported when a store is opened: planning needs none of it. Credentials come from the environment
and the store's own configuration files, never from a URL. Errors of all file systems become `StoreError`,
without secrets.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

Kind = Literal["denied", "absent", "full", "damaged", "unreachable"]
PACKAGES: Mapping[str, str] = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "abfss", "az"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
}
"""Protocol -> the module that fsspec needs for it; the others are fsspec's own, or have their own error."""
UNFIT = ("memory", "http", "https", "data", "ftp", "github", "git", "zip", "tar")
"""Protocols that keep nothing, or that fsspec cannot write."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.+)")
_PIECE = 16 << 20
"""Bytes of one request that reads."""
_S3 = {
    "config_kwargs": {"retries": {"max_attempts": 2, "mode": "standard"}, "read_timeout": 60},
    "max_concurrency": 4,
}
"""Options of S3: callers try again themselves, and four parts of 50 MB are enough memory for one file."""
_NO_LOGIN = r"Credential|Unauthorized|Forbidden|TokenRetrieval|RefreshError"
"""In the names of errors of libraries that raise no PermissionError."""
_FULL = r"(?i)quota|no space left|insufficient (?:storage|capacity)|storage ?full|EntityTooLarge"
_DENIED = r"(?i)access ?denied|InvalidAccessKeyId|SignatureDoesNotMatch|\b40[13]\b"


class StoreError(Exception):
    """An operation on a store failed."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        """One line, without secrets."""

    @property
    def lasts(self) -> bool:
        """Whether another attempt within minutes would fail in the same way."""
        return self.kind in ("denied", "absent", "full")


def protocol_of(url: str) -> str | None:
    """The protocol of a URL in lower case; None for another text."""
    found = _URL.fullmatch(url)
    return None if found is None else found[1].lower()


def package_of(url: str) -> str | None:
    """The module that a URL needs beside fsspec; None where it needs none."""
    return PACKAGES.get(protocol_of(url) or "")


def lacks_package(url: str) -> str | None:
    """The module that a URL needs and that is not installed; None where there is none."""
    names = ("fsspec", package_of(url))
    return next((name for name in names if name and importlib.util.find_spec(name) is None), None)


def obstacle(url: str) -> StoreError | None:
    """Why the folder of a URL cannot be written; None where it can. Asks the store."""
    if absent := lacks_package(url):
        return StoreError("absent", f"the package {absent} is not installed")
    try:
        Store(url).check_writable()
    except StoreError as error:
        return error
    return None


class Store:
    """The objects below one URL. Every method raises StoreError; paths are relative to the URL."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with _Translated():
            from fsspec.core import url_to_fs

            options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
            if package_of(url) == "s3fs":
                options |= _S3
            if protocol_of(url) in ("file", "local"):
                options = {"skip_instance_cache": True, "auto_mkdir": True}
            self._fs, root = url_to_fs(self.url, **options)
            if hasattr(self._fs, "retries"):
                self._fs.retries = 2
            self._root = str(root).rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Path below the URL -> bytes, of every object below a folder."""
        with _Translated():
            found = self._fs.find(self._path(folder), detail=True)
        start = len(self._root) + 1
        return {str(path)[start:]: int(info["size"] or 0) for path, info in found.items()}

    def info(self, name: str = "") -> dict[str, Any]:
        """What the store knows of one object: size, ETag, …"""
        with _Translated():
            return dict(self._fs.info(self._path(name)))

    def glob(self, pattern: str) -> list[str]:
        """Paths below the URL of the objects that match a pattern, sorted."""
        with _Translated():
            found = self._fs.glob(self._path(pattern))
        return sorted(str(path)[len(self._root) + 1 :] for path in found)

    def read(self, name: str) -> bytes | None:
        """The content of a small object; None where there is none."""
        try:
            with _Translated():
                return bytes(self._fs.cat_file(self._path(name)))
        except StoreError as error:
            if error.kind == "absent":
                return None
            raise

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, replacing one of the same name."""
        with _Translated():
            self._fs.pipe_file(self._path(name), content)

    def upload(self, file: Path, name: str) -> None:
        """Copy a file into the store."""
        with _Translated(local=str(file)):
            self._fs.put_file(str(file), self._path(name))

    def download(self, name: str, file: Path) -> None:
        """Copy an object to a file, whose folder exists."""
        with _Translated(local=str(file)):
            self._fs.get_file(self._path(name), str(file))

    def sha256(self, name: str, size: int, count: Callable[[int], None] = lambda size: None) -> str:
        """The SHA-256 of an object of `size` bytes, read from the store. count: gets the bytes of a read."""
        digest = hashlib.sha256()
        for start in range(0, size, _PIECE):
            with _Translated():
                end = min(start + _PIECE, size)
                piece = self._fs.cat_file(self._path(name), start=start, end=end)
            digest.update(piece)
            count(len(piece))
        return digest.hexdigest()

    def check_writable(self) -> None:
        """Write, read, list and remove an object of a name that nobody else uses."""
        name = f".effilaunch-check-{uuid.uuid4().hex}"
        self.write(name, name.encode())
        found, listed = self.read(name), self.sizes()
        self.remove(name)
        if found != name.encode() or name not in listed:
            raise StoreError("damaged", "an object that was written is not there")

    def remove(self, name: str) -> None:
        """Remove one object; nothing where there is none."""
        try:
            with _Translated():
                self._fs.rm_file(self._path(name))
        except StoreError as error:
            if error.kind != "absent":
                raise

    def remove_folder(self, folder: str) -> None:
        """Remove every object below a folder."""
        assert folder.strip("/"), "never all of a store"
        if self.sizes(folder):
            with _Translated():
                self._fs.rm(self._path(folder), recursive=True)


class _Translated:
    """Turns what a file system raises into StoreError; errors of `local`, a file here, stay OSError."""

    def __init__(self, local: str = "") -> None:
        self._local = local

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, StoreError) or not isinstance(error, Exception):
            return
        if self._local and isinstance(error, OSError) and str(error.filename) == self._local:
            return
        raise translated(error) from error


def translated(error: Exception) -> StoreError:
    """The StoreError of what a file system raised."""
    name, text = type(error).__name__, str(error).strip()
    line = next((line.strip() for line in text.splitlines() if line.strip()), name)
    from launcher.files.redaction import hider, secret_values

    reason = hider(secret_values(os.environ))(line)
    if re.search(_FULL, text):
        return StoreError("full", reason)
    if isinstance(error, PermissionError) or re.search(_NO_LOGIN, name) or re.search(_DENIED, text):
        return StoreError("denied", reason)
    if isinstance(error, FileNotFoundError):
        return StoreError("absent", reason)
    return StoreError("unreachable", reason if name in line else f"{name}: {reason}")
