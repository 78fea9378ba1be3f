"""A recipe of LLaMA-Factory: tables of its keys, its dataset_info.json, and what needs more than one key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from launcher.files.safe_files import parse_json
from launcher.importing.adapters import (
    FourBits,
    Lora,
    take_four_bits,
    take_kbit_norms,
    take_lora,
    take_quantization,
)
from launcher.importing.arguments import TRANSFORMERS_DEFAULTS, Field, fill_defaults, take_adapter
from launcher.importing.conversions import (
    To,
    as_bool,
    as_number,
    if_on,
    is_off,
    on,
    revision,
    switch,
    text,
    texts,
    tokens,
    whole,
)
from launcher.importing.key_tables import Keys, Left, Peer, Tool, load_tool, open_peer
from launcher.importing.reading import Effect, Given, Reading, shown
from launcher.importing.row_shapes import Exchange, Ranked, Turns
from launcher.importing.row_sources import NO_LIMIT, Rows, Sources, source_at, take_share
from launcher.recipe.field_tables import trainer_fields
from launcher.tasks import DEFAULT_TASK, task_of_tool, task_with_images, words_of_tool
from launcher.tasks.task import Task

MODEL: Keys = {"model_name_or_path": To("model.name_or_path", text, required="")}
LENGTH: Keys = {"cutoff_len": To("data.max_length", tokens, default=2048)}
KEYS: Keys = {
    **MODEL,
    "model_revision": To("model.revision", revision),
    "cache_dir": To("model.cache_dir", text),
    "trust_remote_code": To("model.trust_remote_code", if_on),
    "enable_liger_kernel": To("trainer.use_liger_kernel", if_on),
    "preprocessing_num_workers": To("data.num_proc", whole),
    **LENGTH,
    "streaming": To("data.streaming", if_on, "needs max_steps"),
    "disable_shuffling": To("trainer.train_sampling_strategy", on("sequential"), "sequential"),
}
LORA = Lora(
    "finetuning_type",
    {
        "lora_rank": Field("adapter.r", default=8),
        "lora_alpha": Field("adapter.lora_alpha", "twice the rank where it is absent"),
        "lora_dropout": Field("adapter.lora_dropout", default=0.0),
        "use_rslora": To("adapter.use_rslora", switch),
        "use_dora": To("adapter.use_dora", switch),
        "additional_target": To("adapter.modules_to_save", texts),
    },
    others=re.compile("lora_target$|pissa_i"),
    unread="all parameters are trained",
    folder="adapter_name_or_path",
    continued="the continued adapter has its own",
)
FOUR_BITS = FourBits("quantization_type", "double_quantization", is_double=True)
DPO_KEYS: Keys = {
    "pref_beta": Field("trainer.beta", "0.1 where it is absent"),
    "pref_loss": Field("trainer.loss_type", "orpo and simpo are refused"),
    "dpo_label_smoothing": Field("trainer.label_smoothing"),
    "ld_alpha": Field("trainer.ld_alpha"),
}
"""With stage: dpo."""
KTO_KEYS: Keys = {
    "pref_beta": DPO_KEYS["pref_beta"],
    "kto_chosen_weight": Field("trainer.desirable_weight", "1 where it is absent"),
    "kto_rejected_weight": Field("trainer.undesirable_weight", "1 where it is absent"),
}
"""With stage: kto."""
TABLES: Keys = {**KEYS, **LORA.keys, **DPO_KEYS, **KTO_KEYS}
"""Every key that alone is one recipe key."""

INFO = "dataset_info.json"
Info = tuple[Mapping[str, Any], str]
"""A dataset_info.json that is given as a FILE, and its name."""
_ADDRESSES = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
_ROLES = {
    "user_tag": ("user", {"human", "user"}),
    "assistant_tag": ("assistant", {"gpt", "chatgpt", "assistant", "model"}),
    "observation_tag": ("tool", {"tool", "observation", "function"}),
    "system_tag": ("system", {"system"}),
}
"""Tag -> (role, words that are read here as that role)."""
_FAR = {
    "ms_hub_url": "on ModelScope alone",
    "om_hub_url": "on Modelers alone",
    "script_url": "made by a script",
    "cloud_file_name": "in a cloud",
}
_TEXTS = ("prompt", "response", "query", "history", "system")
"""Columns of one exchange."""
_LARGEST = 16 * 1024 * 1024
"""Bytes of a dataset_info.json."""
_MARKS = ("stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "lora_target", "lora_rank")
_KERNELS = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager"}
_TOKENS = ("add_tokens", "add_special_tokens", "new_special_tokens")
"""The last one is the earlier name of the second."""
_SIZES = ("image_max_pixels", "image_min_pixels", "image_do_pan_and_scan", "crop_to_patches")
_PARTS = {"vision": "freeze_vision_tower", "projector": "freeze_multi_modal_projector"}
_OF_IMAGES = (*_SIZES, *_PARTS.values(), "media_dir")


def is_recipe(data: Mapping[str, Any]) -> bool:
    """Whether a YAML's keys are LLaMA-Factory's; without a model, two of them."""
    marks = sum(key in data for key in _MARKS) + isinstance(data.get("dataset"), str)
    return marks > ("model_name_or_path" not in data)


def is_dataset_info(data: Any) -> bool:
    """Whether a JSON is a dataset_info.json."""
    if not isinstance(data, Mapping) or not data:
        return False
    return all(
        isinstance(entry, Mapping) and any(name in entry for name in _ADDRESSES) for entry in data.values()
    )


def read(text: str, file: str, info: Info | None = None) -> Reading:
    """Read a recipe of LLaMA-Factory.

    info: None looks for a dataset_info.json next to the recipe. Raises RecipeError if the file is no YAML; a
    kind of training that is not here is among the refusals.
    """
    peer = open_peer(text, file, tool())
    peer.leave(peer.tool.left["values"])
    stage = _take_stage(peer)
    peer.fill(MODEL)
    peer.take_keys(KEYS)
    _take_model(peer)
    _take_adapter(peer)
    _take_bits(peer)
    listing = _listing(peer, info)
    _take_images(peer, stage, listing)
    _take_rows(peer, stage, listing)
    _take_packing(peer, stage)
    _take_masks(peer, stage)
    _take_training(peer)
    for key, table in peer.tool.sections("option ").items():
        if not is_off(peer.values.get(key)):
            peer.leave(table)
    peer.leave(peer.tool.left["keys"])
    peer.take_arguments(DEFAULT_TASK)
    fill_defaults(peer.reading, TRANSFORMERS_DEFAULTS)
    if not peer.switch("upcast_layernorm"):
        take_kbit_norms(peer.reading, "upcast_layernorm: false", "LLaMA-Factory")
    peer.leave_rest(trainer_fields())
    return peer.close()


def tool() -> Tool:
    return load_tool("llamafactory", "LLaMA-Factory", "refuses it")


def _take_stage(peer: Peer) -> str:
    stage = str(peer.get("stage") or "sft")
    task = task_of_tool("llamafactory", stage)
    if task is None:
        known = ", ".join(words_of_tool("llamafactory"))
        peer.refuse("stage", f"is {shown(stage)}; import reads the stages {known}")
    elif "stage" in peer.values:
        peer.take("task", task.name, "stage")
    if as_bool(peer.get("do_train")) is not True:
        peer.refuse("do_train", "is not true: this file does not train", "write do_train: true if it should")
    _take_stage_keys(peer, stage, task)
    return stage


def _take_stage_keys(peer: Peer, stage: str, task: Task | None) -> None:
    """Keys of preference trainings; those of other stages are without effect there, too."""
    own: Keys = {}
    if task is not None and task.labels_answers:
        own = KTO_KEYS
    elif task is not None and task.ranks_answers and task.has_reference:
        own = DPO_KEYS
    peer.leave(peer.tool.sections("stage ").get(stage, ()))
    peer.take_keys(own)
    if task is not None:
        peer.fill_task("pref_beta")
    others = [key for key in {**DPO_KEYS, **KTO_KEYS} if key not in own]
    peer.leave_unread(others, f"stage: {stage} does not read it")
    reason = ""
    if task is not None and task.labels_answers:
        reason = "a prompt's KL answer is of the row before it there; here of its micro-batch"
    if task is not None and task.ranks_answers and not task.has_reference:
        reason = "a value head beside a language model there; here the model has a head with one output alone"
    if reason:
        peer.reading.drop(Given(f"stage: {stage}", "", peer.line("stage")), Effect.TRAINING, reason)


def _take_model(peer: Peer) -> None:
    """Attention kernel, tokens and activation checkpointing."""
    if peer.get("flash_attn") != "auto":
        peer.take_kernel("flash_attn", _KERNELS)
    if tokens := [token for key in _TOKENS for token in peer.listed(key)]:
        peer.take("model.add_tokens", tokens, *(key for key in _TOKENS if key in peer.values))
    if peer.switch("disable_gradient_checkpointing"):
        peer.take("trainer.activation_checkpointing", False, "disable_gradient_checkpointing")
    reentrant = as_bool(peer.get("use_reentrant_gc"))
    if reentrant is not None and "trainer.activation_checkpointing" not in peer.reading.taken:
        peer.take("trainer.activation_checkpointing_kwargs", {"use_reentrant": reentrant}, "use_reentrant_gc")


def _take_adapter(peer: Peer) -> None:
    kind = str(peer.get("finetuning_type") or "lora")
    if kind not in ("lora", "full"):
        peer.refuse("finetuning_type", f"is {shown(kind)}, and of adapters there is only LoRA here")
    if not take_lora(peer, LORA, is_on=kind == "lora"):
        return
    peer.default("adapter.lora_alpha", 2 * (peer.reading.value("adapter.r") or 8), "lora_alpha")
    target = peer.get("lora_target")
    names = [part.strip() for part in target.split(",")] if isinstance(target, str) else target
    if names in (None, ["all"], []):
        peer.decide("adapter.target_modules", "all-linear", "lora_target", said="lora_target: all")
    else:
        take_adapter(peer.reading, "target_modules", Given("lora_target", names, peer.line("lora_target")))
    if peer.switch("pissa_init"):
        peer.take("adapter.init_lora_weights", "pissa", "pissa_init", "pissa_iter")


def _take_bits(peer: Peer) -> None:
    bits, given = as_number(peer.get("quantization_bit")), peer.given("quantization_bit")
    method = str(peer.get("quantization_method") or "bnb").lower()
    peer.reading.know("quantization_type", "double_quantization")
    if given.value is None:
        return
    if method not in ("bnb", "bitsandbytes"):
        peer.refuse("quantization_method", f"is {shown(method)}: only bitsandbytes quantises here")
    elif bits == 8:
        take_quantization(peer.reading, "int8", given)
    elif bits == 4 and str(peer.get("quantization_type") or "nf4") in ("nf4", "fp4"):
        take_four_bits(peer, "quantization_bit", FOUR_BITS, peer)
    else:
        what = f"is {shown(given.value)}, and bitsandbytes has 8 and 4 (nf4, fp4)"
        peer.refuse("quantization_bit", what)


@dataclass(frozen=True, slots=True)
class _DataSet:
    """One entry of dataset_info.json, as `dataset` or `eval_dataset` names it."""

    peer: Peer
    given: Given
    """The name, under `dataset: NAME`."""
    entry: Mapping[str, Any]
    stage: str

    @property
    def columns(self) -> dict[str, str]:
        """Field -> column; columns that are given take the defaults of all others away."""
        given = self.entry.get("columns")
        return {str(k): str(v) for k, v in given.items() if v} if isinstance(given, Mapping) else _COLUMNS

    def column(self, name: str) -> str:
        """The column of a field; empty where it has none."""
        return self.columns.get(name, "")

    def part(self, name: str, value: Any) -> Given:
        """A key of the entry."""
        return Given(f"{self.given.name} {name}", value, self.given.line)

    def drop(self, value: Any, reason: str, hint: str = "") -> None:
        """The data set cannot be a source."""
        self.peer.reading.drop(replace(self.given, value=value), Effect.NEEDED, reason, hint)


class _Listing(NamedTuple):
    """What describes the data sets of a recipe."""

    directory: str
    """`dataset_dir`; ONLINE: each data set is a name on the hub."""
    entries: Mapping[str, Any] | None
    """Those of dataset_info.json, None where there is none."""
    base: Path
    """Folder from which the files are named."""

    def entry(self, name: str) -> Mapping[str, Any]:
        """The description of a data set; empty where it has none."""
        found = {"hf_hub_url": name} if self.directory == "ONLINE" else (self.entries or {}).get(name, {})
        return found if isinstance(found, Mapping) else {}

    def has_images(self, name: str) -> bool:
        """Whether a data set has a column of images."""
        columns = self.entry(name).get("columns")
        return isinstance(columns, Mapping) and bool(columns.get("images"))


def _listing(peer: Peer, info: Info | None) -> _Listing:
    directory = peer.get("dataset_dir")
    directory = "data" if directory is None else str(directory)
    entries, folder = info or _find_info(peer, directory)
    return _Listing(directory, entries, Path(folder).parent if info else Path(folder))


def _find_info(peer: Peer, directory: str) -> tuple[Mapping[str, Any] | None, str]:
    """dataset_info.json in dataset_dir, from the recipe's folder or one above, or next to the recipe."""
    if directory == "ONLINE":
        return {}, ""
    home = Path(peer.reading.file).absolute().parent
    bases = [home, *home.parents, Path().absolute()]
    for folder in (*(base / directory for base in bases), home):
        try:
            file = folder / INFO
            if file.is_file() and file.stat().st_size <= _LARGEST:
                data = parse_json(file.read_text(encoding="utf-8"))
                if is_dataset_info(data):
                    return data, str(folder)
        except (OSError, ValueError):
            continue
    return None, ""


