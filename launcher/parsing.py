"""The words of the command line: which commands there are, and what each takes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, cast

HARDWARE_HELP = "hardware such as 8xA100-80GB, 2x8xH100-80GB, 1x24GB, cpu or 2xcpu"


class WrongWords(Exception):
    """What argparse says of the words; turned into an error of ours where one is printed."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are answered like any other: in the project's form, or as JSON."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=_formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise WrongWords(message, f"see `{self.prog} --help`")


class _CommandParser(Parser):
    """Of one command: its options may stand anywhere, also between a run directory and a prompt."""

    _intermixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; what it has left over is read again, with all options before all words.

        argparse takes an optional word to be absent as soon as an option stands before it.
        """
        found, extra = super().parse_known_args(args, namespace)
        if self._intermixed or not extra:
            return found, extra
        self._intermixed = True  # the second reading comes through here, too
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixed = False


def _formatter(prog: str) -> argparse.HelpFormatter:
    """With the terminal's width, which argparse would ask of shutil and its decompressors."""
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 0
    if width <= 0:
        try:
            width = os.get_terminal_size(sys.__stdout__.fileno()).columns  # type: ignore[union-attr]
        except (AttributeError, ValueError, OSError):
            width = 80
    formatter = argparse.HelpFormatter(prog, width=(width or 80) - 2)
    # argparse counts the indent of a list of commands once too little: its longest would stand alone.
    formatter._action_max_length = len("    completion")
    return formatter


class _Deferred:
    """The parser of a command, made when it is asked for anything: a call needs one of them all."""

    def __init__(self, *, fill: Callable[[argparse.ArgumentParser], None], **settings: Any) -> None:
        self._fill, self._settings = fill, settings
        self._parser: Parser | None = None

    def __getattr__(self, name: str) -> Any:
        if self._parser is None:
            self._parser = _CommandParser(**self._settings)
            self._parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
            self._fill(self._parser)
        return getattr(self._parser, name)

    def _check_help(self, action: argparse.Action) -> None:
        """Nothing: `add_parser` of Python 3.14 formats each summary at once, which would make all parsers."""


def build_parser() -> argparse.ArgumentParser:
    """All commands and options."""
    parser = Parser(
        prog="effilaunch",
        description="Plans and launches Hugging Face Trainer fine-tunes from one YAML recipe.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=cast(Any, _Deferred))
    for name, summary, fill in COMMANDS:
        commands.add_parser(name, help=summary, description=summary, fill=fill)
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file or a shipped recipe's name")


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors and the result's path")


def _add_on(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--on", metavar="HW", help=HARDWARE_HELP)


def _add_run(run: argparse.ArgumentParser) -> None:
    _add_recipe(run)
    _add_overrides(run)
    _add_on(run)
    _add_quiet(run)
    run.add_argument("--dry-run", action="store_true", help="write the run directory, start nothing")
    run.add_argument("--tiny", action="store_true", help="rehearse: narrow model, generated rows, four steps")
    run.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="continue from a checkpoint; auto: from the newest whole one, else begin",
    )
    run.add_argument("--output-dir", metavar="D", help="the run directory")
    _add_rendezvous(run)


def _add_plan(plan: argparse.ArgumentParser) -> None:
    _add_recipe(plan)
    _add_overrides(plan)
    _add_on(plan)
    views = plan.add_mutually_exclusive_group()
    views.add_argument(
        "--explain", metavar="PATH", nargs="?", const="",
        help="where values came from: one, a section, or all of them",
    )  # fmt: skip
    plan.add_argument("--trace", action="store_true", help="trace the real model's memory in a child process")
    views.add_argument("--search", action="store_true", help="all configurations that fit, fastest first")
    views.add_argument(
        "--html", metavar="FILE", nargs="?", const="",
        help="write the plan as a page (by default NAME-plan.html here)",
    )  # fmt: skip


def _add_prepare(prepare: argparse.ArgumentParser) -> None:
    _add_recipe(prepare)
    _add_overrides(prepare)
    _add_on(prepare)
    _add_quiet(prepare)
    prepare.add_argument("--show", metavar="N", type=int, help="show N samples with their loss mask")
    prepare.add_argument("--tiny", action="store_true", help="the generated rows of a rehearsal")


def _add_submit(submit: argparse.ArgumentParser) -> None:
    submit.add_argument(
        "target", metavar="RECIPE|RUN_DIR", help="a recipe; with --follow or --cancel what was submitted"
    )
    from launcher.schedulers import QUEUES

    submit.add_argument("--to", choices=QUEUES, default=QUEUES[0], help="which scheduler")
    _add_overrides(submit)
    _add_on(submit)
    _add_quiet(submit)
    submit.add_argument(
        "--sweep", metavar="K=A,B", action="append", default=[], help="a job for each value; several: product"
    )
    submit.add_argument(
        "--tiny", action="store_true", help="rehearse: narrow model, generated rows, four steps, one node"
    )
    submit.add_argument("--output-dir", metavar="D", help="the run directory, or the sweep's")
    what = submit.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="show and check the scripts, submit nothing")
    what.add_argument("--detach", action="store_true", help="submit, and do not follow")
    what.add_argument("--follow", action="store_true", help="follow what was submitted")
    what.add_argument("--cancel", action="store_true", help="end what was submitted, for good")


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument("recipe", metavar="RECIPE", nargs="?", help="a YAML file or a shipped recipe's name")
    _add_on(doctor)
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


