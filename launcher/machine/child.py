"""Ask a module that runs in a process of its own: a request as JSON, an answer as JSON.

The child's half is `answer`. What libraries print there goes to standard error, which both share. A child
ends with its parent, also with one that is killed: its standard input is closed then.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.errors import DoesNotFit, EffilaunchError, MachineError, Problem, RecipeError, RunFailed
from launcher.files.safe_files import parse_json

_ERRORS: tuple[type[EffilaunchError], ...] = (RecipeError, DoesNotFit, MachineError, RunFailed)


def ask(module: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of `python -m module`. Raises the error that the child answers with.

    RunFailed if it ends without an answer, killed for its memory for example.
    """
    quiet = {} if sys.stderr.isatty() else {"TQDM_DISABLE": "1"}
    done = converse([sys.executable, "-m", module], request, {**os.environ, **quiet})
    try:
        found: dict[str, Any] = parse_json(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        message = f"the process of {module} ended with status {done.returncode} and without an answer"
        hint = "its messages are above; status -9 means that it was killed, usually for lack of memory"
        raise RunFailed(Problem("child-failed", message, hint=hint)) from None
    if "error" in found:
        kind = next((one for one in _ERRORS if one.exit_code == found["error"]["exit_code"]), RunFailed)
        raise kind([Problem(**problem) for problem in found["error"]["problems"]])
    return found


def converse(
    command: Sequence[str],
    request: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    stderr: int | None = None,
    limit_s: float | None = None,
    waiting: Callable[[float], None] = lambda seconds: None,
) -> subprocess.CompletedProcess[str]:
    """Start a child, send it the request and wait for its end.

    waiting: called about once a second with the seconds since the start. Raises TimeoutExpired after
    `limit_s`; the child is killed whatever is raised.
    """
    begun, (theirs, ours) = time.monotonic(), os.pipe()
    with subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environ
    ) as child, os.fdopen(ours, "wb", buffering=0) as asked:  # fmt: skip
        os.close(theirs)
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended at once: its status tells
                asked.write(json.dumps(request).encode() + b"\n")
            while True:
                try:
                    out, err = child.communicate(timeout=1)
                    return subprocess.CompletedProcess(command, child.returncode, out, err)
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - begun
                    if limit_s is not None and seconds > limit_s:
                        raise
                    waiting(seconds)
        except BaseException:
            child.kill()
            raise


def read_request() -> Any:
    """The request on standard input; when that is closed, the parent has ended, and this process ends."""
    request = json.loads(sys.stdin.readline())

    def end_with_parent() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    return request


def answer(function: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> int:
    """Answer the request on standard input; an error for users is an answer too."""
    request = read_request()
    with contextlib.redirect_stdout(sys.stderr):
        try:
            found = function(request)
        except EffilaunchError as error:
            problems = [problem.to_json() for problem in error.problems]
            found = {"error": {"exit_code": error.exit_code, "problems": problems}}
        except KeyboardInterrupt:  # the parent gets it, too, and says it
            return 130
    sys.stdout.write(json.dumps(found) + "\n")
    return 0
