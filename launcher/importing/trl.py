"""What becomes of TRL's keys: tables for its reader, and for the page about coming from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.facts.safe_files import parse_json
from launcher.importing.accelerate import finish_deepspeed, is_option, take_option
from launcher.importing.arguments import (
    as_bool,
    as_number,
    dtype_name,
    field_kind,
    fill_defaults,
    take_argument,
    take_default_targets,
    take_quantization,
)
from launcher.importing.environment import take_env
from launcher.importing.key_tables import (
    Key,
    Left,
    Peer,
    Row,
    Tool,
    close_peer,
    if_on,
    is_off,
    leave_keys,
    leave_rest,
    load_tool,
    open_peer,
    rows_of,
    switch,
    take_keys,
    text,
    texts,
    whole,
)
from launcher.importing.llamafactory import revision
from launcher.importing.reading import Effect, Place, Reading, shown
from launcher.importing.row_sources import BUILDERS, evaluation_share, source_at
from launcher.recipe.field_tables import trainer_fields
from launcher.recipe.suggestions import TRAINER_REMOVED
from launcher.tasks import DEFAULT_TASK, TASKS, task_of_tool, words_of_tool
from launcher.tasks.task import Task


def multiple(value: Any) -> int | None:
    """A number to fill up to; auto says nothing."""
    return None if value == "auto" else whole(value)


KEYS: tuple[Key, ...] = (
    Key("model_name_or_path", "model.name_or_path", text),
    Key("model_revision", "model.revision", revision),
    Key("trust_remote_code", "model.trust_remote_code", if_on),
    Key("dataset_num_proc", "data.num_proc", whole),
    Key("pad_to_multiple_of", "data.pad_to_multiple_of", multiple),
    Key("dataset_streaming", "data.streaming", if_on, "needs max_steps"),
    Key("streaming", "data.streaming", if_on, "needs max_steps"),
)
LORA_KEYS: tuple[Key, ...] = (
    Key("lora_r", "adapter.r", None, "16 where it is absent"),
    Key("lora_alpha", "adapter.lora_alpha", None, "32 where it is absent"),
    Key("lora_dropout", "adapter.lora_dropout", None, "0.05 where it is absent"),
    Key("lora_target_modules", "adapter.target_modules", None, "peft's own for the model where it is absent"),
    Key("lora_target_parameters", "adapter.target_parameters", texts),
    Key("lora_modules_to_save", "adapter.modules_to_save", texts),
    Key("use_rslora", "adapter.use_rslora", switch),
    Key("use_dora", "adapter.use_dora", switch),
)
"""With use_peft: true."""
HANDLED: tuple[Row, ...] = (
    ("dtype", "model.dtype", "float32 where it is absent; of a quantised model its compute_dtype"),
    ("torch_dtype", "model.dtype", "as dtype"),
    ("attn_implementation", "model.attn_implementation", "kernels of the hub are listed"),
    ("model_init_kwargs", "model", "dtype, attn_implementation, revision; others are listed"),
    ("use_peft", "adapter.type", "without it the lora_ keys are without effect"),
    ("lora_task_type", "task", "CAUSAL_LM alone"),
    ("load_in_4bit", "model.quantization", "no double quantisation where use_bnb_nested_quant is absent"),
    ("load_in_8bit", "model.quantization", "int8"),
    ("bnb_4bit_quant_type", "model.quantization", "nf4 where it is absent"),
    ("use_bnb_nested_quant", "model.quantization", ""),
    ("max_length", "data.max_length", "1024 where it is absent"),
    ("max_seq_length", "data.max_length", "the older name"),
    ("truncation_mode", "data.overlong", "keep_start: truncate"),
    ("packing", "data.packing", ""),
    ("packing_strategy", "data.overlong", "bfd: truncate; bfd_split: split; wrapped is listed"),
    ("padding_free", "data.padding_free", "without packing"),
    ("dataset_text_field", "data.train", "columns, where it is not text"),
    ("completion_only_loss", "data.loss_on", "true: completion; false: all"),
    ("assistant_only_loss", "data.loss_on", "true: assistant; without it chats are learnt whole: all"),
    ("chat_template", "model.chat_template", "the text"),
    ("chat_template_path", "model.chat_template", "a file; of a model's id the text is needed"),
    ("accelerate_config", "sharding", "TRL's own names; a file is read, too"),
    ("num_processes", "hardware", "told, not written"),
    ("num_machines", "hardware", "told, not written"),
    ("env", "launch.env", "what a run does not set itself"),
    ("wandb_project", "launch.env.WANDB_PROJECT", ""),
    ("wandb_entity", "launch.env.WANDB_ENTITY", ""),
    ("beta", "trainer.beta", "the task is dpo; asked for where no other key and no name says dpo"),
    ("bf16", "precision", "true where neither bf16 nor fp16 is there"),
    ("dataset_name", "data.train", "the full id of a data set, or a path"),
    ("dataset_config", "data.train", "name"),
    ("dataset_configs", "data.train", "a source for each"),
    ("dataset_train_split", "data.train", "split"),
    ("dataset_test_split", "data.eval", "where eval_strategy is not no"),
    ("datasets", "data.train", "a source for each"),
    ("dataset_mixture", "data.train", "a source for each"),
    ("dataset_mixer", "data.train", "a source for each, by dataset_splits"),
    ("dataset_splits", "data.train", "train… is trained on, test… evaluated"),
    ("test_split_size", "data.eval", "a share"),
)
"""(key, recipe key, note) of what the reader looks at itself. All others are TrainingArguments."""

_SAME = Effect.NONE
_OTHER = Effect.TRAINING
LEFT: tuple[Left, ...] = (
    Left(_SAME, "how 4 bits lie in memory; the planner decides it", "bnb_4bit_quant_storage"),
    Left(_SAME, "evaluation rows are packed as the others", "eval_packing"),
    Left(_SAME, "rows are shuffled anyway", "shuffle_dataset"),
    Left(_SAME, "padding is never learnt", "pad_token"),
    Left(_SAME, "memory only; the planner chooses", "activation_offloading ignore_bias_buffers"),
    Left(_SAME, "the launcher finds ranks and addresses", """machine_rank main_process_ip main_process_port
        rdzv_backend same_network main_training_function"""),
    Left(_SAME, "not part of a run", """callbacks benchmarks hub_model_revision overwrite_hub_revision
        push_to_hub_revision wandb_run_group"""),
    Left(_OTHER, "unless it is the tokenizer's own", "eos_token"),
    Left(_OTHER, "the chat template alone makes the text", "system_prompt"),
    Left(_OTHER, "the loss of the router is the model's own", "router_aux_loss_coef"),
)  # fmt: skip
"""Keys that stay behind."""

PROFILES: dict[str, dict[str, Any]] = {
    "single_gpu": {},
    "multi_gpu": {"sharding.engine": "ddp"},
    "fsdp1": {"sharding.engine": "fsdp"},
    "fsdp2": {"sharding.engine": "fsdp"},
    **{f"zero{stage}": {"sharding.engine": "deepspeed", "sharding.zero_stage": stage} for stage in (1, 2, 3)},
}
"""accelerate_config by name -> what it stands for."""


_LONGEST = 1_000_000
"""Bytes of the first row that are looked at."""
_TURNS = ("messages", "conversations")


def take_rows(peer: Peer) -> None:
    """Take the sources, and which of their tokens are learnt."""
    peer.reading.know("dataset_splits")
    sources = [*_named(peer), *_listed(peer), *_mixed(peer)]
    pairs = peer.reading.task.ranks_answers
    column = peer.get("dataset_text_field")
    if column not in (None, "text") and not pairs:
        for source in sources:
            source |= {"format": "text", "columns": {"text": str(column)}}
    if sources:
        key = next(
            key
            for key in ("dataset_name", "datasets", "dataset_mixture", "dataset_mixer")
            if key in peer.values
        )
        peer.reading.take("data.train", sources, peer.line(key), key)
    else:
        peer.reading.needs("data.train", None, "no data set could be taken")
    size = peer.get("test_split_size")
    if size is not None:
        _share(peer, "test_split_size", size, peer.line("test_split_size"))
    if not pairs:
        _take_loss(peer, sources)


def _named(peer: Peer) -> list[dict[str, Any]]:
    """`dataset_name` with its splits."""
    name, line = peer.get("dataset_name"), peer.line("dataset_name")
    config, configs = peer.get("dataset_config"), peer.get("dataset_configs")
    split, test = peer.get("dataset_train_split") or "train", peer.get("dataset_test_split")
    if name is None:
        return []
    several = configs if isinstance(configs, list) and configs else [config]
    found = [
        source_at(peer.reading, "dataset_name", line, name, {"name": one, "split": split}) for one in several
    ]
    evaluated = peer.reading.value("trainer.eval_strategy") not in (None, "no")
    if evaluated and "test_split_size" not in peer.values:
        given = {"name": several[0], "split": test or "test"}
        rows = source_at(peer.reading, "dataset_test_split", line, name, given)
        if rows is not None:
            said = f"dataset_test_split: {test or 'test'}"
            peer.reading.take("data.eval", [rows], peer.line("dataset_test_split") or line, said)
            peer.reading.know("dataset_test_split")
    return [source for source in found if source is not None]


def _listed(peer: Peer) -> list[dict[str, Any]]:
    """`datasets: [{path, name, split, data_files, fraction}]`."""
    entries = peer.get("datasets")
    sources = []
    for index, entry in enumerate(
        entries if isinstance(entries, list) else [] if entries is None else [entries]
    ):
        at = f"datasets[{index}]"
        if not isinstance(entry, dict):
            peer.reading.drop(at, entry, peer.line(at), Effect.NEEDED, "expected a mapping with a path")
            continue
        source = _one(peer, at, {key: value for key, value in entry.items() if value is not None})
        if source is not None:
            sources.append(source)
    return sources


def _one(peer: Peer, at: str, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    path, files = entry.get("path"), entry.get("data_files")
    line = peer.line(f"{at}.path") or peer.line(at)
    for key, value in entry.items():
        place = peer.line(f"{at}.{key}")
        if key == "fraction":
            reason = "a share of the mixture, of first rows; `weight` of a source is how often it is seen"
            peer.reading.drop(f"{at}.fraction", value, place, Effect.TRAINING, reason)
        elif key == "columns":
            _list_columns(peer, at, value)
        elif key not in ("path", "name", "split", "data_files"):
            peer.reading.drop(f"{at}.{key}", value, place, Effect.NEEDED, "no key of a source says it")
    if files is not None:
        if path not in BUILDERS or not isinstance(files, str):
            reason, hint = "no file of a data set of the hub can be named", "download it, and name the file"
            peer.reading.drop(f"{at}.data_files", files, line, Effect.NEEDED, reason, hint)
            return None
        path = files
    return source_at(
        peer.reading, f"{at}.path", line, path, {"name": entry.get("name"), "split": entry.get("split")}
    )


def _list_columns(peer: Peer, at: str, columns: Any) -> None:
    """Columns that are kept: only those of a chat template's variables would change a row."""
    if columns is None:
        return
    varied = isinstance(columns, list) and "chat_template_kwargs" in columns
    effect = Effect.TRAINING if varied else Effect.NONE
    reason = (
        "a chat template's variables are not read from rows"
        if varied
        else "columns that are not needed are not read"
    )
    peer.reading.drop(f"{at}.columns", columns, peer.line(f"{at}.columns") or peer.line(at), effect, reason)


