"""The flags of a launch line: words and values, and those of transformers' example scripts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from launcher.importing.arguments import (
    TRANSFORMERS_DEFAULTS,
    as_bool,
    as_number,
    dtype_name,
    field_kind,
    field_names,
    fill_defaults,
    take_argument,
)
from launcher.importing.reading import Effect, Reading, shown
from launcher.importing.row_sources import source_at
from launcher.importing.shell import Word
from launcher.importing.unsupported import MANUALLY, SCRIPT, tool_of
from launcher.tasks import DEFAULT_TASK, task_of_tool

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


CONFIGURATIONS = ("config_name", "model_type", "config_overrides")
"""Flags that describe a model, beside the one that names its weights."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a launch line."""

    name: str
    """Without its dashes, `-` as `_`."""
    value: Any
    """A text; several as a list; True without one."""
    line: int
    open: bool = False
    """Whether the value is only known when the line is run."""


def take_start(reading: Reading, flags: Sequence[Flag], program: Program, line: int) -> None:
    """What names a configuration: of a model that starts at random where no weights are named."""
    given = {flag.name: flag for flag in flags if flag.name in CONFIGURATIONS and not flag.open}
    trained = "model_name_or_path" in reading.seen or "model.name_or_path" in program.defaults
    for name, flag in given.items():
        if trained and name == "model_type":
            reading.know(name)
        elif trained:
            reading.drop(f"--{name}", flag.value, flag.line, Effect.TRAINING,
                         "the model is trained as its checkpoint describes it")  # fmt: skip
    if not trained and given:
        said = " ".join(f"--{flag.name} {shown(flag.value)}" for flag in given.values())
        reading.know(*given)
        reason = f"{said} without --model_name_or_path: the model starts at random"
        reading.needs("model.config", line, reason, "write model.config, not model.name_or_path")


def list_silent(reading: Reading, flags: Sequence[Flag], program: Program, line: int) -> None:
    """List defaults that change the training and have no recipe key."""
    given = {flag.name: flag for flag in flags}
    if "max_target_length" in program.flags.split() and "max_target_length" not in given:
        reason = "targets are cut at this length there; here data.max_length cuts them and the inputs"
        reading.drop("max_target_length", 128, line, Effect.TRAINING, reason)
    held_out = {"validation_file", "validation_split_percentage"} & given.keys()
    if program.name == "run_clm.py" and "train_file" in given and not held_out:
        reason = "run_clm.py holds 5 % of the rows out; here all are trained on"
        reading.drop("validation_split_percentage", 5, given["train_file"].line, Effect.TRAINING, reason,
                     "write data.eval: {split: 0.05}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Program:
    """One of transformers' examples/pytorch scripts."""

    name: str
    flags: str
    """Its own flags beside those of all examples and of TrainingArguments, parted by spaces."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Recipe key -> what the script uses where the line is silent."""

    @property
    def task(self) -> str:
        """What it trains."""
        task = task_of_tool("transformers", self.name)
        assert task is not None, f"no task is known as {self.name}"
        return task.name

    def names(self) -> set[str]:
        """All its flags."""
        return {*_OF_ALL.split(), *self.flags.split(), *field_names()}

    def kind(self, flag: str) -> str | None:
        """How many words a flag takes; None for one that the script does not have."""
        if flag in _SWITCHES:
            return "switch"
        if flag in (*_OF_ALL.split(), *self.flags.split()):
            return "one"
        return field_kind(flag)


_OF_ALL = """model_name_or_path config_name tokenizer_name cache_dir use_fast_tokenizer model_revision token
    use_auth_token trust_remote_code dataset_name dataset_config_name train_file validation_file
    max_train_samples max_eval_samples overwrite_cache preprocessing_num_workers"""
_SWITCHES = (
    "use_fast_tokenizer", "use_auth_token", "trust_remote_code", "overwrite_cache", "streaming",
    "keep_linebreaks", "low_cpu_mem_usage", "pad_to_max_length", "ignore_mismatched_sizes", "do_regression",
    "shuffle_train_dataset", "resize_position_embeddings", "ignore_pad_token_for_loss",
)  # fmt: skip
_PAIRS = """source_prefix max_source_length max_target_length val_max_target_length num_beams
    pad_to_max_length ignore_pad_token_for_loss forced_bos_token max_predict_samples test_file"""
_CLASSES = "max_seq_length pad_to_max_length max_predict_samples test_file ignore_mismatched_sizes"
EXAMPLES: dict[str, Program] = {
    program.name: program
    for program in (
        Program("run_clm.py", """model_type config_overrides torch_dtype dtype
            low_cpu_mem_usage streaming block_size validation_split_percentage keep_linebreaks""",
                {"data.max_length": 1024, "data.packing": True}),
        Program("run_summarization.py", f"""{_PAIRS} lang text_column summary_column
            resize_position_embeddings""", {"data.max_length": 1024, "data.overlong": "truncate"}),
        Program("run_translation.py", f"{_PAIRS} source_lang target_lang",
                {"data.max_length": 1024, "data.overlong": "truncate"}),
        Program("run_glue.py", f"{_CLASSES} task_name",
                {"data.max_length": 128, "data.overlong": "truncate"}),
        Program("run_classification.py", f"""{_CLASSES} do_regression
            text_column_names text_column_delimiter train_split_name validation_split_name test_split_name
            remove_splits remove_columns label_column_name shuffle_train_dataset shuffle_seed metric_name""",
                {"data.max_length": 128, "data.overlong": "truncate"}),
        Program("run_image_classification.py", """model_type image_processor_name
            feature_extractor_name train_dir validation_dir train_val_split image_column_name
            label_column_name ignore_mismatched_sizes""",
                {"model.name_or_path": "google/vit-base-patch16-224-in21k"}),
    )
}  # fmt: skip
"""By the file's name (transformers 4 and 5)."""
