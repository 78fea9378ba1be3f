"""Traces one training step of a plan's real model with fake tensors: `python -m launcher.train.trace.run`.

Reads a request as JSON from standard input and answers with JSON on standard output. Nothing is
allocated: fake tensors have shapes and dtypes alone. Nothing of the request is read from files.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError
from launcher.machine.child import read_request
from launcher.train.job import Job

BASE_DEPTH, DEEPER = 2, 4


def main() -> int:
    """Answer one request; a failure is an answer too: {"error": …}."""
    request = read_request()
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print
    warnings.simplefilter("ignore")
    try:
        answer = ANSWERS[request["ask"]](request)
    except EffilaunchError as error:
        answer = {"error": str(error)}
    except Exception as error:  # whatever a model does that fake tensors cannot
        answer = {
            "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        }
    json.dump(answer, out)
    return 0


def trace(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The moments of a step, and the states' bytes, of the whole model in one piece."""
    import torch
    import transformers

    from launcher.train.trace.extend import extend, ruling, state_bytes
    from launcher.train.trace.model import Request, depth_names, language_config, repeats_of, whole_config
    from launcher.train.trace.repeats import ALIKE

    transformers.logging.set_verbosity_error()
    capability = asked["capability"]
    request = Request(
        Job(Path(), asked["plan"]),
        asked["memory"],
        asked["config"],
        asked["labels"],
        asked["on_cpu"],
        tuple(capability) if capability else None,
    )
    config = whole_config(request.config, request.labels)
    text = language_config(config)
    names = depth_names(text)
    repeats, layers = repeats_of(request, config, names), [getattr(text, name) for name in names]
    full = layers if repeats == ALIKE else [repeats.depth(layers[0])]
    source = (config, names, repeats)
    parts, tapes, replays = _recorded(request, source, full, asked["batches"])
    return {
        "moments": ruling(extend(parts, full)),
        "states": state_bytes(tapes, full),
        "depths": layers,
        "replays": replays,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _recorded(
    request: Any, source: tuple[Any, Sequence[str], Any], full: Sequence[int], batches: Sequence[int]
) -> tuple[Mapping[Any, Any], Mapping[Any, Any], list[dict[str, Any]] | None]:
    """Live bytes and tapes by depths and batch, and what the allocator is asked; None where that is unknown.

    Layers that compute position after position are recorded at short lengths, if these tell of longer ones.
    """
    from launcher.train.trace.extend import segment_rows
    from launcher.train.trace.positions import NotAlike, largest_segment, refuse_bounds, rows_at
    from launcher.train.trace.tape import LongSegment

    length, uneven = request.memory["sequence_length"], request.memory.get("uneven")

    def corners(deeper: int) -> list[tuple[tuple[int, ...], int]]:
        # Layers with different adapters are each traced.
        shapes = [tuple(full)] if uneven else shallow(full, deeper)
        return [(depths, batch) for depths in shapes for batch in batches]

    def whole(longest: int | None) -> Any:
        with device_of(request):
            tapes = {corner: record(request, source, *corner, longest) for corner in corners(DEEPER)}
            replays = [] if request.on_cpu else _replays(request, source, full, tapes)
        return {corner: segment_rows(tape) for corner, tape in tapes.items()}, tapes, replays

    def short(tokens: int, corner: Any) -> Any:
        shorter = replace(request, memory={**request.memory, "sequence_length": tokens})
        with device_of(shorter, length), _without_collector():
            return record(shorter, source, *corner)

    try:
        return whole(largest_segment(length))  # type: ignore[no-any-return]
    except LongSegment:
        with contextlib.suppress(NotAlike):
            refuse_bounds(source[0], length)
            return *rows_at(short, corners(BASE_DEPTH + 1), length), None
    return whole(None)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Python's collector frees what is in a cycle at any event: tapes of two lengths would differ there."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _replays(
    request: Any, source: tuple[Any, Sequence[str], Any], full: Sequence[int], tapes: Mapping[Any, Any]
) -> list[dict[str, Any]]:
    """For each batch, what CUDA's allocator is asked in two steps of the whole model."""
    from launcher.train.trace.extend import replay

    keeps = request.memory["accumulation"] != 1
    deep = tuple(full if request.memory.get("uneven") else (min(depth, DEEPER) for depth in full))
    found = []
    batches = {batch for _, batch in tapes}
    if (deep, max(batches)) not in tapes:  # stacks were made deeper one by one: one more tape has to do
        batches = {max(batches)}
    for batch in sorted(batches):
        tape = tapes.get((deep, batch)) or record(request, source, deep, batch)
        base = tapes[min((depths for depths, _ in tapes), key=sum), batch]
        found.append({"batch": batch, **replay(tape, base, full, keeps_gradients=keeps)})
    return found


