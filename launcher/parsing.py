"""The commands with their arguments. Each command's module is imported when the command is called."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from launcher import __version__

if TYPE_CHECKING:
    from launcher.report.outcome import Outcome

HARDWARE_HELP = "hardware such as 8xA100-80GB, 2x8xH100-80GB, 1x24GB, cpu or 2xcpu"
RECIPE_HELP = "a YAML file, or the name of a shipped recipe"
TINY_HELP = "rehearse with a two-layer model and generated rows"


class UsageError(Exception):
    """A wrong command line: the message and the hint, as two arguments."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError instead of exiting."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see `{self.prog} --help`")


def parse(argv: Sequence[str]) -> tuple[Command, dict[str, Any]]:
    """The command that `argv` names, and the value of each of its options.

    Raises UsageError; SystemExit (0) after --help and --version, (2) after the help that no arguments show.
    """
    command = next((command for command in COMMANDS if [command.name] == argv[:1]), None)
    if command is None:
        parser = build_parser()
        parser.parse_args(argv)
        parser.print_help()
        raise SystemExit(2)
    parser = command.fill(Parser(prog=f"effilaunch {command.name}", description=command.summary))
    options, extra = parser.parse_known_args(argv[1:])
    if extra:  # argparse takes an optional positional to be absent when an option is in front of it
        options = parser.parse_intermixed_args(argv[1:])
    return command, vars(options)


def build_parser(*, filled: bool = False) -> argparse.ArgumentParser:
    """The parser of the whole command line. filled: with the arguments of the commands."""
    parser = Parser(
        prog="effilaunch",
        description="Plan and launch Hugging Face Trainer fine-tunes from one YAML recipe.",
        epilog="`effilaunch COMMAND --help` lists the arguments of a command.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"effilaunch {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.summary, description=command.summary)
        if filled:
            command.fill(own)
    return parser


# Arguments that several commands share.


def _recipe(parser: Parser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help=RECIPE_HELP)
    _overrides(parser)


def _overrides(parser: Parser) -> None:
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
        help="override a recipe key, e.g. --set trainer.learning_rate=1e-4; may be repeated",
    )  # fmt: skip
    parser.add_argument("--on", metavar="HW", help=HARDWARE_HELP)


def _progress(parser: Parser) -> None:
    """Of commands that print while they work: they receive --json."""
    parser.add_argument("--quiet", action="store_true", help="print only errors and the path of the result")
    parser.set_defaults(as_json=False)


def _several_nodes(parser: Parser) -> None:
    """Of commands that start processes on several nodes: they receive the command line for their hints."""
    parser.add_argument(
        "--node-rank", metavar="R", type=int, help="rank of this node, if you start every node yourself"
    )
    parser.add_argument("--master-addr", metavar="HOST[:PORT]", help="address of the node with --node-rank 0")
    parser.set_defaults(command_line=())


def _experiment(parser: Parser, *, steps: int, unit: str, units: str) -> None:
    """Of `ladder` and `drill`."""
    _recipe(parser)
    _progress(parser)
    parser.add_argument("--tiny", action="store_true", help=TINY_HELP)
    parser.add_argument(
        "--steps", metavar="N", type=int, default=steps, help=f"steps of each run (default {steps})"
    )
    parser.add_argument("--only", metavar=f"{unit},…", help=f"only these {units}")
    parser.add_argument("--output-dir", metavar="DIR", help="directory of the results")


def _run_dir(parser: Parser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of a finished run")
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", help="use this folder of RUN_DIR/checkpoints instead of the result"
    )
    parser.add_argument(
        "--allow-code", action="store_true",
        help="run the Python code that the run directory of another user names",
    )  # fmt: skip


# Arguments of each command, in the order of COMMANDS.


def _init(parser: Parser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="hub id, folder, or .gguf file")
    parser.add_argument("--data", metavar="DATA", help="file, folder, glob pattern, or hub id of a dataset")
    parser.add_argument("--on", metavar="HW", help=HARDWARE_HELP)
    parser.add_argument(
        "--goal", choices=["instructions", "chat", "text", "preferences", "classify"],
        help="what the model learns from the rows",
    )  # fmt: skip
    parser.add_argument(
        "--columns", metavar="FIELD=COLUMN", action="append", default=[],
        help="name the column of a field, e.g. --columns completion=answer; history= ignores a column; "
        "may be repeated",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="the recipe (default: MODEL_GOAL.yaml)")
    parser.set_defaults(as_json=False)


