"""What CI runs: the targets that a person runs, in two lanes that share the cores and one budget.

A test that failed is tried once more, alone, when all parts have ended. If it passes then, its part passes,
and `FLAKY path::name` is printed with the ends of both outputs; the next change adds its line to
tests/flaky.jsonl.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "build" / "tests"
LANES = (("test SLOW=some",), ("check", "docs", "test-browser", "test-cluster SLOW=some"))
"""`make` targets with their variables; those of a lane run one after the other."""
BUDGET_S = 85 * 60
MOST_RETRIED = 10
"""Failed tests of a part; more are no accident."""
SHOWN = 15
"""Lines of an output's end."""


@dataclass(frozen=True)
class PartResult:
    """How a part ended, as `make stats` reads it."""

    part: str
    status: int
    seconds: int
    cpu_seconds: int
    load: float
    flaky: tuple[str, ...] = ()


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    os.chdir(ROOT)
    began = time.monotonic()
    try:
        shutil.rmtree(RECORDS, ignore_errors=True)
        RECORDS.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"CI needs a folder build/ that can be written: {error}. Nothing was run.")
        return 1
    deadline = began + BUDGET_S
    ended = [run("dev", deadline)]
    if ended[0].status == 0:
        lanes = [threading.Thread(target=run_lane, args=(parts, deadline, ended)) for parts in LANES]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        ended = [one if one.status == 0 else tried_again(one, deadline) for one in ended]
    return summary(ended, round(time.monotonic() - began))


def stop(number: int, _frame: object) -> None:
    """The parts are in sessions of their own: nothing else would end them with CI."""
    # Asked now: one that was started a moment ago is in no list yet.
    asked = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=False)
    for leader in asked.stdout.split():
        subprocess.run(["pkill", "-TERM", "-s", leader], check=False)
    print(f"== ended by {signal.Signals(number).name}; what had not run was not run", flush=True)
    os._exit(128 + number)


def run_lane(parts: tuple[str, ...], deadline: float, ended: list[PartResult]) -> None:
    ended.extend(run(part, deadline) for part in parts)


def run(part: str, deadline: float) -> PartResult:
    """`make PART`; status 124 if the budget ended it."""
    return command(part, ["make", *part.split()], deadline)


def command(part: str, words: list[str], deadline: float) -> PartResult:
    """A command whose lines are shown as they come, and ended as a whole at the deadline."""
    began, name = time.monotonic(), part.split()[0]
    print(f"== {' '.join(words)} ({deadline - began:.0f} s left)", flush=True)
    # A session of its own: at the deadline nothing that it started lives on.
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    late = threading.Timer(max(1.0, deadline - began), end_session, [process.pid])
    late.start()
    assert process.stdout is not None
    with (RECORDS / f"{name}.log").open("a") as log, process.stdout as output:
        for line in output:
            log.write(line)
            sys.stdout.write(f"[{name}] {line}")
            sys.stdout.flush()
    _, status, used = os.wait4(process.pid, 0)  # with the CPU seconds of all that it waited for
    late.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    if time.monotonic() >= deadline:
        print(
            f"== {part}: the budget of {BUDGET_S} s is used up; what it had not run was not run", flush=True
        )
        process.returncode = 124
    seconds, cpu = round(time.monotonic() - began), round(used.ru_utime + used.ru_stime)
    return PartResult(part, process.returncode, seconds, cpu, round(os.getloadavg()[0], 1))


def end_session(leader: int) -> None:
    """Ask all processes of a session to end, then kill them."""
    for number, pause in ((signal.SIGTERM, 30), (signal.SIGKILL, 0)):
        subprocess.run(["pkill", f"-{int(number)}", "-s", str(leader)], check=False)
        time.sleep(pause)


