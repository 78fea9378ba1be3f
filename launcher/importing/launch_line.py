"""A line, or a script of shell, that starts a training: who starts it, on how much, with which flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.importing.accelerate import finish_deepspeed, take_count, take_option
from launcher.importing.arguments import as_number
from launcher.importing.environment import take_env, take_variables_of_llamafactory
from launcher.importing.reading import Call, Effect, Reading, without_tokens
from launcher.importing.shell import Script, Word, read_script
from launcher.importing.transformers_examples import Flag, is_idle, known_flags, read_flags, take_started
from launcher.importing.trl import option_kind
from launcher.importing.unsupported import COMMANDS, MANUALLY, SCRIPT, tool_of
from launcher.tasks import words_of_tool

TOOL = "launch line"
_STARTS = re.compile(
    r"\b(?:deepspeed|accelerate\s+launch|accelerate-launch|torchrun|python[\d.]*|trl|axolotl|llamafactory-cli|lmf|"
    r"(?:swift|megatron)\s+(?:sft|pt|rlhf)|tune\s+run|oumi\s+(?:train|launch|tune|distributed)|xtuner\s+train|litgpt|"
    r"nemo\s+(?:llm|run)|automodel|soup\s+train|unsloth\s+train|colossalai\s+run|fairseq-train|mlx_lm\.lora)\s"
)
"""What stands in every text that starts a training, and in others."""
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

    env: list[tuple[str, Word]]
    program: str
    """deepspeed, accelerate, torchrun, trl, axolotl, llamafactory or python."""
    words: list[Word]
    line: int
    folder: str = ""
    """Where a `cd` before it leads, as it is written."""


def tells(text: str) -> bool:
    """Whether a text may be shell that starts a training: `read` knows it."""
    return _STARTS.search(text) is not None


def read(text: str, file: str) -> Reading:
    """Read it. RecipeError when there is none or more than one command that trains."""
    script = read_script(text, file)
    commands = [found for words in script.commands if (found := _command(words)) is not None]
    reading = Reading(TOOL, file)
    if not commands:
        raise RecipeError(_none(script, file))
    if len(commands) > 1:
        places = ", ".join(str(command.line) for command in commands[:10])
        message = f"starts {len(commands)} trainings (lines {places}); one recipe is of one"
        raise RecipeError(Problem("import-refused", message, file, commands[1].line,
                                  hint="give each line in a file of its own"))  # fmt: skip
    command = commands[0]
    _refuse_cut_off(reading, script, command)
    lines = [(line, said) for line, said in enumerate(text.splitlines(), 1) if said.startswith("#SBATCH")]
    take_sbatch(reading, [(said.removeprefix("#SBATCH"), line) for line, said in lines])
    variables = [*(pair for pair in script.exported if pair[1].line <= command.line), *command.env]
    for name, word in variables:
        _take_variable(reading, name, word)
    folders = [words[1].text for words in script.commands if words[0].text == "cd" and len(words) > 1
               and words[1].line <= command.line]  # fmt: skip
    command.folder = folders[-1] if folders else ""
    _READERS[command.program](reading, command)
    if "hardware.devices_per_node" not in reading.taken and "hardware.total" not in reading.taken:
        _count_visible(reading, variables)
    return reading


def _refuse_cut_off(reading: Reading, script: Script, command: Command) -> None:
    """Flags that a shell takes for a command: a comment, or a blank after `\\`, ends the line before them."""
    cut = [words[0] for words in script.commands if words[0].text.startswith("--")]
    for word in cut[:1]:
        if word.line >= command.line:
            message = "starts a command of its own: a comment or a blank after `\\` ends the one before it"
            reading.refuse(word.text, word.line, message, "take the comment or the blank out")


def _none(script: Script, file: str) -> Problem:
    """Why no command was found: it is made when the script runs, or there is none."""
    programs = [
        words[at] for words in script.commands for _, at in [_before_program(words)] if at < len(words)
    ]
    line = next((word.line for word in programs
                 if word.text in ("eval", "bash", "sh", "zsh") or word.open), None)  # fmt: skip
    if line is not None:
        return Problem("import-refused", "the command is only known when the script runs", file, line,
                       hint=f"give the line as it is run: put an echo before it; {MANUALLY}")  # fmt: skip
    return Problem("import-unknown", "no command that starts a training was found", file,
                   hint="lines of trl, axolotl, llamafactory-cli and of transformers' examples are read; "
                   f"{MANUALLY}")  # fmt: skip


def _take_variable(reading: Reading, name: str, word: Word) -> None:
    if word.open:
        reading.drop(name, word.text, word.line, Effect.NONE, "known only when the script runs")
    else:
        take_env(reading, name, word.text, word.line)


def _count_visible(reading: Reading, env: Sequence[tuple[str, Word]]) -> None:
    """CUDA_VISIBLE_DEVICES names the devices, where nothing else counts them."""
    for name, word in env:
        if name == "CUDA_VISIBLE_DEVICES" and re.fullmatch(r"\w[\w/-]*(,\w[\w/-]*)*", word.text):
            count = len(word.text.split(","))
            reading.take("hardware.devices_per_node", count, word.line, f"{name}: {word.text}")


def _command(words: list[Word]) -> Command | None:
    """The command if it trains."""
    env, at = _before_program(words)
    return _trains(words[at:], env) if at < len(words) else None


def _before_program(words: list[Word]) -> tuple[list[tuple[str, Word]], int]:
    """The variables of a command, and where its program stands: after `srun -n 2`, `uv run` and the like."""
    env: list[tuple[str, Word]] = []
    at = 0
    while at < len(words):
        text = PurePath(words[at].text).name if "=" not in words[at].text else words[at].text
        assigned = _ASSIGNED.fullmatch(words[at].text)
        if assigned is not None:
            env.append((assigned[1], Word(assigned[2], words[at].line, words[at].open)))
            at += 1
        elif text in _PREFIXES:
            at = _after_options(words, at + 1)
        elif at + 1 < len(words) and (text, words[at + 1].text) in _RUNNERS:
            at = _after_options(words, at + 2)
        elif [text, *(word.text for word in words[at + 1 : at + 3])] == ["ray", "job", "submit"]:
            at = next((end + 1 for end in range(at, len(words)) if words[end].text == "--"), len(words))
        else:
            break
    return env, at


def _after_options(words: Sequence[Word], at: int) -> int:
    """Behind a prefix's own options, some of which have a value."""
    while at < len(words) and words[at].text.startswith("-"):
        with_value = "=" not in words[at].text and at + 1 < len(words)
        if with_value and words[at].text not in _VALUED:
            with_value = not _is_program(words[at + 1].text)
        at += 2 if with_value and not words[at + 1].text.startswith("-") else 1
    return at


