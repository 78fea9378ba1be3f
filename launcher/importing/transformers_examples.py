"""The flags of a launch line, and the example scripts of transformers with their own flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from launcher.importing.arguments import (
    TRANSFORMERS_DEFAULTS,
    field_kind,
    field_names,
    fill_defaults,
    take_argument,
)
from launcher.importing.conversions import Drop, Taker, To, as_bool, as_number, dtype_name, ignore, on, tokens
from launcher.importing.reading import Effect, Given, Reading, shown
from launcher.importing.row_sources import NO_LIMIT, source_at
from launcher.importing.shell import Word
from launcher.importing.unsupported import MANUALLY, SCRIPT, tool_of
from launcher.tasks import DEFAULT_TASK, task_of_tool
from launcher.tasks.sequence_classification import REGRESSION

KindOf = Callable[[str], str | None]
"""How many words a flag takes, by its name: `bare` none, `switch` true or false or none, `one`, `many`; None
where the program has no such flag."""
_FRAMEWORKS = re.compile(r"(?:^|/)(tensorflow|flax)(?=/)")
_ANY_NUMBER = re.compile(r"\$(?:[@*]|\{(?:[@*]|\w+\[[@*]\])\})")
"""Any number of words: `$@`, `${ARGS[@]}`."""


def read_flags(words: Sequence[Word], kind_of: KindOf | None = None) -> tuple[list[Given], list[Word]]:
    """Flags (`--x v`, `--x=v`, `--x`, `--x a b`) without their dashes, and the words that belong to none.

    kind_of: where it is None or has no such flag, a flag takes all words up to the next one.
    """
    flags: list[Given] = []
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
            flags.append(Given(plain, text, word.line, word.open))
            continue
        values = _values(words, at, kind_of(plain) if kind_of is not None else None)
        at += len(values)
        value: Any = [v.text for v in values] if len(values) > 1 else values[0].text if values else True
        flags.append(Given(plain, value, word.line, any(v.open for v in values)))
    return flags, loose


def known_flags(
    reading: Reading, words: Sequence[Word], kind_of: KindOf | None, full: Callable[[str], str] = str
) -> tuple[list[Given], list[Word]]:
    """The flags of a program, and the words left; arguments that a shell puts there later are refused.

    full: the name of a flag that may be abbreviated.
    """
    flags, loose = read_flags(words, kind_of and (lambda name: kind_of(full(name))))
    rest = []
    for word in loose:
        if word.open:
            message = "holds arguments that are known only when the line is run"
            reading.refuse(Given(word.text, None, word.line), message, "write its value")
        elif word.text.strip():  # a blank after `\\` at a line's end is a word to a shell
            rest.append(word)
    named = [replace(flag, name=full(flag.name)) for flag in flags]
    return [flag for flag in named if flag.name != "local_rank"], rest


def full_name(name: str, names: Iterable[str]) -> str:
    """The flag that argparse takes an abbreviation for; the name itself where there is none, or several."""
    known = set(names)
    long = [other for other in known if other.startswith(name)] if name not in known else []
    return long[0] if len(long) == 1 else name


def _is_flag(word: Word, kind_of: KindOf | None) -> bool:
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
    other, tool = _FRAMEWORKS.search(f"{folder}/{name.text}"), tool_of(name.text)
    script = Given(name.text, None, name.line)
    if program is not None and other is None:
        _take_program(reading, script, words, program)
    else:
        message = "is no program that import knows: what its flags mean is not known"
        if program is not None and other is not None:
            message = f"is the example of that name for {other[1]}, which import does not read"
        elif name.open:
            message = "may be the program, and is known only when the line is run: write its value"
        elif tool is not None:
            message = f"is of {tool}, which import does not read"
        reading.refuse(script, message, MANUALLY, SCRIPT)
    if spawned_by != "accelerate" and reading.value("sharding.engine") is None:
        reading.default("sharding.engine", "ddp", f"{spawned_by}: ddp", line=name.line)


def _take_program(reading: Reading, script: Given, words: Sequence[Word], program: Program) -> None:
    """One of transformers' examples; a flag that it does not have means another script of the same name."""
    flags, loose = known_flags(reading, words, program.kind, lambda flag: full_name(flag, program.names()))
    for flag in flags:
        if program.kind(flag.name) is None:
            message = f"is no flag of transformers' {program.name}: it is another script of that name"
            reading.refuse(replace(flag, name=f"--{flag.name}"), message, MANUALLY, SCRIPT)
    for word in loose:
        reading.refuse(Given(word.text, None, word.line), f"is no argument that {program.name} takes")
    if not reading.refusals:
        take_flags(reading, flags, program, script.line)


