"""Which tokens of a conversation are learnt, with templates built like those of well-known models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launcher.errors import RecipeError
from launcher.rows.sources import Row
from launcher.train.data.chat import EncodeChat
from launcher.train.data.template import Template, find_spans
from launcher.train.tiny import tiny_tokenizer

# Own, short templates with the structure of each family: its headers, its ends, its peculiarities.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN25 = (  # a system prompt of its own, tools, tool calls, tool answers inside a user turn
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}"
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (  # thoughts stay only after the last question, and the last answer always has one
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
    "{% set parts = m.content.split('</think>') %}{% set thought = '' %}{% if parts | length > 1 %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ parts[-1].lstrip('\n') }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN35 = QWEN3.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} </s>{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n'"
    " + m.content | trim + '<|eot_id|>' %}{% if loop.first %}<|begin_of_text|>{% endif %}"
    "{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls | map(attribute='function') | list | tojson }}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }} [/TOOL_RESULTS]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
PHI3 = (  # one token more where the conversation ends
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|eos|>{% endif %}"
)
HARMONY = (  # the last answer ends in another token
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
NO_PROMPT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_SHORT = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

FAMILIES = {
    "chatml": (CHATML, "{}<|im_end|>", "{}<|im_end|>"),
    "qwen2.5": (QWEN25, "{}<|im_end|>", "{}<|im_end|>"),
    "qwen3": (QWEN3, "{}<|im_end|>", "{}<|im_end|>"),  # without the empty thought that the template adds
    "qwen3.5": (QWEN35, "{}<|im_end|>", "{}<|im_end|>"),
    "llama2": (LLAMA2, " {} </s>", " {} </s>"),
    "llama3": (LLAMA3, "{}<|eot_id|>", "{}<|eot_id|>"),
    "gemma": (GEMMA, "{}<end_of_turn>", "{}<end_of_turn>"),
    "mistral": (MISTRAL, " {}</s>", " {}</s>"),
    "phi3": (PHI3, "{}<|end|>", "{}<|end|>\n<|eos|>"),
    "harmony": (HARMONY, "<|channel|>final<|message|>{}<|end|>", "<|channel|>final<|message|>{}<|return|>"),
    "no prompt": (NO_PROMPT, "{}<|im_end|>", "{}<|im_end|>"),
    "marked": (MARKED, "{}<|im_end|>", "{}<|im_end|>"),
    "marked without end": (MARKED_SHORT, "{}<|im_end|>", "{}<|im_end|>"),
}
"""Name -> (template, what is learnt of an earlier answer, what of the last)."""
ALTERNATING = ("gemma",)

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<|begin_of_text|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>",
    "<|user|>", "<|assistant|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|return|>",
]  # fmt: skip

# Answers of two lines, deep indentation, a character of several bytes, and spaces at the ends.
CHAT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "def two():\n        return '☺'"},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Four five."},
]
FIRST, LAST = CHAT[1]["content"], CHAT[3]["content"]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}]
CALLS = [
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        ],
    },
    {"role": "tool", "content": "yes"},
    {"role": "assistant", "content": "It rains."},
]


def tokenizer_with(template, *, trim_offsets=False, **added):
    from tokenizers import AddedToken, processors

    tokenizer = tiny_tokenizer(512)
    tokenizer.add_tokens([AddedToken(token, special=True, **added) for token in SPECIAL], special_tokens=True)
    if trim_offsets:  # as GPT-2's tokenizer: the place of " word" leaves the space out
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.chat_template = template
    return tokenizer


def encode(tokenizer, messages, loss_on="assistant", tools=None, max_length=512):
    row = Row({"messages": messages, "tools": tools}, "rows.jsonl", 9)
    return EncodeChat(tokenizer, max_length, "truncate", loss_on)([row])


def learnt(tokenizer, batch):
    """The texts of the runs of learnt tokens."""
    assert batch.kept == 1
    ids, labels = batch.columns["input_ids"][0], batch.columns["labels"][0]
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    runs, before = [], False
    for token, label in zip(ids, labels, strict=True):
        if label != -100:
            if not before:
                runs.append([])
            runs[-1].append(token)
        before = label != -100
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("trim_offsets", [False, True], ids=["", "trimmed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_answer_is_learnt_with_its_end_and_without_its_header(family, trim_offsets):
    template, earlier, last = FAMILIES[family]
    tokenizer = tokenizer_with(template, trim_offsets=trim_offsets)
    batch = encode(tokenizer, CHAT)
    assert learnt(tokenizer, batch) == [earlier.format(FIRST), last.format(LAST)]
    whole = tokenizer.decode(batch.columns["input_ids"][0])
    shown = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert shown in (whole, whole + "\n")
    assert learnt(tokenizer, encode(tokenizer, CHAT, "completion")) == [last.format(LAST)]
    assert "".join(learnt(tokenizer, encode(tokenizer, CHAT, "all"))) == shown


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_that_ends_with_a_question(family):
    template, earlier, _ = FAMILIES[family]
    tokenizer = tokenizer_with(template)
    found = learnt(tokenizer, encode(tokenizer, [*CHAT, {"role": "user", "content": "Bye."}]))
    assert found == [earlier.format(FIRST), earlier.format(LAST)]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ALTERNATING])
def test_two_answers_in_a_row(family):
    template, earlier, last = FAMILIES[family]
    tokenizer = tokenizer_with(template)
    batch = encode(tokenizer, [*CHAT, {"role": "assistant", "content": "Six."}])
    middle = earlier.format(LAST)
    expected = [earlier.format(FIRST), middle, last.format("Six.")]
    if family in ("llama2", "mistral"):  # nothing stands between the two
        expected[1:] = ["".join(expected[1:])]
    assert learnt(tokenizer, batch) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_without_an_answer_nothing_is_learnt(family):
    tokenizer = tokenizer_with(FAMILIES[family][0])
    for loss_on in ("assistant", "completion"):
        batch = encode(tokenizer, CHAT[:1], loss_on)
        assert (batch.kept, batch.dropped) == (0, {"no-targets": 1})
    assert encode(tokenizer, CHAT[:1], "all").kept == 1


@pytest.mark.parametrize("family", ["chatml", "llama3", "phi3", "gemma", "marked"])
def test_tokens_that_swallow_the_line_break_after_them(family):
    template, earlier, last = FAMILIES[family]
    tokenizer = tokenizer_with(template, rstrip=True)
    found = learnt(tokenizer, encode(tokenizer, CHAT))
    assert [text.replace("\n", "") for text in found] == [
        earlier.format(FIRST).replace("\n", ""),
        last.format(LAST).replace("\n", ""),
    ]


def test_spaces_of_the_header_are_not_learnt():
    """Trimmed offsets put a token of spaces at its own end, which here is where the answer begins."""
    template = (
        "{% for m in messages %}{{ m.role }}:   {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:   {% endif %}"
    )
    turns = [CHAT[0], {"role": "assistant", "content": "\nfoo"}]
    tokenizer = tokenizer_with(template, trim_offsets=True)
    assert learnt(tokenizer, encode(tokenizer, turns)) == ["\nfoo<|end|>"]


def test_thoughts_are_learnt_where_the_template_keeps_them():
    tokenizer = tokenizer_with(QWEN3)
    thought = "<think>\nhm\n</think>\n\n"
    turns = [
        turn | {"content": thought + turn["content"]} if turn["role"] == "assistant" else turn
        for turn in CHAT
    ]
    found = learnt(tokenizer, encode(tokenizer, turns))
    assert found == [FIRST + "<|im_end|>", thought + LAST + "<|im_end|>"]


def test_a_system_prompt_is_not_learnt():
    tokenizer = tokenizer_with(CHATML)
    turns = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert learnt(tokenizer, encode(tokenizer, turns)) == [FIRST + "<|im_end|>", LAST + "<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (QWEN25, '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]</s>'),
    ],
    ids=["qwen2.5", "mistral"],
)
def test_tool_calls_are_learnt_and_their_answers_are_not(template, call):
    tokenizer = tokenizer_with(template)
    tools = TOOLS if template is QWEN25 else None
    first, second = learnt(tokenizer, encode(tokenizer, CALLS, tools=tools))
    assert first.strip() == call.strip()
    assert second.strip().startswith("It rains.")
    whole = tokenizer.decode(encode(tokenizer, CALLS, tools=tools).columns["input_ids"][0])
    assert (json.dumps(TOOLS[0]) in whole) is bool(tools)


def test_tool_calls_beside_thoughts_that_are_taken_out():
    """Prefixes do not hold here, so the turn is found by the name of the function."""
    call = "{{ c.function.name }}{{ c.function.arguments | tojson }}"
    calls = "{% for c in m.tool_calls or [] %}<tool_call>" + call + "</tool_call>{% endfor %}"
    template = QWEN3.replace("{{ parts[-1].lstrip('\n') }}", "{{ parts[-1].lstrip('\n') }}" + calls)
    turns = [dict(turn) for turn in CALLS]
    turns[1]["content"] = "<think>\nhm\n</think>\n\nI look."
    tokenizer = tokenizer_with(template)
    found = learnt(tokenizer, encode(tokenizer, [*turns, *CHAT[:2]]))
    assert found[0] == 'I look.<tool_call>weather{"city": "Oslo"}</tool_call><|im_end|>'


def test_templates_that_take_arguments_as_text():
    template = QWEN25.replace("c.function.arguments | tojson", "'' + c.function.arguments")
    tokenizer = tokenizer_with(template)
    assert '"arguments": {"city": "Oslo"}' in learnt(tokenizer, encode(tokenizer, CALLS))[0]


@pytest.mark.parametrize(("turns", "tools", "what"), [(CALLS, None, "tool call"), (CHAT, TOOLS, "tool")])
def test_tools_are_not_lost_in_silence(turns, tools, what):
    turns = [{"content": "", **turn} for turn in turns]
    with pytest.raises(RecipeError, match=f"rows.jsonl:9: .*leaves out the {what} weather"):
        encode(tokenizer_with(CHATML), turns, tools=tools)


def test_a_conversation_without_closing_token_gets_an_eos():
    tokenizer = tokenizer_with(PLAIN)
    assert learnt(tokenizer, encode(tokenizer, CHAT))[-1] == f" {LAST}\n<|eos|>"
    assert learnt(tokenizer, encode(tokenizer, CHAT, "all"))[-1].endswith(f"{LAST}\n<|eos|>")
    asked = encode(tokenizer, CHAT[:3])
    assert tokenizer.eos_token_id not in asked.columns["input_ids"][0]


def test_a_short_answer_after_a_special_header_gets_an_eos_too():
    tokenizer = tokenizer_with("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}")
    turns = [CHAT[0], {"role": "assistant", "content": "a"}]
    assert learnt(tokenizer, encode(tokenizer, turns)) == ["a<|eos|>"]


def test_truncation_adds_no_end():
    tokenizer = tokenizer_with(CHATML)
    whole = encode(tokenizer, CHAT)
    length = whole.tokens - 4
    batch = encode(tokenizer, CHAT, max_length=length)
    assert batch.columns["input_ids"][0] == whole.columns["input_ids"][0][:length]
    assert batch.columns["labels"][0] == whole.columns["labels"][0][:length]
    assert (batch.truncated, batch.tokens) == (1, whole.tokens)
    assert batch.tokens_lost == 4


def test_a_batch_equals_its_rows():
    tokenizer = tokenizer_with(QWEN3)
    talks = [CHAT, CHAT[:2], CHAT[:1], [], CHAT[2:], [*CHAT, *CHAT]]
    rows = [Row({"messages": talk, "tools": None}, "rows.jsonl", n) for n, talk in enumerate(talks)]
    encoder = EncodeChat(tokenizer, 512, "truncate", "assistant")
    batch, alone = encoder(rows), [encoder([row]) for row in rows]
    for name, values in batch.columns.items():
        assert values == [value for one in alone for value in one.columns[name]]
    assert batch.dropped == {"no-targets": 1, "empty": 1}
    assert batch.rows == [0, 1, 4, 5]
    assert batch.tokens == sum(one.tokens for one in alone)


def test_a_template_that_hides_the_answers_is_refused_with_the_row():
    tokenizer = tokenizer_with(
        "{{ messages | length }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(RecipeError, match=r"rows\.jsonl:9: data\.loss_on: ") as caught:
        encode(tokenizer, CHAT)
    assert caught.value.problems[0].code == "chat-template-mask"
    assert encode(tokenizer, CHAT, "all").kept == 1


def test_a_template_that_counts_its_turns_is_understood():
    tokenizer = tokenizer_with("{{ messages | length }} turns\n" + CHATML)
    assert learnt(tokenizer, encode(tokenizer, CHAT)) == [FIRST + "<|im_end|>", LAST + "<|im_end|>"]


def test_what_the_template_refuses_is_named():
    with pytest.raises(RecipeError, match=r"rows\.jsonl:9: .*does not take.*roles must alternate"):
        encode(tokenizer_with(GEMMA), [CHAT[0], CHAT[0]])


def test_chat_needs_a_template():
    tokenizer = tiny_tokenizer(512)
    tokenizer.chat_template = None
    with pytest.raises(RecipeError, match="no chat template"):
        encode(tokenizer, CHAT)


@pytest.mark.parametrize("turns", [1, 20])
def test_marked_templates_are_rendered_once(monkeypatch, turns):
    tokenizer = tokenizer_with(MARKED)
    calls = []
    monkeypatch.setattr(Template, "render", lambda *args, **options: calls.append(args))
    _, spans = find_spans(Template(tokenizer, None), CHAT * turns, range(1, 4 * turns, 2))
    assert len(spans) == 2 * turns
    assert not calls


TRAINING = (
    "cohere", "gemma", "gemma3", "lfm2", "llama3", "qwen2_5", "qwen3_instruct_2507", "nemotron_3_nano",
)  # fmt: skip


@pytest.mark.parametrize("name", TRAINING)
def test_real_templates_agree_with_the_marked_ones_of_trl(name):
    """trl ships templates of models as they are, and again with {% generation %} put in by hand."""
    trl = pytest.importorskip("trl")
    folder = Path(trl.__file__).parent / "chat_templates"
    found = []
    for file in (f"{name}.jinja", f"{name}_training.jinja"):
        tokenizer = tiny_tokenizer(512)
        tokenizer.chat_template = (folder / file).read_text()
        signs = sorted(set(re.findall(r"<\|\w+\|>|<(?:start|end)_of_turn>", tokenizer.chat_template)))
        tokenizer.add_tokens(signs, special_tokens=True)
        found.append([text.strip() for text in learnt(tokenizer, encode(tokenizer, CHAT))])
    assert len(found[0]) == 2
    assert found[0] == found[1]
