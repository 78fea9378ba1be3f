"""The moments of a training step that may hold the peak, each with its components."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from launcher.machine.hardware import MIB, Hardware
from launcher.memory.across_layers import AcrossLayers, across_layers
from launcher.memory.activations import make_stacks, mask_bytes, shared_bytes
from launcher.memory.contrast import contrast
from launcher.memory.job import Components, Held, MemoryJob
from launcher.memory.layers import LayerCost, layer_cost
from launcher.memory.loss import HeadCost, head_cost
from launcher.models.layers.layout import Block, Dtypes, Stack
from launcher.models.layers.tape import Peak
from launcher.models.model import ModelSpec
from launcher.tasks import task_named

FRAGMENTED = 1.06
"""Bytes that torch's allocator reserves for each that it allocates, where its segments do not grow: the
median of the sweep on one H100 (benchmarks/records/gpu_memory_*.json), of 1.01 to 1.18."""
CUDA_CONTEXT = 758 * MIB
"""What the driver counts for a process besides torch's reserved bytes: 742 or 758 MiB in each of 31
processes on an H100 (driver 580, torch 2.11, CUDA 13.0; benchmarks/records/gpu_memory_*.json). Other devices
were not measured. Before CUDA 11.7 all kernels were loaded early: 1,343 MiB on a V100."""
HOPPER = (9, 0)
BATCH_BYTES = 24
"""Of one token: its id, its mask and its label, 8 bytes each as collators make them."""


@dataclass(slots=True)
class _Pass:
    """One backward pass through the stacks: what is kept while each layer runs."""

    costs: list[tuple[Stack, LayerCost, LayerCost]]
    """Stack, cost of its layers, cost of its first."""
    head: HeadCost
    shared: int
    masks: int
    """Read by all layers: checkpoints keep them, else they go when the forward pass ends."""
    checkpointing: bool
    offloads: bool
    """The inputs that checkpoints keep are in host memory, but for two."""
    gradient_width: float
    """Of a trained parameter after the layer that runs; 0 where all gradients exist already."""
    across: AcrossLayers
    batches: int
    """Of `shared`, the inputs of the step."""

    def layer_saved(self, cost: LayerCost, stack: Stack) -> tuple[int, int]:
        """Activations and copies of weights that a layer keeps until its turn comes."""
        if self.checkpointing:
            return cost.held + (0 if self.offloads else stack.input_bytes), 0
        return cost.saved, cost.weights

    def below(self, index: int, layer: int) -> tuple[int, int]:
        """Kept by all layers before `layer` (0: the first) of stack `index`."""
        saved = weights = 0
        for i, (stack, cost, first) in enumerate(self.costs[: index + 1]):
            count = stack.layers if i < index else layer
            for one, n in ((first, min(count, 1)), (cost, max(0, count - 1))):
                kept, copies = self.layer_saved(one, stack)
                saved, weights = saved + n * kept, weights + n * copies
        if self.offloads and (index or layer):  # the next one is fetched already, or is still there
            saved += self.costs[index if layer else index - 1][0].input_bytes
        return saved, weights

    def above(self, index: int, layer: int) -> int:
        """Bytes of gradients of head and layers after `layer` of stack `index`."""
        params = self.head.params
        for i, (stack, cost, _) in enumerate(self.costs):
            count = stack.layers if i > index else stack.layers - 1 - layer if i == index else 0
            params += count * cost.params
        return int(params * self.gradient_width)

    def held_above(self, index: int, layer: int) -> int:
        """What functions' contexts hold in the layers that ran already."""
        return sum(
            cost.held * (stack.layers if i > index else stack.layers - 1 - layer if i == index else 0)
            for i, (stack, cost, _) in enumerate(self.costs)
        )

    def at(self, index: int, layer: int) -> Components:
        """The worst moment while one layer's backward pass runs."""
        stack, cost, first = self.costs[index]
        cost = cost if layer else first
        saved, weights = self.below(index, layer)
        if self.checkpointing:
            saved += stack.input_bytes
        saved += self.shared + self.held_above(index, layer)
        last = layer == stack.layers - 1
        saved += self.across.at(index, last=last, checkpointing=self.checkpointing)
        if self.costs[0][0].decodes != self.costs[-1][0].decodes:
            # The gradient of what the decoder read of the encoder.
            saved += stack.input_bytes
        return self._parts(cost.peak, saved, weights, self.above(index, layer))

    def _parts(self, peak: Peak, saved: int, weights: int, gradients: int) -> Components:
        flow = peak.total - peak.saved - peak.gradients
        return Components(
            gradients=gradients + peak.gradients, activations=saved + peak.saved, temporary=weights + flow
        )

    def at_head(self) -> Components:
        """The worst moment of loss and head."""
        saved, weights = self.below(len(self.costs) - 1, self.costs[-1][0].layers)
        peak = self.head.peak
        kept = min(peak.saved, self.head.saved)
        flow = peak.total - kept - peak.gradients
        logits = min(flow, self.head.backward)
        return Components(
            gradients=peak.gradients,
            activations=saved + self.shared + kept,
            logits=logits,
            temporary=weights + flow - logits,
        )

    def forward(self) -> Components:
        """The end of the forward pass; autocast's cache still holds its copies of trained weights."""
        saved, weights = self.below(len(self.costs) - 1, self.costs[-1][0].layers)
        if self.checkpointing and self.costs[-1][0].block.full:
            weights = sum(stack.layers * cost.weights for stack, cost, _ in self.costs)
        weights += self.head.weights
        return Components(
            activations=saved + self.shared + self.head.saved,
            logits=self.head.forward,
            temporary=weights + (0 if self.checkpointing else self.masks),
        )

    def kept(self) -> Components:
        """What its backward pass needs, while other forward passes run."""
        saved, weights = self.below(len(self.costs) - 1, self.costs[-1][0].layers)
        saved += self.shared - self.batches + self.head.saved
        return Components(activations=saved, temporary=weights + self.head.weights)

    def in_forward(self, index: int) -> Components:
        """The worst moment of the forward pass of the last layer of stack `index`."""
        stack, cost, first = self.costs[index]
        saved, weights = self.below(index, stack.layers - 1)
        peak = cost.first_pass if stack.layers > 1 else first.first_pass
        block = self.costs[0][0].first
        # The model's function has the embedded tokens as a variable; some first layers keep them anyway.
        kept = block.grad and (block.dtypes.residual == 4 or not block.layout.rms_norm)
        saved += 0 if kept else block.tokens * block.hidden * block.dtypes.residual
        return self._parts(peak, saved + self.shared + self.masks, weights, 0)

    def at_inputs(self) -> Components:
        """After the first layer, what made the layers' own inputs runs backwards."""
        inputs = self.across.inputs
        kept = self.across.kept(checkpointing=self.checkpointing)
        saved = self.shared - kept + self.costs[0][0].input_bytes
        return self._parts(inputs.peak, saved, 0, self.above(0, -1))

    def at_embedding(self, spec: ModelSpec, job: MemoryJob) -> Components:
        """Last of all, the dense gradient of the embedding; a tied head's exists and is added to it."""
        stack = self.costs[0][0]
        x = stack.input_bytes
        shared = self.shared - self.across.kept(checkpointing=self.checkpointing)
        above = self.above(0, -1) + int(self.across.inputs.params * self.gradient_width)
        if job.adapter:
            return Components(gradients=above, activations=shared, temporary=x)
        table = spec.layout.table_params
        tokens = spec.embedding_params - table
        made = table + (0 if spec.head.tied else tokens)
        fresh = tokens if spec.head.tied or not self.gradient_width else 0
        fresh = fresh if self.gradient_width else max(fresh, table)
        return Components(
            gradients=above + int(made * self.gradient_width),
            activations=shared,
            temporary=x + fresh * stack.block.dtypes.weight,
        )


