"""Which model types of transformers can be planned, trained, saved, reloaded, merged, and run fast.

    python benchmarks/coverage.py                 every causal language model; prints a table and the shares
    python benchmarks/coverage.py --images        every model of images and text instead
    python benchmarks/coverage.py lfm2 mamba      these types alone
    python benchmarks/coverage.py --compile       also compiles the layers (longer; needs a C++ compiler)
    python benchmarks/coverage.py --write         writes records/coverage_cpu.json, which docs/make.py reads

Each type is tried in a process of its own, on the default configuration of its class made small by `--tiny`'s
rules, with random weights: planned (closed form or trace), trained 4 steps with LoRA on all linear layers
through the worker's own code, merged and read back; then two documents packed in one row against both apart,
and the chunked against the full loss. Nothing is learned here about quality or about GPU kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bounds_kernel
from grids import grid
from records import RECORDS, read_record, write_record
from runner import in_process
from switches import Check, needs

RECORD = RECORDS / "coverage_cpu.json"
SECONDS, BYTES = 300, 10 * 2**30
"""Limits of one type."""
STEPS = 4
OVERRIDES: Mapping[str, Mapping[str, Any]] = grid("coverage")["causal_lm"]
"""What the class of a configuration leaves out and every published one has."""
IMAGE_OVERRIDES: Mapping[str, Mapping[str, Any]] = grid("coverage")["image_text_to_text"]
"""The same of models of images and text; missing parts of a part have their class's values."""
YOUNG = 2022
"""Types that came with a paper or release of this year or later are what the target is about."""
OLD = frozenset(grid("coverage")["old"])
"""Types of 2021 and before, and encoders of that time with a causal head."""
_TEMPORARY = re.compile(r"\S*/tmp\w+")
LENGTHS = (17, 9, 12)
"""Tokens of the documents that are packed."""
CHANGED = {
    "sliding_window": 5, "attention_chunk_size": 8, "window_size": 5, "local_attention": 8, "floor_scale": 4,
    "index_topk": 4, "index_block_size": 2, "index_topk_blocks": 2, "keep_window_size": 4,  # below a document
    "logits_scaling": 3.0, "logit_scale": 0.3, "lm_head_multiplier": 0.5,  # whose default has no effect
}  # fmt: skip
"""Values under which a leak between documents, or logits that are more than a product, would show."""


def small_config(kind: str) -> dict[str, Any]:
    """The default configuration of a type, small, without dropout."""
    import transformers

    from launcher.planner.narrow import narrow_config

    given = IMAGE_OVERRIDES.get(kind, {})
    config = transformers.AutoConfig.for_model(kind, **given).to_dict() | {"model_type": kind}
    narrow = narrow_config(config | OVERRIDES.get(kind, {}))
    left_out = ("dtype", "transformers_version", "_name_or_path", "architectures")
    return {
        key: 0.0 if _is_dropout(key, value) else value for key, value in narrow.items() if key not in left_out
    }


def _is_dropout(key: str, value: Any) -> bool:
    return isinstance(value, float) and ("drop" in key or key.endswith("_pdrop"))


class Tried:
    """What was found out about one type: field -> value, and field -> reason where it failed."""

    def __init__(self, kind: str) -> None:
        self.found: dict[str, Any] = {"type": kind}
        self.reasons: dict[str, str] = {}

    def attempt(self, field: str, what: Callable[[], Any]) -> bool:
        """Whether `what` ended well: its value, or the reason it did not, is kept under `field`."""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.found[field] = what()
        except BaseException as error:  # a model's code may raise anything; the reason is the result
            self.found[field] = False
            self.reasons[field] = first_line(error)
        return self.found[field] is not False

    def to_json(self) -> dict[str, Any]:
        return {**self.found, **({"reasons": self.reasons} if self.reasons else {})}


def first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {_TEMPORARY.sub('RUN_DIR', text)[:200]}"


def try_type(kind: str, *, images: bool = False, compiled: bool = False) -> dict[str, Any]:
    """Everything about one type; of a model of images and text, no more than that it trains."""
    tried = Tried(kind)
    config: dict[str, Any] = {}

    def configure() -> bool:
        config.update(small_config(kind))
        return True

    if not tried.attempt("configured", configure):
        return tried.to_json()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        plans: list[Any] = []
        if tried.attempt("planned", lambda: plan(run, config, plans, IMAGES if images else TEXT)) and (
            tried.attempt("trained", lambda: train(run, plans[0]))
        ):
            tried.attempt("idle", lambda: idle(run))
            tried.attempt("merged", lambda: merge(run))
    if images:
        return tried.to_json()
    for field, check in CHECKS.items():
        if tried.attempt(field, lambda check=check: check(config)) and (more := needs(config, check)):
            tried.found.setdefault("needs", {})[field] = more
    if compiled:
        tried.attempt("compiled", lambda: compiled_alike(config))
    return tried.to_json()