def _mixed(peer: Peer) -> list[dict[str, Any]]:
    """What open-r1 and the alignment handbook call a mixture, and what the handbook called a mixer."""
    sources = []
    mixture = peer.get("dataset_mixture")
    inner = mixture.get("datasets") if isinstance(mixture, dict) else None
    for index, entry in enumerate(inner if isinstance(inner, list) else []):
        at = f"dataset_mixture.datasets[{index}]"
        if not isinstance(entry, dict):
            peer.reading.drop(at, entry, peer.line(at), Effect.NEEDED, "expected a mapping with an id")
            continue
        line = peer.line(f"{at}.id") or peer.line(at)
        given = {"name": entry.get("config"), "split": entry.get("split")}
        source = source_at(peer.reading, f"{at}.id", line, entry.get("id"), given)
        if source is not None:
            sources.append(source | _weight(entry.get("weight")))
        _list_columns(peer, at, entry.get("columns"))
        for key in entry.keys() - {"id", "config", "split", "columns", "weight"}:
            peer.reading.drop(f"{at}.{key}", entry[key], line, Effect.NEEDED, "no key of a source says it")
    if mixture is not None and not isinstance(inner, list):
        peer.drop("dataset_mixture", Effect.NEEDED, "expected a mapping with datasets")
    elif isinstance(mixture, dict):
        size = mixture.get("test_split_size")
        if size is not None:
            _share(
                peer, "dataset_mixture.test_split_size", size, peer.line("dataset_mixture.test_split_size")
            )
        if "seed" in mixture:
            reason = "rows are shuffled and split by the recipe's seed"
            peer.reading.drop("dataset_mixture.seed", mixture["seed"], peer.line("dataset_mixture.seed"),
                              Effect.NONE, reason)  # fmt: skip
        for key in mixture.keys() - {"datasets", "test_split_size", "seed"}:
            line = peer.line(f"dataset_mixture.{key}")
            peer.reading.drop(
                f"dataset_mixture.{key}", mixture[key], line, Effect.NEEDED, "no recipe key says it"
            )
    return [*sources, *_mixer(peer)]


