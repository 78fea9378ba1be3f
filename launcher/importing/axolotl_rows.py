"""axolotl's data sets as sources of a recipe, with a hook where its prompt is a pattern of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.importing.arguments import as_bool, as_number
from launcher.importing.axolotl_tables import DATASET_LEFT, TYPES
from launcher.importing.axolotl_texts import first_pretraining, list_streamed, take_long_pairs, take_packs
from launcher.importing.found import Effect, shown
from launcher.importing.peer import Peer, is_off
from launcher.importing.row_hooks import Prompt, Shape, Turns, take_hooks, unknown_fields
from launcher.importing.sources import BUILDERS, evaluation_share, source_at

_PAIRS = (("role", "content"), ("from", "value"))
_WORDS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
"""Words for roles that are read here as what they are there."""


@dataclass(slots=True)
class _Found:
    """What the data sets came to."""

    shapes: dict[str, Shape] = field(default_factory=dict)
    """Path of a source -> what the hook makes of its rows."""
    plain: list[str] = field(default_factory=list)
    """Paths of sources without a hook."""
    formats: list[str] = field(default_factory=list)
    template: tuple[str, Any, int | None] | None = None
    """(key, name, line) of the chat template of the first data set of chats that names one."""


@dataclass(slots=True)
class _Entry:
    """One data set."""

    peer: Peer
    at: str
    """Its dotted path: datasets[0]."""
    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        self.peer.reading.know(f"{self.at}.{key}")
        return self.values.get(key)

    def line(self, key: str = "") -> int | None:
        return self.peer.line(f"{self.at}.{key}") or self.peer.line(self.at)

    def drop(self, key: str, effect: Effect, reason: str, hint: str = "") -> None:
        self.peer.reading.drop(f"{self.at}.{key}", self.values.get(key), self.line(key), effect, reason, hint)


def take_rows(peer: Peer) -> bool:
    """Take sources, lengths and what is learnt; whether there are rows to evaluate on."""
    found = _Found()
    streamed = _take_pretraining(peer, found)
    entries = peer.get("datasets")
    if streamed and entries is not None:
        peer.drop("datasets", Effect.NONE, "axolotl reads pretraining_dataset alone")
    elif entries is not None:
        sources = _sources(peer, "datasets", entries, "train", found)
        if sources:
            peer.reading.take("data.train", sources, peer.line("datasets"), "datasets")
    if peer.reading.value("data.train") is None:
        peer.reading.needs("data.train", peer.line("datasets"), "no data set could be taken")
    has_eval = _take_eval(peer, found)
    take_hooks(peer.reading, "datasets", peer.line("datasets"), found.shapes, found.plain)
    _take_template(peer, found)
    _take_lengths(peer, found, streamed)
    if peer.switch("train_on_inputs") and set(found.formats) - {"text"}:
        peer.take("data.loss_on", "all", "train_on_inputs")
    if as_bool(peer.get("shuffle_merged_datasets")) is False and not peer.switch("curriculum_sampling"):
        reason = "rows are shuffled; write trainer.train_sampling_strategy: sequential for their own order"
        peer.drop("shuffle_merged_datasets", Effect.TRAINING, reason)
    return has_eval


def _take_pretraining(peer: Peer, found: _Found) -> bool:
    """`pretraining_dataset`: texts that are streamed and packed."""
    given = peer.get("pretraining_dataset")
    if given is None or is_off(given):
        if peer.switch("streaming"):
            peer.take("data.streaming", True, "streaming")
            list_streamed(peer)
        return False
    sources = []
    for index, one in enumerate(first_pretraining(peer, given)):
        values = one if isinstance(one, dict) else {"path": one}
        at = f"pretraining_dataset[{index}]" if isinstance(given, list) else "pretraining_dataset"
        entry = _Entry(peer, at, values)
        source = _address(entry, "train")
        column = entry.get("text_column") or "text"
        entry.get("type")
        if entry.get("skip"):
            entry.drop("skip", Effect.TRAINING, "all rows are read")
        _leave(entry, peer.tool.lists["pretraining"])
        if source is not None:
            sources.append(
                {**source, "format": "text", **({"columns": {"text": column}} if column != "text" else {})}
            )
            found.formats.append("text")
    if sources:
        peer.take("data.train", sources, "pretraining_dataset")
    peer.get("streaming")
    peer.take("data.streaming", True, "pretraining_dataset")
    take_packs(peer)
    if "trainer.max_steps" not in peer.reading.taken:
        peer.reading.needs(
            "trainer.max_steps", peer.line("pretraining_dataset"), "rows that are streamed have no end"
        )
    return True


def _sources(peer: Peer, key: str, entries: Any, split: str, found: _Found) -> list[dict[str, Any]]:
    sources = []
    for index, values in enumerate(entries if isinstance(entries, list) else [entries]):
        at = f"{key}[{index}]" if isinstance(entries, list) else key
        if not isinstance(values, dict):
            peer.reading.drop(
                at, values, peer.line(at), Effect.NEEDED, "expected a mapping with path and type"
            )
            continue
        entry = _Entry(peer, at, {name: value for name, value in values.items() if value is not None})
        source = _address(entry, split)
        shape = _rows(entry, found)
        _leave(entry, peer.tool.lists["dataset"])
        if source is None or shape is None:
            continue
        columns, form, hook = shape
        names = entry.get("name")
        for name in names if isinstance(names, list) else [names]:
            one = {**source, "format": form, **({"columns": columns} if columns else {})}
            sources.append({**one, "name": str(name)} if name is not None and "name" in source else one)
        found.formats.append(form)
        if hook is not None:
            found.shapes[source["path"]] = hook
        else:
            found.plain.append(source["path"])
    return sources


def _address(entry: _Entry, split: str) -> dict[str, Any] | None:
    """Where the rows of a data set lie."""
    path, files = entry.get("path"), entry.get("data_files")
    line = entry.line("path")
    if files:
        names = files if isinstance(files, list) else [files]
        if len(names) != 1 or not isinstance(names[0], str):
            entry.drop("data_files", Effect.NEEDED, "one file for one source", "write a source for each file")
            return None
        if path in BUILDERS or path is None:
            path = names[0]
        elif isinstance(path, str) and _is_folder(entry, path):
            path = f"{path.rstrip('/')}/{names[0]}"
        else:
            entry.drop("data_files", Effect.NEEDED, "no file of a data set of the hub can be named",
                       "download it, and name the file")  # fmt: skip
            return None
    name = entry.get("name")
    given = {"name": name[0] if isinstance(name, list) and name else name, "revision": entry.get("revision")}
    given["split"] = entry.get("split") or split
    source = source_at(entry.peer.reading, f"{entry.at}.path", line, path, given)
    if source is None:
        return None
    if str(entry.values.get("ds_type")) in (*source["path"].split("."), entry.values.get("path"), "json"):
        entry.get("ds_type")  # as the files are called
    weight = as_number(entry.get("weight"))
    if weight is not None and weight != 1 and split == "train" and weight > 0:
        source["weight"] = float(weight)
    return source


def _is_folder(entry: _Entry, path: str) -> bool:
    return (Path(entry.peer.reading.file).parent / path).is_dir() or Path(path).is_dir()


def _rows(entry: _Entry, found: _Found) -> tuple[dict[str, str], str, Shape | None] | None:
    """(columns, format, hook) of a data set; None, with the reason in the reading, where it has none."""
    kind = entry.get("type")
    if entry.peer.reading.task.ranks_answers:
        return _pairs(entry, kind)
    if isinstance(kind, dict):
        prompt = _own_prompt(entry, kind)
        return None if prompt is None else ({}, "prompt-completion", prompt)
    if kind is None:
        entry.peer.reading.refuse(
            f"{entry.at}.type", entry.line(), "is not there: its rows would be tokens already"
        )
        return None
    name = str(kind)
    if name.removesuffix(".load") in TYPES:
        return {}, "prompt-completion", TYPES[name.removesuffix(".load")]
    if name == "completion":
        column = entry.get("field") or "text"
        return ({"text": str(column)} if column != "text" else {}), "text", None
    if (
        name in ("chat_template", "chat_template.default")
        or name.partition(":")[0].partition(".")[0] == "sharegpt"
    ):
        return _chat(entry, name, found)
    hint = "write a format_row that makes prompt and completion, and name its file in `python`"
    entry.drop("type", Effect.NEEDED, "its prompt is axolotl's own code", hint)
    return None


def _chat(entry: _Entry, kind: str, found: _Found) -> tuple[dict[str, str], str, Shape | None]:
    old = kind.startswith("sharegpt")
    column = str(entry.get("field_messages") or ("conversations" if old else "messages"))
    properties = entry.get("message_property_mappings")
    properties = properties if isinstance(properties, dict) else {}
    words = [
        str(properties.get(name) or entry.get(f"message_field_{name}") or fallback)
        for name, fallback in zip(("role", "content"), _PAIRS[1 if old else 0], strict=True)
    ]
    if old:
        entry.drop("type", Effect.NONE, "axolotl 0.21 reads such rows as chat_template")
    for name in set(properties) - {"role", "content"}:
        entry.peer.reading.drop(f"{entry.at}.message_property_mappings.{name}", properties[name],
                                entry.line("message_property_mappings"), Effect.TRAINING,
                                "only role and content are renamed")  # fmt: skip
    _template_of(entry, found)
    _masks(entry)
    own = _own_roles(entry)
    tools = str(entry.get("field_tools") or "tools")
    if (words[0], words[1]) not in _PAIRS or not own.items() <= _WORDS.items():
        hook = Turns(
            column,
            words[0],
            words[1],
            tuple((own or _WORDS).items()),
            tools=tools if tools != "tools" else "",
        )
        return {}, "chat", hook
    columns = {"messages": column} if column != "messages" else {}
    return columns | ({"tools": tools} if tools != "tools" else {}), "chat", None


def _own_roles(entry: _Entry) -> dict[str, str]:
    """The rows' words for roles, each with its role."""
    roles = entry.get("roles")
    pairs = roles.items() if isinstance(roles, dict) else ()
    return {str(word): str(role) for role, several in pairs for word in _listed(several)}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _template_of(entry: _Entry, found: _Found) -> None:
    """The template that a data set names goes before the recipe's."""
    name, text = entry.get("chat_template"), entry.get("chat_template_jinja")
    if name is None and text is None:
        return
    given = text if name in (None, "jinja") and text is not None else name
    key = "chat_template_jinja" if given is text else "chat_template"
    if found.template is None:
        found.template = (f"{entry.at}.{key}", given, entry.line(key))
    elif found.template[1] != given:
        entry.drop(key, Effect.TRAINING, "one chat template is for all rows")


