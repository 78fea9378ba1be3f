"""The flags of a launch line: words and values, and those of transformers' example scripts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from launcher.importing.adapter import dtype_name
from launcher.importing.arguments import (
    TRANSFORMERS_DEFAULTS,
    as_bool,
    as_number,
    field_kind,
    fill_defaults,
    take_argument,
)
from launcher.importing.example_defaults import CONFIGURATIONS, Flag, list_silent, take_start
from launcher.importing.foreign import MANUALLY, SCRIPT, tool_of
from launcher.importing.found import Effect, Reading, shown
from launcher.importing.programs import EXAMPLES, Program
from launcher.importing.shell import Word
from launcher.importing.sources import source_at
from launcher.tasks import DEFAULT_TASK

OWN = "a flag of the script that no recipe key says"
NO_VALUE = "has no value, and needs one"


_FRAMEWORKS = re.compile(r"(?:^|/)(tensorflow|flax)(?=/)")
_ANY_NUMBER = re.compile(r"\$(?:[@*]|\{(?:[@*]|\w+\[[@*]\])\})")
"""What stands for any number of words: `$@`, `${ARGS[@]}`."""


def read_flags(
    words: Sequence[Word], kind_of: Callable[[str], str | None] | None = None
) -> tuple[list[Flag], list[Word]]:
    """Flags, and the words that belong to none: `--x v`, `--x=v`, `--x`, `--x a b`.

    kind_of: how many words a flag takes, by its name: `bare` none, `switch` true or false or none, `one`,
    `many`; None where that is not known, which is as `many`.
    """
    flags: list[Flag] = []
    loose: list[Word] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _is_flag(word, kind_of):
            loose.append(word)
            continue
        name, equals, text = word.text.lstrip("-").partition("=")
        plain = name.replace("-", "_")
        if equals:
            flags.append(Flag(plain, text, word.line, word.open))
            continue
        values = _values(words, at, kind_of(plain) if kind_of is not None else None)
        at += len(values)
        value: Any = [v.text for v in values] if len(values) > 1 else values[0].text if values else True
        flags.append(Flag(plain, value, word.line, any(v.open for v in values)))
    return flags, loose


def known_flags(
    reading: Reading,
    words: Sequence[Word],
    kind_of: Callable[[str], str | None] | None,
    full: Callable[[str], str] = str,
) -> tuple[list[Flag], list[Word]]:
    """The flags of a program, and the words left; arguments that a shell puts there later are refused.

    full: the name of a flag that may be abbreviated.
    """
    flags, loose = read_flags(words, kind_of and (lambda name: kind_of(full(name))))
    rest = []
    for word in loose:
        if word.open:
            reading.refuse(word.text, word.line, "holds arguments that are known only when the line is run",
                           "write what it stands for")  # fmt: skip
        elif word.text.strip():  # a blank after `\\` at a line's end is a word to a shell
            rest.append(word)
    named = [replace(flag, name=full(flag.name)) for flag in flags]
    return [flag for flag in named if flag.name != "local_rank"], rest


def full_name(name: str, names: Iterable[str]) -> str:
    """The flag that argparse takes an abbreviation for; the name itself where there is none, or several."""
    known = set(names)
    long = [other for other in known if other.startswith(name)] if name not in known else []
    return long[0] if len(long) == 1 else name


def _is_flag(word: Word, kind_of: Callable[[str], str | None] | None) -> bool:
    """`--name`, and `-n` where the script declares it."""
    if word.text.startswith("--"):
        return len(word.text) > 2
    short = word.text.startswith("-") and as_number(word.text) is None and len(word.text) > 1
    return short and kind_of is not None and kind_of(word.text.lstrip("-").replace("-", "_")) is not None


def _values(words: Sequence[Word], at: int, kind: str | None) -> list[Word]:
    """The words after a flag that are its value."""
    values: list[Word] = []
    most = {"bare": 0, "switch": 1, "one": 1}.get(kind or "", len(words))
    for index in range(at, min(at + most, len(words))):
        word = words[index]
        if word.text.startswith("--") or (kind == "switch" and as_bool(word.text) is None):
            break
        if word.open and _ANY_NUMBER.search(word.text):
            break
        values.append(word)
    return values


def take_started(
    reading: Reading, name: Word, words: Sequence[Word], spawned_by: str, *, is_module: bool, folder: str = ""
) -> None:
    """Take the flags of a script that is known by its name; every other one is refused.

    spawned_by: deepspeed, accelerate, torchrun or python. folder: where a `cd` before it leads.
    """
    program = None if name.open or is_module else EXAMPLES.get(PurePath(name.text).name)
    other = _FRAMEWORKS.search(f"{folder}/{name.text}")
    if program is not None and other is not None:
        message = f"is the example of that name for {other[1]}, which import does not read"
        reading.refuse(name.text, name.line, message, MANUALLY, SCRIPT)
    elif program is not None:
        _take_program(reading, name, words, program)
    else:
        tool = tool_of(name.text)
        message = "is no program that import knows: what its flags mean is not known"
        if name.open:
            message = "may be the program, and is only known when the line is run: write what it stands for"
        elif tool is not None:
            message = f"is of {tool}, which import does not read"
        reading.refuse(name.text, name.line, message, MANUALLY, SCRIPT)
    if spawned_by != "accelerate" and reading.value("sharding.engine") is None:
        reading.take("sharding.engine", "ddp", name.line, f"{spawned_by}: ddp", default=True)


def _take_program(reading: Reading, name: Word, words: Sequence[Word], program: Program) -> None:
    """One of transformers' examples; a flag that it does not have means another script of the same name."""
    flags, loose = known_flags(reading, words, program.kind, lambda flag: full_name(flag, program.names()))
    for flag in flags:
        if program.kind(flag.name) is None:
            message = f"is no flag of transformers' {program.name}: it is another script of that name"
            reading.refuse(f"--{flag.name}", flag.line, message, MANUALLY, SCRIPT)
    for word in loose:
        reading.refuse(word.text, word.line, f"is no argument that {program.name} takes")
    if not reading.refusals:
        take_flags(reading, flags, program, name.line)