@contextlib.contextmanager
def device_of(request: Any, length: int | None = None) -> Iterator[None]:
    """What the plan's device does otherwise than fake CPU tensors; rows stand for those of `length`."""
    from launcher.train.trace.kernels import documents_one_by_one, imitating_cuda, multiply_groups
    from launcher.train.upstream.model_seams import grouped_products, plain_positions

    with contextlib.ExitStack() as stack:
        stack.enter_context(grouped_products(multiply_groups))
        stack.enter_context(plain_positions(documents=request.document_mask))
        if request.one_by_one:
            stack.enter_context(documents_one_by_one(request.memory["sequence_length"]))
        if not request.on_cpu:
            stack.enter_context(imitating_cuda(request.capability, length))
        yield


def record(
    request: Any,
    source: tuple[Any, Sequence[str], Any],
    depths: Sequence[int],
    batch: int,
    longest: int | None = None,
) -> Any:
    """The tape of one step with stacks of these depths and a micro-batch of this size.

    source: the configuration, its names of depths, and how its layers repeat. longest: as of the recorder.
    """
    from launcher.train.tasks import train_task
    from launcher.train.trace.model import build, cut, language_config, place, record_step
    from launcher.train.trace.repeats import ALIKE
    from launcher.train.upstream.torch_seams import EveryExpertHit, fake_tensors

    config, names, repeats = source
    if repeats == ALIKE:
        short = cut(config, names, depths)
        model = build(request, short)
    else:
        short = copy.deepcopy(config)  # it becomes the model's own, and is cut with its layers
        layers = getattr(language_config(config), names[0])
        model = build(request, short, repeats.chosen(layers, depths[0]))
    with fake_tensors(), EveryExpertHit():
        place(model)
        inputs = train_task(request.task).traced_inputs(request.memory, short, batch)
        logits = inputs["labels"].numel() * (request.labels or language_config(short).vocab_size)
        return record_step(request, model, inputs, logits, repeats, longest)


def shallow(full: Sequence[int], deeper: int = DEEPER) -> list[tuple[int, ...]]:
    """The depths to trace: a base, and each stack alone deeper; the whole model where it is that small."""
    if max(full) <= deeper:
        return [tuple(full)]
    base = tuple(min(BASE_DEPTH, depth) for depth in full)
    if len(set(full)) == 1:  # alike stacks grow together
        return [base, (deeper,) * len(full)]
    return [base, *((*base[:i], deeper, *base[i + 1 :]) for i in range(len(full)) if full[i] > BASE_DEPTH)]


def model(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What planning must know of a model, see spec.py."""
    import transformers

    from launcher.train.trace.model import whole_config
    from launcher.train.trace.spec import describe

    transformers.logging.set_verbosity_error()
    described = describe(whole_config(asked["config"], asked["labels"]), asked["task"], asked.get("freeze"))
    return {**described, "adapter": adapter(asked) if asked.get("adapter") else None}


def adapter(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the real peft makes of an adapter, see spec.py."""
    import transformers

    from launcher.train.trace import spec as trace_spec
    from launcher.train.trace.model import whole_config

    transformers.logging.set_verbosity_error()
    config = whole_config(asked["config"], asked["labels"])
    return trace_spec.adapter(config, asked["task"], asked["adapter"], asked.get("freeze"))


def config(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the defaults of its class."""
    from launcher.train.trace.model import whole_config

    return {"config": whole_config(asked["config"], asked["labels"]).to_dict()}


ANSWERS = {"trace": trace, "model": model, "adapter": adapter, "config": config}

if __name__ == "__main__":
    sys.exit(main())