def _add_validate(validate: argparse.ArgumentParser) -> None:
    validate.add_argument("recipes", metavar="RECIPE", nargs="+", help="YAML files or shipped recipes' names")


def _add_lint(lint: argparse.ArgumentParser) -> None:
    lint.add_argument("files", metavar="DS_CONFIG", nargs="+", help="a JSON file, or - for stdin")
    lint.add_argument("--recipe", metavar="R", help="also what fights the plan of this recipe")
    lint.add_argument("--fix", action="store_true", help="write NAME.fixed.json beside each file")


def _add_estimate(estimate: argparse.ArgumentParser) -> None:
    estimate.add_argument("target", metavar="RECIPE|MODEL", help="a recipe, or a model's hub id or folder")
    estimate.add_argument("--on", metavar="HW", action="append", default=[], help=HARDWARE_HELP)
    estimate.add_argument(
        "--tensor-parallel", metavar="N", type=int, default=1, help="devices that share each matrix"
    )
    _add_overrides(estimate)


def _add_ladder(ladder: argparse.ArgumentParser) -> None:
    _add_recipe(ladder)
    _add_overrides(ladder)
    _add_on(ladder)
    _add_quiet(ladder)
    ladder.add_argument("--tiny", action="store_true", help="rehearse: narrow model, generated rows")
    ladder.add_argument("--steps", metavar="N", type=int, default=3, help="steps of each rung (default 3)")
    ladder.add_argument("--only", metavar="RUNG,…", help="only these rungs")
    ladder.add_argument("--output-dir", metavar="D", help="the ladder's directory")


def _add_drill(drill: argparse.ArgumentParser) -> None:
    _add_recipe(drill)
    _add_overrides(drill)
    _add_on(drill)
    _add_quiet(drill)
    drill.add_argument("--tiny", action="store_true", help="rehearse: narrow model, generated rows")
    drill.add_argument("--steps", metavar="N", type=int, default=12, help="steps of each run (default 12)")
    drill.add_argument("--only", metavar="FAULT,…", help="only these faults")
    drill.add_argument("--output-dir", metavar="D", help="the drill's directory")


def _add_fixes(fixes: argparse.ArgumentParser) -> None:
    fixes.add_argument("id", metavar="ID", nargs="?", help="one of them, with its reason")


def _add_recipes(recipes: argparse.ArgumentParser) -> None:
    recipes.add_argument("name", metavar="NAME", nargs="?", help="one of them, as text")
    recipes.add_argument("--copy", action="store_true", help="write it to the current folder")


def _add_diagnose(diagnose: argparse.ArgumentParser) -> None:
    diagnose.add_argument(
        "paths", metavar="RUN_DIR|LOG", nargs="+", help="a run directory, logs, or - for stdin"
    )
    diagnose.add_argument("--apply", action="store_true", help="write NAME.fixed.yaml beside the recipe")


def _add_generate(generate: argparse.ArgumentParser) -> None:
    generate.add_argument("run_dir", metavar="RUN_DIR")
    generate.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        help="a picture's file for image classification; else from stdin",
    )
    _add_checkpoint(generate)
    generate.add_argument("-i", "--interactive", action="store_true", help="talk with it")
    generate.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=64, help="of an answer (default 64)"
    )
    _add_code(generate)


