"""Where a finished run's answers end, and with whose code its tokenizer is read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launcher.train.generate import closing_token, generate, stop_tokens

sys.path.insert(0, str(Path(__file__).parent))
from plans import write_run
from small import llama, tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
)
BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
REFUSES = "{{ raise_exception('never') }}"


def chatty(template: str | None):
    words = tokenizer()
    marks = ("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>")
    words.add_special_tokens({"additional_special_tokens": list(marks)})
    words.chat_template = template
    return words


@pytest.mark.parametrize(
    ("template", "token"),
    [(CHATML, "<|im_end|>"), (GEMMA, "<end_of_turn>"), (BARE, None), (REFUSES, None), (None, None)],
)
def test_the_token_that_closes_a_turn(template, token):
    words = chatty(template)
    assert closing_token(words) == (None if token is None else words.convert_tokens_to_ids(token))


@pytest.mark.parametrize(
    ("configured", "expected"), [(None, [2]), (2, [2]), (5, [2, 5]), ([7, 2, 6], [2, 6, 7])]
)
def test_answers_end_where_tokenizer_checkpoint_or_template_say(configured, expected):
    assert stop_tokens(chatty(None), configured) == expected
    words = chatty(CHATML)
    closing = words.convert_tokens_to_ids("<|im_end|>")
    assert stop_tokens(words, configured) == sorted({*expected, closing})


def finished(folder: Path, stops: list[int]) -> Path:
    """A run whose model lists these ends of an answer."""
    write_run(folder, {"tiny": False})
    model = llama()
    model.generation_config.eos_token_id = stops
    for part in (model, tokenizer()):
        part.save_pretrained(folder / "model")
    return folder


def test_the_checkpoints_own_ends_are_kept(tmp_path):
    words = generate(finished(tmp_path / "a", [2]), "w1 w2", 8).split()
    assert len(words) == 8
    last = next(index for index, word in enumerate(words) if index and word not in words[:index])
    number = tokenizer().convert_tokens_to_ids(words[last])
    assert generate(finished(tmp_path / "b", [2, number]), "w1 w2", 8).split() == words[: last + 1]


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_the_tokenizer_runs_only_when_it_is_trusted(tmp_path, monkeypatch, trusted):
    import transformers

    run = finished(tmp_path, [2])
    write_run(run, {"tiny": False, "model.trust_remote_code": trusted})
    asked = {}

    def read(folder, **options):
        asked.update(options)
        return tokenizer()

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", read)
    generate(run, "w1", 1)
    assert asked == {"trust_remote_code": trusted}
