"""What plans for a CPU set makes glibc keep what a step frees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launcher.inputs.planning_facts import gather
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe

STEPS = """
import resource
import torch

torch.set_num_threads(1)
for step in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.zeros(2**18 + number) for number in range(60)]  # 1 MiB each
    while kept:
        kept.pop(0)  # the end of the heap last, which is then given back whole
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 60 * 2**20 // 4096
"""Of a step."""


def faults(env: dict[str, str]) -> int:
    """Page faults of the last step."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", STEPS], env=env, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="the variables are glibc's")
def test_a_step_has_no_page_faults_with_the_variables_of_a_plan():
    loaded = load_recipe(Path(__file__).parents[2] / "recipes" / "smoke.yaml")
    env = make_plan(*gather(loaded, "cpu", allow_network=False)).launch.env
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    assert faults({**own, **env}) < PAGES // 20
    assert faults(own) > PAGES // 2, "without them each step pays for its pages again"