def _masks(entry: _Entry) -> None:
    learnt = entry.get("roles_to_train")
    if learnt is not None and [_WORDS.get(str(role)) for role in _listed(learnt)] != ["assistant"]:
        entry.drop("roles_to_train", Effect.TRAINING, "the assistant's turns alone are learnt, or with "
                   "data.loss_on: all everything")  # fmt: skip
    for key in ("train_on_eos", "train_on_eot"):
        value = entry.get(key)
        if value not in (None, "turn"):
            entry.drop(key, Effect.TRAINING, "the end of each turn of the assistant is learnt")


def _pairs(entry: _Entry, kind: Any) -> tuple[dict[str, str], str, Shape | None] | None:
    if str(kind) not in ("chat_template", "chat_template.default"):
        entry.drop("type", Effect.NEEDED, "its prompt is axolotl's own code",
                   "write a format_row that makes prompt, chosen and rejected")  # fmt: skip
        return None
    properties = entry.get("message_property_mappings")
    other = {
        "roles": not _own_roles(entry).items() <= _WORDS.items(),
        "message_property_mappings": isinstance(properties, dict)
        and any(name != str(column) for name, column in properties.items()),
    }
    for key in (key for key, found in other.items() if found):
        entry.drop(key, Effect.NEEDED, "other names of roles in preference rows",
                   "write a format_row that renames them")  # fmt: skip
    columns = {"prompt": str(entry.get("field_messages") or "messages")}
    columns["chosen"] = str(entry.get("field_chosen") or "chosen")
    columns["rejected"] = str(entry.get("field_rejected") or "rejected")
    return {name: column for name, column in columns.items() if name != column}, "preference", None


