"""The script that a launch line starts: read with its flags, known by its name, or refused."""

from __future__ import annotations

import ast
from pathlib import PurePath

from launcher.errors import Problem, RecipeError
from launcher.importing import script
from launcher.importing.flags import Flag, full_name, known_flags, take_flags
from launcher.importing.foreign import MANUALLY, tool_of
from launcher.importing.found import Effect, Reading, Started, without_tokens
from launcher.importing.programs import EXAMPLES, Program
from launcher.importing.script_arguments import Declared, declared_in
from launcher.importing.syntax import parsed


def read_started(reading: Reading, started: Started, found: tuple[str, str] | None) -> Reading | None:
    """Take the script's flags; the script's own reading, where it was found and read.

    found: text and name of the script's file. A program that is not known is among the refusals.
    """
    name = started.name
    made = None
    if found is not None:
        made = _read_script(reading, started, *found)
    elif (program := EXAMPLES.get(PurePath(name.text).name)) is not None and not started.is_module:
        _take_program(reading, started, program)
    else:
        tool = tool_of(name.text)
        message = "is not there to be read: what its flags mean is not known"
        if tool is not None:
            message = f"is of {tool}, which import does not read"
        reading.refuse(name.text, name.line, message, f"give the script as a FILE too; {MANUALLY}")
    if started.spawned_by != "accelerate":
        sharded = (made or reading).value("sharding.engine")
        if sharded is None:
            said = f"{started.spawned_by}: ddp"
            reading.take("sharding.engine", "ddp", name.line, said, default=True)
    return made


def _take_program(reading: Reading, started: Started, program: Program) -> None:
    """One of transformers' examples; a flag that it does not have means another script of the same name."""
    flags, loose = known_flags(
        reading, started.words, program.kind, lambda name: full_name(name, program.names())
    )
    for flag in flags:
        if program.kind(flag.name) is None:
            reading.refuse(f"--{flag.name}", flag.line,
                           f"is no flag of transformers' {program.name}: it is another script of that name",
                           f"give the script as a FILE too; {MANUALLY}")  # fmt: skip
    for word in loose:
        reading.refuse(word.text, word.line, f"is no argument that {program.name} takes")
    if not reading.refusals:
        take_flags(reading, flags, program, started.name.line)


def _read_script(reading: Reading, started: Started, text: str, file: str) -> Reading | None:
    """The script with the flags of the line."""
    try:
        tree = parsed(text)
    except SyntaxError as error:
        message = f"not valid Python: {without_tokens(error.msg)}"
        raise RecipeError(Problem("import-unreadable", message, file, error.lineno)) from None
    except (ValueError, RecursionError, MemoryError):
        raise RecipeError(Problem("import-unreadable", "not valid Python: nested too deep", file)) from None
    declared = declared_in(tree)
    reason = _not_read(tree, declared, started)
    if reason:
        reading.refuse(started.name.text, started.name.line, reason, MANUALLY)
        return None
    line = _command_line(reading, started, declared)
    return None if reading.refusals else script.read(text, file, line)


def _not_read(tree: ast.Module, declared: Declared, started: Started) -> str:
    """Why nothing can be made of a script; empty where something can."""
    if declared.other:
        return f"is of a training that is not here ({declared.other})"
    if declared.elsewhere:
        what = ", ".join(declared.elsewhere)
        return f"declares its arguments in another file ({what}), which is not read"
    if script.trains(tree, declared):
        return ""
    tool = tool_of(started.name.text)
    of = "" if tool is None else f" (it is of {tool})"
    return f"makes no Trainer of transformers or trl with its arguments{of}"


def _command_line(reading: Reading, started: Started, declared: Declared) -> script.CommandLine:
    """The flags of the line as the script's parser takes them."""
    flags, loose = known_flags(
        reading, started.words, declared.kind, lambda name: full_name(name, declared.names())
    )
    line = script.CommandLine(declared, reading.file, [], {}, {})
    name = PurePath(started.name.text).name
    for flag in flags:
        option = declared.options.get(flag.name)
        if option is None and declared.kind(flag.name) is not None:
            line.fields.append(flag)
        elif option is None and declared.lenient:
            reason = f"{name} declares no such argument, and leaves what it does not know"
            reading.drop(f"--{flag.name}", flag.value, flag.line, Effect.NONE, reason)
        elif option is None:
            reading.refuse(f"--{flag.name}", flag.line, f"is no argument that {name} declares", MANUALLY)
        elif flag.value is True and option.kind == "one":
            reading.refuse(f"--{flag.name}", flag.line, "has no value, and needs one")
        else:
            line.own[option.name] = None if flag.open else option.value(flag.value)
            line.flags[option.name] = flag
    for at, word in enumerate(loose):
        if at < len(declared.positionals):
            line.own[declared.positionals[at]] = word.text
            line.flags[declared.positionals[at]] = Flag(word.text, "", word.line)
        else:
            reading.refuse(word.text, word.line, f"is no argument that {name} declares")
    return line