def _mixer(peer: Peer) -> list[dict[str, Any]]:
    mixer, splits = peer.get("dataset_mixer"), peer.get("dataset_splits")
    if mixer is None:
        return []
    if not isinstance(mixer, dict):
        peer.drop("dataset_mixer", Effect.NEEDED, "expected a mapping of ids to shares")
        return []
    names = [str(split) for split in splits] if isinstance(splits, list) and splits else ["train"]
    sources, tests = [], []
    for path, share in mixer.items():
        line = peer.line(f"dataset_mixer.{path}") or peer.line("dataset_mixer")
        for split in names:
            source = source_at(peer.reading, f"dataset_mixer.{path}", line, path, {"split": split})
            if source is None:
                break
            if "test" in split:
                tests.append(source)
            else:
                sources.append(source | _weight(share))
    if tests:
        peer.take("data.eval", tests, "dataset_splits")
    return sources


def _weight(share: Any) -> dict[str, float]:
    number = as_number(share)
    return {} if number is None or number <= 0 or number == 1 else {"weight": float(number)}


def _share(peer: Peer, key: str, size: Any, line: int | None) -> None:
    share = evaluation_share(peer.reading, key, line, size)
    if share is not None:
        note = "other rows of the same number"
        peer.reading.take("data.eval", {"split": share}, line, f"{key}: {shown(size)}", note=note)


