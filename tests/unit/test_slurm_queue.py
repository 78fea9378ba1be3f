"""What Slurm answers, as data; how jobs are followed; how a run's end is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.commands import submit
from launcher.errors import (
    DoesNotFit,
    EffilaunchError,
    Interrupted,
    MachineError,
    Problem,
    RecipeError,
    RunFailed,
)
from launcher.recipe.sweep import combine, folder_name, swept_overrides
from launcher.schedulers import following, slurm_commands
from launcher.schedulers import slurm as scheduler
from launcher.schedulers.following import follow, judge, printed_errors
from launcher.schedulers.queue import PlannedRun, QueuedJob, Submission
from launcher.schedulers.slurm import QUEUE
from launcher.schedulers.slurm_commands import SlurmResult, as_job, read_partitions, read_rows
from launcher.schedulers.submitted import Submitted, SubmittedRun, read_submitted

# As `squeue --Format` of 22.05 wrote them.
ROWS = """\
4|COMPLETED|None|0|n1|1|2026-11-22T19:17:44|N/A|low|  |
5|PENDING|PartitionTimeLimit|0||0|N/A|N/A|low,big|  |
21_0|FAILED|NonZeroExitCode|1280|n2|0|2026-11-22T19:17:44|N/A|low|  |
21_3|PENDING|Dependency|0||0|N/A|N/A|low|  |
"""


def row(state: str, reason: str = "", **more: str) -> dict[str, str]:
    return {"JobArrayID": "4", "State": state, "Reason": reason, "exit_code": "0", "NodeList": "",
            "RestartCnt": "0", "StartTime": "", "PreemptTime": "", "Partition": "low", "exc_nodes": "",
            **more}  # fmt: skip


def job(state: str, reason: str = "", **more: str) -> QueuedJob:
    return as_job(row(state, reason, **more))


SINFO = """\
low|low*|1:00:00|2|2|4000|(null)|gpu:2
big|big|infinite|3|64|256000|a100,ib|gpu:a100:8
big|big|infinite|1|128+|512000|h100|gpu:h100:8
"""


@pytest.fixture
def slurm(monkeypatch):
    """Answers as Slurm's, from a table."""

    def ask(*words, **_):
        return SlurmResult(0, SINFO if words[0] == "sinfo" else ROWS, "")

    monkeypatch.setattr(slurm_commands, "ask", ask)
    monkeypatch.setattr(slurm_commands.shutil, "which", lambda name: None)


def test_jobs(slurm):
    found = QUEUE.jobs(["4", "5", "6", "21_0", "21_3"])
    assert set(found) == {"4", "5", "21_0", "21_3"}
    assert (found["4"].state, found["4"].phase, found["4"].code) == ("COMPLETED", "done", 0)
    assert (found["5"].phase, found["5"].never_starts) == ("waiting", "")  # `big` may take it
    assert (found["21_0"].phase, found["21_0"].code) == ("failed", 5)
    assert (found["21_3"].phase, "Dependency" in found["21_3"].text) == ("waiting", True)


def test_jobs_that_the_controller_has_forgotten_are_those_of_accounting(monkeypatch):
    answers = {"squeue": SlurmResult(1, "", "slurm_load_jobs error: Invalid job id specified"),
               "sacct": SlurmResult(0, "4|CANCELLED by 0|0:15|n1\n21_0|FAILED|5:0|n2\n", "")}  # fmt: skip
    monkeypatch.setattr(slurm_commands, "ask", lambda *words, **_: answers[words[0]])
    monkeypatch.setattr(slurm_commands.shutil, "which", lambda name: name)
    found = QUEUE.jobs(["4", "21_0", "7"])
    assert {number: (one.phase, one.code) for number, one in found.items()} == {
        "4": ("cancelled", 0), "21_0": ("failed", 5),
    }  # fmt: skip


