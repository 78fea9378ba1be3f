"""Rows of a recipe of axolotl: data sets and their types, chat template, lengths (axolotl 0.21)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from launcher.importing.conversions import as_bool, is_off, listed
from launcher.importing.key_tables import Peer
from launcher.importing.reading import EVALUATED, Effect, Given, shown
from launcher.importing.rollouts import needs_length
from launcher.importing.row_shapes import Answers, Prompt, Ranked, Shape, Turns, unknown_fields
from launcher.importing.row_sources import Rows, Sources, rows_path, source_at, take_share, weight_of

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


class _Marks(NamedTuple):
    """The text around the parts of a conversation."""

    system: str
    turn: str
    answer: str


_OF_CHATML = _Marks(
    _ML_SYSTEM, "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n", "{answer}<|im_end|>"
)
_OF_LLAMA3 = _Marks(
    "<|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>",
    "<|start_header_id|>user<|end_header_id|>\n\n{prompt}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "{answer}<|eot_id|>",
)
_PAIR = (("chosen", "chosen"), ("rejected", "rejected"))
_SINGLE = (("completion", "completion"),)


def _of(
    marks: _Marks, prompt: str, answers: tuple[tuple[str, str], ...], within: int | None = None
) -> Answers:
    system = "" if prompt == answers[0][1] else marks.system  # a conversation has no column of system texts
    label = "label" if answers == _SINGLE else ""
    return Answers(marks.turn, system, marks.answer, prompt, answers, within=within, label=label)


def _paired() -> Iterator[tuple[str, Answers]]:
    for name, marks in (("chatml", _OF_CHATML), ("llama3", _OF_LLAMA3)):
        yield f"{name}.argilla_chat", _of(marks, "chosen", _PAIR, 1)
        for kind, column in (("icr", "input"), ("intel", "question"), ("prompt_pairs", "prompt")):
            yield f"{name}.{kind}", _of(marks, column, _PAIR)
        yield f"{name}.ultra", _of(marks, "prompt", _PAIR, 1)


def _labelled() -> Iterator[tuple[str, Answers]]:
    for name, marks in (("chatml", _OF_CHATML), ("llama3", _OF_LLAMA3)):
        yield f"{name}.argilla", _of(marks, "instruction", _SINGLE)
        yield f"{name}.argilla_chat", _of(marks, "completion", _SINGLE, 1)
        for kind in ("prompt_pairs", "ultra"):  # ChatML's marks under both names
            yield f"{name}.{kind}", _of(_OF_CHATML, "prompt", _SINGLE)
    yield "chatml.intel", _of(_OF_CHATML, "question", _SINGLE)


PAIRS: Mapping[str, Shape] = dict(_paired())
"""Types of rows with `rl: dpo` and `ipo`: done by a hook, too."""
LABELLED: Mapping[str, Shape] = dict(_labelled())
"""Types of rows with `rl: kto`."""
RANKED: Mapping[str, Shape] = {
    "bradley_terry.chat_template": Ranked("input", "chosen", "rejected", system="system"),
}
"""Types of rows with `reward_model: true`."""
_CHATS = ("chat_template", "chat_template.default")
_OWN_TYPES = (
    "alpaca", "alpaca_chat", "alpaca_instruct", "alpaca_w_system", "concisechoice", "context_qa",
    "creative_acr", "explainchoice", "gpteacher", "input_output", "jeopardy", "llama2_chat", "messages",
    "metharme", "oasst", "orcamini", "pygmalion", "reflection", "stepwise_supervised", "summarizetldr",
)  # fmt: skip
"""Types whose rows axolotl's own code makes (prompt_strategies/, utils/data/wrappers.py)."""
_OWN_ANSWERS = ("bradley_terry", "chat_template", "chatml", "llama3", "passthrough", "user_defined", "zephyr")
"""Beginnings of its types of answers, with or without a hook here."""
_NAMES = (("role", "content"), ("from", "value"))
_WORDS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
"""Names of roles that are read here as what they are there."""
_READ = {
    "chat": ("messages", "tools", "system"),
    "image-chat": ("messages", "tools", "system", "images", "image"),
    "preference": ("prompt", "chosen", "rejected"),
}
"""Format -> columns of rows of messages that axolotl reads."""


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
    key, given = "pretraining_dataset", peer.get("pretraining_dataset")
    if is_off(given):
        if peer.switch("streaming"):
            peer.take("data.streaming", True, "streaming")
            if peer.switch("sample_packing") and len(listed(peer.values.get("datasets"))) > 1:
                reason = "streamed and packed, axolotl reads the first data set alone; here all are read"
                where = Given("datasets[1]", "{…}", peer.line("datasets"))
                peer.reading.drop(where, Effect.TRAINING, reason)
        return False
    first, *others = listed(given)
    for index, other in enumerate(others, 1):
        where = Given(f"{key}[{index}]", other, peer.line(f"{key}[{index}]") or peer.line(key))
        peer.reading.drop(where, Effect.NONE, "axolotl reads the first pretraining_dataset alone")
    at = f"{key}[0]" if isinstance(given, list) else key
    entry = peer.inside(at, first if isinstance(first, dict) else {"path": first})
    source = _address(entry, "train")
    column = entry.get("text_column") or "text"
    entry.get("type")
    if entry.get("skip"):
        entry.drop("skip", Effect.TRAINING, "all rows are read")
    _leave(entry, "pretraining")
    if source is not None:
        columns = {"text": column} if column != "text" else {}
        rows = [found.add(peer.reading, source, Rows("text", columns))]
        peer.take("data.train", rows, key)
    peer.get("streaming")
    peer.take("data.streaming", True, key)
    _take_packs(peer)
    if "trainer.max_steps" not in peer.reading.taken:
        peer.needs("trainer.max_steps", key, "rows that are streamed have no end")
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


