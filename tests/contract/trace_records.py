"""What the tracer answered for every job of `closed_form_cases.py`, in `trace_records.jsonl`, and for what is
shipped, in `launcher/models/data/traces.jsonl`.

`make traces` traces the jobs whose record is absent, damaged or of another digest; `make traces ALL=1` all.
A digest is of what a trace depends on (the configuration, the versions of torch, transformers and peft, the
modules of `launcher/train/trace/`) and of the answer, so that a record edited by hand is noticed. What else
of `launcher/train/` a trace runs through is not in it: `make test-full` traces a tenth again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from closed_form_cases import ClosedFormCase, every_case

from launcher.files.safe_files import write_text
from launcher.models import memory_trace, recorded_traces
from launcher.models.recorded_traces import SHIPPED, TRACER, line_of, packed, surroundings, unpacked

ROOT = Path(__file__).parents[2]
RECORDS = Path(__file__).with_suffix(".jsonl")
RENEW = "`make traces` renews it"
TYPES = ("cohere2", "falcon_h1", "olmoe", "phi", "stablelm", "zamba")
"""Model types whose default configuration is recorded, too."""


@dataclass(frozen=True)
class Records:
    """The file as it was read."""

    answers: Mapping[str, Mapping[str, Any]]
    """By case; records that can be trusted."""
    problems: Mapping[str, str]
    """By case or line of the file: why a record cannot be trusted."""


def digest(case: ClosedFormCase, answer: Mapping[str, Any], around: str) -> str:
    """answer: packed."""
    return recorded_traces.digest(case.configuration(), answer, around)


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
        line_of(name, cases[name].configuration(), packed(answer), around)
        for name, answer in sorted(answers.items())
    ]
    write_text(RECORDS, "".join(lines))


def retrace(name: str) -> dict[str, Any]:
    """What the tracer answers now, in a process whose sets have one order: models walk sets of names."""
    import torch

    assert not sys.flags.hash_randomization, "PYTHONHASHSEED=0, as `make traces` and planning set it"

    from launcher.train.trace.run import trace

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = trace(every_case()[name].request())
    return unpacked(packed({part: answer[part] for part in ("moments", "states", "depths")}))


def shipped_plans(folder: Path) -> dict[str, list[str]]:
    """Name -> arguments of `plan`: every shipped recipe, and types of model that have no closed form.

    folder: for the recipes of types: LoRA of the default configuration of its class on one H100.
    """
    plans = {}
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        plans[path.stem] = ["plan", str(path), *(("--on", "cpu") if path.stem == "smoke" else ())]
    for kind in TYPES:
        path = folder / f"{kind}.yaml"
        path.write_text(
            f"model: {{config: {{model_type: {kind}}}, tokenizer: any/tokenizer}}\nadapter: {{type: lora}}\n"
            "data: {train: [{path: data/train.jsonl}]}\n"
            "hardware: {num_nodes: 1, devices_per_node: 1, device: H100-80GB}\n"
        )
        plans[kind] = ["plan", str(path)]
    return plans


def renew_shipped(*, everything: bool) -> None:
    """Plan what is shipped, and write what its plans ask; answers that are stale are traced."""
    from launcher.cli import main as effilaunch
    from launcher.inputs import model_trace

    around, lines = surroundings(TRACER), []
    try:
        known = [] if everything else recorded_traces.read_records(SHIPPED)
    except (OSError, ValueError):  # absent or damaged
        known = []

    def keep(asked: Mapping[str, Any], _python: str, ask: Callable[[], dict[str, Any]], _say: Any) -> Any:
        same = (
            one["answer"]
            for one in known
            if one["digest"] == recorded_traces.digest(asked, one["answer"], around)
        )
        answer = next(same, None) or packed(ask())
        lines.append(line_of(case, asked, answer, around))
        return unpacked(answer)

    recorded_traces.recorded = model_trace.recorded = keep
    memory_trace.LIMIT_S = 3600  # machines that renew records do other things, too
    with tempfile.TemporaryDirectory() as folder:
        for case, command in shipped_plans(Path(folder)).items():
            before = len(lines)
            with contextlib.redirect_stdout(io.StringIO()):
                status = effilaunch(command)
            if len(lines) > before:
                print(f"{case}: {len(lines) - before} answers, status {status}", flush=True)
    write_text(SHIPPED, "".join(dict.fromkeys(lines)))


def main() -> int:
    """Trace what is stale, or everything with the argument `all`; what is done is kept on Ctrl-C."""
    renew_shipped(everything=sys.argv[1:] == ["all"])
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