def _take_rows(peer: Peer, stage: str, listing: _Listing) -> None:
    """Take the sources of training and evaluation."""
    found = Sources()
    for key, to in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        sources = []
        for name in peer.listed(key):
            given = Given(f"{key}: {name}", name, peer.line(key))
            source = _source(_DataSet(peer, given, listing.entry(name), stage), listing, found)
            sources += [] if source is None else [source]
        if sources:
            peer.take(to, sources, key)
        elif to == "data.train" or peer.listed(key):
            peer.needs(to, key, "no data set could be taken")
    if peer.reading.evaluates:
        peer.leave_unread(["val_size"], "eval_dataset is given, too")
    elif not is_off(peer.get("val_size")):
        take_share(peer, "val_size")
    found.take_hooks(peer.reading, "dataset", peer.line("dataset"))


def _source(data: _DataSet, listing: _Listing, found: Sources) -> dict[str, Any] | None:
    name = data.given.value
    if listing.entries is None:
        reason = f"its rows are described in LLaMA-Factory's {INFO}, which is not here"
        data.drop(name, reason, f"give that {INFO} as a FILE, too")
        return None
    if not data.entry:
        data.drop(name, f"the {INFO} has no such data set")
        return None
    data = replace(data, entry={key: value for key, value in data.entry.items() if value is not None})
    source = _address(data, listing.base)
    rows = None if source is None else _rows(data)
    if source is None or rows is None:
        return None
    if "num_samples" in data.entry:
        limit = data.part("num_samples", data.entry["num_samples"])
        data.peer.reading.drop(limit, Effect.TRAINING, NO_LIMIT)
    return found.add(data.peer.reading, source, rows, data.columns.values() if data.stage != "pt" else ())


