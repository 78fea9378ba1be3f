"""A line, or a script of shell, that starts a training: its launcher, devices, variables and flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.importing.accelerate import finish_deepspeed, take_option
from launcher.importing.conversions import Drop, Taker, To, as_number, count, ignore
from launcher.importing.conversions import text as some_text
from launcher.importing.environment import take_env, take_variables_of_llamafactory
from launcher.importing.reading import Call, Effect, Given, Place, Reading, without_tokens
from launcher.importing.shell import Script, Word, read_script
from launcher.importing.transformers_examples import is_idle, known_flags, read_flags, take_started
from launcher.importing.trl import option_kind
from launcher.importing.unsupported import COMMANDS, MANUALLY, SCRIPT, tool_of
from launcher.tasks import words_of_tool

TOOL = "launch line"
_STARTS = re.compile(
    r"\b(?:deepspeed|accelerate\s+launch|accelerate-launch|torchrun|python[\d.]*|trl|axolotl|llamafactory-cli|lmf|"
    + "|".join(
        rf"{name}\s+(?:{'|'.join(words)})" if words else re.escape(name) for name, words in COMMANDS.items()
    )
    + r")\s"
)
"""In every text that starts a training, and in others."""
_PREFIXES = ("nohup", "sudo", "exec", "env", "srun", "numactl", "setsid", "stdbuf", "nice", "mpirun")
_RUNNERS = {("uv", "run"), ("poetry", "run"), ("pipenv", "run"), ("conda", "run"), ("mamba", "run")}
_VALUED = ("--with", "--extra", "--group", "--python", "--package", "--project", "--env-file", "--name")
"""Options of runners whose value may be a program's name: `uv run --with trl`."""
_PROGRAMS = ("deepspeed", "accelerate", "torchrun", "trl", "axolotl", "llamafactory-cli", "lmf")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_TRL_MODULES = re.compile(r"(?:trl[./]scripts[./]|examples/scripts/)(\w+?)(?:\.py)?$")
_TRAINED = words_of_tool("trl")
_HANDBOOK = re.compile(r"(?:(?:^|/)scripts/run_(sft|dpo)|open_r1/(sft))\.py$")
"""Scripts of alignment-handbook and open-r1, which are trl's with another parser."""


@dataclass(slots=True)
class Command:
    """One command that trains."""

    env: list[Given]
    program: str
    """deepspeed, accelerate, torchrun, trl, axolotl, llamafactory or python."""
    words: list[Word]
    line: int
    folder: str = ""
    """Target of a `cd` before it, as it is written."""


def may_train(text: str) -> bool:
    """Whether a text may be shell that starts a training: `read` finds out."""
    return _STARTS.search(text) is not None


def read(text: str, file: str) -> Reading:
    """Read it. Raises RecipeError unless exactly one command trains."""
    script = read_script(text, file)
    commands = [found for words in script.commands if (found := _trains(*_before_program(words)))]
    reading = Reading(TOOL, file)
    if not commands:
        raise RecipeError(_none(script, file))
    if len(commands) > 1:
        places = ", ".join(str(command.line) for command in commands[:10])
        message = f"starts {len(commands)} trainings (lines {places}); one recipe is of one"
        raise RecipeError(Problem("import-refused", message, file, commands[1].line,
                                  hint="give each line in a file of its own"))  # fmt: skip
    command = commands[0]
    cut = [words[0] for words in script.commands if words[0].text.startswith("--")]
    for word in cut[:1]:
        if word.line >= command.line:  # flags that a shell takes for a command
            message = "starts a command of its own: a comment or a blank after `\\` ends the one before it"
            reading.refuse(_given(word), message, "take the comment or the blank out")
    for line, said in enumerate(text.splitlines(), 1):
        if said.startswith("#SBATCH"):
            _take_sbatch(reading, said.removeprefix("#SBATCH"), line)
    exported = [Given(name, word.text, word.line, word.open) for name, word in script.exported]
    variables = [*(given for given in exported if (given.line or 0) <= command.line), *command.env]
    for variable in variables:
        take_env(reading, variable)
    folders = [words[1].text for words in script.commands if words[0].text == "cd" and len(words) > 1
               and words[1].line <= command.line]  # fmt: skip
    command.folder = folders[-1] if folders else ""
    _READERS[command.program](reading, command)
    if "hardware.devices_per_node" not in reading.taken and "hardware.total" not in reading.taken:
        _count_visible(reading, variables)
    return reading


