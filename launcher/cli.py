"""The command line: thin. Each command imports what it needs when it is called."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from launcher.parsing import WrongWords, build_parser

if TYPE_CHECKING:
    from launcher.report.outcome import Outcome

BETWEEN_COLLECTIONS = 50_000
"""Objects that are made before the collector looks for cycles. Starting a command makes about 40,000 that
live to its end: with Python's own 700, looking through them again and again is a tenth of its time."""
QUICK = ("plan", "validate")
"""Commands that leave nothing behind but what they print. To take the interpreter apart, object by object, as
its end does, would be a seventh of their time."""


def dispatch(args: argparse.Namespace) -> Outcome:
    """Call the command; the imports stay inside so that --help needs none of them."""
    match args.command:
        case "run":
            return _dispatch_run(args)
        case "plan":
            from launcher.commands.plan import plan_command

            return plan_command(
                args.recipe, args.overrides, args.on, args.explain,
                ranking=args.search, trace=args.trace, html=args.html,
            )  # fmt: skip
        case "prepare":
            from launcher.commands.prepare import prepare_command

            return prepare_command(
                args.recipe, args.overrides, on=args.on, show=args.show, tiny=args.tiny, as_json=args.json
            )
        case "validate":
            from launcher.commands.plan import validate_command

            return validate_command(args.recipes)
        case "estimate":
            from launcher.commands.estimate import estimate_command

            return estimate_command(args.target, args.on, args.overrides, args.tensor_parallel)
        case "ladder":
            from launcher.commands.ladder import ladder_command

            return ladder_command(
                args.recipe, args.overrides, on=args.on, tiny=args.tiny, steps=args.steps,
                only=args.only, output_dir=args.output_dir, as_json=args.json,
            )  # fmt: skip
        case "drill":
            from launcher.commands.drill import drill_command

            return drill_command(
                args.recipe, args.overrides, on=args.on, tiny=args.tiny, steps=args.steps,
                only=args.only, output_dir=args.output_dir, as_json=args.json,
            )  # fmt: skip
        case "submit":
            return _submit(args)
        case _:
            return _dispatch_results(args)


def _submit(args: argparse.Namespace) -> Outcome:
    from launcher.commands.submitting import submit_command

    return submit_command(
        args.target, args.overrides, to=args.to, on=args.on, sweeps=args.sweep, dry_run=args.dry_run,
        tiny=args.tiny, output_dir=args.output_dir, detach=args.detach, follow=args.follow,
        cancel=args.cancel, as_json=args.json,
    )  # fmt: skip


def _dispatch_run(args: argparse.Namespace) -> Outcome:
    from launcher.execute.signals import ended_by_signals

    with ended_by_signals():
        from launcher.commands.run import run_command

        return run_command(
            args.recipe, args.overrides, on=args.on, dry_run=args.dry_run, tiny=args.tiny,
            resume=args.resume, output_dir=args.output_dir, as_json=args.json,
            node_rank=args.node_rank, master_addr=args.master_addr, command=args.words,
        )  # fmt: skip


def _dispatch_rehearsal(args: argparse.Namespace) -> Outcome:
    from launcher.execute.signals import ended_by_signals

    with ended_by_signals():
        from launcher.commands.rehearse import rehearse_command

        return rehearse_command(
            args.recipe, args.overrides, on=args.on, seconds=args.seconds, output_dir=args.output_dir,
            as_json=args.json, node_rank=args.node_rank, master_addr=args.master_addr, command=args.words,
        )  # fmt: skip


def _dispatch_results(args: argparse.Namespace) -> Outcome:
    """The commands that take a run directory and what lies in it; the same rule for imports."""
    match args.command:
        case "merge":
            from launcher.commands.merge import merge_command

            return merge_command(
                args.run_dir, args.output, args.dtype, args.push, args.checkpoint, allow_code=args.allow_code
            )
        case "eval":
            from launcher.commands.eval import eval_command

            return eval_command(
                args.run_dir, args.checkpoint, args.data, args.output, allow_code=args.allow_code
            )
        case "generate":
            from launcher.commands.generate import generate_command

            return generate_command(
                args.run_dir, args.prompt, args.max_new_tokens, checkpoint=args.checkpoint,
                interactive=args.interactive, as_json=args.json, allow_code=args.allow_code,
            )  # fmt: skip
        case "report":
            from launcher.commands.report import report_command

            return report_command(args.paths, args.output)
        case _:
            return _dispatch_knowledge(args)


