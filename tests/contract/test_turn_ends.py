"""Where turns end, compared with the templates that trl ships for training."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl")

from launcher.errors import RecipeError  # noqa: E402
from launcher.rows.sources import Row  # noqa: E402
from launcher.train.data.chat import EncodeChat, turns_end_open  # noqa: E402
from launcher.train.data.encoded import IGNORED  # noqa: E402
from launcher.train.data.image_chat import ImageTemplate  # noqa: E402
from launcher.train.data.template import Template  # noqa: E402

FOLDER = Path(trl.__file__).parent / "chat_templates"
TRAINED = sorted(path.name.removesuffix("_training.jinja") for path in FOLDER.glob("*_training.jinja"))
SPECIAL = re.compile(
    r"<\|[\w ]+\|>|<\uff5c[^\uff5c]+\uff5c>|</?s>|<(?:bos|eos)>|\[/?[A-Z_]+\]"
    r"|<end_of_utterance>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>"
)
OF_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates of models for images: contents are lists of parts."""
TAKE_NO_TOOLS = {
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3", "llama3",
    "llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm",
}  # fmt: skip
"""They leave the tools of a row out, which is refused."""
ENDS_OPEN = "glm4moe"
"""Writes nothing after the last turn: trl adds the user's marker there, and we the end of the text."""
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "second answer"},
    {"role": "user", "content": "third question"},
    {"role": "assistant", "content": "third answer"},
]
CALL = {"type": "function", "function": {"name": "search", "arguments": {"what": "stone"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string", "description": "a word"}}},
    },
}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "search", "content": "found"},
    {"role": "assistant", "content": "second answer"},
]


@cache
def tokenizer(source: str) -> Any:
    """A token for each character, and for each marker of the template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = {chr(code): code for code in range(256)}
    core = Tokenizer(models.WordLevel(characters | {"<unk>": 256}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", pad_token="<unk>"
    )
    made.add_special_tokens(
        {"additional_special_tokens": sorted(set(SPECIAL.findall(source)) - {"<bos>", "<eos>"})}
    )
    made.chat_template = source
    return made


def template_of(name: str, made: Any, tools: list[Any] | None) -> Template:
    return (ImageTemplate if name in OF_PARTS else Template)(made, tools)


def ends_of_trl(name: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[str]:
    """The last marker or character of each turn that trl's template marks, in one range or several."""
    source = (FOLDER / f"{name}_training.jinja").read_text("utf-8")
    text, spans = template_of(name, tokenizer(source), tools).render_marked(messages)
    following = [start for start, _ in spans[1:]] + [len(text) + 1]
    last = [
        end
        for (_, end), start in zip(spans, following, strict=True)
        if text[end:start].strip() or start > len(text)
    ]
    return [last_of(text[:end]) for end in last]


def last_of(text: str) -> str:
    text = text.rstrip()
    marks = list(SPECIAL.finditer(text))
    return marks[-1][0] if marks and marks[-1].end() == len(text) else text[-1:]


def ends_of_ours(name: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[str]:
    source = (FOLDER / f"{name}.jinja").read_text("utf-8")
    made = tokenizer(source)
    encode = EncodeChat(made, 4000, "drop", "assistant", loss_on_inserted=True)
    encode._template = lambda row: template_of(name, made, tools)
    row = Row({"messages": messages, **({"tools": tools} if tools else {})}, "rows.jsonl", 1)
    batch = encode([row])
    assert batch.dropped == Counter(), name
    (ids,), (labels,) = batch.columns["input_ids"], batch.columns["labels"]
    learnt = [label != IGNORED for label in labels] + [False]
    last = [index for index in range(len(ids)) if learnt[index] and not learnt[index + 1]]
    return [made.decode([ids[index]]) for index in last]


def compared(messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[set[str], dict[str, Any]]:
    """(Templates that refuse the conversation, those whose turns end otherwise than trl has them.)"""
    refused, other = set(), {}
    for name in TRAINED:
        try:
            ours = ends_of_ours(name, messages, tools)
        except RecipeError:  # it leaves the tools out, or knows no role for them
            refused.add(name)
            continue
        theirs = ends_of_trl(name, messages, tools)
        if ours != theirs and not (name == ENDS_OPEN and ours == [*theirs[:-1], "<eos>"]):
            other[name] = (ours, theirs)
    return refused, other


def test_turns_end_as_in_the_templates_for_training():
    assert compared(TALK, None) == (set(), {})


def test_turns_with_tools_end_as_in_the_templates_for_training():
    assert compared(TALK, [TOOL]) == (TAKE_NO_TOOLS, {})
    assert compared(CALLED, [TOOL]) == (TAKE_NO_TOOLS | {"lfm2"}, {}), "which writes no call"


def test_samples_of_such_templates_alone_are_prepared_anew():
    sources = {name: (FOLDER / f"{name}.jinja").read_text("utf-8") for name in TRAINED}
    assert [name for name in sources if turns_end_open(tokenizer(sources[name]))] == [ENDS_OPEN]


def test_what_begins_an_answer_ends_none():
    """Two answers in a row, and a template that opens each turn with <bos>."""
    source = (FOLDER / "glm4moe.jinja").read_text("utf-8")
    twice = [*TALK[:2], TALK[3], *TALK[4:]]
    assert "<|assistant|>" not in ends_of_ours("glm4moe", twice, None)
    made = tokenizer(source.replace("<|user|>", "<bos>user "))
    batch = EncodeChat(made, 4000, "drop", "assistant")([Row({"messages": TALK}, "rows.jsonl", 1)])
    assert made.bos_token_id not in batch.columns["labels"][0]