def _given(word: Word) -> Given:
    return Given(word.text, None, word.line)


def _none(script: Script, file: str) -> Problem:
    """Why no command was found: it is made when the script runs, or there is none."""
    programs = [words[0] for _, words in map(_before_program, script.commands) if words]
    shells = ("eval", "bash", "sh", "zsh")
    line = next((word.line for word in programs if word.text in shells or word.open), None)
    if line is not None:
        return Problem("import-refused", "the command is only known when the script runs", file, line,
                       hint=f"give the line as it is run: put an echo before it; {MANUALLY}")  # fmt: skip
    return Problem("import-unknown", "no command that starts a training was found", file,
                   hint="lines of trl, axolotl, llamafactory-cli and of transformers' examples are read; "
                   f"{MANUALLY}")  # fmt: skip


def _count_visible(reading: Reading, variables: Sequence[Given]) -> None:
    """CUDA_VISIBLE_DEVICES names the devices, where nothing else counts them."""
    for given in variables:
        if given.name == "CUDA_VISIBLE_DEVICES" and re.fullmatch(r"\w[\w/-]*(,\w[\w/-]*)*", given.value):
            reading.take("hardware.devices_per_node", len(given.value.split(",")), given)


def _before_program(words: list[Word]) -> tuple[list[Given], list[Word]]:
    """The variables of a command, and its words from the program on: after `srun -n 2`, `uv run` …"""
    env: list[Given] = []
    at = 0
    while at < len(words):
        text = PurePath(words[at].text).name if "=" not in words[at].text else words[at].text
        assigned = _ASSIGNED.fullmatch(words[at].text)
        if assigned is not None:
            env.append(Given(assigned[1], assigned[2], words[at].line, words[at].open))
            at += 1
        elif text in _PREFIXES:
            at = _after_options(words, at + 1)
        elif at + 1 < len(words) and (text, words[at + 1].text) in _RUNNERS:
            at = _after_options(words, at + 2)
        elif [text, *(word.text for word in words[at + 1 : at + 3])] == ["ray", "job", "submit"]:
            at = next((end + 1 for end in range(at, len(words)) if words[end].text == "--"), len(words))
        else:
            break
    return env, words[at:]


def _after_options(words: Sequence[Word], at: int) -> int:
    """The position after a prefix's own options, some of which have a value."""
    while at < len(words) and words[at].text.startswith("-"):
        with_value = "=" not in words[at].text and at + 1 < len(words)
        if with_value and words[at].text not in _VALUED:
            with_value = not _is_program(words[at + 1].text)
        at += 2 if with_value and not words[at + 1].text.startswith("-") else 1
    return at


def _is_program(text: str) -> bool:
    name = PurePath(text).name
    return name in (*_PROGRAMS, *_PREFIXES) or name.startswith("python") or _ASSIGNED.match(text) is not None


def _trains(env: list[Given], words: list[Word]) -> Command | None:
    """The command with the launcher that its first words name; None if it does not train."""
    if not words:
        return None
    name, line, rest = PurePath(words[0].text).name, words[0].line, words[1:]
    second = rest[0].text if rest else ""
    if name in ("deepspeed", "torchrun") and rest:
        return Command(env, name, rest, line)
    if name == "accelerate" and second == "launch":
        return Command(env, name, rest[1:], line)
    if name == "accelerate-launch":
        return Command(env, "accelerate", rest, line)
    if name in ("trl", "axolotl", "llamafactory-cli", "lmf") and rest:
        program = "llamafactory" if name in ("llamafactory-cli", "lmf") else name
        trains = (
            second == "train" if program != "trl" else second not in ("env", "vllm-serve", "chat", "skills")
        )
        return Command(env, program, rest, line) if trains else None
    if name.startswith("python"):
        return _python(rest, env, line)
    if name in COMMANDS and (not COMMANDS[name] or second in COMMANDS[name]):
        return Command(env, "other", words, line)
    return None


