"""What each task reads, learns and measures, by its name."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.tasks import TASKS

TASK_FORMATS: Mapping[str, tuple[str, ...]] = {task.name: task.formats for task in TASKS}
"""Task -> formats that it can train on."""

METRICS: Mapping[str, tuple[str, ...]] = {task.name: task.metrics for task in TASKS}
"""Task -> names that `data.metrics` may hold; the evaluation loss is always reported."""
