"""TRL's YAML (`trl sft --config X.yaml`), and the flags of its command, as keys of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.importing.accelerate import finish_deepspeed, is_option, take_option
from launcher.importing.adapter import dtype_name, take_default_targets, take_quantization
from launcher.importing.arguments import as_bool, as_number, field_kind, fill_defaults, take_argument
from launcher.importing.environment import take_env
from launcher.importing.found import Effect, Place, Reading, shown
from launcher.importing.peer import (
    Peer,
    Row,
    Tool,
    close_peer,
    is_off,
    leave_keys,
    leave_rest,
    load_tool,
    open_peer,
    rows_of,
    take_keys,
)
from launcher.importing.trl_rows import take_rows
from launcher.importing.trl_tables import HANDLED, KEYS, LEFT, LORA_KEYS, PROFILES
from launcher.recipe.field_tables import trainer_fields
from launcher.recipe.suggestions import TRAINER_REMOVED
from launcher.tasks import DEFAULT_TASK, TASKS, task_of_tool, words_of_tool
from launcher.tasks.task import Task

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
