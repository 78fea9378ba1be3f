"""Layers that compute position after position: short tapes tell of long rows, or the whole step is traced."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_trace_replay import Writer
from traces import LORA_16, peak, request

from launcher.train.trace import positions
from launcher.train.trace.extend import segment_rows
from launcher.train.trace.positions import LENGTHS, NotAlike, refuse_bounds, rows_at
from launcher.train.trace.run import trace
from launcher.train.trace.tape import Recorder
from launcher.train.upstream.torch_seams import fake_tensors

LENGTH, CORNER = 2100, ((2,), 1)


def scanned(length, state=lambda length: 40, turns=lambda length: length):
    """A layer that keeps a state of each position, and goes back with gradients of the whole row."""
    to = Writer()
    to.make(1000, "build", "weights")
    to.mark("forward/stack0-first0")
    mask = to.make(2 * length * length, "forward", "activations")
    states = [to.make(24, "forward")]
    for _ in range(turns(length)):
        for _ in range(4):
            to.free(to.make(state(length), "forward"))
        states.append(to.make(24, "forward", "activations"))
    row = to.make(24 * length, "forward", "activations")
    to.mark("backward/stack0-first0")
    gradient = to.make(24 * length, "backward")
    while states:
        other = to.make(24 * length, "backward")
        to.free(states.pop())
        to.free(gradient)
        gradient = other
    for piece in (row, mask, gradient):
        to.free(piece)
    return to.tape


def test_short_rows_tell_of_a_long_one():
    parts, tapes = rows_at(lambda tokens, _corner: scanned(tokens), [CORNER], LENGTH)
    whole = segment_rows(scanned(LENGTH))
    assert parts[CORNER].keys() == whole.keys()
    for key, rows in whole.items():
        found = parts[CORNER][key]
        assert len(found) < 50 < len(rows), key
        assert found.sum(axis=1).max() == rows.sum(axis=1).max(), key
        assert np.array_equal(found.max(axis=0), rows.max(axis=0)), key
    assert tapes[CORNER].events == scanned(LENGTHS[0]).events


@pytest.mark.parametrize(
    "layer",
    [
        {"state": lambda length: length**3},
        {"state": lambda length: 10 * (length // 8)},
        {"turns": lambda _length: 12},
        {"turns": lambda length: length + (length == LENGTHS[1])},
    ],
    ids=["cubes", "steps", "always-as-many", "one-more"],
)
def test_short_rows_that_do_not_tell_of_longer_ones_are_refused(layer):
    with pytest.raises(NotAlike):
        rows_at(lambda tokens, _corner: scanned(tokens, **layer), [CORNER], LENGTH)


def test_casts_that_autocast_kept_are_freed_in_the_order_of_their_making():
    """By their addresses, short tapes of one layer would differ, and the whole step be traced instead."""
    row = torch.empty(1, 4)
    with fake_tensors():
        weights = [torch.nn.Parameter(torch.empty(4, 4)) for _ in range(40)]
        with Recorder() as recorder:
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
                for weight in weights:
                    row @ weight
                start = len(recorder.tape.events)
            freed = [~event for event in recorder.tape.events[start:]]
    assert len(freed) >= len(weights)
    assert freed == sorted(freed)


class Config(dict):
    to_dict = dict.copy


def test_windows_and_chunks_within_the_row_are_refused():
    refuse_bounds(Config(hidden_size=64, attention_window_size=LENGTH, chunk_size=LENGTHS[0]), LENGTH)
    for name in ("attention_window_size", "chunk_size", "block_size"):
        with pytest.raises(NotAlike, match=name):
            refuse_bounds(Config({name: 64}), LENGTH)


SIZES = {"hidden_size": 64, "vocab_size": 500, "pad_token_id": 0}
SEQUENTIAL = {
    "mamba": {"model_type": "mamba", **SIZES, "num_hidden_layers": 5, "state_size": 8, "time_step_rank": 8},
    "zamba": {
        "model_type": "zamba", **SIZES, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1,
        "n_mamba_heads": 2, "mamba_d_state": 8, "mamba_dt_rank": 8,
    },
}  # fmt: skip
HOW = {
    "mamba": ({"attention": "eager"}, {}),
    "zamba": ({"attention": "sdpa", "adapter": True}, LORA_16),
}


@pytest.mark.slow
@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "cuda"])
@pytest.mark.parametrize("name", SEQUENTIAL)
def test_the_extended_step_is_the_whole_one(name, on_cpu, monkeypatch):
    memory, settings = HOW[name]
    asked = request(
        SEQUENTIAL[name], {"sequence_length": 32, "padded": True, **memory}, settings, on_cpu=on_cpu
    )
    whole = trace(asked)
    monkeypatch.setattr(positions, "largest_segment", lambda _length: 100)
    short = trace(asked)
    assert whole["replays"] is not None, "the whole step was traced"
    assert short["replays"] is None, "short rows were"
    assert short["states"] == whole["states"]
    for batch in (1, 2, 16):
        assert peak(short, batch) == pytest.approx(peak(whole, batch), abs=64)
