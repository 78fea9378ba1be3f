"""A recipe of axolotl: tables of its keys, its data sets, and what needs more than one key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.importing.arguments import (
    Field,
    fields,
    take_fsdp_options,
    take_kbit_norms,
    take_quantization,
)
from launcher.importing.axolotl_answers import shape_of
from launcher.importing.axolotl_deepspeed import shipped
from launcher.importing.conversions import (
    To,
    as_bool,
    as_number,
    if_on,
    is_off,
    label,
    on,
    switch,
    text,
    texts,
    tokens,
    whole,
)
from launcher.importing.key_tables import Keys, Left, Peer, Tool, load_tool, open_peer
from launcher.importing.reading import EVALUATED, Effect, Given, Reading, shown
from launcher.importing.rollouts import (
    GENERATION_KEYS,
    needs_length,
    take_backend,
    take_batches,
    take_rewards,
    take_scale,
)
from launcher.importing.row_sources import (
    BUILDERS,
    Prompt,
    Shape,
    Sources,
    Turns,
    leave_columns,
    source_at,
    take_share,
    unknown_fields,
)
from launcher.tasks import TASKS, task_of_tool, task_with_images, words_of_tool
from launcher.tasks.grpo import KEY

KEYS: Keys = {
    "base_model": To("model.name_or_path", text),
    "model_revision": To("model.revision", text),
    "revision_of_model": To("model.revision", text),
    "trust_remote_code": To("model.trust_remote_code", if_on),
    "tokens": To("model.add_tokens", texts),
    "resize_token_embeddings_to_32x": To("model.vocab_multiple", on(32), "32"),
    "flash_attention": To("model.attn_implementation", on("flash_attention_2"), "flash_attention_2"),
    "sdp_attention": To("model.attn_implementation", on("sdpa"), "sdpa"),
    "flex_attention": To("model.attn_implementation", on("flex_attention"), "flex_attention"),
    "eager_attention": To("model.attn_implementation", on("eager"), "eager"),
    "lora_alpha": Field("adapter.lora_alpha"),
    "lora_dropout": Field("adapter.lora_dropout", "0 where it is absent"),
    **fields("adapter", """r target_parameters modules_to_save rank_pattern alpha_pattern fan_in_fan_out
        bias""", "lora_"),
    **fields("adapter", """use_dora use_rslora layer_replication init_lora_weights trainable_token_indices
        ensure_weight_tying layers_to_transform layers_pattern""", "peft_"),
    "peft_autocast_adapter_dtype": To("adapter.autocast_adapter_dtype", switch),
    "micro_batch_size": Field("trainer.per_device_train_batch_size", "1 where it is absent"),
    "eval_batch_size": Field("trainer.per_device_eval_batch_size", "micro_batch_size where it is absent"),
    "max_steps": Field("trainer.max_steps", "takes precedence over num_epochs"),
    "save_total_limit": Field("trainer.save_total_limit", "4 where it is absent"),
    **fields("trainer", """learning_rate optim_args optim_target_modules weight_decay adam_beta1 adam_beta2
        adam_epsilon max_grad_norm neftune_noise_alpha logging_steps logging_nan_inf_filter save_only_model
        load_best_model_at_end metric_for_best_model greater_is_better eval_on_start full_determinism
        ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters dataloader_num_workers
        dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last torch_empty_cache_steps
        torch_compile_backend torch_compile_mode hub_strategy hub_revision"""),
    "noisy_embedding_alpha": Field("trainer.neftune_noise_alpha"),
    "tf32": To("trainer.tf32", as_bool, "auto sets nothing"),
    "torch_compile": To("trainer.torch_compile", as_bool, "auto sets nothing"),
    "group_by_length": To("trainer.train_sampling_strategy", on("group_by_length"), "group_by_length"),
    "curriculum_sampling": To("trainer.train_sampling_strategy", on("sequential"), "sequential"),
    "sample_packing_sequentially": To("trainer.train_sampling_strategy", on("sequential"), "sequential"),
    "sequence_len": To("data.max_length", tokens, "512 where it is absent"),
    "dataset_num_proc": To("data.num_proc", whole),
    "dataset_processes": To("data.num_proc", whole),
    "tensor_parallel_size": To("sharding.tp_size", whole),
    "pad_to_multiple_of": To("data.pad_to_multiple_of", whole),
    "wandb_project": To("launch.env.WANDB_PROJECT", label, "and report_to wandb"),
    "wandb_entity": To("launch.env.WANDB_ENTITY", label),
    "wandb_mode": To("launch.env.WANDB_MODE", label),
    "wandb_name": To("trainer.run_name", label),
}  # fmt: skip
"""Each alone is one recipe key."""
DPO_KEYS: Keys = {
    "dpo_beta": Field("trainer.beta"),
    "rl_beta": Field("trainer.beta"),
    **fields("trainer", "label_smoothing loss_type loss_weights ld_alpha use_weighting", "dpo_"),
    **fields("trainer", "precompute_ref_log_probs"),
}
"""With rl: dpo and ipo."""
KTO_KEYS: Keys = {
    "rl_beta": Field("trainer.beta"),
    "kto_desirable_weight": Field("trainer.desirable_weight", "1 where it is absent"),
    "kto_undesirable_weight": Field("trainer.undesirable_weight", "1 where it is absent"),
    **fields("trainer", "precompute_ref_log_probs"),
}
"""With rl: kto."""
OWN_OPTIMIZERS = (
    "optimi_adamw", "ao_adamw_4bit", "ao_adamw_8bit", "ao_adamw_fp8", "adopt_adamw", "adamc", "came_pytorch",
    "muon", "muon_8bit", "dion", "sinkgd", "polora", "scao", "flash_adamw", "flash_adam", "flash_sgd",
    "flash_sgdw", "flash_lion", "q_galore_adamw8bit",
)  # fmt: skip
OWN_SCHEDULES = ("one_cycle", "rex")
_NOT_HERE = "no task here is that"
REFUSED_TRAINING = {
    "orpo": "trl 1.16 has ORPO in trl.experimental alone, which no task here starts",
    "simpo": "trl 1.16 has SimPO in trl.experimental alone, as a loss of its CPO",
    "cpo": "trl 1.16 has CPO in trl.experimental alone, which no task here starts",
    "ebft": "a trainer of axolotl's own",
    **dict.fromkeys(("ppo", "bco"), _NOT_HERE),
}
"""Kinds of `rl` -> why they are refused."""

_ALPACA = "Below is an instruction that describes a task"
_WRITE = "Write a response that appropriately completes the request."
_GIVEN = f"{_ALPACA}, paired with an input that provides further context. {_WRITE}"
_ALONE = f"{_ALPACA}. {_WRITE}"
_INSTRUCT = (
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "### Instruction:\n{instruction}\n\n### Response:\n",
)
_CHAT = ("USER: {instruction}\n{input}\nASSISTANT:", "USER: {instruction}\nASSISTANT:")
_CHATML = (
    "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
)
_PHI = (
    "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
    "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
)
_ORCA = (
    "### Human:\n{instruction}\n### Additional Context:\n{input}\n### Assistant:\n",
    "### Human:\n{instruction}\n### Assistant:\n",
)
_ML_SYSTEM = "<|im_start|>system\n{system}<|im_end|>\n"
_OF_ORCA = {"system_column": "system_prompt", "instruction": "question", "given": "", "output": "response"}

TYPES: dict[str, Prompt] = {
    "alpaca": Prompt(*_INSTRUCT, "{system}\n\n", _GIVEN, _ALONE),
    "alpaca:instruct": Prompt(*_INSTRUCT, "{system}\n\n", _GIVEN, _ALONE),
    "alpaca:chat": Prompt(*_CHAT, "SYSTEM: {system}\n", _GIVEN, _ALONE),
    "alpaca:chatml": Prompt(*_CHATML, _ML_SYSTEM, _GIVEN, _ALONE),
    "alpaca:phi": Prompt(*_PHI, "<|system|>\n{system}<|end|>\n", _GIVEN, _ALONE),
    "alpaca_instruct": Prompt(*_INSTRUCT, "{system}\n\n", _GIVEN, _ALONE),
    "alpaca_instruct.load_no_prompt": Prompt(*_INSTRUCT),
    "alpaca_chat": Prompt(*_CHAT, "SYSTEM: {system}\n", _GIVEN, _ALONE),
    "alpaca_w_system": Prompt(*_CHAT, "SYSTEM: {system}\n", system_column="system"),
    "alpaca_w_system.load_chat": Prompt(*_CHAT, "SYSTEM: {system}\n", system_column="system"),
    "alpaca_w_system.load_instruct": Prompt(*_INSTRUCT, "{system}\n\n", system_column="system"),
    "alpaca_w_system.load_open_orca": Prompt(*_ORCA, "### System:\n{system}\n", **_OF_ORCA),
    "alpaca_w_system.load_open_orca_chatml": Prompt(*_CHATML, _ML_SYSTEM, **_OF_ORCA),
}
"""Types of rows whose prompt is a pattern: done by a hook."""


_PAIRS = (("role", "content"), ("from", "value"))
_WORDS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
"""Names of roles that are read here as what they are there."""
_Shaped = tuple[dict[str, str], str, Shape | None]
"""(columns, format, hook)."""


@dataclass(slots=True)
class _Found(Sources):
    template: Given | None = None
    """The chat template of the first data set of chats that names one."""


def take_rows(peer: Peer) -> None:
    """Take sources, lengths and the loss's tokens."""
    found = _Found()
    streamed = _take_pretraining(peer, found)
    if streamed and peer.get("datasets") is not None:
        peer.drop("datasets", Effect.NONE, "axolotl reads pretraining_dataset alone")
    elif sources := _sources(peer, "datasets", "train", found):
        peer.reading.take("data.train", sources, peer.given("datasets"), said="datasets")
    if peer.reading.value("data.train") is None:
        peer.needs("data.train", "datasets", "no data set could be taken")
    _take_eval(peer, found)
    found.take_hooks(peer.reading, "datasets", peer.line("datasets"))
    _take_template(peer, found)
    _take_lengths(peer, found, streamed)
    if peer.switch("train_on_inputs") and set(found.formats) - {"text"}:
        peer.take("data.loss_on", "all", "train_on_inputs")
    if as_bool(peer.get("shuffle_merged_datasets")) is False and not peer.switch("curriculum_sampling"):
        reason = "rows are shuffled; write trainer.train_sampling_strategy: sequential for their own order"
        peer.drop("shuffle_merged_datasets", Effect.TRAINING, reason)


