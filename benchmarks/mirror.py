"""What `runtime.mirror` costs: step time with and without it, and time to the first step after a resume.

    python benchmarks/mirror.py [--hidden 256] [--steps 30] [--repeats 3] [--url s3://bucket/runs]

Without --url a moto server is started on loopback: it has no network to wait for, but takes a processor of
this machine. A rank has one thread, so that the process that copies has another core. Prints JSON: seconds of
a step (medians over the steps, by repeat) and CPU seconds of whole runs that save every ten steps; bytes of a
checkpoint and seconds of its upload, reading back included; seconds from the start of `run --resume auto` to
its first step, where the checkpoint is on the disk and where it is in the store alone; the machine's load.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from launcher.facts.probe import free_port

BUCKET = "effilaunch-benchmark"


@contextlib.contextmanager
def moto() -> Iterator[dict[str, str]]:
    """A server in a process of its own, with a bucket; the environment of its clients."""
    import boto3

    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    env = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "of-the-server",
        "AWS_SECRET_ACCESS_KEY": "of-the-server", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    os.environ.update(env)
    try:
        for _ in range(100):
            with contextlib.suppress(Exception):
                boto3.client("s3").create_bucket(Bucket=BUCKET)
                break
            time.sleep(0.2)
        yield env
    finally:
        server.kill()
        server.wait()


def make_recipe(folder: Path, hidden: int, steps: int) -> Path:
    """A Llama from random weights, and rows of one length."""
    rows = [{"text": " ".join(f"w{(i + j) % 1000}" for j in range(80))} for i in range(256)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": 4 + i for i in range(1020)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder / "tokenizer")
    recipe = {
        "model": {
            "config": {
                "model_type": "llama", "vocab_size": 1024, "hidden_size": hidden,
                "intermediate_size": 4 * hidden, "num_hidden_layers": 5, "num_attention_heads": 8,
                "num_key_value_heads": 8, "max_position_embeddings": 128,
            },
            "tokenizer": "./tokenizer",
        },
        "data": {"train": [{"path": "rows.jsonl"}], "max_length": 64},
        "precision": "fp32",
        "trainer": {
            "max_steps": steps, "save_steps": 10, "save_total_limit": 2, "logging_steps": 1,
            "per_device_train_batch_size": 4, "report_to": "none",
        },
        "hardware": {"num_nodes": 1, "devices_per_node": 1, "device": "cpu"},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder / "recipe.yaml"


def run(recipe: Path, out: Path, *words: str) -> dict[str, Any]:
    """One run; its result.json, with the CPU seconds of all its processes as `cpu`."""
    before = children_cpu()
    command = [sys.executable, "-m", "launcher", "run", str(recipe), "--output-dir", str(out), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return {**found, "cpu": children_cpu() - before}


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def step_seconds(out: Path) -> float:
    """The median over all steps but the first."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    pairs = itertools.pairwise(rows)
    return median((two["tokens"] - one["tokens"]) / two["tokens_per_second"] for one, two in pairs)


def first_step_seconds(recipe: Path, out: Path, step: int, *words: str) -> float:
    """From the start of a resumed run to the row of its first step."""
    began = time.monotonic()
    command = [sys.executable, "-m", "launcher", "run", str(recipe), "--output-dir", str(out), *words]
    process = subprocess.Popen([*command, "--resume", "auto"], stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError, ValueError, IndexError):
                row = (out / "metrics.jsonl").read_text().splitlines()[-1]
                if json.loads(row)["step"] > step:
                    return time.monotonic() - began
            time.sleep(0.02)
    finally:
        process.wait()
    raise RuntimeError("the run ended without a step")


def measured(folder: Path, url: str, hidden: int, steps: int, repeats: int) -> Mapping[str, Any]:
    recipe = make_recipe(folder, hidden, steps)
    plain, mirrored, uploads, size = [], [], [], 0
    cpu: dict[str, list[float]] = {"without": [], "with": []}
    loads = [os.getloadavg()[0]]
    for repeat in range(repeats):
        cpu["without"].append(run(recipe, folder / f"plain-{repeat}")["cpu"])
        plain.append(step_seconds(folder / f"plain-{repeat}"))
        to = ("--set", f"runtime.mirror={url}/{os.getpid()}-{repeat}")
        result = run(recipe, folder / f"mirrored-{repeat}", *to)
        cpu["with"].append(result["cpu"])
        loads.append(os.getloadavg()[0])
        mirrored.append(step_seconds(folder / f"mirrored-{repeat}"))
        rows = result["mirror"]["checkpoints"]
        uploads += [row["seconds"] for row in rows]
        size = rows[-1]["bytes"]
    more = ("--set", f"trainer.max_steps={steps + 5}")
    disk, store = [], []
    for repeat in range(repeats):
        to = ("--set", f"runtime.mirror={url}/{os.getpid()}-{repeat}")
        store.append(first_step_seconds(recipe, folder / f"empty-{repeat}", steps, *more, *to))
        disk.append(first_step_seconds(recipe, folder / f"plain-{repeat}", steps, *more))
    return {
        "checkpoint_bytes": size,
        "step_seconds": {"without": plain, "with": mirrored, "ratio": median(mirrored) / median(plain)},
        "upload_seconds": uploads,
        "first_step_seconds": {"from_disk": disk, "from_store": store},
        "cpu_seconds": cpu,
        "uploads": len(uploads),
        "cores": os.cpu_count(),
        "load": loads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--url", help="a folder of a store of yours; it is not cleaned up")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="effilaunch-mirror-"))
    try:
        with contextlib.nullcontext() if asked.url else moto():
            url = asked.url or f"s3://{BUCKET}/runs"
            found = measured(folder, url, asked.hidden, asked.steps, asked.repeats)
        print(json.dumps(found, indent=2))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
