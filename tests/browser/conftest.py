"""One browser for all pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import Chromium, find_chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("needs Debian's package chromium")
    opened = Chromium(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