def _take_pretraining(peer: Peer, found: _Found) -> bool:
    """`pretraining_dataset`: texts that are streamed and packed; axolotl reads the first entry alone."""
    given = peer.get("pretraining_dataset")
    if is_off(given):
        if peer.switch("streaming"):
            peer.take("data.streaming", True, "streaming")
            several = isinstance(peer.values.get("datasets"), list) and len(peer.values["datasets"]) > 1
            if peer.switch("sample_packing") and several:
                reason = "streamed and packed, axolotl reads the first data set alone; here all are read"
                where = Given("datasets[1]", "{…}", peer.line("datasets"))
                peer.reading.drop(where, Effect.TRAINING, reason)
        return False
    first, *others = given if isinstance(given, list) else [given]
    for index, other in enumerate(others, 1):
        at = f"pretraining_dataset[{index}]"
        where = Given(at, other, peer.line(at) or peer.line("pretraining_dataset"))
        peer.reading.drop(where, Effect.NONE, "axolotl reads the first pretraining_dataset alone")
    at = "pretraining_dataset[0]" if isinstance(given, list) else "pretraining_dataset"
    entry = peer.inside(at, first if isinstance(first, dict) else {"path": first})
    source = _address(entry, "train")
    column = entry.get("text_column") or "text"
    entry.get("type")
    if entry.get("skip"):
        entry.drop("skip", Effect.TRAINING, "all rows are read")
    _leave(entry, peer.tool.lists["pretraining"])
    if source is not None:
        columns = {"columns": {"text": column}} if column != "text" else {}
        peer.take("data.train", [{**source, "format": "text", **columns}], "pretraining_dataset")
        found.formats.append("text")
    peer.get("streaming")
    peer.take("data.streaming", True, "pretraining_dataset")
    _take_packs(peer)
    if "trainer.max_steps" not in peer.reading.taken:
        peer.needs("trainer.max_steps", "pretraining_dataset", "rows that are streamed have no end")
    return True


def _take_packs(peer: Peer) -> None:
    """Texts of a pretraining_dataset: pieces in packs, texts joined one after another, or each for itself."""
    packed, joined = peer.switch("sample_packing"), peer.switch("pretraining_sample_concatenation")
    apart = as_bool(peer.get("pretrain_multipack_attn")) is not False
    key = "sample_packing" if packed else "pretraining_sample_concatenation"
    if packed or joined:
        peer.take("data.packing", True, key)
    if (packed and not apart) or (joined and not packed):
        key = "pretrain_multipack_attn" if packed else key
        peer.drop(key, Effect.TRAINING, "documents of a pack see each other there; here none sees another")
    if packed:
        note = "there the pieces overlap by 256 tokens"
        peer.default("data.overlong", "split", "sample_packing: true", note)
    else:
        note = "axolotl splits texts with sample_packing: true only"
        peer.default("data.overlong", "truncate", "sample_packing: false", note)


_READ = {
    "chat": ("messages", "tools", "system"),
    "image-chat": ("messages", "tools", "system", "images", "image"),
    "preference": ("prompt", "chosen", "rejected"),
}
"""Format -> columns of rows of messages that axolotl reads."""


