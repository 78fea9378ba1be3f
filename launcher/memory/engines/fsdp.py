"""FSDP2: weights, gradients and optimizer states are sharded, layer by layer.

As read in torch 2.13 (distributed/fsdp/_fully_shard) and accelerate 1.15 (utils/fsdp_utils.py). On CUDA the
copies run on streams of their own, and a buffer is free again when its stream is through; the figures are
those of the moments at which the code lets go of it.
"""

from __future__ import annotations

from dataclasses import replace

from launcher.facts.model import ModelSpec
from launcher.memory.engines.engine import EngineMemory, Held, largest_tensor, layer_values
from launcher.memory.job import WIDTHS, MemoryJob
from launcher.memory.layers import Dtypes
from launcher.memory.states import MIXED, States


class Fsdp(EngineMemory):
    name = "fsdp"
    steps_on_shards = True

    def label(self, job: MemoryJob) -> str:
        return "FSDP2"

    def stage(self, job: MemoryJob) -> int:
        return 3

    def casts(self, job: MemoryJob) -> bool:
        """Layers are cast when they are gathered."""
        return job.precision in MIXED

    def trained_width(self, job: MemoryJob) -> int:
        """accelerate casts trained parameters up to float32 before it shards them."""
        return 4 if job.precision in MIXED else super().trained_width(job)

    def dtypes(self, job: MemoryJob, *, on_cpu: bool) -> Dtypes:
        if job.precision in MIXED:
            # Layers are gathered in 16 bits, adapters included, and FSDP2 casts what flows between them.
            return Dtypes(2, 2, True, 2 if job.adapter else None, on_cpu)
        return super().dtypes(job, on_cpu=on_cpu)

    def waits_unsharded(self, job: MemoryJob) -> bool:
        """Whether whole gradients are kept between the micro-batches of a step."""
        return job.accumulation != 1 and not job.reduces_each and job.data_parallel > 1

    def states(self, spec: ModelSpec, job: MemoryJob) -> States:
        states = super().states(spec, job)
        if job.offload_param != "none":
            # CPUOffloadPolicy moves parameters, gradients and optimizer states together.
            return replace(states, weights=0, gradients=0, optimizer=0, host=states.total)
        if self.waits_unsharded(job):
            # Nothing is reduced between micro-batches: the last backward pass turns whole gradients into
            # shards, layer by layer.
            waiting = job.trainable_params * self._gathered_width(job)
            return replace(states, gradients=max(states.gradients, waiting))
        return states

    def _gathered_width(self, job: MemoryJob) -> int:
        return 2 if job.precision in MIXED else WIDTHS[job.dtype]

    def frozen_bytes(self, spec: ModelSpec, job: MemoryJob) -> tuple[int, int]:
        frozen, _ = super().frozen_bytes(spec, job)
        # accelerate ignores Params4bit whose storage is uint8: quantized weights stay whole.
        return (0, frozen) if job.quantization != "none" else (frozen, 0)

    def frozen_copies(self, job: MemoryJob) -> int:
        """They come and go with the embedding (see `held`)."""
        return 0

    def held(self, spec: ModelSpec, job: MemoryJob) -> Held:
        """Units: each layer, the last norm with the head, and the embedding (part of the head when tied).

        A gathered unit is copied out of its receive buffer; in the forward pass that buffer lives until the
        next unit is there, in the backward pass it is fetched while the previous unit runs. Gradients are
        whole until their unit has run, then copied into a buffer that is freed when the next unit's is
        filled. A unit whose input needs no gradient (the embedding, with a tied head) is reduced at the end.

        Rows of added tokens are written into a copy of the gathered table when it is used
        (TrainableTokensLayer of peft, get_merged_weights): the head keeps its copy for the backward pass, and
        each table has a whole gradient.
        """
        width = self._gathered_width(job)
        head = width * spec.head.in_features * spec.head.out_features
        embedding = width * spec.embedding_params
        whole = width * layer_values(spec)
        layer = whole if job.quantization == "none" else 0
        share = min(1.0, job.trainable_params / spec.loaded_params)
        trained = 0.0 if job.adapter else 1.0
        reduced, of_head = share * whole, trained * head
        local = width if job.accumulation == 1 or job.reduces_each else 0.0
        table = width * job.extra_frozen // WIDTHS[job.dtype] // (1 if spec.head.tied else 2)
        if spec.head.tied:
            kept = head + of_head
            return Held(
                forward=int(head + layer + table),
                head=head + 2 * table,
                layers=int(kept + 2 * layer + reduced),
                bottom=int(kept + layer + reduced),
                embedding=int(kept + reduced + table),
                unsharded=local,
            )
        return Held(
            forward=2 * head + table,
            head=head + 2 * table,
            layers=int(2 * layer + max(reduced, of_head)),
            bottom=int(layer + embedding + reduced),
            embedding=int(embedding * (1 + trained) + max(reduced, trained * embedding) + table),
            unsharded=local,
        )

    def save_peak(self, spec: ModelSpec, job: MemoryJob, resident: int) -> int:
        if job.data_parallel == 1:
            return resident
        return resident + self.trained_width(job) * largest_tensor(spec)

    def gathered_to_load(self, spec: ModelSpec, job: MemoryJob) -> int:
        return WIDTHS[job.dtype] * largest_tensor(spec)

    def loads_once(self, job: MemoryJob) -> bool:
        return not job.each_loads

    def saving(self, spec: ModelSpec, job: MemoryJob, local: int, *, on_cpu: bool) -> int:
        """Rank 0 gathers what was trained."""
        return self.saved_params(spec, job) * self.trained_width(job)

    def untraceable(self, job: MemoryJob) -> str | None:
        if self.casts(job) and job.quantization != "none":
            return "FSDP2 casts the weights that are not quantized when it gathers them"
        return None

    def notes(self, job: MemoryJob) -> list[str]:
        found = []
        if job.quantization != "none":
            found.append("FSDP2 does not shard quantized weights")
        if self.waits_unsharded(job):
            found.append("gradients stay unsharded between the micro-batches of a step")
        return found