def _take_loss(peer: Peer, sources: list[dict[str, Any]]) -> None:
    """In rows of messages TRL learns every token, but with assistant_only_loss."""
    assistant, completion = (
        as_bool(peer.get("assistant_only_loss")),
        as_bool(peer.get("completion_only_loss")),
    )
    if assistant:
        peer.take("data.loss_on", "assistant", "assistant_only_loss")
        return
    if completion is not None:
        peer.take("data.loss_on", "completion" if completion else "all", "completion_only_loss")
        return
    kinds = {_kind(peer, source) for source in sources}
    note = "TRL learns whole conversations without assistant_only_loss"
    if kinds == {"chat"}:
        peer.default("data.loss_on", "all", "assistant_only_loss: false", note)
    elif kinds & {"chat", ""}:
        hint = "write all for rows of messages, and nothing for others"
        peer.reading.needs(
            "data.loss_on", peer.line("dataset_name"), note + "; what these rows are is not known", hint
        )


def _kind(peer: Peer, source: Mapping[str, Any]) -> str:
    """chat, other, or nothing where the rows are not here: by their columns."""
    if source.get("format") == "text":
        return "other"
    kept = _kept_columns(peer).get(source["path"])
    if kept:
        return "chat" if set(_TURNS) & kept else "other"
    columns = _first_row(source["path"], Path(peer.reading.file).parent)
    if columns is None:
        return ""
    return "chat" if set(_TURNS) & columns else "other"


def _kept_columns(peer: Peer) -> dict[str, set[str]]:
    """Path of a data set -> the columns that the file says are kept of it."""
    mixture = peer.values.get("dataset_mixture")
    lists = [peer.values.get("datasets"), mixture.get("datasets") if isinstance(mixture, dict) else None]
    entries = [entry for several in lists if isinstance(several, list) for entry in several]
    return {
        str(entry.get("id") or entry.get("path")): set(map(str, entry["columns"]))
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("columns"), list)
    }


