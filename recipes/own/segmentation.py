"""Semantic segmentation: a class for each pixel of an image.

A small Segformer with random weights learns to outline squares. Replace `make_model` with
`SegformerForSemanticSegmentation.from_pretrained(...)`, `make_datasets` with your images and masks, and add
`processing` with `SegformerImageProcessor.from_pretrained(...)`.
"""

import numpy as np
import torch
from transformers import SegformerConfig, SegformerForSemanticSegmentation

SIZE, CLASSES = 32, 3
"""Pixels of a side; the background and two kinds of squares: bright and dark."""


def make_model(config):
    config = SegformerConfig(
        num_labels=CLASSES,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[4, 2],
        hidden_sizes=[16, 32],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        drop_path_rate=0.0,
    )
    return SegformerForSemanticSegmentation(config)


class Squares(torch.utils.data.Dataset):
    """Images [3, SIZE, SIZE] and masks [SIZE, SIZE], drawn as they are asked for."""

    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = np.random.default_rng([self.seed, index])
        image = draw.normal(0, 0.1, (3, SIZE, SIZE)).astype(np.float32)
        mask = np.zeros((SIZE, SIZE), dtype=np.int64)
        for kind, value in ((1, 1.0), (2, -1.0)):
            top, left = draw.integers(0, SIZE - 12, 2)
            image[:, top : top + 10, left : left + 10] += value
            mask[top : top + 10, left : left + 10] = kind
        return {"pixel_values": image, "labels": mask}


def make_datasets():
    return Squares(256, seed=1), Squares(32, seed=2)


def data_collator(processing):
    def collate(samples):
        return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}

    return collate


def compute_metrics(prediction):
    logits = torch.nn.functional.interpolate(torch.from_numpy(prediction.predictions), (SIZE, SIZE))
    return {"pixel_accuracy": float(np.mean(logits.argmax(1).numpy() == prediction.label_ids))}
