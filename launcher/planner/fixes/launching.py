"""Fixes for what the processes find around them: links between devices, and checkpoints they must load."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.engines.ddp import DDP
from launcher.planner.fixes.fix import Fix, Situation

_NO_LINKS = ("launch.env.NCCL_P2P_DISABLE", "launch.env.NCCL_IB_DISABLE")


def _rtx40_links(s: Situation) -> Mapping[str, object]:
    affected = re.search(r"RTX ?40", s.hardware.device) is not None and s.processes > 1
    return dict.fromkeys(_NO_LINKS, "1") if affected else {}


def _save_only_best(s: Situation) -> Mapping[str, object]:
    clash = s.trainer.save_only_model and s.trainer.load_best_model_at_end
    if not clash or s.engine is DDP:
        return {}
    return {"trainer.save_only_model": False}


LAUNCHING_FIXES = (
    Fix(
        id="rtx40-p2p",
        title="no peer-to-peer transfers between RTX 40 cards",
        condition="several RTX 40 devices",
        action="set",
        reason="Drivers before 550.40.07 claim P2P for these cards and do not have it; accelerate then "
        "refuses to start under any launcher but its own. Later drivers do not offer it either.",
        source="accelerate/utils/environment.py check_cuda_p2p_ib_support",
        versions="accelerate>=0.24",
        changes=_rtx40_links,
        early=True,
        yields=True,
    ),
    Fix(
        id="save-only-model-best",
        title="the best checkpoint needs the engine's states",
        condition="trainer.save_only_model with load_best_model_at_end under engine deepspeed or fsdp",
        action="refuse",
        reason="load_best_model_at_end loads through DeepSpeed or FSDP, which cannot read a checkpoint "
        "without states; the Trainer stops when it is built, after the weights are loaded.",
        source="transformers/trainer.py _validate_args",
        versions="*",
        changes=_save_only_best,
        hint="drop trainer.save_only_model, or trainer.load_best_model_at_end",
        early=True,
    ),
)
