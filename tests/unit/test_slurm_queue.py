"""What Slurm answers, as data; how jobs are followed; how a run's end is told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

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
from launcher.schedulers import jobs as following
from launcher.schedulers import slurm as scheduler
from launcher.schedulers import slurm_queue
from launcher.schedulers.jobs import follow, judge, printed_errors
from launcher.schedulers.slurm_queue import Answer, Job, read_jobs, read_partitions
from launcher.schedulers.submitted import Run, Submitted, read_submitted

# As `scontrol -o show job` of 22.05 wrote them, shortened.
LINES = {
    "4": "JobId=4 JobName=r JobState=COMPLETED Reason=None Dependency=(null) Requeue=1 Restarts=1 "
    "ExitCode=0:0 StartTime=2026-11-22T19:17:44 PreemptTime=None NodeList=n1 BatchHost=n1",
    "5": "JobId=5 JobName=r JobState=PENDING Reason=PartitionTimeLimit Restarts=0 ExitCode=0:0 "
    "StartTime=Unknown Partition=low,big NodeList=(null)",
    "21": "JobId=21 ArrayJobId=21 ArrayTaskId=1-3%2 JobName=r JobState=PENDING Reason=Dependency Restarts=0 "
    "ExitCode=0:0\nJobId=22 ArrayJobId=21 ArrayTaskId=0 JobName=r JobState=FAILED Reason=NonZeroExitCode "
    "Restarts=0 ExitCode=5:0 NodeList=n2",
}
SINFO = """\
low|low*|1:00:00|2|2|4000|(null)|gpu:2
big|big|infinite|3|64|256000|a100,ib|gpu:a100:8
big|big|infinite|1|128+|512000|h100|gpu:h100:8
"""


@pytest.fixture
def slurm(monkeypatch):
    """Answers as Slurm's, from a table."""

    def ask(*words, **_):
        if words[0] == "sinfo":
            return Answer(0, SINFO, "")
        line = LINES.get(words[-1], "")
        return Answer(0 if line else 1, line, "" if line else "Invalid job id specified")

    monkeypatch.setattr(slurm_queue, "ask", ask)
    monkeypatch.setattr(slurm_queue.shutil, "which", lambda name: None)


def test_jobs(slurm):
    found = read_jobs(["4", "5", "6", "21_0", "21_3"])
    assert set(found) == {"4", "5", "21_0", "21_3"}
    assert (found["4"].state, found["4"].code, found["4"].nodes, found["4"].restarts) == (
        "COMPLETED",
        0,
        "n1",
        1,
    )
    assert (found["5"].code, found["5"].reason, found["5"].preempted) == (None, "PartitionTimeLimit", "")
    assert (found["5"].partition, found["4"].partition) == ("low,big", "")
    assert (found["21_0"].state, found["21_0"].code) == ("FAILED", 5)
    assert (found["21_3"].state, found["21_3"].reason) == ("PENDING", "Dependency")