def take_flags(reading: Reading, flags: Sequence[Flag], program: Program, line: int) -> None:
    """Take all flags of one of transformers' examples, and its own defaults."""
    rows = _Rows()
    if program.task != DEFAULT_TASK:
        reading.take("task", program.task, line, f"{program.name}: {program.task}")
    for flag in flags:
        take_flag(reading, flag, lambda flag: _take(reading, flag, rows))
    if not any(flag.name == "do_train" and as_bool(flag.value) is not False for flag in flags):
        reading.refuse(program.name, line, "without --do_train does not train")
    _take_rows(reading, rows)
    take_start(reading, flags, program, line)
    list_silent(reading, flags, program, line)
    open_names = {flag.name for flag in flags if flag.open}
    for key, value in program.defaults.items():
        if key == "data.max_length" and open_names & set(_LENGTHS):
            continue
        said = f"{key.rpartition('.')[2]}: {shown(value)}"
        reading.take(key, value, None, said, default=True)
    if program.name == "run_clm.py":
        reading.drop("block_size", reading.value("data.max_length"), line, Effect.TRAINING,
                     "run_clm.py joins all texts and cuts them into blocks; here no document of a block sees "
                     "another")  # fmt: skip
    fill_defaults(reading, TRANSFORMERS_DEFAULTS)


def take_flag(reading: Reading, flag: Flag, take: Callable[[Flag], bool]) -> None:
    """One flag of a known parser: taken, or listed where its value is not known or is not there."""
    if flag.open:
        _leave_open(reading, flag)
    elif flag.name not in CONFIGURATIONS and not take(flag):
        reading.drop(f"--{flag.name}", flag.value, flag.line, Effect.TRAINING, OWN)