def _address(data: _DataSet, base: Path) -> dict[str, Any] | None:
    """The address in LLaMA-Factory's own order: the hub, then a script, then a file."""
    entry, reading = data.entry, data.peer.reading
    if "folder" in entry and "hf_hub_url" in entry:
        reason, hint = "a folder inside a data set of the hub", "download it, and name the folder"
        reading.drop(data.part("folder", entry["folder"]), Effect.NEEDED, reason, hint)
        return None
    if "hf_hub_url" in entry:
        where = replace(data.given, value=entry["hf_hub_url"])
        return source_at(reading, where, name=entry.get("subset"), split=entry.get("split", "train"))
    for key, place in _FAR.items():
        if key in entry:
            data.drop(entry[key], f"its rows are {place}: download them", "and name the file in data.train")
            return None
    file = entry.get("file_name")
    if not isinstance(file, str):
        data.drop(file, "the data set has no address")
        return None
    path = os.path.relpath(base.absolute() / file, Path(reading.file).absolute().parent)
    return source_at(reading, replace(data.given, value=path))


def _rows(data: _DataSet) -> Rows | None:
    """The rows' shape; None, with the reason in the reading, where it has none."""
    entry, reading, columns, of = data.entry, data.peer.reading, data.columns, f"stage: {data.stage}"
    media = ("videos", "audios", *(() if reading.task.sees_images else ("images",)))
    unread = [name for name in media if name in columns]
    ranking, formatting = bool(entry.get("ranking")), str(entry.get("formatting", "alpaca"))
    if unread:
        reading.refuse(data.given, f"has {', '.join(unread)}, which no task here trains on")
    elif ranking != reading.task.ranks_answers:
        lacks = f"has no ranking, which {of} needs"
        reading.refuse(data.given, "ranks answers, which needs stage: dpo or rm" if ranking else lacks)
    elif ("kto_tag" in columns) != reading.task.labels_answers:
        tagged, lacks = "has a kto_tag, which needs stage: kto", "has no kto_tag, which stage: kto needs"
        reading.refuse(data.given, tagged if "kto_tag" in columns else lacks)
    elif formatting == "alpaca":
        return _alpaca(data)
    elif formatting not in ("sharegpt", "openai") or "messages" not in columns:
        data.drop(formatting, "expected messages in a column of the data set")
    elif data.stage == "pt":
        data.drop(formatting, "of messages stage: pt takes the first alone", "write a format_row")
    else:
        return _messages(data, ranking)
    return None