def _first_row(path: str, folder: Path) -> set[str] | None:
    """Columns of the first row of a .jsonl that is here."""
    for base in (folder, Path()):
        file = base / path
        try:
            if file.suffix == ".jsonl" and file.is_file():
                with file.open("rb") as lines:
                    row = parse_json(lines.readline(_LONGEST))
                return set(row) if isinstance(row, dict) else None
        except (OSError, ValueError):
            return None
    return None


_MARKS = (
    "dataset_name", "dataset_mixture", "dataset_mixer", "use_peft", "lora_r", "max_length", "max_seq_length",
    "packing", "dataset_text_field", "dataset_config", "assistant_only_loss", "completion_only_loss",
)  # fmt: skip
_KERNELS = ("eager", "sdpa", "flash_attention_2", "flex_attention")
_OF_OTHERS = {
    "GRPO": ("num_generations", "reward_funcs", "reward_weights", "num_iterations", "use_vllm"),
    "KTO": ("desirable_weight", "undesirable_weight"),
    "CPO": ("cpo_alpha", "simpo_gamma"),
    "PPO": ("reward_model_path", "num_ppo_epochs", "kl_coef", "missing_eos_penalty"),
    "reward models": ("center_rewards_coefficient",),
    "GKD": ("lmbda", "seq_kd"),
}
"""Trainings of TRL that import does not read -> keys of theirs alone."""
_NAMING = ("output_dir", "hub_model_id", "run_name")
"""Keys whose value is a name that the user gave the training."""


def tells(data: Mapping[str, Any]) -> bool:
    """Whether a YAML's keys are TRL's; after those of the other tools were asked."""
    if "model_name_or_path" not in data:
        return False
    listed = isinstance(data.get("datasets"), list)
    return listed or any(key in data for key in _MARKS) or bool(data.keys() & trainer_fields().keys())


def mapping_rows() -> list[Row]:
    """(key of TRL, key of a recipe, note), for a page."""
    return rows_of((*KEYS, *LORA_KEYS), HANDLED, LEFT)


def option_kind(name: str) -> str | None:
    """How many words an option of TRL's commands takes; None for one that they do not have."""
    if name.removeprefix("no_") != name and option_kind(name.removeprefix("no_")) == "switch":
        return "bare"
    if name in ("lora_target_modules", "lora_target_parameters", "lora_modules_to_save"):
        return "many"
    keys = _tool().keys
    if name in keys:
        return "switch" if isinstance(keys[name], bool) else "one"
    return field_kind(name)


def read(
    text: str,
    file: str,
    overrides: Mapping[str, Any] | None = None,
    place: Place | None = None,
    word: str = "",
) -> Reading:
    """Read a recipe of TRL; an empty text where the launch line has everything.

    overrides: what the launch line at `place` says over the file; word: `sft` or `dpo`, as it stands after
    `trl`. RecipeError when the file is no YAML; a kind of training that is not here is among the reading's
    refusals.
    """
    peer = open_peer(text, file, _tool(), overrides)
    task = _take_task(peer, word)
    if "model_name_or_path" not in peer.values:
        peer.reading.needs("model.name_or_path", None, "model_name_or_path is not there")
    _take_environment(peer)
    adapted = as_bool(peer.get("use_peft")) is True
    take_keys(peer, KEYS)
    _take_model(peer)
    _take_adapter(peer, adapted)
    _take_lengths(peer, task)
    _take_template(peer)
    _take_loss_type(peer, task)
    _take_eval_strategy(peer)
    take_rows(peer)
    leave_keys(peer, LEFT)
    _take_launch_options(peer)
    _take_arguments(peer, task)
    _take_defaults(peer, task)
    leave_rest(peer, trainer_fields())
    return close_peer(peer, overrides or (), place)


def _tool() -> Tool:
    return load_tool("trl", "TRL", "refuses it")


