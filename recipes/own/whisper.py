"""Speech recognition with an encoder and a decoder: sound becomes words.

A small Whisper with random weights learns tones: each word has a pitch. Replace `make_model` with
`WhisperForConditionalGeneration.from_pretrained(...)`, `make_datasets` with your recordings, and add
`processing` with `WhisperProcessor.from_pretrained(...)`.
"""

import math
import random

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

PAD, START, END, FIRST = 0, 1, 2, 3
WORDS, BANDS, FRAMES = 12, 16, 64
"""Words of the vocabulary; bands of the spectrum, and its frames: two become a position of the encoder."""
SPOKEN = 4
"""Words of a recording."""


def make_model(config):
    config = WhisperConfig(
        vocab_size=FIRST + WORDS,
        num_mel_bins=BANDS,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=FRAMES // 2,
        max_target_positions=16,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config)


def spectrum(words, draw):
    """Frames of a recording: each word is a band, which swells and fades."""
    frames = [[draw.gauss(0, 0.1) for _ in range(FRAMES)] for _ in range(BANDS)]
    length = FRAMES // SPOKEN
    for place, word in enumerate(words):
        for at in range(length):
            frames[word][place * length + at] += math.sin(math.pi * (at + 0.5) / length)
    return frames


def rows(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        words = [draw.randrange(WORDS) for _ in range(SPOKEN)]
        yield {"input_features": spectrum(words, draw), "labels": [*(FIRST + word for word in words), END]}


def make_datasets():
    return list(rows(256, seed=1)), list(rows(32, seed=2))


def data_collator(processing):
    def collate(samples):
        return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}

    return collate