def _own_prompt(entry: _Entry, kind: dict[str, Any]) -> Prompt | None:
    """`type: {format: "...", field_instruction: ...}`."""
    said = {str(name): value for name, value in kind.items() if value is not None}
    turn = str(said.get("format", "{instruction} {input} "))
    alone, outer = (
        str(said.get("no_input_format", "{instruction} ")),
        str(said.get("system_format", "{system}")),
    )
    for pattern, names in ((turn, ("instruction", "input")), (alone, ("instruction",)), (outer, ("system",))):
        if unknown_fields(pattern, names) != []:
            reason = f"the braces of {shown(pattern)} are not {' and '.join(names)} alone"
            entry.drop("type", Effect.NEEDED, reason, "write a format_row")
            return None
    for name in set(said) - set(entry.peer.tool.lists["prompt"]):
        entry.peer.reading.drop(f"{entry.at}.type.{name}", said[name], entry.line("type"), Effect.NONE,
                                "no key of a prompt's pattern")  # fmt: skip
    fixed = str(said.get("system_prompt", ""))
    return Prompt(
        turn, alone, outer, fixed, fixed, str(said.get("field_system", "system")),
        str(said.get("field_instruction", "instruction")), str(said.get("field_input", "input")),
        str(said.get("field_output", "output")),
    )  # fmt: skip