def take_training_argument(reading: Reading, flag: Flag) -> bool:
    """A field of TrainingArguments; one that needs a value and has none is refused, as its parser does."""
    kind = field_kind(flag.name)
    if kind is None:
        return False
    if flag.value is True and kind in ("one", "many") and flag.name != "fsdp":
        reading.refuse(f"--{flag.name}", flag.line, NO_VALUE)
        return True
    if kind == "bare":
        return take_argument(reading, flag.name.removeprefix("no_"), False, flag.line)
    return take_argument(reading, flag.name, flag.value, flag.line)


def _leave_open(reading: Reading, flag: Flag) -> None:
    if flag.name in _ADDRESSES:
        key = "model.name_or_path" if flag.name == "model_name_or_path" else "data.train"
        reading.know(flag.name)
        reading.needs(key, flag.line, f"--{flag.name} {shown(flag.value)} is known only when the line is run")
        return
    idle = is_idle(flag.name)
    effect = Effect.NONE if idle else Effect.NEEDED
    reading.drop(f"--{flag.name}", flag.value, flag.line, effect, "known only when the line is run",
                 "" if idle else "write what it stands for")  # fmt: skip


def is_idle(name: str) -> bool:
    """Whether a flag changes nothing of the training, whatever its value is: names, paths, logging."""
    return name in _IDLE


@dataclass(slots=True)
class _Rows:
    """Flags that name rows, which make one or two sources together."""

    train: Flag | None = None
    eval: Flag | None = None
    name: Flag | None = None
    split: Flag | None = None
    share: Flag | None = None
    task: Flag | None = None
    """Of run_glue.py: one of the sets of GLUE."""


def _take(reading: Reading, flag: Flag, rows: _Rows) -> bool:
    """Whether the flag is taken, dropped or known."""
    if flag.name in _ALIASES:
        _ALIASES[flag.name](reading, flag)
        return True
    if flag.name in _ROW_FLAGS:
        setattr(rows, _ROW_FLAGS[flag.name], flag)
        reading.know(flag.name)
        return True
    return take_training_argument(reading, flag)


def _text(to: str) -> Callable[[Reading, Flag], None]:
    def take(reading: Reading, flag: Flag) -> None:
        if flag.value in ("", "None", True):
            reading.know(flag.name)
        else:
            reading.take(to, str(flag.value), flag.line, flag.name)

    return take


def _trust(reading: Reading, flag: Flag) -> None:
    reading.know(flag.name)
    if as_bool(flag.value):
        reading.take("model.trust_remote_code", True, flag.line, flag.name)


def _dtype(reading: Reading, flag: Flag) -> None:
    name = dtype_name(flag.value)
    if name is None:
        reading.drop(flag.name, flag.value, flag.line, Effect.TRAINING, "no dtype that is known here")
    else:
        reading.take("model.dtype", name, flag.line, flag.name)


def _length(reading: Reading, flag: Flag) -> None:
    number = as_number(flag.value)
    if not isinstance(number, int) or number < 8:
        reading.drop(flag.name, flag.value, flag.line, Effect.NEEDED, "expected a number of tokens from 8")
        return
    reading.take("data.max_length", number, flag.line, flag.name)


def _samples(reading: Reading, flag: Flag) -> None:
    reading.drop(
        flag.name, flag.value, flag.line, Effect.TRAINING, "all rows are used; there is no limit of rows"
    )


def _prepared(reading: Reading, flag: Flag) -> None:
    reading.drop(flag.name, flag.value, flag.line, Effect.NONE, "prepared rows are kept by `prepare`")


def _streaming(reading: Reading, flag: Flag) -> None:
    reading.know(flag.name)
    if as_bool(flag.value):
        reading.take("data.streaming", True, flag.line, flag.name)