def _sources(peer: Peer, key: str, split: str, found: _Found) -> list[dict[str, Any]]:
    sources = []
    for entry in peer.entries(key, "path and type"):
        source = _address(entry, split)
        shape = _rows(entry, found)
        _leave(entry, peer.tool.lists["dataset"])
        if source is None or shape is None:
            continue
        columns, form, hook = shape
        left: dict[str, None] = {}
        if form in _READ and hook is None:
            left = leave_columns(source["path"], peer.reading, [columns.get(n, n) for n in _READ[form]])
        for name in _listed(entry.get("name")):
            one = {**source, "format": form, **({"columns": {**columns, **left}} if columns or left else {})}
            sources.append({**one, "name": str(name)} if name is not None and "name" in source else one)
        found.add(source["path"], form, hook)
    return sources


def _address(entry: Peer, split: str) -> dict[str, Any] | None:
    """The address of a data set's rows."""
    path, files = entry.get("path"), entry.get("data_files")
    if files:
        names = _listed(files)
        if len(names) != 1 or not isinstance(names[0], str):
            entry.drop("data_files", Effect.NEEDED, "one file for one source", "write a source for each file")
            return None
        if path in BUILDERS or path is None:
            path = names[0]
        elif isinstance(path, str) and any((base / path).is_dir() for base in (_folder(entry), Path())):
            path = f"{path.rstrip('/')}/{names[0]}"
        else:
            reason, hint = "no file of a data set of the hub can be named", "download it, and name the file"
            entry.drop("data_files", Effect.NEEDED, reason, hint)
            return None
    name = entry.get("name")
    given = Given(entry.given("path").name, path, entry.line("path"))
    source = source_at(entry.reading, given, name=name[0] if isinstance(name, list) and name else name,
                       split=entry.get("split") or split, revision=entry.get("revision"))  # fmt: skip
    if source is None:
        return None
    if str(entry.values.get("ds_type")) in (*source["path"].split("."), entry.values.get("path"), "json"):
        entry.get("ds_type")  # as the files are called
    weight = as_number(entry.get("weight"))
    if weight is not None and weight != 1 and split == "train" and weight > 0:
        source["weight"] = float(weight)
    return source


def _folder(entry: Peer) -> Path:
    return Path(entry.reading.file).parent


def _rows(entry: Peer, found: _Found) -> _Shaped | None:
    """The shape of a data set's rows; None, with the reason in the reading, where it has none."""
    kind = entry.get("type")
    plain = str(kind).removesuffix(".load")
    if entry.reading.task.ranks_answers or entry.reading.task.labels_answers:
        return _pairs(entry, kind)
    if entry.reading.task.rolls_out:
        if kind is not None:
            hint = "write a format_row that makes prompt and what the reward functions read, for `python`"
            entry.drop("type", Effect.NEEDED, "a function of yours makes the prompts there", hint)
        return {}, entry.reading.task.formats[0], None
    if entry.reading.task.sees_images and kind not in _CHATS:
        entry.drop("type", Effect.NEEDED, "with a processor, axolotl reads chat_template alone")
        return None
    if isinstance(kind, dict):
        prompt = _own_prompt(entry, kind)
        return None if prompt is None else ({}, "prompt-completion", prompt)
    if kind is None:
        entry.refuse("type", "is not there: its rows would be tokens already")
        return None
    if plain in TYPES:
        return {}, "prompt-completion", TYPES[plain]
    if kind == "completion":
        column = entry.get("field") or "text"
        return ({"text": str(column)} if column != "text" else {}), "text", None
    is_old = plain.partition(":")[0].partition(".")[0] == "sharegpt"
    if is_old or kind in _CHATS:
        return _chat(entry, is_old, found)
    hint = "write a format_row that makes prompt and completion, and name its file in `python`"
    own = "." in plain or plain.partition(":")[0] in _OWN_TYPES
    reason = "its prompt is axolotl's own code" if own else f"axolotl {entry.tool.version} has no such type"
    entry.drop("type", Effect.NEEDED, reason, hint if own else "completion is its type of plain texts")
    return None


_CHATS = ("chat_template", "chat_template.default")
_OWN_TYPES = (
    "alpaca", "alpaca_chat", "alpaca_instruct", "alpaca_w_system", "concisechoice", "context_qa",
    "creative_acr", "explainchoice", "gpteacher", "input_output", "jeopardy", "llama2_chat", "messages",
    "metharme", "oasst", "orcamini", "pygmalion", "reflection", "stepwise_supervised", "summarizetldr",
)  # fmt: skip
"""Types whose rows axolotl's own code makes (prompt_strategies/, utils/data/wrappers.py)."""


def _chat(entry: Peer, is_old: bool, found: _Found) -> _Shaped:
    column = str(entry.get("field_messages") or ("conversations" if is_old else "messages"))
    properties = entry.section("message_property_mappings").values
    role, content = (
        str(properties.get(name) or entry.get(f"message_field_{name}") or fallback)
        for name, fallback in zip(("role", "content"), _PAIRS[is_old], strict=True)
    )
    if is_old:
        entry.drop("type", Effect.NONE, "axolotl 0.21 refuses it; its rows are read as chat_template")
    for name in properties:
        if name not in ("role", "content"):
            where = entry.given("message_property_mappings").inner(name, properties[name])
            entry.reading.drop(where, Effect.TRAINING, "only role and content are renamed")
    _template_of(entry, found)
    _masks(entry)
    own = _own_roles(entry)
    tools = str(entry.get("field_tools") or "tools")
    form, images = ("image-chat", ("images", "image")) if entry.reading.task.sees_images else ("chat", ())
    if (role, content) not in _PAIRS or not own.items() <= _WORDS.items():
        roles = tuple((own or _WORDS).items())
        tools = tools if tools != "tools" else ""
        return {}, form, Turns(column, role, content, roles, tools=tools, images=images)
    names = {"messages": column, "tools": tools}
    return {field: column for field, column in names.items() if field != column}, form, None


def _own_roles(entry: Peer) -> dict[str, str]:
    """The rows' names of roles, each with its role."""
    roles = entry.get("roles")
    pairs = roles.items() if isinstance(roles, dict) else ()
    return {str(word): str(role) for role, several in pairs for word in _listed(several)}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _template_of(entry: Peer, found: _Found) -> None:
    """The template of a data set, which takes precedence over the recipe's."""
    given = _chosen_template(entry)
    if given.value is None:
        return
    if found.template is None:
        found.template = given
    elif found.template.value != given.value:
        entry.reading.drop(given, Effect.TRAINING, "one chat template is for all rows")


def _chosen_template(peer: Peer) -> Given:
    """`chat_template`, or the text that it refers to."""
    name, text = peer.get("chat_template"), peer.get("chat_template_jinja")
    of_text = name in (None, "jinja") and text is not None
    return peer.given("chat_template_jinja" if of_text else "chat_template")


def _masks(entry: Peer) -> None:
    trained = entry.get("roles_to_train")
    if trained is not None and [_WORDS.get(str(role)) for role in _listed(trained)] != ["assistant"]:
        reason = "the assistant's turns alone contribute to the loss, or with data.loss_on: all everything"
        entry.drop("roles_to_train", Effect.TRAINING, reason)
    for key in ("train_on_eos", "train_on_eot"):
        if entry.get(key) not in (None, "turn"):
            entry.drop(key, Effect.TRAINING, "the end of each turn of the assistant contributes to the loss")