def test_silence_is_not_the_word_that_a_job_is_gone(slurm, monkeypatch):
    answer = Answer(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    monkeypatch.setattr(slurm_queue, "ask", lambda *words, **_: answer)
    with pytest.raises(MachineError, match=r"no answer about job 4: .*Unable to contact"):
        read_jobs(["4"])


def test_ranges_with_steps_of_an_array():
    assert slurm_queue._tasks("0-4:2,7,9-10%2") == [0, 2, 4, 7, 9, 10]


def test_partitions(slurm):
    low, big = read_partitions()
    assert (low.name, low.is_default, low.limit_s, low.nodes, low.largest_cpus) == ("low", True, 3600, 2, 2)
    assert (big.is_default, big.limit_s, big.nodes, big.largest_cpus) == (False, None, 4, 128)
    assert big.gres == ("gpu:a100:8", "gpu:h100:8")
    assert (big.features, big.largest_mib) == (("a100", "ib", "h100"), 512000)


def submission(folder: Path, *, prepare: str | None = None, number: str = "4") -> Submitted:
    (folder / "logs").mkdir()
    run = Run(folder, number, folder / "logs" / f"slurm-{number}.out", {})
    return Submitted(folder, "r.yaml", prepare, number, (run,), "slurm")


def test_following_tells_each_change_once(tmp_path, monkeypatch):
    states = [
        Job("4", "PENDING", "Priority"),
        Job("4", "PENDING", "Priority"),
        Job("4", "RUNNING", nodes="n[1-2]"),
        Job("4", "PENDING", "BeginTime", restarts=1),
        Job("4", "RUNNING", nodes="n1", restarts=1),
        Job("4", "COMPLETED", code=0),
    ]
    monkeypatch.setattr(scheduler, "read_jobs", lambda ids: {"4": states.pop(0)})
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.5}\n{"st')
    said: list[str] = []
    assert follow(submission(tmp_path), said.append)["4"].state == "COMPLETED"
    assert said == [
        "job 4 waits for jobs of higher priority",
        "  step 3: loss 1.5000",
        "job 4 runs on n[1-2]",
        "job 4 waits; Slurm starts a requeued job after two minutes; it was requeued 1 time(s)",
        "job 4 runs on n1, after 1 requeue(s)",
        "job 4 is done",
    ]


def test_a_state_that_a_requeued_job_passes_is_no_end(tmp_path, monkeypatch):
    passing = [Job("4", "NODE_FAIL"), Job("4", "PREEMPTED"), Job("4", "RUNNING", nodes="n1")]
    states = [*passing, *[Job("4", "PREEMPTED")] * 3]
    monkeypatch.setattr(scheduler, "read_jobs", lambda ids: {"4": states.pop(0)})
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    assert follow(submission(tmp_path), lambda line: None)["4"].state == "PREEMPTED"
    assert states == []


def test_a_silent_controller_ends_no_job(tmp_path, monkeypatch):
    silent = MachineError(Problem("slurm-no-answer", "Slurm gives no answer"))
    answers = [*[silent] * 5, Job("4", "RUNNING", nodes="n1"), *[silent] * 5, Job("4", "COMPLETED", code=0)]

    def read(ids):
        answer = answers.pop(0)
        if isinstance(answer, MachineError):
            raise answer
        return {"4": answer}

    monkeypatch.setattr(scheduler, "read_jobs", read)
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    said: list[str] = []
    assert follow(submission(tmp_path), said.append)["4"].state == "COMPLETED"
    once = "Slurm gives no answer; asking again"
    assert said == [once, "job 4 runs on n1", once, "job 4 is done"]


@pytest.mark.parametrize("reason", ["PartitionTimeLimit", "BadConstraints", "DependencyNeverSatisfied"])
def test_a_job_that_never_starts_is_told_in_words(tmp_path, monkeypatch, reason):
    monkeypatch.setattr(scheduler, "read_jobs", lambda ids: {"4": Job("4", "PENDING", reason)})
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    with pytest.raises(MachineError, match=f"job 4 will not start: .*{reason}"):
        follow(submission(tmp_path), lambda line: None)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("PartitionDown", "waits until its partition is up: it is down"),
        ("PartitionInactive", "waits until its partition starts jobs again: it is inactive"),
        ("NodeDown", "waits for a node that is down"),
        ("ReqNodeNotAvail,_UnavailableNodes:n1", "waits for nodes that are down, drained or reserved"),
        ("JobHeldUser", "is held: `scontrol release` releases it"),
        ("JobHeldAdmin", "is held by an administrator"),
        ("Resources", "waits for free nodes"),
        ("Priority", "waits for jobs of higher priority"),
    ],
)
def test_what_passes_is_told_and_waited_for(tmp_path, monkeypatch, reason, words):
    states = [*[Job("4", "PENDING", reason)] * 20, Job("4", "COMPLETED", code=0)]
    monkeypatch.setattr(scheduler, "read_jobs", lambda ids: {"4": states.pop(0)})
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    said: list[str] = []
    assert follow(submission(tmp_path), said.append)["4"].state == "COMPLETED"
    assert said == [f"job 4 {words}", "job 4 is done"]