def _is_program(text: str) -> bool:
    name = PurePath(text).name
    return name in (*_PROGRAMS, *_PREFIXES) or name.startswith("python") or _ASSIGNED.match(text) is not None


def _trains(words: list[Word], env: list[tuple[str, Word]]) -> Command | None:
    """The command with the launcher that its first words name."""
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


def _python(words: list[Word], env: list[tuple[str, Word]], line: int) -> Command | None:
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
    options, rest = split_options(command.program, command.words)
    take_launcher(reading, command.program, options)
    if not rest:
        reading.needs("data.train", command.line, "the launch line names no script")
        return
    if options.get("module") and command.program == "deepspeed":
        rest = [Word("-m", rest[0].line), *rest]
    elif "module" in options:
        rest = [Word("-m", rest[0].line), *([options["module"][1]] if options["module"][1] else []), *rest]
    _script(reading, command, [word for word in rest if word is not None])


def _plain(reading: Reading, command: Command) -> None:
    _script(reading, command, command.words)


def _script(reading: Reading, command: Command, words: Sequence[Word]) -> None:
    """The script or module behind the launcher, with its flags."""
    at = 1 if words[0].text == "-m" and len(words) > 1 else 0
    name, rest = words[at], words[at + 1 :]
    if name.text.startswith("axolotl.cli.train"):
        _call(reading, "axolotl recipe", rest, command.line)
    elif (known := _TRL_MODULES.search(name.text)) and (known[1] in _TRAINED or "trl" in name.text):
        _trl(reading, Command(command.env, "trl", [Word(known[1], name.line), *rest], command.line))
    elif name.text.startswith("llamafactory") or name.text.endswith("llamafactory/launcher.py"):
        take_variables_of_llamafactory(reading)
        word = rest[0] if rest and name.text.endswith("cli") else Word("train", name.line)
        if word.text != "train":
            reading.refuse(f"{name.text} {word.text}", word.line, "does not train")
        _call(reading, "LLaMA-Factory recipe", rest[word in rest :], command.line)
    else:
        _own_script(reading, command, name, rest, is_module=bool(at))