def _sources(peer: Peer, key: str, split: str, found: _Found) -> list[dict[str, Any]]:
    sources = []
    for entry in peer.entries(key, "path and type"):
        source = _address(entry, split)
        rows = _rows(entry, found)
        _leave(entry, "dataset")
        if source is not None and rows is not None:
            read = [rows.columns.get(name, name) for name in _READ.get(rows.form, ())]
            one = found.add(peer.reading, source, rows, read)
            names = listed(entry.get("name"))
            sources += [
                {**one, "name": str(name)} if name is not None and "name" in one else one for name in names
            ]
    return sources


def _address(entry: Peer, split: str) -> dict[str, Any] | None:
    """The address of a data set's rows."""
    given, name = rows_path(entry), entry.get("name")
    if given is None:
        return None
    source = source_at(entry.reading, given, name=next(iter(listed(name)), name),
                       split=entry.get("split") or split, revision=entry.get("revision"))  # fmt: skip
    weight = weight_of(entry.get("weight"))
    if source is None:
        return None
    if str(entry.values.get("ds_type")) in (*source["path"].split("."), entry.values.get("path"), "json"):
        entry.get("ds_type")  # as the files are called
    return source | (weight if split == "train" else {})


def _rows(entry: Peer, found: _Found) -> Rows | None:
    """The shape of a data set's rows; None, with the reason in the reading, where it has none."""
    kind, task = entry.get("type"), entry.reading.task
    plain = str(kind).removesuffix(".load")
    if task.ranks_answers or task.labels_answers:
        return _pairs(entry, kind)
    if task.rolls_out:
        if kind is not None:
            hint = "write a format_row that makes prompt and what the reward functions read, for `python`"
            entry.drop("type", Effect.NEEDED, "a function of yours makes the prompts there", hint)
        return Rows(task.formats[0])
    is_old = plain.partition(":")[0].partition(".")[0] == "sharegpt"
    if task.sees_images and kind not in _CHATS:
        entry.drop("type", Effect.NEEDED, "with a processor, axolotl reads chat_template alone")
    elif isinstance(kind, dict):
        prompt = _own_prompt(entry, kind)
        return None if prompt is None else Rows("prompt-completion", {}, prompt)
    elif kind is None:
        entry.refuse("type", "is not there: its rows would be tokens already")
    elif plain in TYPES:
        return Rows("prompt-completion", {}, TYPES[plain])
    elif kind == "completion":
        column = entry.get("field") or "text"
        return Rows("text", {"text": str(column)} if column != "text" else {})
    elif is_old or kind in _CHATS:
        return _chat(entry, is_old, found)
    else:
        hint = "write a format_row that makes prompt and completion, and name its file in `python`"
        own = "." in plain or plain.partition(":")[0] in _OWN_TYPES
        _refuse_type(entry, hint if own else "completion is its type of plain texts", own)
    return None


