"""Fill-in-the-middle: nothing of a document is lost, and every sample is whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import RecipeError
from launcher.rows.sources import Row
from launcher.train.data.fim import SENTINELS, Cut, EncodeFim, _Sample, draw, find_sentinels
from launcher.train.data.tokenize import make_encoder
from launcher.train.job import Job
from launcher.train.tiny import tiny_tokenizer

CODE = "def add(a, b):\n    '''Über ☺ 漢字'''\n    return a + b\n\n\n"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(512)


@pytest.fixture(scope="module")
def spacing():
    """A tokenizer that begins texts with BOS and a space of its own, as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *SENTINELS[3], *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    core.train_from_iterator(["def add(a, b): return a + b"] * 3, trainer)
    core.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def rows_of(*texts, file="code.jsonl"):
    return [Row({"text": text}, file, number) for number, text in enumerate(texts, 1)]


def encoder(tokenizer, rate=1.0, spm_rate=0.5, max_length=512, overlong=None, seed=3):
    values = {
        "task": "causal-lm",
        "data.max_length": max_length,
        "data.overlong": overlong,
        "data.loss_on": None,
        "data.fim": {"rate": rate, "spm_rate": spm_rate},
        "seed": seed,
    }
    job = Job(Path("run"), {"settings": {name: {"value": value} for name, value in values.items()}})
    return make_encoder(job, tokenizer, SimpleNamespace(format="text", columns={}))


def undone(tokenizer, ids, sentinels=None):
    """(kind, the text before it was reordered) of one sample, its EOS and BOS taken off."""
    prefix, suffix, middle = sentinels or find_sentinels(tokenizer)
    ids = list(ids)
    if ids[0] == tokenizer.bos_token_id:
        ids.pop(0)
    if ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    if prefix not in ids:
        return "plain", tokenizer.decode(ids)
    assert ids[0] == prefix
    assert [ids.count(sign) for sign in (prefix, suffix, middle)] == [1, 1, 1]
    at, turn = ids.index(suffix), ids.index(middle)
    first, second, third = ids[1:at], ids[at + 1 : turn], ids[turn + 1 :]
    if at == 1:  # <prefix><suffix> after <middle> before between
        return "spm", tokenizer.decode(third + second)
    return "psm", tokenizer.decode(first + third + second)


def samples(batch):
    assert batch.columns["labels"] == batch.columns["input_ids"]
    return batch.columns["input_ids"]


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80), st.integers(0, 99), st.sampled_from([0.0, 0.5, 1.0]))
def test_a_cut_text_can_be_put_together_again(text, seed, spm_rate):
    cut = draw(text, 1.0, spm_rate, str(seed))
    assert cut.prefix + cut.middle + cut.suffix == text
    assert sorted(cut.ordered) == sorted([cut.prefix, cut.middle, cut.suffix])
    assert cut == draw(text, 1.0, spm_rate, str(seed))
    assert draw(text, 0.0, spm_rate, str(seed)) is None


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60), st.integers(0, 99))
def test_every_character_survives(tokenizer, text, seed):
    batch = encoder(tokenizer, seed=seed)(rows_of(text))
    if not text.strip():
        assert batch.dropped == {"empty": 1}
        return
    (ids,) = samples(batch)
    assert undone(tokenizer, ids)[1] == text
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("repeat", [1, 7, 60])
@pytest.mark.parametrize("rate", [1e-12, 0.5, 1.0])
def test_every_character_of_a_long_document_survives(tokenizer, rate, repeat):
    text = CODE * repeat
    batch = encoder(tokenizer, rate, max_length=64)(rows_of(text))
    pieces = samples(batch)
    assert all(len(piece) <= 64 for piece in pieces)
    assert "".join(undone(tokenizer, piece)[1] for piece in pieces) == text
    assert (batch.kept, batch.split, batch.tokens_lost) == (1, int(len(pieces) > 1), 0)
    ends = [piece[-1] == tokenizer.eos_token_id for piece in pieces]
    kinds = [undone(tokenizer, piece)[0] for piece in pieces]
    assert ends[-1]
    assert [end for end, kind in zip(ends[:-1], kinds, strict=False) if kind != "plain"] == [True] * (
        len(pieces) - 1 - kinds[:-1].count("plain")
    )
    assert not any(end for end, kind in zip(ends[:-1], kinds, strict=False) if kind == "plain")


def test_each_chunk_of_a_long_document_is_drawn_for_itself(tokenizer):
    pieces = samples(encoder(tokenizer, 0.5, max_length=64)(rows_of(CODE * 60)))
    kinds = [undone(tokenizer, piece)[0] for piece in pieces]
    assert {"plain", "psm", "spm"} == set(kinds)


def test_truncation_happens_before_reordering(tokenizer):
    """The middle stands last, so cutting afterwards would take what is to be learnt."""
    text = CODE * 9
    batch = encoder(tokenizer, max_length=64, overlong="truncate")(rows_of(text))
    (ids,) = samples(batch)
    kept = undone(tokenizer, ids)[1]
    assert text.startswith(kept)
    assert ids[-1] == tokenizer.eos_token_id
    lost = len(tokenizer.encode(text)) - len(tokenizer.encode(kept))
    assert (batch.truncated, batch.tokens_lost) == (1, lost)
    assert batch.tokens == len(tokenizer.encode(text)) + 1