def test_the_limit_of_one_of_several_partitions_is_no_end(tmp_path, monkeypatch):
    waits = Job("4", "PENDING", "PartitionTimeLimit", partition="low,big")
    states = [*[waits] * 9, Job("4", "COMPLETED", code=0, partition="big")]
    monkeypatch.setattr(scheduler, "read_jobs", lambda ids: {"4": states.pop(0)})
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    said: list[str] = []
    assert follow(submission(tmp_path), said.append)["4"].state == "COMPLETED"
    assert said == ["job 4 waits (PartitionTimeLimit)", "job 4 is done"]


def test_of_a_sweep_is_told_what_hinders_it(tmp_path, monkeypatch):
    def both(first, second):
        return {"4_0": first, "4_1": second}

    answers = [
        both(Job("4", "PENDING", "Resources"), Job("4", "PENDING", "JobArrayTaskLimit")),
        *[both(Job("5", "RUNNING"), Job("4", "PENDING", "PartitionDown"))] * 9,
        both(Job("5", "COMPLETED", code=0), Job("4", "COMPLETED", code=0)),
    ]
    monkeypatch.setattr(scheduler, "read_jobs", lambda ids: answers.pop(0))
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    runs = tuple(Run(tmp_path, f"4_{n}", tmp_path / f"{n}.out", {"seed": n}) for n in range(2))
    said: list[str] = []
    assert len(follow(Submitted(tmp_path, "r.yaml", None, "4", runs, "slurm"), said.append)) == 2
    assert said == [
        "array 4: 2 pending",
        "array 4: 1 running, 1 pending, waits until its partition is up: it is down",
        "array 4: 2 completed",
    ]


@pytest.mark.parametrize(("last", "code"), [("COMPLETED", 0), ("FAILED", 5)])
def test_a_sweep_ends_as_its_worst_run(last, code, tmp_path, monkeypatch):
    jobs = {"4_0": Job("5", "COMPLETED", code=0), "4_1": Job("4", last, code=code)}
    monkeypatch.setattr(submit, "follow", lambda submitted, say: jobs)
    for number, job in enumerate(jobs.values()):
        (tmp_path / str(number)).mkdir()
        if job.code == 0:
            (tmp_path / str(number) / "COMPLETED").touch()
            (tmp_path / str(number) / "result.json").write_text('{"loss": {"last": 1.0}, "seconds": 2}')
    runs = tuple(Run(tmp_path / str(n), f"4_{n}", tmp_path / f"{n}.out", {"seed": n}) for n in range(2))
    outcome = submit.follow_submitted(Submitted(tmp_path, "r.yaml", None, "4", runs, "slurm"), print)
    assert (outcome.exit_code, len(outcome.problems)) == (code, bool(code))


def test_a_job_that_slurm_has_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "read_jobs", lambda ids: {})
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    given = submission(tmp_path)
    jobs = follow(given, lambda line: None)
    assert jobs == {"4": None}
    with pytest.raises(RunFailed, match="job 4 is no longer known"):
        judge(given, given.runs[0], jobs)
    (tmp_path / "COMPLETED").touch()
    (tmp_path / "result.json").write_text('{"steps": 6}')
    assert judge(given, given.runs[0], jobs) == {"steps": 6}


