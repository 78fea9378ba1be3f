"""docs/python.md and docs/python.ipynb: their examples run, and interrupting a kernel is the agreed stop."""

from __future__ import annotations

import queue
import re
from pathlib import Path

import pytest
from patience import Deadline, patience, wait_until
from test_docs import blocks

import effilaunch
from launcher.files.checkpoint import complete_checkpoints

pytest.importorskip("torch")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
manager = pytest.importorskip("jupyter_client.manager")
ROOT = Path(__file__).resolve().parents[2]
WARM = "import sys; sys.executable = {!r}"
PAGE, NOTEBOOK = (ROOT / "docs" / name for name in ("python.md", "python.ipynb"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder of a kernel, which imports this checkout and sees no GPU."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def client_of(notebook, forks, folder):
    """A client whose kernel starts the processes of a run as forks, from its first cell on."""
    notebook.cells.insert(0, nbformat.v4.new_code_cell(WARM.format(str(forks.python))))
    place = {"metadata": {"path": str(folder)}}
    return nbclient.NotebookClient(
        notebook, timeout=int(patience(300)), kernel_name="python3", resources=place
    )


def shown(cell):
    """Text of a cell's outputs by kind: `text/html` of a value, `stdout`."""
    found = {}
    for output in cell.outputs:
        found |= output.get("data", {}) if "data" in output else {output.name: output.text}
    return found


def test_the_notebook_runs(here, forks):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    client_of(notebook, forks, here).execute()
    cells = {cell.source.splitlines()[0]: shown(cell) for cell in notebook.cells if cell.cell_type == "code"}
    plan, done = (found for found in cells.values() if "text/html" in found)
    assert plan["text/html"].startswith("<iframe srcdoc=")
    assert "starcoder_lora: planned" in plan["text/html"]
    assert "smoke: finished" in done["text/html"]
    (logged,) = (text for first, text in cells.items() if first.startswith("{row["))
    assert re.findall(r"(\d+): \d", logged["text/plain"]) == ["1", "2", "3", "4"]
    assert "cuda-oom" in cells['log = """Traceback (most recent call last):']["stdout"]


TRAIN = """
import effilaunch
keys = {"trainer.max_steps": 100000, "trainer.save_strategy": "steps", "trainer.save_steps": 100000}
try:
    effilaunch.run("smoke", on="cpu", tiny=True, set=keys, output_dir="out")
except effilaunch.Interrupted as error:
    print("ended with", error.exit_code, [problem.code for problem in error.problems])
print(effilaunch.result("out").state)
"""


def printed(client, said, limit_s):
    """What a cell printed until it had ended, added to `said`."""
    deadline = Deadline(limit_s)
    while not deadline.passed():
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != said[0]:
            continue
        said.append(str(message["content"].get("text", message["content"].get("traceback", ""))))
        if message["content"].get("execution_state") == "idle":
            return "".join(said[1:])
    raise AssertionError(f"the cell has not ended: {said}")


def test_interrupting_the_kernel_is_the_agreed_stop(here, forks):
    """The ranks save what they have trained, and the kernel lives on."""
    kernel, client = manager.start_new_kernel(kernel_name="python3", cwd=str(here))
    try:
        printed(client, [client.execute(WARM.format(str(forks.python)))], 60)
        run = client.execute(TRAIN)
        metrics = here / "out" / "metrics.jsonl"
        wait_until(lambda: metrics.is_file() and metrics.stat().st_size, 120, lambda: client.get_iopub_msg())
        kernel.interrupt_kernel()
        said = printed(client, [run], 120)
        assert "ended with 130 ['interrupted']" in said, said
        assert said.splitlines()[-1] == "stopped", said
        (step,) = complete_checkpoints(here / "out" / "checkpoints")
        assert step == effilaunch.result(here / "out").steps
        assert printed(client, [client.execute("print(1 + 1)")], 60).strip() == "2"
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


def test_the_examples_of_the_page_run(here, warm):
    names = {}
    for code in blocks(PAGE, "python"):
        exec(compile(code, str(PAGE), "exec"), names)
    assert (names["done"].state, len(names["losses"])) == ("finished", 4)


def test_the_page_names_all_that_is_promised():
    page = PAGE.read_text(encoding="utf-8")
    kinds = (effilaunch.Plan, effilaunch.Search, effilaunch.Result, effilaunch.Diagnosis)
    attributes = {name for kind in kinds for name in (*kind.__annotations__, *vars(kind)) if name[0] != "_"}
    missing = {name for name in (*effilaunch.__all__, *attributes) if not re.search(rf"`{name}\b", page)}
    assert missing == set()