def _refuse_type(entry: Peer, hint: str, own: bool) -> None:
    reason = "its prompt is axolotl's own code" if own else f"axolotl {entry.tool.version} has no such type"
    entry.drop("type", Effect.NEEDED, reason, hint)


def _chat(entry: Peer, is_old: bool, found: _Found) -> Rows:
    column = str(entry.get("field_messages") or ("conversations" if is_old else "messages"))
    renamed = entry.section("message_property_mappings")
    role, content = (
        str(renamed.get(name) or entry.get(f"message_field_{name}") or fallback)
        for name, fallback in zip(("role", "content"), _NAMES[is_old], strict=True)
    )
    if is_old:
        entry.drop("type", Effect.NONE, "axolotl 0.21 refuses it; its rows are read as chat_template")
    renamed.leave_inner(Effect.TRAINING, "only role and content are renamed")
    _template_of(entry, found)
    trained = entry.get("roles_to_train")
    if trained is not None and [_WORDS.get(str(role)) for role in listed(trained)] != ["assistant"]:
        reason = "the assistant's turns alone contribute to the loss, or with data.loss_on: all everything"
        entry.drop("roles_to_train", Effect.TRAINING, reason)
    entry.leave(entry.tool.left["chats"])
    entry.reading.know(entry.at + "train_on_eos", entry.at + "train_on_eot")
    own = _own_roles(entry)
    tools = str(entry.get("field_tools") or "tools")
    form, images = ("image-chat", ("images", "image")) if entry.reading.task.sees_images else ("chat", ())
    if (role, content) not in _NAMES or not own.items() <= _WORDS.items():
        tools = tools if tools != "tools" else ""
        roles = tuple((own or _WORDS).items())
        return Rows(form, {}, Turns(column, role, content, roles, tools=tools, images=images))
    return Rows.renamed(form, {"messages": column, "tools": tools})


def _leave(entry: Peer, kind: str) -> None:
    """Report the other keys of a data set; kind: which keys are known."""
    for key in [key for key in entry.values if entry.at + key not in entry.reading.seen]:
        if key not in entry.tool.lists[kind]:
            entry.drop(key, Effect.NONE, f"no key of a data set of axolotl {entry.tool.version}")
    entry.leave(entry.tool.left["dataset"])
    entry.leave_inner(Effect.TRAINING, "axolotl's own; it has no recipe key")


def _own_roles(entry: Peer) -> dict[str, str]:
    """The rows' names of roles, each with its role."""
    roles = entry.get("roles")
    pairs = roles.items() if isinstance(roles, dict) else ()
    return {str(word): str(role) for role, several in pairs for word in listed(several)}


def _pairs(entry: Peer, kind: Any) -> Rows | None:
    """Rows of pairs and of labelled answers; chat templates alone need no hook."""
    task = entry.reading.task
    if kind is None and task.has_reference:  # trl reads the rows as they are
        return Rows(task.formats[0])
    if task.labels_answers or not task.has_reference or str(kind) not in _CHATS:
        hook = _answers(entry, kind)
        return None if hook is None else Rows(task.formats[0], {}, hook)
    given = entry.get("message_property_mappings")
    renamed = isinstance(given, dict) and any(key != str(column) for key, column in given.items())
    other = {"roles": not _own_roles(entry).items() <= _WORDS.items(), "message_property_mappings": renamed}
    for key in [key for key, found in other.items() if found]:
        reason = "other names of roles in preference rows"
        entry.drop(key, Effect.NEEDED, reason, "write a format_row that renames them")
    columns = {"prompt": str(entry.get("field_messages") or "messages")}
    columns |= {name: str(entry.get(f"field_{name}") or name) for name in ("chosen", "rejected")}
    return Rows.renamed("preference", columns)


