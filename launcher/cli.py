"""The command line: thin. Each command imports what it needs when it is called."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from launcher.report.outcome import Outcome

HARDWARE_HELP = "hardware such as 8xA100-80GB, 2x8xH100-80GB, 1x24GB, cpu or 2xcpu"


class Parser(argparse.ArgumentParser):
    """argparse whose errors are answered like any other: in the project's form, or as JSON."""

    def error(self, message: str) -> NoReturn:
        from launcher.errors import Problem, RecipeError

        raise RecipeError(Problem("usage", message, hint=f"see `{self.prog} --help`"))


def build_parser() -> argparse.ArgumentParser:
    """All commands and options."""
    parser = Parser(
        prog="effilaunch",
        description="Plans and launches Hugging Face Trainer fine-tunes from one YAML recipe.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def add(name: str, summary: str, *, json_output: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if json_output:
            sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
        return sub

    run = add("run", "plan, write the run directory, train, report")
    plan = add("plan", "show the whole plan without touching a device")
    for sub in (run, plan):
        sub.add_argument("recipe", metavar="RECIPE", help="a YAML file or a shipped recipe's name")
        _add_overrides(sub)
        sub.add_argument("--on", metavar="HW", help=HARDWARE_HELP)
    _add_run(run)
    views = plan.add_mutually_exclusive_group()
    views.add_argument(
        "--explain", metavar="PATH", nargs="?", const="",
        help="where values came from: one, a section, or all of them",
    )  # fmt: skip
    plan.add_argument("--trace", action="store_true", help="trace the real model's memory in a child process")
    views.add_argument("--search", action="store_true", help="all configurations that fit, fastest first")
    prepare = add("prepare", "tokenise and cache a recipe's data, before the run")
    prepare.add_argument("recipe", metavar="RECIPE", help="a YAML file or a shipped recipe's name")
    _add_overrides(prepare)
    prepare.add_argument("--on", metavar="HW", help=HARDWARE_HELP)
    prepare.add_argument("--show", metavar="N", type=int, help="show N samples with their loss mask")
    prepare.add_argument("--tiny", action="store_true", help="the generated rows of a rehearsal")
    _add_submit(add)
    _add_checks(add)
    _add_memory(add)
    _add_catalogue(add)
    _add_doctor(add)
    return parser


def _add_submit(add: Callable[..., argparse.ArgumentParser]) -> None:
    """A recipe as jobs of a Slurm."""
    submit = add("submit", "submit a recipe to Slurm, follow it, report")
    submit.add_argument(
        "target", metavar="RECIPE|RUN_DIR", help="a recipe; with --follow or --cancel what was submitted"
    )
    submit.add_argument("--to", choices=["slurm"], default="slurm", help="which scheduler")
    _add_overrides(submit)
    submit.add_argument("--on", metavar="HW", help=HARDWARE_HELP)
    submit.add_argument(
        "--sweep", metavar="K=A,B", action="append", default=[], help="a job for each value; several: product"
    )
    submit.add_argument("--tiny", action="store_true", help="rehearse: narrow model, four steps, one node")
    submit.add_argument("--output-dir", metavar="D", help="the run directory, or the sweep's")
    what = submit.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="show and check the scripts, submit nothing")
    what.add_argument("--detach", action="store_true", help="submit, and do not follow")
    what.add_argument("--follow", action="store_true", help="follow what was submitted")
    what.add_argument("--cancel", action="store_true", help="end what was submitted, for good")


def _add_run(run: argparse.ArgumentParser) -> None:
    """What is said of a run and of no plan."""
    run.add_argument("--dry-run", action="store_true", help="write the run directory, start nothing")
    run.add_argument("--tiny", action="store_true", help="rehearse: narrow model, four steps")
    run.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="continue from a checkpoint; auto: from the newest whole one, else begin",
    )
    run.add_argument("--output-dir", metavar="D", help="the run directory")
    _add_rendezvous(run)


def _add_doctor(add: Callable[..., argparse.ArgumentParser]) -> None:
    """What this machine can do."""
    doctor = add("doctor", "this machine; can it run a recipe")
    doctor.add_argument("recipe", metavar="RECIPE", nargs="?", help="a YAML file or a shipped recipe's name")
    doctor.add_argument("--on", metavar="HW", help=HARDWARE_HELP)
    doctor.add_argument(
        "--bundle", metavar="FILE", nargs="?", const="", help="write a redacted report for a bug tracker"
    )
    doctor.add_argument(
        "--rehearse", action="store_true",
        help="start the recipe's run with measurements in the place of training: all-reduce, links, a save",
    )  # fmt: skip
    doctor.add_argument(
        "--seconds", metavar="N", type=float, help="of all-reduce in a rehearsal (default 20)"
    )
    doctor.add_argument("--output-dir", metavar="D", help="the rehearsal's directory")
    _add_overrides(doctor)
    _add_rendezvous(doctor)