TEXT = ("causal-lm", '{"prompt": "a", "completion": "b"}')
IMAGES = ("image-text-to-text", '{"messages": [], "images": []}')
"""Task, and a row that tells its format; `--tiny` makes up rows of it, with images in one or two colours."""


def plan(run: Path, config: dict[str, Any], plans: list[Any], what: tuple[str, str]) -> str:
    """Plan a LoRA run of the model; how its memory was found: closed-form or trace."""
    from launcher.inputs import model_trace
    from launcher.inputs.planning_facts import gather
    from launcher.models import memory_trace
    from launcher.planner.planner import make_plan
    from launcher.recipe.loading import load_recipe
    from launcher.render.bundle import render
    from launcher.train.trace.run import ANSWERS

    def ask(request: Mapping[str, Any], python: str, say: object = None) -> dict[str, Any]:
        """In this process, which has imported what a child would."""
        try:
            return dict(json.loads(json.dumps(ANSWERS[request["ask"]](request))))
        except Exception as error:
            raise memory_trace.Untraceable(first_line(error)) from error

    memory_trace.ask_child = ask  # model_spec imports it when it is called
    model_trace.ask_child = ask
    task, row = what
    length = 32 if what is TEXT else 384
    (run / "rows.jsonl").write_text(f"{row}\n")
    (run / "recipe.yaml").write_text(
        f"task: {task}\nmodel: {{config: {{model_type: {config['model_type']}}}}}\n"
        f"adapter: {{type: lora, r: 4}}\ntrainer: {{learning_rate: 1.0e-2}}\n"
        f"data: {{train: [{{path: {run}/rows.jsonl}}], max_length: {length}}}\n"
        "fixes: {disable: [experts-untouched]}\n"  # all-linear without them is what is tried
    )
    loaded = load_recipe(run / "recipe.yaml")
    model = loaded.recipe.model.model_copy(update={"config": config})
    small = replace(loaded, recipe=loaded.recipe.model_copy(update={"model": model}))
    loaded, facts = gather(small, "1xcpu", tiny=True, trace=True)
    made = make_plan(loaded, facts)
    plans.append(json.loads(render(made).files["plan.json"]))
    if not math.isfinite(made.memory.total) or made.memory.total <= 0:
        raise ValueError(f"the memory of the plan is {made.memory.total}")
    needs_trace = facts.model.foreign
    if needs_trace and made.memory.method != "trace":
        raise ValueError(f"not traced: {facts.warnings[-1]}")
    return "trace" if needs_trace else "closed-form"


def train(run: Path, planned: dict[str, Any]) -> list[float]:
    """Losses of the steps, through the workers' code."""
    from launcher.train.job import read_job
    from launcher.train.prepare import prepare_run
    from launcher.train.worker import train as worker

    (run / "plan.json").write_text(json.dumps(planned))
    prepare_run(read_job(run))
    worker(read_job(run))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    if len(losses) != STEPS or not all(map(math.isfinite, losses)):
        raise ValueError(f"losses are {losses}")
    return losses


def idle(run: Path) -> list[str]:
    """Last parts of the names of adapted layers whose adapter got no gradient: its second matrix is zero."""
    from safetensors.torch import load_file

    weights = load_file(run / "adapter" / "adapter_model.safetensors")
    seconds = {name: tensor for name, tensor in weights.items() if ".lora_B" in name}
    if not seconds:
        raise ValueError("the adapter has no weights")
    moved = {name.partition(".lora_B")[0].rpartition(".")[2] for name, t in seconds.items() if t.abs().sum()}
    return sorted({name.partition(".lora_B")[0].rpartition(".")[2] for name in seconds} - moved)


def merge(run: Path) -> bool:
    """Merge the adapter; `merge` itself compares the logits and reads the folder back."""
    from launcher.train.results.merge import merge as merged

    found = merged(run, run / "merged", "float32", lambda _: "")
    if not found.sum.is_none:
        raise ValueError(f"logits of the merged model differ: {found.sum}")
    return True


