"""What of a checkpoint's files another plan can read, and what has to be converted before. Pure.

Seen with DeepSpeed 0.19.8 and transformers 5.23 on CPU (tests/contract/test_universal.py): ZeRO's own files
are read by the same number of ranks alone, and stage 3 reads none of stage 1 or 2; as a universal checkpoint
they are read by any number of ranks and every stage from 1 on. FSDP2's shards are read by any number of ranks
as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.planner.resuming import MEND, Difference, compare_settings, value_of

ADAM = ("adamw_torch", "adamw_torch_fused")
"""Optimizers with one state: fp32 weights, two moments and a step. The universal format holds no other."""

_FILES = {0: "whole", 1: "shares", 2: "shares", 3: "sharded weights"}
"""What DeepSpeed writes at a ZeRO stage."""

_KEYS = {
    "sharding.engine": "the engine",
    "sharding.zero_stage": "the ZeRO stage",
    "sharding.offload_optimizer": "where the optimizer's states lie",
}


@dataclass(frozen=True, slots=True)
class Resumption:
    """How a plan can go on from a checkpoint."""

    differences: tuple[Difference, ...]
    conversion: str = ""
    """Why its files have to be converted first, half a sentence; empty where they can be read."""

    @property
    def refused(self) -> list[Difference]:
        return [difference for difference in self.differences if difference.refused]

    @property
    def words(self) -> list[str]:
        """What changes from here on, a line each."""
        return [difference.word() for difference in self.differences if not difference.refused]


def judge(old: Mapping[str, Any], new: Mapping[str, Any], ranks: int) -> Resumption:
    """old: the checkpoint's plan.json; ranks: processes that wrote it; new: the plan that shall go on."""
    states, conversion = _states(old, new, ranks)
    both = [*compare_settings(old, new), *states, *_order(old, new, ranks)]
    differences = tuple(sorted(both, key=lambda difference: not difference.refused))
    return Resumption(differences, conversion)


def ranks_of(plan: Mapping[str, Any]) -> int:
    """Processes of a plan."""
    return int(plan["hardware"]["num_nodes"]) * int(plan["hardware"]["devices_per_node"])


def _states(old: Mapping[str, Any], new: Mapping[str, Any], ranks: int) -> tuple[list[Difference], str]:
    """What is refused or said about the engine's files, and why they must be converted."""
    if value_of(old, "trainer.save_only_model"):
        return [
            _refuse(old, new, "trainer.save_only_model", "the checkpoint holds weights alone", _WEIGHTS)
        ], ""
    found = _optimizer(old, new)
    if value_of(old, "sharding.engine") != value_of(new, "sharding.engine"):
        reason = f"neither reads the files of the other; {_ways_out(old)}"
        return [*found, _refuse(old, new, "sharding.engine", reason)], ""
    engine = value_of(new, "sharding.engine")
    if engine == "deepspeed":
        more, conversion = _zero(old, new, ranks)
        return [*found, *more], conversion
    if ranks_of(new) == ranks:
        return found, ""
    reason = (
        "the random states of dropout start afresh on every rank"
        if 1 in (ranks, ranks_of(new))
        else "random states of dropout start afresh on ranks that were not there"
    )
    return [*found, _ranks(new, ranks, False, f"{reason}; the global batch and its rows stay")], ""


def _zero(old: Mapping[str, Any], new: Mapping[str, Any], ranks: int) -> tuple[list[Difference], str]:
    for setting in ("sharding.offload_optimizer", "sharding.offload_param"):
        if "nvme" in (value_of(old, setting), value_of(new, setting)):
            return [_refuse(old, new, setting, _NVME, _WEIGHTS)], ""
    before, after = value_of(old, "sharding.offload_optimizer"), value_of(new, "sharding.offload_optimizer")
    if before != after:
        reason = (
            "DeepSpeedCPUAdam, which updates on the host, and torch's AdamW cannot read each other's states "
            f"(KeyError: 'bias_correction'); {_ways_out(old)}"
        )
        return [_refuse(old, new, "sharding.offload_optimizer", reason)], ""
    stages = value_of(old, "sharding.zero_stage"), value_of(new, "sharding.zero_stage")
    why = []
    if ranks_of(new) != ranks:
        why.append(f"{_count(ranks)} wrote it, {_count(ranks_of(new))} shall read it")
    if _FILES[stages[0]] != _FILES[stages[1]]:
        why.append(f"ZeRO-{stages[0]} wrote it, ZeRO-{stages[1]} shall read it")
    if not why:
        return [], ""
    if hindrance := _unconvertible(old, new, stages):
        reason = f"the files cannot be converted: {hindrance}; {_ways_out(old)}"
        changed_ranks = ranks_of(new) != ranks
        one = _ranks(new, ranks, True, reason) if changed_ranks else None
        return [one or _refuse(old, new, "sharding.zero_stage", reason)], ""
    words = []
    if ranks_of(new) != ranks:
        words.append(_ranks(new, ranks, False, "random states of dropout start afresh on every rank"))
    return words, "; ".join(why)


