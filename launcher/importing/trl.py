"""A recipe of TRL: tables of its keys, and what needs more than one key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.files.secrets import names_secret
from launcher.importing.accelerate import finish_deepspeed, is_option, take_option
from launcher.importing.adapters import (
    FourBits,
    Lora,
    take_default_targets,
    take_four_bits,
    take_kbit_norms,
    take_lora,
    take_quantization,
)
from launcher.importing.arguments import Field, field_names, fill_defaults
from launcher.importing.conversions import (
    To,
    as_bool,
    as_number,
    count,
    dtype_name,
    if_on,
    is_off,
    label,
    on,
    revision,
    switch,
    text,
    texts,
    whole,
)
from launcher.importing.key_tables import Keys, Peer, Tool, load_tool, open_peer
from launcher.importing.reading import EVALUATED, Effect, Given, Reading
from launcher.importing.rollouts import GENERATION_KEYS, OF_TRL, needs_length, take_rollouts, take_scale
from launcher.importing.row_sources import first_row, rows_path, source_at, take_share, weight_of
from launcher.recipe.field_tables import trainer_fields
from launcher.recipe.rules import check_environment
from launcher.recipe.suggestions import TRAINER_REMOVED
from launcher.tasks import DEFAULT_TASK, TASKS, task_with_images, words_of_tool
from launcher.tasks.grpo import KEY
from launcher.tasks.task import Task


def multiple(value: Any) -> int | None:
    """A number to pad to; auto sets nothing."""
    return None if value == "auto" else whole(value)


MODEL: Keys = {"model_name_or_path": To("model.name_or_path", text, required="")}
KEYS: Keys = {
    **MODEL,
    "model_revision": To("model.revision", revision),
    "trust_remote_code": To("model.trust_remote_code", if_on),
    "dataset_num_proc": To("data.num_proc", whole),
    "pad_to_multiple_of": To("data.pad_to_multiple_of", multiple),
    "dataset_streaming": To("data.streaming", if_on, "needs max_steps"),
    "streaming": To("data.streaming", if_on, "needs max_steps"),
    "activation_offloading": To("sharding.offload_activations", on("cpu")),
    "num_processes": To("hardware.total", count, "printed, not written", effect=Effect.NONE),
    "num_machines": To("hardware.num_nodes", count, "printed, not written", effect=Effect.NONE),
    "wandb_project": To("launch.env.WANDB_PROJECT", label),
    "wandb_entity": To("launch.env.WANDB_ENTITY", label),
}
LORA = Lora(
    "use_peft",
    {
        "lora_r": Field("adapter.r", default=16),
        "lora_alpha": Field("adapter.lora_alpha", default=32),
        "lora_dropout": Field("adapter.lora_dropout", default=0.05),
        "lora_target_modules": Field("adapter.target_modules", "peft's own for the model where it is absent"),
        "lora_target_parameters": To("adapter.target_parameters", texts),
        "lora_modules_to_save": To("adapter.modules_to_save", texts),
        "use_rslora": To("adapter.use_rslora", switch),
        "use_dora": To("adapter.use_dora", switch),
    },
    others=re.compile("$^"),
    unread="use_peft is not true: all parameters are trained",
)
FOUR_BITS = FourBits(
    "bnb_4bit_quant_type",
    "use_bnb_nested_quant",
    is_double=False,
    note="TRL has no double quantisation, and computes in dtype",
)
PROFILES: dict[str, dict[str, Any]] = {
    "single_gpu": {},
    "multi_gpu": {"sharding.engine": "ddp"},
    "fsdp1": {"sharding.engine": "fsdp"},
    "fsdp2": {"sharding.engine": "fsdp"},
    **{f"zero{stage}": {"sharding.engine": "deepspeed", "sharding.zero_stage": stage} for stage in (1, 2, 3)},
}
"""accelerate_config by name -> recipe keys."""
TABLES: Keys = {**KEYS, **LORA.keys}
"""Every key that alone is one recipe key."""

_TURNS = ("messages", "conversations")
_MARKS = (
    "dataset_name", "dataset_mixture", "dataset_mixer", "use_peft", "lora_r", "max_length", "max_seq_length",
    "packing", "dataset_text_field", "dataset_config", "assistant_only_loss", "completion_only_loss",
)  # fmt: skip
_OF_SEVERAL = (
    "beta", "num_generations", "reward_funcs", "reward_weights", "num_iterations", "max_completion_length",
    "use_vllm", "epsilon",
)  # fmt: skip
"""Keys of trainings here that trainings of TRL's that are not here have, too."""
_OF_OTHERS = {
    "RLOO": ("normalize_advantages", "reward_clip_range"),
    "CPO": ("cpo_alpha", "simpo_gamma"),
    "PPO": ("reward_model_path", "num_ppo_epochs", "kl_coef", "missing_eos_penalty"),
    "GKD": ("lmbda", "seq_kd"),
}
"""Trainings of TRL that import does not read -> keys of theirs alone."""
_UNCHANGING = ("log_", "use_transformers_paged")
"""Starts of fields of trl's classes that change no training."""
_NAMING = ("output_dir", "hub_model_id", "run_name")
"""Keys whose value is a name that the user gave the training."""
_OF_THE_SHELL = ("PYTHONPATH", "PATH", "HOME", "USER", "LD_LIBRARY_PATH")
_TEMPLATES = (".jinja", ".jinja2", ".j2", ".txt")


