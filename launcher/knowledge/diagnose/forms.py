"""Patterns of log lines: the parts of a traceback, errors, endings of processes, and progress."""

from __future__ import annotations

import re

DUMP = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .{0,80}\(most recent call first\):\s*$")
"""The calls of a process as faulthandler prints them: the innermost first."""
AFTER_DUMPS = "Extension modules: "
"""What faulthandler prints after the last thread's calls."""
HEADER = re.compile(r"Traceback \(most recent (?:call|caller) (?:last|first)\):?\s*$")
WRAPPED = re.compile(r"(?:Original|Remote|Worker) Traceback \(most recent call last\)", re.IGNORECASE)
IGNORED = re.compile(r"^\s*(?:Exception ignored in|Exception in thread .*tqdm|--- Logging error ---)")
CONTINUES = re.compile(
    # bitsandbytes/cextension.py continues without the library.
    r"^\s*(?:Exception in thread |bitsandbytes library load error: |"
    r"Could not load bitsandbytes native library: )"
)
"""Before the traceback of a thread, or of a library that caught it: the process continues."""
FRAME = re.compile(
    r'^(?P<indent>\s*)File "(?P<file>[^"]+)", line (?P<line>\d{1,9})(?:,? in (?P<function>.+))?$'
)
CELL_FRAME = re.compile(
    r"^(?:File |Cell |Input )?(?:\[(?=[^\]]{1,400}\]\(https?://))?(?P<file>[~/<][^\s:\]]+|.*\.py|In ?\[\d+\])"
    r"(?:\]\(https?://\S{0,400}\))?"
    r"(?::(?P<line>\d{1,9}), in| in) (?P<function>[\w.<>]+|<cell line: \d+>)(?:\(|$)"
)
"""A call in a notebook's traceback; Colab turns the file into a link."""
CELL_HEADER = re.compile(r"^(?P<type>[A-Z]\w*) {2,}Traceback \(most recent call last\)\s*$")
"""The first line of a notebook's traceback, which names the exception's class."""
CELL_SOURCE = re.compile(r"^-{1,4}> ?\[?\d+(?:\]\(https?://\S+\))? ?(?P<code>.*)$|^---")
"""The arrow at the line that was called in a notebook; it is shorter for larger line numbers."""
DIRECT = "The above exception was the direct cause of"
HANDLING = "During handling of the above exception, another"
"""Both without their ends, which a narrow terminal wraps."""
GROUP = re.compile(r"^\s*(?:\+-\+-+ (?:\d+|\.\.\.) -+|\+-{4,})\s*$")
GROUP_MARGIN = re.compile(r"^\s*[+|](?: |$)")

_NAME = r"(?:[A-Za-z_]\w*\.)*"
_ENDING = r"(?:Error|Exception|Interrupt|Exit|Failure|Iteration|Timeout|Fault|OutOfMemory|Group|Call|Quit)"
EXCEPTION = re.compile(
    rf"^(?P<indent>\s*)(?P<type>{_NAME}(?:[A-Z]\w*?{_ENDING}\d?|Exception))(?:: ?(?P<message>.*))?$"
)
"""The last line of a traceback; on its own it is an error too, when it has a message."""
ANY_CLASS = re.compile(
    r"^(?P<indent>\s*)(?P<type>[A-Za-z_]\w*(?:\.\w+)*\.[A-Z]\w*|[A-Z][A-Za-z]\w*)(?:: ?(?P<message>.*))?$"
)
"""Any other class; only right after the lines of a traceback."""
_EXPECTED = "XFAIL|XPASS|SKIPPED|PASSED|RERUN|[Ee]xpected failure|xfailed|skipped"
"""Results of tests that did not fail."""
TOLD = re.compile(
    rf"^(?!.{{0,400}}?\b(?:{_EXPECTED})\b)"
    rf"(?:E {{2,}}|(?:FAILED|ERROR) \S+::.{{1,400}}? - |(?!\s|\S+:\d+:)[^\"'`]{{1,80}}?[:(] ?)"
    rf"(?P<type>{_NAME}[A-Z]\w*?{_ENDING})(?:: |\()(?P<message>.+)$"
)
"""An exception in a report: of pytest, or of a program that caught it and may have handled it."""
STOPPED = re.compile(
    r"^(?!\s)[^\"'`:]{0,60}\b(?:stopped|failed|aborted|crashed|died|gave up)\b[^\"'`:]{0,40}: "
    r"(?P<message>\S.+)$"
)
"""A program's own message about its end, with the exception's message but not its class."""
DOUBLED = re.compile(rf"(?P<type>[A-Z]\w*{_ENDING})(?P=type)(?:: ?)+(?P<message>.*)$")
"""The same line of two ranks, written at the same time."""

