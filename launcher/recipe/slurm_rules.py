"""Rules on `launch.slurm`: what Slurm would reject, misread, or find only when the job is queued."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.errors import Problem
from launcher.recipe.suggestions import describe
from launcher.recipe.yaml_reader import join

SECTION = "launch.slurm"
_TIME = r"\d{1,9}|\d{1,9}:\d{1,2}|\d{1,9}:\d{1,2}:\d{1,2}|\d{1,9}-\d{1,2}(?::\d{1,2}){0,2}"
_MEMORY = r"\d{1,15}[KMGT]"
_OPTION = r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*"
_NO_VARIABLE = "Slurm expands no variables in a job's options"
_JOB_KEYS = (
    "partition", "account", "qos", "reservation", "time", "constraint", "cpus_per_task", "mem", "nodelist",
    "exclude", "gpus_per_node", "gres",
)  # fmt: skip
_SIZE = "`hardware` (or --on) sets the number of nodes and devices"
_OURS = "effilaunch sets it"
OWNED: Mapping[str, str] = {
    **{key.replace("_", "-"): f"write it as {SECTION}.{key}" for key in _JOB_KEYS},
    **dict.fromkeys(
        ("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket",
         "ntasks-per-tres", "tasks-per-node", "gpus", "gpus-per-task", "gpus-per-socket"),
        _SIZE,
    ),
    **dict.fromkeys(
        ("job-name", "output", "error", "open-mode", "chdir", "signal", "requeue", "no-requeue", "export",
         "export-file", "dependency", "kill-on-invalid-dep", "parsable", "wait", "wrap", "test-only", "quiet",
         "input", "ignore-pbs", "help", "usage", "version", "verbose"),
        _OURS,
    ),
    "array": "--sweep makes an array; launch.slurm.array_limit bounds it",
    "time-min": "the signal before the end is timed from launch.slurm.time",
}  # fmt: skip
"""Options of sbatch that a recipe does not set under `options` -> where it does."""
_FREE = (
    "acctg-freq", "batch", "bb", "bbf", "begin", "cluster-constraint", "clusters", "comment",
    "container", "contiguous", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline",
    "delay-boot", "distribution", "exclusive", "extra-node-info", "get-user-env", "gid", "gpu-bind",
    "gpu-freq", "gres-flags", "hint", "hold", "licenses", "mail-type", "mail-user", "mcs-label",
    "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice", "no-kill", "nodefile",
    "overcommit", "oversubscribe", "power", "prefer", "priority", "profile", "propagate", "reboot",
    "sockets-per-node", "spread-job", "switches", "thread-spec", "threads-per-core", "tmp", "uid",
    "use-min-nodes", "wait-all-nodes", "wckey",
)  # fmt: skip
"""The other options of Slurm 22.05. Later versions and plugins have more, which sbatch checks."""


def check_slurm(data: Mapping[str, Any]) -> list[Problem]:
    """Problems of the section; the schema reports wrong types."""
    launch = data.get("launch")
    section = launch.get("slurm") if isinstance(launch, Mapping) else None
    if not isinstance(section, Mapping):
        return []
    problems = list(_check_job(section, SECTION))
    if isinstance(section.get("prepare"), Mapping):
        problems += _check_job(section["prepare"], f"{SECTION}.prepare")
    if section.get("gres") is not None and section.get("gpus_per_node") is not None:
        message = f"excludes `{SECTION}.gpus_per_node`: both ask for the devices of a node"
        problems.append(Problem("conflict", message, path=f"{SECTION}.gres", hint="keep one of the two"))
    for number, line in enumerate(section["setup"] if isinstance(section.get("setup"), list) else ()):
        if isinstance(line, str) and line.lstrip().startswith("#SBATCH"):
            hint = f"write the option as a key of {SECTION}"
            message = "is an option of sbatch, which reads none after the first command"
            problems.append(Problem("wrong-value", message, path=f"{SECTION}.setup[{number}]", hint=hint))
    return problems


def _check_job(section: Mapping[str, Any], path: str) -> Iterator[Problem]:
    time, memory = section.get("time"), section.get("mem")
    if time is not None and not (isinstance(time, (str, int)) and re.fullmatch(_TIME, str(time), re.ASCII)):
        message = f"is {_show(time)}, expected minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        yield Problem("wrong-value", message, path=f"{path}.time", hint="e.g. 24:00:00 or 1-12:00:00")
    elif time is not None and not re.search("[1-9]", str(time)):
        message = f"is {_show(time)}, which sbatch takes as no limit"
        hint = "write a limit, e.g. 24:00:00; without the key the limit of the partition holds"
        yield Problem("wrong-value", message, path=f"{path}.time", hint=hint)
    if isinstance(memory, bool) or (
        memory not in (None, 0) and not re.fullmatch(_MEMORY, str(memory), re.ASCII)
    ):
        message = f"is {_show(memory)}, expected a whole number with its unit K, M, G or T"
        hint = "e.g. 64G; 0, without quotes, is all of a node's memory"
        yield Problem("wrong-value", message, path=f"{path}.mem", hint=hint)
    for key in _JOB_KEYS:
        if isinstance(section.get(key), str):
            yield from _check_text(section[key], f"{path}.{key}")
    options = section.get("options")
    for name, value in options.items() if isinstance(options, Mapping) else ():
        yield from _check_option(str(name), value, join(f"{path}.options", name))


def _show(value: Any) -> str:
    return repr(value[:40]) if isinstance(value, str) else describe(value)


def key_hint(path: str) -> str | None:
    """Where a recipe sets the sbatch option of the unknown key `path`; None for other keys."""
    parent, _, name = path.rpartition(".")
    option = name.replace("_", "-")
    if parent not in (SECTION, f"{SECTION}.prepare"):
        return None
    if parent != SECTION and (option in ("gpus-per-node", "gres") or OWNED.get(option) == _SIZE):
        return "the prepare job is one task, without devices"
    return f"write it as {parent}.options.{option}" if option in _FREE else OWNED.get(option)


def _check_option(name: str, value: Any, path: str) -> Iterator[Problem]:
    # sbatch accepts a unique prefix of an option.
    meant = [name] if name in OWNED else [known for known in (*OWNED, *_FREE) if known.startswith(name)]
    if len(meant) == 1 and meant[0] in OWNED:
        short = "" if meant[0] == name else f"is short for --{meant[0]}, which is "
        message = f"{short}not allowed under `{SECTION}.options`"
        yield Problem("owned-key", message, path=path, hint=OWNED[meant[0]])
    elif len(name) > 1 and len(meant) > 1 and name not in meant:
        message = f"is ambiguous: sbatch has {', '.join(f'--{known}' for known in sorted(meant))}"
        yield Problem("wrong-value", message, path=path, hint="write the whole name of the option")
    elif not re.fullmatch(_OPTION, name) or len(name) == 1:
        plain = name.strip("-").replace("_", "-")
        message = "is not a long option of sbatch, expected letters and hyphens without the leading ones"
        yield Problem("wrong-value", message, path=path, hint=f"write {plain}" if len(plain) > 1 else None)
    elif value is False:
        message = "is false, and a flag is present or absent"
        yield Problem("wrong-value", message, path=path, hint="remove it")
    elif isinstance(value, str):
        yield from _check_text(value, path)


def _check_text(text: str, path: str) -> Iterator[Problem]:
    if "$" in text:
        hint = "write the value, or set it when you submit, with --set"
        yield Problem("wrong-value", f"contains a $, but {_NO_VARIABLE}", path=path, hint=hint)
    elif not text or not text.isprintable():
        what = "is empty" if not text else "contains a line end or another control character"
        yield Problem("wrong-value", f"{what}, which sbatch does not accept", path=path)