def _python(words: list[Word], env: list[Given], line: int) -> Command | None:
    """`python -m torch.distributed.run …`, `python train.py --flags`."""
    at = 0
    while at < len(words) and words[at].text.startswith("-") and words[at].text != "-m":
        at += 2 if words[at].text in ("-W", "-X") else 1
    rest = words[at:]
    if not rest:
        return None
    if rest[0].text == "-m" and len(rest) > 1:
        module = rest[1].text
        if module in ("torch.distributed.run", "torch.distributed.launch"):
            return Command(env, "torchrun", rest[2:], line)
        if module == "accelerate.commands.launch":
            return Command(env, "accelerate", rest[2:], line)
        if module == "deepspeed.launcher.runner":
            return Command(env, "deepspeed", rest[2:], line)
        known = module.startswith(("trl.", "axolotl.", "llamafactory.")) or tool_of(module) is not None
        return Command(env, "python", rest, line) if known or _has_flags(rest[2:]) else None
    return (
        Command(env, "python", rest, line) if rest[0].text.endswith(".py") and _looks_trained(rest) else None
    )


def _has_flags(words: Sequence[Word]) -> bool:
    names = {flag.name for flag in read_flags(words)[0]}
    telling = {"learning_rate", "per_device_train_batch_size", "num_train_epochs", "output_dir",
               "model_name_or_path", "deepspeed", "max_steps", "config"}  # fmt: skip
    return bool(names & telling)


def _looks_trained(words: Sequence[Word]) -> bool:
    name = PurePath(words[0].text).name
    return _has_flags(words[1:]) or re.search(r"train|tune|sft|dpo|lora|run_|main", name) is not None


def _launched(reading: Reading, command: Command) -> None:
    options, rest = _split_options(command.program, command.words)
    _take_launcher(reading, command.program, options)
    if not rest:
        reading.needs("data.train", command.line, "the launch line names no script")
        return
    module = options.get("module")
    if module is not None:
        named = [Word(module.value, rest[0].line, module.open)] if module.value is not True else []
        rest = [Word("-m", rest[0].line), *named, *rest]
    _script(reading, replace(command, words=rest))


def _script(reading: Reading, command: Command) -> None:
    """The script or module after the launcher, with its flags."""
    words = command.words
    at = 1 if words[0].text == "-m" and len(words) > 1 else 0
    name, rest = words[at], words[at + 1 :]
    if name.text.startswith("axolotl.cli.train"):
        _call(reading, "axolotl recipe", rest, command.line)
    elif (known := _TRL_MODULES.search(name.text)) and (known[1] in _TRAINED or "trl" in name.text):
        _trl(reading, replace(command, words=[Word(known[1], name.line), *rest]))
    elif name.text.startswith("llamafactory") or name.text.endswith("llamafactory/launcher.py"):
        take_variables_of_llamafactory(reading)
        word = rest[0] if rest and name.text.endswith("cli") else Word("train", name.line)
        if word.text != "train":
            reading.refuse(Given(f"{name.text} {word.text}", None, word.line), "does not train")
        _call(reading, "LLaMA-Factory recipe", rest[word in rest :], command.line)
    elif not _handbook(reading, command, name, rest):
        take_started(reading, name, rest, command.program, is_module=bool(at), folder=command.folder)


def _handbook(reading: Reading, command: Command, name: Word, rest: Sequence[Word]) -> bool:
    """Read a script of alignment-handbook or open-r1 if it is one: a YAML, and flags over it."""
    kind = _HANDBOOK.search(name.text)
    if kind is None:
        return False
    flags, loose = known_flags(reading, rest, option_kind)
    config = next((str(flag.value) for flag in flags if flag.name == "config"
                   and str(flag.value).endswith((".yaml", ".yml"))), None)  # fmt: skip
    if config is None and loose and loose[0].text.endswith((".yaml", ".yml")):
        config = loose.pop(0).text
    if config is None:
        return False
    for word in loose:
        reading.refuse(_given(word), f"is no argument that {name.text} takes")
    kept = [flag for flag in flags if flag.name != "config"]
    _trl_call(reading, config, kept, command.line, kind[1] or kind[2])
    return True


