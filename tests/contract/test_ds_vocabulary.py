"""lint's table is that of the installed DeepSpeed, and what it calls an error is one to the real readers."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
from lint_cases import BROKEN

from launcher.lint.vocabulary import TABLE, version
from launcher.lint.without_effect import BELOW_STAGE3_ONLY, READ_NOWHERE
from launcher.plan.profile import STAGE3_ONLY

# Codes that DeepSpeed's own reader of a config refuses as well.
REFUSED = ("ds-removed-key", "ds-fp16-and-bf16", "ds-no-batch-size", "ds-float-bucket", "ds-wrong-value")
# Read without a word.
NOT_AT_PARSE = ("beyond every number",)


@pytest.fixture(autouse=True)
def _tested_version():
    pytest.importorskip("deepspeed")
    if metadata.version("deepspeed") != version():
        pytest.skip("the tested version of deepspeed is not installed")


def test_regenerating_gives_the_shipped_table(tmp_path):
    file = tmp_path / "deepspeed.json"
    subprocess.run(
        [sys.executable, "-m", "launcher.train.ds_vocabulary", str(file)],
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert json.loads(file.read_text("utf-8")) == json.loads(TABLE.read_text("utf-8"))


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


@pytest.mark.parametrize("name", ["zero_optimisation", "gradient_cliping", "fp_16", "stage 3 key at stage 2"])
def test_deepspeed_says_nothing_where_lint_says_that_it_says_nothing(name):
    config = parsed(BROKEN[name][0])
    assert config.gradient_clipping == 1.0
    assert config.zero_config.stage < 3