def is_recipe(data: Mapping[str, Any]) -> bool:
    """Whether a YAML's keys are TRL's, if they are no other tool's; without a model, two of them."""
    marks = sum(key in data for key in _MARKS)
    if "model_name_or_path" not in data:
        return marks > 1
    return isinstance(data.get("datasets"), list) or marks > 0 or bool(data.keys() & trainer_fields().keys())


def read(text: str, file: str) -> Reading:
    """Read a recipe of TRL.

    Raises RecipeError if the file is no YAML; a kind of training that is not here is among the refusals.
    """
    peer = open_peer(text, file, tool())
    peer.leave(peer.tool.left["values"])
    task = _take_task(peer)
    peer.fill(MODEL)
    _take_environment(peer)
    peer.take_keys(KEYS)
    _take_model(peer)
    _take_adapter(peer)
    if task.rolls_out:
        _take_rollouts(peer)
    else:
        _take_length(peer)
    _take_packing(peer, task)
    _take_template(peer)
    peer.reading.know("truncation_mode")
    if task.learns:
        peer.leave(peer.tool.left["targets"])
        peer.reading.know("loss_type")
    peer.argument("eval_strategy", "evaluation_strategy")  # evaluation rows are read only where there is one
    _take_rows(peer)
    peer.leave(peer.tool.left["keys"])
    _take_launch_options(peer)
    _leave_owned(peer, task)
    peer.take_arguments(task.name, (*TRAINER_REMOVED, "use_liger"))
    _take_defaults(peer, task)
    if (peer.reading.value("model.quantization") or {}).get("compute_dtype") == "bfloat16":
        take_kbit_norms(peer.reading, "dtype: bfloat16", "TRL")
    peer.leave_rest(trainer_fields())
    return peer.close()


def tool() -> Tool:
    return load_tool("trl", "TRL", "refuses it")


def _take_task(peer: Peer) -> Task:
    """The task, by a key that only one kind of training has."""
    reading = peer.reading
    for kind, names in _OF_OTHERS.items():
        for other in [key for key in names if key in peer.values][:1]:
            known = " and ".join(words_of_tool("trl"))
            peer.refuse(other, f"is a key of {kind}; import reads TRL's {known}")
    key, task = _marked(peer)
    if (task is None or task.name == DEFAULT_TASK) and _has_images(peer):
        task = task_with_images()
        reading.take("task", task.name, Given("dataset_name", None, peer.line("dataset_name")), said="images")
    elif task is not None and task.name != DEFAULT_TASK:
        reading.take("task", task.name, Given(key, None, peer.line(key)), said=key)
        reading.seen.discard(key)
    inner = peer.section("dataset_kwargs")
    if as_bool(inner.get("skip_prepare_dataset")) and not reading.task.sees_images:
        peer.refuse("dataset_kwargs", "skips the preparation of rows, which would be tokens already")
    inner.leave_inner(Effect.TRAINING, "rows are prepared here in one way")
    if reading.task.sees_images:
        peer.default("model.freeze", [], "nothing", "TRL freezes no part by itself")
    return task or reading.task