def _pass(
    part: ModelSpec, job: MemoryJob, d: Dtypes, gradient_width: float, unsharded: float, *, keeps: bool
) -> _Pass:
    """`gradient_width`: bytes that a trained parameter's gradient keeps; `unsharded`: see Held; `keeps`: all
    gradients exist already."""
    stacks = make_stacks(part, job, d)
    # What FSDP2 reduces after each micro-batch is added to the shards, not to what a layer has just made.
    accumulated = keeps and not job.reduces_each
    running = max(gradient_width, unsharded)

    def cost(block: Block) -> LayerCost:
        return layer_cost(block, running, accumulated=accumulated, checkpointed=job.checkpointing)

    costs = [(stack, cost(stack.block), cost(stack.first)) for stack in stacks]
    head = head_cost(stacks[-1].block, part.head, part.task, running, accumulated)
    masks = mask_bytes(stacks, documents=job.document_mask)
    # The Trainer fetches all micro-batches of a step before it computes the first (get_batch_samples).
    batches = (job.accumulation or 1) * job.forwards * _batch_bytes(stacks[-1].block)
    shared = shared_bytes(stacks) + batches
    shared += masks if job.checkpointing else 0
    across = across_layers(stacks, running, accumulated=accumulated)
    shared += across.kept(checkpointing=job.checkpointing)
    width = 0.0 if keeps else gradient_width
    moves = job.checkpointing and job.offload_activations != "none" and not d.on_cpu
    return _Pass(costs, head, shared, masks, job.checkpointing, moves, width, across, batches)


def _batch_bytes(block: Block) -> int:
    if block.layout.image_values:
        return 4 * block.rows * block.layout.image_values
    return BATCH_BYTES * block.tokens