def _own_script(
    reading: Reading, command: Command, name: Word, rest: Sequence[Word], *, is_module: bool
) -> None:
    """A script that is no tool's own: trl's with another parser, an example of transformers, or refused."""
    kind = _HANDBOOK.search(name.text)
    if kind is not None:  # TrlParser's and alignment-handbook's: a YAML, and flags over it
        flags, loose = known_flags(reading, rest, option_kind)
        config = _config_of(flags, loose)
        if config is not None:
            for word in loose[config not in flags :]:
                reading.refuse(word.text, word.line, f"is no argument that {name.text} takes")
            kept = [flag for flag in flags if flag is not config and flag.name != "config"]
            _trl_call(reading, str(config.value), kept, command.line, kind[1] or kind[2])
            return
    take_started(reading, name, rest, command.program, is_module=is_module, folder=command.folder)


def _config_of(flags: Sequence[Flag], loose: Sequence[Word]) -> Flag | None:
    """`--config X.yaml`, or a YAML as the first argument."""
    for flag in flags:
        if flag.name == "config" and str(flag.value).endswith((".yaml", ".yml")):
            return flag
    word = loose[0] if loose else None
    if word is not None and word.text.endswith((".yaml", ".yml")):
        return Flag("config", word.text, word.line, word.open)
    return None


def _trl(reading: Reading, command: Command) -> None:
    """`trl sft --config X.yaml --flag v`."""
    word, rest = command.words[0], command.words[1:]
    if word.text not in _TRAINED:
        known = " and ".join(_TRAINED)
        message = "is a kind of training that import does not read"
        reading.refuse(f"trl {word.text}", word.line, message, f"it reads {known}")
        return
    flags, loose = known_flags(reading, rest, option_kind)
    for left in loose:
        reading.refuse(left.text, left.line, f"is no argument of trl {word.text}")
    config = next((flag for flag in flags if flag.name == "config"), None)
    others = [flag for flag in flags if flag is not config]
    _trl_call(reading, None if config is None else str(config.value), others, command.line, word.text)


def _trl_call(reading: Reading, file: str | None, flags: Sequence[Flag], line: int, word: str) -> None:
    overrides: dict[str, Any] = {}
    for flag in flags:
        off = option_kind(flag.name) == "bare"
        _override(reading, overrides,
                  Flag(flag.name.removeprefix("no_"), False, flag.line) if off else flag)  # fmt: skip
    reading.calls.append(Call("TRL recipe", file, overrides, line, word))


def _other(reading: Reading, command: Command) -> None:
    """A command of a tool that is not read."""
    word = command.words[0]
    said = " ".join(part.text for part in command.words[:2])
    reading.refuse(said, word.line, f"is of {tool_of(PurePath(word.text).name)}, which import does not read",
                   MANUALLY, SCRIPT)  # fmt: skip


def _axolotl(reading: Reading, command: Command) -> None:
    _call(reading, "axolotl recipe", command.words[1:], command.line)


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
            _override(reading, overrides, Flag(assigned[1], assigned[2], word.line, word.open))
        elif file is None:
            file = word.text
        else:
            reading.refuse(word.text, word.line, "is a second file, or no argument")
    for flag in flags:
        if flag.name != "launcher":
            _override(reading, overrides, flag)
    launcher = next((str(flag.value) for flag in flags if flag.name == "launcher"), "accelerate")
    if words[end + 1 :] and launcher in ("accelerate", "torchrun"):
        options, _ = split_options(launcher, words[end + 1 :])
        take_launcher(reading, launcher, options)
    reading.calls.append(Call(tool, file, overrides, line, ""))


def _file_after_switch(flags: Sequence[Flag]) -> tuple[list[Flag], str | None]:
    """`--debug recipe.yml`: a switch, which takes no word, and the recipe."""
    for at, flag in enumerate(flags):
        if flag.name not in ("deepspeed", "launcher") and str(flag.value).endswith((".yaml", ".yml")):
            return [*flags[:at], replace(flag, value=True), *flags[at + 1 :]], str(flag.value)
    return list(flags), None