def _trl(reading: Reading, command: Command) -> None:
    """`trl sft --config X.yaml --flag v`."""
    word, rest = command.words[0], command.words[1:]
    if word.text not in _TRAINED:
        message = "is a kind of training that import does not read"
        reading.refuse(
            Given(f"trl {word.text}", None, word.line), message, f"it reads {' and '.join(_TRAINED)}"
        )
        return
    flags, loose = known_flags(reading, rest, option_kind)
    for left in loose:
        reading.refuse(_given(left), f"is no argument of trl {word.text}")
    config = next((flag for flag in flags if flag.name == "config"), None)
    others = [flag for flag in flags if flag is not config]
    _trl_call(reading, None if config is None else str(config.value), others, command.line, word.text)


def _trl_call(reading: Reading, file: str | None, flags: Sequence[Given], line: int, word: str) -> None:
    overrides: dict[str, Any] = {}
    for flag in flags:
        if option_kind(flag.name) == "bare":
            flag = replace(flag, name=flag.name.removeprefix("no_"), value=False, open=False)
        _override(reading, overrides, flag)
    reading.calls.append(Call("TRL recipe", file, overrides, Place(reading.file, line), word))


def _other(reading: Reading, command: Command) -> None:
    """A command of a tool that is not read."""
    word = command.words[0]
    said = Given(" ".join(part.text for part in command.words[:2]), None, word.line)
    tool = tool_of(PurePath(word.text).name)
    reading.refuse(said, f"is of {tool}, which import does not read", MANUALLY, SCRIPT)


def _llamafactory(reading: Reading, command: Command) -> None:
    take_variables_of_llamafactory(reading)
    _call(reading, "LLaMA-Factory recipe", command.words[1:], command.line)


def _call(reading: Reading, tool: str, words: Sequence[Word], line: int) -> None:
    """A YAML with `--key value` (axolotl, before its `--`) or `key=value` (LLaMA-Factory) over it."""
    end = next((at for at, word in enumerate(words) if word.text == "--"), len(words))
    of_axolotl = tool.startswith("axolotl")
    flags, loose = known_flags(reading, words[:end], (lambda _: "one") if of_axolotl else None)
    overrides: dict[str, Any] = {}
    file = None
    if of_axolotl and not loose:
        flags, file = _file_after_switch(flags)
    for word in loose:
        assigned = _ASSIGNED.fullmatch(word.text)
        if assigned is not None:
            _override(reading, overrides, Given(assigned[1], assigned[2], word.line, word.open))
        elif file is None:
            file = word.text
        else:
            reading.refuse(_given(word), "is a second file, or no argument")
    launcher = "accelerate"
    for flag in flags:
        if flag.name == "launcher":
            launcher = str(flag.value)
        else:
            _override(reading, overrides, flag)
    if words[end + 1 :] and launcher in ("accelerate", "torchrun"):
        options, _ = _split_options(launcher, words[end + 1 :])
        _take_launcher(reading, launcher, options)
    reading.calls.append(Call(tool, file, overrides, Place(reading.file, line)))


def _file_after_switch(flags: Sequence[Given]) -> tuple[list[Given], str | None]:
    """`--debug recipe.yml`: a switch without a value, and the recipe."""
    for at, flag in enumerate(flags):
        if flag.name not in ("deepspeed", "launcher") and str(flag.value).endswith((".yaml", ".yml")):
            return [*flags[:at], replace(flag, value=True), *flags[at + 1 :]], str(flag.value)
    return list(flags), None


def _override(reading: Reading, overrides: dict[str, Any], flag: Given) -> None:
    if flag.open:
        effect = Effect.NONE if is_idle(flag.name) else Effect.NEEDED
        value = without_tokens(str(flag.value))
        reading.drop(replace(flag, value=value), effect, "known only when the line is run")
    else:
        overrides[flag.name] = flag.value


_READERS: Mapping[str, Callable[[Reading, Command], None]] = {
    "deepspeed": _launched,
    "accelerate": _launched,
    "torchrun": _launched,
    "python": _script,
    "trl": _trl,
    "axolotl": lambda reading, command: _call(reading, "axolotl recipe", command.words[1:], command.line),
    "llamafactory": _llamafactory,
    "other": _other,
}


