"""How long a trace takes, as a multiple of importing torch, transformers and peft.

    python benchmarks/trace_speed.py            the table
    python benchmarks/trace_speed.py --check    exit 1 when a trace takes more than twice the imports

A trace is a whole child process, its own imports included; models have their whole depth. Wall time is what
counts, on a machine that does nothing else: the runs are interleaved, and medians are taken. Processor time
stands beside it, which other work changes less.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comparison import exit_status
from runner import parser_of

from launcher.errors import DoesNotFit
from launcher.facts.hardware import parse_hardware
from launcher.facts.memory_trace import CHILD
from launcher.facts.model import read_model_spec
from launcher.facts.probe import shipped_model_config
from launcher.inputs.model_trace import trace_request
from launcher.plan.inputs import Facts
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe

LIMIT = 2.0
IMPORTS = (sys.executable, "-c", "import torch, transformers, peft")
TRACE = (sys.executable, "-m", CHILD)
LORA = "{type: lora, r: 16}"


@dataclass(frozen=True, slots=True)
class Case:
    """A model to trace on 8 H100."""

    name: str
    model: str
    adapter: str = "null"
    checkpointing: bool = False
    task: str = "causal-lm"
    length: int = 2048

    @property
    def recipe(self) -> str:
        return f"""\
task: {self.task}
model: {{name_or_path: {self.model}}}
adapter: {self.adapter}
data: {{train: [{{path: rows.jsonl}}], max_length: {self.length}}}
trainer:
  max_steps: 10
  per_device_train_batch_size: 2
  activation_checkpointing: {str(self.checkpointing).lower()}
"""


CASES = (
    Case("GQA 1B", "meta-llama/Llama-3.2-1B"),
    Case("7B", "huggyllama/llama-7b"),
    Case("7B LoRA, checkpointing", "huggyllama/llama-7b", LORA, checkpointing=True),
    Case("70B", "meta-llama/Llama-3.1-70B"),
    Case("T5-large", "google-t5/t5-large", task="seq2seq-lm"),
    Case("BERT-large", "google-bert/bert-large-uncased", task="sequence-classification", length=512),
)


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of one process."""

    wall: float
    processor: float


def request_of(case: Case) -> str:
    """What the child reads for the case's plan, whether that fits or not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(case.recipe, encoding="utf-8")
        loaded = load_recipe(path)
    config = shipped_model_config(case.model)
    assert config is not None
    spec = read_model_spec(case.model, config, "shipped facts", case.task)
    facts = Facts(hardware=parse_hardware("8xH100-80GB"), model=spec, versions={})
    try:
        plan = make_plan(loaded, facts)
    except DoesNotFit as error:
        plan = error.nearest_miss
    return json.dumps(trace_request(plan))


def run(argv: Sequence[str], request: str = "") -> Taken:
    """One process; one that fails, or answers with an error, would be no measurement."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(argv, input=request, check=True, capture_output=True, text=True, env=environment)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    if request and "error" in (answer := json.loads(done.stdout)):
        raise RuntimeError(answer["error"])
    return Taken(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def measure(cases: Sequence[Case], rounds: int) -> tuple[Taken, dict[str, Taken]]:
    """Medians of the imports, and of each case."""
    requests = {case.name: request_of(case) for case in cases}
    run(IMPORTS)  # warms the page cache
    base: list[Taken] = []
    times: dict[str, list[Taken]] = {name: [] for name in requests}
    for _ in range(rounds):
        for number, (name, request) in enumerate(requests.items()):
            if number % 2 == 0:
                base.append(run(IMPORTS))
            times[name].append(run(TRACE, request))
    return _median(base), {name: _median(taken) for name, taken in times.items()}


def _median(taken: Sequence[Taken]) -> Taken:
    return Taken(statistics.median(x.wall for x in taken), statistics.median(x.processor for x in taken))


def main() -> int:
    options = parser_of(__doc__, "check", "rounds", rounds=3).parse_args()
    base, medians = measure(CASES, options.rounds)
    print(f"{'':<38}{'wall':>9}{'':>8}{'processor':>12}")
    print(f"{'imports of torch, transformers, peft':<38}{base.wall:>7.2f} s{'':>8}{base.processor:>10.2f} s")
    for name, taken in medians.items():
        shares = taken.wall / base.wall, taken.processor / base.processor
        print(f"{name:<38}{taken.wall:>7.2f} s{shares[0]:>7.2f}x{taken.processor:>10.2f} s{shares[1]:>7.2f}x")
    missed = [f"{name}: over {LIMIT:g}x" for name, taken in medians.items() if taken.wall > LIMIT * base.wall]
    return exit_status(missed, options.check)


if __name__ == "__main__":
    sys.exit(main())
