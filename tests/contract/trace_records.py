"""What the tracer answered for every job of `closed_form_cases.py`, in `trace_records.jsonl`.

`make traces` traces the jobs whose record is absent, damaged or of another digest; `make traces ALL=1` all.
A digest is of what a trace depends on (the configuration, the versions of torch, transformers and peft, the
modules of `launcher/train/trace/`) and of the answer, so that a record edited by hand is noticed. What else
of `launcher/train/` a trace runs through is not in it: `make test-full` traces a tenth again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from answered import TRAIN, surroundings
from closed_form_cases import ClosedFormCase, every_case

ROOT = Path(__file__).parents[2]
RECORDS = Path(__file__).with_suffix(".jsonl")
TRACER = TRAIN / "trace"
LINES = ("gradients", "activations", "logits", "temporary")
"""Of a moment: bytes as a constant and a factor of the micro-batch."""
RENEW = "`make traces` renews it"


@dataclass(frozen=True)
class Records:
    """The file as it was read."""

    answers: Mapping[str, Mapping[str, Any]]
    """By case; records that can be trusted."""
    problems: Mapping[str, str]
    """By case or line of the file: why a record cannot be trusted."""


def packed(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What a record holds of an answer, a moment as a row; the allocations that it replays are left out."""

    def short(value: float) -> float:
        return int(value) if value == int(value) else value

    moments = [
        [one["segment"], *(short(value) for line in LINES for value in one[line])]
        for one in answer["moments"]
    ]
    states = {name: short(value) for name, value in answer["states"].items()}
    return {"moments": moments, "states": states, "depths": list(answer["depths"])}


def unpacked(record: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a record."""
    moments = [
        {"segment": segment} | {line: values[2 * i : 2 * i + 2] for i, line in enumerate(LINES)}
        for segment, *values in record["moments"]
    ]
    return {**record, "moments": moments}


def digest(case: ClosedFormCase, answer: Mapping[str, Any], around: str) -> str:
    """answer: packed."""
    text = json.dumps([around, case.configuration(), answer], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_records(cases: Mapping[str, ClosedFormCase], path: Path = RECORDS, around: str = "") -> Records:
    """The answers whose digest matches, and what is wrong with the others."""
    around = around or surroundings(TRACER)
    answers: dict[str, Mapping[str, Any]] = {}
    problems: dict[str, str] = {}
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        place = f"{path.name}:{number}"
        try:
            record = json.loads(line)
            name, stored, answer = record["case"], record["digest"], record["answer"]
        except (ValueError, KeyError, TypeError) as error:
            problems[place] = f"cannot be read ({type(error).__name__}: {error}); {RENEW}"
            continue
        if name not in cases:
            problems[place] = f"of no case: {name}; {RENEW}"
        elif name in answers:
            problems[place] = f"a second record of {name}; {RENEW}"
        elif stored != digest(cases[name], answer, around):
            problems[name] = (
                f"{place}: is of another configuration, version or tracer, or was edited; {RENEW}"
            )
        else:
            answers[name] = unpacked(answer)
    for name in cases.keys() - answers.keys() - problems.keys():
        problems[name] = f"no record in {path.name}; {RENEW}"
    return Records(answers, problems)


def write_records(cases: Mapping[str, ClosedFormCase], answers: Mapping[str, Any]) -> None:
    around = surroundings(TRACER)
    lines = [
        json.dumps({"case": name, "digest": digest(cases[name], answer, around), "answer": answer},
                   separators=(",", ":"))
        for name, answer in sorted((name, packed(answer)) for name, answer in answers.items())
    ]  # fmt: skip
    written = RECORDS.with_suffix(".new")
    written.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    written.replace(RECORDS)


def retrace(name: str) -> dict[str, Any]:
    """What the tracer answers now, in a process whose sets have one order: models walk sets of names."""
    import torch

    assert not sys.flags.hash_randomization, "PYTHONHASHSEED=0, as `make traces` and planning set it"

    from launcher.train.trace.run import trace

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = trace(every_case()[name].request())
    return unpacked(packed(answer))


def main() -> int:
    """Trace what is stale, or everything with the argument `all`; what is done is kept on Ctrl-C."""
    cases = every_case()
    records = read_records(cases)
    answers = {} if sys.argv[1:] == ["all"] else dict(records.answers)
    stale = sorted(cases.keys() - answers.keys())
    print(f"{len(stale)} of {len(cases)} traces to renew: about 4 CPU seconds each", flush=True)
    # Imported before the processes are forked, once.
    import launcher.train.trace.run  # noqa: F401

    failed = {}
    pool = ProcessPoolExecutor(os.cpu_count(), get_context("fork"))
    try:
        waited = {pool.submit(retrace, name): name for name in stale}
        for count, future in enumerate(as_completed(waited), 1):
            if error := future.exception():
                failed[waited[future]] = error
            else:
                answers[waited[future]] = future.result()
            if count % 50 == 0:
                print(f"{count} of {len(stale)}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
        if stale or records.problems:
            write_records(cases, answers)
    for name, error in failed.items():
        print(f"{name} cannot be traced: {type(error).__name__}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
