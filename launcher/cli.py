"""The command line: parse it, call the command, print what it returns, exit with its status."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from launcher.parsing import Command, UsageError, build_parser, parse

BETWEEN_COLLECTIONS = 50_000
"""Objects between two garbage collections. A command makes about 40,000 that live until its end; with
Python's default of 700, looking through them takes a tenth of its time."""
QUICK = ("plan", "validate")
"""Commands that only print. Taking the interpreter down would take a seventh of their time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run any command in this process and return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        command, options = parse(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    except UsageError as wrong:
        return _refuse(argv, wrong)
    # pydantic looks for plugins in every installed package, which takes longer than planning.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    context = {"as_json": options.pop("json"), "command_line": argv}
    options |= {name: value for name, value in context.items() if name in options}
    return _call(command, options, as_json=context["as_json"], quiet=options.pop("quiet", False))


def _call(command: Command, options: dict[str, Any], *, as_json: bool, quiet: bool) -> int:
    from launcher.errors import EffilaunchError, Interrupted, Problem
    from launcher.report.outcome import emit, emit_error, silence

    try:
        with silence() if quiet else contextlib.nullcontext():
            return emit(command.name, command.function()(**options), as_json=as_json)
    except EffilaunchError as error:
        return emit_error(command.name, error, as_json=as_json)
    except KeyboardInterrupt:
        stopped = Interrupted(Problem("interrupted", "stopped by the user"))
        return emit_error(command.name, stopped, as_json=as_json)
    except Exception as error:  # the only place that catches bugs of our own
        return _report_bug(command.name, error, as_json=as_json)


def _refuse(argv: Sequence[str], wrong: UsageError) -> int:
    from launcher.errors import Problem, RecipeError
    from launcher.report.outcome import emit_error

    message, hint = wrong.args
    error = RecipeError(Problem("usage", message, hint=hint))
    return emit_error(argv[0], error, as_json="--json" in argv)


def _report_bug(command: str, error: Exception, *, as_json: bool) -> int:
    """Write the traceback to a log, name the log, return 70."""
    import tempfile
    import traceback

    from launcher.errors import EffilaunchError, Problem
    from launcher.report.outcome import emit_error

    name: str | None = None
    hint = "please report it with this log"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="effilaunch-", suffix=".log", delete=False, encoding="utf-8"
        ) as log:
            log.write("".join(traceback.format_exception(error)))
        name = log.name
    except OSError as full:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        hint = f"please report it; its log cannot be written ({full.strerror}); it was raised at {place}"
    message = f"a bug in effilaunch: {type(error).__name__}: {error}"
    problem = Problem("internal-error", message, file=name, hint=hint)
    return emit_error(command, EffilaunchError(problem), as_json=as_json)


def entry() -> NoReturn:
    """The console script."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        from launcher.commands.completion import complete

        complete(build_parser(filled=True))
    gc.set_threshold(BETWEEN_COLLECTIONS)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal's encoding lacks are no bug
            stream.reconfigure(errors="backslashreplace")
    code = main()
    if sys.argv[1:2] and sys.argv[1] in QUICK and threading.active_count() == 1:
        _exit_at_once(code)
    raise SystemExit(code)


def _exit_at_once(code: int) -> None:
    """Exit when all output is written; return if it cannot be, so that the usual exit reports it."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:
        return
    os._exit(code)


if __name__ == "__main__":
    entry()
