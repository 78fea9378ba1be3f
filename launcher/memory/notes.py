"""What an estimate assumes or leaves out, as sentences. Pure."""

from __future__ import annotations

from launcher.facts.hardware import Hardware
from launcher.facts.model import ModelSpec
from launcher.memory.engine import waits_unsharded
from launcher.memory.job import MemoryJob
from launcher.memory.optimizers import optimizer_of
from launcher.tasks import task_named


def memory_notes(job: MemoryJob, hardware: Hardware) -> tuple[str, ...]:
    """What holds for this job only."""
    optimizer = optimizer_of(job.optim, job.optim_args)
    notes: list[str] = []
    if not optimizer.exact:
        notes.append(f"optimizer states of {job.optim} are counted as AdamW's, an upper bound")
    if optimizer.paged and not hardware.is_cpu:
        notes.append("paged optimizer states are counted in host memory, where CUDA moves them on demand")
    if optimizer.library == "adafactor" and job.engine == "deepspeed" and job.zero_stage:
        notes.append("ZeRO's flat partitions cannot be factored: Adafactor keeps a value per parameter")
    if job.engine == "fsdp" and job.quantization != "none":
        notes.append("FSDP2 does not shard quantised weights")
    if waits_unsharded(job):
        notes.append("gradients wait unsharded between the micro-batches of a step")
    return tuple(notes)


def kept_predictions(spec: ModelSpec, job: MemoryJob) -> int:
    """Bytes of one evaluation batch that metrics read, gathered from all ranks: token ids, or class scores.

    Each sample brings its label, each token its own; both are 64-bit numbers.
    """
    samples = job.eval_batch * job.data_parallel * job.sequence_parallel
    task = task_named(spec.task)
    if task.keeps_token_predictions:
        return 16 * samples * job.sequence_length
    return samples * (4 * spec.head.out_features + 8) if task.adds_head else 0