def _marked(peer: Peer) -> tuple[str, Task | None]:
    """(key, task): by a key of one kind of training, or by a name (`out/qwen-kto`).

    `beta` is of DPO, KTO, GRPO and trainings that are not here: without another key and such a name the user
    must decide.
    """
    marks = [(key, task) for task in TASKS for key in task.known_by.get("trl", ()) if key in peer.values]
    for key, task in marks:
        if key not in _OF_SEVERAL and sum(key == other for other, _ in marks) == 1:
            return key, task
    named = _named_tasks(peer)
    tasks = [task for _, task in marks] or named
    if not tasks:
        return "", None
    most = max(map(tasks.count, tasks))
    likely = list(dict.fromkeys(task for task in tasks if tasks.count(task) == most))
    chosen = next((task for task in named if task in likely), None) if marks or len(likely) == 1 else None
    key = next((key for key, task in marks if task is (chosen or likely[0])), "name")
    if chosen is None:
        kinds = ", ".join(task.name for task in likely)
        reason = f"{key} is a key of {kinds}, and of trainings that are not here (ORPO, CPO, RLOO)"
        if not marks:
            reason = f"no key tells it, and the names in the file are of {kinds}"
        hint = f"set task, then delete this line; {likely[0].name} is taken"
        peer.needs("kind of training", key, reason, hint)
    return key, chosen or likely[0]


def _named_tasks(peer: Peer) -> list[Task]:
    """Tasks that TRL's commands are called as in the names of the file, its folder and the training."""
    names = (*Path(peer.reading.file).parts[-2:], *(str(peer.values.get(naming)) for naming in _NAMING))
    words = set(re.split(r"[^a-z]+", " ".join(names).lower()))
    return [task for task in TASKS if words & set(task.known_as.get("trl", ()))]


def _take_environment(peer: Peer) -> None:
    """Variables, and the profile of accelerate by name or as a file."""
    variables, profile = peer.get("env"), peer.get("accelerate_config")
    if isinstance(variables, dict):
        for variable, value in variables.items():
            take_env(peer.reading, Given(str(variable), value, peer.line(f"env.{variable}")))
    elif variables is not None:
        peer.drop("env", Effect.NONE, "expected a mapping of variables")
    if str(profile) in PROFILES:
        for to, value in PROFILES[str(profile)].items():
            peer.take(to, value, "accelerate_config")
    elif profile is not None:
        peer.reading.name_file(str(profile), peer.line("accelerate_config"))


def take_env(reading: Reading, given: Given) -> None:
    """One variable, where a run does not set it itself; a secret is not repeated."""
    problems = check_environment({"launch": {"env": {given.name: given.value}}})
    if names_secret(given.name):
        reading.drop(given, Effect.NONE, "")
    elif problems:
        reading.drop(given, Effect.NONE, problems[0].hint or problems[0].message)
    elif given.name in _OF_THE_SHELL:
        reading.drop(given, Effect.NONE, "set it in the shell that starts the run")
    else:
        reading.take(f"launch.env.{given.name}", str(given.value), given, said=given.name)


def _take_model(peer: Peer) -> None:
    """The type of the weights, their quantisation, and the attention kernel."""
    options = peer.section("model_init_kwargs")
    value = peer.get("dtype") or peer.get("torch_dtype")
    peer.reading.know("torch_dtype")
    inner = options.get("dtype") or options.get("torch_dtype")
    key = next((key for key in ("dtype", "torch_dtype") if key in peer.values), "model_init_kwargs")
    dtype = dtype_name(inner if value is None else value)
    if value is None and inner is None:
        key, dtype = "dtype", "float32"
    elif dtype is None:
        peer.drop(key, Effect.TRAINING, "expected float32, bfloat16, float16 or auto")
    if not _take_bits(peer, dtype) and dtype is not None:
        note = "" if key in peer.values else "TRL loads the weights so"
        peer.decide("model.dtype", dtype, key, note=note)
    for owner in (peer, options):
        owner.take_kernel("attn_implementation")
    if "revision" in options.values:
        options.take("model.revision", str(options.get("revision")), "revision")
    options.leave_inner(Effect.TRAINING, "it has no recipe key", "use_cache", "dtype", "torch_dtype")