def _unconvertible(old: Mapping[str, Any], new: Mapping[str, Any], stages: tuple[int, int]) -> str:
    """Why a universal checkpoint cannot be made, or not be read; empty where it can."""
    optim = value_of(old, "trainer.optim")
    if value_of(old, "sharding.tp_size") * value_of(old, "sharding.sp_size") > 1:
        return "its ranks share a copy, and converting such files was not tried"
    if 0 in stages:
        return "ZeRO-0 shares nothing out, and DeepSpeed converts no files of it"
    if optim not in ADAM:
        return f"DeepSpeed's universal format holds the states of Adam, not those of {optim}"
    if stages[0] != stages[1] and value_of(old, "model.config") and value_of(old, "adapter.type"):
        return "the frozen weights are drawn at random, and each stage draws others"
    return ""


def _optimizer(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    before, after = value_of(old, "trainer.optim"), value_of(new, "trainer.optim")
    if before == after:
        return []
    if before in ADAM and after in ADAM:
        reason = "the same states, updated by another kernel: the numbers differ in the last digits"
        return [Difference("trainer.optim", before, after, False, reason)]
    return [_refuse(old, new, "trainer.optim", "one optimizer cannot go on with the states of another")]


def _order(old: Mapping[str, Any], new: Mapping[str, Any], ranks: int) -> list[Difference]:
    """What else would let rows be read twice, or not at all."""
    found = []
    if value_of(new, "data.streaming"):
        workers = "trainer.dataloader_num_workers"
        if (value_of(old, workers) or 0) != (value_of(new, workers) or 0):
            found.append(_refuse(old, new, workers, _STREAM))
        if ranks_of(new) != ranks:
            found.append(_ranks(new, ranks, True, _STREAM))
    if _by_length(new) and _on_a_rank(old) != _on_a_rank(new):
        micro = "trainer.per_device_train_batch_size"
        reason = "rows are grouped by length within the batches of a rank: their order would be another one"
        found.append(_refuse(old, new, micro, reason))
    return found


def _by_length(plan: Mapping[str, Any]) -> bool:
    strategy = value_of(plan, "trainer.train_sampling_strategy")
    return bool(value_of(plan, "trainer.group_by_length")) or strategy == "group_by_length"


def _on_a_rank(plan: Mapping[str, Any]) -> int:
    return int(plan["batch"]["micro"]) * int(plan["batch"]["accumulation"])


_STREAM = (
    "each rank and each of its dataloader workers streams a share of its own: with others, some rows come "
    "twice and some never"
)
_NVME = "DeepSpeed does not read states from NVMe again: it would go on with fresh moments, without a word"
_WEIGHTS = "start a new run from these weights: adapter.path, or model.name_or_path, names the folder"


def _refuse(
    old: Mapping[str, Any], new: Mapping[str, Any], setting: str, reason: str, mend: str = MEND
) -> Difference:
    by = str(new["settings"].get(setting, {}).get("by", ""))
    return Difference(setting, value_of(old, setting), value_of(new, setting), True, reason, by, mend)


def _ranks(new: Mapping[str, Any], ranks: int, refused: bool, reason: str) -> Difference:
    mend = f"run it on {_count(ranks)} (--on), or start a new run in another --output-dir"
    return Difference("number of ranks", ranks, ranks_of(new), refused, reason, mend=mend)


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _ways_out(old: Mapping[str, Any]) -> str:
    """The two ways: back to what it was, or on from the weights alone."""
    said = ", ".join(f"{key}: {value_of(old, key)}" for key in _KEYS if value_of(old, key) is not None)
    weights = "adapter.path" if value_of(old, "adapter.type") else "model.name_or_path"
    return f"go on with {said}, or begin a new run from the checkpoint's weights with {weights}"
