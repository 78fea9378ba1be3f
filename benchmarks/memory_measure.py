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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # some CPU kernels allocate a buffer for each thread

from grids import HALVES, MEMORY, Row, settings_of
from memory_images import ImageSamples, processor_of, sees_images
from memory_rows import DOCUMENTS, STEPS, ds_config_of, plan_of
from records import RECORDS, read_record, today, versions, write_record
from runner import Room, compare_again, entries_of, error_of, in_processes, parser_of

from launcher.execute.leftovers import remove_shared_buffers, remove_stale_locks
from launcher.machine.probe import free_port
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
    if task == "grpo":
        from tokenizers.pre_tokenizers import WhitespaceSplit

        processing.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
        prompts = [" ".join(["word"] * (row.length // 2))] * count
        places = [{"place": "", "columns": {"answer": ""}}] * count
        return RandomData(_dataset({"prompt": prompts, "row_of_data": places}), None)
    made = torch.Generator().manual_seed(0)

    def ids(size: int) -> list[list[int]]:
        rows = torch.randint(4, plan.spec.vocab_size, (count, size), generator=made)
        return list(rows.tolist())

    if task in ("embedding", "reranker"):
        return (texts if task == "embedding" else documents)(row, plan, ids, processing)
    if task in ("dpo", "reward", "kto"):
        return RandomData(_dataset(preferences(task, row.length, ids)), None)
    kind = "flatten" if row.free else "packed" if row.packing else "pad"
    return RandomData(token_rows(row, plan, count, made), make_collator(kind, processing))


def token_rows(row: Row, plan: Plan, count: int, made: Any) -> list[dict[str, Any]]:
    """Prepared samples of one text each."""
    import torch

    rows: list[dict[str, Any]] = []
    for index in range(count):
        length = row.length - (row.length // 8 if row.padded and index % 2 else 0)
        tokens = torch.randint(4, plan.spec.vocab_size, (length,), generator=made).tolist()
        sample: dict[str, Any] = {"input_ids": tokens, "labels": list(tokens)}
        if plan.task.classifies:  # two classes, of a text or of each token
            per_token = plan.task.name == "token-classification"
            sample["labels"] = [number % 2 for number in tokens] if per_token else index % 2
        if row.packing:
            sample["position_ids"] = [*range(row.length // DOCUMENTS)] * DOCUMENTS
        rows.append(sample)
    return rows


Ids = Callable[[int], list[list[int]]]
"""Tokens of a row -> random ids of all rows."""


def preferences(task: str, length: int, ids: Ids) -> dict[str, Any]:
    """The columns of task dpo, reward or kto as its trainer of trl collates them: a prompt is half."""
    half, rest = length // 2, length - length // 2
    sizes = {
        "dpo": {"prompt_ids": half, "chosen_ids": rest, "rejected_ids": rest},
        "reward": {"chosen_ids": length, "rejected_ids": length},
        "kto": {"prompt_ids": half, "completion_ids": rest},
    }[task]
    columns: dict[str, Any] = {name: ids(size) for name, size in sizes.items()}
    if task == "kto":
        columns["label"] = [index % 2 == 0 for index in range(len(columns["prompt_ids"]))]
    return columns


def texts(row: Row, plan: Plan, ids: Ids, processing: Any) -> RandomData:
    """The samples of task embedding."""
    from launcher.train.contrast import TextRows
    from launcher.train.tasks.embedding import CollateTexts, columns_of

    names = columns_of(plan)
    rows = ids(row.length * len(names))
    columns: dict[str, Any] = {"input_ids": rows, "lengths": [[row.length] * len(names)] * len(rows)}
    if plan.at("embedding.loss") == "CoSENTLoss":
        columns["score"] = [float(index % 2) for index in range(len(rows))]
    return RandomData(TextRows(_dataset(columns), names), CollateTexts(processing, names))


def documents(row: Row, plan: Plan, ids: Ids, processing: Any) -> RandomData:
    """The samples of task reranker."""
    from launcher.train.tasks.reranker import CollateDocuments

    number = plan.at("reranker.documents")
    rows = ids(row.length * number)
    columns: dict[str, Any] = {"input_ids": rows, "lengths": [[row.length] * number] * len(rows)}
    if plan.spec.model_type == "bert":  # its tokenizer tells the second text from the first
        types = [n % row.length * 2 // row.length for n in range(row.length * number)]
        columns["token_type_ids"] = [types] * len(rows)
    columns["relevance"] = [[float((index + n) % 2) for n in range(number)] for index in range(len(rows))]
    columns["query"] = [[index] for index in range(len(rows))]
    return RandomData(_dataset(columns), CollateDocuments(processing))


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


def measure_rank(row: Row, plan: Plan, run_dir: Path, rank: int, port: int) -> dict[str, int]:
    """One process of a row."""
    if row.processes > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(row.processes),
                          LOCAL_WORLD_SIZE=str(row.processes), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(port))  # fmt: skip
    os.environ.update({k: v for k, v in render_env(plan).items() if k != "OMP_NUM_THREADS"})
    if row.engine == "fsdp":
        del os.environ["ACCELERATE_USE_CPU"]
    from profiled import count_all_threads, peak_bytes

    count_all_threads()
    trainer = build_trainer(row, plan, run_dir)
    peak = peak_bytes(trainer.train)
    assert trainer.state.global_step == STEPS, "all steps were trained"
    return {"bytes": peak}


def measure(row: Row, plan: Plan, room: Room) -> dict[str, Any]:
    """{name, bytes: the fullest rank's, seconds} or {name, error, seconds}."""
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
    return {"name": row.name, **found, "seconds": time.monotonic() - started}


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
    names, defaults = ("repeat", "jobs", "record"), {"jobs": os.cpu_count() or 1, "record": RECORD}
    parser = parser_of(__doc__, *names, rows=MEMORY, **defaults)
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
    # Planning reads files under locks, beside which no fork is safe.
    plans = {one.name: plan_of(one) for one in wanted}
    room = Room(options.jobs)
    # A record holds the figures of one set of versions.
    sizes = dict(known) if same_versions else {}

    def line_of(entry: dict[str, Any]) -> str:
        if "bytes" in entry and options.repeat:
            compare_again(entry, "bytes", known[entry["name"]], same_versions)
        elif "bytes" in entry:
            sizes[entry["name"]] = entry["bytes"]
            write_record(options.record, record_of(sizes))
        note = entry.get("error") or ("same" if options.repeat else "")
        return f"{entry['name']:<38}{entry.get('bytes', 0):>12,} B{entry['seconds']:>7.1f} s  {note}".rstrip()

    entries = entries_of(wanted, lambda row: measure(row, plans[row.name], room), line_of, options.jobs)
    return int(any("error" in entry for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
