"""Steps that take long: what a process says of them in its status and in its log."""

from __future__ import annotations

import os
import sys
import threading

import pytest
from patience import patience

from launcher.files.rank_status import amount, is_passing, of_total, read_stage, read_statuses, step_line
from launcher.train import progress, status
from launcher.train.progress import Progress, bars_in_status


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The bars that the status was shown."""
    found = []
    monkeypatch.setattr(status, "_current", status.Status(None, 0))
    monkeypatch.setattr(
        status._current,
        "show",
        lambda bar: found.append(None if bar is None else (bar.title, bar.done, bar.total)),
    )
    return found


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_amounts():
    assert of_total(1000, 20000, "rows") == "1,000 of 20,000 rows"
    assert of_total(20000, 20000, "rows") == of_total(20000, None, "rows") == "20,000 rows"
    assert of_total(2**19, 2**31, "B") == "512 KiB of 2.00 GiB"
    assert [amount(size, "B") for size in (5, 2**20, 3 * 2**40)] == ["5 B", "1 MiB", "3,072.00 GiB"]
    assert amount(7, "") == "7"


def test_a_log_has_a_line_now_and_then_and_one_at_the_end(told, clock, capsys):
    with Progress("Preparing train data", 4000) as rows:
        for _ in range(4):
            clock[0] += 10.0
            rows.add(1000)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "Preparing train data: 2,000 of 4,000 rows, 100 rows/s so far",
        "Preparing train data: 4,000 rows, 100 rows/s so far",
        "Preparing train data: 4,000 rows, 100 rows/s",
    ]
    assert [is_passing(line) for line in said] == [True, True, False]
    assert told == [*(("Preparing train data", done * 1000, 4000) for done in range(5)), None]


def test_a_step_that_is_given_up_says_nothing_at_its_end(told, capsys):
    with pytest.raises(ValueError, match="broken"), Progress("Packing"):
        raise ValueError("broken")
    assert capsys.readouterr().err == ""
    assert told[-1] is None


def test_the_last_that_began_is_shown_until_it_ends(told):
    with Progress("outer", 2, "") as outer:
        with Progress("inner", 5, "", least_s=1.0) as inner:
            inner.add(1)
            outer.add(1)
        outer.add(1)
    assert told == [("outer", 0, 2), ("inner", 0, 5), ("inner", 1, 5), ("outer", 1, 2), ("outer", 2, 2), None]


def test_threads_count_together(told):
    with Progress("Hashing", 8000, "B", least_s=1.0) as hashed:
        threads = [threading.Thread(target=lambda: [hashed.add(1) for _ in range(1000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert hashed._done == 8000


def test_bars_of_libraries_speak_through_the_status(told, clock, capsys):
    from tqdm.auto import tqdm

    drawn = tqdm.display
    with bars_in_status():
        with tqdm(total=3, desc="Loading weights: ", mininterval=0) as bar:
            for _ in range(3):
                clock[0] += 1.0
                bar.update(1)
        for _ in tqdm([1, 2], leave=True, mininterval=0):  # over before anybody could read of it
            pass
    assert tqdm.display is drawn
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "Loading weights: 3, 1/s\n")
    assert ("Loading weights", 2, 3) in told
    assert ("working", 2, 2) in told
    assert told[-1] is None


def test_a_bar_that_counts_oddly_ends_nothing(tmp_path, clock, monkeypatch):
    import numpy
    from tqdm import tqdm

    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(status, "_current", status.Status(tmp_path, 0))
    with bars_in_status():
        for total, unit in ((numpy.int64(5), "it"), (float("nan"), None), (numpy.float32(5), 7)):
            with tqdm(total=total, unit=unit, mininterval=0) as bar:
                for _ in range(3):
                    clock[0] += 1.0
                    bar.update(numpy.int64(1))
                status.status().flush(patience(60))
                shown = read_statuses(tmp_path)[0]
                assert (shown.done, shown.total) == (3, 5 if unit else None)


def test_a_title_keeps_no_secret(tmp_path, clock, monkeypatch):
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("MIRROR_TOKEN", "tiger-in-the-tank")
    monkeypatch.setattr(status, "_current", status.Status(tmp_path, 0))
    with Progress("https://mirror/x?key=tiger-in-the-tank", 5) as download:
        clock[0] += 1.0
        download.add(1)
        status.status().flush(patience(60))
        assert read_statuses(tmp_path)[0].title == "https://mirror/x?key=<secret>"


def test_an_evaluation_counts_its_batches(told, monkeypatch):
    from launcher.train.callbacks import Progress as Callback

    moved = []
    monkeypatch.setattr(status._current, "moved", moved.append)
    callback = Callback()
    for loader in ([1, 2], iter([1, 2])):
        for _ in range(2):
            callback.on_prediction_step(None, None, None, eval_dataloader=loader)
        callback.on_evaluate(None, None, None)
    assert moved == [
        status.Bar("Evaluating", done, total, "batches") for total in (2, None) for done in (1, 2)
    ]


def test_the_hubs_bars_are_there_without_a_terminal(told, capsys, monkeypatch):
    from datasets.utils.tqdm import tqdm as of_datasets
    from huggingface_hub.utils.tqdm import _create_progress_bar
    from huggingface_hub.utils.tqdm import tqdm as hubs

    monkeypatch.delenv("TQDM_POSITION", raising=False)
    with bars_in_status():
        bar = _create_progress_bar(cls=hubs, log_level=20, desc="model.safetensors", total=2**30, unit="B")
        bar.update(2**29)
        bar.refresh()
        bar.close()
        of_datasets(total=5, desc="Generating train split", disable=None).close()
    assert ("model.safetensors", 2**29, 2**30) in told
    assert ("Generating train split", 0, 5) in told
    assert capsys.readouterr().err == ""


def test_a_forked_process_says_nothing(told, capfd):
    from tqdm import tqdm

    with bars_in_status():
        child = os.fork()
        if child == 0:
            with tqdm(total=3, desc="of a child") as bar:
                bar.update(3)
            os._exit(len(told))
        assert os.waitpid(child, 0)[1] == 0
    assert capfd.readouterr().err == ""


def test_a_stage_has_a_status_while_it_goes_on(tmp_path):
    (tmp_path / "logs").mkdir()
    before = status.status()
    with status.status_of_stage(tmp_path, "prepare"):
        status.status().enter("prepare")
        found = read_stage(tmp_path, "prepare")
        assert found is not None
        assert found.phase == "prepare"
        assert read_statuses(tmp_path) == {}
    assert list((tmp_path / "logs").iterdir()) == []
    assert status.status() is before


def test_a_step_without_an_amount_says_how_long_it_took():
    assert step_line("Packing", 0, None, "", 2.4, ended=True) == "Packing: 2 s"


def test_tqdm_is_not_needed_for_our_own(told):
    code = "import sys; import launcher.train.progress; sys.exit('tqdm' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