def _alpaca(data: _DataSet) -> Rows | None:
    columns, task = data.columns, data.peer.reading.task
    if "prompt" not in columns:
        data.drop("", "its columns name no prompt")
    elif data.stage == "pt":
        return Rows.renamed("text", {"text": columns["prompt"]})
    elif task.ranks_answers:
        if "chosen" in columns and "rejected" in columns:
            answers = (columns["chosen"], columns["rejected"])
            return Rows("preference", {}, Ranked(columns["prompt"], *answers, data.column("query")))
        data.drop("", "its columns name no chosen and rejected")
    elif "response" not in columns:
        data.drop("", "its columns name no response")
    else:
        texts: dict[str, Any] = {name: data.column(name) for name in _TEXTS}
        return Rows(_chat(data), {}, Exchange(**texts, **_beside(data)))
    return None


def _chat(data: _DataSet) -> str:
    """The format of a conversation; beside rows with images, those without have the same."""
    return data.peer.reading.task.format_with("messages")


def _beside(data: _DataSet) -> dict[str, Any]:
    """The columns beside messages."""
    images = (data.columns["images"],) if "images" in data.columns else ()
    return {"tools": data.column("tools"), "images": images, "label": data.column("kto_tag")}


def _messages(data: _DataSet, ranking: bool) -> Rows | None:
    columns, given = data.columns, data.entry.get("tags")
    tags = {**_TAGS, **(given if isinstance(given, Mapping) else {})}
    tags = {name: str(tag) for name, tag in tags.items()}
    pair = (tags["role_tag"], tags["content_tag"])
    plain = pair == ("from", "value") and all(tags[tag] in words for tag, (_, words) in _ROLES.items())
    if pair == ("role", "content"):  # there these words are for templates to know
        plain = tags["user_tag"] in ("user", "human") and tags["assistant_tag"] in ("assistant", "gpt")
    plain = plain and "system" not in columns
    if ranking and (not plain or not {"chosen", "rejected"} <= columns.keys()):
        hint = "write a format_row that makes prompt, chosen and rejected"
        data.drop("", "ranked answers with names of their own", hint)
        return None
    if not plain:
        roles = tuple((tags[tag], role) for tag, (role, _) in _ROLES.items())
        turns = Turns(columns["messages"], *pair, roles, data.column("system"), **_beside(data))
        return Rows(_chat(data), {}, turns)
    names = {"messages": "messages", "tools": "tools", "images": "images", "label": "kto_tag"}
    if ranking:
        names = {"prompt": "messages", "chosen": "chosen", "rejected": "rejected"}
    here = {name: columns[theirs] for name, theirs in names.items() if theirs in columns}
    return Rows.renamed("preference" if ranking else _chat(data), here)