def test_silence_is_not_the_word_that_a_job_is_gone(slurm, monkeypatch):
    answer = SlurmResult(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    monkeypatch.setattr(slurm_commands, "ask", lambda *words, **_: answer)
    with pytest.raises(MachineError, match=r"no answer about job 4: .*Unable to contact"):
        read_rows(["4"])


def test_partitions(slurm):
    low, big = read_partitions()
    assert (low.name, low.is_default, low.limit_s, low.nodes, low.largest_cpus) == ("low", True, 3600, 2, 2)
    assert (big.is_default, big.limit_s, big.nodes, big.largest_cpus) == (False, None, 4, 128)
    assert big.gres == ("gpu:a100:8", "gpu:h100:8")
    assert (big.features, big.largest_mib) == (("a100", "ib", "h100"), 512000)


def submission(folder: Path, *, prepare: str | None = None, number: str = "4") -> Submitted:
    (folder / "logs").mkdir()
    run = SubmittedRun(folder, number, folder / "logs" / f"slurm-{number}.out", {})
    return Submitted(folder, "r.yaml", prepare, number, (run,), "slurm")


def test_following_tells_each_change_once(tmp_path, monkeypatch):
    states = [
        row("PENDING", "Priority"),
        row("PENDING", "Priority"),
        row("RUNNING", NodeList="n[1-2]"),
        row("PENDING", "BeginTime", RestartCnt="1"),
        row("RUNNING", NodeList="n1", RestartCnt="1"),
        row("COMPLETED"),
    ]
    monkeypatch.setattr(scheduler, "read_rows", lambda ids: {"4": states.pop(0)})
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.5}\n{"st')
    said: list[str] = []
    assert follow(QUEUE, submission(tmp_path), said.append)["4"].state == "COMPLETED"
    assert said == [
        "job 4 waits (Priority)",
        "  step 3: loss 1.5000",
        "job 4 runs on n[1-2]",
        "job 4 waits (BeginTime), after 1 requeue(s)",
        "job 4 runs on n1, after 1 requeue(s)",
        "job 4 is done",
    ]


def test_a_state_that_a_requeued_job_passes_is_no_end(tmp_path, monkeypatch):
    passing = [row("NODE_FAIL"), row("PREEMPTED"), row("RUNNING", NodeList="n1")]
    states = [*passing, *[row("PREEMPTED")] * 3]
    monkeypatch.setattr(scheduler, "read_rows", lambda ids: {"4": states.pop(0)})
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    assert follow(QUEUE, submission(tmp_path), lambda line: None)["4"].state == "PREEMPTED"
    assert states == []


def test_a_silent_controller_ends_no_job(tmp_path, monkeypatch):
    silent = MachineError(Problem("slurm-no-answer", "Slurm gives no answer"))
    answers = [*[silent] * 5, row("RUNNING", NodeList="n1"), *[silent] * 5, row("COMPLETED")]

    def read(ids):
        answer = answers.pop(0)
        if isinstance(answer, MachineError):
            raise answer
        return {"4": answer}

    monkeypatch.setattr(scheduler, "read_rows", read)
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    said: list[str] = []
    assert follow(QUEUE, submission(tmp_path), said.append)["4"].state == "COMPLETED"
    once = "Slurm gives no answer; asking again"
    assert said == [once, "job 4 runs on n1", once, "job 4 is done"]


@pytest.mark.parametrize("reason", ["PartitionTimeLimit", "BadConstraints", "DependencyNeverSatisfied"])
def test_a_job_that_never_starts_is_told(tmp_path, monkeypatch, reason):
    monkeypatch.setattr(scheduler, "read_rows", lambda ids: {"4": row("PENDING", reason)})
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    with pytest.raises(MachineError) as caught:
        follow(QUEUE, submission(tmp_path), lambda line: None)
    assert caught.value.problems[0].code == "slurm-stuck"
    assert reason in caught.value.problems[0].message


@pytest.mark.parametrize(
    ("reason", "hinders"),
    [("PartitionDown", True), ("NodeDown", True), ("ReqNodeNotAvail, UnavailableNodes:n1", True),
     ("JobHeldUser", True), ("Resources", False), ("Priority", False)],
)  # fmt: skip
def test_what_passes_is_told_and_waited_for(tmp_path, monkeypatch, reason, hinders):
    states = [*[row("PENDING", reason)] * 20, row("COMPLETED")]
    monkeypatch.setattr(scheduler, "read_rows", lambda ids: {"4": states.pop(0)})
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    said: list[str] = []
    assert follow(QUEUE, submission(tmp_path), said.append)["4"].state == "COMPLETED"
    assert said == [f"job 4 waits ({reason})", "job 4 is done"]
    assert bool(job("PENDING", reason).obstacle) is hinders


def test_the_limit_of_one_of_several_partitions_is_no_end(tmp_path, monkeypatch):
    waits = row("PENDING", "PartitionTimeLimit", Partition="low,big")
    states = [*[waits] * 9, row("COMPLETED", Partition="big")]
    monkeypatch.setattr(scheduler, "read_rows", lambda ids: {"4": states.pop(0)})
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    said: list[str] = []
    assert follow(QUEUE, submission(tmp_path), said.append)["4"].state == "COMPLETED"
    assert said == ["job 4 waits (PartitionTimeLimit)", "job 4 is done"]


def test_of_a_sweep_is_told_what_hinders_it(tmp_path, monkeypatch):
    def both(first, second):
        return {"4_0": first, "4_1": second}

    answers = [
        both(row("PENDING", "Resources"), row("PENDING", "JobArrayTaskLimit")),
        *[both(row("RUNNING"), row("PENDING", "PartitionDown"))] * 9,
        both(row("COMPLETED"), row("COMPLETED")),
    ]
    monkeypatch.setattr(scheduler, "read_rows", lambda ids: answers.pop(0))
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    runs = tuple(SubmittedRun(tmp_path, f"4_{n}", tmp_path / f"{n}.out", {"seed": n}) for n in range(2))
    said: list[str] = []
    assert len(follow(QUEUE, Submitted(tmp_path, "r.yaml", None, "4", runs, "slurm"), said.append)) == 2
    assert said == [
        "array 4: 2 pending",
        "array 4: 1 running, 1 pending, waits (PartitionDown)",
        "array 4: 2 completed",
    ]


@pytest.mark.parametrize(("last", "code"), [("COMPLETED", 0), ("FAILED", 5)])
def test_a_sweep_ends_as_its_worst_run(last, code, tmp_path, monkeypatch):
    jobs = {"4_0": job("COMPLETED"), "4_1": job(last, exit_code=str(code))}
    monkeypatch.setattr(submit, "follow", lambda queue, submitted, say: jobs)
    for number, one in enumerate(jobs.values()):
        (tmp_path / str(number)).mkdir()
        if one.code == 0:
            (tmp_path / str(number) / "COMPLETED").touch()
            (tmp_path / str(number) / "result.json").write_text('{"loss": {"last": 1.0}, "seconds": 2}')
    runs = tuple(
        SubmittedRun(tmp_path / str(n), f"4_{n}", tmp_path / f"{n}.out", {"seed": n}) for n in range(2)
    )
    outcome = submit.follow_submitted(Submitted(tmp_path, "r.yaml", None, "4", runs, "slurm"), print)
    assert (outcome.exit_code, len(outcome.problems)) == (code, bool(code))


def test_a_job_that_slurm_has_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "read_rows", lambda ids: {})
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    given = submission(tmp_path)
    jobs = follow(QUEUE, given, lambda line: None)
    assert jobs == {"4": None}
    with pytest.raises(RunFailed, match="job 4 is no longer known"):
        judge(QUEUE, given, given.runs[0], jobs)
    (tmp_path / "COMPLETED").touch()
    (tmp_path / "result.json").write_text('{"steps": 6}')
    assert judge(QUEUE, given, given.runs[0], jobs) == {"steps": 6}


