"""What an export is asked, to compare it with the trained model: texts, conversations and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.train.data.template import render_errors
from launcher.train.job import Job
from launcher.train.results.generate import is_chat, is_instruction

TEXTS, PROMPTS = 200, 50
NEW_TOKENS = 16
"""Of each answer."""
_TOPICS = (
    "the tides", "a bicycle's gears", "sorting a list", "bread", "prime numbers", "the heart", "a leap year",
    "rust on iron", "an eclipse", "compound interest", "a glacier", "the alphabet", "photosynthesis",
    "a binary search", "chess openings", "the Silk Road", "a hash table", "vaccines", "the violin",
    "a parliament", "recursion", "the water cycle", "a magnet", "a comet", "translation",
)  # fmt: skip
_FORMS = (
    "Explain {0} to a child.",
    "Write one sentence about {0}",
    "def about():\n    return {{'topic': \"{0}\", 'n': 1_000 + {1}}}  # {0}\n",
    "{0}: 1,234.5{1} EUR (~{1} %), 2026-11-{1:02d}T08:0{2}:00Z",
    "Que dire de « {0} » ? Größe, naïve, Ελλάδα, Привет, 你好, こんにちは, مرحبا {1}",
    "  {0}\t{1}\n\n\n  and   then\r\n{0} ",
    "# {0}\n\n- [ ] *first* `{1}`\n- <b>second</b> &amp; https://example.org/a?b={1}#c\n",
    "{0} \U0001f600\u200d\U0001f680 e\u0301 \u00a0 {1}\u00bd \ufb01n I'll you've {0}'s",
)


def texts() -> list[str]:
    """Prose, code, numbers, languages, white space, markup and symbols: what tokenizers disagree about."""
    return [
        form.format(topic, number, number % 10) for form in _FORMS for number, topic in enumerate(_TOPICS, 1)
    ]


def prompts(job: Job, processing: Any) -> list[Any]:
    """Prompts in the form of the training rows: messages of a conversation, or a text."""
    asked = [form.format(topic, 0, 0) for form in _FORMS[:2] for topic in _TOPICS]
    if is_chat(job, processing):
        return [[{"role": "user", "content": text}] for text in asked]
    if is_instruction(job):
        from launcher.rows.formats import instruction_prompt

        return [instruction_prompt(text) for text in asked]
    return asked


def conversations() -> list[list[dict[str, str]]]:
    """Beginnings of conversations that end with a user's turn: with and without a system prompt."""
    user = ["What is a glacier?", "And\nthen, {{ x }} {% y %}?", "Why \u201cso\u201d?"]
    reply = ["Ice that flows.", "It melts: 1 < 2 & 3."]
    found = []
    for system in ([], [{"role": "system", "content": "Answer briefly."}]):
        for count in range(1, len(user) + 1):
            turns = list(system)
            for number in range(count):
                turns.append({"role": "user", "content": user[number]})
                if number < count - 1:
                    turns.append({"role": "assistant", "content": reply[number]})
            found.append(turns)
    return found


def rendered(tokenizer: Any, turns: Sequence[dict[str, str]], *, ask: bool = True) -> str | None:
    """The text of a conversation; None where the template refuses it, a system prompt for example.

    ask: with the header that asks for an answer.
    """
    try:
        return str(tokenizer.apply_chat_template([*turns], tokenize=False, add_generation_prompt=ask))
    except render_errors():
        return None


def encoded(tokenizer: Any, prompt: Any) -> list[int]:
    """The ids of a prompt as in training: a template writes its own special tokens."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    found = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
    return list(found["input_ids"])


def greedy(model: Any, ids: Sequence[int], **settings: Any) -> list[dict[str, Any]]:
    """The answer's tokens, each with how far the model's second choice was behind."""
    import torch

    device = model.device
    with torch.inference_mode():
        found = model.generate(
            input_ids=torch.tensor([[*ids]], device=device),
            attention_mask=torch.ones((1, len(ids)), dtype=torch.long, device=device),
            do_sample=False, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True,
            **settings,
        )  # fmt: skip
    count = len(found.logits)
    tokens = found.sequences[0, -count:].tolist()
    steps = []
    for token, logits in zip(tokens, found.logits, strict=True):
        best = logits[0].float().topk(2).values
        steps.append({"token": int(token), "margin": float(best[0] - best[1])})
    return steps