def _import(parser: Parser) -> None:
    parser.add_argument(
        "files", metavar="FILE", nargs="+",
        help="config of DeepSpeed or accelerate; recipe of axolotl, LLaMA-Factory or TRL; shell file with "
        "the launch line of one of them or of a transformers example (no Python script)",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="write the recipe to this file (default: stdout)")
    parser.add_argument("--on", metavar="HW", help=HARDWARE_HELP)


def _run(parser: Parser) -> None:
    _recipe(parser)
    _progress(parser)
    parser.add_argument("--dry-run", action="store_true", help="write the run directory, start nothing")
    parser.add_argument("--tiny", action="store_true", help=f"{TINY_HELP} for four steps")
    parser.add_argument(
        "--resume", metavar="auto|PATH",
        help="continue from a checkpoint; auto: from the newest complete one, or start if there is none",
    )  # fmt: skip
    parser.add_argument("--output-dir", metavar="DIR", help="the run directory")
    _several_nodes(parser)


def _plan(parser: Parser) -> None:
    _recipe(parser)
    views = parser.add_mutually_exclusive_group()
    views.add_argument(
        "--explain", metavar="SETTING", nargs="?", const="",
        help="show where values came from: one setting, a section, or all",
    )  # fmt: skip
    parser.add_argument("--trace", action="store_true", help="trace the memory of the real model")
    views.add_argument("--search", action="store_true", help="list what fits, fastest first")
    views.add_argument(
        "--html", metavar="FILE", nargs="?", const="",
        help="write the plan as an HTML page (default: NAME-plan.html)",
    )  # fmt: skip


def _prepare(parser: Parser) -> None:
    _recipe(parser)
    _progress(parser)
    parser.add_argument("--show", metavar="N", type=int, help="show N samples with their loss mask")
    parser.add_argument("--tiny", action="store_true", help="prepare the generated rows of `run --tiny`")


def _validate(parser: Parser) -> None:
    parser.add_argument("recipes", metavar="RECIPE", nargs="+", help="YAML files or shipped recipes")


def _lint(parser: Parser) -> None:
    parser.add_argument("files", metavar="DS_CONFIG", nargs="+", help="a JSON file, or - for stdin")
    parser.add_argument(
        "--recipe", metavar="RECIPE", help="also report what contradicts the plan of this recipe"
    )
    parser.add_argument("--fix", action="store_true", help="write the corrected file to NAME.fixed.json")


def _doctor(parser: Parser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help=RECIPE_HELP)
    _overrides(parser)
    parser.add_argument(
        "--bundle", metavar="FILE", nargs="?", const="", help="write a redacted report for a bug tracker"
    )
    parser.add_argument(
        "--rehearse", action="store_true",
        help="start the processes of the run and measure all-reduce, links and a save instead of training",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", metavar="N", type=float, help="duration of all-reduce with --rehearse (default 20)"
    )
    parser.add_argument("--output-dir", metavar="DIR", help="directory of the rehearsal")
    _several_nodes(parser)
    parser.set_defaults(as_json=False)


def _diagnose(parser: Parser) -> None:
    parser.add_argument(
        "paths", metavar="RUN_DIR|LOG", nargs="+", help="run directories, logs, or - for stdin"
    )
    parser.add_argument("--apply", action="store_true", help="write the fixed recipe to NAME.mended.yaml")


def _estimate(parser: Parser) -> None:
    parser.add_argument("target", metavar="RECIPE|MODEL", help="a recipe, or hub id or folder of a model")
    parser.add_argument("--on", metavar="HW", action="append", default=[], help=HARDWARE_HELP)
    parser.add_argument(
        "--tensor-parallel", metavar="N", type=int, default=1, help="devices that share each weight matrix"
    )
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
        help="override a key of the recipe; may be repeated",
    )  # fmt: skip


def _ladder(parser: Parser) -> None:
    _experiment(parser, steps=3, unit="RUNG", units="rungs")


def _submit(parser: Parser) -> None:
    parser.add_argument(
        "target", metavar="RECIPE|RUN_DIR", help="a recipe; with --follow or --cancel: what was submitted"
    )
    _overrides(parser)
    _progress(parser)
    parser.add_argument("--to", choices=["slurm"], default="slurm", help="the scheduler")
    parser.add_argument(
        "--sweep", metavar="KEY=A,B", action="append", default=[], dest="sweeps",
        help="submit one job per value; several sweeps: one per combination",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help=f"{TINY_HELP} on one node")
    parser.add_argument("--output-dir", metavar="DIR", help="directory of the run or sweep")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="show and check the scripts, submit nothing")
    what.add_argument("--detach", action="store_true", help="submit and return")
    what.add_argument("--follow", action="store_true", help="follow what was submitted")
    what.add_argument("--cancel", action="store_true", help="cancel what was submitted")


