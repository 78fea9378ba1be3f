"""Decide whether a machine can run a recipe: pure checks over gathered facts."""

from __future__ import annotations

from launcher.knowledge.doctor.build_checks import BUILD_CHECKS
from launcher.knowledge.doctor.check import Check, CheckResult
from launcher.knowledge.doctor.gpu_checks import GPU_CHECKS
from launcher.knowledge.doctor.launch_checks import LAUNCH_CHECKS
from launcher.knowledge.doctor.software_checks import SOFTWARE_CHECKS
from launcher.knowledge.doctor.storage_checks import STORAGE_CHECKS
from launcher.machine.machine_facts import Machine
from launcher.plan.plan import Plan

CHECKS: tuple[Check, ...] = (
    *GPU_CHECKS, *BUILD_CHECKS, *LAUNCH_CHECKS, *STORAGE_CHECKS, *SOFTWARE_CHECKS
)  # fmt: skip
"""All checks, in the order of the output."""
PLAN_CHECK_ID, DATA_CHECK_ID = "plan", "data"
"""Ids of the results of planning a recipe, which come first."""


def examine(machine: Machine, plan: Plan | None) -> list[CheckResult]:
    """Run all checks."""
    return [CheckResult(check.id, check.title, check.verdict(machine, plan)) for check in CHECKS]