@pytest.mark.parametrize(
    ("last", "log", "kind", "said"),
    [
        (
            job("FAILED", exit_code="2"),
            "error: r.yaml:3: x\nerror: r.yaml:3: x\n",
            RecipeError,
            "r.yaml:3: x",
        ),
        (job("FAILED", exit_code="3"), "error: too large\n", DoesNotFit, "too large"),
        (job("FAILED", exit_code="4"), "error: no GPU\n", MachineError, "no GPU"),
        (
            job("FAILED", exit_code="5"),
            "error: old\n==== start 2 of job 4\nerror: a rank\n",
            RunFailed,
            "a rank",
        ),
        (job("FAILED", exit_code="1"), "Traceback\n", RunFailed, "ended with exit code 1"),
        (job("FAILED", exit_code="130"), "", Interrupted, "the run was stopped; it has no checkpoint"),
        (job("FAILED", exit_code="143"), "", Interrupted, "the run was stopped; it has no checkpoint"),
        (job("CANCELLED", exit_code="0"), "", Interrupted, "the job was cancelled"),
        (job("TIMEOUT", exit_code="0"), "", RunFailed, "TIMEOUT"),
        (job("NODE_FAIL", exit_code="0"), "", RunFailed, "NODE_FAIL"),
        (job("PREEMPTED", exit_code="0"), "", RunFailed, "PREEMPTED"),
        (job("OUT_OF_MEMORY", exit_code="0"), "", RunFailed, "launch.slurm.mem"),
    ],
)
def test_ends_are_told_as_run_would(last, log, kind, said, tmp_path):
    given = submission(tmp_path)
    given.runs[0].log.write_text(log)
    with pytest.raises(EffilaunchError) as caught:
        judge(QUEUE, given, given.runs[0], {"4": last})
    assert type(caught.value) is kind
    assert [problem.message for problem in caught.value.problems] == [caught.value.problems[0].message]
    assert said in caught.value.problems[0].message