_SHORT = {"-H": "hostfile", "-i": "include", "-e": "exclude", "-m": "module", "-q": "quiet", "-t": "tee",
          "-r": "redirects", "-h": "help"}  # fmt: skip
SWITCHES = {
    "deepspeed": (
        "module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid",
        "bind_cores_to_rank", "quiet"),
    "accelerate": (
        "help", "quiet", "cpu", "multi_gpu", "tpu", "enable_cpu_affinity", "dynamo_use_fullgraph",
        "dynamo_use_dynamic", "dynamo_use_regional_compilation", "use_deepspeed", "use_fsdp",
        "use_parallelism_config", "use_megatron_lm", "same_network", "module", "no_python", "tpu_cluster",
        "no_tpu_cluster", "tpu_use_sudo", "downcast_bf16", "fp8_use_autocast_during_eval", "debug"),
    "torchrun": ("standalone", "module", "no_python", "run_path", "virtual_local_rank", "use_env"),
}  # fmt: skip
"""Options without a value (deepspeed 0.19, accelerate 1.15, torchrun and torch.distributed.launch)."""
_NODES_OPEN = "the number of nodes is known only when the line is run"
_COUNT_OPEN = "the number of devices is known only when the line is run"


def _split_options(tool: str, words: Sequence[Word]) -> tuple[dict[str, Given], list[Word]]:
    """The launcher's options (True without a value), and the words from the script on."""
    options: dict[str, Given] = {}
    at = 0
    while at < len(words) and words[at].text.startswith("-") and words[at].text != "--":
        word = words[at]
        at += 1
        name, equals, text = word.text.partition("=")
        plain = _SHORT.get(name, name.lstrip("-").replace("-", "_"))
        if equals:
            options[plain] = Given(plain, text, word.line, word.open)
        elif plain in SWITCHES[tool] or at >= len(words):
            options[plain] = Given(plain, True, word.line)
        else:
            options[plain] = Given(plain, words[at].text, word.line, words[at].open)
            at += 1
        if plain == "module" and tool != "deepspeed":
            break
    return options, list(words[at:])


def _take_launcher(reading: Reading, tool: str, options: Mapping[str, Given]) -> None:
    """Take a launcher's options."""
    for option in options.values():
        if tool == "accelerate":
            _take_accelerate(reading, option)
        elif tool == "deepspeed" and option.open:
            reading.drop(_dashed(option), Effect.NONE, _COUNT_OPEN)
        else:
            _TAKERS[tool].get(option.name, ignore)(reading, option)
    line = next((option.line for option in options.values()), None)
    if tool == "torchrun" and "nproc_per_node" not in options:
        reading.default("hardware.devices_per_node", 1, "nproc_per_node")
    if tool != "accelerate":
        return
    if reading.value("sharding.engine") == "deepspeed" and not options.keys() & _FILES:
        finish_deepspeed(reading, line)
    if not options.keys() & {"config_file", "num_processes", "cpu"}:
        reason = ("accelerate's own default config may have applied "
                  "(~/.cache/huggingface/accelerate/default_config.yaml)")  # fmt: skip
        reading.drop(Given("accelerate launch", "", line), Effect.NONE, reason, "give it as a FILE too")


def _dashed(option: Given) -> Given:
    return replace(option, name=f"--{option.name}")


def _include(reading: Reading, given: Given) -> None:
    """`localhost:0,1`, or `host1:0,1@host2:0,1`."""
    hosts = [part.partition(":")[2] for part in str(given.value).split("@") if part]
    counts = {len(slots.split(",")) for slots in hosts if slots}
    reading.know("include")
    if len(counts) == 1 and all(hosts):
        reading.take("hardware.devices_per_node", counts.pop(), given)
        if len(hosts) > 1:
            reading.take("hardware.num_nodes", len(hosts), given)
    else:
        reading.drop(given, Effect.NONE, "nodes with different numbers of devices")


def _autotuning(reading: Reading, given: Given) -> None:
    if given.value is True:
        reading.know(given.name)
    else:
        reading.refuse(given, "measures, and does not train")