def _add_init(init: argparse.ArgumentParser) -> None:
    init.add_argument("--model", metavar="MODEL", help="a model of the hub, a folder, or a .gguf file")
    init.add_argument("--data", metavar="DATA", help="a file, folder or pattern, or a data set of the hub")
    _add_on(init)
    init.add_argument(
        "--goal", choices=["instructions", "chat", "text", "preferences", "classify"],
        help="what the model shall learn from the rows",
    )  # fmt: skip
    init.add_argument(
        "--columns", metavar="FIELD=COLUMN", action="append", default=[],
        help="a column that is not called like its field, e.g. --columns completion=answer; "
        "history= leaves a column out",
    )  # fmt: skip
    init.add_argument("--output", metavar="FILE", help="the recipe; default MODEL_GOAL.yaml, here")


def _add_completion(completion: argparse.ArgumentParser) -> None:
    completion.add_argument("shell", choices=["bash", "zsh", "fish"], help="for which shell")


def _add_merge(merge: argparse.ArgumentParser) -> None:
    merge.add_argument("run_dir", metavar="RUN_DIR")
    _add_checkpoint(merge)
    merge.add_argument("--output", metavar="D", help="the merged model's folder (default RUN_DIR/merged)")
    merge.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
        help="of the written weights (default: the base checkpoint's own)",
    )  # fmt: skip
    merge.add_argument(
        "--push", metavar="REPO", nargs="?", const="",
        help="send it to the hub, private unless REPO is there already (default: the recipe's hub_model_id)",
    )  # fmt: skip
    _add_code(merge)


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("paths", metavar="RUN_DIR", nargs="+", help="a run directory; several are compared")
    report.add_argument(
        "--output",
        metavar="FILE",
        help="a new file (by default RUN_DIR/report.html, or one here for several)",
    )


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", metavar="FILE", nargs="+",
        help="a config of DeepSpeed or accelerate, a recipe of axolotl, LLaMA-Factory or TRL, a shell file "
        "with the launch line of one of them or of an example of transformers; no Python script",
    )  # fmt: skip
    parser.add_argument("--output", metavar="RECIPE", help="write it there; without: to stdout")
    _add_on(parser)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="of RUN_DIR/checkpoints, in the place of the result"
    )


def _add_eval(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument("run_dir", metavar="RUN_DIR")
    _add_checkpoint(evaluate)
    evaluate.add_argument("--data", metavar="FILE", help="rows in the place of those that were held out")
    evaluate.add_argument("--output", metavar="FILE", help="write the numbers as JSON, too")
    _add_code(evaluate)


def _add_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-code", action="store_true",
        help="run the Python code that a run directory of another user names",
    )  # fmt: skip


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


COMMANDS: tuple[tuple[str, str, Callable[[argparse.ArgumentParser], None]], ...] = (
    ("init", "ask four questions, look at the data, write a recipe that plans", _add_init),
    ("import", "other tools' files as a recipe, with what it cannot say", _add_import),
    ("run", "plan, write the run directory, train, report", _add_run),
    ("plan", "show the whole plan without touching a device", _add_plan),
    ("prepare", "tokenise and cache a recipe's data, before the run", _add_prepare),
    ("validate", "all problems of recipes", _add_validate),
    ("lint", "mistakes in DeepSpeed configs, with file, line and column", _add_lint),
    ("doctor", "this machine; can it run a recipe", _add_doctor),
    ("diagnose", "what a failed run died of, and what to change in its recipe", _add_diagnose),
    ("estimate", "memory by component over strategies and devices", _add_estimate),
    ("ladder", "climb the memory ladder: predicted beside measured, rung by rung", _add_ladder),
    ("submit", "submit a recipe to Slurm, follow it, report", _add_submit),
    ("drill", "kill and resume a short real run, and prove that its loss goes on", _add_drill),
    ("report", "a run as one HTML page, or several runs compared", _add_report),
    ("eval", "loss, perplexity and accuracy of the result of a run", _add_eval),
    ("generate", "try the result of a run", _add_generate),
    ("merge", "a run's adapter into its base's weights, and to the hub", _add_merge),
    ("fixes", "the known fixes", _add_fixes),
    ("recipes", "the shipped recipes", _add_recipes),
    ("schema", "the recipe's JSON Schema", lambda schema: None),
    ("completion", "a script that completes these commands in a shell", _add_completion),
)
"""Word, what `--help` says of it, and its arguments."""