def _workers(reading: Reading, flag: Flag) -> None:
    number = as_number(flag.value)
    reading.know(flag.name)
    if isinstance(number, int) and number > 0:
        reading.take("data.num_proc", number, flag.line, flag.name)


def _silent(reading: Reading, flag: Flag) -> None:
    reading.know(flag.name)


_LENGTHS = ("max_seq_length", "block_size", "max_source_length")
_IDLE = (
    "output_dir", "logging_dir", "run_name", "project", "report_to", "hub_model_id", "hub_token", "cache_dir",
    "overwrite_cache", "preprocessing_num_workers", "dataloader_num_workers", "logging_steps",
    "save_total_limit", "token", "use_auth_token", "resume_from_checkpoint", "overwrite_output_dir",
    "disable_tqdm", "do_eval", "do_predict", "local_rank",
)  # fmt: skip
_ADDRESSES = ("model_name_or_path", "dataset_name", "train_file", "train_dir", "task_name")
_ALIASES: dict[str, Callable[[Reading, Flag], None]] = {
    "model_name_or_path": _text("model.name_or_path"),
    "tokenizer_name": _text("model.tokenizer"),
    "model_revision": _text("model.revision"),
    "cache_dir": _text("model.cache_dir"),
    "trust_remote_code": _trust,
    "torch_dtype": _dtype,
    "dtype": _dtype,
    **dict.fromkeys(_LENGTHS, _length),
    **dict.fromkeys(("max_train_samples", "max_eval_samples"), _samples),
    "overwrite_cache": _prepared,
    "preprocessing_num_workers": _workers,
    "streaming": _streaming,
    **dict.fromkeys(("use_fast_tokenizer", "low_cpu_mem_usage", "use_auth_token", "test_file",
                     "max_predict_samples", "pad_to_max_length", "ignore_mismatched_sizes"), _silent),
}  # fmt: skip
_ROW_FLAGS = {
    "dataset_name": "train", "train_file": "train", "train_dir": "train", "task_name": "task",
    "validation_file": "eval", "validation_dir": "eval", "dataset_config_name": "name",
    "train_split_name": "split", "validation_split_percentage": "share",
}  # fmt: skip


def _of_glue(reading: Reading, rows: _Rows) -> None:
    """`--task_name mrpc` is a set of GLUE."""
    task = rows.task
    if task is None or task.open:
        return
    if str(task.value).lower() == "stsb":
        reading.refuse("--task_name", task.line, "is stsb, a regression, which is no task here")
    rows.train = Flag("task_name", "nyu-mll/glue", task.line)
    rows.name = Flag("task_name", str(task.value).lower(), task.line)


def _take_rows(reading: Reading, rows: _Rows) -> None:
    _of_glue(reading, rows)
    if rows.train is not None and not rows.train.open:
        name = None if rows.name is None or rows.name.value == "None" else rows.name.value
        split = None if rows.split is None else rows.split.value
        given = {"name": name, "split": split}
        source = source_at(reading, rows.train.name, rows.train.line, rows.train.value, given)
        if source is not None:
            reading.take(
                "data.train", [source], rows.train.line, f"{rows.train.name}: {shown(rows.train.value)}"
            )
            reading.drop(rows.train.name, rows.train.value, rows.train.line, Effect.TRAINING,
                         "what the script makes of a row is its own; here it is read by its columns",
                         "look with `effilaunch prepare RECIPE --show 1`, or write a format_row")  # fmt: skip
    if rows.eval is not None:
        source = source_at(reading, rows.eval.name, rows.eval.line, rows.eval.value)
        if source is not None:
            reading.take("data.eval", [source], rows.eval.line, f"{rows.eval.name}: {shown(rows.eval.value)}")
    elif rows.share is not None and (share := as_number(rows.share.value)) is not None and 0 < share < 100:
        reading.take("data.eval", {"split": share / 100}, rows.share.line, f"{rows.share.name}: {share}")
