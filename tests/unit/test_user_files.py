"""Unchecked files: reading them never hangs, and fails with an error of a known kind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from counted_work import LINEAR, cpu_growth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.errors import EffilaunchError, RecipeError
from launcher.execute.nodes import read_node
from launcher.execute.output import LogFile, Output, errors_in
from launcher.execute.record import read_run
from launcher.execute.run_dir import last_step, read_stopped
from launcher.files.rank_status import REPORT, read_statuses
from launcher.files.safe_files import exists, is_dir, is_file, read_bytes, read_json, read_jsonl, read_record
from launcher.inputs.planning_facts import load_profile
from launcher.models.model_config import find_model_config
from launcher.recipe.hook_file import read_hooks
from launcher.recipe.loading import load_recipe
from launcher.recipe.merged_yaml import load_merged
from launcher.recipe.yaml_reader import parse_yaml
from launcher.schedulers.hostfile import read_hostfile
from launcher.schedulers.slurm_requeue import last_requeue
from launcher.tasks import task_named

pytestmark = pytest.mark.timeout(300)  # what waits for a FIFO would wait for ever

RECIPE = """\
model: {name_or_path: gpt2}
data:
  train: [{path: rows.jsonl}]
trainer: {max_steps: 2}
"""
TOO_LONG = "x" * 300


def _error_of(path: Path, largest: int) -> int | None:
    try:
        read_bytes(path, largest)
    except OSError as error:
        return error.errno
    return None


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(6 << 30)
    (tmp_path / "full").write_bytes(b"12345")
    assert read_bytes(tmp_path / "full", 5) == b"12345"
    for name, code in (
        ("fifo", errno.EINVAL),
        ("/dev/zero", errno.EINVAL),
        (".", errno.EISDIR),
        ("sparse", errno.EFBIG),
        ("absent", errno.ENOENT),
        (TOO_LONG, errno.ENAMETOOLONG),
    ):
        assert _error_of(tmp_path / name, 1_000_000) == code, name
    assert _error_of(tmp_path / "full", 4) == errno.EFBIG
    assert len(read_bytes("/proc/self/status", 1_000_000)) > 100  # a size of 0, and content


def test_names_that_no_file_system_takes_do_not_exist(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name in (TOO_LONG, "a\0b", "loop"):
        assert [test(tmp_path / name) for test in (exists, is_file, is_dir)] == [False] * 3, name
    assert is_dir(tmp_path)
    assert not is_file(tmp_path)


def test_json_that_is_nested_deeply_is_a_value_error(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested"):
        read_json(tmp_path / "deep.json")


@pytest.mark.parametrize("name", ["stopped.json", "logs/error-rank-0.json", "logs/status-rank-0.json"])
def test_a_record_of_a_run_that_is_nested_deeply_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / name).write_text("[" * 100_000)
    assert read_stopped(tmp_path) is None
    assert errors_in(tmp_path / "logs") == set()
    assert read_statuses(tmp_path) == {}


def test_a_rank_that_reports_nested_nonsense_ends_nobody(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.write(writes, f'{REPORT}{"[" * 50_000}\n{REPORT}{{"rank": 1}}\n'.encode())
    os.close(writes)
    with open(reads, "rb", buffering=0) as stream:  # noqa: PTH123 - of a descriptor
        output = Output(stream, LogFile(tmp_path / "launcher.log", pytest.fail), lambda line: None)
        while not output.ended:
            output.copy(1.0)
        output.close()
    assert [report.rank for report in output.reports] == [1]


def test_damaged_records_of_a_run(tmp_path: Path) -> None:
    lines = b'{"step": 3, "loss": 1.0, "checkpoint": 2}\n{"step": 9, "x": "\xff"}\n\xff\xfe\n[1]\n{"st'
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    (tmp_path / "requeues.jsonl").write_bytes(b'{"checkpoint": 2}\n\xff\xfe\n[1]\n{"checkpoint": 7')
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [3, 9]
    assert read_jsonl(tmp_path / "absent") == []
    assert last_step(tmp_path) == 9
    assert last_requeue(tmp_path)["checkpoint"] == 2
    for content in (b"", b"\xff", b"[]", b"[" * 100_000):
        (tmp_path / "data.json").write_bytes(content)
        with pytest.raises(RecipeError) as caught:
            read_record(tmp_path / "data.json")
        assert caught.value.problems[0].code == "record-unreadable"
        assert caught.value.problems[0].file == str(tmp_path / "data.json")
        (tmp_path / ".nodes").mkdir(exist_ok=True)
        (tmp_path / ".nodes" / "1.json").write_bytes(content)
        assert read_node(tmp_path, 1) is None


def test_a_long_chain_of_extends_is_refused_where_it_is_too_long(tmp_path: Path) -> None:
    for number in range(600):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    (tmp_path / "600.yaml").write_text(RECIPE)
    (problem,) = (p for p in load_merged(tmp_path / "0.yaml", ()).problems if p.path == "extends")
    assert (problem.code, problem.line, problem.file) == ("extends-depth", 1, str(tmp_path / "32.yaml"))
    assert load_merged(tmp_path / "570.yaml", ()).problems == []


@pytest.mark.parametrize(("keys", "merges"), [(1, 500), (300, 20)])
def test_many_merges_are_read_in_linear_time(keys: int, merges: int) -> None:
    def text(count: int) -> str:
        return "a: &a {" + ",".join(f"k{i}: {i}" for i in range(keys)) + "}\nb:\n" + "  <<: *a\n" * count

    document = parse_yaml(text(merges), "r.yaml")
    assert document.problems == []
    assert document.data["a"] == document.data["b"]
    assert cpu_growth(lambda text: parse_yaml(text, "r.yaml"), text, merges) < LINEAR


def test_layers_with_many_keys_are_merged_in_linear_time(tmp_path: Path) -> None:
    def written(count: int) -> Path:
        many = "launch: {env: {" + ",".join(f"V{number}: x" for number in range(count)) + "}}\n"
        folder = tmp_path / str(count)
        folder.mkdir(exist_ok=True)
        (folder / "low.yaml").write_text(RECIPE + many)
        (folder / "high.yaml").write_text("extends: low.yaml\n" + many.replace("x", "y"))
        return folder / "high.yaml"

    high = written(500)
    merged = load_merged(high, ())
    assert merged.data["launch"]["env"]["V499"] == "y"
    assert merged.position("launch.env.V499").file == str(high)
    assert merged.position("trainer.max_steps").file == str(high.with_name("low.yaml"))
    assert cpu_growth(lambda path: load_merged(path, ()), written, 500) < LINEAR


@pytest.mark.parametrize(
    "text", ["${ENV:A:" * 8_000, "${ENV:" + "A" * 200_000, "${ENV:}", "${ENV:A:${ENV:B}}", "${ENV:1A}"]
)
def test_a_reference_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("A", "a")
    monkeypatch.setenv("B", "b")
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace("rows.jsonl", f'"{text}"'))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert [(p.code, p.path, p.line) for p in caught.value.problems] == [
        ("env-reference", "data.train[0].path", 3)
    ]


def test_a_default_may_hold_a_dollar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A", raising=False)
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace("rows.jsonl", '"${ENV:A:a$b$}.jsonl"'))
    assert load_recipe(path).recipe.data.train[0].path == str(tmp_path / "a$b$.jsonl")


def _exit_code(read: Callable[[], object]) -> int:
    try:
        read()
    except EffilaunchError as error:
        return error.exit_code
    return 0


def _readers(folder: Path, file: Path):
    """What reads a file of the user's, each as a command does."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE + f"sharding: {{engine: deepspeed, config: {file}}}\n")
    loaded = load_recipe(recipe, ()).recipe
    (folder / "model").mkdir(exist_ok=True)
    yield "recipe", lambda: load_recipe(file, ())
    yield "hooks", lambda: read_hooks(file, task_named("causal-lm"))
    yield "hostfile", lambda: read_hostfile(str(file))
    yield "profile", lambda: load_profile(loaded)
    yield "config.json", lambda: find_model_config(str(folder / "model"), allow_network=False)
    yield "run directory", lambda: read_run(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(
        st.binary(max_size=300),
        st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.sampled_from([b"[" * 5_000, b'{"a":' * 5_000, b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"null"]),
    )
)
def test_no_content_is_a_bug_of_ours(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    for name, read in _readers(tmp_path, file):
        for written in ("file", "model/config.json", "plan.json", "metrics.jsonl", "data.json"):
            (tmp_path / written).write_bytes(content)
        assert _exit_code(read) in (0, 2, 4), name