def test_a_failed_prepare_job_is_the_cause(tmp_path):
    given = submission(tmp_path, prepare="3")
    given.prepare_log.write_text("error: rows.jsonl:1: no field\n")
    jobs = {"3": job("FAILED", JobArrayID="3", exit_code="2"), "4": job("CANCELLED")}
    with pytest.raises(RecipeError, match=r"the data could not be prepared: rows\.jsonl:1: no field"):
        judge(QUEUE, given, given.runs[0], jobs)


@pytest.mark.parametrize(
    ("answer", "kind", "said", "hint"),
    [
        (
            SlurmResult(124, "", "sbatch gave no answer within 60 s"),
            MachineError,
            "may have been submitted",
            "squeue --me",
        ),
        (SlurmResult(127, "", "sbatch cannot be started"), MachineError, "rejects the job", "nothing was"),
        (
            SlurmResult(1, "", "sbatch: error: no"),
            RecipeError,
            "rejects the job: no",
            "nothing was submitted",
        ),
    ],
)
def test_what_is_told_of_a_job_that_was_not_taken(answer, kind, said, hint, tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "sbatch", lambda script, dependency: answer)
    asked = Submission("r", "python", "/", tmp_path, None, None, (PlannedRun(tmp_path, None, {}),))
    with pytest.raises(kind, match=said) as caught:
        QUEUE.submit(asked, {"job.sbatch": ""})
    assert hint in caught.value.problems[0].hint


def test_errors_are_those_of_the_last_start(tmp_path):
    log = tmp_path / "log"
    log.write_text("==== start 1\nerror: old\n==== start 2\n0: error: new\nerror: new\nno error: here\n")
    assert printed_errors(log) == ["new"]
    assert printed_errors(tmp_path / "absent") == []


def test_what_was_submitted_is_read_again_and_a_stranger_refused(tmp_path):
    given = submission(tmp_path)
    (tmp_path / "submit.json").write_text(json.dumps(given.to_json()))
    assert read_submitted(tmp_path) == given
    with pytest.raises(RecipeError, match="no job was submitted"):
        read_submitted(tmp_path / "elsewhere")
    (tmp_path / "submit.json").write_text("{}")
    with pytest.raises(RecipeError, match="cannot be read"):
        read_submitted(tmp_path)


@pytest.fixture
def swept(tmp_path, monkeypatch) -> list[tuple[str, ...]]:
    """A sweep of two runs that was submitted as the array 12; what Slurm is asked."""
    asked: list[tuple[str, ...]] = []
    numbers = iter(["11", "12", "13", "14"])
    monkeypatch.setattr(
        scheduler, "sbatch", lambda script, dependency: SlurmResult(0, f"{next(numbers)}\n", "")
    )
    monkeypatch.setattr(scheduler, "ask", lambda *words: asked.append(words) or SlurmResult(0, "", ""))
    monkeypatch.setattr(scheduler, "read_rows", lambda ids: {})
    values = [{"seed": 1}, {"seed": 2}]
    run_dirs = [tmp_path / folder_name(number, v, 2) for number, v in enumerate(values)]
    for run_dir in run_dirs:
        run_dir.mkdir()
    runs = tuple(PlannedRun(path, None, v) for path, v in zip(run_dirs, values, strict=True))
    job = Submission("r", "python", "/", tmp_path, None, None, runs)
    submit._submit(QUEUE, job, "r.yaml", {"prepare.sbatch": "", "job.sbatch": ""})
    return asked