def _take_bits(peer: Peer, dtype: str | None) -> bool:
    """Whether the model is quantised."""
    four, eight = peer.switch("load_in_4bit"), peer.switch("load_in_8bit")
    peer.reading.know("bnb_4bit_quant_type")
    peer.switch("use_bnb_nested_quant")
    if four and eight:
        peer.refuse("load_in_8bit", "is true, and so is load_in_4bit: TRL refuses both")
    elif eight:
        take_quantization(peer.reading, "int8", peer.given("load_in_8bit"))
    elif four:
        take_four_bits(peer, "load_in_4bit", FOUR_BITS, peer, None if dtype in (None, "auto") else dtype)
    return four or eight


def _take_adapter(peer: Peer) -> None:
    quantized, targets = "model.quantization" in peer.reading.taken, peer.values.get("lora_target_modules")
    is_on = peer.switch("use_peft")
    if is_on and isinstance(targets, str):  # a list there, no pattern
        peer.values["lora_target_modules"] = [targets]
    if take_lora(peer, LORA, is_on=is_on):
        take_default_targets(peer.reading)
        if quantized and not peer.reading.value("adapter.use_dora"):
            note = "TRL keeps the adapter of a quantised model in 16 bits"
            peer.default("adapter.autocast_adapter_dtype", False, "use_peft: true", note)
    elif quantized:
        message = "is not true, and a quantised model cannot be trained itself"
        peer.refuse("use_peft", message, "set use_peft: true")


def _take_rollouts(peer: Peer) -> None:
    """The reward functions, and how completions are sampled."""
    has_functions = take_rollouts(peer, OF_TRL, "colocate", GENERATION_KEYS)
    if peer.get("reward_model_name_or_path") is not None:
        hint = "write a function that scores completions with that model"
        peer.refuse("reward_model_name_or_path", "is set: rewards are functions here", hint)
    elif not has_functions:
        peer.needs(KEY, "reward_funcs", "it is not there, and nothing scores the completions")
    take_scale(peer)
    peer.argument("shuffle_dataset")
    peer.argument("vllm_importance_sampling_cap", to="vllm_importance_sampling_clip_max")
    needs_length(peer, "TRL")


def _take_length(peer: Peer) -> None:
    """Null, which elsewhere is as if absent, is a length without a limit here."""
    keys = ("max_length", "max_seq_length")
    nothing = [key for key in keys if key in peer.reading.seen]
    for key in keys:
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
        peer.needs("data.max_length", nothing[0], reason, "write the longest row's length")
    else:
        peer.default("data.max_length", 1024, "max_length")


def _take_packing(peer: Peer, task: Task) -> None:
    """Packs, and long rows."""
    strategy, packing = peer.get("packing_strategy"), peer.switch("packing") and bool(task.learns)
    if packing:
        peer.take("data.packing", True, "packing")
    if packing and strategy == "wrapped":
        peer.drop("packing_strategy", Effect.TRAINING, "documents run into each other there, and not here")
    if packing and strategy in ("wrapped", "bfd_split"):
        peer.take("data.overlong", "split", "packing_strategy")
    if not task.rolls_out and "truncate" not in task.overlong:
        peer.default("data.overlong", "truncate", "truncation_mode: keep_start")
    elif not task.rolls_out:
        peer.default("data.overlong", "drop", "max_length", "TRL leaves longer samples out")
    if peer.switch("padding_free") and not packing and task.learns:
        peer.take("data.padding_free", True, "padding_free")


def _take_template(peer: Peer) -> None:
    template, path = peer.get("chat_template"), peer.get("chat_template_path")
    if isinstance(template, str) and ("{%" in template or "{{" in template):
        peer.take_template(peer.given("chat_template"))
    elif template is not None:
        reason, hint = "expected the template's text", "write model.chat_template"
        peer.drop("chat_template", Effect.TRAINING, reason, hint)
    if path is not None and str(path).endswith(_TEMPLATES):
        peer.take("model.chat_template", str(path), "chat_template_path")
    elif path is not None:
        reason = "a model whose template is taken: its text is needed"
        peer.drop("chat_template_path", Effect.TRAINING, reason, "save it as a file, for model.chat_template")


def _take_rows(peer: Peer) -> None:
    """Take the sources, and which of their tokens contribute to the loss."""
    peer.reading.know("dataset_splits")
    sources = [*_named(peer), *_several(peer, "datasets", "path", "name"), *_mixed(peer), *_mixer(peer)]
    has_choice = bool(peer.reading.task.learns)
    column = peer.get("dataset_text_field")
    if column not in (None, "text") and has_choice:
        for source in sources:
            source |= {"format": "text", "columns": {"text": str(column)}}
    if sources:
        keys = ("dataset_name", "datasets", "dataset_mixture", "dataset_mixer")
        key = next(key for key in keys if key in peer.values)
        peer.reading.take("data.train", sources, peer.given(key), said=key)
    else:
        peer.reading.needs("data.train", None, "no data set could be taken")
    take_share(peer, "test_split_size")
    if has_choice:
        _take_loss(peer, sources)