def _answers(entry: Peer, kind: Any) -> Shape | None:
    """The hook of a type of answers; None, with the reason in the reading, where it has none."""
    task = entry.reading.task
    if isinstance(kind, dict):
        return _own_answers(entry, kind, labelled=task.labels_answers)
    known = LABELLED if task.labels_answers else PAIRS if task.has_reference else RANKED
    if str(kind) not in known:
        columns = "prompt, completion and label" if task.labels_answers else "prompt, chosen and rejected"
        hint = f"write a format_row that makes {columns}"
        _refuse_type(entry, hint, str(kind).partition(".")[0] in _OWN_ANSWERS)
    return known.get(str(kind))


def _own_answers(entry: Peer, kind: Mapping[str, Any], *, labelled: bool) -> Answers | None:
    """`type: {prompt_format: "...", field_prompt: ...}`."""
    given = {str(key): str(value) for key, value in kind.items() if value is not None}
    names = ("completion",) if labelled else ("chosen", "rejected")
    known = {"field_system", "field_prompt", "prompt_format"} | {f"field_{name}" for name in names}
    known |= {f"{name}_format" for name in names} | ({"field_label"} if labelled else set())
    for key in given.keys() - known:
        entry.reading.drop(entry.given("type").inner(key, given[key]), Effect.NONE, "no key of such a type")
    turn = given.get("prompt_format", "{prompt}")
    formats = {
        given.get(f"{name}_format", f"{{{name}}}").replace(f"{{{name}}}", "{answer}") for name in names
    }
    plain = unknown_fields(turn, ("prompt",)) == [] and len(formats) == 1
    if not plain or unknown_fields(answer := formats.pop(), ("answer",)) != []:
        reason = f"the braces of {shown(turn)} and of its answers are not one prompt and one answer alone"
        entry.drop("type", Effect.NEEDED, reason, "write a format_row")
        return None
    columns = tuple((name, given.get(f"field_{name}", name)) for name in names)
    label = given.get("field_label", "label") if labelled else ""
    return Answers(turn, "", answer, given.get("field_prompt", "prompt"), columns, label=label)


def _own_prompt(entry: Peer, kind: dict[str, Any]) -> Prompt | None:
    """`type: {format: "...", field_instruction: ...}`."""
    given = {str(key): value for key, value in kind.items() if value is not None}
    turn = str(given.get("format", "{instruction} {input} "))
    alone = str(given.get("no_input_format", "{instruction} "))
    outer = str(given.get("system_format", "{system}"))
    for pattern, names in ((turn, ("instruction", "input")), (alone, ("instruction",)), (outer, ("system",))):
        if unknown_fields(pattern, names) != []:
            reason = f"the braces of {shown(pattern)} are not {' and '.join(names)} alone"
            entry.drop("type", Effect.NEEDED, reason, "write a format_row")
            return None
    for key in [key for key in given if key not in entry.tool.lists["prompt"]]:
        where = entry.given("type").inner(key, given[key])
        entry.reading.drop(where, Effect.NONE, "no key of a prompt's pattern")
    fixed = str(given.get("system_prompt", ""))
    columns = (str(given.get(f"field_{name}", name)) for name in ("system", "instruction", "input", "output"))
    return Prompt(turn, alone, outer, fixed, fixed, *columns)


