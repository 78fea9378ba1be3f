"""Where a finished run's answers end, and with whose code its tokenizer is read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launcher.train.job import read_job
from launcher.train.results.generate import (
    Trained,
    answer,
    closing_token,
    converse,
    load_trained,
    stop_tokens,
)
from launcher.train.results.trained import (
    SPARE,
    free_device_bytes,
    place_of,
    placement,
    slow_places,
    weight_bytes,
)

sys.path.insert(0, str(Path(__file__).parent))
from plans import generate, write_run
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


GIB = 2**30


@pytest.mark.parametrize(
    ("weights", "free", "place"),
    [
        (7 * GIB, None, "cpu"),
        (7 * GIB, 24 * GIB, "cuda"),
        (24 * GIB - SPARE, 24 * GIB, "cuda"),
        (24 * GIB - SPARE + 1, 24 * GIB, "auto"),
        (140 * GIB, 80 * GIB, "auto"),
    ],
)
def test_one_gpu_where_it_holds_the_weights_else_all_there_is(weights, free, place):
    assert placement(weights, free) == place


@pytest.mark.parametrize("quantization", ["none", "int8", "nf4"])
def test_the_bytes_of_the_weights_are_known_before_they_are_read(tmp_path, quantization):
    run = write_run(
        tmp_path, {"adapter": {"type": "lora", "r": 4, "target_modules": ["q_proj"]},
                   "model.quantization": quantization, "model.device_map": None},
    )  # fmt: skip
    work = read_job(run)
    from launcher.train.model.models import load_model
    from launcher.train.model.processing import load_processing

    model = load_model(work, load_processing(work), distributed=False)
    found = sum(p.numel() * p.element_size() for p in model.parameters())
    # 4 bits: each layer's constants are a little more for rows that are no multiple of 64.
    assert weight_bytes(work, tmp_path / "adapter") == pytest.approx(found, rel=0.05)


def test_a_model_folder_counts_in_the_dtype_that_it_has(tmp_path):
    import torch

    run = finished(tmp_path, [2])
    whole = weight_bytes(read_job(run), run / "model")
    assert whole == llama().num_parameters() * 4
    llama().to(torch.bfloat16).save_pretrained(run / "model")
    assert weight_bytes(read_job(run), run / "model") == whole // 2


def test_what_the_gpu_does_not_hold_is_spread_and_its_speed_is_named(tmp_path, monkeypatch):
    """Facts of a GPU with 1 kB free; accelerate then finds this machine's devices, which is its CPU."""
    run = finished(tmp_path, [2])
    expected = generate(run, "w1 w2", 8)
    monkeypatch.setattr("launcher.train.results.trained.free_device_bytes", lambda: 1024)
    assert place_of(read_job(run), run / "model") == "auto"
    asked = []
    import launcher.train.results.generate as module

    real = module.trained_model
    monkeypatch.setattr(
        module, "trained_model", lambda *a, **k: asked.append(k["device_map"]) or real(*a, **k)
    )
    assert generate(run, "w1 w2", 8) == expected
    assert asked == ["auto"]


def test_layers_off_the_gpu_are_named(monkeypatch):
    import torch

    model = llama()
    assert slow_places(model) is None
    model.hf_device_map = {
        "model.embed_tokens": 0,
        "model.layers.0": 0,
        "model.layers.1": "cpu",
        "lm_head": "disk",
    }
    assert slow_places(model) is None, "there is no GPU that would be faster"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = slow_places(model)
    assert "2 of its 4 parts are in the CPU's memory and the disk" in said
    model.hf_device_map = {"": 0}
    assert slow_places(model) is None


def test_layers_that_wait_elsewhere_answer_the_same(tmp_path):
    """accelerate's hooks, which a spread model has: here a layer and the embedding wait on the disk."""
    from accelerate import dispatch_model

    from launcher.train.results.trained import settle

    run = finished(tmp_path / "run", [2])
    trained = load_trained(run, print)
    expected = answer(trained, "w1 w2", 8)
    spread = dispatch_model(
        trained.model,
        {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
         "model.rotary_emb": "cpu", "lm_head": "cpu"},
        main_device="cpu", offload_dir=str(tmp_path / "aside"),
    )  # fmt: skip
    assert {p.device.type for p in spread.parameters()} == {"cpu", "meta"}
    device = settle(spread, "auto")
    assert device.type == "cpu"
    assert (
        answer(Trained(trained.job, trained.processing, spread, device, trained.folder), "w1 w2", 8)
        == expected
    )


