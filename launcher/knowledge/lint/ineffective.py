"""Find keys that the ZeRO stage or the offload device of the same file ignores or refuses.

Checked against DeepSpeed 0.19.8: `_configure_zero_optimizer` of runtime/engine.py hands a key to the
optimizer of stages 1 and 2, or to that of stage 3; runtime/zero/config.py refuses what a stage cannot do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.engines.deepspeed_config import STAGE3_ONLY
from launcher.knowledge.lint.consistency import ZERO, offloads, stage, value
from launcher.knowledge.lint.document import Document, Finding, Member
from launcher.knowledge.lint.keys import deepspeed_version

# Handed to no optimizer, whatever the stage. At stages 1 and 2, true is what happens anyway.
READ_NOWHERE = frozenset({"allgather_partitions"})
# Not handed to the optimizer of stage 3.
BELOW_STAGE3_ONLY = frozenset(
    {
        "allgather_bucket_size",
        "ignore_unused_parameters",
        "use_multi_rank_bucket_allreduce",
        "round_robin_gradients",
        "parameter_alignment",
        "elastic_checkpoint",
    }
)
# Off unless they are set, so that false says nothing.
_OFF_BY_DEFAULT = frozenset({"round_robin_gradients", "parameter_alignment", "elastic_checkpoint"})
# Stage 0 has no ZeRO optimizer, to which alone these are handed.
_ANY_STAGE_BUT_0 = frozenset({"contiguous_gradients", "reduce_scatter", "overlap_comm", "reduce_bucket_size"})
# Read by something else that the file may have.
_READ_BY_BLOCK = {"allgather_bucket_size": "pipeline", "reduce_bucket_size": "compile"}
_NVME_ONLY = {
    "offload_optimizer": ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write"),
    "offload_param": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}
Reason = tuple[str, str]
"""Why a key has no effect, and what to do."""


def check_effects(document: Document) -> Iterator[Finding]:
    """Findings of `zero_optimization`, its offload sections, and `activation_checkpointing`."""
    yield from _contiguous_checkpoints(document)
    section = document.member(ZERO)
    if section is None:
        return
    # Without a stage it is 0 to DeepSpeed, and open in a base profile: then nothing is said.
    level = None if document.member(f"{ZERO}.stage") is None else stage(document)
    for member in section.node.members or ():
        if member.key in _NVME_ONLY:
            yield from _offload(document, member, level)
            continue
        reason = _reason(document, member.key, member.node.plain(), level)
        if reason is not None:
            yield _nothing(
                document, member, f"{ZERO}.{member.key}", f"at stage {level}: {reason[0]}", reason[1]
            )
        yield from _refused(document, member, level)


def _nothing(document: Document, member: Member, where: str, why: str, hint: str) -> Finding:
    return document.found(
        member.start,
        where,
        "ds-no-effect",
        f"`{member.key}` has no effect {why}",
        hint,
        severity="warning",
        edits=document.removal(where),
    )


def _reason(document: Document, key: str, given: Any, level: int | None) -> Reason | None:
    name = key.removeprefix("stage3_")
    if given is None or level is None:
        return None
    if name in STAGE3_ONLY:
        ignored = level < 3 and given is not False and not _gathers_parts(document, key)
        return ("only stage 3 reads it", "set stage 3, or remove it") if ignored else None
    if name in READ_NOWHERE:
        as_happens = given == "auto" or (given is True and level in (1, 2))
        return None if as_happens else (f"DeepSpeed {deepspeed_version()} never reads it", "remove it")
    if given == "auto" or (given is False and (level == 0 or name in _OFF_BY_DEFAULT)):
        return None
    if level == 0 and name in BELOW_STAGE3_ONLY | _ANY_STAGE_BUT_0:
        by_block = name in _READ_BY_BLOCK and document.member(_READ_BY_BLOCK[name]) is not None
        return None if by_block else ("nothing is sharded", "set another stage, or remove it")
    if level == 3 and name in BELOW_STAGE3_ONLY:
        return "only stages 1 and 2 read it", "remove it"
    if name == "ignore_unused_parameters" and given is False and not offloads(document):
        return "it is read only with offload_optimizer", "remove it"
    return None


def _gathers_parts(document: Document, key: str) -> bool:
    """Whether a key counts at other stages, too: accelerate asks for it to put AutoTP's parts together."""
    size = value(document, "tensor_parallel.autotp_size")
    return "weights_on_model_save" in key and isinstance(size, int) and size > 1


