"""Guards around every test: no hub, no user's files, no environment leaking between tests."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cpu_seconds import (  # noqa: F401  hooks
    FORKING,
    pytest_runtest_logreport,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    pytest_sessionfinish,
    pytest_terminal_summary,
)
from drawn import pytest_addoption, pytest_collection_modifyitems  # noqa: F401  hooks
from forked import Forks

from launcher.execute.leftovers import SHARED_MEMORY
from launcher.machine.storage import mapped_files

ROOT = Path(__file__).resolve().parent.parent

# Under nohup, and as jobs of a script, they are ignored, and every child would inherit that: tests that send
# them would wait for ever.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Set before any test module can import a library that reads them at import time.
os.environ["HF_HUB_OFFLINE"] = "1"
# The command line sets this for its own process, which is the test's when called in process.
os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# As many test processes as cores: a thread that spins while it waits takes the core from who it waits for.
# 150 steps of a tiny model beside other work: 74 s spinning, 1.5 s sleeping.
os.environ["OMP_WAIT_POLICY"] = "passive"

# As in an activated environment: another ninja than that of `run` would compile DeepSpeed's operators anew.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# One folder for all tests and all sessions: the smoke model is converted from GGUF once.
CACHE = ROOT / "build" / "test-cache"
os.environ["EFFILAUNCH_CACHE"] = str(CACHE / "effilaunch")
os.environ["HF_HOME"] = str(CACHE / "huggingface")
os.environ["TRITON_CACHE_DIR"] = str(CACHE / "triton")
# DeepSpeedCPUAdam is compiled here, once.
os.environ["TORCH_EXTENSIONS_DIR"] = str(CACHE / "torch_extensions")
os.environ.setdefault("CXX", str(ROOT / "tests" / "compiler.sh"))

# Libraries write these when they are imported or start a process group in the test's process.
_LIBRARIES_OWN = (
    "ACCELERATE_", "CUDA_", "DS_", "FSDP_", "GLOO_", "KMP_", "LOCAL_", "MASTER_", "NCCL_", "OMP_",
    "PYTEST_", "PYTORCH_", "RANK", "RAY_", "TF", "TORCH", "TRITON_", "WANDB_", "WORLD_SIZE",
    "CROSS_", "PMI_",
)  # fmt: skip


def pytest_configure() -> None:
    """Every session writes there; without it each test would fail for a reason of its own."""
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        (CACHE / "written").touch()
    except OSError as error:
        raise pytest.UsageError(f"tests need a folder build/ that can be written: {error}") from None


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def forks(tmp_path_factory) -> Iterator[Forks]:
    """The process that forks ranks, once: its imports take most of ten seconds."""
    home = str(tmp_path_factory.mktemp("forks-home"))
    environ = {**os.environ, "EFFILAUNCH_CACHE": home, "HOME": home, "XDG_CACHE_HOME": home}
    for name in ("EFFILAUNCH_RESUME", "EFFILAUNCH_DRILL", "EFFILAUNCH_SUPERVISOR"):
        environ.pop(name, None)
    with Forks(environ, tmp_path_factory.mktemp("forks")) as found:
        assert found.threads == [], "a fork would lose the other threads"
        FORKING.append(found.pid)
        yield found
        FORKING.remove(found.pid)


@pytest.fixture
def warm(forks) -> Iterator[Forks]:
    """What `sys.executable` runs is a fork of a process that has imported the stack."""
    with forks.as_interpreter():
        yield forks


@pytest.fixture(scope="module")
def warm_module(forks) -> Iterator[Forks]:
    """The same for fixtures of a whole module, and from then on for all its tests."""
    with forks.as_interpreter():
        yield forks


@pytest.fixture
def answered(empty_home) -> None:
    """What is traced is recorded for all tests of a checkout."""
    folder = CACHE / "effilaunch" / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    (Path(os.environ["EFFILAUNCH_CACHE"]) / "traces").symlink_to(folder)


@pytest.fixture
def recorded(monkeypatch) -> None:
    """What is shipped is planned from its records alone."""

    def ask(request: Mapping[str, Any], *_others: Any) -> None:
        kind = request["config"].get("model_type")
        pytest.fail(f"a shipped record is absent or stale ({request['ask']} of {kind}): `make traces`")

    # The one that imports the other comes first: it would keep what is patched there.
    monkeypatch.setattr("launcher.inputs.model_trace.ask_child", ask)
    monkeypatch.setattr("launcher.models.memory_trace.ask_child", ask)


@pytest.fixture(scope="session")
def homes(tmp_path_factory) -> Iterator[Path]:
    """New folders. Among those of the tests, pytest would look through all of them for each next number."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def empty_home(no_leaked_environment, no_shared_memory_left, homes, monkeypatch):
    """Nothing of the developer's home is read or written, and no test plans from another's measured runs."""
    home = next(homes)
    cache = home / "effilaunch"
    cache.mkdir(parents=True)
    for shared in ("data", "gguf", "hub"):
        (CACHE / "effilaunch" / shared).mkdir(parents=True, exist_ok=True)
        (cache / shared).symlink_to(CACHE / "effilaunch" / shared)
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(cache))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    for name in ("HF_TOKEN", "WANDB_API_KEY", "EFFILAUNCH_RESUME", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True, scope="module")
def frozen_imports():
    """Each training run collects garbage: 0.3 s over the imported stack, nothing over what a test makes."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_shared_memory_left():
    """DeepSpeed started by a test itself leaves 66 MiB of memory per rank; over a session they fill it."""
    before = set(SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*"))
    yield
    mine = set(SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*")) - before
    for path in mine - (
        in_use() if mine else set()
    ):  # another session's run may have begun meanwhile: its ranks need theirs
        path.unlink(missing_ok=True)


def in_use() -> set[Path]:
    """Files in shared memory that a process has open or mapped: a rank writes its own before it maps it."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # closed meanwhile, or another user's
            found.add(link.readlink())
    return found | {Path(path) for path in mapped_files(SHARED_MEMORY)}


@pytest.fixture(autouse=True)
def no_leaked_environment():
    """A test that changes the environment without monkeypatch fails, and is undone."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
        # Other devices than before would be what later tests of the process see.
        and (name == "CUDA_VISIBLE_DEVICES" or not name.startswith(_LIBRARIES_OWN))
    )
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"the test left these environment variables changed: {changed}"


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Connections leave this machine in no test; loopback is what process groups meet on."""
    connect = socket.socket.connect

    def local_only(self, address):
        loopback = self.family == socket.AF_UNIX or address[0].startswith("127.")
        if not loopback and address[0] not in ("localhost", "::1"):
            own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
            if address[0] not in own and address[0] != socket.gethostname():
                raise AssertionError(f"a test reached for the network: {address}")
        return connect(self, address)

    with mock.patch.object(socket.socket, "connect", local_only):
        yield