def _pairs(entry: Peer, kind: Any) -> _Shaped | None:
    """Rows of pairs and of labelled answers; chat templates alone need no hook."""
    task = entry.reading.task
    if kind is None and task.has_reference:  # trl reads the rows as they are
        return {}, task.formats[0], None
    if task.labels_answers or not task.has_reference or str(kind) not in _CHATS:
        hook = shape_of(entry, kind)
        return None if hook is None else ({}, task.formats[0], hook)
    given = entry.get("message_property_mappings")
    renamed = isinstance(given, dict) and any(key != str(column) for key, column in given.items())
    other = {"roles": not _own_roles(entry).items() <= _WORDS.items(), "message_property_mappings": renamed}
    for key in [key for key, found in other.items() if found]:
        reason = "other names of roles in preference rows"
        entry.drop(key, Effect.NEEDED, reason, "write a format_row that renames them")
    columns = {"prompt": str(entry.get("field_messages") or "messages")}
    columns |= {name: str(entry.get(f"field_{name}") or name) for name in ("chosen", "rejected")}
    return {name: column for name, column in columns.items() if name != column}, "preference", None


def _own_prompt(entry: Peer, kind: dict[str, Any]) -> Prompt | None:
    """`type: {format: "...", field_instruction: ...}`."""
    given = {str(key): value for key, value in kind.items() if value is not None}
    turn = str(given.get("format", "{instruction} {input} "))
    alone, outer = (
        str(given.get("no_input_format", "{instruction} ")),
        str(given.get("system_format", "{system}")),
    )
    for pattern, names in ((turn, ("instruction", "input")), (alone, ("instruction",)), (outer, ("system",))):
        if unknown_fields(pattern, names) != []:
            reason = f"the braces of {shown(pattern)} are not {' and '.join(names)} alone"
            entry.drop("type", Effect.NEEDED, reason, "write a format_row")
            return None
    for key in given:
        if key not in entry.tool.lists["prompt"]:
            entry.reading.drop(
                entry.given("type").inner(key, given[key]), Effect.NONE, "no key of a prompt's pattern"
            )
    fixed = str(given.get("system_prompt", ""))
    columns = (str(given.get(f"field_{name}", name)) for name in ("system", "instruction", "input", "output"))
    return Prompt(turn, alone, outer, fixed, fixed, *columns)


def _leave(entry: Peer, known: tuple[str, ...]) -> None:
    """Report the other keys of a data set."""
    for key, value in entry.values.items():
        if entry.at + key in entry.reading.seen:
            continue
        left = next((left for left in entry.tool.left["dataset"] if key in left.names), None)
        if key not in known:
            entry.drop(key, Effect.NONE, f"no key of a data set of axolotl {entry.tool.version}")
        elif is_off(value):
            entry.get(key)
        elif left is None:
            entry.drop(key, Effect.TRAINING, "axolotl's own; it has no recipe key")
        else:
            entry.drop(key, left.effect or Effect.TRAINING, left.reason)


def _take_eval(peer: Peer, found: _Found) -> None:
    tests, size = peer.get("test_datasets"), peer.get("val_set_size")
    if not tests:
        if size is not None:
            take_share(peer.reading, peer.given("val_set_size"))
        return
    if rows := _sources(peer, "test_datasets", "test", found):
        peer.take(EVALUATED, rows, "test_datasets")
    else:
        peer.needs(EVALUATED, "test_datasets", "no evaluation data set could be taken")
    if not is_off(size):
        peer.drop("val_set_size", Effect.NONE, "test_datasets are given, too")


def _take_template(peer: Peer, found: _Found) -> None:
    given = _chosen_template(peer)
    if found.template is not None:
        if given.value is not None and given.value != found.template.value:
            peer.reading.drop(given, Effect.NONE, "the data set's own takes precedence")
        given = found.template
    if given.value in (None, "tokenizer_default"):
        return
    if not ({"chat", "image-chat", "preference"} & set(found.formats) or peer.reading.task.rolls_out):
        peer.reading.drop(given, Effect.NONE, "no rows are made with it")
    elif given.name.endswith("jinja"):
        peer.take_template(given)
    else:
        hint = "look with `effilaunch prepare RECIPE --show 1`, or set model.chat_template"
        reason = "axolotl's own text of that template; the tokenizer's is used"
        peer.reading.drop(given, Effect.TRAINING, reason, hint)


def _take_lengths(peer: Peer, found: _Found, streamed: bool) -> None:
    key, unprepared = "excess_length_strategy", _take_unprepared(peer)
    if peer.reading.task.rolls_out:
        peer.reading.know(key)
        needs_length(peer, "axolotl")
        return
    if "sequence_len" not in peer.values:
        peer.default("data.max_length", 512, "sequence_len")
    given = peer.get(key)
    if given not in (None, "truncate", "drop", "raise"):
        peer.drop(key, Effect.NEEDED, "expected truncate, drop or raise")
        given = None
    strategy, texts_alone = given or "drop", set(found.formats) == {"text"}
    where = Given(key, strategy, peer.line(key))
    if not peer.reading.task.learns:
        _take_length_of_answers(peer, peer.given("skip_prepare_dataset") if unprepared else where)
    elif texts_alone:
        peer.default("data.overlong", "split", "type: completion", "texts are cut into pieces there, too")
    else:
        if "text" in found.formats:
            reason = (
                "axolotl cuts texts into pieces and drops other long rows; here all rows are treated alike"
            )
            peer.needs("data.overlong", "datasets", reason)
        value = "truncate" if strategy == "truncate" else "drop"
        if given is None:
            peer.reading.default("data.overlong", value, f"{key}: drop", line=peer.line(key))
        else:
            peer.reading.take("data.overlong", value, where, said=f"{key}: {given}")
    if peer.reading.task.sees_images:
        reason = "axolotl keeps samples with images whole; longer ones are dropped here, and counted"
        where = Given("sequence_len", peer.values.get("sequence_len", 512), peer.line("sequence_len"))
        peer.reading.drop(where, Effect.TRAINING, reason)
    if given == "raise" and peer.reading.task.learns:
        peer.drop(key, Effect.TRAINING, "long rows are dropped, and counted")
    if peer.switch("sample_packing") and not streamed:
        peer.take("data.packing", True, "sample_packing")
    _take_flattening(peer)


def _take_unprepared(peer: Peer) -> bool:
    """`skip_prepare_dataset`: whether rows of answers keep their length; other rows would be tokens."""
    key, task = "skip_prepare_dataset", peer.reading.task
    if not peer.switch(key) or task.sees_images:
        return False
    if is_off(peer.values.get("rl")):
        peer.refuse(key, "is true: the rows would be tokens already, or what trl makes of them")
    return True


def _take_flattening(peer: Peer) -> None:
    key = "batch_flattening"
    if peer.values.get(key) == "auto":
        peer.drop(key, Effect.NONE, "the plan decides it where data.padding_free is absent")
    elif peer.switch(key) and not peer.reading.value("data.packing"):
        peer.take("data.padding_free", True, key)