def _named(peer: Peer) -> list[dict[str, Any]]:
    """`dataset_name` with its splits."""
    given, config, several = (
        peer.given("dataset_name"),
        peer.get("dataset_config"),
        peer.get("dataset_configs"),
    )
    configs = several if isinstance(several, list) and several else [config]
    peer.reading.know("dataset_config")
    split, test = peer.get("dataset_train_split") or "train", peer.get("dataset_test_split") or "test"
    if peer.get("dataset_name") is None:
        return []
    found = [source_at(peer.reading, given, name=one, split=split) for one in configs]
    evaluated = peer.reading.value("trainer.eval_strategy") not in (None, "no")
    if evaluated and "test_split_size" not in peer.values:
        where = Given("dataset_test_split", test, peer.line("dataset_test_split") or given.line)
        address = Given("dataset_test_split", given.value, given.line)
        rows = source_at(peer.reading, address, name=configs[0], split=test)
        if rows is not None:
            peer.reading.take(EVALUATED, [rows], where)
        else:
            peer.reading.needs(EVALUATED, where.line, "the rows of dataset_test_split could not be taken")
    return [source for source in found if source is not None]


def _several(peer: Peer, key: str, path: str, name: str) -> list[dict[str, Any]]:
    """A list of data sets; path, name: keys of an entry's address and configuration."""
    sources = []
    for entry in peer.entries(key, f"{'an' if path == 'id' else 'a'} {path}"):
        given, columns = rows_path(entry, path), entry.values.get("columns")
        if isinstance(columns, list) and "chat_template_kwargs" in columns:
            entry.drop("columns", Effect.TRAINING, "a chat template's variables are not read from rows")
        entry.leave(peer.tool.left["dataset"])
        weight = weight_of(entry.get("weight")) if path == "id" else {}
        asked = {"name": entry.get(name), "split": entry.get("split")}
        entry.leave_inner(Effect.NEEDED, "a source has no such key")
        source = None if given is None else source_at(entry.reading, given, **asked)
        sources += [] if source is None else [source | weight]
    return sources


def _mixed(peer: Peer) -> list[dict[str, Any]]:
    """The `dataset_mixture` of open-r1 and the alignment handbook."""
    given = peer.get("dataset_mixture")
    if not isinstance(given, dict) or not isinstance(given.get("datasets"), list):
        if given is not None:
            peer.drop("dataset_mixture", Effect.NEEDED, "expected a mapping with datasets")
        return []
    mixture = peer.inside("dataset_mixture", given)
    sources = _several(mixture, "datasets", "id", "config")
    take_share(mixture, "test_split_size")
    mixture.leave(peer.tool.left["mixture"])
    mixture.leave_inner(Effect.NEEDED, "it has no recipe key")
    return sources


def _mixer(peer: Peer) -> list[dict[str, Any]]:
    """`dataset_mixer: {id: share}` of the alignment handbook, with dataset_splits."""
    mixer, splits = peer.get("dataset_mixer"), peer.get("dataset_splits")
    if mixer is not None and not isinstance(mixer, dict):
        peer.drop("dataset_mixer", Effect.NEEDED, "expected a mapping of ids to shares")
        return []
    names = [str(split) for split in splits] if isinstance(splits, list) and splits else ["train"]
    sources, tests = [], []
    for path, share in (mixer or {}).items():
        line = peer.line(f"dataset_mixer.{path}") or peer.line("dataset_mixer")
        for split in names:
            source = source_at(peer.reading, Given(f"dataset_mixer.{path}", path, line), split=split)
            if source is None:
                break
            if "test" in split:
                tests.append(source)
            else:
                sources.append(source | weight_of(share))
    if tests:
        peer.take("data.eval", tests, "dataset_splits")
    return sources