def build(config: Mapping[str, Any], kernel: str | None = None) -> Any:
    """The model with weights so large that a leak between documents shows; None: a kernel that it has."""
    import torch
    import transformers

    from launcher.train.model.attention import register_varlen
    from launcher.train.upstream.model_seams import attention_of

    register_varlen()
    bounds_kernel.register()
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(**_acting(config))
    for name in ("initializer_range", "init_std"):
        if hasattr(made, name):
            setattr(made, name, 0.2)
    make = transformers.AutoModelForCausalLM.from_config
    try:
        model = make(made, attn_implementation=kernel or "sdpa")
    except ValueError:
        if kernel:
            raise
        model = make(made, attn_implementation="eager")
    if kernel and attention_of(model.config.get_text_config()) != kernel:
        raise ValueError(f"the model has no attention {kernel}")
    return model.float().train()


def _acting(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the values of CHANGED where it has one, in its text model too."""
    given = {**config, **{key: value for key, value in CHANGED.items() if config.get(key)}}
    inner = {"text_config": _acting(given["text_config"])} if given.get("text_config") else {}
    return given | inner


def documents_apart(config: Mapping[str, Any], kernel: str) -> bool:
    """Whether documents in one row have the logits that they have alone."""
    import torch

    from launcher.train.data.batches import make_collator

    class Pad:
        pad_token_id = 3

    model = build(config, kernel)
    generator = torch.Generator().manual_seed(1)
    words = min(int(getattr(model.config.get_text_config(), "vocab_size", 256)), 250)
    rows = [torch.randint(5, words, (length,), generator=generator).tolist() for length in LENGTHS]
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
        batch = dict(make_collator("flatten", Pad())([{"input_ids": row, "labels": row} for row in rows]))
        batch.pop("labels")
        together = model(**batch, use_cache=False).logits[0]
    expected = torch.cat(alone)
    worst = float((together - expected).abs().max() / expected.abs().max())
    if not worst < 1e-4:
        raise ValueError(f"logits differ by {worst:.1e} of the largest")
    return True


def chunked_alike(config: Mapping[str, Any]) -> bool:
    """Whether the chunked loss has the value and gradients of the model's own."""
    from launcher.train.model.loss import chunk_loss

    return _alike(build(config), chunk_loss)


def compiled_alike(config: Mapping[str, Any]) -> bool:
    """Whether compiled layers compute the loss and the gradients of plain ones.

    A layer that torch cannot compile is an error here; in a run it would train as it is.
    """
    from torch._dynamo.utils import counters

    from launcher.train.model.models import repeated_layers

    def change(model: Any) -> None:
        layers = repeated_layers(model)
        if not layers:
            raise ValueError("the model does not name its layers")
        for layer in layers:
            layer.compile(dynamic=True)

    counters.clear()
    same = _alike(build(config), change)
    if not counters["stats"]["unique_graphs"]:
        raise ValueError("nothing of the layers was compiled")
    return same


KERNELS = {"sdpa": "sdpa", "eager": "eager", "varlen": "varlen", "flash_attention_2": bounds_kernel.NAME}
"""Attention -> the one that is run in its place on a CPU."""
CHECKS: Mapping[str, Check] = {
    **{name: partial(documents_apart, kernel=kernel) for name, kernel in KERNELS.items()},
    "chunked": chunked_alike,
}
"""What else is tried with changed configurations: field of the record -> check."""


def _alike(model: Any, change: Callable[[Any], object]) -> bool:
    """Whether loss and gradients of a step are the same after `change`; ValueError says how they differ."""
    before, gradients = _step(model)
    change(model)
    after, others = _step(model)
    if not math.isclose(before, after, rel_tol=1e-5):
        raise ValueError(f"the loss is {after} instead of {before}")
    if others.keys() != gradients.keys():
        raise ValueError("other parameters have gradients")
    floor = 1e-3 * max(float(g.abs().max()) for g in gradients.values())  # rounding: of a key's bias, say
    worst = max(float((others[n] - g).abs().max() / (g.abs().max() + floor)) for n, g in gradients.items())
    if not worst < 1e-3:
        raise ValueError(f"gradients differ by {worst:.1e}")
    return True


def _step(model: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a batch in which some tokens are no targets."""
    import torch

    model.zero_grad()
    torch.manual_seed(2)
    words = min(int(getattr(model.config.get_text_config(), "vocab_size", 256)), 250)
    ids = torch.randint(5, words, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :5] = -100
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, use_cache=False).loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


def in_child(kind: str, *, images: bool, compiled: bool) -> dict[str, Any]:
    """`try_type` in a forked process with limits; a process that dies is a result too."""
    start = time.monotonic()
    found = in_process(partial(_limited, kind, images=images, compiled=compiled), SECONDS, quiet=True)
    if "error" in found:
        found = {"type": kind, "configured": False, "reasons": {"configured": found["error"]}}
    return {**found, "seconds": round(time.monotonic() - start, 1)}


def _limited(kind: str, *, images: bool, compiled: bool) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    found: dict[str, Any] = json.loads(json.dumps(try_type(kind, images=images, compiled=compiled)))
    return found


def is_trained(row: Mapping[str, Any]) -> bool:
    """Planned and trained."""
    return all(row.get(field, False) is not False for field in ("planned", "trained"))


def is_whole(row: Mapping[str, Any]) -> bool:
    """Planned, trained, saved and merged."""
    return is_trained(row) and row.get("merged", False) is not False


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Types of all, and of those younger than `YOUNG`, that passed; and how many get each way to be fast."""
    young = [row for kind, row in rows.items() if kind not in OLD]
    return {
        "types": len(rows),
        "trained": sum(map(is_trained, rows.values())),
        "whole": sum(map(is_whole, rows.values())),
        "young": len(young),
        "young_whole": sum(map(is_whole, young)),
        "closed_form": sum(row.get("planned") == "closed-form" for row in rows.values()),
        **{name: sum(row.get(name) is True for row in rows.values())
           for name in ("sdpa", "varlen", "chunked", "compiled")},
        "packed": sum(any(row.get(kernel) is True for kernel in KERNELS) for row in rows.values()),
        "compile_tried": sum("compiled" in row for row in rows.values()),
    }  # fmt: skip


def lines(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for kind, row in rows.items():
        fields = ("planned", "trained", "merged", "sdpa", "varlen", "chunked", "compiled")
        said = {name: row[name] for name in fields if name in row}
        marks = [f"{n} {v if isinstance(v, str) else 'yes' if v else '-'}" for n, v in said.items()]
        yield f"{kind:24} {'  '.join(marks)}"
        for name, reason in row.get("reasons", {}).items():
            yield f"{'':24}   {name}: {reason}"


def import_torchvision() -> str | None:
    """Version of torchvision, where it is installed; PyPI's wheel fits torch for CUDA alone.

    Image processors need its Python code. Declaring the operators for detection, whose library does not load
    beside another torch, lets it be imported.
    """
    import importlib.util

    import torch

    if importlib.util.find_spec("torchvision") is None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # a build for this torch defines them
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(library)  # without it they would be gone
    import torchvision

    return str(torchvision.__version__)


KEPT: list[Any] = []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import transformers
    from transformers.models.auto import modeling_auto

    import launcher.train.results.merge
    import launcher.train.worker  # noqa: F401  what a child would import

    vision = import_torchvision()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    part = "image_text_to_text" if asked.images else "causal_lm"
    every = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if asked.images else (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )  # fmt: skip
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    versions |= {"torchvision": vision} if vision else {}
    rows = {}
    for kind in asked.types or sorted(every):
        rows[kind] = in_child(kind, images=asked.images, compiled=asked.compile)
        print(*lines({kind: rows[kind]}), sep="\n", flush=True)
        if asked.write:
            write(part, {kind: rows[kind]}, versions)
    print(json.dumps(summary(rows)))
    return 0


def write(part: str, rows: Mapping[str, Mapping[str, Any]], versions: Mapping[str, str]) -> None:
    """Put rows into one part of the record; other rows and the other part stay.

    So does what is known about compiled layers of a row that was tried without them.
    """
    record = read_record(RECORD) if RECORD.exists() else {}
    known = record.get(part, {})
    kept = {kind: {"compiled": known[kind]["compiled"]} for kind in rows if "compiled" in known.get(kind, {})}
    rows = {kind: {**kept.get(kind, {}), **row} for kind, row in rows.items()}
    every = dict(sorted({**known, **rows}.items()))
    counts = {**summary(every), **({"year": YOUNG} if part == "causal_lm" else {})}
    record |= {"versions": {**record.get("versions", {}), **versions}, part: every}
    record["summary"] = {**record.get("summary", {}), part: counts}
    write_record(RECORD, record)


if __name__ == "__main__":
    sys.exit(main())
