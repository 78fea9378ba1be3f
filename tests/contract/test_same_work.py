"""At a plain Trainer's settings a step does that Trainer's operations, and hardly one more.

Seconds on a shared machine differ by more than what this project could add to a step; the number of
operations does not.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from test_same_learning import HALF, by_hand, ground, ours  # noqa: F401 - `ground` is a fixture

STEP = 5
"""The memory of a CPU run is measured in the steps before."""
HEAVY = {
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "matmul", "mul", "add", "add_", "cat", "embedding")
}
"""What a step's time is made of. Beside them the two count tokens and look for nan each in its way."""
TOKENS_SEEN = ("aten::add", "[[], [], []]")
"""The step's second micro-batch adds its count of tokens to the first one's, which stays on the device: as a
number of the host it would be waited for in each micro-batch. The plain Trainer counts no tokens."""
FP32 = {"adapter": HALF["adapter"]}


@pytest.fixture
def counted(monkeypatch):
    """How often each operation ran, by name and shapes, from one step's beginning to the next one's."""
    from transformers.trainer_callback import CallbackHandler

    found: Counter[tuple[str, str]] = Counter()
    begin, running = CallbackHandler.on_step_begin, None

    def on_step_begin(self, args, state, control):
        nonlocal running
        if state.global_step == STEP:
            running = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            running.start()
        if state.global_step == STEP + 1:
            running.stop()
            found.clear()
            rows = running.key_averages(group_by_input_shape=True)
            found.update({(row.key, str(row.input_shapes)): row.count for row in rows if "aten::" in row.key})
        return begin(self, args, state, control)

    monkeypatch.setattr(CallbackHandler, "on_step_begin", on_step_begin)
    return found


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.slow
def test_an_equal_step_has_equal_operations(ground, tmp_path, counted, half):  # noqa: F811
    asked = HALF if half else FP32
    _, _, samples = ours(ground, tmp_path / "ours", **asked, **{"trainer.max_steps": STEP + 2})
    mine = Counter(counted)
    counted.clear()
    dtype = "bfloat16" if half else "float32"
    by_hand(ground, tmp_path / "by-hand", samples, lora=True, bf16=half, dtype=dtype)
    for one in (mine, counted):
        assert sum(count for (name, _), count in one.items() if name == "aten::mm") > 50, "the step was seen"
    more, fewer = mine - counted, counted - mine
    assert more.pop(TOKENS_SEEN, 0) == 1
    assert not [operation for operation in (*more, *fewer) if operation[0] in HEAVY]
    assert more.total() + fewer.total() < mine.total() / 100, (more, fewer)
