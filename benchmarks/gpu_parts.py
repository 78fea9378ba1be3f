"""Parts of a first run on GPUs: real `effilaunch` commands, what they have to show, and the record of both.

Models have their published sizes and random weights, rows are as long as they may be: nothing is downloaded.
A part that fails does not stop the others, and the record is written after each. With --cpu the same commands
run on CPU processes with two narrow layers, and what cannot run there is listed by name.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import gpu
from gpu import Device
from peers.work import smollm2
from records import RECORDS, today, versions, write_record
from runner import in_process, parser_of

from launcher.models.model_config import shipped_model_config
from launcher.planner.narrow import narrow_config

ROWS, STEPS = 256, 8
QWEN, LLAMA_1B, LLAMA_8B = "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"
LORA: Mapping[str, Any] = {"adapter": {"type": "lora", "r": 16}}
NEAR = 0.02
"""Relative difference of losses that 16-bit products in another order may have; on a CPU 1e-4 (float32)."""
LEARNT = 5
"""By how many times that difference a loss has to fall at least: runs that learn nothing are alike, too."""


class Missed(Exception):
    """What a part had to show, and did not."""


@dataclass
class Bench:
    """Where the parts run: their folder, their devices, and the commands so far."""

    folder: Path
    device: Device
    ranks: int
    ends: float
    """time.monotonic() at which the budget is spent."""
    commands: list[dict[str, Any]] = field(default_factory=list)
    """Of the part that runs."""

    @property
    def on_cpu(self) -> bool:
        return self.device.rehearsal

    @property
    def near(self) -> float:
        return 1e-4 if self.on_cpu else NEAR

    def recipe(
        self, name: str, base: str, rows: str = "text", length: int = 2048, batch: int = 8, hooks: str = "",
        **keys: Any,
    ) -> Path:  # fmt: skip
        """A recipe in a folder of its own; keys: its other sections. JSON is YAML, too."""
        own = self.folder / name
        own.mkdir()
        if self.on_cpu:
            length = min(length, 64)
        write_rows(rows, length, own / "rows.jsonl")
        source = {"path": "rows.jsonl", **({"format": "text"} if rows == "text" else {})}
        trainer = {"max_steps": STEPS, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no"}
        recipe: dict[str, Any] = {
            "global_batch_size": batch,
            "data": {"train": [source], "max_length": length, "max_dropped": 1.0},
            **keys,
            "model": {"name_or_path": str(self.model(base)), **keys.get("model", {})},
            "trainer": trainer | keys.get("trainer", {}),
        }
        if hooks:
            (own / "hooks.py").write_text(hooks, encoding="utf-8")
            recipe["python"] = "hooks.py"
        if self.on_cpu:
            recipe["precision"] = "fp32"
        path = own / "recipe.yaml"
        path.write_text(json.dumps(recipe, indent=1), encoding="utf-8")
        return path

    def model(self, name: str) -> Path:
        """Its folder; made once."""
        target = self.folder / "models" / name.rsplit("/", 1)[-1]
        made = in_process(make_model, 300.0, name, target, smollm2(), self.device)
        if "error" in made:
            raise Missed(f"{name} was not made: {made['error']}")
        return target

    def on(self, ranks: int) -> tuple[str, ...]:
        """Words that choose CPU processes; GPUs are chosen by `gpus`."""
        return ("--on", f"{ranks}xcpu" if ranks > 1 else "cpu") if self.on_cpu else ()

    def gpus(self, first: int, count: int) -> dict[str, str]:
        """The environment in which `count` GPUs are visible."""
        numbers = map(str, range(first, first + count))
        return {} if self.on_cpu else {"CUDA_VISIBLE_DEVICES": ",".join(numbers)}

    def begin(self, *words: str | Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command that answers in JSON."""
        return subprocess.Popen(
            [sys.executable, "-m", "launcher.cli", *map(str, words), "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder,
            env={**os.environ, "EFFILAUNCH_CACHE": str(self.folder / "cache"), **(env or {})},
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str], *words: str | Path, expect: int = 0) -> dict[str, Any]:
        """What the command answered. Missed for another exit status, and when the budget is spent."""
        began = time.monotonic()
        try:
            out, said = process.communicate(timeout=max(1.0, self.ends - began))
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its ranks
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
            process.kill()
            raise Missed("the time budget is spent") from None
        try:
            answer = json.loads(out)
        except ValueError:
            answer = {}
        shown = [str(word).replace(str(self.folder), "") for word in words]
        seconds = round(time.monotonic() - began, 1)
        self.commands.append({"words": shown, "status": process.returncode, "seconds": seconds})
        if process.returncode != expect:
            problems = "; ".join(f"{one['code']}: {one['message']}" for one in answer.get("errors", ()))
            raise Missed(f"{' '.join(shown)}: status {process.returncode}, expected {expect}: "
                         f"{problems or (out + said)[-2000:]}")  # fmt: skip
        return {**answer, "said": said}

    def command(
        self, *words: str | Path, expect: int = 0, env: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run a command to its end."""
        return self.end(self.begin(*words, env=env), *words, expect=expect)

    def run(self, recipe: Path, ranks: int = 1, *words: str, **more: Any) -> Path:
        """`effilaunch run` on the first `ranks` devices; the run directory, which is beside the recipe."""
        out = recipe.parent / "out"
        env = {**self.gpus(0, ranks), **more.pop("env", {})}
        self.command("run", recipe, *self.on(ranks), "--output-dir", out, *words, env=env, **more)
        return out

    def alike(self, runs: Mapping[str, Path]) -> dict[str, Any]:
        """Each run's figures. Missed if the losses of one do not fall, or are not those of the first."""
        found = {name: figures(path) for name, path in runs.items()}
        first, *others = found
        for name, one in found.items():
            begins, *_, ends = one["losses"]
            if not ends < begins * (1 - LEARNT * self.near):
                raise Missed(f"nothing was learned by {name}: the loss is {begins:.4f} and then {ends:.4f}")
        for other in others:
            pairs = zip(found[first]["losses"], found[other]["losses"], strict=True)
            apart = max(abs(one - two) / max(abs(one), 1e-6) for one, two in pairs)
            if apart > self.near:
                raise Missed(f"losses of {other} differ from those of {first} by {apart:.2%}: {found}")
        return found

    def drill(self, recipe: Path, ranks: int, faults: str) -> dict[str, Any]:
        """`effilaunch drill`: each fault, how the run ended, and by how much its losses differ."""
        words = ("drill", recipe, *self.on(ranks), "--steps", "6", "--only", faults,
                 "--output-dir", recipe.parent / "drill")  # fmt: skip
        found = self.command(*words, env=self.gpus(0, ranks))
        return {"drill": {name: value for name, value in found.items() if name != "said"}}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a script."""

    name: str
    work: Callable[[Bench], dict[str, Any]]
    not_on_cpu: tuple[str, ...] = ()
    """What of it cannot run on CPU processes."""


def write_rows(kind: str, length: int, path: Path) -> None:
    """Random words of one token each, rows of about `length` tokens (prompts of grpo: 64)."""
    draw = random.Random(0)
    words = ["table", "green", "river", "seven", "walk", "letter", "open", "under", "paper", "stone"]

    def text(count: int) -> str:
        return " ".join(draw.choice(words) for _ in range(count))

    with path.open("w", encoding="utf-8") as stream:
        for _ in range(ROWS):
            row = {"prompt": text(min(64, length // 2))} if kind == "prompt" else {"text": text(length - 2)}
            stream.write(f"{json.dumps(row)}\n")


def make_model(name: str, target: Path, tokenizer: Path, device: Device) -> dict[str, Any]:
    """A folder with random weights of the published size, in bfloat16, and the tokenizer; made once."""
    if (target / "tokenizer_config.json").is_file():
        return {}
    import torch
    import transformers

    config = shipped_model_config(name)
    assert config is not None, name
    if device.rehearsal:
        config = narrow_config(config) | {"vocab_size": 49_152}
    transformers.set_seed(0)
    with torch.device(device.torch_name):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config), dtype=torch.bfloat16
        )
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(target)
    return {}


def figures(out: Path) -> dict[str, Any]:
    """Of a run directory: settings that the plan chose, bytes planned and measured, losses and speed."""
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    plan = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    rows = list(map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()))
    steps = [row for row in rows if "tokens_per_second" in row]
    tokens = [after["tokens"] - before["tokens"] for before, after in pairwise([{"tokens": 0}, *steps])]
    memory = plan["memory"]
    return {
        "batch": plan["batch"],
        "settings": {name: one.get("value", one) if isinstance(one, dict) else one
                     for name, one in plan["settings"].items()},
        "planned": {name: memory[name] for name in ("expected", "low", "high", "needed", "phase", "method")},
        "measured": result["memory"],
        "losses": [row["loss"] for row in rows if "loss" in row],
        "step_s": [n / row["tokens_per_second"] for n, row in zip(tokens, steps, strict=True) if n],
        "tokens_per_second": result["tokens_per_second"],
        "planned_s": plan["time"]["seconds_per_step"],
        "warnings": len(plan["warnings"]),
        **({"rollouts": result["rollouts"]} if "rollouts" in result else {}),
    }  # fmt: skip


def tried(part: Part, bench: Bench) -> dict[str, Any]:
    """The entry of one part: passed with what it found, failed with why, or skipped."""
    entry: dict[str, Any] = {"name": part.name, "status": "skipped"}
    if bench.on_cpu and part.not_on_cpu:
        entry["not_on_cpu"] = list(part.not_on_cpu)
    began = time.monotonic()
    if began > bench.ends:
        return entry | {"error": "the time budget is spent"}
    bench.commands = []
    try:
        entry |= {"status": "passed", "found": part.work(bench)}
    except Exception as error:  # the next part is tried, whatever went wrong in this one
        entry |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    return entry | {"seconds": round(time.monotonic() - began, 1), "commands": bench.commands}


def script(doc: str, kind: str, parts: Sequence[Part], budget_s: float, cpu_ranks: int) -> int:
    """A script's command line: exit status 1 when a part failed, 4 without a GPU."""
    parser = parser_of(doc, "cpu", "out", "budget", rows=parts, budget=budget_s)
    options = parser.parse_args()
    device = gpu.find_device(options.cpu)
    if device is None:
        print("no GPU is here; --cpu runs the same commands on CPU processes", file=sys.stderr)
        return 4
    out = options.out
    if out is None and not device.rehearsal:
        out = RECORDS / f"{kind}_{re.sub(r'[^a-z0-9]+', '_', device.name.lower()).strip('_')}.json"
    record: dict[str, Any] = {
        "about": gpu.REHEARSAL if device.rehearsal else str(doc).splitlines()[0], "date": today(),
        "device": device.name, "device_bytes": device.hardware.device_bytes,
        "versions": versions(gpu.PACKAGES), "parts": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        ranks = cpu_ranks if device.rehearsal else gpu.count()
        bench = Bench(Path(folder), device, ranks, time.monotonic() + options.budget)
        for part in parts:
            if options.only is not None and part.name not in options.only:
                continue
            entry = tried(part, bench)
            record["parts"].append(entry)
            print(line_of(entry), flush=True)
            if out is not None:
                write_record(out, record)
    return int(any(entry["status"] != "passed" and "error" in entry for entry in record["parts"]))


def line_of(entry: Mapping[str, Any]) -> str:
    left = f"  not on a CPU: {', '.join(entry['not_on_cpu'])}" if "not_on_cpu" in entry else ""
    seconds = f"{entry.get('seconds', 0):>7.1f} s"
    return f"{entry['name']:<14}{entry['status']:<9}{seconds}{left}  {entry.get('error', '')}"
