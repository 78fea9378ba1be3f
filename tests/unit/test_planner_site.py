"""What the planner's page is built from: kept in a folder that several test processes ask for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import patience

from tools.planner_site import NoPlannerSite, kept


def test_several_may_ask_for_one_folder_at_once(tmp_path):
    both = threading.Barrier(2, timeout=patience(60))

    def install(made):
        both.wait()
        (made / "file").write_text("whole")

    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda _: kept(tmp_path / "cache" / "x-1", install), range(2))]
    assert [(folder / "file").read_text() for folder in found] == ["whole"] * 2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["x-1"]


def test_an_installation_that_fails_is_not_kept(tmp_path):
    def fail(made):
        (made / "half").touch()
        raise NoPlannerSite("no network")

    with pytest.raises(NoPlannerSite):
        kept(tmp_path / "x-1", fail)
    assert list(tmp_path.iterdir()) == []
    assert (kept(tmp_path / "x-1", lambda made: (made / "whole").touch()) / "whole").is_file()