@pytest.mark.parametrize(("name", "ended"), [(".", ["11", "12_0", "12_1"]), ("1-seed=2", ["12_1"])])
def test_one_run_of_a_sweep_is_cancelled_without_the_prepare_job_of_all(name, ended, swept, tmp_path):
    outcome = submit.cancel_submitted(read_submitted(tmp_path / name))
    assert swept == [("scancel", *ended)]
    assert (f"the other runs of {tmp_path}" in outcome.text) is (len(ended) == 1)
    assert read_submitted(tmp_path / name).place == tmp_path / name  # what hints name


def test_only_runs_that_have_not_finished_are_requeued(swept, tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "read_rows", lambda ids: {"12_0": row("RUNNING", JobArrayID="12_0")})
    with pytest.raises(RecipeError) as caught:
        submit.requeue_submitted(read_submitted(tmp_path))
    assert caught.value.problems[0].code == "still-queued"
    (tmp_path / "0-seed=1" / "COMPLETED").touch()
    submit.requeue_submitted(read_submitted(tmp_path))
    assert [run.job for run in read_submitted(tmp_path).runs] == ["12_0", "13"]
    submit.requeue_submitted(read_submitted(tmp_path / "1-seed=2"))  # one run alone
    sweep, alone = read_submitted(tmp_path), read_submitted(tmp_path / "1-seed=2")
    assert [run.job for run in sweep.runs] == ["12_0", "14"]
    assert (alone.jobs, alone.runs[0].log) == (["14"], tmp_path / "1-seed=2" / "logs" / "slurm-14.out")
    (tmp_path / "1-seed=2" / "COMPLETED").touch()
    with pytest.raises(RecipeError) as caught:
        submit.requeue_submitted(sweep)
    assert caught.value.problems[0].code == "already-done"


def test_a_sweep_is_the_product_with_the_types_of_yaml():
    found = combine(["trainer.learning_rate=1e-4,2e-4", "precision=bf16,fp32", "data.packing=true,false"])
    assert len(found) == 8
    assert found[1] == {"trainer.learning_rate": 1e-4, "precision": "bf16", "data.packing": False}
    assert swept_overrides(found[1]) == [
        "trainer.learning_rate=0.0001", 'precision="bf16"', "data.packing=false",
    ]  # fmt: skip
    assert folder_name(1, found[1], 12) == "01-learning_rate=0.0001-precision=bf16-packing=false"
    nested = combine(["model.quantization=nf4,{type: nf4, double_quant: false}"])
    assert nested[1] == {"model.quantization": {"type": "nf4", "double_quant": False}}
    assert "/" not in folder_name(0, {"model.name_or_path": "../x/y"}, 1)
    assert combine([]) == [{}]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "seed",
        "seed=",
        "=1",
        "seed=1,,2",
        "seed=1,1",
        "seed=[1",
        "seed=1,null",
        "a=1,1.0",
        "a={b: [1]},{b: [1.0]}",
    ],
)
def test_slips_of_a_sweep(text):
    with pytest.raises(RecipeError):
        combine([text])


def test_a_key_is_swept_once_and_not_without_end():
    with pytest.raises(RecipeError, match="swept twice"):
        combine(["seed=1,2", "seed=3,4"])
    with pytest.raises(RecipeError, match="swept twice"):
        combine(["data.train[0].weight=1,2", "seed=1", "data.train[00].weight=3"])
    for sweeps in (
        ["trainer.max_steps=1,2", "trainer={max_steps: 5}"],
        ["a={b: 1}", "a.b=2"],
        ["a[0]=1", "a=2"],
    ):
        with pytest.raises(RecipeError) as caught:
            combine(sweeps)
        assert "which is swept too" in caught.value.problems[0].message
        assert caught.value.problems[0].file == "--sweep"
    assert len(combine(["trainer.max_steps=1,2", "trainer.max_step=1,true", "trainer.max_steps_x=1"])) == 4
    with pytest.raises(RecipeError, match="at most 1000"):
        combine([f"seed={','.join(map(str, range(50)))}", f"a={','.join(map(str, range(50)))}"])