def buffers(spec: ModelSpec, job: MemoryJob, hardware: Hardware) -> int:
    """Bytes that are held from the first step to the last: the engine's, and the workspaces that torch gives
    to cuBLAS and cuBLASLt, as large each (aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize).
    """
    if hardware.is_cpu:
        return job.engine.buffers(spec, job)
    is_hopper = hardware.compute_capability is not None and hardware.compute_capability >= HOPPER
    workspace = 32 * MIB if is_hopper else 65 * MIB // 8
    return job.engine.buffers(spec, job) + 2 * workspace


def training_phases(spec: ModelSpec, job: MemoryJob, hardware: Hardware) -> dict[str, Components]:
    """Components at each moment of a step that may be its peak."""
    engine = job.engine
    states, held = engine.states(spec, job), engine.held(spec, job)
    resident = Components(
        weights=states.weights,
        optimizer=states.optimizer,
        buffers=buffers(spec, job, hardware),
        context=0 if hardware.is_cpu else CUDA_CONTEXT,
    )
    gradient_width = states.gradients / max(job.trainable_params, 1)
    if engine.keeps_gradients(job):
        resident = replace(resident, gradients=states.gradients)
    d, full = engine.dtypes(job, on_cpu=hardware.is_cpu), replace(resident, gradients=states.gradients)

    def run_once(keeps: bool) -> _Pass:
        return _pass(spec, job, d, gradient_width, held.unsharded, keeps=keeps)

    run = run_once(engine.keeps_gradients(job))
    moments = _moments(run, held, spec, job)
    found = {name: _sum(resident, parts) for name, parts in moments.items()}
    if job.forwards > 1:
        later = {name: _sum(full, parts) for name, parts in _moments(run_once(True), held, spec, job).items()}
        found = _of_passes(found, later, run.kept(), job)
    if task_named(spec.task).head == "none":
        found = _compared(found, resident, run, spec, job)
    found["step"] = engine.at_step(resident, states.gradients, spec, job, hardware)
    return found


def _of_passes(
    first: dict[str, Components], later: dict[str, Components], kept: Components, job: MemoryJob
) -> dict[str, Components]:
    """The moments of several forward passes, which run backwards one after the other, the last one first.

    first: moments before a gradient exists; later: with all of them; kept: by a pass until its turn comes.
    GradCache's passes run forwards when the one before has run backwards.
    """
    if job.mini_batch:
        return {name: _most([parts, later[name]]) for name, parts in first.items()}
    found = {name: _sum(parts, kept, job.passes - 1) for name, parts in first.items()}
    then = {name: _sum(parts, kept, job.passes - 2) for name, parts in later.items() if name != "forward"}
    return {name: _most([parts, then.get(name, parts)]) for name, parts in found.items()}


def _compared(
    found: dict[str, Components], resident: Components, run: _Pass, spec: ModelSpec, job: MemoryJob
) -> dict[str, Components]:
    """The moments with what compares embeddings; its own worst one is at the end of the forward pass."""
    block = run.costs[-1][0].block
    of = contrast(spec, job, block.dtypes.residual, on_cpu=block.dtypes.on_cpu)
    alive = _sum(resident, run.kept(), 0 if job.mini_batch else job.passes)
    loss = _sum(alive, Components(activations=run.batches + of.saved, logits=of.flow))
    cached = {name: _sum(parts, Components(activations=of.cache)) for name, parts in found.items()}
    return {**cached, "forward": _most([cached["forward"], loss])}


def _moments(run: _Pass, held: Held, spec: ModelSpec, job: MemoryJob) -> dict[str, Components]:
    """The moments before the step, each with what the engine holds then."""

    def with_held(parts: Components, buffers: int) -> Components:
        return replace(parts, buffers=buffers)

    last = len(run.costs) - 1
    top = [with_held(run.at(i, stack.layers - 1), held.layers) for i, (stack, _, _) in enumerate(run.costs)]
    bottom = [with_held(run.at(i, 0), held.layers if i else held.bottom) for i in range(len(run.costs))]
    bottom.append(with_held(run.at_inputs(), held.embedding))
    bottom.append(with_held(run.at_embedding(spec, job), held.embedding))
    head = with_held(run.at_head(), held.head)
    ends = [] if job.checkpointing else [run.in_forward(i) for i in range(len(run.costs))]
    moments = {
        "forward": with_held(_most([run.forward(), *ends]), held.forward),
        "backward": head if job.checkpointing else _most([head, top[last]]),
        "gradients": _most(bottom + top[:last]),
    }
    return {**moments, "recompute": _most(top)} if job.checkpointing else moments


def _most(moments: list[Components]) -> Components:
    return max(moments, key=lambda parts: parts.total)


def _sum(first: Components, second: Components, times: int = 1) -> Components:
    """`second` so many times."""
    names = [one.name for one in fields(Components)]
    return Components(**{name: getattr(first, name) + times * getattr(second, name) for name in names})


def fragmented(parts: Components) -> Components:
    """With what the allocator reserves beyond it; a trace replays that."""
    lost = int((FRAGMENTED - 1) * (parts.total - parts.outside))
    return replace(parts, temporary=parts.temporary + lost)