def test_truncation_of_what_stays_plain_uses_the_whole_length(tokenizer):
    # rate > 0, so that the encoder is the one of fill-in-the-middle, but nothing is ever drawn
    batch = encoder(tokenizer, 1e-12, max_length=64, overlong="truncate")(rows_of(CODE * 9))
    assert samples(batch) == [tokenizer.encode(CODE * 9)[:64]]
    assert batch.truncated == 1


def test_overlong_rows_can_be_dropped(tokenizer):
    batch = encoder(tokenizer, max_length=64, overlong="drop")(rows_of(CODE * 9, "short"))
    assert (batch.kept, batch.dropped) == (1, {"overlong": 1})


def test_a_row_that_has_no_room_for_sentinels_stays_plain(tokenizer):
    text = CODE
    length = len(tokenizer.encode(text)) + 1
    (ids,) = samples(encoder(tokenizer, max_length=length)(rows_of(text)))
    assert undone(tokenizer, ids) == ("plain", text)


def test_rates_are_kept(tokenizer):
    kinds = [
        undone(tokenizer, ids)[0]
        for ids in samples(encoder(tokenizer, 0.6, 0.25)(rows_of(*[CODE * 3] * 1000)))
    ]
    share = {kind: kinds.count(kind) / len(kinds) for kind in ("plain", "psm", "spm")}
    assert share["plain"] == pytest.approx(0.4, abs=0.04)
    assert share["spm"] == pytest.approx(0.6 * 0.25, abs=0.03)


def test_the_same_seed_gives_the_same_samples_and_rows_differ(tokenizer):
    texts = rows_of(*[CODE] * 20)
    batch = encoder(tokenizer)(texts)
    whole = samples(batch)
    assert batch.rows == list(range(20))
    assert whole == [ids for row in texts for ids in samples(encoder(tokenizer)([row]))]
    assert len({tuple(ids) for ids in whole}) > 10
    assert whole != samples(encoder(tokenizer, seed=4)(texts))
    assert whole != samples(encoder(tokenizer)(rows_of(*[CODE] * 20, file="other.jsonl")))


@pytest.mark.parametrize("max_length", [64, 512])
def test_no_space_is_put_into_the_text(spacing, max_length):
    """Undone at the level of tokens: a part that began with a space of its own would show here."""
    text = "def add(a, b):\n    return a + b\n" * (9 if max_length == 64 else 1)
    for seed in range(20):
        pieces = samples(encoder(spacing, max_length=max_length, seed=seed)(rows_of(text)))
        kinds = {undone(spacing, piece)[0] for piece in pieces}
        assert kinds <= {"psm", "spm"} or max_length == 64
        for piece in pieces:
            assert piece[0] == spacing.bos_token_id or undone(spacing, piece)[0] == "plain"
        joined = "".join(_raw(spacing, piece) for piece in pieces)
        assert joined.removeprefix("▁") == text.replace(" ", "▁")


def test_equal_parts_of_one_character_are_told_apart(spacing):
    """A suffix that is the same object as the prefix once got the space that begins a text."""
    for spm, parts in ((False, [["▁a"], ["a"], ["d"]]), (True, [["a"], ["▁a"], ["d"]])):
        sample = _Sample([], Cut("a", "d", "a", spm), True, [])
        encoder(spacing)._encode_parts([sample])
        assert [spacing.convert_ids_to_tokens(part) for part in sample.parts] == parts


def _raw(tokenizer, ids):
    """The text with spaces as the vocabulary writes them, so that none is lost in decoding."""
    prefix, suffix, middle = find_sentinels(tokenizer)
    ids = [token for token in ids if token not in (tokenizer.bos_token_id, tokenizer.eos_token_id)]
    if prefix in ids:
        at, turn = ids.index(suffix), ids.index(middle)
        first, second, third = ids[1:at], ids[at + 1 : turn], ids[turn + 1 :]
        ids = third + second if at == 1 else first + third + second
    text, pending = "", b""
    for token in tokenizer.convert_ids_to_tokens(ids):
        if token.startswith("<0x"):
            pending += bytes([int(token[3:5], 16)])
        else:
            text, pending = text + pending.decode() + token, b""
    return text + pending.decode()


@pytest.mark.parametrize("names", SENTINELS)
def test_known_families_are_found(names):
    vocabulary = {"a": 0} | {name: number for number, name in enumerate(names, 5)}
    assert find_sentinels(SimpleNamespace(get_vocab=lambda: vocabulary)) == (5, 6, 7)


def test_no_sentinels_are_named():
    bare = SimpleNamespace(get_vocab=lambda: {"a": 0, "<fim_prefix>": 1})
    with pytest.raises(RecipeError, match="<fim_prefix> <fim_suffix> <fim_middle>; ") as caught:
        encoder(bare)
    assert caught.value.problems[0].code == "fim-tokens-missing"
    assert caught.value.problems[0].path == "data.fim"


def test_too_short_samples_are_refused(tokenizer):
    with pytest.raises(RecipeError, match="too few for fill-in-the-middle"):
        encoder(tokenizer, max_length=16)


def test_without_a_rate_text_is_text(tokenizer):
    assert not isinstance(encoder(tokenizer, 0.0), EncodeFim)
    assert samples(encoder(tokenizer, 0.0)(rows_of("a b"))) == [
        [*tokenizer.encode("a b"), tokenizer.eos_token_id]
    ]
