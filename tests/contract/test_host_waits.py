"""No line of ours has the host wait for the device in a micro-batch: what would wait is counted on a CPU.

On a GPU the host waits where it reads a value, or a shape that depends on values. Here every such operation
in a micro-batch of a real run is seen, with the frame that asked for it; those of other projects are theirs.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import cases

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

sys.path.insert(0, str(Path(__file__).parent))
from engine_runs import LORA, column
from factories import plan
from library_cases import CASES, make_ground, make_run

import launcher
from launcher.render.bundle import render
from launcher.train.data.host_counts import CountOnHost, hand_over, holds_several
from launcher.train.upstream.model_seams import documents_known

PACKED = masking_utils.find_packed_sequence_indices.__code__
"""Of transformers: what reads the positions of packed rows, which the collator has counted. Of padded rows
transformers reads the mask itself."""
OURS, TORCH = (f"{Path(module.__file__).parent}/" for module in (launcher, torch))
ATEN = torch.ops.aten
WAITS = {
    ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.masked_select.default,
    ATEN.unique_consecutive.default, ATEN._unique2.default,
}  # fmt: skip
METHODS = ("tolist", "cpu", "numpy", "item")


class Waits(TorchDispatchMode):
    """Collects file:line of ours for each operation of which the host would wait."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is ATEN.index.Tensor and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        if func in WAITS or by_mask:
            note(self._found, str(func))
        return func(*args, **(kwargs or {}))


def note(found: list[str], what: str) -> None:
    """Add the innermost line that is not torch's, if it is ours and not the data loader's."""
    frame, place, counts = sys._getframe(2), None, False
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{TORCH}utils/data/"):
            return
        if place is None and not name.startswith(TORCH):
            place, counts = f"{name}:{frame.f_lineno}: {what}", frame.f_code is PACKED
        frame = frame.f_back
    if place is not None and (place.startswith(OURS) or counts):
        found.append(place.removeprefix(OURS))


@pytest.fixture
def waits(monkeypatch) -> list[str]:
    """The lines of ours that waited, from the second step on: the first looks at what it was given."""
    from launcher.train.trainers import PlannedTrainer

    found: list[str] = []
    watching: list[bool] = []

    def watched(name: str) -> None:
        upstream = getattr(PlannedTrainer, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.state.global_step or watching:
                return upstream(self, *args, **kwargs)
            watching.append(True)
            try:
                with Waits(found):
                    return upstream(self, *args, **kwargs)
            finally:
                watching.pop()

        monkeypatch.setattr(PlannedTrainer, name, method)

    for name in ("training_step", "get_batch_samples", "count_tokens"):
        watched(name)

    def reading(name: str) -> None:
        plain = getattr(torch.Tensor, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if watching:
                note(found, name)
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, method)

    for name in METHODS:
        reading(name)
    return found


CAUSAL = CASES["causal-lm"]
CHUNKED = {"name_or_path": "model", "loss": "chunked"}
FORMS = {
    **CASES,
    "causal-lm, packed and flattened": replace(
        CAUSAL,
        recipe={
            "task": "causal-lm",
            "data": {"max_length": 64, "packing": True},
            "model": {**CHUNKED, "attn_implementation": "varlen"},
            "adapter": LORA,
        },
    ),
    "causal-lm, packed": replace(
        CAUSAL,
        recipe={
            "task": "causal-lm",
            "data": {"max_length": 64, "packing": True},
            "model": {**CHUNKED, "attn_implementation": "sdpa"},
        },
    ),
    "causal-lm, padded": replace(
        CAUSAL,
        recipe={
            "task": "causal-lm",
            "data": {"max_length": 64, "padding_free": False},
            "model": {**CHUNKED, "attn_implementation": "sdpa"},
        },
    ),
}


@pytest.mark.parametrize("name", cases(list(FORMS), "causal-lm, packed and flattened"))
def test_no_micro_batch_waits(name, tmp_path, monkeypatch, waits):
    from launcher.train.job import read_job
    from launcher.train.worker import train

    case = FORMS[name]
    pytest.importorskip(case.package.replace("-", "_"))
    make_ground(case, tmp_path)
    env = make_run(case, tmp_path, tmp_path / "run", save_strategy="no", max_steps=3, logging_steps=1)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    train(read_job(tmp_path / "run"))
    assert len(column(tmp_path / "run", "loss")) == 3
    # trl keeps the weights of the rewards on the host.
    assert [line for line in waits if not line.startswith("train/rewards/trainer.py:")] == []


@pytest.mark.parametrize(
    "lengths", [[[7]], [[4, 3]], [[1, 1, 5], [7, 0, 0]], [[6, 1], [2, 5]]], ids=lambda value: str(value)
)
def test_masks_know_the_documents_that_the_host_counted(lengths):
    """The same ones that transformers finds in the positions."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    upstream = masking_utils.find_packed_sequence_indices(positions)
    ids = torch.zeros_like(positions)
    count = CountOnHost(lambda samples: dict(samples[0]), targets=False)
    batch = count([{"position_ids": positions, "labels": ids}])
    hand_over(batch)
    with documents_known(holds_several):
        found = masking_utils.find_packed_sequence_indices(batch["position_ids"])
        unknown = masking_utils.find_packed_sequence_indices(positions.clone())
    assert (found is None) is (upstream is None) is (unknown is None)
    if found is not None:
        for one, other in zip(found, upstream, strict=True):
            assert torch.equal(one[:, None] == one, other[:, None] == other)


def test_deepspeeds_throughput_timer_does_not_wait(tmp_path):
    """It would twice in each micro-batch."""
    config = pytest.importorskip("deepspeed.utils.config")
    written = render(plan(tmp_path, "2xA100-80GB", sharding__zero_stage=2)).ds_config
    assert config.get_timers_config({}).enabled is True
    assert config.get_timers_config(written).enabled is False


@pytest.mark.parametrize(("chosen", "name"), [(True, "high"), (False, "highest")])
def test_both_interfaces_to_tf32_can_be_asked(chosen, name):
    """After transformers' own setting the earlier one raises, which compiled layers ask."""
    from transformers.utils.import_utils import enable_tf32

    from launcher.train.arguments import settle_tf32

    before = torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    try:
        enable_tf32.__wrapped__(chosen)
        settle_tf32()
        assert torch.get_float32_matmul_precision() == name
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is chosen
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if chosen else "ieee")
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision = before
