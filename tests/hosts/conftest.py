"""Two machines for all tests here, and what a tiny run stands on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from grounds import make_base
from network import Network, missing


@pytest.fixture(scope="session")
def network(tmp_path_factory) -> Iterator[Network]:
    if lacks := missing():
        pytest.skip(f"two machines cannot be made here: {lacks}")
    network = Network(tmp_path_factory.mktemp("network"))
    try:
        network.up()
        yield network
    finally:
        network.down()


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    pytest.importorskip("torch")
    return make_base(tmp_path_factory.mktemp("base"), hidden_size=32, layers=1, heads=2)
