"""Peak memory of every row of the grid, measured on a CPU apart from our tracer and formulas.

    python benchmarks/memory_measure.py                 the whole grid, written to records/memory_cpu.json
    python benchmarks/memory_measure.py --only NAME …   these rows alone; the others stay as recorded
    python benchmarks/memory_measure.py --repeat        measure again and compare with the record

Each row is a process (two, where it says so) with one thread. Its plan decides the settings; the worker's
own functions build model, adapter and Trainer; two optimizer steps run on random tokens under
torch.profiler. The peak is the bytes of all tensors that live before training, plus the largest running sum
of the allocations and frees that the profiler saw.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # some CPU kernels allocate a buffer for each thread

from grids import HALVES, MEMORY, Row, settings_of
from memory_images import ImageSamples, processor_of, sees_images
from memory_rows import DOCUMENTS, STEPS, ds_config_of, plan_of
from records import RECORDS, read_record, today, versions, write_record
from runner import Room, compared_again, error_of, in_processes, measured, parser_of

from launcher.execute.leftovers import remove_shared_buffers, remove_stale_locks
from launcher.facts.probe import free_port
from launcher.plan.plan import Plan
from launcher.render.bundle import dump_json, plan_json
from launcher.render.command import render_env

RECORD = RECORDS / "memory_cpu.json"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed")
METHOD = "torch.profiler allocations"
TIMEOUT_S = 600


@dataclass
class RandomData:
    """What `make_trainer` reads of the data."""

    train: Any
    collate: Any
    eval: None = None
    streaming: bool = False
    labels: tuple[str, ...] | None = None
    collate_eval: None = None
    counts: dict[str, Any] = field(default_factory=dict)


class RandomImages:
    """Made when they are asked for: they shall not count as held by the training."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        return {"pixel_values": torch.randn(3, self.size, self.size), "labels": index % 2}