def _add_checks(add: Callable[..., argparse.ArgumentParser]) -> None:
    """What is wrong with files."""
    validate = add("validate", "all problems of recipes")
    validate.add_argument("recipes", metavar="RECIPE", nargs="+")
    lint = add("lint", "mistakes in DeepSpeed configs, with file, line and column")
    lint.add_argument("files", metavar="DS_CONFIG", nargs="+", help="a JSON file, or - for stdin")
    lint.add_argument("--recipe", metavar="R", help="also what fights the plan of this recipe")
    lint.add_argument("--fix", action="store_true", help="write NAME.fixed.json beside each file")


def _add_memory(add: Callable[..., argparse.ArgumentParser]) -> None:
    """What a fine-tune takes, computed and measured; and what it survives."""
    estimate = add("estimate", "memory by component over strategies and devices")
    estimate.add_argument("target", metavar="RECIPE|MODEL")
    estimate.add_argument("--on", metavar="HW", action="append", default=[], help=HARDWARE_HELP)
    estimate.add_argument(
        "--tensor-parallel", metavar="N", type=int, default=1, help="devices that share each matrix"
    )
    _add_overrides(estimate)
    ladder = add("ladder", "climb the memory ladder: predicted beside measured, rung by rung")
    ladder.add_argument("recipe", metavar="RECIPE", help="a YAML file or a shipped recipe's name")
    _add_overrides(ladder)
    ladder.add_argument("--on", metavar="HW", help=HARDWARE_HELP)
    ladder.add_argument("--tiny", action="store_true", help="rehearse: narrow model, generated rows")
    ladder.add_argument("--steps", metavar="N", type=int, default=3, help="steps of each rung (default 3)")
    ladder.add_argument("--only", metavar="RUNG,…", help="only these rungs")
    ladder.add_argument("--output-dir", metavar="D", help="the ladder's directory")
    drill = add("drill", "kill and resume a short real run, and prove that its loss goes on")
    drill.add_argument("recipe", metavar="RECIPE", help="a YAML file or a shipped recipe's name")
    _add_overrides(drill)
    drill.add_argument("--on", metavar="HW", help=HARDWARE_HELP)
    drill.add_argument("--tiny", action="store_true", help="rehearse: narrow model, generated rows")
    drill.add_argument("--steps", metavar="N", type=int, default=12, help="steps of each run (default 12)")
    drill.add_argument("--only", metavar="FAULT,…", help="only these faults")
    drill.add_argument("--output-dir", metavar="D", help="the drill's directory")


def _add_catalogue(add: Callable[..., argparse.ArgumentParser]) -> None:
    """What is shipped, and what a run made."""
    add("fixes", "the known fixes").add_argument("id", metavar="ID", nargs="?")
    recipes = add("recipes", "the shipped recipes")
    recipes.add_argument("name", metavar="NAME", nargs="?")
    recipes.add_argument("--copy", action="store_true", help="write it to the current folder")
    add("schema", "the recipe's JSON Schema")
    diagnose = add("diagnose", "what a failed run died of, and what to change in its recipe")
    diagnose.add_argument(
        "paths", metavar="RUN_DIR|LOG", nargs="+", help="a run directory, logs, or - for stdin"
    )
    diagnose.add_argument("--apply", action="store_true", help="write NAME.mended.yaml beside the recipe")
    generate = add("generate", "try the result of a run")
    generate.add_argument("run_dir", metavar="RUN_DIR")
    generate.add_argument("prompt", metavar="PROMPT")
    generate.add_argument("--max-new-tokens", type=int, default=64)


def _add_rendezvous(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--node-rank", metavar="R", type=int, help="this machine's number, where each is started by hand"
    )
    parser.add_argument("--master-addr", metavar="HOST[:PORT]", help="the machine with --node-rank 0")


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", metavar="K=V", action="append", default=[], dest="overrides",
        help="override a recipe key, e.g. --set trainer.learning_rate=1e-4",
    )  # fmt: skip