def _take_length_of_answers(peer: Peer, where: Given) -> None:
    """Long rows of preference trainings; where: the strategy of the file, or that it has none."""
    task = peer.reading.task
    if "truncate" in task.overlong:
        reason = "axolotl cuts longer pairs; here they are left out, because a cut answer has another reward"
        where = Given("sequence_len", peer.values.get("sequence_len", 512), peer.line("sequence_len"))
        peer.reading.take("data.overlong", "drop", where, said="sequence_len")
        peer.reading.drop(where, Effect.TRAINING, reason)
        return
    peer.reading.take("data.overlong", "truncate", where, said=f"{where.name}: {shown(where.value)}")
    if where.value != "truncate":
        there = {"raise": "stops at", "drop": "leaves out"}.get(where.value, "keeps")
        reason = f"axolotl {there} rows longer than sequence_len; here their answers are cut at the end"
        peer.reading.drop(where, Effect.TRAINING, reason)


_NOT_LINEAR = ("lm_head", "embed_tokens", "wte")


def take_model(peer: Peer) -> None:
    tokenizer = peer.get("tokenizer_config")
    if tokenizer is not None and tokenizer != peer.values.get("base_model"):
        peer.take("model.tokenizer", str(tokenizer), "tokenizer_config")
    if peer.values.get("base_model_config") == peer.values.get("base_model"):
        peer.get("base_model_config")
    _take_special_tokens(peer)
    for key in ("model_type", "type_of_model"):
        head = str(peer.values.get(key, "")).endswith("ForSequenceClassification")
        if head and peer.reading.task.head == "language-model":
            peer.refuse(key, f"is {shown(peer.values[key])}: axolotl trains reward models with it")
    peer.take_kernel("attn_implementation")


def _take_special_tokens(peer: Peer) -> None:
    given = peer.get("special_tokens")
    if given is not None and not isinstance(given, dict):
        peer.drop("special_tokens", Effect.NEEDED, "expected a mapping of tokens")
        return
    inner = peer.inside("special_tokens", given or {})
    for token in inner.values:
        if token == "additional_special_tokens":
            if added := inner.listed(token):
                known = peer.reading.value("model.add_tokens") or []
                inner.take("model.add_tokens", [*known, *added], token)
        elif token == "pad_token":
            inner.drop(token, Effect.NONE, "padding never contributes to the loss")
        else:
            inner.drop(token, Effect.TRAINING, "unless the tokenizer has it already")


def take_lora(peer: Peer) -> bool:
    """The adapter; whether there is one."""
    kind = peer.get("adapter")
    if is_off(kind):
        _forget_adapter(peer)
        return False
    if kind not in ("lora", "qlora"):
        peer.refuse("adapter", f"is {shown(kind)}, and of adapters there is only LoRA here")
        return True
    folder = peer.get("lora_model_dir")
    if folder is not None:
        _forget_adapter(peer)
        peer.take("adapter.type", "lora", "adapter")
        peer.take("adapter.path", str(folder), "lora_model_dir")
        return True
    peer.take("adapter.type", "lora", "adapter")
    _take_targets(peer)
    given = peer.get("peft")
    loftq = given.get("loftq_config") if isinstance(given, dict) else None
    if isinstance(loftq, dict) and loftq:
        peer.take("adapter.loftq_config", {"loftq_iter": 1, **loftq}, "peft")
        peer.take("adapter.init_lora_weights", "loftq", "peft")
    elif given:
        peer.drop("peft", Effect.TRAINING, "only its loftq_config is read")
    peer.default("adapter.lora_dropout", 0.0, "lora_dropout")
    for key, to in (("lora_r", "adapter.r"), ("lora_alpha", "adapter.lora_alpha")):
        if key not in peer.values:
            peer.reading.needs(to, None, f"{key} is not there, and axolotl has no default")
    return True


def _forget_adapter(peer: Peer) -> None:
    """Fields of an adapter that is not made: they are without effect there, too."""
    for to in [key for key in peer.reading.taken if key.startswith("adapter.")]:
        del peer.reading.taken[to]
    continued = "lora_model_dir" in peer.values
    why = "the adapter in lora_model_dir has its own" if continued else "no adapter is trained"
    for key in peer.values:
        if key.startswith(("lora_", "peft")) and key not in ("lora_model_dir", "lora_on_cpu"):
            if is_off(peer.values[key]):
                peer.get(key)
            else:
                peer.drop(key, Effect.NONE, why)


def _take_targets(peer: Peer) -> None:
    names = peer.get("lora_target_modules")
    if peer.switch("lora_target_linear"):
        peer.take("adapter.target_modules", "all-linear", "lora_target_linear")
        given = _listed(names) if names else []
        if any(str(layer).rpartition(".")[2] in _NOT_LINEAR for layer in given):
            reason = "all-linear is without the embeddings and the head"
            hint = "write adapter.target_modules as a list of all names"
            peer.drop("lora_target_modules", Effect.TRAINING, reason, hint)
        elif given:
            peer.drop("lora_target_modules", Effect.NONE, "lora_target_linear takes all linear layers")
    elif names:
        Field("adapter.target_modules")(peer.reading, peer.given("lora_target_modules"))
    elif "lora_target_parameters" not in peer.values:
        reason = "neither lora_target_modules nor lora_target_linear is there: axolotl would adapt nothing"
        peer.reading.needs(
            "adapter.target_modules", None, reason, "all-linear is what lora_target_linear means"
        )


def take_bits(peer: Peer, adapted: bool) -> None:
    _take_stored(peer)
    four, eight, kind = peer.switch("load_in_4bit"), peer.switch("load_in_8bit"), peer.values.get("adapter")
    backend = peer.get("nf4_backend")
    if backend not in (None, "bitsandbytes"):
        peer.refuse("nf4_backend", f"is {shown(backend)}: only bitsandbytes quantises here")
    if (four or eight) and not adapted:
        message = "is true without an adapter: a quantised model cannot be trained itself"
        peer.refuse("load_in_4bit" if four else "load_in_8bit", message, "set adapter: qlora, or delete it")
    elif kind == "qlora" and not four and "lora_model_dir" not in peer.values:
        peer.refuse("adapter", "is qlora without load_in_4bit: true, which axolotl refuses")
    elif kind == "lora" and four and not eight:
        reason = "axolotl quantises with adapter: qlora only; the model stays as it is"
        peer.drop("load_in_4bit", Effect.NONE, reason, "write model.quantization: nf4 if QLoRA is meant")
    elif eight and kind == "lora":
        take_quantization(peer.reading, "int8", peer.given("load_in_8bit"))
    elif four:
        _take_four_bits(peer)


def _take_stored(peer: Peer) -> None:
    """`model_quantization_config`: weights that the checkpoint stores in another form than 16 bits."""
    key, kind = "model_quantization_config", peer.get("model_quantization_config")
    options = peer.section("model_quantization_config_kwargs").values if kind is not None else {}
    if kind is not None and as_bool(options.get("dequantize")):
        reason = "dequantize trains 16-bit weights, which base_model does not hold"
        peer.drop(key, Effect.NEEDED, reason, "write model.name_or_path: a checkpoint with 16-bit weights")
    elif kind is not None:
        peer.refuse(key, f"is {shown(kind)}: only bitsandbytes quantises here")