def _drill(parser: Parser) -> None:
    _experiment(parser, steps=12, unit="FAULT", units="faults")


def _report(parser: Parser) -> None:
    parser.add_argument("paths", metavar="RUN_DIR", nargs="+", help="run directories; several are compared")
    parser.add_argument(
        "--output", metavar="FILE",
        help="a new file (default: RUN_DIR/report.html; for several runs a file in the current folder)",
    )  # fmt: skip


def _eval(parser: Parser) -> None:
    _run_dir(parser)
    parser.add_argument("--data", metavar="FILE", help="rows to use instead of the held-out ones")
    parser.add_argument("--output", metavar="FILE", help="also write the numbers as JSON")


def _generate(parser: Parser) -> None:
    _run_dir(parser)
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?",
        help="the prompt (for image classification: an image file; default: stdin)",
    )  # fmt: skip
    parser.add_argument("-i", "--interactive", action="store_true", help="chat at the terminal")
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=64, help="longest answer (default 64)"
    )
    parser.set_defaults(as_json=False)


def _merge(parser: Parser) -> None:
    _run_dir(parser)
    parser.add_argument(
        "--output", metavar="DIR", help="folder of the merged model (default: RUN_DIR/merged)"
    )
    parser.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
        help="dtype of the written weights (default: that of the base checkpoint)",
    )  # fmt: skip
    parser.add_argument(
        "--push", metavar="REPO", nargs="?", const="",
        help="push to the hub, private if REPO is new (default: hub_model_id of the recipe)",
    )  # fmt: skip


def _fixes(parser: Parser) -> None:
    parser.add_argument("id", metavar="ID", nargs="?", help="show one fix with its reason")


def _recipes(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="print one recipe")
    parser.add_argument("--copy", action="store_true", help="copy it to the current folder")


def _completion(parser: Parser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="the shell")


class Command(NamedTuple):  # a dataclass would cost `--help` 10 ms
    """A command of the command line."""

    name: str
    summary: str
    arguments: Callable[[Parser], None]
    module: str = ""
    """Where NAME_command is, if not in launcher.commands.NAME."""

    def fill(self, parser: Parser) -> Parser:
        """The same parser, with the arguments of the command."""
        self.arguments(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        return parser

    def function(self) -> Callable[..., Outcome]:
        """NAME_command, which takes the options by name; its module is imported here."""
        module = importlib.import_module(self.module or f"launcher.commands.{self.name}")
        function: Callable[..., Outcome] = getattr(module, f"{self.name}_command")
        return function


COMMANDS = (
    Command("init", "ask four questions and write a recipe", _init, "launcher.commands.init"),
    Command("import", "convert files of other tools to a recipe", _import, "launcher.commands.import_"),
    Command("run", "plan, train and report", _run),
    Command("plan", "show the whole plan without using a device", _plan),
    Command("prepare", "tokenise and cache the data of a recipe", _prepare),
    Command("validate", "list all problems of recipes", _validate),
    Command("lint", "find mistakes in DeepSpeed configs", _lint),
    Command("doctor", "check this machine, and whether it can run a recipe", _doctor),
    Command("diagnose", "explain why a run failed, and what to change", _diagnose),
    Command("estimate", "memory by strategy and device", _estimate),
    Command("ladder", "measure the memory of each strategy beside its estimate", _ladder),
    Command("submit", "submit a recipe to a scheduler", _submit, "launcher.commands.submitting"),
    Command("drill", "kill and resume a short run and compare its losses", _drill),
    Command("report", "write runs as one HTML page", _report),
    Command("eval", "evaluate the result of a run", _eval),
    Command("generate", "try the result of a run", _generate),
    Command("merge", "merge an adapter into the base weights, push to the hub", _merge),
    Command("fixes", "list the known fixes", _fixes),
    Command("recipes", "list the shipped recipes", _recipes),
    Command("schema", "print the JSON Schema of recipes", lambda parser: None),
    Command("completion", "print the script that completes commands in a shell", _completion),
)