def tried_again(first: PartResult, deadline: float) -> PartResult:
    """The part with its failed tests tried once more, where those are all that went wrong."""
    name = first.part.split()[0]
    failed = failed_tests(name)
    if not 0 < len(failed) <= MOST_RETRIED:
        return first
    before = outputs(RECORDS / f"{name}.xml")
    words = [
        ".venv/bin/pytest", "--last-failed", "--last-failed-no-failures=none",
        "-o", f"cache_dir=build/tests/{name}",
        f"--junitxml=build/tests/{name}-again.xml", "-rs",
        *files_of(failed),
    ]  # fmt: skip
    again = command(f"{name}-again", words, deadline)
    after = outputs(RECORDS / f"{name}-again.xml")
    passed = [state for state, _ in after.values() if state == "passed"]
    if again.status != 0 or len(passed) != len(failed):  # one that is skipped now has not passed
        return first
    for test in failed:
        texts = (found.get(key(test), ("", "(its output is in the log)"))[1] for found in (before, after))
        show_flaky(test, *texts)
    return PartResult(
        first.part,
        0,
        first.seconds + again.seconds,
        first.cpu_seconds + again.cpu_seconds,
        again.load,
        tuple(failed),
    )


def failed_tests(name: str) -> list[str]:
    """Of a session that ran to its end and had failed tests (pytest's status 1); of every other one none."""
    try:
        record = json.loads((RECORDS / f"{name}.json").read_text())
        failed = json.loads((RECORDS / name / "v" / "cache" / "lastfailed").read_text())
    except (OSError, ValueError):
        return []
    return sorted(failed) if record["status"] == 1 else []


def files_of(tests: list[str]) -> list[str]:
    return sorted({test.partition("::")[0] for test in tests})


def key(test: str) -> str:
    """A test's name as JUnit's XML has it: classname and name."""
    path, *classes, name = test.split("::") if "[" not in test else split_parameters(test)
    return "::".join([".".join([path.removesuffix(".py").replace("/", "."), *classes]), name])


def split_parameters(test: str) -> list[str]:
    """The parts of a test's name; parameters may contain `::`."""
    plain, bracket, parameters = test.partition("[")
    *before, name = plain.split("::")
    return [*before, f"{name}{bracket}{parameters}"]


def outputs(xml: Path) -> dict[str, tuple[str, str]]:
    """For each test of a session: passed, failed or skipped, and the text of its failure or its output."""
    found: dict[str, tuple[str, str]] = {}
    if not xml.is_file():
        return found
    for case in ElementTree.parse(xml).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        wrong = [part for part in case if part.tag in ("failure", "error")]
        skipped = any(part.tag == "skipped" for part in case)
        said = [part.text or "" for part in wrong or case if part.tag != "properties"]
        state = "failed" if wrong else "skipped" if skipped else "passed"
        if found.get(name, ("passed",))[0] == "passed":  # an error of the teardown is a case of its own
            found[name] = (state, "\n".join(said))
    return found


def show_flaky(test: str, first: str, second: str) -> None:
    print(f"FLAKY {test}")
    for title, text in (("failed", first), ("passed alone", second)):
        lines = text.strip().splitlines()[-SHOWN:] or ["no output"]
        print(f"  {title}:", *(f"    {line}" for line in lines), sep="\n")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    line = {"path": test, "commit": commit.stdout.strip(), "cause": "find it"}
    print(f"  for tests/flaky.jsonl: {json.dumps(line)}", flush=True)


def summary(ended: list[PartResult], seconds: int) -> int:
    print("== skipped")
    logs = [(RECORDS / f"{one.part.split()[0]}.log").read_text(errors="replace") for one in ended]
    skipped = [line for log in logs for line in log.splitlines() if line.startswith("SKIPPED ")]
    print("\n".join(skipped) or "nothing was skipped")
    missing = [part for lane in LANES for part in lane if part not in [one.part for one in ended]]
    print("== parts: status, seconds, CPU seconds, load at the end")
    for one in ended:
        flaky = f"  FLAKY {' '.join(one.flaky)}" if one.flaky else ""
        print(f"{one.part:16} {one.status:6} {one.seconds:6} {one.cpu_seconds:6} {one.load:6}{flaky}")
    for part in missing:
        print(f"{part:16} was not run")
    cpu = sum(one.cpu_seconds for one in ended)
    print(f"{'all':16} {'':6} {seconds:6} {cpu:6} {os.cpu_count()} cores")
    parts = [asdict(one) for one in ended]
    (RECORDS / "ci.json").write_text(json.dumps({"seconds": seconds, "parts": parts}, indent=1) + "\n")
    return 0 if not missing and all(one.status == 0 for one in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