def _refused(document: Document, member: Member, level: int | None) -> Iterator[Finding]:
    """Values that DeepSpeed refuses at this stage."""
    given = member.node.value
    allowed = {"compute_grad_norm": (False, (1, 2)), "legacy_stage1": (True, (0,))}.get(member.key)
    if allowed is not None and level is not None and given is allowed[0] and level not in allowed[1]:
        where = f"{ZERO}.{member.key}"
        said = f"`{member.key}` = {str(given).lower()} is refused at stage {level}"
        yield document.found(
            member.start, where, "ds-stage-refuses", said, "remove it", edits=document.removal(where)
        )


def _offload(document: Document, section: Member, level: int | None) -> Iterator[Finding]:
    name = section.key
    where = f"{ZERO}.{name}"
    given = section.node.plain()
    device = given.get("device", "none") if isinstance(given, dict) else "none"
    if device not in ("cpu", "nvme"):
        return
    if name == "offload_param" and level in (0, 1, 2):
        yield document.found(
            section.start,
            where,
            "ds-stage2-offload-param",
            f"offload_param has no effect at stage {level}: only stage 3 shards the weights",
            "set stage 3, or remove it",
            edits=document.removal(where),
        )
        return
    if level == 0:
        yield document.found(
            section.start,
            where,
            "ds-stage-refuses",
            "offload_optimizer at stage 0: the CPU optimizer is created, and its first step refuses "
            "weights on a GPU",
            "set a stage from 1 to 3, or remove it",
            edits=document.removal(where),
        )
        return
    if device == "nvme":
        yield from _nvme(document, name, level)
    for member in section.node.members or ():
        yield from _offload_key(document, name, member, level, device)


def _offload_key(
    document: Document, name: str, member: Member, level: int | None, device: str
) -> Iterator[Finding]:
    """One key of an offload section whose device is `cpu` or `nvme`."""
    where, given = f"{ZERO}.{name}.{member.key}", member.node.plain()
    if given is None or given is False:
        return
    at_nvme = member.key in _NVME_ONLY[name]
    if at_nvme and device == "cpu":
        yield _nothing(document, member, where, 'with device "cpu": only "nvme" reads it', "remove it")
    elif member.key == "super_offload" and level in (1, 2):
        yield _nothing(document, member, where, f"at stage {level}: only stage 3 reads it", "remove it")
    elif member.key == "fast_init" and "nvme" not in (
        device,
        value(document, f"{ZERO}.offload_param.device"),
    ):
        yield _nothing(document, member, where, "without nvme", "remove it")
    elif member.key == "ratio" and level in (1, 2) and isinstance(given, int | float) and given < 1:
        said = f"`ratio` below 1 is refused at stage {level}: only stage 3 supports partial offload"
        yield document.found(
            member.start,
            where,
            "ds-stage-refuses",
            said,
            "set it to 1, or stage 3",
            edits=document.removal(where),
        )


def _nvme(document: Document, name: str, level: int | None) -> Iterator[Finding]:
    device = document.member(f"{ZERO}.{name}.device")
    assert device is not None, "it was read before"
    where = f"{ZERO}.{name}.device"
    if level in (1, 2):
        yield document.found(
            device.node.start,
            where,
            "ds-no-effect",
            f"nvme at stage {level} offloads to CPU memory: only stage 3 writes to disk",
            'set stage 3, or "cpu"',
            severity="warning",
        )
    elif not value(document, f"{ZERO}.{name}.nvme_path"):
        yield document.found(
            device.node.start,
            where,
            "ds-nvme-path-missing",
            "offload to nvme without nvme_path: DeepSpeed fails at engine start",
            'write "nvme_path": "/a/local/disk"',
        )


def _contiguous_checkpoints(document: Document) -> Iterator[Finding]:
    """What `configure` of runtime/activation_checkpointing/checkpointing.py asserts."""
    block = "activation_checkpointing"
    asked = document.member(f"{block}.contiguous_memory_optimization")
    if asked is None or asked.node.value is not True:
        return
    for key, missing, needs in (
        ("partition_activations", value(document, f"{block}.partition_activations") is not True, "true"),
        (
            "number_checkpoints",
            value(document, f"{block}.number_checkpoints") is None,
            "the number of layers",
        ),
    ):
        if missing:
            yield document.found(
                asked.start,
                f"{block}.contiguous_memory_optimization",
                "ds-contiguous-checkpoints",
                f"`contiguous_memory_optimization` needs `{key}`: DeepSpeed refuses it "
                "unless the script sets it",
                f'write "{key}": {needs}, or contiguous_memory_optimization false',
                severity="warning",
            )
            return
