"""lint's table is that of the installed DeepSpeed, and what it calls an error is one to the real readers."""

from __future__ import annotations

import inspect
import json
from importlib import metadata

import pytest
from lint_cases import BROKEN

from launcher.engines.deepspeed_config import STAGE3_ONLY
from launcher.knowledge.lint.consistency import BELOW_STAGE3_ONLY, READ_NOWHERE
from launcher.knowledge.lint.keys import deepspeed_version

# Codes that DeepSpeed's own reader of a config refuses as well.
REFUSED = ("ds-removed-key", "ds-fp16-and-bf16", "ds-no-batch-size", "ds-float-bucket", "ds-wrong-value")
# Read without a word, and refused or replaced when the engine is built, or by its first step.
NOT_AT_PARSE = (
    "beyond every number",
    "16-bit weights without offload",
    "clipping below 0",
    "progress every 0 steps",
    "clipping without the norm",
    "autocast of quantised weights",
    "a warm-up of another form",
    "a warm-up that is longer than the run",
    *(name for name, case in BROKEN.items() if ".params." in case[4]),  # test_ds_parameters.py
)


@pytest.fixture(autouse=True)
def _tested_version():
    pytest.importorskip("deepspeed")
    if metadata.version("deepspeed") != deepspeed_version():
        pytest.skip("the tested version of deepspeed is not installed")


def test_what_lint_calls_without_effect_is_not_handed_to_the_optimizer():
    from deepspeed.runtime.engine import DeepSpeedEngine

    for key in READ_NOWHERE:  # the engine has a method for it, which nothing calls
        assert inspect.getsource(DeepSpeedEngine).count(f"zero_{key}()") == 0
    source = inspect.getsource(DeepSpeedEngine._configure_zero_optimizer)
    below, found, stage_3 = source.partition("elif zero_stage == ZeroStageEnum.weights:")
    assert found
    for key in BELOW_STAGE3_ONLY:
        assert f"{key}=" in below, key
        assert f"{key}=" not in stage_3, key
    for key in READ_NOWHERE:
        assert f"{key}=" not in source, key
    for key in STAGE3_ONLY:
        assert f"{key}=" not in below, key


def parsed(text):
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig(json.loads(text))


@pytest.mark.parametrize(
    "name", [name for name, case in BROKEN.items() if case[1] in REFUSED and name not in NOT_AT_PARSE]
)
def test_deepspeed_refuses_what_lint_says_it_refuses(name):
    from deepspeed.runtime.config import DeepSpeedConfigError

    with pytest.raises((ValueError, AssertionError, DeepSpeedConfigError)):
        parsed(BROKEN[name][0])


def test_another_form_of_the_warm_up_is_log():
    import torch
    from deepspeed.runtime.lr_schedules import WarmupLR

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    forms = {form: WarmupLR(optimizer, warmup_type=form).warmup_type for form in ("cosine", "linear", "log")}
    assert forms == {"cosine": "log", "linear": "linear", "log": "log"}


def test_what_the_engine_asserts_of_its_config_is_still_there():
    """Building it needs a GPU: what lint says stands in these lines."""
    from deepspeed.runtime import base_optimizer, lr_schedules, torch_autocast
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    assert "not engine.zero_quantized_weights()" in inspect.getsource(torch_autocast)
    assert "bf16_offload_validator()" in inspect.getsource(base_optimizer)
    assert "total_num_steps < self.warmup_num_steps" in inspect.getsource(lr_schedules)
    assert "not compute_grad_norm and clip_grad > 0.0" in inspect.getsource(stage_1_and_2)
    for module in (stage3, stage_1_and_2):
        source = inspect.getsource(module)
        assert "assert self.postscale_gradients" in source
        assert "assert self.gradient_predivide_factor == 1.0" in source


@pytest.mark.parametrize("name", ["zero_optimisation", "gradient_cliping", "fp_16", "stage 3 key at stage 2"])
def test_deepspeed_says_nothing_where_lint_says_that_it_says_nothing(name):
    config = parsed(BROKEN[name][0])
    assert config.gradient_clipping == 1.0
    assert config.zero_config.stage < 3
