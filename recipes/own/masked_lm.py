"""Masked language modelling: the model fills in words that are hidden from it.

A small ModernBERT with random weights learns sentences that count. Replace `make_model` with
`AutoModelForMaskedLM.from_pretrained(...)`, `make_datasets` with your tokenised texts and `data_collator`
with `DataCollatorForLanguageModeling(processing)`.
"""

import random

import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

WORDS, LENGTH = 64, 24
PAD, MASK = 0, 1
HIDDEN = 0.2
"""Share of the words that are hidden."""


def make_model(config):
    config = ModernBertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        pad_token_id=PAD,
        bos_token_id=2,
        eos_token_id=3,
        cls_token_id=2,
        sep_token_id=3,
    )
    return ModernBertForMaskedLM(config)


def rows(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        first, step = draw.randrange(4, WORDS), draw.randrange(1, 4)
        length = draw.randrange(LENGTH // 2, LENGTH)
        yield {"input_ids": [4 + (first + step * place) % (WORDS - 4) for place in range(length)]}


def make_datasets():
    return list(rows(512, seed=1)), list(rows(64, seed=2))


def data_collator(processing):
    def collate(samples):
        longest = max(len(sample["input_ids"]) for sample in samples)
        ids = torch.full((len(samples), longest), PAD)
        for row, sample in zip(ids, samples):
            row[: len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
        hidden = (torch.rand(ids.shape) < HIDDEN) & (ids != PAD)
        hidden[:, 0] = True  # each row has a target
        labels = ids.masked_fill(~hidden, -100)
        return {
            "input_ids": ids.masked_fill(hidden, MASK),
            "attention_mask": (ids != PAD).long(),
            "labels": labels,
        }

    return collate
