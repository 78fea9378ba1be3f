"""Whether a machine can run what is asked of it: pure verdicts over gathered facts."""

from __future__ import annotations

from launcher.doctor.check import Check, Finding, Verdict
from launcher.doctor.checks_build import BUILD_CHECKS
from launcher.doctor.checks_gpu import GPU_CHECKS
from launcher.doctor.checks_launch import LAUNCH_CHECKS
from launcher.doctor.checks_software import SOFTWARE_CHECKS
from launcher.doctor.checks_storage import STORAGE_CHECKS
from launcher.facts.machine import Machine
from launcher.plan.plan import Plan

CHECKS: tuple[Check, ...] = (
    *GPU_CHECKS, *BUILD_CHECKS, *LAUNCH_CHECKS, *STORAGE_CHECKS, *SOFTWARE_CHECKS
)  # fmt: skip
"""Every check, in the order in which they are shown."""
PLAN_CHECK_ID, DATA_CHECK_ID = "plan", "data"
"""What planning a recipe says comes before them."""


def examine(machine: Machine, plan: Plan | None) -> list[Finding]:
    """Every check's answer."""
    return [Finding(check.id, check.title, check.verdict(machine, plan)) for check in CHECKS]


__all__ = ["CHECKS", "DATA_CHECK_ID", "PLAN_CHECK_ID", "Check", "Finding", "Verdict", "examine"]