def _take_accelerate(reading: Reading, option: Given) -> None:
    name = option.name
    if name == "config_file" and option.value is not True:
        reading.know(name)
        if option.open:
            reading.drop(
                _dashed(option), Effect.NEEDED, "known only when it is run", "give the file as a FILE too"
            )
        else:
            reading.name_file(option.value, option.line)
    elif name.startswith("aws_"):
        reading.drop(option, Effect.NONE, "not for jobs here")
    elif name in ("module", "help", "mpirun_hostfile", "mpirun_ccl", "env"):
        reading.know(name)
    elif name.startswith(("fp8_", "megatron_lm_")):
        reading.refuse(option, "is not supported here")
    elif option.open:
        reading.drop(_dashed(option), Effect.NONE, "known only when the line is run")
    else:
        take_option(reading, option)


def _processes(reading: Reading, given: Given) -> None:
    if isinstance(as_number(given.value), int) and not given.open:
        To("hardware.devices_per_node", count)(reading, given)
    else:
        reading.drop(_dashed(given), Effect.NONE, _COUNT_OPEN, "name them with --on")


def _nodes(reading: Reading, given: Given) -> None:
    low, _, high = str(given.value).partition(":")
    number = as_number(high or low)
    reading.know(given.name)
    if given.open or not isinstance(number, int):
        reading.drop(_dashed(given), Effect.NONE, _NODES_OPEN, "name them with --on")
        return
    reading.take("hardware.num_nodes", number, given)
    if high and high != low:
        reading.drop(given, Effect.NONE, "a run keeps its number of nodes")


_TAKERS: dict[str, dict[str, Taker]] = {
    "deepspeed": {
        "hostfile": To("launch.hostfile", some_text),
        "num_nodes": To("hardware.num_nodes", count),
        "num_gpus": To("hardware.devices_per_node", count),
        "num_accelerators": To("hardware.devices_per_node", count),
        "include": _include,
        "exclude": Drop(Effect.NONE, "which devices of a node are used",
                        "set CUDA_VISIBLE_DEVICES in the shell that starts the run"),
        "autotuning": _autotuning,
    },
    "torchrun": {"nnodes": _nodes, "nproc_per_node": _processes, "max_restarts": take_option},
}  # fmt: skip
"""Options of a launcher; all others need no report."""
_FILES = {"config_file", "deepspeed_config_file"}


_KEYS = ("partition", "account", "qos", "reservation", "time", "constraint", "mem", "nodelist", "exclude")
_SBATCH_SHORT = {"-p": "partition", "-A": "account", "-q": "qos", "-t": "time", "-C": "constraint",
          "-w": "nodelist", "-x": "exclude", "-N": "nodes", "-c": "cpus-per-task", "-J": "job-name",
          "-o": "output", "-e": "error", "-n": "ntasks", "-G": "gpus"}  # fmt: skip
_OURS = ("job-name", "output", "error", "ntasks", "ntasks-per-node", "chdir", "export", "array", "signal",
         "requeue", "open-mode")  # fmt: skip
_COUNT = re.compile(r"(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d+)")


def _take_sbatch(reading: Reading, text: str, line: int) -> None:
    """Take the options of one line of a job script."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        at += 1
        if not equals and at < len(words) and not words[at].startswith("-"):
            value = words[at]
            at += 1
        _take_slurm(reading, _SBATCH_SHORT.get(name, name.lstrip("-")), value, line)


def _take_slurm(reading: Reading, name: str, value: str, line: int) -> None:
    given = Given(f"#SBATCH --{name}", value, line)
    if name in _KEYS and value:
        reading.take(f"launch.slurm.{name}", value, given)
    elif name == "cpus-per-task" and value.isdecimal():
        reading.take("launch.slurm.cpus_per_task", int(value), given)
    elif name == "nodes" and value.isdecimal():
        reading.take("hardware.num_nodes", int(value), given)
    elif name in ("gres", "gpus-per-node", "gpus-per-task") and (found := _COUNT.fullmatch(value)):
        reading.take("hardware.devices_per_node", int(found[1]), given)
        if name == "gres" and value.count(":") > 1:
            reading.take("launch.slurm.gres", value, given)
    elif name in _OURS:
        reading.drop(given, Effect.NONE, "`submit` writes the job script, and sets it itself")
    else:
        reading.drop(given, Effect.NONE, "write it under launch.slurm.options if it is needed")