def _take_eval(peer: Peer, found: _Found) -> None:
    tests, size = peer.get("test_datasets"), peer.given("val_set_size")
    if not tests:
        take_share(peer, "val_set_size")
        return
    if rows := _sources(peer, "test_datasets", "test", found):
        peer.take(EVALUATED, rows, "test_datasets")
    else:
        peer.needs(EVALUATED, "test_datasets", "no evaluation data set could be taken")
    if not is_off(peer.get("val_set_size")):
        peer.reading.drop(size, Effect.NONE, "test_datasets are given, too")


def _chosen_template(peer: Peer) -> Given:
    """`chat_template`, or the text that it refers to."""
    name, text = peer.get("chat_template"), peer.get("chat_template_jinja")
    of_text = name in (None, "jinja") and text is not None
    return peer.given("chat_template_jinja" if of_text else "chat_template")


def _template_of(entry: Peer, found: _Found) -> None:
    """The template of a data set, which takes precedence over the recipe's."""
    given = _chosen_template(entry)
    if given.value is not None and found.template is None:
        found.template = given
    elif given.value is not None and found.template is not None and found.template.value != given.value:
        entry.reading.drop(given, Effect.TRAINING, "one chat template is for all rows")


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
    key, unprepared, task = "excess_length_strategy", _take_unprepared(peer), peer.reading.task
    if task.rolls_out:
        peer.reading.know(key)
        needs_length(peer, "axolotl")
        return
    if "sequence_len" not in peer.values:
        peer.default("data.max_length", 512, "sequence_len")
    peer.leave(peer.tool.left["lengths"])
    given = peer.get(key)
    given = given if given in ("truncate", "drop", "raise") else None
    where = Given(key, given or "drop", peer.line(key))
    if not task.learns:
        _take_length_of_answers(peer, peer.given("skip_prepare_dataset") if unprepared else where)
    elif set(found.formats) == {"text"}:
        peer.default("data.overlong", "split", "type: completion", "texts are cut into pieces there, too")
    else:
        if "text" in found.formats:
            reason = (
                "axolotl cuts texts into pieces and drops other long rows; here all rows are treated alike"
            )
            peer.needs("data.overlong", "datasets", reason)
        value = "truncate" if given == "truncate" else "drop"
        if given is None:
            peer.reading.default("data.overlong", value, f"{key}: drop", line=peer.line(key))
        else:
            peer.reading.take("data.overlong", value, where, said=f"{key}: {given}")
    if task.sees_images:
        reason = "axolotl keeps samples with images whole; longer ones are dropped here, and counted"
        peer.reading.drop(peer.given("sequence_len", 512), Effect.TRAINING, reason)
    if given == "raise" and task.learns:
        peer.drop(key, Effect.TRAINING, "long rows are dropped, and counted")
    if peer.switch("sample_packing") and not streamed:
        peer.take("data.packing", True, "sample_packing")
    if peer.switch("batch_flattening") and not peer.reading.value("data.packing"):
        peer.take("data.padding_free", True, "batch_flattening")


def _take_unprepared(peer: Peer) -> bool:
    """`skip_prepare_dataset`: whether rows of answers keep their length; other rows would be tokens."""
    key, task = "skip_prepare_dataset", peer.reading.task
    if not peer.switch(key) or task.sees_images:
        return False
    if is_off(peer.values.get("rl")):
        peer.refuse(key, "is true: the rows would be tokens already, or what trl makes of them")
    return True


def _take_length_of_answers(peer: Peer, where: Given) -> None:
    """Long rows of preference trainings; where: the strategy of the file, or that it has none."""
    if "truncate" in peer.reading.task.overlong:
        peer.leave_out_long("sequence_len", 512, "axolotl cuts longer pairs")
        return
    peer.reading.take("data.overlong", "truncate", where, said=f"{where.name}: {shown(where.value)}")
    if where.value != "truncate":
        there = {"raise": "stops at", "drop": "leaves out"}.get(where.value, "keeps")
        reason = f"axolotl {there} rows longer than sequence_len; here their answers are cut at the end"
        peer.reading.drop(where, Effect.TRAINING, reason)