def _take_task(peer: Peer, word: str) -> Task:
    """What it trains; a file alone says so by a key that only one kind of training has.

    `beta` is of DPO, ORPO, KTO, CPO and GRPO: where the file has nothing else, and no name says
    dpo, the user must.
    """
    for kind, names in () if word else _OF_OTHERS.items():
        for other in [name for name in names if name in peer.values][:1]:
            known = " and ".join(words_of_tool("trl"))
            peer.refuse(other, f"is a key of {kind}; import reads TRL's {known}")
    marks = [(key, task) for task in TASKS for key in task.known_by.get("trl", ()) if key in peer.values]
    key, marked = marks[0] if marks else (None, None)
    task = task_of_tool("trl", word) if word else marked
    if task is not None and task.name != DEFAULT_TASK:
        line = None if key is None else peer.line(key)
        peer.reading.take("task", task.name, line, f"trl {word}" if word else str(key))
        peer.reading.seen.discard(str(key))
    names = (peer.reading.file, *(str(peer.values.get(name)) for name in _NAMING))
    unsure = marked.known_as["trl"] if marked is not None and key == "beta" and not word else ()
    if unsure and not any(said in name.lower() for name in names for said in unsure):
        reason = "beta is a key of DPO, and of trainings that are not here (ORPO, KTO, CPO)"
        peer.reading.needs(
            "kind of training", peer.line("beta"), reason, "take this line out where it is DPO"
        )
    kind = peer.get("lora_task_type")
    if kind not in (None, "CAUSAL_LM"):
        peer.refuse("lora_task_type", f"is {shown(kind)}: TRL trains language models", "CAUSAL_LM is")
    options = peer.get("dataset_kwargs")
    for name, value in options.items() if isinstance(options, dict) else ():
        if name == "skip_prepare_dataset" and as_bool(value):
            peer.refuse("dataset_kwargs", "skips the preparation of rows, which would be tokens already")
        elif not is_off(value):
            peer.reading.drop(f"dataset_kwargs.{name}", value, peer.line(f"dataset_kwargs.{name}"),
                              Effect.TRAINING, "rows are prepared here in one way")  # fmt: skip
    return task or peer.reading.task


def _take_environment(peer: Peer) -> None:
    """Variables, the profile of accelerate by name or as a file, and numbers of devices."""
    variables = peer.get("env")
    for name, value in variables.items() if isinstance(variables, dict) else ():
        take_env(peer.reading, str(name), value, peer.line(f"env.{name}"))
    if variables is not None and not isinstance(variables, dict):
        peer.drop("env", Effect.NONE, "expected a mapping of variables")
    for key in ("wandb_project", "wandb_entity"):
        if peer.get(key):
            peer.take(f"launch.env.{key.upper()}", str(peer.values[key]), key)
    profile = peer.get("accelerate_config")
    if str(profile) in PROFILES:
        for to, value in PROFILES[str(profile)].items():
            peer.take(to, value, "accelerate_config")
    elif profile is not None:
        peer.reading.name_file(str(profile), peer.line("accelerate_config"))
    for key, to in (("num_processes", "hardware.total"), ("num_machines", "hardware.num_nodes")):
        count = as_number(peer.get(key))
        if count is not None and count >= 1:
            peer.take(to, int(count), key)
        elif count is None and key in peer.values:
            peer.drop(key, Effect.NONE, "expected a number")


def _take_launch_options(peer: Peer) -> None:
    """What TRL's parser does not know goes to accelerate launch, of the YAML and of the line."""
    for name, value in peer.values.items():
        if name in peer.reading.seen or name in peer.tool.keys or field_kind(name) is not None:
            continue
        own = as_bool(peer.values.get("bf16")) is not False or as_bool(peer.values.get("fp16")) is True
        if name == "mixed_precision" and own:
            reason = "TRL's own bf16 and fp16 go before it, and bf16 is its default"
            peer.drop(name, Effect.NONE, reason)
        elif name == "config_file":
            peer.reading.know(name)
            peer.reading.name_file(str(value), peer.line(name))
        elif is_option(name):
            take_option(peer.reading, name, value, peer.line(name))
    if peer.reading.value("sharding.engine") == "deepspeed" and "use_deepspeed" in peer.values:
        finish_deepspeed(peer.reading, peer.line("use_deepspeed"))