def take_flags(reading: Reading, flags: Sequence[Given], program: Program, line: int | None) -> None:
    """Take all flags of one of transformers' examples, and its own defaults."""
    rows: dict[str, Given] = {}
    if program.task != DEFAULT_TASK:
        reading.take(
            "task", program.task, Given(program.name, None, line), said=f"{program.name}: {program.task}"
        )
    for flag in flags:
        if flag.open:
            _leave_open(reading, flag)
        elif flag.name in _OWN_FLAGS:
            _OWN_FLAGS[flag.name](reading, flag)
        elif flag.name in _ROW_FLAGS:
            rows[_ROW_FLAGS[flag.name]] = flag
            reading.know(flag.name)
        elif flag.name not in _CONFIGURATIONS and not _take_training_argument(reading, flag):
            own = replace(flag, name=f"--{flag.name}")
            reading.drop(own, Effect.TRAINING, "a flag of the script that has no recipe key")
    if not any(flag.name == "do_train" and as_bool(flag.value) is not False for flag in flags):
        reading.refuse(Given(program.name, None, line), "without --do_train does not train")
    _take_rows(reading, rows)
    given = {flag.name: flag for flag in flags}
    _take_configuration(reading, given, program, line)
    _list_defaults(reading, given, program, line)
    cut = any(given[name].open for name in _LENGTHS if name in given)
    for key, value in program.defaults.items():
        if key != "data.max_length" or not cut:
            reading.default(key, value, key.rpartition(".")[2])
    if program.name == "run_clm.py":
        length = Given("block_size", reading.value("data.max_length"), line)
        reading.drop(length, Effect.TRAINING, "run_clm.py joins all texts and cuts them into blocks; here no "
                     "document of a block sees another")  # fmt: skip
    fill_defaults(reading, TRANSFORMERS_DEFAULTS)


def _take_training_argument(reading: Reading, flag: Given) -> bool:
    """A field of TrainingArguments; one that needs a value and has none is refused, as its parser does."""
    kind = field_kind(flag.name)
    if kind is None:
        return False
    if flag.value is True and kind in ("one", "many") and flag.name != "fsdp":
        reading.refuse(replace(flag, name=f"--{flag.name}"), "has no value, and needs one")
        return True
    if kind == "bare":
        flag = replace(flag, name=flag.name.removeprefix("no_"), value=False)
    return take_argument(reading, flag)


def _leave_open(reading: Reading, flag: Given) -> None:
    if flag.name in _ADDRESSES:
        key = "model.name_or_path" if flag.name == "model_name_or_path" else "data.train"
        reading.know(flag.name)
        reading.needs(key, flag.line, f"--{flag.name} {shown(flag.value)} is known only when the line is run")
        return
    effect, hint = (Effect.NONE, "") if is_idle(flag.name) else (Effect.NEEDED, "write its value")
    reading.drop(replace(flag, name=f"--{flag.name}"), effect, "known only when the line is run", hint)


def is_idle(name: str) -> bool:
    """Whether a flag changes nothing of the training, whatever its value is: names, paths, logging."""
    return name in _IDLE


def _text(value: Any) -> str | None:
    return None if value in ("", "None", True) else str(value)


def _dtype(value: Any) -> str:
    name = dtype_name(value)
    if name is None:
        raise ValueError("float32, bfloat16, float16 or auto")
    return name


def _workers(value: Any) -> int | None:
    number = as_number(value)
    return number if isinstance(number, int) and number > 0 else None


