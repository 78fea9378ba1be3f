"""Preparation streams: memory does not grow with the file."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("datasets")

from plans import TINY_LLAMA, write_run

pytestmark = pytest.mark.usefixtures("warm")

SIZE = 200 * 10**6
CHILD = textwrap.dedent(
    """
    import json, sys, threading
    from pathlib import Path
    import psutil
    from launcher.train.data import encoded
    from launcher.train.job import read_job
    from launcher.train.prepare import prepare_run

    process, seen = psutil.Process(), []
    real = encoded.Counts.add

    def add(self, batch):
        real(self, batch)
        every = [process, *process.children(recursive=True)]
        seen.append(sum(one.memory_info().rss for one in every))

    encoded.Counts.add = add
    prepare_run(read_job(Path(sys.argv[1])))
    print(json.dumps(seen))
    """
)


def write_large(path: Path, size: int) -> int:
    """Rows of words until the file has `size` bytes; returns their number."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 9))) for _ in range(500)]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=700))}) + "\n" for _ in range(200)]
    written = rows = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            written += file.write(lines[rows % len(lines)])
            rows += 1
    return rows


@pytest.mark.slow(share=16)
@pytest.mark.timeout(1500)
def test_resident_memory_is_flat_over_200_megabytes(tmp_path):
    from launcher.train.tiny import tiny_tokenizer

    tiny_tokenizer(512).save_pretrained(tmp_path / "tokenizer")
    rows = write_large(tmp_path / "rows.jsonl", SIZE)
    settings = {
        "tiny": False,
        "model.config": TINY_LLAMA,
        "model.tokenizer": str(tmp_path / "tokenizer"),
        "data.train": [{"path": str(tmp_path / "rows.jsonl"), "format": "auto", "columns": {}}],
        "data.max_length": 2048,
    }
    run_dir = write_run(tmp_path / "run", settings)
    env = {**os.environ, "EFFILAUNCH_CACHE": str(tmp_path / "cache"), "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(run_dir)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    resident = json.loads(done.stdout.splitlines()[-1])
    assert len(resident) >= rows // 512
    quarter = len(resident) // 4
    first, last = max(resident[:quarter]), max(resident[-quarter:])
    assert last <= 1.05 * first, f"{first / 2**20:.0f} MiB grew to {last / 2**20:.0f} MiB"
    record = json.loads((run_dir / "data.json").read_text())
    assert record["splits"]["train"]["counts"]["read"] == rows
