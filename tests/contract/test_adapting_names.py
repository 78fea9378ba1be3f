"""The functions by whose names `on_oom: adapt` tells when memory ran out exist in the installed libraries."""

from __future__ import annotations

import pytest

from launcher.planner import adapting

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # noqa: E402
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer  # noqa: E402

from launcher.train import training  # noqa: E402
from launcher.train.model import adapters, models  # noqa: E402


def test_every_function_before_the_first_batch_exists():
    functions = [
        models.load_model,
        adapters.attach_adapter,
        training.make_trainer,
        transformers.PreTrainedModel.from_pretrained,
        transformers.Trainer._prepare_for_training,
        torch.optim.AdamW._init_group,
        DeepSpeedZeroOptimizer.initialize_optimizer_states,
        DeepSpeedZeroOptimizer_Stage3.initialize_optimizer_states,
    ]
    assert {function.__name__ for function in functions} == adapting._NO_BATCH_YET
