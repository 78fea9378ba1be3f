"""Speech recognition with CTC: letters are aligned with a wave.

A small Wav2Vec2 with random weights learns tones: each letter has a frequency. Replace `make_model` with
`Wav2Vec2ForCTC.from_pretrained(...)`, `make_datasets` with your recordings, and add `processing` with
`Wav2Vec2Processor.from_pretrained(...)`.
"""

import math
import random

import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

BLANK, LETTERS = 0, 6
SPOKEN, SAMPLES = 4, 160
"""Letters of a recording; values of the wave of one letter."""


def make_model(config):
    config = Wav2Vec2Config(
        vocab_size=1 + LETTERS,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        conv_dim=(32, 32),
        conv_kernel=(10, 8),
        conv_stride=(5, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        pad_token_id=BLANK,
        ctc_loss_reduction="mean",
        apply_spec_augment=False,
        layerdrop=0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
    )
    return Wav2Vec2ForCTC(config)


def rows(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        letters = [draw.randrange(LETTERS) for _ in range(draw.randrange(2, SPOKEN + 1))]
        wave = [
            math.sin(2 * math.pi * (letter + 1) * at / 40) + draw.gauss(0, 0.1)
            for letter in letters
            for at in range(SAMPLES)
        ]
        yield {"input_values": wave, "labels": [1 + letter for letter in letters]}


def make_datasets():
    return list(rows(256, seed=1)), list(rows(32, seed=2))


def padded(rows, value):
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def data_collator(processing):
    def collate(samples):
        waves = [sample["input_values"] for sample in samples]
        return {
            "input_values": padded(waves, 0.0),
            "attention_mask": padded([[1] * len(wave) for wave in waves], 0),
            "labels": padded([sample["labels"] for sample in samples], -100),
        }

    return collate