def test_no_gpu_is_no_free_memory():
    assert free_device_bytes() is None


def test_only_the_first_of_eight_gpus_is_asked(monkeypatch):
    """Asking another one opens a context on it."""
    import torch

    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (asked.append(number), (5, 9))[1])
    assert free_device_bytes() == 5
    assert asked == [0]


def talking(folder: Path, template: str | None = CHATML) -> Trained:
    """A model that was trained on conversations, loaded."""
    run = write_run(folder, {"tiny": False, "data.train": [{"path": "x", "format": "chat", "columns": {}}]})
    words = chatty(template)
    model = llama()
    model.resize_token_embeddings(len(words))
    for part in (model, words):
        part.save_pretrained(folder / "model")
    return load_trained(run, print)


def said_in(trained: Trained, *prompts: str, tokens: int = 6, monkeypatch=None) -> tuple[int, str, list[str]]:
    """(how many answers, what was written, the prompts as the model got them)."""
    pieces: list[str] = []
    seen: list[str] = []
    real = trained.model.generate

    def spied(**inputs):
        seen.append(trained.processing.decode(inputs["input_ids"][0]))
        return real(**inputs)

    trained.model.generate = spied
    lines = iter(prompts)
    count = converse(trained, lambda: next(lines, None), pieces.append, tokens)
    return count, "".join(pieces), seen


def test_a_conversation_is_written_as_it_comes_and_remembered(tmp_path):
    trained = talking(tmp_path)
    alone = answer(trained, "w1 w2", 6)
    assert alone
    count, said, seen = said_in(trained, "w1 w2", "", "w3")
    assert count == 2, "an empty line asks nothing"
    assert said.splitlines()[0].strip() == alone
    assert "w1 w2" in seen[1]
    assert all(word in seen[1] for word in alone.split()), "the answer is part of what follows"
    assert seen[1].index("w1 w2") < seen[1].rindex("w3")
    assert "w1" not in answer_prompt(trained, "w3")


def answer_prompt(trained: Trained, prompt: str) -> str:
    from launcher.train.results.generate import _encode

    return trained.processing.decode(_encode(trained.job, trained.processing, prompt)["input_ids"][0])


def test_pieces_make_the_answer(tmp_path):
    trained = load_trained(finished(tmp_path, [2]), print)
    pieces: list[str] = []
    whole = answer(trained, "w1 w2", 8, write=pieces.append)
    assert "".join(pieces).split() == whole.split() == generate(tmp_path, "w1 w2", 8).split()
    assert len(pieces) > 1, "not all at its end"


def test_a_model_of_plain_text_takes_each_line_by_itself(tmp_path):
    trained = load_trained(finished(tmp_path, [2]), print)
    assert not trained.chats
    _, _, seen = said_in(trained, "w1 w2", "w3")
    assert seen == ["w1 w2", "w3"]


def test_a_conversation_that_grows_too_long_loses_its_oldest_turns(tmp_path):
    trained = talking(tmp_path)  # of 64 positions
    count, said, seen = said_in(trained, *[f"w{n} w{n} w{n} w{n}" for n in range(10, 16)])
    assert count == 6
    assert "64 tokens fit" in said
    assert "w10" in seen[1]
    assert "w10 w10" not in seen[-1]
    assert max(len(text.split()) for text in seen) <= 64


def test_ctrl_c_ends_the_answer_and_not_the_conversation(tmp_path):
    trained = talking(tmp_path)
    calls = []
    real = trained.model.generate

    def interrupted(**inputs):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(**inputs)

    trained.model.generate = interrupted
    lines = iter(["w1", "w2"])
    pieces: list[str] = []
    assert converse(trained, lambda: next(lines, None), pieces.append, 4) == 1
    assert pieces[0] == " …"
    assert len(calls) == 2