def _take_images(peer: Peer, stage: str, listing: _Listing) -> None:
    """Rows with images: the task, the frozen parts (both unless it says false) and the size of images.

    Of a data set that no dataset_info.json describes, a key about images says that there are some.
    """
    peer.switch("freeze_language_model")  # true is refused before
    named = [*peer.listed("dataset"), *peer.listed("eval_dataset")]
    is_about_images = any(key in peer.values for key in _OF_IMAGES)
    undescribed = is_about_images and any(not listing.entry(name) for name in named)
    if not undescribed and not any(listing.has_images(name) for name in named):
        peer.leave([Left(Effect.NONE, "none of the data sets has images", dict.fromkeys(_OF_IMAGES, ""))])
        return
    if stage != "sft":
        peer.refuse("stage", f"is {shown(stage)}, and its rows have images, which only sft has here")
        return
    peer.take("task", task_with_images().name, "dataset")
    frozen = [part for part, key in _PARTS.items() if as_bool(peer.get(key)) is not False]
    peer.decide("model.freeze", frozen, *_PARTS.values(), said="freeze_vision_tower: true")
    _take_sizes(peer)
    if not is_off(peer.get("media_dir")):
        reason = "paths of images start from the folder of the data file"
        peer.drop("media_dir", Effect.NEEDED, reason, "write the images' paths so, then delete this line")