def random_data(row: Row, plan: Plan, processing: Any, steps: int = STEPS) -> RandomData:
    """Rows of full length; of a padded grid row, every second one ends an eighth earlier.

    One more batch than steps: while a step runs, the next batch is there already.
    """
    import torch

    from launcher.train.data.batches import make_collator

    count = (steps + 1) * row.accumulation * row.micro_batch * row.processes
    task = plan.task.name
    if sees_images(row):
        samples = ImageSamples(row, processing, count, plan.spec.vocab_size)
        return RandomData(samples, samples.collate)
    if task == "image-classification":
        from launcher.train.tasks.image_classification import stack_images

        return RandomData(RandomImages(count, plan.spec.config["image_size"]), stack_images)
    made = torch.Generator().manual_seed(0)
    if task == "grpo":
        from tokenizers.pre_tokenizers import WhitespaceSplit

        processing.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
        prompts = [" ".join(["word"] * (row.length // 2))] * count
        places = [{"place": "", "columns": {"answer": ""}}] * count
        return RandomData(_dataset({"prompt": prompts, "row_of_data": places}), None)
    if task in _OF_TEXTS:
        return _OF_TEXTS[task](row, plan, count, processing)
    if columns := _OF_TRL.get(task):
        return RandomData(columns(row, count, made, plan.spec.vocab_size), None)
    rows: list[dict[str, Any]] = []
    for index in range(count):
        length = row.length - (row.length // 8 if row.padded and index % 2 else 0)
        ids = torch.randint(4, plan.spec.vocab_size, (length,), generator=made).tolist()
        sample: dict[str, Any] = {"input_ids": ids}
        sample["labels"] = list(ids)
        if plan.task.classifies:  # two classes, of a text or of each token
            per_token = task == "token-classification"
            sample["labels"] = [number % 2 for number in ids] if per_token else index % 2
        if row.packing:
            sample["position_ids"] = [*range(row.length // DOCUMENTS)] * DOCUMENTS
        rows.append(sample)
    kind = "flatten" if row.free else "packed" if row.packing else "pad"
    return RandomData(rows, make_collator(kind, processing))


def pairs(row: Row, count: int, made: Any, words: int) -> Any:
    """The samples of task dpo: half of a sequence is the prompt."""
    half, rest = row.length // 2, row.length - row.length // 2
    sizes = {"prompt_ids": half, "chosen_ids": rest, "rejected_ids": rest}
    return _dataset({name: _ids(count, size, made, words) for name, size in sizes.items()})


def ranked(row: Row, count: int, made: Any, words: int) -> Any:
    """The samples of task reward."""
    return _dataset({name: _ids(count, row.length, made, words) for name in ("chosen_ids", "rejected_ids")})


def judged(row: Row, count: int, made: Any, words: int) -> Any:
    """The samples of task kto."""
    half, rest = row.length // 2, row.length - row.length // 2
    ids = {"prompt_ids": _ids(count, half, made, words), "completion_ids": _ids(count, rest, made, words)}
    return _dataset({**ids, "label": [index % 2 == 0 for index in range(count)]})


_OF_TRL = {"dpo": pairs, "reward": ranked, "kto": judged}
"""Task -> samples as its trainer of trl collates them."""


def texts(row: Row, plan: Plan, count: int, processing: Any) -> RandomData:
    """The samples of task embedding."""
    import torch

    from launcher.train.contrast import TextRows
    from launcher.train.tasks.embedding import CollateTexts, columns_of

    names, made = columns_of(plan), torch.Generator().manual_seed(0)
    ids = _ids(count, row.length * len(names), made, plan.spec.vocab_size)
    columns: dict[str, Any] = {"input_ids": ids, "lengths": [[row.length] * len(names)] * count}
    if plan.at("embedding.loss") == "CoSENTLoss":
        columns["score"] = [float(index % 2) for index in range(count)]
    return RandomData(TextRows(_dataset(columns), names), CollateTexts(processing, names))


def documents(row: Row, plan: Plan, count: int, processing: Any) -> RandomData:
    """The samples of task reranker."""
    import torch

    from launcher.train.tasks.reranker import CollateDocuments

    number, made = plan.at("reranker.documents"), torch.Generator().manual_seed(0)
    ids = _ids(count, row.length * number, made, plan.spec.vocab_size)
    relevance = [[float((index + n) % 2) for n in range(number)] for index in range(count)]
    columns: dict[str, Any] = {"input_ids": ids, "lengths": [[row.length] * number] * count}
    if plan.spec.model_type == "bert":  # its tokenizer tells the second text from the first
        columns["token_type_ids"] = [[n % row.length * 2 // row.length for n in range(len(ids[0]))]] * count
    columns |= {"relevance": relevance, "query": [[index] for index in range(count)]}
    return RandomData(_dataset(columns), CollateDocuments(processing))


_OF_TEXTS = {"embedding": texts, "reranker": documents}


def _ids(count: int, size: int, made: Any, words: int) -> list[list[int]]:
    import torch

    found: list[list[int]] = torch.randint(4, words, (count, size), generator=made).tolist()
    return found


def _dataset(columns: Mapping[str, Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(dict(columns))


def tokenizer() -> Any:
    """A few words; the rows are made of ids, and only its special tokens are read."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def write_run(row: Row, plan: Plan, folder: Path) -> None:
    """A run directory as the launcher writes it."""
    ds_config = ds_config_of(row, plan)
    (folder / "plan.json").write_text(dump_json(plan_json(plan, ds_config, [], {})), encoding="utf-8")
    if ds_config is not None:
        (folder / "ds_config.json").write_text(dump_json(ds_config), encoding="utf-8")


def build_trainer(row: Row, plan: Plan, run_dir: Path, steps: int = STEPS) -> Any:
    """The worker's steps up to training, with random rows in place of prepared ones."""
    from transformers import set_seed

    from launcher.train.job import read_job
    from launcher.train.model.adapters import attach_adapter
    from launcher.train.model.models import load_model
    from launcher.train.tiny_processor import set_token_ids
    from launcher.train.training import make_arguments, make_trainer

    job = read_job(run_dir)
    args = make_arguments(job)
    if row.engine == "fsdp":
        args = fsdp_arguments(args)
    processing = None if plan.task.name == "image-classification" else tokenizer()
    if sees_images(row):
        processing = processor_of(row)
    data = random_data(row, plan, processing, steps)
    set_seed(args.seed)
    model = load_model(job, processing)
    if sees_images(row):
        set_token_ids(model.config, processing)
    set_seed(args.seed)
    model = attach_adapter(job, model, processing)
    return make_trainer(job, args, model, processing, data)


def fsdp_arguments(args: Any) -> Any:
    """FSDP2 around each layer. accelerate leaves it out on a CPU, hence the patched attribute (1.15)."""
    import dataclasses

    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    fsdp = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    args = dataclasses.replace(args, fsdp=True, fsdp_config=fsdp)
    _ = args.device
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return args


def peak_of(row: Row, trainer: Any) -> int:
    """Bytes at the peak of training."""
    from fast_products import install_fast_products
    from profiled import peak_bytes

    if row.precision != "fp32":
        install_fast_products()
    peak = peak_bytes(trainer.train)
    assert trainer.state.global_step == STEPS, "all steps were trained"
    return peak


def measure_rank(row: Row, plan: Plan, run_dir: Path, rank: int, port: int) -> dict[str, int]:
    """One process of a row."""
    if row.processes > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(row.processes),
                          LOCAL_WORLD_SIZE=str(row.processes), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(port))  # fmt: skip
    os.environ.update({k: v for k, v in render_env(plan).items() if k != "OMP_NUM_THREADS"})
    if row.engine == "fsdp":
        del os.environ["ACCELERATE_USE_CPU"]
    from profiled import count_all_threads

    count_all_threads()
    return {"bytes": peak_of(row, build_trainer(row, plan, run_dir))}


def measure(row: Row, plan: Plan, room: Room) -> dict[str, Any]:
    """{bytes: the fullest rank's, seconds} or {error, seconds}."""
    with room.of(row.processes), tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        if row.engine == "deepspeed":
            remove_stale_locks(os.environ)  # else a killed build would be waited for
        port = free_port()
        write_run(row, plan, Path(folder))
        ranks = [partial(measure_rank, row, plan, Path(folder), rank, port) for rank in range(row.processes)]
        answers = in_processes(ranks, TIMEOUT_S)
        remove_shared_buffers(port)
    error = error_of(answers)
    found = {"bytes": max(one["bytes"] for one in answers)} if error is None else {"error": error}
    return {**found, "seconds": time.monotonic() - started}


def import_stack(rows: Sequence[Row]) -> None:
    """What every row needs, imported once: the rows are forked from here."""
    if any(one.model == "llama4-vl" for one in rows):  # its image processor needs torchvision
        from coverage import import_torchvision

        import_torchvision()
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401

    import launcher.train.data.batches
    import launcher.train.model.adapters
    import launcher.train.model.models
    import launcher.train.training  # noqa: F401

    if any(one.engine == "deepspeed" for one in rows):
        import deepspeed  # noqa: F401


def measured_before(path: Path = RECORD) -> dict[str, int]:
    """Recorded bytes by name."""
    rows = read_record(path)["rows"] if path.is_file() else []
    return {one["name"]: one["measured_bytes"] for one in rows if "measured_bytes" in one}


def record_of(measured: Mapping[str, int]) -> dict[str, Any]:
    """The rows in the grid's order, each with the settings that are not a row's defaults."""
    rows = []
    for one in MEMORY:
        given = settings_of(one)
        entry = {"name": one.name, "half": one.half, "settings": given}
        if one.impossible is not None:
            rows.append({**entry, "impossible": given.pop("impossible")})
        elif one.name in measured:
            rows.append({**entry, "measured_bytes": measured[one.name], "method": METHOD})
    about = "Peak bytes of small training jobs on a CPU; made by benchmarks/memory_measure.py"
    return {"about": about, "date": today(), "versions": versions(PACKAGES), "rows": rows}


def main() -> int:
    parser = parser_of(
        __doc__, "repeat", "jobs", "record", rows=MEMORY, jobs=os.cpu_count() or 1, record=RECORD
    )
    options = parser.parse_args()
    wanted = [one for one in MEMORY if one.impossible is None]
    wanted = [one for one in wanted if options.only is None or one.name in options.only]
    # Rows of several processes come last: they want the machine to themselves.
    wanted.sort(key=lambda one: (one.processes, HALVES.index(one.half)))
    known = measured_before(options.record)
    same_versions = bool(known) and read_record(options.record)["versions"] == versions(PACKAGES)
    if options.repeat and (missing := [one.name for one in wanted if one.name not in known]):
        parser.error(f"not in the record: {', '.join(missing)}")
    import_stack(wanted)
    plans = {
        one.name: plan_of(one) for one in wanted
    }  # reads files under locks, beside which no fork is safe
    room, failed = Room(options.jobs), 0
    # A record holds the figures of one set of versions.
    sizes = dict(known) if same_versions else {}
    for one, found in measured(wanted, lambda row: measure(row, plans[row.name], room), options.jobs):
        note = found.get("error", "")
        if "bytes" in found and options.repeat:
            note, differing = compared_again(found["bytes"], known[one.name], same_versions)
            failed += differing
        elif "bytes" in found:
            sizes[one.name] = found["bytes"]
            write_record(options.record, record_of(sizes))
        failed += "error" in found
        size, seconds = found.get("bytes", 0), found["seconds"]
        print(f"{one.name:<38}{size:>12,} B{seconds:>7.1f} s  {note}".rstrip(), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