def _take_loss(peer: Peer, sources: list[dict[str, Any]]) -> None:
    """Of rows of messages every token contributes to the loss there, but with assistant_only_loss."""
    completion = as_bool(peer.get("completion_only_loss"))
    if peer.switch("assistant_only_loss"):
        peer.take("data.loss_on", "assistant", "assistant_only_loss")
        return
    if completion is not None:
        peer.take("data.loss_on", "completion" if completion else "all", "completion_only_loss")
        return
    kinds = {_kind(peer, source) for source in sources}
    note = "in TRL all tokens of a conversation contribute to the loss without assistant_only_loss"
    if peer.reading.task.sees_images:
        note += ", tokens of images included; here these never do"
    if kinds == {"chat"}:
        peer.default("data.loss_on", "all", "assistant_only_loss: false", note)
    elif kinds & {"chat", ""}:
        hint = "write all for rows of messages, and nothing for others"
        if not peer.reading.task.sees_images:
            hint += f"; rows with images need task: {task_with_images().name}"
        peer.needs("data.loss_on", "dataset_name", f"{note}; the kind of these rows is not known", hint)


def _kind(peer: Peer, source: Mapping[str, Any]) -> str:
    """chat, other, or nothing where the rows are not here: by their columns."""
    if source.get("format") == "text":
        return "other"
    columns = _kept_columns(peer).get(source["path"]) or first_row(source["path"], peer.reading)
    if columns is None:
        return ""
    return "chat" if set(_TURNS) & set(columns) else "other"


def _kept_columns(peer: Peer) -> dict[str, set[str]]:
    """Path of a data set -> its `columns`."""
    mixture = peer.values.get("dataset_mixture")
    lists = [peer.values.get("datasets"), mixture.get("datasets") if isinstance(mixture, dict) else None]
    entries = [entry for several in lists if isinstance(several, list) for entry in several]
    return {
        str(entry.get("id") or entry.get("path")): set(map(str, entry["columns"]))
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("columns"), list)
    }


def _has_images(peer: Peer) -> bool:
    """Whether a data set has a column of images, as far as the file or its first row is here."""
    several = peer.values.get("datasets")
    entries = [entry for entry in several if isinstance(entry, dict)] if isinstance(several, list) else []
    paths = [entry.get("data_files", entry.get("path")) for entry in entries]
    paths.append(peer.values.get("dataset_name"))
    rows = [set(first_row(path, peer.reading) or {}) for path in paths if isinstance(path, str)]
    return any({"image", "images"} & columns for columns in (*rows, *_kept_columns(peer).values()))


def _take_launch_options(peer: Peer) -> None:
    """Keys that TRL's parser does not have go to accelerate launch."""
    own = as_bool(peer.values.get("bf16")) is not False or as_bool(peer.values.get("fp16")) is True
    for key in list(peer.values):
        if key in peer.reading.seen or key in peer.tool.keys or key in field_names():
            continue
        given = peer.given(key)
        if key == "mixed_precision" and own:
            reason = "TRL's own bf16 and fp16 take precedence, and bf16 is its default"
            peer.drop(key, Effect.NONE, reason)
        elif key == "config_file":
            peer.reading.know(key)
            peer.reading.name_file(str(given.value), given.line)
        elif is_option(key):
            take_option(peer.reading, given)
    if peer.reading.value("sharding.engine") == "deepspeed" and "use_deepspeed" in peer.values:
        finish_deepspeed(peer.reading, peer.line("use_deepspeed"))


def _leave_owned(peer: Peer, task: Task) -> None:
    """Fields of trl's class that the launcher decides or that do nothing here."""
    for key, reason in task.owned_arguments.items():
        if key not in peer.values or key in trainer_fields() or key in peer.reading.seen:
            continue
        if is_off(peer.values[key]):
            peer.reading.know(key)
        else:
            peer.drop(key, Effect.NONE if key.startswith(_UNCHANGING) else Effect.TRAINING, reason)


def _take_defaults(peer: Peer, task: Task) -> None:
    """TRL's own, where the file sets nothing: bf16 unless fp16, and its rates."""
    by_default = peer.reading.taken.get("precision")
    if by_default is None or (by_default.is_default and as_bool(peer.values.get("bf16")) is not False):
        peer.reading.taken.pop("precision", None)
        peer.default("precision", "bf16", "bf16: true")
    defaults = {**task.tool_defaults["trl"], "trainer.num_train_epochs": 3.0}
    fill_defaults(peer.reading, defaults, logging_steps=10)