KILLED = re.compile(
    r"oom.?kill|OOM ?Kill|Out of memory: Kill|Killed process \d+|OUT_OF_MEMORY|"
    r"exits with return code = -?(?:9|137)\s*$|"
    r"(?:exitcode ?: ?|return ?code |Signal |exit(?:ed with)? code:? ?|Exit Code: +)-?(?:9|137)\b|SIGKILL|"
    r"^(?:\S+: line \d+: +\d+ )?Killed\b|tasks? [\d,-]+: (?:Killed|Out Of Memory)"
)
CRASHED = re.compile(
    r"^Fatal Python error: |Segmentation fault|SIGSEGV|SIGBUS|Bus error|core dumped|SIGABRT|SIGILL|"
    r"Illegal instruction"
)
EXITED = re.compile(
    r"exits with return code = (-?\d+)\s*$|failed \(exitcode: (-?\d+)\)|^\s*exitcode +: (-?\d+)|"
    r"^\s*Exit Code: +(\d+)$|Exited with exit code (\d+)|returned non-zero exit status (\d+)"
)
PART_SUCCEEDED = re.compile(r"^Status: +Succeeded$|exits successfully")
"""What `kubectl describe` prints of a pod, and DeepSpeed's launcher of a rank; others may have failed."""
SUCCESS = re.compile(
    r"'train_runtime'|\"train_runtime\"|train_runtime +=|Training completed\. Do not|"
    r"[Ss]cript completed successfully|^Training (?:completed|complete|finished)"
)
LEVEL = re.compile(
    r"^(?:[-|:\s]*\[?(?:\w+[-.:])?(?:ERROR|CRITICAL|FATAL)\b|\[E |\[?E\d{3,4} |E \S+\.cc:|ERROR:)|"
    r"^.{0,80}?[\[|:=\s-](?:ERROR|CRITICAL|FATAL)[\]|:\s-]|"
    # torch's own loggers, after whatever a launcher writes before its lines.
    r"^.{0,160}?\[[EF](?:\d{3,4} [\d:.]+)? \S+\.(?:cpp|cc|cu|h):\d+\] "
)
SAID = re.compile(
    r"^(?:[\w./+-]+: )?(?:[\w./+-]+:\d+(?::\d+)?: )?(?:fatal |internal compiler )?error: ", re.IGNORECASE
)
ENDED = re.compile(
    r"^\S+: error: (?:unrecognized arguments|the following arguments are required|argument \S+: |"
    r"ambiguous option)|"
    r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+|CANCELLED AT \S+ DUE TO|DUE TO TIME LIMIT|"
    r"^\S*python[\d.]*(?:\.exe)?: "
    r"(?:Error while finding module specification|No module named |can't open file )|"
    r"^(?:sbatch|salloc): error: |^srun: (?:error: Unable to |fatal: )|"
    # What `kubectl describe` prints of a container, and its events.
    r"^\s*Reason: +(?:Error|Evicted|\w+BackOff|Err\w+|\w+Error|ContainerCannotRun|DeadlineExceeded)$|"
    r"^\s*Warning +(?:Failed\w*|BackOff|Evicted|OOMKilling) |^Message: +The node was low on resource: |"
    # llama.cpp and Ollama
    r"^(?:llama_(?:model_load|load_model|init_from|new_context)\w*|gguf_init_\w+|common_init_\w+|main|"
    r"srv +load_model): (?:.{0,80}: )?(?:error\b|failed to |unable to |tensor .{1,80} has invalid )|"
    r"^Error: (?:llama runner|model requires|unable to load|\d{3} [A-Z]|pull model|.{0,60}GGUF)"
)
"""The last line of a program that argparse, Python itself, a scheduler or an inference engine ended."""
DIED = re.compile(
    r"thread terminated with exception|terminate called after throwing|GGML_(?:ASSERT|ABORT)\(|"
    r"[Kk]ernel (?:appears to have )?died|Kernel crashed|session crashed|NVRM: Xid|fallen off the bus|"
    r"we are taking the entire process down|"
    # bitsandbytes ends the process after any error of CUDA (csrc/common.cuh)
    r"^Error .{1,80} at line \d+ in file \S"
)
NATIVE = re.compile(DIED.pattern + r"|^\s*what\(\):|Assertion [`'\"].*failed|^FAILED: |^ninja: |^nvcc fatal")
KERNEL = re.compile(r"\.cuh?:\d+: .{0,400}Assertion [`'\"]")
"""A failed assertion of a CUDA kernel."""
WARNING = re.compile(
    r"^(?:[-|:\s]*\[?(?:WARNING|WARN|INFO|DEBUG)\b|\[?[WI](?:\d{3,4})? )|Warning: |\bWARNING\b|^wandb: "
)
TABLE_RANK = re.compile(r"^\s*rank\s+: (\d{1,6}) \(local_rank")
STEP = re.compile(r"\{'loss': |\{\"loss\": |\"loss\": [\d.eNn-]+, \"")
RUNNING = re.compile(r"\*\*\*\*\* Running training \*\*\*\*\*|Running training")

