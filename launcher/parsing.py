"""The commands with their arguments. Each command's module is imported when the command is called."""

from __future__ import annotations

import argparse
import importlib
import itertools
import keyword
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from launcher import __version__
from launcher.schedulers import QUEUES

if TYPE_CHECKING:
    from launcher.report.outcome import Outcome

HARDWARE_HELP = "hardware such as 8xA100-80GB, 2x8xH100-80GB, 1x24GB, cpu or 2xcpu"
RECIPE_HELP = "a YAML file, or the name of a shipped recipe"
GOALS = (
    "instructions", "chat", "text", "preferences", "classify", "images", "feedback", "reward-model",
    "reasoning", "embeddings", "ranking",
)  # fmt: skip
"""Those of planner/starting.py, which is not imported here: it would slow every command."""
EXPORTS = ("transformers", "vllm", "ollama", "gguf")
"""Names of TARGETS in train/exports/export.py, which imports torch."""
QUANTIZED = (
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1",
    "q4_0", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k", "iq4_nl", "iq4_xs",
)  # fmt: skip
"""Types of weights that llama.cpp's programs write without calibration data."""
TINY_HELP = "rehearse with a two-layer model and generated rows"


class UsageError(Exception):
    """A wrong command line: the message and the hint, as two arguments."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError instead of exiting."""

    hint = ""
    """What the user probably meant; the next error says it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, self.hint or f"see `{self.prog} --help`")


def parse(argv: Sequence[str]) -> tuple[Command, dict[str, Any]]:
    """The command that `argv` names, and the value of each of its options.

    Raises UsageError; SystemExit (0) after --help and --version, (2) after the help that no arguments show.
    """
    command = next((command for command in COMMANDS if [command.name] == argv[:1]), None)
    if command is not None and "--" in argv and (own := OWN.get(command.name)) is not None:
        at = argv.index("--")
        command, options = parse_options(own, argv[1:at])
        return command, {**options, "own": argv[at + 1 :]}
    if command is None:
        if argv and not argv[0].startswith("-"):
            raise UsageError(f"no command {argv[0]!r}", _command_hint(argv[0]))
        parser = build_parser()
        parser.parse_args(argv)
        parser.print_help()
        raise SystemExit(2)
    return parse_options(command, argv[1:])


def parse_options(command: Command, words: Sequence[str]) -> tuple[Command, dict[str, Any]]:
    """The command, and the value of each of its options. Raises as `parse`."""
    parser = command.fill(Parser(prog=f"effilaunch {command.name}", description=command.summary))
    options, extra = parser.parse_known_args(words)
    if extra:  # argparse takes an optional positional to be absent when an option is in front of it
        parser.hint = _setting_hint(extra) if hasattr(options, "overrides") else ""
        options = parser.parse_intermixed_args(words)
    return command, vars(options)


OTHER_WORDS = {
    "run": ("train", "start", "launch", "sft", "finetune", "fine-tune", "resume"),
    "plan": ("dry-run", "show", "search"),
    "validate": ("check",),
    "import": ("convert",),
    "eval": ("evaluate", "test"),
    "generate": ("chat", "predict", "infer", "inference"),
    "merge": ("push",),
    "export": ("serve", "deploy", "gguf", "vllm", "ollama"),
    "prepare": ("preprocess", "tokenize"),
    "init": ("new", "create"),
}
"""Names that other tools have for a command."""


def _command_hint(word: str) -> str:
    """The command that was probably meant."""
    import difflib

    plain = word.lower().replace("_", "-")
    meant = [name for name, words in OTHER_WORDS.items() if plain in words]
    meant = meant or difflib.get_close_matches(plain, [command.name for command in COMMANDS], 1)
    return f"did you mean `effilaunch {meant[0]}`?" if meant else "see `effilaunch --help`"


def _setting_hint(words: Sequence[str]) -> str:
    """How to set what is no option of a command but a setting of recipes, "" where no such is named."""
    from launcher.recipe.problems import setting_named

    found = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, _, value = word.removeprefix("--").partition("=")
        setting = setting_named(name) if word.startswith("--") else None
        if setting is not None:
            value = value or ("" if following.startswith("--") else following) or "VALUE"
            found.append(f"--set {shlex.quote(setting if '=' in setting else f'{setting}={value}')}")
    return f"write `{' '.join(found)}`" if found else ""


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


Argument = Callable[[Any], object]
"""Adds an argument to a parser, or to a group of arguments of which one may be given."""


class Command(NamedTuple):  # a dataclass would cost `--help` 10 ms
    """A command of the command line."""

    name: str
    summary: str
    arguments: Sequence[Argument] = ()
    module: str = ""
    """Of launcher/commands/, where it is not the name."""

    def fill(self, parser: Parser) -> Parser:
        """The same parser, with the arguments of the command."""
        for add in self.arguments:
            add(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        return parser

    def function(self) -> Callable[..., Outcome]:
        """NAME_command, which takes the options by name; its module is imported here."""
        name = self.module or (f"{self.name}_" if keyword.iskeyword(self.name) else self.name)  # import_.py
        module = importlib.import_module(f"launcher.commands.{name}")
        function: Callable[..., Outcome] = getattr(module, f"{self.module or self.name}_command")
        return function


def arg(*names: str, **settings: Any) -> Argument:
    """An argument of argparse."""
    return lambda parser: parser.add_argument(*names, **settings)


def flag(*names: str, help: str) -> Argument:
    return arg(*names, action="store_true", help=help)


def one_of(*arguments: Argument) -> Argument:
    """Arguments that exclude each other."""

    def add(parser: Any) -> None:
        group = parser.add_mutually_exclusive_group()
        for argument in arguments:
            argument(group)

    return add


def context(**values: Any) -> Argument:
    """What cli.py passes to a command besides its options: as_json, command_line."""
    return lambda parser: parser.set_defaults(**values)


# Arguments that several commands share.

ON = arg("--on", metavar="HW", help=HARDWARE_HELP)
SET = arg(
    "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
    help="override a recipe key, e.g. --set trainer.learning_rate=1e-4; may be repeated",
)  # fmt: skip
RECIPE = (arg("recipe", metavar="RECIPE", help=RECIPE_HELP), SET, ON)
PROGRESS = (
    flag("--quiet", help="print only errors and the path of the result"),
    context(as_json=False),
)
"""Of commands that print while they work."""
NODES = (
    arg("--node-rank", metavar="R", type=int, help="rank of this node, if you start every node yourself"),
    arg("--master-addr", metavar="HOST[:PORT]", help="address of the node with --node-rank 0"),
    context(command_line=()),
)
"""Of commands that start processes on several nodes: they repeat the command line in their hints."""
TINY = flag("--tiny", help=TINY_HELP)
RUN_DIR = (
    arg("run_dir", metavar="RUN_DIR", help="directory of a finished run"),
    arg(
        "--checkpoint", metavar="FOLDER", help="use this folder of RUN_DIR/checkpoints instead of the result"
    ),
    flag("--allow-code", help="run the Python code that the run directory of another user names"),
)


def _experiment(steps: int, unit: str, units: str) -> Sequence[Argument]:
    """Of `ladder` and `drill`."""
    return (
        *RECIPE,
        *PROGRESS,
        TINY,
        arg("--steps", metavar="N", type=int, default=steps, help=f"steps of each run (default {steps})"),
        arg("--only", metavar=f"{unit},…", help=f"only these {units}"),
        arg("--output-dir", metavar="DIR", help="directory of the results"),
    )


COMMANDS = (
    Command("init", "ask four questions and write a recipe", (
        arg("--model", metavar="MODEL", help="hub id, folder, or .gguf file"),
        arg("--data", metavar="DATA", help="file, folder, glob pattern, or hub id of a dataset"),
        ON,
        arg("--goal", choices=[*GOALS],
            help="what the model learns from the rows"),
        arg("--columns", metavar="FIELD=COLUMN", action="append", default=[],
            help="name the column of a field, e.g. --columns completion=answer; history= ignores a column; "
            "may be repeated"),
        arg("--output", metavar="FILE", help="the recipe (default: MODEL_GOAL.yaml)"),
        context(as_json=False),
    )),
    Command("import", "convert files of other tools to a recipe", (
        arg("files", metavar="FILE", nargs="+",
            help="config of DeepSpeed or accelerate; recipe of axolotl, LLaMA-Factory or TRL (no script)"),
        arg("--output", metavar="FILE", help="write the recipe to this file (default: stdout)"),
        ON,
    )),
    Command("run", "plan, train and report; or supervise a command of your own: run -- COMMAND", (
        *RECIPE,
        *PROGRESS,
        flag("--dry-run", help="write the run directory, start nothing"),
        flag("--serve", help="serve a page that follows the run, on this machine only, until it ends"),
        flag("--tiny", help=f"{TINY_HELP} for four steps"),
        arg("--resume", metavar="auto|PATH",
            help="continue from a checkpoint; auto: from the newest complete one, or start if there is none"),
        arg("--output-dir", metavar="DIR", help="the run directory"),
        *NODES,
    )),
    Command("plan", "show the whole plan without using a device", (
        *RECIPE,
        flag("--trace", help="trace the memory of the real model"),
        one_of(
            arg("--explain", metavar="SETTING", nargs="?", const="",
                help="show where values came from: one setting, a section, or all"),
            flag("--search", help="list what fits, fastest first"),
            arg("--html", metavar="FILE", nargs="?", const="",
                help="write the plan as an HTML page (default: NAME-plan.html)"),
            flag("--browser", help="plan in the browser: a page on this machine only, until Ctrl-C"),
        ),
        arg("--port", metavar="N", type=int, default=0,
            help="with --browser: the port (default: a free one)"),
        context(as_json=False),
    )),
    Command("prepare", "tokenise and cache the data of a recipe", (
        *RECIPE,
        *PROGRESS,
        arg("--show", metavar="N", type=int, help="show N samples with their loss mask"),
        flag("--tiny", help="prepare the generated rows of `run --tiny`"),
    )),
    Command("validate", "list all problems of recipes", (
        arg("recipes", metavar="RECIPE", nargs="+", help="YAML files or shipped recipes"),
        SET,
    )),
    Command("lint", "find mistakes in DeepSpeed configs", (
        arg("files", metavar="DS_CONFIG", nargs="+", help="a JSON file, or - for stdin"),
        arg("--recipe", metavar="RECIPE", help="also report what contradicts the plan of this recipe"),
        flag("--fix", help="write the corrected file to NAME.fixed.json"),
    )),
    Command("doctor", "check this machine, and whether it can run a recipe", (
        arg("recipe", metavar="RECIPE", nargs="?", help=RECIPE_HELP),
        SET,
        ON,
        arg("--bundle", metavar="FILE", nargs="?", const="",
            help="write a redacted report for a bug tracker"),
        flag("--rehearse", help="start the processes of the run and measure all-reduce, links and a save "
             "instead of training"),
        arg("--seconds", metavar="N", type=float, help="duration of all-reduce with --rehearse (default 20)"),
        arg("--output-dir", metavar="DIR", help="directory of the rehearsal"),
        *NODES,
        context(as_json=False),
    )),
    Command("diagnose", "explain why a run failed, and what to change", (
        arg("paths", metavar="RUN_DIR|LOG", nargs="+", help="run directories, logs, or - for stdin"),
        flag("--apply", help="write the fixed recipe to NAME.mended.yaml"),
    )),
    Command("estimate", "memory by strategy and device", (
        arg("target", metavar="RECIPE|MODEL", help="a recipe, or hub id or folder of a model"),
        arg("--on", metavar="HW", action="append", default=[], help=HARDWARE_HELP),
        arg("--tensor-parallel", metavar="N", type=int, default=1,
            help="devices that share each weight matrix"),
        arg("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
            help="override a key of the recipe; may be repeated"),
    )),
    Command("ladder", "measure the memory of each strategy beside its estimate",
            _experiment(3, "RUNG", "rungs")),
    Command("submit", "submit a recipe to a scheduler", (
        arg("target", metavar="RECIPE|RUN_DIR",
            help="a recipe; with --follow, --cancel or --requeue: what was submitted"),
        SET,
        ON,
        *PROGRESS,
        arg("--to", choices=QUEUES, default=QUEUES[0], help="the scheduler"),
        arg("--sweep", metavar="KEY=A,B", action="append", default=[], dest="sweeps",
            help="submit one job per value; several sweeps: one per combination"),
        flag("--tiny", help=f"{TINY_HELP} on one node"),
        arg("--output-dir", metavar="DIR", help="directory of the run or sweep"),
        one_of(
            flag("--dry-run", help="show and check the scripts, submit nothing"),
            flag("--detach", help="submit and return"),
            flag("--follow", help="follow what was submitted"),
            flag("--cancel", help="cancel what was submitted"),
            flag("--requeue", help="start runs again whose jobs have ended; they resume"),
        ),
    )),
    Command("drill", "kill and resume a short run and compare its losses",
            _experiment(12, "FAULT", "faults")),
    Command("report", "write runs as one HTML page", (
        arg("paths", metavar="RUN_DIR", nargs="+", help="run directories; several are compared"),
        flag("--serve", help="serve a page that follows the runs, on this machine only, until Ctrl-C"),
        arg("--port", metavar="N", type=int, default=0, help="with --serve: the port (default: a free one)"),
        context(as_json=False),
        arg("--output", metavar="FILE",
            help="a new file (default: RUN_DIR/report.html; for several runs a file in the current folder)"),
    )),
    Command("eval", "evaluate the result of a run", (
        *RUN_DIR,
        arg("--data", metavar="FILE", help="rows to use instead of the held-out ones"),
        arg("--suite", metavar="TASK,…",
            help="benchmarks by lm-eval, beside the model before training: names such as gsm8k,ifeval, YAML "
            "files of tasks, or folders with them"),
        arg("--limit", metavar="N", type=int, help="with --suite: only the first N samples of each task"),
        arg("--fewshot", metavar="N", type=int,
            help="with --suite: examples in each prompt (default: the task's)"),
        arg("--batch-size", metavar="N", type=int, help="with --suite: samples at a time (default 1)"),
        arg("--seed", metavar="N", type=int, help="with --suite: every seed (default: lm-eval's)"),
        flag("--no-base", help="with --suite: leave the model before training out"),
        arg("--output", metavar="FILE", help="also write the numbers as JSON"),
    )),
    Command("generate", "try the result of a run", (
        *RUN_DIR,
        arg("prompt", metavar="PROMPT", nargs="?",
            help="the prompt (for image classification: an image file; default: stdin)"),
        arg("second", metavar="TEXT", nargs="?",
            help="tasks embedding and reranker: the text, or document, that PROMPT is compared with"),
        arg("--image", metavar="FILE", dest="images", action="append", default=[],
            help="an image that the prompt is about (task image-text-to-text; can be repeated)"),
        flag("-i", "--interactive", help="chat at the terminal"),
        arg("--max-new-tokens", metavar="N", type=int, default=64, help="longest answer (default 64)"),
        context(as_json=False),
    )),
    Command("merge", "merge an adapter into the base weights, push to the hub", (
        *RUN_DIR,
        arg("--output", metavar="DIR", help="folder of the merged model (default: RUN_DIR/merged)"),
        arg("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
            help="dtype of the written weights (default: that of the base checkpoint)"),
        arg("--push", metavar="REPO", nargs="?", const="",
            help="push to the hub, private if REPO is new (default: hub_model_id of the recipe)"),
    )),
    Command("export", "export the result of a run to the program that uses it, and compare the two", (
        *RUN_DIR,
        arg("--to", choices=EXPORTS, required=True, help="the program"),
        arg("--output", metavar="DIR", help="folder of the export (default: RUN_DIR/export-PROGRAM)"),
        arg("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
            help="dtype of the weights (default: that of the base checkpoint)"),
        flag("--adapter", help="--to vllm: serve the adapter on its base instead of merging it"),
        arg("--quantize", metavar="TYPE", choices=QUANTIZED,
            help=f"--to gguf and ollama: {', '.join(QUANTIZED)} (default: that of the weights)"),
        arg("--llama-cpp", metavar="DIR",
            help="--to gguf and ollama: folder with llama.cpp's converter and programs (default: on PATH)"),
    )),
    Command("fixes", "list the known fixes", (
        arg("id", metavar="ID", nargs="?", help="show one fix with its reason"),
    )),
    Command("recipes", "list the shipped recipes", (
        arg("name", metavar="NAME", nargs="?", help="print one recipe"),
        flag("--copy", help="copy it to the current folder"),
    )),
    Command("schema", "print the JSON Schema of recipes"),
    Command("completion", "print the script that completes commands in a shell", (
        arg("shell", choices=["bash", "zsh", "fish"], help="the shell"),
    )),
)  # fmt: skip

OWN = {
    "run": Command("run", "run a command of your own, supervised: run [OPTIONS] -- COMMAND", (
        *PROGRESS,
        arg("--launch", metavar="FILE", help="YAML with `launch:`: max_restarts, hang_factor, env"),
        SET,
        arg("--resume", metavar="auto|PATH",
            help="continue a run directory; a Trainer with the callback resumes its newest checkpoint"),
        arg("--output-dir", metavar="DIR", help="the run directory"),
    ), module="supervise"),
}  # fmt: skip
"""Command -> the one in its place where `--` and a user's own command follow."""