@pytest.mark.parametrize(
    ("job", "log", "kind", "said"),
    [
        (Job("4", "FAILED", code=2), "error: r.yaml:3: x\nerror: r.yaml:3: x\n", RecipeError, "r.yaml:3: x"),
        (Job("4", "FAILED", code=3), "error: too large\n", DoesNotFit, "too large"),
        (Job("4", "FAILED", code=4), "error: no GPU\n", MachineError, "no GPU"),
        (
            Job("4", "FAILED", code=5),
            "error: old\n==== start 2 of job 4\nerror: a rank\n",
            RunFailed,
            "a rank",
        ),
        (Job("4", "FAILED", code=1), "Traceback\n", RunFailed, "ended with exit code 1"),
        (Job("4", "FAILED", code=130), "", Interrupted, "the run was stopped; it has no checkpoint"),
        (Job("4", "FAILED", code=143), "", Interrupted, "the run was stopped; it has no checkpoint"),
        (Job("4", "CANCELLED", code=0, signal=15), "", Interrupted, "the job was cancelled"),
        (Job("4", "TIMEOUT", code=0), "", RunFailed, "reached its time limit"),
        (Job("4", "NODE_FAIL", code=0), "", RunFailed, "a node of the job failed"),
        (Job("4", "PREEMPTED", code=0), "", RunFailed, "preempted"),
        (Job("4", "OUT_OF_MEMORY", code=0), "", RunFailed, "launch.slurm.mem"),
    ],
)
def test_ends_are_told_as_run_would(job, log, kind, said, tmp_path):
    given = submission(tmp_path)
    given.runs[0].log.write_text(log)
    with pytest.raises(EffilaunchError) as caught:
        judge(given, given.runs[0], {"4": job})
    assert type(caught.value) is kind
    assert [problem.message for problem in caught.value.problems] == [caught.value.problems[0].message]
    assert said in caught.value.problems[0].message


def test_a_failed_prepare_job_is_the_cause(tmp_path):
    given = submission(tmp_path, prepare="3")
    given.prepare_log.write_text("error: rows.jsonl:1: no field\n")
    jobs = {"3": Job("3", "FAILED", code=2), "4": Job("4", "CANCELLED")}
    with pytest.raises(RecipeError, match=r"the data could not be prepared: rows\.jsonl:1: no field"):
        judge(given, given.runs[0], jobs)


@pytest.mark.parametrize(
    ("answer", "kind", "said", "hint"),
    [
        (
            Answer(124, "", "sbatch gave no answer within 60 s"),
            MachineError,
            "may have been submitted",
            "squeue --me",
        ),
        (Answer(127, "", "sbatch cannot be started"), MachineError, "rejects the job", "nothing was"),
        (
            Answer(1, "", "sbatch: error: no"),
            RecipeError,
            "rejects the job: no",
            "nothing was submitted",
        ),
    ],
)
def test_what_is_told_of_a_job_that_was_not_taken(answer, kind, said, hint, tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "submit", lambda script, dependency: answer)
    with pytest.raises(kind, match=said) as caught:
        scheduler.SCHEDULER.submit(
            tmp_path, "r.yaml", ["job.sbatch"], [SimpleNamespace(run_dir=tmp_path, values={})]
        )
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


@pytest.mark.parametrize(
    ("name", "ended", "said"),
    [
        (".", ["12", "11"], "cancelled job(s) 12, 11; they are not requeued\n"),
        ("1-seed=2", ["12_1"], "cancelled job(s) 12_1; they are not requeued; the other runs of"),
    ],
)
def test_one_run_of_a_sweep_is_cancelled_without_the_prepare_job_of_all(
    name, ended, said, tmp_path, monkeypatch
):
    asked: list[tuple[str, ...]] = []
    numbers = iter([Answer(0, "11\n", ""), Answer(0, "12\n", "")])
    monkeypatch.setattr(scheduler, "submit", lambda script, dependency: next(numbers))
    monkeypatch.setattr(scheduler, "ask", lambda *words: asked.append(words) or Answer(0, "", ""))
    monkeypatch.setattr(scheduler, "read_jobs", lambda ids: {})
    values = [{"seed": 1}, {"seed": 2}]
    run_dirs = [tmp_path / folder_name(number, v, 2) for number, v in enumerate(values)]
    for run_dir in run_dirs:
        run_dir.mkdir()
    runs = [SimpleNamespace(run_dir=path, values=v) for path, v in zip(run_dirs, values, strict=True)]
    scheduler.SCHEDULER.submit(tmp_path, "r.yaml", ["prepare.sbatch", "job.sbatch"], runs)
    outcome = submit.cancel_submitted(read_submitted(tmp_path / name))
    assert asked == [("scancel", *ended)]
    assert outcome.text.startswith(said)
    assert read_submitted(tmp_path / name).place == tmp_path / name  # what hints name


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