def _override(reading: Reading, overrides: dict[str, Any], flag: Flag) -> None:
    if flag.open:
        effect = Effect.NONE if is_idle(flag.name) else Effect.NEEDED
        reading.drop(flag.name, without_tokens(str(flag.value)), flag.line, effect,
                     "known only when the line is run")  # fmt: skip
    else:
        overrides[flag.name] = flag.value


_READERS: Mapping[str, Any] = {
    "deepspeed": _launched,
    "accelerate": _launched,
    "torchrun": _launched,
    "python": _plain,
    "trl": _trl,
    "axolotl": _axolotl,
    "llamafactory": _llamafactory,
    "other": _other,
}


Options = dict[str, tuple[Word, Word | None]]
"""Name, `-` as `_` -> its word, and its value's."""
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
_NODES_OPEN = "the number of machines is known only when the line is run"
_COUNT_OPEN = "the number of devices is known only when the line is run"


def split_options(tool: str, words: Sequence[Word]) -> tuple[Options, list[Word]]:
    """The launcher's options, and the words from the script on."""
    options: Options = {}
    at = 0
    while at < len(words) and words[at].text.startswith("-") and words[at].text != "--":
        word = words[at]
        at += 1
        name, equals, text = word.text.partition("=")
        plain = _SHORT.get(name, name.lstrip("-").replace("-", "_"))
        if equals:
            options[plain] = (word, Word(text, word.line, word.open))
        elif plain in SWITCHES[tool] or at >= len(words):
            options[plain] = (word, None)
        else:
            options[plain] = (word, words[at])
            at += 1
        if plain == "module" and tool != "deepspeed":
            break
    return options, list(words[at:])


def take_launcher(reading: Reading, tool: str, options: Options) -> None:
    """Take a launcher's options."""
    _TAKERS[tool](reading, options)


def _deepspeed(reading: Reading, options: Options) -> None:
    for name, (word, value) in options.items():
        text = "" if value is None else value.text
        if value is not None and value.open:
            reading.drop(f"--{name}", text, word.line, Effect.NONE, _COUNT_OPEN)
        elif name == "hostfile":
            reading.take("launch.hostfile", text, word.line, "hostfile")
        elif name == "num_nodes":
            take_count("hardware.num_nodes")(reading, name, text, word.line)
        elif name in ("num_gpus", "num_accelerators"):
            take_count("hardware.devices_per_node")(reading, name, text, word.line)
        elif name == "include":
            _include(reading, text, word.line)
        elif name == "exclude":
            reading.drop("exclude", text, word.line, Effect.NONE, "which devices of a machine are used",
                         "set CUDA_VISIBLE_DEVICES in the shell that starts the run")  # fmt: skip
        elif name == "autotuning" and text:
            reading.refuse("autotuning", word.line, "measures, and does not train")
        else:
            reading.know(name)


def _include(reading: Reading, text: str, line: int) -> None:
    """`localhost:0,1`, or `host1:0,1@host2:0,1`."""
    hosts = [part.partition(":")[2] for part in text.split("@") if part]
    counts = {len(slots.split(",")) for slots in hosts if slots}
    reading.know("include")
    if len(counts) == 1 and all(hosts):
        reading.take("hardware.devices_per_node", counts.pop(), line, f"include: {text}")
        if len(hosts) > 1:
            reading.take("hardware.num_nodes", len(hosts), line, f"include: {text}")
    else:
        reading.drop("include", text, line, Effect.NONE, "machines with different numbers of devices")