def _dispatch_knowledge(args: argparse.Namespace) -> Outcome:
    """The commands that look at files and the machine, or list what is known; the same rule for imports."""
    match args.command:
        case "lint":
            from launcher.commands.lint import lint_command

            return lint_command(args.files, args.recipe, fix=args.fix)
        case "doctor":
            from launcher.commands.doctor import check_usage, doctor_command

            check_usage(args)
            if not args.rehearse:
                return doctor_command(args.recipe, args.on, args.bundle, args.overrides)
            return _dispatch_rehearsal(args)
        case "diagnose":
            from launcher.commands.diagnose import diagnose_command

            return diagnose_command(args.paths, apply=args.apply)
        case "init":
            from launcher.commands.init import init_command

            return init_command(
                args.model, args.data, args.on, args.goal,
                columns=args.columns, output=args.output, as_json=args.json,
            )  # fmt: skip
        case "completion":
            from launcher.commands.completion import completion_command

            return completion_command(args.shell, build_parser())
        case "import":
            from launcher.commands.import_ import import_command

            return import_command(args.files, args.output, args.on)
    from launcher.commands import recipes

    match args.command:
        case "fixes":
            return recipes.fixes_command(args.id)
        case "recipes":
            return recipes.recipes_command(args.name, copy=args.copy)
        case _:
            return recipes.schema_command()


def main(argv: Sequence[str] | None = None) -> int:
    """Run any command in process and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except WrongWords as wrong:
        return _refuse_words(argv, wrong)
    if args.version or args.command is None:
        from launcher import __version__

        sys.stdout.write(f"effilaunch {__version__}\n" if args.version else parser.format_help())
        return 0 if args.version else 2
    from launcher.errors import EffilaunchError, Interrupted, Problem
    from launcher.report.outcome import emit, emit_error, silence

    args.words = argv  # as given, for the hints that repeat the command
    # pydantic scans every installed package for plugins, which costs more than planning.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        with silence() if getattr(args, "quiet", False) else contextlib.nullcontext():
            return emit(args.command, dispatch(args), as_json=args.json)
    except EffilaunchError as error:
        return emit_error(args.command, error, as_json=args.json)
    except KeyboardInterrupt:
        stopped = Interrupted(Problem("interrupted", "stopped by the user"))
        return emit_error(args.command, stopped, as_json=args.json)
    except Exception as error:  # the one place where our own bugs end
        return _report_bug(args.command, error, as_json=args.json)


def _refuse_words(argv: Sequence[str], wrong: WrongWords) -> int:
    """Say what is wrong with the command line; exit 2."""
    from launcher.errors import Problem, RecipeError
    from launcher.report.outcome import emit_error

    message, hint = wrong.args
    error = RecipeError(Problem("usage", message, hint=hint))
    return emit_error(argv[0], error, as_json="--json" in argv)


def _report_bug(command: str, error: Exception, *, as_json: bool) -> int:
    """Write the traceback to a log and say where it is; exit 70."""
    import tempfile
    import traceback

    from launcher.errors import EffilaunchError, Problem
    from launcher.report.outcome import emit_error

    text = "".join(traceback.format_exception(error))
    name: str | None = None
    hint = "please report it with this log"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="effilaunch-", suffix=".log", delete=False, encoding="utf-8"
        ) as log:
            log.write(text)
        name = log.name
    except OSError as full:
        hint = (
            f"please report it; no log of it could be written ({full.strerror}), it came from {_place(error)}"
        )
    message = f"a bug in effilaunch: {type(error).__name__}: {error}"
    problem = Problem("internal-error", message, file=name, hint=hint)
    return emit_error(command, EffilaunchError(problem), as_json=as_json)


def _place(error: Exception) -> str:
    """Where an exception was raised."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def entry() -> NoReturn:
    """The console script."""
    gc.set_threshold(BETWEEN_COLLECTIONS)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal has no letters for is no bug
            stream.reconfigure(errors="backslashreplace")
    code = main()
    if sys.argv[1:2] and sys.argv[1] in QUICK and threading.active_count() == 1:
        _leave(code)
    raise SystemExit(code)


def _leave(code: int) -> None:
    """End at once when all output is written; where it cannot be, return, for the end that reports it."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:
        return
    os._exit(code)


if __name__ == "__main__":
    entry()
