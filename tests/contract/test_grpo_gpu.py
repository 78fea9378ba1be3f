"""grpo with vLLM on real GPUs, in the same process and as a server: what no CPU can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from patience import Deadline, patience

if not (find_spec("torch") and find_spec("trl")):  # neither is imported here: that takes long
    pytest.skip("the training stack is not installed", allow_module_level=True)

from forked import free_port
from grounds import tokenizer_of_1024_words, write_rows

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1500)]
LENGTH, READY_S, STEPS = 16, 600.0, 8
RECIPE = {
    "task": "grpo",
    "model": {"name_or_path": "model"},
    "data": {"train": [{"path": "rows.jsonl"}], "max_length": LENGTH + 16},
    "reward": [{"function": "regular_expression", "arguments": {"pattern": "[0-4]$"}}],
    "global_batch_size": 32,
}


def ground(folder: Path, devices: int) -> Path:
    import torch
    import transformers

    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA device{'s' * (devices > 1)}")
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2 * LENGTH, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    tokenizer_of_1024_words().save_pretrained(folder / "model")
    write_rows(folder / "rows.jsonl", [{"prompt": f"w{n} w{n + 1}", "answer": f"w{n}"} for n in range(256)])
    return folder


def check(folder: Path, backend: str, **trainer: object) -> None:
    """Runs, and every step has rewards of whole completions."""
    said: dict[str, Any] = {
        **RECIPE,
        "generation": {"backend": backend, "num_generations": 8, "max_completion_length": LENGTH},
        "trainer": {
            "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-6,
            "generation_kwargs": {"min_tokens": LENGTH}, **trainer,
        },
    }  # fmt: skip
    (folder / "r.yaml").write_text(json.dumps(said))
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "run", "r.yaml", "--output-dir", "out", "--json"],
        cwd=folder, capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert all("reward" in row and row["completions/min_length"] == LENGTH for row in steps)
    rollouts = json.loads((folder / "out" / "result.json").read_text())["rollouts"]
    assert (rollouts["generations"], rollouts["completions"]) == (STEPS, 32 * STEPS)


@pytest.mark.parametrize("sleeps", [False, True])
def test_vllm_in_the_same_process(tmp_path, sleeps):
    check(ground(tmp_path, 1), "vllm-colocate", vllm_enable_sleep_mode=sleeps)


@pytest.fixture
def server(tmp_path) -> Iterator[tuple[Path, int]]:
    """A vLLM server on the second device, started as docs/tasks/grpo.md says; its folder and port."""
    folder, port = ground(tmp_path, 2), free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder / "model")]
    command += ["--port", str(port), "--gpu-memory-utilization", "0.3"]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    command += ["--weight-transfer-config", '{"backend": "nccl"}']
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = Deadline(READY_S)
        while True:
            assert process.poll() is None, (folder / "server.log").read_text()[-4000:]
            assert not deadline.passed(), "the server is not ready"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(2)
        yield folder, port
    finally:
        process.terminate()
        process.wait(patience(60))


def test_vllm_as_a_server(server):
    folder, port = server
    check(folder, "vllm-server", vllm_server_host="127.0.0.1", vllm_server_port=port)