def _accelerate(reading: Reading, options: Options) -> None:
    for name, (word, value) in options.items():
        if name == "config_file" and value is not None:
            reading.know(name)
            if value.open:
                reading.drop(f"--{name}", value.text, word.line, Effect.NEEDED, "known only when it is run",
                             "give the file as a FILE too")  # fmt: skip
            else:
                reading.name_file(value.text, word.line)
        elif name.startswith("aws_"):
            reading.drop(
                name, "" if value is None else value.text, word.line, Effect.NONE, "not for jobs here"
            )
        elif name in ("module", "help", "mpirun_hostfile", "mpirun_ccl") or name == "env":
            reading.know(name)
        elif name.startswith(("fp8_", "megatron_lm_")):
            reading.refuse(name, word.line, "asks for what nothing here trains with")
        elif value is not None and value.open:
            reading.drop(f"--{name}", value.text, word.line, Effect.NONE, "known only when the line is run")
        else:
            take_option(reading, name, True if value is None else value.text, word.line)
    line = next((word.line for word, _ in options.values()), None)
    named = "config_file" in options or "deepspeed_config_file" in options
    if reading.value("sharding.engine") == "deepspeed" and not named:
        finish_deepspeed(reading, line)
    if "config_file" not in options and "num_processes" not in options and "cpu" not in options:
        reading.drop("accelerate launch", "", line, Effect.NONE, "accelerate's own default config may have "
                     "applied (~/.cache/huggingface/accelerate/default_config.yaml)",
                     "give it as a FILE too")  # fmt: skip


def _torchrun(reading: Reading, options: Options) -> None:
    for name, (word, value) in options.items():
        text = "" if value is None else value.text
        is_open = value is not None and value.open
        if name == "nnodes":
            _nodes(reading, text, word.line, is_open=is_open)
        elif name == "nproc_per_node":
            if isinstance(as_number(text), int) and not is_open:
                take_count("hardware.devices_per_node")(reading, name, text, word.line)
            else:
                reading.drop(f"--{name}", text, word.line, Effect.NONE, _COUNT_OPEN, "name them with --on")
        elif name == "max_restarts":
            take_option(reading, name, text, word.line)
        else:
            reading.know(name)
    if "nproc_per_node" not in options:
        reading.take("hardware.devices_per_node", 1, None, "nproc_per_node: 1", default=True)


def _nodes(reading: Reading, text: str, line: int, *, is_open: bool) -> None:
    low, _, high = text.partition(":")
    number = as_number(high or low)
    reading.know("nnodes")
    if is_open or not isinstance(number, int):
        reading.drop("--nnodes", text, line, Effect.NONE, _NODES_OPEN, "name them with --on")
        return
    reading.take("hardware.num_nodes", number, line, "nnodes")
    if high and high != low:
        reading.drop("nnodes", text, line, Effect.NONE, "a run keeps its number of machines")


_TAKERS: dict[str, Callable[[Reading, Options], None]] = {
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "torchrun": _torchrun,
}


_KEYS = ("partition", "account", "qos", "reservation", "time", "constraint", "mem", "nodelist", "exclude")
_SBATCH_SHORT = {"-p": "partition", "-A": "account", "-q": "qos", "-t": "time", "-C": "constraint",
          "-w": "nodelist", "-x": "exclude", "-N": "nodes", "-c": "cpus-per-task", "-J": "job-name",
          "-o": "output", "-e": "error", "-n": "ntasks", "-G": "gpus"}  # fmt: skip
_OURS = ("job-name", "output", "error", "ntasks", "ntasks-per-node", "chdir", "export", "array", "signal",
         "requeue", "open-mode")  # fmt: skip
_COUNT = re.compile(r"(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d+)")


def take_sbatch(reading: Reading, lines: Sequence[tuple[str, int]]) -> None:
    """Take the options of a job script."""
    for text, line in lines:
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
            _take(reading, _SBATCH_SHORT.get(name, name.lstrip("-")), value, line)


def _take(reading: Reading, name: str, value: str, line: int) -> None:
    said = f"#SBATCH --{name}"
    if name in _KEYS and value:
        reading.take(f"launch.slurm.{name}", value, line, said)
    elif name == "cpus-per-task" and value.isdecimal():
        reading.take("launch.slurm.cpus_per_task", int(value), line, said)
    elif name == "nodes" and value.isdecimal():
        reading.take("hardware.num_nodes", int(value), line, said)
    elif name in ("gres", "gpus-per-node", "gpus-per-task") and (count := _COUNT.fullmatch(value)):
        reading.take("hardware.devices_per_node", int(count[1]), line, said)
        if name == "gres" and value.count(":") > 1:
            reading.take("launch.slurm.gres", value, line, f"{said}: {value}")
    elif name in _OURS:
        reading.drop(said, value, line, Effect.NONE, "`submit` writes the job script, and says it itself")
    else:
        reading.drop(said, value, line, Effect.NONE, "write it under launch.slurm.options if it is needed")
