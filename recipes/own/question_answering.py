"""Extractive question answering: which tokens of a text answer a question.

A small ModernBERT with random weights learns to find a marker and the word after it. Replace `make_model`
with `AutoModelForQuestionAnswering.from_pretrained(...)` and `make_datasets` with your rows.
"""

import random

import numpy as np
import torch
from transformers import ModernBertConfig, ModernBertForQuestionAnswering

WORDS, LENGTH = 64, 32
QUESTION, PAD = 1, 0


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
    return ModernBertForQuestionAnswering(config)


def rows(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        words = [draw.randrange(4, WORDS) for _ in range(draw.randrange(12, LENGTH - 1))]
        place = draw.randrange(len(words) - 1)
        words[place] = QUESTION
        yield {"input_ids": words, "start_positions": place, "end_positions": place + 1}


def make_datasets():
    return list(rows(256, seed=1)), list(rows(48, seed=2))


def data_collator(processing):
    def collate(samples):
        longest = max(len(sample["input_ids"]) for sample in samples)
        ids = torch.full((len(samples), longest), PAD)
        for row, sample in zip(ids, samples):
            row[: len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
        places = {
            name: torch.tensor([sample[name] for sample in samples])
            for name in ("start_positions", "end_positions")
        }
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), **places}

    return collate


def compute_metrics(prediction):
    starts, ends = (np.argmax(logits, axis=-1) for logits in prediction.predictions[:2])
    right_starts, right_ends = prediction.label_ids
    return {"exact_match": float(np.mean((starts == right_starts) & (ends == right_ends)))}
