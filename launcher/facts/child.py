"""Ask a module that runs in a process of its own: a request as JSON, an answer as JSON.

The child's half is `answer`. What libraries print there goes to standard error, which both share.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from launcher.errors import DoesNotFit, EffilaunchError, MachineError, Problem, RecipeError, RunFailed
from launcher.facts.safe_files import parse_json

_ERRORS: tuple[type[EffilaunchError], ...] = (RecipeError, DoesNotFit, MachineError, RunFailed)


def ask(module: str, request: Mapping[str, Any], python: str = sys.executable) -> dict[str, Any]:
    """The answer of `python -m module`. Raises the error that the child answers with.

    RunFailed if it ends without an answer, killed for its memory for example.
    """
    quiet = {} if sys.stderr.isatty() else {"TQDM_DISABLE": "1"}
    done = subprocess.run(
        [python, "-m", module], input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=False,
        env={**os.environ, **quiet},
    )  # fmt: skip
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


def answer(function: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> int:
    """Answer the request on standard input; an error for users is an answer too."""
    request = json.load(sys.stdin)
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