def _take_model(peer: Peer) -> None:
    options = peer.get("model_init_kwargs")
    options = dict(options) if isinstance(options, dict) else {}
    given = peer.get("dtype") or peer.get("torch_dtype")
    peer.reading.know("dtype", "torch_dtype")
    inner = options.pop("dtype", None) or options.pop("torch_dtype", None)
    key = (
        "dtype"
        if "dtype" in peer.values
        else "torch_dtype"
        if "torch_dtype" in peer.values
        else "model_init_kwargs"
    )
    dtype = dtype_name(inner if given is None else given)
    if given is None and inner is None:
        key, dtype = "dtype", "float32"
    elif dtype is None:
        peer.drop(key, Effect.TRAINING, "expected float32, bfloat16, float16 or auto")
    if not _take_bits(peer, dtype) and dtype is not None:
        if key in peer.values:
            peer.take("model.dtype", dtype, key)
        else:
            peer.default("model.dtype", dtype, key, "TRL loads the weights so")
    _take_kernel(peer, "attn_implementation", peer.get("attn_implementation"))
    for name, value in options.items():
        said = f"model_init_kwargs.{name}"
        if name == "attn_implementation":
            _take_kernel(peer, said, value)
        elif name == "revision":
            peer.reading.take("model.revision", str(value), peer.line(said), said)
        elif name != "use_cache" and not is_off(value):
            peer.reading.drop(said, value, peer.line(said), Effect.TRAINING, "no recipe key says it")


def _take_kernel(peer: Peer, said: str, kernel: Any) -> None:
    if kernel in _KERNELS:
        peer.reading.take("model.attn_implementation", kernel, peer.line(said), said)
    elif kernel is not None:
        reason = "a kernel that is not here; the planner chooses one"
        peer.reading.drop(said, kernel, peer.line(said), Effect.NONE, reason)


def _take_bits(peer: Peer, dtype: str | None) -> bool:
    """Whether the model is quantised."""
    four, eight = peer.switch("load_in_4bit"), peer.switch("load_in_8bit")
    kind, nested = str(peer.get("bnb_4bit_quant_type") or "nf4"), peer.switch("use_bnb_nested_quant")
    if four and eight:
        peer.refuse("load_in_8bit", "is true, and so is load_in_4bit: TRL refuses both")
    elif eight:
        take_quantization(peer.reading, "int8", peer.line("load_in_8bit"), "load_in_8bit: true")
    elif four and kind in ("nf4", "fp4"):
        compute = None if dtype in (None, "auto") else dtype
        take_quantization(peer.reading, kind, peer.line("load_in_4bit"), "load_in_4bit: true",
                          double_quant=nested, compute_dtype=compute,
                          note="TRL has no double quantisation, and computes in dtype")  # fmt: skip
    elif four:
        peer.drop("bnb_4bit_quant_type", Effect.NEEDED, "expected nf4 or fp4", "write model.quantization")
    return four or eight


def _take_adapter(peer: Peer, adapted: bool) -> None:
    if not adapted:
        for key in LORA_KEYS:
            if key.name in peer.values:
                peer.drop(key.name, Effect.NONE, "use_peft is not true: all parameters are trained")
        if "model.quantization" in peer.reading.taken:
            peer.refuse("use_peft", "is not true, and a quantised model cannot be trained itself",
                        "set use_peft: true")  # fmt: skip
        return
    peer.take("adapter.type", "lora", "use_peft")
    if isinstance(
        peer.values.get("lora_target_modules"), str
    ):  # one word of a flag; a list there, no pattern
        peer.values["lora_target_modules"] = [peer.values["lora_target_modules"]]
    take_keys(peer, LORA_KEYS)
    for name, value in (("r", 16), ("lora_alpha", 32), ("lora_dropout", 0.05)):
        peer.default(f"adapter.{name}", value, "lora_r" if name == "r" else name)
    take_default_targets(peer.reading)
    if "model.quantization" in peer.reading.taken and not peer.reading.value("adapter.use_dora"):
        note = "TRL keeps the adapter of a quantised model in 16 bits"
        peer.default("adapter.autocast_adapter_dtype", False, "use_peft: true", note)


def _take_lengths(peer: Peer, task: Task) -> None:
    _take_length(peer)
    if peer.get("truncation_mode") not in (None, "keep_start"):
        peer.drop("truncation_mode", Effect.TRAINING, "the start of a long row is kept")
    _take_packing(peer, task)