def _take_sizes(peer: Peer) -> None:
    """Limits of pixels are fields of Qwen-VL's image processor; LLaMA-Factory resizes for every model."""
    sizes: dict[str, Any] = {}
    said: list[str] = []
    about = f"{peer.values.get('template', '')} {peer.values.get('model_name_or_path', '')}".lower()
    of_qwen = "qwen" in about and "vl" in about
    for key in [key for key in _SIZES if key in peer.values]:
        to = key.removeprefix("image_")
        if not key.endswith("pixels"):
            sizes |= {to: True} if peer.switch(key) else {}
            said.append(key)
        elif of_qwen and (pixels := as_number(peer.get(key))) is not None and pixels >= 1:
            sizes[to] = int(pixels)
            said.append(key)
        else:
            reason = "the model's own image processor decides the size; LLaMA-Factory resizes before it"
            peer.drop(key, Effect.TRAINING, reason, "model.image_sizes sets its fields")
    if of_qwen and "image_max_pixels" not in peer.values:
        sizes["max_pixels"] = peer.tool.keys["image_max_pixels"]
    if sizes:
        peer.decide("model.image_sizes", sizes, *(said or _SIZES[:1]), said="image_max_pixels: 589824")


def _take_packing(peer: Peer, stage: str) -> None:
    """pt packs by default; documents of a pack see each other there, except with neat_packing."""
    packing, neat = as_bool(peer.get("packing")), peer.switch("neat_packing")
    packed = neat or packing is True or (packing is None and stage == "pt")
    if packed:
        key = "neat_packing" if neat else "packing"
        peer.decide("data.packing", True, key)
    if packed and not neat and peer.reading.task.learns:
        reason = "documents of a pack see each other there; here none sees another"
        peer.reading.drop(Given("packing", "true", peer.line("packing")), Effect.TRAINING, reason)
    peer.fill(LENGTH)
    if "truncate" in peer.reading.task.overlong:
        peer.leave_out_long("cutoff_len", 2048, "longer pairs are cut there")
    elif packed and stage == "pt":
        peer.default("data.overlong", "split", "packing: true")
    else:
        note = "" if stage == "pt" else "cut at the end; there prompt and answer are cut in proportion"
        peer.default("data.overlong", "truncate", "cutoff_len: 2048", note)


def _take_masks(peer: Peer, stage: str) -> None:
    """Which tokens are targets, and the chat template."""
    prompt, history = peer.switch("train_on_prompt"), peer.switch("mask_history")
    key = "train_on_prompt" if prompt else "mask_history"
    if stage == "sft" and (prompt or history):
        peer.take("data.loss_on", "all" if prompt else "completion", key)
    elif prompt or history:
        peer.drop(key, Effect.NONE, "of stage: sft alone")
    if stage == "pt":
        peer.leave_unread(["template"], "texts are trained on as they are")
    elif peer.get("template") is not None:
        reason = "LLaMA-Factory's own text of that template; the tokenizer's chat template is used"
        peer.drop("template", Effect.TRAINING, reason, "look with `effilaunch prepare RECIPE --show 1`")


def _take_training(peer: Peer) -> None:
    """Precision, metrics and early stopping; the rest are TrainingArguments."""
    if peer.switch("pure_bf16"):
        peer.take("precision", "bf16-true", "pure_bf16")
        peer.reading.know("bf16", "fp16")
    if peer.switch("compute_accuracy"):
        if peer.reading.evaluates and not peer.reading.task.own_metrics:
            peer.take("data.metrics", ["accuracy"], "compute_accuracy")
        else:
            peer.drop("compute_accuracy", Effect.NONE, "nothing is evaluated")
    peer.take_patience("early_stopping_steps")