def dispatch(args: argparse.Namespace) -> Outcome:
    """Call the command; the imports stay inside so that --help needs none of them."""
    match args.command:
        case "run":
            return _dispatch_run(args)
        case "plan":
            from launcher.commands.planning import plan_command

            return plan_command(
                args.recipe, args.overrides, args.on, args.explain, ranking=args.search, trace=args.trace
            )
        case "prepare":
            from launcher.commands.preparing import prepare_command

            return prepare_command(
                args.recipe, args.overrides, on=args.on, show=args.show, tiny=args.tiny, as_json=args.json
            )
        case "validate":
            from launcher.commands.planning import validate_command

            return validate_command(args.recipes)
        case "estimate":
            from launcher.commands.estimating import estimate_command

            return estimate_command(args.target, args.on, args.overrides, args.tensor_parallel)
        case "ladder":
            from launcher.commands.laddering import ladder_command

            return ladder_command(
                args.recipe, args.overrides, on=args.on, tiny=args.tiny, steps=args.steps,
                only=args.only, output_dir=args.output_dir, as_json=args.json,
            )  # fmt: skip
        case "drill":
            from launcher.commands.drilling import drill_command

            return drill_command(
                args.recipe, args.overrides, on=args.on, tiny=args.tiny, steps=args.steps,
                only=args.only, output_dir=args.output_dir, as_json=args.json,
            )  # fmt: skip
        case "generate":
            from launcher.commands.running import generate_command

            return generate_command(args.run_dir, args.prompt, args.max_new_tokens)
        case "submit":
            return _submit(args)
        case _:
            return _dispatch_knowledge(args)


def _submit(args: argparse.Namespace) -> Outcome:
    from launcher.commands.submitting import submit_command

    return submit_command(
        args.target, args.overrides, on=args.on, sweeps=args.sweep, dry_run=args.dry_run,
        tiny=args.tiny, output_dir=args.output_dir, detach=args.detach, follow=args.follow,
        cancel=args.cancel, as_json=args.json,
    )  # fmt: skip


def _dispatch_run(args: argparse.Namespace) -> Outcome:
    from launcher.execute.signals import ended_by_signals

    with ended_by_signals():
        from launcher.commands.running import run_command

        return run_command(
            args.recipe, args.overrides, on=args.on, dry_run=args.dry_run, tiny=args.tiny,
            resume=args.resume, output_dir=args.output_dir, as_json=args.json,
            node_rank=args.node_rank, master_addr=args.master_addr, command=args.words,
        )  # fmt: skip


def _dispatch_rehearsal(args: argparse.Namespace) -> Outcome:
    from launcher.execute.signals import ended_by_signals

    with ended_by_signals():
        from launcher.commands.rehearsing import rehearse_command

        return rehearse_command(
            args.recipe, args.overrides, on=args.on, seconds=args.seconds, output_dir=args.output_dir,
            as_json=args.json, node_rank=args.node_rank, master_addr=args.master_addr, command=args.words,
        )  # fmt: skip


def _dispatch_knowledge(args: argparse.Namespace) -> Outcome:
    """The commands that look at files and the machine, or list what is known; the same rule for imports."""
    match args.command:
        case "lint":
            from launcher.commands.linting import lint_command

            return lint_command(args.files, args.recipe, fix=args.fix)
        case "doctor":
            from launcher.commands.doctoring import check_usage, doctor_command

            check_usage(args)
            if not args.rehearse:
                return doctor_command(args.recipe, args.on, args.bundle, args.overrides)
            return _dispatch_rehearsal(args)
        case "diagnose":
            from launcher.commands.diagnosing import diagnose_command

            return diagnose_command(args.paths, apply=args.apply)
    from launcher.commands import catalogue

    match args.command:
        case "fixes":
            return catalogue.fixes_command(args.id)
        case "recipes":
            return catalogue.recipes_command(args.name, copy=args.copy)
        case _:
            return catalogue.schema_command()


def main(argv: Sequence[str] | None = None) -> int:
    """Run any command in process and return its exit code."""
    from launcher.errors import EffilaunchError, Interrupted, Problem, RecipeError
    from launcher.report.outcome import emit, emit_error

    argv = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except RecipeError as error:
        return emit_error(argv[0], error, as_json="--json" in argv)
    if args.version or args.command is None:
        from launcher import __version__

        sys.stdout.write(f"effilaunch {__version__}\n" if args.version else parser.format_help())
        return 0 if args.version else 2
    args.words = argv  # as given, for the hints that repeat the command
    # pydantic scans every installed package for plugins, which costs more than planning.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        return emit(args.command, dispatch(args), as_json=args.json)
    except EffilaunchError as error:
        return emit_error(args.command, error, as_json=args.json)
    except KeyboardInterrupt:
        stopped = Interrupted(Problem("interrupted", "stopped by the user"))
        return emit_error(args.command, stopped, as_json=args.json)
    except Exception as error:  # the one place where our own bugs end
        return _report_bug(args.command, error, as_json=args.json)


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal has no letters for is no bug
            stream.reconfigure(errors="backslashreplace")
    raise SystemExit(main())


if __name__ == "__main__":
    entry()