_LENGTHS = ("max_seq_length", "block_size", "max_source_length")
_IDLE = (
    "output_dir", "logging_dir", "run_name", "project", "report_to", "hub_model_id", "hub_token", "cache_dir",
    "overwrite_cache", "preprocessing_num_workers", "dataloader_num_workers", "logging_steps",
    "save_total_limit", "token", "use_auth_token", "resume_from_checkpoint", "overwrite_output_dir",
    "disable_tqdm", "do_eval", "do_predict", "local_rank",
)  # fmt: skip
_ADDRESSES = ("model_name_or_path", "dataset_name", "train_file", "train_dir", "task_name")
_OWN_FLAGS: dict[str, Taker] = {
    "model_name_or_path": To("model.name_or_path", _text),
    "tokenizer_name": To("model.tokenizer", _text),
    "model_revision": To("model.revision", _text),
    "cache_dir": To("model.cache_dir", _text),
    "trust_remote_code": To("model.trust_remote_code", on(True)),
    **dict.fromkeys(("torch_dtype", "dtype"), To("model.dtype", _dtype, effect=Effect.TRAINING)),
    **dict.fromkeys(_LENGTHS, To("data.max_length", tokens)),
    **dict.fromkeys(("max_train_samples", "max_eval_samples"), Drop(Effect.TRAINING, NO_LIMIT)),
    "overwrite_cache": Drop(Effect.NONE, "prepared rows are kept by `prepare`"),
    "preprocessing_num_workers": To("data.num_proc", _workers),
    "streaming": To("data.streaming", on(True)),
    "do_regression": To("data.problem_type", lambda value: REGRESSION if as_bool(value) else None),
    **dict.fromkeys(("use_fast_tokenizer", "low_cpu_mem_usage", "use_auth_token", "test_file",
                     "max_predict_samples", "pad_to_max_length", "ignore_mismatched_sizes"), ignore),
}  # fmt: skip
_ROW_FLAGS = {
    "dataset_name": "train", "train_file": "train", "train_dir": "train", "task_name": "task",
    "validation_file": "eval", "validation_dir": "eval", "dataset_config_name": "name",
    "train_split_name": "split", "validation_split_percentage": "share",
}  # fmt: skip


def _take_rows(reading: Reading, rows: dict[str, Given]) -> None:
    name, split, task = (rows[key].value if key in rows else None for key in ("name", "split", "task"))
    train = rows.get("train")
    if task is not None:  # one of the sets of GLUE
        line = rows["task"].line
        if str(task).lower() == "stsb":
            reading.take("data.problem_type", REGRESSION, rows["task"], said="--task_name stsb: scores")
        train, name = Given("task_name", "nyu-mll/glue", line), str(task).lower()
    if train is not None:
        source = source_at(reading, train, name=None if name == "None" else name, split=split)
        if source is not None:
            reading.take("data.train", [source], train)
            reason = "the script prepares rows in its own way; here they are read by their columns"
            hint = "look with `effilaunch prepare RECIPE --show 1`, or write a format_row"
            reading.drop(train, Effect.TRAINING, reason, hint)
    if "eval" in rows:
        source = source_at(reading, rows["eval"])
        if source is not None:
            reading.take("data.eval", [source], rows["eval"])
    elif "share" in rows and (share := as_number(rows["share"].value)) is not None and 0 < share < 100:
        reading.take("data.eval", {"split": share / 100}, rows["share"])


_CONFIGURATIONS = ("config_name", "model_type", "config_overrides")
"""Flags that describe a model's configuration."""


def _take_configuration(
    reading: Reading, flags: Mapping[str, Given], program: Program, line: int | None
) -> None:
    """Flags of a configuration: of a model that starts at random where no weights are named."""
    given = [flags[name] for name in flags if name in _CONFIGURATIONS and not flags[name].open]
    trained = "model_name_or_path" in reading.seen or "model.name_or_path" in program.defaults
    if given and not trained:
        said = " ".join(f"--{flag.name} {shown(flag.value)}" for flag in given)
        reading.know(*(flag.name for flag in given))
        reason = f"{said} without --model_name_or_path: the model starts at random"
        reading.needs("model.config", line, reason, "write model.config, not model.name_or_path")
        return
    for flag in given:
        if flag.name == "model_type":
            reading.know(flag.name)
        else:
            reason = "the model is trained as its checkpoint describes it"
            reading.drop(replace(flag, name=f"--{flag.name}"), Effect.TRAINING, reason)


def _list_defaults(reading: Reading, given: Mapping[str, Given], program: Program, line: int | None) -> None:
    """Drop defaults that change the training and have no recipe key."""
    if "max_target_length" in program.flags.split() and "max_target_length" not in given:
        reason = "targets are cut at this length there; here data.max_length cuts them and the inputs"
        reading.drop(Given("max_target_length", 128, line), Effect.TRAINING, reason)
    held_out = {"validation_file", "validation_split_percentage"} & given.keys()
    if program.name == "run_clm.py" and "train_file" in given and not held_out:
        share = Given("validation_split_percentage", 5, given["train_file"].line)
        reason = "run_clm.py holds 5 % of the rows out; here all are trained on"
        reading.drop(share, Effect.TRAINING, reason, "write data.eval: {split: 0.05}")


@dataclass(frozen=True, slots=True)
class Program:
    """One of transformers' examples/pytorch scripts."""

    name: str
    flags: str
    """Its own flags, without those of all examples and of TrainingArguments, separated by spaces."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Recipe key -> the script's default."""

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