def _leave(entry: _Entry, known: tuple[str, ...]) -> None:
    """What else a data set says."""
    for key, value in entry.values.items():
        if f"{entry.at}.{key}" in entry.peer.reading.seen:
            continue
        if key not in known:
            entry.drop(key, Effect.NONE, f"no key of a data set of axolotl {entry.peer.tool.version}")
        elif value is None or is_off(value):
            entry.get(key)
        else:
            left = next((left for left in DATASET_LEFT if key in left.names.split()), None)
            entry.drop(key, left.effect or Effect.TRAINING if left else Effect.TRAINING,
                       left.reason if left else "axolotl's own; no recipe key says it")  # fmt: skip


def _take_eval(peer: Peer, found: _Found) -> bool:
    tests, size = peer.get("test_datasets"), peer.get("val_set_size")
    if tests:
        rows = _sources(peer, "test_datasets", tests, "test", found)
        if rows:
            peer.take("data.eval", rows, "test_datasets")
        if size is not None and not is_off(size):
            peer.drop("val_set_size", Effect.NONE, "test_datasets are given, too")
        return bool(rows)
    if size is None:
        return False
    share = evaluation_share(peer.reading, "val_set_size", peer.line("val_set_size"), size)
    if share is not None:
        peer.take("data.eval", {"split": share}, "val_set_size", note="other rows of the same number")
    return share is not None


def _take_template(peer: Peer, found: _Found) -> None:
    name, text = peer.get("chat_template"), peer.get("chat_template_jinja")
    key, given, line = "chat_template", name, peer.line("chat_template")
    if name in (None, "jinja") and text is not None:
        key, given, line = "chat_template_jinja", text, peer.line("chat_template_jinja")
    if found.template is not None:
        if given is not None and given != found.template[1]:
            peer.drop(key, Effect.NONE, "the data set's own goes before it")
        key, given, line = found.template
    if given is None or given == "tokenizer_default":
        return
    if not {"chat", "preference"} & set(found.formats):
        peer.reading.drop(key, given, line, Effect.NONE, "no rows are made with it")
    elif key.endswith("jinja"):
        peer.reading.texts["_template.jinja"] = str(given)
        peer.reading.take("model.chat_template", "_template.jinja", line, key)
    else:
        peer.reading.drop(key, given, line, Effect.TRAINING, "axolotl's own text of that template; the "
                          "tokenizer's is used", "look with `effilaunch prepare RECIPE --show 1`, or set "
                          "model.chat_template")  # fmt: skip


def _take_lengths(peer: Peer, found: _Found, streamed: bool) -> None:
    if "data.max_length" not in peer.reading.taken and "sequence_len" not in peer.values:
        peer.default("data.max_length", 512, "sequence_len")
    given = peer.get("excess_length_strategy")
    if given not in (None, "truncate", "drop", "raise"):
        peer.drop("excess_length_strategy", Effect.NEEDED, "expected truncate, drop or raise")
        given = None
    strategy = "truncate" if given == "truncate" else "drop"
    if peer.reading.task.ranks_answers:
        take_long_pairs(peer, given)
    elif set(found.formats) == {"text"} and peer.reading.value("data.overlong") is None:
        peer.default("data.overlong", "split", "type: completion", "texts are cut into pieces there, too")
    elif set(found.formats) != {"text"}:
        if "text" in found.formats:
            peer.reading.needs("data.overlong", peer.line("datasets"), "axolotl cuts texts into pieces and "
                               "drops long rows of the others; one word is for all rows here")  # fmt: skip
        peer.reading.take("data.overlong", strategy, peer.line("excess_length_strategy"),
                          f"excess_length_strategy: {given or 'drop'}", default=given is None)  # fmt: skip
    if given == "raise" and not peer.reading.task.ranks_answers:
        peer.drop("excess_length_strategy", Effect.TRAINING, "long rows are dropped, and counted")
    if peer.switch("sample_packing") and not streamed:
        peer.take("data.packing", True, "sample_packing")
    if peer.switch("batch_flattening") and not peer.reading.value("data.packing"):
        peer.take("data.padding_free", True, "batch_flattening")