def _take_length(peer: Peer) -> None:
    """Null, which elsewhere is as if absent, is a length without a limit here."""
    nothing = [key for key in ("max_length", "max_seq_length") if key in peer.reading.seen]
    for key in ("max_length", "max_seq_length"):
        value = peer.get(key)
        length = as_number(value)
        if length is not None and 8 <= length <= 1_000_000_000:
            peer.take("data.max_length", int(length), key)
        elif value == "None":
            nothing.append(key)
        elif value is not None:
            peer.drop(key, Effect.NEEDED, "expected a number of tokens", "write data.max_length")
    if nothing and "data.max_length" not in peer.reading.taken:
        reason = f"{nothing[0]} is null: there is no limit there"
        peer.reading.needs("data.max_length", peer.line(nothing[0]), reason, "write the longest row's length")
    elif "data.max_length" not in peer.reading.taken:
        peer.default("data.max_length", 1024, "max_length")


def _take_packing(peer: Peer, task: Task) -> None:
    strategy, packing = peer.get("packing_strategy"), peer.switch("packing") and not task.ranks_answers
    if packing:
        peer.take("data.packing", True, "packing")
    if packing and strategy == "wrapped":
        peer.drop("packing_strategy", Effect.TRAINING, "documents run into each other there, and not here")
    if packing and strategy in ("wrapped", "bfd_split"):
        peer.take("data.overlong", "split", "packing_strategy")
    elif strategy not in (None, "bfd", "bfd_split", "wrapped"):
        peer.drop("packing_strategy", Effect.TRAINING, "expected bfd, bfd_split or wrapped")
    peer.default("data.overlong", "truncate", "truncation_mode: keep_start")
    if peer.switch("padding_free") and not packing and not task.ranks_answers:
        peer.take("data.padding_free", True, "padding_free")


def _take_template(peer: Peer) -> None:
    text, path = peer.get("chat_template"), peer.get("chat_template_path")
    if isinstance(text, str) and ("{%" in text or "{{" in text):
        peer.reading.texts["_template.jinja"] = text
        peer.reading.take(
            "model.chat_template", "_template.jinja", peer.line("chat_template"), "chat_template"
        )
    elif text is not None:
        peer.drop(
            "chat_template", Effect.TRAINING, "expected the template's text", "write model.chat_template"
        )
    if path is not None and str(path).endswith((".jinja", ".jinja2", ".j2", ".txt")):
        peer.take("model.chat_template", str(path), "chat_template_path")
    elif path is not None:
        reason = "a model whose template is taken: its text is needed"
        peer.drop("chat_template_path", Effect.TRAINING, reason, "save it as a file, for model.chat_template")


def _take_loss_type(peer: Peer, task: Task) -> None:
    if task.ranks_answers:
        return
    loss = peer.get("loss_type")
    if loss not in (None, "nll", "chunked_nll"):
        peer.drop("loss_type", Effect.TRAINING, "a loss of its own, which is not here")


def _take_eval_strategy(peer: Peer) -> None:
    """Before the rows: those of evaluation are read only where there is one."""
    for key in ("eval_strategy", "evaluation_strategy"):
        value = peer.get(key)
        if value is not None:
            take_argument(peer.reading, key, value, peer.line(key))


def _take_arguments(peer: Peer, task: Task) -> None:
    """What is left, of TrainingArguments and of DPO's; fields that only other tasks have are none of them."""
    fields = {*trainer_fields(task.name), *TRAINER_REMOVED, "use_liger"}
    others = {name for other in TASKS for name in trainer_fields(other.name)} - fields
    owned = task.owned_arguments
    for name in list(peer.values):
        value = peer.values[name]
        if name in peer.reading.seen or name in others:
            continue
        if name in owned and name not in trainer_fields():
            peer.drop(name, Effect.NONE, owned[name])
        else:
            take_argument(peer.reading, name, value, peer.line(name))


def _take_defaults(peer: Peer, task: Task) -> None:
    """TRL's own, where the file is silent: bf16 unless fp16, and its rates."""
    by_default = peer.reading.taken.get("precision")
    if by_default is None or (by_default.is_default and as_bool(peer.values.get("bf16")) is not False):
        peer.reading.taken.pop("precision", None)
        peer.default("precision", "bf16", "bf16: true")
    defaults = {**task.tool_defaults["trl"], "trainer.num_train_epochs": 3.0}
    fill_defaults(peer.reading, defaults, logging_steps=10)