def _take_four_bits(peer: Peer) -> None:
    options = peer.section("bnb_config_kwargs").values
    kind = str(options.get("bnb_4bit_quant_type", "nf4"))
    if kind not in ("nf4", "fp4"):
        peer.drop("bnb_config_kwargs", Effect.NEEDED, "expected the type nf4 or fp4")
        return
    double = as_bool(options.get("bnb_4bit_use_double_quant", True))
    take_quantization(peer.reading, kind, peer.given("load_in_4bit"), double_quant=double)
    for option, value in options.items():
        if option not in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"):
            where = peer.given("bnb_config_kwargs").inner(option, value)
            peer.reading.drop(where, Effect.TRAINING, "it has no recipe key")


def take_precision(peer: Peer, adapted: bool) -> None:
    """bf16 is auto there, and without DeepSpeed the weights themselves are loaded in 16 bits."""
    bf16, fp16 = peer.get("bf16"), peer.switch("fp16")
    brain, half, full = (peer.switch(key) for key in ("bfloat16", "float16", "float32"))
    asked = str("auto" if bf16 is None else bf16).lower()
    wide = as_bool(bf16) is True or brain
    # Norms of a quantised model in 16 bits need a precision that is set.
    is_open = adapted and peer.reading.value("model.quantization") in (None, "none")
    if asked == "full":
        peer.take("precision", "bf16-true", "bf16", note="no autocast there")
    elif wide or (asked == "auto" and not fp16):
        _take_wide(peer, adapted, "auto" if is_open and not wide else "bf16", "bfloat16" if brain else "bf16")
    elif fp16:
        peer.take("precision", "fp16", "fp16")
    elif half:
        peer.take("precision", "fp16-true", "float16")
    else:
        peer.take("precision", "fp32", "float32" if full else "bf16")


def _take_wide(peer: Peer, adapted: bool, precision: str, key: str) -> None:
    given = peer.values.get(key)
    by_card = precision == "bf16" and as_bool(given) is None
    note = "auto there: where the card has it" if by_card else ""
    if given is None:
        peer.default("precision", precision, f"{key}: auto", note)
    else:
        peer.take("precision", precision, key, note=note)
    if not adapted and "deepspeed" not in peer.values:
        where = Given(key, "auto" if given is None else given, peer.line(key))
        peer.reading.take("model.dtype", "bfloat16", where, note="axolotl loads the weights in 16 bits")