WORDS = (
    b"rror", b"raceback", b'File "', b"xception", b"nterrupt", b"ailed", b"ailure", b"FAIL", b"illed",
    b"illing", b"KILL", b"fault", b"ignal", b"SIG", b"exit", b"Exit", b"bort", b"terminat", b"what()",
    b"ssert", b"CANCELLED", b"loss'", b'loss"', b"train_runtime", b"uccess", b"omplete", b"finished",
    b"ERROR", b"CRITICAL", b"FATAL", b"Running training", b"OVERFLOW", b"[E", b"atchdog", b"OUT_OF_MEMORY",
    b"ut of memory", b"ut Of Memory", b"core dumped", b"oom", b"rank  ", b"single sample", b"free disk",
    b"ost recent call", b"stopped", b"rashed", b" died", b"gave up", b"rainable params: 0 ", b"a second time",
    b".py in ", b"num_train_epochs", b"trainer_state", b"WANDB_DISABLED", b"TRANSFORMERS_CACHE",
    b"--report_to", b"VISIBLE_DEVICES", b"got forked", b"slow inference", b"slow speed", b"Params4bit",
    b"deprecated and will", b"weight_tying", b"use_cache=True", b"length is longer", b"OMP_NUM_THREADS env",
    b"16bit", b"ignored in loss", b"use_reentrant", b"vocabulary was not", b"o module named", b"can't open",
    b"Warning  ", b"Reason:", b"BackOff", b"GGML_A", b"Xid", b"fallen off", b"unable to", b"Succeeded",
    b"low on resource", b"invalid ggml", b"native library", b'"cell_type"', b'"output_type"', b'"source"',
    # What the reports of pytest and unittest contain.
    b"test session", b"Captured", b" passed", b" failed", b" error", b" skipped", b" xfailed", b" xpassed",
    b" deselected", b"Ran ", b"OK", b"FAILED",
)  # fmt: skip
"""A line without any of these matters only while a traceback is open: a fast filter for logs of gigabytes."""
_RANK = re.compile(rb"\[(?:rank|default) ?(\d{1,6})\]:|\[\d+,(\d{1,6})\]<|^(\d{1,6}): ")


def rank_in(raw: bytes) -> tuple[int | None, int | None]:
    """The rank, and the task, at the beginning of a line; fast."""
    found = _RANK.search(raw[:80])
    if found is None:
        return None, None
    rank, process, task = found.groups()
    named = rank or process
    return (int(named), None) if named is not None else (None, int(task))


def is_error(text: str) -> bool:
    """Whether a line is an error by its form, whatever its content."""
    for form in (KILLED, CRASHED, EXITED):
        # Text in quotes is only mentioned.
        if any(text[: found.start()][-1:] not in ("`", '"', "'") for found in form.finditer(text)):
            return True
    if WARNING.search(text[:200]) and not LEVEL.match(text):
        return False
    return bool(SAID.match(text) or ENDED.search(text) or LEVEL.match(text) or NATIVE.search(text))


def undouble(text: str) -> tuple[str, str] | None:
    """Class and message of a line that two ranks wrote at the same time; None for other lines."""
    if text[:1].isspace():
        return None
    found = DOUBLED.search(text[:300])
    if found is None or " " in text[: found.start("type")]:
        return None
    return found["type"], DOUBLED.search(text)["message"].lstrip(": ")  # type: ignore[index]