def take_steps(peer: Peer) -> None:
    micro, batch = as_number(peer.values.get("micro_batch_size", 1)), as_number(peer.get("batch_size"))
    accumulation = "trainer.gradient_accumulation_steps"
    peer.default("trainer.per_device_train_batch_size", 1, "micro_batch_size")
    peer.argument("gradient_accumulation_steps", to="gradient_accumulation_steps")
    if "gradient_accumulation_steps" in peer.values:
        if batch is not None:
            peer.drop("batch_size", Effect.NONE, "gradient_accumulation_steps is given too, and decides")
    elif batch is not None and micro:
        peer.take(accumulation, max(1, int(batch // micro)), "batch_size",
                  note="batch_size // micro_batch_size, as for one process")  # fmt: skip
    peer.default(accumulation, 1, "gradient_accumulation_steps")
    peer.default("trainer.average_tokens_across_devices", False, "average_tokens_across_devices")
    if peer.reading.evaluates:
        size = peer.reading.value("trainer.per_device_train_batch_size")
        peer.default("trainer.per_device_eval_batch_size", size, "eval_batch_size")
    if "trainer.max_steps" not in peer.reading.taken:
        peer.argument("num_epochs", to="num_train_epochs")
        if "num_epochs" not in peer.values:
            peer.default("trainer.num_train_epochs", 1.0, "num_epochs")
    elif "num_epochs" in peer.values:
        peer.drop("num_epochs", Effect.NONE, "max_steps takes precedence")
    peer.argument("seed")
    known = any(entry.key.rpartition(".")[2] == "learning_rate" for entry in peer.reading.dropped)
    if "trainer.learning_rate" not in peer.reading.taken and not known:
        peer.reading.needs(
            "trainer.learning_rate", None, "learning_rate is not there, and axolotl requires it"
        )


def take_optimizer(peer: Peer) -> None:
    optimizer = peer.get("optimizer")
    if str(optimizer) in OWN_OPTIMIZERS:
        reason = "axolotl's own optimizer, which is not here"
        peer.drop("optimizer", Effect.TRAINING, reason, "write trainer.optim")
    elif optimizer is None:
        peer.default("trainer.optim", "adamw_torch_fused", "optimizer")
    else:
        peer.argument("optimizer", to="optim")
    _take_schedule(peer)
    peer.argument("warmup_steps", "warmup_ratio")
    if not {"warmup_steps", "warmup_ratio"} & peer.values.keys():
        note = "a share of all steps; axolotl stops at 100 steps"
        peer.default("trainer.warmup_steps", 0.03, "warmup_ratio", note)
    if str(peer.get("gradient_checkpointing")).lower() in ("offload", "offload_disk", "unsloth"):
        note = "how it is kept concerns speed and memory only"
        peer.take("trainer.activation_checkpointing", True, "gradient_checkpointing", note=note)
    else:
        peer.argument("gradient_checkpointing")
    peer.argument("gradient_checkpointing_kwargs")
    if peer.get("lr_scheduler_kwargs") != {}:
        peer.argument("lr_scheduler_kwargs")


def _take_schedule(peer: Peer) -> None:
    schedule, ratio = peer.get("lr_scheduler"), as_number(peer.get("cosine_min_lr_ratio"))
    if str(schedule) in OWN_SCHEDULES:
        reason = "axolotl's own schedule, which is not here"
        peer.drop("lr_scheduler", Effect.TRAINING, reason, "write trainer.lr_scheduler_type")
    elif schedule is None:
        peer.default("trainer.lr_scheduler_type", "cosine", "lr_scheduler")
    else:
        peer.argument("lr_scheduler", to="lr_scheduler_type")
    if "cosine_min_lr_ratio" not in peer.values or ratio == 0:
        return
    plain = schedule in (None, "cosine") and "cosine_constant_lr_ratio" not in peer.values
    if plain and ratio is not None and 0 < ratio < 1:
        peer.take("trainer.lr_scheduler_type", "cosine_with_min_lr", "cosine_min_lr_ratio")
        peer.take("trainer.lr_scheduler_kwargs", {"min_lr_rate": ratio}, "cosine_min_lr_ratio")
    else:
        peer.drop("cosine_min_lr_ratio", Effect.TRAINING, "only of a cosine schedule, without a constant end")


def _take_interval(peer: Peer, kind: str) -> float | None:
    """Take the interval of saves or evaluations; returns evals_per_epoch as a share of all steps."""
    often, share = f"{kind}s_per_epoch", None
    times, epochs = as_number(peer.get(often)), as_number(peer.values.get("num_epochs", 1.0))
    if times and epochs and times > 0 and epochs > 0:
        share = float(f"{1 / (times * epochs):.12g}")
    peer.get(f"{kind}_steps")
    if share is not None and share < 1:
        peer.take(f"trainer.{kind}_steps", share, often, note="a share of all steps")
        peer.take(f"trainer.{kind}_strategy", "steps", often)
    elif f"{kind}_steps" in peer.values:
        peer.argument(f"{kind}_steps")
        peer.take(f"trainer.{kind}_strategy", "steps", f"{kind}_steps")
    peer.argument(f"{kind}_strategy")
    return share


def take_times(peer: Peer) -> None:
    """The intervals of saves and evaluations, and early stopping."""
    if "evaluation_strategy" in peer.values:
        peer.values.setdefault("eval_strategy", peer.get("evaluation_strategy"))
    _take_interval(peer, "save")
    if not peer.reading.value("data.streaming"):  # a stream has no epochs
        peer.default("trainer.save_strategy", "epoch", "save_strategy")
    peer.default("trainer.save_total_limit", 4, "save_total_limit")
    if not peer.reading.evaluates:
        for key in ("eval_strategy", "eval_steps", "evals_per_epoch", "early_stopping_patience"):
            if not is_off(peer.get(key)):
                peer.drop(key, Effect.NONE, "axolotl has no rows to evaluate on either")
        return
    share = _take_interval(peer, "eval")
    if share is not None and share >= 1 and peer.values.get("eval_steps") is None:
        reason = "1 / (evals x epochs) is not below 1: axolotl does not evaluate"
        peer.drop("evals_per_epoch", Effect.NONE, reason)
    peer.default(
        "trainer.eval_strategy", "no", "eval_strategy", "axolotl evaluates only at an interval that is set"
    )
    patience = as_number(peer.get("early_stopping_patience"))
    if patience is not None and peer.reading.value("trainer.eval_strategy") == "no":
        reason = "axolotl does not evaluate during the run either"
        peer.drop("early_stopping_patience", Effect.NONE, reason)
    elif patience is not None and patience >= 1:
        peer.take("early_stopping.patience", int(patience), "early_stopping_patience")


_MARKS = ("datasets", "pretraining_dataset", "sequence_len", "micro_batch_size", "adapter", "rl")
_TRACKERS = {
    "use_wandb": "wandb",
    "use_tensorboard": "tensorboard",
    "use_mlflow": "mlflow",
    "use_comet": "comet_ml",
    "use_trackio": "trackio",
}


def is_recipe(data: Mapping[str, Any]) -> bool:
    """Whether a YAML's keys are axolotl's; without a model, two of them."""
    marks = sum(key in data for key in _MARKS)
    return marks > ("base_model" not in data) and "model_name_or_path" not in data


def read(text: str, file: str) -> Reading:
    """Read a recipe of axolotl.

    Raises RecipeError if the file is no YAML; a kind of training that is not here is among the refusals.
    """
    peer = open_peer(text, file, tool())
    if "base_model" not in peer.values:
        peer.reading.needs("model.name_or_path", None, "base_model is not there")
    _take_task(peer)
    _take_images(peer)
    if (as_number(peer.values.get("max_steps", 1)) or 0) <= 0:
        peer.get("max_steps")  # as if absent
        peer.values.pop("max_steps")
    peer.take_keys(KEYS)
    take_model(peer)
    adapted = take_lora(peer)
    take_bits(peer, adapted)
    take_precision(peer, adapted)
    take_kbit_norms(peer.reading, f"adapter: {peer.values.get('adapter')}", "axolotl")
    take_rows(peer)
    take_steps(peer)
    take_optimizer(peer)
    take_times(peer)
    _take_sharding(peer)
    _take_trackers(peer)
    _take_plugins(peer)
    peer.leave((*peer.tool.left["keys"], *peer.tool.left["unused"]))
    peer.leave_rest()
    return peer.close()


def tool() -> Tool:
    return load_tool("axolotl", "axolotl", "ignores it")


def _take_task(peer: Peer) -> None:
    kind, of_reward = str(peer.get("rl")).lower(), peer.switch("reward_model")
    labels = as_number(peer.get("num_labels"))
    if labels not in (None, 1) or (labels and not of_reward):
        peer.refuse("num_labels", f"is {shown(labels)}: only a reward model has labels here, and it has one")
    if of_reward and is_off(peer.values.get("rl")):
        task = next(task for task in TASKS if "reward_model" in task.known_by.get("axolotl", ()))
        peer.take("task", task.name, "reward_model")
        peer.argument("center_rewards_coefficient")
    elif not is_off(peer.values.get("rl")):
        named = task_of_tool("axolotl", kind)
        if named is not None:
            peer.take("task", named.name, "rl")
            if named.rolls_out:
                _take_rollouts(peer, kind)
            else:
                peer.take_keys(KTO_KEYS if named.labels_answers else DPO_KEYS)
            for to, value in named.tool_defaults.get("axolotl", {}).items():
                peer.default(to, value, to.rpartition(".")[2])
            if kind == "ipo":
                peer.take("trainer.loss_type", "ipo", "rl")
        elif kind in REFUSED_TRAINING:
            peer.refuse("rl", f"is {shown(kind)}: {REFUSED_TRAINING[kind]}")
        else:
            peer.refuse("rl", f"is {shown(kind)}, expected {', '.join(words_of_tool('axolotl'))}")


TRL_KEYS: Keys = {
    **GENERATION_KEYS,
    "beta": Field("trainer.beta"),
    "use_liger_loss": Field("trainer.use_liger_kernel"),
    "vllm_importance_sampling_cap": Field("trainer.vllm_importance_sampling_clip_max"),
    **fields(
        "trainer",
        """num_iterations epsilon epsilon_high loss_type mask_truncated_completions
        importance_sampling_level multi_objective_aggregation log_completions num_completions_to_print
        off_policy_mask_threshold use_bias_correction_kl vllm_importance_sampling_correction
        vllm_importance_sampling_mode""",
    ),
}
"""Of the section `trl`, with rl: grpo and gdpo."""
SERVER_KEYS: Keys = fields("trainer", "vllm_server_host vllm_server_port vllm_server_timeout")
"""The same with vllm_mode: server."""
_OWN_ROLLOUTS = (
    "use_data_producer",
    "async_prefetch",
    "rollout_func",
    "replay_buffer_size",
    "vllm_lora_sync",
)
"""Keys of `trl` that start a trainer of axolotl's own."""
_MOVED = ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")


def _take_rollouts(peer: Peer, kind: str) -> None:
    """The section `trl`: reward functions and sampling. gdpo normalises each reward by itself."""
    if "sequence_len" in peer.values:
        peer.drop("sequence_len", Effect.NONE, f"axolotl does not read it with rl: {kind}")
    inner = peer.section("trl")
    if kind == "gdpo":
        peer.reading.take(
            "trainer.multi_objective_aggregation", "normalize_then_sum", peer.given("rl"), said="rl: gdpo"
        )
    for key in _OWN_ROLLOUTS:
        if not is_off(inner.get(key)):
            inner.refuse(key, "starts a trainer of axolotl's own")
    functions = inner.listed("reward_funcs")
    if not functions:
        peer.needs(KEY, "trl", "trl.reward_funcs is not there, and nothing scores the completions")
    take_rewards(inner, functions, inner.get("reward_weights"))
    _take_vllm(peer, inner)
    take_scale(inner)
    take_batches(inner)
    inner.take_keys(TRL_KEYS)
    if "generation.max_completion_length" not in peer.reading.taken:
        peer.needs("generation.max_completion_length", "trl", "axolotl has no default of it")
    peer.take_keys({"rl_beta": Field("trainer.beta")} if "beta" not in inner.values else {})
    moved = inner.switch("sync_ref_model")
    for key in inner.values:
        if f"trl.{key}" in peer.reading.seen or is_off(inner.values[key]):
            inner.get(key)
        elif key in _MOVED and not moved:
            inner.drop(key, Effect.NONE, "without sync_ref_model")
        else:
            inner.drop(key, Effect.TRAINING, "it has no recipe key")
    if moved:
        inner.drop("sync_ref_model", Effect.TRAINING, "the reference is the model before training")


def _take_vllm(peer: Peer, inner: Peer) -> None:
    """`trl.use_vllm` with the section `vllm`, which is of the server but for two keys."""
    take_backend(inner, None)
    backend = peer.reading.value("generation.backend")
    engine = peer.section("vllm")
    if backend == "vllm-server":
        inner.take_keys(SERVER_KEYS)
    elif backend is not None:
        inner.argument("vllm_enable_sleep_mode")
        engine.argument("gpu_memory_utilization", to="vllm_gpu_memory_utilization")
        peer.default("trainer.vllm_gpu_memory_utilization", 0.9, "vllm.gpu_memory_utilization")
        engine.argument("tensor_parallel_size", to="vllm_tensor_parallel_size")
    why = "of the server, which is started apart" if backend == "vllm-server" else "not read there either"
    for key in SERVER_KEYS:
        if key in inner.values and f"trl.{key}" not in peer.reading.seen:
            inner.drop(key, Effect.NONE, "of a server, which nothing asks for")
    for key in engine.values:
        if f"vllm.{key}" not in peer.reading.seen:
            engine.drop(key, Effect.NONE, why)


def _take_images(peer: Peer) -> None:
    """`processor_type`: rows with images. A text is trained on without it, also of a multimodal model."""
    frozen = peer.switch("freeze_mm_modules")
    if is_off(peer.get("processor_type")):
        if frozen:
            peer.drop(
                "freeze_mm_modules", Effect.NONE, "of rows without images the text model alone is loaded"
            )
        return
    if "task" in peer.reading.taken:
        peer.refuse("processor_type", "is set, and of preference trainings there is none with images here")
        return
    peer.take("task", task_with_images().name, "processor_type")
    if frozen:
        peer.take("model.freeze", ["vision", "projector"], "freeze_mm_modules")
    else:
        peer.default("model.freeze", [], "freeze_mm_modules: false", "axolotl freezes no part by itself")
    if not peer.switch("skip_prepare_dataset"):
        peer.drop(
            "skip_prepare_dataset", Effect.NONE, "axolotl needs true for images; rows are prepared here"
        )


def _take_sharding(peer: Peer) -> None:
    options, words = peer.get("fsdp_config"), peer.get("fsdp")
    if name := peer.get("deepspeed"):
        peer.argument("deepspeed")
        if config := shipped(str(name)):
            peer.reading.shipped[str(name)] = config
    if words:
        peer.take("sharding.engine", "fsdp", "fsdp_config" if options else "fsdp")
        peer.argument("fsdp")
    elif options:
        peer.take("sharding.engine", "fsdp", "fsdp_config")
    if options:
        take_fsdp_options(peer.reading, peer.given("fsdp_config"))
    peer.get("fsdp_version")
    if "fsdp_final_state_dict_type" in peer.values:
        peer.drop("fsdp_final_state_dict_type", Effect.NONE, "complete weights are saved")
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        size = as_number(peer.get(key))
        if size is not None and size > 1:
            peer.take(
                "sharding.sp_size" if peer.values.get("deepspeed") else "sharding.cp_size", int(size), key
            )


def _take_trackers(peer: Peer) -> None:
    used = [tracker for key, tracker in _TRACKERS.items() if peer.switch(key)]
    if "swanlab" in str(peer.values.get("plugins", "")) and peer.switch("use_swanlab"):
        used.append("swanlab")
    off = as_bool(peer.values.get("use_wandb")) is False
    if peer.values.get("wandb_project") and "wandb" not in used and not off:
        used.insert(0, "wandb")
    if used:
        keys = ("wandb_project", *_TRACKERS, "use_swanlab")
        peer.take("trainer.report_to", used, next(key for key in keys if key in peer.values))
    target = peer.get("hub_model_id")
    if target:
        peer.take("trainer.hub_model_id", str(target), "hub_model_id")
        peer.take("trainer.push_to_hub", True, "hub_model_id")
        peer.take("trainer.hub_private_repo", True, "hub_model_id", note="always private there")


def _take_plugins(peer: Peer) -> None:
    given = peer.get("plugins")
    named = [str(plugin) for plugin in given] if isinstance(given, list) else []
    kernels = [key for key in peer.values if key.startswith("liger_")]
    peer.reading.know(*kernels)
    if on_keys := [key for key in kernels if as_bool(peer.values[key])]:
        peer.take("trainer.use_liger_kernel", True, on_keys[0], *kernels)
    for plugin in named:
        plain = plugin.lower()
        if _plugin_of(plugin) in ("liger", "cut_cross_entropy", "swanlab"):
            continue
        if "kd" in plain.split(".") or "diffusion" in plain:
            peer.refuse("plugins", f"holds {shown(plugin)}: another kind of training")
        else:
            where = Given("plugins", plugin, peer.line("plugins"))
            peer.reading.drop(where, Effect.TRAINING, "a plugin of axolotl's")
    enabled = {_plugin_of(plugin) for plugin in named}
    for plugin, table in peer.tool.sections("plugin ").items():
        unread = f"only axolotl's plugin {plugin} reads it, and plugins does not name that"
        others = [Left(Effect.NONE, unread, entry.names) for entry in table]
        peer.leave(table if plugin in enabled else others)
    foreign = [plugin for plugin in named if not _plugin_of(plugin)]
    known = {*peer.tool.keys, *peer.reading.seen}
    for key in [key for key in peer.values if key not in known] if foreign else ():
        reason = f"no key of axolotl's own: the plugin {shown(foreign[0])} may read it"
        peer.drop(key, Effect.TRAINING, reason)


def _plugin_of(name: str) -> str:
    """`swanlab` of `axolotl.integrations.swanlab.SwanLabPlugin`; empty for a plugin of another package."""
    start, _, rest = name.partition("axolotl.integrations.")
    return rest.partition(".")[0] if not start else ""
